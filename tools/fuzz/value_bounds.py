"""The bounds of right results for values of any magnitude: exact results, and a bound for each row.

Scores are formed in float32 (float64 for float64), so that a row may depend on how they round. A
row is one of these, by its near keys: those that may have a weight, whatever its scores round to.

- exact: rounding moves no near score by more than 1/16, or all near scores are equal (equal keys
  have equal scores whatever their magnitude). It is held to float64: twice the error of plain
  computations in the same dtype, which counts as at least one rounding of each near score, weighed
  by its probability, of the probabilities and of the result. What a key without weight is biased
  with does not count.
- absorbed: one term (a bias of -1e9, say) is shared by all near keys, and so large that adding the
  others to it changes nothing. Near keys have equal weights: held to that as exact rows are.
- lifted: otherwise, where the bias of all near keys is 1e4 or more in magnitude, and rounding moves
  a score by more than 1/16. The error is at most twice that of the worst plain computation.
- coarse: otherwise (q.k so large that the order of additions decides). The result is a convex
  combination of V's rows of near keys.
- empty: no keys to attend to: 0, and minus infinity or the sink.
- nan: NaN as a plain computation gives it, of a bias or a slope or a sink.

In all of them out lies between the smallest and the largest value of each column of V among the
visible keys (and 0, where there is a sink). Plain computations are real ones in float32: q.k as a
matrix product in natural units, one product after the other, and sixteen at a time from the end in
base two; and where there are ALiBi and a bias, either of them added first, or their sum.

Tensor cores align the products that they add by the exponents that their factors are stored with,
so that a subnormal number rounds q.k as the smallest normal number does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from differential import ROUNDING

from dlattn.bench.tensors import torch_module
from dlattn.reference import ABSOLUTE_TERM as TINY  # here relative to V
from dlattn.reference import LARGEST_SLOPE

LIFTED = 1e4  # a bias of that magnitude and more
KINDS = ("exact", "absorbed", "lifted", "coarse", "empty", "nan")
# From a number to the next, at the least.
STEP = {"float16": 2.0**-24, "bfloat16": 2.0**-133, "float32": 2.0**-149, "float64": 5e-324}
ORDERS = ("matrix", "one by one", "from the end")  # of adding up q.k
TERM_ORDERS = ("alibi first", "bias first", "both first")  # of adding the terms to it
LOG2E = math.log2(math.e)
_NEGLIGIBLE = 25.0  # a score so far below the row's largest has no weight: exp(-25) is 1.4e-11
_HULL_ELEMENTS = 1 << 24

Tensor = Any


@dataclass
class Terms:
    """The terms of a score, (batch, heads, queries, keys), and which keys are visible."""

    capped: Tensor  # softcap(scale * q.k)
    alibi: Tensor
    bias: Tensor
    seen: Tensor
    products: Tensor  # the sum of the magnitudes of what q.k is a sum of, scaled and capped

    def total(self, order: str = TERM_ORDERS[0]) -> Tensor:
        """The score."""
        torch = torch_module()
        if order == "alibi first":
            total = self.capped + self.alibi + self.bias
        elif order == "bias first":
            total = self.capped + self.bias + self.alibi
        else:
            total = self.capped + (self.alibi + self.bias)
        return torch.where(self.seen, total, -math.inf)


def _visible(q: Tensor, k: Tensor, causal: Any, window: Any, mask: Any) -> tuple[Tensor, Tensor]:
    """Distances of query and key, and whether masks let the one see the other."""
    torch = torch_module()
    length_q, length_k = q.shape[2], k.shape[2]
    shift = 0 if causal == "top_left" else length_k - length_q
    position = torch.arange(length_q, device=q.device)[:, None] + shift
    ahead = torch.arange(length_k, device=q.device)[None, :] - position
    seen = torch.ones_like(ahead, dtype=torch.bool)
    if causal:
        seen &= ahead <= 0
    left, right = window
    if left is not None:
        seen &= ahead >= -left
    if right is not None:
        seen &= ahead <= right
    seen = seen.expand(*q.shape[:2], length_q, length_k)
    return ahead.abs(), seen if mask is None else seen & mask


def _product(q: Tensor, k: Tensor, order: str) -> Tensor:
    """q.k in the tensors' dtype, added up in one of several orders."""
    if order == "matrix":
        return q @ k.transpose(2, 3)
    step = 1 if order == "one by one" else 16
    starts = range(0, q.shape[3], step)
    total = q.new_zeros(*q.shape[:3], k.shape[2])
    for at in starts if order == "one by one" else reversed(starts):
        part = slice(at, at + step)
        total += q[..., part] @ k[..., part].transpose(2, 3)
    return total


