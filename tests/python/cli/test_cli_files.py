"""`python -m dlattn run` on files: none is cut off or left behind."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import (
    ARCHIVES,
    OTHERS,
    Captured,
    archive,
    draw,
    is_out,
    program,
    refuses,
    words,
)

from dlattn.cli import main
from dlattn.cli.files import Place, load, save
from dlattn.console.errors import OutputError

# Modes, links, what is no regular file


@contextlib.contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
@pytest.mark.parametrize("suffix", [".npy", *ARCHIVES])
def test_modes(folder: Path, suffix: str, mask: int) -> None:
    if suffix == ".safetensors":
        pytest.importorskip("safetensors")
    path = folder / f"out{suffix}"
    with umask(mask):
        assert main(words("-o", path)) == 0
        assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask
        for mode in (0o600, 0o664, 0o755):
            path.chmod(mode)
            assert main(words("-o", path)) == 0
            assert stat.S_IMODE(path.stat().st_mode) == mode


@pytest.mark.parametrize("there", [True, False])
def test_symbolic_link_stays(folder: Path, there: bool) -> None:
    (folder / "far").mkdir()
    target, link = folder / "far" / "target.npy", folder / "link.npy"
    link.symlink_to("far/target.npy")
    if there:
        target.write_bytes(b"older")
        target.chmod(0o600)
    assert main(words("-o", link)) == 0
    assert link.readlink() == Path("far/target.npy")
    assert is_out(np.load(target))
    assert not there or stat.S_IMODE(target.stat().st_mode) == 0o600
    assert [path.name for path in target.parent.iterdir()] == ["target.npy"]


@pytest.mark.parametrize("name", ["out.npy", "out.npz", "out.npz:a", "out.safetensors"])
def test_fifo_is_written_to(folder: Path, name: str) -> None:
    place = Place.parse(name)
    if place.path.suffix == ".safetensors":
        pytest.importorskip("safetensors")
    os.mkfifo(place.path)
    content = []
    reader = threading.Thread(target=lambda: content.append(place.path.read_bytes()), daemon=True)
    reader.start()
    assert main(words("-o", name)) == 0
    reader.join(timeout=60)
    assert stat.S_ISFIFO(place.path.stat().st_mode)
    got = Place(folder / f"got{place.path.suffix}", place.key)
    got.path.write_bytes(content[0])
    assert is_out(load(got))


def test_device_is_written_to(folder: Path, capsys: Captured) -> None:
    (folder / "null.npy").symlink_to("/dev/null")
    (folder / "full.npy").symlink_to("/dev/full")
    assert main(words("-o", "null.npy")) == 0
    assert main(words("-o", "out.npy", "--lse", "full.npy")) == 1
    error = capsys.readouterr().err
    assert error == "dlattn: error: full.npy: cannot be written: No space left on device\n"
    assert not (folder / "out.npy").exists()  # both or none
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_report_among_what_stdout_gets(folder: Path) -> None:
    """By /dev/stdout: neither cut off nor replaced where it is a file."""
    (folder / "out.npy").symlink_to("/dev/stdout")
    command = [sys.executable, "-m", "dlattn", *words("-o", "out.npy")]
    with open("log", "wb") as log:
        subprocess.run([sys.executable, "-c", "print('before')"], stdout=log, check=True)
        subprocess.run(command, stdout=log, check=True)
    content = Path("log").read_bytes()
    assert content.startswith(b"before\n\x93NUMPY")
    assert content.endswith(b"out: (1, 6, 2, 16) float32 -> out.npy\n")


# Failures


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """As if the disk were full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("suffix", [".npy", *ARCHIVES])
def test_failure_leaves_everything_as_it_was(folder: Path, suffix: str) -> None:
    path = folder / f"out{suffix}"
    key = None if suffix == ".npy" else "a"
    if key:
        archive(path, OTHERS)
    else:
        path.write_bytes(b"precious")
    small, new = Place(folder / "small.npy", None), Place(folder / "new.npy", None)
    np.save(small.path, np.ones(3))
    before = {found: found.read_bytes() for found in folder.iterdir()}
    large = draw(100, 1000)
    results = [
        (small, "lse", np.zeros(3)),
        (new, "lse", np.zeros(3)),
        (Place(path, key), "o", large),
    ]
    with largest_file(100_000), pytest.raises(OutputError, match=r"cannot be written: File too l"):
        save(results)
    assert {found: found.read_bytes() for found in folder.iterdir()} == before
    save(results)
    assert np.array_equal(load(Place(path, key)), large)
    assert np.array_equal(load(small), np.zeros(3))


def test_interrupt_leaves_nothing_behind(folder: Path, monkeypatch: Any) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    before = sorted(folder.iterdir())
    monkeypatch.setattr(np.lib.format, "write_array", interrupt)
    assert main(words("-o", "out.npy")) == 130
    assert sorted(folder.iterdir()) == before


