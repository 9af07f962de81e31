"""Attention of models that two processes train: DistributedDataParallel, fully_shard and
context_parallel, on the CPU.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

PROGRAM = Path(__file__).parents[1] / "support" / "torch_training.py"


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch has no processes")
def test_gradients_are_those_of_one_process(tmp_path: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(rank), str(tmp_path / "meeting")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
