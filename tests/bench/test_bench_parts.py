"""Runs of the benchmark in parts: their steps, when they stop, how they are put together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from quick_bench import run_bench, run_to_json

from dlattn.bench import cases, eight_bit, parts, record, report, session
from dlattn.console.errors import CommandError

Captured = pytest.CaptureFixture[str]

pytestmark = pytest.mark.usefixtures("instant")

SET = ("--shape", "small", "--peers", "numpy", "--commit", "abc")


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three lengths, full and causal: six steps."""
    monkeypatch.setattr(cases, "small", lambda _: tuple((1, 1, n, 8) for n in (8, 16, 24)))


def read(path: Path) -> Any:
    return json.loads(path.read_text(), parse_constant=pytest.fail)


def cases_of(document: Any) -> list[Any]:
    return [(r.case, r.contestant) for r in report.from_json(document)]


def test_parts_have_every_step_once() -> None:
    steps = list(range(11))
    for count in (1, 2, 3, 11, 20):
        found = [parts.Part(number, count).of(steps) for number in range(1, count + 1)]
        assert sorted(step for part in found for step in part) == steps
        assert max(map(len, found)) - min(map(len, found)) <= 1
    assert parts.parse_part("2/3") == parts.Part(2, 3)


@pytest.mark.parametrize("text", ["0/3", "4/3", "1", "a/2", "1/", "/2", "-1/2", "1/999999999"])
def test_wrong_parts(text: str, capsys: Captured) -> None:
    assert run_bench(*SET, f"--part={text}") == 2
    assert f"--part is '{text}'; accepted: K/N with K from 1 to N" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["0", "-1", "soon", "nan", "inf"])
def test_wrong_limits(text: str, capsys: Captured) -> None:
    assert run_bench(*SET, f"--time-limit={text}") == 2
    assert "accepted: seconds above 0" in capsys.readouterr().err


def test_a_step_begins_if_one_as_long_as_the_last_few_would_end_in_time() -> None:
    now = [100.0]
    deadline = parts.Deadline(60.0, lambda: now[0])
    assert deadline.allows()
    for seconds, more in ((20.0, True), (5.0, True), (5.0, False)):
        now[0] += seconds
        deadline.took(seconds)
        # 25 seconds for the step, 10 to close.
        assert deadline.allows() is more
    deadline.took(5.0)
    assert not deadline.allows()
    deadline.took(5.0)  # the first one is forgotten
    assert deadline.allows()
    assert parts.Deadline(None, lambda: 1e9).allows()
    assert not parts.Deadline(5.0, lambda: now[0]).allows()  # not even time to close


def test_parts_put_together_are_the_whole(tmp_path: Path) -> None:
    whole = run_to_json(tmp_path, *SET)
    assert whole["complete"] and len(whole["steps"]["measured"]) == 6
    assert whole["host_seconds"]
    found = {}
    for number in (1, 2, 3):
        path = tmp_path / f"part.{number}.json"
        assert run_bench(*SET, "--json", path, "--part", f"{number}/3") == 0
        found[path.name] = read(path)
        assert found[path.name]["complete"]
        assert bool(found[path.name]["host_seconds"]) is (number == 1)
    merged = record.merged(found)
    assert cases_of(merged) == cases_of(whole)
    assert merged["complete"] and merged["host_seconds"]
    assert merged["steps"]["asked"] == whole["steps"]["asked"]
    assert [part["steps"] for part in merged["parts"]] == [
        record.measured(document) for document in found.values()
    ]
    by_case = {
        (case, name): entry["window_seconds"]
        for document in found.values()
        for (case, name), entry in zip(cases_of(document), document["results"], strict=True)
    }
    for (case, name), entry in zip(cases_of(merged), merged["results"], strict=True):
        assert entry["window_seconds"] == by_case[case, name]
    assert merged["ceiling"]["tflops"] == max(d["ceiling"]["tflops"] for d in found.values())
    del found["part.3.json"]
    assert not record.merged(found)["complete"]


