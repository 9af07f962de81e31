"""Environment variables, each read once in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CALL = (
    "import numpy, dlattn; x = numpy.ones((1, 2, 1, 8), numpy.float32); "
    "dlattn.attention(x, x, x); print('done')"
)


def run(code: str = CALL, **variables: str | bytes) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **variables},  # type: ignore[dict-item]
        capture_output=True,
        text=True,
        errors="backslashreplace",
    )


@pytest.mark.parametrize("value", ["", "0", "false", "False", "no", "OFF"])
def test_plans_are_not_printed(value):
    done = run(DLATTN_PRINT_PLAN=value)
    assert (done.stdout, done.stderr) == ("done\n", "")


@pytest.mark.parametrize("value", ["1", "true", "yes", "00"])
def test_plans_are_printed(value):
    done = run(DLATTN_PRINT_PLAN=value)
    assert done.stdout == "done\n" and done.stderr.startswith("kernel: cpu\n")


@pytest.mark.parametrize(
    ("name", "accepted"),
    [("DLATTN_NUM_THREADS", "accepted: 1 to 4096"), ("DLATTN_CPU_ISA", "accepted on this process")],
)
def test_bytes_that_are_no_text_are_quoted(name, accepted):
    code = f"""
import dlattn
try:
    {CALL}
except dlattn.UnsupportedError as error:
    print(error)
"""
    done = run(code, **{name: b"\xff4\xed\xa0\x80"})
    assert done.stderr == ""
    assert rf'{name} is "\xff4\xed\xa0\x80"; {accepted}' in done.stdout


@pytest.mark.parametrize(
    ("variables", "threads"),
    [
        ({"OMP_NUM_THREADS": "3"}, 3),
        ({"OMP_NUM_THREADS": "5,2"}, 5),
        ({"OMP_NUM_THREADS": "3", "DLATTN_NUM_THREADS": "7"}, 7),
        ({"OMP_NUM_THREADS": "many"}, 0),
        ({"OMP_NUM_THREADS": "0"}, 0),
    ],
)
def test_threads(variables, threads):
    """0: those of a process without either variable."""
    code = "import dlattn; print(dlattn.info().cpu_threads)"
    if threads == 0:
        threads = int(run(code, OMP_NUM_THREADS="", DLATTN_NUM_THREADS="").stdout)
    done = run(code, **{"DLATTN_NUM_THREADS": "", **variables})
    assert (done.stdout, done.stderr) == (f"{threads}\n", "")
