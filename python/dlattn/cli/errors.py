"""What a command raises to end with a message and no traceback."""


class CommandError(Exception):
    """The command was asked for something it cannot do: exit code 2."""
