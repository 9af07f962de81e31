"""How torch.vmap maps the operators: what is mapped joins the batch of one call.

Each rule gets the number of mappings, the mapped dimension of each argument (None: it is not
mapped) and the arguments, and returns the results and their mapped dimensions. What is not mapped
is not repeated where the operator can read it as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad

import dlattn

_MOST_ROWS = 2**31 - 1  # cu_seqlens are int32


def attention(count: int, dims: tuple[Any, ...], *arguments: Any) -> Any:
    given = list(arguments)
    _refuse_sinks(dims[6])
    given[:3] = [
        _first(x, dim, count).flatten(0, 1) for x, dim in zip(given[:3], dims[:3], strict=True)
    ]
    batch = given[0].shape[0] // max(count, 1)
    for i, rank in ((3, 4), (4, 4), (5, 2)):  # bias, mask, alibi_slopes
        given[i] = _of_batch(given[i], dims[i], count, batch, rank)
    out, lse = torch.ops.dlattn.attention(*given)
    return tuple(x.unflatten(0, (count, batch)) for x in (out, lse)), (0, 0)


def attention_varlen(count: int, dims: tuple[Any, ...], *arguments: Any) -> Any:
    """The packs become one. Rows that belong to no sequence, as the last of one pack and the first
    of the next may, are a sequence in between, whose results nobody reads."""
    given = list(arguments)
    _refuse_sinks(dims[11])
    rows = 1 if given[18] else 0  # the dimension of a pack's rows: bhsd
    given[:3] = [
        _first(x, dim, count).movedim(0, rows) for x, dim in zip(given[:3], dims[:3], strict=True)
    ]
    totals = [x.shape[rows + 1] for x in given[:2]]
    given[:3] = [x.flatten(rows, rows + 1) for x in given[:3]]
    batch = given[3].shape[0 if dims[3] is None else 1 - dims[3]] - 1
    for i, name, total in ((3, "q", totals[0]), (4, "k", totals[1])):
        if count * total > _MOST_ROWS:
            raise dlattn.UnsupportedError(
                f"{name}: vmap makes one pack of {count} with {total} rows each; accepted: "
                f"{_MOST_ROWS} rows in all"
            )
        starts = _first(given[i], dims[i], count)
        given[i] = (starts + _offsets(starts, total)[:, None]).flatten()
    if given[7] is not None:
        given[7] = pad(_first(given[7], dims[7], count), (0, 1)).flatten()[:-1]
    for i, rank in ((8, 4), (9, 4), (10, 2)):  # bias, mask, alibi_slopes
        given[i] = _of_batch(given[i], dims[i], count, batch, rank, gaps=True)
    if given[0].device.type == "cpu" and given[8] is None and given[9] is None:
        # The CPU refuses what is longer, the sequences in between as well.
        for i, total in ((5, totals[0]), (6, totals[1])):
            given[i] = min(torch.sym_max(given[i], 2 * total), _MOST_ROWS)
    out, lse = torch.ops.dlattn.attention_varlen(*given)
    shape = (count, totals[0])
    return (out.unflatten(rows, shape), lse.unflatten(1, shape)), (rows, 1)


def attention_with_kvcache(count: int, dims: tuple[Any, ...], *arguments: Any) -> Any:
    given = list(arguments)
    _refuse_sinks(dims[15])

    def joined(i: int) -> torch.Tensor:
        return _first(given[i], dims[i], count).flatten(0, 1)

    given[0] = joined(0)
    batch = given[0].shape[0] // max(count, 1)
    mapped = dims[1] is not None or dims[2] is not None
    if mapped:
        given[1], given[2] = joined(1), joined(2)
    places = given[1].shape[0] // max(count, 1)  # in the cache of one, if caches are mapped
    if given[4] is None and given[5] is None and not mapped:
        given[5] = torch.arange(batch, dtype=torch.int32, device=given[0].device)
    for i in (4, 5):  # page_table, cache_batch_idx
        if given[i] is None:
            continue
        entries = _first(given[i], dims[i], count)
        if mapped:
            offsets = _offsets(entries, places).view(-1, *(1,) * (entries.dim() - 1))
            there = (entries >= 0) & (entries < places)
            entries = torch.where(there, entries + offsets, -1)
        given[i] = entries.flatten(0, 1).contiguous()
    for i in (3, 6):  # seqused_k, leftpad_k
        if given[i] is not None:
            given[i] = joined(i).contiguous()
    # mask, alibi_slopes, k_scale, v_scale
    for i, rank in ((13, 4), (14, 2), (18, 2), (19, 2)):
        given[i] = _of_batch(given[i], dims[i], count, batch, rank)
    out, lse = torch.ops.dlattn.attention_with_kvcache(*given)
    return tuple(x.unflatten(0, (count, batch)) for x in (out, lse)), (0, 0)


def merge_states(count: int, dims: tuple[Any, ...], *parts: Any) -> Any:
    outs, lses = (
        [_first(x, dim, count).flatten(0, 1) for x, dim in zip(some, of, strict=True)]
        for some, of in zip(parts, dims, strict=True)
    )
    batch = outs[0].shape[0] // max(count, 1)
    out, lse = torch.ops.dlattn.merge_states(outs, lses)
    return tuple(x.unflatten(0, (count, batch)) for x in (out, lse)), (0, 0)


def _refuse_sinks(dim: int | None) -> None:
    if dim is not None:
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
    """What broadcasts to `rank` dimensions, of which the batch is the first, for the joined batch.

    `gaps`: with an element more between two mappings.
    """
    # Of rank 2 are slopes and scales of sequences, which need not broadcast from one sequence.
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
