"""The float64 reference of gradients against finite differences of the definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dlattn.reference import (
    attention_backward_reference,
    attention_reference,
    attention_varlen_backward_reference,
    attention_varlen_reference,
    same_dtype_gradients,
)

B, SQ, SK, H, HKV, D, DV = 2, 4, 6, 4, 2, 3, 5
NAMES = ("q", "k", "v", "bias", "alibi_slopes", "sinks")


def draw(*shape: int, seed: int) -> Any:
    return np.random.default_rng([seed, *shape]).standard_normal(shape) + 0.2


def blind_row_mask() -> Any:
    mask = draw(B, 1, SQ, SK, seed=9) > -0.8
    mask[1, :, 2] = False
    return mask


def inputs(bias_shape: tuple[int, ...], slopes_shape: tuple[int, ...]) -> dict[str, Any]:
    return {
        "q": draw(B, SQ, H, D, seed=1),
        "k": draw(B, SK, HKV, D, seed=2),
        "v": draw(B, SK, HKV, DV, seed=3),
        "bias": draw(*bias_shape, seed=4),
        "alibi_slopes": np.abs(draw(*slopes_shape, seed=5)) / 4,
        "sinks": draw(H, seed=6),
    }


def differences(function: Any, values: dict[str, Any], step: float = 1e-6) -> dict[str, Any]:
    """The gradient of a function of all values by central differences, element by element."""
    found = {}
    for name, value in values.items():
        found[name] = np.zeros_like(value)
        for at in np.ndindex(value.shape):
            sides = []
            for sign in (1, -1):
                moved = value.copy()
                moved[at] += sign * step
                sides.append(function(**{**values, name: moved}))
            found[name][at] = (sides[0] - sides[1]) / (2 * step)
    return found


def finite(lse: Any) -> Any:
    return np.where(np.isneginf(lse), 0.0, lse)


def check(found: Any, expected: dict[str, Any]) -> None:
    for name, gradient in zip(NAMES, found, strict=True):
        np.testing.assert_allclose(gradient, expected[name], atol=2e-8, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("causal", [True, "top_left", False])
@pytest.mark.parametrize(
    "bias_shape, slopes_shape",
    [((B, H, SQ, SK), (B, H)), ((SQ, 1), (H,)), ((1, H, 1, SK), (H,)), ((B, 1, SQ, SK), (H,))],
)
def test_all_features_at_once(causal, bias_shape, slopes_shape):
    options: dict[str, Any] = {
        "causal": causal,
        "softmax_scale": 0.7,
        "softcap": 1.3,
        "window": (3, 2),
        "mask": blind_row_mask(),
    }
    values = inputs(bias_shape, slopes_shape)
    dout, dlse = draw(B, SQ, H, DV, seed=7), draw(B, H, SQ, seed=8)

    def loss(**given: Any) -> float:
        out, lse = attention_reference(**given, **options)
        return float(np.sum(out * dout) + np.sum(finite(lse) * dlse))

    out, lse = attention_reference(**values, **options)
    found = attention_backward_reference(dout, **values, out=out, lse=lse, dlse=dlse, **options)
    check(found, differences(loss, values))


@pytest.mark.parametrize("has_dout, has_dlse", [(True, False), (False, True)])
def test_rows_that_see_nothing(has_dout, has_dlse):
    """Without sinks their lse is -inf, and they have no gradient at all."""
    values = {name: x for name, x in inputs((H, 1, SK), (H,)).items() if name != "sinks"}
    options = {"mask": blind_row_mask(), "causal": True, "softcap": 0.9}
    dout = draw(B, SQ, H, DV, seed=7) if has_dout else None
    dlse = draw(B, H, SQ, seed=8) if has_dlse else None

    def loss(**given: Any) -> float:
        out, lse = attention_reference(**given, **options)
        return float(
            (0 if dout is None else np.sum(out * dout))
            + (0 if dlse is None else np.sum(finite(lse) * dlse))
        )

    out, lse = attention_reference(**values, **options)
    assert np.isneginf(lse[1, :, 2]).all()
    found = attention_backward_reference(dout, **values, out=out, lse=lse, dlse=dlse, **options)
    check((*found[:5], np.zeros(0)), {**differences(loss, values), "sinks": np.zeros(0)})
    assert found.dsinks is None and not found.dq[1, 2].any() and found.dq[0].any()


def test_a_part_of_the_keys():
    """The gradients of two parts, each with the whole's out and lse, make up those of the whole."""
    values = {name: inputs((1,), (H,))[name] for name in ("q", "k", "v")}
    dout = draw(B, SQ, H, DV, seed=7)
    out, lse = attention_reference(**values)
    whole = attention_backward_reference(dout, **values, out=out, lse=lse)
    q, k, v = values.values()
    parts = [
        attention_backward_reference(dout, q, k[:, keys], v[:, keys], out, lse)
        for keys in (slice(0, 2), slice(2, SK))
    ]
    np.testing.assert_allclose(parts[0].dq + parts[1].dq, whole.dq, atol=1e-12)
    for i in (1, 2):
        both = np.concatenate([parts[0][i], parts[1][i]], axis=1)
        np.testing.assert_allclose(both, whole[i], atol=1e-12)


@pytest.mark.parametrize("bias_shape", [(2, H, 4, 5), (1, 4, 1), (2, 1, 1, 5)])
def test_varlen(bias_shape):
    """Sequences of 3 and 4 queries, with rows that belong to none, and a key that is not in use."""
    starts = np.array([1, 4, 8]), np.array([0, 5, 9])
    lengths = {
        "cu_seqlens_q": starts[0],
        "cu_seqlens_k": starts[1],
        "max_seqlen_q": 4,
        "max_seqlen_k": 5,
        "seqused_k": np.array([4, 4]),
    }
    values = {
        "q": draw(9, H, D, seed=1),
        "k": draw(10, HKV, D, seed=2),
        "v": draw(10, HKV, DV, seed=3),
        "bias": draw(*bias_shape, seed=4),
        "alibi_slopes": np.abs(draw(H, seed=5)) / 4,
        "sinks": draw(H, seed=6),
    }
    options: dict[str, Any] = {**lengths, "causal": True, "softcap": 1.5}
    dout, dlse = draw(9, H, DV, seed=7), draw(H, 9, seed=8)

    def loss(**given: Any) -> float:
        out, lse = attention_varlen_reference(**given, **options)
        return float(np.sum(out * dout) + np.sum(finite(lse) * dlse))

    out, lse = attention_varlen_reference(**values, **options)
    found = attention_varlen_backward_reference(
        dout, **values, out=out, lse=lse, dlse=dlse, **options
    )
    check(found, differences(loss, values))
    assert not found.dq[0].any() and not found.dk[4].any() and not found.dk[9].any()


@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-5), ("bfloat16", 0.1)])
def test_gradients_of_a_plain_computation(dtype, tolerance):
    values = inputs((H, 1, 1), (H,))
    out, lse = attention_reference(**values)
    dout = draw(B, SQ, H, DV, seed=7)
    exact = attention_backward_reference(dout, **values, out=out, lse=lse)
    plain = same_dtype_gradients(dout, **values, out=out, lse=lse, dtype=dtype)
    for one, other in zip(exact, plain, strict=True):
        assert 0 < np.max(np.abs(one - other)) < tolerance * np.max(np.abs(one)), dtype
