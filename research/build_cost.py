"""CPU seconds that a build takes, by operation and kernel family.

    python research/build_cost.py                          what a machine without a GPU builds
    python research/build_cost.py --archs 89 --only decode
    python research/build_cost.py --archs common 90 89     a column for each DLATTN_ARCHS
    python research/build_cost.py --write                  puts these into docs/install.md

Compiles everything anew in a temporary folder, without ccache, and takes as long. User and system
time of the compilers, and of all that they start, are added. Needs GNU time.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "install.md"
MARKS = ("<!-- generated: build cost -->\n", "<!-- end -->")
PARTS = {"src/cuda/": "CUDA, host code", "src/core/": "core", "src/cpu/": "CPU backend"}
BINDINGS = "Python module"
WRITTEN = ("common", "90", "89", "OFF")  # what the document has


def part_of(source: str, families: Iterable[str]) -> str:
    """The family ("forward/decode") or the part of the host code that a source file belongs to."""
    if "/generated/" in source:
        name = Path(source).stem
        fitting = [f for f in families if f"{name}_".startswith(f"{f.replace('/', '_')}_")]
        if fitting and "_and_" in name:  # of several families, or of several operations
            return "/".join(name.split("_", 1)).replace("_and_", " and ")
        return max(fitting, key=len, default=name.replace("_", " "))
    if joined := re.search("/unity_(core|plans|cpu)_", source):
        return PARTS["src/cpu/" if joined[1] == "cpu" else "src/core/"]
    inside = os.path.relpath(source, ROOT)
    return next((part for folder, part in PARTS.items() if inside.startswith(folder)), BINDINGS)


def families_of_sources() -> list[str]:
    """As "forward/decode"; delta and reduce have no plan of their own."""
    return ["/".join(x.parts[-3:-1]) for x in (ROOT / "src" / "cuda").glob("*/*/launch.cuh")]


def read(log: str, families: Iterable[str]) -> dict[str, float]:
    """CPU seconds by part, from lines of user time, system time and command."""
    seconds: dict[str, float] = {}
    for line in log.splitlines():
        match = re.match(r"([\d.]+) ([\d.]+) .* -c (\S+)", line)
        if match:
            part = part_of(match[3], families)
            seconds[part] = seconds.get(part, 0) + float(match[1]) + float(match[2])
    return seconds


def operations_of(seconds: dict[str, float]) -> dict[str, float]:
    """CPU seconds by operation, or part of the host code."""
    operations: dict[str, float] = {}
    for part, cost in seconds.items():
        operation = part.split("/")[0]
        operations[operation] = operations.get(operation, 0) + cost
    return operations


def column_name(archs: str) -> str:
    names = {"common": "without a GPU", "OFF": "CPU alone"}
    return names.get(archs) or "for " + re.sub(r"(\d)\b", r".\1", archs)


def table(builds: dict[str, dict[str, float]]) -> str:
    """A column for each build, by its architectures. Operations first, the dearest first, each with
    the families of the first build."""
    first = next(iter(builds.values()))
    columns = [operations_of(seconds) for seconds in builds.values()]
    names = sorted(
        {name for column in columns for name in column}, key=lambda n: (-columns[0].get(n, 0), n)
    )
    lines = [
        ["operation or part", *map(column_name, builds), "families"],
        ["---"] * (len(builds) + 2),
    ]
    for operation in names:
        of_it = {p.split("/")[1]: c for p, c in first.items() if p.startswith(f"{operation}/")}
        dearest = sorted(of_it, key=lambda name: -of_it[name])
        families = ", ".join(f"{name} {of_it[name]:.0f}" for name in dearest)
        costs = [f"{column.get(operation, 0):.0f}" for column in columns]
        lines.append([operation, *costs, families])
    lines.append(["all", *(f"{sum(column.values()):.0f}" for column in columns), ""])
    return "".join(f"| {' | '.join(line)} |\n".replace("|  |", "| |") for line in lines)


def build(archs: str, only: str, folder: Path) -> str:
    """Builds what matches `only`; the log of the compilers' times."""
    log = folder / "times.log"
    launcher = f"{shutil.which('time')};-a;-o;{log};-f;%U %S %C"
    languages = ("C", "CXX", "CUDA")
    configure = ["cmake", "-S", str(ROOT), "-B", str(folder), "-G", "Ninja", "-DDLATTN_PYTHON=ON"]
    configure.append("-DDLATTN_JOINED=ON")  # as pip does
    configure += [f"-DCMAKE_{language}_COMPILER_LAUNCHER={launcher}" for language in languages]
    environment = {**os.environ, "CCACHE_DISABLE": "1"}
    if archs == "OFF":
        configure.append("-DDLATTN_CUDA=OFF")
    else:
        configure.append(f"-DDLATTN_ARCHS={archs}")
    subprocess.run(configure, check=True, env=environment, stdout=sys.stderr)
    ninja = ["ninja", "-C", str(folder)]
    listed = subprocess.run([*ninja, "-t", "targets", "all"], capture_output=True, text=True)
    objects = [line.split(": ")[0] for line in listed.stdout.splitlines()]
    wanted = [o for o in objects if o.endswith(".o") and re.search(only, o)] if only else []
    subprocess.run([*ninja, *wanted], check=True, env=environment, stdout=sys.stderr)
    return log.read_text()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--archs", nargs="+", default=[], help="DLATTN_ARCHS, or OFF for the CPU alone"
    )
    parser.add_argument("--only", default="", help="object files that match this expression")
    parser.add_argument("--write", action="store_true", help="put the table into docs/install.md")
    arguments = parser.parse_args()
    builds = {}
    for archs in arguments.archs or (WRITTEN if arguments.write else WRITTEN[:1]):
        with tempfile.TemporaryDirectory() as folder:
            log = build(archs, arguments.only, Path(folder))
        builds[archs] = read(log, families_of_sources())
    text = table(builds)
    print(text, end="")
    if arguments.write:
        before, _, rest = DOCUMENT.read_text().partition(MARKS[0])
        _, end, after = rest.partition(MARKS[1])
        DOCUMENT.write_text(f"{before}{MARKS[0]}{text}{end}{after}")


if __name__ == "__main__":
    main()
