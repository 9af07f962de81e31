"""`torch.ops.dlattn.attention_with_kvcache`: attention over a cache, for code that torch traces.

Its kernel is Python's. The caches are read, never written: new keys are in them before.
"""

from __future__ import annotations

from typing import Any

import torch

import dlattn
from dlattn._types import Causal, Window
from dlattn.integrations.torch import arguments, autocast, ops
from dlattn.integrations.torch.gradients import forward_only

_SCHEMA = (
    "attention_with_kvcache(Tensor q, Tensor k_cache, Tensor v_cache, Tensor seqused_k, "
    "Tensor? page_table=None, Tensor? cache_batch_idx=None, Tensor? leftpad_k=None, "
    "SymInt? max_seqlen_k=None, int causal=0, float? scale=None, SymInt window_left=-1, "
    "SymInt window_right=-1, float softcap=0.0, Tensor? mask=None, Tensor? alibi_slopes=None, "
    "Tensor? sinks=None, bool bhsd=False, bool batch_invariant=False, Tensor? k_descale=None, "
    "Tensor? v_descale=None) -> (Tensor out, Tensor lse)"
)
_LIBRARY = torch.library.Library("dlattn", "FRAGMENT")


def attention_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    seqused_k: torch.Tensor,
    page_table: torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    max_seqlen_k: int | None = None,
    causal: Causal = False,
    softmax_scale: float | None = None,
    window: Window = (None, None),
    softcap: float = 0.0,
    mask: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    layout: str = "bshd",
    return_lse: bool = False,
    batch_invariant: bool = False,
) -> Any:
    """`dlattn.attention_with_kvcache` as an operator: for functions that torch compiles or exports.

    Arguments, results and errors are those of `dlattn.attention_with_kvcache`; new keys and values,
    rotary tables, `out`, `stream`, `kernel`, `num_splits`, `split_size` and `workspace` are not
    among them. `k_descale` and `v_descale` of caches in 8 bits are tensors, float32 on q's device.
    """
    arguments.check(causal, softmax_scale, softcap, None, layout, return_lse, batch_invariant)
    sides = arguments.sides_of(window)
    if max_seqlen_k is not None:
        max_seqlen_k = arguments.length(max_seqlen_k, "max_seqlen_k", "an int or None")
    try:
        out, lse = torch.ops.dlattn.attention_with_kvcache(
            q,
            k_cache,
            v_cache,
            seqused_k,
            page_table,
            cache_batch_idx,
            leftpad_k,
            max_seqlen_k,
            arguments.CAUSAL[causal],
            softmax_scale,
            *sides,
            softcap,
            mask,
            alibi_slopes,
            sinks,
            layout == "bhsd",
            batch_invariant,
            k_descale,
            v_descale,
        )
    except RuntimeError as error:
        raise arguments.error_of(
            error,
            {"q": q, "k_cache": k_cache, "v_cache": v_cache, "seqused_k": seqused_k},
            page_table=page_table,
            cache_batch_idx=cache_batch_idx,
            leftpad_k=leftpad_k,
            mask=mask,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            k_descale=k_descale,
            v_descale=v_descale,
        ) from None
    return (out, lse) if return_lse else out


def _kernel(**given: Any) -> Any:
    return dlattn.attention_with_kvcache(**ops.keywords(**given))


def _fake(*, q: Any, k_cache: Any, v_cache: Any, bhsd: bool, **_: Any) -> Any:
    return ops.fake_attention(bhsd, q=q, k_cache=k_cache, v_cache=v_cache)


def _register() -> None:
    name = _SCHEMA.partition("(")[0]
    _LIBRARY.define(_SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
    for backend in ("CPU", "CUDA"):
        _LIBRARY.impl(name, ops.by_name(_SCHEMA, _kernel), backend)
    _LIBRARY.impl(name, forward_only(name), "Autograd")
    ops.register_shapes(_SCHEMA, _fake, _LIBRARY)
    ops.register_mapping(_SCHEMA, _LIBRARY)
    autocast.register(name, ops.argument_names(name), _LIBRARY)
    ops.register_operations(name)


_register()
