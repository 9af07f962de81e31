"""Random caches of 8 bits: their elements, what an element counts, and how both are rounded."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
from random_problems import Placed, contiguous

from dlattn.reference import round_to

CACHE_DTYPES = ("int8", "float8_e4m3fn")
# Which scales there may be: of the whole tensor, of KV heads, of sequences, of both.
SHAPES = ("()", "(1,)", "(heads,)", "(batch, heads)", "(batch, heads)")
# `append_kv` takes no scale of these shapes.
SHAPES_TO_READ = (*SHAPES, "(batch, 1)", "(1, heads)")
# The factors that scales are multiplied by, mostly 1: elements saturate, or have few steps.
FACTORS = {"int8": (*(1.0,) * 6, 2.0**-3, 2.0**3), "float8_e4m3fn": (*(1.0,) * 6, 2.0**-3, 2.0**8)}


@dataclass(frozen=True)
class Scale:
    """The factors of a cache's elements: values that broadcast to (batch, heads), and a place."""

    values: np.ndarray
    place: Placed

    def of_heads(self, batch: int, heads: int) -> np.ndarray:
        """(batch, heads)."""
        return np.broadcast_to(self.values, (batch, heads))

    @property
    def kind(self) -> str:
        """In the words that a summary counts."""
        sizes = (1, 1, *self.values.shape)
        by_sequence, by_head = sizes[-2] > 1, sizes[-1] > 1
        if by_sequence:
            return "scales by sequence and KV head" if by_head else "scales by sequence"
        return "scales by KV head" if by_head else "scales of one element"


def draw_scale(
    rng: random.Random,
    numbers: np.random.Generator,
    dtype: str,
    full: tuple[int, int],
    appended: bool,
) -> Scale:
    """A scale for (batch, heads); `appended`: one that `append_kv` takes."""
    batch, heads = full
    shapes: dict[str, tuple[int, ...]] = {
        "()": (),
        "(1,)": (1,),
        "(heads,)": (heads,),
        "(batch, heads)": full,
        "(batch, 1)": (batch, 1),
        "(1, heads)": (1, heads),
    }
    shape = shapes[rng.choice(SHAPES if appended else SHAPES_TO_READ)]
    factor = rng.choice(FACTORS[dtype])
    values = np.asarray(numbers.uniform(0.01, 0.05, shape) * factor, np.float32)
    if shape == ():
        return Scale(values, Placed.of((), ()))
    strides = list(contiguous(shape))
    kind = rng.choice(("contiguous", "contiguous", "padded", "transposed", "repeated"))
    if kind == "padded":
        strides = [2 * stride for stride in strides]
    elif kind == "transposed" and len(shape) == 2:
        strides = [1, shape[0]]
    elif kind == "repeated":
        strides[0] = 0
        values = np.broadcast_to(values[:1], shape)
    return Scale(values, Placed.of(shape, strides, rng.choice((0, 0, 1))))


def draw_elements(
    rng: random.Random,
    numbers: np.random.Generator,
    dtype: str,
    values: np.ndarray,
    scale: Scale,
) -> np.ndarray:
    """Values (n, heads, dim) divided by the first sequence's scale; or any that elements can be."""
    if rng.random() < 0.8:
        return in_8_bits(values, np.atleast_2d(scale.values)[:1], dtype)
    if dtype == "int8":
        return numbers.integers(-128, 128, values.shape).astype(np.float32)
    magnitude = 2.0 ** numbers.uniform(-10, 9, values.shape)
    return in_8_bits(np.copysign(magnitude, values).astype(np.float32), np.ones((1, 1)), dtype)


def unused_elements(numbers: np.random.Generator, dtype: str, sizes: tuple[int, ...]) -> np.ndarray:
    """The contents where no key in use is: NaN; int8 has none, and has its largest numbers
    there."""
    if dtype == "int8":
        return numbers.choice(np.array([-128, 127], np.float32), sizes)
    return np.full(sizes, np.nan, np.float32)


def in_8_bits(x: np.ndarray, scale: np.ndarray, dtype: str) -> np.ndarray:
    """(n, heads, dim) in float32 by scales (n, heads)."""
    quotient = x / scale[..., None].astype(np.float32)
    if dtype == "int8":
        return np.clip(np.rint(quotient), -128, 127)
    return round_to(np.clip(quotient, -448, 448), dtype)
