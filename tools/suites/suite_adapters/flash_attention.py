"""The packages of FlashAttention-2 and FlashAttention-3, of which `dlattn.flash_attn` computes."""

from __future__ import annotations

from typing import Any

import torch

import dlattn
import dlattn.flash_attn
from suite_adapters import plain
from suite_adapters.serving import Module, refuse, serve

_MOST_COLUMNS = 256  # of v

ours = {name: serve(getattr(dlattn.flash_attn, name)) for name in dlattn.flash_attn.__all__}
append_kv = serve(dlattn.append_kv)
attention = serve(dlattn.attention)
attention_varlen = serve(dlattn.attention_varlen)
attention_with_kvcache = serve(dlattn.attention_with_kvcache)
merge_states = serve(dlattn.merge_states)


def _window(window_size: Any) -> tuple[int, int]:
    """As a pair of int: the tests pass a tensor of two."""
    return int(window_size[0]), int(window_size[1])


def install_2() -> None:
    """Put flash-attn 2's modules into sys.modules."""

    def with_window(name: str) -> Any:
        def function(*args: Any, window_size: Any = (-1, -1), **options: Any) -> Any:
            # Tests of caches mark tensors as requiring grad and never ask for one.
            grad = torch.is_grad_enabled() and options.get("block_table") is None
            with torch.set_grad_enabled(grad):
                return ours[name](*args, window_size=_window(window_size), **options)

        return function

    functions = {name: with_window(name) for name in ours}
    Module("flash_attn", **functions)
    Module("flash_attn.flash_attn_interface", USE_TRITON_ROCM=False)
    Module("flash_attn.bert_padding", pad_input=plain.pad_input, unpad_input=plain.unpad_input)
    _install_rotary()


def _install_rotary() -> None:
    Module("flash_attn.layers")
    Module("flash_attn.layers.rotary", apply_rotary_emb=plain.apply_rotary_emb)


def install_3() -> None:
    """Put FlashAttention-3's modules into sys.modules, and what its tests need besides."""
    Module(
        "flash_attn_interface",
        flash_attn_func=_func_3,
        flash_attn_varlen_func=_varlen_func_3,
        flash_attn_with_kvcache=_with_kvcache_3,
        flash_attn_combine=_combine,
        get_scheduler_metadata=lambda *_, **__: None,  # a plan needs no preparation
    )
    Module("padding", pad_input=plain.pad_input, unpad_input=plain.unpad_input)
    Module("flash_attn")
    _install_rotary()


def _func_3(
    q: Any,
    k: Any,
    v: Any,
    window_size: Any = (-1, -1),
    attention_chunk: int = 0,
    num_splits: int = 1,
    **options: Any,
) -> Any:
    """FlashAttention-3's function; num_splits is a matter of speed."""
    if attention_chunk:
        batch, rows, room = q.shape[0], q.shape[1], k.shape[1]
        lengths = torch.full((batch,), room, dtype=torch.int32, device=q.device)
        mask = _chunk_mask(rows, rows, room, lengths, None, attention_chunk)
        return _masked(attention, (q, k, v), mask, window_size, room, options)
    return _in_columns(
        v,
        lambda part: ours["flash_attn_func"](
            q, k, part, window_size=_window(window_size), **_options_of_2(dict(options))
        ),
    )


def _varlen_func_3(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Any = None,
    seqused_k: Any = None,
    window_size: Any = (-1, -1),
    attention_chunk: int = 0,
    num_splits: int = 1,
    **options: Any,
) -> Any:
    """FlashAttention-3's function: the adapter takes the rows of seqused_q out before."""
    if seqused_q is not None:
        rows = used_rows(cu_seqlens_q, seqused_q, q.shape[0])
        starts = torch.nn.functional.pad(seqused_q.cumsum(0, dtype=torch.int32), (1, 0))
        found = _varlen_func_3(
            *(q[rows], k, v, starts, cu_seqlens_k, max_seqlen_q, max_seqlen_k, None, seqused_k),
            *(window_size, attention_chunk, num_splits),
            **options,
        )
        return found.new_zeros(q.shape[0], *found.shape[1:]).index_copy(0, rows, found)
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    if attention_chunk:
        used = _counts(k, cu_seqlens_k) if seqused_k is None else seqused_k
        counts = _counts(q, cu_seqlens_q)
        mask = _chunk_mask(max_seqlen_q, counts, max_seqlen_k, used, None, attention_chunk)
        options["seqused_k"] = seqused_k
        inputs = (q, k, v, *lengths)
        return _masked(attention_varlen, inputs, mask, window_size, max_seqlen_k, options)
    return _in_columns(
        v,
        lambda part: ours["flash_attn_varlen_func"](
            *(q, k, part, *lengths),
            seqused_k=seqused_k,
            window_size=_window(window_size),
            num_splits=num_splits,
            **_options_of_2(dict(options)),
        ),
    )


