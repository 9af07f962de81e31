"""The package of FlashAttention-4, of which `dlattn.flash_attn` computes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch

from suite_adapters.flash_attention import ours, used_rows
from suite_adapters.serving import Module, refuse

_TESTING = "flash_attn.cute.testing"  # of the project: the reference of its tests


def install() -> None:
    """Put FlashAttention-4's modules into sys.modules."""
    functions = {"flash_attn_func": _func, "flash_attn_varlen_func": _varlen_func}
    Module("flash_attn")
    Module("flash_attn.cute", **functions)
    Module("flash_attn.cute.cache_utils")
    Module(
        "flash_attn.cute.interface",
        **functions,
        get_scheduler_metadata=lambda *_, **__: None,  # a plan needs no preparation
    )
    spec = importlib.util.spec_from_file_location(_TESTING, _testing_file())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[_TESTING] = module
    spec.loader.exec_module(module)


def _testing_file() -> Path:
    name = Path(*_TESTING.split(".")).with_suffix(".py")
    found = [Path(folder) / name for folder in sys.path if (Path(folder) / name).is_file()]
    if not found:
        raise FileNotFoundError(f"no {name}: bring it beside the project's tests")
    return found[0]


def _func(q: Any, k: Any, v: Any, qv: Any = None, **options: Any) -> Any:
    return _pair(ours["flash_attn_func"](q, k, v, **_options_of_2(qv=qv, **options)))


def _varlen_func(
    q: Any,
    k: Any,
    v: Any,
    qv: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    **options: Any,
) -> Any:
    """Rows that seqused_q leaves out are taken out before, and padded rows are a list of them."""
    given = _options_of_2(qv=qv, **options)
    shape = q.shape[:-1]
    rows_q, starts_q = _as_list(q, cu_seqlens_q)
    keys, starts_k = _as_list(k, cu_seqlens_k)
    values, _ = _as_list(v, cu_seqlens_k)
    longest_q = _longest(starts_q) if max_seqlen_q is None else max_seqlen_q
    longest_k = _longest(starts_k) if max_seqlen_k is None else max_seqlen_k
    index = None
    if seqused_q is not None:
        index = used_rows(starts_q, seqused_q, rows_q.shape[0])
        starts_q = torch.nn.functional.pad(seqused_q.cumsum(0, dtype=torch.int32), (1, 0))
    out, lse = _pair(
        ours["flash_attn_varlen_func"](
            *(rows_q if index is None else rows_q[index], keys, values),
            *(starts_q, starts_k, longest_q, longest_k),
            seqused_k=seqused_k,
            **given,
        )
    )
    if index is not None:
        out = out.new_zeros(rows_q.shape[0], *out.shape[1:]).index_copy(0, index, out)
        lse = lse.new_zeros(lse.shape[0], rows_q.shape[0]).index_copy(1, index, lse)
    return out.unflatten(0, shape[:-1]) if len(shape) == 3 else out, lse


def _as_list(x: Any, cu_seqlens: Any) -> tuple[Any, Any]:
    """Rows one after the other, and where each sequence's begin."""
    if cu_seqlens is not None:
        return x, cu_seqlens
    batch, rows = x.shape[:2]
    starts = torch.arange(batch + 1, dtype=torch.int32, device=x.device) * rows
    return x.flatten(0, 1), starts


def _longest(starts: Any) -> int:
    return int((starts[1:] - starts[:-1]).max())


def _pair(result: Any) -> tuple[Any, Any]:
    out, lse, _ = result
    return out, lse


def _options_of_2(
    softmax_scale: Any = None,
    causal: bool = False,
    window_size: Any = (None, None),
    learnable_sink: Any = None,
    softcap: float = 0.0,
    deterministic: bool = False,
    **others: Any,
) -> dict[str, Any]:
    """FlashAttention-2's options, without those that change no result."""
    for name in ("num_splits", "pack_gqa", "return_lse", "scheduler_metadata", "min_seqlen_k"):
        others.pop(name, None)
    for name, value in others.items():
        if value is not None:
            refuse(f"{name}: not an argument of dlattn.flash_attn")
    if any(side is not None and side < 0 for side in window_size):
        refuse("window_size below 0: windows of dlattn have the query's own position in them")
    return {
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window_size": tuple(-1 if side is None else int(side) for side in window_size),
        "softcap": softcap,
        "deterministic": deterministic,
        "return_attn_probs": True,
        "s_aux": None if learnable_sink is None else learnable_sink.float(),
    }
