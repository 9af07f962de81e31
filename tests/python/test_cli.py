"""The command line: what it prints, what it writes, how it fails."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dlattn
from dlattn.cli import check, devices, main, support
from dlattn.cli.errors import CommandError
from dlattn.cli.files import Place, load, save
from dlattn.cli.text import Progress, duration, markdown_table, rate, shape, table
from dlattn.reference import attention_reference, error_bound, max_error

Captured = pytest.CaptureFixture[str]

SMALL = (
    check.Case("even", (1, 2, 16, 8), False, seeds=(0, 1)),
    check.Case("ragged", (2, 1, 19, 16), True),
)


def draw(*sizes: int, seed: int = 0, dtype: str = "f4") -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(sizes) + 0.25).astype(dtype)


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


# check


@pytest.fixture
def small_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "CASES", SMALL)


@pytest.mark.usefixtures("small_check")
def test_check_passes(capsys: Captured, tmp_path: Path) -> None:
    report = tmp_path / "check.json"
    assert main(["check", "--kernel", "cpu", "--json", str(report)]) == 0
    printed = capsys.readouterr().out
    assert "PASS: 6 problems" in printed
    assert re.search(r"cpu +float16 +ragged +\(2,1,19,16\) +causal +1 .* PASS", printed)
    document = json.loads(report.read_text())
    assert document["passed"] is True
    assert len(document["results"]) == 6
    for result in document["results"]:
        assert 0.0 < result["max_error"] <= result["bound"]
        assert result["seconds"] > 0.0
        assert result["passed"] is True


def broken(change: Callable[[Any, Any], tuple[Any, Any]]) -> Callable[..., Any]:
    """dlattn.attention with a change to its results."""
    attention = dlattn.attention

    def call(*args: Any, **options: Any) -> Any:
        result = attention(*args, **options)
        return change(*result) if options.get("return_lse") else result

    return call


@pytest.mark.usefixtures("small_check")
@pytest.mark.parametrize(
    "change",
    [
        lambda out, lse: (out * 1.01, lse),
        lambda out, lse: (out, lse + 1e-3),
        lambda out, lse: (np.where(np.arange(out.shape[1])[:, None, None] == 3, np.nan, out), lse),
    ],
    ids=["out", "lse", "a row left out"],
)
def test_check_fails_on_a_wrong_result(capsys: Captured, monkeypatch: Any, change: Any) -> None:
    monkeypatch.setattr(dlattn, "attention", broken(change))
    assert main(["check", "--kernel", "cpu"]) == 1
    printed = capsys.readouterr().out
    assert "FAIL: 6 of 6 problems" in printed
    assert "PASS" not in printed


@pytest.mark.usefixtures("small_check")
def test_check_fails_where_a_kernel_raises(
    capsys: Captured, monkeypatch: Any, tmp_path: Path
) -> None:
    def refuse(*args: Any, **options: Any) -> Any:
        raise dlattn.DeviceError("the device is on fire")

    monkeypatch.setattr(dlattn, "attention", refuse)
    report = tmp_path / "check.json"
    assert main(["check", "--kernel", "cpu", "--json", str(report)]) == 1
    printed = capsys.readouterr().out
    assert "cpu float16 ragged causal seed 0: the device is on fire" in printed
    result = json.loads(report.read_text(), parse_constant=pytest.fail)["results"][0]
    assert result["max_error"] is None
    assert result["failure"] == "the device is on fire"


def test_check_writes_where_it_is_told(capsys: Captured, tmp_path: Path) -> None:
    error = refuses(capsys, "check", "--kernel", "cpu", "--json", tmp_path / "no" / "check.json")
    assert "no such folder" in error


def test_check_wants_a_kernel_of_the_device(capsys: Captured) -> None:
    assert "--kernel cpu does not run on --device cuda" in refuses(
        capsys, "check", "--kernel", "cpu", "--device", "cuda"
    )
    assert "invalid choice: 'fast'" in refuses(capsys, "check", "--kernel", "fast")


@pytest.mark.usefixtures("small_check")
def test_check_without_a_gpu(capsys: Captured, monkeypatch: Any) -> None:
    monkeypatch.setattr(check, "gpu_status", lambda: "none was found")
    monkeypatch.setattr(devices, "gpu_status", lambda: "none was found")
    assert "no GPU: none was found" in refuses(capsys, "check", "--kernel", "scalar")
    assert main(["check"]) == 0
    assert "GPU not checked: none was found" in capsys.readouterr().out


@pytest.mark.usefixtures("small_check")
def test_check_without_a_framework_for_the_gpu(capsys: Captured, monkeypatch: Any) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(check, "gpu_status", lambda: "")
    monkeypatch.setattr(devices, "gpu_status", lambda: "")
    monkeypatch.setattr(devices.importlib, "import_module", missing)
    assert main(["check"]) == 0
    printed = capsys.readouterr().out
    assert "GPU not checked: there is a GPU, but nothing here can hold arrays on it" in printed
    assert "cupy is not installed; torch is not installed; jax is not installed" in printed
    assert "pip install" in printed
    assert "PASS: 6 problems" in printed


@pytest.mark.gpu
@pytest.mark.usefixtures("small_check")
@pytest.mark.parametrize("kernel", check.GPU_KERNELS)
def test_check_on_a_gpu(capsys: Captured, monkeypatch: Any, kernel: str) -> None:
    cases = (check.Case("half", (1, 2, 65, 64), True, seeds=(0, 1)),)
    monkeypatch.setattr(check, "CASES", cases)
    gpu, remarks = check.find_gpu(), list[str]()
    if kernel not in check._kernels_of(gpu, remarks):
        # Not for this GPU: said, and passed over unless asked for by name.
        assert kernel == "sm90" and "needs " in " ".join(remarks)
        assert main(["check", "--kernel", kernel]) == 1
        return
    assert main(["check", "--kernel", kernel]) == 0
    assert "PASS: 2 problems" in capsys.readouterr().out


# run


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    paths = {name: tmp_path / f"{name}.npy" for name in ("q", "k", "v")}
    np.save(paths["q"], draw(2, 6, 4, 16, seed=1))
    np.save(paths["k"], draw(2, 9, 2, 16, seed=2))
    np.save(paths["v"], draw(2, 9, 2, 8, seed=3))
    return paths


def run_arguments(files: dict[str, Path], *more: str | Path) -> list[str]:
    words: list[str | Path] = ["run"]
    for name, path in files.items():
        words += [f"--{name}", path]
    return [str(word) for word in (*words, *more)]


def check_result(files: dict[str, Path], out: Any, lse: Any = None, **options: Any) -> None:
    q, k, v = (np.load(files[name]) for name in "qkv")
    expected = attention_reference(q, k, v, **options)
    bound = error_bound(q, k, v, expected=expected, **options)
    assert max_error(out, expected[0]) <= bound.out
    if lse is not None:
        assert max_error(lse, expected[1]) <= bound.lse


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ([], {}),
        (["--causal"], {"causal": True}),
        (["--causal", "top_left"], {"causal": "top_left"}),
        (["--softmax-scale", "0.5"], {"softmax_scale": 0.5}),
        (["--window", "2", "none"], {"window": (2, None)}),
        (["--window", "none", "0", "--softcap", "3"], {"window": (None, 0), "softcap": 3.0}),
        (["--kernel", "cpu"], {}),
    ],
)
def test_run(files: dict[str, Path], tmp_path: Path, words: list[str], options: Any) -> None:
    out, lse = tmp_path / "out.npy", tmp_path / "lse.npy"
    assert main(run_arguments(files, "-o", out, "--lse", lse, *words)) == 0
    check_result(files, np.load(out), np.load(lse), **options)


def test_run_with_heads_first(files: dict[str, Path], tmp_path: Path) -> None:
    for path in files.values():
        np.save(path, np.load(path).swapaxes(1, 2))
    out = tmp_path / "out.npy"
    assert main(run_arguments(files, "-o", out, "--layout", "bhsd")) == 0
    check_result(files, np.load(out), layout="bhsd")


def test_run_with_mask_and_bias(files: dict[str, Path], tmp_path: Path) -> None:
    mask, bias = draw(6, 9, seed=4) > 0.0, draw(4, 6, 9, seed=5)
    np.save(tmp_path / "mask.npy", mask)
    np.save(tmp_path / "bias.npy", bias)
    more = ["--mask", tmp_path / "mask.npy", "--bias", tmp_path / "bias.npy"]
    assert main(run_arguments(files, "-o", tmp_path / "out.npy", *more)) == 0
    check_result(files, np.load(tmp_path / "out.npy"), mask=mask, bias=bias)


def test_run_says_what_it_wrote(files: dict[str, Path], tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "out.npy"
    assert main(run_arguments(files, "-o", out)) == 0
    assert capsys.readouterr().out == f"out: (2, 6, 4, 8) float32 -> {out}\n"


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_run_on_files_of_many_arrays(files: dict[str, Path], tmp_path: Path, suffix: str) -> None:
    if suffix == ".safetensors":
        pytest.importorskip("safetensors")
    inputs, outputs = tmp_path / f"in{suffix}", tmp_path / f"out{suffix}"
    save([(Place(inputs, name), name, np.load(path)) for name, path in files.items()])
    words = ["run", "-o", f"{outputs}", "--lse", f"{outputs}:log_sum_exp"]
    for name in files:
        words += [f"--{name}", f"{inputs}:{name}"]
    assert main(words) == 0
    check_result(files, load(Place(outputs, "out")), load(Place(outputs, "log_sum_exp")))


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".safetensors"])
def test_bfloat16_goes_through_files(tmp_path: Path, suffix: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    if suffix == ".safetensors":
        pytest.importorskip("safetensors")
    place = Place(tmp_path / f"x{suffix}", None)
    array = draw(3, 4).astype(ml_dtypes.bfloat16)
    save([(place, "x", array)])
    loaded = load(place)
    assert loaded.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(loaded, array)


@pytest.mark.gpu
def test_run_on_a_gpu(files: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "out.npy"
    assert main(run_arguments(files, "-o", out, "--device", "cuda", "--kernel", "scalar")) == 0
    check_result(files, np.load(out))


@pytest.mark.parametrize("output", ["-o", "--lse"])
@pytest.mark.parametrize("link", [False, True])
def test_run_never_overwrites_an_input(
    files: dict[str, Path], tmp_path: Path, capsys: Captured, output: str, link: bool
) -> None:
    before = files["k"].read_bytes()
    target = files["k"]
    if link:
        target = tmp_path / "another_name.npy"
        target.hardlink_to(files["k"])
    words = [output, target] if output == "-o" else ["-o", tmp_path / "out.npy", output, target]
    error = refuses(capsys, *run_arguments(files, *words))
    assert "that is the file of --k; give it another name" in error
    assert files["k"].read_bytes() == before
    assert not (tmp_path / "out.npy").exists()


def test_run_keeps_its_two_results_apart(
    files: dict[str, Path], tmp_path: Path, capsys: Captured
) -> None:
    out = tmp_path / "out.npy"
    assert "--out goes there too" in refuses(capsys, *run_arguments(files, "-o", out, "--lse", out))
    place = f"{tmp_path / 'out.npz'}:x"
    assert "--out goes there too" in refuses(
        capsys, *run_arguments(files, "-o", place, "--lse", place)
    )
    assert not out.exists()


def test_run_refuses_what_attention_refuses(
    files: dict[str, Path], tmp_path: Path, capsys: Captured
) -> None:
    out = tmp_path / "out.npy"
    arguments = run_arguments(files, "-o", out)
    assert "softmax_scale is -1" in refuses(capsys, *arguments, "--softmax-scale", "-1")
    assert "kernel" in refuses(capsys, *arguments, "--kernel", "fast")
    np.save(files["k"], draw(2, 9, 3, 16))
    assert "v: num_heads is 2" in refuses(capsys, *arguments)
    np.save(files["k"], np.zeros((2, 9, 2, 16), dtype=np.int32))
    assert "int32" in refuses(capsys, *arguments)
    assert not out.exists()


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda folder: folder / "missing.npy", "missing.npy: no such file"),
        (lambda folder: write(folder / "q.txt", b"1 2 3"), "accepted: .npy, .npz, .safetensors"),
        (lambda folder: write(folder / "bad.npy", b"no array"), "bad.npy: cannot be read: "),
        (lambda folder: write(folder / "bad.npz", b"no archive"), "bad.npz: cannot be read: "),
        (lambda folder: objects(folder / "objects.npy"), "objects.npy: cannot be read: "),
        (lambda folder: two(folder / "two.npz"), "several arrays; name one as path:key; it holds:"),
        (lambda folder: f"{two(folder / 'two.npz')}:c", "no array named 'c'; it holds: a, b"),
        (lambda folder: f"{objects(folder / 'a.npy')}:x", "holds one array and takes no key"),
    ],
)
def test_run_on_files_that_cannot_be_read(
    files: dict[str, Path], tmp_path: Path, capsys: Captured, prepare: Any, message: str
) -> None:
    files["q"] = prepare(tmp_path)
    assert message in refuses(capsys, *run_arguments(files, "-o", tmp_path / "out.npy"))


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def objects(path: Path) -> Path:
    """A file that only unpickling could read."""
    np.save(path, np.array([{}], dtype=object), allow_pickle=True)
    return path


def two(path: Path) -> Path:
    np.savez(path, a=np.zeros(1), b=np.ones(1))
    return path


def test_run_into_a_missing_folder(
    files: dict[str, Path], tmp_path: Path, capsys: Captured
) -> None:
    out = tmp_path / "no" / "such" / "folder" / "out.npy"
    assert "cannot be written: no such folder" in refuses(capsys, *run_arguments(files, "-o", out))


def test_run_needs_safetensors_for_its_files(
    files: dict[str, Path], tmp_path: Path, capsys: Captured, monkeypatch: Any
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    files["q"] = write(tmp_path / "q.safetensors", b"")
    for out in ("out.npy", "out.safetensors"):
        error = refuses(capsys, *run_arguments(files, "-o", tmp_path / out))
        assert "pip install safetensors" in error
        files["q"] = files["k"]


def test_run_with_half_a_window(files: dict[str, Path], tmp_path: Path, capsys: Captured) -> None:
    words = run_arguments(files, "-o", tmp_path / "out.npy", "--window", "1", "all")
    assert "'all' is no number of tokens, nor 'none'" in refuses(capsys, *words)


def test_save_leaves_no_half_file(tmp_path: Path, monkeypatch: Any) -> None:
    target = write(tmp_path / "out.npy", b"precious")

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(CommandError, match=r"out.npy: cannot be written: No space left"):
        save([(Place(target, None), "out", np.zeros(3))])
    assert target.read_bytes() == b"precious"
    assert [path.name for path in tmp_path.iterdir()] == ["out.npy"]


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
