"""Objects that a call keeps alive and lets go; several threads; imports."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from typing import Any

import numpy as np
import pytest
from arrays import FRAMEWORKS, normal, qkv
from capsules import Exporter

import dlattn


def memory_bytes(kind: str) -> int:
    """Memory of this process: "resident" in the machine's, or "virtual", touched or not."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[kind == "resident"]) * os.sysconf("SC_PAGESIZE")


def test_no_references_are_kept(framework):
    arrays = [framework.array(x) for x in qkv()]
    bias = framework.array(normal(5, 7))
    tensors = [*arrays, bias]
    out, lse = dlattn.attention(*arrays, bias=bias, return_lse=True)
    gc.collect()
    before = [sys.getrefcount(x) for x in tensors]
    for _ in range(10):
        out, lse = dlattn.attention(*arrays, bias=bias, return_lse=True)
        dlattn.plan(*arrays, bias=bias)
        dlattn.merge_states([out, out], [lse, lse])
        with pytest.raises(dlattn.UnsupportedError):
            dlattn.attention(*arrays, bias=bias, softmax_scale=0)
    gc.collect()
    assert [sys.getrefcount(x) for x in tensors] == before


@pytest.mark.parametrize("name", ["numpy", "torch", "exporter"])
def test_types_die_when_their_caller_lets_go(name):
    base = Exporter if name == "exporter" else type(FRAMEWORKS[name]().array(0.0))
    values, watched = qkv(), []
    want = np.asarray(dlattn.attention(*values))
    for _ in range(100):
        kind = type("Local", (base,), {})
        if name == "numpy":
            arrays = [x.view(kind) for x in values]
        elif name == "torch":
            arrays = [FRAMEWORKS[name]().array(x).as_subclass(kind) for x in values]
        else:
            arrays = [kind(x) for x in values]
        watched.append(weakref.ref(kind))
        np.testing.assert_array_equal(np.asarray(dlattn.attention(*arrays)), want)
        del kind, arrays
    gc.collect()
    assert sum(kind() is not None for kind in watched) <= 1


def test_a_type_where_another_one_was_is_looked_at_anew():
    x = qkv()[0]
    addresses: set[int] = set()
    reused = 0
    for n in range(40):
        kind = type("Local", (Exporter,) if n % 2 else (np.ndarray,), {})
        reused += id(kind) in addresses
        addresses.add(id(kind))
        tensor = kind(x) if n % 2 else x.view(kind)
        assert dlattn._core.inspect(tensor)["pointer"] == x.ctypes.data
        assert not n % 2 or tensor.streams == [None]
        del kind, tensor
        gc.collect()
    assert reused


def test_inputs_die_when_their_caller_lets_go():
    torch = pytest.importorskip("torch")
    arrays = [torch.from_numpy(x) for x in qkv()]
    watched = [weakref.ref(x) for x in arrays]
    out = dlattn.attention(*arrays)
    arrays.clear()
    gc.collect()
    assert [x() for x in watched] == [None] * 3 and out.isfinite().all()


@pytest.mark.parametrize("name", ["numpy", "torch", "jax", "exporter"])
def test_no_leak_over_many_calls(name):
    make = Exporter if name == "exporter" else FRAMEWORKS[name]().array
    arrays = [make(x) for x in qkv(1, 64, 64, 4, 4, 64)]  # out: 64 kB
    calls = 10_000 if name in ("numpy", "torch") else 2_000

    def run(count: int) -> None:
        for n in range(count):
            dlattn.attention(*arrays, return_lse=n % 2 == 0)
            if n % 8 == 0:
                with pytest.raises((TypeError, dlattn.UnsupportedError)):
                    dlattn.attention(*arrays[:2], arrays[2] if n % 16 else None, layout="x")

    run(200)
    gc.collect()
    objects, before = len(gc.get_objects()), memory_bytes("resident")
    run(calls)
    gc.collect()
    assert memory_bytes("resident") - before < 100 * 65536
    assert len(gc.get_objects()) - objects < 100


def test_a_refused_call_gives_its_output_back(framework):
    """A fault of the numbers is found when the output is there already."""
    arrays = [framework.array(x) for x in qkv(1, 512, 2, 8, 8, 64)]  # out: 1 MB, never touched

    def run(count: int) -> None:
        for _ in range(count):
            with pytest.raises(dlattn.UnsupportedError, match="softmax_scale"):
                dlattn.attention(*arrays, softmax_scale=-1.0)

    run(20)
    before = memory_bytes("virtual")
    run(500)
    assert memory_bytes("virtual") - before < 200 << 20


def test_two_threads_at_once():
    q, k, v = qkv(2, 65, 130, 4, 2, 32)
    torch = FRAMEWORKS["torch"]()
    want = {causal: dlattn.attention(q, k, v, causal=causal) for causal in (False, True)}
    start = threading.Barrier(4, timeout=60)
    failures: list[BaseException] = []

    def work(causal: bool, array: Any) -> None:
        try:
            arrays = [array(x) for x in (q, k, v)]
            start.wait()
            for _ in range(50):
                got = dlattn.attention(*arrays, causal=causal)
                np.testing.assert_array_equal(np.asarray(got), want[causal])
        except BaseException as error:
            failures.append(error)

    threads = [
        threading.Thread(target=work, args=(causal, array))
        for causal in (False, True)
        for array in (np.array, torch.array)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_other_threads_run_meanwhile():
    """The GIL is released: a thread counts while another computes one long call."""
    arrays = qkv(1, 2048, 2048, 8, 8, 64)
    counted, done = 0, threading.Event()

    def work() -> None:
        dlattn.attention(*arrays)
        done.set()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # only a release lets the counter run
    thread = threading.Thread(target=work)
    try:
        thread.start()
        while not done.wait(0.001):
            counted += 1
    finally:
        thread.join()
        sys.setswitchinterval(interval)
    assert counted > 1


def test_import_brings_no_framework():
    code = (
        "import sys, dlattn; "
        "heavy = {'torch', 'cupy', 'jax', 'jaxlib', 'ml_dtypes'} & set(sys.modules); "
        "assert not heavy, heavy; "
        "import numpy as np; x = np.ones((1, 2, 1, 8), np.float16); dlattn.attention(x, x, x); "
        "heavy = {'torch', 'cupy', 'jax', 'jaxlib', 'ml_dtypes'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
