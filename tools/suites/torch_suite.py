"""Tests that torch has of its own, with torch's attention computed by dlattn.

    python tools/suites/torch_suite.py FOLDER/test_transformers.py --json results.json
    python tools/suites/torch_suite.py FILE -k 'CUDA\\.' --cases 20 --jobs 16 --json results.json

FILE is from the folder `test` of PyTorch's sources, of about the release that is installed; it is
not part of this project. Its tests run twice, as they are and after `dlattn.torch.activate()`, in
processes of their own. What passes as it is must pass with dlattn; what does not is run again,
alone, and told. The exit status is 0 only where something was compared, nothing was lost and dlattn
served some of the calls.

Tests run in rounds of 20 of each function, those with the least CRC-32 of their names first;
--cases keeps so many of each function. What has not run in one of the ways when the time is over is
counted, and not compared.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from suite_processes import finish, read, threads_of
from torch_suite_worker import function_of, functions_of

from dlattn.bench.environment import describe, git_state

WORKER = Path(__file__).with_name("torch_suite_worker.py")
WAYS = ("stock", "dlattn")
GOOD = ("passed", "failed as expected")
FIRST_PART = 0.85  # of the time; the rest is for what was lost, once more
NOT_PROMISED = {
    "test_fused_sdp_priority_order": "which backend is faster by the clock: here all are one kernel"
}
REASONS = 40  # of refusals: the most frequent ones


@dataclass
class Settings:
    """Which tests of a file are run, and how."""

    path: Path
    pattern: str = ""  # a regular expression, searched for in Class.test
    cases: int = 0  # of each test function; 0: all
    shard: tuple[int, int] = (0, 1)
    jobs: int = 1
    timeout: float = 3600.0  # of all
    patience: float = 300.0  # of one test
    gradients: str = "auto"  # of dlattn.torch.activate()


@dataclass
class Results:
    """The outcomes of the tests that were chosen, in one way."""

    chosen: set[str] = field(default_factory=set)
    records: dict[str, dict[str, Any]] = field(default_factory=dict)
    troubles: list[str] = field(default_factory=list)
    on_gpu: bool = False

    def outcome(self, test: str) -> str:
        """In a word."""
        return str(self.records[test]["outcome"]) if test in self.records else "not run"

    def counts(self) -> dict[str, int]:
        """The counts of the outcomes."""
        return dict(Counter(self.outcome(test) for test in sorted(self.chosen)).most_common())

    def take(self, records: Path) -> None:
        """Add what a process wrote."""
        if not records.exists():
            return
        for record in read(records):
            self.chosen.update(record.get("chosen", ()))
            self.on_gpu |= record.get("cuda", False)
            if "outcome" in record:
                self.records[record["test"]] = record
                if record["outcome"] == "crashed":
                    self.troubles.append(f"{record['test']}: {record['message']}")
            if "trouble" in record:
                self.troubles.append(record["trouble"])


def run_all(settings: Settings, folder: Path) -> tuple[dict[str, Results], dict[str, Results]]:
    """Every chosen test in both ways, and again what was lost."""
    start = time.monotonic()
    first_part = settings.timeout * FIRST_PART
    processes = max(settings.jobs // 2, 1)  # of one way
    if settings.jobs > 1:  # both ways at once
        ends = dict.fromkeys(WAYS, start + first_part)
    else:
        ends = {"stock": start + first_part / 2, "dlattn": start + first_part}
    found = {way: Results() for way in WAYS}
    with ThreadPoolExecutor(min(settings.jobs, 2 * processes)) as pool:
        index, count = settings.shard
        shares = [
            (way, pool.submit(_finish_share, settings, way, share, ends[way], folder))
            for way in WAYS
            for share in ((index * processes + i, count * processes) for i in range(processes))
        ]
        for way, records in shares:
            found[way].take(records.result())
    again = {way: Results() for way in WAYS}
    lost = lost_in(found)
    if lost:
        only = folder / "lost.json"
        only.write_text(json.dumps(lost))
        end = start + settings.timeout
        with ThreadPoolExecutor(min(settings.jobs, len(WAYS))) as pool:
            shares = [
                (way, pool.submit(_finish_share, settings, way, (0, 1), end, folder, only))
                for way in WAYS
            ]
            for way, records in shares:
                again[way].take(records.result())
    return found, again


def _finish_share(
    settings: Settings,
    way: str,
    share: tuple[int, int],
    end: float,
    folder: Path,
    only: Path | None = None,
) -> Path:
    """Run a share of the tests, in as many processes as it takes; return where the records are."""
    records = folder / f"{way}-{'again' if only else share[0]}.jsonl"
    command = [sys.executable, str(WORKER), str(settings.path), str(records)]
    command += ["--pattern", settings.pattern, "--cases", str(settings.cases)]
    command += ["--shard", str(share[0]), str(share[1]), "--patience", str(settings.patience)]
    command += ["--dlattn", settings.gradients] if way == "dlattn" else []
    command += ["--only", str(only)] if only else []
    environment = {
        **threads_of(settings.jobs),
        "PYTORCH_PRINT_REPRO_ON_FAILURE": "0",  # it would take the place of what went wrong
    }
    return finish(command, records, end, environment)


def compared_in(found: dict[str, Results]) -> list[str]:
    """Tests that are good as they are and ran with dlattn, of what dlattn promises."""
    stock, ours = (found[way] for way in WAYS)
    good = (t for t in sorted(stock.records) if stock.outcome(t) in GOOD and t in ours.records)
    return [t for t in good if not any(name in t for name in NOT_PROMISED)]


def lost_in(found: dict[str, Results]) -> list[str]:
    """Those of them that end otherwise with dlattn."""
    stock, ours = (found[way] for way in WAYS)
    return [t for t in compared_in(found) if ours.outcome(t) != stock.outcome(t)]


def summarise(
    settings: Settings, found: dict[str, Results], again: dict[str, Results]
) -> dict[str, Any]:
    """As JSON can hold it."""
    stock, ours = (found[way] for way in WAYS)
    compared, lost = compared_in(found), lost_in(found)
    served, refused = Counter[str](), Counter[str]()
    for record in ours.records.values():
        served.update(record.get("served", {}))
        refused.update(record.get("refused", {}))
    text = settings.path.read_bytes()
    options = asdict(settings)
    del options["path"]
    return {
        "file": {
            "name": settings.path.name,
            "sha256": hashlib.sha256(text).hexdigest(),
            "lines": text.count(b"\n"),
        },
        "options": options,
        "stock": stock.counts(),
        "dlattn": ours.counts(),
        "compared": len(compared),
        "compared_that_dlattn_served": sum(bool(ours.records[t].get("served")) for t in compared),
        "lost": [
            {
                **{key: ours.records[t].get(key) for key in ("test", "outcome", "message")},
                "again": {way: again[way].outcome(t) for way in WAYS},
            }
            for t in lost
        ],
        "not_promised": [
            {"test": t, "reason": reason, **{way: found[way].outcome(t) for way in WAYS}}
            for name, reason in NOT_PROMISED.items()
            for t in sorted(stock.chosen)
            if name in t
        ],
        "gained": sum(
            ours.outcome(t) in GOOD and stock.outcome(t) not in (*GOOD, "not run")
            for t in ours.records
        ),
        "left_dlattn_inactive": [t for t, r in ours.records.items() if not r.get("active", True)],
        "troubles": {way: found[way].troubles + again[way].troubles for way in WAYS},
        "served": dict(served.most_common()),
        "refused": dict(refused.most_common(REASONS)),
        "other_refusals": sum(n for _, n in refused.most_common()[REASONS:]),
        "functions": _by_function(settings.path, found, set(compared), set(lost)),
    }


def _by_function(
    path: Path, found: dict[str, Results], compared: set[str], lost: set[str]
) -> dict[str, dict[str, int]]:
    """For each test function how many tests there were, and how many of dlattn's calls."""
    functions = functions_of(path)
    table: dict[str, Counter[str]] = {}
    for test in sorted(found["stock"].chosen | found["dlattn"].chosen):
        row = table.setdefault(function_of(test, functions), Counter(tests=0, compared=0, lost=0))
        record = found["dlattn"].records.get(test, {})
        row["tests"] += 1
        row["compared"] += test in compared
        row["lost"] += test in lost
        row["served"] += sum(record.get("served", {}).values())
        row["refused"] += sum(record.get("refused", {}).values())
    return {name: dict(row) for name, row in table.items()}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", type=Path, help="test_transformers.py of torch's release")
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("-k", dest="pattern", default="", help="regular expression of Class.test")
    parser.add_argument("--cases", type=int, default=0, help="of each test function; 0: all")
    parser.add_argument("--shard", default="0/1", help="i/n: one part of n, i from 0")
    parser.add_argument("--jobs", type=int, default=1, help="processes, half of them each way")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds of all")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds of one test")
    parser.add_argument(
        "--gradients", choices=("auto", "dlattn", "torch"), default="auto", help="of activate()"
    )
    parser.add_argument("--commit", help="of dlattn, where this is no checkout of it")
    args = parser.parse_args()
    index, count = (int(number) for number in args.shard.split("/"))
    settings = Settings(
        path=args.path.resolve(strict=True),
        pattern=args.pattern,
        cases=args.cases,
        shard=(index, count),
        jobs=args.jobs,
        timeout=args.timeout,
        patience=args.patience,
        gradients=args.gradients,
    )
    git = git_state(args.commit)  # as it was when the processes began
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found, again = run_all(settings, Path(folder))
    summary = {
        **describe("cuda" if found["dlattn"].on_gpu else "cpu", args.commit),
        "git": git,
        "seconds": round(time.monotonic() - start),
        **summarise(settings, found, again),
    }
    if args.json:
        args.json.write_text(json.dumps(summary, indent=1) + "\n")
    for way in WAYS:
        print(way, summary[way], *summary["troubles"][way], sep="\n  ")
    for test in summary["lost"]:
        print(f"LOST {test['test']}: {test['outcome']}, again {test['again']}\n{test['message']}")
    print(
        f"{summary['compared']} compared, {len(summary['lost'])} lost, {summary['gained']} gained; "
        f"dlattn served {summary['served']}, in {summary['compared_that_dlattn_served']} tests"
    )
    return 0 if summary["compared"] and summary["served"] and not summary["lost"] else 1


if __name__ == "__main__":
    sys.exit(main())
