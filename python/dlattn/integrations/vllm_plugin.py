"""The entry point by which vLLM finds dlattn's backend.

vLLM calls it early, in every process. What the backend is built on is imported when vLLM asks for
the class.
"""

from __future__ import annotations

NAME = "DLATTN"


def register() -> None:
    """Tell vLLM of the backend; once is enough, more do no harm."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if NAME not in AttentionBackendEnum.__members__:
        register_backend(NAME, "dlattn.vllm.DlattnBackend")
