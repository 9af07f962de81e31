"""wmma's softmax against the plain streaming one, in the same kernels, in one run.

python benchmarks/softmax_forms.py --json benchmarks/results/steps/h200-wmma-softmax.json

wmma takes a row's probabilities relative to a reference that is seldom raised, so its time depends
on the data; the plain softmax works out a maximum and scales what it has for every tile, so its
time hardly does. Here the kernels' source is compiled twice, the second time with
softmax_forms/plain in front of src, and both forms compute problems whose scores have the
statistics of `python -m dlattn bench --shape scores`: checked against float64, then taking turns,
by that command's protocol. vs_baseline is the speed over the plain form on the same data.

Needs nvcc, a GPU, torch, and dlattn with its CUDA kernels, which says what shape a problem takes.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import dlattn
from dlattn.bench import environment, report, scores
from dlattn.bench.cases import Case, Sizes
from dlattn.bench.peers import Bound, Contestant, Problem, UnavailableError
from dlattn.bench.session import Entrant, Session
from dlattn.bench.timing import QUICK, SUSTAINED

ROOT = Path(__file__).resolve().parents[1]
FORMS = {"wmma": (), "plain": (ROOT / "benchmarks" / "softmax_forms" / "plain",)}  # put before src
SIZES: dict[int, Sizes] = {64: (4, 32, 4096, 64), 128: (4, 16, 4096, 128)}
VARIANTS = ("wide", "narrow")  # as they are numbered in src/cuda/wmma/traits.h
_FAILURES = {1: "softmax_forms/launch.cu has no such kernel", 2: "the launch failed"}


@dataclass(frozen=True)
class Form:
    """The kernels with one of the softmaxes."""

    name: str
    library: ctypes.CDLL
    resources: dict[str, str]  # of each kernel, as ptxas tells them


def compile_command(form: str, arch: str, output: Path) -> list[str]:
    """What compiles a form."""
    folders = [*FORMS[form], ROOT / "src", ROOT / "src" / "include"]
    command = ["nvcc", "-std=c++17", "-O3", "--expt-relaxed-constexpr", f"-arch={arch}"]
    # The forms' functions have the same names, so neither library may see the other's.
    command += ["-shared", "-Xcompiler", "-fPIC,-fvisibility=hidden,-fno-gnu-unique"]
    command += [f"-I{folder}" for folder in folders]
    command += ["-Xptxas", "-v", "-o", str(output)]
    sources = (ROOT / "benchmarks" / "softmax_forms" / "launch.cu", ROOT / "src/core/types.cpp")
    return [*command, *map(str, sources)]


def build(form: str, arch: str, folder: Path) -> Form:
    """Compile a form and load it."""
    path = folder / f"{form}.so"
    done = subprocess.run(compile_command(form, arch, path), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return Form(form, ctypes.CDLL(str(path)), resources(done.stderr))


def resources(log: str) -> dict[str, str]:
    """Registers and spills of each kernel, from what ptxas says."""
    found = {}
    pattern = re.compile(
        r"6kernelI6__halfLi(\d+)ELi(\d+)E.*?(\d+) bytes spill stores, (\d+) bytes spill loads"
        r".*?Used (\d+) registers",
        re.S,
    )
    for part in log.split("Compiling entry function")[1:]:
        match = pattern.search(part)
        if match:
            head_dim, variant, stores, loads, registers = map(int, match.groups())
            found[f"{head_dim} {VARIANTS[variant]}"] = (
                f"{registers} registers, {stores} bytes of spill stores, {loads} of spill loads"
            )
    return found


def contestant(form: Form) -> Contestant:
    """A form as the benchmark takes it, on the tile shape that the plan takes."""

    def bind(problem: Problem) -> Bound:
        import torch

        q, k, v = problem.q, problem.k, problem.v
        causal = problem.case.causal
        plan = dlattn.plan(q, k, v, causal=causal, layout="bhsd", kernel="wmma")
        if plan.variant not in VARIANTS:
            raise UnavailableError(f"the plan takes {plan.variant}")
        out = torch.empty_like(q)

        def once() -> Any:
            failed = form.library.launch(
                *(ctypes.c_void_p(x.data_ptr()) for x in (q, k, v, out)),
                *(ctypes.c_int64(size) for size in q.shape),
                ctypes.c_double(1 / math.sqrt(q.shape[3])),
                int(causal),
                VARIANTS.index(plan.variant),
                q.device.index,
                ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
            )
            if failed:
                raise RuntimeError(_FAILURES[failed])
            return out

        def checked() -> Any:
            out.fill_(math.nan)
            return once()

        return Bound(once, checked=checked, plan=f"wmma:{plan.variant}")

    return Contestant(f"{form.name} softmax", True, bind)


def groups(forms: dict[str, Form], case: Case) -> Iterator[list[Entrant]]:
    """For every kind of scores the two forms, which take turns."""
    for kind in scores.KINDS:
        problem = Problem(replace(case, variant=kind), *scores.make(kind, case, "cuda"))
        plain = Entrant(contestant(forms["plain"]), problem)
        facts = scores.facts_of(problem, "wmma")
        yield [Entrant(contestant(forms["wmma"]), problem, plain, facts=facts), plain]


def slowest(results: list[report.Result]) -> dict[str, Any]:
    """How fast wmma's softmax is, at the least, relative to the plain one."""
    compared = [r for r in results if r.vs_baseline is not None]
    if not compared:
        return {}
    least = min(compared, key=lambda r: r.vs_baseline or 0.0)
    return {
        "least": least.vs_baseline,
        "least_case": f"{least.case.label} {least.case.mask} {least.case.variant}",
        "cases": len(compared),
        "below_0.9": sum((r.vs_baseline or 0.0) < 0.9 for r in compared),
    }


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--head-dim", nargs="*", type=int, choices=SIZES, default=list(SIZES))
    parser.add_argument("--causal", action="store_true", help="causal only; default: both")
    parser.add_argument("--full", action="store_true", help="full only; default: both")
    parser.add_argument("--quick", action="store_true", help="short windows: a first impression")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    parser.add_argument("--commit", metavar="SHA", help="to record; default: ask git, here")
    args = parser.parse_args()

    session = Session("cuda", QUICK if args.quick else SUSTAINED, ["wmma"], [])
    about = environment.describe("cuda", args.commit)
    arch = "sm_" + "".join(map(str, about["machine"]["compute_capability"]))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        built = pool.map(lambda form: build(form, arch, Path(folder)), FORMS)
        forms = {form.name: form for form in built}
    ceiling = environment.ceilings("cuda", "float16", session.windows)
    results = []
    for head_dim in args.head_dim:
        for causal in (False, True):
            if (args.full and causal) or (args.causal and not causal):
                continue
            for group in groups(forms, Case(SIZES[head_dim], causal, "float16")):
                results += session.time(group)
                session.release()
    print(report.print_results(results, ceiling))
    found = slowest(results)
    print(f"\nwmma's softmax over the plain one: {json.dumps(found)}")
    document = report.to_json(about, session.protocol(), ceiling, results, {})
    document["forms"] = {name: form.resources for name, form in forms.items()}
    document["wmma_over_plain"] = found
    if args.json:
        args.json.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
    return 1 if any(result.wrong for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
