"""How accurate schemes of 8-bit attention are: simulated in NumPy, and the library's own call.

    python research/eight_bit.py --json FILE --plot PNG
    python research/eight_bit.py --print research/model/eight_bit.json
    python research/eight_bit.py --print research/model/eight_bit.json --gates bench.json

Inputs are those of `dlattn.bench.accuracy`, errors relative to float64 on the inputs before anybody
quantised them. A scheme is simulated as its source describes it: what it rounds, by which scales,
in which order it walks the keys. Products are exact in float64, but where a scheme's accumulators
have fewer bits. The schemes are not run: what is said of SageAttention2 is said of its scheme.

`--gates` holds what `python -m dlattn bench --shape eight_bit --json bench.json` found against
limits: G2, the library's kernels on what their float8 tensors stand for; G3, long sums of values
whose mean is 1; G4, each distribution against the simulated scheme on the same inputs, for
precision int8_fp8 against SageAttention2's too. The exit code is 1 if the library misses one.

`accumulators` shows what sums of P V in few bits lose: the model of microsoft/MMA-Sim (commit
c785138), by which Hopper's and Ada's tensor cores align all products of a step and the sum so far
to the largest of their exponents, cut them off 13 bits below it, and keep 13 bits of the sum.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlattn.bench import accuracy
from dlattn.console.errors import CommandError
from dlattn.console.text import markdown_table
from dlattn.console.writing import check_distinct

ROOT = Path(__file__).resolve().parent.parent

Array = NDArray[Any]
Logits = Callable[[Array, Array], Array]  # of q and k
# v as multiplied, and its scales: of channels or, with two dimensions, of keys.
Values = Callable[[Array], tuple[Array, Array | float]]

Tile = Callable[[int], int]  # keys of a tile, by head_dim

LOG2_E = 1 / math.log(2)
TILE = 64  # keys
LARGEST = 448.0  # in e4m3
SAMPLED = 64  # keys whose mean is subtracted where not all are averaged


def tile_of_float8(dim: int) -> int:
    """Keys of a tile of precision fp8, which share a scale (core/problem/quantized.h)."""
    return 96 if dim <= 64 else 128


# Rounding


def e4m3(x: Array) -> Array:
    """To the nearest of float8_e4m3fn, ties to even; what is too large becomes 448."""
    x = np.clip(np.asarray(x, np.float64), -LARGEST, LARGEST)
    _, exponent = np.frexp(x)
    quantum = np.exp2(np.maximum(exponent - 1, -6) - 3.0)  # subnormal below 2^-6
    return np.rint(x / quantum) * quantum


def int8(x: Array, scale: Array) -> Array:
    """The integers that stand for x by a scale."""
    return np.clip(np.rint(x / scale), -127, 127)


def largest_of_blocks(x: Array, rows: int) -> Array:
    """For each row the largest magnitude of its block of rows, of which the last may be short."""
    blocks = np.maximum.reduceat(np.abs(x).max(1), np.arange(0, len(x), rows))
    return np.repeat(np.maximum(blocks, 1e-12), rows)[: len(x), None]


def power_of_two(x: Array, rows: int, limit: float = LARGEST) -> Array:
    """For each row the least power of two by which its block of rows is at most a limit."""
    return np.exp2(np.ceil(np.log2(largest_of_blocks(x, rows) / limit)))


def hadamard(dim: int) -> Array:
    """The orthonormal one."""
    h = np.ones((1, 1))
    while len(h) < dim:
        h = np.block([[h, h], [h, -h]])
    return h / math.sqrt(dim)


def signs(dim: int) -> Array:
    """Fixed signs, so that a rotation leaves no direction alone."""
    return np.sign(np.random.default_rng(7).standard_normal(dim))


def rotation(dim: int) -> Array:
    """A sign for each column, then the Hadamard transform, as core/problem/rounding.h has them."""
    x = np.arange(dim, dtype=np.uint64) * 0x9E3779B9 & 0xFFFFFFFF
    x = (x ^ x >> np.uint64(15)) * np.uint64(0x85EBCA6B) & np.uint64(0xFFFFFFFF)
    return np.where(x >> np.uint64(31), -1.0, 1.0)[:, None] * hadamard(dim)


def shifted(k: Array, sampled: bool = False) -> Array:
    """Without the mean of all keys, or of those that lie evenly between them."""
    count = min(SAMPLED, len(k)) if sampled else len(k)
    return k - k[np.arange(count) * len(k) // count].mean(0)


# Logits, natural


def exact_logits(q: Array, k: Array) -> Array:
    """As they are."""
    return q @ k.T / math.sqrt(q.shape[1])


def int8_logits(q: Array, k: Array, q_rows: int, k_rows: int) -> Array:
    """Rounding to int8 by a scale for each block of rows."""
    a, b = largest_of_blocks(q, q_rows) / 127, largest_of_blocks(k, k_rows) / 127
    return (int8(q, a) @ int8(k, b).T) * a * b.T / math.sqrt(q.shape[1])


def float8_logits(q: Array, k: Array, rows: int = 0) -> Array:
    """Rounding to e4m3 by a scale for each block of rows, or one for all."""
    a = largest_of_blocks(q, rows or len(q)) / LARGEST
    b = largest_of_blocks(k, rows or len(k)) / LARGEST
    return (e4m3(q / a) @ e4m3(k / b).T) * a * b.T / math.sqrt(q.shape[1])


def _sage(q: Array, k: Array) -> Array:
    return int8_logits(q, shifted(k), 32, 64)


def _float8_blocks(q: Array, k: Array) -> Array:
    h = hadamard(q.shape[1])
    return float8_logits(q @ h, shifted(k) @ h, 64)


def _float8_rotated(q: Array, k: Array) -> Array:
    h = hadamard(q.shape[1])
    return float8_logits(q @ h, k @ h)


def _rows(q: Array, k: Array) -> Array:
    return int8_logits(q, shifted(k, sampled=True), 1, 64)


def _rows_rotated(q: Array, k: Array) -> Array:
    h = signs(q.shape[1])[:, None] * hadamard(q.shape[1])
    return int8_logits(q @ h, shifted(k, sampled=True) @ h, 1, 64)


def _library_int8(q: Array, k: Array) -> Array:
    r = rotation(q.shape[1])
    return int8_logits(q @ r, shifted(k, sampled=True) @ r, 1, 64)


def _library_float8(q: Array, k: Array) -> Array:
    # By powers of two apart from what the library rounds: to e4m3 a factor of √2 is other bits.
    r = rotation(q.shape[1]) * math.sqrt(q.shape[1])
    q, k = q @ r, shifted(k, sampled=True) @ r / q.shape[1]
    a, b = power_of_two(q, 64), power_of_two(k, tile_of_float8(q.shape[1]))
    return (e4m3(q / a) @ e4m3(k / b).T) * a * b.T / math.sqrt(q.shape[1])


def _comfy(q: Array, k: Array) -> Array:
    h = hadamard(q.shape[1])
    return int8_logits(q @ h, shifted(k) @ h, 4, 16)


def _tokens(q: Array, k: Array) -> Array:
    h = hadamard(q.shape[1])
    return int8_logits(q @ h, shifted(k) @ h, 1, 1)


# Values


def float16_values(v: Array) -> tuple[Array, float]:
    """In float16."""
    return v.astype(np.float16).astype(np.float64), 1.0


def exact_values(v: Array) -> tuple[Array, float]:
    """As they are."""
    return v, 1.0


def float8_of_head(v: Array) -> tuple[Array, float]:
    """In e4m3 by one scale."""
    scale = float(np.abs(v).max()) / LARGEST
    return e4m3(v / scale), scale


def float8_of_channels(v: Array, largest: float = LARGEST) -> tuple[Array, Array]:
    """In e4m3 by a scale for each channel."""
    scale = np.abs(v).max(0) / largest
    return e4m3(v / scale), scale


def float8_of_blocks(v: Array, keys: int = TILE) -> tuple[Array, float]:
    """In e4m3 by a power of two for each so many keys, which the tile's sum is multiplied by."""
    scale = power_of_two(v, keys)
    return e4m3(v / scale) * scale, 1.0


