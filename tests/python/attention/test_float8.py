"""Inputs of 8 bits (float8_e4m3fn) with descales by head, on the CPU, against float64."""

from __future__ import annotations

import numpy as np
import pytest
from arrays import FRAMEWORKS, max_error, normal, poisoned
from command_line import refuses

import dlattn
from dlattn import UnsupportedError, flash_attn
from dlattn.cli import main
from dlattn.reference import (
    attention_reference,
    attention_varlen_reference,
    error_bound,
    round_to,
    to_float64,
)

ml_dtypes = pytest.importorskip("ml_dtypes")
FLOAT8 = "float8_e4m3fn"
E4M3 = ml_dtypes.float8_e4m3fn
BATCH, HEADS, HEADS_KV = 2, 4, 2
MASK = np.arange(70) % 3 > 0
OUT_DTYPES = ("bfloat16", "float16", "float32")


def inputs(seqlen_q=33, seqlen_k=70, head_dim=24, head_dim_v=16):
    """q, k and v, and by name the descales, by KV head as FlashAttention-3 takes them."""
    arrays = (
        normal(BATCH, seqlen_q, HEADS, head_dim, seed=1).astype(E4M3),
        normal(BATCH, seqlen_k, HEADS_KV, head_dim, seed=2).astype(E4M3),
        normal(BATCH, seqlen_k, HEADS_KV, head_dim_v, seed=3).astype(E4M3),
    )
    return arrays, {
        f"{name}_descale": np.exp2(normal(BATCH, HEADS_KV, seed=seed)).astype(np.float32)
        for name, seed in (("q", 4), ("k", 5), ("v", 6))
    }


def check(actual, arrays, *, dtype="bfloat16", **options):
    """`actual` is out or (out, lse), within the bound of a plain computation in out's dtype."""
    out, lse = actual if isinstance(actual, tuple) else (actual, None)
    expected = attention_reference(*arrays, **options)
    bound = error_bound(*arrays, dtype=dtype, expected=expected, **options)
    assert max_error(out, expected[0]) <= bound.out
    if lse is not None:
        assert max_error(lse, expected[1]) <= bound.lse


@pytest.mark.parametrize("out_dtype", [None, *OUT_DTYPES])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_framework(framework, out_dtype):
    library = FRAMEWORKS[framework]()
    arrays, descales = inputs()
    if framework == "torch":
        put = [library.array(x.astype(np.float32), FLOAT8) for x in arrays]
    else:
        put = [library.array(x, x.dtype) for x in arrays]
    options = {name: library.array(x) for name, x in descales.items()}
    out, lse = dlattn.attention(*put, **options, out_dtype=out_dtype, return_lse=True)
    assert library.is_array(out)
    assert library.dtype(out) == (out_dtype or "bfloat16")
    assert library.dtype(lse) == "float32"
    check((out, lse), arrays, dtype=out_dtype or "bfloat16", **descales)


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"causal": "top_left"},
        {"window": (9, 3)},
        {"softcap": 2.5},
        {"sinks": normal(HEADS, seed=9)},
        {"softmax_scale": 0.5},
        {"mask": normal(33, 70, seed=10) > -0.5},
        {"bias": normal(HEADS, 33, 70, seed=11).astype(np.float32), "causal": True},
        {"bias": normal(33, 70, seed=12).astype(np.float16), "softcap": 2.5},
        {"bias": normal(33, 70, seed=13).astype(ml_dtypes.bfloat16), "mask": MASK},
    ],
    ids=lambda options: " ".join(options),
)
def test_features(options):
    arrays, descales = inputs()
    actual = dlattn.attention(*arrays, **descales, **options, return_lse=True)
    check(actual, arrays, **descales, **options)


def test_without_descales():
    arrays, _ = inputs()
    check(dlattn.attention(*arrays, return_lse=True), arrays)


@pytest.mark.parametrize(
    "shape", [(), (1,), (HEADS_KV,), (HEADS,), (BATCH, 1), (1, HEADS_KV), (BATCH, HEADS)], ids=str
)
def test_shapes_of_descales(shape):
    arrays, _ = inputs()
    descales = {"q_descale": np.asarray(np.exp2(normal(*shape, seed=7)), np.float32)}
    if HEADS not in shape:
        descales["k_descale"] = np.asarray(np.exp2(normal(*shape, seed=8)), np.float32)
        descales["v_descale"] = descales["k_descale"]
    check(dlattn.attention(*arrays, **descales), arrays, **descales)


