"""Measure all figures of a release, in parts that a short lease of a GPU has time for.

    python benchmarks/release.py --list
    python benchmarks/release.py FOLDER --part 1 2 --time-limit 540
    python benchmarks/release.py FOLDER --plot

Each set of shapes is run by `python -m dlattn bench` in a process of its own, which writes its JSON
into FOLDER as it goes: h200-sweep.1.json and so on. Where the time limit cuts a part off, the same
command with the same FOLDER measures the rest. Put together are files of one commit and one card.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import dlattn
from dlattn.bench import figures, plot, record
from dlattn.console.errors import CommandError

_LEAST_SECONDS = 60.0  # in which a set can measure anything


@dataclass(frozen=True)
class Set:
    """A set of shapes, or a part of it."""

    shape: str
    part: str = "1/1"


# Each takes 3 to 8 minutes on an H200 beside all peers, by the number of what is timed.
PARTS: dict[int, tuple[Set, ...]] = {
    1: (Set("sweep"),),
    2: (Set("backward", "1/2"),),
    3: (Set("backward", "2/2"),),
    4: (Set("decode"), Set("basic")),
    5: (Set("small"),),
    6: (Set("features"), Set("scores")),
    7: (Set("eight_bit"),),
}


def card() -> str:
    """The GPU's name in names of files, such as h200; cpu without one."""
    gpus = dlattn.info().devices
    if not gpus:
        return "cpu"
    return figures.short_card({"machine": {"gpu": gpus[0].name}}).lower().replace(" ", "-")


def files_of(folder: Path, name: str) -> list[Path]:
    """The JSON of a set, whole or in parts."""
    return sorted(path for path in folder.glob("*.json") if record.stem(path) == name)


def command(folder: Path, of_set: Set, seconds: float, options: argparse.Namespace) -> list[str]:
    """The run of the benchmark that measures what FOLDER lacks of a set."""
    name = f"{card()}-{of_set.shape.replace('_', '-')}"
    earlier = files_of(folder, name)
    numbers = (folder / f"{name}.{i}.json" for i in count(1))
    target = next(path for path in numbers if not path.exists())
    asked = ["--shape", of_set.shape, "--json", str(target), "--part", of_set.part]
    asked += ["--time-limit", f"{seconds:.0f}"]
    if earlier:
        asked += ["--continue", *map(str, earlier)]
    for option in ("cudnn", "commit"):
        value = getattr(options, option)
        if value is not None:
            asked += [f"--{option}", str(value)]
    return [sys.executable, "-m", "dlattn", "bench", *asked, *(["--quick"] * options.quick)]


def measure(options: argparse.Namespace) -> int:
    """Run the sets of the parts one after the other; 1 if one of them failed."""
    ends = time.monotonic() + options.time_limit
    failed = 0
    for of_set in (of_set for part in options.part for of_set in PARTS[part]):
        left = ends - time.monotonic()
        if left < _LEAST_SECONDS:
            print(f"No time is left for {of_set.shape} {of_set.part}.", flush=True)
            continue
        failed |= subprocess.run(command(options.folder, of_set, left, options)).returncode != 0
    return int(failed)


def draw(folder: Path) -> None:
    """A plot of each set in the folder that was measured, its parts put together."""
    for name, document in record.gathered(sorted(folder.glob("*.json"))).items():
        paths = plot.draw(document, folder / f"{name}.png")
        print(*paths, sep="\n")
        number = len(paths) + 1
        while (left := plot.part(paths[0], number)).exists():  # of a plot that had more parts
            left.unlink()
            number += 1


def main() -> int:
    """List the parts, measure some of them, or draw."""
    parser = argparse.ArgumentParser(description="The figures of a release, in parts.")
    parser.add_argument(
        "folder", nargs="?", type=Path, help="for the JSON, and what it has already"
    )
    parser.add_argument("--list", action="store_true", help="tell the parts")
    parser.add_argument("--part", nargs="+", type=int, choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--time-limit", type=float, default=540.0, metavar="SECONDS")
    parser.add_argument("--cudnn", type=Path, metavar="FOLDER", help="as for bench")
    parser.add_argument("--commit", metavar="SHA", help="as for bench")
    parser.add_argument("--quick", action="store_true", help="as for bench: a first impression")
    parser.add_argument("--plot", action="store_true", help="draw what FOLDER has; measure nothing")
    options = parser.parse_args()
    if options.list:
        for number, sets in PARTS.items():
            print(f"{number}: " + ", ".join(f"{x.shape} {x.part}" for x in sets))
        return 0
    if options.folder is None:
        parser.error("FOLDER is missing")
    options.folder.mkdir(parents=True, exist_ok=True)
    try:
        if options.plot:
            draw(options.folder)
            return 0
        return measure(options)
    except CommandError as error:
        print(f"release.py: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
