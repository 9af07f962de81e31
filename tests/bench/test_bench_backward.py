"""The benchmark of the backward pass: exact gradients, who computes them, what is told."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from quick_bench import run_bench, run_to_json

import dlattn
from dlattn.bench import backward, figures, peers, plot, report
from dlattn.bench.cases import BACKWARD, BOTH, Case
from dlattn.cli import main
from dlattn.reference import (
    attention_backward_reference,
    attention_reference,
    same_dtype_gradients,
    same_dtype_reference,
)

torch = pytest.importorskip("torch")

from dlattn.bench import tensors  # noqa: E402
from dlattn.bench.backward import contestants, gradients  # noqa: E402
from dlattn.bench.backward import plot as backward_plot  # noqa: E402

Captured = pytest.CaptureFixture[str]

pytestmark = pytest.mark.usefixtures("instant")


@pytest.fixture(autouse=True)
def small_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a CPU, in an instant."""
    small = replace(
        backward.SCALES["cpu"],
        square=((1, 2, 96, 16), (1, 2, 80, 32)),
        short=((2, 2, 24, 16),),
        varlen={"long": (5, 1, 60)},
        varlen_heads=(2, 16),
        gqa=(((1, 4, 64, 16), 2),),
        bias=(2, 2, 48, 16),
    )
    monkeypatch.setitem(backward.SCALES, "cpu", small)


def normal(*sizes: int, seed: int) -> Any:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed)) + 0.25


def problem(heads_kv: int = 2, causal: bool = True, bias: bool = False) -> peers.Problem:
    """In float16; the batch shares the bias if there is one."""
    case = Case((2, 4, 21, 16), causal, "float16", heads_kv, passes=BACKWARD)
    options = {"bias": normal(1, 4, 21, 21, seed=9).half()} if bias else {}
    asked = peers.Problem(case, *tensors.draw(case, "cpu"), options)
    dout = normal(2, 4, 21, 16, seed=7).half()
    return replace(asked, backward=backward.BackwardInputs(asked, dout))


# Exact gradients


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_gradients_are_the_references(
    causal: bool, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradients, "_SCORES_AT_A_TIME", 1000)  # several blocks of rows
    asked = problem(causal=causal, bias=bias)
    assert asked.backward is not None
    inputs = [x.numpy() for x in (asked.q, asked.k, asked.v)]
    dout, options = asked.backward.dout.numpy(), {"causal": causal, "layout": "bhsd"}
    options |= {name: x.numpy() for name, x in asked.options.items()}
    for plain in (False, True):
        forward = same_dtype_reference if plain else attention_reference
        out, lse = forward(*inputs, **options)
        if plain:
            found = same_dtype_gradients(dout, *inputs, out, lse, dtype="float16", **options)
        else:
            found = attention_backward_reference(dout, *inputs, out, lse, **options)
        want = [found.dq, found.dk, found.dv, *([found.dbias] if bias else [])]
        got = gradients.gradients(
            *(asked.backward.dout, asked.q, asked.k, asked.v),
            plain=plain,
            causal=causal,
            bias=asked.options.get("bias"),
        )
        # Sums in another order may round the other way.
        close = {"rtol": 4e-3, "atol": 2e-3} if plain else {"rtol": 0, "atol": 1e-11}
        for x, y in zip(got, want, strict=True):
            np.testing.assert_allclose(x.numpy(), y, **close)


