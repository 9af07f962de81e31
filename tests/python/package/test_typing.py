"""Type checkers know an attention's result by q, and the names of kernels."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import dlattn

PACKAGE = Path(dlattn.__file__).resolve().parents[1]

TORCH = """
class Tensor: ...
"""

USES = """
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import dlattn

def uses(q: torch.Tensor, x: NDArray[np.float16], lse: bool) -> None:
    reveal_type(dlattn.attention(q, q, q, kernel="wmma:narrow+packed"))
    reveal_type(dlattn.attention(q, q, q, return_lse=True))
    reveal_type(dlattn.attention(q, q, q, return_lse=lse))
    reveal_type(dlattn.attention(x, x, x))
    reveal_type(dlattn.attention_with_kvcache(q, q, q, seqused_k=q, return_lse=True)[1])
    dlattn.attention(q, q, q, kernel="nope")
    dlattn.attention(q, q, q, kernel="sm90:narrow")
    dlattn.supported(q, q, q, kernel="nope")
    dlattn.attention(q, q, q, layout="sbhd")
    wrong: int = dlattn.attention(q, q, q)
    reveal_type(dlattn.merge_states([q, q], q))
    reveal_type(dlattn.merge_states(q, q))
    reveal_type(dlattn.merge_states((x, x), [x, x]))
"""

# With the torch that there is.
TORCH_USES = """
import torch

import dlattn.torch

def uses(q: torch.Tensor) -> None:
    reveal_type(dlattn.torch.ring_attention(q, q, q, causal=True))
    reveal_type(dlattn.torch.shard_sequence(q))
    dlattn.torch.ring_attention(q, q, q, casual=True)
    dlattn.torch.activate(allow=1)
    reveal_type(dlattn.torch.attention(q, q, q))
    reveal_type(dlattn.torch.attention_varlen(q, q, q, q, q, 1, 1, return_lse=True))
    reveal_type(dlattn.torch.attention_with_kvcache(q, q, q, seqused_k=q))
    reveal_type(dlattn.scaled_dot_product_attention(q, q, q))
    dlattn.torch.attention(q, q, q, layout="sbhd")
"""

# With the JAX that there is.
JAX_USES = """
import jax

import dlattn.jax

def uses(q: jax.Array) -> None:
    reveal_type(dlattn.jax.attention(q, q, q, causal=True))
    reveal_type(dlattn.jax.attention(q, q, q, return_lse=True))
    reveal_type(dlattn.jax.dot_product_attention(q, q, q))
    reveal_type(dlattn.jax.dot_product_attention(q, q, q, return_residual=True))
    reveal_type(dlattn.jax.ring_attention(q, q, q, axis_name="x"))
    reveal_type(dlattn.jax.shard_sequence(q, 2))
"""

# Modules that are not looked at: they need the torch that there is.
CONFIG = """
[mypy]
strict = True
python_version = 3.12
[mypy-dlattn.integrations.*,dlattn.flash_attn.*,dlattn.sageattention,dlattn._sdpa,dlattn.reference.*]
follow_imports = skip
"""

MYPY_ARRAY = "numpy.ndarray[tuple[Any, ...], numpy.dtype[Any]]"
REVEALED = [
    "torch.Tensor",
    "tuple[torch.Tensor, torch.Tensor]",
    "Any",
    "numpy.ndarray",
    "torch.Tensor",
    "tuple[torch.Tensor, torch.Tensor]",
    "tuple[torch.Tensor, torch.Tensor]",
    f"tuple[{MYPY_ARRAY}, {MYPY_ARRAY}]",
]
WRONG = {16: "call-overload", 17: "call-overload", 18: "arg-type", 19: "call-overload"}


@pytest.mark.slow
def test_mypy_strict(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "torch.pyi").write_text(TORCH)
    (tmp_path / "mypy.ini").write_text(CONFIG)
    (tmp_path / "uses.py").write_text(USES)
    # mypy finds an installed package itself, and refuses to be told of its folder.
    folders = (
        [tmp_path] if PACKAGE.name in ("site-packages", "dist-packages") else [tmp_path, PACKAGE]
    )
    paths = os.pathsep.join(map(str, folders))
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "uses.py"],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": paths, "MYPY_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("uses.py:")]
    revealed = re.findall(r'Revealed type is "(tuple\[.*\]|[^"\[]*)', "\n".join(lines))
    assert revealed == REVEALED, done.stdout
    errors = {}
    for line in lines:
        if found := re.match(r"uses\.py:(\d+): error: .*\[([\w-]+)\]", line):
            errors[int(found[1])] = found[2]
    assert errors == {**WRONG, 20: "assignment"}, done.stdout + done.stderr


@pytest.mark.slow
def test_pyright(tmp_path: Path) -> None:
    """By basedpyright, which is pyright as pip installs it, without npm."""
    pytest.importorskip("basedpyright")
    uses = {"uses.py": USES}
    if find_spec("torch") is None:
        (tmp_path / "torch.pyi").write_text(TORCH)
    else:
        uses["torch_uses.py"] = TORCH_USES
    if find_spec("jax") is not None:
        uses["jax_uses.py"] = JAX_USES
    for name, text in uses.items():
        (tmp_path / name).write_text(text)
    settings = {"include": list(uses), "extraPaths": [str(tmp_path), str(PACKAGE)]}
    settings |= {"typeCheckingMode": "standard", "pythonVersion": "3.12"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    done = subprocess.run(
        [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    found = json.loads(done.stdout)["generalDiagnostics"]
    revealed: dict[str, list[str]] = {name: [] for name in uses}
    errors: dict[str, set[int]] = {name: set() for name in uses}
    for each in found:
        name = Path(each["file"]).name
        if each["severity"] == "error":
            errors[name].add(each["range"]["start"]["line"] + 1)
        elif " is " in each["message"]:
            revealed[name].append(re.sub(r'.* is "(.*)"', r"\1", each["message"]))
    pair = "tuple[Tensor, Tensor]"
    array = "NDArray[Any]"
    expected = ["Tensor", pair, "Any", array, "Tensor", pair, pair, f"tuple[{array}, {array}]"]
    long = "ndarray[tuple[Any, ...], dtype[Any]]"
    assert [x.replace(long, array) for x in revealed["uses.py"]] == expected, found
    assert errors["uses.py"] == {*WRONG, 20}, found
    if "torch_uses.py" in uses:
        own = ["Tensor", pair, "Tensor", "Tensor"]
        assert revealed["torch_uses.py"] == ["Tensor", "Tensor", *own], found
        assert errors["torch_uses.py"] == {9, 10, 15}, found
    if "jax_uses.py" in uses:
        pair = "tuple[Array, Array]"
        of_jax = ["Array", pair, "Array", pair, "Array", "Array"]
        assert revealed["jax_uses.py"] == of_jax, found


def test_stubs_cost_an_import_nothing() -> None:
    """The interpreter finds no module of names: only a type checker does."""
    code = "import sys, dlattn; sys.exit('dlattn._kernel_names' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    assert (PACKAGE / "dlattn" / "_kernel_names.pyi").is_file()
    assert not (PACKAGE / "dlattn" / "_kernel_names.py").exists()


def test_names_are_those_of_the_build() -> None:
    names = (PACKAGE / "dlattn" / "_kernel_names.pyi").read_text()
    assert all(f'"{kernel}",' in names for kernel in dlattn.info().kernels)
