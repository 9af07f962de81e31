"""Queries, caches of keys and values for them, and the right results, on torch tensors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dlattn.bench import tensors
from dlattn.bench.decode.cases import E4M3, DecodeCase

Tensor = Any
Pair = tuple[Tensor, Tensor]  # K and V

_LARGEST = {"float8_e4m3fn": tensors.LARGEST_FLOAT8, "int8": 127.0}


@dataclass(frozen=True)
class Inputs:
    """The tensors that all calls of a case share, and K and V in as many copies as cold calls read
    in turn."""

    case: DecodeCase
    q: Tensor  # (batch, queries, num_heads, head_dim)
    pairs: tuple[Pair, ...]  # (batch, keys, num_heads_kv, head_dim), or (pages, page_size, ...)
    seqused_k: Tensor  # int32, (batch,)
    page_table: Tensor | None = None  # int32, (batch, pages of the longest), padded with -1
    scales: Pair | None = None  # of 8-bit caches: float32, a number each

    @cached_property
    def rows(self) -> list[Tensor]:
        """Where each sequence's keys are, as rows of K and V without their first dimension."""
        torch = tensors.torch_module()
        device, found = self.q.device, []
        for b, length in enumerate(self.case.lengths):
            j = torch.arange(length, device=device)
            if self.page_table is None:
                found.append(b * self.pairs[0][0].shape[1] + j)
            else:
                page = self.page_table[b].long()[j // self.case.page_size]
                found.append(page * self.case.page_size + j % self.case.page_size)
        return found

    @cached_property
    def packed(self) -> tuple[Pair, ...]:
        """The same keys and values without pages, sequence after sequence."""
        rows = tensors.torch_module().cat(self.rows)
        return tuple((_flat(k)[rows], _flat(v)[rows]) for k, v in self.pairs)

    @cached_property
    def expected(self) -> Expected:
        """The right results, which are the same for every copy."""
        return Expected(self)


@dataclass(frozen=True)
class Caches:
    """The copies that calls read in turn: all, or one, which the L2 cache may then hold."""

    inputs: Inputs
    count: int

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """K and V of each."""
        return self.inputs.pairs[: self.count]

    @property
    def packed(self) -> tuple[Pair, ...]:
        """As `Inputs.packed`."""
        return self.inputs.packed[: self.count]


def draw(case: DecodeCase, dtype: str, device: str, count: int, seed: int = 0) -> Inputs:
    """Normal values with a mean that is not zero, in `count` copies; pages lie in any order."""
    torch = tensors.torch_module()
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*sizes: int) -> Tensor:
        x = torch.empty(sizes, dtype=getattr(torch, dtype), device=device)
        return x.normal_(generator=generator).add_(tensors.OFFSET)

    batch_size, table = len(case.lengths), None
    q = normal(batch_size, case.queries, case.num_heads, case.head_dim)
    rows = (batch_size, max(case.lengths))
    if case.page_size:
        counts = [-(-length // case.page_size) for length in case.lengths]
        rows = (sum(counts), case.page_size)
        order = torch.randperm(rows[0], device=device, generator=generator).int()
        table = torch.full((batch_size, max(counts)), -1, dtype=torch.int32, device=device)
        for b, pages in enumerate(order.split(counts)):
            table[b, : counts[b]] = pages
    elif len(set(case.lengths)) > 1:
        raise ValueError(f"lengths are {case.lengths}; accepted without pages: equal ones")
    used = torch.tensor(case.lengths, dtype=torch.int32, device=device)
    k = normal(*rows, case.num_heads_kv, case.head_dim)
    if case.latent:
        latents = [k, *(k.clone() for _ in range(count - 1))]
        pairs = [(x, x[..., : case.latent]) for x in latents]
        return Inputs(case, q, tuple(pairs), used, table)
    v = normal(*rows, case.num_heads_kv, case.head_dim)
    scales = None
    if case.cache_dtype:
        (k, k_scale), (v, v_scale) = (_quantised(x, case.cache_dtype) for x in (k, v))
        scales = (k_scale, v_scale)
    pairs = [(k, v), *((k.clone(), v.clone()) for _ in range(count - 1))]
    return Inputs(case, q, tuple(pairs), used, table, scales)


def _quantised(x: Tensor, dtype: str) -> tuple[Tensor, Tensor]:
    """In 8 bits by one scale, and the scale."""
    torch = tensors.torch_module()
    scale = x.abs().amax().float() / _LARGEST[dtype]
    narrow = x.float() / scale
    if dtype != E4M3:
        narrow = narrow.round().clamp(-_LARGEST[dtype], _LARGEST[dtype])
    return narrow.to(getattr(torch, dtype)), scale


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, *x.shape[2:])


class Expected:
    """The right values of every sequence and head, by float64, and how far off results may be.

    The query heads of a KV head are rows of one problem, so that no key is copied for each of them.
    """

    def __init__(self, inputs: Inputs) -> None:
        """Compute them."""
        torch = tensors.torch_module()
        case = self._case = inputs.case
        self._sequences = []
        options: dict[str, Any] = {}
        if inputs.scales is not None:
            for name, scale in zip(("k_descale", "v_descale"), inputs.scales, strict=True):
                options[name] = scale.expand(1, case.num_heads_kv)
        narrow = case.cache_dtype == E4M3
        # Not every version of torch takes rows out of float8 tensors.
        k, v = (_flat(x.view(torch.uint8) if narrow else x) for x in inputs.pairs[0])
        for b, rows in enumerate(inputs.rows):
            own = [x[rows].transpose(0, 1)[None].contiguous() for x in (k, v)]
            if narrow:
                own = [x.view(inputs.pairs[0][0].dtype) for x in own]
            if case.queries > 1:
                key = torch.arange(len(rows), device=rows.device)
                query = torch.arange(case.queries, device=rows.device) + len(rows) - case.queries
                seen = key[None] <= query[:, None]
                options["mask"] = seen.repeat(case.num_heads // case.num_heads_kv, 1)[None, None]
            folded = self._folded(inputs.q[b])
            self._sequences.append(tensors.Expected(folded, own[0], own[1], options))

    def errors(self, out: Tensor) -> tuple[float, float]:
        """Largest error, and the largest error in units of its bound."""
        found = [
            expected.errors(self._folded(x))
            for x, expected in zip(out, self._sequences, strict=True)
        ]
        return max(error for error, _ in found), max(ratio for _, ratio in found)

    def _folded(self, x: Tensor) -> Tensor:
        """(queries, num_heads, dim) as (1, num_heads_kv, heads of a KV head · queries, dim)."""
        by_head = x.reshape(x.shape[0], self._case.num_heads_kv, -1, x.shape[2])
        return by_head.permute(1, 2, 0, 3).reshape(1, self._case.num_heads_kv, -1, x.shape[2])
