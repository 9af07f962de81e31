"""New keys and values of a call of attention over a cache: written to it before it is read."""

from __future__ import annotations

from typing import Any

from dlattn import _views
from dlattn._append import append_kv
from dlattn._errors import UnsupportedError
from dlattn._plan import supported


def append(
    q: Any,
    k: Any,
    v: Any,
    k_cache: Any,
    v_cache: Any,
    *,
    options: dict[str, Any],
    rotary_cos: Any,
    rotary_sin: Any,
    rotary_interleaved: Any,
    rotary_leftpad_k: Any,
) -> tuple[Any, Any]:
    """Append k and v, unless attention would refuse the call: then it is left to it to say why.

    Args:
        options: The keywords of `attention_with_kvcache`, with the lengths from before.
        rotary_leftpad_k: `append_kv`'s leftpad_k.

    Returns:
        q, rotated if there are tables, and the lengths with the new keys.
    """
    _refuse_alone(k, v=v, rotary_cos=rotary_cos, rotary_sin=rotary_sin)
    if options.get("stream") is not None:
        raise UnsupportedError(
            "stream is given with k, and lengths are added on the current stream of their library; "
            "accepted with k: None; with a stream, append_kv before the call"
        )
    layout = options.get("layout", "bshd")
    lengths = _lengths_after(options["seqused_k"], k, q, layout)
    try:
        accepted = supported(q, k_cache, v_cache, **(options | {"seqused_k": lengths}))
    except TypeError as error:
        _views.rename(error, {"k": "k_cache", "v": "v_cache"})
        raise
    if not accepted:
        return q, lengths
    no_window = tuple(options.get("window", (None, None))) == (None, None)
    rotated = append_kv(
        k,
        v,
        k_cache,
        v_cache,
        seqused_k=options["seqused_k"],
        page_table=options["page_table"],
        cache_batch_idx=options["cache_batch_idx"],
        leftpad_k=None if rotary_cos is None else rotary_leftpad_k,
        q=None if rotary_cos is None else q,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        rotary_interleaved=rotary_interleaved,
        q_fixed_position=rotary_cos is not None and not options["causal"] and no_window,
        k_scale=options.get("k_scale"),
        v_scale=options.get("v_scale"),
        layout=layout,
    )
    return q if rotated is None else rotated, lengths


def _refuse_alone(k: Any, **arguments: Any) -> None:
    """Refuse what comes with new keys only."""
    for name, value in arguments.items():
        if k is None and value is not None:
            raise UnsupportedError(f"{name} is given and k is None; accepted: both, or neither")


def _lengths_after(seqused_k: Any, k: Any, q: Any, layout: Any) -> Any:
    """Each sequence's keys with the rows of k, computed where seqused_k lies."""
    shape, of_q = _views.shape_of(k, "k"), _views.shape_of(q, "q")
    rows = 0
    if len(shape) == len(of_q) == 4:  # others are refused later on
        if shape[0] != of_q[0]:
            raise UnsupportedError(
                f"k: batch is {shape[0]}, shape {shape}; accepted: {of_q[0]}, that of q"
            )
        rows = shape[2 if layout == "bhsd" else 1]
    _views.shape_of(seqused_k, "seqused_k")  # raises TypeError for what is no tensor
    try:
        return seqused_k + rows
    except TypeError:
        kind = type(seqused_k).__name__
        raise TypeError(
            f"seqused_k is of type {kind}, to which no int can be added; accepted with k: a torch, "
            "CuPy or NumPy array, or append_kv before the call"
        ) from None
