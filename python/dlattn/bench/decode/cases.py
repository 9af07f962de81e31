"""The decoding problems: batches of sequences, the keys of each, and how these lie in memory."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from dlattn.bench.cases import Case
from dlattn.bench.decode import lengths as lists
from dlattn.bench.decode.lengths import Lengths

COLD, WARM = "cold", "warm"
ROTATED = 3  # times the L2 cache: what cold calls read in turn, at least
LEAST_CALLS = 24  # of a graph, between whose replays there is a gap
E4M3, INT8 = "float8_e4m3fn", "int8"
_ITEM_BYTES = {E4M3: 1, INT8: 1, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True)
class DecodeCase:
    """A batch: a few new queries of each sequence over the keys of that sequence in a cache."""

    group: str
    lengths: Lengths
    num_heads: int
    num_heads_kv: int
    head_dim: int
    queries: int = 1
    page_size: int = 0  # 0: no pages
    on_device: bool = False  # lengths are read on the device; with pages they always are
    cache_dtype: str = ""  # "": that of the queries
    name: str = ""  # of the lengths
    latent: int = 0  # columns of V, which are K's first ones, as the same memory; 0: V has its own

    @property
    def what(self) -> str:
        """The difference from other cases of its sizes, in words."""
        parts = [self.name] if self.name else []
        if self.latent:
            parts.append(f"latents, V of {self.latent}")
        if self.queries > 1:
            parts.append(f"{self.queries} queries")
        if self.cache_dtype:
            parts.append(f"{self.cache_dtype} cache")
        if self.page_size:
            parts.append(f"page {self.page_size}")
        elif self.on_device:
            parts.append("lengths on the device")
        return ", ".join(parts) or "1 query"

    @property
    def label(self) -> str:
        """The sizes, with the longest sequence's keys."""
        return self.as_case("", COLD).label

    @property
    def operations(self) -> float:
        """Both products."""
        columns = self.head_dim + (self.latent or self.head_dim)
        return 2.0 * self.num_heads * columns * self.queries * sum(self.lengths)

    def cache_bytes(self, dtype: str) -> int:
        """The bytes of the keys and values that are in use, beside queries of `dtype`."""
        item = _ITEM_BYTES[self.cache_dtype or dtype]
        tensors = 1 if self.latent else 2
        return tensors * sum(self.lengths) * self.num_heads_kv * self.head_dim * item

    def as_case(self, dtype: str, temperature: str) -> Case:
        """As the benchmark's other sets have it."""
        sizes = (len(self.lengths), self.num_heads, max(self.lengths), self.head_dim)
        heads_kv = 0 if self.num_heads_kv == self.num_heads else self.num_heads_kv
        return Case(sizes, True, dtype, heads_kv, f"{self.group}: {self.what}, {temperature}")


def parse_variant(variant: str) -> tuple[str, str, str]:
    """Group, what and temperature of a case that `as_case` made."""
    found = re.fullmatch(rf"(\w+): (.*), ({COLD}|{WARM})", variant)
    if found is None:
        raise ValueError(f"variant is {variant!r}; accepted: GROUP: WHAT, {COLD} or {WARM}")
    return found[1], found[2], found[3]


def buffers(cache_bytes: int, l2_bytes: int) -> int:
    """How many tensors K and V cold calls need, so that all of them are `ROTATED` times the L2."""
    return max(2, math.ceil(ROTATED * l2_bytes / cache_bytes))


def turns(count: int) -> int:
    """How often a graph reads each of so many buffers."""
    return math.ceil(LEAST_CALLS / count)


# The set


@dataclass(frozen=True)
class Scale:
    """How large the problems are."""

    contiguous: tuple[tuple[int, int, int, int, int], ...]  # batch, heads, KV heads, keys, head_dim
    drafts: tuple[tuple[int, int, int, int, int], ...]
    pages: tuple[int, int, int, int, int]
    page_sizes: tuple[int, ...]
    eight_bit: tuple[int, int, int, int, int]
    heads: tuple[int, int, int]  # of sequences of several lengths: heads, KV heads, head_dim
    skewed: str
    mixes: tuple[str, ...]
    batches: tuple[int, ...]  # of traces
    longest: int  # to which traces' lengths are cut
    host: tuple[int, int, int, int, int]
    latents: tuple[tuple[int, int, int, int], ...] = ()  # batch, heads, keys, queries


