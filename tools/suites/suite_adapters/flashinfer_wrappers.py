"""FlashInfer's wrappers, which keep what `plan` is told and call dlattn in `run`.

Tests compare wrappers with functions of the same package: `begin` says which of these are plain
computations, so that dlattn is not compared with itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

import dlattn
from suite_adapters import plain
from suite_adapters.serving import refuse, serve

LN2 = math.log(2)  # FlashInfer's lse is a logarithm to base 2

attention_varlen = serve(dlattn.attention_varlen)
attention_with_kvcache = serve(dlattn.attention_with_kvcache)
page_table_from_csr = serve(dlattn.page_table_from_csr)

plain_parts: set[str] = set()
_AGAINST_WRAPPERS = (
    "test_batch_attention_correctness",
    "test_batch_attention_with_noncontiguous_q",
)


def begin(test: str) -> None:
    """Choose what is plain in a test function: the wrappers where another function is compared with
    them, the kernel without tensor cores where the one with them is, and else attention of single
    sequences where a wrapper is compared with it."""
    plain_parts.clear()
    if test.startswith("test_xqa") or test in _AGAINST_WRAPPERS:
        plain_parts.add("wrappers")
    elif "tensor_cores" in test or test == "test_mlc_failed_case":
        plain_parts.add("cuda cores")
    elif not test.startswith("test_single"):
        plain_parts.add("single")


def score_options(options: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """dlattn's options for scores."""
    mode = options.get("pos_encoding_mode") or "NONE"
    if mode != "NONE":
        refuse(f"pos_encoding_mode {mode}: not an option of dlattn's attention")
    left = options.get("window_left", -1)
    scale = options.get("sm_scale")
    return {
        "softmax_scale": 1 / math.sqrt(head_dim) if scale is None else float(scale),
        "softcap": options.get("logits_soft_cap") or 0.0,
        "window": (left if left >= 0 else None, None),
    }


def _scaled(options: dict[str, Any], q_scale: Any, k_scale: Any) -> dict[str, Any]:
    for scale in (q_scale, k_scale):
        options["softmax_scale"] *= 1.0 if scale is None else float(scale)
    return options


