"""FlashInfer's package, of which dlattn computes attention, writing to caches and merging."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

import dlattn
from suite_adapters import plain
from suite_adapters.flashinfer_cascade import MultiLevelCascade, SharedPrefix, merge
from suite_adapters.flashinfer_wrappers import (
    LN2,
    BatchAttention,
    BatchDecode,
    BatchPrefill,
    BatchRagged,
    GraphBatchDecode,
    attention_varlen,
    attention_with_kvcache,
    decode,
    fast_decode_plan,
    halves,
    plain_parts,
    score_options,
)
from suite_adapters.serving import Module, refuse, serve

append_kv = serve(dlattn.append_kv)
attention = serve(dlattn.attention)


def merge_state(v_a: Any, s_a: Any, v_b: Any, s_b: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return merge((v_a, v_b), (s_a, s_b))


def merge_state_in_place(v: Any, s: Any, v_other: Any, s_other: Any, mask: Any = None) -> None:
    out, lse = merge((v, v_other), (s, s_other))
    chosen = slice(None) if mask is None else mask
    v[chosen], s[chosen] = out[chosen], lse[chosen]


def append_paged_kv_cache(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: Any,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    kv_layout: str = "NHD",
) -> None:
    k, v = halves(paged_kv_cache)
    if kv_layout == "HND":
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    size = k.shape[1]
    pages = kv_indices[(kv_indptr[batch_indices.long()] + positions // size).long()]
    append_kv(append_key, append_value, k, v, slots=(pages * size + positions % size).int())


def get_seq_lens(indptr: Any, last_page_len: Any, page_size: int) -> torch.Tensor:
    pages = indptr[1:] - indptr[:-1]
    return ((pages - 1).clamp_min(0) * page_size + last_page_len * (pages > 0)).int()


def get_batch_indices_positions(indptr: Any, seq_lens: Any, rows: int) -> tuple[Any, Any]:
    row = torch.arange(rows, device=indptr.device)
    owner = torch.searchsorted(indptr[1:].long(), row, right=True)
    last = seq_lens[owner] - indptr[1:][owner]
    return owner.int(), (row + last).int()


def xqa_batch_decode_with_kv_cache(
    query: torch.Tensor,
    kv_cache: Any,
    workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    bmm1_scale: Any = 1.0,
    bmm2_scale: Any = 1.0,
    window_left: int = -1,
    out: Any = None,
    sinks: Any = None,
    kv_layout: str = "NHD",
    q_len_per_req: int = 1,
    mask: Any = None,
    q_cu_seq_lens: Any = None,
    **_: Any,
) -> torch.Tensor:
    """Attention of one or some drafted tokens, which see each other as bits of `mask` say."""
    k, v = halves(kv_cache)
    options: dict[str, Any] = {
        "seqused_k": seq_lens.int(),
        "page_table": block_tables.int().contiguous(),
        "softmax_scale": float(bmm1_scale),
        "window": (window_left if window_left >= 0 else None, None),
        "sinks": sinks,
        "out": out,
    }
    if mask is not None:
        options["mask"] = _draft_mask(mask, seq_lens, max_seq_len, q_len_per_req, q_cu_seq_lens)
    if q_cu_seq_lens is None:
        out = decode(
            query, k, v, kv_layout, q_len_per_req, max_seqlen_k=int(max_seq_len), **options
        )[0]
    else:
        if kv_layout == "HND":
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        longest = (q_len_per_req, int(max_seq_len))
        out = attention_varlen(query, k, v, q_cu_seq_lens, None, *longest, **options)
    return out if float(bmm2_scale) == 1 else out.mul_(float(bmm2_scale))


def _draft_mask(
    mask: torch.Tensor, seq_lens: torch.Tensor, max_seq_len: int, q_len: int, cu_seqlens: Any
) -> torch.Tensor:
    """(batch, 1, q_len, max_seq_len): all keys before the drafts, and of these what the bits say.

    Args:
        mask: Words of 16 bits, of rows (batch, q_len) or with cu_seqlens (total_q,).
    """
    words = mask.view(torch.int16).int()
    bits = (words[..., None] >> torch.arange(16, device=mask.device)) & 1
    bits = bits.flatten(-2).bool()
    counts = q_len
    if cu_seqlens is not None:
        counts = cu_seqlens[1:] - cu_seqlens[:-1]
        row = cu_seqlens[:-1, None] + torch.arange(q_len, device=mask.device)
        bits = bits[row.clamp_max(bits.shape[0] - 1).long()]
    draft = torch.arange(max_seq_len, device=mask.device) - (seq_lens - counts)[:, None]
    column = draft.clamp(0, bits.shape[-1] - 1)[:, None].expand(-1, q_len, -1)
    seen = (draft < 0)[:, None] | bits.gather(2, column.long())
    return seen[:, None]


def single_decode_with_kv_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    return_lse: bool = False,
    **options: Any,
) -> Any:
    heads_first = kv_layout == "HND"
    slopes = _slopes(q) if pos_encoding_mode == "ALIBI" else None
    options["pos_encoding_mode"] = "NONE" if slopes is not None else pos_encoding_mode
    found = score_options(options, q.shape[-1])
    if "single" in plain_parts or ("cuda cores" in plain_parts and not use_tensor_cores):
        if slopes is not None:
            refuse("a plain computation with ALiBi: not offered by the adapter")
        k, v = (x.transpose(0, 1) if heads_first else x for x in (k, v))
        out, lse = plain.attention(
            q[None],
            k,
            v,
            scale=found["softmax_scale"],
            window_left=options.get("window_left", -1),
            softcap=found["softcap"],
        )
        return (out[0], lse[0] / LN2) if return_lse else out[0]
    out, lse = attention_with_kvcache(
        q[None, :, None] if heads_first else q[None, None],
        k[None],
        v[None],
        seqused_k=torch.tensor([k.shape[-2 if heads_first else 0]], dtype=torch.int32).to(q.device),
        alibi_slopes=slopes,
        layout="bhsd" if heads_first else "bshd",
        return_lse=True,
        **found,
    )
    out = out.reshape(q.shape)
    return (out, lse.reshape(-1) / LN2) if return_lse else out


def single_prefill_with_kv_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    custom_mask: Any = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    return_lse: bool = False,
    **options: Any,
) -> Any:
    alibi = pos_encoding_mode == "ALIBI"
    options["pos_encoding_mode"] = "NONE" if alibi else pos_encoding_mode
    found = score_options(options, q.shape[-1])
    if kv_layout == "HND":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    if "single" in plain_parts:
        if alibi:
            refuse("a plain computation with ALiBi: not offered by the adapter")
        out, lse = plain.attention(
            q,
            k,
            v,
            scale=found["softmax_scale"],
            causal=causal,
            window_left=options.get("window_left", -1),
            softcap=found["softcap"],
            mask=custom_mask,
        )
        return (out, lse / LN2) if return_lse else out
    # FlashInfer adds slope * (key - query), which for keys behind the query is not ALiBi's.
    linear = alibi and not causal
    keys = torch.arange(k.shape[0], device=q.device, dtype=torch.float32)
    out, lse = attention(
        q[None],
        k[None],
        v[None],
        causal=causal,
        mask=None if custom_mask is None else custom_mask.bool(),
        alibi_slopes=_slopes(q) if alibi and causal else None,
        bias=_slopes(q)[None, :, None, None] * keys if linear else None,
        return_lse=True,
        **found,
    )
    return (out[0], lse[0].transpose(0, 1) / LN2) if return_lse else out[0]


def _slopes(q: torch.Tensor) -> torch.Tensor:
    """ALiBi's slopes for a power of two of heads."""
    heads = q.shape[-2]
    if heads & (heads - 1):
        refuse(f"ALiBi's slopes of {heads} heads: not offered by the adapter")
    return 2.0 ** (-8 / heads * torch.arange(1, heads + 1, device=q.device, dtype=torch.float32))