def used_rows(cu_seqlens: Any, seqused: Any, count: int) -> Any:
    """The indices of the rows that sequences use, of so many."""
    row = torch.arange(count, dtype=torch.int32, device=cu_seqlens.device)
    owner = torch.searchsorted(cu_seqlens[1:], row, right=True).clamp_max(len(seqused) - 1)
    place = row - cu_seqlens[owner]
    return ((place >= 0) & (place < seqused[owner])).nonzero().flatten()


def _in_columns(v: Any, attend: Any) -> Any:
    """The result for all of v, of which dlattn takes 256 columns at a time."""
    parts = v.split(_MOST_COLUMNS, dim=-1)
    return attend(v) if len(parts) == 1 else torch.cat([attend(part) for part in parts], -1)


def _masked(
    function: Any, inputs: Any, mask: Any, window_size: Any, room: int, options: dict[str, Any]
) -> Any:
    """Attention with a mask, without gradients, which tests of chunks do not ask for."""
    sides = _window(window_size)
    left, right = (None if side < 0 else side for side in sides)
    given = _options_of_2(dict(options))
    with torch.no_grad():
        return _in_columns(
            inputs[2],
            lambda part: function(
                *(*inputs[:2], part, *inputs[3:]),
                mask=mask,
                window=(left, room if left is not None and right is None else right),
                **given,
            ),
        )


def _options_of_2(options: dict[str, Any]) -> dict[str, Any]:
    """FlashAttention-3's further options, without those that change no result."""
    for name in ("qv", "attention_chunk"):
        if options.pop(name, None):
            refuse(f"{name}: not an argument of dlattn.flash_attn")
    for name in ("pack_gqa", "sm_margin", "scheduler_metadata"):
        options.pop(name, None)
    return options