def _terms(
    q: Tensor,
    k: Tensor,
    compute: Any,
    order: str = "matrix",
    *,
    causal: Any = False,
    softmax_scale: float | None = None,
    window: Any = (None, None),
    softcap: float = 0.0,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
) -> Terms:
    """The terms of the scores as `compute` has them; k has as many heads as q."""
    torch = torch_module()
    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    least = 0.0 if q.dtype in (torch.float32, torch.float64) else torch.finfo(q.dtype).tiny
    q, k = q.to(compute), k.to(compute)
    distance, seen = _visible(q, k, causal, window, mask)
    scores = _product(q, k, order) * scale
    sizes = scores
    if compute == torch.float64:
        stored = (torch.where(x == 0, 0.0, x.abs().clamp_min(least)) for x in (q, k))
        sizes = _product(*stored, "matrix") * scale
    if softcap:
        uncapped = scores / softcap
        scores = softcap * torch.tanh(uncapped)
        # The slope of tanh; never quite 0 where rounding may change the argument.
        sizes = sizes / torch.cosh(uncapped.clamp(-300, 300)) ** 2
    none = torch.zeros((), dtype=compute, device=q.device)
    alibi = added = none
    if alibi_slopes is not None:
        slopes = alibi_slopes.to(compute).clamp(-LARGEST_SLOPE, LARGEST_SLOPE)
        alibi = -slopes.expand(q.shape[:2])[..., None, None] * distance
    if bias is not None:
        added = bias.to(compute)
        seen = seen & (added != -math.inf)
    full = scores.shape
    return Terms(scores, alibi.expand(full), added.expand(full), seen.expand(full), sizes)


def _softmax(x: Tensor, sink: Tensor, exp: Any, log: Any) -> tuple[Tensor, Tensor]:
    """Probabilities and log of the denominator, in the units of `exp`; an infinite sink has all."""
    torch = torch_module()
    top = torch.maximum(x.amax(3, keepdim=True), sink) if x.shape[3] else sink
    finite = torch.where(top.isinf(), 0.0, top)
    weights = exp(x - finite)
    total = weights.sum(3, keepdim=True) + exp(sink - finite)
    p = torch.where(sink == math.inf, 0.0, weights / torch.where(total == 0, 1.0, total))
    return p, torch.where(top == math.inf, top, finite + log(total))[..., 0]


def _extent(x: Tensor, of: Tensor) -> Tensor:
    """Largest less smallest value among some keys of each row; at most 0 of none."""
    torch = torch_module()
    if not x.shape[3]:
        return x.new_zeros(x.shape[:3])
    largest = torch.where(of, x, -math.inf).amax(3)
    return largest - torch.where(of, x, math.inf).amin(3)


def _largest(x: Tensor, dim: int) -> Tensor:
    return x.amax(dim) if x.shape[dim] else x.sum(dim)


def _few(x: Tensor) -> list[float]:
    return [float(f"{value:.6g}") for value in x[:3].tolist()]


