"""The float64 reference against cases by hand, torch in float64, and properties it must have."""

import math

import numpy as np
import pytest

from dlattn.reference import (
    allowed_keys,
    attention_reference,
    attention_varlen_reference,
    bias_range,
    bound_of,
    error_bound,
    max_error,
    merge_states_reference,
    round_to,
    same_dtype_reference,
)


def draw(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape) + 0.25


@pytest.fixture
def qkv():
    return draw(2, 5, 4, 8, seed=1), draw(2, 7, 2, 8, seed=2), draw(2, 7, 2, 6, seed=3)


def test_two_keys_by_hand():
    # Scores ln 3 and 0, so the weights are 3/4 and 1/4.
    q = np.full((1, 1, 1, 1), math.log(3.0))
    k = np.array([1.0, 0.0]).reshape(1, 2, 1, 1)
    v = np.array([[8.0, 0.0], [0.0, 4.0]]).reshape(1, 2, 1, 2)
    out, lse = attention_reference(q, k, v, softmax_scale=1.0)
    np.testing.assert_allclose(out.ravel(), [6.0, 1.0], rtol=1e-15)
    np.testing.assert_allclose(lse, [[[math.log(4.0)]]], rtol=1e-15)


def test_scale_defaults_to_inverse_root_of_head_dim():
    q, k, v = draw(1, 2, 1, 16), draw(1, 3, 1, 16, seed=1), draw(1, 3, 1, 4)
    default = attention_reference(q, k, v)
    np.testing.assert_array_equal(default[0], attention_reference(q, k, v, softmax_scale=0.25)[0])
    assert max_error(default[0], attention_reference(q, k, v, softmax_scale=0.5)[0]) > 1e-3


def test_softcap_by_hand():
    q, k = np.full((1, 1, 1, 1), 3.0), np.array([2.0, -1.0]).reshape(1, 2, 1, 1)
    lse = attention_reference(q, k, k, softmax_scale=1.0, softcap=5.0)[1]
    scores = [5.0 * math.tanh(6.0 / 5.0), 5.0 * math.tanh(-3.0 / 5.0)]
    np.testing.assert_allclose(lse.ravel(), [math.log(sum(map(math.exp, scores)))], rtol=1e-15)


def test_sink_by_hand():
    # One key with score 0 and a sink of ln 3: the key keeps a quarter of the weight.
    q, k, v = np.zeros((1, 1, 1, 1)), np.ones((1, 1, 1, 1)), np.full((1, 1, 1, 1), 8.0)
    out, lse = attention_reference(q, k, v, sinks=[math.log(3.0)])
    np.testing.assert_allclose(out.ravel(), [2.0], rtol=1e-15)
    np.testing.assert_allclose(lse.ravel(), [math.log(4.0)], rtol=1e-15)


def test_alibi_by_hand():
    # Query 1 of 2 over 3 keys stands at key 2: distances 2, 1, 0.
    q, k = np.zeros((1, 2, 1, 1)), np.zeros((1, 3, 1, 1))
    v = np.eye(3).reshape(1, 3, 1, 3)
    out = attention_reference(q, k, v, alibi_slopes=[math.log(2.0)])[0]
    np.testing.assert_allclose(out[0, 1, 0], np.array([1.0, 2.0, 4.0]) / 7.0, rtol=1e-14)
    # Query 0 stands at key 1.
    np.testing.assert_allclose(out[0, 0, 0], np.array([1.0, 2.0, 1.0]) / 4.0, rtol=1e-14)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["11111", "11111", "11111"]),
        ({"causal": True}, ["11100", "11110", "11111"]),
        ({"causal": "bottom_right"}, ["11100", "11110", "11111"]),
        ({"causal": "top_left"}, ["10000", "11000", "11100"]),
        ({"window": (1, 0)}, ["01100", "00110", "00011"]),
        ({"window": (None, 1)}, ["11110", "11111", "11111"]),
        ({"window": (0, None)}, ["00111", "00011", "00001"]),
        ({"causal": True, "window": (1, 5)}, ["01100", "00110", "00011"]),
        ({"causal": "top_left", "window": (1, None)}, ["10000", "11000", "01100"]),
    ],
)
def test_which_keys_a_query_sees(options, expected):
    allowed = allowed_keys(np.arange(3), 3, 5, **options)
    assert ["".join("01"[int(x)] for x in row) for row in allowed] == expected


