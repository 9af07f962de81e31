"""Files written whole or not at all, whatever their name stands for."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from dlattn.console.errors import CommandError, OutputError, first_line

# Signals that end a program, but for the interrupt, which Python raises as an exception.
_DEADLY = [
    getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGQUIT") if hasattr(signal, name)
]

# Files that are being written, each to take the place of another.
_unfinished: set[str] = set()


def status(path: Path) -> os.stat_result | None:
    """The file that is there, through links; None if nothing is yet."""
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None


def check_writable(path: Path, option: str) -> None:
    """Raise before anything is computed if a file could not be written; it stays as it is."""
    reason = ""
    try:
        found = status(path)
        if found is not None and stat.S_ISDIR(found.st_mode):
            reason = "it is a folder"
        elif found is not None and stat.S_ISSOCK(found.st_mode):
            reason = "it is a socket"
        elif found is not None and not os.access(path, os.W_OK):
            reason = "it is read-only"
        elif _is_replaced(found):
            folder = os.path.dirname(os.path.realpath(path))
            if os.path.isdir(folder):
                with tempfile.TemporaryFile(dir=folder):  # a new file is needed there in any case
                    pass
            else:
                reason = "no such folder"
    except OSError as error:
        reason = first_line(error)
    if reason:
        raise CommandError(f"{option} {path}: cannot be written: {reason}")


def same_file(a: Path, b: Path) -> bool:
    """Whether two paths name one file, through links too."""
    if os.path.realpath(a) == os.path.realpath(b):
        return True
    try:
        return os.path.samefile(a, b)
    except OSError:  # one of them is not there, or not to be seen
        return False


def check_distinct(outputs: Mapping[str, Path | None]) -> None:
    """Raise if the paths of two options name one file, of which the second would replace the first.

    What is written to the null device is not wanted, so any number may go there.
    """
    given = [(option, path) for option, path in outputs.items() if path is not None]
    for i, (second, other) in enumerate(given):
        for first, path in given[:i]:
            if same_file(path, other) and not same_file(path, Path(os.devnull)):
                raise CommandError(
                    f"{second} {other}: {first} goes there too; give it another name"
                )


def is_stream(path: Path) -> bool:
    """Whether what is written goes on to a reader, and cannot be replaced by a later version."""
    return not _is_replaced(status(path))


def write_text(path: Path, text: str) -> None:
    """Write a text file."""
    try:
        with replacing(path) as file:
            file.write(text.encode())
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {first_line(error)}") from error


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` when the block has ended without an error.

    A link stays and its target is replaced, which keeps its mode and owner. A file that
    is not regular (a FIFO, a device) is not replaced but written to, and so is stdout's target.

    An error or a signal that ends the program leaves nothing behind.
    """
    found = status(path)
    if found is not None and not _is_replaced(found):
        descriptor = _standard(found)
        if descriptor is not None:
            sys.stdout.flush()
        with open(path if descriptor is None else os.dup(descriptor), "wb") as stream:
            yield stream
        return
    target = os.path.realpath(path)
    temporary = os.path.join(os.path.dirname(target), f".dlattn-{secrets.token_hex(8)}")
    mode = 0o666 if found is None else stat.S_IMODE(found.st_mode)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with _removed_unless_finished(temporary):
        descriptor = os.open(temporary, flags, mode)  # less what the umask takes
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            if found is not None:
                _take_after(found, file.fileno())
        os.replace(temporary, target)


@contextlib.contextmanager
def _removed_unless_finished(temporary: str) -> Iterator[None]:
    """Remove a file if the block ends by an error, or a signal ends the program."""
    before: dict[int, Any] = {}
    _unfinished.add(temporary)
    try:
        with contextlib.suppress(
            ValueError
        ):  # another thread than Python's main one gets no signals
            for number in _DEADLY:
                if signal.getsignal(number) is signal.SIG_DFL:  # nohup, for one, ignores SIGHUP
                    before[number] = signal.signal(number, _end)
        yield
    except BaseException:
        _remove(temporary)
        raise
    finally:
        _unfinished.discard(temporary)
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(number: int, _: Any) -> None:
    """Remove what is not finished, and end as the signal does."""
    for temporary in list(_unfinished):
        _remove(temporary)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _remove(temporary: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(temporary)


def _is_replaced(found: os.stat_result | None) -> bool:
    return found is None or (stat.S_ISREG(found.st_mode) and _standard(found) is None)


def _standard(found: os.stat_result) -> int | None:
    """The descriptor of stdout or stderr if the file is theirs, by a name such as /dev/stdout."""
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):
            if os.path.samestat(found, os.fstat(descriptor)):
                return descriptor
    return None


def _take_after(found: os.stat_result, descriptor: int) -> None:
    """Give a file the owner, if we may, and the mode of the one it replaces."""
    made = os.fstat(descriptor)
    if (made.st_uid, made.st_gid) != (found.st_uid, found.st_gid):
        with contextlib.suppress(OSError):
            os.fchown(descriptor, found.st_uid, found.st_gid)
    os.fchmod(descriptor, stat.S_IMODE(found.st_mode))