def test_a_step_of_two_parts_counts_as_of_the_later(tmp_path: Path) -> None:
    document = run_to_json(tmp_path, *SET)
    later = json.loads(json.dumps(document))
    later["date"] = "2999-01-01T00:00:00+00:00"
    for entry in later["results"]:
        entry["window_seconds"] = [1.0]
    for named in ({"a": document, "b": later}, {"b": later, "a": document}):
        merged = record.merged(named)
        assert len(merged["results"]) == len(document["results"])
        assert all(entry["seconds"] == 1.0 for entry in merged["results"])


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda d: d["git"].update(sha="def"), "commit is abc and def"),
        (lambda d: d["git"].update(dirty=True), "commit is abc and abc with changes"),
        (lambda d: d["machine"].update(gpu="NVIDIA X"), "card is .* and NVIDIA X"),
        (lambda d: d["versions"].update(cudnn=92801), "versions is .* and .*92801"),
        (lambda d: d["protocol"].update(rounds=7), "protocol is .* and .*'rounds': 7"),
        (lambda d: d["steps"].update(shape="sweep"), "set is small and sweep"),
        (lambda d: d["steps"].update(asked=[]), "steps is .* and "),
        (lambda d: d.pop("steps"), "set is small and None"),
    ],
    ids=["commit", "changes", "card", "versions", "protocol", "set", "steps", "older"],
)
def test_what_is_not_of_one_run_is_not_mixed(tmp_path: Path, change: Any, what: str) -> None:
    document = run_to_json(tmp_path, *SET, "--part", "1/6")
    other = json.loads(json.dumps(document))
    change(other)
    with pytest.raises(CommandError, match=f"a and b are no parts of one run: {what}"):
        record.merged({"a": document, "b": other})


def test_parts_need_a_commit(tmp_path: Path) -> None:
    document = run_to_json(tmp_path, *SET, "--part", "1/6")
    document["git"]["sha"] = None
    with pytest.raises(CommandError, match="a: its commit is unknown; --commit records it"):
        record.merged({"a": document, "b": document})


def test_a_run_that_the_limit_cuts_off_is_continued(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    measure = session.Session.time

    def slow(self: session.Session, entrants: Any) -> list[report.Result]:
        now[0] += 10.0
        return measure(self, entrants)

    deadline = parts.Deadline
    monkeypatch.setattr(session.Session, "time", slow)
    monkeypatch.setattr(parts, "Deadline", lambda limit: deadline(limit, lambda: now[0]))
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    assert run_bench(*SET, "--json", first, "--time-limit", "45") == 0
    printed = capsys.readouterr().out
    assert "The time limit left out 3 of 6 steps: (1,1,16,8) causal float32, " in printed
    document = read(first)
    assert not document["complete"] and len(document["steps"]["measured"]) == 3
    assert not document["host_seconds"]

    rest = ("--json", second, "--time-limit", "600", "--continue", first)
    assert run_bench(*SET, *rest) == 0
    assert "left out" not in capsys.readouterr().out
    last = read(second)
    assert last["complete"] and last["host_seconds"]
    assert not set(record.measured(document)) & set(record.measured(last))
    merged = record.merged({"a": document, "b": last})
    assert merged["complete"] and len(merged["results"]) == 12

    assert run_bench(*SET[:-1], "def", "--continue", first, second) == 2
    assert f"{first} and this run are no parts of one run: commit" in capsys.readouterr().err
    assert run_bench(*SET, "--continue", tmp_path / "missing.json") == 2
    assert "--continue: " in capsys.readouterr().err


def test_sections_of_a_study_are_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    groups = eight_bit.groups
    some = ("varlen",)
    monkeypatch.setattr(
        eight_bit, "groups", lambda context: {name: groups(context)[name] for name in some}
    )
    checks = {name: lambda name=name: [{name: 1.0}] for name in ("mean_of_v", "distributions")}
    monkeypatch.setattr(eight_bit, "checks", lambda _: checks)
    monkeypatch.setattr(eight_bit, "text", lambda _: "")
    asked = ("--shape", "eight_bit", "--commit", "abc", "--peers")
    whole = run_to_json(tmp_path, *asked)
    found = {}
    for number in (1, 2):
        path = tmp_path / f"part.{number}.json"
        assert run_bench(*asked, "--json", path, "--part", f"{number}/2") == 0
        found[path.name] = read(path)
    merged = record.merged(found)
    assert cases_of(merged) == cases_of(whole)
    section, expected = merged["eight_bit"], whole["eight_bit"]
    assert set(section) == set(expected) >= {"mean_of_v", "distributions"}
    assert section["mean_of_v"] == expected["mean_of_v"]
    assert len(section["summary"]) == len(expected["summary"])


def test_decoding_in_parts(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    asked = ("--shape", "decode", "--only", "contiguous", "pages", "--commit", "abc")
    whole = run_to_json(tmp_path, *asked)
    found = {}
    for number in (1, 2):
        path = tmp_path / f"part.{number}.json"
        assert run_bench(*asked, "--json", path, "--part", f"{number}/2") == 0
        found[path.name] = read(path)
    merged = record.merged(found)["decode"]
    told = [(x["group"], x["case"], x["contestant"]) for x in whole["decode"]["cases"]]
    assert [(x["group"], x["case"], x["contestant"]) for x in merged["cases"]] == told
    assert merged["l2_bytes"] == whole["decode"]["l2_bytes"]
