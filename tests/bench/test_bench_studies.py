"""The benchmark's studies on torch tensors: exact results, features, scores and their rule."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from quick_bench import run_to_json

import dlattn
from dlattn import bench
from dlattn.bench import (
    features,
    figures,
    mma_ceiling,
    plot,
    report,
    session,
)
from dlattn.bench.cases import Case, small, sweep
from dlattn.bench.peers import cpu_problem, ours_with
from dlattn.bench.session import TILES, Entrant
from dlattn.cli import main
from dlattn.reference import attention_reference, same_dtype_reference

torch = pytest.importorskip("torch")

from dlattn.bench import scores, tensors  # noqa: E402

Captured = pytest.CaptureFixture[str]

pytestmark = pytest.mark.usefixtures("instant")


def normal(*sizes: int, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sizes, generator=generator) + 0.25


# Sets of shapes


def test_the_sweep_and_small_grids() -> None:
    assert len(sweep("cuda")) == 18
    assert {sizes[3] for sizes in sweep("cuda")} == {64, 128, 256}
    assert {(sizes[1], sizes[3]) for sizes in small("cuda")} == {(8, 64), (8, 128), (32, 128)}
    assert {sizes[2] for sizes in small("cuda")} == {128, 256, 512, 1024, 2048, 4096}


def test_head_dims_can_be_chosen(tmp_path: Path, capsys: Captured) -> None:
    document = run_to_json(tmp_path, "--shape", "small", "--head-dim", "64", "--causal", "--peers")
    assert {tuple(r["shape"]) for r in document["results"]} == set(small("cpu"))
    assert {r["contestant"] for r in document["results"]} == {"dlattn auto"}
    command = ["bench", "--device", "cpu", "--shape", "small", "--head-dim", "40"]
    assert main(command) == 2
    assert "--head-dim [40] leaves no shape of small" in capsys.readouterr().err


def test_a_kernel_may_name_its_shape(capsys: Captured) -> None:
    command = ["bench", "--quick", "--device", "cpu", "--shape", "1,1,16,8", "--peers"]
    assert main([*command, "--kernels", "cpu:wide", "auto"]) == 0
    assert "cpu: variant is wide; accepted: none" in capsys.readouterr().out


def test_summary() -> None:
    cases = [Case((1, 8, n, 64), False, "float16") for n in (128, 256)]
    results = []
    for case, ours, flash, efficient in zip(cases, (1, 2), (2, 1), (8, 4), strict=True):
        for name, seconds in (("dlattn a", ours), ("flash", flash), ("efficient", efficient)):
            results.append(report.Result(case, name, name[0] == "d", 0.0, 0.1, [float(seconds)]))
    flash, efficient, best = report.summary(results)
    assert flash["geometric_mean"] == pytest.approx(1.0)  # twice as fast and half as fast
    assert (flash["least"], flash["below_1"]) == (0.5, 1)
    assert flash["least_case"] == "(1,8,256,64) full float16"
    assert efficient["geometric_mean"] == pytest.approx(4.0)
    assert (best["peer"], best["least"]) == ("best peer", 0.5)


# Exact results on torch tensors


def options_of(seed: int) -> dict[str, Any]:
    """Every combination of score features in turn."""
    shape = (2, 4, 21, 30)
    every = {
        "softcap": 1.5,
        "bias": normal(2, 1, 21, 30, seed=5),
        "mask": normal(*shape[1:], seed=6) > -0.3,
        "alibi_slopes": normal(4, seed=7).abs(),
        "sinks": normal(4, seed=8),
        "window": (9, 4),
        "softmax_scale": 0.5,
    }
    chosen = {name: value for i, (name, value) in enumerate(every.items()) if seed >> i & 1}
    return {"causal": [False, True, "top_left"][seed % 3], **chosen}


@pytest.mark.parametrize("seed", [0, 1, 2, 4, 8, 16, 32, 64, 127, 85, 42])
def test_attention_is_the_references(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "_SCORES_AT_A_TIME", 1000)  # several blocks of rows
    options = options_of(seed)
    for dtype in (torch.float64, torch.float16):
        q, k, v = (normal(2, h, n, 16, seed=i).to(dtype) for i, h, n in
                   ((1, 4, 21), (2, 2, 30), (3, 2, 30)))  # fmt: skip
        out, lse = tensors.attention(q, k, v, **options)
        want = attention_reference(q, k, v, layout="bhsd", **options)
        np.testing.assert_allclose(out.numpy(), want[0], atol=1e-12)
        np.testing.assert_allclose(lse.numpy(), want[1], atol=1e-12)
        rows = slice(7, 16)
        part, _ = tensors.attention(q, k, v, rows=rows, **options)
        torch.testing.assert_close(part, out[:, :, rows])
    out, lse = tensors.attention(q, k, v, plain=True, **options)
    want = same_dtype_reference(q, k, v, layout="bhsd", **options)
    # Sums in another order may round the other way.
    np.testing.assert_allclose(out.numpy(), want[0], rtol=2e-3, atol=5e-4)
    np.testing.assert_allclose(lse.numpy(), want[1], rtol=1e-5, atol=1e-5)


def test_errors_of_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "_ALL_SCORES", 100)
    monkeypatch.setattr(tensors, "_SAMPLE_ROWS", 6)
    options = options_of(127)
    q, k, v = (
        normal(2, h, n, 16, seed=i).half() for i, h, n in ((1, 4, 21), (2, 2, 30), (3, 2, 30))
    )
    exact, _ = tensors.attention(q, k, v, **options)
    expected = tensors.Expected(q, k, v, options)
    assert expected.errors(exact)[1] < 1e-3
    for at, caught in (((1, 3, 20, 0), True), ((0, 0, 5, 15), True), ((0, 1, 5, 0), False)):
        broken = exact.clone()
        broken[at] += 0.01
        assert (expected.errors(broken)[1] > 1) is caught
    broken[0, 0, 0, 0] = math.nan
    assert expected.errors(broken)[1] == math.inf


def test_a_rounding_of_the_largest_probability_is_no_error() -> None:
    q, k, v = (torch.zeros(1, 1, 1, 8), torch.zeros(1, 1, 2, 8), torch.full((1, 1, 2, 8), 1.5))
    q[..., 0] = k[..., 0, 0] = 4.0  # most of the weight, and v is the same for both keys
    expected = tensors.Expected(q.half(), k.half(), v.half(), {})
    exact, _ = tensors.attention(q, k, v)
    assert expected.errors(exact + 1.5 * 2.0**-11)[1] < 1 < expected.errors(exact + 0.005)[1]


def test_errors_of_packed_sequences() -> None:
    lengths = (5, 1, 9, 3)
    q, k, v = (normal(18, 4, 8, seed=i) for i in range(3))
    parts = [x.transpose(0, 1)[None].split(lengths, 2) for x in (q, k, v)]
    exact = torch.cat(
        [tensors.attention(*part, causal=True)[0][0].transpose(0, 1) for part in zip(*parts)]  # noqa: B905
    )
    expected = tensors.ExpectedVarlen(q, k, v, lengths, {"causal": True})
    assert expected.errors(exact)[1] < 1e-3
    for row in (0, 5, 6, 14, 15, 17):
        broken = exact.clone()
        broken[row, 3, 2] += 0.01
        assert expected.errors(broken)[1] > 1


# Features


def test_features(tmp_path: Path, capsys: Captured) -> None:
    document = run_to_json(tmp_path, "--shape", "features")
    assert "vs baseline" in capsys.readouterr().out
    results = document["results"]
    assert not any(result["wrong"] for result in results)
    assert all(result["seconds"] > 0 for result in results), [r["note"] for r in results]
    ours = {r["variant"]: r for r in results if r["ours"]}
    plain = "dlattn auto, plain"
    for variant in ("lse", "sinks", "softcap", "alibi", "window 24", "other dtype"):
        assert ours[variant]["baseline"] == plain
    assert ours["packed qkv"]["baseline"] == "dlattn auto, rows of their own"
    assert ours["other dtype"]["dtype"] == "float16"
    lengths = features.draw_lengths(features.SCALES["cpu"])
    varlen = ours[f"varlen {min(lengths)}-{max(lengths)}"]
    assert varlen["baseline"] == "dlattn auto, one length"
    assert varlen["operations"] == 2 * 2 * 16 * sum(n * n for n in lengths)  # the causal one
    for kind in ("mask", "bias", "bias float32"):
        for shape in ("(1,1,S,S)", "(B,H,S,S)"):
            result = ours[f"{kind} {shape}"]
            assert result["baseline"].startswith("torch")
            assert result["vs_baseline"] > 0
            assert result["facts"]["vs plain"] > 0
    (grouped, *_) = [r for r in results if r["num_heads_kv"] == 2 and r["shape"][1] == 4]
    assert grouped["baseline"] == "torch"
    assert all(r["baseline_plan"] == "cpu" for r in results if r["baseline"].startswith("dlattn"))
    one = ours["lse"]
    base = next(r for r in results if r["variant"] == "plain" and r["causal"])
    assert one["vs_baseline"] == pytest.approx(base["seconds"] / one["seconds"])
    again = report.from_json(document)
    assert report.to_json({}, {}, {}, again, {})["results"] == results


def test_tiles_of_windows() -> None:
    def seen(rows: int, keys: int, seqlen: int, left: int | None) -> int:
        i, j = torch.arange(seqlen)[:, None], torch.arange(seqlen)[None]
        visible = (j <= i) & (j >= i - (seqlen if left is None else left))
        return sum(
            bool(part.any()) for row in visible.split(rows) for part in row.split(keys, dim=1)
        )

    for case in ((64, 64, 512, None), (64, 128, 1024, 256), (128, 64, 600, 100), (64, 64, 200, 0)):
        assert features.tiles_walked(*case) == seen(*case)
    assert features.tiles_walked(64, 64, 512, None) == 36


def test_times_of_tiles_are_compared() -> None:
    case = Case((1, 1, 64, 8), True, "float16")
    contestant = ours_with("cpu")
    problem = cpu_problem(case, *3 * (np.zeros((1, 1, 64, 8), np.float16),))
    plain = Entrant(contestant, problem)
    entrants = [plain, Entrant(contestant, problem, plain)]
    results = [report.Result(case, "dlattn cpu", True, times=[seconds]) for seconds in (4.0, 3.0)]
    session._compare(entrants, results)
    assert not results[1].facts
    results[0].facts, results[1].facts = {TILES: 100}, {TILES: 60}
    session._compare(entrants, results)
    assert results[1].facts["time a tile over the baseline's"] == pytest.approx(1.25)


def test_ours_are_compared_with_the_same_kernel_and_with_wmma(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Times, plans and problems in the results; `sm90`, `auto` and `wmma` are made up."""
    case = Case((1, 1, 64, 8), False, "float16")
    bare = cpu_problem(case, *3 * (np.zeros((1, 1, 64, 8), np.float16),))
    masked = replace(bare, options={"mask": True})
    entrants, results = [], []
    for name, plans, seconds in (
        ("auto", ("wmma:general", "sm90"), (3.0, 1.0)),
        ("sm90", ("sm90", "sm90"), (1.5, 1.2)),
        ("wmma", ("wmma:general", "wmma:wide"), (3.0, 2.0)),
    ):
        plain = Entrant(ours_with(name), bare)
        own = Entrant(ours_with(name), masked, plain, plain=plain)
        for entrant, plan, time in zip((own, plain), plans, seconds, strict=True):
            entrants.append(entrant)
            results.append(
                report.Result(case, entrant.contestant.name, True, times=[time], plan=plan)
            )
    session._compare(entrants, results)
    session._compare_ours(entrants, results)
    auto, _, sm90, sm90_plain, wmma, _ = results
    assert "vs plain" not in auto.facts  # its plain one is another kernel
    assert auto.baseline_plan == "sm90" and auto.facts["vs wmma"] == pytest.approx(1.0)
    assert sm90.facts == {"vs plain": pytest.approx(0.8), "vs wmma": pytest.approx(2.0)}
    assert sm90_plain.facts == {"vs wmma": pytest.approx(2 / 1.2)}
    assert wmma.facts == {"vs plain": pytest.approx(2 / 3)}
    ceiling = {"tflops": 1.0, "matmul": "made up", "copy_gb_per_s": 1.0}
    table = report.print_results(results, ceiling)
    assert "dlattn auto (sm90)" in table and "dlattn sm90 (sm90)" not in table


