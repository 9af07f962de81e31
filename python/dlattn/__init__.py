"""Attention with a streaming softmax on tensor cores, for any framework's tensors.

    out = dlattn.attention(q, k, v, causal=True)

takes torch, CuPy, JAX and NumPy arrays as they are, without a copy, and returns an array of the
same kind on the same device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dlattn._api import info, merge_states
from dlattn._append import append_kv
from dlattn._attention import attention, attention_varlen, attention_with_kvcache
from dlattn._backward import (
    Gradients,
    attention_backward,
    attention_varlen_backward,
    plan_backward,
    supported_backward,
)
from dlattn._core import __version__
from dlattn._errors import DeviceError, UnsupportedError
from dlattn._pages import page_table_from_csr
from dlattn._plan import plan, supported
from dlattn._quantize import quantize_kv
from dlattn._types import DeviceInfo, Info, Plan, QuantizedKV, Support

if TYPE_CHECKING:
    from dlattn import flash_attn, sageattention
    from dlattn._sdpa import scaled_dot_product_attention

__all__ = [
    "DeviceError",
    "DeviceInfo",
    "Gradients",
    "Info",
    "Plan",
    "QuantizedKV",
    "Support",
    "UnsupportedError",
    "__version__",
    "append_kv",
    "attention",
    "attention_backward",
    "attention_varlen",
    "attention_varlen_backward",
    "attention_with_kvcache",
    "flash_attn",
    "info",
    "merge_states",
    "page_table_from_csr",
    "plan",
    "plan_backward",
    "quantize_kv",
    "sageattention",
    "scaled_dot_product_attention",
    "supported",
    "supported_backward",
]


def __getattr__(name: str) -> Any:
    """The other libraries' signatures, on first use: NumPy, which they need, loads slowly."""
    if name in ("flash_attn", "jax", "sageattention"):
        import importlib

        return importlib.import_module(f"dlattn.{name}")
    if name == "scaled_dot_product_attention":
        from dlattn._sdpa import scaled_dot_product_attention

        globals()[name] = scaled_dot_product_attention
        return scaled_dot_product_attention
    raise AttributeError(f"module 'dlattn' has no attribute {name!r}")
