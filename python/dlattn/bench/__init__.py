"""`python -m dlattn bench`: this library and its peers, first checked, then timed in turns."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

import dlattn
from dlattn.bench import environment, plot, report
from dlattn.bench.cases import Case, parse_shapes
from dlattn.bench.correctness import draw, expect, measure
from dlattn.bench.peers import (
    Bound,
    Contestant,
    Problem,
    UnavailableError,
    cpu_contestants,
    cpu_problem,
    gpu_contestants,
    gpu_problem,
)
from dlattn.bench.timing import QUICK, SUSTAINED, Clock, CpuClock, GpuClock, Prepared, Windows
from dlattn.cli.devices import gpu_status
from dlattn.cli.errors import CommandError, first_line
from dlattn.cli.text import Progress, shape

_HOST_SIZES = {"cuda": (1, 8, 128, 64), "cpu": (1, 1, 16, 64)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--shape", default="seed", metavar="WHICH", help="mission, seed (default), sweep or B,H,S,D"
    )
    masks = parser.add_mutually_exclusive_group()
    masks.add_argument("--causal", action="store_true", help="causal only; default: both")
    masks.add_argument("--full", action="store_true", help="full only; default: both")
    parser.add_argument(
        "--dtype",
        choices=("float16", "bfloat16", "float32"),
        help="default: float16 on a GPU, float32 on the CPU",
    )
    parser.add_argument("--kernels", nargs="*", metavar="K", help="of ours; default: all")
    parser.add_argument("--peers", nargs="*", metavar="P", help="default: all that are installed")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU if there is one")
    parser.add_argument("--quick", action="store_true", help="short windows: a first impression")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it (.png, .svg, .pdf)")
    parser.add_argument("--commit", metavar="SHA", help="to record; default: ask git, here")


def main(args: argparse.Namespace) -> int:
    """Run the command; 1 if one of our kernels is wrong."""
    device = args.device or ("cpu" if gpu_status() else "cuda")
    for option, path in (("--json", args.json), ("--plot", args.plot)):
        if path and not path.parent.is_dir():
            raise CommandError(f"{option} {path}: no such folder")
    if args.plot:
        plot.require()
    session = _Session(device, QUICK if args.quick else SUSTAINED, args.kernels, args.peers)
    dtype = args.dtype or ("float16" if device == "cuda" else "float32")
    masks = [causal for causal, wanted in ((False, args.full), (True, args.causal)) if wanted]
    cases = [
        Case(sizes, causal, dtype)
        for sizes in parse_shapes(args.shape, device)
        for causal in masks or (False, True)
    ]
    about = environment.describe(device, args.commit)
    _print_head(about, session)

    progress = Progress(len(cases) + 2)
    progress.step("ceilings: matrix product, copy")
    ceiling = environment.ceilings(device, dtype, session.windows)
    results = []
    for case in cases:
        progress.step(f"{shape(case.sizes)} {case.mask} {dtype}")
        results += session.time(case)
    progress.step("host time of a call")
    host = session.host_times(dtype)
    progress.close()

    print(report.print_results(results, ceiling))
    print()
    print(report.print_host_times(host))
    document = report.to_json(about, session.protocol(), ceiling, results, host)
    if args.json:
        _write(args.json, json.dumps(document, indent=1, allow_nan=False) + "\n")
    if args.plot:
        plot.draw(document, args.plot)
    return 1 if any(result.ours and result.wrong for result in results) else 0


class _Session:
    """The contestants on one device and how they are timed."""

    def __init__(
        self,
        device: str,
        windows: Windows,
        kernels: Sequence[str] | None,
        peers: Sequence[str] | None,
    ) -> None:
        self.device = device
        self.windows = windows
        self.clock: Clock
        if device == "cuda":
            _require_torch()
            self.clock, everybody = GpuClock(), gpu_contestants()
        else:
            _match_threads()
            self.clock, everybody = CpuClock(), cpu_contestants()
        self.contestants = _choose(everybody, kernels, peers)

    def time(self, case: Case) -> list[report.Result]:
        """Check everybody, then let them take turns."""
        inputs = draw(case)
        expected = expect(case, *inputs)
        problem = self._problem(case, inputs)
        results = []
        ready: list[tuple[report.Result, Bound, Prepared]] = []
        for contestant in self.contestants:
            result = report.Result(case, contestant.name, contestant.ours)
            results.append(result)
            try:
                bound = contestant.bind(problem)
                with bound.context():
                    self._poison(problem)
                    out = contestant.to_host((bound.checked or bound.call)())
                    result.max_error, result.bound_ratio = measure(out, expected)
                    if result.wrong and result.ours:
                        continue
                    prepared = self.clock.prepare(bound.call)
                    result.note = prepared.note
            except UnavailableError as error:
                result.note = str(error)
            except Exception as error:  # every library refuses in its own way
                result.note = first_line(error)
                if result.ours:
                    result.bound_ratio = math.inf
            else:
                ready.append((result, bound, prepared))
        for turn in range(self.windows.rounds):
            order = ready if turn % 2 == 0 else ready[::-1]
            for result, bound, prepared in order:
                with bound.context():
                    seconds = self.clock.window(prepared, self.windows)
                result.times.append(statistics.median(seconds))
        return results

    def host_times(self, dtype: str) -> dict[str, float | None]:
        """The eager call's host time, on a problem too small to matter."""
        case = Case(_HOST_SIZES[self.device], False, dtype)
        problem = self._problem(case, draw(case))
        host: dict[str, float | None] = {}
        for contestant in self.contestants:
            try:
                bound = contestant.bind(problem)
                with bound.context():
                    host[contestant.name] = self.clock.host(bound.call, self.windows)
            except Exception:  # its cases say why
                host[contestant.name] = None
        return host

    def protocol(self) -> dict[str, Any]:
        """How the times were taken."""
        return {
            "method": self.clock.method,
            "device": self.device,
            "inputs": "normal plus 0.25, (batch, num_heads, seqlen, head_dim) contiguous",
            "host_shape": list(_HOST_SIZES[self.device]),
            "threads": _threads() if self.device == "cpu" else None,
            **asdict(self.windows),
        }

    def _problem(self, case: Case, inputs: tuple[Any, Any, Any]) -> Problem:
        if self.device == "cpu":
            return cpu_problem(case, *inputs)
        importlib.import_module("torch").cuda.empty_cache()  # what the last case's graphs held
        return gpu_problem(case, *inputs)

    def _poison(self, problem: Problem) -> None:
        """Leave NaN in the memory that the allocator is likely to hand out for a result."""
        if self.device == "cuda":
            importlib.import_module("torch").full_like(problem.q, float("nan"))
        else:
            np.full_like(problem.q, np.nan)


