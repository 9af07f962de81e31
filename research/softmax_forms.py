"""A kernel's own softmax against the plain streaming one, in the same kernel, in one run.

python research/softmax_forms.py --json research/steps/h200-wmma-softmax.json
python research/softmax_forms.py --kernel sm90 \
    --json research/steps/h200-sm90-softmax.json

wmma and sm90 take a row's probabilities relative to a row max that is seldom raised, so their
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
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import dlattn
from dlattn.bench import environment, report, scores
from dlattn.bench.cases import Case, Sizes
from dlattn.bench.peers import Bound, Contestant, Problem
from dlattn.bench.session import Entrant, Session
from dlattn.bench.timing import QUICK, SUSTAINED

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "research" / "softmax_forms"
FORMS = {"own": (), "plain": (FOLDER / "plain",)}  # put before src
HOST_SOURCES = (
    ROOT / "src/core/types.cpp",
    ROOT / "src/cuda/device_guard.cpp",
    ROOT / "src/cuda/launch.cpp",
    ROOT / "src/cuda/driver.cpp",
    ROOT / "src/cuda/tensor_map.cpp",
)


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
        (FOLDER / "launch.cu", *HOST_SOURCES),
        "",
        {64: (4, 32, 4096, 64), 128: (4, 16, 4096, 128)},
    ),
    "sm90": Family(
        "sm90",
        (FOLDER / "launch_sm90.cu", *HOST_SOURCES),
        "a",
        {64: (4, 32, 4096, 64), 128: (4, 16, 4096, 128), 256: (4, 8, 4096, 256)},
    ),
}


@dataclass(frozen=True)
class Shape:
    """The parameters that a kernel is compiled with: a tile and, for wmma, its variant."""

    head_dim: int
    variant: str

    @property
    def definitions(self) -> list[str]:
        """The numbers that the launcher gets."""
        variant = [f"-DVARIANT=k{self.variant.title().replace('_', '')}"] if self.variant else []
        return [f"-DHEAD_DIM={self.head_dim}", *variant]


@dataclass(frozen=True)
class Form:
    """A kernel with one of the softmaxes, in the shapes that are needed."""

    family: Family
    name: str
    libraries: dict[Shape, ctypes.CDLL]
    resources: dict[str, str]  # of each shape, as ptxas tells them


def plan_of(family: Family, case: Case) -> dlattn.Plan:
    """How a problem is taken."""
    import torch

    q = torch.empty(case.sizes, dtype=torch.float16, device="cuda")
    return dlattn.plan(q, q, q, causal=case.causal, layout="bhsd", kernel=family.kernel)


def shape_of(plan: dlattn.Plan) -> Shape:
    """The parameters that the kernel of a plan is compiled with."""
    return Shape(plan.head_dim_tile, plan.variant if plan.kernel == "wmma" else "")


def compile_command(family: Family, form: str, shape: Shape, arch: str, output: Path) -> list[str]:
    """The command that compiles a form."""
    folders = [*FORMS[form], ROOT / "src", ROOT / "src" / "include"]
    command = ["nvcc", "-std=c++17", "-O3", "--expt-relaxed-constexpr", *shape.definitions]
    number = arch.removeprefix("sm_") + family.suffix
    command += ["-gencode", f"arch=compute_{number},code=sm_{number}"]
    # The forms' functions have the same names, so neither library may see the other's.
    command += ["-shared", "-Xcompiler", "-fPIC,-fvisibility=hidden,-fno-gnu-unique"]
    command += [f"-I{folder}" for folder in folders]
    command += ["-Xptxas", "-v", "-o", str(output)]
    return [*command, *map(str, family.sources)]


def build(family: Family, shapes: Iterable[Shape], arch: str, folder: Path) -> list[Form]:
    """Compile the forms and load them."""

    def build_one(form: str, shape: Shape) -> tuple[ctypes.CDLL, str]:
        path = folder / f"{form}_{shape.head_dim}_{shape.variant}.so"
        command = compile_command(family, form, shape, arch, path)
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        return ctypes.CDLL(str(path)), resources(done.stderr)

    jobs = [(form, shape) for form in FORMS for shape in shapes]
    with ThreadPoolExecutor() as pool:
        built = dict(zip(jobs, pool.map(lambda job: build_one(*job), jobs), strict=True))
    return [
        Form(
            family,
            form,
            {shape: built[form, shape][0] for shape in shapes},
            {f"{s.head_dim} {s.variant}".strip(): built[form, s][1] for s in shapes},
        )
        for form in FORMS
    ]


def resources(log: str) -> str:
    """Registers and spills of the one kernel that ptxas tells of."""
    stores, loads, registers = re.findall(
        r"(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers", log, re.S
    )[0]
    return f"{registers} registers, {stores} bytes of spill stores, {loads} of spill loads"


def contestant(form: Form) -> Contestant:
    """A form as the benchmark takes it, on the tile shape that the plan takes."""

    def bind(problem: Problem) -> Bound:
        import torch

        q, k, v = problem.q, problem.k, problem.v
        plan = plan_of(form.family, problem.case)
        library = form.libraries[shape_of(plan)]
        out = torch.empty_like(q)

        def once() -> Any:
            failed = library.launch(
                *(ctypes.c_void_p(x.data_ptr()) for x in (q, k, v, out)),
                *(ctypes.c_int64(size) for size in q.shape[:3]),
                ctypes.c_double(1 / math.sqrt(q.shape[3])),
                int(problem.case.causal),
                ctypes.c_int64(plan.grid),
                q.device.index,
                ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
            )
            if failed:
                raise RuntimeError("the launch failed")
            return out

        def checked() -> Any:
            out.fill_(math.nan)
            return once()

        kernel = form.family.kernel
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
    masks = [False] * (not args.causal) + [True] * (not args.full)
    cases = [
        Case(family.sizes[head_dim], causal, "float16")
        for head_dim in args.head_dim or family.sizes
        for causal in masks
    ]
    shapes = {shape_of(plan_of(family, case)) for case in cases}
    with tempfile.TemporaryDirectory() as folder:
        forms = {form.name: form for form in build(family, shapes, arch, Path(folder))}
    ceiling = environment.ceilings("cuda", "float16", session.windows)
    results = []
    for case in cases:
        for group in groups(forms, case):
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
