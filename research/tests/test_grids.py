"""Shapes of models beside the peers: what the study makes of the times."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import grids


def test_a_row_has_its_fastest_peer_and_all_rows_a_mean() -> None:
    rows: list[dict[str, Any]] = [
        {"us": {"dlattn auto": 10.0, "dlattn sm90:tall": 1.0, "fa3": 8.0, "torch-cudnn": 20.0}},
        {"us": {"dlattn auto": 10.0, "fa3": 20.0}},
        {"us": {"dlattn auto": 10.0}},
    ]
    summary = grids.summarize(rows, ("torch-cudnn", "fa3", "fa4"))
    assert [(row.get("best_peer"), row.get("ratio")) for row in rows] == [
        ("fa3", 0.8),
        ("fa3", 2.0),
        (None, None),
    ]
    assert list(summary) == ["torch-cudnn", "fa3", "best peer"]
    assert summary["fa3"] == {"cases": 2, "geometric_mean": 1.2649, "least": 0.8, "below_1": 1}
    assert summary["torch-cudnn"]["cases"] == 1


def test_shapes_of_25_models_and_grouped_heads() -> None:
    assert len(grids.CASES) == len(set(grids.CASES)) == 28
    assert [case for case in grids.CASES if case[:3] == (4, 32, 8)] == [
        (4, 32, 8, 4096, 4096, 128, False),
        (4, 32, 8, 4096, 4096, 128, True),
    ]


def test_auto_takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["grids.py", "--kernels", "sm90:tall"])
    with pytest.raises(SystemExit):
        grids.main()


def test_a_run_that_was_cut_off_goes_on(tmp_path: Path) -> None:
    document: dict[str, Any] = {
        "git": {"sha": "1"},
        "versions": {"torch": "2"},
        "dtype": "bfloat16",
        "machine": {"gpu": "H200", "load_average": 1.0},
    }
    path = tmp_path / "grids.json"
    path.write_text(json.dumps({**document, "cases": [{"us": {}}]}))
    document["machine"] = {"gpu": "H200", "load_average": 2.0}
    assert grids.earlier_rows(path, document) == [{"us": {}}]
    for changed in ({"git": {"sha": "2"}}, {"machine": {"gpu": "H100"}}):
        with pytest.raises(SystemExit, match="accepted"):
            grids.earlier_rows(path, {**document, **changed})