def _capability(*_: Any) -> tuple[int, int]:
    """The capability of the GPU; without one that of Hopper, which all tests of 16 bits run on."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)


def install() -> None:
    """Put FlashInfer's modules into sys.modules, and what its tests' helpers compile with it."""
    decode = {
        "BatchDecodeWithPagedKVCacheWrapper": BatchDecode,
        "CUDAGraphBatchDecodeWithPagedKVCacheWrapper": GraphBatchDecode,
        "fast_decode_plan": fast_decode_plan,
        "single_decode_with_kv_cache": single_decode_with_kv_cache,
        "xqa_batch_decode_with_kv_cache": xqa_batch_decode_with_kv_cache,
    }
    prefill = {
        "BatchPrefillWithPagedKVCacheWrapper": BatchPrefill,
        "BatchPrefillWithRaggedKVCacheWrapper": BatchRagged,
        "single_prefill_with_kv_cache": single_prefill_with_kv_cache,
    }
    cascade = {
        "BatchDecodeWithSharedPrefixPagedKVCacheWrapper": SharedPrefix,
        "BatchPrefillWithSharedPrefixPagedKVCacheWrapper": SharedPrefix,
        "MultiLevelCascadeAttentionWrapper": MultiLevelCascade,
        "merge_state": merge_state,
        "merge_state_in_place": merge_state_in_place,
    }
    page = {
        "append_paged_kv_cache": append_paged_kv_cache,
        "get_batch_indices_positions": get_batch_indices_positions,
        "get_seq_lens": get_seq_lens,
    }
    everything = {**decode, **prefill, **cascade, **page}
    attention_wrappers = {
        "BatchAttention": BatchAttention,
        "BatchAttentionWithAttentionSinkWrapper": BatchPrefill,
    }
    Module("flashinfer", **attention_wrappers, **everything)
    for name, contents in (
        ("decode", decode),
        ("prefill", prefill),
        ("cascade", cascade),
        ("page", page),
    ):
        Module(f"flashinfer.{name}", **contents)
    utils = {
        "get_compute_capability": _capability,
        "has_flashinfer_jit_cache": lambda: True,  # nothing is compiled before the tests
        "is_sm90a_supported": lambda *_: False,  # its cases are those of "fa2" again
    }
    Module("flashinfer.utils", **utils)
    for name in ("fp4_quantization", "jit", "jit.attention"):
        Module(f"flashinfer.{name}")
    # Texts that tests put together before they ask for a kernel made of them.
    Module("flashinfer.jit.attention.variants", attention_sink_decl=defaultdict(str))
    Module("flashinfer.jit.utils", filename_safe_dtype_map=defaultdict(str))
    for name in ("jit_utils", "utils_fp4"):
        Module(f"tests.test_helpers.{name}")
