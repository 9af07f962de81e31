"""Random attention problems whose values cover the accepted range of every argument.

Shapes, strides and masks are those of `random_problems`. Magnitudes are drawn in log space. Large
values fill whole tiles of keys, whole rows or single keys, at either end of the keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from random_problems import FINITE, SPELLINGS, Draw, Placed, Problem, contiguous

# Magnitudes of q, k and v, as exponents of two. An accumulator holds sums of many products with V,
# so that V stays that far below the largest float32: in bfloat16, whose probabilities exceed 1, as
# far as the accepted domain says. Products below 2^-100 would be subnormal.
RANGE = {"float16": (-12, 14), "bfloat16": (-45, 62), "float32": (-45, 62), "float64": (-45, 62)}
RANGE_OF_V = {"float16": (-8, 12), "bfloat16": (-60, 92), "float32": (-60, 112)}
LARGEST_SCORE = 2.0**124
HEAD_DIMS = (40, 64, 64, 80, 96, 128, 128, 192, 256)
LENGTHS = (1, 17, 64, 65, 128, 129, 192, 200, 256, 257, 320, 384, 448, 512, 576, 640, 700)
TILES = (16, 32, 64, 64, 128, 128, 176)


class DrawValues(Draw):
    """Draws one problem."""

    def __init__(self, seed: int, dtypes: Sequence[str], most_scores: int) -> None:
        super().__init__(seed, dtypes, most_scores)
        rng = self._random
        self._dtype = rng.choice(dtypes)
        self._dtypes = (self._dtype,)
        self._density = rng.choice((0.15, 0.3, 0.6))
        self._scale = 2.0 ** rng.uniform(-126, 126) if rng.random() < 0.4 else None
        # Where a bias may be as low as float32 goes, what is added to it has to stay small.
        self._to_the_end = rng.random() < 0.3
        self._limit = 2.0**60 if self._to_the_end else LARGEST_SCORE
        self._of_scores = rng.choice(("spread",) * 5 + ("equal", "equal keys", "one key", "trend"))
        self._target = self._exponent()
        self._largest_q = 0.0

    def problem(self) -> Problem:
        """The problem of this seed; `out` is always the caller's, poisoned before."""
        problem = super().problem()
        if problem.out is None:
            sizes = (*problem.tensors["q"][1].sizes[:-1], problem.tensors["v"][1].sizes[-1])
            problem = replace(problem, out=Placed.of(sizes, contiguous(sizes)))
        return problem

    def _exponent(self) -> float:
        """The exponent of the magnitude that scores are to have, to base two."""
        rng = self._random
        lowest, highest = rng.choice(((-6, 4),) * 4 + ((4, 14),) * 2 + ((14, 40), (-60, 120)))
        return rng.uniform(lowest, highest)

    def _head_dim(self) -> int:
        return self._random.choice(HEAD_DIMS)

    def _most_rows(self, most: int) -> int:
        """Few rows rather than few keys."""
        return max(1, most // self._random.choice((64, 200, 700)))

    def _length(self, most: int) -> int:
        rng = self._random
        drawn = rng.choice(LENGTHS) if rng.random() < 0.8 else rng.randint(1, 700)
        return max(1, min(drawn, most))

    def _options(self) -> dict[str, Any]:
        rng = self._random
        softcap = 0.0
        if self._some():
            exponent = rng.choice((rng.uniform(-100, 100), rng.uniform(-4, 30)))
            softcap = float(np.float32(2.0**exponent))
        options = {**super()._options(), "softmax_scale": self._scale, "softcap": softcap}
        return {**options, "return_lse": rng.random() < 0.9}

    def _place(self, sizes: tuple[int, ...], name: str) -> Placed:
        if self._random.random() < 0.8:
            return Placed.of(sizes, contiguous(sizes))
        return super()._place(sizes, name)

    def _place_scores(self, sizes: tuple[int, ...]) -> Placed:
        if self._random.random() < 0.7:
            return Placed.of(sizes, contiguous(sizes))
        return super()._place_scores(sizes)

    # --- q, k and v ------------------------------------------------------------------------------

    def _values(self, name: str, sizes: tuple[int, ...]) -> np.ndarray:
        rng = self._random
        x = self._numbers.standard_normal(sizes, dtype=np.float32) + np.float32(0.25)
        if name == "v":
            if rng.random() < 0.2:
                x += np.float32(3.0)
            low, high = RANGE_OF_V.get(self._dtype, RANGE_OF_V["float32"])
            return x * np.float32(2.0 ** rng.choice((0, 0, rng.uniform(low, high))))
        if self._of_scores == "equal":
            x[...] = 1.0
        elif self._of_scores == "equal keys" and name == "k":
            x[...] = x[..., :1, :1, :] if x.size else x
        elif self._of_scores == "one key" and name == "k" and x.size:
            x[..., rng.choice((0, -1, rng.randrange(sizes[-3]))), :, :] *= 2.0 ** rng.uniform(2, 8)
        elif self._of_scores == "trend" and name == "k":
            trend = np.linspace(0.1, rng.choice((4.0, 12.0)), sizes[-3], dtype=np.float32)
            x *= (trend if rng.random() < 0.5 else trend[::-1])[:, None, None]
        return self._scaled(name, x)

    def _scaled(self, name: str, x: np.ndarray) -> np.ndarray:
        """So that scores come close to their target, and nothing leaves its range."""
        low, high = RANGE[self._dtype]
        dim = x.shape[-1]
        scale = dim**-0.5 if self._scale is None else self._scale
        terms = dim if self._of_scores == "equal" else dim**0.5
        product = self._target - math.log2(scale * terms)
        product = min(max(product, 2 * low, -90.0), 2 * high, 110.0)
        if name == "q":
            share = self._random.choice((product / 2, self._random.uniform(low, high)))
            self._share = min(max(share, low, product - high), high, product - low)
        exponent = self._share if name == "q" else product - self._share
        limit = FINITE.get(self._dtype, FINITE["float32"])
        x = np.clip(x.astype(np.float64) * 2.0**exponent, -limit, limit)
        largest = float(np.max(np.abs(x), initial=0.0))
        if name == "q":
            self._largest_q = largest
        else:
            at_most = self._largest_q * largest * dim * max(1.0, scale)
            x *= min(1.0, self._limit / at_most) if at_most else 1.0
        return x.astype(np.float32)

    # --- what is added to scores -----------------------------------------------------------------

    def _add_scores(
        self,
        tensors: dict[str, tuple[np.ndarray, Placed]],
        full: tuple[int, int, int, int],
        dtype: str,
    ) -> None:
        rng, numbers = self._random, self._numbers
        if rng.random() < 0.7:
            sizes = self._broadcastable(full)
            tensors["bias"] = (self._bias(sizes, full), self._place_scores(sizes))
        if self._some():
            sizes = self._broadcastable(full)
            mask = numbers.random(sizes) < rng.choice((0.2, 0.7, 0.97))
            if rng.random() < 0.5:
                mask[...] = ~self._region(sizes, full)
            tensors["mask"] = (mask, self._place_scores(sizes))
        if self._some():
            sizes = full[1:2] if rng.random() < 0.5 else full[:2]
            tensors["alibi_slopes"] = (self._slopes(sizes), Placed.of(sizes, contiguous(sizes)))
        if self._some():
            tensors["sinks"] = (self._sinks(full[1]), Placed.of((full[1],), (rng.choice((1, 3)),)))

    def _broadcastable(self, full: tuple[int, int, int, int]) -> tuple[int, ...]:
        rng = self._random
        sizes = [n if rng.random() < 0.4 else 1 for n in full[:2]]
        sizes.append(full[2] if rng.random() < 0.75 else 1)
        sizes.append(full[3] if rng.random() < 0.95 else 1)
        return tuple(sizes[rng.choice((0, 0, 0, 1, 2)) :])

    def _bias(self, sizes: tuple[int, ...], full: tuple[int, int, int, int]) -> np.ndarray:
        rng, numbers = self._random, self._numbers
        bias = np.zeros(sizes, np.float32)
        if rng.random() < 0.5:
            spread = rng.choice((1.0, 1.0, 10.0 ** rng.uniform(-3, 4)))
            bias += numbers.standard_normal(sizes, dtype=np.float32) * np.float32(spread)
        own = self._dtype if self._seed % 2 == 0 else "float32"  # as differential.Run makes it
        limit = FINITE.get(own, FINITE["float32"])
        limit = limit if self._to_the_end else min(limit, 1e30)
        for _ in range(rng.choice((1, 1, 2))):
            region, value = self._region(sizes, full), self._low()
            added = bias.astype(np.float64) + value if rng.random() < 0.7 else value
            bias = np.where(region, np.clip(added, -limit, limit), bias).astype(np.float32)
        if rng.random() < 0.1:
            bias = np.where(self._region(sizes, full), np.float32(-np.inf), bias)
        if rng.random() < 0.03 and bias.size:
            bias.flat[rng.randrange(bias.size)] = rng.choice((np.nan, np.inf))
        return bias

    def _low(self) -> float:
        rng = self._random
        value = rng.choice(SPELLINGS) if rng.random() < 0.6 else -(10.0 ** rng.uniform(2, 38.5))
        return -value if rng.random() < 0.1 else value

    def _region(self, sizes: tuple[int, ...], full: tuple[int, int, int, int]) -> np.ndarray:
        """Which scores are at an extreme: padding, a causal mask, tiles, rows, keys."""
        rng = self._random
        rows, keys = np.arange(sizes[-2])[:, None], np.arange(sizes[-1])[None, :]
        length_q, length_k = sizes[-2:]
        tile = rng.choice(TILES)
        count = rng.choice((1, tile - 1, tile, tile + 1, length_k // 2, length_k - 1, length_k))
        row = rng.randrange(max(1, length_q))
        first = tile * rng.randrange(-(-max(1, length_k) // tile))
        kind = rng.choice(("right", "left", "causal", "tile", "last tile", "key", "rows", "random"))
        if kind == "right":
            region = (keys >= length_k - count) & (rows >= 0)
        elif kind == "left":
            region = (keys < count) & (rows >= 0)
        elif kind == "causal":
            region = keys > rows + (full[3] - full[2])
        elif kind == "tile":
            region = (keys >= first) & (keys < first + tile) & (rows >= 0)
        elif kind == "last tile":
            region = (keys >= (length_k - 1) // tile * tile) & (rows >= 0)
        elif kind == "key":
            region = (keys == rng.choice((0, length_k - 1, first))) & (rows >= 0)
        elif kind == "rows":
            chosen = rng.choice((rows == row, rows >= row, rows <= row, rows % 2 == 0))
            region = chosen & (keys >= 0)
        else:
            region = self._numbers.random((length_q, length_k)) < rng.choice((0.1, 0.5, 0.9))
        of_all = np.broadcast_to(region, sizes)
        if len(sizes) == 4 and sizes[0] > 1 and rng.random() < 0.5:  # one batch entry alone
            of_all = of_all & (np.arange(sizes[0]) == rng.randrange(sizes[0]))[:, None, None, None]
        return of_all

    def _slopes(self, sizes: tuple[int, ...]) -> np.ndarray:
        rng, numbers = self._random, self._numbers
        highest = 20.0 if self._to_the_end else 38.0
        kind = rng.choice(("usual", "wide", "one", "special"))
        if kind == "usual":
            return numbers.random(sizes, dtype=np.float32)
        if kind == "one":
            value = rng.choice((-1000.0, 1000.0, 1e4, -1e4, 1e8, 1e18, -1e18))
            return np.full(sizes, value, np.float32)
        exponents = numbers.uniform(-3.0, highest, sizes)
        slopes = (10.0**exponents * numbers.choice((-1.0, 1.0), sizes)).astype(np.float32)
        if kind == "special" and not self._to_the_end:
            slopes.flat[0] = rng.choice((np.inf, -np.inf, 1e30, -1e30, 3e38, np.nan))
        return slopes

    def _sinks(self, heads: int) -> np.ndarray:
        rng, numbers = self._random, self._numbers
        sinks = numbers.standard_normal(heads, dtype=np.float32) * np.float32(3.0)
        if rng.random() < 0.5:
            exponents = numbers.uniform(-2.0, 38.5, heads)
            sinks = (10.0**exponents * numbers.choice((-1.0, 1.0), heads)).astype(np.float32)
        if rng.random() < 0.4:
            extremes = (3e38, -3e38, 2.4e38, FINITE["float32"], np.inf, -np.inf, np.nan)
            sinks[rng.randrange(heads)] = rng.choice(extremes)
        return sinks


def draw_values(seed: int, dtypes: Sequence[str], most_scores: int) -> Problem:
    """The problem of a seed; its batch has at most about `most_scores` scores."""
    return DrawValues(seed, dtypes, most_scores).problem()
