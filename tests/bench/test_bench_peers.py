"""The benchmark's peers that tests' machines lack, and what is told of several at once."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from dlattn.bench import peers, report, session, tensors, timing
from dlattn.bench.cases import Case

torch = pytest.importorskip("torch")

INSTANT = timing.Windows(rounds=1, warmup_seconds=0.0, measured_seconds=0.0, host_calls=1)


def problem(causal: bool = False, heads_kv: int = 0) -> peers.Problem:
    case = Case((2, 4, 24, 16), causal, "float32", heads_kv)
    return peers.Problem(case, *tensors.draw(case, "cpu"))


def flash_attn_func(q: Any, k: Any, v: Any, *, causal: bool) -> tuple[Any, None]:
    """As the package's: (batch, seqlen, heads, dim), and a pair."""
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return sdpa(*heads_first, is_causal=causal, enable_gqa=True).transpose(1, 2), None


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads_kv", [0, 2])
@pytest.mark.parametrize("pair", [True, False], ids=["pair", "alone"])
def test_flash_4(monkeypatch: pytest.MonkeyPatch, causal: bool, heads_kv: int, pair: bool) -> None:
    def function(*arguments: Any, **options: Any) -> Any:
        result = flash_attn_func(*arguments, **options)
        return result if pair else result[0]

    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(__path__=[]))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", SimpleNamespace(flash_attn_func=function))
    asked = problem(causal, heads_kv)
    out = peers.TORCH_PEERS["fa4"](asked).call()
    expected = tensors.Expected(asked.q, asked.k, asked.v, {"causal": causal})
    assert expected.errors(out)[1] <= 1
    with pytest.raises(peers.UnavailableError, match="plain problems only"):
        peers.TORCH_PEERS["fa4"](replace(asked, options={"softcap": 1.0}))


def test_flash_4_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(peers.UnavailableError, match="flash-attn-4 is not installed"):
        peers.TORCH_PEERS["fa4"](problem())


@pytest.mark.parametrize("protocol", [True, False], ids=["CuPy 14", "CuPy 13"])
def test_cupy_works_on_torchs_stream(monkeypatch: pytest.MonkeyPatch, protocol: bool) -> None:
    def current_stream() -> Any:
        return SimpleNamespace(cuda_stream=77)

    monkeypatch.setitem(
        sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(current_stream=current_stream))
    )
    by_protocol = SimpleNamespace(
        from_external=lambda stream: nullcontext(("protocol", stream.__cuda_stream__()))
    )
    cuda = SimpleNamespace(
        Stream=by_protocol if protocol else SimpleNamespace(),
        ExternalStream=lambda handle: nullcontext(("handle", handle)),
    )
    with peers._torch_stream(SimpleNamespace(cuda=cuda)) as stream:
        assert stream == (("protocol", (0, 77)) if protocol else ("handle", 77))


def test_the_plan_is_told() -> None:
    asked = problem()
    assert peers.ours_with("auto").bind(asked).plan == "cpu"
    run = session.Session("cpu", INSTANT, ["auto", "cpu"], [])
    auto, named = run.time([session.Entrant(own, asked) for own in run.contestants])
    ceiling = {"matmul": "a product", "tflops": 1.0, "copy_gb_per_s": 1.0}
    printed = report.print_results([auto, named], ceiling)
    assert "  dlattn auto (cpu)  " in printed and "  dlattn cpu  " in printed
    document = report.to_json({}, {}, {}, [auto, named], {})
    assert [result["plan"] for result in document["results"]] == ["cpu", "cpu"]
    assert [result.plan for result in report.from_json(document)] == ["cpu", "cpu"]


def test_the_best_of_several_peers_is_a_measure_too() -> None:
    run = session.Session("cpu", INSTANT, ["cpu"], ["torch", "numpy"])
    asked = problem()
    ours, torch_, numpy_ = run.contestants

    class Clock(timing.CpuClock):
        """A second less every time."""

        seconds = 3.0

        def window(self, prepared: timing.Prepared, windows: timing.Windows) -> list[float]:
            self.seconds -= 1
            return [self.seconds + 1]

    run.clock = Clock()
    array = replace(asked, q=asked.q.numpy(), k=asked.k.numpy(), v=asked.v.numpy())
    first, second = session.Entrant(torch_, array), session.Entrant(numpy_, array)
    results = run.time([session.Entrant(ours, array, first), first, second])
    assert [result.seconds for result in results] == [3.0, 2.0, 1.0]
    assert results[0].baseline == "torch"
    assert results[0].vs_baseline == pytest.approx(2 / 3)
    assert results[0].facts == {"vs best peer": pytest.approx(1 / 3)}
    assert results[1].facts == {}

    run.clock = Clock()
    results = run.time([session.Entrant(ours, array, first), first])
    assert results[0].facts == {}


def test_a_summary_for_each_head_dim() -> None:
    results = []
    for head_dim, theirs in ((64, 2.0), (128, 0.5)):
        case = Case((1, 8, 128, head_dim), False, "float16")
        results += [
            report.Result(case, "dlattn a", True, 0.0, 0.1, [1.0]),
            report.Result(case, "flash", False, 0.0, 0.1, [theirs]),
            report.Result(case, "fa4", False, 0.0, 0.1, [4.0]),
        ]
    found = {(line["peer"], line["head_dim"]): line for line in report.summary(results)}
    assert len(found) == 9
    assert found["best peer", None]["geometric_mean"] == pytest.approx(1.0)
    assert found["best peer", 64]["geometric_mean"] == pytest.approx(2.0)
    assert found["best peer", 128]["least"] == pytest.approx(0.5)
    lines = report.summary_lines(results)
    assert len(lines) == 5  # each peer alone and the best overall, then the best by head_dim
    assert "0.500 times as fast as best peer at head_dim 128 (geometric mean of 1 case" in lines[4]
    assert len(report.summary(results[:3])) == 3
