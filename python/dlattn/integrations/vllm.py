"""dlattn as an attention backend of vLLM, by the name "DLATTN".

Source: vLLM 0.33.0, `vllm/v1/attention/backend.py` and the backends beside it. A layer's cache is
(num_blocks, num_heads_kv, block_size, 2 * head_size) there, keys and values of a token in one row,
in memory of any order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import vllm.envs as envs
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)

import dlattn
from dlattn.integrations.vllm_plugin import NAME

_8_BIT_DTYPES = ["fp8", "fp8_e4m3"]  # one type by two names
_16_BIT_DTYPES = ["float16", "bfloat16"]
_CACHE_DTYPES = ["auto", *_16_BIT_DTYPES, *_8_BIT_DTYPES]


class DlattnBackend(AttentionBackend):
    """The class that vLLM asks about a backend before it builds a model."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = _CACHE_DTYPES
    forward_includes_kv_cache_update = False
    supports_kv_cache_update_bypass = True  # forward() reads nothing but the cache

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_impl_cls() -> type[DlattnImpl]:
        return DlattnImpl

    @staticmethod
    def get_builder_cls() -> type[DlattnMetadataBuilder]:
        return DlattnMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(1)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        step = 8 if head_size <= 256 else 16  # which caches of 8 bits ask for beyond 256
        return head_size % step == 0 and 8 <= head_size <= 512

    @classmethod
    def supports_dtype(cls, dtype: torch.dtype) -> bool:
        on_cpu = dtype == torch.float32 and current_platform.is_cpu()
        return on_cpu or super().supports_dtype(dtype)

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: Any,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> str | None:
        model = str(dtype).removeprefix("torch.")
        in_32_bits = dtype == torch.float32 and kv_cache_dtype in _8_BIT_DTYPES
        # vLLM converts no keys: a cache of 16 bits has the dtype of the model's queries.
        other = kv_cache_dtype in _16_BIT_DTYPES and kv_cache_dtype != model
        if in_32_bits or other:
            return f"kv_cache_dtype {kv_cache_dtype} not supported with {model}"
        return None

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return capability is None or bool(capability.major >= 8)  # CPUs have none

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True


@dataclass
class DlattnMetadata(AttentionMetadata):
    """The lists that the layers of a step share.

    Attributes:
        num_actual_tokens: Rows of the queries that are tokens; what follows is padding.
        max_query_len: At least the number of queries of each sequence.
        max_seq_len: At least the number of keys of each sequence.
        query_start_loc: int32 (num_reqs + 1,).
        seq_lens: int32 (num_reqs,): keys, those of this step among them.
        block_table: int32 (num_reqs, max_blocks).
        slot_mapping: int64 (num_tokens,).
        causal: Whether the last query sees the last key, and each earlier one a key less.
    """

    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool


