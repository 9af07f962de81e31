"""New keys and values of a call of attention over a cache: written to it before it is read."""

from __future__ import annotations

from typing import Any

from dlattn import _core, _views
from dlattn._errors import UnsupportedError
from dlattn.frameworks.base import type_text


def append_and_attend(
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
) -> Any:
    """Append k and v, and return attention over the cache. A call that is refused writes nothing.

    Args:
        options: The keywords of `attention_with_kvcache`, with the lengths from before.
        rotary_leftpad_k: `append_kv`'s leftpad_k.
    """
    _refuse_alone(k, v=v, rotary_cos=rotary_cos, rotary_sin=rotary_sin)
    if options.get("stream") is not None:
        raise UnsupportedError(
            "stream is given with k, and lengths are added on the current stream of their library; "
            "accepted with k: None; with a stream, append_kv before the call"
        )
    seqused_k = options["seqused_k"]
    lengths = _lengths_after(seqused_k, k, q, options.get("layout", "bshd"))
    caches = {"q": q, "k_cache": k_cache, "v_cache": v_cache}
    return _core.append_and_attend(
        k,
        v,
        seqused_k,
        rotary_cos,
        rotary_sin,
        rotary_interleaved,
        rotary_leftpad_k,
        {"max_seqlen_k": None} | options | caches | {"seqused_k": lengths},
    )


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
    except OverflowError:  # of a dtype that is refused later on
        return seqused_k
    except TypeError:
        kind = type_text(type(seqused_k))
        raise TypeError(
            f"seqused_k is of type {kind}, to which no int can be added; accepted with k: a torch, "
            "CuPy or NumPy array, or append_kv before the call"
        ) from None