DRAFTS = 8
LATENT, LATENT_V, LATENT_PAGE = 576, 512, 64  # columns of K and V, keys of a page, as DeepSeek-V3
PAGE = 16  # of sequences of several lengths
SCALES = {
    "cuda": Scale(
        contiguous=(
            (1, 32, 8, 1024, 128),
            (1, 32, 8, 8192, 128),
            (1, 32, 8, 131072, 128),
            (8, 32, 8, 4096, 128),
            (16, 32, 8, 8192, 128),
            (64, 32, 8, 4096, 128),
            (16, 32, 32, 4096, 128),
            (1, 8, 8, 512, 64),
            (1, 32, 8, 8192, 64),
            (4, 16, 4, 4096, 256),
        ),
        drafts=((8, 32, 8, 4096, 128),),
        pages=(8, 32, 8, 4096, 128),
        page_sizes=(256, 16, 1),
        eight_bit=(8, 32, 8, 32768, 128),
        latents=(
            (1, 16, 8192, 1),
            (1, 16, 131072, 1),
            (8, 8, 8192, 1),
            (8, 16, 8192, 1),
            (64, 16, 4096, 1),
            (64, 32, 4096, 1),
            (64, 64, 4096, 1),
            (64, 128, 4096, 1),
            (64, 16, 4096, 2),
        ),
        heads=(32, 8, 128),
        skewed="31x4k+1x128k",
        mixes=(
            "64x512",
            "64x4k",
            "32x128+32x4k",
            "1x16k+15x64",
            "1x64k+7x4k",
            "1x64k+15x4k",
            "1x64k+31x4k",
            "1x128k+31x4k",
            "2x32k+30x4k",
        ),
        batches=lists.BATCHES,
        longest=1 << 20,
        host=(1, 32, 8, 1024, 128),
    ),
    "cpu": Scale(
        contiguous=((1, 4, 2, 96, 16), (2, 2, 2, 40, 16)),
        drafts=((2, 4, 2, 64, 16),),
        pages=(2, 4, 2, 64, 16),
        page_sizes=(16, 1),
        eight_bit=(2, 4, 2, 64, 16),
        latents=((2, 4, 40, 1),),
        heads=(4, 2, 16),
        skewed="3x16+1x200",
        mixes=("2x32+2x100",),
        batches=(1, 4),
        longest=300,
        host=(1, 1, 1, 16, 64),
    ),
}


def _even(group: str, sizes: tuple[int, int, int, int, int], queries: int = 1) -> DecodeCase:
    batch_size, num_heads, num_heads_kv, keys, head_dim = sizes
    return DecodeCase(group, batch_size * (keys,), num_heads, num_heads_kv, head_dim, queries)


def turn_groups(scale: Scale) -> Iterator[tuple[DecodeCase, ...]]:
    """All of a scale. Those of one tuple take turns, and the first is what others measure by."""
    for sizes in scale.contiguous:
        yield (_even("contiguous", sizes),)
    for sizes in scale.drafts:
        yield (_even("drafts", sizes, DRAFTS),)
    yield on_device(_even("pages", scale.pages), pages=scale.page_sizes)
    yield on_device(_even("eight_bit", scale.eight_bit), cache_dtypes=(E4M3, INT8))
    yield (_uneven("skewed", scale, lists.parse(scale.skewed), scale.skewed),)
    for text in scale.mixes:
        yield (_uneven("mixes", scale, lists.parse(text), text),)
    for trace in lists.TRACES:
        for batch_size in scale.batches:
            chosen = tuple(min(n, scale.longest) for n in trace.lengths[:batch_size])
            yield (_uneven("traces", scale, chosen, f"{trace.name}, batch of {batch_size}"),)
    for batch_size, heads, keys, queries in scale.latents:
        case = _even("latents", (batch_size, heads, 1, keys, LATENT), queries)
        yield (replace(case, latent=LATENT_V, page_size=LATENT_PAGE),)


def on_device(
    case: DecodeCase, pages: tuple[int, ...] = (), cache_dtypes: tuple[str, ...] = ()
) -> tuple[DecodeCase, ...]:
    """The case with lengths on the device, and the same in pages or in other dtypes."""
    base = replace(case, on_device=True)
    return (
        base,
        *(replace(base, page_size=size) for size in pages),
        *(replace(base, cache_dtype=dtype) for dtype in cache_dtypes),
    )


def host_cases(scale: Scale) -> tuple[DecodeCase, ...]:
    """The cases whose host time is measured: without lengths, with them, in pages."""
    case = _even("host", scale.host)
    return (case, *on_device(case, pages=(PAGE,)))


def _uneven(group: str, scale: Scale, lengths: Lengths, name: str) -> DecodeCase:
    num_heads, num_heads_kv, head_dim = scale.heads
    return DecodeCase(group, lengths, num_heads, num_heads_kv, head_dim, page_size=PAGE, name=name)
