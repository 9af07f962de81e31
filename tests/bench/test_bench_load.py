"""The benchmark beside other programs: a warning, and marks at what it measured."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from quick_bench import run_to_json

from dlattn.bench import figures, load, plot, report

Captured = pytest.CaptureFixture[str]
CORES = len(load._cores())
ALL = f"other programs used {CORES}.0 of {CORES} cores"


@pytest.mark.usefixtures("instant")
def test_busy_machine(tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "_others", lambda *_: float(CORES))
    document = run_to_json(tmp_path, "--shape", "1,1,16,8", "--peers", "numpy")
    assert document["busy"] == [f"{ALL} before the benchmark", f"{ALL} during the benchmark"]
    assert [result["note"] for result in document["results"]] == ["busy machine"] * 4
    printed = capsys.readouterr().out
    first, last = (line for line in printed.splitlines() if line.startswith("WARNING, busy"))
    assert first.removeprefix("WARNING, busy machine: ") == (
        f"{ALL} before the benchmark. Times and ratios may be far off."
    )
    assert f"{ALL} before the benchmark; {ALL} during the benchmark. Times" in last
    rows = [line for line in printed.splitlines() if line.startswith("(1,1,16,8)")]
    assert len(rows) == 4 and all(row.endswith("busy machine") for row in rows)
    sentences = [line for line in printed.splitlines() if " times as fast as " in line]
    assert sentences and all(line.startswith("On a busy machine: dlattn") for line in sentences)
    # The warnings made from the JSON.
    assert plot._title(document).endswith(", busy machine")
    assert plot._footnote(document, 99.0).endswith(
        f"; {ALL} before the benchmark; {document['busy'][1]}"
    )
    markdown = figures.figures_markdown([tmp_path / "bench.json"], tmp_path)
    assert f"WARNING, busy machine: {ALL} before" in markdown


@pytest.mark.usefixtures("instant")
def test_quiet_machine(tmp_path: Path, capsys: Captured) -> None:
    document = run_to_json(tmp_path, "--shape", "1,1,16,8", "--full", "--peers", "numpy")
    assert document["busy"] == []
    assert not any(result["note"] for result in document["results"])
    assert "busy" not in capsys.readouterr().out
    assert "busy" not in plot._title(document) + plot._footnote(document, 99.0)
    del document["busy"]  # as older documents
    assert "busy" not in plot._title(document) + plot._footnote(document, 99.0)


@pytest.mark.usefixtures("instant")
def test_only_cases_that_were_disturbed_are_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = iter([0.0, 0.0, float(CORES)])  # before, the first case, the second
    monkeypatch.setattr(load, "_others", lambda *_: next(found, 0.0))
    document = run_to_json(tmp_path, "--shape", "1,1,16,8", "--peers", "numpy")
    assert document["busy"] == [f"{ALL} during the benchmark"]
    marked = [result["causal"] for result in document["results"] if result["note"]]
    assert marked == [True, True]


def test_others_are_what_is_not_ours() -> None:
    first = load._Snapshot(wall=100.0, busy=1000.0, own=50.0)
    assert load._others(first, load._Snapshot(104.0, 1007.0, 51.0)) == 1.5
    assert load._others(first, load._Snapshot(104.0, 1001.0, 51.5)) == 0.0


def test_load_average_where_cores_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (5.0, 0.0, 0.0))
    first, second = load._Snapshot(100.0, None, 50.0), load._Snapshot(104.0, None, 54.0)
    assert load._others(first, second) == 4.0


def test_stolen_time_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tick = 1.0 / os.sysconf("SC_CLK_TCK")
    stat = tmp_path / "stat"
    stat.write_text(
        "cpu  9 9 9 9 9 9 9 9 9 9\n"
        "cpu0 100 20 3 4000 500 6 7 80 100 20\n"  # user, nice, system, idle, iowait, irq, ...
        "cpu1 1 0 0 0 0 0 0 0 0 0\n"
        "cpu2 1000 0 0 0 0 0 0 0 0 0\n"
        "intr 1 2 3\n"
    )
    monkeypatch.setattr(load, "_STAT", stat)
    monkeypatch.setattr(load, "_cores", lambda: {0, 1})
    assert load._busy_seconds() == pytest.approx((100 + 20 + 3 + 6 + 7 + 80 + 1) * tick)
    monkeypatch.setattr(load, "_STAT", tmp_path / "none")
    assert load._busy_seconds() is None


def test_a_program_beside_is_seen() -> None:
    """A real one. Where others keep it from running, it is they who are seen."""
    if not load._busy_seconds():
        pytest.skip("this system does not tell what its cores did")
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        time.sleep(0.1)
        watch = load.Watch("cpu")
        watch.before()
        process.kill()
    assert watch._others["before"] > 0.2


@pytest.mark.parametrize(("percent", "is_busy"), [(97.0, True), (2.0, False)])
def test_gpu_that_others_use(
    monkeypatch: pytest.MonkeyPatch, percent: float, is_busy: bool
) -> None:
    monkeypatch.setattr(load, "_SAMPLE_SECONDS", 0.0)
    monkeypatch.setattr(load, "_GPU_SAMPLE_SECONDS", 0.0)
    monkeypatch.setattr(load, "_others", lambda *_: 0.0)
    used = iter([0.0, percent])
    monkeypatch.setattr(load, "_gpu_utilization", lambda: next(used))
    watch = load.Watch("cuda")
    watch.before()
    assert watch.reasons() == []
    watch.after()
    expected = ["other programs kept the GPU 97% busy after the benchmark"] if is_busy else []
    assert watch.reasons() == expected


def test_nvidia_smi_is_asked_for_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\n[ "$4" = GPU-12ab ] && echo 83\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    cuda: Any = SimpleNamespace(current_device=lambda: 0)
    cuda.get_device_properties = lambda _: SimpleNamespace(uuid="12ab")
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert load._gpu_utilization() == 83.0
    cuda.get_device_properties = lambda _: SimpleNamespace(uuid="other")
    assert load._gpu_utilization() == 0.0
    program.unlink()
    assert load._gpu_utilization() == 0.0


@pytest.mark.usefixtures("instant")
def test_what_could_not_run_is_not_marked() -> None:
    case: Any = SimpleNamespace()
    timed, refused = report.Result(case, "a", True), report.Result(case, "b", False)
    timed.times, refused.note = [1.0], "refused"
    timed.note = "eager"
    report.mark([timed, refused], True)
    assert (timed.note, refused.note) == ("eager; busy machine", "refused")