def test_rows_that_see_no_key(qkv):
    q, k, v = qkv
    mask = np.ones((5, 7), dtype=bool)
    mask[3] = False
    out, lse = attention_reference(q, k, v, mask=mask)
    assert np.all(out[:, 3] == 0.0)
    assert np.all(np.isneginf(lse[:, :, 3]))
    assert np.all(np.isfinite(lse[:, :, [0, 1, 2, 4]]))

    sinks = np.array([0.5, -1.0, 2.0, 0.0])
    out, lse = attention_reference(q, k, v, mask=mask, sinks=sinks)
    assert np.all(out[:, 3] == 0.0)
    np.testing.assert_array_equal(lse[:, :, 3], np.broadcast_to(sinks, (2, 4)))


def test_more_queries_than_keys_leaves_the_first_rows_empty():
    q, k = draw(1, 4, 1, 2), draw(1, 2, 1, 2, seed=1)
    lse = attention_reference(q, k, k, causal=True)[1]
    assert np.isneginf(lse[0, 0]).tolist() == [True, True, False, False]


def test_no_keys_at_all():
    out, lse = attention_reference(draw(1, 3, 2, 4), draw(1, 0, 2, 4), draw(1, 0, 2, 5))
    assert out.shape == (1, 3, 2, 5)
    assert not out.any()
    assert np.all(np.isneginf(lse))


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"sinks": [0.1, 0.2, -0.3, 4.0]}])
def test_layouts_agree(qkv, options):
    out, lse = attention_reference(*qkv, **options)
    turned = [np.swapaxes(x, 1, 2) for x in qkv]
    out_turned, lse_turned = attention_reference(*turned, layout="bhsd", **options)
    np.testing.assert_array_equal(np.swapaxes(out_turned, 1, 2), out)
    np.testing.assert_array_equal(lse_turned, lse)


def test_query_heads_share_key_heads_in_groups(qkv):
    q, k, v = qkv
    repeated = attention_reference(q, np.repeat(k, 2, axis=2), np.repeat(v, 2, axis=2))
    np.testing.assert_array_equal(attention_reference(q, k, v)[0], repeated[0])


def test_blocks_of_rows_do_not_show(qkv, monkeypatch):
    options = {"causal": True, "window": (3, None), "alibi_slopes": [0.1, 0.2, 0.3, 0.4]}
    options["bias"] = draw(5, 7, seed=9)
    whole = attention_reference(*qkv, **options)
    monkeypatch.setattr("dlattn.reference.definition.MAX_SCORES", 14)  # two rows at a time
    pieces = attention_reference(*qkv, **options)
    np.testing.assert_allclose(pieces[0], whole[0], rtol=1e-14)
    np.testing.assert_allclose(pieces[1], whole[1], rtol=1e-14)


def test_merge_of_parts_is_the_whole(qkv):
    q, k, v = qkv
    whole = attention_reference(q, k, v)
    parts = [attention_reference(q, k[:, s], v[:, s]) for s in (slice(0, 2), slice(2, 7))]
    out, lse = merge_states_reference(*zip(*parts, strict=True))
    np.testing.assert_allclose(out, whole[0], rtol=1e-13)
    np.testing.assert_allclose(lse, whole[1], rtol=1e-13)


