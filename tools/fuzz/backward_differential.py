"""Gradients of random problems by every kernel that computes them, against float64.

    python tools/fuzz/backward_differential.py --seconds 60               # a GPU if there is one
    python tools/fuzz/backward_differential.py --seconds 600 --workers 16 # processes, on all GPUs
    python tools/fuzz/backward_differential.py --seed 1234 --count 1      # one problem again

The problems are those of differential.py with a gradient of out, of lse, or of both, of any size
and strides, for all gradients or some. out and lse are what `attention` returns. The error of each
gradient may be three times that of a plain computation in the same dtype, which counts as at least
a rounding of scores and factors, relative to the magnitudes that the gradient is the sum of.

Rows whose scores float32 rounds by more than a thousandth, as a large finite bias makes them, have
no gradient here: lse does not tell the shares of their keys. They must not disturb the others.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Sequence
from typing import Any

import differential
import numpy as np
from differential import ROUNDING
from random_problems import Draw, Placed, Problem, contiguous

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
LARGEST_LSE = 2.0**10
LARGEST_WORKSPACE = 1 << 25  # in float32 numbers

# Not dlattn's names: a test replaces these, to see that what is wrong is found.
_attention_backward = dlattn.attention_backward
_attention_varlen_backward = dlattn.attention_varlen_backward


class BackwardRun:
    """One problem on every kernel that computes its gradients."""

    def __init__(self, arrays: Any, problem: Problem) -> None:
        self.arrays, self.problem = arrays, problem
        self.random = random.Random(problem.seed)
        self.inputs = {
            name: arrays.make(values, place, self._dtype(name))
            for name, (values, place) in problem.tensors.items()
        }
        given = ("return_lse", "batch_invariant")
        self.options = {n: x for n, x in problem.options.items() if n not in given}
        present = [name for name, of in OF.items() if of in self.inputs]
        self.needs = None
        if self.random.random() < 0.3:
            self.needs = self.random.sample(present, self.random.randint(1, len(present)))
        self.wanted = present if self.needs is None else self.needs
        self.deterministic = arrays.device == "cpu" or self.random.random() < 0.3
        self._forward()
        self._draw_gradients()
        self._expect()

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
        """Whether the kernel computes these gradients, and refuses them before it begins if not."""
        try:
            self._results(kernel)
        except dlattn.UnsupportedError:
            return False
        except Exception:
            return True  # `check` meets it again
        return True

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
        for name in self.wanted:
            error = max_error(found[name], self.exact[name]) / self.bounds[name]
            if not error <= worst:
                worst, which = error, name
        return worst, 0.0, which if not worst <= 1 else ""

    def _dtype(self, name: str) -> str:
        problem = self.problem
        if name == "mask":
            return "bool"
        own = name in ("alibi_slopes", "sinks") or (name == "bias" and problem.seed % 2)
        return "float32" if own else problem.dtype

    def _lengths(self) -> dict[str, Any]:
        problem = self.problem
        if not problem.varlen:
            return {}
        starts = {
            f"cu_seqlens_{x}": self.arrays.ints(np.cumsum([0, *lengths]).tolist())
            for x, lengths in (("q", problem.lengths_q), ("k", problem.lengths_k))
        }
        longest = {"max_seqlen_q": problem.max_seqlen_q, "max_seqlen_k": problem.max_seqlen_k}
        used = {"seqused_k": self.arrays.ints(problem.seqused_k)} if problem.seqused_k else {}
        return {**starts, **longest, **used}

    def _laid_out(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """Tensors of rows and heads in the problem's layout."""
        if self.problem.layout == "bshd":
            return tensors
        rows = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
        return {
            name: self.arrays.swap_heads(x) if name in rows and x is not None else x
            for name, x in tensors.items()
        }

    def _forward(self) -> None:
        function = dlattn.attention_varlen if self.problem.varlen else dlattn.attention
        given = {**self._laid_out(self.inputs), **self._lengths(), **self.options}
        out, self.lse = function(**given, layout=self.problem.layout, return_lse=True)
        self.out = self._laid_out({"out": out})["out"]

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

    def _results(self, kernel: str) -> tuple[dict[str, Any], str]:
        """The gradients, computed into poisoned memory, and what is wrong beside their values."""
        arrays, problem = self.arrays, self.problem
        views, blocks = {}, {}
        draw = Draw(problem.seed + 3, ("float32",), 1)
        for name in ("dq", "dk", "dv"):
            if name in self.wanted:
                place = draw._place(tuple(self.inputs[OF[name]].shape), "out")
                views[name], block = arrays.poisoned(place, problem.dtype)
                blocks[name] = (block, place)
        given = self._laid_out({**self.inputs, **views, "out": self.out, "dout": self.dout})
        if arrays.device == "cuda":
            memory = Placed.of((LARGEST_WORKSPACE,), (1,))
            given["workspace"] = arrays.poisoned(memory, "float32")[0]
        function = _attention_varlen_backward if problem.varlen else _attention_backward
        found = function(
            **given,
            **self._lengths(),
            **self.options,
            lse=self.lse,
            dlse=self.dlse,
            layout=problem.layout,
            needs=self.needs,
            deterministic=self.deterministic,
            kernel=kernel,
        )
        for name in OF:
            if (getattr(found, name) is not None) != (name in self.wanted):
                return {}, f"{name} is there, or not, and should not be so"
        for name, (block, place) in blocks.items():
            if not arrays.untouched(block, place):
                return {}, f"a write beside {name}"
        results = {name: getattr(found, name) for name in self.wanted}
        return {**results, **views}, ""

    def _expect(self) -> None:
        """The exact gradients and their bounds."""
        tensors = {name: _host(x) for name, x in self.inputs.items()}
        given = {**tensors, **{name: _host(x) for name, x in self._lengths().items()}}
        given |= {**self.options, "dout": _host(self.dout), "dlse": _host(self.dlse)}
        given |= {"out": _host(self.out), "lse": _host(self.lse)}
        dtype = self.problem.dtype
        if self.problem.varlen:
            backward = attention_varlen_backward_reference
            exact, plain = backward(**given), backward(**given, dtype=dtype)
        else:
            exact = attention_backward_reference(**given)
            plain = same_dtype_gradients(**given, dtype=dtype)
        sums = self._magnitudes(given)
        of_scores = 2.0**-52 if dtype == "float64" else 2.0**-23
        rounding = ROUNDING[dtype] + of_scores * self._score_size(given)
        self.exact = {name: getattr(exact, name) for name in self.wanted}
        self.bounds = {}
        for name in self.wanted:
            own = dtype_name(self.inputs[OF[name]])
            rough = max_error(round_to(getattr(plain, name), own), self.exact[name])
            if not math.isfinite(rough):
                raise ValueError(f"{name} is not finite in a plain computation")
            largest = float(np.max(np.abs(self.exact[name]), initial=0.0))
            bound = 3 * max(rough, rounding * sums[name]) + ABSOLUTE_TERM[own] * largest
            self.bounds[name] = max(bound, 1e-37)

    def _score_size(self, given: dict[str, Any]) -> float:
        """At least the magnitude of the scores that count, and of their products of q and k."""
        q, k = (np.nan_to_num(given[name]) for name in "qk")
        scale = self.options["softmax_scale"] or q.shape[-1] ** -0.5
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
        scale = self.options["softmax_scale"] or q.shape[-1] ** -0.5
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
