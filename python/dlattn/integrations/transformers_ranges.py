"""The keys that a step of decoding sees in a static cache, as a range for each sequence.

A static cache has room for all keys that will ever be, and transformers masks those that there are
not yet: a row of bools of the cache's full length for each sequence. Where what a row lets through
is one run of keys (left padding, a sliding window, chunks, an empty tail are), two numbers say as
much, and attention reads no more than the keys between them.

`ranges_of` returns an int32 tensor of (2, batch, 1, 1): where each sequence's run begins and where
it ends. Four dimensions, since transformers takes a mask of four for one that is ready, and passes
it on to every layer as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.masking_utils import sdpa_mask
from transformers.utils.import_utils import is_tracing


def is_decoding_step(q_length: Any, options: dict[str, Any]) -> bool:
    """Whether a mask function is asked for the mask of one query over a static cache.

    transformers allows no None there, in place of a mask, as it does with caches that grow.
    """
    return (
        isinstance(q_length, int)
        and q_length == 1
        and not options.get("allow_is_causal_skip", True)
        and not options.get("allow_is_bidirectional_skip", False)
        and not _has_indexer(options.get("config"))
    )


def _has_indexer(config: Any) -> bool:
    """Whether the layers choose keys by an indexer, and combine the mask with what it chose."""
    return any(name.startswith("index") for name in vars(config or object))


def ranges_of(mask: torch.Tensor) -> torch.Tensor | None:
    """The runs of a mask of (batch, 1, 1, seqlen_k), bool; None if a row has more than one.

    The host waits for the answer, once a step and kind of layer, as it does for the masks of
    transformers' flash attention. While torch is tracing or captures a CUDA graph it does not, and
    the answer is None.
    """
    if is_tracing(mask):
        return None
    rows = mask[:, 0, 0]
    seen = rows.to(torch.int32)
    first = seen.argmax(-1)
    count = seen.sum(-1)
    last = rows.shape[1] - 1 - seen.flip(-1).argmax(-1)
    if not bool(((count == 0) | (count == last - first + 1)).all()):
        return None
    return torch.stack([first, first + count]).to(torch.int32)[:, :, None, None]


def decoding_mask(*arguments: Any, **options: Any) -> torch.Tensor | None:
    """The mask of `sdpa_mask`, as ranges where there can be."""
    mask: torch.Tensor | None = sdpa_mask(*arguments, **options)
    ranges = None if mask is None or mask.dtype != torch.bool else ranges_of(mask)
    return mask if ranges is None else ranges


def are_ranges(mask: torch.Tensor, query: torch.Tensor) -> bool:
    """Whether a layer's mask is what `ranges_of` returned, for queries of (batch, heads, 1, .)."""
    return (
        mask.dtype == torch.int32
        and mask.shape == (2, query.shape[0], 1, 1)
        and query.shape[2] == 1
    )


def mask_of(ranges: torch.Tensor, seqlen_k: int) -> torch.Tensor:
    """The mask of (batch, 1, 1, seqlen_k) that the ranges were made of."""
    keys = torch.arange(seqlen_k, device=ranges.device)
    first, end = ranges[0, :, :, None], ranges[1, :, :, None]
    return (keys >= first) & (keys < end)


def reads_caches(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether a fast kernel takes these as a cache: told by what torch knows while it traces.

    On a GPU `decode` is the one on tensor cores (docs/kernels.md); the CPU's takes all.
    """
    if query.device.type == "cpu":
        return True
    dims = (key.shape[3], value.shape[3])
    whole = all(x.stride(3) == 1 and _aligned(x) for x in (query, key, value))
    return query.dtype in (torch.float16, torch.bfloat16) and whole and max(dims) <= 256


def _aligned(x: torch.Tensor) -> bool:
    """Whether rows begin at multiples of 16 bytes of 8 elements, if the tensor does."""
    return all(stride % 8 == 0 for stride in x.stride()[:3]) and x.shape[3] % 8 == 0