def halves(cache: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """K's and V's pages of a cache, which is a pair or has them in a dimension of two."""
    k, v = cache if isinstance(cache, (tuple, list)) else (cache[:, 0], cache[:, 1])
    # The wrapper with sinks takes lists of tokens, which are pages of one row.
    return (k, v) if k.dim() == 4 else (k[:, None], v[:, None])


class Paged:
    """Lists of pages, as `plan` gets them, and dlattn's table of them."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        *,
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Any = None,
        paged_kv_indices_buffer: Any = None,
        paged_kv_last_page_len_buffer: Any = None,
        **options: Any,
    ) -> None:
        self.device = float_workspace_buffer.device
        self.layout = kv_layout
        self.use_tensor_cores = use_tensor_cores
        self.options = options
        self.room = None
        if use_cuda_graph:  # the same table in every replay: an equal share of the pages for each
            batch = paged_kv_last_page_len_buffer.shape[0]
            self.room = -(-paged_kv_indices_buffer.shape[0] // batch)
        self.table: Any = None

    def plan_pages(self, lists: Sequence[torch.Tensor], page_size: int, options: Any) -> None:
        options = {**self.options, **options}
        indptr, indices, last_page_len = (x.to(self.device).int() for x in lists)
        table, lengths = page_table_from_csr(
            indptr, indices, last_page_len, page_size=page_size, max_pages=self.room
        )
        if self.room is None or self.table is None:
            self.table, self.lengths = table, lengths
        else:
            self.table.copy_(table)
            self.lengths.copy_(lengths)
        self.planned = options
        split = options.get("fixed_split_size") or options.get("disable_split_kv")
        self.invariant = bool(split)


def decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: str,
    q_len: int,
    out: Any = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """dlattn's attention_with_kvcache, of rows (sequences * q_len, num_heads, head_dim).

    Returns:
        out, or what is new, and lse of base 2, (rows, num_heads).
    """
    heads_first = layout == "HND"

    def by_sequence(x: torch.Tensor) -> torch.Tensor:
        x = x.unflatten(0, (-1, q_len)) if q_len > 1 else x.unsqueeze(1)
        return x.transpose(1, 2) if heads_first else x

    made, lse = attention_with_kvcache(
        by_sequence(q),
        k,
        v,
        layout="bhsd" if heads_first else "bshd",
        out=None if out is None else by_sequence(out),
        return_lse=True,
        **options,
    )
    if out is None:
        out = (made.transpose(1, 2) if heads_first else made).flatten(0, 1)
    return out, lse.transpose(1, 2).flatten(0, 1) / LN2


class BatchDecode(Paged):
    """BatchDecodeWithPagedKVCacheWrapper."""

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        **options: Any,
    ) -> None:
        self.plan_pages((indptr, indices, last_page_len), page_size, options)
        self.q_len = options.get("q_len_per_req") or 1

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: Any,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        out: Any = None,
        return_lse: bool = False,
        **_: Any,
    ) -> Any:
        options = _scaled(score_options(self.planned, q.shape[-1]), q_scale, k_scale)
        k, v = halves(paged_kv_cache)
        cuda_cores = "cuda cores" in plain_parts and not self.use_tensor_cores
        if cuda_cores or "wrappers" in plain_parts:
            rows = range(0, q.shape[0] + 1, self.q_len)
            options["causal"] = self.q_len > 1
            made, lse = plain_pages(q, rows, k, v, self, options)
        else:
            made, lse = decode(
                q,
                k,
                v,
                self.layout,
                self.q_len,
                seqused_k=self.lengths,
                page_table=self.table,
                causal=self.q_len > 1,
                out=out,
                batch_invariant=self.invariant,
                **options,
            )
        if v_scale is not None:
            made.mul_(float(v_scale))
        return (made, lse) if return_lse else made

    def run_return_lse(self, q: torch.Tensor, paged_kv_cache: Any, **options: Any) -> Any:
        return self.run(q, paged_kv_cache, return_lse=True, **options)


class GraphBatchDecode(BatchDecode):
    """CUDAGraphBatchDecodeWithPagedKVCacheWrapper."""

    def __init__(
        self,
        workspace_buffer: torch.Tensor,
        indptr_buffer: torch.Tensor,
        indices_buffer: torch.Tensor,
        last_page_len_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ) -> None:
        super().__init__(
            workspace_buffer,
            kv_layout,
            use_cuda_graph=True,
            use_tensor_cores=use_tensor_cores,
            paged_kv_indptr_buffer=indptr_buffer,
            paged_kv_indices_buffer=indices_buffer,
            paged_kv_last_page_len_buffer=last_page_len_buffer,
        )


def fast_decode_plan(
    wrapper: BatchDecode,
    *lists: Any,
    non_blocking: bool = True,
    global_override_indptr_cpu: Any = None,
    **options: Any,
) -> None:
    """plan, which waits for the GPU here either way."""
    type(wrapper).plan(wrapper, *lists, **options)


class BatchPrefill(Paged):
    """BatchPrefillWithPagedKVCacheWrapper, and the wrapper with sinks."""

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        causal: bool = False,
        **options: Any,
    ) -> None:
        if options.get("custom_mask") is not None:
            refuse("custom_mask, of bits: not an option of dlattn's attention")
        lists = (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self.plan_pages(lists, page_size, options)
        self.indptr = qo_indptr.to(self.device).int()
        self.longest = int((self.indptr[1:] - self.indptr[:-1]).max())
        self.causal = causal

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: Any,
        sinks: Any = None,
        sm_scale: Any = None,
        *,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        out: Any = None,
        return_lse: bool = False,
        **_: Any,
    ) -> Any:
        planned = self.planned if sm_scale is None else {**self.planned, "sm_scale": sm_scale}
        options = _scaled(score_options(planned, q.shape[-1]), q_scale, k_scale)
        options["causal"] = self.causal
        k, v = halves(paged_kv_cache)
        if "wrappers" in plain_parts and type(self) is BatchPrefill:
            out, lse = plain_pages(q, self.indptr.tolist(), k, v, self, options)
            out = out if v_scale is None else out.mul_(float(v_scale))
            return (out, lse) if return_lse else out
        if self.layout == "HND":
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        out, lse = attention_varlen(
            q,
            k,
            v,
            self.indptr,
            None,
            self.longest,
            self.table.shape[1] * k.shape[1],
            seqused_k=self.lengths,
            page_table=self.table,
            sinks=sinks,
            out=out,
            return_lse=True,
            batch_invariant=self.invariant,
            **options,
        )
        out = out if v_scale is None else out.mul_(float(v_scale))
        return (out, lse.transpose(0, 1) / LN2) if return_lse else out


class BatchAttention(BatchPrefill):
    """BatchAttention, for sequences of many and of few queries at once."""

    def __init__(self, kv_layout: str = "NHD") -> None:
        super().__init__(torch.empty(0), kv_layout)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int,
        page_size: int,
        **options: Any,
    ) -> None:
        self.device = qo_indptr.device
        last = (kv_len - 1) % page_size + 1
        lists = (qo_indptr, kv_indptr, kv_indices, last)
        super().plan(*lists, num_qo_heads, num_kv_heads, head_dim_qk, page_size, **options)

    def run(self, q: torch.Tensor, kv_cache: Any, **options: Any) -> Any:
        return super().run(q, kv_cache, return_lse=True, **options)


class BatchRagged:
    """BatchPrefillWithRaggedKVCacheWrapper."""

    def __init__(self, workspace: torch.Tensor, kv_layout: str = "NHD", **_: Any) -> None:
        self.device = workspace.device
        if kv_layout != "NHD":
            refuse(f"ragged keys of {kv_layout}: not offered by the adapter")

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        causal: bool = False,
        **options: Any,
    ) -> None:
        self.lists = [x.to(self.device).int() for x in (qo_indptr, kv_indptr)]
        self.longest = [int((x[1:] - x[:-1]).max()) for x in self.lists]
        self.causal, self.planned = causal, options

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: Any = None,
        sm_scale: Any = None,
        **_: Any,
    ) -> torch.Tensor:
        planned = self.planned if sm_scale is None else {**self.planned, "sm_scale": sm_scale}
        options = score_options(planned, q.shape[-1])
        return attention_varlen(
            q, k, v, *self.lists, *self.longest, causal=self.causal, sinks=sinks, **options
        )


def plain_pages(
    q: torch.Tensor,
    rows: Sequence[int],
    k: torch.Tensor,
    v: torch.Tensor,
    pages: Paged,
    options: dict[str, Any],
    prefix: Sequence[torch.Tensor] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain attention of each sequence over its pages, with a prefix before them. The host reads no
    lengths and no pages, so that a CUDA graph can hold it."""
    outs, lses = [], []
    if pages.layout == "HND":
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    for b in range(len(rows) - 1):
        table = pages.table[b].clamp_min(0).long()  # -1 behind the last page
        kv = [x[table].flatten(0, 1) for x in (k, v)]
        if prefix:
            kv = [torch.cat(pair) for pair in zip(prefix, kv, strict=True)]
        out, lse = plain.attention(
            q[rows[b] : rows[b + 1]],
            *kv,
            scale=options["softmax_scale"],
            causal=options.get("causal", False),
            window_left=-1 if options["window"][0] is None else options["window"][0],
            softcap=options["softcap"],
            length=pages.lengths[b] + (prefix[0].shape[0] if prefix else 0),
        )
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses) / LN2
