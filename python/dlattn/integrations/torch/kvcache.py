"""`torch.ops.dlattn.attention_with_kvcache`: attention over a cache, for code that torch traces.

Its kernel is Python's. The caches are read, never written: new keys are in them before.
"""

from __future__ import annotations

from typing import Any

import torch

import dlattn
from dlattn.integrations.torch import autocast, ops
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
    ops.register_mapping(_SCHEMA, _fake, _LIBRARY)
    autocast.register(name, ops.argument_names(name), _LIBRARY)
    ops.register_operations(name)


_register()
