"""Every kernel that serves a random problem, against float64.

    python tools/fuzz/differential.py --seconds 60               # a GPU if there is one, else CPU
    python tools/fuzz/differential.py --seconds 600 --workers 16 # processes, on all GPUs in turn
    python tools/fuzz/differential.py --seed 1234 --count 1      # one problem again

Problem i has the seed --seed + i, printed where it fails; the second of three workers has seeds
--seed + 1, + 4, + 7 and so on. The error may be twice that of a plain computation in the same
dtype, which counts as at least one rounding of products, probabilities and result; a call must also
give the same bits twice and write nothing beside its result. On torch tensors each row is held to a
bound of its own: see `value_bounds`.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import numpy as np
from random_problems import Placed, Problem, contiguous, draw

import dlattn
from dlattn.bench.environment import describe
from dlattn.reference import (
    Bound,
    attention_reference,
    bias_range,
    bound_of,
    max_error,
    same_dtype_reference,
    to_float64,
)

KERNELS = {
    "cpu": ("cpu",),
    "cuda": (
        "scalar",
        "wmma",
        "wmma:wide",
        "wmma:narrow",
        "wmma:split",
        "wmma:single_pass",
        "wmma:pipelined",
        "wmma:persistent",
        "wmma:general",
        "wmma:packed",
        "wmma_halves",
        "wmma_smem",
        "wmma_qk",
        "decode:rows16",
        "decode:rows32",
        "sm90",
    ),
}
DTYPES = {
    "cpu": ("float16", "bfloat16", "float32", "float64"),
    "cuda": (*("float16",) * 4, *("bfloat16",) * 4, "float32"),
}
MOST_SCORES = {"cpu": 1 << 18, "cuda": 1 << 22}
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-22, "float64": 2.0**-51}
ALIGNED = 16  # bytes: no access is wider
FORMS: tuple[Literal["natural"], Literal["base2"]] = ("natural", "base2")
SPECIAL = ("bias", "mask", "alibi_slopes", "sinks")


class NumPyArrays:
    """Arrays on the CPU."""

    device = "cpu"

    def make(self, values: np.ndarray, place: Placed, dtype: str) -> Any:
        """The values at their place, in a block that holds NaN (or True) elsewhere."""
        return self._view(self.block(values, place, dtype), place)

    def block(self, values: np.ndarray, place: Placed, dtype: str) -> Any:
        """That block."""
        block = np.full(place.block, True if dtype == "bool" else np.nan, self._dtype(dtype))
        self._view(block, place)[...] = values
        return block

    def poisoned(self, place: Placed, dtype: str) -> tuple[Any, Any]:
        """A view full of NaN, and its block."""
        block = np.full(place.block, np.nan, self._dtype(dtype))
        return self._view(block, place), block

    def ints(self, values: Any) -> Any:
        return np.array(values, np.int32)

    def swap_heads(self, x: Any) -> Any:
        return x.swapaxes(-2, -3)

    def untouched(self, block: Any, place: Placed) -> bool:
        """Whether all but the view is NaN still."""
        inside = np.zeros(place.block, bool)
        self._view(inside, place)[...] = True
        return bool(np.isnan(block.astype(np.float64))[~inside].all())

    def expand(self, x: Any, sizes: tuple[int, ...]) -> Any:
        return np.broadcast_to(x, sizes)

    def same(self, a: Any, b: Any) -> bool:
        return bool(np.array_equal(to_float64(a), to_float64(b), equal_nan=True))

    def beside(self, x: Any, whole: Any) -> Any:
        """A copy of a part of a tensor, in rows that are aligned as all of the tensor's are."""
        bytes_ = alignment(whole.ctypes.data, whole.shape, whole.strides)
        strides, size = padded_rows(x.shape, x.itemsize)
        block = np.zeros(size + 2 * ALIGNED, x.dtype)
        first = (bytes_ - block.ctypes.data) % ALIGNED // x.itemsize
        copy = self._view(block, Placed(tuple(x.shape), strides, first, block.size))
        copy[...] = x
        return copy

    @staticmethod
    def _dtype(dtype: str) -> Any:
        if dtype == "bfloat16":
            import ml_dtypes

            return ml_dtypes.bfloat16
        return np.dtype(dtype)

    @staticmethod
    def _view(block: Any, place: Placed) -> Any:
        strides = [s * block.itemsize for s in place.strides]
        return np.lib.stride_tricks.as_strided(block[place.offset :], place.sizes, strides)


