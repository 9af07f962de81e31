"""Gradients of random problems by every kernel that computes them, against float64.

    python tools/fuzz/backward_differential.py --seconds 60               # a GPU if there is one
    python tools/fuzz/backward_differential.py --seconds 600 --workers 16 # processes, on all GPUs
    python tools/fuzz/backward_differential.py --seed 1234 --count 1      # one problem again
    python tools/fuzz/backward_differential.py --seconds 600 --kernels sm90  # what it serves alone

The problems are those of differential.py with a gradient of out, of lse, or of both, of any size
and strides, for all gradients or some. out and lse are what `attention` returns. The error of each
gradient may be three times that of a plain computation in the same dtype, which counts as at least
a rounding of scores and factors, relative to the magnitudes that the gradient is the sum of. A
probability below the least normal number may count as 0, whatever it is multiplied by, and a number
beyond the dtype's largest is as good as that: it overflows to infinity.

Rows whose scores float32 rounds by more than a thousandth, as a large finite bias makes them, have
no gradient here: lse does not tell the shares of their keys. They must not disturb the others.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import differential
import numpy as np
from differential import ROUNDING, Run
from random_problems import FINITE, Draw, Placed, Problem, contiguous

import dlattn
from dlattn.reference import (
    ABSOLUTE_TERM,
    attention_backward_reference,
    attention_varlen_backward_reference,
    dtype_name,
    max_error,
    round_to,
    same_dtype_gradients,
    to_float64,
)

KERNELS = {"cpu": ("cpu",), "cuda": ("auto", "scalar", "wmma", "sm90")}
MOST_SCORES = {"cpu": 1 << 14, "cuda": 1 << 18}
OF = {
    "dq": "q",
    "dk": "k",
    "dv": "v",
    "dbias": "bias",
    "dalibi_slopes": "alibi_slopes",
    "dsinks": "sinks",
}
LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "seqused_k")
LARGEST_LSE = 2.0**10
LARGEST_WORKSPACE = 1 << 25  # in float32 numbers
LEAST_SHARE = 2.0**-126  # the least normal number: exp2 of GPUs gives 0 below it

# Not dlattn's names: a test replaces these, to see that what is wrong is found.
_attention_backward = dlattn.attention_backward
_attention_varlen_backward = dlattn.attention_varlen_backward


class BackwardRun(Run):
    """One problem on every kernel that computes its gradients."""

    def __init__(self, arrays: Any, problem: Problem) -> None:
        self.random = random.Random(problem.seed)
        self.deterministic = arrays.device == "cpu" or self.random.random() < 0.3
        super().__init__(arrays, problem)

    def features(self) -> list[str]:
        """Those of the problem, and of its gradients."""
        kinds = {
            "deterministic": self.deterministic,
            "some gradients": self.needs is not None,
            "dlse": self.dlse is not None,
            "no dout": self.dout is None,
        }
        own = [x for x in self.problem.features() if x not in ("lse", "batch_invariant", "out")]
        return own + [name for name, used in kinds.items() if used]

    def served(self, kernel: str) -> bool:
        """Whether the kernel computes these gradients."""
        arguments, options, _ = self._backward_call(kernel)
        return bool(dlattn.supported_backward(*arguments, **options))

    def check(self, kernel: str) -> tuple[float, float, str]:
        """The largest error over its bound, and what else is wrong."""
        found, trouble = self._results(kernel)
        if trouble:
            return math.inf, 0.0, trouble
        if self.deterministic:
            again, _ = self._results(kernel)
            if any(not self.arrays.same(found[name], again[name]) for name in self.wanted):
                return math.inf, 0.0, "other bits the second time"
        worst, which = 0.0, ""
        exact, bounds = self.expected
        for name in self.wanted:
            if math.isinf(bounds[name]):
                continue
            error = max_error(_held(found[name], self._dtype(name)), exact[name]) / bounds[name]
            if not error <= worst:
                worst, which = error, name
        return worst, 0.0, which if not worst <= 1 else ""

    def _expect(self) -> None:
        """out and lse, and gradients of them."""
        arguments, options = self._call(None)
        self.tensors = dict(zip("qkv", self.inputs, strict=True)) | self.special
        present = [name for name, of in OF.items() if of in self.tensors]
        self.needs = None
        if self.random.random() < 0.3:
            self.needs = self.random.sample(present, self.random.randint(1, len(present)))
        self.wanted = present if self.needs is None else self.needs
        function = dlattn.attention_varlen if self.problem.varlen else dlattn.attention
        out, self.lse = function(*arguments, **{**options, "return_lse": True})
        self.out = self._swapped(out)
        self._draw_gradients()

    @cached_property
    def expected(self) -> tuple[dict[str, Any], dict[str, float]]:
        """The exact gradients and their bounds, which take the most time: not computed for a
        problem that no kernel serves."""
        return self._expect_gradients()

    def _backward_call(self, kernel: str) -> tuple[list[Any], dict[str, Any], dict[str, Any]]:
        """The arguments of a backward pass into poisoned memory, and the blocks of that."""
        (q, k, v, *lengths), options = self._call(None)
        for name in ("return_lse", "batch_invariant"):
            del options[name]
        draw = Draw(self.problem.seed + 3, ("float32",), 1)
        blocks = {}
        for name in ("dq", "dk", "dv"):
            if name in self.wanted:
                place = draw._place(tuple(self.tensors[OF[name]].shape), "out")
                view, block = self.arrays.poisoned(place, self.problem.dtype)
                blocks[name] = (view, block, place)
                options[name] = self._swapped(view)
        if self.arrays.device == "cuda":
            memory = Placed.of((LARGEST_WORKSPACE,), (1,))
            options["workspace"] = self.arrays.poisoned(memory, "float32")[0]
        options |= {"dlse": self.dlse, "needs": self.needs, "kernel": kernel}
        options["deterministic"] = self.deterministic
        dout = None if self.dout is None else self._swapped(self.dout)
        return [dout, q, k, v, self._swapped(self.out), self.lse, *lengths], options, blocks

    def _dtype(self, name: str) -> str:
        """That of a gradient."""
        return dtype_name(self.tensors[OF[name]])

    def _swapped(self, x: Any) -> Any:
        """Rows and heads as the problem's layout has them, from "bshd", or back."""
        return self.arrays.swap_heads(x) if self.problem.layout == "bhsd" else x

    def _results(self, kernel: str) -> tuple[dict[str, Any], str]:
        """The gradients, and what is wrong beside their values."""
        arguments, options, blocks = self._backward_call(kernel)
        function = _attention_varlen_backward if self.problem.varlen else _attention_backward
        found = function(*arguments, **options)
        for name in OF:
            if (getattr(found, name) is not None) != (name in self.wanted):
                return {}, f"{name} is there, or not, and should not be so"
        for name, (_, block, place) in blocks.items():
            if not self.arrays.untouched(block, place):
                return {}, f"a write beside {name}"
        views = {name: view for name, (view, _, _) in blocks.items()}
        return {name: getattr(found, name) for name in self.wanted} | views, ""

    def _draw_gradients(self) -> None:
        """dout and dlse: none, small or large, anywhere, and zero in rows of huge scores."""
        draw = self.random
        numbers = np.random.default_rng(self.problem.seed + 1)
        lse = to_float64(self.lse)
        certain = ~(np.abs(np.where(np.isfinite(lse), lse, 0)) > LARGEST_LSE)
        factor = draw.choice((1.0, 1.0, 1e-3, 100.0))
        kind = draw.choice(("out", "out", "out", "lse", "both"))
        place = Draw(self.problem.seed + 2, ("float32",), 1)
        shape = tuple(self.out.shape)
        self.dout = self.dlse = None
        if kind != "lse":
            values = numbers.standard_normal(shape, dtype=np.float32) + np.float32(0.25)
            values *= factor * np.swapaxes(certain, -1, -2)[..., None]
            at = place._place(shape, "out")
            self.dout = self.arrays.make(values, at, self.problem.dtype)
        if kind != "out":
            values = numbers.standard_normal(lse.shape, dtype=np.float32) * factor * certain
            step = draw.choice((1, 3))
            strides = tuple(s * step for s in contiguous(lse.shape))
            self.dlse = self.arrays.make(values, Placed.of(lse.shape, strides), "float32")

    def _expect_gradients(self) -> tuple[dict[str, Any], dict[str, float]]:
        (_, _, _, *lengths), options = self._call(None)
        if "seqused_k" in options:
            lengths.append(options["seqused_k"])
        not_of_gradients = ("return_lse", "batch_invariant")
        given = {n: x for n, x in self.problem.options.items() if n not in not_of_gradients}
        results = {"out": self.out, "lse": self.lse, "dout": self.dout, "dlse": self.dlse}
        tensors = self.tensors | results | dict(zip(LENGTHS, lengths, strict=False))
        given |= {name: _host(x) for name, x in tensors.items()}
        dtype = self.problem.dtype
        if self.problem.varlen:
            backward = attention_varlen_backward_reference
            exact, plain = backward(**given), backward(**given, dtype=dtype)
        else:
            exact = attention_backward_reference(**given)
            plain = same_dtype_gradients(**given, dtype=dtype)
        sums, factors = self._magnitudes(given), self._magnitudes_of_factors(given)
        of_scores = 2.0**-52 if dtype == "float64" else 2.0**-23
        rounding = ROUNDING[dtype] + of_scores * self._score_size(given)
        wanted = {name: _held(getattr(exact, name), self._dtype(name)) for name in self.wanted}
        bounds = {}
        for name in self.wanted:
            own = self._dtype(name)
            rough = max_error(_held(round_to(getattr(plain, name), own), own), wanted[name])
            if not rough < FINITE.get(own, math.inf) / 3:
                # Numbers on the way overflow, and any result is allowed.
                bounds[name] = math.inf
                continue
            largest = float(np.max(np.abs(wanted[name]), initial=0.0))
            bound = 3 * max(rough, rounding * sums[name]) + ABSOLUTE_TERM[own] * largest
            bounds[name] = max(bound + LEAST_SHARE * factors[name], 1e-37)
        return wanted, bounds

    def _score_size(self, given: dict[str, Any]) -> float:
        """At least the magnitude of the scores that count, and of their products of q and k."""
        q, k = (np.nan_to_num(given[name]) for name in "qk")
        scale = given["softmax_scale"] or q.shape[-1] ** -0.5
        longest = (np.max(np.linalg.norm(x, axis=-1), initial=0.0) for x in (q, k))
        lse = np.abs(given["lse"])
        counted = lse[np.isfinite(lse) & (lse <= LARGEST_LSE)]
        return float(scale * math.prod(longest) + np.max(counted, initial=0.0))

    def _magnitudes(self, given: dict[str, Any]) -> dict[str, float]:
        """By gradient, at least the largest sum of the magnitudes of its terms.

        The magnitudes of dS, P (|dout| |v|ᵀ + rowsum(|dout out|) + |dlse|), are the gradients of a
        bias that has all dimensions, in a pass with other inputs.
        """
        problem = self.problem
        out = given["out"]
        dout = np.zeros_like(out) if given["dout"] is None else np.abs(given["dout"])
        least = np.swapaxes(np.sum(np.abs(dout * out), axis=-1), -1, -2)
        if given["dlse"] is not None:
            least = least + np.abs(given["dlse"])
        q, k, v = (given[name] for name in "qkv")
        if problem.varlen:
            batch, sizes = len(problem.lengths_q), (problem.max_seqlen_q, problem.max_seqlen_k)
            backward = attention_varlen_backward_reference
        else:
            batch, sizes = q.shape[0], (q.shape[1], k.shape[1])
            backward = attention_backward_reference
        full = (batch, q.shape[-2], *sizes)
        bias = np.broadcast_to(given.get("bias", np.zeros(1)), full)
        others = {"dout": dout, "dlse": least, "out": np.zeros_like(out), "v": np.abs(v)}
        found = backward(**{**given, **others, "bias": bias})
        ds = found.dbias
        scale = given["softmax_scale"] or q.shape[-1] ** -0.5
        group = q.shape[-2] // k.shape[-2]
        by_kv_head = ds.reshape(batch, k.shape[-2], group, *sizes).sum(axis=(2, 3))
        largest = {name: np.max(np.abs(np.nan_to_num(given[name])), initial=0.0) for name in "qk"}
        sums = {
            "dq": scale * largest["k"] * np.max(ds.sum(axis=3), initial=0.0),
            "dk": scale * largest["q"] * np.max(by_kv_head, initial=0.0),
            "dv": np.max(found.dv, initial=0.0),
            "dalibi_slopes": np.sum(ds, axis=(0, 2, 3)).max(initial=0.0) * max(sum(sizes), 1),
        }
        if "bias" in given:
            shape = (1,) * (4 - given["bias"].ndim) + given["bias"].shape
            over = tuple(i for i, n in enumerate(shape) if n == 1)
            sums["dbias"] = np.max(ds.sum(axis=over), initial=0.0)
        if "sinks" in given:
            sums["dsinks"] = np.max(found.dsinks, initial=0.0)
        return {name: float(x) for name, x in sums.items()}

    def _magnitudes_of_factors(self, given: dict[str, Any]) -> dict[str, float]:
        """By gradient, at least such a sum of what probabilities are multiplied by."""
        out = given["out"]
        dout = np.zeros_like(out) if given["dout"] is None else np.abs(given["dout"])
        numbers = {name: np.abs(np.nan_to_num(given[name])) for name in "qkv"}
        largest = {name: np.max(x, initial=0.0) for name, x in numbers.items()}
        rows = np.sum(dout) * largest["v"] + np.sum(np.abs(dout * out))
        if given["dlse"] is not None:
            rows += np.sum(np.abs(given["dlse"]))
        q, k = numbers["q"], numbers["k"]
        terms = rows * max(math.prod(k.shape[:-2]), 1)
        scale = given["softmax_scale"] or q.shape[-1] ** -0.5
        sums = {
            "dq": terms * scale * largest["k"],
            "dk": terms * scale * largest["q"],
            "dv": np.sum(dout),
            "dbias": terms,
            "dalibi_slopes": terms * (q.shape[-3] + k.shape[-3]),
            "dsinks": rows,
        }
        return {name: float(x) for name, x in sums.items()}


