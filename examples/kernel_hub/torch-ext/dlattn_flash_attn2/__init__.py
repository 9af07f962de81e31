"""flash-attn's functions, computed by dlattn, as a kernel of the Hugging Face Kernel Hub.

    kernels.get_kernel("NAMESPACE/dlattn-flash-attn2", version=0, trust_remote_code=True)
    from_pretrained(..., attn_implementation="NAMESPACE/dlattn-flash-attn2", allow_all_kernels=True)

dlattn must be installed. It is imported when a function is first asked for, since kernel-builder
imports a kernel beside torch alone.
"""

from __future__ import annotations

from typing import Any

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import dlattn.flash_attn
    except ImportError as error:
        raise ImportError(
            "this kernel needs dlattn, which is not installed (pip install dlattn)"
        ) from error
    return getattr(dlattn.flash_attn, name)