class TorchArrays:
    """Tensors on a GPU."""

    def __init__(self, device: str = "cuda") -> None:
        import torch

        self.device = device
        self.torch: Any = torch

    def make(self, values: np.ndarray, place: Placed, dtype: str) -> Any:
        """The values at their place, in a block that holds NaN (or True) elsewhere."""
        block = NumPyArrays().block(values, place, "bool" if dtype == "bool" else "float32")
        there = self.torch.from_numpy(block).to(self.device).to(getattr(self.torch, dtype))
        return there.as_strided(place.sizes, place.strides, place.offset)

    def poisoned(self, place: Placed, dtype: str) -> tuple[Any, Any]:
        """A view full of NaN, and its block."""
        kind = getattr(self.torch, dtype)
        block = self.torch.full((place.block,), math.nan, dtype=kind, device=self.device)
        return block.as_strided(place.sizes, place.strides, place.offset), block

    def ints(self, values: Any) -> Any:
        return self.torch.tensor(values, dtype=self.torch.int32, device=self.device)

    def swap_heads(self, x: Any) -> Any:
        return x.transpose(-2, -3)

    def untouched(self, block: Any, place: Placed) -> bool:
        """Whether all but the view is NaN still."""
        inside = self.torch.zeros_like(block, dtype=self.torch.bool)
        inside.as_strided(place.sizes, place.strides, place.offset).fill_(True)
        return bool((block.isnan() | inside).all())

    def expand(self, x: Any, sizes: tuple[int, ...]) -> Any:
        return x.expand(sizes)

    def same(self, a: Any, b: Any) -> bool:
        return bool(self.torch.equal(a.nan_to_num(nan=7.0), b.nan_to_num(nan=7.0)))

    def beside(self, x: Any, whole: Any) -> Any:
        """A copy of a part of a tensor, in rows that are aligned as all of the tensor's are."""
        of_bytes = [s * whole.element_size() for s in whole.stride()]
        bytes_ = alignment(whole.data_ptr(), whole.shape, of_bytes)
        strides, size = padded_rows(x.shape, x.element_size())
        block = x.new_zeros(size + 2 * ALIGNED)
        first = (bytes_ - block.data_ptr()) % ALIGNED // x.element_size()
        return block.as_strided(tuple(x.shape), strides, first).copy_(x)


def alignment(address: int, sizes: Sequence[int], strides: Sequence[int]) -> int:
    """The bytes, up to 16, that all rows of a tensor are aligned to; strides are in bytes."""
    apart = (s for n, s in zip(sizes[:-1], strides[:-1], strict=True) if n > 1)
    return math.gcd(ALIGNED, address, *apart)


