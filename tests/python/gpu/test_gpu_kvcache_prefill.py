"""Many new queries of each sequence over keys in a cache, by the kernels for prefill: `sm90`, whose
TMA copies page by page, and `wmma`. Memory that no key uses holds NaN."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from arrays import normal
from gpu_checks import DEVICE, captured, torch
from kvcaches import Cache, Problem
from test_gpu_kvcache import MOST, check_offsets_beyond_32_bits, convert, poisoned, run

import dlattn
from dlattn.reference import attention_varlen_reference, max_error

pytestmark = pytest.mark.gpu

KERNELS = ["auto", "sm90:tall", "sm90:short", "wmma:narrow"]


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> Any:
    name = request.param.partition(":")[0]
    if name not in ("auto", *dlattn.info().kernels):
        pytest.skip(f"this build has no kernel {name}")
    probe = Problem(Cache((64,), 64, seqlen_q=64, dtype="float16")).arrays(convert)
    asked = {name.removesuffix("_cache"): value for name, value in probe.items()}
    support = dlattn.supported(**asked, kernel=request.param)
    if not support and ("compute capability" in str(support) or "build" in str(support)):
        pytest.skip(str(support))
    return request.param


def lengths_about(page_size: int, capacity: int) -> tuple[int, ...]:
    return (0, 1, page_size - 1, page_size + 1, capacity - page_size - 3, capacity)


@pytest.mark.parametrize("dtype, layout", [("float16", "bshd"), ("bfloat16", "bhsd")])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("page_size", [8, 16, 24, 64, 128, 256])
def test_pages(page_size: int, dim: int, layout: str, dtype: str, kernel: str) -> None:
    cache = Cache(
        lengths_about(page_size, 520), page_size, 100, head_dim=dim, head_dim_v=dim, dtype=dtype,
        layout=layout, capacity=520,
    )  # fmt: skip
    run(Problem(cache), kernel, causal=True)
    run(Problem(dataclasses.replace(cache, head_dim_v=dim - 16, seqlen_q=150)), kernel)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("chosen", [False, True], ids=["all entries", "chosen entries"])
def test_entries(chosen: bool, dim: int, kernel: str) -> None:
    cache = Cache(
        (0, 1, 170, 333), 0, 150, head_dim=dim, head_dim_v=dim, dtype="bfloat16", chosen=chosen,
        capacity=350,
    )  # fmt: skip
    run(Problem(cache), kernel, causal=True)
    run(Problem(dataclasses.replace(cache, layout="bhsd")), kernel, causal="top_left")


@pytest.mark.parametrize("entry", [-1, MOST])
@pytest.mark.parametrize("page_size", [8, 16, 256])
def test_pages_before_a_window_need_not_be_there(page_size: int, entry: int, kernel: str) -> None:
    for seqlen_q, left in ((40, 33), (130, 7), (200, 0)):
        cache = Cache((0, 9, 50, 410, 700), page_size, seqlen_q, capacity=768, dtype="float16")
        problem = Problem(cache)
        problem.evict(left, entry)
        run(problem, kernel, causal=True, window=(left, None))


@pytest.mark.parametrize("window", [(100, None), (30, 20), (None, 9)])
def test_windows_and_sinks(window: Any, kernel: str) -> None:
    cache = Cache((700, 33, 260), 16, 200, capacity=704, dtype="float16")
    run(Problem(cache), kernel, window=window, sinks=normal(4, seed=8))
    run(Problem(cache), kernel, window=window, causal="top_left" if window[0] else False)


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (8, 1), (32, 8)])
def test_heads(heads: tuple[int, int], kernel: str) -> None:
    for page_size in (0, 32):
        cache = Cache((270, 5), page_size, 130, *heads, capacity=300, dtype="bfloat16")
        run(Problem(cache), kernel, causal=True)


@pytest.mark.parametrize("page_size", [0, 16, 64])
def test_many_work_tiles(page_size: int, kernel: str) -> None:
    """More than a device holds at once: blocks take several, of different lengths."""
    lengths = tuple(97 * i % 200 for i in range(40))
    cache = Cache(lengths, page_size, 130, 16, 4, capacity=200, dtype="float16")
    run(Problem(cache), kernel, causal=True)


@pytest.mark.parametrize("page_size", [1, 7, 48])
def test_odd_pages(page_size: int) -> None:
    """Those that TMA does not take have another kernel."""
    cache = Cache((260, 33), page_size, 120, capacity=300, dtype="float16")
    run(Problem(cache), causal=True)
    if "wmma" in dlattn.info().kernels:
        run(Problem(cache), "wmma", causal=True)
        run(Problem(dataclasses.replace(cache, leftpads=(70, 33))), "wmma", causal=True)


@pytest.mark.parametrize("page_size", [8, 16, 128])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_varlen_queries(layout: str, page_size: int, kernel: str) -> None:
    lengths_q, lengths = (1, 0, 200, 70, 7), (30, 5, 450, 70, 333)
    problem = Problem(Cache(lengths, page_size, layout=layout, capacity=512, dtype="float16"))
    arrays = problem.arrays(convert)
    q = normal(sum(lengths_q), 4, 64, seed=6, dtype="float16")
    if layout == "bhsd":
        q = np.ascontiguousarray(q.swapaxes(0, 1))
    starts = np.cumsum([0, *lengths_q]).astype(np.int32)
    numbers = problem.arrays(lambda x, dtype: x)
    given = [name for name in ("seqused_k", "page_table", "layout") if name in arrays]
    out, lse = dlattn.attention_varlen(
        convert(q, "float16"), arrays["k_cache"], arrays["v_cache"], convert(starts, "int32"),
        None, 200, 512, **{name: arrays[name] for name in given}, causal=True, kernel=kernel,
        return_lse=True,
    )  # fmt: skip
    expected = attention_varlen_reference(
        q, numbers["k_cache"], numbers["v_cache"], starts, None, 200, 512,
        **{name: numbers[name] for name in given}, causal=True,
    )  # fmt: skip
    assert max_error(out.cpu(), expected[0]) < 4e-3
    assert max_error(lse.cpu(), expected[1]) < 1e-3


@pytest.mark.parametrize("page_size", [8, 16, 64, 256])
@pytest.mark.parametrize("dim", [64, 128])
def test_a_pool_that_fills_its_memory(dim: int, page_size: int, kernel: str) -> None:
    """No address before the first page or behind the last one is used, where memory is given back:
    a fault would be seen, and compute-sanitizer sees more."""
    size = 32 * 2**20 // (page_size * 8 * dim * 2)
    problem = Problem(
        Cache((page_size + 5, 2 * page_size), page_size, 70, 8, 8, dim, dim, dtype="float16")
    )
    count = len(problem.buffers[0])
    arrays = problem.arrays(convert)
    table = arrays["page_table"]
    arrays["page_table"] = torch.where(table >= count // 2, table + size - count, table)
    shape = (size, *problem.buffers[0].shape[1:])
    torch.cuda.empty_cache()
    blocks = [torch.full(shape, float("nan"), device=DEVICE, dtype=torch.float16) for _ in range(5)]
    pools = blocks[1::2]
    del blocks
    torch.cuda.empty_cache()  # gives back what lies before, between and behind
    for name, buffer, pool in zip(("k_cache", "v_cache"), problem.buffers, pools, strict=True):
        half = convert(buffer, "float16")
        pool[: count // 2], pool[size - count + count // 2 :] = (
            half[: count // 2],
            half[count // 2 :],
        )
        arrays[name] = pool
    out, lse = dlattn.attention_with_kvcache(**arrays, causal=True, kernel=kernel, return_lse=True)
    torch.cuda.synchronize()
    problem.check(out.cpu(), lse.cpu(), causal=True)


@pytest.mark.parametrize("paged", [True, False], ids=["pages", "entries"])
def test_offsets_beyond_32_bits(paged: bool, kernel: str) -> None:
    check_offsets_beyond_32_bits(paged, kernel)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_pools_that_are_parts_of_one(layout: str, kernel: str) -> None:
    """A page's K is followed by its V, as engines have them: a page begins two pages' rows behind
    the one before."""
    cache = Cache((150, 0, 333), 16, 100, capacity=352, dtype="float16", layout=layout)
    problem = Problem(cache)
    arrays = problem.arrays(convert)
    both = torch.stack([arrays["k_cache"], arrays["v_cache"]], dim=1)
    arrays["k_cache"], arrays["v_cache"] = both.unbind(dim=1)
    out, lse = dlattn.attention_with_kvcache(**arrays, causal=True, kernel=kernel, return_lse=True)
    problem.check(out.cpu(), lse.cpu(), causal=True)


@pytest.mark.parametrize("page_size", [0, 16])
def test_values_that_nobody_could_check(page_size: int, kernel: str) -> None:
    # Whole pages: a length beyond the table is that of the table's pages.
    cache = Cache((64, 0, 30, 304), page_size, 100, dtype="float16", capacity=304)
    problem = Problem(cache)
    arrays = problem.arrays(convert)
    arrays["seqused_k"] = convert(np.array([64, -3, 30, MOST]), "int32")
    out, lse = dlattn.attention_with_kvcache(**arrays, causal=True, kernel=kernel, return_lse=True)
    problem.check(out.cpu(), lse.cpu(), causal=True)
    arrays["seqused_k"] = convert(np.array(cache.lengths), "int32")
    name = "page_table" if page_size else "cache_batch_idx"
    if not page_size:
        arrays[name] = convert(np.arange(4), "int32")
    right = arrays[name]
    want = dlattn.attention_with_kvcache(**arrays, causal=True, kernel=kernel)
    for value in (-(2**31), -1, 10**6, MOST):
        arrays[name] = right.clone()
        arrays[name][2] = value
        got = dlattn.attention_with_kvcache(**arrays, causal=True, kernel=kernel)
        torch.cuda.synchronize()
        assert torch.equal(got[:2], want[:2]) and torch.equal(got[3], want[3])


def test_a_graph_serves_other_lengths_and_tables(kernel: str) -> None:
    """Captured once, replayed with what is written into the same tensors."""
    problems = [
        Problem(Cache(lengths, 16, 90, dtype="float16", capacity=400), seed=i)
        for i, lengths in enumerate([(390, 3, 0, 64), (1, 400, 16, 300), (0, 0, 0, 0)])
    ]
    static = problems[0].arrays(convert)
    pages = 3 + max(len(problem.buffers[0]) for problem in problems)

    def pools(problem: Problem) -> list[Any]:
        made = []
        for buffer in problem.buffers:
            pool = np.full((pages, *buffer.shape[1:]), np.nan, np.float32)
            pool[: len(buffer)] = buffer
            made.append(convert(pool, "float16"))
        return made

    static["k_cache"], static["v_cache"] = pools(problems[0])
    out = poisoned(problems[0])

    def call() -> Any:
        return dlattn.attention_with_kvcache(
            **static, causal=True, kernel=kernel, out=out, return_lse=True
        )

    graph, (_, lse) = captured(call)
    for problem in [*problems, *problems[::-1]]:
        given = problem.arrays(convert)
        given["k_cache"], given["v_cache"] = pools(problem)
        for name, tensor in given.items():
            if name != "layout":
                static[name].copy_(tensor)
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        problem.check(out.cpu(), lse.cpu(), causal=True)


@pytest.mark.parametrize("page_size", [0, 16, 64])
def test_new_keys(page_size: int, kernel: str) -> None:
    """A chunk's keys are appended in the call that attends to them."""
    cache = Cache((150, 0, 333), page_size, 100, capacity=448, dtype="float16")
    counts = np.array(cache.lengths)
    whole = Problem(dataclasses.replace(cache, lengths=tuple(int(n) + 100 for n in counts)))
    k, v = whole.take_out(counts, 100)
    arrays = whole.arrays(convert)
    arrays["seqused_k"] = convert(counts, "int32")
    out, lse = dlattn.attention_with_kvcache(
        **arrays, k=convert(k, "float16"), v=convert(v, "float16"), causal=True, kernel=kernel,
        return_lse=True,
    )  # fmt: skip
    whole.put_back(counts, k, v)
    whole.check(out.cpu(), lse.cpu(), causal=True)


