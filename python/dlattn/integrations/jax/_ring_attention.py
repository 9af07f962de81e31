"""`dlattn.jax.ring_attention`: what it takes, its gradients, and the parts of sequences."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec

from dlattn._errors import UnsupportedError
from dlattn._types import Causal, Layout, Window
from dlattn.integrations.jax import _call, _launch, _ring
from dlattn.integrations.jax._calls import spec_of, vary
from dlattn.integrations.jax._launch import Names, Result
from dlattn.integrations.jax._layers import with_automatic_axes
from dlattn.integrations.jax._operands import NAMES, dims, in_order_of
from dlattn.integrations.ring import shards
from dlattn.integrations.ring.schedule import mask_of

_DTYPES = ("float16", "bfloat16", "float32", "float64")


def ring_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    axis_name: Any,
    causal: Causal = False,
    softmax_scale: float | None = None,
    window: Window | None = None,
    softcap: float = 0.0,
    sinks: Any = None,
    alibi_slopes: Any = None,
    layout: Layout = "bshd",
    order: str = "zigzag",
    deterministic: bool = False,
) -> jax.Array:
    """Self-attention over sequences whose positions are spread over an axis of a mesh.

    For code inside of jax.shard_map: each device has its rows of q, k and v, as `shard_sequence`
    orders them, and gets those rows of what `attention` returns for the whole. It has gradients
    with respect to q, k, v and sinks, of first order. Keys and values go round the devices, and
    those of the next step are sent while one is computed. Memory grows with the part that a device
    has.

    Args:
        q: This device's queries, (batch, rows, num_heads, head_dim) in the layout "bshd": float16,
            bfloat16, float32 or float64, where `dlattn.attention` takes them.
        k, v: Its keys and values, of q's dtype and rows, with num_heads_kv heads.
        axis_name: The axis of shard_map's mesh, or a tuple of axes in the mesh's order, over which
            the sequences are split. All its devices have the same number of rows.
        causal: True, "bottom_right" and "top_left" are the same here: keys j <= i.
        softmax_scale, softcap: As for `dlattn.attention`.
        window: (left, right), as for `dlattn.attention`, in positions of the whole sequence. None:
            no limit.
        sinks: float32, (num_heads,), the same on every device. As for any weight that devices
            share, shard_map sums its gradient over them.
        alibi_slopes: float32, (num_heads,) or (batch, num_heads), the same on every device. Its
            gradient is refused.
        layout: "bshd", or "bhsd" with heads before rows.
        order: How the sequences were cut: as for `shard_sequence`.
        deterministic: Gradients have the same bits at every run. XLA's flags that ask for it do so
            too.

    Returns:
        out, of q's shape with head_dim_v for head_dim.

    Raises:
        UnsupportedError, TypeError: An argument is wrong, or a gradient of a gradient is asked for.

    References:
        [1] Liu, Zaharia, Abbeel. Ring attention with blockwise transformers. arXiv:2310.01889,
            2023.
    """
    tensors = {"q": q, "k": k, "v": v, "sinks": sinks, "alibi_slopes": alibi_slopes}
    operands = {
        name: _launch.array(x, name)
        for name, x in tensors.items()
        if x is not None or name in ("q", "k", "v")
    }
    shards.check_order(order)
    mask = mask_of(causal, window, alibi_slopes is not None)
    bound = _launch.SIGNATURE.bind(
        q, k, v, softmax_scale=softmax_scale, softcap=softcap, layout=layout, return_lse=True
    )
    bound.apply_defaults()
    options = {name: x for name, x in bound.arguments.items() if name not in NAMES}
    _launch.describe(options, operands)
    _check_rows(operands, layout)
    ring = _ring.Ring(
        tuple(axis_name) if isinstance(axis_name, list) else axis_name,
        _axis_size(axis_name),
        q.shape[1 if layout == "bshd" else 2],
        order,
        mask,
        tuple(sorted({**options, "deterministic": bool(deterministic)}.items())),
        _call.launch,
    )
    return _differentiable(ring, tuple(operands))(*operands.values())


def _axis_size(axis_name: Any) -> int:
    try:
        size = int(jax.lax.axis_size(axis_name))
    except (NameError, TypeError, ValueError) as error:
        raise UnsupportedError(
            f"axis_name is {axis_name!r}; accepted: an axis of the jax.shard_map around the call"
        ) from error
    mesh = jax.sharding.get_abstract_mesh()
    axes = axis_name if isinstance(axis_name, (tuple, list)) else (axis_name,)
    ordered = in_order_of(mesh, tuple(axes)) if set(axes) <= set(mesh.axis_names) else tuple(axes)
    if len(axes) > 1 and tuple(axes) != ordered:
        raise UnsupportedError(
            f"axis_name is {axis_name!r}; accepted: {ordered!r}, the order that the mesh has"
        )
    return size


def _check_rows(operands: dict[str, Any], layout: str) -> None:
    q = operands["q"]
    if str(q.dtype) not in _DTYPES:
        raise UnsupportedError(f"q is of {q.dtype}; accepted: {', '.join(_DTYPES)}")
    axis = 1 if layout == "bshd" else 2
    rows, keys = (operands[name].shape[axis] for name in "qk")
    if rows != keys:
        raise UnsupportedError(
            f"k has {keys} rows on a device and q has {rows}; accepted: as many, of the same "
            "positions"
        )


@functools.lru_cache(maxsize=1024)
def _differentiable(ring: _ring.Ring, names: Names) -> Callable[..., Any]:
    needs = tuple(name for name in names if name != "alibi_slopes")

    def by_name(*values: Any) -> dict[str, Any]:
        return dict(zip((*names, "out", "lse", "dout"), values, strict=False))

    def out_and_lse(*operands: Any) -> Result:
        of_q = dict(zip(dims("q", ring.layout), spec_of(operands[0]), strict=False))

        def specs(mesh: Any) -> Result:
            letters = (dims(name, ring.layout) for name in ("out", "lse"))
            return tuple(PartitionSpec(*map(of_q.get, x)) for x in letters)

        def call(*operands: Any) -> Result:
            return _ring.forward(ring, by_name(*operands))

        result: Result = with_automatic_axes(call, operands, specs)
        return result

    def gradients(*values: Any) -> Result:
        def specs(mesh: Any) -> Result:
            return tuple(spec_of(by_name(*values)[name]) for name in needs)

        def call(*values: Any) -> Result:
            found = _ring.backward(ring, by_name(*values), needs)
            return tuple(found[name] for name in needs)

        result: Result = with_automatic_axes(call, values, specs)
        return result

    first_out_and_lse, first_gradients = _refusing(out_and_lse), _refusing(gradients)

    @jax.custom_vjp
    def attention(*operands: Any) -> Any:
        return out_and_lse(*operands)[0]

    def forward(*primals: Any) -> tuple[Any, Any]:
        if any(x.perturbed for x, name in zip(primals, names, strict=True) if name not in needs):
            raise UnsupportedError(
                "alibi_slopes has a gradient asked for, and ring_attention has none of it; "
                "accepted: jax.lax.stop_gradient(alibi_slopes)"
            )
        operands = tuple(x.value for x in primals)
        out, lse = first_out_and_lse(*operands)
        return out, (operands, out, lse)

    def backward(saved: Any, dout: Any) -> Result:
        operands, out, lse = saved
        found: Result = ()
        if not isinstance(dout, SymbolicZero):
            found = first_gradients(*operands, out, lse, dout)
        return _call.gradients_as(operands, names, dict(zip(needs, found, strict=False)))

    attention.defvjp(forward, backward, symbolic_zeros=True)

    def ring_attention(*operands: Any) -> Any:
        # Gradients of what all devices share are sums over them, which JAX adds here.
        return attention(*vary(operands, (*operands, ring.rank())))

    compiled: Callable[..., Any] = jax.jit(ring_attention)
    return compiled


def _refusing(function: Callable[..., Result]) -> Callable[..., Result]:
    """The function, which refuses to be differentiated."""
    guarded = jax.custom_vjp(function)

    def refuse(*values: Any) -> Any:
        raise UnsupportedError(
            "gradients of ring_attention are differentiated, and have no gradients themselves; "
            "accepted: first derivatives"
        )

    guarded.defvjp(refuse, refuse)
    return guarded


def shard_sequence(x: Any, num_shards: int, *, axis: int = 1, order: str = "zigzag") -> jax.Array:
    """The array with its positions in the order of devices, to be split into equal parts.

    Device r of `num_shards` then has what torch's process r gets from
    `dlattn.torch.shard_sequence`. With order "contiguous" the array stays as it is.

    Args:
        x: An array with the positions of a sequence along `axis`: tokens, labels, q.
        num_shards: The devices over which the sequence is to be split.
        axis: The dimension of positions; num_shards divides its size.
        order: "zigzag": device r has parts r and 2n - 1 - r of 2n, equal work under a causal mask.
            "contiguous": part r of n.

    Returns:
        An array of x's shape. Gradients flow back to x.

    Raises:
        UnsupportedError, TypeError: An argument is wrong.
    """
    return _reordered(x, num_shards, axis, order, back=False)


def unshard_sequence(x: Any, num_shards: int, *, axis: int = 1, order: str = "zigzag") -> jax.Array:
    """The array in the order of positions, from one as `shard_sequence` returns it.

    Args:
        x: An array whose positions along `axis` are in the order of devices.
        num_shards, axis, order: As for `shard_sequence`.

    Returns:
        An array of x's shape. Gradients flow back to x.

    Raises:
        UnsupportedError, TypeError: An argument is wrong.
    """
    return _reordered(x, num_shards, axis, order, back=True)


def _reordered(x: Any, num_shards: int, axis: int, order: str, *, back: bool) -> jax.Array:
    shards.check_order(order)
    x = _launch.array(x, "x")
    if type(axis) is not int or not -x.ndim <= axis < x.ndim:
        raise UnsupportedError(f"axis is {axis!r}; accepted: a dimension of x, which has {x.ndim}")
    length = x.shape[axis]
    if type(num_shards) is not int or num_shards < 1 or length % num_shards:
        raise UnsupportedError(
            f"num_shards is {num_shards!r}; accepted: an int from 1 on that divides the {length} "
            "positions of x"
        )
    each = (shards.positions(length, num_shards, r, order) for r in range(num_shards))
    ranges = [positions for own in each for positions in own]
    if back:  # where each of the parts, in order of positions, lies
        row, placed = 0, []
        for begin, end in ranges:
            placed.append((begin, row, row + end - begin))
            row += end - begin
        ranges = [(begin, end) for _, begin, end in sorted(placed)]
    if len(ranges) <= 1 or order == "contiguous":
        return x
    return jnp.concatenate([jax.lax.slice_in_dim(x, *r, axis=axis) for r in ranges], axis)
