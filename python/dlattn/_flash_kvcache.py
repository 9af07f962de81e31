"""Keys in a cache for `dlattn.flash_attn`, and what its functions share."""

from __future__ import annotations

import math
import sys
from functools import partial
from numbers import Real
from typing import Any

from dlattn import _views, frameworks
from dlattn._append_and_attend import append_and_attend
from dlattn._attention import attention_varlen, attention_with_kvcache
from dlattn._errors import UnsupportedError
from dlattn._numbers import integer
from dlattn.frameworks.base import shown, type_text
from dlattn.frameworks.jax import on_device_of

NO_WINDOW = (-1, -1)

_NAMES = {
    "seqused_k": "cache_seqlens",
    "leftpad_k": "cache_leftpad",
    "page_table": "block_table",
    "sinks": "s_aux",
}


def flash_attn_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    block_table: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = NO_WINDOW,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Any = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    k_descale: Any = None,
    v_descale: Any = None,
    s_aux: Any = None,
) -> Any:
    """Attention of q over the keys and values in a cache. The module tells the other arguments.

    Args:
        q: (batch, seqlen_q, num_heads, head_dim).
        k_cache: (batch, seqlen_cache, num_heads_kv, head_dim), with cache_batch_idx of any batch;
            with block_table (num_pages, page_size, num_heads_kv, head_dim) of any page_size.
        v_cache: The same, of head_dim_v.
        k, v: (batch, seqlen_new, num_heads_kv, .): new keys and values, which are written to the
            caches behind each sequence's keys and attended to. A call that is refused writes
            nothing. None: the caches are not written to.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2), with k and v alone: q and k are rotated
            as `append_kv` tells, by their positions in the cache, and seqlen_q must be seqlen_new,
            which flash-attn does not ask for. Without causal and window all queries of a sequence
            have the position of its first new key, as in flash-attn.
        rotary_interleaved: Whether columns 2j and 2j + 1 are a pair, else j and j + rotary_dim / 2.
        cache_seqlens: int32, (batch,), or an int for all: how many keys each sequence has, before
            those of k. None: all that there is room for; not with k.
        cache_batch_idx: int32, (batch,): the entry of the cache of each sequence. Not with
            block_table.
        cache_leftpad: int32, (batch,): so many of each sequence's first keys are not seen.
        block_table: int32, (batch, max_pages): key j of sequence b is row j % page_size of page
            block_table[b, j // page_size]. What stands behind its last page is not read.
        num_splits: 1: bits that do not depend on the rest of the batch, as
            `attention_with_kvcache`'s batch_invariant gives them; which is why one asks flash-attn
            for one split. Other numbers change no result in flash-attn, and are ignored: the plan
            tells into how many parts keys are split.
        return_softmax_lse: Return (out, softmax_lse), (batch, num_heads, seqlen_q).

    Returns:
        out, (batch, seqlen_q, num_heads, head_dim_v), or the pair.
    """
    options = options_of(0.0, causal, softcap, False, return_softmax_lse)
    options["batch_invariant"] = one_split(num_splits)
    q, softmax_scale = _views.with_any_scale(q, softmax_scale)  # a rotation of -q is that of q
    options |= {"softmax_scale": softmax_scale, "alibi_slopes": alibi_slopes, "sinks": s_aux}
    options |= {"k_descale": k_descale, "v_descale": v_descale}
    room = _room(k_cache, "k_cache", block_table)
    if window_size is not NO_WINDOW:
        options["window"] = window_of(window_size, causal, room)
    where = {"page_table": block_table, "cache_batch_idx": cache_batch_idx}
    new = {"k": k, "v": v, "rotary_cos": rotary_cos, "rotary_sin": rotary_sin}
    try:
        options["seqused_k"] = _lengths(cache_seqlens, q, room, k)
        options |= {**where, "leftpad_k": cache_leftpad}
        if any(value is not None for value in new.values()):
            # flash-attn's rotary positions count padding too
            result = append_and_attend(
                q,
                k_cache=k_cache,
                v_cache=v_cache,
                options=options,
                rotary_interleaved=rotary_interleaved,
                rotary_leftpad_k=None,
                **new,
            )
        else:
            result = attention_with_kvcache(q, k_cache, v_cache, **options)
    except (UnsupportedError, TypeError) as error:
        _views.rename(error, _NAMES)
        raise
    return lse_of_flash(*result) if return_softmax_lse else result


def varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    *,
    seqused_k: Any,
    block_table: Any,
    descales: dict[str, Any],
    deterministic: bool = False,
    **options: Any,
) -> Any:
    """`attention_varlen`, with flash-attn's ways to tell the lengths of keys in pages."""
    if block_table is not None:
        # vLLM passes them with a cache of any dtype.
        of_cache = ("k_descale", "v_descale") if _is_of_8_bits(k) else ()
        descales = {name: descales[name] for name in of_cache}
        if seqused_k is None and cu_seqlens_k is not None:
            seqused_k = _lengths_between(cu_seqlens_k)
        cu_seqlens_k = None
        known = integer(max_seqlen_k)  # else refused later on
        if known is not None:  # engines pass what the model has, which may be more
            max_seqlen_k = min(known, _room(k, "k", block_table))
    function: Any = attention_varlen
    if _views.wants_operator(q, k, v, options.get("alibi_slopes"), options.get("sinks")):
        from dlattn.integrations.torch import flash

        function = partial(flash.attention_varlen, deterministic=deterministic)
    try:
        q, options["softmax_scale"] = _views.with_any_scale(q, options["softmax_scale"])
        return function(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            seqused_k=seqused_k,
            page_table=block_table,
            **descales,
            **options,
        )
    except (UnsupportedError, TypeError) as error:
        _views.rename(error, {"page_table": "block_table", "sinks": "s_aux"})
        raise


