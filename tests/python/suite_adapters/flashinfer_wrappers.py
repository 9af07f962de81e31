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
merge_states = serve(dlattn.merge_states)
page_table_from_csr = serve(dlattn.page_table_from_csr)

plain_parts: set[str] = set()


def begin(test: str) -> None:
    """Choose what is plain in a test function: attention of single sequences where a wrapper is
    compared with it, or the kernel without tensor cores where those are."""
    plain_parts.clear()
    of_cores = "tensor_cores" in test or test == "test_mlc_failed_case"
    if of_cores:
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


def _scaled(options: dict[str, Any], q_scale: Any, k_scale: Any, v_scale: Any) -> dict[str, Any]:
    if v_scale is not None:
        refuse("v_scale: not an option of dlattn's attention")
    for scale in (q_scale, k_scale):
        options["softmax_scale"] *= 1.0 if scale is None else float(scale)
    return options


def halves(cache: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """K's and V's pages of a cache, which is a pair or has them in a dimension of two."""
    k, v = cache if isinstance(cache, (tuple, list)) else (cache[:, 0], cache[:, 1])
    # The wrapper with sinks takes lists of tokens, which are pages of one row.
    return (k, v) if k.dim() == 4 else (k[:, None], v[:, None])


class _Paged:
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

    def _plan(self, lists: Sequence[torch.Tensor], page_size: int, options: Any) -> None:
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


class BatchDecode(_Paged):
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
        self._plan((indptr, indices, last_page_len), page_size, options)
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
        options = _scaled(score_options(self.planned, q.shape[-1]), q_scale, k_scale, v_scale)
        k, v = halves(paged_kv_cache)
        if "cuda cores" in plain_parts and not self.use_tensor_cores:
            made, lse = _plain_pages(q, range(q.shape[0] + 1), k, v, self, options)
            return (made, lse) if return_lse else made
        heads_first = self.layout == "HND"
        dim = 2 if heads_first else 1

        def by_sequence(x: torch.Tensor) -> torch.Tensor:
            if self.q_len == 1:
                return x.unsqueeze(dim)
            x = x.unflatten(0, (-1, self.q_len))
            return x.transpose(1, 2) if heads_first else x

        made, lse = attention_with_kvcache(
            by_sequence(q),
            k,
            v,
            seqused_k=self.lengths,
            page_table=self.table,
            causal=self.q_len > 1,
            layout="bhsd" if heads_first else "bshd",
            out=None if out is None else by_sequence(out),
            return_lse=True,
            batch_invariant=self.invariant,
            **options,
        )
        if out is None:
            out = (made.transpose(1, 2) if heads_first else made).flatten(0, 1)
        return (out, lse.transpose(1, 2).flatten(0, 1) / LN2) if return_lse else out

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


class BatchPrefill(_Paged):
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
        self._plan(lists, page_size, options)
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
        options = _scaled(score_options(planned, q.shape[-1]), q_scale, k_scale, v_scale)
        k, v = halves(paged_kv_cache)
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
            causal=self.causal,
            sinks=sinks,
            out=out,
            return_lse=True,
            batch_invariant=self.invariant,
            **options,
        )
        return (out, lse.transpose(0, 1) / LN2) if return_lse else out


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


class MultiLevelCascade:
    """MultiLevelCascadeAttentionWrapper: each level by itself, then merged."""

    def __init__(self, num_levels: int, workspace: torch.Tensor, kv_layout: str = "NHD") -> None:
        self.levels = [BatchPrefill(workspace, kv_layout) for _ in range(num_levels)]

    def plan(
        self,
        qo_indptr: Sequence[torch.Tensor],
        kv_indptr: Sequence[torch.Tensor],
        kv_indices: Sequence[torch.Tensor],
        last_page_len: Sequence[torch.Tensor],
        *shape: int,
        causal: bool = False,
        **options: Any,
    ) -> None:
        lists = zip(qo_indptr, kv_indptr, kv_indices, last_page_len, strict=True)
        for level, each in zip(self.levels, lists, strict=True):
            level.plan(*each, *shape, causal=causal and level is self.levels[-1], **options)

    def run(self, q: torch.Tensor, paged_kv_cache: Any) -> torch.Tensor:
        parts = [level.run(q, paged_kv_cache, return_lse=True) for level in self.levels]
        return merge([out for out, _ in parts], [lse for _, lse in parts])[0]


class SharedPrefix(_Paged):
    """The wrappers with a shared prefix: plain, since cascades are compared with them."""

    def begin_forward(self, *lists: Any, **options: Any) -> None:
        self.indptr = lists[0].tolist() if len(lists) == 8 else None
        *lists, _, _, _, page_size = lists[-7:]
        self._plan(lists, page_size, options)

    def forward(
        self,
        q: torch.Tensor,
        k_shared: torch.Tensor,
        v_shared: torch.Tensor,
        unique_kv_cache: Any,
        causal: bool = False,
    ) -> torch.Tensor:
        rows = self.indptr or range(q.shape[0] + 1)
        options = {**score_options(self.planned, q.shape[-1]), "causal": causal}
        shared = (k_shared, v_shared)
        return _plain_pages(q, rows, *halves(unique_kv_cache), self, options, shared)[0]


def _plain_pages(
    q: torch.Tensor,
    rows: Sequence[int],
    k: torch.Tensor,
    v: torch.Tensor,
    pages: _Paged,
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


def merge(outs: Sequence[Any], lses: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """dlattn's merge_states, of (rows, num_heads, head_dim) and lse of base 2."""
    out, lse = merge_states(
        [out[None] for out in outs],
        [(lse.float() * LN2).transpose(0, 1)[None].contiguous() for lse in lses],
    )
    return out[0], lse[0].transpose(0, 1) / LN2
