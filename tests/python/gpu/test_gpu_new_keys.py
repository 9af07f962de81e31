"""New keys of attention_with_kvcache on a GPU: a call that is refused has written nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from gpu_checks import DEVICE, torch

import dlattn

pytestmark = pytest.mark.gpu

SPLITS = {"kernel": "decode", "num_splits": 5, "causal": True}


def call(rotary: bool = False) -> dict[str, Any]:
    """One that is right, whose plan needs a workspace."""
    generator = torch.Generator(DEVICE).manual_seed(0)

    def normal(*shape: int) -> Any:
        x = torch.randn(*shape, generator=generator, device=DEVICE) + 0.3
        return x.to(torch.bfloat16)

    given = {
        "q": normal(2, 3, 8, 128),
        "k_cache": normal(2, 2048, 2, 128),
        "v_cache": normal(2, 2048, 2, 128),
        "k": normal(2, 3, 2, 128),
        "v": normal(2, 3, 2, 128),
        "seqused_k": torch.tensor([1900, 2045], dtype=torch.int32, device=DEVICE),
        "out": torch.full((2, 3, 8, 128), float("nan"), dtype=torch.bfloat16, device=DEVICE),
    }
    if rotary:
        given |= {f"rotary_{name}": normal(2048, 32) for name in ("cos", "sin")}
    return given | SPLITS


def workspace_bytes() -> int:
    given = call()
    arguments = (given[name] for name in ("q", "k_cache", "v_cache"))
    return dlattn.plan(*arguments, seqused_k=given["seqused_k"], **SPLITS).workspace_bytes


def memory(size: int) -> Any:
    return torch.zeros(size, dtype=torch.uint8, device=DEVICE)


def as_bytes(x: Any) -> Any:
    return x.view(-1).view(torch.uint8)


def over(name: str) -> Callable[[dict[str, Any], int], Any]:
    """A workspace whose first bytes are the last ones of a tensor."""

    def place(given: dict[str, Any], size: int) -> Any:
        own = as_bytes(given[name])
        pool = memory(own.numel() + size + 512)
        at = own.numel() // 256 * 256
        begin = max(at - own.numel() + 4, 0) // 4 * 4
        pool[begin : begin + own.numel()] = own
        laid = pool[begin : begin + own.numel()]
        given[name] = laid.view(given[name].dtype).view(given[name].shape)
        return pool[at : at + size]

    return place


WORKSPACES: dict[str, Any] = {
    "too small": lambda given, size: memory(size - 1),
    "misaligned": lambda given, size: memory(size + 1)[1:],
    "on the CPU": lambda given, size: memory(size).cpu(),
    "with gaps": lambda given, size: memory(2 * size).view(size, 2)[:, 0],
    "a text": lambda given, size: "workspace",
    **{f"over {x}": over(x) for x in ("q", "k", "v", "k_cache", "v_cache", "seqused_k", "out")},
}


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("name", WORKSPACES)
def test_a_wrong_workspace_is_refused_before_anything_is_written(name: str, rotary: bool) -> None:
    given = call(rotary)
    given["workspace"] = WORKSPACES[name](given, workspace_bytes())
    before = {
        x: as_bytes(t).clone() for x, t in given.items() if x != "workspace" and torch.is_tensor(t)
    }
    with pytest.raises((dlattn.UnsupportedError, TypeError), match="workspace"):
        dlattn.attention_with_kvcache(**given)
    torch.cuda.synchronize()
    for x, values in before.items():
        assert torch.equal(as_bytes(given[x]), values), x


@pytest.mark.parametrize("other", ["k", "v", "seqused_k", "rotary_cos", "rotary_sin"])
def test_out_over_what_comes_with_new_keys(other: str) -> None:
    given = call(rotary=True)
    pool = memory(1 << 20)
    out, x = as_bytes(given["out"]), as_bytes(given[other])
    given["out"] = pool[: out.numel()].view(torch.bfloat16).view(given["out"].shape)
    laid = pool[out.numel() - 16 : out.numel() - 16 + x.numel()]
    laid.copy_(x)
    given[other] = laid.view(given[other].dtype).view(given[other].shape)
    before = {x: as_bytes(given[x]).clone() for x in ("k_cache", "v_cache", other)}
    with pytest.raises(dlattn.UnsupportedError, match=f"out shares memory with {other}"):
        dlattn.attention_with_kvcache(**given)
    torch.cuda.synchronize()
    for name, values in before.items():
        assert torch.equal(as_bytes(given[name]), values), name


@pytest.mark.parametrize("own_workspace", [False, True])
@pytest.mark.parametrize("rotary", [False, True])
def test_bits_are_those_of_two_calls(rotary: bool, own_workspace: bool) -> None:
    given, other = call(rotary), call(rotary)
    if own_workspace:
        given["workspace"] = memory(workspace_bytes())
    out = dlattn.attention_with_kvcache(**given)
    new = {name: other.pop(name) for name in ("k", "v")}
    tables = {name: other.pop(name) for name in list(other) if name.startswith("rotary")}
    q = {"q": other["q"]} if rotary else {}
    rotated = dlattn.append_kv(
        **new, **tables, **q, k_cache=other["k_cache"], v_cache=other["v_cache"],
        seqused_k=other["seqused_k"],
    )  # fmt: skip
    other |= {"seqused_k": other["seqused_k"] + 3} | ({"q": rotated} if rotary else {})
    expected = dlattn.attention_with_kvcache(**other)
    assert not torch.isnan(out).any() and torch.equal(out, expected)
    for name in ("k_cache", "v_cache"):
        assert torch.equal(given[name], other[name])
        assert not torch.equal(given[name], call()[name])
