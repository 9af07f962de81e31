"""The dimensions of each operand, and what follows from them: batching and sharding."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp

from dlattn import _core

# b: batch, s: seqlen_q, t: seqlen_k, h: num_heads, g: num_heads_kv, d and e: head_dim of q and v.
# An operand of fewer dimensions has the last ones, as it broadcasts, and so does one of size 1.
_DIMS = {
    name: letters.replace("n", "h")
    for name, letters, functions in _core.operands["forward"]
    if "attention" in functions
} | {"seqused_k": "b"}
_LAYOUTS = {
    "bshd": {"q": "bshd", "k": "btgd", "v": "btge", "out": "bshe", "dout": "bshe"},
    "bhsd": {"q": "bhsd", "k": "bgtd", "v": "bgte", "out": "bhse", "dout": "bhse"},
}
for _dims in _LAYOUTS.values():
    _dims |= {"lse": "bhs", "dlse": "bhs"}
NAMES = ("q", "k", "v", *_DIMS)
_ROWS, _HEAD_DIMS = ("s", "t"), ("d", "e")


def dims(name: str, layout: str) -> str:
    return _LAYOUTS[layout].get(name) or _DIMS[name]


def last_dims(letters: str, count: int) -> str:
    """The last dimensions, which an operand of `count` dimensions has; of a scalar none."""
    return letters[len(letters) - count :]


def size_of(letter: str, name: str, x: Any, layout: str) -> int:
    """The dimensions of an operand, or of one with further dimensions before its own."""
    letters = dims(name, layout)
    size: int = x.shape[x.ndim - len(letters) + letters.index(letter)]
    return size


def folds(name: str) -> bool:
    """Whether the operand has a batch, which takes up a dimension that vmap adds."""
    return "b" in dims(name, "bshd")


def fold(
    name: str, x: Any, axis_size: int, batched: bool, batch_size: int, layout: str, each: bool
) -> Any:
    """The operand with the mapped dimension, its first if it is `batched`, taken into the batch.

    With `each` it has elements of its own for each sequence.
    """
    whole = len(dims(name, layout))
    if not batched:
        if not each:
            if x.ndim < whole or not folds(name):
                return x  # broadcasts to any batch
            if batch_size == 1 and name in _DIMS and name != "seqused_k":
                return x[0]
        x = jnp.broadcast_to(x, (axis_size, *x.shape))
    own = x.shape[1:]
    own = (*(1,) * (whole - len(own)), *own)
    x = x.reshape(axis_size, *own)
    if own[0] != batch_size:
        x = jnp.broadcast_to(x, (axis_size, batch_size, *own[1:]))
    return x.reshape(axis_size * batch_size, *own[1:])


def splits(
    q_spec: Any, mesh_shape: Any, num_heads_kv: int, layout: str, length: int
) -> dict[str, Any]:
    """The axes of a mesh over which each of the dimensions is split, as q is.

    `length` is that of sequences that may be split, or 0.
    """
    spec = (*q_spec, *(None,) * 4)
    batch, heads, rows = (spec[dims("q", layout).index(letter)] for letter in "bhs")

    def devices(part: Any) -> int:
        return math.prod(mesh_shape[axis] for axis in axes_of((part,)))

    if num_heads_kv > 1 and num_heads_kv % devices(heads):
        heads = None  # a device would have queries of a part of a KV head
    if not length or length % devices(rows):
        rows = None
    return {"b": batch, "h": heads, "g": heads if num_heads_kv > 1 else None, "s": rows, "t": rows}


def axes_of(spec: Iterable[Any]) -> tuple[Any, ...]:
    """The axes of a mesh that a sharding names, each once."""
    parts = (x if isinstance(x, tuple) else (x,) for x in spec if x is not None)
    return tuple(dict.fromkeys(axis for part in parts for axis in part))


def in_order_of(mesh: Any, part: Any) -> Any:
    """The axes over which a dimension is split, in the order that the mesh has them."""
    axes = axes_of((part,))
    return part if len(axes) < 2 else tuple(sorted(axes, key=list(mesh.axis_names).index))


def sharding_rule(
    names: Iterable[str],
    shapes: Iterable[tuple[int, ...]],
    results: Iterable[tuple[str, tuple[int, ...] | None]],
    layout: str,
    ring: bool,
) -> tuple[str, dict[str, Any]]:
    """Shardy's rule: batch and heads may be split over devices, each with its own KV heads.

    With `ring` sequences may be split too, those of q as those of k and v.

    Query heads that share KV heads are a dimension of their own to it. As the product of KV heads
    and of the queries of each, a split over more devices than there are KV heads would split these
    over a part of a mesh's axis, which a PartitionSpec cannot tell: JAX then fails. A result has
    the shape that is given, or all of its dimensions.
    """
    operands = list(zip(names, shapes, strict=True))
    num_heads = operands[0][1][dims("q", layout).index("h")]
    num_heads_kv = operands[1][1][dims("k", layout).index("g")]
    heads = "g" if num_heads == num_heads_kv else "h"
    seen: list[str] = []
    count = 0

    def factor(letter: str, size: int, full: bool) -> str:
        nonlocal count
        if letter == "h" and size == num_heads_kv != num_heads:
            letter = "g"  # a q_descale of KV heads
        if letter == "t" and ring:
            letter = "s"
        if size == 1 and not full:
            count += 1
            return f"u{count}"
        letter = heads if letter == "h" else letter
        if letter not in seen:
            seen.append(letter)
        return letter

    def side(entries: Iterable[tuple[str, str, tuple[int, ...]]]) -> str:
        return ", ".join(
            " ".join(
                factor(letter, size, name not in _DIMS)
                for letter, size in zip(letters, shape, strict=True)
            )
            for name, letters, shape in entries
        )

    left = side(
        (name, last_dims(dims(name, layout), len(shape)), shape) for name, shape in operands
    )
    sizes = {"b": operands[0][1][0], "h": num_heads}
    full = [(name, dims(name, layout), shape) for name, shape in results]
    right = side(
        (name, letters, tuple(sizes.get(letter, 0) for letter in letters))
        if shape is None
        else (name, last_dims(letters, len(shape)), shape)
        for name, letters, shape in full
    )
    whole = _HEAD_DIMS if ring else (*_ROWS, *_HEAD_DIMS)
    alone = tuple(x for x in seen if x in whole)
    return f"{left} -> {right}", {"need_replication_factors": alone}
