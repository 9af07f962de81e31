"""`python -m dlattn run` on files of several arrays: it loses none of them."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
from command_line import (
    ARCHIVES,
    INPUTS,
    OTHERS,
    Captured,
    archive,
    holds,
    is_lse,
    is_out,
    names,
    refuses,
    words,
)

from dlattn.cli import main
from dlattn.cli.files import Place, load


@pytest.mark.parametrize("suffix", ARCHIVES)
def test_named_result_keeps_the_other_arrays(folder: Path, suffix: str) -> None:
    path = archive(folder / f"file{suffix}", OTHERS)
    for _ in range(2):  # adds out, then replaces it
        assert main(words("-o", f"{path}:out")) == 0
        assert names(path) == ["none", "out", "steps", "weights"]
        assert holds(path, OTHERS)
        assert is_out(load(Place(path, "out")))


@pytest.mark.parametrize("suffix", ARCHIVES)
def test_unnamed_result_replaces_the_file(folder: Path, suffix: str) -> None:
    path = archive(folder / f"file{suffix}", OTHERS)
    assert main(words("-o", path)) == 0
    assert names(path) == ["out"]
    assert main(words("-o", path, "--lse", f"{path}:log")) == 0
    assert names(path) == ["log", "out"]


def test_help_tells_what_becomes_of_a_file(capsys: Captured) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "A file that is there is replaced; but one given with the name of an array" in text
    assert "(file.npz:name) keeps its other arrays" in text


def test_npz_keeps_what_numpy_would_not_read(folder: Path) -> None:
    path = archive(folder / "file.npz", {"objects": np.array([{}], dtype=object), **OTHERS})
    with zipfile.ZipFile(path, "a") as members:
        members.writestr("notes.txt", "no array")
        members.comment = b"of the file"
        before = {name: members.read(name) for name in members.namelist()}
    assert main(words("-o", "file.npz:out")) == 0
    with zipfile.ZipFile(path) as members:
        assert {name: members.read(name) for name in before} == before
        assert sorted(members.namelist()) == sorted([*before, "out.npy"])
        assert members.getinfo("weights.npy").compress_type == zipfile.ZIP_DEFLATED
        assert members.comment == b"of the file"
        assert members.testzip() is None


def test_safetensors_keep_what_numpy_does_not_know(folder: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    path = folder / "file.safetensors"
    entries = {"odd": {"dtype": "F8_E4M3", "shape": [3], "data_offsets": [0, 3]}}
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\x01\x02\x03")
    assert main(words("-o", f"{path}:out", "--lse", f"{path}:lse")) == 0
    with safetensors.safe_open(path, framework="np") as tensors:
        assert tensors.metadata() == {"format": "pt"}
        assert sorted(tensors.keys()) == ["lse", "odd", "out"]
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    entry = json.loads(content[8 : 8 + size])
    begin, end = entry["odd"]["data_offsets"]
    assert content[8 + size :][begin:end] == b"\x01\x02\x03"
    assert size % 8 == 0 and entry["out"]["data_offsets"][0] % 4 == 0  # aligned, for mmap
    assert is_out(load(Place(path, "out"))) and is_lse(load(Place(path, "lse")))


@pytest.mark.parametrize("key", ["file", "x.npy", "a:b", "allow_pickle", "model.layers.0", "../x"])
@pytest.mark.parametrize("suffix", ARCHIVES)
def test_any_name_of_an_array(folder: Path, suffix: str, key: str) -> None:
    if suffix == ".safetensors":
        pytest.importorskip("safetensors")
    path = folder / f"file{suffix}"
    assert main(words("-o", f"{path}:{key}")) == 0
    assert names(path) == [key]
    assert is_out(load(Place.parse(f"{path}:{key}")))


@pytest.mark.parametrize("suffix", ARCHIVES)
@pytest.mark.parametrize("way", ["absolute", "dots", "symbolic link", "linked folder"])
def test_two_results_in_one_file_by_two_paths(folder: Path, suffix: str, way: str) -> None:
    path = archive(folder / f"file{suffix}", OTHERS)
    if way == "symbolic link":
        (folder / f"link{suffix}").symlink_to(path.name)
    (folder / "sub").mkdir()
    (folder / "here").symlink_to(".")
    other = {
        "absolute": path,
        "dots": f"sub/../{path.name}",
        "symbolic link": f"link{suffix}",
        "linked folder": f"here/{path.name}",
    }[way]
    for first, second in ((path.name, other), (other, path.name)):
        assert main(words("-o", f"{first}:a", "--lse", f"{second}:b")) == 0
        assert names(path) == ["a", "b", "none", "steps", "weights"]
        assert holds(path, OTHERS)
        assert is_out(load(Place(path, "a"))) and is_lse(load(Place(path, "b")))
        path.unlink()
        archive(path, OTHERS)


def test_two_results_in_one_file_by_a_hard_link(folder: Path, capsys: Captured) -> None:
    path = archive(folder / "file.npz", OTHERS)
    (folder / "hard.npz").hardlink_to(path)
    error = refuses(capsys, *words("-o", "file.npz:a", "--lse", "hard.npz:b"))
    assert "--out goes there too by another hard link; give both the same path" in error
    assert names(path) == sorted(OTHERS)


def test_two_results_of_two_kinds_in_one_file(folder: Path, capsys: Captured) -> None:
    (folder / "link.npz").symlink_to("file.safetensors")
    pytest.importorskip("safetensors")
    error = refuses(capsys, *words("-o", "file.safetensors:a", "--lse", "link.npz:b"))
    assert "--lse link.npz:b: --out goes there too" in error


@pytest.mark.parametrize("suffix", ARCHIVES)
def test_result_beside_its_inputs(folder: Path, capsys: Captured, suffix: str) -> None:
    path = archive(folder / f"file{suffix}", INPUTS)
    (folder / f"link{suffix}").symlink_to(path.name)
    inputs = {name: f"{path}:{name}" for name in INPUTS}
    for output in (f"{path}:out", f"link{suffix}:out"):
        assert main(words("-o", output, **inputs)) == 0
        assert names(path) == ["k", "out", "q", "v"]
        assert holds(path, INPUTS) and is_out(load(Place(path, "out")))
    before = path.read_bytes()
    for output in (path, f"{path}:k", f"link{suffix}", f"link{suffix}:k"):
        error = refuses(capsys, *words("-o", output, **inputs))
        assert f"--out {output}: that is the file of --" in error
        assert path.read_bytes() == before


def test_result_is_not_added_to_what_is_no_archive(folder: Path, capsys: Captured) -> None:
    for name in ("text.npz", "text.safetensors"):
        if name.endswith(".safetensors"):
            pytest.importorskip("safetensors")
        (folder / name).write_bytes(b"precious")
        error = refuses(capsys, *words("-o", f"{name}:a"))
        assert f"--out {name}:a: cannot be written: what is there is no " in error
        assert (folder / name).read_bytes() == b"precious"
    (folder / "text.npz").write_bytes(b"")  # as mktemp leaves it
    assert main(words("-o", "text.npz:a")) == 0
    assert names(folder / "text.npz") == ["a"]
