"""One process of `torch_suite.py`: some tests of a file of torch's, with or without dlattn.

What it writes is told by `suite_processes.py`.
"""

from __future__ import annotations

import argparse
import ast
import faulthandler
import json
import re
import sys
import time
import traceback
import unittest
import zlib
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from suite_processes import KEPT_BYTES, MESSAGE, ended, load

ROUND = 20  # tests of a function


def load_beside(path: Path) -> ModuleType:
    """The test file as a module; files beside it can be imported, as where it comes from."""
    sys.path.insert(0, str(path.parent))
    return load(path)


def tests_of(module: ModuleType) -> dict[str, type[unittest.TestCase]]:
    """Every test that the module defines, `Class.test`, and its class."""
    found: dict[str, type[unittest.TestCase]] = {}
    loader = unittest.TestLoader()
    for name, thing in sorted(vars(module).items()):
        is_tests = isinstance(thing, type) and issubclass(thing, unittest.TestCase)
        if is_tests and thing.__module__ == module.__name__:
            found |= {f"{name}.{test}": thing for test in loader.getTestCaseNames(thing)}
    return found


def functions_of(path: Path) -> list[str]:
    """The names of the test functions as they are written, without parameters and devices."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return [n.name for n in nodes if isinstance(n, ast.FunctionDef) and n.name.startswith("test")]


def function_of(test: str, functions: Iterable[str]) -> str:
    """`Class.function` of a test, of which the file makes many."""
    owner, name = test.split(".")
    matching = (f for f in functions if name == f or name.startswith(f + "_"))
    return f"{owner}.{max(matching, key=len, default=name)}"


def chosen(tests: Iterable[str], functions: list[str], pattern: str, cases: int) -> list[str]:
    """Keep of the tests that match at most so many of each function, in the order to run them.

    They come in rounds of ROUND tests of each function, by class, since unittest prepares a class
    when it comes to it: when time ends, every function has had its turn.
    """
    taken: dict[str, int] = {}
    kept = []
    for test in sorted(tests, key=lambda t: (zlib.crc32(t.encode()), t)):
        if re.search(pattern, test):
            function = function_of(test, functions)
            rank = taken.setdefault(function, 0)
            taken[function] += 1
            if not cases or rank < cases:
                kept.append((rank // ROUND, test.split(".")[0], test))
    return [test for _, _, test in sorted(kept, key=lambda entry: entry[:2])]


class Recorder(unittest.TestResult):
    """Writes what becomes of each test, and what dlattn had to do with it."""

    def __init__(
        self, records: Path, dlattn: Any, patience: float, gradients: str | None = None
    ) -> None:
        super().__init__()
        self._file = records.open("a")
        self._dlattn = dlattn
        self._gradients = gradients
        self._patience = patience
        self._outcome, self._message = "passed", ""
        self._started = 0.0

    def write(self, **record: Any) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self.write(test=_name(test))
        self._outcome, self._message = "passed", ""
        self._started = time.monotonic()
        if self._dlattn is not None:
            self._dlattn.activate(self._gradients)
            self._dlattn.stats(reset=True)
        faulthandler.dump_traceback_later(self._patience, exit=True)

    def stopTest(self, test: unittest.TestCase) -> None:
        faulthandler.cancel_dump_traceback_later()
        record: dict[str, Any] = {"test": _name(test), "outcome": self._outcome}
        record["seconds"] = round(time.monotonic() - self._started, 3)
        if self._message:
            record["message"] = self._message[-MESSAGE:]
        if self._dlattn is not None:
            stats = self._dlattn.stats()
            record |= {"served": stats.served, "refused": stats.refused}
            record["active"] = self._dlattn.is_active()
        self.write(**record)
        super().stopTest(test)
        if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > KEPT_BYTES:
            torch.cuda.empty_cache()

    def _take(self, outcome: str, error: Any) -> None:
        self._outcome = outcome
        self._message = "".join(traceback.format_exception(*error))

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        super().addFailure(test, err)
        self._take("failed", err)

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        super().addError(test, err)
        self._take("failed", err)
        if not isinstance(test, unittest.TestCase):  # a class whose setUpClass failed
            self.write(trouble=f"{test}: {self._message[-MESSAGE:]}")

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: Any) -> None:
        super().addSubTest(test, subtest, err)
        if err is not None:
            self._take("failed", err)

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        super().addSkip(test, reason)
        self._outcome, self._message = "skipped", reason

    def addExpectedFailure(self, test: unittest.TestCase, err: Any) -> None:
        super().addExpectedFailure(test, err)
        self._outcome = "failed as expected"

    def addUnexpectedSuccess(self, test: unittest.TestCase) -> None:
        super().addUnexpectedSuccess(test)
        self._outcome = "passed, which was not expected"


def _name(test: unittest.TestCase) -> str:
    return f"{type(test).__qualname__}.{test._testMethodName}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("path", type=Path)
    parser.add_argument("records", type=Path)
    parser.add_argument("--dlattn", help="whose gradients: an argument of dlattn.torch.activate()")
    parser.add_argument("--pattern", default="")
    parser.add_argument("--cases", type=int, default=0)
    parser.add_argument("--shard", type=int, nargs=2, default=(0, 1))
    parser.add_argument("--patience", type=float, default=300.0)
    parser.add_argument("--only", type=Path)
    args = parser.parse_args()
    dlattn = None
    if args.dlattn:
        import dlattn.torch as dlattn

        dlattn.activate(args.dlattn)  # before the file asks torch anything
    path = args.path.resolve()
    tests = tests_of(load_beside(path))
    names = chosen(tests, functions_of(path), args.pattern, args.cases)
    if args.only:
        only = set(json.loads(args.only.read_text()))
        names = [name for name in names if name in only]
    names = names[args.shard[0] :: args.shard[1]]
    done = ended(args.records)
    recorder = Recorder(args.records, dlattn, args.patience, args.dlattn)
    recorder.write(chosen=names, cuda=torch.cuda.is_available())
    left = [name for name in names if name not in done]
    unittest.TestSuite(tests[name](name.split(".")[1]) for name in left).run(recorder)
    recorder.write(finished=not recorder.shouldStop)


if __name__ == "__main__":
    main()
