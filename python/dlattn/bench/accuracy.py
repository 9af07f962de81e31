"""How far results are from float64 on the inputs as they were before anybody quantised them.

Inputs are one head of 512 queries and 2048 keys, exact in float16. Their distributions:

noise       N(0,1), all of it
outliers    N(0,1) + N(0,100) · Bernoulli(0.001), those of the FlashAttention-3 paper
biases      a bias of deviation 5 for each channel of k, of deviation 1 for each of v
channels    4 channels of k times 8 and of q times √8: few channels carry the scores
peaked      q and k times 2, so that the deviation of the scores is 4
sink        4 keys whose scores are 8 above the others', with values near 0
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlattn.bench import tensors
from dlattn.bench.cases import FLOAT8, Case, Sizes
from dlattn.bench.peers import Contestant, Problem, UnavailableError
from dlattn.console.errors import first_line
from dlattn.console.text import shape

Array = NDArray[np.float32]
Inputs = tuple[Array, Array, Array]  # q, k, v: (seqlen, head_dim)

QUERIES, KEYS = 512, 2048
_ROWS = 128  # of queries whose mean is compared


def _normal(rng: np.random.Generator, rows: int, dim: int) -> Array:
    return rng.standard_normal((rows, dim)).astype(np.float32)


def _noise(rng: np.random.Generator, sizes: tuple[int, int, int]) -> Inputs:
    queries, keys, dim = sizes
    return _normal(rng, queries, dim), _normal(rng, keys, dim), _normal(rng, keys, dim)


def _outliers(rng: np.random.Generator, sizes: tuple[int, int, int]) -> Inputs:
    def some(x: Array) -> Array:
        large = 10 * _normal(rng, *x.shape)
        return np.where(rng.random(x.shape) < 0.001, x + large, x)

    q, k, v = _noise(rng, sizes)
    return some(q), some(k), some(v)


def _biases(rng: np.random.Generator, sizes: tuple[int, int, int]) -> Inputs:
    q, k, v = _noise(rng, sizes)
    return q, k + 5 * _normal(rng, 1, sizes[2]), v + _normal(rng, 1, sizes[2])


def _channels(rng: np.random.Generator, sizes: tuple[int, int, int]) -> Inputs:
    q, k, v = _noise(rng, sizes)
    gain = np.ones(sizes[2], np.float32)
    gain[rng.choice(sizes[2], 4, replace=False)] = 8
    return q * np.sqrt(gain), k * gain, v


def _peaked(rng: np.random.Generator, sizes: tuple[int, int, int]) -> Inputs:
    q, k, v = _noise(rng, sizes)
    return 2 * q, 2 * k, v


def _sink(rng: np.random.Generator, sizes: tuple[int, int, int]) -> Inputs:
    q, k, v = _noise(rng, sizes)
    direction = _normal(rng, 1, sizes[2])
    direction /= np.linalg.norm(direction)
    k[:4] = 8 * direction
    v[:4] *= 0.01
    return q + math.sqrt(sizes[2]) * direction, k, v


KINDS: dict[str, Callable[[np.random.Generator, tuple[int, int, int]], Inputs]] = {
    "noise": _noise,
    "outliers": _outliers,
    "biases": _biases,
    "channels": _channels,
    "peaked": _peaked,
    "sink": _sink,
}


def make(kind: str, head_dim: int, seed: int = 0) -> Inputs:
    """q, k and v of a distribution."""
    q, k, v = KINDS[kind](np.random.default_rng(seed), (QUERIES, KEYS, head_dim))
    return (
        q.astype(np.float16).astype(np.float32),
        k.astype(np.float16).astype(np.float32),
        v.astype(np.float16).astype(np.float32),
    )


@dataclass(frozen=True)
class Errors:
    """Errors of a result: relative to the norms of the exact one, and the largest of all."""

    relative_l2: float
    relative_l1: float
    one_minus_cosine: float
    largest: float


def errors(out: Any, exact: Any) -> Errors:
    """The errors of an array, or of a torch tensor wherever it is."""
    if hasattr(out, "detach"):
        out, exact = out.double().cpu().numpy(), exact.double().cpu().numpy()
    a, b = np.asarray(out, np.float64), np.asarray(exact, np.float64)
    difference = a - b
    norms = math.sqrt(float((a * a).sum()) * float((b * b).sum()))
    return Errors(
        relative_l2=math.sqrt(float((difference**2).sum()) / float((b * b).sum())),
        relative_l1=float(np.abs(difference).sum() / np.abs(b).sum()),
        one_minus_cosine=1.0 - float((a * b).sum()) / norms if norms else math.nan,
        largest=float(np.abs(difference).max()),
    )


@dataclass(frozen=True)
class Scheme:
    """A contestant, the dtype of the tensors that it is handed, and what else it is asked for."""

    contestant: Contestant
    dtype: str
    options: Mapping[str, Any] = field(default_factory=dict)  # of dlattn.attention

    @property
    def name(self) -> str:
        """The contestant's, and the dtype."""
        return f"{self.contestant.name} {self.dtype}"


