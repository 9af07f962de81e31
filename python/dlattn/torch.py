"""dlattn for torch.

    import dlattn.torch

    dlattn.torch.activate()  # F.scaled_dot_product_attention and all that calls it, by dlattn

and, for code that torch compiles or exports, `dlattn.torch.attention`: `dlattn.attention` as an
operator. `torch.ops.dlattn.attention`, `attention_varlen` and `merge_states` are the operators
themselves, and `operators()` tells what runs them. Importing this registers them, and changes
nothing of torch.
"""

from dlattn.integrations.torch.ops import attention, operators
from dlattn.integrations.torch.sdpa import Stats, activate, active, deactivate, is_active, stats

__all__ = [
    "Stats",
    "activate",
    "active",
    "attention",
    "deactivate",
    "is_active",
    "operators",
    "stats",
]
