"""The functions of `dlattn.flash_attn` for torch tensors of which a gradient is wanted."""

from __future__ import annotations

from typing import Any

import torch

import dlattn.integrations.torch.backward  # noqa: F401  registers operators
from dlattn._errors import UnsupportedError
from dlattn.integrations.torch import ops
from dlattn.integrations.torch.gradients import deterministic_gradients
from dlattn.integrations.torch.kernels import own_error


def attention(
    q: Any, k: Any, v: Any, *, deterministic: bool, return_lse: bool, **named: Any
) -> Any:
    """`dlattn.attention` with gradients, for the keywords that flash-attn's functions pass."""
    return _call("attention", deterministic, return_lse, {"q": q, "k": k, "v": v, **named})


def attention_varlen(*given: Any, deterministic: bool, return_lse: bool, **named: Any) -> Any:
    """The same of `dlattn.attention_varlen`."""
    names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    arguments = {**dict(zip(names, given, strict=True)), **named}
    return _call("attention_varlen", deterministic, return_lse, arguments)


def _call(name: str, deterministic: bool, return_lse: bool, given: dict[str, Any]) -> Any:
    left, right = given.pop("window", (None, None))
    for argument in ("q_descale", "k_descale", "v_descale", "page_table", "out"):
        if given.pop(argument, None) is not None:
            raise UnsupportedError(
                f"{argument} is given and an input requires grad; accepted: None, as a call with "
                "it has no gradients"
            )
    given["causal"] = ops.CAUSAL[given["causal"]]
    given["scale"] = given.pop("softmax_scale")
    given |= {"window_left": -1 if left is None else left}
    given |= {"window_right": -1 if right is None else right}
    try:
        with deterministic_gradients(deterministic):
            out, lse = getattr(torch.ops.dlattn, name)(**given)
    except RuntimeError as error:
        raise own_error(error) from None
    return (out, lse) if return_lse else out
