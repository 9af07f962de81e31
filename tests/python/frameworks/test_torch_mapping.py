"""Operators over packs, caches and parts: other lengths, counted and mapped, on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

import dlattn.torch  # noqa: E402

OPS = torch.ops.dlattn
COUNT = 3  # mappings


def drawn(*shape: int, seed: int = 0) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + 0.2


def ints(*values: Any) -> Any:
    return torch.tensor(values, dtype=torch.int32)


def pack(rows: int = 20) -> tuple[Any, ...]:
    return drawn(rows, 4, 16), drawn(rows, 2, 16, seed=1), drawn(rows, 2, 8, seed=2)


def cache(paged: bool) -> tuple[Any, ...]:
    where = (9, 4, 2) if paged else (2, 12, 2)
    q = drawn(2, 3, 4, 16)
    return q, drawn(*where, 16, seed=1), drawn(*where, 8, seed=2), ints(12, 5)


# Lengths that change from call to call


@pytest.fixture
def graphs() -> Iterator[Any]:
    """The counter of compiled graphs."""
    # Not at the top: it takes seconds, and each worker imports all files.
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    yield CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()


def test_varlen_is_compiled_once_for_all_lengths(graphs: Any) -> None:
    def layer(q: Any, k: Any, v: Any, starts: Any, longest: int, left: int) -> Any:
        arguments = (q, k, v, starts, starts, longest, longest)
        return OPS.attention_varlen(*arguments, causal=1, window_left=left)[0] + 1

    compiled = torch.compile(layer, fullgraph=True, backend=graphs)
    for longest in range(10, 20):  # more than dynamo compiles anew: it fails then
        arguments = (*pack(), ints(0, 20 - longest, 20), longest, longest - 7)
        assert torch.equal(compiled(*arguments), layer(*arguments))
    assert graphs.frame_count <= 3


def test_a_cache_is_compiled_once_for_all_lengths(graphs: Any) -> None:
    def layer(q: Any, k: Any, v: Any, used: Any, longest: int) -> Any:
        attend = dlattn.torch.attention_with_kvcache
        return attend(q, k, v, seqused_k=used, max_seqlen_k=longest, window=(longest, None)) + 1

    q, k, v, _ = cache(paged=False)
    compiled = torch.compile(layer, fullgraph=True, backend=graphs)
    for longest in range(2, 12):
        arguments = (q, k, v, ints(longest, 1), longest)
        assert torch.equal(compiled(*arguments), layer(*arguments))
    assert graphs.frame_count <= 3


def test_exported_with_any_longest_sequence() -> None:
    class Model(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any, starts: Any, used: Any, longest: int) -> Any:
            packed = OPS.attention_varlen(q, k, v, starts, starts, longest, longest)[0]
            caches = (x[None].expand(2, -1, -1, -1).contiguous() for x in (k, v))
            new = q[:2, None].contiguous()
            cached = OPS.attention_with_kvcache(new, *caches, used, max_seqlen_k=longest)[0]
            return packed, cached

    tensors = (*pack(), ints(0, 8, 20), ints(12, 3))
    dynamic = (*(None,) * 5, torch.export.Dim.DYNAMIC)
    program = torch.export.export(Model(), (*tensors, 13), dynamic_shapes=dynamic).module()
    for longest in (13, 17):
        found, want = program(*tensors, longest), Model()(*tensors, longest)
        assert all(torch.equal(x, y) for x, y in zip(found, want, strict=True))


# Operations


def counted(function: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def test_operations_of_packs_are_counted() -> None:
    q, k, v = pack()
    arguments = (q, k, v, ints(0, 8, 20), ints(0, 5, 20), 12, 15)
    each = 2 * 4 * (16 + 8)
    assert counted(lambda: OPS.attention_varlen(*arguments)) == each * (8 * 5 + 12 * 15)
    used = ints(2, 15)
    found = counted(lambda: OPS.attention_varlen(*arguments, seqused_k=used, causal=1))
    assert found == each * (8 * 2 + 12 * 15)
    out = torch.full((20, 4, 8), torch.nan)
    found = counted(lambda: OPS.attention_varlen_out(*arguments, out=out))
    assert found == each * (8 * 5 + 12 * 15)
    swapped = [x.transpose(0, 1) for x in (q, k, v)]
    found = counted(lambda: OPS.attention_varlen(*swapped, *arguments[3:], bhsd=True))
    assert found == each * (8 * 5 + 12 * 15)
    # Without values, of two sequences that are as long as they may be.
    metas = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in arguments]
    assert counted(lambda: OPS.attention_varlen(*metas)) == each * 2 * 12 * 15


def test_operations_of_caches_are_counted() -> None:
    each, attend = 2 * 4 * (16 + 8), OPS.attention_with_kvcache
    for paged, more, room in (
        (True, {"page_table": ints([7, 0, 3], [2, 8, -1])}, 12),
        (False, {}, 12),
        (False, {"leftpad_k": ints(4, 0)}, 12),
        (False, {"max_seqlen_k": 12}, 12),
    ):
        tensors = cache(paged)
        keys = 17 - (4 if "leftpad_k" in more else 0)
        assert counted(lambda t=tensors, m=more: attend(*t, **m)) == each * 3 * keys
        metas = [x.to("meta") for x in tensors]
        options = {n: x if isinstance(x, int) else x.to("meta") for n, x in more.items()}
        found = counted(lambda t=metas, o=options: attend(*t, **o))
        assert found == each * 3 * 2 * room
    q, k, v, used = cache(paged=False)
    swapped = [x.transpose(1, 2) for x in (q, k, v)]
    assert counted(lambda: attend(*swapped, used, bhsd=True)) == each * 3 * 17


def test_operations_of_out_are_counted() -> None:
    q, k, v = (x[None] for x in pack())
    out = torch.full((1, 20, 4, 8), torch.nan)
    found = counted(lambda: OPS.attention_out(q, k, v, out=out))
    assert found == 2 * 4 * 20 * 20 * (16 + 8)


# vmap


@pytest.fixture
def no_loops() -> Iterator[None]:
    """Without torch's loop over all mappings, for operators that have no rule."""
    torch._C._functorch._set_vmap_fallback_enabled(False)
    yield
    torch._C._functorch._set_vmap_fallback_enabled(True)


