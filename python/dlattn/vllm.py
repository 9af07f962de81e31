"""dlattn as an attention backend of vLLM.

    vllm serve MODEL --attention-backend DLATTN

vLLM loads this by itself, where both are installed. What the backend takes:
`dlattn.integrations.vllm`.
"""

try:
    import vllm as _vllm  # noqa: F401
except ImportError as error:
    raise ImportError(
        "dlattn.vllm needs vLLM, which is not installed; accepted: vllm 0.32 or 0.33 "
        "(pip install vllm)"
    ) from error

from dlattn.integrations.vllm import (
    DlattnBackend,
    DlattnImpl,
    DlattnMetadata,
    DlattnMetadataBuilder,
)
from dlattn.integrations.vllm_plugin import register

__all__ = ["DlattnBackend", "DlattnImpl", "DlattnMetadata", "DlattnMetadataBuilder", "register"]