def _small_float8_of_blocks(v: Array) -> tuple[Array, Array]:
    """So small that 64 of them times 64 fit a sum in float16, as in core/problem/quantized.h."""
    scale = power_of_two(v, TILE, 15.0)
    return e4m3(v / scale), scale


def _float8_of_tiles(v: Array) -> tuple[Array, float]:
    return float8_of_blocks(v, tile_of_float8(v.shape[1]))


def int8_of_channels(v: Array) -> tuple[Array, Array]:
    """In int8 by a scale for each channel."""
    scale = np.abs(v).max(0) / 127
    return int8(v, scale), scale


def _small_float8_of_channels(v: Array) -> tuple[Array, Array]:
    """So small that 64 of them times 448 fit a sum in float16."""
    return float8_of_channels(v, 2.25)


# Schemes


@dataclass(frozen=True)
class Scheme:
    """The tensors that a scheme rounds, and the order in which it walks the keys."""

    name: str
    logits: Logits
    values: Values
    weights: str  # "float16", "e4m3" or "uint8"
    scale: float = 1.0  # of the weights before they are rounded
    backward: bool = True  # from the last tile to the first
    of_tile: bool = False  # weights are relative to their tile's maximum, not to the row's so far
    rounded_sums: bool = False  # the denominator is the sum of the rounded weights
    float16_sums: bool = False  # of P V in a tile
    tile: Tile = lambda _: TILE