@pytest.mark.parametrize("bias", [False, True])
def test_a_sample_of_heads_sees_errors(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = problem(bias=bias)
    assert asked.backward is not None
    own = {"causal": True, "bias": asked.options.get("bias")}
    exact = gradients.gradients(asked.backward.dout, asked.q, asked.k, asked.v, **own)
    monkeypatch.setattr(gradients, "_ALL_SCORES", 100)
    expected = gradients.ExpectedGradients(asked, asked.backward.dout)
    assert expected.errors(exact)[1] < 1e-6
    places: list[tuple[int, tuple[int, ...]]] = [(0, (1, 3, 20, 0)), (1, (0, 0, 5, 15))]
    places += [(2, (1, 1, 0, 2)), *([(3, (0, 1, 5, 2))] if bias else [])]
    for i, at in places:
        for wrong in (0.1, math.nan):
            broken = [x.clone() for x in exact]
            broken[i][at] += wrong
            assert expected.errors(broken)[1] > 1, (i, wrong)


def test_varlen_gradients_are_those_of_each_sequence() -> None:
    """Ours, which is held to its own reference elsewhere, agrees; a row of another one does not."""
    (_, varlen) = backward.study(context()).groups()["varlen"]
    entrant = varlen()[0]
    assert entrant.problem.backward is not None and entrant.problem.varlen is not None
    found = list(entrant.contestant.bind(entrant.problem).call())
    expected = entrant.problem.backward.expected
    assert expected.errors(found)[1] <= 1
    lengths = entrant.problem.varlen.lengths
    start = sum(lengths[: lengths.index(max(lengths))])
    found[1] = found[1].clone()
    found[1][start] += 0.1
    assert expected.errors(found)[1] > 1
    pairs = sum(n * n for n in lengths)
    assert entrant.operations == 2.5 * 2 * pairs * 2 * 16  # causal: half of the products


def test_varlen_gradients_of_shared_heads() -> None:
    """The second head of keys is shared by the last two heads of queries."""
    lengths = (5, 12, 7)
    case = Case((3, 4, 12, 16), True, "float32", 2, passes=BACKWARD)
    drawn = tensors.draw(replace(case, sizes=(1, 4, 24, 16)), "cpu")
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in drawn)
    starts = torch.tensor([0, 5, 17, 24], dtype=torch.int32)
    asked = peers.Problem(case, q, k, v, varlen=peers.Varlen(lengths, starts))
    asked = replace(asked, backward=backward.BackwardInputs(asked, normal(24, 4, 16, seed=7)))
    assert asked.backward is not None
    found = list(contestants.ours(peers.ours_with("cpu"), False).bind(asked).call())
    assert asked.backward.expected.errors(found)[1] <= 1
    for i, head in ((0, 3), (1, 1), (2, 1)):
        broken = [x.clone() for x in found]
        broken[i][20, head, 3] += 0.1
        assert asked.backward.expected.errors(broken)[1] > 1, i


def context(**more: Any) -> backward.Context:
    own = [peers.ours_with("auto")]
    return backward.Context("cpu", "float32", own, None, **more)


# Who computes them


@pytest.mark.parametrize("passes", [BACKWARD, BOTH])
@pytest.mark.parametrize("bias", [False, True])
def test_a_peers_gradients_are_those_of_its_forward_pass(passes: str, bias: bool) -> None:
    asked = problem(bias=bias)
    asked = replace(asked, case=replace(asked.case, passes=passes))
    assert asked.backward is not None
    bound = contestants.by_autograd(peers.TORCH_SDPA).bind(replace(asked, options={}))
    before = [x.clone() for x in (asked.q, asked.k, asked.v)]
    if bias:
        bound = contestants.by_autograd(peers.TORCH_SDPA).bind(
            replace(asked, case=replace(asked.case, causal=False))
        )
        expected = gradients.ExpectedGradients(
            replace(asked, case=replace(asked.case, causal=False)), asked.backward.dout
        )
    else:
        expected = asked.backward.expected
    for _ in range(2):  # what the backward pass needs is kept
        found = bound.call()
        assert len(found) == 3 + bias
        assert expected.errors(found)[1] <= 1.5
    assert not asked.q.requires_grad
    for x, y in zip((asked.q, asked.k, asked.v), before, strict=True):
        assert torch.equal(x, y)


