"""The entry point by which SGLang finds dlattn's backend.

SGLang calls it in every process, before arguments are parsed. What the backend is built on is
imported when SGLang asks for it.
"""

from __future__ import annotations

from typing import Any

NAME = "dlattn"


def register() -> None:
    """Tell SGLang of the backend; once is enough, more do no harm."""
    from sglang.srt import server_args
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    if NAME not in server_args.ATTENTION_BACKEND_CHOICES:
        server_args.add_attention_backend_choices([NAME])
    if NAME not in server_args.DETERMINISTIC_ATTENTION_BACKEND_CHOICES:
        server_args.add_deterministic_attention_backend_choices([NAME])
    register_attention_backend(NAME)(_backend)


def _backend(model_runner: Any) -> Any:
    from dlattn.integrations.sglang import DlattnAttnBackend

    return DlattnAttnBackend(model_runner)
