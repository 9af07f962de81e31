"""A release's figures: measured in parts, drawn and shown with cards side by side."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import dlattn
from dlattn.bench import cases, figures, parts, record, report, sets
from dlattn.bench.cases import BACKWARD, BOTH, Case
from dlattn.cli import main
from dlattn.console.errors import CommandError

Captured = pytest.CaptureFixture[str]

pytestmark = pytest.mark.usefixtures("instant")

ROOT = Path(__file__).resolve().parents[2]


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The program, with small sets, whose runs of the benchmark are made in this process."""
    module = load("release")
    monkeypatch.setattr(cases, "small", lambda _: tuple((1, 1, n, 8) for n in (8, 16, 24)))
    monkeypatch.setattr(cases, "BASIC", ((1, 1, 8, 8),))

    def run(command: list[str]) -> Any:
        assert command[:4] == [sys.executable, "-m", "dlattn", "bench"]
        more = ["--device", "cpu", "--peers", "numpy"]
        return SimpleNamespace(returncode=main([*command[3:], *more]))

    monkeypatch.setattr(module, "subprocess", SimpleNamespace(run=run))
    small = module.Set("small", "1/2"), module.Set("small", "2/2")
    of_parts = {1: small[:1], 2: small[1:], 3: (module.Set("basic"),)}
    monkeypatch.setattr(module, "PARTS", of_parts)
    monkeypatch.setattr(dlattn, "info", lambda info=dlattn.info: info_of_a_cpu(info()))
    return module


def info_of_a_cpu(info: Any) -> Any:
    return SimpleNamespace(devices=(), cpu_threads=info.cpu_threads, gpu=None)


def run(release: Any, monkeypatch: pytest.MonkeyPatch, *arguments: Any) -> int:
    words = ["release.py", *map(str, arguments)]
    monkeypatch.setattr(sys, "argv", words)
    return int(release.main())


ABC = ("--quick", "--commit", "abc")


