"""The part of SGLang's interface that dlattn's backend is built on, for machines without SGLang.

Names, parameters and defaults are those of SGLang 0.5.23; what they do is the little that tests
need.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any


class AttentionArch(enum.IntEnum):
    MLA = 1
    MHA = 2
    SSM = 3


class AttentionType(enum.Enum):
    DECODER = "decoder"
    DECODER_BIDIRECTIONAL = "decoder_bidirectional"
    ENCODER_ONLY = "encoder_only"


class ForwardMode(enum.IntEnum):
    EXTEND = 1
    DECODE = 2
    MIXED = 3
    IDLE = 4
    DLLM_EXTEND = 5

    def is_decode_or_idle(self) -> bool:
        return self in (ForwardMode.DECODE, ForwardMode.IDLE)

    def is_mixed(self) -> bool:
        return self == ForwardMode.MIXED

    def is_dllm_extend(self) -> bool:
        return self == ForwardMode.DLLM_EXTEND

    def is_decode(self) -> bool:
        return self == ForwardMode.DECODE

    def is_idle(self) -> bool:
        return self == ForwardMode.IDLE


@dataclass
class KVWriteLoc:
    loc: Any
    swa_loc: Any = None
    full_loc: Any = None
    physical: bool = False

    @classmethod
    def for_layer(
        cls, forward_batch: Any, layer: Any, *, swa_loc: Any = None, full_loc: Any = None
    ) -> Any:
        physical = forward_batch.out_cache_loc_is_physical
        return cls(forward_batch.out_cache_loc, swa_loc, full_loc, physical)


class AttentionBackend:
    forward_metadata: Any = None
    kv_cache_dtype: Any = None
    needs_cpu_seq_lens = True

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.init_forward_metadata_out_graph(forward_batch)
        self.init_forward_metadata_in_graph(forward_batch)

    def init_forward_metadata_out_graph(
        self, forward_batch: Any, in_capture: bool = False
    ) -> None: ...

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None: ...

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        raise NotImplementedError

    def get_cuda_graph_seq_len_fill_value(self) -> Any:
        raise NotImplementedError

    def forward(
        self,
        q: Any,
        k: Any,
        v: Any,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Any:
        mode = forward_batch.forward_mode
        if mode.is_idle():
            return q.new_empty(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)
        step = self.forward_decode if mode.is_decode() else self.forward_extend
        return step(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)

    def forward_decode(
        self,
        q: Any,
        k: Any,
        v: Any,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Any:
        raise NotImplementedError

    def forward_extend(
        self,
        q: Any,
        k: Any,
        v: Any,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Any:
        raise NotImplementedError


ATTENTION_BACKENDS: dict[str, Any] = {}
ATTENTION_BACKEND_CHOICES = ["triton", "flashinfer", "fa3"]
DETERMINISTIC_ATTENTION_BACKEND_CHOICES = ["triton", "fa3", "flashinfer"]
RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND = ["triton", "fa3"]
EXEC = SimpleNamespace(deterministic=SimpleNamespace(enable_deterministic_inference=False))


def register_attention_backend(name: str) -> Any:
    def decorator(fn: Any) -> Any:
        ATTENTION_BACKENDS[name] = fn
        return fn

    return decorator


def get_exec() -> Any:
    return EXEC


MODULES: dict[str, dict[str, Any]] = {
    "sglang": {},
    "sglang.srt": {},
    "sglang.srt.configs": {},
    "sglang.srt.configs.model_config": {"AttentionArch": AttentionArch},
    "sglang.srt.layers": {},
    "sglang.srt.layers.attention": {},
    "sglang.srt.layers.attention.attention_registry": {
        "ATTENTION_BACKENDS": ATTENTION_BACKENDS,
        "register_attention_backend": register_attention_backend,
    },
    "sglang.srt.layers.attention.base_attn_backend": {"AttentionBackend": AttentionBackend},
    "sglang.srt.layers.radix_attention": {"AttentionType": AttentionType},
    "sglang.srt.mem_cache": {},
    "sglang.srt.mem_cache.memory_pool": {"KVWriteLoc": KVWriteLoc},
    "sglang.srt.model_executor": {},
    "sglang.srt.model_executor.forward_batch_info": {"ForwardMode": ForwardMode},
    "sglang.srt.runtime_context": {"get_exec": get_exec},
    "sglang.srt.server_args": {
        "ATTENTION_BACKEND_CHOICES": ATTENTION_BACKEND_CHOICES,
        "DETERMINISTIC_ATTENTION_BACKEND_CHOICES": DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
        "add_attention_backend_choices": ATTENTION_BACKEND_CHOICES.extend,
        "add_deterministic_attention_backend_choices": (
            DETERMINISTIC_ATTENTION_BACKEND_CHOICES.extend
        ),
        "RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND": (
            RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND
        ),
        "add_radix_supported_deterministic_attention_backend_choices": (
            RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND.extend
        ),
    },
}
