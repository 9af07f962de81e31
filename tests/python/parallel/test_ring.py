"""Attention over four processes, by gloo on a CPU, against one process in float64.

The processes are started once and compute all cases; each test reads what they found.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
    pytest.skip("torch has no gloo", allow_module_level=True)
if not hasattr(__import__("os"), "fork"):
    pytest.skip("processes are forked", allow_module_level=True)

from ring_cases import CASES, PROCESSES  # noqa: E402
from ring_faults import FAULTS  # noqa: E402

Results = list[dict[str, list[str]]]
SUPPORT = Path(__file__).resolve().parents[1] / "support"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("ring")
    done = subprocess.run(
        [sys.executable, str(SUPPORT / "ring_cases.py"), str(folder)],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"results{r}.json").read_text()) for r in range(PROCESSES)]


@pytest.mark.parametrize("name", CASES)
def test_numbers(name: str, results: Results) -> None:
    for rank in range(CASES[name].processes):
        assert results[rank].get(name) == [], f"process {rank}"


@pytest.mark.parametrize("name", FAULTS)
def test_faults(name: str, results: Results) -> None:
    left = PROCESSES - (name == "a_process_dies")
    for rank in range(left):
        assert results[rank].get(name) == [], f"process {rank}"