def _held(x: Any, dtype: str) -> Any:
    """Within the finite numbers of a dtype."""
    largest = FINITE.get(dtype, math.inf)
    return np.clip(to_float64(x), -largest, largest)


def _host(x: Any) -> Any:
    """In float64; lengths and masks as they are."""
    if x is None or isinstance(x, int):
        return x
    if dtype_name(x) in ("bool", "int32"):
        return x if isinstance(x, np.ndarray) else x.cpu().numpy()
    return to_float64(x)


def run(
    arrays: Any,
    kernels: tuple[str, ...],
    seed: int,
    count: int | None = None,
    seconds: float | None = None,
    dtypes: tuple[str, ...] = (),
    step: int = 1,
) -> differential.Summary:
    """Problems of every `step`th seed from `seed` on, as many as asked for or as time allows."""
    if kernels == differential.KERNELS["cuda"]:
        kernels = KERNELS["cuda"]

    def draw(seed: int, dtypes: Sequence[str], most_scores: int) -> Problem:
        del most_scores
        return Draw(seed, dtypes, MOST_SCORES[arrays.device]).problem()

    return differential.run(
        arrays, kernels, seed, count, seconds, dtypes, draw, step, attempt=BackwardRun
    )


if __name__ == "__main__":
    sys.exit(differential.main(__doc__, run=run))
