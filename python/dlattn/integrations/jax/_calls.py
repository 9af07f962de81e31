"""A custom call of a device, with or without layers around it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from dlattn.integrations.jax import _launch
from dlattn.integrations.jax._launch import Names, Options, Result
from dlattn.integrations.jax._operands import dims, size_of, splits


class Call(NamedTuple):
    """A custom call of `names`, its operands: the first are q, k and v."""

    options: Options
    names: Names
    needs: Names = ()  # the operands whose gradients are the results; without any they are out, lse
    ring: bool = False  # sequences may be split over devices

    @property
    def layout(self) -> str:
        layout: str = dict(self.options)["layout"]
        return layout

    @property
    def results(self) -> Names:
        """The names of what each result is split and mapped as."""
        return self.needs or (("out", "lse") if dict(self.options)["return_lse"] else ("out",))

    def launch(self, values: Sequence[Any]) -> Result:
        operands = dict(zip(self.names, values, strict=True))
        if self.needs:
            return _launch.backward(dict(self.options), operands, self.needs)
        return _launch.forward(dict(self.options), operands)

    def specs(self, q_spec: Any, operands: Sequence[Any], mesh: Any) -> Result:
        """The shardings of the results, from that of q and the types of the operands."""
        if self.needs:
            given = dict(zip(self.names, operands, strict=True))
            return tuple(spec_of(given[name]) for name in self.needs)
        num_heads_kv = size_of("g", "k", operands[1], self.layout)
        length = size_of("s", "q", operands[0], self.layout)
        split = self.splits(q_spec, mesh, num_heads_kv, length)
        return tuple(
            PartitionSpec(*map(split.get, dims(name, self.layout))) for name in self.results
        )

    def splits(self, q_spec: Any, mesh: Any, num_heads_kv: int, length: int) -> dict[str, Any]:
        length = length if self.ring else 0
        return splits(q_spec, mesh.shape, num_heads_kv, self.layout, length)


def _varying_axes(x: Any) -> frozenset[Any]:
    """The axes of shard_map's mesh along which devices have values of their own."""
    kind: Any = jax.typeof(x) if hasattr(jax, "typeof") else None
    if hasattr(kind, "vma"):  # before JAX 0.10
        return frozenset(kind.vma)
    return frozenset(kind.mat.varying if hasattr(kind, "mat") else ())


def vary(values: Sequence[Any], like: Sequence[Any]) -> Result:
    """The values as they are in shard_map where devices have their own of any of `like`.

    Results differ between devices if operands do; custom_partitioning forgets.
    """
    axes = frozenset[Any]().union(*map(_varying_axes, like))

    def varying(x: Any) -> Any:
        missing = tuple(axes - _varying_axes(x))
        if not missing:
            return x
        if hasattr(jax.lax, "pcast"):
            return jax.lax.pcast(x, missing, to="varying")
        return jax.lax.pvary(x, missing)  # type: ignore[attr-defined]  # of older ones

    return tuple(map(varying, values))


def spec_of(x: Any) -> Any:
    return jax.typeof(x).sharding.spec
