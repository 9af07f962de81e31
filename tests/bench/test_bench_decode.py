"""The benchmark's decode set: its cases, its caches and their right results, our calls."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from quick_bench import INSTANT

import dlattn
from dlattn.bench import decode, session, timing
from dlattn.bench.decode import cases, lengths
from dlattn.bench.decode.cases import COLD, E4M3, INT8, SCALES, WARM, DecodeCase
from dlattn.bench.features import Context
from dlattn.bench.peers import ours_with
from dlattn.reference import attention_reference

torch = pytest.importorskip("torch")

from dlattn.bench import tensors  # noqa: E402
from dlattn.bench.decode import caches, contestants  # noqa: E402

pytestmark = pytest.mark.usefixtures("instant")

L2 = 50_000_000  # bytes, as an H200's


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels that the set asks of a GPU."""
    monkeypatch.setattr(decode, "l2_bytes", lambda device: L2)
    monkeypatch.setattr(decode, "_memory_bytes", lambda device: 78 * 2.0**30)


def all_of(device: str) -> list[DecodeCase]:
    return [case for group in cases.turn_groups(SCALES[device]) for case in group]


# The set


@pytest.mark.usefixtures("h200")
def test_the_set() -> None:
    study = decode.study(Context("cuda", "bfloat16", [], []))
    groups = study.groups()
    assert {name: len(members) for name, members in groups.items()} == {
        "contiguous": 10,
        "drafts": 1,
        "pages": 1,
        "eight_bit": 1,
        "skewed": 1,
        "mixes": 9,
        "traces": 8,
        "latents": 9,
    }
    assert not study.left_out
    found = {(case.label, case.what) for case in all_of("cuda")}
    assert len(found) == len(all_of("cuda")) == 45
    for label, what in (
        ("(1,32/8,131072,128)", "1 query"),
        ("(16,32,4096,128)", "1 query"),
        ("(8,32/8,4096,128)", "8 queries"),
        ("(8,32/8,4096,128)", "lengths on the device"),
        ("(8,32/8,4096,128)", "page 1"),
        ("(8,32/8,32768,128)", "int8 cache, lengths on the device"),
        ("(32,32/8,131072,128)", "31x4k+1x128k, page 16"),
        ("(16,32/8,16384,128)", "1x16k+15x64, page 16"),
        ("(64,128/1,4096,576)", "latents, V of 512, page 64"),
    ):
        assert (label, what) in found
    variants = [c.as_case("bfloat16", t).variant for c in all_of("cuda") for t in (COLD, WARM)]
    for variant in variants:
        group, what, temperature = cases.parse_variant(variant)
        assert f"{group}: {what}, {temperature}" == variant
    with pytest.raises(ValueError, match="variant is 'page 16'"):
        cases.parse_variant("page 16")


@pytest.mark.usefixtures("h200")
def test_parts_of_the_set() -> None:
    context = Context("cuda", "bfloat16", [], [])
    narrow = decode.study(replace(context, head_dims=[64])).groups()
    assert {name: len(members) for name, members in narrow.items() if members} == {"contiguous": 2}
    assert not any(decode.study(replace(context, masks=[False])).groups().values())


def test_bytes_and_operations() -> None:
    case = DecodeCase("contiguous", (8192,), 32, 8, 128)
    assert case.cache_bytes("bfloat16") == 33_554_432
    assert case.operations == 4 * 32 * 128 * 8192
    assert replace(case, cache_dtype=INT8).cache_bytes("bfloat16") == 16_777_216
    assert replace(case, cache_dtype=E4M3).cache_bytes("float32") == 16_777_216
    uneven = replace(case, lengths=(3, 5), queries=2, page_size=16)
    assert uneven.cache_bytes("float16") == 2 * 8 * 8 * 128 * 2
    assert uneven.operations == 4 * 32 * 128 * 8 * 2
    largest = max(all_of("cuda"), key=lambda case: case.cache_bytes("bfloat16"))
    assert largest.what.startswith("Mooncake conversation, batch of 128")
    assert largest.cache_bytes("bfloat16") == 4096 * sum(lengths.MOONCAKE.lengths)


def test_rotation() -> None:
    assert cases.buffers(33_554_432, L2) == 5
    assert cases.buffers(1_073_741_824, L2) == 2  # a copy that the L2 may have a part of is another
    for case in all_of("cuda"):
        size = case.cache_bytes("bfloat16")
        count = cases.buffers(size, L2)
        assert count * size >= 3 * L2 and (count == 2 or (count - 1) * size < 3 * L2)
        assert count * cases.turns(count) >= 24
        assert cases.turns(1) == 24 and cases.turns(23) == 2 and cases.turns(150) == 1


