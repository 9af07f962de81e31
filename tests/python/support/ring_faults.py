"""Refusals and faults on four processes: one function each, which returns a list of failures."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from dlattn import UnsupportedError
from dlattn.torch import ring_attention, shard_sequence, unshard_sequence


def run(name: str, group: Any) -> list[str]:
    return FAULTS[name](group)


def _inputs(rows: int = 8, dtype: Any = torch.float32, **options: Any) -> list[torch.Tensor]:
    return [torch.randn(1, rows, 4, 16, dtype=dtype, **options) + 0.25 for _ in range(3)]


def _refused(words: str, function: Callable[[], Any], kind: Any = UnsupportedError) -> list[str]:
    try:
        function()
    except kind as error:
        return [] if words in str(error) else [f"{words!r} is not in {error}"]
    return [f"nothing was raised about {words!r}"]


def unequal_shards(group: Any) -> list[str]:
    x = _inputs(8 + (dist.get_rank(group) == 1))
    wrong = _refused("[8, 9, 8, 8] rows", lambda: ring_attention(*x, group=group))
    whole = _inputs(8 + 8 * (dist.get_rank(group) == 1))[0]
    return wrong + _refused("rows; accepted", lambda: unshard_sequence(whole, group))


def unequal_shards_unchecked(group: Any) -> list[str]:
    x = [y[0] for y in _inputs(9)]
    given = {"group": group, "cu_seqlens": [0, 32], "check": False}
    return _refused("accepted for 32 rows", lambda: ring_attention(*x, **given))


def mixed_dtypes(group: Any) -> list[str]:
    q, k, v = _inputs()
    rank = dist.get_rank(group)
    k = k.half() if rank == 2 else k
    words = "k: dtype is torch.float16" if rank == 2 else "process 2 of the group refused"
    return _refused(words, lambda: ring_attention(q, k, v, group=group))


def calls_that_differ(group: Any) -> list[str]:
    rank = dist.get_rank(group)
    x = _inputs(dtype=torch.float64 if rank == 3 else torch.float32)
    wrong = _refused("dtype is torch.float", lambda: ring_attention(*x, group=group))
    x = _inputs()
    right = 0 if rank == 0 else None
    words = f"window with causal is (None, {right}) on this process, {rank}, and another on process"
    wrong += _refused(words, lambda: ring_attention(*x, group=group, causal=rank == 0))
    softcap = 20.0 if rank == 3 else 0.0
    return wrong + _refused(
        f"softcap is {softcap} on", lambda: ring_attention(*x, group=group, softcap=softcap)
    )


def wrong_arguments(group: Any) -> list[str]:
    q, k, v = _inputs()
    slopes = torch.ones(4, requires_grad=True)
    wrong = []
    for words, options in {
        "alibi_slopes requires grad": {"alibi_slopes": slopes},
        "sinks is torch.float32 of shape (2,)": {"sinks": torch.ones(2)},
        "window is (-1, 0)": {"window": (-1, 0)},
        "window is 5": {"window": 5},
        "causal is 'left'": {"causal": "left"},
        "order is 'striped'": {"order": "striped"},
        "mode is 'gather'": {"mode": "gather"},
        "layout is 'sbhd'": {"layout": "sbhd"},
        "q has 4 dimensions; accepted with cu_seqlens: 3": {"cu_seqlens": [0, 32]},
    }.items():
        given: dict[str, Any] = {"group": group, **options}
        wrong += _refused(words, lambda given=given: ring_attention(q, k, v, **given))
    odd = [x[:, :, :2].contiguous() for x in (q, k, v)]
    options = {"group": group, "mode": "all_to_all"}
    wrong += _refused("num_heads is 2; accepted: mult", lambda: ring_attention(*odd, **options))
    wrong += _refused("v has the shape", lambda: ring_attention(q, k, v[:, 1:], group=group))
    turned = q.transpose(1, 3).contiguous().transpose(1, 3)
    words = f"q: the stride of the last dimension is {turned.stride(-1)}; accepted: 1"
    wrong += _refused(words, lambda: ring_attention(turned, k, v, group=group))
    starts = {"group": group, "cu_seqlens": [0, 3, 2]}
    x = [y[0] for y in (q, k, v)]
    wrong += _refused("cu_seqlens is [0, 3, 2]", lambda: ring_attention(*x, **starts))
    wrong += _refused("group is of type int", lambda: ring_attention(q, k, v, group=3), TypeError)
    wrong += _refused("dim is 4; accepted: a", lambda: shard_sequence(q, group, 4))
    wrong += _refused("x is of type list", lambda: shard_sequence([1.0], group), TypeError)
    wrong += _refused(
        "cu_seqlens is of type int", lambda: shard_sequence(q, group, cu_seqlens=3), TypeError
    )
    bits = [y.to(torch.float8_e4m3fn) for y in (q, k, v)]
    words = "q: dtype is torch.float8_e4m3fn; accepted: float16"
    wrong += _refused(words, lambda: ring_attention(*bits, group=group))
    nowhere = [y.to("meta") for y in (q, k, v)]
    words = "q is on meta; accepted: a device that the group has a backend for"
    wrong += _refused(words, lambda: ring_attention(*nowhere, group=group))
    wrong += _refused("x is on meta", lambda: unshard_sequence(nowhere[0], group))
    mapped = torch.func.vmap(lambda y: ring_attention(y, k, v, group=group))
    wrong += _refused("under torch.func (vmap", lambda: mapped(torch.stack([q, q])))
    total = torch.func.grad(lambda y: ring_attention(y, k, v, group=group).sum())
    wrong += _refused("under torch.func (vmap", lambda: total(q))
    leaf = q.clone().requires_grad_()
    return wrong + _refused("x requires grad", lambda: unshard_sequence(leaf, group))


def devices_meet(group: Any) -> list[str]:
    """All processes take part in a group's first message, without rows too, and then no more."""
    own = dist.new_group(list(range(dist.get_world_size(group))))
    met: list[str] = []
    reduce = dist.all_reduce

    def counted(x: torch.Tensor, **options: Any) -> Any:
        met.append(x.device.type)
        return reduce(x, **options)

    dist.all_reduce = counted  # type: ignore[assignment]
    try:
        for check in (False, True):
            x = [shard_sequence(y, own) for y in _inputs(3)]
            ring_attention(*x, group=own, check=check)
    finally:
        dist.all_reduce = reduce
    return [] if met == ["cpu"] else [f"all processes met on {met}"]