def test_strided_descales():
    arrays, descales = inputs()
    wide = {name: np.repeat(x, 3, axis=1)[:, ::3] for name, x in descales.items()}
    expected = dlattn.attention(*arrays, **descales)
    assert np.array_equal(dlattn.attention(*arrays, **wide), expected)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_views_and_layouts(layout):
    arrays, descales = inputs()
    views = [np.repeat(x, 2, axis=1)[:, ::2] for x in arrays]
    if layout == "bhsd":
        views = [x.swapaxes(1, 2) for x in views]
    out = dlattn.attention(*views, **descales, layout=layout)
    check(out.swapaxes(1, 2) if layout == "bhsd" else out, arrays, **descales)


@pytest.mark.parametrize("dtype", OUT_DTYPES)
def test_out(dtype):
    arrays, descales = inputs()
    out = poisoned(BATCH, 33, HEADS, 16, dtype=dtype)
    assert dlattn.attention(*arrays, **descales, out=out) is out
    check(out, arrays, dtype=dtype, **descales)
    assert dlattn.attention(*arrays, **descales, out=out, out_dtype=dtype) is out


def test_varlen():
    q, k, v = (x.reshape(-1, *x.shape[2:]) for x in inputs()[0])
    _, descales = inputs()
    cu_q, cu_k = (np.array(x, np.int32) for x in ([0, 50, 66], [0, 9, 140]))
    options = {"causal": True, **descales}
    out, lse = dlattn.attention_varlen(q, k, v, cu_q, cu_k, 50, 131, **options, return_lse=True)
    expected = attention_varlen_reference(q, k, v, cu_q, cu_k, **options)
    assert out.dtype == "bfloat16"
    rounding = np.spacing(round_to(np.abs(expected[0]).astype(np.float32), "bfloat16")) * 2.0**16
    assert np.all(np.abs(to_float64(out) - expected[0]) <= rounding + 1e-5)
    assert max_error(lse, expected[1]) <= 1e-5
    face = flash_attn.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 50, 131, causal=True, **descales)
    assert np.array_equal(face.view(np.uint16), out.view(np.uint16))


def test_flash_attn_face():
    arrays, descales = inputs(head_dim_v=24)
    out = flash_attn.flash_attn_func(*arrays, causal=True, **descales)
    expected = dlattn.attention(*arrays, causal=True, **descales)
    assert np.array_equal(out.view(np.uint16), expected.view(np.uint16))


def test_supported_and_plan():
    arrays, descales = inputs()
    assert dlattn.supported(*arrays, **descales)
    assert dlattn.plan(*arrays, **descales, out_dtype="float16").dtype == FLOAT8
    assert not dlattn.supported(*arrays, **descales, out_dtype="float64")
    assert dlattn.supported(*arrays, mask=np.ones((33, 70), bool))
    refused = dlattn.supported(*arrays, alibi_slopes=np.ones(4, np.float32))
    assert refused.reasons == ("alibi_slopes is given with q of float8_e4m3fn; accepted: none",)


def test_rows_that_see_nothing():
    arrays, descales = inputs(seqlen_q=40, seqlen_k=12)
    descales["v_descale"][:] = np.nan
    out, lse = dlattn.attention(*arrays, causal=True, **descales, return_lse=True)
    assert np.all(to_float64(out)[:, :28] == 0.0)
    assert np.all(np.isneginf(lse[..., :28]))


@pytest.mark.parametrize("name", ["q_descale", "k_descale", "v_descale"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0, 0.0, 1e-40])
def test_rows_that_a_bias_hides_are_0_whatever_descales_are(name, value):
    """On the CPU: kernels may have NaN there where q_descale or k_descale is NaN or negative."""
    arrays, descales = inputs()
    descales[name][:] = value
    bias = np.zeros((1, 1, arrays[0].shape[1], arrays[1].shape[1]), np.float32)
    bias[:, :, ::2] = -np.inf
    out, lse = dlattn.attention(*arrays, bias=bias, **descales, return_lse=True)
    assert np.all(to_float64(out)[:, ::2] == 0.0) and np.all(np.isneginf(lse[..., ::2]))


