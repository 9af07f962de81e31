# Written by python/api/write.py from plan.py.in: edit that, or arguments.py.
"""`supported` and `plan`: what `attention` and the functions beside it would do."""

from __future__ import annotations

from typing import Any

from dlattn import _core
from dlattn._errors import UnsupportedError
from dlattn._types import (
    Causal,
    Kernel,
    Layout,
    OutDType,
    Plan,
    Precision,
    QuantizedKV,
    Support,
    Tensor,
    Window,
)


def supported(
    q: Tensor,
    k: Tensor | QuantizedKV,
    v: Tensor | None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    seqused_k: Tensor | None = None,
    page_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    causal: Causal = False,
    softmax_scale: float | None = None,
    window: Window = (None, None),
    softcap: float = 0.0,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    precision: Precision | None = None,
    layout: Layout = "bshd",
    out: Tensor | None = None,
    out_dtype: OutDType | None = None,
    return_lse: bool = False,
    stream: Any = None,
    kernel: Kernel = "auto",
    batch_invariant: bool = False,
    num_splits: int | None = None,
    split_size: int | None = None,
    workspace: Tensor | None = None,
) -> Support:
    """Tell whether `attention` would run with these arguments, and if not, why.

    Takes the arguments of `attention`, `attention_varlen` or `attention_with_kvcache`, and answers
    for the function that they belong to: cu_seqlens_q, cu_seqlens_k or max_seqlen_q is given for
    `attention_varlen`; else seqused_k, page_table, cache_batch_idx, leftpad_k or max_seqlen_k for
    `attention_with_kvcache`, whose caches are k and v here. Nothing is launched, and no device
    memory is allocated.

    Returns:
        A `Support`: true or false in a condition, with the reasons why the call would not run, one
        for each kernel or mistake. A problem that is merely unsupported raises nothing.

    Raises:
        TypeError: An argument is not the kind of object that is accepted, as in the call itself.
    """
    try:
        return Support(*_answer("supported", locals()))
    except UnsupportedError as error:
        return Support(False, (str(error),))


def plan(
    q: Tensor,
    k: Tensor | QuantizedKV,
    v: Tensor | None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    seqused_k: Tensor | None = None,
    page_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    causal: Causal = False,
    softmax_scale: float | None = None,
    window: Window = (None, None),
    softcap: float = 0.0,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    precision: Precision | None = None,
    layout: Layout = "bshd",
    out: Tensor | None = None,
    out_dtype: OutDType | None = None,
    return_lse: bool = False,
    stream: Any = None,
    kernel: Kernel = "auto",
    batch_invariant: bool = False,
    num_splits: int | None = None,
    split_size: int | None = None,
    workspace: Tensor | None = None,
) -> Plan:
    """Tell how `attention` would compute this: kernel, tile, grid, shared memory, splits.

    Takes the arguments of `attention`, `attention_varlen` or `attention_with_kvcache`, as
    `supported` does. Nothing is launched, and no device memory is allocated. DLATTN_PRINT_PLAN=1
    in the environment prints the plan of every call.

    Returns:
        A `Plan`, which prints readably.

    Raises:
        UnsupportedError, TypeError, DeviceError: As the call itself would, but for the size of a
            workspace, which the plan tells.
    """
    return Plan(**_answer("plan", locals()))


# The arguments of each function, in the order in which the native module takes them.
_ATTENTION: tuple[str, ...] = (
    "q",
    "k",
    "v",
    "causal",
    "softmax_scale",
    "window",
    "softcap",
    "bias",
    "mask",
    "alibi_slopes",
    "sinks",
    "q_descale",
    "k_descale",
    "v_descale",
    "precision",
    "layout",
    "out",
    "out_dtype",
    "return_lse",
    "stream",
    "kernel",
    "batch_invariant",
)
_WITH_KVCACHE: tuple[str, ...] = (
    "q",
    "k_cache",
    "v_cache",
    "seqused_k",
    "page_table",
    "cache_batch_idx",
    "leftpad_k",
    "max_seqlen_k",
    "causal",
    "softmax_scale",
    "window",
    "softcap",
    "mask",
    "alibi_slopes",
    "sinks",
    "k_descale",
    "v_descale",
    "layout",
    "out",
    "return_lse",
    "stream",
    "kernel",
    "batch_invariant",
    "num_splits",
    "split_size",
    "workspace",
)
_VARLEN: tuple[str, ...] = (
    "q",
    "k",
    "v",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "max_seqlen_q",
    "max_seqlen_k",
    "seqused_k",
    "page_table",
    "causal",
    "softmax_scale",
    "window",
    "softcap",
    "bias",
    "mask",
    "alibi_slopes",
    "sinks",
    "q_descale",
    "k_descale",
    "v_descale",
    "precision",
    "layout",
    "out",
    "out_dtype",
    "return_lse",
    "stream",
    "kernel",
    "batch_invariant",
    "num_splits",
    "split_size",
    "workspace",
)


def _answer(question: str, arguments: dict[str, Any]) -> Any:
    """The native module's answer for the function that takes these arguments."""
    given = {name for name, value in arguments.items() if value is not None}
    function, taken = "attention", _ATTENTION
    if given.intersection(_VARLEN).difference(_WITH_KVCACHE, _ATTENTION):
        function, taken = "attention_varlen", _VARLEN
    elif given.difference(_ATTENTION):
        function, taken = "attention_with_kvcache", _WITH_KVCACHE
        arguments["k_cache"], arguments["v_cache"] = arguments.pop("k"), arguments.pop("v")
    for name in arguments:
        if name in given and name not in taken:
            raise UnsupportedError(
                f"{name} is given; accepted: None, as {function} does not take it"
            )
    native = getattr(_core, function.replace("attention", question))
    return native(*(arguments[name] for name in taken))