def test_the_forward_pass_runs_on_the_stream_that_is_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once for each stream: autograd computes where the forward pass ran."""
    calls: list[int] = []
    stream = SimpleNamespace(cuda_stream=5)

    def bind(own: peers.Problem) -> peers.Bound:
        def call() -> Any:
            calls.append(stream.cuda_stream)
            return own.q * own.k.sum() + own.v

        return peers.Bound(call)

    asked = problem(heads_kv=4)
    assert asked.backward is not None
    dout = SimpleNamespace(is_cuda=True)
    asked = replace(asked, backward=SimpleNamespace(dout=dout))  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.autograd, "grad", lambda out, *_, **__: out)
    bound = contestants.by_autograd(peers.Contestant("x", False, bind)).bind(asked)
    for stream.cuda_stream in (5, 5, 6, 6, 5):
        bound.call()
    assert calls == [5, 6]


def test_ours_in_its_deterministic_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = problem()
    plan_backward, given, variants = dlattn.plan_backward, [], {True: "", False: ""}

    def plan(*arguments: Any, deterministic: bool = False, **options: Any) -> Any:
        return replace(plan_backward(*arguments, **options), variant=variants[deterministic])

    def gradients_of(*arguments: Any, deterministic: bool, **options: Any) -> Any:
        given.append(deterministic)
        return attention_backward(*arguments, **options)

    attention_backward = dlattn.attention_backward
    monkeypatch.setattr(dlattn, "plan_backward", plan)
    monkeypatch.setattr(dlattn, "attention_backward", gradients_of)
    with pytest.raises(peers.UnavailableError, match="always deterministic"):
        contestants.ours(peers.ours_with("cpu"), True).bind(asked)
    variants[True] = "ordered"
    bound = contestants.ours(peers.ours_with("cpu"), True).bind(asked)
    assert (bound.plan, given) == ("cpu:ordered", [])
    assert asked.backward is not None and bound.checked is not None
    assert asked.backward.expected.errors(bound.checked())[1] <= 1
    assert given == [True]


def test_ours_is_checked_where_nan_was(monkeypatch: pytest.MonkeyPatch) -> None:
    attention_backward = dlattn.attention_backward

    def leaves_dk(*arguments: Any, **options: Any) -> Any:
        found = attention_backward(*arguments, **{**options, "dk": None})
        return found._replace(dk=options["dk"])

    asked = problem()
    bound = contestants.ours(peers.ours_with("cpu"), False).bind(asked)
    monkeypatch.setattr(dlattn, "attention_backward", leaves_dk)
    assert asked.backward is not None and bound.checked is not None
    bound = contestants.ours(peers.ours_with("cpu"), False).bind(asked)
    assert bound.checked is not None
    assert asked.backward.expected.errors(bound.checked())[0] == math.inf


def test_a_problem_without_a_gradient_is_refused() -> None:
    asked = replace(problem(), backward=None)
    for contestant in (
        contestants.ours(peers.ours_with("cpu"), False),
        contestants.by_autograd(peers.TORCH_SDPA),
    ):
        with pytest.raises(peers.UnavailableError, match="computes gradients only"):
            contestant.bind(asked)


# The set


def test_the_cases_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    own = [peers.ours_with("auto")]
    study = backward.study(backward.Context("cuda", "bfloat16", own, None))
    made: list[tuple[Case, Any]] = []
    monkeypatch.setattr(
        backward.Study, "_drawn", lambda self, case: peers.Problem(case, None, None, None)
    )
    for name, groups in study.groups().items():
        if name in ("varlen", "bias"):
            continue
        for group in groups:
            entrants = group()
            made.append((replace(entrants[0].problem.case, passes="forward"), name))
            names = [e.contestant.name for e in entrants if e.problem.case.passes == BACKWARD]
            assert names[:2] == ["dlattn auto", "dlattn auto deterministic"]
            assert entrants[1].beside == (entrants[0],)
            efficient = ["torch-efficient"] if name != "gqa" else []
            assert names[2:] == ["torch-flash", "torch-cudnn", *efficient, "fa3", "fa4"]
            assert len(entrants) == 2 * len(names)
    told = {f"{case.label} {case.mask}" for case, _ in made}
    for wanted in (
        *("(1,16,16384,128) full", "(4,16,4096,128) causal", "(1,32,16384,64) full"),
        *("(1,8,16384,256) causal", "(4,32/8,4096,128) causal", "(2,32/8,8192,128) causal"),
        *("(4,32,4096,64) full", "(4,8,4096,256) causal", "(1,16,1024,128) causal"),
    ):
        assert wanted in told
    for case, name in made:
        batch, heads, seqlen, _ = case.sizes
        if name == "short":
            assert seqlen <= 1024 and 64 <= batch * heads * seqlen // 128 <= 132
    assert sum(map(len, study.groups().values())) == len(made) + 4 + 1


def test_run(tmp_path: Path, capsys: Captured) -> None:
    document = run_to_json(tmp_path, "--shape", "backward", "--only", "gqa", "bias")
    printed = capsys.readouterr().out
    assert "(1,4/2,64,16)  causal backward          float32  dlattn auto (cpu)" in printed
    assert "(gradients: three times)" in printed
    assert "times as fast as torch in forward+backward (geometric mean of 2 cases" in printed
    results = report.from_json(document)
    assert [(r.case.passes, r.contestant) for r in results[:4]] == [
        (passes, name) for passes in (BACKWARD, BOTH) for name in ("dlattn auto", "torch")
    ]
    for result in results:
        assert result.seconds and result.bound_ratio and result.bound_ratio <= 1, result
    flops = 2 * 4 * 64 * 64 * 16
    assert [r.case.flops for r in results[:4]] == [2.5 * flops] * 2 + [3.5 * flops] * 2
    assert document["results"][0]["passes"] == "backward"
    assert "torch, forward+backward" in document["host_seconds"]
    assert {line["passes"] for line in document["summary"]} == {BACKWARD, BOTH}


def test_one_of_the_passes(tmp_path: Path, capsys: Captured) -> None:
    """The protocol tells it, so that results of other passes do not continue these."""
    asked = ("--shape", "backward", "--only", "bias", "--commit", "0" * 40)
    document = run_to_json(tmp_path, *asked, "--passes", "backward")
    assert {r.case.passes for r in report.from_json(document)} == {BACKWARD}
    assert document["protocol"]["passes"] == [BACKWARD]
    assert list(document["host_seconds"]) == ["dlattn auto, backward", "torch, backward"]
    path = tmp_path / "one.json"
    path.write_text(json.dumps(document))
    assert run_bench(*asked, "--continue", path) == 2
    assert "are no parts of one run: protocol is" in capsys.readouterr().err
    assert run_bench("--shape", "1,1,16,8", "--passes", "backward") == 2
    assert "--passes is for --shape backward" in capsys.readouterr().err


def test_a_wrong_gradient_is_not_timed(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = dlattn.attention_backward

    def wrong(*arguments: Any, **options: Any) -> Any:
        result = found(*arguments, **options)
        result.dv.mul_(1.01)
        return result

    monkeypatch.setattr(dlattn, "attention_backward", wrong)
    path = tmp_path / "bench.json"
    assert run_bench("--shape", "backward", "--only", "gqa", "--json", path) == 1
    assert "WRONG" in capsys.readouterr().out
    ours, theirs = report.from_json(json.loads(path.read_text()))[:2]
    assert ours.wrong and ours.seconds is None and theirs.seconds


@pytest.mark.parametrize(
    ("raised", "note"),
    [
        (ModuleNotFoundError("no cutlass"), "flash-attn-4 is not installed: no cutlass"),
        (OSError("libx.so: not found"), "flash-attn-4 cannot be imported: libx.so: not found"),
        (RuntimeError("driver too old"), "flash-attn-4 cannot be imported: driver too old"),
    ],
    ids=["missing", "library", "driver"],
)
def test_a_peer_that_cannot_be_imported_is_left_out(
    raised: Exception,
    note: str,
    tmp_path: Path,
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others are measured, and the exit status is that of a good run."""
    import_module = peers.importlib.import_module

    def fails(name: str) -> Any:
        if name == "flash_attn.cute":
            raise raised
        return import_module(name)

    known = [peers.TORCH_SDPA, peers.Contestant("fa4", False, peers.TORCH_PEERS["fa4"])]
    monkeypatch.setattr(peers, "importlib", SimpleNamespace(import_module=fails))
    monkeypatch.setattr(backward, "_peers", lambda device: ((peer.name, peer) for peer in known))
    document = run_to_json(tmp_path, "--shape", "backward", "--only", "head_dim 16")
    assert note in capsys.readouterr().out
    by_name = {r.contestant: r for r in report.from_json(document)}
    assert (by_name["fa4"].note, by_name["fa4"].seconds) == (note, None)
    assert by_name["dlattn auto"].seconds and by_name["torch"].seconds


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--peers", "fa4"], "--peers fa4; accepted here: torch"),
        (["--only", "gqb"], "accepted here: head_dim 16, head_dim 32, gqa, bias, varlen, short"),
        (["--head-dim", "40"], "leave nothing of backward"),
    ],
)
def test_wrong_use(arguments: list[str], message: str, capsys: Captured) -> None:
    assert run_bench("--shape", "backward", *arguments) == 2
    assert message in capsys.readouterr().err


