"""A run: everybody is checked, then takes turns being timed."""

from __future__ import annotations

import importlib
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

import dlattn
from dlattn.bench import correctness, tensors
from dlattn.bench.cases import Case
from dlattn.bench.peers import (
    CPU_KERNELS,
    GPU_KERNELS,
    Bound,
    Contestant,
    Problem,
    UnavailableError,
    cpu_contestants,
    cpu_problem,
    gpu_contestants,
    gpu_problem,
    ours_with,
)
from dlattn.bench.report import Result, best_peer
from dlattn.bench.timing import Clock, CpuClock, GpuClock, Prepared, Windows
from dlattn.console.devices import gpu_status
from dlattn.console.errors import CommandError, first_line

# A fact about an entrant and its baseline, by which their times are compared as well.
TILES = "tiles"
_WMMA = "dlattn wmma"
_HOST_SIZES = {"cuda": (1, 8, 128, 64), "cpu": (1, 1, 16, 64)}


@dataclass(frozen=True)
class Entrant:
    """A contestant with the problem that it is to solve, and what its speed is measured by."""

    contestant: Contestant
    problem: Problem
    against: Entrant | None = None  # its baseline, one of those that it takes turns with
    operations: float | None = None  # where the case's count does not say it
    facts: Mapping[str, float] = field(default_factory=dict)  # to record beside the times
    plain: Entrant | None = None  # itself without the feature, where that is not its baseline
    beside: tuple[Entrant, ...] = ()  # others to tell its speed relative to

    @property
    def label(self) -> str:
        """Whom a baseline is named by."""
        variant = self.problem.case.variant
        return f"{self.contestant.name}, {variant}" if variant else self.contestant.name


class Session:
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
        self.contestants = _choose(device, everybody, kernels, peers)

    def of_case(self, case: Case) -> list[Entrant]:
        """Everybody with one case."""
        problem = self._problem(case)
        return [Entrant(contestant, problem) for contestant in self.contestants]

    def time(self, entrants: Sequence[Entrant]) -> list[Result]:
        """Check everybody, then let them take turns."""
        expected: dict[int, Any] = {}
        results, ready = [], []
        for entrant in entrants:
            problem, contestant = entrant.problem, entrant.contestant
            result = Result(problem.case, contestant.name, contestant.ours)
            result.operations, result.facts = entrant.operations, dict(entrant.facts)
            results.append(result)
            try:
                bound = contestant.bind(problem)
                result.plan = bound.plan
                with bound.context():
                    self._poison(problem)
                    out = (bound.checked or bound.call)()
                    if id(problem) not in expected:
                        expected[id(problem)] = _expect(problem)
                    errors = expected[id(problem)].errors(_as_of(problem, out))
                    result.max_error, result.bound_ratio = errors
                    del out
                    if result.wrong and result.ours:
                        continue
                    prepared = self.clock.prepare(bound.call, bound.turn)
                    result.note = "; ".join(note for note in (bound.note, prepared.note) if note)
            except UnavailableError as error:
                result.note = str(error)
            except Exception as error:  # every library refuses in its own way
                result.note = first_line(error)
                if result.ours:
                    result.bound_ratio = math.inf
            else:
                ready.append((result, bound, prepared))
        self._take_turns(ready)
        _compare(entrants, results)
        _compare_ours(entrants, results)
        return results

    def _take_turns(self, ready: Sequence[tuple[Result, Bound, Prepared]]) -> None:
        for turn in range(self.windows.rounds):
            order = ready if turn % 2 == 0 else ready[::-1]
            for result, bound, prepared in order:
                with bound.context():
                    seconds = self.clock.window(prepared, self.windows)
                result.times.append(statistics.median(seconds))

    def host_entrants(self, dtype: str) -> dict[str, Entrant]:
        """Everybody with a problem whose time on the device is too short to matter."""
        problem = self._problem(Case(_HOST_SIZES[self.device], False, dtype))
        return {contestant.name: Entrant(contestant, problem) for contestant in self.contestants}

    def host_times(self, entrants: Mapping[str, Entrant]) -> dict[str, float | None]:
        """The eager call's host time, by the names given."""
        host: dict[str, float | None] = {}
        for name, entrant in entrants.items():
            try:
                bound = entrant.contestant.bind(entrant.problem)
                with bound.context():
                    host[name] = self.clock.host(bound.call, self.windows)
            except Exception:  # its cases say why
                host[name] = None
        return host

    def protocol(self) -> dict[str, Any]:
        """How the times were taken."""
        return {
            "method": self.clock.method,
            "device": self.device,
            "inputs": "normal plus 0.25, (batch, num_heads, seqlen, head_dim) contiguous",
            "host_shape": list(_HOST_SIZES[self.device]),
            "threads": int(dlattn.info().cpu_threads) if self.device == "cpu" else None,
            **asdict(self.windows),
        }

    def release(self) -> None:
        """Give back what the last cases' graphs held."""
        if self.device == "cuda":
            importlib.import_module("torch").cuda.empty_cache()

    def _problem(self, case: Case) -> Problem:
        if self.device == "cpu":
            return cpu_problem(case, *correctness.draw(case))
        return gpu_problem(case, *tensors.draw(case, self.device))

    @staticmethod
    def _poison(problem: Problem) -> None:
        """Leave NaN in the memory that the allocator is likely to hand out for a result."""
        if isinstance(problem.q, np.ndarray):
            np.full_like(problem.q, np.nan)
        else:
            tensors.fill_with_nan(importlib.import_module("torch").empty_like(problem.q))


