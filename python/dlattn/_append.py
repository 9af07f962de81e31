"""`append_kv`: new keys and values, written into a cache."""

from __future__ import annotations

from typing import Any

from dlattn import _core
from dlattn._types import Layout, Tensor


def append_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    seqused_k: Tensor | None = None,
    page_table: Tensor | None = None,
    slots: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    q: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
    q_fixed_position: bool = False,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    layout: Layout = "bshd",
    stream: Any = None,
) -> Any:
    """Write new keys and values into a KV cache, in place, with rotary embedding [1] if asked for.

    Row i of sequence b becomes key seqused_k[b] + i of that sequence. Its place is in the entry of
    the sequence, in the pages that `page_table` names, or in `slots`. Nothing is copied and the
    host reads nothing: the tensors' values alone decide which rows are written, so that a CUDA
    graph with the call can be replayed with other lengths, pages and slots.

    Args:
        k: New keys, (batch, seqlen_new, num_heads_kv, head_dim) in the layout "bshd", or with
            cu_seqlens_q (total_new, num_heads_kv, head_dim). float16, bfloat16 or float32, on the
            CPU float64 too. Any strides of at least 0 with a contiguous last dimension.
        v: New values, of k's shape but for head_dim, and of k's dtype.
        k_cache: Keys, (batch, seqlen_k, num_heads_kv, head_dim), with cache_batch_idx of any batch
            size; or with page_table or slots (num_pages, page_size, num_heads_kv, head_dim), for
            any page size. In the layout "bhsd" heads come before rows. Of k's dtype, or int8 or
            float8_e4m3fn with k_descale and v_descale. Any strides with a contiguous last
            dimension, but none that make elements share memory: K and V may be slices of one
            tensor, or with page_table or slots views of one pool that begin at different pages.
            Written in place, so it may be neither read-only nor a JAX array.
        v_cache: Values, of k_cache's shape but for head_dim, and of k_cache's dtype.
        seqused_k: int32, (batch,): keys of each sequence before the call, as FlashAttention's
            cache_seqlens. Needed without slots; with slots it tells the rotary positions alone.
        page_table: int32, (batch, pages of a sequence): key j of sequence b is row j % page_size of
            page page_table[b, j // page_size]. Entries behind the last new key are not read.
        slots: int64 or int32, one for each row of k, (batch, seqlen_new) or (total_new,): page *
            page_size + row in the page, as vLLM's slot_mapping; -1 skips the row. With slots, k may
            be a list of tokens, (total_new, num_heads_kv, head_dim), without cu_seqlens_q.
        cu_seqlens_q: int32, (batch + 1,): sequence b owns the rows cu_seqlens_q[b] to
            cu_seqlens_q[b + 1] of k, v and q. Rows of no sequence are skipped. None: fixed length.
        cache_batch_idx: int32, (batch,): the entry of the cache that each sequence has. None: its
            own. Not with page_table or slots.
        leftpad_k: int32, (batch,): keys of padding before the first token of each sequence. Rotary
            positions count from that token, and padding has its position. They change nothing
            else. FlashAttention's count from the first key, padding or not: leave it out for them.
        q: Queries to be rotated as k is, (batch, seqlen_new, num_heads, head_dim) or with
            cu_seqlens_q (total_new, num_heads, head_dim), of k's dtype. Needs rotary_cos.
        rotary_cos: Cosines, (positions, rotary_dim / 2), of k's dtype or float32, for as many
            positions as a sequence has room for. The first rotary_dim columns of k, and of q, are
            rotated by the row of their position. None: nothing is rotated.
        rotary_sin: Sines, the same.
        rotary_interleaved: Whether pairs are columns 2j and 2j + 1 (GPT-J); else they are j and
            j + rotary_dim / 2 (GPT-NeoX, Llama). flash_attn's default is True.
        q_fixed_position: Whether all rows of q are rotated as the sequence's row 0, which is what
            flash_attn_with_kvcache does without causality and window.
        k_descale: The factor of the elements of an 8-bit k_cache: float32, broadcastable to (batch,
            num_heads_kv); positive and finite.
        v_descale: The same for v_cache.
        layout: Dimensions of k, v, q and the caches, as for `attention`: "bshd" or "bhsd".
        stream: As for `attention`.

    The rotation of a pair (x0, x1) is (x0 cos - x1 sin, x1 cos + x0 sin), in fp32 (in float64 for
    float64 inputs), and rounded once, to the cache's or q's dtype. In 8 bits an element is
    x / descale, to the nearest number, on a tie the even one: saturated to -128 and 127, or 448;
    NaN is 0 in int8 and NaN in float8_e4m3fn. Without a rotation elements keep their bits in a
    cache of k's dtype.

    On a GPU values in the lists cannot be refused. A row whose sequence, position, page, entry,
    slot or row of the tables does not exist is skipped, and nothing is written elsewhere; a row of
    q without a row of the tables is not written. On the CPU such values are refused before anything
    is written. If several rows go to the same place, one of them is stored, for k and v not
    necessarily the same one. Everything else in the cache stays unchanged.

    Returns:
        None, or if q is given the rotated q, a new tensor of k's framework and device.

    Raises:
        UnsupportedError, TypeError, DeviceError: As `attention`.

    References:
        [1] Su et al. RoFormer. arXiv:2104.09864, 2021.
    """
    return _core.append_kv(
        k,
        v,
        k_cache,
        v_cache,
        seqused_k,
        page_table,
        slots,
        cu_seqlens_q,
        cache_batch_idx,
        leftpad_k,
        q,
        rotary_cos,
        rotary_sin,
        rotary_interleaved,
        q_fixed_position,
        k_descale,
        v_descale,
        layout,
        stream,
    )
