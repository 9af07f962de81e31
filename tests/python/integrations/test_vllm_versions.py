"""The plug-in beside other versions of vLLM: it registers, or says why not and leaves no trace.

What stands for a version has the registry and the platform in that version's form.
"""

from __future__ import annotations

import enum
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from dlattn.integrations import engines
from dlattn.integrations.vllm_plugin import NAME, register

OWN = "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"


class Registry:
    """A registry's members: one enumeration of each version, and what was registered in it."""

    def __init__(self, named: bool) -> None:
        class AttentionBackendEnum(enum.Enum):
            CPU_ATTN = OWN
            CUSTOM = None

        self.AttentionBackendEnum: Any = AttentionBackendEnum
        self._ATTN_OVERRIDES: dict[Any, str] = {}
        self.named = named

    def register_backend(self, backend: Any, class_path: Any = None, is_mamba: bool = False) -> Any:
        cls = self.AttentionBackendEnum
        if self.named and isinstance(backend, str):
            member = object.__new__(cls)
            member._name_, member._value_ = backend, class_path
            cls._member_map_[backend] = member
            backend = member
        self._ATTN_OVERRIDES[backend] = class_path
        return lambda x: x

    def before_names(self, backend: Any, is_mamba: bool = False, class_path: Any = None) -> Any:
        """As 0.12 has it: what stands second is no path."""
        raise AssertionError("a registry is called whose arguments are others")


def version(name: str) -> tuple[dict[str, dict[str, Any]], Registry, type]:
    """The modules of a version of vLLM, its registry and its platform for CPUs."""
    registry = Registry(named=name in ("0.33", "many arguments"))

    class Platform:
        @classmethod
        def is_cpu(cls) -> bool:
            return True

        if name in ("0.33", "no names"):

            @classmethod
            def get_attn_backend_cls(
                cls, selected_backend: Any, attn_selector_config: Any, num_heads: Any = None
            ) -> str:
                return OWN
        else:

            @classmethod
            def get_attn_backend_cls(
                cls, selected_backend: Any, head_size: int, dtype: Any, use_mla: bool
            ) -> str:
                return OWN

    own = {"AttentionBackendEnum": registry.AttentionBackendEnum}
    modules: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.platforms": {"current_platform": Platform()},
    }
    if name == "0.12":
        modules |= {"vllm.attention": {}, "vllm.attention.backends": {}}
        own["register_backend"] = registry.before_names
        modules["vllm.attention.backends.registry"] = own
    else:
        modules |= {"vllm.v1": {}, "vllm.v1.attention": {}, "vllm.v1.attention.backends": {}}
        own["register_backend"] = registry.register_backend
        own["_ATTN_OVERRIDES"] = registry._ATTN_OVERRIDES
        modules["vllm.v1.attention.backends.registry"] = own
    return modules, registry, Platform


@pytest.mark.parametrize("name", ["0.12", "no names", "many arguments", "0.33"])
def test_versions(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    modules, registry, platform = version(name)
    for there in [n for n in sys.modules if n.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, there)
    for module, members in modules.items():
        made = ModuleType(module)
        made.__path__ = []
        vars(made).update(members)
        monkeypatch.setitem(sys.modules, module, made)
    monkeypatch.setattr(engines, "_told", set())
    method = platform.__dict__["get_attn_backend_cls"]
    for _ in range(2):
        register()
    members = registry.AttentionBackendEnum.__members__
    if registry.named:
        assert not caplog.messages
        assert members[NAME].value == registry._ATTN_OVERRIDES[members[NAME]]
    else:
        (message,) = caplog.messages
        assert message.endswith("; accepted: vllm 0.33")
        assert NAME not in members and not registry._ATTN_OVERRIDES
        assert platform.__dict__["get_attn_backend_cls"] is method
    # A server that asks for no backend, or another one, has vLLM's own.
    call: Any = platform.get_attn_backend_cls  # type: ignore[attr-defined]
    config = SimpleNamespace()
    options = {"head_size": 64, "dtype": None, "use_mla": False}
    if name in ("0.33", "no names"):
        options = {"attn_selector_config": config, "num_heads": 4}
    for other in (None, registry.AttentionBackendEnum.CPU_ATTN):
        assert call(other, **options) == OWN
        assert call(selected_backend=other, **options) == OWN
        assert call(other, *options.values()) == OWN
