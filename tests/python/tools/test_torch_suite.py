"""The program that runs torch's own tests with dlattn, on a file of tests made up for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from programs import start
from torch_suite import Results, compared_in, lost_in
from torch_suite_worker import chosen, function_of

# The outcome of each test as it is, and with dlattn, is in its name.
SUITE = """
import os
import unittest

import torch
import torch.nn.functional as F

import dlattn.torch

ours = dlattn.torch.is_active()


class TestMadeUp(unittest.TestCase):
    def test_serves(self):
        q, k, v = torch.randn(3, 1, 2, 9, 16) + 0.2
        F.scaled_dot_product_attention(q, k, v)

    def test_refuses(self):
        q, k, v = torch.randn(3, 1, 2, 9, 16, dtype=torch.float64) + 0.2
        F.scaled_dot_product_attention(q, k, v)

    def test_switches_off(self):
        dlattn.torch.deactivate()

    def test_passes_then_fails(self):
        self.assertFalse(ours, "a mark of dlattn")

    def test_fused_sdp_priority_order(self):
        self.assertFalse(ours)

    def test_passes_then_skips(self):
        if ours:
            self.skipTest("not with dlattn")

    def test_passes_then_dies(self):
        if ours:
            os._exit(5)

    def test_fails_in_a_part(self):
        for part in range(2):
            with self.subTest(part=part):
                self.assertEqual(part, 0)

    def test_fails_then_passes(self):
        self.assertTrue(ours)

    def test_skips(self):
        self.skipTest("always")

    @unittest.expectedFailure
    def test_fails_as_expected(self):
        self.assertTrue(False)

    @unittest.expectedFailure
    def test_fails_as_expected_then_passes(self):
        self.assertTrue(ours)


for number in range(50):
    setattr(TestMadeUp, f"test_many_{number}", lambda self: None)
# Written out, so that the file's text has the name.
def test_many(self): ...


