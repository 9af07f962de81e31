"""Attention over the GPUs of one host, a process each, by NCCL, against float64 and one GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
    pytest.skip("torch has no NCCL", allow_module_level=True)

import ring_gpus  # noqa: E402

pytestmark = pytest.mark.gpu


def gpus() -> int:
    found: int = min(4, torch.cuda.device_count())
    if found < 2:
        pytest.skip("two GPUs are needed")
    return found


def test_over_gpus(tmp_path: Path) -> None:
    n = gpus()
    command = [sys.executable, ring_gpus.__file__, str(tmp_path), str(n)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    subjects = 2 * len(ring_gpus.SUBJECTS) + len(ring_gpus.SAME_BITS) + 2
    for rank in range(n):
        found = json.loads((tmp_path / f"results{rank}.json").read_text())
        assert len(found) == subjects and not any(found.values()), done.stdout


def test_a_process_that_ends(tmp_path: Path) -> None:
    """The others do not wait for ever: they raise, or NCCL's watchdog ends them.

    It does so after the group's time-out of 8 s; the limit has room for start and a slow watchdog.
    """
    n = gpus()
    codes = ring_gpus.start("last", n, tmp_path, 150)
    assert not list(tmp_path.glob("survived*"))
    assert codes[-1] == 0 and all(code not in (0, -9) for code in codes[:-1]), codes
