"""Type checkers know an attention's result by q, and the names of kernels."""

from __future__ import annotations

import os
import re
import subprocess
import sys
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
"""

# Modules that are not looked at: they need the torch that there is.
CONFIG = """
[mypy]
strict = True
python_version = 3.12
[mypy-dlattn.integrations.*,dlattn.flash_attn.*,dlattn.sageattention,dlattn._sdpa,dlattn.reference.*]
follow_imports = skip
"""

REVEALED = [
    "torch.Tensor",
    "tuple[torch.Tensor, torch.Tensor]",
    "Any",
    "numpy.ndarray",
    "torch.Tensor",
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


def test_stubs_cost_an_import_nothing() -> None:
    """The interpreter finds no module of names: only a type checker does."""
    code = "import sys, dlattn; sys.exit('dlattn._kernel_names' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    assert (PACKAGE / "dlattn" / "_kernel_names.pyi").is_file()
    assert not (PACKAGE / "dlattn" / "_kernel_names.py").exists()


def test_names_are_those_of_the_build() -> None:
    names = (PACKAGE / "dlattn" / "_kernel_names.pyi").read_text()
    assert all(f'"{kernel}",' in names for kernel in dlattn.info().kernels)
