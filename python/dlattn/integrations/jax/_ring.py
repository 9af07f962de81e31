"""Attention over a sequence whose positions are spread over an axis of devices.

Every device runs this program. In each step it computes its queries with keys of another device,
while those of the next step arrive. Partial results are merged in float32 by their lse. The
backward pass has out and lse over all keys, by which each step's gradients are shares of the whole;
those of keys return to the device that has them.

Source: Liu, Zaharia, Abbeel. Ring attention with blockwise transformers. arXiv:2310.01889, 2023.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dlattn.integrations.jax._calls import Call, vary
from dlattn.integrations.jax._launch import Names, Options, Result
from dlattn.integrations.jax._operands import dims
from dlattn.integrations.ring.programs import Part, Step, steps
from dlattn.integrations.ring.schedule import Mask
from dlattn.integrations.ring.shards import Range

Launch = Callable[[Call, tuple[Any, ...]], Result]
Operands = dict[str, Any]


class Ring(NamedTuple):
    """All of a ring but its arrays.

    Attributes:
        axis: The name of the axis, or several.
        n: Its devices.
        rows: The positions that each of them has.
        options: Those of attention, but for what it masks.
        launch: Calls dlattn with the arrays of a device.
    """

    axis: Any
    n: int
    rows: int
    order: str
    mask: Mask
    options: Options
    launch: Launch

    @property
    def layout(self) -> str:
        layout: str = dict(self.options)["layout"]
        return layout

    @property
    def steps(self) -> tuple[Step, ...]:
        return steps(self.n * self.rows, self.n, self.order, self.mask)

    def options_of(self, part: Part) -> Options:
        causal = part.right == 0
        window = part.left, None if causal else part.right
        return tuple(sorted({**dict(self.options), "causal": causal, "window": window}.items()))

    def rank(self) -> Any:
        return jax.lax.axis_index(self.axis)

    def take(self, name: str, x: Any, rows: Range) -> Any:
        axis = self._row_axis(name)
        if rows == (0, x.shape[axis]):
            return x
        return jax.lax.slice_in_dim(x, *rows, axis=axis)

    def put(self, name: str, x: Any, rows: Range, part: Any) -> Any:
        """x with `part` in the place of these rows."""
        axis = self._row_axis(name)
        if rows == (0, x.shape[axis]):
            return part
        return jax.lax.dynamic_update_slice_in_dim(x, part, rows[0], axis)

    def joined(self, name: str, parts: Sequence[Any]) -> Any:
        return jnp.concatenate(list(parts), self._row_axis(name))

    def _row_axis(self, name: str) -> int:
        letters = dims(name, self.layout)
        return letters.index("t" if "t" in letters else "s")

    def by_row(self, x: Any) -> Any:
        """An array like lse, to be multiplied with one like out."""
        return (x.swapaxes(1, 2) if self.layout == "bshd" else x)[..., None]

    def send(self, step: Step, arrays: Sequence[Any], *, back: bool = False) -> list[Any]:
        """Arrays from the devices that have a step's keys to those that need them, or `back`.

        They are one message, as XLA computes beside one at a time and waits for others.
        """
        if step.shift == 0 or not arrays:
            return list(arrays)
        both = [((rank - step.shift) % self.n, rank) for rank in step.receivers]
        pairs = [(b, a) for a, b in both] if back else both
        flat = jnp.concatenate([x.reshape(-1) for x in arrays])
        flat = jax.lax.ppermute(flat, self.axis, pairs)
        ends = list(accumulate(x.size for x in arrays))
        parts = jnp.split(flat, ends[:-1])
        return [part.reshape(x.shape) for part, x in zip(parts, arrays, strict=True)]

    def arriving(self, step: Step, operands: Operands) -> Any:
        return tuple(self.send(step, [self.take(x, operands[x], step.rows) for x in "kv"]))


def sum_dtype(x: Any) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)


def _sums(like: Any, shape: Sequence[int], value: float, dtype: Any) -> Any:
    return vary((jnp.full(shape, value, dtype),), (like,))[0]


def _pipelined(
    ring: Ring, operands: Operands, sums: Any, compute: Callable[[Step, Any, Any], Any]
) -> Any:
    """compute(step, keys, sums) for each step; it returns the new sums.

    The keys of the next step are sent when the step before this one is done, so that two steps'
    keys are held at most, and XLA can send them during this one.
    """
    each = ring.steps
    arriving = ring.arriving(each[0], operands) if each else ()
    for s, step in enumerate(each):
        keys = arriving
        if step is not each[-1]:
            own = operands["k"], operands["v"]
            if s > 0:
                own, sums = jax.lax.optimization_barrier((own, sums))
            arriving = ring.arriving(each[s + 1], dict(zip("kv", own, strict=True)))
        sums = compute(step, keys, sums)
    return sums


def _by_kind(ring: Ring, step: Step, run: Callable[..., Any], *operands: Any) -> Any:
    """run(parts, offsets, *operands) with the calls of this device."""
    rank = ring.rank()
    offsets = jnp.asarray(step.offsets, jnp.int32)[rank]

    def branch(parts: tuple[Part, ...]) -> Callable[..., Any]:
        return lambda offsets, *operands: run(parts, offsets, *operands)

    branches = [branch(parts) for parts in step.kinds]
    if len(branches) == 1:
        return branches[0](offsets, *operands)
    kind = jnp.asarray(step.kind_of, jnp.int32)[rank]
    return jax.lax.switch(kind, branches, offsets, *operands)


def _scores(
    part: Part, offset: Any, slopes: Any, q: Any, num_keys: int, num_queries: int
) -> tuple[Operands, Any]:
    """The operand by which a call has the scores -slope |p - j|, and what its lse lacks.

    Queries at the positions of the keys have them from the call itself. Otherwise all keys are on
    one side, and the distance is one of the key from a fixed position, which is a bias, and one of
    the query from it, which the softmax does not see but lse does.
    """
    if slopes is None:
        return {}, None
    if part.side == 0:
        return {"alibi_slopes": slopes}, None
    slopes = slopes.astype(sum_dtype(q))[..., None]
    keys = jnp.arange(num_keys, dtype=slopes.dtype)
    distances = (offset + jnp.arange(num_queries, dtype=jnp.int32)).astype(slopes.dtype)
    if part.side > 0:
        keys, distances = keys - (num_keys - 1), (num_keys - 1) - distances
    else:
        keys = -keys
    bias = (slopes * keys)[..., None, :]
    return {"bias": bias if bias.ndim == 4 else bias[None]}, slopes * distances


def _operands_of(
    ring: Ring, part: Part, offset: Any, q: Any, keys: Any, slopes: Any
) -> tuple[Operands, Any]:
    own: Operands = {"q": ring.take("q", q, part.q)}
    own |= {name: ring.take(name, x, part.k) for name, x in zip("kv", keys, strict=True)}
    sizes = part.k[1] - part.k[0], part.q[1] - part.q[0]
    scores, lse_offset = _scores(part, offset, slopes, q, *sizes)
    names = tuple(scores)
    return {**own, **dict(zip(names, vary(tuple(scores.values()), (q,)), strict=True))}, lse_offset


def _merge(ring: Ring, sums: Any, rows: Range, out: Any, lse: Any) -> Any:
    """The sums so far, (out, lse), and a part's of these rows."""
    before, lse_before = ring.take("out", sums[0], rows), ring.take("lse", sums[1], rows)
    total = jnp.logaddexp(lse_before, lse)

    def weighted(out: Any, lse: Any) -> Any:
        weight = jnp.where(jnp.isneginf(lse), 0, jnp.exp(lse - total))
        return out.astype(before.dtype) * ring.by_row(weight).astype(before.dtype)

    merged = weighted(before, lse_before) + weighted(out, lse)
    return ring.put("out", sums[0], rows, merged), ring.put("lse", sums[1], rows, total)