@pytest.mark.parametrize("infinity", [-np.inf, np.inf])
def test_merge_ignores_what_empty_parts_hold(qkv, infinity):
    out, lse = attention_reference(*qkv)
    garbage, nothing = np.full_like(out, np.nan), np.full_like(lse, infinity)
    merged = merge_states_reference([garbage, out], [nothing, lse])
    np.testing.assert_array_equal(merged[0], out)
    np.testing.assert_array_equal(merged[1], lse)
    empty = merge_states_reference([garbage, garbage], [nothing, nothing])
    assert not empty[0].any()
    assert np.all(np.isneginf(empty[1]))


def test_adding_a_constant_to_the_scores_moves_only_lse(qkv):
    out, lse = attention_reference(*qkv)
    shifted = attention_reference(*qkv, bias=np.full((1,), 3.0))
    np.testing.assert_allclose(shifted[0], out, rtol=0, atol=1e-13)
    np.testing.assert_allclose(shifted[1], lse + 3.0, rtol=1e-13)


def test_varlen_is_every_sequence_on_its_own():
    q, k, v = draw(9, 4, 8), draw(11, 2, 8, seed=1), draw(11, 2, 6, seed=2)
    cu_q, cu_k, used = [0, 4, 4, 9], [0, 5, 8, 11], [5, 3, 2]
    bias = draw(3, 1, 5, 5, seed=4)
    out, lse = attention_varlen_reference(
        q, k, v, cu_q, cu_k, 5, 5, seqused_k=used, causal=True, bias=bias
    )
    assert (out.shape, lse.shape) == ((9, 4, 6), (4, 9))
    for b in range(3):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b] + used[b])
        part = attention_reference(
            q[None, rows],
            k[None, keys],
            v[None, keys],
            causal=True,
            bias=bias[b : b + 1, :, : rows.stop - rows.start, : used[b]],
        )
        np.testing.assert_array_equal(out[rows], part[0][0])
        np.testing.assert_array_equal(lse[:, rows], part[1][0])
    turned = [np.swapaxes(x, 0, 1) for x in (q, k, v)]
    heads_first = attention_varlen_reference(
        *turned, cu_q, cu_k, 5, 5, seqused_k=used, causal=True, bias=bias, layout="bhsd"
    )
    np.testing.assert_array_equal(np.swapaxes(heads_first[0], 0, 1), out)
    np.testing.assert_array_equal(heads_first[1], lse)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"mask": True}, {"bias": True}])