def _is_of_8_bits(cache: Any) -> bool:
    return str(getattr(cache, "dtype", "")).rpartition(".")[2] in ("float8_e4m3fn", "int8")


def _room(cache: Any, name: str, block_table: Any) -> int:
    """How many keys each sequence has room for; 0 for shapes that will be refused."""
    shape = _views.shape_of(cache, name)
    if len(shape) != 4:
        return 0
    if block_table is None:
        return int(shape[1])
    table = _views.shape_of(block_table, "block_table")
    return int(table[1] * shape[1]) if len(table) == 2 else 0


def _lengths(cache_seqlens: Any, q: Any, room: int, k: Any) -> Any:
    """A length for each sequence, before the rows of k, as an array of q's library."""
    if k is not None:
        if cache_seqlens is None:
            raise UnsupportedError(
                "cache_seqlens is None and k is given; accepted: an int32 tensor of shape "
                "(batch,), or an int, as k is written behind the keys that it counts"
            )
        shape = _views.shape_of(k, "k")
        room -= shape[1] if len(shape) == 4 else 0
    count = room if cache_seqlens is None else integer(cache_seqlens)
    if count is None:
        return cache_seqlens
    if not 0 <= count <= room:
        raise UnsupportedError(
            f"cache_seqlens is {count}; accepted: 0 to {room}, the keys that there is room for, or "
            "an int32 tensor of shape (batch,)"
        )
    batch_size = (*_views.shape_of(q, "q"), 0)[0]
    library = _views.library_of(q, "q")
    if library == "torch":
        torch = sys.modules["torch"]
        return torch.full((batch_size,), count, dtype=torch.int32, device=q.device)
    xp: Any = sys.modules.get("jax.numpy" if library == "jax" else library)
    if not hasattr(xp, "full"):
        raise TypeError(
            f"cache_seqlens is {cache_seqlens} with q of type {type_text(type(q))}; accepted: an "
            "int32 tensor of shape (batch,)"
        )
    frameworks.find(type(q), "q").check(q, "q")
    if library == "cupy":
        with xp.cuda.Device(q.device.id):
            return xp.full((batch_size,), count, dtype=xp.int32)
    lengths = xp.full((batch_size,), count, dtype=xp.int32)
    return on_device_of(q, lengths) if library == "jax" else lengths


def _lengths_between(cu_seqlens_k: Any) -> Any:
    """The lengths of sequences that begin at these offsets, computed where they lie."""
    shape = _views.shape_of(cu_seqlens_k, "cu_seqlens_k")
    dtype = str(cu_seqlens_k.dtype).rpartition(".")[2]
    if dtype != "int32" or len(shape) != 1:
        raise UnsupportedError(
            f"cu_seqlens_k: dtype is {dtype}, shape {tuple(shape)}; accepted: int32, (batch + 1,)"
        )
    return cu_seqlens_k[1:] - cu_seqlens_k[:-1]


def options_of(
    dropout_p: Any,
    causal: Any,
    softcap: Any,
    return_attn_probs: Any,
    return_softmax_lse: Any = False,
) -> dict[str, Any]:
    """Return the keywords of `attention` for arguments that need no array."""
    _views.refuse_dropout(dropout_p)
    _views.check_flag(causal, "causal")
    _views.check_flag(return_attn_probs, "return_attn_probs")
    _views.check_flag(return_softmax_lse, "return_softmax_lse")
    if isinstance(softcap, Real) and softcap <= 0:
        softcap = 0.0
    with_lse = return_attn_probs or return_softmax_lse
    return {"causal": causal, "softcap": softcap, "return_lse": with_lse}


def one_split(num_splits: Any) -> bool:
    """Whether the caller asks for the keys in one part: for bits that the batch does not change."""
    number = integer(num_splits)
    if number is None:
        raise TypeError(f"num_splits is of type {type_text(type(num_splits))}; accepted: an int")
    return number == 1


def window_of(window_size: Any, causal: bool, seqlen_k: int) -> tuple[int | None, int | None]:
    """Return attention's `window` for flash-attn's, as its host code settles the two sides."""
    pair = isinstance(window_size, (tuple, list)) and len(window_size) == 2
    sides = [integer(side) for side in window_size] if pair else []
    left, right = sides or (None, None)
    if left is None or right is None:
        raise TypeError(
            f"window_size is {shown(window_size)}; accepted: a pair (left, right) of int, "
            "negative for no limit"
        )
    left, right = (-1 if side >= seqlen_k else side for side in (left, right))
    if left >= 0 and right < 0:
        right = seqlen_k  # causal limits it to 0 anyway
    return (None if left < 0 else left, None if right < 0 else right)


def triple(out: Any, lse: Any) -> tuple[Any, Any, Any]:
    """Return what flash-attn returns for return_attn_probs; see `lse_of_flash`."""
    return (*lse_of_flash(out, lse), out[:0].reshape(0))


def lse_of_flash(out: Any, lse: Any) -> tuple[Any, Any]:
    """`out`, and `lse` with +inf where a query sees no key: in place, unless it has gradients."""
    hidden = lse == -math.inf
    if getattr(lse, "requires_grad", False):
        return out, lse.masked_fill(hidden, math.inf)
    if hasattr(lse, "masked_fill_"):  # torch: indexing would make a tensor of the value
        lse.masked_fill_(hidden, math.inf)
    elif hasattr(lse, "at"):  # JAX
        lse = lse.at[hidden].set(math.inf)
    else:
        lse[hidden] = math.inf
    return out, lse