SCHEMES = (
    Scheme("fp16 P, V", exact_logits, float16_values, "float16"),
    Scheme("only P in e4m3 ×256, backward", exact_logits, exact_values, "e4m3", 256.0),
    Scheme("only P in e4m3 ×1, forward", exact_logits, exact_values, "e4m3", backward=False),
    Scheme("fp8 per head", float8_logits, float8_of_head, "e4m3", 256.0),
    Scheme("fp8 per head, Hadamard", _float8_rotated, float8_of_head, "e4m3", 256.0),
    Scheme("fp8 per 64 keys, Hadamard, K shift", _float8_blocks, float8_of_channels, "e4m3", 256.0),
    Scheme("SageAttention2", _sage, float8_of_channels, "e4m3", 448.0, backward=False),
    Scheme(
        "SageAttention2++",
        _sage,
        _small_float8_of_channels,
        "e4m3",
        448.0,
        backward=False,
        float16_sums=True,
    ),
    Scheme("int8_fp8", _rows, float8_of_blocks, "e4m3", 448.0, of_tile=True),
    Scheme(
        "int8_fp8, signed Hadamard", _rows_rotated, float8_of_blocks, "e4m3", 448.0, of_tile=True
    ),
    Scheme(
        "all int8, rotated (comfy-kitchen)",
        _comfy,
        int8_of_channels,
        "uint8",
        255.0,
        of_tile=True,
        rounded_sums=True,
    ),
    Scheme("int8 rotated, fp16 P V (SageAttention)", _tokens, float16_values, "float16"),
    # The library's own precisions.
    Scheme(
        "dlattn int8_fp8",
        _library_int8,
        _small_float8_of_blocks,
        "e4m3",
        64.0,
        of_tile=True,
        float16_sums=True,
    ),
    Scheme("dlattn int8_fp16", _library_int8, float16_values, "float16", of_tile=True),
    Scheme("dlattn fp8", _library_float8, _float8_of_tiles, "e4m3", 256.0, tile=tile_of_float8),
)


def attend(scheme: Scheme, q: Array, k: Array, v: Array) -> Array:
    """The result of the scheme."""
    # Scores are float32 everywhere.
    scores = (scheme.logits(q, k) * LOG2_E).astype(np.float32)
    values, v_scale = scheme.values(v)
    of_keys = v_scale if isinstance(v_scale, np.ndarray) and v_scale.ndim == 2 else None
    rows, keys = scores.shape
    maximum = np.full((rows, 1), -np.inf)
    total = np.zeros((rows, 1))
    out = np.zeros((rows, v.shape[1]))
    tile = scheme.tile(q.shape[1])
    tiles = range(0, keys, tile)
    for first in reversed(tiles) if scheme.backward else tiles:
        x = scores[:, first : first + tile]
        of_tile = x.max(1, keepdims=True)
        raised = np.maximum(maximum, of_tile)
        reference = of_tile if scheme.of_tile else raised
        p = np.exp2(x - reference)
        rounded = _round_weights(scheme, p)
        part = np.exp2(reference - raised)  # of what is relative to the tile's maximum
        before = np.exp2(maximum - raised)
        summed = rounded / scheme.scale if scheme.rounded_sums else p
        total = total * before + summed.sum(1, keepdims=True) * part
        product = _product(rounded, values[first : first + tile], scheme.float16_sums)
        if of_keys is not None:
            product = product * of_keys[first]
        out = out * before + product / scheme.scale * part
        maximum = raised
    return out / total * (v_scale if of_keys is None else 1.0)


