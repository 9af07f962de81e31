"""stdout for the commands: any text goes through, and a failure to write ends with a message."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import TextIO


class StdoutError(Exception):
    """stdout took no more; the cause is the error of writing to it."""

    @property
    def reader_is_gone(self) -> bool:
        """Whether a reader such as `head` has seen enough, which is no error."""
        return isinstance(self.__cause__, BrokenPipeError)


class Stdout(io.TextIOBase):
    """Stands before stdout, whose own errors could not be told from those of other files."""

    def __init__(self, stream: TextIO) -> None:
        """Write to `stream`."""
        self._stream = stream

    def write(self, text: str) -> int:
        """Write; what the encoding lacks goes out as the bytes of a file's name do."""
        try:
            return self._stream.write(text)
        except UnicodeEncodeError:
            return self._write_bytes(text)
        except (OSError, ValueError) as error:  # ValueError: it was closed
            raise StdoutError from error

    def flush(self) -> None:
        """Write what is still in the buffer."""
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            raise StdoutError from error

    def isatty(self) -> bool:
        """Whether a person is reading."""
        return self._stream.isatty()

    def _write_bytes(self, text: str) -> int:
        self.flush()
        readable = text.encode("ascii", "backslashreplace")
        try:
            raw = text.encode(sys.getfilesystemencoding(), "surrogateescape")
        except UnicodeEncodeError:  # a surrogate that stands for no byte
            raw = readable
        try:
            if hasattr(self._stream, "buffer"):
                self._stream.buffer.write(raw)
            else:
                self._stream.write(readable.decode())
        except OSError as error:
            raise StdoutError from error
        return len(text)


def discard(stream: TextIO | None) -> None:
    """Have Python not fail once more, at exit, over what a stream has not taken."""
    if stream is None:
        return
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
