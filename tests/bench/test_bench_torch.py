"""benchmarks/activation.py and benchmarks/training.py: their turns and figures, on the CPU."""

from __future__ import annotations

import importlib.util
import sys
import threading
from argparse import Namespace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import dlattn.torch  # noqa: E402

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # for its dataclasses
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def torchs_own_again(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    yield
    dlattn.torch.deactivate()


def test_contestants_take_turns() -> None:
    activation = script("activation")
    orders, threads = {}, []
    for name in (activation.TORCH, activation.OPERATOR):
        orders[name], theirs = Pipe()
        threads.append(threading.Thread(target=activation.contest, args=(name, "cpu", 2, theirs)))
        threads[-1].start()
    args = Namespace(windows=3)
    for kind in activation.CPU:
        case = (kind, activation.SHAPES[0], "forward and backward")
        times = activation.times_of(case, orders, args)
        assert all(len(each) == 3 and min(each) > 0 for each in times.values())
        assert set(activation.ratios(times)) == {activation.OPERATOR}
    unknown = ("flash", (1, 1, 2, 3, -1), "forward")
    assert activation.times_of(unknown, orders, args) == {}
    for to in orders.values():
        to.send(None)
        assert set(to.recv()) == {"served", "refused", "why"}
    for thread in threads:
        thread.join()


def test_ratios_are_those_of_windows_beside_each_other() -> None:
    """A machine that is twice as slow for one round changes none."""
    times = {"torch": [1.0, 2.0, 1.0], "auto": [0.5, 1.0, 0.5], "dlattn": [2.0, 2.0, 1.0]}
    assert script("activation").ratios(times) == {"auto": 0.5, "dlattn": 1.0}
    assert script("activation").ratios({"auto": [1.0]}) == {}


class Unwatched:
    def during(self) -> bool:
        return False


def test_training_compares_losses_and_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    training = script("training")
    batch = torch.arange(40, dtype=torch.long).reshape(2, 20) % 7
    monkeypatch.setattr(training, "batches", lambda *_: iter([(batch, batch)] * 9))
    monkeypatch.setattr(training, "BLOCK", 2)
    sizes = training.Gpt(layers=1, heads=2, width=16, vocabulary=8)
    args = Namespace(gpt=sizes, device="cpu", steps=3, batch=2, seqlen=20)
    found, good = training.train(args, Unwatched())
    assert good and found["served"]["_scaled_dot_product_flash_attention_for_cpu"] == 6
    assert [len(run["losses"]) for run in found["runs"]] == [3] * 4
    assert len(set(found["last_losses_of_stock_seeds"])) == training.SEEDS
    ours, _, flash = found["differences_of_losses"]
    assert ours["largest"] < 1e-2 and flash["largest"] == 0.0
    monkeypatch.setattr(training, "OURS", {"other weights": training.nullcontext})
    monkeypatch.setattr(training, "SEEDS", 1)  # which have no spread
    assert not training.train(args, Unwatched())[1]


def test_a_layer_of_llamas() -> None:
    training = script("training")
    sizes = training.Llama(heads=4, heads_kv=2, head_dim=8, hidden=16)
    args = Namespace(llama=sizes, device="cpu", layer_seqlens=[6, 9], layer_blocks=2)
    found = training.layer_steps(args, Unwatched())
    assert [x["seqlen"] for x in found] == [6, 9]
    assert all(x["ratios_to_stock"][training.STOCK] == 1.0 for x in found)
    counted = 2 * (training.LAYER_BLOCK - 1)
    assert all(len(each) == counted for x in found for each in x["step_seconds"].values())