@pytest.mark.parametrize(
    ("capability", "contestants"),
    [((9, 0), ["dlattn auto", "dlattn wmma"]), ((8, 9), ["dlattn auto"])],
)
def test_wmma_takes_part_in_features_on_hopper(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], contestants: list[str]
) -> None:
    device = dlattn.DeviceInfo(0, "A GPU", capability, 132, 227 << 10, 50 << 20, "")
    monkeypatch.setattr(dlattn, "info", lambda: SimpleNamespace(devices=(device,)))
    monkeypatch.setattr(session, "_require_torch", lambda: None)
    monkeypatch.setattr(session, "GpuClock", lambda: None)
    args = SimpleNamespace(shape="features", kernels=None, peers=None, quick=True)
    chosen = bench._session(args, "cuda").contestants
    assert [contestant.name for contestant in chosen] == contestants


def test_a_wrong_feature_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attention = dlattn.attention

    def without_softcap(*args: Any, **options: Any) -> Any:
        return attention(*args, **{k: x for k, x in options.items() if k != "softcap"})

    monkeypatch.setattr(dlattn, "attention", without_softcap)
    monkeypatch.setattr(tensors, "OFFSET", 2.0)  # scores that a cap of 30 changes
    path = tmp_path / "bench.json"
    command = ["bench", "--quick", "--device", "cpu", "--shape", "features", "--only", "score"]
    assert main([*command, "--json", str(path)]) == 1
    results = json.loads(path.read_text())["results"]
    assert [r["variant"] for r in results if r["wrong"]] == ["softcap"]


