"""Wrong arguments of the functions of dlattn.torch, and of flash-attn's where gradients are wanted.

Each is refused by a message that names it, before an operator of torch's makes a number of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from arrays import normal

torch = pytest.importorskip("torch")

import dlattn.torch  # noqa: E402
from dlattn import flash_attn  # noqa: E402

Given = dict[str, Any]


def tensor(*shape: int) -> Any:
    return torch.from_numpy(normal(*shape, seed=sum(shape)))


def ints(*values: int) -> Any:
    return torch.tensor(values, dtype=torch.int32)


def dense() -> Given:
    return {"q": tensor(2, 5, 4, 8), "k": tensor(2, 7, 2, 8), "v": tensor(2, 7, 2, 8)}


def packed() -> Given:
    lengths = {"cu_seqlens_q": ints(0, 5, 10), "cu_seqlens_k": ints(0, 7, 14)}
    longest = {"max_seqlen_q": 5, "max_seqlen_k": 7}
    return {"q": tensor(10, 4, 8), "k": tensor(14, 2, 8), "v": tensor(14, 2, 8)} | lengths | longest


def cached() -> Given:
    caches = {"k_cache": tensor(2, 9, 2, 8), "v_cache": tensor(2, 9, 2, 8)}
    return {"q": tensor(2, 5, 4, 8), "seqused_k": ints(9, 6)} | caches


def differentiated(given: Callable[[], Given]) -> Given:
    return {
        name: x.requires_grad_() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for name, x in given().items()
    }


FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[[], Given]]] = {
    "attention": (dlattn.torch.attention, dense),
    "attention grad": (dlattn.torch.attention, partial(differentiated, dense)),
    "varlen": (dlattn.torch.attention_varlen, packed),
    "varlen grad": (dlattn.torch.attention_varlen, partial(differentiated, packed)),
    "kvcache": (dlattn.torch.attention_with_kvcache, cached),
    "flash_attn_func": (flash_attn.flash_attn_func, partial(differentiated, dense)),
    "flash_attn_varlen_func": (flash_attn.flash_attn_varlen_func, partial(differentiated, packed)),
}
FLASH = ("flash_attn_func", "flash_attn_varlen_func")

FLAG = ["yes", 1, np.array([True, False]), torch.ones(2), None]
NUMBER = ["1", True, [1.0], 1j, np.array(1.0), torch.tensor(1.0), 10**400]
WRONG: dict[str, list[Any]] = {
    "causal": [1, None, "left", np.array([1, 2]), ["left"]],
    "softmax_scale": NUMBER,
    "softcap": [*NUMBER, None, np.array([0.0, 1.0]), torch.zeros(2)],
    "window": [5, "ab", np.array([1, 2]), torch.ones(2), (np.array([1, 2]), None), (True, 1)],
    "layout": [3, "sbhd", np.array(["bshd", "bshd"]), None],
    "return_lse": FLAG,
    "batch_invariant": FLAG,
    "precision": [3, "int4", "fp8\0"],
    "max_seqlen_q": [True, 5.0, np.float32(5), "5", torch.tensor(5), 2**70, -1, None],
    "max_seqlen_k": [True, 9.0, np.float32(9), "9", torch.tensor(9), 2**70, -1],
    "deterministic": FLAG,
}


def cases() -> list[Any]:
    found = []
    for name, (function, _) in FUNCTIONS.items():
        taken = inspect.signature(function).parameters
        found += [
            pytest.param(name, argument, value, id=f"{name}-{argument}-{value!r:.20}")
            for argument, values in WRONG.items()
            if argument in taken
            for value in values
        ]
    return found


@pytest.mark.parametrize("function, argument, value", cases())
def test_wrong_settings(function: str, argument: str, value: Any) -> None:
    call, given = FUNCTIONS[function]
    with pytest.raises((dlattn.UnsupportedError, TypeError)) as caught:
        call(**given() | {argument: value})
    message = str(caught.value)
    assert argument in message and "; accepted: " in message and len(message) < 300


PLAIN = {
    "attention": dlattn.attention,
    "varlen": dlattn.attention_varlen,
    "kvcache": dlattn.attention_with_kvcache,
}


@pytest.mark.parametrize("function", PLAIN)
def test_settings_are_refused_in_one_set_of_words(function: str) -> None:
    """Those of the functions without torch, which read no tensor to tell its type."""
    call, given = FUNCTIONS[function]
    taken = inspect.signature(call).parameters
    values = {
        "window": [(-1, 5), (True, 1), (0, 1.0), (2,), None],
        "max_seqlen_k": [None, *WRONG["max_seqlen_k"]],
        "softmax_scale": [*NUMBER, -1.0, 0.0, 1e-39, float("nan"), ""],
    }
    for argument in WRONG.keys() & taken.keys():
        for value in values.get(argument, [*WRONG[argument], ""]):
            messages = []
            for one in (call, PLAIN[function]):
                try:
                    one(**given() | {argument: value})
                    messages.append("")
                except (dlattn.UnsupportedError, TypeError) as error:
                    messages.append(f"{type(error).__name__}: {error}")
            assert messages[0] == messages[1], (argument, value)


TENSORS: dict[str, Callable[[Any], Any]] = {
    "None": lambda x: None,
    "text": lambda x: "x",
    "array": lambda x: x.detach().numpy(),
    "sparse": lambda x: x.detach().to_sparse(),
    "quantized": lambda x: torch.quantize_per_tensor(x.detach().float(), 0.1, 0, torch.qint8),
    "nested": lambda x: torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(1, 3)]),
}


@pytest.mark.parametrize("kind", TENSORS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_wrong_tensors(function: str, kind: str) -> None:
    """Each tensor that a function requires, and one that it does not."""
    call, given = FUNCTIONS[function]
    for argument, x in {**given(), "alibi_slopes": torch.ones(4)}.items():
        if not isinstance(x, torch.Tensor) or (argument == "alibi_slopes" and kind == "None"):
            continue
        with pytest.raises((dlattn.UnsupportedError, TypeError)) as caught:
            call(**given() | {argument: TENSORS[kind](x)})
        assert argument in str(caught.value) and "accepted: " in str(caught.value)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_numbers_of_other_libraries(function: str) -> None:
    """Those that dlattn.attention takes."""
    call, given = FUNCTIONS[function]
    window = "window_size" if function in FLASH else "window"
    options: Given = {"softmax_scale": np.float32(0.5), "softcap": np.int64(2)}
    found = call(**given(), **options, **{window: (np.int64(3), 2**70)})
    assert torch.equal(found, call(**given(), softmax_scale=0.5, softcap=2.0, **{window: (3, 99)}))


def test_nested_tensors_have_no_shape() -> None:
    x, nested = tensor(2, 9, 2, 8), TENSORS["nested"](None)
    for function, given, name in (
        (flash_attn.flash_attn_qkvpacked_func, {"qkv": nested}, "qkv"),
        (flash_attn.flash_attn_kvpacked_func, {"q": x, "kv": nested}, "kv"),
        (flash_attn.flash_attn_with_kvcache, {"q": x, "k_cache": nested, "v_cache": x}, "k_cache"),
    ):
        with pytest.raises(
            TypeError, match=f"^{name} is of type torch.Tensor, which has no shape; acc"
        ):
            function(**given)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_tensors_of_the_device_meta(function: str) -> None:
    """Beside others torch would take the operator's shapes for its results."""
    call, given = FUNCTIONS[function]
    for argument, x in given().items():
        if not isinstance(x, torch.Tensor):
            continue
        of_meta = given() | {argument: x.detach().to("meta")}
        with pytest.raises(
            dlattn.UnsupportedError, match=r" is on (cpu|meta); accepted: (meta|cpu)"
        ):
            call(**of_meta)
    if function not in FLASH:  # which need no operator without gradients
        of_meta = {
            name: x.detach().to("meta") if isinstance(x, torch.Tensor) else x
            for name, x in given().items()
        }
        assert call(**of_meta).is_meta


def test_states_on_the_device_meta() -> None:
    out, lse = torch.ones(2, 3, 4, 8), torch.ones(2, 4, 3)
    with pytest.raises(
        dlattn.UnsupportedError, match=r"^lses is on meta; accepted: cpu, where out"
    ):
        torch.ops.dlattn.merge_states([out, out], [lse, lse.to("meta")])