@pytest.mark.usefixtures("h200")
def test_what_does_not_fit_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    context = Context("cuda", "bfloat16", [], None)
    for gigabytes, count in ((78, 0), (24, 1), (2, 13)):
        monkeypatch.setattr(decode, "_memory_bytes", lambda device, n=gigabytes: n * 2.0**30)
        study = decode.study(context)
        assert any(peer.packs for peer in study.peers)
        before = len(study.left_out)  # peers that are not installed
        study.groups()
        assert len(study.left_out) - before == count
    assert study.left_out["(64,32/8,4096,128), 1 query"] == "needs 2.1 GB; the device has 2.1"


def test_lengths() -> None:
    assert lengths.parse("1x16k+15x64") == (16384, *15 * (64,))
    assert lengths.parse("31x4k+1x128k")[-2:] == (4096, 131072)
    for text in ("", "4k", "2x", "2x4m", "2x4k+", "2x4k,1x1"):
        with pytest.raises(ValueError, match="accepted: COUNTxLENGTH"):
            lengths.parse(text)
    assert sum(lengths.parse("32x128+32x4k")) == 32 * (128 + 4096)


@pytest.mark.parametrize("trace", lengths.TRACES, ids=lambda trace: trace.name)
def test_traces_are_drawn_from_their_quantiles(trace: lengths.Trace) -> None:
    drawn = lengths.draw(trace)
    assert len(trace.lengths) == max(lengths.BATCHES)
    assert max(abs(a - b) for a, b in zip(drawn, trace.lengths, strict=True)) <= 1  # roundings
    share = (np.arange(100_000) + 0.5) / 100_000
    means = {"Mooncake": (12035, 343), "Azure": (1155, 211)}[trace.name.split()[0]]
    for quantiles, mean in zip((trace.inputs, trace.outputs), means, strict=True):
        tokens = lengths._at(quantiles, share)
        assert tokens.mean() == pytest.approx(mean, rel=0.06)
        for percent, most in quantiles:
            assert lengths._at(quantiles, np.array([percent / 100]))[0] == pytest.approx(most)


# Caches and right results


EVEN = DecodeCase("contiguous", (40, 40), 4, 2, 16)
UNEVEN = DecodeCase("mixes", (40, 1, 17), 4, 2, 16, page_size=16)
CASES = [
    EVEN,
    replace(EVEN, queries=5),
    replace(EVEN, on_device=True),
    replace(EVEN, page_size=1),
    UNEVEN,
    replace(UNEVEN, page_size=3),
    replace(EVEN, cache_dtype=E4M3, on_device=True),
    replace(EVEN, cache_dtype=INT8, page_size=16),
]


