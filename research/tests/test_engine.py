"""The comparison of serving: what it makes of two runs, and what it accepts."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import engine


def served(speed: float, logarithm: float, token: int = 3) -> dict[str, Any]:
    kinds = ("prompt", "decode", "new")
    return {
        "workloads": {"batch": {f"{kind}_tokens_per_s": speed for kind in kinds} | {"seconds": []}},
        "completions": [[[token, {"3": -1.0, "4": logarithm}]]],
    }


def test_a_backend_is_compared_with_the_default_of_its_mode() -> None:
    rows = {"eager": {"default": served(10.0, -2.0), "DLATTN": served(15.0, -2.0)}}
    ours = engine.summary(rows)["eager"]["DLATTN"]
    assert ours["over_default"] == {"batch": {"prompt": 1.5, "decode": 1.5, "new": 1.5}}
    assert ours["tokens"]["equal"] == 1 and not ours["tokens"]["wrong"]
    assert "completions" not in ours


@pytest.mark.parametrize(("logarithm", "ties", "wrong"), [(-1.05, 1, 0), (-2.0, 0, 1)])
def test_other_tokens_are_ties_only_where_they_are_as_likely(
    logarithm: float, ties: int, wrong: int
) -> None:
    rows = {"eager": {"default": served(1.0, logarithm), "DLATTN": served(1.0, logarithm, 4)}}
    found = engine.summary(rows)["eager"]["DLATTN"]["tokens"]
    assert (found["ties"], len(found["wrong"])) == (ties, wrong)


def test_a_run_that_failed_leaves_the_others() -> None:
    rows = {
        "graphs": {"default": {"failed": "…"}, "DLATTN": served(1.0, -2.0)},
        "eager": {"default": served(1.0, -2.0), "DLATTN": {"failed": "…"}},
    }
    assert "tokens" not in engine.summary(rows)["graphs"]["DLATTN"]


def test_a_configuration_has_room_for_its_workloads(tmp_path: Path) -> None:
    for name in engine.SHAPES:
        engine.write_model(name, tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        longest = max(given + new for _, given, new in engine.WORKLOADS[name].values())
        assert config["max_position_embeddings"] >= longest


def test_a_process_that_does_not_end_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleeper = tmp_path / "sleeper"
    sleeper.write_text("#!/bin/sh\necho begun\nexec sleep 60\n")
    sleeper.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(sleeper))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    asked, start = engine.arguments(["--model", "tiny"]), time.monotonic()
    row = engine.Server(asked, "eager", "DLATTN", tmp_path).row(0.5)
    assert row["failed"] == "begun\n" and time.monotonic() - start < 30


def test_a_process_that_is_ended_keeps_what_it_has_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = tmp_path / "measured"
    engine.write(measured, {"workloads": {"batch": {}}})
    server = tmp_path / "server"
    server.write_text(f'#!/bin/sh\ncp {measured} "$3"\nexec sleep 60\n')  # --serve and its file
    server.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(server))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    asked = engine.arguments(["--model", "tiny"])
    row = engine.Server(asked, "eager", "DLATTN", tmp_path).row(2.0)
    assert row == {"workloads": {"batch": {}}, "missing": ["single"]}


def test_backends_that_start_together_have_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one ends before the second one's turn; one that fails at once is waited for."""
    server = tmp_path / "server"
    server.write_text(
        "#!/bin/sh\n"
        'for last; do :; done; ready="${3%.json}.ready"; [ "$7" = broken ] && exit 1\n'
        'touch "$ready"; while [ ! -e "$last" ]; do sleep 0.05; done\n'
        'sleep 0.3; ls "${3%/*}" | grep -c turn > "$3"\n'
    )
    server.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(server))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    given = ["--model", "tiny", "--together", "--cache", "1", "--backends", "a", "broken", "b"]
    servers = engine.started(engine.arguments(given), "eager", tmp_path)
    assert not any(one.starting() for one in servers.values())
    monkeypatch.setattr(json, "loads", lambda text: {"workloads": {}, "turns": int(text)})
    assert servers["a"].row(20.0)["turns"] == 1
    assert servers["broken"].row(20.0) == {"failed": ""}
    assert servers["b"].row(20.0)["turns"] == 3


def test_workloads_of_one_backend_alone_are_not_compared() -> None:
    ours, theirs = served(10.0, -2.0), served(5.0, -2.0)
    ours["workloads"]["single"] = dict(ours["workloads"]["batch"])
    found = engine.summary({"eager": {"default": theirs, "DLATTN": ours}})["eager"]["DLATTN"]
    assert list(found["over_default"]) == ["batch"]


@pytest.mark.parametrize(
    ("there", "given", "said"),
    [
        (None, [], "vLLM is not installed; accepted: vllm 0.32 or 0.33"),
        ("vllm", ["--repeats", "0"], "--repeats is 0; accepted: 1 and more"),
        ("vllm", ["--together"], "--together needs --cache"),
    ],
)
def test_what_cannot_be_run_is_told(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    there: str | None,
    given: list[str],
    said: str,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: there)
    with pytest.raises(SystemExit):
        engine.arguments(given)
    assert said in capsys.readouterr().err
