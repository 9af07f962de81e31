"""Two results of the benchmark side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from quick_bench import run_bench

Captured = pytest.CaptureFixture[str]
RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def write(path: Path, document: Any) -> Path:
    path.write_text(json.dumps(document))
    return path


def test_compare(tmp_path: Path, capsys: Captured) -> None:
    first = json.loads((RESULTS / "cpu-basic.json").read_text())
    ours = [result for result in first["results"] if result["ours"] and result["seconds"]]
    first["results"] = ours[:2]
    second = json.loads(json.dumps(first))
    times = second["results"][0]["window_seconds"]
    second["results"][0]["window_seconds"] = [seconds / 4 for seconds in times]
    second["busy"] = ["other programs used 3.0 of 4 cores during the benchmark"]
    second["machine"]["cpu"] = "another"
    paths = write(tmp_path / "a.json", first), write(tmp_path / "b.json", second)
    assert run_bench("--compare", *paths) == 0
    printed = capsys.readouterr().out
    _, *rows = [line for line in printed.splitlines() if line.startswith("(")]
    assert "4.000x" in rows[0] and "within noise" not in rows[0]
    assert "1.000x" in rows[1] and rows[1].endswith("within noise")
    assert "2 times: the second is 2.000 times as fast" in printed
    assert "WARNING: not the same machine" in printed and "; another" in printed
    assert "second: WARNING, busy machine: other programs used 3.0 of 4 cores" in printed


def test_compare_refuses(tmp_path: Path, capsys: Captured) -> None:
    document = json.loads((RESULTS / "cpu-basic.json").read_text())
    whole = write(tmp_path / "whole.json", document)
    empty = write(tmp_path / "empty.json", {**document, "results": []})
    other = write(tmp_path / "other.json", [])
    assert run_bench("--compare", whole, empty) == 2
    assert "have no case in common" in capsys.readouterr().err
    for wrong in (other, tmp_path / "missing.json"):
        assert run_bench("--compare", whole, wrong) == 2
        assert f"{wrong.name} is no result of bench --json: " in capsys.readouterr().err
