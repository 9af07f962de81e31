"""The command line: `python -m dlattn info | check | run | bench`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import dlattn
from dlattn.cli import check, info, run
from dlattn.cli.errors import CommandError

_EPILOG = "Exit codes: 0 done, 1 a check failed or the device did, 2 wrong use."


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments, run the command, return the exit code."""
    args = _parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int] = args.command
    try:
        return command(args)
    except (CommandError, dlattn.UnsupportedError) as error:
        print(f"dlattn: error: {error}", file=sys.stderr)
        return 2
    except dlattn.DeviceError as error:
        print(f"dlattn: error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of our output has seen enough
        sys.stderr.close()
        return 0
    except KeyboardInterrupt:
        return 130


def package_dir() -> Path:
    """Where the package is installed; the headers and the CMake package lie inside."""
    return Path(dlattn._core.__file__).absolute().parent  # an editable install has it elsewhere


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dlattn",
        description="Attention with a streaming softmax on tensor cores.",
        epilog=_EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"dlattn {dlattn.__version__}")
    root = package_dir()
    for option, folder, what in (
        ("--cmake-dir", root / "lib" / "cmake" / "dlattn", "the CMake package, for dlattn_DIR"),
        ("--include-dir", root / "include", "the C++ headers"),
    ):
        parser.add_argument(
            option, action="version", version=str(folder), help=f"print the folder of {what}"
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
