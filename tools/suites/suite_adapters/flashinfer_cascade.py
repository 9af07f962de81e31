"""FlashInfer's wrappers for sequences that share keys, and merging of what parts of keys gave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import dlattn
from suite_adapters.flashinfer_wrappers import (
    LN2,
    BatchPrefill,
    Paged,
    halves,
    plain_pages,
    score_options,
)
from suite_adapters.serving import serve

merge_states = serve(dlattn.merge_states)


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


class SharedPrefix(Paged):
    """The wrappers with a shared prefix: plain, since cascades are compared with them."""

    def begin_forward(self, *lists: Any, **options: Any) -> None:
        self.indptr = lists[0].tolist() if len(lists) == 8 else None
        *lists, _, _, _, page_size = lists[-7:]
        self.plan_pages(lists, page_size, options)

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
        return plain_pages(q, rows, *halves(unique_kv_cache), self, options, shared)[0]


def merge(outs: Sequence[Any], lses: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """dlattn's merge_states, of (rows, num_heads, head_dim) and lse of base 2."""
    out, lse = merge_states(
        [out[None] for out in outs],
        [(lse.float() * LN2).transpose(0, 1)[None].contiguous() for lse in lses],
    )
    return out[0], lse[0].transpose(0, 1) / LN2