def test_parts_are_measured_and_put_together(
    tmp_path: Path, release: Any, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    for part in (2, 1):
        assert run(release, monkeypatch, tmp_path, "--part", part, *ABC) == 0
    assert run(release, monkeypatch, tmp_path, "--part", 3, *ABC) == 0
    found = sorted(path.name for path in tmp_path.iterdir())
    assert found == ["cpu-basic.1.json", "cpu-small.1.json", "cpu-small.2.json"]
    gathered = record.gathered(list(tmp_path.glob("*.json")))
    assert list(gathered) == ["cpu-basic", "cpu-small"]
    assert len(gathered["cpu-small"]["results"]) == 12
    assert all(record.is_whole(document) for document in gathered.values())

    page = figures.figures_markdown(list(tmp_path.glob("*.json")), tmp_path)
    assert page.count("([cpu-small.1.json](cpu-small.1.json), [cpu-small.2.json]") == 1
    assert "Not all of the set" not in page and page.count("| (1,1,24,8) |") == 2
    lone = figures.figures_markdown([tmp_path / "cpu-small.1.json"], tmp_path)
    assert "Not all of the set has been measured." in lone

    capsys.readouterr()
    assert run(release, monkeypatch, tmp_path, "--part", 1, 2, 3, *ABC) == 0
    assert capsys.readouterr().out.count("Nothing is left to measure.") == 3
    assert len(list(tmp_path.iterdir())) == 3


def test_a_part_that_was_cut_off_goes_on(
    tmp_path: Path, release: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    allows = iter([True, False])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts.Deadline, "allows", lambda self: next(allows))
        assert run(release, monkeypatch, tmp_path, "--part", 1, *ABC) == 0
    assert run(release, monkeypatch, tmp_path, "--part", 1, 2, *ABC) == 0
    sizes = [
        len(record.measured(json.loads(path.read_text()))) for path in sorted(tmp_path.iterdir())
    ]
    assert sizes == [1, 2, 3]
    assert record.is_whole(record.gathered(list(tmp_path.iterdir()))["cpu-small"])


def test_parts_of_another_commit_are_refused(
    tmp_path: Path, release: Any, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    assert run(release, monkeypatch, tmp_path, "--part", 1, *ABC) == 0
    before = sorted(tmp_path.iterdir())
    assert run(release, monkeypatch, tmp_path, "--part", 2, "--quick", "--commit", "def") == 1
    assert "are no parts of one run: commit is abc and def" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before
    document = json.loads(before[0].read_text())
    document["git"]["sha"] = "def"
    (tmp_path / "cpu-small.2.json").write_text(json.dumps(document))
    with pytest.raises(CommandError, match=r"cpu-small\.1\.json and cpu-small\.2\.json are no"):
        figures.figures_markdown(list(tmp_path.iterdir()), tmp_path)
    assert run(release, monkeypatch, tmp_path, "--plot") == 2


def test_no_set_begins_without_time(
    tmp_path: Path, release: Any, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    asked = (tmp_path, "--part", 1, 3, "--time-limit", 59, *ABC)
    assert run(release, monkeypatch, *asked) == 0
    assert "No time is left for small 1/2.\nNo time is left for basic 1/1." in (
        capsys.readouterr().out
    )
    assert not list(tmp_path.iterdir())


def test_the_command_of_a_set(tmp_path: Path, release: Any) -> None:
    options = SimpleNamespace(cudnn=tmp_path / "cudnn", commit="abc", quick=False)
    (tmp_path / "cpu-small.1.json").touch()
    (tmp_path / "cpu-smaller.json").touch()
    told = release.command(tmp_path, release.PARTS[2][0], 539.6, options)
    assert told[4:] == [
        *("--shape", "small", "--json", str(tmp_path / "cpu-small.2.json"), "--part", "2/2"),
        *("--time-limit", "540", "--continue", str(tmp_path / "cpu-small.1.json")),
        *("--cudnn", str(tmp_path / "cudnn"), "--commit", "abc"),
    ]


def test_the_list_has_every_set_whole(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    program = load("release")
    every = [x for of_part in program.PARTS.values() for x in of_part]
    assert {x.shape for x in every} == {*sets.STUDIES, *sets.PEERS, "basic"}
    for shape in {x.shape for x in every}:
        slices = [parts.parse_part(x.part) for x in every if x.shape == shape]
        assert sorted(p.number for p in slices) == list(range(1, slices[0].count + 1))
    assert run(program, monkeypatch, "--list") == 0
    assert "2: backward 1/2\n3: backward 2/2\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
    ],
)
def test_cards_in_names_of_files(name: str, short: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimpleNamespace(name=name)
    monkeypatch.setattr(dlattn, "info", lambda: SimpleNamespace(devices=(device,)))
    assert load("release").card() == short


def test_plots_of_parts(tmp_path: Path, release: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    assert run(release, monkeypatch, tmp_path, "--part", 1, 2, *ABC) == 0
    for number in (2, 3):  # of an earlier plot, which had more parts
        (tmp_path / f"cpu-small-{number}.png").touch()
    assert run(release, monkeypatch, tmp_path, "--plot") == 0
    assert (tmp_path / "cpu-small.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.glob("*.png")] == ["cpu-small.png"]


# README


def measured(gpu: str, speeds: dict[str, float], *kinds: str) -> Any:
    """A document with the sweep's lengths, or with gradients, of one head_dim."""
    results = []
    for passes in kinds or ("forward",):
        for seqlen in (1024, 4096, 16384):
            case = Case((16384 // seqlen, 16, seqlen, 128), True, "bfloat16", passes=passes)
            for contestant, tflops in speeds.items():
                seconds = case.flops / (tflops * 1e12)
                ours = contestant.startswith("dlattn")
                wrong = 9.0 if contestant == "torch-math" else 0.5
                results.append(report.Result(case, contestant, ours, 0.0, wrong, [seconds]))
    about = {
        "date": "2026-01-02T00:00:00",
        "git": {"sha": "0123456789abcdef", "dirty": False},
        "machine": {"cpu": "EPYC", "gpu": gpu},
        "versions": {"dlattn": "0.1.0", "torch": "2.11.0", "fa3": "0.0.3", "cudnn": 92801},
        "busy": [],
    }
    ceiling = {"matmul": "torch 8192^3", "tflops": 775.0, "copy_gb_per_s": 1.0}
    return report.to_json(about, {"method": "events", "threads": None}, ceiling, results, {})


H100 = {"dlattn auto": 400.0, "torch-flash": 300.0, "fa3": 390.0, "torch-math": 999.0}
H200 = {"dlattn auto": 600.0, "torch-cudnn": 610.0, "xformers": 620.0}


def test_cards_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = load("update_readme")
    monkeypatch.setattr(generator, "ROOT", tmp_path)
    for card, speeds in (("NVIDIA H100 80GB HBM3", H100), ("NVIDIA H200", H200)):
        name = figures.short_card({"machine": {"gpu": card}}).lower()
        path = tmp_path / f"{name}-sweep.1.json"
        path.write_text(json.dumps(measured(card, speeds)))
        path = tmp_path / f"{name}-backward.json"
        path.write_text(json.dumps(measured(card, speeds, BACKWARD, BOTH)))
    (tmp_path / "rtx-4090-sweep.json").write_text(json.dumps(measured("NVIDIA L4", H100)))
    (tmp_path / "h200-sweep.png").touch()
    text = generator.figures(tmp_path)
    assert text.startswith(
        "![NVIDIA H200: the sweep](h200-sweep.png)\n\nNVIDIA H100 80GB HBM3 with"
    )
    flat = " ".join(text.split())
    peers = "torch 2.11.0, FlashAttention-3 0.0.3, cuDNN 9.28.1"
    timed = "torch 2.11.0, cuDNN 9.28.1"  # FlashAttention-3 has no figures there
    assert f"NVIDIA H100 80GB HBM3 with {peers} ([h100-sweep.1.json](h100-sweep.1.json))" in flat
    assert f"; NVIDIA H200 with {timed} ([h200-sweep.1.json](h200-sweep.1.json)), bfloat16" in flat
    tokens = "1024 tokens, {0} | 4096 tokens, {0} | 16384 tokens, {0}"
    assert f"| head_dim | mask | {tokens.format('H100')} | {tokens.format('H200')} |" in text
    of_h100, of_h200 = "400 (390, FlashAttention-3)", "600 (620, xformers)"
    cells = " | ".join([*[of_h100] * 3, *[of_h200] * 3])
    assert f"| 128 | causal | {cells} |" in text
    assert "2.5 times the forward pass's operations: NVIDIA H100 80GB HBM3 with" in text
    assert "| (B,H,S,D) | mask | H100 | H200 |" in text
    assert f"| (4,16,4096,128) | causal | {of_h100} | {of_h200} |" in text
    assert "(16,16,1024,128)" not in text and "4090" not in text


def test_a_case_that_a_card_lacks(tmp_path: Path) -> None:
    paths = [tmp_path / "h100-sweep.json", tmp_path / "h200-sweep.json"]
    paths[0].write_text(json.dumps(measured("NVIDIA H100", {"dlattn auto": 400.0})))
    other = measured("NVIDIA H200", H200)
    other["results"] = [r for r in other["results"] if r["shape"][2] != 4096]
    paths[1].write_text(json.dumps(other))
    text = figures.sweep_markdown(paths, tmp_path)
    best = "600 (620, xformers)"
    assert f"| 128 | causal | 400 | 400 | 400 | {best} | - | {best} |" in text
