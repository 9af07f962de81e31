"""torch.autocast for attention: q, k and v get its dtype, as those of torch's function.

Source: the list of what autocast does to which function, in
https://docs.pytorch.org/docs/stable/amp.html (scaled_dot_product_attention).
"""

from __future__ import annotations

from typing import Any

import torch

_CAST = (torch.float16, torch.bfloat16, torch.float32)  # float64 and 8 bits stay as they are


def cast(q: Any, k: Any, v: Any, *biases: Any) -> tuple[Any, ...]:
    """Return the same tensors, cast where autocast is on for q's device.

    Callers ask `torch._C._is_any_autocast_enabled()` first, which costs less than this. Biases stay
    float32, which dlattn takes beside any q, and what is no tensor of numbers stays as it is.
    """
    device = q.device.type
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return (q, k, v, *biases)
    dtype = torch.get_autocast_dtype(device)
    q, k, v = (_as(x, dtype, _CAST) for x in (q, k, v))
    if q.dtype == dtype:
        biases = tuple(_as(x, dtype, _CAST[:2]) for x in biases)
    return (q, k, v, *biases)


def _as(x: Any, dtype: torch.dtype, kinds: tuple[torch.dtype, ...]) -> Any:
    return x.to(dtype) if isinstance(x, torch.Tensor) and x.dtype in kinds else x


def register(name: str, arguments: list[str], library: torch.library.Library) -> None:
    """Give an operator its rule of autocast, which costs nothing where autocast is off.

    Its first three arguments are q, k and v.
    """
    # Every call under autocast passes here: this is looked up once.
    overload = getattr(torch.ops.dlattn, name).default
    call = getattr(overload, "_op", overload)
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    keys = keys | torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
    cast_ones = [arguments.index(x) for x in (*arguments[:3], "bias") if x in arguments]

    def cast_first(*given: Any) -> Any:
        full = list(given)
        where = [i for i in cast_ones if i < len(full)]  # a bias that is None may be left out
        for i, x in zip(where, cast(*(full[i] for i in where)), strict=True):
            full[i] = x
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return call(*full)

    for key in ("AutocastCPU", "AutocastCUDA"):
        library.impl(name, cast_first, key)