Entry = dict[str, Any]
ToFloat8 = Callable[[Problem], Problem]


def distributions(schemes: Sequence[Scheme], device: str, to_float8: ToFloat8) -> list[Entry]:
    """Every scheme on every distribution, against the inputs as they were."""
    entries = []
    for kind, head_dim in (("noise", 64), *((kind, 128) for kind in KINDS)):
        q, k, v = (_tensor(x[None, None], device) for x in make(kind, head_dim))
        exact, _ = tensors.attention(q.double(), k.double(), v.double())
        case = Case((1, 1, QUERIES, head_dim), False, "float32", variant=kind)
        about = {"distribution": kind, "head_dim": head_dim, "against": "the inputs"}
        for scheme, result in _results(schemes, Problem(case, q, k, v), to_float8):
            entries.append({**about, "scheme": scheme.name, **_told(result, exact)})
    return entries


def dequantised(
    schemes: Sequence[Scheme], device: str, to_float8: ToFloat8, sizes: Sizes = (1, 8, 512, 64)
) -> list[Entry]:
    """The float8 schemes on noise against what their float8 tensors stand for: the kernels' own."""
    entries = []
    narrow = [scheme for scheme in schemes if scheme.dtype == FLOAT8]
    generator = tensors.torch_module().Generator(device=device).manual_seed(0)
    q, k, v = (
        tensors.torch_module().randn(sizes, device=device, generator=generator) for _ in range(3)
    )
    for causal in (False, True):
        problem = Problem(Case(sizes, causal, "float32", variant="noise"), q, k, v)
        float8 = to_float8(problem)
        inputs = (float8.q, float8.k, float8.v)
        exact, _ = tensors.attention(*inputs, causal=causal, **float8.options)
        about = {
            "distribution": f"noise, {problem.case.label} {problem.case.mask}",
            "head_dim": sizes[3],
            "against": "the dequantised inputs",
        }
        for scheme, result in _results(narrow, problem, to_float8):
            entries.append({**about, "scheme": scheme.name, **_told(result, exact)})
    return entries


def mean_of_v(
    schemes: Sequence[Scheme], device: str, to_float8: ToFloat8, shapes: Sequence[Sizes]
) -> list[Entry]:
    """How much of the mean of v is left: v ~ N(1,1), without a mask, for growing numbers of keys.

    A kernel that adds up in fewer bits than float32 loses more of it with every key. Against
    float64 on the dequantised inputs, the first rows of every head.
    """
    torch = tensors.torch_module()
    entries = []
    for sizes in shapes:
        generator = torch.Generator(device=device).manual_seed(0)
        q, k, v = (torch.randn(sizes, device=device, generator=generator) for _ in range(3))
        problem = Problem(Case(sizes, False, "float32", variant="v ~ N(1,1)"), q, k, v + 1)
        rows = slice(0, min(_ROWS, sizes[2]))
        exact: dict[str, Any] = {}
        for scheme, result in _results(schemes, problem, to_float8, averaged=True):
            if scheme.dtype not in exact:
                asked = _in_dtype(problem, scheme.dtype, to_float8)
                inputs = (asked.q, asked.k, asked.v)
                exact[scheme.dtype], _ = tensors.attention(*inputs, rows=rows, **asked.options)
            want = exact[scheme.dtype]
            entry: Entry = {"shape": list(sizes), "scheme": scheme.name}
            if isinstance(result, str):
                entries.append({**entry, "note": result})
                continue
            found = result[:, :, rows].double()
            ratio = float(found.mean()) / float(want.mean())
            entries.append(
                {**entry, "mean_ratio": ratio, "relative_l2": errors(found, want).relative_l2}
            )
    return entries


