"""`python -m dlattn check`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import Captured, refuses

import dlattn
from dlattn.cli import check, check_features, main
from dlattn.console import devices

SMALL = (
    check.Case("even", (1, 2, 16, 8), False, seeds=(0, 1)),
    check.Case("ragged", (2, 1, 19, 16), True),
)


@pytest.fixture
def small_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "CASES", SMALL)
    monkeypatch.setattr(check_features, "FEATURES", {})


@pytest.mark.usefixtures("small_check")
def test_check_passes(capsys: Captured, tmp_path: Path) -> None:
    report = tmp_path / "check.json"
    assert main(["check", "--kernel", "cpu", "--json", str(report)]) == 0
    printed = capsys.readouterr().out
    assert "PASS: 9 problems" in printed
    assert re.search(r"cpu +float16 +ragged +\(2,1,19,16\) +causal +1 .* PASS", printed)
    document = json.loads(report.read_text())
    assert document["passed"] is True
    assert len(document["results"]) == 9
    for result in document["results"]:
        assert 0.0 < result["max_error"] <= result["bound"]
        assert result["seconds"] > 0.0
        assert result["passed"] is True


def broken(change: Callable[[Any, Any], tuple[Any, Any]]) -> Callable[..., Any]:
    """dlattn.attention with a change to its results."""
    attention = dlattn.attention

    def call(*args: Any, **options: Any) -> Any:
        result = attention(*args, **options)
        return change(*result) if options.get("return_lse") else result

    return call


@pytest.mark.usefixtures("small_check")
@pytest.mark.parametrize(
    "change",
    [
        lambda out, lse: (out * 1.01, lse),
        lambda out, lse: (out, lse + 1e-3),
        lambda out, lse: (np.where(np.arange(out.shape[1])[:, None, None] == 3, np.nan, out), lse),
    ],
    ids=["out", "lse", "a row left out"],
)
def test_check_fails_on_a_wrong_result(capsys: Captured, monkeypatch: Any, change: Any) -> None:
    monkeypatch.setattr(dlattn, "attention", broken(change))
    assert main(["check", "--kernel", "cpu"]) == 1
    printed = capsys.readouterr().out
    assert "FAIL: 9 of 9 problems" in printed
    assert "PASS" not in printed


def test_check_has_every_feature(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("ml_dtypes")
    monkeypatch.setattr(check, "CASES", ())
    report = tmp_path / "check.json"
    assert main(["check", "--kernel", "cpu", "--json", str(report)]) == 0
    printed = capsys.readouterr().out
    for feature in ("KV cache in pages", "varlen", "backward", "bias and mask"):
        assert re.search(rf"{feature} +bfloat16 +0\.\d\d +PASS +cpu", printed)
    results = json.loads(report.read_text())["features"]
    assert len(results) == 2 * len(check_features.FEATURES)
    assert all(0.0 < result["error_over_bound"] <= 1.0 for result in results)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_check_fails_on_a_wrong_gradient(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, which: int
) -> None:
    backward = dlattn.attention_backward

    def wrong(**options: Any) -> Any:
        gradients = backward(**options)
        gradients[which][0, 5] *= 1.2
        return gradients

    monkeypatch.setattr(check, "CASES", ())
    monkeypatch.setattr(dlattn, "attention_backward", wrong)
    assert main(["check", "--kernel", "cpu"]) == 1
    assert re.search(r"backward +float32 +\d+\.\d\d +FAIL +cpu", capsys.readouterr().out)


@pytest.mark.usefixtures("small_check")
def test_check_fails_where_a_kernel_raises(
    capsys: Captured, monkeypatch: Any, tmp_path: Path
) -> None:
    def refuse(*args: Any, **options: Any) -> Any:
        raise dlattn.DeviceError("the device is on fire")

    monkeypatch.setattr(dlattn, "attention", refuse)
    report = tmp_path / "check.json"
    assert main(["check", "--kernel", "cpu", "--json", str(report)]) == 1
    printed = capsys.readouterr().out
    assert "cpu float16 ragged causal seed 0: the device is on fire" in printed
    result = json.loads(report.read_text(), parse_constant=pytest.fail)["results"][0]
    assert result["max_error"] is None
    assert result["failure"] == "the device is on fire"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (".", "it is a folder"),
        ("no/check.json", "no such folder"),
        ("x" * 300, "File name too long"),
        ("loop", "Too many levels of symbolic links"),
        ("file/check.json", "Not a directory"),
    ],
)
@pytest.mark.parametrize("command", ["check", "bench"])
def test_report_that_cannot_be_written_is_refused_first(
    capsys: Captured, monkeypatch: Any, tmp_path: Path, name: str, reason: str, command: str
) -> None:
    """Not after half a minute of work, which would be lost."""
    monkeypatch.setattr(dlattn, "attention", lambda *_, **__: pytest.fail("computed in vain"))
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    error = refuses(capsys, command, "--device", "cpu", "--json", tmp_path / name)
    assert error == f"dlattn: error: --json {tmp_path / name}: cannot be written: {reason}\n"


@pytest.mark.usefixtures("small_check")
def test_report_that_is_there_stays_until_it_is_replaced(
    capsys: Captured, monkeypatch: Any, tmp_path: Path
) -> None:
    report, link = tmp_path / "check.json", tmp_path / "latest.json"
    report.write_text("older")
    report.chmod(0o640)
    link.symlink_to(report)
    attention = dlattn.attention

    def look(*args: Any, **options: Any) -> Any:
        assert report.read_text() == "older"
        return attention(*args, **options)

    monkeypatch.setattr(dlattn, "attention", look)
    assert main(["check", "--kernel", "cpu", "--json", str(link)]) == 0
    assert json.loads(report.read_text())["passed"] is True
    assert link.is_symlink()
    assert report.stat().st_mode & 0o7777 == 0o640
    assert sorted(path.name for path in tmp_path.iterdir()) == ["check.json", "latest.json"]


@pytest.mark.usefixtures("small_check")
def test_report_on_a_full_device(capsys: Captured) -> None:
    assert main(["check", "--kernel", "cpu", "--json", "/dev/full"]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error == "dlattn: error: /dev/full: cannot be written: No space left on device"


def test_check_wants_a_kernel_of_the_device(capsys: Captured) -> None:
    assert "--kernel cpu does not run on --device cuda" in refuses(
        capsys, "check", "--kernel", "cpu", "--device", "cuda"
    )
    assert "invalid choice: 'fast'" in refuses(capsys, "check", "--kernel", "fast")


@pytest.mark.usefixtures("small_check")
def test_check_without_a_gpu(capsys: Captured, monkeypatch: Any) -> None:
    monkeypatch.setattr(check, "gpu_status", lambda: "none was found")
    monkeypatch.setattr(devices, "gpu_status", lambda: "none was found")
    assert "no GPU: none was found" in refuses(capsys, "check", "--kernel", "scalar")
    assert main(["check"]) == 0
    assert "GPU not checked: none was found" in capsys.readouterr().out


@pytest.mark.usefixtures("small_check")
def test_check_without_a_framework_for_the_gpu(capsys: Captured, monkeypatch: Any) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(check, "gpu_status", lambda: "")
    monkeypatch.setattr(devices, "gpu_status", lambda: "")
    monkeypatch.setattr(devices.importlib, "import_module", missing)
    assert main(["check"]) == 0
    printed = capsys.readouterr().out
    assert "GPU not checked: there is a GPU, but nothing here can hold arrays on it" in printed
    assert "cupy is not installed; torch is not installed; jax is not installed" in printed
    assert "pip install" in printed
    assert "PASS: 9 problems" in printed


@pytest.mark.usefixtures("small_check")
def test_check_without_ml_dtypes(capsys: Captured, monkeypatch: Any) -> None:
    for module in (check, check_features):
        monkeypatch.setattr(module, "find_spec", lambda name: None)
    assert main(["check", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert "bfloat16 and float8_e4m3fn not checked: they need ml_dtypes" in printed
    assert printed.count("bfloat16") == 1 and "PASS" in printed


@pytest.mark.gpu
@pytest.mark.usefixtures("small_check")
@pytest.mark.parametrize("kernel", check.GPU_KERNELS)
def test_check_on_a_gpu(capsys: Captured, monkeypatch: Any, kernel: str) -> None:
    cases = [check.Case("half", (1, 2, 65, dim), True, seeds=(0, 1)) for dim in (64, 512)]
    monkeypatch.setattr(
        check, "CASES", cases[1:] if kernel in ("wmma_halves", "sm90_wide") else cases[:1]
    )
    gpu, remarks = check.find_gpu(float8=True), list[str]()
    if check._supports(gpu, kernel, check.FLOAT8):
        assert main(["check", "--kernel", kernel]) == 0
        assert "PASS: 2 problems" in capsys.readouterr().out
        return
    if kernel not in check._kernels_of(gpu, remarks):
        # Not for this GPU: said, and passed over unless asked for by name.
        why = "sm90_latent: " if kernel == "sm90_latent" else "needs "
        assert kernel.startswith("sm90") and why in " ".join(remarks)
        assert main(["check", "--kernel", kernel]) == 1
        return
    assert main(["check", "--kernel", kernel]) == 0
    assert "PASS: 2 problems" in capsys.readouterr().out
