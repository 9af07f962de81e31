"""The benchmark: right before fast, taking turns, what it writes down. No test looks at a time."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quick_bench import run_bench, run_to_json

import dlattn
from dlattn.bench import correctness, environment, figures, peers, plot, report, session
from dlattn.bench.cases import BASIC, Case, parse_shapes, sweep
from dlattn.cli import main
from dlattn.console.errors import CommandError
from dlattn.console.writing import check_distinct

Captured = pytest.CaptureFixture[str]

pytestmark = pytest.mark.usefixtures("instant")


# Cases


def test_shapes() -> None:
    assert parse_shapes("basic", "cpu") == BASIC
    assert parse_shapes("2,4,100,32", "cpu") == ((2, 4, 100, 32),)
    for batch_size, num_heads, seqlen, head_dim in sweep("cuda"):
        assert batch_size * seqlen == 16384
        assert num_heads * head_dim == 2048


WRONG = ("1,2,3", "1,2,3,4,5", "1,2,x,4", "0,2,3,4", "-1,2,3,4", "big", "1,2,3,\u00b2")
TOO_LARGE = ("99999999,999999,99999,9999", "1,1,1," + "9" * 5000)


@pytest.mark.parametrize("text", [*WRONG, *TOO_LARGE], ids=lambda text: text[:20])
def test_wrong_shapes(text: str) -> None:
    accepted = "basic, sweep, small, features, scores, eight_bit, decode, backward, or B,H,S,D"
    with pytest.raises(CommandError, match=f"accepted: {accepted}"):
        parse_shapes(text, "cpu")


def test_operations_are_counted_as_the_field_does() -> None:
    assert Case(BASIC[0], False, "float16").flops == 4 * 8 * 512 * 512 * 64
    assert Case(BASIC[0], True, "float16").flops == 2 * 8 * 512 * 512 * 64


# A whole run


def test_run(tmp_path: Path, capsys: Captured) -> None:
    document = run_to_json(tmp_path, "--shape", "1,2,33,16")
    printed = capsys.readouterr().out
    assert "(1,2,33,16)  full    float32  dlattn cpu" in printed
    assert "(1,2,33,16)  causal  float32  numpy" in printed
    assert "GFLOP/s" in printed and "host time of a call" in printed

    assert document["schema"] == 1 and document["complete"]
    assert document["versions"]["numpy"] == np.__version__
    assert document["versions"]["dlattn"] == dlattn.__version__
    assert document["protocol"]["threads"] == dlattn.info().cpu_threads
    assert document["protocol"]["rounds"] == 2
    assert document["ceiling"]["tflops"] > 0
    assert set(document["machine"]) >= {"cpu", "cores", "load_average"}
    assert document["host_seconds"]["dlattn cpu"] > 0
    results = {(r["contestant"], r["causal"]): r for r in document["results"]}
    for causal in (False, True):
        ours, numpy = results["dlattn cpu", causal], results["numpy", causal]
        for result in (ours, numpy):
            assert result["max_error"] > 0
            assert 0 < result["bound_ratio"] <= 1
            assert len(result["window_seconds"]) == 2
            assert result["seconds"] > 0
        assert (ours["ours"], numpy["ours"]) == (True, False)
        flops = (2 if causal else 4) * 2 * 33 * 33 * 16
        assert ours["tflops"] == pytest.approx(flops / ours["seconds"] / 1e12)


def test_cut_off_keeps_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = session.Session.time
    cases: list[Case] = []

    def interrupted(self: session.Session, entrants: Any) -> list[report.Result]:
        if cases:
            raise KeyboardInterrupt
        results = measure(self, entrants)
        cases.extend(result.case for result in results)
        return results

    monkeypatch.setattr(session.Session, "time", interrupted)
    path = tmp_path / "bench.json"
    assert run_bench("--json", path, "--shape", "1,1,16,8") == 130
    document = json.loads(path.read_text())
    assert not document["complete"]
    assert [result.case for result in report.from_json(document)] == cases


def test_choices(tmp_path: Path) -> None:
    arguments = ["--shape", "1,1,16,8", "--causal", "--dtype", "float16", "--peers", "numpy"]
    document = run_to_json(tmp_path, *arguments)
    assert [r["contestant"] for r in document["results"]] == ["dlattn cpu", "numpy"]
    assert all(r["causal"] and r["dtype"] == "float16" for r in document["results"])
    document = run_to_json(tmp_path, "--shape", "1,1,16,8", "--full", "--peers")
    assert [r["contestant"] for r in document["results"]] == ["dlattn cpu"]
    assert not document["results"][0]["causal"]


def test_torch_takes_part_with_as_many_threads(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    for dtype in ("float32", "bfloat16"):
        if dtype == "bfloat16":
            pytest.importorskip("ml_dtypes")
        document = run_to_json(tmp_path, "--shape", "1,2,24,16", "--dtype", dtype)
        result = next(r for r in document["results"] if r["contestant"] == "torch")
        assert result["seconds"] > 0, result["note"]
        assert result["bound_ratio"] < 4
    assert torch.get_num_threads() == dlattn.info().cpu_threads


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--peers", "jax"], "--peers jax; accepted here: torch, numpy"),
        (["--kernels", "wmma_smem"], "--kernels wmma_smem; accepted here: auto, cpu"),
        (["--kernels", "--peers"], "leave nobody to time"),
        (["--shape", "huge"], "--shape is 'huge'"),
        (["--json", "no/such/folder/f.json"], "no such folder"),
        (["--plot", "no/such/folder/f.png"], "no such folder"),
        (["--causal", "--full"], "not allowed with argument"),
    ],
)
def test_wrong_use(arguments: list[str], message: str, capsys: Captured) -> None:
    try:
        assert run_bench(*arguments) == 2
    except SystemExit as exit_:  # from argparse
        assert exit_.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["same", "relative", "symlink", "folder", "hardlink"])
def test_two_outputs_in_one_file(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("dlattn.bench._session", lambda *_: pytest.fail("measured in vain"))
    one, other = tmp_path / "one.png", tmp_path / "other.png"
    if kind == "same":
        other = one
    elif kind == "relative":
        other = Path("../") / tmp_path.name / "one.png"
    elif kind == "symlink":
        other.symlink_to("one.png")
    elif kind == "folder":
        (tmp_path / "folder").symlink_to(tmp_path)
        other = tmp_path / "folder" / "one.png"
    else:
        one.write_bytes(b"precious")
        other.hardlink_to(one)
    assert run_bench("--json", one, "--plot", other) == 2
    assert f"--plot {other}: --json goes there too; give it another name" in capsys.readouterr().err
    assert not one.exists() or one.read_bytes() == b"precious"


def test_outputs_that_nobody_wants(tmp_path: Path) -> None:
    null = tmp_path / "null.png"
    null.symlink_to("/dev/null")
    check_distinct({"--json": Path("/dev/null"), "--plot": null, "--third": None})
    with pytest.raises(CommandError, match=r"--third .*: --json goes there too"):
        check_distinct({"--json": tmp_path / "a", "--plot": null, "--third": tmp_path / "a"})


@pytest.mark.parametrize("name", ["plot", "plot.xyz", ".png"])
def test_plot_of_no_known_kind(tmp_path: Path, capsys: Captured, name: str) -> None:
    """Refused before anything is measured; matplotlib would give `plot` a suffix of its own."""
    pytest.importorskip("matplotlib")
    assert run_bench("--shape", "1,1,16,8", "--plot", tmp_path / name) == 2
    assert f"{name}: accepted: a name that ends in .png, .svg or .pdf" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_plot_that_fails_leaves_the_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure
    path = tmp_path / "plot.png"
    path.write_bytes(b"precious")

    def fails(self: Any, file: Any, **_: Any) -> None:
        file.write(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(figure, "savefig", fails)
    with pytest.raises(CommandError, match=r"plot\.png: cannot be written: No space left"):
        plot.draw(example(), path)
    assert path.read_bytes() == b"precious"
    assert [found.name for found in tmp_path.iterdir()] == ["plot.png"]


def test_a_gpu_that_is_not_there(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "gpu_status", lambda: "none was found")
    assert main(["bench", "--device", "cuda"]) == 2
    assert "--device cuda: none was found" in capsys.readouterr().err


@pytest.mark.gpu
def test_run_on_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    path = tmp_path / "bench.json"
    arguments = ["bench", "--quick", "--device", "cuda", "--shape", "1,2,128,64"]
    assert main([*arguments, "--json", str(path)]) == 0
    document = json.loads(path.read_text())
    assert document["machine"]["gpu"] and "driver" in document["machine"]
    results = {(r["contestant"], r["causal"]): r for r in document["results"]}
    for kernel in peers.GPU_KERNELS:
        if kernel == "sm90" and results["dlattn sm90", False]["seconds"] is None:
            assert "sm90: needs " in results["dlattn sm90", False]["note"]  # not for this GPU
            continue
        if kernel in ("sm90_latent", "sm90_fp8", "wmma8"):  # of other tensors
            assert results[f"dlattn {kernel}", False]["seconds"] is None
            continue
        for causal in (False, True):
            result = results[f"dlattn {kernel}", causal]
            assert result["bound_ratio"] <= 1
            assert result["note"] == ""  # captured in a graph
            assert result["seconds"] > 0
        assert document["host_seconds"][f"dlattn {kernel}"] > 0
    assert results["torch-math", False]["seconds"] > 0


# Right before fast


def wrong_by(change: Callable[[Any], Any]) -> Callable[..., Any]:
    attention = dlattn.attention
    return lambda *args, **options: change(attention(*args, **options))


@pytest.mark.parametrize("change", [lambda out: out * 1.01, lambda out: out * np.nan])
def test_a_wrong_kernel_is_not_timed(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch, change: Any
) -> None:
    monkeypatch.setattr(dlattn, "attention", wrong_by(change))
    path = tmp_path / "bench.json"
    assert run_bench("--shape", "1,1,16,8", "--peers", "numpy", "--json", path) == 1
    assert "WRONG" in capsys.readouterr().out
    document = json.loads(path.read_text(), parse_constant=pytest.fail)
    ours = document["results"][0]
    assert (ours["contestant"], ours["wrong"], ours["seconds"]) == ("dlattn cpu", True, None)
    assert document["results"][1]["seconds"] > 0
    assert report.from_json(document)[0].wrong


def test_a_kernel_that_raises_is_an_error(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **options: Any) -> Any:
        raise dlattn.DeviceError("the device is on fire\nand more")

    monkeypatch.setattr(dlattn, "attention", fail)
    assert run_bench("--shape", "1,1,16,8", "--peers", "numpy") == 1
    assert "WRONG the device is on fire\n" in capsys.readouterr().out


def test_a_missing_peer_is_named(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it now raises ImportError
    assert run_bench("--shape", "1,1,16,8", "--full") == 0
    assert "torch is not installed" in capsys.readouterr().out


def test_large_problems_are_checked_on_rows_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    for causal in (False, True):
        case = Case((2, 3, 40, 8), causal, "float32")
        inputs = correctness.draw(case)
        (whole,) = correctness.expect(case, *inputs)
        monkeypatch.setattr(correctness, "_ALL_SCORES", 100)
        monkeypatch.setattr(correctness, "_SAMPLE_ROWS", 6)
        samples = correctness.expect(case, *inputs)
        monkeypatch.undo()
        assert len(samples) == 4
        for sample in samples:
            assert sample.out.shape == (1, 1, 6, 8)
            np.testing.assert_allclose(sample.out, whole.out[sample.where], rtol=1e-12)
        assert correctness.measure(whole.out, samples)[1] < 1e-3
        broken = whole.out.copy()
        broken[1, 2, 39, 0] += 1e-3
        assert correctness.measure(broken, samples)[1] > 1


def test_inputs_are_not_zero_nor_centred() -> None:
    q, k, v = correctness.draw(Case((1, 8, 256, 64), False, "float16"))
    for x in (q, k, v):
        assert x.dtype == np.float16
        assert abs(float(x.astype("f8").mean()) - 0.25) < 0.02
    assert not np.array_equal(q, k)


# The written files


def example(name: str = "AMD", *, gpu: bool = False, lengths: tuple[int, ...] = (512,)) -> Any:
    """A document as `report.to_json` makes it."""
    results = []
    for seqlen in lengths:
        for causal in (False, True):
            case = Case((1, 8, seqlen, 64), causal, "float16")
            results += [
                report.Result(case, "dlattn scalar", True, 1e-3, 0.5, [2e-5, 3e-5, 4e-5]),
                report.Result(case, "dlattn wmma_smem", True, 1e-3, 0.5, [2e-5]),
                report.Result(case, "torch-flash", False, 1e-3, 0.5, [1e-5]),
                report.Result(case, "torch-wrong", False, 1.0, 9.0, [1e-6]),
                report.Result(case, "cupy", False, note="CuPy is not installed"),
            ]
    machine = {"cpu": name} | ({"gpu": "NVIDIA X", "driver": "580.1"} if gpu else {})
    return report.to_json(
        {
            "date": "2026-01-02T03:04:05+00:00",
            "git": {"sha": "0123456789abcdef", "dirty": False},
            "machine": machine,
            "versions": {"dlattn": "0.1.0", "torch": "2.11"},
        },
        {"method": "a graph", "device": "cuda", "threads": None if gpu else 2, "rounds": 3},
        {"matmul": "torch float16 8192^3", "tflops": 700.0, "copy_gb_per_s": 4000.0},
        results,
        {"dlattn scalar": 5e-6, "torch-flash": 2.5e-5, "cupy": None},
    )


def test_results_survive_json() -> None:
    document = json.loads(json.dumps(example()))
    results = report.from_json(document)
    assert results[0].seconds == 3e-5  # the median window
    again = report.to_json(
        {key: document[key] for key in ("date", "git", "machine", "versions")},
        document["protocol"],
        document["ceiling"],
        [*results[:3], *results[4:5], *results[5:8], *results[9:]],
        document["host_seconds"],
    )
    assert again["results"] == [r for r in document["results"] if not r["wrong"]]
    with pytest.raises(ValueError, match="schema is 7; accepted: 1"):
        report.from_json({"schema": 7})


def test_table_compares_with_the_fastest_right_peer() -> None:
    document = example()
    lines = report.print_results(report.from_json(document), document["ceiling"]).splitlines()
    ours = next(line for line in lines if "dlattn wmma_smem" in line and " full " in line)
    # 20 us against 10 us; the faster peer is wrong and does not count. 4 * 8 * 512^2 * 64 / 20 us.
    assert "20.0 us  26.8 TFLOP/s          0.50        3.8" in ours
    assert "CuPy is not installed" in next(line for line in lines if "cupy" in line)


def test_figures(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / "a.json").write_text(json.dumps(example(gpu=True)))
    (folder / "b.json").write_text(json.dumps(example("EPYC")))
    for name in ("a.png", "a-2.png", "a-4.png"):  # the last one is nobody's
        (folder / name).write_bytes(b"")
    text = figures.figures_markdown(sorted(folder.glob("*.json")), tmp_path)
    assert "**NVIDIA X** ([a.json](results/a.json))" in text
    assert "![NVIDIA X](results/a.png)\n\n![NVIDIA X](results/a-2.png)\n\n" in text
    assert "a-4.png" not in text
    assert "**EPYC, 2 threads** ([b.json](results/b.json))" in text
    assert "results/b.png" not in text
    assert (
        "| (1,8,512,64) | full | float16 | 30.0 us | 20.0 us | 10.0 us | 1.00 us | 0.50 |" in text
    )
    assert "Host time of an eager call: dlattn scalar 5.00 us, torch-flash 25.0 us." in text
    assert "2026-01-02, commit 0123456789ab, driver 580.1, dlattn 0.1.0, torch 2.11." in text
    assert "700 TFLOP/s (torch float16 8192^3)" in text
    assert "<details>" not in text
    assert figures.figures_markdown([], tmp_path) == "No results are committed yet."


def test_long_tables_are_folded(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(example(gpu=True, lengths=tuple(range(100, 800, 100)))))
    text = figures.figures_markdown([path], tmp_path)
    assert "<details><summary>All 14 rows</summary>\n\n| (B,H,S,D) |" in text
    # 10 us against 20.
    assert "- dlattn wmma_smem is 0.500 times as fast as torch-flash (geometric mean of 14" in text


@pytest.mark.parametrize("lengths", [(512,), (128, 256, 512, 1024)], ids=["bars", "lines"])
@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_plot(tmp_path: Path, lengths: tuple[int, ...], suffix: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"plot{suffix}"
    document = example(gpu=True, lengths=lengths)
    document["ceiling"]["mma_sync_tflops"] = 640.0
    plot.draw(document, path)
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG" if suffix == ".png" else b"<?xml")
    assert len(content) > 10_000


def test_plot_of_nothing(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    document = example()
    document["results"] = [r for r in document["results"] if r["seconds"] is None]
    with pytest.raises(CommandError, match="nothing was timed"):
        plot.draw(document, tmp_path / "plot.png")
    with pytest.raises(CommandError, match=r"--plot .*plot\.xyz"):
        plot.draw(example(), tmp_path / "plot.xyz")


def test_plot_without_matplotlib(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run_bench("--shape", "1,1,16,8", "--plot", "plot.png") == 2
    assert "--plot needs matplotlib: pip install" in capsys.readouterr().err


def test_commit_is_recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert environment.describe("cpu", "abc")["git"] == {"sha": "abc", "dirty": None}
    monkeypatch.chdir(tmp_path.anchor)  # no checkout of this project
    assert environment.describe("cpu", None)["git"] == {"sha": None, "dirty": None}

    monkeypatch.chdir(tmp_path)
    (tmp_path / "src" / "include" / "dlattn").mkdir(parents=True)
    (tmp_path / "src" / "include" / "dlattn" / "version.h").touch()
    answers = {
        "rev-parse --show-toplevel": str(tmp_path),
        "rev-parse HEAD": "f00",
        "status": " M x",
    }

    def git(*command: str) -> str:
        return next(text for start, text in answers.items() if start in " ".join(command))

    monkeypatch.setattr(environment, "_output", git)
    assert environment.describe("cpu", None)["git"] == {"sha": "f00", "dirty": True}


def test_infinite_errors_are_null_in_json() -> None:
    result = report.Result(Case((1, 1, 8, 8), False, "float32"), "x", True, math.inf, math.inf)
    document = report.to_json({}, {}, {}, [result], {})
    assert document["results"][0]["max_error"] is None
    assert document["results"][0]["wrong"] is True
