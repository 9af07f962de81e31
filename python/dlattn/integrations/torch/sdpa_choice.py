"""Whose gradients torch's operators of attention get where nobody asked for either.

On CUDA that is one comparison, by measured figures, of the kernel that dlattn's plan takes with
torch's: python/bindings/torch_sdpa_choice.h, which native kernels and those in Python ask.

Each function here has an operator's arguments and tells whether dlattn's kernel is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import dlattn
from dlattn import _core
from dlattn._types import Layout
from dlattn.integrations.torch.gradients import with_rows_side_by_side
from dlattn.integrations.torch.sdpa import flash_window, top_left

_ALL = ("dq", "dk", "dv", "dbias")


def _preferred_on_cpu(*given: Any, **_: Any) -> bool:
    """Short sequences in 16 bits, causal ones in float32 that are not short.

    For others torch's kernel was as fast or faster.
    """
    query, key, is_causal = given[1], given[2], given[7]
    rows, columns = query.shape[2:]
    keys = key.shape[2]
    if query.itemsize == 2:
        return bool(32 <= rows <= 128 and keys <= 128 and columns <= 128)
    return bool(
        query.itemsize == 4 and is_causal and rows >= 128 and keys >= 128 and columns <= 256
    )


def _is_as_fast(
    torchs: str,
    grad_out: torch.Tensor,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    lse: torch.Tensor,
    lengths: tuple[Any, ...] = (),
    layout: Layout = "bhsd",
    needs: tuple[str, ...] = _ALL[:3],
    **options: Any,
) -> bool:
    """Whether the kernel of dlattn's plan is as fast as one of torch's on CUDA."""
    query = inputs[0]
    if query.itemsize != 2:
        return False
    deterministic = torch.are_deterministic_algorithms_enabled()
    dout = with_rows_side_by_side(grad_out, out)
    asked: dict[str, Any] = {"layout": layout, "needs": needs, **options}
    try:
        plan = dlattn.plan_backward(
            dout, *inputs, out, lse, *lengths, deterministic=deterministic, **asked
        )
    except (dlattn.UnsupportedError, TypeError):
        return True  # to raise it where it is counted
    return _core.torch_gradients_are_as_fast(
        torchs,
        plan.kernel,
        options.get("bias") is not None,
        "dbias" in needs,
        deterministic,
        lengths[2] if lengths else query.shape[2 if layout == "bhsd" else 1],
        query.shape[-1],
    )


def _preferred_to_flash(*given: Any, scale: float | None = None) -> bool:
    return _is_as_fast(
        "flash", given[0], given[1:4], *given[4:6], causal=given[11], softmax_scale=scale
    )


def _preferred_to_packed_flash(
    *given: Any,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> bool:
    out, lse = given[4:6]
    return _is_as_fast(
        *("flash", given[0], given[1:4], out, lse),
        lengths=given[6:10] if given[6] is not None else (),
        layout="bshd",
        causal=given[11],
        softmax_scale=scale,
        window=flash_window(window_size_left, window_size_right),
    )


def _preferred_to_efficient(*given: Any, scale: float | None = None) -> bool:
    grad_out, query, key, value, bias, out, lse, _, _, _, wanted, *causal = given
    rows = query.shape[2]
    if lse.shape[-1] < rows:
        return True  # to be refused
    wanted = (*wanted[:3], wanted[3] and bias is not None)
    return _is_as_fast(
        *("efficient", grad_out, (query, key, value), out, lse[..., :rows]),
        needs=tuple(name for name, is_wanted in zip(_ALL, wanted, strict=True) if is_wanted),
        causal=top_left(bool(causal and causal[0])),
        softmax_scale=scale,
        bias=bias,
    )


def _preferred_to_cudnn(*given: Any, scale: float | None = None) -> bool:
    """Calls with a mask too: cuDNN has NaN for rows that see nothing and a mask of float32."""
    if given[8] is not None:
        return True
    out, lse = given[4:6]
    return _is_as_fast(
        *("cudnn", given[0], given[1:4], out, lse.squeeze(-1) if lse.dim() == 4 else lse),
        causal=top_left(given[14]),
        softmax_scale=scale,
    )


# By operator.
PREFERRED: dict[str, Callable[..., bool]] = {
    "_scaled_dot_product_flash_attention_backward": _preferred_to_flash,
    "_scaled_dot_product_efficient_attention_backward": _preferred_to_efficient,
    "_scaled_dot_product_cudnn_attention_backward": _preferred_to_cudnn,
    "_flash_attention_backward": _preferred_to_packed_flash,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _preferred_on_cpu,
}
