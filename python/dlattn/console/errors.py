"""The exception that ends a command with a message and no traceback; other errors in a line."""

from __future__ import annotations


class CommandError(Exception):
    """The command was asked for something it cannot do."""

    exit_code = 2


class OutputError(CommandError):
    """A result could not be written, after all that could be checked before was right."""

    exit_code = 1


def first_line(error: BaseException) -> str:
    """The first line of an error, or its name if it has none."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror  # without the number, and the path that the caller names
    return (str(error).splitlines() or [type(error).__name__])[0]