def check_map(function: Callable[..., Any], in_dims: tuple[Any, ...], *arguments: Any) -> None:
    """Mapped in one call as one after the other."""
    found = torch.vmap(function, in_dims=in_dims)(*arguments)
    each = []
    for n in range(COUNT):
        own = [
            x if dim is None else x.select(dim, n).contiguous()
            for x, dim in zip(arguments, in_dims, strict=True)
        ]
        each.append(function(*own))
    for part, want in zip(found, zip(*each, strict=True), strict=True):
        torch.testing.assert_close(part, torch.stack(want), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bhsd", [False, True])
@pytest.mark.parametrize(
    "in_dims", [(0, 1, 0, 0, 1), (None, None, 2, None, None), (0,) + 4 * (None,)]
)
@pytest.mark.usefixtures("no_loops")
def test_packs_are_mapped(in_dims: tuple[Any, ...], bhsd: bool) -> None:
    """Each pack has lengths of its own, and all are one call."""
    q, k, v = (x.transpose(0, 1) if bhsd else x for x in pack())
    starts = ints([0, 8, 20], [0, 1, 20], [0, 20, 20])
    used = ints([3, 12], [1, 9], [20, 0])

    def function(q: Any, k: Any, v: Any, starts: Any, used: Any) -> Any:
        arguments = (q, k, v, starts, starts, 20, 20)
        return OPS.attention_varlen(*arguments, seqused_k=used, causal=1, bhsd=bhsd)

    stacked = []
    for x, dim in zip((q, k, v), in_dims, strict=False):
        more = torch.stack([x, x * 0.5, x + 1])
        stacked.append(x if dim is None else more.movedim(0, dim))
    lengths = [
        x[0] if dim is None else x.movedim(0, dim).contiguous()
        for x, dim in zip((starts, used), in_dims[3:], strict=True)
    ]
    check_map(function, in_dims, *stacked, *lengths)


@pytest.mark.usefixtures("no_loops")
def test_packs_with_gaps_are_mapped() -> None:
    """Rows before the first sequence and behind the last are no sequence's."""
    q, k, v = (torch.stack([x, x * 0.5, x + 1]) for x in pack())
    starts = ints([3, 5, 9], [0, 2, 4], [11, 11, 20])
    slopes = drawn(COUNT, 2, 4).abs()
    sinks = drawn(4)

    def function(q: Any, k: Any, v: Any, starts: Any, slopes: Any) -> Any:
        out, lse = OPS.attention_varlen(
            q, k, v, starts, starts, 9, 9, alibi_slopes=slopes, sinks=sinks
        )
        rows = torch.arange(20)
        mine = (rows >= starts[0]) & (rows < starts[-1])
        return torch.where(mine[:, None, None], out, 0.0), torch.where(mine, lse, 0.0)

    check_map(function, (0, 0, 0, 0, 0), q, k, v, starts, slopes)
    check_map(function, (0, 0, 0, 0, None), q, k, v, starts, slopes[0])
    check_map(function, (0, 0, 0, 0, None), q, k, v, starts, slopes[0, 0])


@pytest.mark.usefixtures("no_loops")
def test_masks_of_packs_are_mapped() -> None:
    q, k, v = pack()
    starts = ints(0, 8, 20)
    masks = drawn(COUNT, 2, 1, 12, 12, seed=3) > -0.5
    masks[..., 0] = True
    bias = drawn(4, 12, 12, seed=4)

    def function(q: Any, mask: Any, bias: Any) -> Any:
        arguments = (q, k, v, starts, starts, 12, 12)
        return OPS.attention_varlen(*arguments, mask=mask, bias=bias)

    qs = torch.stack([q, q * 0.5, q + 1])
    check_map(function, (0, 0, None), qs, masks, bias)
    check_map(function, (None, 1, 0), q, masks.movedim(0, 1), torch.stack([bias, -bias, bias * 2]))
    check_map(function, (0, None, None), qs, masks[0], bias)


def test_packs_of_too_many_rows_are_refused() -> None:
    k = torch.empty(1, 2**30, 1, 8, device="meta").expand(COUNT, -1, -1, -1)
    starts = ints(0, 8).to("meta")
    with pytest.raises(
        dlattn.UnsupportedError, match="k: vmap makes one varlen batch of 3 with 1073741824"
    ):
        torch.vmap(lambda k: OPS.attention_varlen(k[:8], k, k, starts, starts, 8, 8))(k)


CACHES = {
    "queries": (0, None, None, None, None),
    "lengths": (None, None, None, 0, 1),
    "caches": (1, 0, 1, 0, None),
    "values": (None, None, 0, None, None),
    "all": (0, 1, 2, 1, 0),
}


@pytest.mark.usefixtures("no_loops")
@pytest.mark.parametrize("where", ["table", "entries", "neither"])
@pytest.mark.parametrize("in_dims", CACHES.values(), ids=CACHES)
def test_caches_are_mapped(in_dims: tuple[Any, ...], where: str) -> None:
    q, k, v, used = cache(where == "table")
    if where == "table":
        places = ints([7, 0, 3], [2, 8, -1])
        others = [ints([1, 2, 4], [5, -1, 99]), ints([0, 0, 8], [3, 6, 7])]
    else:
        places, others = ints(1, 0), [ints(0, 1), ints(1, 1)]
    if where == "neither":
        in_dims = (*in_dims[:4], None)

    def function(q: Any, k: Any, v: Any, used: Any, places: Any) -> Any:
        named = {"table": "page_table", "entries": "cache_batch_idx"}.get(where)
        options = {named: places} if named else {}
        return OPS.attention_with_kvcache(q, k, v, used, causal=1, **options)

    tensors = [
        torch.stack([q, q * 0.5, q + 1]),
        torch.stack([k, k * 0.5, k + 1]),
        torch.stack([v, v * 0.5, v + 1]),
        torch.stack([used, ints(9, 4), ints(0, 1)]),
        torch.stack([places, *others]),
    ]
    given = [
        x[0] if dim is None else x.movedim(0, dim) for x, dim in zip(tensors, in_dims, strict=True)
    ]
    check_map(function, in_dims, *given)


@pytest.mark.usefixtures("no_loops")
def test_what_else_a_cache_has_is_mapped() -> None:
    q, k, v, used = cache(paged=False)
    q = q.half()
    k, v = ((x * 20).to(torch.int8) for x in (k, v))
    masks = drawn(COUNT, 3, 12, seed=3) > -0.5
    slopes, scales = drawn(COUNT, 4).abs(), drawn(COUNT, 2, 2, seed=5).abs()
    leftpad = ints([4, 0], [0, 1], [2, 2])

    def function(mask: Any, slopes: Any, k_descale: Any, v_descale: Any, leftpad: Any) -> Any:
        return OPS.attention_with_kvcache(
            q,
            k,
            v,
            used,
            leftpad_k=leftpad,
            mask=mask,
            alibi_slopes=slopes,
            k_descale=k_descale,
            v_descale=v_descale,
        )

    arguments = (masks, slopes, scales, scales[:, 0, 0].contiguous(), leftpad)
    check_map(function, (0, 0, 0, 0, 0), *arguments)
    check_map(function, (0, None, None, None, None), masks, *(x[0] for x in arguments[1:]))
    with pytest.raises(NotImplementedError, match="sinks: vmap over them"):
        q, k, v = cache(paged=False)[:3]
        torch.vmap(lambda sinks: OPS.attention_with_kvcache(q, k, v, used, sinks=sinks))(slopes)
    with pytest.raises(NotImplementedError, match="sinks: vmap over them"):
        packed = (*pack(), ints(0, 20), ints(0, 20), 20, 20)
        torch.vmap(lambda sinks: OPS.attention_varlen(*packed, sinks=sinks))(slopes)


@pytest.mark.usefixtures("no_loops")
def test_parts_are_mapped() -> None:
    q, k, v = (torch.stack([x, x * 0.5, x + 1])[:, None] for x in pack())
    parts = [
        OPS.attention(q.flatten(0, 1), k[:, :, keys].flatten(0, 1), v[:, :, keys].flatten(0, 1))
        for keys in (slice(0, 7), slice(7, 20))
    ]
    (first, second), (first_lse, second_lse) = zip(*parts, strict=True)
    first, second = (x.unflatten(0, (COUNT, 1)) for x in (first, second))
    first_lse, second_lse = (x.unflatten(0, (COUNT, 1)) for x in (first_lse, second_lse))

    def function(first: Any, second: Any, first_lse: Any, second_lse: Any) -> Any:
        return OPS.merge_states([first, second], [first_lse, second_lse])

    check_map(function, (0, 0, 0, 0), first, second, first_lse, second_lse)
    check_map(
        function, (0, None, 1, None), first, second[1], first_lse.movedim(0, 1), second_lse[1]
    )


@pytest.mark.usefixtures("no_loops")
def test_mapped_twice() -> None:
    q, k, v = pack()
    starts = ints(0, 8, 20)
    qs = torch.stack([torch.stack([q, -q]), torch.stack([q + 1, q * 2]), torch.stack([q, q])])

    def function(q: Any) -> Any:
        return OPS.attention_varlen(q, k, v, starts, starts, 12, 12)

    found = torch.vmap(torch.vmap(function))(qs)[0]
    want = torch.stack([torch.stack([function(q)[0] for q in some]) for some in qs])
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6)


