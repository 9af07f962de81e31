"""The program that tries the plug-in beside releases of vLLM, on sources made here."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import vllm_releases

REGISTRY = """
import enum
from vllm.logger import init_logger

class AttentionBackendEnum(enum.Enum):
    CPU_ATTN = "own"

_ATTN_OVERRIDES = {}

def register_backend(backend, class_path=None, is_mamba=False):
    if isinstance(backend, str) and NAMED:
        member = object.__new__(AttentionBackendEnum)
        member._name_, member._value_ = backend, class_path
        AttentionBackendEnum._member_map_[backend] = member
        backend = member
    _ATTN_OVERRIDES[KEPT or backend] = class_path
"""
PLATFORM = """
class CpuPlatform:
    @classmethod
    def get_attn_backend_cls(cls, selected_backend, attn_selector_config, *, num_heads=None): ...
"""
BACKEND = """
class AttentionBackend: ...
from elsewhere import AttentionType
"""


def made(folder: Path, **values: object) -> Path:
    heads = "".join(f"{name} = {value!r}\n" for name, value in values.items())
    for name, text in (
        ("v1/attention/backends/registry", heads + REGISTRY),
        ("v1/attention/backend", BACKEND),
        ("platforms/cpu", PLATFORM),
        ("envs", ""),
    ):
        path = folder / "vllm" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_releases(tmp_path: Path) -> None:
    before = set(sys.modules)
    taken = vllm_releases.facts(made(tmp_path, NAMED=True, KEPT=None))
    assert taken["registered"] and not taken["said"]
    assert taken["register_backend"] == ["backend", "class_path", "is_mamba"]
    assert taken["platform"] == ["selected_backend", "attn_selector_config", "num_heads"]
    lacking = taken["missing"]
    assert "vllm.platforms.current_platform" in lacking  # the package is a folder here
    assert "vllm.v1.attention.backend.AttentionImpl" in lacking
    assert not any("AttentionBackend" in name.split(".")[-1:] for name in lacking)
    assert not any(name.endswith((".AttentionType", ".envs")) for name in lacking)
    refused = vllm_releases.facts(made(tmp_path, NAMED=False, KEPT=None))
    assert not refused["registered"]
    (line,) = refused["said"]
    assert "registered with vllm (RuntimeError: register_backend adds no member" in line
    with pytest.raises(RuntimeError, match="half registered"):
        vllm_releases.facts(made(tmp_path, NAMED=False, KEPT="a key of its own"))
    assert not any(name.partition(".")[0] == "vllm" for name in set(sys.modules) - before)
