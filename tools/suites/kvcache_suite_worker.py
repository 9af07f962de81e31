"""One process of `kvcache_suite.py`: some cases of a file of another project's tests.

What it writes is told by `suite_processes.py`.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import re
import sys
import time
import traceback
import zlib
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from suite_adapters import SUITES, Suite
from suite_adapters.cases import Cases, chosen, test_functions
from suite_adapters.serving import Refused, refused, reset, served
from suite_processes import KEPT_BYTES, MESSAGE, ended, load

SHAPE = re.compile(r"\((\d+, ?)+\d*\)")  # in reasons, which are counted without them


def cases_of(suite: Suite, module: ModuleType) -> tuple[list[Cases], dict[str, str]]:
    """The cases of a file's functions, and why functions are left out."""
    found, left_out = [], {}
    for name, function in test_functions(module).items():
        if not re.fullmatch(suite.functions, name):
            continue
        reason = suite.reason_against(name) or _skip_reason(function)
        if reason:
            left_out[name] = reason
        else:
            found.append(Cases(function, suite.values.get(name)))
    return found, left_out


def _skip_reason(function: Callable[..., Any]) -> str | None:
    """The reason of a mark that skips all cases of a function."""
    for mark in getattr(function, "pytestmark", ()):
        if mark.name == "skip" or (mark.name == "skipif" and mark.args and mark.args[0] is True):
            return f"skipped by its file: {mark.kwargs.get('reason', '')}"
    return None


def run(function: Callable[..., Any], arguments: dict[str, Any]) -> tuple[str, str]:
    """A case's outcome in a word, and what it says."""
    try:
        with redirect_stdout(StringIO()):
            function(**arguments)
    except pytest.skip.Exception as skipped:
        return "skipped", str(skipped)
    except pytest.xfail.Exception as expected:
        return "xfailed", str(expected)
    except torch.OutOfMemoryError as error:
        return "out of memory", str(error)
    except (Exception, pytest.fail.Exception) as error:
        refusal = _refusal_behind(error)
        if refusal is not None:
            return "refused", SHAPE.sub("(...)", str(refusal))
        return "failed", traceback.format_exc()[-MESSAGE:]
    return "passed", ""


def _refusal_behind(error: BaseException | None) -> Refused | None:
    while error is not None and not isinstance(error, Refused):
        error = error.__cause__ or error.__context__
    return error


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("path", type=Path)
    parser.add_argument("records", type=Path)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--pattern", default="")
    parser.add_argument("--cases", type=int, default=0)
    parser.add_argument("--shard", type=int, nargs=2, default=(0, 1))
    parser.add_argument("--patience", type=float, default=300.0)
    args = parser.parse_args()
    suite, path = SUITES[args.suite], args.path.resolve()
    on_device = ExitStack()
    if args.device == "cpu":
        from suite_adapters import on_cpu

        on_cpu.patch()
        on_device.enter_context(on_cpu.OnCpu())
    begin = suite.prepare(path)
    found, left_out = cases_of(suite, load(path))
    order = chosen(found, args.pattern, args.cases)[args.shard[0] :: args.shard[1]]
    done = ended(args.records)
    with args.records.open("a") as records:

        def write(**record: Any) -> None:
            records.write(json.dumps(record) + "\n")
            records.flush()

        counts = {group.name: len(group) for group in found}
        write(functions=counts, left_out=left_out, chosen=len(order))
        for group, number in order:
            name = group.title(number)
            if name in done:
                continue
            write(test=name)
            against = suite.reason_against_case(name)
            if against is not None:
                write(test=name, outcome="not promised", message=against)
                continue
            begin(group.name)
            reset()
            torch.manual_seed(zlib.crc32(name.encode()))
            faulthandler.dump_traceback_later(args.patience, exit=True)
            started = time.monotonic()
            outcome, message = run(group.function, group.arguments(number))
            faulthandler.cancel_dump_traceback_later()
            record = {"test": name, "outcome": outcome}
            record["seconds"] = round(time.monotonic() - started, 3)
            record |= {"served": dict(served), "refused": dict(refused)}
            write(**record, **({"message": message} if message else {}))
            if outcome == "failed" and "CUDA error" in message:
                sys.exit(1)  # the context is lost; a new process goes on with the next case
            gc.collect()
            if args.device == "cuda" and torch.cuda.memory_reserved() > KEPT_BYTES:
                torch.cuda.empty_cache()
        write(finished=True)


if __name__ == "__main__":
    main()