def _choose(
    everybody: list[Contestant], kernels: Sequence[str] | None, peers: Sequence[str] | None
) -> list[Contestant]:
    ours = {c.name.removeprefix("dlattn "): c for c in everybody if c.ours}
    theirs = {c.name: c for c in everybody if not c.ours}
    chosen = []
    for option, names, available in (("--kernels", kernels, ours), ("--peers", peers, theirs)):
        for name in available if names is None else names:
            if name not in available:
                raise CommandError(f"{option} {name}; accepted here: {', '.join(available)}")
            chosen.append(available[name])
    if not chosen:
        raise CommandError("--kernels and --peers leave nobody to time")
    return chosen


def _require_torch() -> None:
    status = gpu_status()
    if status:
        raise CommandError(f"--device cuda: {status}")
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        raise CommandError(
            "timing on a GPU needs torch: it holds the tensors, captures the graphs and is a peer"
        ) from None
    if not torch.cuda.is_available():
        raise CommandError("timing on a GPU needs a torch that can use it; this one cannot")


def _threads() -> int:
    return int(dlattn.info().cpu_threads)


def _match_threads() -> None:
    """Give torch as many threads as this library takes."""
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        return
    torch.set_num_threads(_threads())


def _print_head(about: dict[str, Any], session: _Session) -> None:
    machine, versions, git = about["machine"], about["versions"], about["git"]
    where = machine.get("gpu") or machine["cpu"]
    commit = f"commit {git['sha'][:12]}" if git["sha"] else "unknown commit"
    commit += " with changes" if git["dirty"] else ""
    print(f"{where}; " + ", ".join(f"{name} {version}" for name, version in versions.items()))
    print(f"{commit}; {session.clock.method}")
    if session.device == "cpu":
        print(f"{_threads()} threads, load average {machine['load_average']}")
    print(flush=True)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise CommandError(f"{path}: cannot be written: {error.strerror}") from error
