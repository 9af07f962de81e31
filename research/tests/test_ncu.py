"""The profiling script: what it reads from Nsight Compute, and what it says where it cannot."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]

STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
TENSOR = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active"
SHARED = "l1tex__data_pipe_lsu_wavefronts_mem_shared{}.sum.pct_of_peak_sustained_elapsed"
COLUMNS = (
    ("ID", "", "0"),
    ("Kernel Name", "", "kernel"),
    ("device__attribute_display_name", "", "NVIDIA Model"),
    ("gpu__time_duration.sum", "us", "1,540.25"),
    ("launch__registers_per_thread", "register/thread", "255"),
    (TENSOR, "%", "61.5"),
    (TENSOR.replace("avg", "max"), "%", "99"),
    (SHARED.format(""), "%", "56"),
    (SHARED.format("_op_ld"), "%", "55"),
    ("sm__inst_executed_pipe_fma.sum.pct_of_peak_sustained_active", "%", "8"),
    ("sm__inst_executed_pipe_tex.sum.pct_of_peak_sustained_active", "%", "0"),
    (STALL.format("wait"), "inst", "0.5"),
    (STALL.format("math_pipe_throttle"), "inst", "1.75"),
    ("launch__occupancy_limit_registers", "block", "many"),
)
LINES = [",".join(f'"{cell}"' for cell in line) for line in zip(*COLUMNS, strict=True)]
FAKE = "\n".join(["#!/bin/sh", "echo '==PROF== Connected'", "cat <<'END'", *LINES, "END", ""])


@pytest.fixture
def ncu() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ncu_script", ROOT / "research" / "ncu.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def install(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "ncu"
    path.write_text(script)
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_a_profile(ncu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, FAKE, monkeypatch)
    words = ["ncu.py", "--head-dim", "64", "--json", str(tmp_path / "ncu.json"), "--commit", "abc"]
    monkeypatch.setattr(sys, "argv", words)
    assert ncu.main() == 0
    (entry,) = json.loads((tmp_path / "ncu.json").read_text())
    assert (entry["kernel"], entry["shape"]) == ("wmma", [4, 32, 4096, 64])
    assert (entry["device"], entry["commit"]) == ("NVIDIA Model", "abc")
    metrics = entry["metrics"]
    assert metrics["duration"] == {"value": 1540.25, "unit": "us"}
    assert metrics["registers per thread"]["value"] == 255
    assert metrics["tensor pipe active %"]["value"] == 61.5
    assert metrics["shared memory wavefronts %"]["value"] == 56
    assert metrics["shared memory wavefronts ld %"]["value"] == 55
    assert [name for name in metrics if name.startswith("issued")] == ["issued to fma %"]
    assert not any(name.startswith("blocks per SM") for name in metrics)  # no number
    stalls = [name for name in metrics if name.startswith("stall")]
    assert stalls == ["stall math_pipe_throttle", "stall wait"]  # the largest first


def test_profiles_of_several_launches(
    ncu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = LINES[-1].replace("61.5", "70.25")
    install(tmp_path, FAKE.replace(LINES[-1], f"{LINES[-1]}\n{second}"), monkeypatch)
    words = ["ncu.py", "--kernel", "sm90", "--head-dim", "256", "--causal", "both"]
    kept, raw = tmp_path / "ncu.json", tmp_path / "ncu.csv"
    monkeypatch.setattr(sys, "argv", [*words, "--json", str(kept), "--raw", str(raw)])
    assert ncu.main() == 0
    full, causal = json.loads(kept.read_text())
    assert (full["kernel"], full["shape"], full["causal"]) == ("sm90", [4, 8, 4096, 256], False)
    assert (causal["shape"], causal["causal"]) == ([4, 8, 4096, 256], True)
    assert full["metrics"]["tensor pipe active %"]["value"] == 61.5
    assert causal["metrics"]["tensor pipe active %"]["value"] == 70.25
    assert second in raw.read_text()


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("#!/bin/sh\necho '==ERROR== ERR_NVGPUCTRPERM - no permission'; exit 1\n", "may not read"),
        ("#!/bin/sh\necho 'out of luck' >&2; exit 9\n", "ended with 9 and 0 profiles of 2"),
        (FAKE, "ended with 0 and 1 profiles of 2"),
        (None, "there is no ncu on the PATH"),
    ],
)
def test_no_profile(
    ncu: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    script: str | None,
    message: str,
) -> None:
    if script is None:
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        install(tmp_path, script, monkeypatch)
    monkeypatch.setattr(sys, "argv", ["ncu.py"])
    assert ncu.main() == 3
    assert message in capsys.readouterr().err
