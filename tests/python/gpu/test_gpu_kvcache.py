"""Attention over keys in a cache on a GPU: test_kvcache.py's cases on torch's tensors, CUDA graphs,
memory at its end and beyond 2^32 elements, and values that only the device can see."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from arrays import normal
from gpu_checks import DEVICE, HALF, captured, torch
from kvcaches import FEATURES, PAGES, Cache, Problem, draft_tree, lengths_about

import dlattn
from dlattn.reference import attention_varlen_reference, max_error

pytestmark = pytest.mark.gpu

KERNELS = ["auto", "decode", "decode:rows16", "decode:rows32"]
LEAST, MOST = -(2**31), 2**31 - 1


def convert(values: Any, dtype: str) -> Any:
    return torch.from_numpy(np.ascontiguousarray(values)).to(DEVICE, getattr(torch, dtype))


def poisoned(problem: Problem) -> Any:
    shape = (*problem.q.shape[:3], problem.cache.head_dim_v)
    return convert(np.full(shape, np.nan, np.float32), problem.cache.dtype)


def on_device(options: dict[str, Any]) -> dict[str, Any]:
    return {
        name: convert(value, str(value.dtype)) if isinstance(value, np.ndarray) else value
        for name, value in options.items()
    }


def run(problem: Problem, kernel: str = "auto", **options: Any) -> Any:
    """Compute with poisoned memory for out, and check it. Returns (out, lse)."""
    arrays = {**problem.arrays(convert), **on_device(options)}
    asked = {name.removesuffix("_cache"): value for name, value in arrays.items()}
    support = dlattn.supported(**asked, kernel=kernel)
    if "has no instance" in str(support):
        pytest.skip(str(support))  # not every head_dim has each tile
    assert support, support
    got = dlattn.attention_with_kvcache(
        **arrays, kernel=kernel, out=poisoned(problem), return_lse=True
    )
    problem.check(*(x.cpu() for x in got), **options)
    return got


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> Any:
    name = request.param.partition(":")[0]
    if name not in ("auto", *dlattn.info().kernels):
        pytest.skip(f"this build has no kernel {name}")
    return request.param


@pytest.mark.parametrize("entry", [-1, MOST])
@pytest.mark.parametrize("page_size", [1, 3, 16, 256])
def test_pages_before_a_window_need_not_be_there(page_size: int, entry: int, kernel: str) -> None:
    """Tiles of keys begin before windows, with entries that are no pages within the first one."""
    for seqlen_q, left in ((1, 20), (3, 7), (8, 0), (40, 33)):
        cache = Cache((0, 9, 50, 210, 900), page_size, seqlen_q, capacity=1024, dtype="float16")
        problem = Problem(cache)
        problem.evict(left, entry)
        assert (problem.told_table[4] == entry).any()
        run(problem, kernel, causal=True, window=(left, None))
        run(problem, kernel, causal=True, window=(left, None), softcap=2.0)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("page_size", PAGES)
def test_pages(page_size: int, layout: str, dtype: str, kernel: str) -> None:
    capacity = PAGES[page_size]
    cache = Cache(lengths_about(page_size, capacity), page_size, dtype=dtype, layout=layout)
    run(Problem(cache), kernel, causal=True)
    run(Problem(dataclasses.replace(cache, one_row=True, head_dim_v=32, seqlen_q=3)), kernel)
    run(Problem(dataclasses.replace(cache, lengths=(capacity,))), kernel, causal=True)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("chosen", [False, True], ids=["all entries", "chosen entries"])
def test_entries(chosen: bool, layout: str, dtype: str, kernel: str) -> None:
    cache = Cache((0, 1, 70, 33), capacity=100, chosen=chosen, dtype=dtype, layout=layout)
    run(Problem(cache), kernel, causal=True)
    run(Problem(dataclasses.replace(cache, one_row=True, seqlen_q=3)), kernel, causal=True)


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (8, 1), (32, 1)])
@pytest.mark.parametrize("seqlen_q", [1, 3, 8, 20])
@pytest.mark.parametrize("page_size", [0, 3, 16])
def test_queries_and_heads(
    page_size: int, seqlen_q: int, heads: tuple[int, int], kernel: str
) -> None:
    cache = Cache((0, 5, 16, 45), page_size, seqlen_q, *heads, capacity=60, dtype="float16")
    run(Problem(cache), kernel, causal=True)


@pytest.mark.parametrize("dim", [32, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("page_size", [0, 1, 16])
def test_head_dims(page_size: int, dim: int, kernel: str) -> None:
    cache = Cache((40, 7, 300), page_size, head_dim=dim, head_dim_v=dim, dtype="bfloat16")
    run(Problem(cache), kernel, causal=True)
    run(Problem(dataclasses.replace(cache, head_dim_v=dim - 8, seqlen_q=3)), kernel, causal=True)


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("page_size", [0, 1, 16])
@pytest.mark.parametrize("leftpad", [False, True], ids=["", "leftpad"])
def test_features(leftpad: bool, page_size: int, feature: str, kernel: str) -> None:
    cache = Cache((0, 9, 50, 33), page_size, seqlen_q=3, capacity=64, dtype="float16")
    if leftpad:
        cache = dataclasses.replace(cache, leftpads=(0, 4, 17, 33))
    sinks, slopes = normal(4, seed=8), normal(4, 4, seed=9) ** 2
    options = {"causal": True, **FEATURES[feature]}
    run(Problem(cache), kernel, **options)
    run(Problem(cache), kernel, **options, sinks=sinks)
    run(Problem(cache), kernel, **options, sinks=sinks, alibi_slopes=slopes)


@pytest.mark.parametrize("page_size", [0, 3, 16])
def test_draft_trees(page_size: int, kernel: str) -> None:
    problem = Problem(Cache((8, 21, 50), page_size, seqlen_q=8, capacity=64, dtype="float16"))
    run(problem, kernel, mask=draft_tree(problem), max_seqlen_k=64)
    of_all = normal(1, 4, 8, 64, seed=3) > 0.0
    run(problem, kernel, mask=of_all, causal=True, max_seqlen_k=64)


@pytest.mark.parametrize("lengths", [(9000,), (1, 3000, 0, 700), (100,) * 40])
@pytest.mark.parametrize("page_size", [0, 16])
def test_many_keys(page_size: int, lengths: tuple[int, ...], kernel: str) -> None:
    """Splits of the keys, and lengths that differ."""
    cache = Cache(
        lengths, page_size, num_heads=8, num_heads_kv=2, head_dim=128, head_dim_v=128,
        dtype="bfloat16", capacity=10_000,
    )  # fmt: skip
    run(Problem(cache), kernel, causal=True)


@pytest.mark.parametrize("page_size", [0, 1, 16])
def test_bits_do_not_depend_on_the_batch(page_size: int, kernel: str) -> None:
    lengths = tuple(37 * i % 1500 for i in range(64))
    problem = Problem(
        Cache(lengths, page_size, num_heads=8, head_dim=128, head_dim_v=128, dtype="float16")
    )
    arrays = problem.arrays(convert)
    options: dict[str, Any] = {"causal": True, "kernel": kernel, "batch_invariant": True}
    whole = dlattn.attention_with_kvcache(**arrays, **options)
    again = dlattn.attention_with_kvcache(**arrays, **options)
    assert torch.equal(whole, again)
    for b in (1, 40, 63):
        own = dict(arrays)
        for name in ("q", "seqused_k", "page_table"):
            if name in own:
                own[name] = own[name][b : b + 1]
        if not page_size:
            own |= {name: own[name][b : b + 1] for name in ("k_cache", "v_cache")}
        alone = dlattn.attention_with_kvcache(**own, **options)
        assert torch.equal(alone, whole[b : b + 1])


def pooled(problem: Problem, pages: int) -> list[Any]:
    """The caches within pools of so many pages, NaN elsewhere."""
    pools = []
    for buffer in problem.buffers:
        pool = np.full((pages, *buffer.shape[1:]), np.nan, np.float32)
        pool[: len(buffer)] = buffer
        pools.append(convert(pool, problem.cache.dtype))
    return pools


def test_a_graph_serves_other_lengths_and_tables(kernel: str) -> None:
    """Captured once, replayed with what is written into the same tensors."""
    capacity, pages = 1000, 400
    cases = [(900, 3, 0, 64), (1, 1000, 16, 700), (0, 0, 0, 0), (17, 16, 15, 1000)]
    problems = [
        Problem(Cache(lengths, 16, seqlen_q=2, dtype="float16", capacity=capacity), seed=i)
        for i, lengths in enumerate(cases)
    ]
    first = problems[0]
    static = first.arrays(convert)
    static["k_cache"], static["v_cache"] = pooled(first, pages)
    out = poisoned(first)

    def call() -> Any:
        return dlattn.attention_with_kvcache(
            **static, causal=True, kernel=kernel, out=out, return_lse=True
        )

    graph, (_, lse) = captured(call)
    for problem in [*problems, *problems[::-1]]:
        given = problem.arrays(convert)
        given["k_cache"], given["v_cache"] = pooled(problem, pages)
        for name, tensor in given.items():
            if name != "layout":
                static[name].copy_(tensor)
        out.fill_(float("nan"))
        lse.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        problem.check(out.cpu(), lse.cpu(), causal=True)


def test_a_pool_that_ends_where_its_memory_ends(kernel: str) -> None:
    """Nothing behind the last page is read: compute-sanitizer sees it, and here a fault would."""
    pages = 640  # of 16 keys, 8 heads and 128 elements: 20 MiB, which are an allocation of its own
    problem = Problem(
        Cache((33, 5), 16, num_heads=8, num_heads_kv=8, head_dim=128, head_dim_v=128,
              dtype="float16")
    )  # fmt: skip
    shift = pages - len(problem.buffers[0])
    arrays = problem.arrays(convert)
    torch.cuda.empty_cache()
    for name, buffer in zip(("k_cache", "v_cache"), problem.buffers, strict=True):
        pool = torch.full(
            (pages, *buffer.shape[1:]), float("nan"), device=DEVICE, dtype=torch.float16
        )
        pool[shift:] = convert(buffer, "float16")
        arrays[name] = pool
    table = arrays["page_table"]
    arrays["page_table"] = torch.where(table >= 0, table + shift, table)
    out, lse = dlattn.attention_with_kvcache(**arrays, causal=True, kernel=kernel, return_lse=True)
    torch.cuda.synchronize()
    problem.check(out.cpu(), lse.cpu(), causal=True)


def check_offsets_beyond_32_bits(paged: bool, kernel: str) -> None:
    """Pages, or entries, 2^30 elements apart."""
    apart, count = 2**30, 5
    if torch.cuda.mem_get_info()[0] < 10 * 2**30:
        pytest.skip("needs 10 GiB of the GPU's memory")
    rows = 16 if paged else 50
    lengths = (50,) if paged else (50, 0, 9, 1, 44)
    problem = Problem(Cache(lengths, 16 if paged else 0, dtype="float16"))
    arrays = problem.arrays(convert)
    memory = torch.empty(apart * (count - 1) + 2**20, dtype=torch.float16, device=DEVICE)
    pools = []
    for offset, buffer in zip((0, 2**19), problem.buffers, strict=True):
        pool = memory[offset:].as_strided((count, rows, 2, 64), (apart, 128, 64, 1))
        pool.fill_(float("nan"))
        if not paged:
            pool.copy_(convert(buffer, "float16"))
        pools.append(pool)
    if paged:  # the four pages of the sequence, the last one of the pool first
        for i in range(4):
            for pool, buffer in zip(pools, problem.buffers, strict=True):
                pool[count - 1 - i] = convert(buffer[problem.page_table[0, i]], "float16")
        arrays["page_table"] = convert(np.array([[4, 3, 2, 1]]), "int32")
    arrays["k_cache"], arrays["v_cache"] = pools
    out, lse = dlattn.attention_with_kvcache(**arrays, causal=True, kernel=kernel, return_lse=True)
    problem.check(out.cpu(), lse.cpu(), causal=True)


@pytest.mark.parametrize("paged", [True, False], ids=["pages", "entries"])
def test_offsets_beyond_32_bits(paged: bool, kernel: str) -> None:
    check_offsets_beyond_32_bits(paged, kernel)


@pytest.mark.parametrize("page_size", [0, 16])
def test_values_that_nobody_could_check(page_size: int, kernel: str) -> None:
    """Lengths count as those that there is room for; other sequences are right beside them."""
    cache = Cache(
        (64, 0, 30, 64), page_size, dtype="float16", capacity=64, chosen=not page_size,
        leftpads=(0, 0, 30, 5),
    )  # fmt: skip
    problem = Problem(cache)
    arrays = problem.arrays(convert)
    arrays["seqused_k"] = convert(np.array([65, -3, 30, MOST]), "int32")
    arrays["leftpad_k"] = convert(np.array([LEAST, 5, MOST, 5]), "int32")
    out, lse = dlattn.attention_with_kvcache(**arrays, causal=True, kernel=kernel, return_lse=True)
    problem.check(out.cpu(), lse.cpu(), causal=True)


def test_pages_and_entries_that_there_are_not(kernel: str) -> None:
    """They count as some that there are: the GPU's context lives on, and the others are right."""
    for page_size in (0, 16):
        problem = Problem(Cache((50, 40, 20), page_size, dtype="float16", chosen=not page_size))
        arrays = problem.arrays(convert)
        name = "page_table" if page_size else "cache_batch_idx"
        right = arrays[name]
        for value in (LEAST, -1, 10**6, MOST):
            arrays[name] = right.clone()
            arrays[name][1] = value
            out = dlattn.attention_with_kvcache(**arrays, causal=True, kernel=kernel)
            torch.cuda.synchronize()
            arrays[name] = right
            want = dlattn.attention_with_kvcache(**arrays, causal=True, kernel=kernel)
            assert torch.equal(out[::2], want[::2])


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize(
    ("lengths_q", "lengths", "dim"),
    [
        ((1, 0, 20, 1, 7), (30, 5, 45, 1, 7), 64),
        ((2,), (58,), 64),  # an only sequence
        ((8,), (61,), 128),
    ],
)
def test_varlen_queries(
    lengths_q: tuple[int, ...],
    lengths: tuple[int, ...],
    dim: int,
    layout: str,
    page_size: int,
    kernel: str,
) -> None:
    cache = Cache(lengths, page_size, head_dim=dim, head_dim_v=dim, layout=layout, capacity=64)
    problem = Problem(dataclasses.replace(cache, dtype="float16"))
    arrays = problem.arrays(convert)
    q = normal(sum(lengths_q), 4, dim, seed=6, dtype="float16")
    if layout == "bhsd":
        q = np.ascontiguousarray(q.swapaxes(0, 1))
    starts = np.cumsum([0, *lengths_q]).astype(np.int32)
    numbers = problem.arrays(lambda x, dtype: x)
    given = ("seqused_k", "page_table", "layout")
    out, lse = dlattn.attention_varlen(
        convert(q, "float16"), arrays["k_cache"], arrays["v_cache"], convert(starts, "int32"),
        None, 20, 64, **{name: arrays[name] for name in given}, causal=True, kernel=kernel,
        return_lse=True,
    )  # fmt: skip
    expected = attention_varlen_reference(
        q, numbers["k_cache"], numbers["v_cache"], starts, None, 20, 64,
        **{name: numbers[name] for name in given}, causal=True,
    )  # fmt: skip
    assert max_error(out.cpu(), expected[0]) < 4e-3
    assert max_error(lse.cpu(), expected[1]) < 1e-3


