"""A kernel's own softmax against the plain streaming one, in the same kernel, in one run.

python benchmarks/softmax_forms.py --json benchmarks/results/steps/h200-wmma-softmax.json
python benchmarks/softmax_forms.py --kernel sm90 \
    --json benchmarks/results/steps/h200-sm90-softmax.json

wmma and sm90 take a row's probabilities relative to a reference that is seldom raised, so their
time depends on the data; the plain softmax works out a maximum for every tile and scales what it
has (sm90's plain form where a maximum rises), so its time hardly does. Here a kernel's source is
compiled twice, the second time with softmax_forms/plain in front of src, and both forms compute
problems whose scores have the statistics of `python -m dlattn bench --shape scores`: checked
against float64, then taking turns, by that command's protocol. vs_baseline is the speed over the
plain form on the same data.

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
FOLDER = ROOT / "benchmarks" / "softmax_forms"
FORMS = {"own": (), "plain": (FOLDER / "plain",)}  # put before src
VARIANTS = ("wide", "narrow")  # as they are numbered in src/cuda/wmma/traits.h
_FAILURES = {1: "there is no such kernel in softmax_forms", 2: "the launch failed"}


@dataclass(frozen=True)
class Family:
    """A kernel, and what launches it."""

    kernel: Any
    sources: tuple[Path, ...]
    suffix: str  # of the architecture's name
    sizes: dict[int, Sizes]  # for each head_dim


FAMILIES = {
    "wmma": Family(
        "wmma",
        (FOLDER / "launch.cu", ROOT / "src/core/types.cpp"),
        "",
        {64: (4, 32, 4096, 64), 128: (4, 16, 4096, 128)},
    ),
    "sm90": Family(
        "sm90",
        (
            FOLDER / "launch_sm90.cu",
            ROOT / "src/core/types.cpp",
            ROOT / "src/cuda/tensor_map.cpp",
        ),
        "a",
        {64: (4, 32, 4096, 64), 128: (4, 16, 4096, 128), 256: (4, 8, 4096, 256)},
    ),
}


@dataclass(frozen=True)
class Form:
    """A kernel with one of the softmaxes."""

    family: Family
    name: str
    library: ctypes.CDLL
    resources: dict[str, str]  # of each kernel, as ptxas tells them


def compile_command(family: Family, form: str, arch: str, output: Path) -> list[str]:
    """What compiles a form."""
    folders = [*FORMS[form], ROOT / "src", ROOT / "src" / "include"]
    command = ["nvcc", "-std=c++17", "-O3", "--expt-relaxed-constexpr"]
    number = arch.removeprefix("sm_") + family.suffix
    command += ["-gencode", f"arch=compute_{number},code=sm_{number}"]
    # The forms' functions have the same names, so neither library may see the other's.
    command += ["-shared", "-Xcompiler", "-fPIC,-fvisibility=hidden,-fno-gnu-unique"]
    command += [f"-I{folder}" for folder in folders]
    command += ["-Xptxas", "-v", "-o", str(output)]
    return [*command, *map(str, family.sources)]


def build(family: Family, form: str, arch: str, folder: Path) -> Form:
    """Compile a form and load it."""
    path = folder / f"{form}.so"
    command = compile_command(family, form, arch, path)
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return Form(family, form, ctypes.CDLL(str(path)), resources(done.stderr))


def resources(log: str) -> dict[str, str]:
    """Registers and spills of each kernel, from what ptxas says."""
    found = {}
    pattern = re.compile(
        r"(wmma|sm90)6kernelI6__halfLi(\d+)ELi(\d+)E.*?(\d+) bytes spill stores, (\d+) bytes spill"
        r" loads.*?Used (\d+) registers",
        re.S,
    )
    for part in log.split("Compiling entry function")[1:]:
        match = pattern.search(part)
        if match:
            head_dim, second, stores, loads, registers = map(int, match.groups()[1:])
            name = f"{head_dim} {VARIANTS[second]}" if match[1] == "wmma" else str(head_dim)
            found[name] = (
                f"{registers} registers, {stores} bytes of spill stores, {loads} of spill loads"
            )
    return found


def contestant(form: Form) -> Contestant:
    """A form as the benchmark takes it, on the tile shape that the plan takes."""

    def bind(problem: Problem) -> Bound:
        import torch

        q, k, v = problem.q, problem.k, problem.v
        causal = problem.case.causal
        kernel = form.family.kernel
        plan = dlattn.plan(q, k, v, causal=causal, layout="bhsd", kernel=kernel)
        if kernel == "wmma" and plan.variant not in VARIANTS:
            raise UnavailableError(f"the plan takes {plan.variant}")
        choice = VARIANTS.index(plan.variant) if kernel == "wmma" else plan.grid
        out = torch.empty_like(q)

        def once() -> Any:
            failed = form.library.launch(
                *(ctypes.c_void_p(x.data_ptr()) for x in (q, k, v, out)),
                *(ctypes.c_int64(size) for size in q.shape),
                ctypes.c_double(1 / math.sqrt(q.shape[3])),
                int(causal),
                ctypes.c_int64(choice),
                q.device.index,
                ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
            )
            if failed:
                raise RuntimeError(_FAILURES[failed])
            return out

        def checked() -> Any:
            out.fill_(math.nan)
            return once()

        taken = f"{kernel}:{plan.variant}" if plan.variant else kernel
        return Bound(once, checked=checked, plan=taken)

    name = form.family.kernel if form.name == "own" else form.name
    return Contestant(f"{name} softmax", True, bind)


def groups(forms: dict[str, Form], case: Case) -> Iterator[list[Entrant]]:
    """For every kind of scores the two forms, which take turns."""
    for kind in scores.KINDS:
        problem = Problem(replace(case, variant=kind), *scores.make(kind, case, "cuda"))
        plain = Entrant(contestant(forms["plain"]), problem)
        own = forms["own"]
        facts = scores.facts_of(problem, own.family.kernel)
        yield [Entrant(contestant(own), problem, plain, facts=facts), plain]


def slowest(results: list[report.Result]) -> dict[str, Any]:
    """How fast a kernel's own softmax is, at the least, relative to the plain one."""
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
    parser.add_argument("--kernel", choices=FAMILIES, default="wmma")
    parser.add_argument("--head-dim", nargs="*", type=int, help="default: all that there are")
    parser.add_argument("--causal", action="store_true", help="causal only; default: both")
    parser.add_argument("--full", action="store_true", help="full only; default: both")
    parser.add_argument("--quick", action="store_true", help="short windows: a first impression")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    parser.add_argument("--commit", metavar="SHA", help="to record; default: ask git, here")
    args = parser.parse_args()

    family = FAMILIES[args.kernel]
    unknown = set(args.head_dim or ()) - set(family.sizes)
    if unknown:
        parser.error(f"--head-dim is {min(unknown)}; {args.kernel} takes {list(family.sizes)}")
    session = Session("cuda", QUICK if args.quick else SUSTAINED, [args.kernel], [])
    about = environment.describe("cuda", args.commit)
    arch = "sm_" + "".join(map(str, about["machine"]["compute_capability"]))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        built = pool.map(lambda form: build(family, form, arch, Path(folder)), FORMS)
        forms = {form.name: form for form in built}
    ceiling = environment.ceilings("cuda", "float16", session.windows)
    results = []
    for head_dim in args.head_dim or family.sizes:
        for causal in (False, True):
            if (args.full and causal) or (args.causal and not causal):
                continue
            for group in groups(forms, Case(family.sizes[head_dim], causal, "float16")):
                results += session.time(group)
                session.release()
    print(report.print_results(results, ceiling))
    found = slowest(results)
    print(f"\n{args.kernel}'s softmax over the plain one: {json.dumps(found)}")
    document = report.to_json(about, session.protocol(), ceiling, results, {})
    document["forms"] = {name: form.resources for name, form in forms.items()}
    document[f"{args.kernel}_over_plain"] = found
    if args.json:
        args.json.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
    return 1 if any(result.wrong for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