def forward(ring: Ring, operands: Operands) -> tuple[Any, Any]:
    """out in q's dtype, and lse over all keys of all devices."""
    q, v = operands["q"], operands["v"]
    of_q = dict(zip(dims("q", ring.layout), q.shape, strict=True))
    sums = (
        _sums(q, (*q.shape[:-1], v.shape[-1]), 0, sum_dtype(q)),
        _sums(q, [of_q[letter] for letter in "bhs"], -jnp.inf, jnp.float32),
    )

    def compute(step: Step, keys: Any, sums: Any) -> Any:
        def run(parts: tuple[Part, ...], offsets: Any, q: Any, keys: Any, sums: Any) -> Any:
            for n, part in enumerate(parts):
                own, lse_offset = _operands_of(
                    ring, part, offsets[n], q, keys, operands.get("alibi_slopes")
                )
                call = Call(ring.options_of(part), tuple(own))
                out, lse = ring.launch(call, tuple(own.values()))
                if lse_offset is not None:
                    lse = (lse + lse_offset).astype(jnp.float32)
                sums = _merge(ring, sums, part.q, out, lse)
            return sums

        return _by_kind(ring, step, run, q, keys, sums)

    out, lse = _pipelined(ring, operands, sums, compute)
    if "sinks" in operands:
        out, lse = _with_sinks(ring, out, lse, operands["sinks"])
    return out.astype(q.dtype), lse