class TestNotPrepared(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        raise RuntimeError("no such device")

    def test_never(self):
        pass
"""


PROGRAM = Path(__file__).resolve().parents[3] / "tools" / "suites" / "torch_suite.py"


def run(folder: Path, *arguments: str, text: str = SUITE) -> tuple[int, dict[str, Any], str]:
    """The program's exit status, what it wrote, and what it printed."""
    suite, results = folder / "test_suite.py", folder / "results.json"
    suite.write_text(text)
    process = start(str(PROGRAM), str(suite), "--json", str(results), *arguments)
    out, err = process.communicate(timeout=240)
    return (
        process.returncode,
        json.loads(results.read_text()) if results.exists() else {},
        out + err,
    )


@pytest.mark.slow
def test_what_passes_must_pass_with_dlattn(tmp_path: Path) -> None:
    status, results, printed = run(tmp_path, "--cases", "7")
    assert status == 1
    assert results["stock"] == {
        "passed": 14,  # seven of test_many among them
        "failed": 2,
        "failed as expected": 2,
        "not run": 1,
        "skipped": 1,
    }
    lost = {entry["test"].split("test_")[1]: entry for entry in results["lost"]}
    assert {name: entry["outcome"] for name, entry in lost.items()} == {
        "passes_then_fails": "failed",
        "passes_then_skips": "skipped",
        "passes_then_dies": "crashed",
        "fails_as_expected_then_passes": "passed, which was not expected",
    }
    assert "a mark of dlattn" in lost["passes_then_fails"]["message"]
    assert "exit status 5" in lost["passes_then_dies"]["message"]
    for entry in lost.values():
        assert entry["again"]["dlattn"] == entry["outcome"] != entry["again"]["stock"]
    (clock,) = results["not_promised"]
    assert (clock["stock"], clock["dlattn"]) == ("passed", "failed")
    assert results["compared"] == 15 and results["gained"] == 1
    assert results["options"]["cases"] == 7 and results["file"]["name"] == "test_suite.py"
    assert results["left_dlattn_inactive"] == ["TestMadeUp.test_switches_off"]
    assert results["served"] == {"_scaled_dot_product_flash_attention_for_cpu": 1}
    assert results["compared_that_dlattn_served"] == 1
    (reason,) = results["refused"]
    assert reason.endswith("query is float64")
    assert results["functions"]["TestMadeUp.test_many"]["tests"] == 7
    assert results["functions"]["TestMadeUp.test_serves"]["served"] == 1
    assert any("passes_then_dies: exit status 5" in text for text in results["troubles"]["dlattn"])
    assert any("no such device" in trouble for trouble in results["troubles"]["dlattn"])
    assert "15 compared, 4 lost" in printed


@pytest.mark.slow
def test_nothing_lost(tmp_path: Path) -> None:
    status, results, printed = run(tmp_path, "-k", "serves|many_1", "--jobs", "2")
    assert status == 0, printed
    assert results["lost"] == [] and results["compared"] == 12


@pytest.mark.nightly  # seconds to import torch, for a tool that changes seldom
def test_nothing_that_dlattn_served_proves_nothing(tmp_path: Path) -> None:
    status, results, _ = run(tmp_path, "-k", "many", "--shard", "1/2")
    assert status == 1
    assert results["lost"] == [] and results["compared"] == 25 and results["served"] == {}


@pytest.mark.nightly  # it waits for the time to end
def test_time_that_ends(tmp_path: Path) -> None:
    sleeps = "import time\n" + SUITE.replace('self.skipTest("always")', "time.sleep(600)")
    _, results, _ = run(tmp_path, "-k", "test_skips|serves", "--timeout", "30", text=sleeps)
    assert results["functions"]["TestMadeUp.test_skips"]["compared"] == 0 and not results["lost"]
    for way in ("stock", "dlattn"):
        assert results[way]["not run"] >= 1 and results[way].keys() <= {"passed", "not run"}


@pytest.mark.nightly  # it waits, and starts programs anew
def test_a_test_that_hangs(tmp_path: Path) -> None:
    sleeps = "import time\n" + SUITE.replace("os._exit(5)", "time.sleep(600)")
    _, results, _ = run(tmp_path, "-k", "dies|serves", "--patience", "2", text=sleeps)
    (lost,) = results["lost"]
    assert lost["outcome"] == "crashed" and "Timeout" in lost["message"]


@pytest.mark.nightly  # seconds to import torch, for a tool that changes seldom
def test_a_file_that_does_not_load(tmp_path: Path) -> None:
    status, results, _ = run(tmp_path, text="import no_such_module\n")
    assert status == 1 and results["compared"] == 0
    assert "no_such_module" in results["troubles"]["stock"][0]


def test_the_function_of_a_test() -> None:
    functions = ["test_a", "test_a_b"]
    assert function_of("C.test_a_b_float32_cpu", functions) == "C.test_a_b"
    assert function_of("C.test_a_x_cpu", functions) == "C.test_a"
    assert function_of("C.test_other", functions) == "C.test_other"


def test_every_function_has_its_turn() -> None:
    tests = [f"A.test_a_{n}" for n in range(300)] + [f"B.test_b_{n}" for n in range(30)]
    order = chosen(tests, ["test_a", "test_b"], "", 0)
    assert sorted(order) == sorted(tests)
    assert [test[0] for test in order[:60]] == ["A"] * 20 + ["B"] * 20 + ["A"] * 20
    some = chosen(tests, ["test_a", "test_b"], "", 25)
    assert [test[0] for test in some] == ["A"] * 20 + ["B"] * 20 + ["A"] * 5 + ["B"] * 5
    assert set(some) <= set(order) and chosen(tests[::-1], ["test_a", "test_b"], "", 25) == some


def test_what_did_not_run_is_not_compared() -> None:
    found = {"stock": Results(), "dlattn": Results()}
    for way, outcomes in {"stock": ["passed"] * 3, "dlattn": ["passed", "failed"]}.items():
        found[way].records = {f"t{n}": {"outcome": what} for n, what in enumerate(outcomes)}
    assert compared_in(found) == ["t0", "t1"] and lost_in(found) == ["t1"]
