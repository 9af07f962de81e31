"""dlattn for torch.

    import dlattn.torch

    dlattn.torch.activate()  # F.scaled_dot_product_attention and all that calls it, by dlattn

and, for code that torch compiles or exports, `dlattn.torch.attention` and `attention_with_kvcache`:
`dlattn.attention` and `dlattn.attention_with_kvcache` as operators. `torch.ops.dlattn.attention`,
`attention_varlen`, `attention_with_kvcache` and `merge_states` are the operators themselves, and
`operators()` tells what runs those but `attention_with_kvcache`, which Python does. Importing this
registers them, and changes nothing of torch.
"""

from dlattn.integrations.torch.activation import activate, active, deactivate, is_active
from dlattn.integrations.torch.kvcache import attention_with_kvcache
from dlattn.integrations.torch.ops import attention, operators
from dlattn.integrations.torch.sdpa_stats import Stats, stats

__all__ = [
    "Stats",
    "activate",
    "active",
    "attention",
    "attention_with_kvcache",
    "deactivate",
    "is_active",
    "operators",
    "stats",
]