def _combine(
    out_partial: torch.Tensor, lse_partial: torch.Tensor, out: Any = None, out_dtype: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge parts, stacked, with lse of (parts, batch, seqlen, num_heads)."""
    merged, lse = merge_states(out_partial, lse_partial.transpose(-1, -2))
    return merged.to(out_dtype or merged.dtype), lse.transpose(-1, -2)


def _with_kvcache_3(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: Any = None,
    v: Any = None,
    qv: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    page_table: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k_new: Any = None,
    max_seqlen_q: Any = None,
    rotary_seqlens: Any = None,
    softmax_scale: Any = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    **options: Any,
) -> Any:
    """FlashAttention-3's function: by dlattn's of that name, or for lists of queries, chunks of
    keys and numbers of queries other than of new keys by `append_kv` and attention after it. There
    the adapter rotates the queries, since `append_kv` rotates as many as there are new keys; and
    chunks, and padding before the keys of lists, are masks."""
    _options_of_2({**options, "qv": qv})
    if rotary_seqlens is not None and rotary_seqlens is not cache_seqlens:
        refuse("rotary_seqlens other than cache_seqlens: not an argument of dlattn")
    window_size = _window(window_size)
    if page_table is not None and cache_batch_idx is not None:
        page_table, cache_batch_idx = page_table[cache_batch_idx.long()], None
    as_many = k is None or rotary_cos is None or k.shape[1] == q.shape[1]
    if cu_seqlens_q is None and not attention_chunk and as_many:
        return ours["flash_attn_with_kvcache"](
            q,
            k_cache,
            v_cache,
            k,
            v,
            rotary_cos,
            rotary_sin,
            cache_seqlens,
            cache_batch_idx,
            cache_leftpad,
            page_table,
            softmax_scale,
            causal,
            window_size,
            softcap,
            rotary_interleaved,
            None,
            num_splits,
            return_softmax_lse,
        )
    where = {"page_table": page_table, "cache_batch_idx": cache_batch_idx}
    lengths = cache_seqlens
    if k is not None:
        tables = {"rotary_cos": rotary_cos, "rotary_sin": rotary_sin}
        append_kv(
            k,
            v,
            k_cache,
            v_cache,
            seqused_k=cache_seqlens,
            cu_seqlens_q=cu_seqlens_k_new,
            rotary_interleaved=rotary_interleaved,
            **where,
            **tables,
        )
        lengths = cache_seqlens + _counts(k, cu_seqlens_k_new)
        if rotary_cos is not None:
            moving = causal or max(window_size) >= 0
            positions = _positions(q, cu_seqlens_q, cache_seqlens, moving)
            q = plain.rotate(q, rotary_cos, rotary_sin, positions, rotary_interleaved)
    room = k_cache.shape[1] * (1 if page_table is None else page_table.shape[1])
    left, right = (None if side < 0 else side for side in window_size)
    common = {
        "causal": causal,
        "window": (left, room if left is not None and right is None else right),
        "softmax_scale": softmax_scale,
        "softcap": softcap,
        "return_lse": return_softmax_lse,
        "batch_invariant": num_splits == 1,
    }
    counts = _counts(q, cu_seqlens_q)
    if cu_seqlens_q is None:
        mask = _chunk_mask(q.shape[1], counts, room, lengths, cache_leftpad, attention_chunk)
        return attention_with_kvcache(
            q,
            k_cache,
            v_cache,
            seqused_k=lengths,
            leftpad_k=cache_leftpad,
            mask=mask,
            **where,
            **common,
        )
    if page_table is None:  # an entry of the cache is a page as long as it
        entries = torch.arange(k_cache.shape[0], dtype=torch.int32, device=q.device)
        page_table = (entries if cache_batch_idx is None else cache_batch_idx)[:, None]
    return attention_varlen(
        q,
        k_cache,
        v_cache,
        cu_seqlens_q,
        None,
        max_seqlen_q,
        room,
        seqused_k=lengths,
        page_table=page_table.contiguous(),
        mask=_chunk_mask(max_seqlen_q, counts, room, lengths, cache_leftpad, attention_chunk),
        **common,
    )


def _counts(x: torch.Tensor, cu_seqlens: Any) -> Any:
    """How many rows of x each sequence has."""
    return x.shape[1] if cu_seqlens is None else cu_seqlens[1:] - cu_seqlens[:-1]


def _positions(
    q: torch.Tensor, cu_seqlens_q: Any, cache_seqlens: torch.Tensor, moving: bool
) -> torch.Tensor:
    """The rotary position of each row of q; without `moving`, that of its sequence's first."""
    if cu_seqlens_q is None:
        rows = torch.arange(q.shape[1], device=q.device) * moving
        return cache_seqlens[:, None] + rows
    owner = torch.searchsorted(
        cu_seqlens_q[1:], torch.arange(q.shape[0], dtype=torch.int32, device=q.device), right=True
    )
    rows = (torch.arange(q.shape[0], device=q.device) - cu_seqlens_q[owner]) * moving
    return cache_seqlens[owner] + rows


def _chunk_mask(
    seqlen_q: int, counts: Any, room: int, lengths: Any, leftpad: Any, chunk: int
) -> torch.Tensor | None:
    """Keys behind the padding, and in the chunk that the query stands in: chunks count from the
    first key behind the padding. None: neither is asked for."""
    if not chunk and leftpad is None:
        return None
    leftpad = torch.zeros_like(lengths) if leftpad is None else leftpad
    key = torch.arange(room, device=lengths.device) - leftpad[:, None, None, None]
    seen = key >= 0
    if chunk:
        last = (lengths - leftpad - counts)[:, None, None, None]
        position = last + torch.arange(seqlen_q, device=lengths.device)[:, None]
        begin = position - position % chunk
        seen = seen & (key >= begin) & (key < begin + chunk)
    return seen
