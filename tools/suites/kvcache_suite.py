"""Other projects' tests of caches of keys, and of gradients, with dlattn in the place of the
package they test.

    python tools/suites/kvcache_suite.py flash-attention-2 FOLDER --json results.json
    python tools/suites/kvcache_suite.py flash-attention-4-gradients FOLDER --cases 100 --jobs 8
    python tools/suites/kvcache_suite.py flashinfer FILE -k 'page_size=16' --cases 40 --jobs 8

FOLDER is a copy of the project's repository, or as much of it as the tests need; FILE is one of its
files. They are not part of this project. `suite_adapters` has modules of the package's name that
compute with dlattn, and says which functions are run. With --device cpu what the tests make on a
GPU is made on the CPU.

Cases run in rounds of 20 of each function, those with the least CRC-32 first; --cases keeps so many
of each function. A case that asks for what dlattn refuses by name has not failed: it is counted
with the reason, and so is one that `suite_adapters` leaves out. The exit status is 0 only where a
case passed that dlattn served, and none failed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from suite_adapters import SUITES, Suite
from suite_processes import finish, read, threads_of

from dlattn.bench.environment import describe

WORKER = Path(__file__).with_name("kvcache_suite_worker.py")
REASONS = 40  # of refusals: the most frequent ones
SLOWEST = 5  # cases


@dataclass
class Settings:
    """Which cases of a suite are run, and how."""

    suite: str
    device: str
    pattern: str = ""  # a regular expression, searched for in test[argument=value,...]
    cases: int = 0  # of each test function; 0: all
    jobs: int = 1
    timeout: float = 3600.0  # of all
    patience: float = 300.0  # of one case


def run_file(settings: Settings, path: Path, end: float, folder: Path) -> list[dict[str, Any]]:
    """The records of a file's cases."""

    def share(index: int) -> Path:
        records = folder / f"{path.stem}-{index}.jsonl"
        command = [sys.executable, str(WORKER), settings.suite, str(path), str(records)]
        command += ["--device", settings.device, "--pattern", settings.pattern]
        command += ["--cases", str(settings.cases), "--patience", str(settings.patience)]
        command += ["--shard", str(index), str(settings.jobs)]
        return finish(command, records, end, threads_of(settings.jobs))

    with ThreadPoolExecutor(settings.jobs) as pool:
        found = [file for file in pool.map(share, range(settings.jobs)) if file.exists()]
    return [record for file in found for record in read(file)]


def summarise(records: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The outcomes of a file's cases, as JSON can hold them."""
    functions: dict[str, Counter[str]] = {}
    served, refused, not_promised = Counter[str](), Counter[str](), Counter[str]()
    failed, troubles, left_out, seconds = [], [], {}, []
    for record in records:
        for name, cases in record.get("functions", {}).items():
            functions.setdefault(name, Counter(cases=cases))
        left_out |= record.get("left_out", {})
        if "trouble" in record:
            troubles.append(record["trouble"])
        if "outcome" not in record:
            continue
        row = functions[record["test"].split("[")[0]]
        calls = record.get("served", {})
        proves = record["outcome"] == "passed" and not calls
        row["passed without dlattn" if proves else record["outcome"]] += 1
        served.update(calls)
        seconds.append((record.get("seconds", 0.0), record["test"]))
        if record["outcome"] == "refused":
            refused[record["message"]] += 1
        if record["outcome"] == "not promised":
            not_promised[record["message"]] += 1
        if record["outcome"] in ("failed", "crashed"):
            failed.append({key: record.get(key) for key in ("test", "outcome", "message")})
    outcomes: Counter[str] = sum(functions.values(), Counter())
    del outcomes["cases"]
    return {
        "compared": outcomes["passed"],
        "outcomes": dict(outcomes.most_common()),
        "failed": failed,
        "troubles": troubles,
        "served": dict(served.most_common()),
        "refused": dict(refused.most_common(REASONS)),
        "other_refusals": sum(n for _, n in refused.most_common()[REASONS:]),
        "not_promised": dict(not_promised),
        "left_out": left_out,
        "slowest": sorted(seconds, reverse=True)[:SLOWEST],
        "functions": {name: dict(row) for name, row in functions.items()},
    }


def run_suite(settings: Settings, suite: Suite, paths: list[Path]) -> dict[str, Any]:
    """All files, each with an equal part of the time that is left."""
    found = {}
    end = time.monotonic() + settings.timeout
    with tempfile.TemporaryDirectory() as folder:
        for number, path in enumerate(paths):
            now = time.monotonic()
            until = now + max(end - now, 0) / (len(paths) - number)
            summary = summarise(run_file(settings, path, until, Path(folder)))
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            found[path.name] = {"sha256": digest, **summary}
            print(path.name, summary["outcomes"], *summary["troubles"], sep="\n  ", flush=True)
    return found


def commit_of(path: Path) -> str | None:
    """The commit of a checkout that has a file, where the file is as the commit has it."""

    def git(*arguments: str) -> str | None:
        command = ["git", "-C", str(path.parent), *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except OSError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    tracked = git("ls-files", "--error-unmatch", path.name)
    return git("rev-parse", "HEAD") if tracked and git("status", "--porcelain", ".") == "" else None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("path", type=Path, help="the project's repository, or a file of it")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("-k", dest="pattern", default="", help="regular expression of a case")
    parser.add_argument("--cases", type=int, default=0, help="of each test function; 0: all")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds of all")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds of one case")
    parser.add_argument("--suite-commit", help="of the project, where PATH is no checkout of it")
    parser.add_argument("--commit", help="of dlattn, where this is no checkout of it")
    args = parser.parse_args()
    suite = SUITES[args.suite]
    paths = suite.paths(args.path.resolve(strict=True))
    settings = Settings(
        suite=args.suite,
        device=args.device,
        pattern=args.pattern,
        cases=args.cases,
        jobs=args.jobs,
        timeout=args.timeout,
        patience=args.patience,
    )
    described = describe(args.device, args.commit)  # as it was when the processes began
    start = time.monotonic()
    files = run_suite(settings, suite, paths)
    outcomes: Counter[str] = sum((Counter(file["outcomes"]) for file in files.values()), Counter())
    failed = [case for file in files.values() for case in file["failed"]]
    troubles = [trouble for file in files.values() for trouble in file["troubles"]]
    compared = sum(file["compared"] for file in files.values())
    summary = {
        **described,
        "seconds": round(time.monotonic() - start),
        "suite": {
            "name": args.suite,
            "project": suite.project,
            "commit": args.suite_commit or commit_of(paths[0]),
        },
        "options": asdict(settings),
        "compared": compared,
        "outcomes": dict(outcomes.most_common()),
        "files": files,
    }
    if args.json:
        args.json.write_text(json.dumps(summary, indent=1) + "\n")
    for case in failed:
        print(f"FAILED {case['test']}: {case['outcome']}\n{case['message']}")
    print(f"{compared} compared, {len(failed)} failed; {dict(outcomes.most_common())}")
    return 0 if compared and not failed and not troubles else 1


if __name__ == "__main__":
    sys.exit(main())
