"""What the command line's tests share."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlattn.cli import main

Captured = pytest.CaptureFixture[str]


def draw(*sizes: int, seed: int = 0, dtype: str = "f4") -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(sizes) + 0.25).astype(dtype)


def program(
    *arguments: str | Path, stdout: Any = subprocess.PIPE, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run the command line as a program of its own."""
    command = [sys.executable, "-m", "dlattn", *map(str, arguments)]
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, **options)


def refuses(capsys: Captured, *arguments: str | Path) -> str:
    """Run a command that must end with exit code 2 and a message without a traceback."""
    try:
        code = main([str(argument) for argument in arguments])
    except SystemExit as exit_:  # from argparse
        assert isinstance(exit_.code, int)
        code = exit_.code
    captured = capsys.readouterr()
    assert code == 2, captured
    assert "Traceback" not in captured.err
    return captured.err