def padded_rows(sizes: Sequence[int], element_bytes: int) -> tuple[tuple[int, ...], int]:
    """Strides of rows that lie whole multiples of 16 bytes apart, and their room, in elements."""
    step = ALIGNED // element_bytes
    row = -(-sizes[-1] // step) * step
    rows = contiguous((*sizes[:-1], row))
    return rows, math.prod(sizes[:-1]) * row


@dataclass
class Tally:
    """The results of one kernel for the problems."""

    runs: int = 0
    passed_over: int = 0
    failures: int = 0
    worst_out: tuple[float, int] = (0.0, -1)  # error over bound, and the problem's seed
    worst_lse: tuple[float, int] = (0.0, -1)

    def add(self, other: Tally) -> None:
        """Add what another worker found."""
        self.runs += other.runs
        self.passed_over += other.passed_over
        self.failures += other.failures
        self.worst_out = max(self.worst_out, other.worst_out)
        self.worst_lse = max(self.worst_lse, other.worst_lse)


@dataclass
class Summary:
    """All of a run."""

    device: str
    first_seed: int
    end_seed: int  # beyond the last one
    workers: int = 1
    problems: int = 0
    seconds: float = 0.0  # of all workers
    features: Counter[str] = field(default_factory=Counter)
    served_features: dict[str, Counter[str]] = field(default_factory=dict)  # by kernel
    kernels: dict[str, Tally] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {
            "device": self.device,
            "seeds": [self.first_seed, self.end_seed],
            "workers": self.workers,
            "problems": self.problems,
            "seconds": round(self.seconds, 1),
            "features": dict(sorted(self.features.items())),
            "kernels": {
                name: {
                    "runs": tally.runs,
                    "passed_over": tally.passed_over,
                    "failures": tally.failures,
                    "worst_out": _told(tally.worst_out),
                    "worst_lse": _told(tally.worst_lse),
                    "features": dict(sorted(self.served_features[name].items())),
                }
                for name, tally in self.kernels.items()
            },
            "failures": self.failures,
        }

    def add(self, other: Summary) -> None:
        """Add what another worker found."""
        self.first_seed = min(self.first_seed, other.first_seed)
        self.end_seed = max(self.end_seed, other.end_seed)
        self.workers += other.workers
        self.problems += other.problems
        self.seconds += other.seconds
        self.features.update(other.features)
        self.failures += other.failures
        for name, tally in other.kernels.items():
            self.kernels[name].add(tally)
            self.served_features[name].update(other.served_features[name])


def _told(worst: tuple[float, int]) -> dict[str, Any]:
    """JSON knows no infinity."""
    ratio = worst[0] if math.isfinite(worst[0]) else None
    return {"error_over_bound": ratio, "seed": worst[1]}


class Run:
    """One problem on every kernel that serves it."""

    def __init__(self, arrays: Any, problem: Problem) -> None:
        self.arrays = arrays
        self.problem = problem
        made = {}
        for name, (values, place) in problem.tensors.items():
            dtype = problem.dtype
            if name in ("alibi_slopes", "sinks") or (name == "bias" and problem.seed % 2):
                dtype = "float32"
            made[name] = arrays.make(values, place, "bool" if name == "mask" else dtype)
        self.inputs = [made[name] for name in "qkv"]
        self.special = {name: made[name] for name in SPECIAL if name in made}
        self._expect()

    def features(self) -> list[str]:
        """The entries that a summary counts."""
        return self.problem.features()

    def served(self, kernel: str) -> bool:
        """Whether the kernel says that it serves the problem, where out lies included."""
        out = None
        if self.problem.out is not None:
            out, _ = self.arrays.poisoned(self.problem.out, self.problem.dtype)
        arguments, options = self._call(out)
        return bool(dlattn.supported(*arguments, kernel=kernel, **options))

    def check(self, kernel: str) -> tuple[float, float, str]:
        """Errors of out and lse over their bounds, and what else is wrong."""
        arrays, problem = self.arrays, self.problem
        results = []
        for _ in range(2):
            view, block = None, None
            if problem.out is not None:
                view, block = arrays.poisoned(problem.out, problem.dtype)
            else:  # memory that a new result may be given
                sizes = (*self.inputs[0].shape[:-1], self.inputs[2].shape[-1])
                arrays.poisoned(Placed.of(sizes, contiguous(sizes)), problem.dtype)
            arguments, options = self._call(view)
            function = dlattn.attention_varlen if problem.varlen else dlattn.attention
            result = function(*arguments, kernel=kernel, **options)
            out, lse = result if problem.options["return_lse"] else (result, None)
            if block is not None and not arrays.untouched(block, problem.out):
                return math.inf, 0.0, "a write beside out"
            results.append((arrays.swap_heads(out) if problem.layout == "bhsd" else out, lse))
        (out, lse), (again, lse_again) = results
        if not arrays.same(out, again) or (lse is not None and not arrays.same(lse, lse_again)):
            return math.inf, 0.0, "other bits the second time"
        if problem.options["batch_invariant"]:
            alone = self._first_alone(kernel, results[0][0])
            if alone is not None and not arrays.same(alone, out[: alone.shape[0]]):
                return math.inf, 0.0, "other bits alone than in a batch"
        return *self._errors(out, lse), ""

    def _first_alone(self, kernel: str, out: Any) -> Any:
        """The first batch entry or sequence without the others; None if there are no others.

        Its rows are aligned as they are beside the others, whose result `out` is: kernels may be
        chosen by that.
        """
        arrays, problem = self.arrays, self.problem
        special = dict(self.special)
        for name in SPECIAL[:3]:
            if name in special and special[name].ndim == (2 if name == "alibi_slopes" else 4):
                special[name] = special[name][:1]
        options = {**problem.options, **special, "kernel": kernel, "return_lse": False}
        tensors = (*self.inputs, out)

        def first(*counts: int) -> list[Any]:
            parts = [x[:n] for x, n in zip(tensors, counts, strict=True)]
            *inputs, options["out"] = map(arrays.beside, parts, tensors)
            return inputs

        if not problem.varlen:
            if out.shape[0] < 2:
                return None
            return dlattn.attention(*first(1, 1, 1, 1), **options)
        length_q, length_k = problem.lengths_q[0], problem.lengths_k[0]
        starts = [arrays.ints([0, length]) for length in (length_q, length_k)]
        longest = [problem.max_seqlen_q, problem.max_seqlen_k]
        if problem.seqused_k:
            options["seqused_k"] = arrays.ints(problem.seqused_k[:1])
        inputs = first(length_q, length_k, length_k, length_q)
        return dlattn.attention_varlen(*inputs, *starts, *longest, **options)

    def _call(self, out: Any) -> tuple[list[Any], dict[str, Any]]:
        arrays, problem = self.arrays, self.problem
        swapped = problem.layout == "bhsd"
        arguments = [arrays.swap_heads(x) if swapped else x for x in self.inputs]
        options = {**problem.options, **self.special, "layout": problem.layout}
        if out is not None:
            options["out"] = arrays.swap_heads(out) if swapped else out
        if problem.varlen:
            for lengths in (problem.lengths_q, problem.lengths_k):
                arguments.append(arrays.ints(np.cumsum([0, *lengths]).tolist()))
            arguments += [problem.max_seqlen_q, problem.max_seqlen_k]
            if problem.seqused_k:
                options["seqused_k"] = arrays.ints(problem.seqused_k)
        return arguments, options

    def _expect(self) -> None:
        """Exact results of every sequence, and bounds over all of them: of lifted rows, and others.

        Lifted: every key that the row may attend to has a large finite bias. Its scores are so
        large that float32 rounds them, in natural units or in base 2, both of which are right; a
        bias of 1e9 or more that they share leaves nothing else of them.
        """
        not_of_values = ("return_lse", "batch_invariant")
        options = {n: x for n, x in self.problem.options.items() if n not in not_of_values}
        self._parts = []
        worst = {lifted: Worst() for lifted in (False, True)}
        for at, inputs, special in self._sequences():
            exact, lifted = self._exact(inputs, {**options, **special})
            self._parts.append((at, exact, lifted))
            q, k, v = inputs
            absolute = attention_reference(q, k, abs(v), **options, **special)[0]
            for form in FORMS:
                plain = same_dtype_reference(q, k, v, form=form, **options, **special)
                if form == "natural" or lifted.any():
                    worst[True].take(plain, exact, absolute, lifted)
                if form == "natural":
                    worst[False].take(plain, exact, absolute, ~lifted)
            worst[False].scores = max(worst[False].scores, self._score_size(q, k))
        self.bounds = {lifted: w.bounds(self.problem.dtype) for lifted, w in worst.items()}

    def _exact(self, inputs: Any, options: dict[str, Any]) -> tuple[Any, Any]:
        """The right `out` and `lse`, and which rows are lifted."""
        out, lse = attention_reference(*inputs, **options)
        if "bias" not in options:
            return (out, lse), np.zeros(lse.shape, bool)
        biases = bias_range(*inputs[:2], **options)
        lifted = (biases.least >= 1e4) & np.isfinite(biases.least)
        shared = lifted & (biases.low == biases.high) & (biases.least >= 1e9)
        if shared.any() and self.problem.dtype != "float64":
            of_mean = attention_reference(*inputs, score_dtype="float32", **options)
            out = np.where(shared.swapaxes(1, 2)[..., None], of_mean[0], out)
            lse = np.where(shared, of_mean[1], lse)
        return (out, lse), lifted

    def _score_size(self, q: Any, k: Any) -> float:
        """At least the magnitude of the largest product of q and k, scaled: float32 rounds it."""
        scale = self.problem.options["softmax_scale"] or q.shape[-1] ** -0.5
        lengths = (np.linalg.norm(to_float64(x), axis=-1) for x in (q, k))
        return scale * math.prod(float(np.max(x, initial=0.0)) for x in lengths)

    def _sequences(self) -> Any:
        """Where each stands, its q, k and v as a batch of one, and its share of the rest."""
        problem, arrays = self.problem, self.arrays
        q, k, v = self.inputs
        if not problem.varlen:
            yield None, (q, k, v), self.special
            return
        batch, heads = len(problem.lengths_q), q.shape[1]
        full = (batch, heads, problem.max_seqlen_q, problem.max_seqlen_k)
        used = problem.seqused_k or problem.lengths_k
        start_q = start_k = 0
        for b, (length_q, length_k) in enumerate(
            zip(problem.lengths_q, problem.lengths_k, strict=True)
        ):
            rows, keys = slice(start_q, start_q + length_q), slice(start_k, start_k + used[b])
            special = dict(self.special)
            for name in ("bias", "mask"):
                if name in special:
                    of_sequence = arrays.expand(special[name], full)[b : b + 1]
                    special[name] = of_sequence[:, :, :length_q, : used[b]]
            if "alibi_slopes" in special:
                special["alibi_slopes"] = arrays.expand(special["alibi_slopes"], full[:2])[b]
            if length_q:
                yield rows, (q[None, rows], k[None, keys], v[None, keys]), special
            start_q, start_k = start_q + length_q, start_k + length_k

    def _errors(self, out: Any, lse: Any) -> tuple[float, float]:
        worst_out = worst_lse = 0.0
        for rows, exact, lifted in self._parts:
            for of_lifted, bound in self.bounds.items():
                those = lifted == of_lifted
                of_out = those.swapaxes(1, 2)
                part = to_float64(out if rows is None else out[None, rows])
                error = max_error(part[of_out], exact[0][of_out])
                worst_out = max(worst_out, error / bound.out)
                if lse is not None:
                    part = to_float64(lse if rows is None else lse[None, :, rows])
                    error = max_error(part[those], exact[1][those])
                    worst_lse = max(worst_lse, error / bound.lse)
        return worst_out, worst_lse


@dataclass
class Worst:
    """The worst that plain computations make of some rows."""

    out: float = 0.0
    lse: float = 0.0
    most_out: float = 0.0
    most_lse: float = 0.0
    weighed: float = 0.0  # the largest sum of magnitudes of V, weighed
    scores: float = 0.0  # the largest magnitude of a product of q and k

    def take(self, plain: Any, exact: Any, absolute: Any, rows: Any) -> None:
        """Add the rows (batch, heads, rows) of a result; `absolute` is that of abs(v)."""
        of_out = rows.swapaxes(1, 2)
        self.out = max(self.out, max_error(plain[0][of_out], exact[0][of_out]))
        self.lse = max(self.lse, max_error(plain[1][rows], exact[1][rows]))
        self.most_out = max(self.most_out, _magnitude(exact[0][of_out]))
        self.most_lse = max(self.most_lse, _magnitude(exact[1][rows]))
        self.weighed = max(self.weighed, _magnitude(absolute[of_out]))

    def bounds(self, dtype: str) -> Bound:
        """Twice that, or a rounding of scores, probabilities and result."""
        of_scores = 2.0**-52 if dtype == "float64" else 2.0**-23
        rounding = ROUNDING[dtype] + of_scores * self.scores
        out = bound_of(dtype, max(self.out, rounding * self.weighed), self.most_out)
        # lse is float32, even of a computation in float64.
        lse = bound_of("float32", max(self.lse, 2.0**-22 * self.scores), self.most_lse)
        return Bound(out, lse)


def _magnitude(x: Any) -> float:
    x = np.abs(x)
    return float(np.max(x[np.isfinite(x)], initial=0.0))


def attempt_on(arrays: Any) -> type[Run]:
    """The bounds that hold kernels to float64: whole results on NumPy arrays, each row on torch
    tensors."""
    if isinstance(arrays, NumPyArrays):
        return Run
    from values import ValuesRun

    return ValuesRun


def run(
    arrays: Any,
    kernels: tuple[str, ...],
    seed: int,
    count: int | None = None,
    seconds: float | None = None,
    dtypes: tuple[str, ...] = (),
    draw: Callable[[int, tuple[str, ...], int], Problem] = draw,
    step: int = 1,
    attempt: Callable[[Any, Problem], Run] | None = None,
) -> Summary:
    """Problems of every `step`th seed from `seed` on, as many as asked for or as time allows."""
    summary = Summary(arrays.device, seed, seed)
    for kernel in kernels:
        summary.kernels[kernel], summary.served_features[kernel] = Tally(), Counter()
    start = time.monotonic()
    dtypes = dtypes or DTYPES[arrays.device]
    make = attempt or attempt_on(arrays)
    while count is None or summary.problems < count:
        if seconds is not None and time.monotonic() - start >= seconds:
            break
        problem = draw(seed + step * summary.problems, dtypes, MOST_SCORES[arrays.device])
        summary.problems += 1
        summary.end_seed = problem.seed + 1
        try:
            trial = make(arrays, problem)
        except ValueError as error:  # the plain computation bounds nothing: the test is broken
            summary.failures.append(f"{error}; {problem.describe()}")
            print(f"FAIL {summary.failures[-1]}", flush=True)
            continue
        features = trial.features()
        summary.features.update(features)
        for kernel in kernels:
            tally = summary.kernels[kernel]
            if not trial.served(kernel):
                tally.passed_over += 1
                continue
            try:
                out, lse, trouble = trial.check(kernel)
            except Exception as error:  # a kernel that promised to serve must not raise
                out, lse, trouble = math.inf, math.inf, f"{type(error).__name__}: {error}"
            tally.runs += 1
            summary.served_features[kernel].update(features)
            tally.worst_out = max(tally.worst_out, (out, problem.seed))
            tally.worst_lse = max(tally.worst_lse, (lse, problem.seed))
            if trouble or not (out <= 1 and lse <= 1):
                tally.failures += 1
                text = f"{kernel}: out {out:.2f}, lse {lse:.2f} of the bound {trouble}; "
                summary.failures.append(text + problem.describe())
                print(f"FAIL {summary.failures[-1]}", flush=True)
    summary.seconds = time.monotonic() - start
    return summary


def report(summary: Summary) -> None:
    """The table."""
    print(
        f"{summary.problems} problems, seeds {summary.first_seed} to {summary.end_seed - 1}, "
        f"{summary.seconds:.0f} s of {summary.workers} worker(s)"
    )
    for name, count in sorted(summary.features.items()):
        print(f"  {count:6d}  {name}")
    print("kernel            runs  passed over  failures  worst out (seed)     worst lse (seed)")
    for name, t in summary.kernels.items():
        print(
            f"{name:14s} {t.runs:7d} {t.passed_over:12d} {t.failures:9d}  "
            f"{t.worst_out[0]:.3f} ({t.worst_out[1]})  {t.worst_lse[0]:.3f} ({t.worst_lse[1]})"
        )


def arrays_of(device: str) -> Any:
    """Arrays of a device."""
    return NumPyArrays() if device == "cpu" else TorchArrays()


def _work(
    arrays_of: Callable[[str], Any],
    run: Callable[..., Summary],
    device: str,
    worker: int,
    arguments: tuple[Any, ...],
    step: int,
) -> Summary:
    """One worker's share, in a process of its own."""
    if device == "cuda":
        import torch

        torch.cuda.set_device(worker % torch.cuda.device_count())
    return run(arrays_of(device), *arguments, step=step)


def run_workers(
    arrays_of: Callable[[str], Any],
    run: Callable[..., Summary],
    device: str,
    kernels: tuple[str, ...],
    seed: int,
    count: int | None,
    seconds: float | None,
    workers: int,
) -> Summary:
    """The same in `workers` processes, each of which computes in one thread."""
    share = None if count is None else -(-count // workers)
    context = multiprocessing.get_context("spawn")
    with (
        mock.patch.dict(os.environ, OMP_NUM_THREADS="1"),
        ProcessPoolExecutor(workers, mp_context=context) as pool,
    ):
        parts = [
            pool.submit(
                _work,
                arrays_of,
                run,
                device,
                worker,
                (kernels, seed + worker, share, seconds),
                workers,
            )
            for worker in range(workers)
        ]
        summary = parts[0].result()
        for part in parts[1:]:
            summary.add(part.result())
    return summary


def main(
    about: str = __doc__,
    arrays_of: Callable[[str], Any] = arrays_of,
    run: Callable[..., Summary] = run,
) -> int:
    """Exit code 1 if a kernel failed, 2 if none served anything."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU if there is one")
    parser.add_argument("--seed", type=int, default=0, help="of the first problem")
    parser.add_argument("--count", type=int, help="how many; default: as --seconds says, or 200")
    parser.add_argument("--seconds", type=float, help="stop after so many")
    parser.add_argument("--workers", type=int, default=1, help="processes to share the problems")
    parser.add_argument("--kernels", nargs="+", help="default: all of the device")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the summary there")
    parser.add_argument("--commit", metavar="SHA", help="to record; default: ask git, here")
    args = parser.parse_args()
    device = args.device or ("cuda" if dlattn.info().gpu else "cpu")
    if args.count is None and args.seconds is None:
        args.count = 200
    kernels = tuple(args.kernels or KERNELS[device])
    if args.workers > 1:
        limits = args.count, args.seconds, args.workers
        summary = run_workers(arrays_of, run, device, kernels, args.seed, *limits)
    else:
        summary = run(arrays_of(device), kernels, args.seed, args.count, args.seconds)
    report(summary)
    if args.json:
        document = {**describe(device, args.commit), **summary.to_json()}
        args.json.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
    if summary.failures:
        print(f"again: python {sys.argv[0]} --device {device} --seed <seed> --count 1")
        return 1
    return 0 if any(tally.runs for tally in summary.kernels.values()) else 2


if __name__ == "__main__":
    sys.exit(main())
