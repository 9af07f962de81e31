"""dlattn as an attention backend of SGLang, by the name "dlattn".

Source: SGLang 0.5.23, `sglang/srt/layers/attention/base_attn_backend.py` and the backends beside
it. A layer's cache is two pools of (slots, num_heads_kv, head_dim) there, and a table tells the
slot of each token of each request; with a page size of p, slots come in runs of p.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.runtime_context import get_exec

import dlattn

_DTYPES = (torch.float16, torch.bfloat16, torch.float8_e4m3fn)


@dataclass
class DlattnMetadata:
    """The lists that the layers of a forward pass share.

    Attributes:
        seq_lens: int32 (batch,): keys of each request, those of this pass among them.
        page_table: int32 (batch, max_pages).
        cu_seqlens_q: int32 (batch + 1,); None: each request has one query.
        max_seqlen_q: At least the number of queries of each request.
        tokens: Queries of all requests, behind which there may be padding.
    """

    seq_lens: torch.Tensor
    page_table: torch.Tensor
    cu_seqlens_q: torch.Tensor | None = None
    max_seqlen_q: int = 1
    tokens: int = 0


class DlattnAttnBackend(AttentionBackend):
    """Prompts by `dlattn.attention_varlen`, steps of single tokens by `attention_with_kvcache`."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        config, pool = model_runner.model_config, model_runner.token_to_kv_pool
        if config.attention_arch == AttentionArch.MLA:
            raise _refused(
                "the model's attention is MLA", "heads with keys and values of their own"
            )
        if config.is_encoder_decoder:
            raise _refused("the model has an encoder", "decoders")
        if getattr(config, "attention_chunk_size", None) is not None:
            raise _refused("the model attends to chunks", "causal masks and sliding windows")
        on_cpu = torch.device(model_runner.device).type == "cpu"
        if model_runner.kv_cache_dtype not in (*_DTYPES, *([torch.float32] if on_cpu else [])):
            dtype = str(model_runner.kv_cache_dtype).removeprefix("torch.")
            raise _refused(
                f"kv_cache_dtype is {dtype}", "float16, bfloat16, float8_e4m3fn; on CPUs float32"
            )
        if model_runner.kv_cache_dtype.itemsize > 1 and model_runner.kv_cache_dtype != config.dtype:
            cache, model = (
                str(x).removeprefix("torch.") for x in (model_runner.kv_cache_dtype, config.dtype)
            )
            raise _refused(
                f"kv_cache_dtype is {cache} beside a model in {model}",
                "the model's dtype, float8_e4m3fn",
            )
        plain = getattr(pool, "full_kv_pool", pool)  # beside the states of linear layers
        if getattr(plain, "k_scale_buffer", None) is not None:  # as of mxfp8
            raise _refused("the pool has factors for blocks of a row", "one factor for a layer")
        if getattr(plain, "kv_cache_layout", "nhd") != "nhd":
            raise _refused(f"the pool's layout is {plain.kv_cache_layout}", "nhd")
        if getattr(pool, "swa_layer_nums", 0) > 0:
            raise _refused(
                "layers with sliding windows have a pool of their own",
                "one pool for all layers (--disable-hybrid-swa-memory)",
            )
        self.kv_cache_dtype = model_runner.kv_cache_dtype
        self.device = model_runner.device
        self.page_size: int = model_runner.page_size
        self.max_context_len: int = config.context_len
        self.token_to_kv_pool = pool
        self.req_to_token: torch.Tensor = model_runner.req_to_token_pool.req_to_token
        self.batch_invariant = bool(get_exec().deterministic.enable_deterministic_inference)
        self._one = torch.ones((), dtype=torch.float32, device=self.device)
        self.forward_metadata: DlattnMetadata | None = None
        self._graphs: DlattnMetadata | None = None  # the tensors of all CUDA graphs

    # The start of a forward pass

    def init_forward_metadata(self, forward_batch: Any) -> None:
        _refuse_modes(forward_batch)
        if self.batch_invariant and forward_batch.forward_mode.is_mixed():
            raise _refused(
                "deterministic inference of batches that mix prompts and single tokens",
                "a server without --enable-mixed-chunk",
            )
        table = self._page_table(forward_batch, self._most_keys(forward_batch))
        metadata = DlattnMetadata(forward_batch.seq_lens.to(torch.int32), table)
        if not forward_batch.forward_mode.is_decode_or_idle():
            lengths = forward_batch.extend_seq_lens_cpu
            ends = forward_batch.extend_seq_lens.cumsum(0, dtype=torch.int32)
            metadata.cu_seqlens_q = torch.nn.functional.pad(ends, (1, 0))
            metadata.max_seqlen_q = max(lengths, default=0)
            metadata.tokens = sum(lengths)
        self.forward_metadata = metadata

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        pages = -(-self.max_context_len // self.page_size)
        self._graphs = DlattnMetadata(
            torch.zeros(max_bs, dtype=torch.int32, device=self.device),
            torch.zeros(max_bs, pages, dtype=torch.int32, device=self.device),
        )

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        _refuse_modes(forward_batch)
        if not forward_batch.forward_mode.is_decode_or_idle():
            raise _refused("a CUDA graph of prompts", "CUDA graphs of decoding")
        assert self._graphs is not None
        batch = forward_batch.batch_size
        # Graphs hold these tensors in full width; a step fills as much as it has keys.
        lengths, table = self._graphs.seq_lens[:batch], self._graphs.page_table[:batch]
        lengths.copy_(forward_batch.seq_lens[:batch])
        filled = self._page_table(forward_batch, self._most_keys(forward_batch))
        table[:, : filled.shape[1]].copy_(filled[:batch])
        self.forward_metadata = DlattnMetadata(lengths, table)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def _most_keys(self, forward_batch: Any) -> int:
        """At least the number of keys of each request, as far as the host knows it."""
        known = forward_batch.seq_lens_cpu
        if known is None or known.numel() == 0:
            return self.max_context_len
        return max(1, min(int(known.max()), self.max_context_len))

    def _page_table(self, forward_batch: Any, keys: int) -> torch.Tensor:
        slots = self.req_to_token[forward_batch.req_pool_indices, :keys]
        if self.page_size > 1:
            slots = slots[:, :: self.page_size] // self.page_size
        return slots.to(torch.int32)

    # A layer's attention

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
        **others: Any,
    ) -> torch.Tensor:
        metadata, options = self._prepared(k, v, layer, forward_batch, save_kv_cache, others)
        k_cache, v_cache = self._caches(layer)
        q = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = q.new_empty(q.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        tokens = metadata.tokens
        dlattn.attention_varlen(
            q[:tokens],
            k_cache,
            v_cache,
            metadata.cu_seqlens_q,
            None,
            metadata.max_seqlen_q,
            metadata.page_table.shape[1] * self.page_size,
            seqused_k=metadata.seq_lens,
            page_table=metadata.page_table,
            sinks=None if sinks is None else sinks.detach().float(),
            out=out[:tokens],
            **options,
        )
        out[tokens:].zero_()
        return out.flatten(1)

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
        **others: Any,
    ) -> torch.Tensor:
        metadata, options = self._prepared(k, v, layer, forward_batch, save_kv_cache, others)
        k_cache, v_cache = self._caches(layer)
        out: torch.Tensor = dlattn.attention_with_kvcache(
            q.reshape(-1, 1, layer.tp_q_head_num, layer.qk_head_dim),
            k_cache,
            v_cache,
            seqused_k=metadata.seq_lens,
            page_table=metadata.page_table,
            sinks=None if sinks is None else sinks.detach().float(),
            **options,
        )
        return out.flatten(1)

    def _prepared(
        self,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool,
        others: dict[str, Any],
    ) -> tuple[DlattnMetadata, dict[str, Any]]:
        """Write new keys and values; return what to attend to, and the keywords of attention."""
        for name, value in others.items():
            if value is not None and value is not False:
                raise _refused(f"{name} is given", "a call without it")
        if layer.is_cross_attention or layer.attn_type == AttentionType.ENCODER_ONLY:
            raise _refused("a layer attends to no cache of its own", "decoder layers")
        if layer.xai_temperature_len > 0 or layer.logit_capping_method != "tanh":
            raise _refused("a temperature by position, or a cap that is no tanh", "a tanh")
        if save_kv_cache and k is not None and v is not None:
            where = KVWriteLoc.for_layer(forward_batch, layer)
            self.token_to_kv_pool.set_kv_buffer(layer, where, k, v, layer.k_scale, layer.v_scale)
        assert self.forward_metadata is not None
        scales = {}
        if self.kv_cache_dtype == torch.float8_e4m3fn:  # without factors the pool writes rounds
            for name, scale in (("k_descale", layer.k_scale), ("v_descale", layer.v_scale)):
                scales[name] = self._one if scale is None else scale.detach()
        causal = layer.attn_type != AttentionType.DECODER_BIDIRECTIONAL
        left = layer.sliding_window_size  # without the query's own key
        limited = left is not None and left > -1
        return self.forward_metadata, {
            "causal": causal,
            "softmax_scale": layer.scaling,
            "window": (left, 0 if causal else left) if limited else (None, None),
            "softcap": layer.logit_cap or 0.0,
            "batch_invariant": self.batch_invariant,
            **scales,
        }

    def _caches(self, layer: Any) -> tuple[torch.Tensor, ...]:
        """Keys and values, each (num_pages, page_size, num_heads_kv, head_dim)."""
        pools = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        return tuple(pool.unflatten(0, (-1, self.page_size)) for pool in pools)


def _refused(what: str, accepted: str) -> NotImplementedError:
    return NotImplementedError(f"attention backend dlattn: {what}; accepted: {accepted}")


def _refuse_modes(forward_batch: Any) -> None:
    if forward_batch.spec_info is not None:
        raise _refused("speculative decoding", "decoding without drafts")
    if forward_batch.forward_mode.is_dllm_extend():
        raise _refused("a diffusion language model", "models that decode token by token")
