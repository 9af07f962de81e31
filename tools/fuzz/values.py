"""Every kernel that serves a problem of extreme values, against float64.

    python tools/fuzz/values.py --seconds 60               # a GPU if there is one, else CPU
    python tools/fuzz/values.py --seconds 600 --workers 16 # processes, on all GPUs in turn
    python tools/fuzz/values.py --seed 1234 --count 1      # one problem again

Bias, masks with a bias, softcap, ALiBi slopes, sinks, softmax_scale and the magnitudes of q, k and
v cover the accepted range of each. `value_bounds` says what a right result is.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import differential
from differential import Run, TorchArrays
from random_problems import Problem
from value_bounds import Expected
from value_problems import draw_values

from dlattn.bench.tensors import torch_module

MOST_SCORES = {"cpu": 1 << 15, "cuda": 1 << 20}


class BrokenTest(ValueError):
    """The plain computation is not finite: the problem is outside the accepted range."""


class ValuesRun(Run):
    """One problem on every kernel that serves it, each row held to its own bound."""

    arrays: TorchArrays

    def _expect(self) -> None:
        options = dict(self.problem.options)
        for name in ("return_lse", "batch_invariant"):
            options.pop(name)
        self.kinds: Counter[str] = Counter()
        self._parts = []
        for at, (q, k, v), special in self._sequences():
            special = dict(special)
            slopes = special.get("alibi_slopes")
            if slopes is not None and slopes.dim() == 1:
                special["alibi_slopes"] = slopes[None]
            expected = Expected(q, k, v, {**options, **special})
            if expected.broken:
                raise BrokenTest(f"not finite in plain float32: {self.problem.describe()}")
            self.kinds.update(expected.kinds())
            self._parts.append((at, expected))

    def features(self) -> list[str]:
        """Those of the problem, and the kinds of its rows."""
        kinds = [f"rows: {kind}" for kind, count in self.kinds.items() if count]
        return [*self.problem.features(), *kinds]

    def check(self, kernel: str) -> tuple[float, float, str]:
        """Errors of out and lse over their bounds, and what else is wrong, or the worst row."""
        self._worst = ""
        out, lse, trouble = super().check(kernel)
        right = out <= 1 and lse <= 1
        return out, lse, trouble or ("" if right else self._worst)

    def _errors(self, out: Any, lse: Any) -> tuple[float, float]:
        worst = (0.0, 0.0)
        for rows, expected in self._parts:
            part = out if rows is None else out[None, rows]
            part_lse = lse if rows is None or lse is None else lse[None, :, rows]
            *found, text = expected.worst(part, part_lse)
            if max(found) > max(worst):
                self._worst = text if rows is None else f"{rows}: {text}"
            worst = (max(worst[0], found[0]), max(worst[1], found[1]))
        return worst


def run(
    arrays: TorchArrays,
    kernels: tuple[str, ...],
    seed: int,
    count: int | None = None,
    seconds: float | None = None,
    dtypes: tuple[str, ...] = (),
    step: int = 1,
) -> differential.Summary:
    """Problems of every `step`th seed from `seed` on, as many as asked for or as time allows."""

    def draw(seed: int, dtypes: tuple[str, ...], most_scores: int) -> Problem:
        del most_scores
        return draw_values(seed, dtypes, MOST_SCORES[arrays.device])

    return differential.run(arrays, kernels, seed, count, seconds, dtypes, draw, step)


def main() -> int:
    """Exit code 1 if a kernel failed, 2 if none served anything."""
    torch_module().set_num_threads(1)  # its matrices are small
    return differential.main(__doc__, TorchArrays, run)


if __name__ == "__main__":
    sys.exit(main())
