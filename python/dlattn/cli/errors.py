"""What a command raises to end with a message and no traceback, and others' errors in a line."""

from __future__ import annotations


class CommandError(Exception):
    """The command was asked for something it cannot do: exit code 2."""


def first_line(error: BaseException) -> str:
    """What an error says, or its name if it says nothing."""
    return (str(error).splitlines() or [type(error).__name__])[0]
