"""Programs that the tests run in processes of their own, where a hang is a failure."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent  # where programs and helpers of the tests are
PATIENCE = 120  # seconds


def start(program: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a program: its text, or the path of a file, from HERE."""
    named = [str(HERE / program)] if program.endswith(".py") else ["-c", program]
    return subprocess.Popen(
        [sys.executable, *named, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(processes: Sequence[subprocess.Popen[str]], quiet: bool = True) -> list[str]:
    """Wait for programs that must end well, without a word to stderr; return what they print."""
    printed = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=PATIENCE)
            assert process.returncode == 0, f"exit status {process.returncode}\n{out}{err}"
            assert not (quiet and err), err
            printed.append(out)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return printed


def run(program: str, *arguments: str, quiet: bool = True) -> str:
    return finish([start(program, *arguments)], quiet)[0]
