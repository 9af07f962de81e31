"""The launcher of C++ test programs, which does not repeat what has passed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

LAUNCHER = Path(__file__).resolve().parents[2] / "run_once.py"


class Programs:
    """A program that counts its runs, and the launcher with a cache folder."""

    def __init__(self, folder: Path) -> None:
        self.program = folder / "program"
        self.log = folder / "log"
        self.cache = folder / "cache"
        self.write(status=0)

    def write(self, status: int) -> None:
        self.program.write_text(f'#!/bin/sh\necho "$@" >>"{self.log}"\nexit {status}\n')
        self.program.chmod(0o755)

    def launch(self, *arguments: str, cache: str | None = None) -> int:
        cached = str(self.cache) if cache is None else cache
        command = [sys.executable, str(LAUNCHER), str(self.program), *arguments]
        environment = {**os.environ, "DLATTN_CI_CACHE": cached}
        return subprocess.run(command, env=environment, check=False).returncode

    def runs(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0


@pytest.fixture
def programs(tmp_path: Path) -> Programs:
    return Programs(tmp_path)


def test_what_has_passed_is_not_repeated(programs: Programs) -> None:
    assert programs.launch("--values") == 0 and programs.launch("--values") == 0
    assert programs.runs() == 1


def test_other_arguments_and_another_program_run(programs: Programs) -> None:
    programs.launch("--values")
    programs.launch("--random", "1")
    assert programs.runs() == 2
    programs.write(status=3)
    assert programs.launch("--values") == 3
    assert programs.runs() == 3


def test_a_failure_is_not_remembered(programs: Programs) -> None:
    programs.write(status=3)
    assert programs.launch() == 3 and programs.launch() == 3
    assert programs.runs() == 2


def test_without_a_folder_everything_runs(programs: Programs) -> None:
    assert programs.launch(cache="") == 0 and programs.launch(cache="") == 0
    assert programs.runs() == 2


def test_a_program_that_a_signal_ends_has_failed(programs: Programs) -> None:
    programs.program.write_text("#!/bin/sh\nkill -9 $$\n")
    assert programs.launch() == 128 + 9