def _round_weights(scheme: Scheme, p: Array) -> Array:
    if scheme.weights == "float16":
        return p.astype(np.float16).astype(np.float64)
    if scheme.weights == "uint8":
        return np.rint(p * scheme.scale)
    return e4m3(p * scheme.scale)


def _product(p: Array, v: Array, float16_sums: bool) -> Array:
    if not float16_sums:
        return p @ v
    total = np.zeros((len(p), v.shape[1]), np.float16)
    for i in range(0, len(v), 16):  # an Ada instruction takes its 32 products in two steps
        total = (total.astype(np.float64) + p[:, i : i + 16] @ v[i : i + 16]).astype(np.float16)
    return total.astype(np.float64)


def exact(q: Array, k: Array, v: Array) -> Array:
    """In float64."""
    scores = exact_logits(q, k)
    p = np.exp(scores - scores.max(1, keepdims=True))
    return p @ v / p.sum(1, keepdims=True)


# Sums in few bits


def floor_log2(x: Array) -> Array:
    """The exponents of magnitudes; far below all others for 0."""
    return np.where(x == 0, -200, np.frexp(np.abs(x))[1] - 1)


def step(a: Array, b: Array, c: Array) -> Array:
    """c + a b as one step of a tensor core adds it up, the sum not yet stored."""
    products = a[:, :, None] * b[None]
    of_products = np.where(products == 0, -200, floor_log2(a)[:, :, None] + floor_log2(b)[None])
    top = np.maximum(of_products.max(1), floor_log2(c))
    ulp = np.exp2(top - 13.0)
    return (np.trunc(products / ulp[:, None]) * ulp[:, None]).sum(1) + np.trunc(c / ulp) * ulp


def store(x: Array) -> Array:
    """A sum as float32 accumulators keep it: 13 bits below the first, cut off."""
    ulp = np.exp2(floor_log2(x) - 13.0)
    return np.trunc(x / ulp) * ulp


def weighted_sum(p: Array, v: Array, gpu: str, promoted: int) -> Array:
    """P V in e4m3 on "hopper" or "ada" ("ada fp16": with accumulators in float16), the sum so far
    moved to float32 after every so many keys; 0: never."""
    total = np.zeros((len(p), v.shape[1]))
    c = np.zeros_like(total)
    width = 32 if gpu == "hopper" else 16
    for first in range(0, len(v), width):
        c = step(p[:, first : first + width], v[first : first + width], c)
        c = c.astype(np.float16).astype(np.float64) if gpu == "ada fp16" else store(c)
        if promoted and (first + width) % promoted == 0:
            total += c
            c = np.zeros_like(c)
    return total + c


ACCUMULATORS = (("hopper", 0), ("hopper", 128), ("hopper", 256), ("ada", 0), ("ada", 64))
ADA_FLOAT16 = ("ada fp16", 64)


def accumulators(keys: int, mean: float, rows: int = 4, columns: int = 8) -> list[dict[str, Any]]:
    """The loss of sums of N(0,1) logits' weights and v ~ N(mean,1), both rounded to e4m3 before."""
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((rows, keys))
    p = e4m3(np.exp(logits - logits.max(1, keepdims=True)) * 256)
    v = rng.standard_normal((keys, columns)) + mean
    large = e4m3(v / np.abs(v).max() * LARGEST)
    small = e4m3(v / np.abs(v).max() * 2.25)  # so that 64 keys' sum fits float16
    entries = []
    for gpu, promoted in (*ACCUMULATORS, ADA_FLOAT16):
        values = small if gpu == "ada fp16" else large
        want, found = p @ values, weighted_sum(p, values, gpu, promoted)
        entries.append(
            {
                "gpu": gpu,
                "promoted_after": promoted,
                "keys": keys,
                "mean_of_v": mean,
                "relative_l2": accuracy.errors(found, want).relative_l2,
                "mean_ratio": float(found.mean() / want.mean()),
            }
        )
    return entries


# The study


