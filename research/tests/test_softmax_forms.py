"""The benchmark of softmaxes against the plain one: what is compiled, and what is told."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dlattn.bench import report
from dlattn.bench.cases import Case

RESEARCH = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(RESEARCH))

import softmax_forms  # noqa: E402

LOG = """\
ptxas info    : Compiling entry function '4wmma6kernelI6__halfLi128ELi1ELb0E' for 'sm_90'
    8 bytes stack frame, 16 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 168 registers, used 2 barriers
"""
SHAPES = [
    ("wmma", "wide"),
    ("wmma", "persistent"),
    ("sm90", ""),
]


@pytest.mark.parametrize(("kernel", "variant"), SHAPES)
@pytest.mark.parametrize("form", softmax_forms.FORMS)
def test_each_form_has_its_softmax(kernel: str, variant: str, form: str, tmp_path: Path) -> None:
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc")
    family = softmax_forms.FAMILIES[kernel]
    shape = softmax_forms.Shape(128, variant)
    command = softmax_forms.compile_command(family, form, shape, "sm_90", tmp_path / "files.d")
    others = len(family.sources) - 1  # the host's
    if form == "plain":  # to PTX: its own softmax is compiled for the library anyway
        command[command.index("-shared")] = "-ptx"
        command[command.index("-o") + 1] = str(tmp_path / "kernel.ptx")
        command[1:1] = ["-MD", "-MF", str(tmp_path / "files.d")]
    else:
        command[command.index("-shared")] = "-M"
    subprocess.run(command[:-others], check=True)
    files = (tmp_path / "files.d").read_text()
    softmax = {"wmma": "cuda/tile/mma/softmax.cuh", "sm90": "cuda/forward/sm90/softmax.cuh"}[kernel]
    assert (f"softmax_forms/plain/{softmax}" in files) == (form == "plain")
    assert (f"src/{softmax}" in files) == (form == "own")


def test_resources_are_read() -> None:
    assert softmax_forms.resources(LOG) == (
        "168 registers, 16 bytes of spill stores, 8 of spill loads"
    )


def test_shapes_are_named_as_in_the_source() -> None:
    text = (RESEARCH.parent / "src/cuda/forward/wmma/traits.h").read_text()
    for kernel, variant in SHAPES:
        if kernel == "wmma":
            named = softmax_forms.Shape(128, variant).definitions[1].partition("=")[2]
            assert f"constexpr int {named} =" in text


def test_the_slowest_is_told() -> None:
    results = []
    for variant, ratio in (("noise", 1.2), ("distant", 0.85)):
        case = Case((4, 32, 4096, 64), True, "float16", variant=variant)
        results += [
            report.Result(case, "wmma softmax", True, vs_baseline=ratio),
            report.Result(case, "plain softmax", True),
        ]
    assert softmax_forms.slowest(results) == {
        "least": 0.85,
        "least_case": "(4,32,4096,64) causal distant",
        "cases": 2,
        "below_0.9": 1,
    }
    assert softmax_forms.slowest(results[1:2]) == {}
