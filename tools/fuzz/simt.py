"""Run random problems on the kernels of wmma and sm90 under simt, and sum up what came of them.

python tools/fuzz/simt.py --build build --count 1000 --variants plain asan

A problem is a seed's, so `build/tests/simt/simt_<test>_plain --random 1 <seed>` is one again.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

TESTS = ["test_wmma", "test_wmma_split", "test_wmma_general", "test_wmma_persistent", "test_sm90"]

LINE = re.compile(
    r"(?P<outcome>ok  |FAIL) (?P<family>\w+) \w+ .* seed (?P<seed>\d+)(?P<variant>[ \w+]*),.*"
    r"error (?P<error>\S+) \(bound (?P<bound>\S+)\), lse (?P<lse>\S+) \((?P<lse_bound>[^)]+)\)"
)


def summarise(lines: list[str]) -> dict[str, Any]:
    """Runs, failures, the worst errors over their bounds with seeds, for each tile shape.

    Or for the family, where it has one tile shape alone.
    """
    summary: dict[str, Any] = {}
    for line in lines:
        match = LINE.match(line)
        if match is None:
            continue
        name = match["variant"].strip() or match["family"]
        entry = summary.setdefault(
            name, {"runs": 0, "failures": [], "worst_out": [0.0, -1], "worst_lse": [0.0, -1]}
        )
        seed = int(match["seed"])
        entry["runs"] += 1
        if match["outcome"] == "FAIL":
            entry["failures"].append(line)
        for key, error, bound in (("out", "error", "bound"), ("lse", "lse", "lse_bound")):
            ratio = round(float(match[error]) / float(match[bound]), 4)
            entry[f"worst_{key}"] = max(entry[f"worst_{key}"], [ratio, seed])
    return summary


def commit() -> str:
    """Return the commit of this file's checkout, with a word if it has changes."""
    git = ["git", "-C", str(Path(__file__).parent)]
    words = ["describe", "--always", "--abbrev=40", "--exclude=*", "--dirty= with changes"]
    done = subprocess.run([*git, *words], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def main() -> int:
    """Exit code 1 if anything failed or a program ended in another way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=Path, required=True, help="the CMake build folder")
    parser.add_argument("--variants", nargs="+", default=["plain"], help="plain, asan, tsan")
    parser.add_argument("--tests", nargs="+", default=TESTS, help=f"default: {' '.join(TESTS)}")
    parser.add_argument("--seed", type=int, default=0, help="of the first problem")
    parser.add_argument("--count", type=int, default=1000, help="how many, served or not")
    parser.add_argument("--seconds", type=float, default=1e6, help="for each program at most")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    document: dict[str, Any] = {
        "commit": commit(),
        "seeds": [args.seed, args.seed + args.count],
        "programs": {},
    }
    failed = False
    for test in args.tests:
        for variant in args.variants:
            program = args.build / "tests" / "simt" / f"simt_{test}_{variant}"
            words = ["--random", str(args.count), str(args.seed), str(args.seconds)]
            start = time.monotonic()
            done = subprocess.run([program, *words], capture_output=True, text=True)
            kernels = summarise(done.stdout.splitlines())
            document["programs"][program.name] = {
                "exit_code": done.returncode,
                "seconds": round(time.monotonic() - start, 1),
                "kernels": kernels,
            }
            failed |= done.returncode != 0 or not kernels  # nothing that the summary knows
            print(f"{program.name}: exit code {done.returncode}")
            if done.returncode != 0:
                print("\n".join([*done.stdout.splitlines()[-3:], done.stderr[-2000:]]))
            for name, entry in kernels.items():
                print(
                    f"  {name}: {entry['runs']} runs, {len(entry['failures'])} failed, worst out "
                    f"{entry['worst_out'][0]} (seed {entry['worst_out'][1]}), worst lse "
                    f"{entry['worst_lse'][0]} (seed {entry['worst_lse'][1]})",
                    flush=True,
                )
    if args.json:
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
