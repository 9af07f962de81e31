"""The arguments that a model of transformers passes to its attention beyond tensors, masks and
scales.

Most of it says nothing new. What would change the result and is not computed is refused by name,
as an argument that is left out in silence gives wrong results.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.utils import logging

_log = logging.get_logger(__name__)

# The meaning of each, by the models that pass them.
_NOT_COMPUTED = {
    "block_indices": "blocks of keys that an indexer chose (MiniMax M3)",
    "sinks": "sinks of each token (Inkling 2)",
}
_NEITHER_OF_FLASH = {
    **_NOT_COMPUTED,
    "indices": "keys that an indexer chose (DeepSeek V3.2)",
    "position_bias": "a bias by position (T5)",
}


def check(name: str, options: dict[str, Any], flash: bool = False) -> None:
    """Raise ValueError for options that the attention of that name does not compute."""
    for option in _NEITHER_OF_FLASH if flash else _NOT_COMPUTED:
        if options.get(option) is not None:
            other = '"eager"' if option in _NOT_COMPUTED else '"dlattn" or "eager"'
            raise ValueError(
                f"{option}: the model passes {_NEITHER_OF_FLASH[option]}, which "
                f'attn_implementation="{name}" does not compute; accepted: '
                f"attn_implementation={other}"
            )
    if options.get("output_attentions", False):
        _log.warning_once(
            f"`{name}` attention does not support `output_attentions=True`: it computes no "
            "attention weights. Please set your attention to `eager` if you want any of these "
            "features."
        )


def chosen(mask: torch.Tensor | None, indices: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """A mask that also hides what an indexer did not choose, of (batch, seqlen_q, count) keys."""
    shape = (*indices.shape[:2], key.shape[2])
    seen = torch.zeros(shape, dtype=torch.bool, device=indices.device)
    seen = seen.scatter(-1, indices.long(), True)[:, None]
    if mask is None:  # that of causality
        raise ValueError(
            "attention_mask is None, and the model passes keys that an indexer chose; accepted: a "
            "mask of (batch, 1, seqlen_q, seqlen_k)"
        )
    if mask.dtype == torch.bool:
        return mask & seen
    return mask.masked_fill(~seen, -torch.inf)


def drops_queries(config: Any) -> bool:
    """Whether later layers get the last queries alone, as where they share keys (Gemma 4).

    Without a mask the first of those would be taken for the first of all: that is why transformers
    makes one for its own implementations.
    """
    return bool(getattr(config, "num_kv_shared_layers", 0))