@pytest.mark.parametrize("num_heads_kv", [1, 2, 4])
def test_against_torch(options, num_heads_kv):
    torch = pytest.importorskip("torch")
    q, k, v = draw(2, 6, 4, 8), draw(2, 6, num_heads_kv, 8, seed=1), draw(2, 6, num_heads_kv, 8)
    extra = dict(options)
    attn_mask = None
    if "mask" in options:
        extra["mask"] = draw(2, 1, 6, 6) > 0.0
        extra["mask"][..., 0] = True
        attn_mask = torch.from_numpy(extra["mask"])
    if "bias" in options:
        extra["bias"] = draw(1, 4, 6, 6)
        attn_mask = torch.from_numpy(extra["bias"])
    tensors = [torch.from_numpy(x).transpose(1, 2) for x in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(
        *tensors, attn_mask=attn_mask, is_causal="causal" in options, enable_gqa=True
    )
    out, _ = attention_reference(q, k, v, **extra)
    np.testing.assert_allclose(out, expected.transpose(1, 2).numpy(), rtol=1e-12, atol=1e-14)


def test_takes_torch_tensors():
    torch = pytest.importorskip("torch")
    q = torch.from_numpy(draw(1, 4, 2, 8)).to(torch.bfloat16).requires_grad_()
    values = q.detach().double().numpy()
    np.testing.assert_array_equal(
        attention_reference(q, q, q)[0], attention_reference(values, values, values)[0]
    )
    assert error_bound(q, q, q) == error_bound(values, values, values, dtype="bfloat16")


def test_rounding():
    rng = np.random.default_rng(0)
    values = (rng.standard_normal(100_000) * 10.0 ** rng.uniform(-9, 4, 100_000)).astype("f4")
    values[:4] = [0.0, -0.0, np.inf, 2.0**-25]
    np.testing.assert_array_equal(round_to(values, "float16"), values.astype("f2").astype("f4"))
    np.testing.assert_array_equal(round_to(values, "float32"), values)
    ml_dtypes = pytest.importorskip("ml_dtypes")
    expected = values.astype(ml_dtypes.bfloat16).astype("f4")
    np.testing.assert_array_equal(round_to(values, "bfloat16"), expected)


def test_plain_computation_rounds_the_probabilities():
    # Weights 1/10 and 9/10 and values 9 and -1 cancel, but for the rounding of the weights.
    q, k = np.full((1, 1, 1, 1), math.log(9.0)), np.array([0.0, 1.0]).reshape(1, 2, 1, 1)
    v = np.array([9.0, -1.0]).reshape(1, 2, 1, 1)
    out = same_dtype_reference(q, k, v, dtype="float16", softmax_scale=1.0)[0]
    assert out.item() == 9 * float(np.float16(0.1)) - float(np.float16(0.9))
    assert abs(same_dtype_reference(q, k, v, dtype="float32")[0].item()) < 1e-6


@pytest.mark.parametrize(
    ("dtype", "digits"), [("float16", 11), ("bfloat16", 8), ("float32", 24), ("float64", 53)]
)
def test_bound_is_of_the_order_of_the_dtype(dtype, digits):
    q, k, v = (round_to(draw(1, 64, 2, 32, seed=s).astype("f4"), dtype) for s in range(3))
    bound = error_bound(q, k, v, dtype=dtype, causal=True)
    unit = 2.0**-digits * np.abs(v).max()
    assert unit / 8 < bound.out < 64 * unit
    # It must be too tight for the next coarser type's result.
    coarser = {"float16": "bfloat16", "float32": "float16", "float64": "float32"}.get(dtype)
    if coarser:
        wrong = same_dtype_reference(q, k, v, dtype=coarser, causal=True)[0]
        assert max_error(wrong, attention_reference(q, k, v, causal=True)[0]) > bound.out


def test_the_rule_of_the_bound():
    assert bound_of("float16", 3e-4, 0.5) == pytest.approx(6e-4 + 1e-5)
    assert bound_of("float16", 3e-4, 20.0) == pytest.approx(6e-4 + 2e-4)
    assert bound_of("float16", 3e-4, 20.0, 5e-4) == pytest.approx(6e-4 + 5e-4)
    assert bound_of("float16", 3e-4, 20.0, 1e-4) == pytest.approx(6e-4 + 2e-4)


def test_max_error():
    assert max_error([1.0, -np.inf], [1.5, -np.inf]) == 0.5
    assert max_error([np.nan, 1.0], [np.nan, 1.0]) == np.inf
    assert max_error([np.inf], [-np.inf]) == np.inf
    assert max_error([-np.inf], [0.0]) == np.inf
    assert max_error(np.zeros((0, 3)), np.zeros((0, 3))) == 0.0
    with pytest.raises(ValueError, match=r"shapes differ: \(2,\) and \(3,\)"):
        max_error([1.0, 2.0], [1.0, 2.0, 3.0])


@pytest.mark.parametrize(
    ("options", "message"),
    [({"causal": "left"}, "causal is 'left'; accepted"), ({"layout": "sbhd"}, "layout is 'sbhd'")],
)
def test_wrong_options(qkv, options, message):
    with pytest.raises(ValueError, match=message):
        attention_reference(*qkv, **options)


LEAST = {t: float(np.finfo(t).min) for t in ("float16", "float32")} | {"bfloat16": -3.3895314e38}
SPELLINGS = [-1e4, -1e9, -1e10, -1e20, *LEAST.values()]


@pytest.mark.parametrize("form", ["natural", "base2"])
@pytest.mark.parametrize("value", SPELLINGS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_a_large_bias_on_some_keys_hides_them(qkv, dtype, value, form):
    q, k, v = (round_to(x.astype("f4"), dtype) for x in qkv)
    bias = np.zeros((1, 1, 5, 7))
    bias[..., 4:] = value
    exact = attention_reference(q, k, v, bias=bias)
    hidden = attention_reference(q, k, v, bias=np.where(bias < 0, -np.inf, 0.0))
    assert max_error(exact[0], hidden[0]) == 0.0
    plain = same_dtype_reference(q, k, v, dtype=dtype, bias=bias, form=form)
    unbiased = same_dtype_reference(q, k[:, :4], v[:, :4], dtype=dtype)
    assert max_error(plain[0], exact[0]) <= bound_of(dtype, max_error(unbiased[0], exact[0]), 1.0)


@pytest.mark.parametrize("value", SPELLINGS)
def test_a_large_bias_on_all_keys_leaves_a_mean(qkv, value):
    q, k, v = qkv
    bias = np.full((1, 1, 5, 7), value)
    exact, lse = attention_reference(q, k, v, bias=bias)
    np.testing.assert_allclose(lse, np.full_like(lse, value), rtol=1e-3)
    if abs(value) < 1e9:
        np.testing.assert_allclose(exact, attention_reference(q, k, v)[0], rtol=1e-7)
        return
    mean = np.broadcast_to(np.repeat(v.mean(axis=1, keepdims=True), 2, axis=2), exact.shape)
    rounded = attention_reference(q, k, v, bias=bias, score_dtype="float32")[0]
    np.testing.assert_allclose(rounded, mean, rtol=1e-13)
    for form in ("natural", "base2"):
        out, lse = same_dtype_reference(q, k, v, dtype="float32", bias=bias, form=form)
        np.testing.assert_allclose(out, mean, rtol=1e-5)
        np.testing.assert_allclose(lse, np.full_like(lse, value), rtol=1e-6)


def test_forms_differ_by_the_rounding_of_scores():
    q, k, v = (draw(1, 32, 1, 16, seed=s).astype("f4") for s in range(3))
    for size, least, most in ((0.0, 0.0, 1e-6), (3e4, 1e-5, 1e-2)):
        bias = np.full((1, 1, 32, 32), size)
        exact = attention_reference(q, k, v, bias=bias)[0]
        for form in ("natural", "base2"):
            out = same_dtype_reference(q, k, v, bias=bias, form=form)[0]
            assert least <= max_error(out, exact) < most


def test_bias_of_minus_infinity_hides_whatever_the_key_holds(qkv):
    q, k, v = qkv
    k = k.copy()
    k[:, 3:] = np.nan
    bias = np.zeros((5, 7))
    bias[:, 3:] = -np.inf
    want = attention_reference(q, k[:, :3], v[:, :3])
    for got in (
        attention_reference(q, k, v, bias=bias),
        same_dtype_reference(q, k, v, dtype="float64", bias=bias, form="base2"),
    ):
        np.testing.assert_allclose(got[0], want[0], rtol=1e-13)
        np.testing.assert_allclose(got[1], want[1], rtol=1e-13)
    out, lse = attention_reference(q, k, v, bias=np.full((5, 7), -np.inf))
    assert not out.any()
    assert np.isneginf(lse).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_bias_makes_its_row_nan(qkv, bad):
    bias = np.zeros((5, 7))
    bias[2, 6] = bad
    for dtype in ("float32", "float64"):
        out, lse = same_dtype_reference(*qkv, dtype=dtype, bias=bias)
        assert np.isnan(out).all(axis=(0, 2, 3)).tolist() == [False, False, True, False, False]
        assert np.isnan(lse).all(axis=(0, 1)).tolist() == [False, False, True, False, False]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_slopes_of_any_size(qkv, dtype):
    exact = attention_reference(*qkv, alibi_slopes=[2.0**64, -(2.0**64), 1.0, 0.0])
    got = attention_reference(*qkv, alibi_slopes=[np.inf, -3e38, 1.0, 0.0])
    np.testing.assert_array_equal(got[0], exact[0])
    plain = same_dtype_reference(*qkv, dtype=dtype, alibi_slopes=[np.inf, -np.inf, 1.0, np.nan])
    assert max_error(plain[0][:, :, :3], exact[0][:, :, :3]) < 1e-5
    assert np.isnan(plain[0][:, :, 3]).all()


@pytest.mark.parametrize("form", ["natural", "base2"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_sinks_of_any_size(qkv, dtype, form):
    sinks = np.array([3.4e38, np.inf, -np.inf, np.nan], np.float32)
    for mask in (None, np.zeros((5, 7), bool)):
        out, lse = same_dtype_reference(*qkv, dtype=dtype, sinks=sinks, mask=mask, form=form)
        assert not out[:, :, :2].any()
        np.testing.assert_allclose(lse[:, 0], np.full((2, 5), 3.4e38), rtol=1e-6)
        assert np.isposinf(lse[:, 1]).all()
        assert np.isnan(out[:, :, 3]).all()
        assert np.isnan(lse[:, 3]).all()
        without = same_dtype_reference(*qkv, dtype=dtype, mask=mask, form=form)
        np.testing.assert_array_equal(out[:, :, 2], without[0][:, :, 2])
        np.testing.assert_array_equal(lse[:, 2], without[1][:, 2])


def test_scores_of_both_signs_at_the_limits_stay_finite(qkv):
    q, k, v = qkv
    bias = np.full((5, 7), LEAST["float32"])
    bias[:, 3] = -LEAST["float32"]
    for form in ("natural", "base2"):
        out, lse = same_dtype_reference(
            q, k, v, dtype="float32", bias=bias, alibi_slopes=[-(2.0**64)] * 4, form=form
        )
        assert max_error(out, np.repeat(v[:, 3:4], 2, axis=2).repeat(5, axis=1)) < 1e-6
        np.testing.assert_allclose(lse, np.full((2, 4, 5), -LEAST["float32"]), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_the_largest_values_have_a_finite_mean(dtype):
    largest = {**LEAST, "float64": -1.7e308}[dtype]
    v = np.full((1, 3, 1, 2), -largest)
    out, _ = same_dtype_reference(draw(1, 2, 1, 4), draw(1, 3, 1, 4), v, dtype=dtype)
    np.testing.assert_allclose(out, np.full_like(out, -largest), rtol=1e-2)


def test_bias_range():
    q, k = draw(1, 3, 1, 4), draw(1, 4, 1, 4)
    bias = np.array([[-1e9] * 4, [-np.inf, 5.0, -7.0, 0.5], [-np.inf] * 4])
    mask = np.array([True, True, True, False])
    got = bias_range(q, k, bias=bias, mask=mask, softmax_scale=1.0)
    assert got.low.ravel().tolist() == [-1e9, -7.0, np.inf]
    assert got.high.ravel().tolist() == [-1e9, 5.0, -np.inf]
    assert got.least.ravel().tolist() == [1e9, 5.0, np.inf]
    turned = bias_range(q.swapaxes(1, 2), k.swapaxes(1, 2), bias=bias, causal=True, layout="bhsd")
    assert turned.low.ravel().tolist() == [-1e9, -7.0, np.inf]


@pytest.mark.parametrize("numbers", [(np.inf, 1.0), (np.nan, 1.0), (0.1, np.inf)])
def test_a_plain_computation_without_a_finite_error_bounds_nothing(numbers):
    with pytest.raises(ValueError, match="accepted: finite numbers"):
        bound_of("float32", *numbers)
