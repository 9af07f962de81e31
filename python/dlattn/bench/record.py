"""The findings of a run while it goes on, and those of runs that measured parts of one set."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dlattn.bench import eight_bit, precision, report
from dlattn.bench.decode import report as decode_report
from dlattn.bench.report import Result
from dlattn.console.errors import CommandError, first_line


@dataclass
class Record:
    """The results of a run, by the steps of its set."""

    shape: str  # the set
    asked: list[str]  # all steps of the set, whichever of them this run takes
    about: dict[str, Any]  # commit, machine, versions, date
    protocol: dict[str, Any]
    ceiling: dict[str, Any] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)
    measured: dict[str, int] = field(default_factory=dict)  # steps with their number of results
    checked: dict[str, Any] = field(default_factory=dict)  # findings that are no times
    host: dict[str, float | None] = field(default_factory=dict)
    decoding: dict[str, Any] | None = None  # facts by which a run of decoding is read

    def add(self, step: str, results: Sequence[Result]) -> None:
        """Take in the results of a step."""
        self.results += results
        self.measured[step] = len(results)

    def document(self, busy: Sequence[str], complete: bool) -> dict[str, Any]:
        """The JSON; `complete`: all that this run was to measure."""
        about = {**self.about, "busy": list(busy)}
        found = report.to_json(
            about, self.protocol, self.ceiling, self.results, self.host, complete
        )
        found["steps"] = {
            "shape": self.shape,
            "asked": self.asked,
            "measured": [{"name": name, "results": n} for name, n in self.measured.items()],
        }
        if self.decoding is not None:
            machine = self.about["machine"]
            found["decode"] = {**self.decoding, **decode_report.summary(self.results, machine)}
        if self.shape == "eight_bit":
            copy = self.ceiling.get("copy_gb_per_s")
            found["eight_bit"] = {
                "summary": eight_bit.summary(self.results),
                "quantising": precision.quantising_rates(self.results, copy) if copy else [],
                **self.checked,
            }
        return found


def read(path: Path, option: str) -> dict[str, Any]:
    """A document that `bench --json` wrote."""
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        report.from_json(document)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CommandError(
            f"{option}: {path} is no result of bench --json: {first_line(error)}"
        ) from error
    return document


def gathered(paths: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """A document for each set on each card: `h200-sweep` of h200-sweep.json, or of its parts
    h200-sweep.1.json and so on. Raises CommandError for parts that do not belong together."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for path in sorted(paths):
        document = read(path, str(path.parent))
        found.setdefault(stem(path), {})[path.name] = document
    return {name: merged(of_set) for name, of_set in found.items()}


def stem(path: Path) -> str:
    """The name that the parts of one set share."""
    return path.name.partition(".")[0]


def card(document: dict[str, Any]) -> str:
    """The name of what a document was measured on."""
    machine = document.get("machine", {})
    return str(machine.get("gpu") or machine.get("cpu") or "unknown")


def cudnn_version(number: int) -> str:
    """The version that cuDNN tells as 92801: 9.28.1."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def require_same(named: dict[str, dict[str, Any]]) -> None:
    """Raise CommandError unless documents are parts of one set, of one commit and one card."""
    facts = {name: _identity(document) for name, document in named.items()}
    first, *others = facts
    for other in others:
        for what, value in facts[first].items():
            if facts[other][what] != value:
                raise CommandError(
                    f"{first} and {other} are no parts of one run: {what} is {value} and "
                    f"{facts[other][what]}"
                )
    if facts[first]["commit"] is None:
        raise CommandError(f"{first}: its commit is unknown; --commit records it")


def _identity(document: dict[str, Any]) -> dict[str, Any]:
    """The facts that figures of one table must share."""
    git, steps = document["git"], document.get("steps", {})
    return {
        "commit": git["sha"] and git["sha"] + (" with changes" if git["dirty"] else ""),
        "card": card(document),
        "set": steps.get("shape"),
        "versions": document["versions"],
        "protocol": document["protocol"],
        "steps": steps.get("asked"),
    }


def merged(named: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """One document of several, by their names: a step that several measured counts as of last.

    Raises CommandError where they differ in commit, card, versions, protocol or set. The ceilings
    are those of the part whose matrix product was the fastest; `parts` has those of each.
    """
    documents = sorted(named.values(), key=lambda document: str(document["date"]))
    if len(documents) == 1:
        return documents[0]
    require_same(named)
    last = documents[-1]
    about = {key: last[key] for key in ("date", "git", "machine", "versions")}
    whole = Record(last["steps"]["shape"], last["steps"]["asked"], about, last["protocol"])
    whole.ceiling = max((d["ceiling"] for d in documents), key=lambda c: float(c["tflops"]))
    found: dict[str, list[Result]] = {}
    for document in documents:
        found |= _by_step(document)
        whole.host = whole.host or document["host_seconds"]
        more = document.get("eight_bit", {})
        whole.checked |= {k: v for k, v in more.items() if k not in ("summary", "quantising")}
        if "decode" in document:
            whole.decoding = {k: v for k, v in document["decode"].items() if k != "cases"}
    for step in (step for step in whole.asked if step in found):
        whole.add(step, found[step])
    busy = dict.fromkeys(reason for document in documents for reason in document["busy"])
    result = whole.document(list(busy), complete=set(found) == set(whole.asked))
    result["parts"] = [
        {
            "date": document["date"],
            "ceiling": document["ceiling"],
            "steps": [step["name"] for step in document["steps"]["measured"]],
        }
        for document in documents
    ]
    return result


def measured(document: dict[str, Any]) -> list[str]:
    """The names of the steps that a document has."""
    return [step["name"] for step in document.get("steps", {}).get("measured", ())]


def is_whole(document: dict[str, Any]) -> bool:
    """Whether all of its set was measured, whichever part of it a run was asked for."""
    asked = document.get("steps", {}).get("asked", ())
    return bool(document.get("complete", True)) and set(measured(document)) >= set(asked)


def _by_step(document: dict[str, Any]) -> dict[str, list[Result]]:
    """The results of each step that a document has, which stand in the order of its steps."""
    results = iter(report.from_json(document))
    return {
        step["name"]: [next(results) for _ in range(step["results"])]
        for step in document["steps"]["measured"]
    }