@pytest.mark.parametrize("dtype", HALF)
def test_tokens_of_one_graph(dtype: str) -> None:
    """Each replay appends a token to every sequence, attends to all, and counts it."""
    counts, steps = (0, 15, 100), 20
    lengths = tuple(n + steps for n in counts)
    problem = Problem(Cache(lengths, 16, head_dim=128, head_dim_v=128, dtype=dtype))
    numbers = problem.arrays(lambda x, dtype: x)
    caches = [convert(numbers[name], dtype) for name in ("k_cache", "v_cache")]
    token = [torch.zeros(3, 1, 2, 128, device=DEVICE, dtype=caches[0].dtype) for _ in range(2)]
    q = convert(problem.q, dtype)
    table, used = convert(problem.page_table, "int32"), convert(np.array(counts), "int32")

    def step() -> Any:
        result = dlattn.flash_attn.flash_attn_with_kvcache(
            q, *caches, *token, cache_seqlens=used, block_table=table, causal=True,
            return_softmax_lse=True,
        )  # fmt: skip
        used.add_(1)
        return result

    graph, (out, lse) = captured(step)
    for pool in caches:
        pool[:] = float("nan")
    for b, count in enumerate(counts):
        for j in range(count):
            for pool, name in zip(caches, ("k_cache", "v_cache"), strict=True):
                pool[problem.row(b, j)] = convert(numbers[name][problem.row(b, j)], dtype)
    used.copy_(convert(np.array(counts), "int32"))
    for i in range(steps):
        for new, name in zip(token, ("k_cache", "v_cache"), strict=True):
            rows = [numbers[name][problem.row(b, count + i)] for b, count in enumerate(counts)]
            new[:, 0] = convert(np.stack(rows), dtype)
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        problem.seqused_k = np.array([count + i + 1 for count in counts], np.int32)
        problem.check(out.cpu(), lse.cpu(), causal=True)
    assert used.tolist() == list(lengths)


