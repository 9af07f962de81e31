"""The command line: `dlattn info | check | run | bench`, or `python -m dlattn`."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import dlattn
from dlattn.cli import check, info, run
from dlattn.console.errors import CommandError, first_line
from dlattn.console.stdout import Stdout, StdoutError, discard

_EPILOG = "Exit codes: 0 done; 1 a check, the device or writing failed; 2 wrong use."
_READER_IS_GONE = 141  # as the shell reports a program that a closed pipe has ended
_INTERRUPTED = 130


class _Print(argparse.Action):
    """Print a line as it is; argparse's own action for a version wraps it like prose."""

    def __init__(self, option_strings: Sequence[str], dest: str, *, line: str, help: str) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help=help)
        self._line = line

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(self._line)
        parser.exit()


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments, run the command, return the exit code."""
    real = sys.stdout
    if real is None:  # the shell's >&-
        return _complain("stdout is closed", 1)
    try:
        with contextlib.redirect_stdout(Stdout(real)) as stdout:
            try:
                return _run(argv)
            finally:
                stdout.flush()
    except StdoutError as error:
        discard(real)
        if error.reader_is_gone:
            return _READER_IS_GONE
        return _complain(f"stdout: cannot be written: {first_line(error.__cause__ or error)}", 1)
    except KeyboardInterrupt:
        return _INTERRUPTED


def package_dir() -> Path:
    """Where the package is installed; the headers and the CMake package lie inside."""
    return Path(dlattn._core.__file__).absolute().parent  # an editable install has it elsewhere


def _run(argv: Sequence[str] | None) -> int:
    args = _parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int] = args.command
    try:
        return command(args)
    except CommandError as error:
        return _complain(error, error.exit_code)
    except dlattn.UnsupportedError as error:
        return _complain(error, 2)
    except dlattn.DeviceError as error:
        return _complain(error, 1)
    except MemoryError as error:
        return _complain(f"out of memory: {first_line(error)}", 1)


def _complain(message: object, exit_code: int) -> int:
    text = str(message).encode("utf-8", "backslashreplace").decode()  # a file's name may be no text
    try:
        if sys.stderr is not None:  # print would take stdout instead
            print(f"dlattn: error: {text}", file=sys.stderr, flush=True)
    except OSError:
        discard(sys.stderr)
    return exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dlattn" if Path(sys.argv[0]).name == "dlattn" else "python -m dlattn",
        description="Attention with a streaming softmax on tensor cores.",
        epilog=_EPILOG,
    )
    root = package_dir()
    for option, line, what in (
        ("--version", f"dlattn {dlattn.__version__}", "the version"),
        ("--cmake-dir", root / "lib" / "cmake" / "dlattn", "the folder of the CMake package"),
        ("--include-dir", root / "include", "the folder of the C++ headers"),
    ):
        parser.add_argument(
            option, action=_Print, line=str(line), help=f"print {what}, one line, and exit"
        )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, module, summary in (
        ("info", info, "what this build and this machine have"),
        ("check", check, "compare every kernel of this machine with float64"),
        ("run", run, "attention on arrays in files"),
    ):
        command = commands.add_parser(name, help=summary, description=f"{summary}.", epilog=_EPILOG)
        module.add_arguments(command)
        command.set_defaults(command=module.main)
    _add_bench(commands)
    return parser


def _add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from dlattn import bench

    summary = "time the kernels against whatever peers are installed"
    command = commands.add_parser("bench", help=summary, description=f"{summary}.", epilog=_EPILOG)
    bench.add_arguments(command)
    command.set_defaults(command=bench.main)
