"""How torch.vmap maps the operators: what is mapped joins the batch of one call.

Each rule gets the number of mappings, the mapped dimension of each argument (None: it is not
mapped) and the arguments, by name, and returns the results and their mapped dimensions. What is not
mapped is not repeated where the operator can read it as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import pad

import dlattn
from dlattn import _core

Arguments = dict[str, Any]

# The operators' optional tensors that broadcast to dimensions of which the batch is the first.
_RANKS = {
    name: len(dims)
    for name, dims, takers in _core.operands["forward"]
    if "torch" in takers and dims.startswith("b")
}
_MOST_ROWS = 2**31 - 1  # cu_seqlens are int32


def attention(count: int, dims: Arguments, given: Arguments) -> Any:
    _refuse_sinks(dims)
    for name in ("q", "k", "v"):
        given[name] = _first(given[name], dims[name], count).flatten(0, 1)
    batch = given["q"].shape[0] // count
    for name, rank in _RANKS.items():
        given[name] = _of_batch(given[name], dims[name], count, batch, rank)
    out, lse = torch.ops.dlattn.attention(**given)
    return tuple(x.unflatten(0, (count, batch)) for x in (out, lse)), (0, 0)


def attention_varlen(count: int, dims: Arguments, given: Arguments) -> Any:
    """Join the varlen batches into one. Rows of no sequence, as those at the end of a batch and the
    start of the next may be, become a sequence in between, whose results nobody reads."""
    _refuse_sinks(dims)
    rows = 1 if given["bhsd"] else 0  # the dimension of a batch's rows
    totals = {}
    for name in ("q", "k", "v"):
        x = _first(given[name], dims[name], count).movedim(0, rows)
        totals[name] = x.shape[rows + 1]
        given[name] = x.flatten(rows, rows + 1)
    batch = 0
    for name in ("q", "k"):
        total, starts = totals[name], f"cu_seqlens_{name}"
        if count * total > _MOST_ROWS:
            raise dlattn.UnsupportedError(
                f"{name}: vmap makes one varlen batch of {count} with {total} rows each; accepted: "
                f"{_MOST_ROWS} rows in all"
            )
        each = _first(given[starts], dims[starts], count)
        batch = each.shape[1] - 1
        given[starts] = (each + _offsets(each, total)[:, None]).flatten()
    if given["seqused_k"] is not None:
        used = _first(given["seqused_k"], dims["seqused_k"], count)
        given["seqused_k"] = pad(used, (0, 1)).flatten()[:-1]
    for name, rank in _RANKS.items():
        given[name] = _of_batch(given[name], dims[name], count, batch, rank, gaps=True)
    if given["q"].device.type == "cpu" and given["bias"] is None and given["mask"] is None:
        # The CPU refuses what is longer, the sequences in between as well.
        for name in ("q", "k"):
            longest = torch.sym_max(given[f"max_seqlen_{name}"], 2 * totals[name])
            given[f"max_seqlen_{name}"] = torch.sym_min(longest, _MOST_ROWS)
    out, lse = torch.ops.dlattn.attention_varlen(**given)
    shape = (count, totals["q"])
    return (out.unflatten(rows, shape), lse.unflatten(1, shape)), (rows, 1)


def attention_with_kvcache(count: int, dims: Arguments, given: Arguments) -> Any:
    _refuse_sinks(dims)

    def joined(name: str) -> torch.Tensor:
        return _first(given[name], dims[name], count).flatten(0, 1)

    given["q"] = joined("q")
    batch = given["q"].shape[0] // count
    mapped = dims["k_cache"] is not None or dims["v_cache"] is not None
    if mapped:
        given["k_cache"], given["v_cache"] = joined("k_cache"), joined("v_cache")
    elif given["page_table"] is None and given["cache_batch_idx"] is None:
        given["cache_batch_idx"] = torch.arange(batch, dtype=torch.int32, device=given["q"].device)
    places = given["k_cache"].shape[0] // count  # in the cache of one, if it is mapped
    for name in ("page_table", "cache_batch_idx"):
        if given[name] is None:
            continue
        entries = _first(given[name], dims[name], count)
        if mapped:
            offsets = _offsets(entries, places).view(-1, *(1,) * (entries.dim() - 1))
            there = (entries >= 0) & (entries < places)
            entries = torch.where(there, entries + offsets, -1)
        given[name] = entries.flatten(0, 1).contiguous()
    for name in ("seqused_k", "leftpad_k"):
        if given[name] is not None:
            given[name] = joined(name).contiguous()
    for name, rank in (("mask", 4), ("alibi_slopes", 2), ("k_descale", 2), ("v_descale", 2)):
        given[name] = _of_batch(given[name], dims[name], count, batch, rank)
    out, lse = torch.ops.dlattn.attention_with_kvcache(**given)
    return tuple(x.unflatten(0, (count, batch)) for x in (out, lse)), (0, 0)


def merge_states(count: int, dims: Arguments, given: Arguments) -> Any:
    for name in ("outs", "lses"):
        given[name] = [
            _first(x, dim, count).flatten(0, 1)
            for x, dim in zip(given[name], dims[name], strict=True)
        ]
    batch = given["outs"][0].shape[0] // count
    out, lse = torch.ops.dlattn.merge_states(**given)
    return tuple(x.unflatten(0, (count, batch)) for x in (out, lse)), (0, 0)


def over_nothing(
    fake: Callable[..., Any], dims: Arguments, given: Arguments
) -> tuple[list[torch.Tensor], list[int]]:
    """The results of no mapping, of the shapes that `fake` tells of one: no call is made."""

    def one(x: Any, dim: Any) -> Any:
        if dim is None:
            return x
        if isinstance(dim, (list, tuple)):
            return [one(*pair) for pair in zip(x, dim, strict=True)]
        shape = list(x.shape)
        del shape[dim]
        return x.new_empty(shape)

    results = fake(**{name: one(x, dims[name]) for name, x in given.items()})
    return [x.new_empty(0, *x.shape) for x in results], [0] * len(results)


def _refuse_sinks(dims: Arguments) -> None:
    if dims["sinks"] is not None:
        raise NotImplementedError(
            "sinks: vmap over them is not implemented; accepted: sinks that are not mapped"
        )


def _first(x: torch.Tensor, dim: int | None, count: int) -> torch.Tensor:
    """The mapped dimension before all others."""
    return x.expand(count, *x.shape) if dim is None else x.movedim(dim, 0)


def _offsets(like: torch.Tensor, step: int) -> torch.Tensor:
    """Where the rows or entries of each mapping begin."""
    return torch.arange(like.shape[0], dtype=like.dtype, device=like.device) * step


def _of_batch(
    x: torch.Tensor | None, dim: int | None, count: int, batch: int, rank: int, gaps: bool = False
) -> torch.Tensor | None:
    """Join the batches of a tensor that broadcasts to `rank` dimensions, of which the batch is the
    first.

    `gaps`: with an element more between two mappings.
    """
    # Slopes and scales of sequences have rank 2, and need not broadcast from one sequence.
    broadcasts = x is not None and (x.dim() < rank or (rank > 2 and x.shape[0] == 1))
    if x is None or (dim is None and broadcasts):
        return x
    x = _first(x, dim, count)
    while x.dim() < rank + 1:
        x = x.unsqueeze(1)
    x = x.expand(count, batch, *x.shape[2:])
    if gaps:
        return pad(x, (0, 0) * (rank - 1) + (0, 1)).flatten(0, 1)[:-1]
    return x.flatten(0, 1)