def simulated(seeds: int) -> list[dict[str, Any]]:
    """Every scheme on every distribution: means over seeds, and the largest error of all."""
    entries = []
    for kind, head_dim in (("noise", 64), *((kind, 128) for kind in accuracy.KINDS)):
        problems = []
        for seed in range(seeds):
            q, k, v = (x.astype(np.float64) for x in accuracy.make(kind, head_dim, seed))
            problems.append((q, k, v, exact(q, k, v)))
        for scheme in SCHEMES:
            found = [accuracy.errors(attend(scheme, q, k, v), e) for q, k, v, e in problems]
            l2 = [x.relative_l2 for x in found]
            entries.append(
                {
                    "distribution": kind,
                    "head_dim": head_dim,
                    "scheme": scheme.name,
                    "relative_l2": math.sqrt(float(np.mean(np.square(l2)))),
                    "relative_l2_of_seeds": l2,
                    "relative_l1": float(np.mean([x.relative_l1 for x in found])),
                    "one_minus_cosine": float(np.mean([x.one_minus_cosine for x in found])),
                    "largest": max(x.largest for x in found),
                }
            )
    return entries


def document(seeds: int, longest: int) -> dict[str, Any]:
    """All of it."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return {
        "made_by": "research/eight_bit.py: a simulation, no measurement",
        "git": commit.stdout.strip(),
        "seeds": seeds,
        "queries": accuracy.QUERIES,
        "keys": accuracy.KEYS,
        "tile": TILE,
        "simulated": simulated(seeds),
        "accumulators": [
            entry
            for keys in (1024, 2048, 8192, 32768, 131072)
            if keys <= longest
            for mean in (0.0, 1.0)
            for entry in accumulators(keys, mean)
        ],
    }


@dataclass(frozen=True)
class Gate:
    """A limit, and what was found."""

    name: str
    scheme: str
    value: float
    limit: float
    least: bool = False  # whether the limit is the least that is accepted, not the most

    @property
    def passed(self) -> bool:
        """Whether the value is within the limit; NaN never is."""
        return self.value >= self.limit if self.least else self.value <= self.limit


# The scheme that contestants have whose name and dtype begin or end so.
SIMULATED_AS = {
    "float8_e4m3fn": "fp8 per head",
    "dlattn precision=int8_fp8": "dlattn int8_fp8",
    "dlattn precision=int8_fp16": "dlattn int8_fp16",
    "dlattn precision=fp8": "dlattn fp8",
}
# Distributions of which the library's int8_fp8 is to be nearer than that scheme of its kind.
RIVAL = "SageAttention2"
NEARER_THAN_RIVAL = ("noise", "outliers", "biases", "sink")


def scheme_of(contestant: str) -> str | None:
    """The simulated scheme of a contestant, if there is one."""
    name, _, dtype = contestant.rpartition(" ")
    return SIMULATED_AS.get(name) or SIMULATED_AS.get(dtype)


def gates(found: dict[str, Any], bench: dict[str, Any]) -> list[Gate]:
    """Those of a benchmark's contestants that compute in 8 bits; peers are told as well."""
    checked = bench["eight_bit"]
    held = []
    for entry in checked.get("dequantised", ()):
        if "largest" not in entry:
            continue
        full = entry["distribution"].endswith("full")
        where = f"G2 {entry['distribution']}"
        limit = 1e-2 if full else 6e-2
        held.append(Gate(f"{where}, largest error", entry["scheme"], entry["largest"], limit))
        if full:
            held.append(Gate(f"{where}, L2", entry["scheme"], entry["relative_l2"], 0.027))
    shortest: dict[str, float] = {}
    for entry in checked.get("mean_of_v", ()):
        if "mean_ratio" not in entry or scheme_of(entry["scheme"]) is None:
            continue
        keys, scheme = entry["shape"][2], entry["scheme"]
        held.append(Gate(f"G3 mean of {keys} keys", scheme, entry["mean_ratio"], 0.999, True))
        grown = entry["relative_l2"] - shortest.setdefault(scheme, entry["relative_l2"])
        held.append(Gate(f"G3 L2 of {keys} keys, growth", scheme, grown, 2e-3))
    simulated_l2 = {
        (e["scheme"], e["distribution"], e["head_dim"]): e["relative_l2_of_seeds"][0]
        for e in found["simulated"]
    }
    for entry in checked.get("distributions", ()):
        as_scheme = scheme_of(entry["scheme"])
        if as_scheme is None or "relative_l2" not in entry:
            continue
        case, found_l2 = (entry["distribution"], entry["head_dim"]), entry["relative_l2"]
        name = f"G4 {case[0]}, head_dim {case[1]}, L2"
        limit = 1.15 * simulated_l2[(as_scheme, *case)]
        held.append(Gate(name, entry["scheme"], found_l2, limit))
        if as_scheme == "dlattn int8_fp8" and case[0] in NEARER_THAN_RIVAL:
            limit = simulated_l2[(RIVAL, *case)]
            held.append(Gate(f"{name}, than {RIVAL}'s", entry["scheme"], found_l2, limit))
    return held


