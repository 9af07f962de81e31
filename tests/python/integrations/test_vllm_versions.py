"""The plug-in beside each release of vLLM: it registers, or says why not and leaves no trace.

What stands for a release has the registry and the platform in that release's form, as
`tools/suites/vllm_releases.py` found them in its source.
"""

from __future__ import annotations

import enum
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from dlattn.integrations import engines
from dlattn.integrations.vllm_plugin import NAME, register

RELEASES: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).parents[1].joinpath("support", "vllm_releases.json").read_text()
)
# One that takes names, and whose platform has parameters that the plug-in does not know.
RELEASES_AND_ANOTHER = RELEASES | {
    "another": {**RELEASES["0.33.0"], "platform": RELEASES["0.12.0"]["platform"]}
}
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


def modules_of(release: dict[str, Any]) -> tuple[dict[str, dict[str, Any]], Registry, type]:
    """The modules of a release of vLLM, its registry and its platform for CPUs."""
    registry = Registry(named=release["registered"])
    made: dict[str, Any] = {"OWN": OWN}
    exec(f"def cls_of(cls, {', '.join(release['platform'])}): return OWN", made)

    class Platform:
        get_attn_backend_cls = classmethod(made["cls_of"])

        @classmethod
        def is_cpu(cls) -> bool:
            return True

    path_second = release["register_backend"][:2] == ["backend", "class_path"]
    modules: dict[str, dict[str, Any]] = {"vllm.platforms": {"current_platform": Platform()}}
    modules[release["registry"]] = {
        "AttentionBackendEnum": registry.AttentionBackendEnum,
        "register_backend": registry.register_backend if path_second else registry.before_names,
        "_ATTN_OVERRIDES": registry._ATTN_OVERRIDES,
    }
    for name in list(modules):
        parts = name.split(".")
        modules |= {".".join(parts[:n]): {} for n in range(1, len(parts))}
    return modules, registry, Platform


@pytest.mark.parametrize("version", RELEASES_AND_ANOTHER)
def test_releases(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    release = RELEASES_AND_ANOTHER[version]
    modules, registry, platform = modules_of(release)
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
    assert len(caplog.messages) == len(release["said"])
    if release["registered"]:
        assert not caplog.messages
        assert members[NAME].value == registry._ATTN_OVERRIDES[members[NAME]]
    else:
        (message,), (said,) = caplog.messages, release["said"]
        assert message.endswith(said[said.index(" (") :])
        assert NAME not in members and not registry._ATTN_OVERRIDES
        assert platform.__dict__["get_attn_backend_cls"] is method
    # A server that asks for no backend, or another one, has vLLM's own.
    call: Any = platform.get_attn_backend_cls  # type: ignore[attr-defined]
    options = {name: None for name in release["platform"] if name != "selected_backend"}
    if "attn_selector_config" in options:
        options["attn_selector_config"] = SimpleNamespace()
    for other in (None, registry.AttentionBackendEnum.CPU_ATTN):
        assert call(other, **options) == OWN
        assert call(selected_backend=other, **options) == OWN
        assert call(other, *options.values()) == OWN


def test_which_releases_take_the_backend() -> None:
    """As docs/engines.md has it; a release that takes names must have all that is imported."""
    taken = [version for version, release in RELEASES.items() if release["registered"]]
    assert [version.rpartition(".")[0] for version in taken] == ["0.32", "0.33"]
    assert not any(RELEASES[version]["missing"] for version in taken)
    minor = [int(version.split(".")[1]) for version in RELEASES]
    assert minor == list(range(12, 34))