def _expect(problem: Problem) -> Any:
    if problem.caches is not None:
        return problem.caches.inputs.expected
    if problem.backward is not None:
        return problem.backward.expected
    if isinstance(problem.q, np.ndarray):
        return correctness.Expectations(problem.case, problem.q, problem.k, problem.v)
    options = {k: v for k, v in problem.options.items() if k != "return_lse"}
    options["causal"] = problem.case.causal
    inputs = (problem.q, problem.k, problem.v)
    if problem.varlen is not None:
        return tensors.ExpectedVarlen(*inputs, problem.varlen.lengths, options)
    return tensors.Expected(*inputs, options)


def _as_of(problem: Problem, out: Any) -> Any:
    """A result, or each of several, as the kind of array that the problem's inputs are."""
    if isinstance(out, (tuple, list)):
        return [_as_of(problem, each) for each in out]
    torch_result = hasattr(out, "detach")
    if isinstance(problem.q, np.ndarray):
        return out.float().numpy() if torch_result else np.asarray(out)
    return out if torch_result else importlib.import_module("torch").from_dlpack(out)


def _compare(entrants: Sequence[Entrant], results: Sequence[Result]) -> None:
    """Work out how fast everybody is relative to its baseline, in operations per second."""
    by_entrant = {id(entrant): result for entrant, result in zip(entrants, results, strict=True)}
    for entrant, result in zip(entrants, results, strict=True):
        for other in entrant.beside:
            rival = by_entrant[id(other)]
            if result.tflops is not None and rival.tflops is not None:
                name = f"vs {rival.contestant} {rival.case.dtype}"
                result.facts[name] = result.tflops / rival.tflops
        if entrant.against is None:
            continue
        result.baseline = entrant.against.label
        baseline = by_entrant[id(entrant.against)]
        if result.tflops is not None and baseline.tflops is not None:
            result.vs_baseline = result.tflops / baseline.tflops
        if result.seconds and baseline.seconds and {TILES} <= result.facts.keys() & baseline.facts:
            tiles = result.facts[TILES] / baseline.facts[TILES]
            result.facts["time a tile over the baseline's"] = (
                result.seconds / baseline.seconds / tiles
            )
        # A case may have more peers than the one that it is measured by.
        rivals = [r for e, r in zip(entrants, results, strict=True) if e.problem is entrant.problem]
        if sum(not rival.ours for rival in rivals) > 1:
            best = best_peer(rivals)
            if result.seconds is not None and best is not None:
                result.facts["vs best peer"] = best / result.seconds


def _compare_ours(entrants: Sequence[Entrant], results: Sequence[Result]) -> None:
    """Tell ours relative to the same kernel without the feature, and to wmma on the same problem.

    Both are facts, above 1 is faster. A ratio of two kernels, as `auto` may choose, is no figure of
    the feature and is left out.
    """
    by_entrant = {id(entrant): result for entrant, result in zip(entrants, results, strict=True)}
    for entrant, result in zip(entrants, results, strict=True):
        if not result.ours or result.seconds is None or result.tflops is None:
            continue
        if entrant.against is not None and entrant.against.contestant.ours:
            result.baseline_plan = by_entrant[id(entrant.against)].plan
        plain = by_entrant[id(entrant.plain)] if entrant.plain is not None else None
        if plain is not None and plain.tflops is not None and plain.kernel == result.kernel:
            result.facts["vs plain"] = result.tflops / plain.tflops
        if result.contestant == _WMMA:
            continue
        for other, rival in zip(entrants, results, strict=True):
            same = other.problem is entrant.problem and rival.contestant == _WMMA
            if same and rival.seconds is not None:
                result.facts["vs wmma"] = rival.seconds / result.seconds


def _choose(
    device: str,
    everybody: list[Contestant],
    kernels: Sequence[str] | None,
    peers: Sequence[str] | None,
) -> list[Contestant]:
    """Those named, or all. A kernel's name may be followed by a colon and one of its shapes."""
    known = GPU_KERNELS if device == "cuda" else CPU_KERNELS
    if kernels is None:
        chosen = [contestant for contestant in everybody if contestant.ours]
    else:
        for name in kernels:
            if name.partition(":")[0] not in ("auto", *known):
                raise CommandError(f"--kernels {name}; accepted here: auto, {', '.join(known)}")
        chosen = [ours_with(name) for name in kernels]
    theirs = {c.name: c for c in everybody if not c.ours}
    for name in theirs if peers is None else peers:
        if name not in theirs:
            raise CommandError(f"--peers {name}; accepted here: {', '.join(theirs)}")
        chosen.append(theirs[name])
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


def _match_threads() -> None:
    """Give torch as many threads as this library takes."""
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        return
    torch.set_num_threads(int(dlattn.info().cpu_threads))
