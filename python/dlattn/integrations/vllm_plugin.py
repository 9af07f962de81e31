"""The entry point by which vLLM finds dlattn's backend.

vLLM calls it early, in every process. What the backend is built on is imported when vLLM asks for
the class.
"""

from __future__ import annotations

from typing import Any

from dlattn.integrations.engines import log_errors

NAME = "DLATTN"


@log_errors("vllm", "vllm 0.32 or 0.33")
def register() -> None:
    """Tell vLLM of the backend; once is enough, more do no harm."""
    _be_chosen_on_cpus(_member())


def _member() -> Any:
    """The backend's member of vLLM's enumeration, which it is added to if need be.

    A process that vLLM spawns unpickles its configuration before it loads any plug-in, and would
    find no such member: so a pickle of it has the name of this function.
    """
    from vllm.v1.attention.backends import registry
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if NAME not in AttentionBackendEnum.__members__:
        register_backend(NAME, "dlattn.vllm.DlattnBackend")
        if NAME not in AttentionBackendEnum.__members__:
            # Earlier registries keep whatever they get, as a key of what overrides members.
            getattr(registry, "_ATTN_OVERRIDES", {}).pop(NAME, None)
            raise RuntimeError("register_backend adds no member for a name")
    member: Any = AttentionBackendEnum.__members__[NAME]
    member.__reduce_ex__ = lambda protocol: (_member, ())
    return member


def _be_chosen_on_cpus(member: Any) -> None:
    """Let vLLM's platform for CPUs take the backend that is asked for, if it is this one.

    That platform takes its own backend for whatever is asked, and logs that it does.
    """
    from vllm.platforms import current_platform

    platform = type(current_platform)
    theirs = platform.get_attn_backend_cls
    if not current_platform.is_cpu() or hasattr(theirs, "dlattn"):
        return

    def get_attn_backend_cls(cls: Any, *given: Any, **options: Any) -> Any:
        names = ("selected_backend", "attn_selector_config")
        named = dict(zip(names, given, strict=False)) | options
        chosen: Any = named.get("selected_backend")
        if chosen is not member:
            return theirs(*given, **options)  # another version's arguments too
        asked = named["attn_selector_config"]._asdict()
        reasons = member.get_class().validate_configuration(device_capability=None, **asked)
        if reasons:
            raise ValueError(f"attention backend {NAME}: {', '.join(reasons)}")
        return member.get_path()

    get_attn_backend_cls.dlattn = True  # type: ignore[attr-defined]
    platform.get_attn_backend_cls = classmethod(get_attn_backend_cls)
