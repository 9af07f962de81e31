"""Shared by the tests of gradients: problems for a CPU or a GPU, and the check by float64."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from arrays import NumPy, normal

import dlattn
from dlattn.reference import (
    ABSOLUTE_TERM,
    attention_backward_reference,
    attention_reference,
    attention_varlen_backward_reference,
    attention_varlen_reference,
    dtype_name,
    max_error,
    round_to,
    same_dtype_gradients,
    to_float64,
)

NAMES = ("dq", "dk", "dv", "dbias", "dalibi_slopes", "dsinks")
OF = dict(zip(NAMES, ("q", "k", "v", "bias", "alibi_slopes", "sinks"), strict=True))


def array(values: Any, dtype: str, device: str = "cpu") -> Any:
    """On the CPU a NumPy array, on a GPU a torch tensor; also values that the dtype lacks."""
    if device == "cpu":
        with np.errstate(over="ignore"):
            return NumPy().array(values, dtype)
    import torch

    return torch.from_numpy(np.array(values)).to(device, getattr(torch, dtype))


def nans(shape: tuple[int, ...], dtype: str, device: str = "cpu") -> Any:
    return array(np.full(shape, np.nan), dtype, device)


@dataclass
class Problem:
    """A forward call and the gradients of its results. Varlen has `lengths`."""

    inputs: dict[str, Any]  # q, k, v and optional tensors
    options: dict[str, Any]
    dout: Any = None
    dlse: Any = None
    lengths: dict[str, Any] = field(default_factory=dict)
    out: Any = None
    lse: Any = None

    @property
    def dtype(self) -> str:
        return dtype_name(self.inputs["q"])

    def forward(self) -> None:
        """Compute out and lse."""
        function = dlattn.attention_varlen if self.lengths else dlattn.attention
        self.out, self.lse = function(
            **self.inputs, **self.lengths, **self.options, return_lse=True
        )

    def gradients(self, **more: Any) -> Any:
        if self.out is None:
            self.forward()
        function = dlattn.attention_varlen_backward if self.lengths else dlattn.attention_backward
        given = {**self.inputs, **self.lengths, **self.options, "dlse": self.dlse, **more}
        return function(self.dout, out=self.out, lse=self.lse, **given)

    def expected(self) -> Any:
        lengths = {name: on_host(x) for name, x in self.lengths.items()}
        inputs = {name: on_host(x) for name, x in self.inputs.items()}
        forward = attention_varlen_reference if lengths else attention_reference
        backward = attention_varlen_backward_reference if lengths else attention_backward_reference
        out, lse = forward(**inputs, **lengths, **self.options)
        given = {**inputs, **lengths, **self.options, "out": out, "lse": lse}
        return backward(on_host(self.dout), dlse=on_host(self.dlse), **given)

    def plain(self) -> Any:
        """The gradients of a plain computation in q's dtype of the same out and lse."""
        lengths = {name: on_host(x) for name, x in self.lengths.items()}
        inputs = {name: on_host(x) for name, x in self.inputs.items()}
        backward = attention_varlen_backward_reference if lengths else same_dtype_gradients
        given = {**inputs, **lengths, **self.options, "dtype": self.dtype}
        given |= {"out": on_host(self.out), "lse": on_host(self.lse), "dlse": on_host(self.dlse)}
        return backward(on_host(self.dout), **given)


def on_host(x: Any) -> Any:
    return x if x is None or isinstance(x, (int, np.ndarray)) else to_float64(x)


def check(problem: Problem, found: Any = None, needs: Any = None, **more: Any) -> Any:
    """The gradients are within three times the error of a plain computation.

    Beside that a tiny term relative to the largest gradient is allowed, whatever its size is.
    """
    if found is None:
        found = problem.gradients(needs=needs, **more)
    expected, plain = problem.expected(), problem.plain()
    for name in NAMES:
        got, want, rough = (getattr(x, name) for x in (found, expected, plain))
        if want is None or (needs is not None and name not in needs):
            assert got is None, name
            continue
        like = problem.inputs[OF[name]]
        assert tuple(got.shape) == tuple(like.shape), name
        assert dtype_name(got) == dtype_name(like), name
        rough = round_to(np.asarray(rough), dtype_name(like))
        largest = float(np.max(np.abs(want), initial=0.0))
        # A sum over a row or a head cancels: what is left of it is small beside its terms.
        tiny = ABSOLUTE_TERM[problem.dtype] * largest
        if name not in ("dq", "dk", "dv"):
            tiny += np.finfo(np.float32).eps * _largest(expected) * max(problem_size(problem), 1)
        bound = 3 * max_error(rough, want) + tiny
        assert np.isfinite(bound), name
        assert max_error(got, want) <= bound, (name, max_error(got, want), bound, largest)
    return found


