"""dlattn as an attention backend of SGLang.

    python -m sglang.launch_server --model-path MODEL --attention-backend dlattn

SGLang loads this by itself, where both are installed. What the backend takes:
`dlattn.integrations.sglang`.
"""

try:
    import sglang as _sglang  # noqa: F401
except ImportError as error:
    raise ImportError(
        "dlattn.sglang needs SGLang, which is not installed; accepted: sglang 0.5.23 (pip install "
        "sglang)"
    ) from error

from dlattn.integrations.sglang import DlattnAttnBackend, DlattnMetadata
from dlattn.integrations.sglang_plugin import register

__all__ = ["DlattnAttnBackend", "DlattnMetadata", "register"]