def _tensor(x: Array, device: str) -> Any:
    return tensors.torch_module().from_numpy(np.ascontiguousarray(x)).to(device)


def _in_dtype(problem: Problem, dtype: str, to_float8: ToFloat8) -> Problem:
    if dtype == FLOAT8:
        return to_float8(problem)
    to = getattr(tensors.torch_module(), dtype)
    q, k, v = (x.to(to) for x in (problem.q, problem.k, problem.v))
    return Problem(replace(problem.case, dtype=dtype), q, k, v, problem.options)


def _results(
    schemes: Sequence[Scheme], problem: Problem, to_float8: ToFloat8, averaged: bool = False
) -> Iterator[tuple[Scheme, Any]]:
    """The result of each scheme, or in words why there is none."""
    asked: dict[str, Problem] = {}
    for scheme in schemes:
        if scheme.dtype not in asked:
            asked[scheme.dtype] = _in_dtype(problem, scheme.dtype, to_float8)
        try:
            own = asked[scheme.dtype]
            if scheme.options:
                own = replace(own, options={**own.options, **scheme.options})
            bound = scheme.contestant.bind(own)
            with bound.context():
                call = (bound.averaged if averaged else None) or bound.checked or bound.call
                result: Any = call()
        except UnavailableError as error:
            result = str(error)
        except Exception as error:  # every library refuses in its own way
            result = first_line(error)
        yield scheme, result


def _told(result: Any, exact: Any) -> Entry:
    if isinstance(result, str):
        return {"note": result}
    return dict(vars(errors(result, exact)))


Table = tuple[list[str], list[list[str]]]  # headers and rows


def error_table(
    entries: Sequence[Entry],
    measure: str = "relative_l2",
    name: str = "relative L2 error",
    digits: int = 4,
) -> Table:
    """Errors: a row for each scheme, a column for each distribution."""
    columns = list(dict.fromkeys((e["distribution"], e["head_dim"], e["against"]) for e in entries))
    found = {(e["scheme"], (e["distribution"], e["head_dim"], e["against"])): e for e in entries}
    rows = []
    for scheme in dict.fromkeys(e["scheme"] for e in entries):
        cells = []
        for column in columns:
            entry = found.get((scheme, column), {})
            cells.append(f"{entry[measure]:.{digits}f}" if measure in entry else "-")
        rows.append([scheme, *cells])
    return [name, *(f"{kind}, {dim}" for kind, dim, _ in columns)], rows


def mean_table(entries: Sequence[Entry]) -> Table:
    """The ratio of the means: a row for each scheme, a column for each number of keys."""
    shapes = list(dict.fromkeys(tuple(entry["shape"]) for entry in entries))
    found = {(entry["scheme"], tuple(entry["shape"])): entry for entry in entries}
    rows = []
    for scheme in dict.fromkeys(entry["scheme"] for entry in entries):
        cells = []
        for sizes in shapes:
            entry = found.get((scheme, sizes), {})
            cells.append(f"{entry['mean_ratio']:.4f}" if "mean_ratio" in entry else "-")
        rows.append([scheme, *cells])
    return ["mean of V ~ N(1,1) that is left", *(shape(sizes) for sizes in shapes)], rows