def test_groups_can_be_chosen(tmp_path: Path, capsys: Captured) -> None:
    document = run_to_json(tmp_path, "--shape", "features", "--only", "gqa", "--full", "--peers")
    (result,) = document["results"]
    assert (result["causal"], result["num_heads_kv"], result["baseline"]) == (False, 2, "")
    for arguments, message in (
        (["features", "--only", "gqb"], "--only gqb; accepted here: gqa, varlen, mask, score"),
        (["scores", "--head-dim", "7"], "leave nothing of scores"),
        (["basic", "--only", "gqa"], "--only is for --shape features and scores"),
    ):
        assert main(["bench", "--device", "cpu", "--shape", *arguments]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("study", ["features", "scores"])
def test_studies_are_shown(tmp_path: Path, study: str) -> None:
    document = run_to_json(tmp_path, "--shape", study, "--causal")
    (tmp_path / "bench.json").write_text(json.dumps(document))
    text = figures.figures_markdown([tmp_path / "bench.json"], tmp_path)
    assert "| what | (B,H,S,D) |" in text
    assert ("| distant |" if study == "scores" else "| softcap |") in text
    pytest.importorskip("matplotlib")
    plot.draw(document, tmp_path / "plot.png")
    assert len((tmp_path / "plot.png").read_bytes()) > 10_000


# Scores


@pytest.mark.parametrize("head_dim", [64, 128])
def test_scores_have_the_statistics_that_are_stated(head_dim: int) -> None:
    def logits(kind: str) -> Any:
        q, k, _ = scores.make(kind, Case((1, 3, 512, head_dim), False, "float16"), "cpu")
        return (q.float() @ k.float().transpose(2, 3) / math.sqrt(head_dim))[0]

    noise = logits("noise")
    assert 0.9 < float(noise.std()) < 1.2
    for kind, deviation in (("peaked 4", 4.0), ("peaked 8", 8.0)):
        # The mean square of a log-normal factor of sigma 0.4 is exp(2 * 0.16).
        assert float(logits(kind).std()) == pytest.approx(deviation * math.exp(0.16), rel=0.1)
    for kind, sign in (("recent", 1), ("distant", -1)):
        means = logits(kind).mean((0, 1)).view(8, 64).mean(1)
        steps = (means[1:] - means[:-1]) * sign
        assert torch.allclose(steps, torch.full_like(steps, 2.0), atol=0.35)
    sink = logits("sink")
    height = (sink[:, :, 0] - sink[:, :, 1:].mean(2)).mean(1)
    assert torch.allclose(height, torch.tensor([10.0, 20.0, 30.0]), atol=1.0)
    adversarial = logits("adversarial").amax(1).view(3, 32, 16)
    rise = adversarial[:, :-1].amin(2) - adversarial[:, 1:].amax(2)  # towards the first key
    assert float(rise.min()) > 12 * math.log(2)
    retrieval = logits("retrieval")
    recent = retrieval.diagonal(dim1=1, dim2=2).mean()
    far = retrieval.diagonal(offset=-400, dim1=1, dim2=2).mean()
    assert float(recent - far) > 3
    assert 9 < float((retrieval.amax(2) - retrieval.mean(2)).mean()) < 25


def follow_slowly(walk: scores.Walk, x: Any, causal: bool) -> tuple[int, ...]:
    """The rule for one head, a warp and a slice at a time."""
    num_rows, num_keys = x.shape
    redone = max_first = long = raised = edges = scaled = 0
    for first in range(0, num_rows, walk.warp_rows):
        rows = range(first, min(first + walk.warp_rows, num_rows))
        block = first // walk.block_m * walk.block_m
        last = min(block + walk.block_m, num_rows) - 1
        end = -(-(last + 1 if causal else num_keys) // walk.block_n)
        seen_by_all = block + 1 if causal else num_keys
        references = dict.fromkeys(rows, -math.inf)
        rising = False
        for n in reversed(range(end)):
            masked = (n + 1) * walk.block_n > seen_by_all
            edge = n == end - 1 or (masked and not walk.speculates_on_edges)
            width = walk.edge_keys if edge else walk.block_n // walk.slices
            starts = range(n * walk.block_n, (n + 1) * walk.block_n, width)
            tile_rose_far = False
            for start in starts[::-1] if edge else starts:
                if edge and start >= (rows[-1] + 1 if causal else num_keys):
                    continue
                overflowing = []
                tops = {}
                sums = {}
                largest_lane = {}
                for row in rows:
                    lanes = [0.0] * 4
                    top = -math.inf
                    for key in range(start, start + width):
                        if key >= num_keys or (causal and key > row):
                            continue
                        top = max(top, float(x[row, key]))
                        if not edge:
                            lanes[key % 8 // 2] += 2.0 ** (float(x[row, key]) - references[row])
                    by_maximum = edge or rising
                    tops[row], sums[row], largest_lane[row] = top, sum(lanes), max(lanes)
                    if (
                        top > references[row] + walk.slack
                        if by_maximum
                        else max(lanes) > walk.max_sum
                    ):
                        overflowing.append(row)
                larger = largest_lane if walk.lanes_overflow else sums
                overflown = not edge and not rising and max(larger.values()) > scores.LARGEST
                rise = 0.0
                for row in rows if overflowing and not edge else overflowing:
                    old = references[row]
                    if edge or rising or overflown:
                        if tops[row] > old + walk.slack:
                            references[row] = tops[row]
                    else:
                        references[row] += max(0, math.frexp(sums[row])[1] - 1)
                    rise = max(rise, references[row] - old)
                tile_rose_far |= overflown or (rising and rise > scores.FAR_RISE)
                if edge:
                    raised, edges = raised + bool(overflowing), edges + 1
                else:
                    long, max_first = long + 1, max_first + rising
                    redone += overflown
                    scaled += bool(overflowing) and not rising and not overflown
            if not edge:
                rising = walk.anticipates and tile_rose_far
    return redone, max_first, long, raised, edges, scaled


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "walk",
    [
        scores.Walk(32, 16, 16, 1, 8, max_sum=4096),
        scores.Walk(64, 16, 32, 2, 16, max_sum=4096),
        scores.Walk(16, 16, 16, 1, 16, max_sum=4096, slack=0.0, anticipates=True),
        scores.Walk(
            16,
            16,
            16,
            1,
            16,
            max_sum=4096,
            slack=0.0,
            speculates_on_edges=True,
            anticipates=True,
            lanes_overflow=False,
        ),
    ],
    ids=["16 rows", "32 rows", "anticipating", "speculating on edges"],
)
def test_the_rule_is_followed(walk: scores.Walk, causal: bool) -> None:
    x = 5.0 * torch.randn(2, 90, 90, generator=torch.Generator().manual_seed(1))
    x[1] *= 16  # beyond what is scaled down, again and again
    counts = np.sum([follow_slowly(walk, head, causal) for head in x], 0)
    assert 0 < counts[0] < counts[2]
    assert bool(counts[1]) == walk.anticipates
    assert counts[5] > 0
    rates = scores.follow(walk, x, causal)
    assert rates.redone == pytest.approx(counts[0] / counts[2])
    assert rates.scaled == pytest.approx(counts[5] / counts[2])
    assert rates.max_first == pytest.approx(counts[1] / counts[2])
    assert rates.raised_on_edges == pytest.approx(counts[3] / counts[4])
    assert rates.long_tiles == pytest.approx(counts[2] / (counts[2] + counts[4]))


def test_which_scores_break_the_rule() -> None:
    walk = scores.Walk(128, 64, 32, 1, 32)

    def scaled(kind: str) -> float:
        q, k, _ = scores.make(kind, Case((1, 2, 512, 64), False, "float16"), "cpu")
        rates = scores.follow(walk, scores._some_scores(q, k), False)
        assert rates.redone == 0  # none of them rises by what fp32 does not hold
        return rates.scaled

    assert scaled("noise") == 0
    assert scaled("recent") == 0
    assert scaled("adversarial") == 1
    assert 1 / 14 <= scaled("sink") <= 1 / 7  # the tile of key 0, where the sink is high
    assert scaled("distant") > 0.1


@pytest.mark.parametrize("variant", ["wide", "narrow", "persistent"])
def test_the_walk_of_a_plan(variant: str) -> None:
    source = _source("forward/wmma/traits.h")
    body = re.search(
        rf"TileShape {variant}_shape\(int head_dim_tile[^)]*\) {{(.*?)\n}}", source, re.S
    )
    assert body is not None
    shapes = re.findall(r"return {([^}]*)}", body[1])
    assert len(shapes) == 3
    for head_dim_tile, shape in zip((64, 128, 256), shapes, strict=True):
        warps, row_tiles, block_n, slices, edge_keys = map(int, shape.split(",")[:5])
        rows = 16 * row_tiles
        plan = SimpleNamespace(
            kernel="wmma", variant=variant, num_warps=warps, block_m=warps * rows, block_n=block_n,
            head_dim_tile=head_dim_tile, dtype="bfloat16",
        )  # fmt: skip
        assert scores.walk_of(plan) == scores.Walk(warps * rows, block_n, rows, slices, edge_keys)
    assert f"kSlack = {scores.SLACK}f" in _source("tile/mma/softmax.cuh")


def test_the_walk_of_a_plan_on_hopper() -> None:
    source = _source("forward/sm90/traits.h")
    body = re.search(r"TileShape plain_shape\(.*?\) {(.*?)\n}", source, re.S)
    default = re.search(r"int block_n = (\d+);", source)
    assert body is not None and default is not None
    assigned = re.findall(r"shape\.block_n = ([^;]*);", body[1])
    sizes = {default[1], *re.findall(r"[?:] (\d+)", "".join(assigned))}
    assert sizes == {"64", "96", "128"}
    for block_n in map(int, sizes):
        plan = SimpleNamespace(kernel="sm90", block_n=block_n, head_dim_tile=128, dtype="float16")
        walk = scores.walk_of(plan)
        assert (walk.block_n, walk.edge_keys) == (block_n, block_n)
    assert "kWarpgroupRows = 64;" in _source("tile/wgmma/warpgroup.h")
    far = re.search(r"kFarRise = 0x1p-(\d+)f", _source("tile/wgmma/softmax.cuh"))
    assert far and int(far[1]) == scores.FAR_RISE


def test_the_sums_that_raise_a_row_max() -> None:
    shared = _source("tile/row_max.cuh")
    limit = re.search(r"kMaxSum = 0x1p(\d+)f", shared)
    assert limit and 2.0 ** int(limit[1]) == scores.MAX_SUM
    largest = re.search(r"kLargest = 0x1p(\d+)f", shared)
    assert largest and 2.0 ** int(largest[1]) == scores.LARGEST
    mma, wgmma = (_source(f"tile/{folder}/softmax.cuh") for folder in ("mma", "wgmma"))
    assert "tile::kMaxSum" in mma and "tile::kLargest" in mma and "tile::kLargest" in wgmma
    sm90 = _source("forward/sm90/softmax.cuh")
    limit = re.search(r"kMaxSum = 0x1p(\d+)f", sm90)
    assert limit and 2.0 ** int(limit[1]) == scores.HOPPER_MAX_SUM
    walk = scores.walk_of(SimpleNamespace(kernel="sm90", block_n=64, head_dim_tile=64))
    assert walk.to_power == ("kToPower = true;" in sm90)


def _source(path: str) -> str:
    return (Path(__file__).parents[2] / "src" / "cuda" / path).read_text()


# The ceiling


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_the_ceilings_kernel_assembles(tmp_path: Path, kind: str) -> None:
    text = mma_ceiling.ptx(kind)
    assert text.count("mma.sync.aligned.m16n8k16.row.col.f32." + kind) == 8
    ptxas = shutil.which("ptxas") or shutil.which("ptxas", path="/usr/local/cuda/bin")
    if ptxas is None:
        pytest.skip("no ptxas here")
    (tmp_path / "mma.ptx").write_text(text)
    command = [ptxas, "-arch=sm_89", "-v", "mma.ptx", "-o", "mma.cubin"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "spill" not in done.stderr or "0 bytes spill" in done.stderr


@pytest.mark.parametrize(
    ("mma_sync", "percent"),
    [(None, "41.7"), (640.0, "41.7"), (800.0, "40.0")],  # wgmma's product is above mma.sync
)
def test_percentages_are_of_the_largest_ceiling(mma_sync: float | None, percent: str) -> None:
    case = Case((1, 8, 512, 64), False, "float16")
    result = report.Result(case, "dlattn wmma", True, 0.0, 0.1, [case.flops / 320e12])
    ceiling: dict[str, Any] = {"tflops": 768.0, "matmul": "m", "copy_gb_per_s": 1.0}
    ceiling["mma_sync_tflops"] = mma_sync
    assert f" {percent} " in report.print_results([result], ceiling)
    text = "768 TFLOP/s (m)" + (
        f", {mma_sync:.0f} TFLOP/s (mma.sync on registers)" if mma_sync else ""
    )
    assert report.ceiling_text(ceiling) == text


@pytest.mark.gpu
@pytest.mark.parametrize("arguments", [["small", "--head-dim", "64"], ["features"], ["scores"]])
def test_studies_on_a_gpu(
    tmp_path: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(features.SCALES, "cuda", features.SCALES["cpu"])
    monkeypatch.setitem(scores._SIZES, "cuda", ((1, 2, 256, 64),))
    path = tmp_path / "bench.json"
    command = ["bench", "--quick", "--device", "cuda", "--json", str(path), "--shape", *arguments]
    assert main(command) == 0
    document = json.loads(path.read_text())
    assert document["ceiling"]["mma_sync_tflops"] > 1
    assert all(result["seconds"] for result in document["results"] if result["ours"])