def example() -> list[report.Result]:
    """Two cases, each with both passes."""
    results = []
    for sizes, variant in (((1, 8, 512, 64), ""), ((2, 8, 512, 64), "varlen 1-512")):
        for passes, factor in ((BACKWARD, 2.5), (BOTH, 3.5)):
            case = Case(sizes, True, "bfloat16", variant=variant, passes=passes)
            for name, tflops in (("dlattn auto", 300), ("torch-flash", 150), ("fa4", 250)):
                seconds = case.flops / (tflops * 1e12)
                times = [seconds, seconds * factor, seconds / factor]
                results.append(report.Result(case, name, name[0] == "d", 0.0, 0.1, times))
    return results


def document_of(results: list[report.Result]) -> Any:
    about = {
        "date": "2026-01-02T00:00:00",
        "git": {"sha": "0123456789abcdef", "dirty": False},
        "machine": {"cpu": "EPYC", "gpu": "NVIDIA X"},
        "versions": {"dlattn": "0.1.0"},
        "busy": [],
    }
    ceiling = {"matmul": "torch 8192^3", "tflops": 775.0, "copy_gb_per_s": 1.0}
    return report.to_json(about, {"method": "events", "threads": None}, ceiling, results, {})


def test_figures(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(document_of(example())))
    text = figures.figures_markdown([path], tmp_path)
    assert "| TFLOP/s at (B,H,S,D) | what | dtype | dlattn auto | torch-flash | fa4 |" in text
    assert "| (1,8,512,64) | causal backward | bfloat16 | 300 | 150 | 250 | 1.20 |" in text
    assert "| (2,8,512,64) | causal forward+backward, varlen 1-512 | bfloat16 | 300 |" in text


