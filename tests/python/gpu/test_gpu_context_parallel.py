"""torch's context_parallel over two GPUs, by `activate()`, with grouped heads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
    pytest.skip("torch has no NCCL", allow_module_level=True)

pytestmark = pytest.mark.gpu


def test_over_two_gpus(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("two GPUs are needed")
    program = Path(__file__).parents[1] / "support" / "context_parallel_gpus.py"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launch, str(program), str(tmp_path)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        found = json.loads((tmp_path / f"results{rank}.json").read_text())
        assert len(found) == 3 and not any(found.values()), found
