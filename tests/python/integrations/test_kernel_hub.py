"""The kernel of Hugging Face's Kernel Hub: its layout, and its functions as kernels loads them."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[3] / "examples" / "kernel_hub"
MODULE = FOLDER / "torch-ext" / "dlattn_flash_attn2"
REPOSITORY = "someone/dlattn-flash-attn2"


def loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kernel_of_the_hub", MODULE / "__init__.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_build_file() -> None:
    """By kernel-builder's edition 5 (kernels-data/src/config/v5.rs of huggingface/kernels)."""
    tomllib = pytest.importorskip("tomllib")
    build = tomllib.loads((FOLDER / "build.toml").read_text())
    assert set(build) == {"general", "torch-noarch"} and build["torch-noarch"] == {}
    general = build["general"]
    assert set(general) == {"name", "version", "edition", "license", "backends"}
    assert re.fullmatch(r"[a-z][-a-z0-9]*[a-z0-9]", general["name"])
    assert general["name"].replace("-", "_") == MODULE.name
    assert general["edition"] == 5 and general["version"] == 0
    assert set(general["backends"]) == {"cpu", "cuda"}
    ours = tomllib.loads((FOLDER.parents[1] / "pyproject.toml").read_text())["project"]
    assert general["license"] == ours["license"]


def test_build_file_by_their_parser(tmp_path: Path) -> None:
    parser = pytest.importorskip("kernels._rust").Build
    assert {str(backend) for backend in parser.open(FOLDER).general.backends} == {"cpu", "cuda"}
    text = (FOLDER / "build.toml").read_text()
    (tmp_path / "build.toml").write_text(text.replace("edition = 5", "edition = 6"))
    with pytest.raises(ValueError, match="Cannot parse"):
        parser.open(tmp_path)


def test_functions_are_those_of_dlattn() -> None:
    import dlattn.flash_attn

    module = loaded()
    for name in module.__all__:
        assert getattr(module, name) is getattr(dlattn.flash_attn, name)
    assert not hasattr(module, "sparse_atten_func")  # transformers asks for other kinds by name


def test_what_is_said_without_dlattn() -> None:
    """kernel-builder imports the kernel beside torch alone, so that import is none of dlattn."""
    code = (
        f"import sys; sys.path.insert(0, {str(MODULE.parent)!r}); sys.modules['dlattn'] = None\n"
        "import dlattn_flash_attn2 as kernel; print('imported'); kernel.flash_attn_func"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["imported"]
    assert "ImportError: this kernel needs dlattn, which is not installed" in done.stderr


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The kernel as kernel-builder lays it out, found by its name on the Hub."""
    variant = tmp_path / "build" / "torch-cpu"
    shutil.copytree(MODULE, variant, ignore=shutil.ignore_patterns("__pycache__"))
    metadata: dict[str, Any] = {
        "id": f"_dlattn_flash_attn2_cpu_{abs(hash(tmp_path)):x}",
        "name": "dlattn-flash-attn2",
        "version": 0,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": "cpu"},
    }
    (variant / "metadata.json").write_text(json.dumps(metadata))
    monkeypatch.setenv("LOCAL_KERNELS", f"{REPOSITORY}={tmp_path}")
    return tmp_path


def test_loaded_by_kernels(repository: Path) -> None:
    torch = pytest.importorskip("torch")
    kernels = pytest.importorskip("kernels")
    from dlattn.reference import attention_reference

    kernel = kernels.get_kernel(REPOSITORY, version=0, backend="cpu")
    assert Path(kernel.__file__).is_relative_to(repository)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 9, n, 16, generator=generator) + 0.2 for n in (4, 2, 2))
    found = kernel.flash_attn_func(q, k, v, causal=True)
    want, _ = attention_reference(q, k, v, causal=True)
    torch.testing.assert_close(found.double(), torch.as_tensor(want), rtol=1e-5, atol=1e-5)


def test_transformers_takes_it(repository: Path) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("kernels")
    hub_kernels = pytest.importorskip("transformers.integrations.hub_kernels")
    if not hub_kernels.is_kernels_available() or torch.version.cuda is not None:
        pytest.skip("needs the version of kernels that transformers asks for, and a torch for CPUs")
    from transformers_models import decoder

    def generated(implementation: str) -> list[list[int]]:
        model = decoder("llama", implementation)
        ids = torch.arange(3, 17).reshape(2, 7)
        mask = torch.ones_like(ids)
        mask[0, :3] = 0
        options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
        tokens: list[list[int]] = model.generate(
            input_ids=ids, attention_mask=mask, **options
        ).tolist()
        return tokens

    assert generated(REPOSITORY) == generated("eager")