def test_page_table_from_csr_can_be_captured() -> None:
    indptr, indices, last = (
        convert(np.array(x), "int32") for x in ([0, 2, 2, 5], [7, 1, 4, 0, 2], [3, 16, 16])
    )
    graph = torch.cuda.CUDAGraph()
    dlattn.page_table_from_csr(indptr, indices, last, page_size=16, max_pages=4)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        table, used = dlattn.page_table_from_csr(indptr, indices, last, page_size=16, max_pages=4)
    last.fill_(2)
    graph.replay()
    torch.cuda.synchronize()
    assert used.tolist() == [18, 0, 34]
    assert table.tolist() == [[7, 1, -1, -1], [-1, -1, -1, -1], [4, 0, 2, -1]]


def test_page_table_from_csr_reads_a_gpu_only_where_it_must() -> None:
    lists = [np.array(x) for x in ([0, 2, 2, 5], [7, 1, 4, 0, 2], [3, 16, 17])]
    indptr, indices, last = (convert(x, "int32") for x in lists)
    with pytest.raises(dlattn.UnsupportedError, match=r"last_page_len\[2\] is 17; accepted: 1 to"):
        dlattn.page_table_from_csr(indptr, indices, last, page_size=16)
    with pytest.raises(dlattn.UnsupportedError, match="indices is on cpu, and indptr on cuda:0"):
        dlattn.page_table_from_csr(indptr, indices.cpu(), last, page_size=16)
    torch.cuda.set_sync_debug_mode("error")
    try:
        used = dlattn.page_table_from_csr(indptr, indices, last, page_size=16, max_pages=3)[1]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert used.tolist() == [19, 0, 49]