def check_finite_spellings(lowest: float, dtype: str, device: str = "cpu", **more: Any) -> None:
    """Rows all of whose keys have a finite bias that stands for minus infinity, and no gradient.

    Scores and lse are rounded by much there: lse is what it was and one number less, as another
    kernel may round it. Such rows add nothing to the gradients of the others; with a gradient of
    their own, whose share no lse tells, everything stays finite.
    """
    problem = random_problem(16, dtype, device, most=60, features=("causal",), dims=(64,))
    seqlen_q, seqlen_k = problem.inputs["q"].shape[1], problem.inputs["k"].shape[1]
    bias = np.zeros((1, 1, seqlen_q, seqlen_k), np.float32)
    bias[:, :, ::3] = lowest
    bias[..., seqlen_k // 2] = lowest
    problem.inputs["bias"] = array(bias, "float32", device)
    given = problem.dout
    dout = to_float64(given)
    dout[:, ::3] = 0
    problem.forward()
    lse = np.asarray(to_float64(problem.lse), np.float32)
    lowest_finite = np.finfo(np.float32).min
    less = np.where(lse > lowest_finite, np.nextafter(lse, lowest_finite), lse)
    for rounded in (lse, np.where(lse < -1e8, less, lse)):
        problem.lse = array(rounded, "float32", device)
        problem.dout = array(dout, dtype, device)
        check(problem, **more)
        problem.dout = given
        assert all(np.isfinite(to_float64(x)).all() for x in problem.gradients(**more)[:4])


def _largest(gradients: Any) -> float:
    given = [x for x in gradients if x is not None and np.size(x)]
    return max((float(np.max(np.abs(x))) for x in given), default=0.0)


def problem_size(problem: Problem) -> float:
    return float(problem.inputs["q"].shape[0] * problem.inputs["k"].shape[0]) ** 0.5


FEATURES = (
    "softcap",
    "alibi",
    "bias",
    "mask",
    "sinks",
    "window",
    "scale",
    "causal",
    "dlse",
    "bhsd",
    "dv",
)


def random_problem(
    seed: int,
    dtype: str,
    device: str = "cpu",
    *,
    most: int = 40,
    features: Any = None,
    dims: tuple[int, ...] = (8, 16, 20, 33, 64),
) -> Problem:
    """Sizes and features by chance, or all of `features`."""
    draw = random.Random(seed)
    chosen = (
        {name for name in FEATURES if draw.random() < 0.45} if features is None else set(features)
    )
    batch, group, heads_kv = draw.randint(1, 3), draw.choice((1, 2, 3)), draw.randint(1, 2)
    heads = group * heads_kv
    seqlen_q, seqlen_k = draw.randint(1, most), draw.randint(1, most)
    dim = draw.choice(dims)
    dim_v = draw.choice((8, 24, 48)) if "dv" in chosen else dim

    def made(*shape: int, salt: int) -> Any:
        return normal(*shape, seed=100 * seed + salt)

    rows = {
        "q": made(batch, seqlen_q, heads, dim, salt=1),
        "k": made(batch, seqlen_k, heads_kv, dim, salt=2),
        "v": made(batch, seqlen_k, heads_kv, dim_v, salt=3),
        "dout": made(batch, seqlen_q, heads, dim_v, salt=4),
    }
    options: dict[str, Any] = {}
    if "bhsd" in chosen:
        rows = {name: x.swapaxes(1, 2).copy() for name, x in rows.items()}
        options["layout"] = "bhsd"
    inputs = {name: array(x, dtype, device) for name, x in rows.items()}
    dout = inputs.pop("dout")
    full = (batch, heads, seqlen_q, seqlen_k)
    inputs |= _score_tensors(draw, chosen, full, dtype, device, made)
    options |= _settings(draw, chosen, seqlen_k)
    dlse = None
    if "dlse" in chosen:
        dlse = array(made(*full[:3], salt=5), "float32", device)
    return Problem(inputs, options, dout, dlse)


def _score_tensors(
    draw: random.Random, chosen: set[str], full: Any, dtype: str, device: str, made: Any
) -> dict[str, Any]:
    inputs: dict[str, Any] = {}
    batch, heads, seqlen_q, seqlen_k = full
    if "bias" in chosen:
        shape = tuple(n if draw.random() < 0.6 else 1 for n in full)[draw.choice((0, 0, 1, 2)) :]
        kind = draw.choice((dtype, "float32")) if dtype != "float64" else dtype
        inputs["bias"] = array(made(*shape, salt=6), kind, device)
    if "mask" in chosen:
        shape = (draw.choice((1, batch)), draw.choice((1, heads)), seqlen_q, seqlen_k)
        mask = made(*shape, salt=7) > -0.7
        mask[..., seqlen_q // 2, :] = False  # a row that sees nothing
        inputs["mask"] = array(mask, "bool", device)
    if "alibi" in chosen:
        shape = (heads,) if draw.random() < 0.5 else (batch, heads)
        inputs["alibi_slopes"] = array(np.abs(made(*shape, salt=8)) / 8, "float32", device)
    if "sinks" in chosen:
        inputs["sinks"] = array(made(heads, salt=9), "float32", device)
    return inputs


def _settings(draw: random.Random, chosen: set[str], seqlen_k: int) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if "softcap" in chosen:
        options["softcap"] = draw.choice((0.8, 3.0, 20.0))
    if "scale" in chosen:
        options["softmax_scale"] = draw.choice((0.05, 0.3))
    if "causal" in chosen:
        options["causal"] = draw.choice((True, "top_left"))
    if "window" in chosen:
        options["window"] = draw.choice(((5, None), (None, 4), (seqlen_k // 2, 2)))
    return options


def varlen_problem(
    seed: int,
    dtype: str,
    device: str = "cpu",
    *,
    most: int = 30,
    features: Any = (),
    dim: int = 16,
) -> Problem:
    """Sequences of any lengths, none among them. What no sequence owns holds NaN."""
    draw = random.Random(1000 + seed)
    chosen = set(features)
    batch, heads_kv = 4, 2
    heads = 2 * heads_kv
    lengths_q = [draw.randint(0, most) for _ in range(batch)]
    lengths_k = [draw.randint(0, most) for _ in range(batch)]
    lengths_q[1], lengths_k[2] = 0, 0
    starts_q, starts_k = (np.cumsum([2, *n]) for n in (lengths_q, lengths_k))
    used = [draw.randint(0, n) for n in lengths_k] if "seqused_k" in chosen else lengths_k
    total_q, total_k = int(starts_q[-1]) + 3, int(starts_k[-1]) + 3
    dim_v = 24 if "dv" in chosen else dim

    def made(*shape: int, salt: int) -> Any:
        return normal(*shape, seed=100 * seed + salt)

    rows = {
        "q": made(total_q, heads, dim, salt=1),
        "k": made(total_k, heads_kv, dim, salt=2),
        "v": made(total_k, heads_kv, dim_v, salt=3),
        "dout": made(total_q, heads, dim_v, salt=4),
    }
    owned_q = np.zeros(total_q, bool)
    owned_q[starts_q[0] : starts_q[-1]] = True
    owned_k = np.zeros(total_k, bool)
    for start, count in zip(starts_k[:-1], used, strict=True):
        owned_k[start : start + count] = True
    for name, x in rows.items():
        x[~(owned_k if name in "kv" else owned_q)] = np.nan
    options: dict[str, Any] = {}
    if "bhsd" in chosen:
        rows = {name: x.swapaxes(0, 1).copy() for name, x in rows.items()}
        options["layout"] = "bhsd"
    inputs = {name: array(x, dtype, device) for name, x in rows.items()}
    dout = inputs.pop("dout")
    full = (batch, heads, max(lengths_q), max(lengths_k))
    inputs |= _score_tensors(draw, chosen, full, dtype, device, made)
    options |= _settings(draw, chosen, full[3])
    lengths = {
        "cu_seqlens_q": array(starts_q, "int32", device),
        "cu_seqlens_k": array(starts_k, "int32", device),
        "max_seqlen_q": full[2],
        "max_seqlen_k": full[3],
    }
    if "seqused_k" in chosen:
        lengths["seqused_k"] = array(used, "int32", device)
    dlse = None
    if "dlse" in chosen:
        values = made(heads, total_q, salt=5)
        values[:, ~owned_q] = np.nan
        dlse = array(values, "float32", device)
    problem = Problem(inputs, options, dout, dlse, lengths)
    problem.forward()
    hidden = array(~owned_q, "bool", device)  # out and lse are not written there
    rows_of_out = problem.out.swapaxes(0, 1) if "bhsd" in chosen else problem.out
    rows_of_out[hidden] = float("nan")
    problem.lse[:, hidden] = float("nan")
    return problem