def double_backward(group: Any) -> list[str]:
    x = [y.requires_grad_() for y in _inputs()]
    out = ring_attention(*x, group=group)
    return _refused(
        "create_graph=True", lambda: torch.autograd.grad(out.sum(), x, create_graph=True)
    )


def same_bits(group: Any) -> list[str]:
    from ring_cases import CASES, Problem

    wrong = []
    for name in ("rfa_zigzag", "packed_window", "te_sinks", "te_all_to_all", "bfloat16"):
        first, second = (
            Problem(CASES[name], group, seed=7).results(deterministic=True) for _ in range(2)
        )
        if not all(torch.equal(x, y) for x, y in zip(first, second, strict=True)):
            wrong.append(f"{name}: bits differ")
    return wrong


class _Layer(torch.nn.Module):
    """Attention of two heads behind a linear layer, on shards or, without a group, on the whole."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.linear = torch.nn.Linear(16, 96, dtype=torch.float64)
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from ring_cases import Case, expected

        q, k, v = self.linear(x).view(*x.shape[:2], 3, 2, 16).unbind(2)
        if self.group is None:
            out: torch.Tensor = expected(Case(causal=True), q, k, v, None, None)
            return out
        return ring_attention(q, k, v, group=self.group, causal=True)


def _batches() -> tuple[list[torch.Tensor], torch.Tensor]:
    """Two inputs, and the sum of their gradients of the weights."""
    torch.manual_seed(4)
    inputs = [torch.randn(1, 29, 16, dtype=torch.float64) + 0.25 for _ in range(2)]
    whole = _Layer(None)
    for x in inputs:
        whole(x).square().sum().backward()
    assert whole.linear.weight.grad is not None
    return inputs, whole.linear.weight.grad


def _differs(found: torch.Tensor, want: torch.Tensor) -> list[str]:
    error = float((found - want).abs().max() / want.abs().max())
    return [] if error < 1e-6 else [f"relative error {error:.3g}"]


def accumulation(group: Any) -> list[str]:
    """DistributedDataParallel, the first of two backward passes under no_sync."""
    inputs, want = _batches()
    layer = torch.nn.parallel.DistributedDataParallel(_Layer(group), process_group=group)
    first, second = (shard_sequence(x, group) for x in inputs)
    with layer.no_sync():
        layer(first).square().sum().backward()
    layer(second).square().sum().backward()
    return _differs(layer.module.linear.weight.grad * dist.get_world_size(group), want)


def fully_sharded(group: Any) -> list[str]:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    inputs, want = _batches()
    layer = _Layer(group)
    fully_shard(layer, mesh=DeviceMesh.from_group(group, "cpu"))
    for x in inputs:
        layer(shard_sequence(x, group)).square().sum().backward()
    grad: Any = layer.linear.weight.grad
    return _differs(grad.full_tensor() * dist.get_world_size(group), want)


def compiled(group: Any) -> list[str]:
    """torch.compile, whose graph breaks at the call."""
    inputs, want = _batches()
    layer = _Layer(group)
    function = torch.compile(lambda x: layer(x).square().sum(), backend="eager")
    for x in inputs:
        function(shard_sequence(x, group)).backward()
    assert layer.linear.weight.grad is not None
    total = layer.linear.weight.grad.clone()
    dist.all_reduce(total, group=group)
    return _differs(total, want)


def a_process_dies(group: Any) -> list[str]:
    """The last one, between the two passes: nothing can be computed behind it."""
    x = [y.requires_grad_() for y in _inputs()]
    out = ring_attention(*x, group=group, check=False)
    if dist.get_rank(group) == 3:
        os._exit(0)
    begin = time.monotonic()
    wrong = _refused("", lambda: torch.autograd.grad(out.sum(), x), RuntimeError)
    wrong += _refused("", lambda: ring_attention(*x, group=group, check=False), RuntimeError)
    took = time.monotonic() - begin
    return wrong if took < 20 else [*wrong, f"it took {took:.0f} s"]


FAULTS: dict[str, Callable[[Any], list[str]]] = {
    function.__name__: function
    for function in (
        unequal_shards,
        unequal_shards_unchecked,
        mixed_dtypes,
        calls_that_differ,
        wrong_arguments,
        devices_meet,
        double_backward,
        same_bits,
        accumulation,
        fully_sharded,
        compiled,
        a_process_dies,
    )
}