def gates_text(held: Sequence[Gate]) -> str:
    """A table of them."""
    rows = [
        [
            gate.name,
            gate.scheme,
            f"{gate.value:.5f}",
            f"{'≥' if gate.least else '≤'} {gate.limit:.5f}",
            "PASS" if gate.passed else "FAIL",
        ]
        for gate in held
    ]
    return markdown_table(["gate", "contestant", "found", "limit", ""], rows)


def text(found: dict[str, Any]) -> str:
    """Tables: relative L2 errors, and what sums in few bits lose."""
    columns = list(dict.fromkeys((e["distribution"], e["head_dim"]) for e in found["simulated"]))
    cells = {(e["scheme"], e["distribution"], e["head_dim"]): e for e in found["simulated"]}
    rows = [
        [name, *(f"{cells[name, kind, dim]['relative_l2']:.4f}" for kind, dim in columns)]
        for name in dict.fromkeys(e["scheme"] for e in found["simulated"])
    ]
    parts = [markdown_table(["relative L2", *(f"{k}, {d}" for k, d in columns)], rows)]
    sums = found["accumulators"]
    by_case = {(e["gpu"], e["promoted_after"], e["keys"], e["mean_of_v"]): e for e in sums}
    kinds = list(dict.fromkeys((e["gpu"], e["promoted_after"]) for e in sums))
    for measure, mean, title in (
        ("relative_l2", 0.0, "relative L2, V ~ N(0,1)"),
        ("relative_l2", 1.0, "relative L2, V ~ N(1,1)"),
        ("mean_ratio", 1.0, "mean that is left, V ~ N(1,1)"),
    ):
        rows = [
            [str(keys), *(f"{by_case[(*kind, keys, mean)][measure]:.4f}" for kind in kinds)]
            for keys in dict.fromkeys(e["keys"] for e in sums)
        ]
        names = [f"{gpu}, {f'per {n}' if n else 'never promoted'}" for gpu, n in kinds]
        parts.append(f"{title}:\n\n" + markdown_table(["keys", *names], rows))
    return "\n\n".join(parts)


def draw(found: dict[str, Any], path: Path) -> None:
    """Relative L2 errors of the schemes that round something of all three tensors."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [
        name
        for name in dict.fromkeys(e["scheme"] for e in found["simulated"])
        if not name.startswith(("only", "fp16"))
    ]
    kinds = list(accuracy.KINDS)
    cells = {
        (e["scheme"], e["distribution"]): e["relative_l2"]
        for e in found["simulated"]
        if e["head_dim"] == 128
    }
    figure, axes = pyplot.subplots(figsize=(10, 4.5))
    colours = pyplot.get_cmap("tab20")
    width = 0.85 / len(names)
    for i, name in enumerate(names):
        xs = [j + (i - (len(names) - 1) / 2) * width for j in range(len(kinds))]
        axes.bar(
            xs, [cells[name, kind] for kind in kinds], 0.95 * width, label=name, color=colours(i)
        )
    axes.set_yscale("log")
    axes.set_xticks(range(len(kinds)), kinds)
    axes.set_ylabel("relative L2 error")
    axes.set_title("Schemes of 8-bit attention, simulated, head_dim 128, 2048 keys", loc="left")
    axes.legend(fontsize=8, ncols=3, frameon=False, loc="upper left", bbox_to_anchor=(0, -0.08))
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150, bbox_inches="tight")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the study, or print one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--longest", type=int, default=131072, help="keys of `accumulators`")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--print", type=Path, dest="shown", metavar="JSON")
    parser.add_argument("--gates", type=Path, metavar="JSON", help="of the benchmark")
    args = parser.parse_args(arguments)
    try:
        check_distinct({"--json": args.json, "--plot": args.plot})
    except CommandError as error:
        parser.error(str(error))
    found = json.loads(args.shown.read_text()) if args.shown else document(args.seeds, args.longest)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    if args.plot:
        draw(found, args.plot)
    print(text(found))
    if not args.gates:
        return 0
    held = gates(found, json.loads(args.gates.read_text()))
    print(f"\n{gates_text(held)}")
    return 0 if all(x.passed for x in held if x.scheme.startswith("dlattn")) else 1


if __name__ == "__main__":
    raise SystemExit(main())