class DlattnMetadataBuilder(AttentionMetadataBuilder[DlattnMetadata]):
    """Metadata of references alone: kernels read lengths and tables where vLLM keeps them."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS
    supports_update_block_table = True
    supports_draft_decode_metadata_update = True

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: list[str],
        vllm_config: Any,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.block_size: int = kv_cache_spec.block_size

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> DlattnMetadata:
        common = common_attn_metadata
        if not isinstance(common.causal, bool):
            raise NotImplementedError(
                "causal is a tensor, of one value for each request; the backend DLATTN accepts one "
                "bool for all"
            )
        return DlattnMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            max_seq_len=min(common.max_seq_len, self._room(common.block_table_tensor)),
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            causal=common.causal,
        )

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> DlattnMetadata:
        # Replays may have any lengths that the table has room for.
        metadata = self.build(0, common_attn_metadata)
        return replace(metadata, max_seq_len=self._room(metadata.block_table))

    def update_block_table(
        self, metadata: DlattnMetadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> DlattnMetadata:
        return replace(metadata, block_table=blk_table, slot_mapping=slot_mapping)

    def update_draft_decode_metadata(self, metadata: DlattnMetadata) -> None:
        """Nothing: the metadata refers to tensors that vLLM has updated."""

    def _room(self, block_table: torch.Tensor) -> int:
        return int(block_table.shape[1]) * self.block_size


class DlattnImpl(AttentionImpl[DlattnMetadata]):
    """Attention of one layer: `dlattn.attention_varlen` over the cache's pages."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(
                f"attn_type is {attn_type!r}; the backend DLATTN accepts {AttentionType.DECODER!r}"
            )
        if kv_cache_dtype not in _CACHE_DTYPES:
            accepted = ", ".join(_CACHE_DTYPES)
            raise NotImplementedError(
                f"kv_cache_dtype is {kv_cache_dtype!r}; the backend DLATTN accepts {accepted}"
            )
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.logits_soft_cap = logits_soft_cap or 0.0
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sliding_window = sliding_window
        self.sinks = sinks
        self.alibi_slopes = (
            None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        )
        self.batch_invariant = bool(envs.VLLM_BATCH_INVARIANT)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: DlattnMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write attention over what the cache has to `output`, (num_tokens, num_heads, head_size).

        `key` and `value` are not read: `do_kv_cache_update` has written them to the cache.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("the backend DLATTN writes no quantized output")
        if attn_metadata is None:  # vLLM measures memory
            return output.fill_(0)
        tokens = attn_metadata.num_actual_tokens
        k_cache, v_cache = self._caches(kv_cache)
        if self.alibi_slopes is not None and self.alibi_slopes.device != query.device:
            self.alibi_slopes = self.alibi_slopes.to(query.device)
        dlattn.attention_varlen(
            query[:tokens],
            k_cache,
            v_cache,
            attn_metadata.query_start_loc,
            None,
            attn_metadata.max_query_len,
            attn_metadata.max_seq_len,
            seqused_k=attn_metadata.seq_lens,
            page_table=attn_metadata.block_table,
            causal=attn_metadata.causal,
            softmax_scale=self.scale,
            window=self._window(attn_metadata.causal),
            softcap=self.logits_soft_cap,
            alibi_slopes=self.alibi_slopes,
            sinks=None if self.sinks is None else self.sinks.detach().float(),
            out=output[:tokens],
            batch_invariant=self.batch_invariant,
            k_descale=self._scale(layer, "_k_scale"),
            v_descale=self._scale(layer, "_v_scale"),
        )
        return output

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write a step's keys and values to the cache; a slot of -1 is of no token."""
        tokens = slot_mapping.shape[0]  # keys and values may be padded behind them
        k_cache, v_cache = self._caches(kv_cache)
        dlattn.append_kv(
            key[:tokens],
            value[:tokens],
            k_cache,
            v_cache,
            slots=slot_mapping,
            k_descale=self._scale(layer, "_k_scale"),
            v_descale=self._scale(layer, "_v_scale"),
        )

    def _scale(self, layer: Any, name: str) -> torch.Tensor | None:
        """The factor of a cache in 8 bits: a layer's, in a tensor that vLLM may still write to."""
        return getattr(layer, name) if self.kv_cache_dtype in _8_BIT_DTYPES else None

    def _caches(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, each (num_blocks, block_size, num_heads_kv, head_size)."""
        if self.kv_cache_dtype in _8_BIT_DTYPES:
            kv_cache = kv_cache.view(torch.float8_e4m3fn)  # vLLM has them as bytes
        pages = kv_cache.transpose(1, 2)
        return pages[..., : self.head_size], pages[..., self.head_size :]

    def _window(self, causal: bool) -> tuple[int | None, int | None]:
        """A window of vLLM counts a query's own key, on either side if queries see behind them."""
        if self.sliding_window is None:
            return (None, None)
        left = self.sliding_window - 1
        return (left, 0 if causal else left)
