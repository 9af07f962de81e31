"""The command line: as a program, what it tells of itself, its texts."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import Captured, draw

import dlattn
from dlattn.cli import main, support
from dlattn.cli.text import Progress, duration, markdown_table, rate, shape, table

# As a program


def program(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dlattn", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd)


def test_version() -> None:
    assert program("--version").stdout == f"dlattn {dlattn.__version__}\n"


def test_without_a_command() -> None:
    done = program()
    assert done.returncode == 2
    assert "usage: python -m dlattn" in done.stderr


def test_folders_of_the_cpp_package() -> None:
    package = Path(dlattn.__file__).parent
    assert Path(program("--cmake-dir").stdout.strip()) == package / "lib" / "cmake" / "dlattn"
    assert Path(program("--include-dir").stdout.strip()) == package / "include"


@pytest.mark.slow
def test_the_whole_acceptance_table() -> None:
    done = program("check", "--device", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("cpu ")]
    assert len(rows) == 22  # 11 problems, float32 and float16
    assert all(row.endswith("PASS") for row in rows)
    assert "PASS: 54 problems" in done.stdout


def test_commands_import_no_framework() -> None:
    code = (
        "import sys, dlattn.cli; dlattn.cli.main(['info']); dlattn.cli.main(['info', '--support']);"
        "print([name for name in ('torch', 'cupy', 'jax', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr


# info


def test_info(capsys: Captured) -> None:
    assert main(["info"]) == 0
    printed = capsys.readouterr().out
    assert str(dlattn.info()) in printed
    assert f"numpy {np.__version__}" in printed


def test_info_names_what_is_not_installed(capsys: Captured, monkeypatch: Any) -> None:
    monkeypatch.setattr("dlattn.cli.info._PACKAGES", ("numpy", "no_such_package"))
    main(["info"])
    assert capsys.readouterr().out.endswith(
        f"numpy {np.__version__}\nnot installed: no_such_package\n"
    )


def test_support_table(capsys: Captured) -> None:
    assert main(["info", "--support"]) == 0
    lines = capsys.readouterr().out.splitlines()
    by_kernel = {line.split()[0]: line for line in lines[2:]}
    assert set(by_kernel) == {"cpu", "scalar", "wmma_qk", "wmma_smem", "wmma", "sm90"}
    assert "sinks, varlen" in by_kernel["cpu"] and " any " in by_kernel["cpu"]
    assert "1 to 256" in by_kernel["scalar"] and "float32" in by_kernel["scalar"]
    for kernel in ("wmma_qk", "wmma_smem"):
        assert "multiples of 16 up to 128" in by_kernel[kernel]
        assert "sm_80" in by_kernel[kernel]
        assert "float32" not in by_kernel[kernel]
    assert "1 to 256" in by_kernel["wmma"]
    assert "alibi_slopes" in by_kernel["wmma"]
    assert "multiples of 8 up to 256" in by_kernel["sm90"] and " sm_90 " in by_kernel["sm90"]


def test_support_table_agrees_with_supported() -> None:
    q = draw(1, 4, 2, 24, dtype="f2")
    assert dlattn.supported(q, q, q, softcap=3.0).ok
    refusal = dlattn._core.refusal
    assert refusal("cpu", "float16", 24, "softcap", 0) == ""
    assert "does not implement softcap" in refusal("wmma_smem", "float16", 64, "softcap", 89)
    assert "the tensors are on the CPU" in refusal("scalar", "float16", 64, "", 0)
    assert "head_dim is 24" in refusal("wmma_smem", "float16", 24, "", 89)
    assert "needs compute capability 9.0" in refusal("sm90", "float16", 64, "", 89)
    with pytest.raises(dlattn.UnsupportedError, match="feature is dropout; accepted: causal"):
        refusal("cpu", "float16", 24, "dropout", 0)
    with pytest.raises(dlattn.UnsupportedError, match="dtype is int8; accepted: float16"):
        refusal("cpu", "int8", 24, "", 0)


@pytest.mark.parametrize(
    ("dims", "text"),
    [
        ([64], "64"),
        (list(range(1, 257)), "1 to 256"),
        (list(range(1, 513)), "any"),
        (list(range(16, 129, 16)), "multiples of 16 up to 128"),
        ([64, 128], "multiples of 64 up to 128"),
        ([32, 64, 128], "32, 64, 128"),
        ([40, 56, 72], "40, 56, 72"),
    ],
)
def test_head_dims_in_words(dims: list[int], text: str) -> None:
    assert support._ranges(dims) == text


# Texts


def test_table_is_aligned() -> None:
    text = table(["name", "n"], [["a", "1"], ["long name", "100"]], right=(1,))
    assert text.splitlines() == [
        "name         n",
        "---------  ---",
        "a            1",
        "long name  100",
    ]
    assert markdown_table(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (4.74e-6, "4.74 us"),
        (0.0101, "10.1 ms"),
        (0.1, "100 ms"),
        (2.5, "2.50 s"),
        (1e-9, "0.00 us"),
        (float("nan"), "-"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_rates_and_shapes() -> None:
    assert rate(12.34) == "12.3 TFLOP/s"
    assert rate(7.1) == "7.10 TFLOP/s"
    assert rate(0.1234) == "123 GFLOP/s"
    assert shape((1, 8, 512, 64)) == "(1,8,512,64)"


def test_progress() -> None:
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    for stream in (terminal, log := io.StringIO()):
        progress = Progress(2, stream)
        progress.step("one")
        progress.step("two")
        progress.close()
    assert terminal.getvalue() == "\r\x1b[K[1/2] one\r\x1b[K[2/2] two\r\x1b[K"
    assert log.getvalue() == "[1/2] one\n"  # a log is not flooded: the second follows too soon
