"""Compiles a family's test with changed files, runs it, and says how it fails.

Changes of synchronisation are compiled together, once for each family and variant, and switched on
one at a time; every other mutant is compiled by itself.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from threading import BoundedSemaphore, Lock
from typing import Any

from mutants import Mutant, switched_sources

TIMEOUT_S = 300
NO_CASES = "0 passed, 0 failed\n"
# Files under src from which a source that is compiled once for all tests has numbers for their
# launches, and that source: with a change of the one, the other is compiled anew and linked first.
SHARED_SOURCES = {"cuda/plan/launch_shape.h": "attention_test.cpp"}
# Included before the changed sources. A variable, which needs no order of threads to be read.
SWITCH = """#include <cstdlib>
namespace simt {
inline const char* const asked = std::getenv("SIMT_MUTANT");
inline const int number_switched_on = asked ? std::atoi(asked) : 0;
inline bool switched_on(int number) { return number == number_switched_on; }
}  // namespace simt
"""


class OutOfTimeError(Exception):
    """The time for the whole run is over."""


@dataclass(frozen=True)
class Finding:
    """The variant that caught a mutant, and how; else why it is not known whether it survives."""

    caught: str = ""
    undecided: str = ""

    def __str__(self) -> str:
        return self.caught or f"**{self.undecided or 'survives'}**"


class Once:
    """Values that the first thread to ask for computes, while others wait."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.values: dict[Hashable, Future[Any]] = {}

    def __call__(self, key: Hashable, compute: Callable[[], Any]) -> Any:
        with self.lock:
            first = key not in self.values
            value = self.values.setdefault(key, Future())
        if first:
            try:
                value.set_result(compute())
            except BaseException as error:
                value.set_exception(error)
        return value.result()


