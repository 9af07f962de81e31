"""Calls that are cut short: by Ctrl-C, and by the end of the process while they are in flight."""

from __future__ import annotations

import os

import pytest
from programs import HERE, run

# Minutes of computing, but for the signal.
LONG_CALLS = {
    "attention": """
x = make(np.ones((1, 1 << 17, 8, 32), np.float32))
call = lambda: dlattn.attention(x, x, x)
""",
    "varlen": """
x = make(np.ones((1 << 17, 8, 32), np.float32))
lengths = make(np.array([0, 1 << 17], np.int32))
call = lambda: dlattn.attention_varlen(x, x, x, lengths, lengths, 1 << 17, 1 << 17)
""",
    "merge_states": """
out = make(np.broadcast_to(np.float32(1), (1 << 10, 1 << 15, 1, 1)))
lse = make(np.broadcast_to(np.float32(1), (1 << 10, 1, 1 << 15)))
call = lambda: dlattn.merge_states([out] * 32, [lse] * 32)
""",
}

PREAMBLE = """
import os, signal, sys, threading, time
import numpy as np
import dlattn

make = lambda x: x
if sys.argv[1] == "torch":
    import torch
    make = torch.from_numpy
elif sys.argv[1] == "jax":
    import jax
    make = jax.numpy.asarray
elif sys.argv[1] == "exporter":
    from capsules import Exporter as make

small = make((np.random.default_rng(1).standard_normal((1, 64, 2, 16)) + 0.3).astype(np.float32))
want = np.asarray(dlattn.attention(small, small, small))
"""

INTERRUPTED = """
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it

def send(seconds, number=signal.SIGINT):
    def wait_and_send():
        time.sleep(seconds)
        os.kill(os.getpid(), number)
    threading.Thread(target=wait_and_send).start()

for _ in range(2):
    send(0.5)
    try:
        call()
    except KeyboardInterrupt:
        pass
    else:
        raise AssertionError("not interrupted")
    assert np.array_equal(np.asarray(dlattn.attention(small, small, small)), want)
"""

HANDLED = """
x = (np.random.default_rng(1).standard_normal((1, 4096, 8, 64)) + 0.3).astype(np.float32)
want = dlattn.attention(x, x, x)
handled = []

def handler(number, frame):
    handled.append(dlattn.attention(small, small, small))  # within the call that it interrupts

signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
got = [dlattn.attention(x, x, x) for _ in range(3)]
signal.setitimer(signal.ITIMER_REAL, 0)
assert handled and all(np.array_equal(out, want) for out in got)
"""

IN_FLIGHT = """
def work():
    while True:
        call()

for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
time.sleep(1.0)
"""

SHORT_CALL = """
call = lambda: dlattn.attention(small, small, small)
"""


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    path = [str(HERE), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))


def needs(kind: str) -> None:
    if kind in ("torch", "jax"):
        pytest.importorskip(kind)


@pytest.mark.parametrize("threads", ["1", "2"])
@pytest.mark.parametrize("call", sorted(LONG_CALLS))
def test_ctrl_c_ends_a_long_call(call: str, threads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLATTN_NUM_THREADS", threads)
    run(PREAMBLE + LONG_CALLS[call] + INTERRUPTED, "numpy")


@pytest.mark.parametrize("kind", ["torch", "jax", "exporter"])
def test_ctrl_c_with_other_tensors(kind: str) -> None:
    needs(kind)
    run(PREAMBLE + LONG_CALLS["attention"] + INTERRUPTED, kind)


def test_a_handler_that_returns_changes_nothing() -> None:
    run(PREAMBLE + HANDLED, "numpy")


# JAX ends the process itself where one of its own threads wants the GIL then.
@pytest.mark.parametrize("kind", ["numpy", "torch", "exporter"])
def test_exit_during_long_calls(kind: str) -> None:
    needs(kind)
    run(PREAMBLE + LONG_CALLS["attention"] + IN_FLIGHT, kind)


# So does torch where a thread asks for a tensor's negative bit.
@pytest.mark.parametrize("kind", ["numpy", "exporter"])
def test_exit_during_short_calls(kind: str) -> None:
    for _ in range(3):
        run(PREAMBLE + SHORT_CALL + IN_FLIGHT, kind)
