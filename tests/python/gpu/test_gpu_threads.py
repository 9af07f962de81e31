"""Threads that have not used CUDA: their first calls at once, on every GPU, and while captured.

Each in a process of its own, as the process's first calls. Such a thread has no current context
until someone makes one, and nothing but dlattn does: outputs are given, not allocated.
"""

from __future__ import annotations

import pytest
from gpu_checks import HOPPER, SERVED, torch
from programs import run

pytestmark = pytest.mark.gpu

HOPPERS = ["wmma:persistent", "sm90"] if HOPPER else []
KERNELS = [*dict.fromkeys([kernel for kernel, _ in SERVED] + HOPPERS), "auto"]
every_gpu = pytest.mark.parametrize("device", range(max(1, torch.cuda.device_count())))

PREAMBLE = """
import math, os, sys, threading
import torch
import dlattn

THREADS = 32

def problem(device, dtype="float16", seed=1):
    torch.manual_seed(seed)
    q, k, v = (
        (torch.randn(2, 256, 4, 64) + 0.3).to(device=f"cuda:{device}", dtype=getattr(torch, dtype))
        for _ in range(3)
    )
    return (q, k, v), torch.full_like(q, math.nan)

def compute(arrays, out, kernel):
    dlattn.attention(*arrays, causal=True, kernel=kernel, out=out)

def check(arrays, out, kernel):
    torch.cuda.synchronize(out.device)
    assert not out.isnan().any()
    again = dlattn.attention(*arrays, causal=True, kernel=kernel)
    assert torch.equal(out, again)
    q, k, v = (x.double().transpose(1, 2) for x in arrays)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert (out.double() - want.transpose(1, 2)).abs().max() < 0.02

def in_threads(works):
    barrier = threading.Barrier(len(works))
    failures = []
    def run(work):
        barrier.wait()
        try:
            work()
        except BaseException as error:
            failures.append(error)
    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if any(thread.is_alive() for thread in threads):
        print("a thread hangs", file=sys.stderr, flush=True)
        os._exit(1)
    if failures:
        raise failures[0]
"""

AT_ONCE = """
kernels = sys.argv[1].split(",")
works, results = [], []
for n in range(THREADS):
    device = n % torch.cuda.device_count()
    kernel = kernels[n // torch.cuda.device_count() % len(kernels)]
    dtype = "bfloat16" if n % 3 else "float16"
    if kernel == "scalar" and n % 2:
        dtype = "float32"
    arrays, out = problem(device, dtype, seed=n)
    results.append((arrays, out, kernel))
    works.append(lambda arrays=arrays, out=out, kernel=kernel: compute(arrays, out, kernel))
for device in range(torch.cuda.device_count()):
    torch.cuda.synchronize(device)
in_threads(works)
for result in results:
    check(*result)
"""

ONE_THREAD = """
device, kernel, dtype, current = int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
arrays, out = problem(device, dtype)
torch.cuda.synchronize(device)

def work():
    if current >= 0:
        torch.cuda.set_device(current)
        torch.ones(1, device=f"cuda:{current}")
    before = torch.cuda.current_device()
    compute(arrays, out, kernel)
    assert torch.cuda.current_device() == before

in_threads([work])
check(arrays, out, kernel)
"""

CAPTURED = """
device, kernel, dtype, thread = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
arrays, out = problem(device, dtype)
graph = torch.cuda.CUDAGraph()
stream = torch.cuda.Stream(device)
torch.cuda.synchronize(device)

def capture():
    with torch.cuda.device(device), torch.cuda.graph(graph, stream=stream):
        if thread == "none":
            compute(arrays, out, kernel)
            return
        # As an autograd engine does: another thread, while this one captures its stream.
        def work():
            dlattn.attention(
                *arrays, causal=True, kernel=kernel, out=out, stream=stream.cuda_stream
            )
        in_threads([work])

capture()
for _ in range(3):
    out.fill_(math.nan)
    torch.cuda.synchronize(device)
    graph.replay()
    check(arrays, out, kernel)
"""


@pytest.mark.parametrize("repetition", range(3))
def test_first_calls_at_once_of_all_kernels(repetition: int) -> None:
    run(PREAMBLE + AT_ONCE, ",".join(KERNELS[repetition:] + KERNELS[:repetition]), quiet=False)


@pytest.mark.parametrize("kernel", KERNELS)
def test_first_calls_at_once_of_one_kernel(kernel: str) -> None:
    run(PREAMBLE + AT_ONCE, kernel, quiet=False)


@every_gpu
@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [*SERVED, *((kernel, "bfloat16") for kernel in HOPPERS if kernel != "sm90")],
)
def test_first_call_in_a_fresh_thread(kernel: str, dtype: str, device: int) -> None:
    run(PREAMBLE + ONE_THREAD, str(device), kernel, dtype, "-1", quiet=False)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(("device", "current"), [(0, 1), (1, 0)])
@pytest.mark.parametrize("kernel", KERNELS)
def test_first_call_with_another_device_current(kernel: str, device: int, current: int) -> None:
    run(PREAMBLE + ONE_THREAD, str(device), kernel, "float16", str(current), quiet=False)


@every_gpu
@pytest.mark.parametrize("thread", ["none", "fresh"])
@pytest.mark.parametrize("kernel", ["scalar", "wmma", *HOPPERS])
def test_captured_as_the_very_first_call(kernel: str, thread: str, device: int) -> None:
    run(PREAMBLE + CAPTURED, str(device), kernel, "float16", thread, quiet=False)