class Expected:
    """The right results for one batch of equal lengths, (batch, rows, heads, dim)."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> None:
        torch = torch_module()
        self.dtype = str(q.dtype).removeprefix("torch.")
        options = dict(options)
        sinks = options.pop("sinks", None)
        group = q.shape[2] // k.shape[2]
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        native = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.unit = 2.0**-53 if q.dtype == torch.float64 else 2.0**-24
        sink = torch.full((1, q.shape[1], 1, 1), -math.inf, device=q.device, dtype=torch.float64)
        if sinks is not None:
            sink = sinks.double()[None, :, None, None]
        self.sink = sink.expand(q.shape[0], q.shape[1], q.shape[2], 1)
        terms = _terms(q, k, torch.float64, **options)
        plains = {order: _terms(q, k, native, order, **options).total() for order in ORDERS}
        if "bias" in options and "alibi_slopes" in options:
            rounded = _terms(q, k, native, **options)
            plains.update({order: rounded.total(order) for order in TERM_ORDERS[1:]})
        self._find_near(terms)
        self._find_exact(terms, v.double(), list(plains.values()))
        self._find_errors(v, native, plains)
        self._find_hulls(terms.seen, v.double())

    def _is(self, *kinds: str) -> Tensor:
        """Rows of these kinds."""
        found = self.kind == KINDS.index(kinds[0])
        for kind in kinds[1:]:
            found = found | (self.kind == KINDS.index(kind))
        return found

    def _find_near(self, terms: Terms) -> None:
        """Near keys of each row, its kind, and its exact scores."""
        torch = torch_module()
        scores = terms.total()
        size = terms.products + terms.capped.abs() + terms.alibi.abs() + terms.bias.abs()
        size = torch.where(terms.seen, size + scores.abs(), 0.0)
        slack = 16 * self.unit * size  # more than any order of additions is off by
        surely = self.sink - torch.where(self.sink.isinf(), 0.0, 16 * self.unit * self.sink.abs())
        if scores.shape[3]:
            surely = torch.maximum(surely, (scores - slack).amax(3, keepdim=True))
        self.near = terms.seen & (scores + slack + _NEGLIGIBLE >= surely)
        self.size = torch.where(self.near, size, 0.0)
        largest = _largest(self.size, 3)
        rounding = self.unit * largest
        no_sink = (self.sink + 16 * self.unit * self.sink.abs() + _NEGLIGIBLE < surely)[..., 0]
        no_sink |= (self.sink == -math.inf)[..., 0] | (self.sink == math.inf)[..., 0]
        by_alibi = terms.alibi.abs() > terms.bias.abs()
        shared = torch.where(by_alibi, terms.alibi, terms.bias)
        rest = torch.where(by_alibi, terms.bias, terms.alibi).abs() + terms.capped.abs()
        lost = rest + terms.products * 2.0**-20 <= shared.abs() * (self.unit / 4)
        absorbed = no_sink & (_extent(shared, self.near) <= 0) & (lost | ~self.near).all(3)
        absorbed &= rounding > 2.0**-6
        # A slope times a distance that is no float32 may be rounded together with the rest.
        native = torch.float64 if self.unit == 2.0**-53 else torch.float32
        exact_term = ~by_alibi | (shared.to(native).double() == shared)
        absorbed &= (exact_term | ~self.near).all(3)
        alike = 2.0**-48 if self.unit > 2.0**-53 else 0.0  # float64's own last bits
        most = _largest(torch.where(self.near, terms.products + terms.capped.abs(), 0.0), 3)
        equal = no_sink & ~absorbed & (_extent(terms.capped, self.near) <= alike * most)
        equal &= _extent(terms.products, self.near) <= 2.0**-48 * most
        equal &= (_extent(terms.alibi, self.near) <= 0) & (_extent(terms.bias, self.near) <= 0)
        large = (terms.bias.abs() >= LIFTED) & (terms.bias.abs() >= 8 * terms.products)
        rough = (rounding > 1 / 16) & ~equal & ~absorbed
        wrong = (scores.isnan() | (scores == math.inf)).any(3) | self.sink[..., 0].isnan()
        kind = torch.zeros_like(rounding, dtype=torch.long)
        kind[absorbed] = KINDS.index("absorbed")
        kind[rough] = KINDS.index("coarse")
        kind[rough & (large | ~self.near).all(3)] = KINDS.index("lifted")
        self.any_key = terms.seen.any(3, keepdim=True)
        kind[~self.any_key[..., 0]] = KINDS.index("empty")
        # A bias of -inf hides any score that is a number.
        wrong |= terms.alibi.isnan().any(3) & ~self.any_key[..., 0]
        kind[wrong] = KINDS.index("nan")
        self.kind = kind
        self.settled = equal | absorbed
        self.scores = torch.where(absorbed[..., None] & self.near, shared, scores)
        if scores.shape[3]:
            top = scores.amax(3, keepdim=True)
            level = (equal & (rounding > 2.0**-6))[..., None] & self.near
            self.scores = torch.where(level, top, self.scores)

    def _find_exact(self, terms: Terms, v: Tensor, plains: list[Tensor]) -> None:
        """Results, and what one rounding of scores, probabilities and result makes of them."""
        torch = torch_module()
        p, self.lse = _softmax(self.scores, self.sink, torch.exp, torch.log)
        self.p, self.out = p, p @ v
        self.weighed = ROUNDING[self.dtype] * (p @ v.abs())
        # One rounding; beside a large bias, by what plain scores are in truth off by.
        off = [_extent((x.double() - self.scores).nan_to_num(), self.near) for x in plains]
        truly_off = torch.stack(off).amax(0)[..., None]
        one_rounding = 2 * self.unit * self.size
        moved = torch.where(self._is("lifted")[..., None], truly_off, one_rounding)
        weights = torch.where(self.settled[..., None], 0.0, p * moved) ** 2
        spread = weights @ v**2 - 2 * self.out * (weights @ v)
        spread = spread + self.out**2 * weights.sum(3, keepdim=True)
        self.of_scores = spread.clamp_min(0).sqrt()
        of_row = torch.where(
            self._is("lifted", "coarse"), _largest(self.size, 3), (p * self.size).sum(3)
        )
        self.of_lse = 4 * self.unit * of_row
        most = _largest(v.abs(), 2)[:, :, None]
        self.tiny = TINY[self.dtype] * torch.minimum(terms.seen.double() @ v.abs(), most)
        self.tiny = self.tiny + STEP[self.dtype]

    def _find_errors(self, v: Tensor, native: Any, plains: dict[str, Tensor]) -> None:
        """Errors of plain computations, the worst of the rows that round as much or less."""
        torch = torch_module()
        dtype, v = v.dtype, v.to(native)
        sink = self.sink.to(native)
        worst_out = self._error(self._times_v(self.p.to(native), v, dtype), self.out)
        worst_lse = torch.zeros_like(self.lse)
        for order, x in plains.items():
            if order == "from the end" and self._in_range(x) and self._in_range(sink):
                p, lse = _softmax(x * LOG2E, sink * LOG2E, torch.exp2, torch.log2)
                lse = lse / LOG2E
            else:
                p, lse = _softmax(x, sink, torch.exp, torch.log)
            error = self._error((p.to(dtype).to(native) @ v).to(dtype), self.out)
            worst_out = torch.maximum(worst_out, torch.where(self.settled, 0.0, error))
            worst_lse = torch.maximum(worst_lse, self._error(lse[..., None], self.lse[..., None]))
        finite = worst_out.isfinite() & worst_lse.isfinite()
        self.broken = bool((~finite & ~self._is("nan")).any())
        classes = torch.frexp(self.of_lse / self.unit)[1].clamp(0, 160)
        self.plain_out, self.plain_lse = torch.zeros_like(worst_out), torch.zeros_like(worst_lse)
        groups = (self.settled, self._is("lifted"), self._is("coarse"))
        groups = (~(groups[0] | groups[1] | groups[2]), *groups)
        for group in groups:
            group = group & ~self._is("nan")
            for worst, found in ((worst_out, self.plain_out), (worst_lse, self.plain_lse)):
                table = torch.zeros(161, dtype=torch.float64, device=v.device)
                table.scatter_reduce_(0, classes[group].long(), worst[group], "amax")
                found[group] = table.cummax(0)[0][classes[group].long()]

    @staticmethod
    def _in_range(x: Tensor) -> bool:
        """Whether a computation in base two can hold all of this."""
        return bool(((x * LOG2E).isfinite() == x.isfinite()).all())

    @staticmethod
    def _times_v(p: Tensor, v: Tensor, dtype: Any) -> Tensor:
        """Probabilities times V, sixteen keys at a time from the last to the first."""
        p = p.to(dtype).to(v.dtype)
        total = v.new_zeros(*p.shape[:3], v.shape[3])
        for at in reversed(range(0, p.shape[3], 16)):
            total += p[..., at : at + 16] @ v[:, :, at : at + 16]
        return total.to(dtype)

    @staticmethod
    def _error(actual: Tensor, expected: Tensor) -> Tensor:
        """The largest of each row; infinite of NaN."""
        torch = torch_module()
        actual = actual.double()
        error = torch.where(actual == expected, 0.0, (actual - expected).abs())
        return error.nan_to_num(nan=math.inf, posinf=math.inf).amax(3)

    def _find_hulls(self, seen: Tensor, v: Tensor) -> None:
        """The smallest and largest value of each column of V, of visible keys or of near ones."""
        torch = torch_module()
        few = self._is("lifted", "coarse")[..., None]
        keys = torch.where(few, self.near, seen)
        shape = (*seen.shape[:3], v.shape[3])
        low, high = v.new_zeros(shape), v.new_zeros(shape)
        step = max(1, _HULL_ELEMENTS // max(1, math.prod(seen.shape[:2]) * v.shape[2] * v.shape[3]))
        for start in range(0, seen.shape[2] if v.shape[2] else 0, step):
            rows = slice(start, start + step)
            of_rows, values = keys[:, :, rows, :, None], v[:, :, None]
            low[:, :, rows] = torch.where(of_rows, values, math.inf).amin(3)
            high[:, :, rows] = torch.where(of_rows, values, -math.inf).amax(3)
        zero = (self.sink > -math.inf) | ~keys.any(3, keepdim=True)
        self.low = torch.where(zero, low.clamp_max(0), low)
        self.high = torch.where(zero, high.clamp_min(0), high)
        unit = 2 * ROUNDING[self.dtype] + TINY[self.dtype]
        self.slack = unit * torch.maximum(self.low.abs(), self.high.abs()) + STEP[self.dtype]
        most = _largest(v.abs(), 2)[:, :, None]
        self.slack = torch.where(few, self.slack + 1e-8 * most, self.slack)

    def each(self, out: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor]:
        """Errors of out, (batch, rows, heads, dim), and lse over their bounds, of each row."""
        torch = torch_module()
        out = out.transpose(1, 2).double()
        bound = torch.maximum(self.weighed, self.of_scores)
        bound = 2 * torch.maximum(self.plain_out[..., None], bound) + self.tiny
        error = torch.where(out == self.out, 0.0, (out - self.out).abs()) / bound
        error = torch.where(self._is("coarse")[..., None], 0.0, error)
        outside = torch.maximum(self.low - out, out - self.high) / self.slack
        error = torch.maximum(error.nan_to_num(nan=math.inf), outside.nan_to_num(nan=math.inf))
        empty = self._is("empty")[..., None]
        error = torch.where(empty, torch.where(out == 0, 0.0, math.inf), error)
        # Either result is right for a NaN beside a sink that has all weight, and without keys.
        is_nan, or_sink = self._is("nan"), self.sink == math.inf
        right = out.isnan() | ((or_sink | ~self.any_key) & (out == 0))
        error = torch.where(is_nan[..., None], torch.where(right, 0.0, math.inf), error)
        if lse is None:
            return error.amax(3), torch.zeros_like(self.lse)
        lse = lse.double()
        limit = 2 * torch.maximum(self.plain_lse, self.of_lse) + 2e-6
        limit = limit + 2.0**-22 * torch.where(self.lse.isinf(), 0.0, self.lse.abs())
        of_lse = torch.where(lse == self.lse, 0.0, (lse - self.lse).abs()) / limit
        of_lse = of_lse.nan_to_num(nan=math.inf, posinf=math.inf)
        right = lse.isnan() | (or_sink[..., 0] & (lse == math.inf))
        right = right | (~self.any_key[..., 0] & (lse == self.lse))
        return error.amax(3), torch.where(is_nan, torch.where(right, 0.0, math.inf), of_lse)

    def worst(self, out: Tensor, lse: Tensor | None) -> tuple[float, float, str]:
        """The same of the worst row, and what is to be said of it."""
        torch = torch_module()
        both = self.each(out, lse)
        if not both[0].numel():
            return 0.0, 0.0, ""
        worst = tuple(float(x.max()) for x in both)
        at = torch.unravel_index(torch.maximum(*both).argmax(), both[0].shape)
        b, h, row = (int(i) for i in at)
        kind = KINDS[int(self.kind[at])]
        near = int(self.near[at].sum())
        text = (
            f"batch {b} head {h} row {row} ({kind}, {near} near keys): out {_few(out[b, row, h])}"
        )
        text += f", right {_few(self.out[at])}, lse {'' if lse is None else float(lse[at])}"
        return *worst, f"{text}, right {float(self.lse[at])}"

    def kinds(self) -> dict[str, int]:
        """How many rows are of each kind."""
        counts = torch_module().bincount(self.kind.flatten(), minlength=len(KINDS))
        return dict(zip(KINDS, counts.tolist(), strict=True))
