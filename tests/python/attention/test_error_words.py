"""The words of errors: dtypes that they say are accepted are, and they read no array's numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import dlattn

X = np.ones((1, 4, 2, 8), np.float32)
OUT, LSE = dlattn.attention(X, X, X, return_lse=True)
LENGTHS, STARTS = np.array([4], np.int32), np.array([0, 4], np.int32)
PAGES: dict[str, Any] = {"seqused_k": LENGTHS, "page_table": np.zeros((1, 1), np.int32)}
WIDE = "float16, bfloat16, float32, float64"

# Calls with arrays of one dtype, and the dtypes in the words of their refusal.
CALLS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "attention": (lambda x: dlattn.attention(x, x, x), f"{WIDE}, float8_e4m3fn"),
    "precision": (lambda x: dlattn.attention(x, x, x, precision="fp8"), "float16, bfloat16"),
    "attention_backward": (lambda x: dlattn.attention_backward(x, x, x, x, OUT, LSE), WIDE),
    "attention_with_kvcache": (
        lambda x: dlattn.attention_with_kvcache(x, x, x, seqused_k=LENGTHS),
        WIDE,
    ),
    "attention_varlen": (
        lambda x: dlattn.attention_varlen(x[0], x, x, STARTS, None, 4, 4, **PAGES),
        WIDE,
    ),
    "append_kv": (
        lambda x: dlattn.append_kv(x, x, x.copy(), x.copy(), seqused_k=0 * LENGTHS),
        WIDE,
    ),
    "merge_states": (lambda x: dlattn.merge_states([x], [LSE]), WIDE),
}


@pytest.mark.parametrize("name", CALLS)
def test_dtypes_that_are_accepted(name: str) -> None:
    call, accepted = CALLS[name]
    with pytest.raises(dlattn.UnsupportedError, match=f": dtype is int32; accepted: {accepted}$"):
        call(X.astype(np.int32))
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for dtype in accepted.split(", "):
        if dtype.startswith("float8") or dtype == "bfloat16":
            x = X.astype(getattr(ml_dtypes, dtype))
        else:
            x = X.astype(dtype)
        if name == "attention_backward":
            out, lse = dlattn.attention(x, x, x, return_lse=True)
            dlattn.attention_backward(x, x, x, x, out, lse)
        else:
            call(x)


@pytest.mark.parametrize(("dtype", "more"), [("float32", False), ("float16", True)])
def test_keys_of_8_bits_are_named_beside_16(dtype: str, more: bool) -> None:
    q, k = X.astype(dtype), X.astype(np.int16)
    words = ", or int8 or float8_e4m3fn with k_descale and v_descale" if more else ""
    with pytest.raises(dlattn.UnsupportedError, match=f"accepted: {dtype}, that of q{words}$"):
        dlattn.attention_with_kvcache(q, k, k, seqused_k=LENGTHS)


def test_merge_names_its_own_argument() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    with pytest.raises(dlattn.UnsupportedError, match=f"^outs: dtype is float8_e4m3fn; .* {WIDE}$"):
        dlattn.merge_states([X.astype(ml_dtypes.float8_e4m3fn)], [LSE])


@pytest.mark.parametrize("parts", [iter([OUT]), {0: OUT}, map(abs, [OUT]), {1}])
def test_merge_takes_no_iterator(parts: Any) -> None:
    kind = re.escape(type(parts).__name__)
    with pytest.raises(TypeError, match=f"^outs is of type {kind}; accepted: a list or tuple of"):
        dlattn.merge_states(parts, [LSE])
    with pytest.raises(TypeError, match=f"^lses is of type {kind}; accepted: a list or tuple of"):
        dlattn.merge_states([OUT], parts)


class Unread:
    """An array of a GPU, whose text the host would wait for."""

    def __dlpack__(self) -> None:
        raise AssertionError("it was taken in")

    def __repr__(self) -> str:
        raise AssertionError("it was read")


UNREAD = Unread()


def from_torch(**options: Any) -> Any:
    pytest.importorskip("torch")
    import dlattn.torch

    return dlattn.torch.attention(X, X, X, **options)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: dlattn.attention(X, X, X, window=UNREAD), "window is <.*Unread>; "),
        (lambda: dlattn.attention(X, X, X, window=(UNREAD, 1)), "window is <tuple>: its left side"),
        (
            lambda: dlattn.attention_backward(X, X, X, X, OUT, LSE, needs=[UNREAD]),
            "needs has <.*Unread>; ",
        ),
        (
            lambda: dlattn.flash_attn.flash_attn_func(X, X, X, window_size=(UNREAD, 1)),
            "window_size is <tuple>; ",
        ),
        (lambda: from_torch(window=UNREAD), "window is <.*Unread>; "),
    ],
)
def test_no_array_is_read_for_an_error(call: Callable[[], Any], match: str) -> None:
    with pytest.raises((TypeError, dlattn.UnsupportedError), match=match):
        call()
