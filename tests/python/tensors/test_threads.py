"""Calls from many threads at once, the first ones of a process; processes that fork."""

from __future__ import annotations

import importlib
import os

import pytest
from programs import HERE, finish, run, start

AT_ONCE = 4  # processes


def first_calls(processes: int, *libraries: str) -> None:
    for library in libraries:
        pytest.importorskip(library)
    for begin in range(0, processes, AT_ONCE):
        count = min(AT_ONCE, processes - begin)
        finish([start("first_calls.py", *libraries) for _ in range(count)])


@pytest.mark.parametrize("libraries", ["numpy", "torch", "jax", "numpy torch jax"])
def test_first_calls_at_once(libraries: str) -> None:
    first_calls(4 if libraries == "numpy" else 2, *libraries.split())


@pytest.mark.slow
@pytest.mark.parametrize("processes", [24, pytest.param(100, marks=pytest.mark.nightly)])
def test_first_calls_of_many_processes(processes: int) -> None:
    first_calls(processes, "numpy")


PREAMBLE = """
import os, signal, sys, threading, time
import numpy as np
import dlattn

random = np.random.default_rng(1)
x = (random.standard_normal((2, 70, 4, 16)) + 0.3).astype(np.float32)

def compute(y):
    out, lse = dlattn.attention(y, y, y, causal=True, return_lse=True)
    merged, _ = dlattn.merge_states([out, out], [lse, lse])
    return np.concatenate([np.asarray(out), np.asarray(merged)])

def in_child(work):
    "Fork; whether work() gives True in the child. A child that hangs is killed, and it is not."
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            os._exit(0 if work() else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""

FORK_AFTER_A_CALL = f"""{PREAMBLE}
if sys.argv[1] == "torch":
    import torch
    x = torch.from_numpy(x)
elif sys.argv[1] == "exporter":
    from capsules import Exporter
    x = Exporter(x)
want = compute(x)
same = lambda: np.array_equal(compute(x), want)
for _ in range(5):
    assert in_child(same)
    assert in_child(lambda: in_child(same) and same())
assert same()
"""

FORK_DURING_CALLS = f"""{PREAMBLE}
stop = threading.Event()

def work():
    while not stop.is_set():
        compute(x)

threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads:
    thread.start()
want = compute(x)
for _ in range(60):
    assert in_child(lambda: np.array_equal(compute(x), want))
stop.set()
for thread in threads:
    thread.join()
"""

FORK_DURING_FIRST_CALLS = f"""{PREAMBLE}
threads = [threading.Thread(target=compute, args=(x,)) for _ in range(8)]
for thread in threads:
    thread.start()
for _ in range(4):
    assert in_child(lambda: compute(x).any() and dlattn.info().cpu_threads > 0)
for thread in threads:
    thread.join()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
class TestFork:
    @pytest.fixture(autouse=True)
    def _quiet(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # Python from 3.12 on warns of threads beside a fork, which is what is tested here.
        monkeypatch.setenv("PYTHONWARNINGS", "ignore")
        monkeypatch.setenv("DLATTN_NUM_THREADS", "3")
        monkeypatch.syspath_prepend(str(HERE))
        path = [str(HERE), os.environ.get("PYTHONPATH", "")]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))

    @pytest.mark.parametrize("kind", ["numpy", "torch", "exporter"])
    def test_after_a_call(self, kind: str) -> None:
        if kind == "torch":
            pytest.importorskip("torch")
        run(FORK_AFTER_A_CALL, kind)

    def test_during_calls(self) -> None:
        run(FORK_DURING_CALLS)

    def test_during_first_calls(self) -> None:
        finish([start(FORK_DURING_FIRST_CALLS) for _ in range(4)])


SUB_INTERPRETER = """
import sys
import numpy as np
import dlattn  # the main interpreter's, before and after
x = np.ones((1, 8, 2, 16), np.float32)
import importlib
interpreters = importlib.import_module(sys.argv[1])
for _ in range(2):
    sub = interpreters.create()
    interpreters.run_string(sub, '''if True:
        import sys
        try:
            import dlattn
        except ImportError as error:
            print(error, flush=True)
    ''')
    interpreters.destroy(sub)
    assert (np.asarray(dlattn.attention(x, x, x)) == 1).all()
"""


def test_sub_interpreters_are_refused() -> None:
    for name in ("_xxsubinterpreters", "_interpreters"):
        try:
            importlib.import_module(name)
        except ImportError:
            continue
        printed = run(SUB_INTERPRETER, name).splitlines()
        assert len(printed) == 2
        for line in printed:
            # CPython's own refusal comes first where the sub-interpreter has its own GIL.
            assert "sub-interpreter" in line or "subinterpreters" in line
        return
    pytest.skip("this Python has no module for sub-interpreters")