def of_sequences(inputs: caches.Inputs) -> list[tuple[Any, Any]]:
    """Each sequence's keys and values, gathered one by one, in float64."""
    case, found = inputs.case, []
    for b, length in enumerate(case.lengths):
        own = []
        for i, x in enumerate(inputs.pairs[0]):
            rows = []
            for j in range(length):
                if inputs.page_table is None:
                    rows.append(x[b, j])
                else:
                    page = int(inputs.page_table[b, j // case.page_size])
                    rows.append(x[page, j % case.page_size])
            numbers = torch.stack([row.float() for row in rows]).double()
            if inputs.scales is not None:
                numbers *= inputs.scales[i].double()
            own.append(numbers)
        found.append((own[0], own[1]))
    return found


def right(inputs: caches.Inputs, **options: Any) -> Any:
    """By the library's reference."""
    asked = {"causal": True, **options}
    outs = [
        attention_reference(q[None].double().numpy(), k[None].numpy(), v[None].numpy(), **asked)[0]
        for q, (k, v) in zip(inputs.q, of_sequences(inputs), strict=True)
    ]
    return torch.from_numpy(np.concatenate(outs))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.what}, {len(case.lengths)}")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_right_results(case: DecodeCase, dtype: str) -> None:
    inputs = caches.draw(case, dtype, "cpu", 3)
    exact = right(inputs)
    assert inputs.expected.errors(exact)[1] < 1e-3
    assert inputs.expected.errors(exact.to(inputs.q.dtype))[1] < 1
    for at in np.ndindex(len(case.lengths), case.num_heads):
        broken = exact.clone()
        broken[at[0], -1, at[1], 3] += 0.05
        assert inputs.expected.errors(broken)[1] > 1, at
    assert inputs.expected.errors(exact * math.nan)[1] == math.inf
    if case.queries > 1:
        assert inputs.expected.errors(right(inputs, causal=False))[1] > 1
        assert inputs.expected.errors(right(inputs, causal="top_left"))[1] > 1
    if inputs.scales is not None:
        assert inputs.expected.errors(exact * 1.1)[1] > 1
        assert inputs.expected.errors(right(inputs, softmax_scale=1.5 / 4))[1] > 1


def test_pages_lie_in_any_order_and_copies_are_alike() -> None:
    inputs = caches.draw(UNEVEN, "float32", "cpu", 3)
    table = inputs.page_table
    assert table.dtype == torch.int32
    assert table.shape == (3, 3) and (table[1, 1:] == -1).all() and (table[2, 2:] == -1).all()
    used = table[table >= 0].tolist()
    assert sorted(used) == list(range(6)) and used != sorted(used)
    assert inputs.pairs[0][0].shape == (6, 16, 2, 16)
    addresses = {x.data_ptr() for pair in inputs.pairs for x in pair}
    assert len(addresses) == 6
    for k, v in inputs.pairs:
        assert torch.equal(k, inputs.pairs[0][0]) and torch.equal(v, inputs.pairs[0][1])
    own = of_sequences(inputs)
    for packed in inputs.packed:
        for i, x in enumerate(packed):
            assert torch.equal(x.double(), torch.cat([pair[i] for pair in own]))
    assert abs(float(inputs.pairs[0][0].mean()) - 0.25) < 0.1
    assert inputs.seqused_k.tolist() == [40, 1, 17]
    with pytest.raises(ValueError, match="accepted without pages: equal ones"):
        caches.draw(replace(UNEVEN, page_size=0), "float32", "cpu", 1)


@pytest.mark.parametrize("dtype", [E4M3, INT8])
def test_eight_bit_caches_have_the_values_but_for_their_rounding(dtype: str) -> None:
    wide = caches.draw(EVEN, "float32", "cpu", 1)
    narrow = caches.draw(replace(EVEN, cache_dtype=dtype), "float32", "cpu", 2)
    assert wide.scales is None and narrow.scales is not None
    for x, y, scale in zip(wide.pairs[0], narrow.pairs[1], narrow.scales, strict=True):
        assert tensors.dtype_of(y) == dtype and scale.shape == ()
        most = 448.0 if dtype == E4M3 else 127.0
        assert float(y.float().abs().max()) == most
        step = 2**-4 * float(x.abs().max()) if dtype == E4M3 else float(scale) / 2 * 1.001
        assert float((y.float() * scale - x).abs().max()) <= step


# Ours


def study_of(case: DecodeCase, count: int) -> tuple[Any, Any]:
    """Ours over a case, and the caches."""
    inputs = caches.draw(case, "float32", "cpu", count)
    study = decode.Study(Context("cpu", "float32", [], None), ())
    problem = study._problem(caches.Caches(inputs, count), COLD)
    return contestants.ours(ours_with("auto")).bind(problem), problem.caches


@pytest.mark.parametrize("case", CASES[:6], ids=lambda case: f"{case.what}, {len(case.lengths)}")
def test_ours(case: DecodeCase) -> None:
    bound, problem_caches = study_of(case, 3)
    assert bound.plan == "cpu"
    expected = problem_caches.inputs.expected
    assert bound.checked is not None
    assert expected.errors(bound.checked())[1] <= 1
    assert expected.errors(bound.call())[1] <= 1
    assert len(bound.turn) == 24
    for k, v in problem_caches.pairs[1:]:  # which the last call and the next ones read
        k.fill_(0), v.fill_(7)
    outs = [float(call().mean()) for call in bound.turn]
    assert outs[:3] == outs[3:6] and outs[1] == outs[2] == 7 and outs[0] != 7


def test_cold_calls_read_every_copy_and_warm_calls_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "l2_bytes", lambda device: 4 * 2 * 40 * 2 * 16 * 4 // 3)
    study = decode.Study(Context("cpu", "float32", [ours_with("auto")], []), ())
    cold, warm = study._entrants((replace(EVEN, lengths=(20, 20)),))
    assert (cold.facts["buffers"], warm.facts["buffers"]) == (4, 1)
    assert cold.facts["bytes"] == warm.facts["bytes"] == 2 * 40 * 2 * 16 * 4
    read: list[int] = []
    attention = dlattn.attention

    def watched(q: Any, k: Any, v: Any, **options: Any) -> Any:
        read.append(k.data_ptr())
        return attention(q, k, v, **options)

    monkeypatch.setattr(dlattn, "attention", watched)
    for entrant, different in ((cold, 4), (warm, 1)):
        read.clear()
        bound = entrant.contestant.bind(entrant.problem)
        for call in bound.turn:
            call()
        assert len(set(read)) == len(set(read[:different])) == different
        assert len(read) == 24
    assert cold.problem.caches.inputs is warm.problem.caches.inputs

    prepared = []

    class Clock(timing.CpuClock):
        def prepare(self, call: Any, turn: Any = ()) -> timing.Prepared:
            read.clear()
            for each in turn:
                each()
            prepared.append(len(set(read)))
            return super().prepare(call, turn)

    run = session.Session("cpu", INSTANT, ["auto"], [])
    run.clock = Clock()
    results = run.time([cold, warm])
    assert prepared == [4, 1]
    assert all(result.seconds and not result.wrong for result in results)


def test_another_type_error_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def supported(*args: Any, **options: Any) -> Any:
        raise TypeError("of our own making")

    monkeypatch.setattr(dlattn, "supported", supported)
    with pytest.raises(TypeError, match="of our own making"):
        study_of(EVEN, 1)
