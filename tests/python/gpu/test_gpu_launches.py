"""The kernels that calls launch, counted in captured graphs, are those that their plans list."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import pytest
from gpu_checks import DEVICE, every_kernel, normal, torch

import dlattn

pytestmark = pytest.mark.gpu

KERNEL_NODE = 0  # CU_GRAPH_NODE_TYPE_KERNEL


def kernels_of(graph: Any) -> int:
    """How many kernels a captured graph has."""
    cuda = ctypes.CDLL("libcuda.so.1")
    handle = ctypes.c_void_p(graph.raw_cuda_graph())
    count = ctypes.c_size_t()
    assert cuda.cuGraphGetNodes(handle, None, ctypes.byref(count)) == 0
    nodes = (ctypes.c_void_p * count.value)()
    assert cuda.cuGraphGetNodes(handle, nodes, ctypes.byref(count)) == 0
    kinds = []
    for node in nodes:
        kind = ctypes.c_int(-1)
        assert cuda.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)) == 0
        kinds.append(kind.value)
    return kinds.count(KERNEL_NODE)


def launched(call: Callable[[], object]) -> int:
    """The kernels of a call, which is made once before: that may load code."""
    if not hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph"):
        pytest.skip("torch does not give out its graphs")
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        call()
    return kernels_of(graph)


def inputs(seqlen_q: int, seqlen_k: int, dtype: str = "float16", dim: int = 64) -> list[Any]:
    return [
        normal(2, seqlen, heads, dim, dtype=dtype, seed=seed)
        for seed, (seqlen, heads) in enumerate([(seqlen_q, 4), (seqlen_k, 2), (seqlen_k, 2)])
    ]


@every_kernel
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(300, 200), (1, 5000)])
def test_attention(kernel: str, dtype: str, seqlen_q: int, seqlen_k: int) -> None:
    q, k, v = inputs(seqlen_q, seqlen_k, dtype)
    plan = dlattn.plan(q, k, v, kernel=kernel)
    assert plan.num_launches == len(plan.launches) >= 1
    assert launched(lambda: dlattn.attention(q, k, v, kernel=kernel)) == plan.num_launches


def test_parts_of_the_keys() -> None:
    q, k, v = inputs(1, 20000)
    used = torch.tensor([20000, 19000], dtype=torch.int32, device=DEVICE)
    for num_splits, launches in ((1, 1), (37, 2)):
        options: dict[str, Any] = {"seqused_k": used, "kernel": "decode", "num_splits": num_splits}
        plan = dlattn.plan(q, k, v, **options)
        assert plan.num_launches == launches
        call = functools.partial(dlattn.attention_with_kvcache, q, k, v, **options)
        assert launched(call) == launches


@pytest.mark.parametrize("precision", ["fp8", "int8_fp8", "int8_fp16"])
@pytest.mark.parametrize("stored", [False, True])
def test_precisions(precision: Any, stored: bool) -> None:
    q, k, v = inputs(300, 400)
    support = dlattn.supported(q, k, v, precision=precision)
    if not support:
        pytest.skip(support.reasons[0])
    if stored:
        assert launched(lambda: dlattn.quantize_kv(k, v, precision=precision)) == 1
        k, v = dlattn.quantize_kv(k, v, precision=precision), None
    plan = dlattn.plan(q, k, v, precision=precision)
    assert plan.num_launches == 1 + (precision == "fp8") + (not stored)
    count = launched(lambda: dlattn.attention(q, k, v, precision=precision))
    assert count == plan.num_launches


def test_float8() -> None:
    q, k, v = (x.to(torch.float8_e4m3fn) for x in inputs(300, 400))
    support = dlattn.supported(q, k, v)
    if not support:
        pytest.skip(support.reasons[0])
    assert launched(lambda: dlattn.attention(q, k, v)) == dlattn.plan(q, k, v).num_launches


def test_other_operations() -> None:
    q, k, v = inputs(30, 40)
    out, lse = dlattn.attention(q, k, v, return_lse=True)
    assert launched(lambda: dlattn.merge_states([out, out], [lse, lse])) == 1
    cache = [torch.zeros(2, 100, 2, 64, dtype=torch.float16, device=DEVICE) for _ in range(2)]
    used = torch.tensor([3, 50], dtype=torch.int32, device=DEVICE)
    assert launched(lambda: dlattn.append_kv(k, v, *cache, seqused_k=used)) == 1


def test_an_empty_problem_launches_nothing() -> None:
    q, k, v = inputs(0, 40)
    plan = dlattn.plan(q, k, v)
    assert (plan.num_launches, plan.launches) == (0, ())