def test_plot(tmp_path: Path) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    drawn: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pyplot, "close", drawn.append)
        files = plot.draw(document_of(example()), tmp_path / "plot.png")
    assert files == [tmp_path / "plot.png"]
    (figure,) = drawn
    assert figure.texts[0].get_text() == "Attention backward, bfloat16: NVIDIA X"
    alone, both = figure.axes
    assert alone.get_title(loc="left") == "backward, TFLOP/s"
    assert both.get_title(loc="left") == "forward+backward, TFLOP/s"
    assert [round(bar.get_width()) for bar in alone.patches] == [300, 150, 250] * 2
    labels = [label.get_text() for label in alone.get_yticklabels()]
    assert labels == ["(1,8,512,64) causal", "(2,8,512,64) causal\nvarlen 1-512"]
    pyplot.close(figure)


def test_plots_of_many_cases_have_about_as_many_each() -> None:
    """As few figures as have room, and none with the few cases that are left."""
    results = [
        report.Result(Case((n + 1, 8, 512, 64), True, "bfloat16", passes=BACKWARD), name, False)
        for n in range(25)
        for name in ("dlattn auto", "torch-flash", "fa4")
    ]
    sizes = [len(part) for part in backward_plot._parts(results)]
    assert sum(sizes) == 25 and len(sizes) == 2 and max(sizes) - min(sizes) <= 1


@pytest.mark.gpu
def test_run_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU")
    small = replace(
        backward.SCALES["cuda"],
        square=((1, 2, 512, 128), (1, 2, 512, 64), (1, 2, 512, 256)),
        short=((1, 2, 256, 128),),
        varlen={"long": (5, 16, 300)},
        varlen_heads=(2, 128),
        gqa=(((1, 8, 512, 128), 2),),
        bias=(2, 2, 256, 128),
    )
    monkeypatch.setitem(backward.SCALES, "cuda", small)
    path = tmp_path / "bench.json"
    command = ["bench", "--quick", "--device", "cuda", "--json", str(path), "--shape", "backward"]
    assert main(command) == 0
    results = report.from_json(json.loads(path.read_text()))
    timed = {r.contestant for r in results if r.seconds}
    assert {"dlattn auto", "torch-flash", "torch-cudnn", "torch-efficient"} <= timed
    assert "torch-flash varlen" in timed
    for result in results:
        assert result.seconds or result.note, result
        assert "not captured" not in result.note, result
        assert not (result.ours and result.wrong), result