class Bench:
    """Builds and runs the families' tests, as they are and with a changed file."""

    def __init__(
        self,
        config: dict[str, Any],
        source: Path,
        scratch: Path,
        *,
        jobs: int,
        seconds: float = float("inf"),
    ) -> None:
        self.config = config
        self.source = source
        self.scratch = scratch
        self.end = time.monotonic() + seconds
        self.once = Once()
        self.cores = BoundedSemaphore(jobs)
        self.switches: dict[str, dict[str, int]] = {}  # by family and name

    def switch(self, mutants: list[Mutant]) -> None:
        """Compile these mutants together with others of their families, where they can be."""
        families = {m.family for m in mutants}
        for family in families:
            own = [m for m in mutants if m.family == family and m.span]
            if not own:
                continue
            self.switches[family] = {m.name: n for n, m in enumerate(own, start=1)}
            folder = self.scratch / "switched" / family
            for file, text in switched_sources(self.source / "cuda", own).items():
                path = folder / "src" / "cuda" / file
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            (folder / "switch.h").write_text(SWITCH)

    def options(self, variant: str, changed: Path | None = None) -> list[str]:
        """Return the compiler and its options; ``changed`` comes before the source."""
        c = self.config
        includes = [f"{c['tests']}/model", c["tests"], *([changed] if changed else [])]
        includes += [self.source, self.source / "include", c["generated"]]
        command = [c["compiler"], *c["flags"], *c["variants"][variant]["flags"]]
        command += [f"-I{path}" for path in includes]
        return command + [f"-isystem{path}" for path in c["system_includes"]]

    def precompiled(self, variant: str) -> tuple[Path, set[str]]:
        """The header of all tests, compiled, and the files of src that it includes."""

        def compile_header() -> tuple[Path, set[str]]:
            header = self.scratch / f"{variant}.h"
            tests = self.config["tests"]
            header.write_text(f'#include "{tests}/prelude.h"\n#include "{tests}/common.h"\n')
            listed = header.with_suffix(".d")
            command = [*self.options(variant), "-x", "c++-header", str(header), "-MMD"]
            built = self.run([*command, "-MF", str(listed), "-o", f"{header}.gch"])
            if built.returncode != 0:
                raise RuntimeError(f"common.h under {variant} does not compile:\n{built.stdout}")
            names = [os.path.normpath(x) for x in listed.read_text().split()]
            folder = f"{self.source}/"
            return header, {x.removeprefix(folder) for x in names if x.startswith(folder)}

        return self.once(("header", variant), compile_header)

    def compile_test(
        self, family: str, variant: str, binary: Path, changed: Path | None = None
    ) -> str:
        """Compile a family's test; ``changed`` has files that come before the source's.

        Returns why there is no test; "" if there is one.
        """
        c = self.config
        name, _, tile = variant.partition(" ")
        header, files = self.precompiled(name)
        if changed and files & {str(x.relative_to(changed)) for x in changed.rglob("*.*")}:
            header = Path(c["tests"]) / "prelude.h"
        command = self.options(name, changed)
        command += [f"-DSIMT_TILE={tile}"] if tile else []
        command += ["-include", str(header)]
        if changed and (changed.parent / "switch.h").exists():
            command += ["-include", str(changed.parent / "switch.h")]
        command += [f"{c['tests']}/test_{family}.cpp"]
        for file, source in SHARED_SOURCES.items():
            command += [f"{c['tests']}/{source}"] if changed and (changed / file).exists() else []
        command += c["variants"][name]["link"]
        built = self.run([*command, *c["libraries"], "-o", str(binary)])
        if built.returncode == 0:
            return ""
        error = re.search(r"[^\n]*\b(?:error|undefined)\b[^\n]*", built.stdout)
        return f"does not compile: {error[0] if error else built.stdout[-200:]}"

    def switched(self, family: str, variant: str) -> Path | str:
        """The test with all switches of a family, or why there is none."""

        def compile_switched() -> Path | str:
            folder = self.scratch / "switched" / family
            binary = folder / variant.replace(" ", "_")
            return self.compile_test(family, variant, binary, folder / "src") or binary

        return self.once(("switched", family, variant), compile_switched)

    def run(self, command: list[str], seconds: float = float("inf"), number: int = 0) -> Any:
        """Run a command, with a switch on; end it and what it has started when time is over."""
        with self.cores:
            return self.run_at_once(command, seconds, number)

    def run_at_once(self, command: list[str], seconds: float, number: int) -> Any:
        left = self.end - time.monotonic()
        if left <= 0:
            raise OutOfTimeError
        wait = min(left, seconds)
        with subprocess.Popen(
            command,
            env={**os.environ, "SIMT_STOP_AT_FAILURE": "1", "SIMT_MUTANT": str(number)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process:
            try:
                output, _ = process.communicate(timeout=None if wait == float("inf") else wait)
            except BaseException as error:
                os.killpg(process.pid, signal.SIGKILL)
                if isinstance(error, subprocess.TimeoutExpired) and left <= seconds:
                    raise OutOfTimeError from error
                raise
        return subprocess.CompletedProcess(command, process.returncode, output)

    def build(self) -> str:
        """The compiler and the flags of all variants, without the folders of this checkout."""
        c = self.config
        asked = [c["compiler"], "--version"]
        version = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
        flags = {name: variant["flags"] for name, variant in sorted(c["variants"].items())}
        return json.dumps([version, c["flags"], flags])

    def inputs(self, mutant: Mutant) -> str:
        """A digest of the mutant, and of all that its test is compiled from and by."""

        def of_family() -> str:
            tests = Path(self.config["tests"])
            command = [*self.options("plain"), "-include", str(tests / "prelude.h"), "-M"]
            command += [str(tests / f"test_{mutant.family}.cpp")]
            listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            files = {Path(x) for x in listed.partition(":")[2].replace("\\\n", "").split()}
            files |= {x for x in tests.rglob("harness/*") if x.is_file()}
            # Every test is linked with these.
            own = ("test_", "self_test")
            files |= {x for x in tests.glob("*.cpp") if not x.name.startswith(own)}
            digest = hashlib.sha256(self.once("build", self.build).encode())
            for content in sorted(path.read_bytes() for path in files):
                digest.update(content)
            return digest.hexdigest()

        digest = self.once(("inputs", mutant.family), of_family)
        return hashlib.sha256((digest + mutant.text).encode()).hexdigest()

    def failure(self, binary: Path, cases: str = "", number: int = 0) -> str:
        """How a test fails, with the switch of a mutant on; "" if it passes.

        ``cases``: what names of those contain that are run.
        """
        command = [str(binary), cases] if cases else [str(binary)]
        try:
            ran = self.run(command, TIMEOUT_S, number)
        except subprocess.TimeoutExpired:
            return f"no end within {TIMEOUT_S} s"
        if ran.returncode == 0 or ran.stdout.endswith(NO_CASES):
            return ""
        return evidence(ran.stdout, ran.returncode)

    def fails_unchanged(self, family: str, variant: str, is_switched: bool, cases: str) -> str:
        """How the test of the unchanged source fails; "" if it passes, as it must.

        Else a red test would mean nothing.
        """
        if is_switched:
            binary = self.switched(family, variant)
            return binary if isinstance(binary, str) else self.failure(binary, cases)
        with tempfile.TemporaryDirectory(dir=self.scratch) as work:
            binary = Path(work) / "test"
            return self.compile_test(family, variant, binary) or self.failure(binary, cases)

    def try_variant(self, mutant: Mutant, variant: str) -> tuple[str, str, str]:
        """How the test fails with a mutant, "" if it passes; why there is no test, or "".

        And of what cases it was, "" of all.
        """
        number = self.switches.get(mutant.family, {}).get(mutant.name, 0)
        with tempfile.TemporaryDirectory(dir=self.scratch) as work:
            if number:
                binary = self.switched(mutant.family, variant)
                if isinstance(binary, str):
                    return "", binary, ""
            else:
                changed, binary = Path(work) / "src", Path(work) / "test"
                file = changed / os.path.normpath(f"cuda/{mutant.file}")
                file.parent.mkdir(parents=True)
                file.write_text(mutant.text)
                trouble = self.compile_test(mutant.family, variant, binary, changed)
                if trouble:
                    return "", trouble, ""
            for cases in dict.fromkeys((mutant.cases_first, "")):
                how = self.failure(binary, cases, number)
                if how:
                    return how, "", cases
        return "", "", ""


def evidence(output: str, status: int) -> str:
    """A short account of why a test failed."""
    output = re.sub(r"0x[0-9a-f]{6,}", "an address", output)
    race = re.search(r"ThreadSanitizer: data race(.*?)\n\n(.*?)\n\n", output, re.DOTALL)
    if race:
        places = [place_of(race.group(1)), place_of(race.group(2))]
        return "data race, " + " with ".join(places)
    error = re.search(r"AddressSanitizer: (\S+)(.*?)\n\n", output, re.DOTALL)
    if error:
        return f"{error.group(1)}, {place_of(error.group(2))}"
    error = re.search(r"(\w+/\w+\.\w+:\d+):\d+: runtime error: ([^\n]*)", output)
    if error:
        return f"{error.group(2)}, {error.group(1)}"
    error = re.search(r"^simt: ([^\n(]*)", output, re.MULTILINE)
    if error:
        return error.group(1).strip()
    if re.search(r"^FAIL ", output, re.MULTILINE):
        return "wrong results"
    return f"ended by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


def place_of(stack: str) -> str:
    """The innermost frame in the kernels' source, or in the model of an instruction."""
    frames = re.findall(r"/src/cuda/(\S+?:\d+)", stack) or re.findall(r"/simt/(\S+?:\d+)", stack)
    return frames[0] if frames else "unknown place"
