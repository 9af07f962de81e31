"""flash-attn's module of this name: its functions, and the passes that training code calls itself.

Code that spreads a sequence over processes imports flash-attn's forward and backward pass from
here. It finds these once dlattn's package stands in the place of flash-attn's:

    import sys
    import dlattn.flash_attn

    sys.modules["flash_attn"] = dlattn.flash_attn

They take torch tensors, which need not require grad: it is for the caller to make an
autograd.Function of them. Parameters and results are those of flash-attn 2.7 and 2.8; versions
before returned eight values where there are four now. window_size=(left, right), as those versions
had it, is taken by keyword in the place of window_size_left and window_size_right. Other arguments
are those of `dlattn.flash_attn`, which tells where it differs from flash-attn.

Importing this module imports torch.
"""

from __future__ import annotations

from dlattn.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from dlattn.integrations.torch.flash_passes import (
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
)

__all__ = [
    "_flash_attn_backward",
    "_flash_attn_forward",
    "_flash_attn_varlen_backward",
    "_flash_attn_varlen_forward",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]
