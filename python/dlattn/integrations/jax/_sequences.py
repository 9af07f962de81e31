"""Calls whose sequences are split over devices by XLA: each runs as a ring.

Devices have their positions in order there. Where a causal mask would leave the first ones with
less work, the ring is run in zigzag order: halves of their parts are exchanged before and after.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dlattn.integrations.jax import _ring
from dlattn.integrations.jax._calls import Call
from dlattn.integrations.jax._launch import Result
from dlattn.integrations.jax._operands import dims, size_of
from dlattn.integrations.ring.schedule import Mask

_OPERANDS = {"q", "k", "v", "alibi_slopes", "sinks", "out", "lse", "dout", "dlse"}
_GRADIENTS = {"q", "k", "v", "sinks"}


def may_be_split(call: Call, operands: Sequence[Any]) -> bool:
    """Whether a ring serves the call: attention of sequences to themselves without a bias or mask.

    Neither do 8-bit elements and precisions, lengths, and gradients of slopes.
    """
    if not (_OPERANDS.issuperset(call.names) and _GRADIENTS.issuperset(call.needs)):
        return False
    q, k = operands[:2]
    rows, keys = size_of("s", "q", q, call.layout), size_of("t", "k", k, call.layout)
    options = dict(call.options)
    return (
        rows == keys > 0
        and q.dtype.itemsize > 1
        and options["precision"] is None
        and options["out_dtype"] is None
    )


def launch(call: Call, values: Sequence[Any], axes: tuple[Any, ...], mesh: Any) -> Result:
    """The results of `call` for a device that has its parts of the sequences, over these axes."""
    operands = dict(zip(call.names, values, strict=True))
    options = dict(call.options)
    n = math.prod(mesh.shape[axis] for axis in axes)
    rows = size_of("s", "q", operands["q"], call.layout)
    left, right = options["window"]
    mask = Mask(left, 0 if options["causal"] else right, "alibi_slopes" in operands)
    # Zigzag pays where most of a part's keys are those of other devices.
    zigzag = mask.right == 0 and (mask.left is None or mask.left > 2 * rows)
    zigzag = zigzag and n > 1 and rows % 2 == 0
    ring = _ring.Ring(
        axes,
        n,
        rows,
        "zigzag" if zigzag else "contiguous",
        mask,
        tuple(sorted({**options, "return_lse": True}.items())),
        Call.launch,
    )

    def ordered(name: str, x: Any, back: bool = False) -> Any:
        has_rows = not {"s", "t"}.isdisjoint(dims(name, call.layout))
        return _exchanged(ring, name, x, back) if zigzag and has_rows else x

    given = {name: ordered(name, x) for name, x in operands.items()}
    if call.needs:
        found = _ring.backward(ring, given, call.needs)
        return tuple(ordered(name, found[name], True) for name in call.needs)
    results = dict(zip(("out", "lse"), _ring.forward(ring, given), strict=True))
    return tuple(ordered(name, results[name], True) for name in call.results)


def _exchanged(ring: _ring.Ring, name: str, x: Any, back: bool) -> Any:
    """x in zigzag order, from the order of positions, or `back`.

    Of 2n parts device r has parts 2r and 2r + 1, and in zigzag order r and 2n - 1 - r: one of even
    number and one of odd, the first one of r's own parity.
    """
    n, half = ring.n, ring.rows // 2

    def moves(odd: int) -> list[tuple[int, int]]:
        pairs = ((r, min(2 * r + odd, 2 * n - 1 - 2 * r - odd)) for r in range(n))
        return [(b, a) if back else (a, b) for a, b in pairs]

    def sent(x: Any, odd: int) -> Any:
        return jax.lax.ppermute(x, ring.axis, moves(odd))

    parts = [ring.take(name, x, rows) for rows in ((0, half), (half, 2 * half))]
    swaps = ring.rank() % 2 == 1

    def swapped(a: Any, b: Any) -> list[Any]:
        return [jnp.where(swaps, b, a), jnp.where(swaps, a, b)]

    if back:
        parts = [sent(part, odd) for odd, part in enumerate(swapped(*parts))]
    else:
        parts = swapped(*(sent(part, odd) for odd, part in enumerate(parts)))
    return ring.joined(name, parts)