@pytest.mark.parametrize("page_size", [0, 16])
def test_bits_do_not_depend_on_the_batch(page_size: int, kernel: str) -> None:
    lengths = tuple(37 * i % 700 for i in range(16))
    problem = Problem(Cache(lengths, page_size, 70, 8, 2, 128, 128, dtype="float16"))
    arrays = problem.arrays(convert)
    options: dict[str, Any] = {"causal": True, "kernel": kernel}
    if kernel == "auto":
        options["batch_invariant"] = True
    whole = dlattn.attention_with_kvcache(**arrays, **options)
    for b in (1, 7, 15):
        own = dict(arrays)
        for name in ("q", "seqused_k", "page_table"):
            if name in own:
                own[name] = own[name][b : b + 1]
        if not page_size:
            own |= {name: own[name][b : b + 1] for name in ("k_cache", "v_cache")}
        alone = dlattn.attention_with_kvcache(**own, **options)
        assert torch.equal(alone, whole[b : b + 1])


def test_auto_takes_them_for_many_queries() -> None:
    family = "sm90" if torch.cuda.get_device_capability() == (9, 0) else "wmma"
    if family not in dlattn.info().kernels:
        pytest.skip(f"this build has no kernel {family}")
    for seqlen_q, expected in ((1, "decode"), (512, family)):
        problem = Problem(Cache((600,), 64, seqlen_q, 32, 8, 128, 128, dtype="float16"))
        arrays = problem.arrays(convert)
        asked = {name.removesuffix("_cache"): value for name, value in arrays.items()}
        assert dlattn.plan(**asked, causal=True).kernel == expected
