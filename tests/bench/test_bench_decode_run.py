"""The benchmark's decode set: whole runs, what is refused, what is told of a run."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from quick_bench import run_bench, run_to_json

import dlattn
from dlattn.bench import decode, figures, plot, report
from dlattn.bench.cases import Case
from dlattn.bench.decode import cases
from dlattn.bench.decode import report as decode_report
from dlattn.bench.decode.cases import COLD, SCALES, WARM, DecodeCase
from dlattn.cli import main

torch = pytest.importorskip("torch")

Captured = pytest.CaptureFixture[str]

pytestmark = pytest.mark.usefixtures("instant")

L2 = 50_000_000  # bytes, as an H200's


def all_of(device: str) -> list[DecodeCase]:
    return [case for group in cases.turn_groups(SCALES[device]) for case in group]


# A whole run


def test_run(tmp_path: Path, capsys: Captured) -> None:
    document = run_to_json(tmp_path, "--shape", "decode")
    printed = capsys.readouterr().out
    results = {(r["contestant"], r["variant"], *r["shape"]): r for r in document["results"]}
    assert len(results) == len(document["results"])
    assert document["schema"] == 1 and document["complete"]
    for result in document["results"]:
        assert not result["wrong"] and result["causal"]
        if "cache" in result["variant"] and not result["seconds"]:
            assert result["note"].startswith("refused: ")  # a build may have no 8-bit caches
            continue
        assert result["seconds"] > 0, result
        assert 0 < result["bound_ratio"] <= 1
    contiguous = results["dlattn auto", f"contiguous: 1 query, {COLD}", 1, 4, 96, 16]
    assert contiguous["operations"] == 4 * 4 * 16 * 96
    assert contiguous["facts"] == {"bytes": 2 * 96 * 2 * 16 * 4, "buffers": 8}
    assert contiguous["plan"] == "cpu" and contiguous["num_heads_kv"] == 2
    for temperature in (COLD, WARM):
        paged = results["dlattn auto", f"pages: page 1, {temperature}", 2, 4, 64, 16]
        base = results["dlattn auto", f"pages: lengths on the device, {temperature}", 2, 4, 64, 16]
        assert paged["baseline"] == f"dlattn auto, {base['variant']}"
        assert paged["vs_baseline"] == pytest.approx(base["seconds"] / paged["seconds"])
    assert ("torch", f"drafts: 8 queries, {WARM}", 2, 4, 64, 16) in results
    assert ("torch", f"mixes: 2x32+2x100, page 16, {WARM}", 4, 4, 100, 16) not in results

    found = document["decode"]
    assert (found["rotated"], found["left_out"], found["reference_tb_per_s"]) == (3, {}, None)
    rows = {(e["group"], e["what"], e["case"], e["contestant"]): e for e in found["cases"]}
    row = rows["contiguous", "1 query", "(1,4/2,96,16)", "dlattn auto"]
    assert row[COLD]["seconds"] == contiguous["seconds"]
    assert row[COLD]["tb_per_s"] == pytest.approx(row["bytes"] / contiguous["seconds"] / 1e12)
    theirs = results["torch", f"contiguous: 1 query, {COLD}", 1, 4, 96, 16]["seconds"]
    assert row[COLD]["vs_best_peer"] == pytest.approx(theirs / contiguous["seconds"])
    assert row[WARM]["over_reference"] is None
    assert set(document["host_seconds"]) == {
        "dlattn auto",
        "torch",
        "dlattn auto, lengths on the device",
        "torch, lengths on the device",
        "dlattn auto, page 16",
    }
    assert all(document["host_seconds"].values())
    assert "copies of K and V in turn" in document["protocol"]["method"]
    assert "copies of K and V in turn" in printed and "vs best peer" in printed
    assert "Azure 2023 conversation, batch of 4, page 16" in printed
    again = report.from_json(document)
    assert report.to_json({}, {}, {}, again, {})["results"] == document["results"]
    assert decode_report.summary(again, document["machine"])["cases"] == found["cases"]

    page = figures.figures_markdown([tmp_path / "bench.json"], tmp_path)
    assert "| group | (B,H,S,D) | what | contestant |" in page
    assert "| pages | (2,4/2,64,16) | page 1 | dlattn auto (cpu) | 0.0328 MB |" in page
    pytest.importorskip("matplotlib")
    plot.draw(document, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_a_part_of_it(tmp_path: Path, capsys: Captured) -> None:
    document = run_to_json(tmp_path, "--shape", "decode", "--only", "pages", "skewed", "--peers")
    assert {entry["group"] for entry in document["decode"]["cases"]} == {"pages", "skewed"}
    assert {r["contestant"] for r in document["results"]} == {"dlattn auto"}
    capsys.readouterr()
    for arguments, message in (
        (["--only", "page"], "--only page; accepted here: contiguous, drafts, pages, eight_bit, s"),
        (["--full"], "--head-dim, --only and masks leave nothing of decode"),
        (["--peers", "fa4"], "--peers fa4; accepted here: torch"),
    ):
        assert run_bench("--shape", "decode", *arguments) == 2
        assert message in capsys.readouterr().err


def test_a_gpu_that_is_not_there(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlattn.bench.session.gpu_status", lambda: "none was found")
    assert main(["bench", "--device", "cuda", "--shape", "decode"]) == 2
    assert "--device cuda: none was found" in capsys.readouterr().err


def test_torch_that_is_not_there(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert run_bench("--shape", "decode") == 2
    assert "--shape decode needs torch, which holds its tensors" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["attention", "attention_with_kvcache"])
def test_wrong_results_fail_the_run(
    name: str, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = getattr(dlattn, name)

    def wrong(*args: Any, **options: Any) -> Any:
        return function(*args, **options).mul_(1.01)

    monkeypatch.setattr(dlattn, name, wrong)
    path = tmp_path / "bench.json"
    only = ("--only", "contiguous", "pages", "--peers")
    assert run_bench("--shape", "decode", "--json", path, *only) == 1
    assert "WRONG" in capsys.readouterr().out
    document = json.loads(path.read_text())
    for entry in document["decode"]["cases"]:
        hit = (entry["group"] == "contiguous") is (name == "attention")
        assert (entry[COLD]["seconds"] is None) is hit
        assert (entry[WARM]["tb_per_s"] is None) is hit


# 8-bit caches


def wide(function: Any) -> Any:
    """A function that takes 8-bit caches with scales, made of one that does not."""

    def called(q: Any, k: Any, v: Any, **options: Any) -> Any:
        scales = [options.pop(name, None) for name in ("k_descale", "v_descale")]
        if scales[0] is not None:
            assert all(s.shape == (2,) and s.dtype == torch.float32 for s in scales)
            k, v = ((x.float() * s[:, None]).to(q.dtype) for x, s in zip((k, v), scales))  # noqa: B905
        return function(q, k, v, **options)

    return called


def test_eight_bit_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("attention_with_kvcache", "supported", "plan"):
        monkeypatch.setattr(dlattn, name, wide(getattr(dlattn, name)))
    document = run_to_json(tmp_path, "--shape", "decode", "--only", "eight_bit", "--peers")
    found = {e["what"]: e for e in document["decode"]["cases"]}
    base = found.pop("lengths on the device")
    assert len(found) == 2
    for entry in found.values():
        assert entry["bytes"] == base["bytes"] / 4
        assert entry[COLD]["seconds"] > 0 and entry[WARM]["seconds"] > 0
    for result in document["results"]:
        cached = "cache" in result["variant"]
        assert result["dtype"] == "float32" and not result["wrong"]
        assert result["baseline"].startswith("dlattn auto, eight_bit: lengths") is cached


@pytest.mark.parametrize("known", [False, True], ids=["arguments", "dtype"])
def test_what_a_build_refuses_is_noted(
    known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def supported(*args: Any, **options: Any) -> Any:
        if "k_descale" not in options:
            return dlattn.Support(True, ())
        if not known:
            raise TypeError("supported() got an unexpected keyword argument 'k_descale'\nand more")
        return dlattn.Support(False, ("k has 8 bits", "q has 16"))

    monkeypatch.setattr(dlattn, "supported", supported)
    document = run_to_json(tmp_path, "--shape", "decode", "--only", "eight_bit", "--peers")
    notes = {r["note"] for r in document["results"] if "cache" in r["variant"]}
    why = "k has 8 bits; q has 16" if known else "supported() got an unexpected keyword argument"
    assert len(notes) == 1 and notes.pop().startswith(f"refused: {why}")


# The printed report


def example(gpu: str = "NVIDIA H200", only: str = "") -> dict[str, Any]:
    """A document as a GPU gives it: ours reads 4 TB/s, cuDNN 4.2 cold, FlashAttention-2 3."""
    results = []
    for case in all_of("cuda"):
        if only and case.group != only:
            continue
        size = case.cache_bytes("bfloat16")
        for temperature in (COLD, WARM):
            for name, rate in (("dlattn auto", 4.0), ("torch-cudnn", 4.2), ("torch-flash", 3.0)):
                ours = name.startswith("dlattn")
                if case.page_size and not ours:
                    continue
                seconds = size / rate / 1e12 / (1.1 if temperature == WARM else 1)
                result = report.Result(
                    case.as_case("bfloat16", temperature), name, ours, 1e-3, 0.2, [seconds]
                )
                result.operations, result.facts = case.operations, {"bytes": float(size)}
                results.append(result)
    about = {
        "date": "2026-01-02T03:04:05+00:00",
        "git": {"sha": "0123456789abcdef", "dirty": False},
        "machine": {"gpu": gpu},
        "versions": {"dlattn": "0.1.0", "torch": "2.11"},
    }
    protocol = {"threads": None, **decode.protocol("cuda")}
    ceiling = {"matmul": "a product", "tflops": 700.0, "copy_gb_per_s": 4000.0}
    document = report.to_json(about, protocol, ceiling, results, {"dlattn auto": 3e-6})
    document["decode"] = {
        "l2_bytes": L2,
        "rotated": 3,
        "left_out": {"flashinfer": "flashinfer is not installed: no module"},
        **decode_report.summary(results, about["machine"]),
    }
    return json.loads(json.dumps(document, allow_nan=False))


@pytest.mark.parametrize(
    ("gpu", "reference"),
    [("NVIDIA H200", 4.42), ("NVIDIA H200 NVL", 4.42), ("NVIDIA GH200 480GB", None), ("L4", None)],
)
def test_the_reference_bandwidth_is_an_h200s(gpu: str, reference: float | None) -> None:
    document = example(gpu, "skewed")
    (entry,) = document["decode"]["cases"]
    assert document["decode"]["reference_tb_per_s"] == reference
    text = decode_report.text(document, report.from_json(document))
    assert ("cold over 4.42 TB/s" in text) is (reference is not None)
    if reference is not None:
        assert entry[COLD]["over_reference"] == pytest.approx(4.42 / 4.0)
        assert entry[WARM]["over_reference"] == pytest.approx(4.42 / 4.4)
        assert " 4.000 " in text and " 1.10 " in text and " 1.06 GB " in text
    else:
        assert entry[COLD]["over_reference"] is None


def test_the_table() -> None:
    document = example()
    results = report.from_json(document)
    lines = decode_report.text(document, results).splitlines()
    row = next(line for line in lines if "(1,32/8,8192,128)" in line and "dlattn" in line)
    assert row.split()[5:] == [
        "auto", "33.6", "MB", "8.39", "us", "4.000", "0.95", "7.63", "us", "4.400", "0.95",
        "1.10", "-", "0.20",
    ]  # fmt: skip
    assert "Left out: flashinfer: flashinfer is not installed: no module." in lines
    assert any("3 times the L2 cache of 50 MB" in line for line in lines)


def test_wrong_peers_are_no_measure() -> None:
    document = example(only="drafts")
    results = report.from_json(document)
    for result in results:
        if result.contestant == "torch-cudnn":
            result.bound_ratio, result.note = 2.0, "mask as a bias"
    ours, cudnn, flash = decode_report.rows(results)
    assert (cudnn.wrong, flash.wrong) == (True, False)
    ratio = decode_report.vs_best_peer(ours, [ours, cudnn, flash], COLD)
    assert ratio == pytest.approx(4.0 / 3.0)
    _, lines = decode_report.times(results, document["machine"])
    assert [line[-1] for line in lines] == ["", "beyond the bound; mask as a bias", ""]


def load_generator() -> Any:
    path = Path(__file__).resolve().parents[2] / "benchmarks" / "update_readme.py"
    spec = importlib.util.spec_from_file_location("update_readme", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_readme_has_decoding_once_it_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = load_generator()
    monkeypatch.setattr(generator, "ROOT", tmp_path)
    monkeypatch.setattr(generator, "sweep_markdown", lambda paths, root: f"sweep {paths[0].name}")
    (tmp_path / "h200-sweep.json").touch()
    assert generator.figures(tmp_path) == "sweep h200-sweep.json"
    (tmp_path / "h200-decode.json").write_text(json.dumps(example()))
    text = generator.figures(tmp_path)
    assert text.startswith("sweep h200-sweep.json\n\nDecoding, one query of each sequence: ")
    assert "NVIDIA H200, bfloat16, microseconds a call" in text
    assert "([h200-decode.json](h200-decode.json))" in text
    assert "| (B,H,keys,D) | dlattn | cuDNN | FlashAttention-2 |" in text
    assert "| (1,32/8,8192,128) | 8.4 | 8.0 | 11.2 |" in text
    assert text.count("\n| (") == 6

    (tmp_path / "h200-decode.json").write_text(json.dumps(example(only="contiguous")))
    assert generator.figures(tmp_path) == text
    (tmp_path / "h200-decode.json").write_text(json.dumps(example(only="mixes")))
    assert "| (1,32/8,8192,128) | - | - | - |" in generator.figures(tmp_path)

    document = example()
    for entry in document["results"]:
        entry["contestant"] = entry["contestant"].replace("torch-flash", "fa3")
    (tmp_path / "h200-decode.json").write_text(json.dumps(document))
    text = generator.figures(tmp_path)
    assert "| dlattn | cuDNN | FlashAttention-2 | FlashAttention-3 |" in text
    assert "| (1,32/8,8192,128) | 8.4 | 8.0 | - | 11.2 |" in text


def test_plot(tmp_path: Path) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    drawn = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pyplot, "close", drawn.append)
        files = plot.draw(example(), tmp_path / "plot.png")
    assert [file.name for file in files] == [
        "plot.png",
        *(f"plot-{i}.png" for i in range(2, len(drawn) + 1)),
    ]
    axes = [axis for figure in drawn for axis in figure.axes]
    assert [axis.get_title(loc="left") for axis in axes] == list(
        dict.fromkeys(case.group for case in all_of("cuda"))
    )
    assert len({axis.get_xlim() for axis in axes}) == 1  # figures can be compared
    for figure in drawn:
        assert figure.get_size_inches()[1] < 10
    contiguous = axes[0]
    widths = [bar.get_width() for bar in contiguous.patches]
    assert len(widths) == 30 and widths[:3] == pytest.approx([4.0, 4.2, 3.0])
    texts = [text.get_text().strip() for text in contiguous.texts]
    assert texts[3] == "8.39 us"
    assert [line.get_xdata()[0] for line in contiguous.lines] == [4.42]
    for figure in drawn:
        assert figure.texts[0].get_text() == "Decoding, bfloat16: NVIDIA H200"
        pyplot.close(figure)
    one = tmp_path / "one.svg"
    assert plot.draw(example("L4", "traces"), one) == [one]
    assert one.stat().st_size > 5_000


def test_a_study_of_other_results_is_not_read_as_decoding() -> None:
    result = report.Result(Case((1, 1, 8, 8), True, "float32", variant="plain"), "x", True)
    with pytest.raises(ValueError, match="variant is 'plain'"):
        decode_report.rows([result])


@pytest.mark.gpu
def test_run_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU")
    small = replace(
        SCALES["cuda"],
        contiguous=((1, 32, 8, 1024, 128), (1, 8, 8, 512, 64)),
        pages=(2, 32, 8, 512, 128),
        eight_bit=(2, 32, 8, 512, 128),
        drafts=((2, 32, 8, 512, 128),),
        skewed="3x512+1x4k",
        mixes=("2x128+2x1k",),
        batches=(1, 8),
        longest=4096,
        latents=((2, 16, 512, 1),),
    )
    monkeypatch.setitem(SCALES, "cuda", small)
    path = tmp_path / "bench.json"
    command = ["bench", "--quick", "--device", "cuda", "--json", str(path), "--shape", "decode"]
    assert main(command) == 0
    document = json.loads(path.read_text())
    for result in document["results"]:
        if result["ours"] and "cache" not in result["variant"]:
            assert result["seconds"] > 0, result
            assert result["note"] == ""  # captured in a graph
        assert result["seconds"] or result["note"]
        assert not (result["ours"] and result["wrong"]), result
    by_name = {
        entry["contestant"] for entry in document["decode"]["cases"] if entry[COLD]["seconds"]
    }
    assert {"dlattn auto", "torch-cudnn", "torch-flash", "torch-flash varlen"} <= by_name


def test_the_gpu_runs_method_is_told() -> None:
    told = decode.protocol("cuda")
    assert "graph of at least 24 calls" in told["method"] and "3 times the L2" in told["method"]
    assert told["host_shape"] == [1, 32, 1024, 128]
    assert decode.protocol("cpu")["method"].startswith("wall time")
