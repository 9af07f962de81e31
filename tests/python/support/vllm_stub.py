"""The part of vLLM's interface that dlattn's backend is built on, for machines without vLLM.

Names, parameters and defaults are those of vLLM 0.33.0 (`vllm/v1/attention/backend.py` and
`backends/registry.py`); what they do is the little that tests need.
"""

from __future__ import annotations

import enum
import importlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch

M = TypeVar("M")


class AttentionType(str, enum.Enum):
    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


class AttentionCGSupport(enum.Enum):
    ALWAYS = 3
    UNIFORM_BATCH = 2
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    NEVER = 0


@dataclass(frozen=True)
class MultipleOf:
    base: int


class DeviceCapability(NamedTuple):
    major: int
    minor: int


class AttentionMetadata:
    pass


@dataclass
class CommonAttentionMetadata:
    query_start_loc: Any
    query_start_loc_cpu: Any
    seq_lens: Any
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: Any
    slot_mapping: Any
    causal: Any = True


class AttentionBackend(ABC):
    supported_dtypes = [torch.float16, torch.bfloat16]  # noqa: RUF012
    supported_kv_cache_dtypes = ["auto", "float16", "bfloat16"]  # noqa: RUF012
    forward_includes_kv_cache_update = True
    supports_kv_cache_update_bypass = False

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(1)]

    @staticmethod
    @abstractmethod
    def get_name() -> str: ...

    @staticmethod
    @abstractmethod
    def get_impl_cls() -> Any: ...

    @staticmethod
    @abstractmethod
    def get_builder_cls() -> Any: ...

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return True

    @classmethod
    def supports_dtype(cls, dtype: Any) -> bool:
        return dtype in cls.supported_dtypes

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: Any) -> bool:
        return kv_cache_dtype is None or kv_cache_dtype in cls.supported_kv_cache_dtypes

    @classmethod
    def supports_block_size(cls, block_size: Any) -> bool:
        sizes = [getattr(x, "base", x) for x in cls.get_supported_kernel_block_sizes()]
        return block_size is None or any(block_size % size == 0 for size in sizes)

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return True

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: Any,
        kv_cache_dtype: Any,
        block_size: Any,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> str | None:
        return None

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER

    @classmethod
    def validate_configuration(
        cls,
        head_size: int,
        dtype: Any,
        kv_cache_dtype: Any,
        block_size: Any,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        use_per_head_quant_scales: bool,
        device_capability: Any,
        attn_type: str,
        has_sliding_window: bool = False,
        use_non_causal: bool = False,
        use_batch_invariant: bool = False,
        use_kv_connector: bool = False,
        use_pcp: bool = False,
        use_adaptive_verification: bool = False,
        use_dcp: bool = False,
        use_rswa: bool = False,
    ) -> list[str]:
        answers = {
            "head_size": cls.supports_head_size(head_size),
            "dtype": cls.supports_dtype(dtype),
            "kv_cache_dtype": cls.supports_kv_cache_dtype(kv_cache_dtype),
            "block_size": cls.supports_block_size(block_size),
            "multimodal prefix": not use_mm_prefix or cls.supports_mm_prefix(),
            "MLA": use_mla == cls.is_mla(),
            "sinks": not has_sink or cls.supports_sink(),
            "sparse": use_sparse == cls.is_sparse(),
            "scales": not use_per_head_quant_scales or cls.supports_per_head_quant_scales(),
            "compute capability": cls.supports_compute_capability(device_capability),
            "attention type": cls.supports_attn_type(attn_type),
            "sliding window": not has_sliding_window or cls.supports_sliding_window(),
            "R-SWA": not use_rswa or cls.supports_rswa(),
            "non-causal": not use_non_causal or cls.supports_non_causal(),
            "batch invariance": not use_batch_invariant or cls.supports_batch_invariance(),
        }
        reasons = [f"{name} not supported" for name, ok in answers.items() if not ok]
        together = cls.supports_combination(
            head_size,
            dtype,
            kv_cache_dtype,
            block_size,
            use_mla,
            has_sink,
            use_sparse,
            use_mm_prefix,
            device_capability,
        )
        return reasons if together is None else [*reasons, together]


def _no(cls: type) -> bool:
    return False


for _name in (
    "is_mla",
    "is_sparse",
    "supports_alibi_sqrt",
    "supports_batch_invariance",
    "supports_mm_prefix",
    "supports_non_causal",
    "supports_per_head_quant_scales",
    "supports_rswa",
    "supports_sink",
    "supports_sliding_window",
):
    setattr(AttentionBackend, _name, classmethod(_no))


class AttentionMetadataBuilder(ABC, Generic[M]):
    _cudagraph_support = AttentionCGSupport.NEVER
    supports_update_block_table = False
    supports_draft_decode_metadata_update = False

    @abstractmethod
    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any
    ) -> None:
        self.kv_cache_spec = kv_cache_spec
        self.layer_names = layer_names
        self.vllm_config = vllm_config
        self.device = device

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
        return cls._cudagraph_support

    @abstractmethod
    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Any: ...

    def update_block_table(self, metadata: Any, blk_table: Any, slot_mapping: Any) -> Any:
        raise NotImplementedError

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        return self.build(common_prefix_len=0, common_attn_metadata=common_attn_metadata)

    def update_draft_decode_metadata(self, metadata: Any) -> None:
        raise NotImplementedError


class AttentionImpl(ABC, Generic[M]):
    @abstractmethod
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: Any = None,
        alibi_slopes: Any = None,
        sliding_window: Any = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: Any = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: Any = None,
    ) -> None: ...

    @abstractmethod
    def forward(
        self,
        layer: Any,
        query: Any,
        key: Any,
        value: Any,
        kv_cache: Any,
        attn_metadata: Any,
        output: Any,
        output_scale: Any = None,
        output_block_scale: Any = None,
    ) -> Any: ...

    # Called where forward_includes_kv_cache_update is False; no method of the base class there.
    def do_kv_cache_update(
        self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any
    ) -> None: ...


class AttentionBackendEnum(enum.Enum):
    FLASH_ATTN = "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"

    @classmethod
    def register(cls, name: str, value: str) -> Any:
        if name in cls._member_map_:
            raise ValueError(f"Backend {name} already exists")
        member = object.__new__(cls)
        member._name_, member._value_ = name, value
        setattr(cls, name, member)
        cls._member_map_[name] = member
        cls._value2member_map_[value] = member
        cls._member_names_.append(name)
        return member

    def get_path(self) -> str:
        return self.value

    def get_class(self) -> Any:
        module, _, name = self.get_path().rpartition(".")
        return getattr(importlib.import_module(module), name)


def register_backend(backend: Any, class_path: str | None = None, is_mamba: bool = False) -> Any:
    AttentionBackendEnum.register(backend, class_path or "")
    return lambda x: x


class GpuPlatform:
    @classmethod
    def is_cpu(cls) -> bool:
        return False


class CpuPlatform:
    """Takes its own backend for whatever is asked, as vLLM's does."""

    @classmethod
    def is_cpu(cls) -> bool:
        return True

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: Any = None
    ) -> str:
        return "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"


BACKEND = (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
MODULES: dict[str, dict[str, Any]] = {
    "vllm": {},
    "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
    "vllm.platforms": {"current_platform": GpuPlatform()},
    "vllm.v1": {},
    "vllm.v1.attention": {},
    "vllm.v1.attention.backend": {cls.__name__: cls for cls in BACKEND},
    "vllm.v1.attention.backends": {},
    "vllm.v1.attention.backends.registry": {
        "AttentionBackendEnum": AttentionBackendEnum,
        "register_backend": register_backend,
    },
}