def _with_sinks(ring: Ring, out: Any, lse: Any, sinks: Any) -> tuple[Any, Any]:
    """The sinks join the denominator, once, behind all keys."""
    total = jnp.logaddexp(lse, sinks[:, None])
    weight = jnp.where(jnp.isneginf(lse), 0, jnp.exp(lse - total))
    return out * ring.by_row(weight).astype(out.dtype), total


def _sink_gradient(ring: Ring, operands: Operands) -> Any:
    """This device's share of it: what its rows add."""
    sinks, lse, dtype = operands["sinks"], operands["lse"], sum_dtype(operands["q"])
    delta: Any = jnp.zeros((), dtype)
    if "dout" in operands:
        delta = (operands["dout"].astype(dtype) * operands["out"].astype(dtype)).sum(-1)
        delta = delta.swapaxes(1, 2) if ring.layout == "bshd" else delta
    if "dlse" in operands:
        delta = delta - operands["dlse"].astype(dtype)
    share = jnp.where(sinks[:, None] < lse, jnp.exp(sinks[:, None] - lse), 1)  # 1 too at +inf
    weight = jnp.where(jnp.isneginf(lse), 0, share).astype(dtype)
    return -(weight * delta).sum((0, 2)).astype(sinks.dtype)


def backward(ring: Ring, operands: Operands, needs: Names) -> dict[str, Any]:
    """The gradients of those of q, k, v and sinks that `needs` names.

    `operands` has those of `forward`, out, lse, and dout or dlse or both.
    """
    q = operands["q"]
    given = {name: operands[name] for name in ("out", "lse", "dout", "dlse") if name in operands}
    asked = tuple(name for name in "qkv" if name in needs)
    own = {name: _sums(q, operands[name].shape, 0, sum_dtype(operands[name])) for name in asked}
    on_way: list[tuple[Step, dict[str, Any]]] = []

    def compute(step: Step, keys: Any, sums: dict[str, Any]) -> Any:
        shares = {}
        for name, x in zip("kv", keys, strict=True):
            if name in asked:  # one call's gradients have the keys' dtype, and travel so
                dtype = sum_dtype(x) if step.sums else x.dtype
                shares[name] = _sums(q, x.shape, 0, dtype)

        def run(
            parts: tuple[Part, ...], offsets: Any, q: Any, keys: Any, given: Any, found: Any
        ) -> Any:
            for n, part in enumerate(parts):
                slopes = operands.get("alibi_slopes")
                own, lse_offset = _operands_of(ring, part, offsets[n], q, keys, slopes)
                of_rows = {name: ring.take(name, x, part.q) for name, x in given.items()}
                if lse_offset is not None:
                    of_rows["lse"] = (of_rows["lse"] - lse_offset).astype(jnp.float32)
                names = (*own, *of_rows)
                call = Call(ring.options_of(part), names, asked)
                gradients = ring.launch(call, (*own.values(), *of_rows.values()))
                for name, gradient in zip(asked, gradients, strict=True):
                    rows = part.q if name == "q" else part.k
                    sofar = ring.take(name, found[name], rows)
                    added = sofar + gradient.astype(sofar.dtype)
                    found = {**found, name: ring.put(name, found[name], rows, added)}
            return found

        rest = {name: x for name, x in sums.items() if name == "q"}
        found = _by_kind(ring, step, run, q, keys, given, {**rest, **shares})
        if on_way:
            sums = _add(ring, sums, *on_way.pop())
        returning = ring.send(step, [found[name] for name in shares], back=True)
        on_way.append((step, dict(zip(shares, returning, strict=True))))
        return {**sums, **{name: found[name] for name in rest}}

    if asked:
        own = _pipelined(ring, operands, own, compute)
    if on_way:
        own = _add(ring, own, *on_way.pop())
    result = {name: own[name].astype(operands[name].dtype) for name in asked}
    if "sinks" in needs:
        result["sinks"] = _sink_gradient(ring, operands)
    return result


def _add(ring: Ring, sums: dict[str, Any], step: Step, shares: dict[str, Any]) -> dict[str, Any]:
    """The sums with the gradients of a step's rows, where these rows are."""
    result = dict(sums)
    for name, share in shares.items():
        sofar = ring.take(name, sums[name], step.rows)
        result[name] = ring.put(name, sums[name], step.rows, sofar + share.astype(sofar.dtype))
    return result
