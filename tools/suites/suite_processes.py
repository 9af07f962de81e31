"""Processes that run tests and write what becomes of each, and what they have written.

Such a process writes a line of JSON when a test begins and one when it ends, so that nothing is
lost where the process is. Tests whose end is in the file already are left out: a process that died
is started again with the same arguments.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

CORES = len(os.sched_getaffinity(0))
LOG = 1500  # characters of what a process printed before it died, the last ones
# The processes of a run share a GPU: what torch's allocator keeps beyond this is given back.
KEPT_BYTES = 1 << 30
MESSAGE = 1500  # characters of a traceback, the last ones


def load(path: Path) -> ModuleType:
    """A test file as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def threads_of(jobs: int) -> dict[str, str]:
    """Environment of one of several processes, which would else each take all cores."""
    threads = str(max(CORES // jobs, 1))
    return {"OMP_NUM_THREADS": threads, "DLATTN_NUM_THREADS": threads}


def finish(
    command: Sequence[str], records: Path, end: float, environment: Mapping[str, str]
) -> Path:
    """Run a command, in as many processes as it takes, until `end`; return where the records are.

    A test at which the process dies has crashed; one that dies before any test is not repeated.
    """
    log = records.with_suffix(".log")
    while True:
        before = records.stat().st_size if records.exists() else 0
        with log.open("w") as printed:
            process = subprocess.Popen(
                command,
                stdout=printed,
                stderr=subprocess.STDOUT,
                env={**environment, **os.environ},
            )
            try:
                status = process.wait(max(end - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                return records
        lines = list(read(records)) if records.exists() else []
        if lines and lines[-1].get("finished"):
            return records
        message = f"exit status {status}: {log.read_text()[-LOG:]}"
        with records.open("a") as file:
            if lines and "test" in lines[-1] and "outcome" not in lines[-1]:
                crash = {"test": lines[-1]["test"], "outcome": "crashed", "message": message}
                file.write(f"\n{json.dumps(crash)}\n")
            elif not any("outcome" in line for line in _lines_from(records, before)):
                file.write(f"\n{json.dumps({'trouble': message})}\n")
                return records


def read(records: Path) -> Iterator[dict[str, Any]]:
    """The lines of a file of records; the last may be cut off."""
    for line in records.read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            yield json.loads(line)


def ended(records: Path) -> set[str]:
    """The tests of a file of records that need not run again."""
    if not records.exists():
        return set()
    return {r["test"] for r in read(records) if "outcome" in r}


def _lines_from(records: Path, offset: int) -> list[dict[str, Any]]:
    """The output of the last process."""
    if not records.exists():
        return []
    text = records.read_bytes()[offset:].decode()
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]