def test_mapped_over_nothing() -> None:
    """Shapes are those of one mapping, and of the gradients too."""
    (q, k, v), starts = pack(), ints(0, 8, 20)
    none = q.new_empty(0, *q.shape)
    merge = torch.vmap(lambda out, lse: OPS.merge_states([out], [lse]), in_dims=(1, None))
    found = [
        torch.vmap(lambda q: OPS.attention(q, k[None], v[None]))(none[:, None]),
        torch.vmap(lambda x: OPS.attention_varlen(q, k, v, x, x, 12, 12))(starts[None][:0]),
        torch.vmap(lambda x: OPS.attention_with_kvcache(q[None], k[None], v[None], x))(
            starts[:0, None]
        ),
        merge(drawn(1, 0, 20, 4, 8), drawn(1, 4, 20)),
    ]
    for out, lse in found:
        shapes = {(0, 1, 20, 4, 8): (0, 1, 4, 20), (0, 20, 4, 8): (0, 4, 20)}
        assert shapes[tuple(out.shape)] == lse.shape
    inner = torch.func.grad(lambda q: OPS.attention(q, k[None], v[None])[0].sum())
    twice = torch.vmap(torch.vmap(inner))(drawn(COUNT, 0, 1, 20, 4, 16))
    assert twice.shape == (COUNT, 0, 1, 20, 4, 16)