# Stops in the middle of the second file, as a slow disk would, until the signal comes.
STOPPED = """
import signal, sys, time
import numpy as np
from dlattn.cli import main

signal.signal(signal.SIGHUP, {sighup})
written, write = [], np.lib.format.write_array

def stop(file, array, **options):
    write(file, array, **options)
    written.append(array)
    if len(written) == 2:
        file.write(b"rest")
        print("stopped", file=sys.stderr, flush=True)
        sys.stdin.readline()

np.lib.format.write_array = stop
sys.exit(main({arguments}))
"""


def stopped_program(sighup: str) -> subprocess.Popen[str]:
    arguments = words("-o", "out.npy", "--lse", "lse.npz")
    code = STOPPED.format(sighup=sighup, arguments=arguments)
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen([sys.executable, "-c", code], text=True, **pipes)
    assert process.stderr is not None
    assert process.stderr.readline() == "stopped\n"
    return process


def end_by(process: Any, number: signal.Signals) -> int:
    """The exit status. A signal just before a blocking read ends it no sooner than the next one."""
    for _ in range(60):
        process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return int(process.wait(timeout=1))
    raise AssertionError("no signal ends the program")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signal_leaves_nothing_behind(folder: Path, number: signal.Signals) -> None:
    (folder / "out.npy").write_bytes(b"precious")
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with stopped_program("signal.SIG_DFL") as process:
        assert len(list(folder.glob(".dlattn-*"))) == 2
        assert end_by(process, number) == -number  # as without files: by the signal itself
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_signal_that_is_ignored(folder: Path) -> None:
    """As nohup does."""
    with stopped_program("signal.SIG_IGN") as process:
        process.send_signal(signal.SIGHUP)
        process.communicate("\n", timeout=60)
        assert process.returncode == 0
    assert is_out(load(Place(folder / "out.npy", None)))
    assert not list(folder.glob(".dlattn-*"))


NOT_UTF_8 = os.fsdecode(b"\xff")


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ("", "'': unknown kind of file; accepted: .npy, .npz, .safetensors"),
        (".npy", "'.npy': unknown kind of file"),
        ("folder.npy", "folder.npy: cannot be written: it is a folder"),
        ("socket.npy", "socket.npy: cannot be written: it is a socket"),
        ("loop.npy", "loop.npy: cannot be written: Too many levels of symbolic links"),
        ("q.npy/x.npy", "q.npy/x.npy: cannot be written: Not a directory"),
        ("no/x.npy", "no/x.npy: cannot be written: no such folder"),
        ("x" * 300 + ".npy", "cannot be written: File name too long"),
        ("x/" * 3000 + ".npy.npy", "cannot be written: File name too long"),
        ("out.npz:", "out.npz:: '' cannot be the name of an array"),
        ("out.npz:" + NOT_UTF_8, "'\\udcff' cannot be the name of an array"),
        ("out.npz:" + "x" * 40_000, "cannot be the name of an array"),
        ("out.safetensors:__metadata__", "'__metadata__' cannot be the name of an array"),
    ],
    ids=lambda value: value[:20].encode("unicode_escape").decode(),
)
def test_outputs_that_cannot_be(
    folder: Path, capsys: Captured, monkeypatch: Any, output: str, reason: str
) -> None:
    """Refused before anything is read or computed, by one line."""
    monkeypatch.setattr("dlattn.cli.run.load", lambda _: pytest.fail("read in vain"))
    (folder / "folder.npy").mkdir()
    (folder / "loop.npy").symlink_to("loop.npy")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket.npy")
    before = sorted(folder.iterdir())
    for option in (["-o", output], ["-o", "out.npy", "--lse", output]):
        error = refuses(capsys, *words(*option))
        name = {"-o": "--out"}.get(option[-2], option[-2])
        assert error.startswith(f"dlattn: error: {name} ") and reason in error
        assert len(error.splitlines()) == 1
        assert sorted(folder.iterdir()) == before


def test_name_that_is_no_text(folder: Path, capsys: Captured) -> None:
    os.rename("q.npy", f"{NOT_UTF_8}.npy")
    output = f"out{NOT_UTF_8}.npz"
    done = program(*words("-o", output, q=f"{NOT_UTF_8}.npy"), errors="surrogateescape")
    assert done.stdout == f"out: (1, 6, 2, 16) float32 -> {output}\n"
    assert is_out(load(Place(folder / output, None)))
    error = refuses(capsys, *words("-o", output, q=f"no{NOT_UTF_8}.npy"))
    assert error == "dlattn: error: --q no\\udcff.npy: no such file\n"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_places_that_are_read_only(folder: Path, capsys: Captured) -> None:
    (folder / "kept.npy").write_bytes(b"precious")
    (folder / "kept.npy").chmod(0o444)
    assert "kept.npy: cannot be written: it is read-only" in refuses(
        capsys, *words("-o", "kept.npy")
    )
    (folder / "closed").mkdir(mode=0o555)
    error = refuses(capsys, *words("-o", "closed/out.npy"))
    assert "closed/out.npy: cannot be written: Permission denied" in error
    (folder / "q.npy").chmod(0)
    assert "--q q.npy: cannot be read: Permission denied" in refuses(
        capsys, *words("-o", "out.npy")
    )
