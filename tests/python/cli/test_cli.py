"""The command line: as a program, what it tells of itself, its texts."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import Captured, draw, program

import dlattn
from dlattn.cli import check, main, support
from dlattn.console.stdout import Stdout
from dlattn.console.text import Progress, duration, markdown_table, rate, shape, table

# As a program


def test_version() -> None:
    assert program("--version").stdout == f"dlattn {dlattn.__version__}\n"


def test_without_a_command() -> None:
    done = program()
    assert done.returncode == 2
    assert "usage: python -m dlattn" in done.stderr


def test_the_command_that_pip_installs(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    project = (Path(__file__).resolve().parents[3] / "pyproject.toml").read_text()
    assert '[project.scripts]\ndlattn = "dlattn.cli:main"\n' in project
    monkeypatch.setattr(sys, "argv", ["/usr/bin/dlattn"])
    with pytest.raises(SystemExit):
        main(["--help"])
    assert capsys.readouterr().out.startswith("usage: dlattn [-h]")


def test_folders_of_the_cpp_package() -> None:
    package = Path(dlattn.__file__).parent
    assert Path(program("--cmake-dir").stdout.strip()) == package / "lib" / "cmake" / "dlattn"
    assert Path(program("--include-dir").stdout.strip()) == package / "include"


@pytest.mark.parametrize(
    ("columns", "name"),
    [("20", "a" * 200), ("80", "two words, " * 20), ("20", "\udcff" * 200)],
    ids=["one word", "words", "no text"],
)
def test_folders_are_printed_as_one_line(tmp_path: Path, columns: str, name: str) -> None:
    """However narrow the terminal and whatever the folder's name: cmake takes the line as it is."""
    deep = tmp_path / name
    deep.mkdir()
    (deep / "dlattn").symlink_to(Path(dlattn.__file__).parent)
    env = os.environ | {"COLUMNS": columns, "PYTHONPATH": str(deep), "PYTHONUTF8": "1"}

    def printed(*words: str) -> bytes:
        command = [sys.executable, *words]
        return subprocess.run(command, capture_output=True, env=env, check=True).stdout

    code = "import sys, os, dlattn; sys.stdout.buffer.write(os.fsencode(dlattn._core.__file__))"
    folder = os.path.dirname(printed("-c", code))  # an editable install stays where it is
    assert printed("-m", "dlattn", "--cmake-dir") == folder + b"/lib/cmake/dlattn\n"
    assert printed("-m", "dlattn", "--include-dir") == folder + b"/include\n"


# stdout and stderr

COMMANDS = (["--version"], ["--help"], ["info"], ["info", "--support"])


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_stdout_that_is_full(words: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        done = program(*words, stdout=full)
    assert done.returncode == 1
    assert done.stderr == "dlattn: error: stdout: cannot be written: No space left on device\n"


def shell(script: str) -> subprocess.CompletedProcess[str]:
    script = script.replace("dlattn", f"{shlex.quote(sys.executable)} -m dlattn")
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True)


def test_stdout_that_is_closed() -> None:
    done = shell("dlattn info >&-")
    assert done.returncode == 1
    assert done.stderr == "dlattn: error: stdout is closed\n"


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_reader_that_has_gone(words: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    done = program(*words, stdout=write)
    os.close(write)
    assert done.stderr == ""
    assert done.returncode == 141  # as if the signal had ended it: nobody can know of a result


def test_stderr_that_takes_nothing() -> None:
    for where in ("2>&-", "2>/dev/full"):
        assert shell(f"dlattn check --kernel cpu --device cuda {where}").returncode == 2
        assert shell(f"dlattn info {where}").stdout.startswith("dlattn ")


def test_progress_that_nobody_can_read() -> None:
    with open("/dev/full", "w") as full:
        Progress(2, full).step("one")


def test_text_that_stdout_cannot_encode(monkeypatch: Any) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    with contextlib.redirect_stdout(Stdout(stream)) as stdout:  # type: ignore[type-var]
        print("plain, \u00fc, \udcff, \ud800")
        print("\u00fc\udcff")
        stdout.flush()
    assert raw.getvalue() == b"plain, \\xfc, \\udcff, \\ud800\n\xc3\xbc\xff\n"


def test_memory_that_runs_out(capsys: Captured, monkeypatch: Any) -> None:
    def no_memory() -> None:
        raise MemoryError("Unable to allocate 57 PiB")

    monkeypatch.setattr(dlattn, "info", no_memory)
    assert main(["info"]) == 1
    assert capsys.readouterr().err == "dlattn: error: out of memory: Unable to allocate 57 PiB\n"


# The acceptance table, frameworks


@pytest.mark.nightly  # float64 takes nearly all of its two minutes for three problems of 2,048 keys
def test_the_whole_acceptance_table() -> None:
    done = program("check", "--device", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("cpu ")]
    assert len(rows) == 36  # 12 problems, float32, float16 and float8_e4m3fn
    assert all(row.endswith("PASS") for row in rows)
    assert "PASS: 102 problems" in done.stdout  # and 9 features in two dtypes


@pytest.mark.slow
def test_the_acceptance_table_up_to_512_keys(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_seed = (replace(case, seeds=case.seeds[:1]) for case in check.CASES)
    short = tuple(case for case in one_seed if case.sizes[2] <= 512)
    monkeypatch.setattr(check, "CASES", short)
    assert main(["check", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    rows = [line for line in printed.splitlines() if line.startswith("cpu ")]
    assert len(rows) == 27 and all(row.endswith("PASS") for row in rows)
    assert "PASS: 45 problems" in printed


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
    ladder = {"scalar", "wmma_qk", "wmma_smem"}
    kernels = {"cpu", *ladder, "wmma", "wmma_halves", "decode", "wmma8", "sm90", "sm90_fp8"}
    kernels.add("sm90_wide")
    assert set(by_kernel) == kernels
    assert "float8_e4m3fn" in by_kernel["cpu"] and "float8_e4m3fn" in by_kernel["sm90_fp8"]
    assert "multiples of 16 up to 256" in by_kernel["sm90_fp8"]
    assert "sinks, varlen" in by_kernel["cpu"] and " any " in by_kernel["cpu"]
    assert "1 to 256" in by_kernel["scalar"] and "float32" in by_kernel["scalar"]
    for kernel in ("wmma_qk", "wmma_smem"):
        assert "multiples of 16 up to 128" in by_kernel[kernel]
        assert "sm_80" in by_kernel[kernel]
        assert "float32" not in by_kernel[kernel]
    assert "1 to 256" in by_kernel["wmma"]
    for kernel in ("decode", "scalar", "wmma", "sm90"):
        assert "KV cache" in by_kernel[kernel]
    assert "KV cache" not in by_kernel["wmma_qk"]
    assert "alibi_slopes" in by_kernel["wmma"]
    halves = by_kernel["wmma_halves"]
    assert "257 to 512" in halves and "sm_80" in halves and "KV cache" not in halves
    assert "softcap, bias, mask, alibi_slopes, sinks, varlen" in halves
    assert "multiples of 8 up to 256" in by_kernel["sm90"] and " sm_90 " in by_kernel["sm90"]
    assert "multiples of 8 from 264 up to 512" in by_kernel["sm90_wide"]


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
        (list(range(257, 513)), "257 to 512"),
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