def test_largest_and_nan():
    arrays, _ = inputs()
    v = arrays[2].copy()
    v[:] = E4M3(448)
    out = dlattn.attention(arrays[0], arrays[1], v, out_dtype="float32")
    assert np.all(np.abs(to_float64(out) - 448.0) < 1e-3)
    v[0, 3, 1, 2] = E4M3(np.nan)
    out = to_float64(dlattn.attention(arrays[0], arrays[1], v))
    assert np.isnan(out[0, :, 2:, 2]).all()
    assert np.isfinite(out[0, :, :2]).all()


@pytest.mark.parametrize("name", ["q_descale", "k_descale"])
@pytest.mark.parametrize("value", [-1.0, np.nan])
def test_descales_that_are_no_factors(name, value):
    arrays, descales = inputs()
    descales[name][1, 0] = value
    out, lse = dlattn.attention(*arrays, **descales, return_lse=True)
    assert np.isnan(to_float64(out)[1, :, :2]).all()
    assert np.isnan(lse[1, :2]).all()
    assert np.isfinite(to_float64(out)[1, :, 2:]).all()
    assert np.isfinite(to_float64(out)[0]).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"out_dtype": "float64"}, 'out_dtype is "float64"; accepted: "bfloat16", "float16" or'),
        (
            {"out": np.zeros((BATCH, 33, HEADS, 16))},
            "out: dtype is float64; accepted: bfloat16, float16, float32, as q is of float8_e4m3fn",
        ),
        (
            {"out": np.zeros((BATCH, 33, HEADS, 16), np.float32), "out_dtype": "float16"},
            "out: dtype is float32; accepted: float16",
        ),
        ({"q_descale": np.ones(2)}, "q_descale: dtype is float64; accepted: float32"),
        (
            {"q_descale": np.ones((3, 2), np.float32)},
            r"q_descale: shape is \(3, 2\); accepted: one that broadcasts to "
            r"\(batch, num_heads_kv\) = \(2, 2\) or \(batch, num_heads\) = \(2, 4\)",
        ),
        (
            {"k_descale": np.ones(4, np.float32)},
            r"k_descale: shape is \(4,\); accepted: one that broadcasts to "
            r"\(batch, num_heads_kv\) = \(2, 2\)$",
        ),
        (
            {"v_descale": np.ones((1, 1, 2), np.float32)},
            r"v_descale: shape is \(1, 1, 2\); accepted: one that broadcasts to",
        ),
        (
            {"bias": np.zeros((33, 70))},
            "bias: dtype is float64; accepted: float16, bfloat16 or float32 with q of float8",
        ),
        ({"alibi_slopes": np.ones(4, np.float32)}, "alibi_slopes is given with q of float8_e4m3fn"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, dict) else "",
)
def test_refusals(changes, message):
    arrays, descales = inputs()
    with pytest.raises(UnsupportedError, match=message):
        dlattn.attention(*arrays, **{**descales, **changes})


def test_rounding_of_the_reference():
    values = np.concatenate([np.linspace(-460, 460, 4001), 2.0 ** np.arange(-14.0, 9)])
    rounded = round_to(values, FLOAT8)
    with np.errstate(invalid="ignore"):
        expected = np.clip(values, -448, 448).astype(E4M3).astype(np.float64)
    assert np.array_equal(rounded, expected)


def test_files(tmp_path, capsys):
    safetensors = pytest.importorskip("safetensors.numpy")
    arrays, descales = inputs()
    names = dict(zip("qkv", arrays, strict=True))
    safetensors.save_file({**names, **descales}, tmp_path / "in.safetensors")
    command = ["run", "-o", str(tmp_path / "out.npy"), "--out-dtype", "float32"]
    for name in (*names, *descales):
        command += [f"--{name.replace('_', '-')}", f"{tmp_path / 'in.safetensors'}:{name}"]
    assert main(command) == 0
    check(np.load(tmp_path / "out.npy"), arrays, dtype="float32", **descales)


def test_a_file_that_does_not_name_its_type(tmp_path, capsys):
    np.save(tmp_path / "q.npy", inputs()[0][0])
    words = [x for name in "qkv" for x in (f"--{name}", tmp_path / "q.npy")]
    message = refuses(capsys, "run", *words, "-o", tmp_path / "out.npy")
    assert "of 8 bits, whose type a .npy file does not tell; accepted: a .safetensors" in message
