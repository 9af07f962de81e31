"""Environment variables, each read once in a process of its own."""

from __future__ import annotations

import os
import platform
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


_ROUNDING = """
import ctypes
import numpy as np, dlattn

rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((2, 300, 4, 40)).astype(np.float32) for _ in range(3))
k[:, :, 0] *= np.float32(1e-40)  # subnormal

def results():
    out, lse = dlattn.attention(q, k, v, causal=True, return_lse=True)
    half, tiny = v.astype(np.float16), (v * 1e-6).astype(np.float16)
    cache = np.zeros((2, 300, 4, 40), np.float16), np.zeros((2, 300, 4, 40), np.int8)
    for x in cache:
        scales = {"k_descale": np.ones(4, np.float32) / 30, "v_descale": np.ones(4, np.float32)}
        given = {} if x.dtype == half.dtype else scales
        table = v[0, :, 0, :8].copy()
        begin = np.zeros(2, np.int32)
        dlattn.append_kv(half, tiny, x, x.copy(), seqused_k=begin, rotary_cos=table,
                         rotary_sin=table, **given)
    return [out, lse, *cache, *dlattn.merge_states([out, v], [lse, lse]),
            dlattn.attention(half, half, tiny, precision="int8_fp8"),
            *dlattn.attention_backward(v, q, k, v, out, lse, causal=True)[:3]]

modes = ctypes.CDLL("libm.so.6")
assert modes.fesetround(0x800) == 0  # up; threads that are started now inherit it
np.seterr(all="ignore")
upward = results()
modes.fesetround(0)
for x, y in zip(upward, results(), strict=True):
    assert np.array_equal(x.view(np.uint8), y.view(np.uint8))
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the number is x86-64's")
def test_the_callers_rounding_changes_nothing() -> None:
    """Nor do other floating-point settings of the calling thread."""
    result = subprocess.run([sys.executable, "-c", _ROUNDING], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
