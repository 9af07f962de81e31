"""Shared by the tests of the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlattn.cli import main
from dlattn.cli.files import Place, load
from dlattn.reference import attention_reference, error_bound, max_error

Captured = pytest.CaptureFixture[str]


def draw(*sizes: int, seed: int = 0, dtype: str = "f4") -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(sizes) + 0.25).astype(dtype)


def program(
    *arguments: str | Path, stdout: Any = subprocess.PIPE, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run the command line as a program of its own."""
    command = [sys.executable, "-m", "dlattn", *map(str, arguments)]
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, **options)


def refuses(capsys: Captured, *arguments: str | Path) -> str:
    """Run a command that must end with exit code 2 and a message without a traceback."""
    try:
        code = main([str(argument) for argument in arguments])
    except SystemExit as exit_:  # from argparse
        assert isinstance(exit_.code, int)
        code = exit_.code
    captured = capsys.readouterr()
    assert code == 2, captured
    assert "Traceback" not in captured.err
    return captured.err


# Problems in files

INPUTS = {"q": draw(1, 6, 2, 16, seed=1), "k": draw(1, 9, 2, 16, seed=2), "v": draw(1, 9, 2, 16)}
OTHERS = {"weights": draw(3, 5), "steps": np.arange(7, dtype=np.uint8), "none": np.zeros((0, 4))}
ARCHIVES = [".npz", ".safetensors"]


def words(*more: str | Path, **inputs: str | Path) -> list[str]:
    files = {name: f"{name}.npy" for name in INPUTS} | inputs
    given = [word for name, path in files.items() for word in (f"--{name}", path)]
    return ["run", *map(str, given), *map(str, more)]


def is_out(array: Any) -> bool:
    expected = attention_reference(*INPUTS.values())
    return max_error(array, expected[0]) <= error_bound(*INPUTS.values(), expected=expected).out


def is_lse(array: Any) -> bool:
    expected = attention_reference(*INPUTS.values())
    return max_error(array, expected[1]) <= error_bound(*INPUTS.values(), expected=expected).lse


def archive(path: Path, arrays: dict[str, np.ndarray]) -> Path:
    """A file of several arrays as others write it, compressed or with metadata."""
    if path.suffix == ".npz":
        np.savez_compressed(path, **arrays)  # type: ignore[arg-type]
    else:
        writer = pytest.importorskip("safetensors.numpy")
        writer.save_file(arrays, path, metadata={"format": "pt", "by": "me"})
    return path


def names(path: Path) -> list[str]:
    if path.suffix == ".npz":
        with np.load(path) as arrays:
            return sorted(arrays.files)
    with pytest.importorskip("safetensors").safe_open(path, framework="np") as tensors:
        return sorted(tensors.keys())


def holds(path: Path, arrays: dict[str, np.ndarray]) -> bool:
    return all(np.array_equal(load(Place(path, key)), array) for key, array in arrays.items())
