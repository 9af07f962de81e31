"""batch_invariant=True with lengths that would have other kernels otherwise: few rows in a pack
with many, windows, caches, split_size. The plans: tests/cpp/plan_invariance_test.cpp."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import pytest

import dlattn

torch = pytest.importorskip("torch")

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
INPUTS = [
    ("cpu", "float16", 64),
    *(
        pytest.param("cuda", dtype, head_dim, marks=pytest.mark.gpu)
        for dtype in ("float16", "bfloat16")
        for head_dim in (64, 90, 128)
    ),
]
# Queries and keys of each sequence.
LENGTHS = [(1, 300), (17, 17), (300, 511), (511, 300), (64, 1024), (130, 129)]
WINDOW: dict[str, Any] = {"window": (70, 5)}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": WINDOW,
    "causal window": {"causal": True, "window": (70, None)},
    "top left": {"causal": "top_left"},
    "softcap": {"softcap": 9.0},
    "softcap and window": {"softcap": 9.0, **WINDOW},
    "slopes and window": {"alibi_slopes": 8, **WINDOW},
    "sinks and window": {"sinks": 8, **WINDOW},
    "all": {"softcap": 9.0, "alibi_slopes": 8, "sinks": 8, "causal": True, **WINDOW},
    "fp8": {"precision": "fp8", "causal": True},
    "int8_fp8": {"precision": "int8_fp8", **WINDOW},
}
Random = Callable[..., Any]


def random_on(device: str, dtype: str = "float32", seed: int = 5) -> Random:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, kind: str = dtype) -> Any:
        x = torch.randn(*shape, generator=generator) + 0.25
        return x.to(device, getattr(torch, kind))

    return random


def options_of(feature: str, random: Random) -> dict[str, Any]:
    """With tensors of so many heads where a number stands for one."""
    options = dict(FEATURES[feature])
    for name in {"alibi_slopes", "sinks"} & set(options):
        options[name] = random(options[name], kind="float32").abs()
    return {**options, "return_lse": True}


def starts(lengths: Sequence[int], device: str) -> Any:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def same(got: Any, expected: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))


def attend_pack(q: Any, k: Any, v: Any, lengths: Sequence[tuple[int, int]], **options: Any) -> Any:
    """attention_varlen of sequences that have these lengths."""
    of_q, of_k = zip(*lengths, strict=True)
    cu = (starts(x, str(q.device)) for x in (of_q, of_k))
    return dlattn.attention_varlen(q, k, v, *cu, max(of_q), max(of_k), **options)


@pytest.mark.parametrize(("device", "dtype", "head_dim"), INPUTS)
@pytest.mark.parametrize("feature", FEATURES)
def test_alone_in_a_batch_and_in_a_pack(
    feature: str, head_dim: int, dtype: str, device: str
) -> None:
    random = random_on(device, dtype)
    options = {**options_of(feature, random), "batch_invariant": True}
    of_q, of_k = zip(*LENGTHS, strict=True)
    q = random(sum(of_q), 8, head_dim)
    k, v = random(sum(of_k), 2, head_dim), random(sum(of_k), 2, head_dim)
    asked = {name: x for name, x in options.items() if name != "return_lse"}
    support = dlattn.supported(q[None], k[None], v[None], **asked)
    if not support and "precision" in options:
        pytest.skip(str(support))
    packed, packed_lse = attend_pack(q, k, v, LENGTHS, **options)
    assert packed.isfinite().all()
    row = key = 0
    for length_q, length_k in LENGTHS:
        rows, keys = slice(row, row + length_q), slice(key, key + length_k)
        row, key = rows.stop, keys.stop
        own = (q[rows], k[keys], v[keys])
        expected = (packed[rows], packed_lse[:, rows])
        assert same(attend_pack(*own, [(length_q, length_k)], **options), expected)
        alone = dlattn.attention(*(x[None] for x in own), **options)
        assert same((x[0] for x in alone), expected)
        batch = (torch.stack([x.flip(0), x, x * 0.5]) for x in own)
        assert same((x[1] for x in dlattn.attention(*batch, **options)), expected)


CACHED = (5, 300, 1024, 1025, 3000)  # keys of each sequence
PAGE_SIZE = 16
CACHE_FEATURES = [x for x in FEATURES if "8" not in x]
# split_size alone promises as much.
with_promises = pytest.mark.parametrize(
    "asked",
    [{"batch_invariant": True}, {"split_size": 256}, {"batch_invariant": True, "split_size": 256}],
    ids=["batch_invariant", "split_size", "both"],
)


@pytest.mark.parametrize("device", DEVICES)
@with_promises
@pytest.mark.parametrize("feature", CACHE_FEATURES)
def test_pages_of_a_cache(feature: str, asked: dict[str, Any], device: str) -> None:
    random = random_on(device, "bfloat16")
    options = {**options_of(feature, random), **asked}
    columns = -(-max(CACHED) // PAGE_SIZE)
    pages = len(CACHED) * columns
    k, v = random(pages, PAGE_SIZE, 2, 64), random(pages, PAGE_SIZE, 2, 64)
    table = torch.randperm(pages, generator=torch.Generator().manual_seed(3))
    table = table.reshape(len(CACHED), columns).to(device, torch.int32)
    used = torch.tensor(CACHED, dtype=torch.int32, device=device)
    for queries in (1, 5, 40) if device == "cuda" else (3,):
        q = random(len(CACHED), queries, 8, 64)
        cache: dict[str, Any] = {"seqused_k": used, "page_table": table}
        whole = dlattn.attention_with_kvcache(q, k, v, **cache, **options)
        for b, length in enumerate(CACHED):
            room = -(-length // PAGE_SIZE)
            cache = {"seqused_k": used[b : b + 1], "page_table": table[b : b + 1, :room]}
            one = dlattn.attention_with_kvcache(q[b : b + 1], k, v, **cache, **options)
            assert same(one, (x[b : b + 1] for x in whole))
    # Queries of variable length.
    lengths = (1, 5, 40, 1, 17)
    q = random(sum(lengths), 8, 64)
    cache = {"seqused_k": used, "page_table": table}
    packed = dlattn.attention_varlen(
        q, k, v, starts(lengths, device), None, max(lengths), max(CACHED), **cache, **options
    )
    row = 0
    for b, length in enumerate(lengths):
        rows = slice(row, row + length)
        row = rows.stop
        cache = {"seqused_k": used[b : b + 1], "page_table": table[b : b + 1]}
        one = dlattn.attention_varlen(
            q[rows], k, v, starts([length], device), None, length, CACHED[b], **cache, **options
        )
        assert same(one, (packed[0][rows], packed[1][:, rows]))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("feature", CACHE_FEATURES)
def test_parts_of_keys_that_are_in_no_cache(
    feature: str, batch_invariant: bool, device: str
) -> None:
    """Split as asked, whatever the number of rows is."""
    random = random_on(device, "float16")
    options = {**options_of(feature, random), "split_size": 128}
    options["batch_invariant"] = batch_invariant
    of_q, of_k = zip(*LENGTHS, strict=True)
    q, k, v = random(sum(of_q), 8, 64), random(sum(of_k), 2, 64), random(sum(of_k), 2, 64)
    packed, packed_lse = attend_pack(q, k, v, LENGTHS, **options)
    row = key = 0
    for length_q, length_k in LENGTHS:
        rows, keys = slice(row, row + length_q), slice(key, key + length_k)
        row, key = rows.stop, keys.stop
        one = attend_pack(q[rows], k[keys], v[keys], [(length_q, length_k)], **options)
        assert same(one, (packed[rows], packed_lse[:, rows]))


@pytest.mark.gpu
def test_beyond_the_limits_of_the_kernel() -> None:
    random = random_on("cuda", "float16")
    q, k = random(1, 9, 2, 64), random(1, 131_073, 2, 64)
    assert dlattn.supported(q, k, k)
    with pytest.raises(
        dlattn.UnsupportedError,
        match="seqlen_k is 131073; accepted: up to 131072; with batch_invariant no other kernel",
    ):
        dlattn.attention(q, k, k, batch_invariant=True)
    general: dict[str, Any] = {"kernel": "wmma:general", "batch_invariant": True}
    out = dlattn.attention(q, k, k, **general)
    cu_q, cu_k = (starts([x], "cuda") for x in (9, 131_073))
    packed = dlattn.attention_varlen(q[0], k[0], k[0], cu_q, cu_k, 9, 131_073, **general)
    assert torch.equal(packed, out[0])
