"""Kernels of 8-bit products on random problems, against the CPU backend.

    python tools/fuzz/eight_bit_problems.py --seconds 60               # on a GPU
    python tools/fuzz/eight_bit_problems.py --seconds 600 --workers 16 # processes, on all GPUs
    python tools/fuzz/eight_bit_problems.py --seed 1234 --count 1      # one problem again

q, k and v are float8_e4m3fn, or 16-bit tensors that a precision quantises. The CPU backend has the
same numbers in 8 bits and rounds nothing else, so a kernel may differ by what it rounds on the way:
probabilities to e4m3, each by a sixteenth at most, or by half the smallest number, or to fp16, by
less; scores, of which tensor cores keep 14 bits; and what one number of q, rounded the other way,
changes. Each element of out, and each lse, is held to the sum of these.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import differential
import numpy as np
from differential import ROUNDING, Run, TorchArrays
from random_problems import Draw, Problem

import dlattn
from dlattn.bench.tensors import torch_module

FLOAT8 = "float8_e4m3fn"
KINDS = (FLOAT8, "int8_fp8", "int8_fp16", "fp8")
KERNELS = {"cpu": ("cpu",), "cuda": ("sm90_fp8", "wmma8")}
MOST_SCORES = {"cpu": 1 << 15, "cuda": 1 << 19}
# Half the distance of e4m3's smallest numbers, of probabilities whose largest is 256 or, of
# int8_fp8, 64; of fp16's, of probabilities whose largest is 64.
SMALLEST = {FLOAT8: 2.0**-18, "fp8": 2.0**-18, "int8_fp8": 2.0**-16, "int8_fp16": 2.0**-31}
# How far a probability moves that is rounded to e4m3, and to fp16, and a little.
ROUNDED = {FLOAT8: 1.1 / 16, "fp8": 1.1 / 16, "int8_fp8": 1.1 / 16, "int8_fp16": 1.1 / 2048}

# Not dlattn's name: a test replaces that, to see that what is wrong is found.
_attention = dlattn.attention


class EightBitDraw(Draw):
    """Draws a problem of one of KINDS."""

    def __init__(self, seed: int, dtypes: Sequence[str], most_scores: int) -> None:
        super().__init__(seed, dtypes, most_scores)
        self.kind = self._random.choice(KINDS)

    def problem(self) -> Problem:
        """The problem of this seed; its dtype is that of out."""
        problem = super().problem()
        options = dict(problem.options)
        # A product of scores and softmax_scale that is as good as an infinity is left to values.py.
        if (options["softmax_scale"] or 0.0) > 1.0:
            options["softmax_scale"] = None
        if self.kind == FLOAT8:
            # Odd seeds have a bias in float32, others one of q's dtype, which float8 is not.
            tensors = {
                name: drawn
                for name, drawn in problem.tensors.items()
                if name != "bias" or problem.seed % 2
            }
            return replace(problem, dtype="bfloat16", options=options, tensors=tensors)
        return replace(problem, options={**options, "precision": self.kind})

    def _head_dim(self) -> int:
        if self.kind == FLOAT8:
            return -(-super()._head_dim() // 16) * 16
        return min(super()._head_dim(), 256)

    def _options(self) -> dict[str, Any]:
        options = super()._options()
        if self.kind != FLOAT8 or self._random.random() < 0.8:
            options["softcap"] = 0.0
        return options

    def _add_scores(
        self,
        tensors: dict[str, tuple[np.ndarray, Any]],
        full: tuple[int, int, int, int],
        dtype: str,
    ) -> None:
        super()._add_scores(tensors, full, dtype)
        tensors.pop("alibi_slopes", None)


class EightBitRun(Run):
    """One problem on every kernel that serves it, each element held to a bound of its own."""

    arrays: TorchArrays

    def __init__(self, arrays: TorchArrays, problem: Problem) -> None:
        self.kind = problem.options.get("precision", FLOAT8)
        self._out_dtype = problem.dtype
        of_inputs = FLOAT8 if self.kind == FLOAT8 else problem.dtype
        super().__init__(arrays, replace(problem, dtype=of_inputs))
        self.problem = problem

    def features(self) -> list[str]:
        """Those of the problem, and what is in 8 bits."""
        return [*self.problem.features(), f"8 bits: {self.kind}"]

    def _expect(self) -> None:
        options = {
            name: x
            for name, x in self.problem.options.items()
            if name not in ("return_lse", "batch_invariant")
        }
        if self.kind == FLOAT8:
            options["out_dtype"] = "float32"
        self._parts = []
        for at, inputs, special in self._sequences():
            q, k, v = (x.cpu() for x in inputs)
            special = {name: x.cpu() for name, x in special.items()}
            asked = {**options, **special, "kernel": "cpu"}
            out, lse = _attention(q, k, v, return_lse=True, **asked)
            weighed = _attention(q, k, v.float().abs().to(v.dtype), **asked)
            bounds = self._bounds(q, k, v, special.get("bias"), out, lse, weighed)
            self._parts.append((at, out, lse, *bounds))

    def _bounds(
        self, q: Any, k: Any, v: Any, bias: Any, out: Any, lse: Any, weighed: Any
    ) -> tuple[Any, Any]:
        """The errors of elements of out, and of lse."""
        scale = self.problem.options["softmax_scale"] or q.shape[-1] ** -0.5
        group = q.shape[2] // k.shape[2]
        q_norms = q.float().norm(dim=-1)
        k_norms = k.float().norm(dim=-1)
        k_largest = k_norms.amax(1) if k.shape[1] else k_norms.new_zeros(k.shape[0], k.shape[2])
        # 14 bits of sums, and a number of q that is rounded the other way.
        relative = 2.0**-11 + 2.0**-4 / q.shape[-1]
        scores = relative * scale * q_norms * k_largest.repeat_interleave(group, -1)[:, None]
        if bias is not None and bias.numel():
            scores = scores + 2.0**-22 * bias.float().nan_to_num(0.0, 0.0, 0.0).abs().amax()
        largest_v = v.float().abs().nan_to_num(0.0).amax().item() if v.numel() else 0.0
        small = k.shape[1] * SMALLEST[self.kind] * largest_v
        rounding = 2 * ROUNDING[self._out_dtype] * out.float().abs() + 2.0**-24
        share = ROUNDED[self.kind] + 2 * torch_module().expm1(scores[..., None].clamp(max=3.0))
        of_lse = scores.transpose(1, 2) + 1e-5 * (1 + lse.nan_to_num(0.0, 0.0, 0.0).abs())
        return share * weighed.float() + small + rounding, of_lse

    def _errors(self, out: Any, lse: Any) -> tuple[float, float]:
        worst_out = worst_lse = 0.0
        for rows, exact, exact_lse, bound, bound_lse in self._parts:
            part = (out if rows is None else out[None, rows]).cpu()
            worst_out = max(worst_out, _worst(part, exact, bound))
            if lse is not None:
                part = (lse if rows is None else lse[None, :, rows]).cpu()
                worst_lse = max(worst_lse, _worst(part, exact_lse, bound_lse))
        return worst_out, worst_lse


def _worst(found: Any, want: Any, bound: Any) -> float:
    """The largest error over its bound; what is not finite must be the same."""
    found, want = found.double(), want.double()
    same = (found == want) | (found.isnan() & want.isnan())
    error = ((found - want).abs() / bound.double()).masked_fill(same, 0.0)
    return error.nan_to_num(math.inf, math.inf).amax().item() if error.numel() else 0.0


def run(
    arrays: TorchArrays,
    kernels: tuple[str, ...],
    seed: int,
    count: int | None = None,
    seconds: float | None = None,
    dtypes: tuple[str, ...] = ("float16", "bfloat16"),
    step: int = 1,
) -> differential.Summary:
    """Problems of every `step`th seed from `seed` on, as many as asked for or as time allows."""
    if kernels == differential.KERNELS["cuda"]:
        kernels = KERNELS["cuda"]

    def draw(seed: int, dtypes: Sequence[str], most_scores: int) -> Problem:
        del most_scores
        return EightBitDraw(seed, dtypes, MOST_SCORES[arrays.device]).problem()

    return differential.run(
        arrays, kernels, seed, count, seconds, dtypes, draw, step, attempt=EightBitRun
    )


def main() -> int:
    """Exit code 1 if a kernel failed, 2 if none served anything."""
    torch_module().set_num_threads(1)  # its matrices are small
    return differential.main(__doc__, TorchArrays, run)


if __name__ == "__main__":
    sys.exit(main())
