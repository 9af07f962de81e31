"""The entry point by which SGLang finds dlattn's backend.

SGLang calls it in every process, before arguments are parsed. What the backend is built on is
imported when SGLang asks for it.
"""

from __future__ import annotations

from typing import Any

from dlattn.integrations.engines import log_errors

NAME = "dlattn"


@log_errors("sglang", "sglang 0.5.23")
def register() -> None:
    """Tell SGLang of the backend; once is enough, more do no harm."""
    from sglang.srt import server_args
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    register_attention_backend(NAME)(_backend)
    for choices, add in (
        (server_args.ATTENTION_BACKEND_CHOICES, server_args.add_attention_backend_choices),
        (
            server_args.DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
            server_args.add_deterministic_attention_backend_choices,
        ),
        (  # those that keep the cache of prefixes
            server_args.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND,
            server_args.add_radix_supported_deterministic_attention_backend_choices,
        ),
    ):
        if NAME not in choices:
            add([NAME])


def _backend(model_runner: Any) -> Any:
    from dlattn.integrations.sglang import DlattnAttnBackend

    return DlattnAttnBackend(model_runner)
