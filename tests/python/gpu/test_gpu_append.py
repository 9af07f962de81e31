"""`append_kv` on a GPU: the bits of the CPU backend, and what only a GPU does."""

from __future__ import annotations

from typing import Any

import pytest
from gpu_checks import DEVICE, torch

from dlattn import append_kv

pytestmark = pytest.mark.gpu

POISON = 0x5B  # a number in every dtype
CACHES = ["same", "int8", "float8_e4m3fn"]


def poisoned(shape: tuple[int, ...], dtype: Any, device: str) -> Any:
    size = torch.empty((), dtype=dtype).element_size()
    whole = torch.full((*shape[:-1], shape[-1] * size), POISON, dtype=torch.uint8, device=device)
    return whole.view(dtype)


def bits(x: Any) -> Any:
    return x.cpu().contiguous().view(torch.uint8)


class Problem:
    """Sequences of new rows, with room for `capacity` keys each, on both devices."""

    def __init__(
        self,
        lengths: tuple[int, ...],
        seqused: tuple[int, ...],
        *,
        dtype: str = "bfloat16",
        cache: str = "same",
        where: str = "pages",
        rotary_dim: int = 0,
        interleaved: bool = False,
        own_tables: bool = False,
        heads: int = 8,
        heads_kv: int = 2,
        dim: int = 128,
        page_size: int = 16,
        capacity: int = 64,
        offset: int = 0,  # of the new rows in their memory, in elements
        leftpad: tuple[int, ...] = (),
    ) -> None:
        generator = torch.Generator().manual_seed(sum(lengths) + dim)
        batch, total = len(lengths), sum(lengths)
        kind = getattr(torch, dtype)

        def draw(heads: int) -> Any:
            x = torch.randn(total * heads * dim + offset, generator=generator) * 2 + 0.3
            return x.to(kind)[offset:].view(total, heads, dim)

        self.inputs = {"k": draw(heads_kv), "v": draw(heads_kv)}
        self.lists = {
            "seqused_k": torch.tensor(seqused, dtype=torch.int32),
            "cu_seqlens_q": torch.tensor([0, *lengths]).cumsum(0).int(),
        }
        self.options: dict[str, Any] = {}
        entries, rows = batch, capacity
        if where in ("pages", "slots"):
            per_sequence = -(-capacity // page_size)
            entries, rows = batch * per_sequence + 2, page_size
            table = torch.randperm(entries, generator=generator)[: batch * per_sequence]
            table = table.view(batch, per_sequence)
            if where == "pages":
                self.lists["page_table"] = table.int()
            else:
                position = [
                    (b, used + i)
                    for b, (n, used) in enumerate(zip(lengths, seqused, strict=True))
                    for i in range(n)
                ]
                slots = [int(table[b, p // rows]) * rows + p % rows for b, p in position]
                slots[1] = -1
                self.lists["slots"] = torch.tensor(slots)
        if rotary_dim:
            angle = torch.rand(capacity, rotary_dim // 2, generator=generator) * 6.3
            table_dtype = kind if own_tables else torch.float32
            self.inputs["rotary_cos"] = angle.cos().to(table_dtype)
            self.inputs["rotary_sin"] = angle.sin().to(table_dtype)
            self.inputs["q"] = draw(heads)
            self.options["rotary_interleaved"] = interleaved
        if leftpad:
            self.lists["leftpad_k"] = torch.tensor(leftpad, dtype=torch.int32)
        self.cache_dtype = kind if cache == "same" else getattr(torch, cache)
        if cache != "same":
            for name in ("k_descale", "v_descale"):
                scale = torch.rand(batch, heads_kv, generator=generator) * 0.02 + 0.02
                self.inputs[name] = scale
        self.shape = (entries, rows, heads_kv, dim)

    def caches(self, device: str) -> dict[str, Any]:
        return {n: poisoned(self.shape, self.cache_dtype, device) for n in ("k_cache", "v_cache")}

    def run(self, device: str, caches: dict[str, Any]) -> Any:
        # A copy of a slice would be aligned: the storage is copied instead.
        tensors = {}
        for name, x in self.inputs.items():
            base = x if x._base is None else x._base
            moved = base.to(device)
            tensors[name] = moved.as_strided(x.shape, x.stride(), x.storage_offset())
        lists = {name: x.to(device) for name, x in self.lists.items()}
        return append_kv(**tensors, **lists, **caches, **self.options)

    def check(self) -> None:
        """Bytes of the caches, those that no row goes to among them, and of q."""
        host, device = self.caches("cpu"), self.caches(DEVICE)
        q_host, q_device = self.run("cpu", host), self.run(DEVICE, device)
        for name in host:
            assert not torch.equal(bits(host[name]), bits(self.caches("cpu")[name]))
            assert torch.equal(bits(device[name]), bits(host[name])), name
        assert (q_host is None) == (q_device is None)
        if q_host is not None:
            assert torch.equal(bits(q_device), bits(q_host))


@pytest.mark.parametrize("where", ["rows", "pages", "slots"])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_bits_are_the_cpus(dtype: str, cache: str, where: str) -> None:
    for rotary_dim, interleaved in ((0, False), (128, False), (64, True)):
        Problem(
            (5, 0, 1, 17),
            (0, 3, 40, 47),
            dtype=dtype,
            cache=cache,
            where=where,
            rotary_dim=rotary_dim,
            interleaved=interleaved,
        ).check()


@pytest.mark.parametrize(
    "options",
    [
        {"dim": 72, "rotary_dim": 24},
        {"dim": 41, "rotary_dim": 40, "interleaved": True},
        {"offset": 1, "rotary_dim": 64},
        {"offset": 4, "rotary_dim": 64, "own_tables": True},
        {"dim": 256, "rotary_dim": 256, "heads": 33, "heads_kv": 11},
        {"page_size": 1},
        {"page_size": 3, "capacity": 63, "rotary_dim": 128, "leftpad": (2, 0, 50)},
    ],
    ids=str,
)
def test_shapes(options: dict[str, Any]) -> None:
    Problem((3, 9, 1), (7, 0, 30), **options).check()


def test_many_sequences() -> None:
    """More than two steps of the search, and more thread blocks than a GPU holds."""
    lengths = tuple(n % 3 for n in range(5000))
    Problem(lengths, lengths, dim=64, capacity=8, page_size=4, rotary_dim=64).check()


def test_pools_of_more_than_2_31_elements() -> None:
    pages, rows, heads, dim = 70000, 128, 2, 128
    if torch.cuda.mem_get_info()[0] < 6 << 30:
        pytest.skip("needs 6 GiB of GPU memory")
    cache = poisoned((pages, rows, heads, dim), torch.int8, DEVICE)
    other = poisoned((pages, rows, heads, 16), torch.int8, DEVICE)
    k = torch.randn(3, heads, dim, device=DEVICE)
    slots = torch.tensor([pages * rows - 1, -1, 0], device=DEVICE)
    one = torch.tensor(0.05, device=DEVICE)
    append_kv(k, k[..., :16], cache, other, slots=slots, k_descale=one, v_descale=one)
    expected = torch.round(k / 0.05).clamp(-128, 127)
    assert (cache[-1, -1].float() - expected[0]).abs().max() <= 1
    assert (cache[0, 0].float() - expected[2]).abs().max() <= 1
    assert (cache[0, 1:] == POISON).all() and (cache[-1, :-1] == POISON).all()


def test_a_graph_replays_with_other_lengths() -> None:
    problem = Problem((1, 1, 1), (3, 20, 40), rotary_dim=128)
    later = Problem((1, 1, 1), (17, 63, 0), rotary_dim=128)
    later.lists["page_table"] = later.lists["page_table"].flip(0)
    caches = problem.caches(DEVICE)
    tensors = {name: x.to(DEVICE) for name, x in (problem.inputs | problem.lists).items()}
    append_kv(**tensors, **caches)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q = append_kv(**tensors, **caches)
    for name, x in (later.inputs | later.lists).items():
        tensors[name].copy_(x * 1.5 if name in ("k", "v") else x)
    for name, fresh in problem.caches(DEVICE).items():
        caches[name].copy_(fresh)
    q.fill_(float("nan"))
    graph.replay()
    for name in ("k", "v"):
        later.inputs[name] = later.inputs[name] * 1.5
    expected = later.caches("cpu")
    q_expected = later.run("cpu", expected)
    for name in caches:
        assert torch.equal(bits(caches[name]), bits(expected[name])), name
    assert torch.equal(bits(q), bits(q_expected))


def test_values_that_do_not_exist_are_skipped() -> None:
    """Rows of lengths, pages and slots out of range are not written, anywhere."""
    spoilt: list[tuple[str, dict[str, list[int]]]] = [
        ("rows", {"seqused_k": [64, -1, 2**31 - 1]}),
        ("pages", {"seqused_k": [64, -5, -(2**31)]}),
        ("pages", {"cu_seqlens_q": [9, 9, 9, 9]}),
        ("slots", {"slots": [-1, -2, 10**9, 2**62, -(2**62), 14 * 16]}),
    ]
    for where, lists in spoilt:
        problem = Problem((2, 1, 3), (0, 1, 2), where=where)
        for name, numbers in lists.items():
            dtype = problem.lists[name].dtype
            problem.lists[name] = torch.tensor(numbers, dtype=dtype)
        caches = problem.caches(DEVICE)
        problem.run(DEVICE, caches)
        torch.cuda.synchronize()
        for name, cache in caches.items():
            assert torch.equal(bits(cache), bits(problem.caches("cpu")[name])), (where, name)
    problem = Problem((2, 1, 3), (0, 1, 2))
    problem.lists["page_table"].fill_(14)  # there are 0 to 13
    caches = problem.caches(DEVICE)
    problem.run(DEVICE, caches)
    assert torch.equal(bits(caches["k_cache"]), bits(problem.caches("cpu")["k_cache"]))
