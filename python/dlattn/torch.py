"""dlattn for torch.

    import dlattn.torch

    dlattn.torch.activate()  # F.scaled_dot_product_attention and all that calls it, by dlattn

and, for code that torch differentiates, compiles or exports, `dlattn.torch.attention`,
`attention_varlen` and `attention_with_kvcache`: dlattn's functions of these names as operators. The
first two have gradients, by dlattn's own backward pass. `torch.ops.dlattn.attention`,
`attention_varlen`, `attention_with_kvcache` and `merge_states` are the operators themselves, and
`operators()` tells what runs those but `attention_with_kvcache`, which Python does. Importing this
registers them, and changes nothing of torch.

`ring_attention` computes attention over sequences that the processes of a group share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import dlattn.integrations.torch.backward  # noqa: F401  registers operators
from dlattn.integrations.torch._functions import (
    attention,
    attention_varlen,
    attention_with_kvcache,
)
from dlattn.integrations.torch.activation import activate, active, deactivate, is_active
from dlattn.integrations.torch.ops import operators
from dlattn.integrations.torch.sdpa_stats import Stats, stats

if TYPE_CHECKING:
    from dlattn.integrations.ring.attention import ring_attention
    from dlattn.integrations.ring.sharding import shard_sequence, unshard_sequence

__all__ = [
    "Stats",
    "activate",
    "active",
    "attention",
    "attention_varlen",
    "attention_with_kvcache",
    "deactivate",
    "is_active",
    "operators",
    "ring_attention",
    "shard_sequence",
    "stats",
    "unshard_sequence",
]


def __getattr__(name: str) -> Any:
    """Attention over processes on first use: it needs torch's compiler, which loads slowly."""
    if name == "ring_attention":
        from dlattn.integrations.ring.attention import ring_attention as found
    elif name in ("shard_sequence", "unshard_sequence"):
        from dlattn.integrations.ring import sharding

        found = getattr(sharding, name)
    else:
        raise AttributeError(f"module 'dlattn.torch' has no attribute {name!r}")
    globals()[name] = found
    return found
