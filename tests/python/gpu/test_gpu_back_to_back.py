"""Calls one behind the other on a stream, each of which needs what the one before has written.

A kernel may start before the grid ahead of it is over, and must then wait for it. So calls are
chained: what such a chain gives must be, bit for bit, what it gives with a pause after every call.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from gpu_checks import DEVICE, HOPPER, every_kernel, normal, torch

import dlattn

pytestmark = pytest.mark.gpu

LINKS = 9
REPETITIONS = 60

Chain = Callable[[Callable[[], object]], None]


def check_chain(chain: Chain, buffers: list[Any], result: Any) -> None:
    """Compare the result of a chain, eager and captured, with that of pauses; poisoned before."""

    def poison() -> None:
        for buffer in buffers:
            buffer.fill_(math.nan if buffer.is_floating_point() else 0)
        torch.cuda.synchronize()

    poison()
    chain(torch.cuda.synchronize)
    torch.cuda.synchronize()
    want = result.clone()
    assert not want.isnan().any()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(lambda: None)
    for run in (lambda: chain(lambda: None), graph.replay):
        for repetition in range(REPETITIONS):
            poison()
            run()
            torch.cuda.synchronize()
            assert torch.equal(result, want), f"repetition {repetition}"


@every_kernel
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("heads", "seqlen", "dim"), [(8, 512, 64), (2, 96, 64), (4, 1100, 128)])
def test_attention_of_attention(
    kernel: str, dtype: str, heads: int, seqlen: int, dim: int, causal: bool
) -> None:
    """Each output is the next call's q, k or v, in three buffers that are used again and again.

    Scores are so far apart that a row is hardly the mean of many: chains do not come to rest.
    """
    inputs = [normal(1, seqlen, heads, dim, dtype=dtype, seed=seed) for seed in range(3)]
    ring = [torch.empty_like(inputs[0]) for _ in range(3)]

    def chain(pause: Callable[[], object]) -> None:
        for link in range(LINKS):
            arguments = list(inputs)
            if link > 0:
                arguments[link % 3] = ring[(link - 1) % 3]
            out = ring[link % 3]
            dlattn.attention(*arguments, causal=causal, softmax_scale=1.0, kernel=kernel, out=out)
            pause()

    check_chain(chain, ring, ring[(LINKS - 1) % 3])


@every_kernel
def test_lengths_from_the_kernel_ahead(kernel: str, dtype: str) -> None:
    q = normal(300, 4, 64, dtype=dtype, seed=1)
    lengths = torch.tensor([0, 40, 41, 300], dtype=torch.int32, device=DEVICE)
    cu_seqlens = torch.empty_like(lengths)
    out = torch.empty_like(q)

    def chain(pause: Callable[[], object]) -> None:
        for _ in range(LINKS):
            cu_seqlens.zero_()
            out.fill_(math.nan)
            pause()
            cu_seqlens.copy_(lengths)
            pause()
            dlattn.attention_varlen(
                q, q, q, cu_seqlens, cu_seqlens, 259, 259, kernel=kernel, out=out
            )
            pause()

    check_chain(chain, [out, cu_seqlens], out)


@every_kernel
def test_merge_of_parts_just_made(kernel: str, dtype: str) -> None:
    start = normal(1, 128, 8, 64, dtype=dtype, seed=1)
    x = torch.empty_like(start)

    def chain(pause: Callable[[], object]) -> None:
        x.copy_(start)
        for _ in range(LINKS):
            parts = [
                dlattn.attention(
                    start, part, part, softmax_scale=1.0, kernel=kernel, return_lse=True
                )
                for part in (x[:, :50], x[:, 50:])
            ]
            pause()
            merged, _ = dlattn.merge_states(*zip(*parts, strict=True))
            pause()
            x.copy_(merged)
            pause()

    check_chain(chain, [x], x)


@every_kernel
def test_streams_that_part_and_meet(kernel: str, dtype: str) -> None:
    """A call that depends on kernels of two streams, and two streams that depend on a call."""
    inputs = [normal(1, 512, 8, 64, dtype=dtype, seed=seed) for seed in range(3)]
    buffers = [torch.empty_like(inputs[0]) for _ in range(4)]
    side = torch.cuda.Stream()

    def attend(q: Any, k: Any, v: Any, out: Any) -> None:
        dlattn.attention(q, k, v, softmax_scale=1.0, kernel=kernel, out=out)

    def chain(pause: Callable[[], object]) -> None:
        left, right, met, x = buffers
        x.copy_(inputs[0])
        for _ in range(3):
            pause()
            main = torch.cuda.current_stream()
            side.wait_stream(main)
            attend(x, inputs[1], inputs[2], left)
            with torch.cuda.stream(side):
                attend(inputs[0], x, inputs[2], right)
            pause()
            main.wait_stream(side)
            attend(left, inputs[1], right, met)
            pause()
            x.copy_(met)

    check_chain(chain, buffers, buffers[3])


@pytest.mark.parametrize("kernel", ["wmma", "sm90"] if HOPPER else ["wmma"])
def test_first_call_of_a_process_within_a_capture(kernel: str) -> None:
    """Questions to CUDA that are asked once per kernel may come while a stream is being
    captured."""
    program = f"""
import torch, dlattn
x = torch.randn(1, 512, 8, 64, device="cuda", dtype=torch.float16)
out = torch.empty_like(x)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    dlattn.attention(x, x, x, kernel="{kernel}", out=out)
    second = dlattn.attention(x, x, out, kernel="{kernel}")
graph.replay()
torch.cuda.synchronize()
want = dlattn.attention(x, x, dlattn.attention(x, x, x, kernel="{kernel}"), kernel="{kernel}")
assert torch.equal(second, want)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_captured_by_cupy() -> None:
    cupy = pytest.importorskip("cupy")
    stream = cupy.cuda.Stream(non_blocking=True)
    random = cupy.random.default_rng(1)
    with stream:
        inputs = [
            (random.standard_normal((1, 512, 8, 64)) + 0.3).astype(cupy.float16) for _ in range(3)
        ]
        ring = [cupy.empty_like(inputs[0]) for _ in range(3)]

        def chain() -> None:
            for link in range(LINKS):
                arguments = list(inputs)
                if link > 0:
                    arguments[link % 3] = ring[(link - 1) % 3]
                dlattn.attention(*arguments, softmax_scale=1.0, out=ring[link % 3])

        chain()
        stream.synchronize()
        want = ring[(LINKS - 1) % 3].copy()
        stream.begin_capture()
        chain()
        graph = stream.end_capture()
        for _ in range(REPETITIONS):
            for buffer in ring:
                buffer.fill(cupy.nan)
            graph.launch(stream)
            stream.synchronize()
            assert cupy.array_equal(ring[(LINKS - 1) % 3], want)
