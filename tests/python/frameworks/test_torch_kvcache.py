"""Attention over a cache as an operator of torch, on the CPU."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import dlattn.torch  # noqa: E402

OP = torch.ops.dlattn.attention_with_kvcache


def cache(paged: bool = False, dtype: Any = None) -> tuple[list[Any], dict[str, Any]]:
    """q, k_cache and v_cache of head dims 16 and 8, and where their keys are."""
    generator = torch.Generator().manual_seed(0)
    shape = (9, 4, 2) if paged else (2, 12, 2)
    tensors = [
        torch.randn(*s, generator=generator).to(dtype or torch.float32)
        for s in ((2, 3, 4, 16), (*shape, 16), (*shape, 8))
    ]
    where = {"seqused_k": torch.tensor([12, 5], dtype=torch.int32)}
    if paged:
        where["page_table"] = torch.tensor([[7, 0, 3], [2, 8, -1]], dtype=torch.int32)
    else:
        where["leftpad_k"] = torch.tensor([4, 0], dtype=torch.int32)
    return tensors, where


EVERY: dict[str, Any] = {
    "causal": True,
    "softmax_scale": 0.3,
    "window": (4, 1),
    "softcap": 2.0,
    "max_seqlen_k": 12,
    "batch_invariant": True,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("paged", [False, True])
def test_the_operator_is_the_function(paged: bool, dtype: Any) -> None:
    tensors, where = cache(paged, dtype)
    given = EVERY | where | {"sinks": torch.rand(4), "alibi_slopes": torch.rand(2, 4)}
    given["mask"] = torch.rand(3, 12, generator=torch.Generator().manual_seed(1)) > 0.2
    want = dlattn.attention_with_kvcache(*tensors, **given, return_lse=True)
    found = dlattn.torch.attention_with_kvcache(*tensors, **given, return_lse=True)
    for x, y in zip(found, want, strict=True):
        assert torch.equal(x, y)
    assert torch.equal(dlattn.torch.attention_with_kvcache(*tensors, **given), want[0])


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_caches_of_8_bits(dtype: Any) -> None:
    (q, k, v), where = cache(paged=True)
    k, v = ((x * 10).to(dtype) for x in (k, v))
    scales = {"k_descale": torch.tensor([0.1, 0.2]), "v_descale": torch.tensor(0.1)}
    want = dlattn.attention_with_kvcache(q.half(), k, v, **where, **scales)
    found = dlattn.torch.attention_with_kvcache(q.half(), k, v, **where, **scales)
    assert found.dtype == torch.float16 and torch.equal(found, want)
    used = where.pop("seqused_k")
    if dtype == torch.int8:  # opcheck multiplies its inputs, which torch does not do to float8
        torch.library.opcheck(OP, (q.half(), k, v, used), {**where, **scales})
    with pytest.raises(dlattn.UnsupportedError, match="k_descale"):
        dlattn.torch.attention_with_kvcache(q.half(), k, v, seqused_k=used, **where)


def test_entries_and_the_other_layout() -> None:
    (q, k, v), where = cache()
    where["cache_batch_idx"] = torch.tensor([1, 0], dtype=torch.int32)
    want = dlattn.attention_with_kvcache(q, k, v, **where)
    swapped = [x.transpose(1, 2) for x in (q, k, v)]
    found = dlattn.torch.attention_with_kvcache(*swapped, layout="bhsd", **where)
    assert torch.equal(found.transpose(1, 2), want)


@pytest.mark.parametrize("paged", [False, True])
def test_the_operators_rules(paged: bool) -> None:
    tensors, where = cache(paged)
    used = where.pop("seqused_k")
    torch.library.opcheck(OP, (*tensors, used), {**where, "causal": 1})


def test_compiled_with_other_lengths() -> None:
    """One graph, of lengths that it reads when it runs."""
    tensors, where = cache(paged=True)

    def layer(q: Any, k: Any, v: Any, used: Any, table: Any) -> Any:
        attend = dlattn.torch.attention_with_kvcache
        return attend(q, k, v, seqused_k=used, page_table=table, causal=True) + 1

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for lengths in ([12, 5], [1, 8], [0, 3]):
        used = torch.tensor(lengths, dtype=torch.int32)
        given = (*tensors, used, where["page_table"])
        assert torch.equal(compiled(*given), layer(*given))
    torch._dynamo.reset()


def test_refusals() -> None:
    (q, k, v), where = cache()
    attend = dlattn.torch.attention_with_kvcache
    with pytest.raises(dlattn.UnsupportedError, match=r"causal is 'left'; accepted: False, True"):
        attend(q, k, v, causal="left", **where)
    with pytest.raises(dlattn.UnsupportedError, match=r"layout is 'sbhd'; accepted: \"bshd\""):
        attend(q, k, v, layout="sbhd", **where)
    with pytest.raises(dlattn.UnsupportedError, match=r"window is \(-1, 0\): its left side is "):
        attend(q, k, v, window=(-1, 0), **where)
    with pytest.raises(TypeError, match=r"v_cache is (None|of type NoneType); accep"):
        attend(q, k, None, **where)
    with pytest.raises(TypeError, match=r"max_seqlen_k is of type str; accepted: an int >= 0"):
        attend(q, k, v, max_seqlen_k="a", **where)
    with pytest.raises(dlattn.UnsupportedError, match=r"causal is 3; accepted: 0"):
        OP(q, k, v, where["seqused_k"], causal=3)
    with pytest.raises(dlattn.UnsupportedError, match=r"seqused_k\[1\] is 13"):
        attend(q, k, v, seqused_k=torch.tensor([1, 13], dtype=torch.int32))
    with pytest.raises(dlattn.UnsupportedError, match="an input requires grad"):
        attend(q.requires_grad_(), k, v, **where)
    with pytest.raises(Exception, match="k_cache has 3 dimensions; accepted: 4"):
        OP(*(x.detach().to("meta") for x in (q, k[0], v, where["seqused_k"])))
