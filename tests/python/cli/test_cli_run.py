"""`python -m dlattn run`: files in, files out."""

from __future__ import annotations

import os
import pickle
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import Captured, draw, refuses

from dlattn.cli import main
from dlattn.cli.files import Place, load, save
from dlattn.console.devices import CpuDevice
from dlattn.reference import attention_reference, error_bound, max_error


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
        (lambda folder: write(folder / "bad.npy", b"no array"), "read: it is no .npy file"),
        (lambda folder: write(folder / "bad.npz", b"no archive"), "read: it is no .npz file"),
        (lambda folder: write(folder / "bad.npy", b""), "bad.npy: cannot be read: it is no .npy"),
        (lambda folder: write(folder / "p.npy", pickle.dumps([1])), "p.npy: cannot be read: it is"),
        (lambda folder: write(folder / "p.npz", pickle.dumps([1])), "p.npz: cannot be read: it is"),
        (lambda folder: objects(folder / "objects.npy"), "read: its elements are Python objects"),
        (lambda folder: objects(folder / "objects.npz"), "read: its elements are Python objects"),
        (lambda folder: made(folder / "h.npy", long_header), "read: its header is none that NumPy"),
        (lambda folder: two(folder / "two.npz"), "several arrays; name one as path:key; it holds:"),
        (lambda folder: f"{two(folder / 'two.npz')}:c", "no array named 'c'; it holds: a, b"),
        (lambda folder: f"{objects(folder / 'a.npy')}:x", "holds one array and takes no key"),
        (lambda folder: f"{two(folder / 'two.npz')}:", "'' cannot be the name of an array"),
        (lambda folder: "", "--q '': unknown kind of file"),
        (lambda folder: folder / "q.npy" / "x.npy", "x.npy: cannot be read: Not a directory"),
        (lambda folder: folder / ("x" * 300 + ".npy"), ".npy: cannot be read: File name too long"),
        (lambda folder: made(folder / "folder.npy", Path.mkdir), "cannot be read: it is a folder"),
        (lambda folder: made(folder / "fifo.npy", os.mkfifo), "cannot be read: it is no regular f"),
        (lambda folder: made(folder / "none.npz", np.savez), "none.npz: it holds no array"),
        (lambda folder: two(folder / "a.npz").rename(folder / "a.npy"), "no array in a .npy file"),
        (lambda folder: (folder / "q.npy").rename(folder / "q.npz"), "no array in a .npz file"),
        (lambda folder: made(folder / "t.npz", of_text), "t.npz: cannot be read: it is no array"),
        (lambda folder: made(folder / "huge.npy", huge), "cannot be read: Unable to allocate 56.8"),
        (lambda folder: made(folder / "s.npy", lambda to: np.save(to, ["a"])), "q: dtype is <U1"),
        (lambda folder: made(folder / "e.npy", lambda to: np.save(to, 1j)), "dtype is complex128"),
    ],
)
def test_run_on_files_that_cannot_be_read(
    files: dict[str, Path], tmp_path: Path, capsys: Captured, prepare: Any, message: str
) -> None:
    files["q"] = prepare(tmp_path)
    error = refuses(capsys, *run_arguments(files, "-o", tmp_path / "out.npy"))
    assert message in error
    assert len(error.splitlines()) == 1
    assert "pickle" not in error and "unsafe" not in error  # NumPy's advice


@pytest.mark.parametrize("suffix", [".npy", ".npz"])
@pytest.mark.parametrize("order", ["fortran", "bytes"])
def test_run_on_arrays_of_another_order(
    files: dict[str, Path], tmp_path: Path, suffix: str, order: str
) -> None:
    """Fortran's order, and the bytes of another machine: what the file holds is the same array."""
    arrays = {name: np.load(path) for name, path in files.items()}
    arrays["bias"] = draw(2, 4, 6, 9, seed=7)
    arguments = ["run", "-o", str(tmp_path / "out.npy")]
    for name, array in arrays.items():
        other = np.asfortranarray(array) if order == "fortran" else array.astype(">f4")
        path = tmp_path / f"other-{name}{suffix}"
        np.save(path, other) if suffix == ".npy" else np.savez(path, other)
        arguments += [f"--{name}", str(path)]
    assert main(arguments) == 0
    expected = attention_reference(*(arrays[name] for name in "qkv"), bias=arrays["bias"])
    bound = error_bound(*(arrays[name] for name in "qkv"), bias=arrays["bias"], expected=expected)
    assert max_error(np.load(tmp_path / "out.npy"), expected[0]) <= bound.out


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def made(path: Path, make: Callable[[Path], Any]) -> Path:
    make(path)
    return path


def of_text(path: Path) -> None:
    """An archive, but not of arrays."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("q", "text")


def huge(path: Path) -> None:
    """A file that claims more than any memory holds."""
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(
            file, {"descr": "<f4", "fortran_order": False, "shape": (16 * 10**15,)}
        )


def long_header(path: Path) -> None:
    """Longer than what NumPy reads unless it is told that the file can be trusted."""
    fields = [(f"field{i}", "<f4") for i in range(1000)]
    np.save(path, np.zeros(1, fields))


def objects(path: Path) -> Path:
    """A file that only unpickling could read."""
    array = np.array([{}], dtype=object)
    np.save(path, array, allow_pickle=True) if path.suffix == ".npy" else np.savez(path, array)
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


def test_run_where_the_gpu_has_no_memory(
    files: dict[str, Path], tmp_path: Path, capsys: Captured, monkeypatch: Any
) -> None:
    class Full(CpuDevice):
        def put(self, array: Any) -> Any:
            raise RuntimeError("CUDA out of memory.\nHere is a tip that takes a page.")

    monkeypatch.setattr("dlattn.cli.run.find_device", lambda *_: Full())
    assert main(run_arguments(files, "-o", tmp_path / "out.npy")) == 1
    assert capsys.readouterr().err == "dlattn: error: CUDA out of memory.\n"


def test_run_on_a_kernel_that_is_no_text(
    files: dict[str, Path], tmp_path: Path, capsys: Captured
) -> None:
    arguments = run_arguments(files, "-o", tmp_path / "out.npy", "--kernel", os.fsdecode(b"\xff"))
    assert "Traceback" not in refuses(capsys, *arguments)
