"""dlattn's functions on the CPU, every option and framework, against float64."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from arrays import assert_attention, max_error, normal, poisoned, qkv, to_float64

import dlattn
from dlattn.flash_attn import flash_attn_func
from dlattn.reference import (
    attention_reference,
    attention_varlen_reference,
    error_bound,
    merge_states_reference,
)

SCORE_OPTIONS = {
    "causal": {"causal": True},
    "bottom_right": {"causal": "bottom_right"},
    "top_left": {"causal": "top_left"},
    "scale": {"softmax_scale": 0.3},
    "integer scale": {"softmax_scale": 1},
    "window left": {"window": (2, None)},
    "window right": {"window": (None, 1)},
    "window both": {"window": [1, 0]},
    "window and causal": {"window": (2, None), "causal": "top_left"},
    "softcap": {"softcap": 1.5},
    "bias": {"bias": normal(2, 4, 5, 7, seed=9)},
    "bias, broadcast": {"bias": normal(4, 1, 7, seed=9)},
    "bias, one row": {"bias": normal(7, seed=9)},
    "mask": {"mask": normal(2, 4, 5, 7, seed=8) > 0},
    "mask, broadcast": {"mask": normal(2, 1, 1, 7, seed=8) > 0},
    "mask, all hidden": {"mask": np.zeros((1, 1), dtype=bool)},
    "alibi": {"alibi_slopes": np.abs(normal(4, seed=7))},
    "alibi, per batch": {"alibi_slopes": np.abs(normal(2, 4, seed=7))},
    "alibi, top_left": {"alibi_slopes": np.abs(normal(4, seed=7)), "causal": "top_left"},
    "sinks": {"sinks": normal(4, seed=6)},
    "sinks, all hidden": {"sinks": normal(4, seed=6), "mask": np.zeros((5, 7), dtype=bool)},
    "everything": {
        "causal": True,
        "window": (4, None),
        "softcap": 2.0,
        "bias": normal(2, 1, 5, 7, seed=9),
        "mask": normal(5, 7, seed=8) > -1,
        "alibi_slopes": np.abs(normal(4, seed=7)),
        "sinks": normal(4, seed=6),
        "softmax_scale": 0.5,
    },
}


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_every_framework_and_dtype(framework, dtype, causal, layout):
    if dtype not in framework.dtypes:
        pytest.skip(f"{framework.name} has no {dtype}")
    arrays = [framework.array(x, dtype) for x in qkv(head_dim_v=6, layout=layout)]
    out, lse = dlattn.attention(*arrays, causal=causal, layout=layout, return_lse=True)
    assert framework.is_array(out) and framework.is_array(lse)
    assert framework.dtype(out) == dtype and framework.dtype(lse) == "float32"
    assert tuple(out.shape) == ((2, 5, 4, 6) if layout == "bshd" else (2, 4, 5, 6))
    assert tuple(lse.shape) == (2, 4, 5)
    assert_attention((out, lse), *arrays, causal=causal, layout=layout)
    alone = dlattn.attention(*arrays, causal=causal, layout=layout)
    np.testing.assert_array_equal(to_float64(alone), to_float64(out))


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("name", SCORE_OPTIONS)
def test_score_options(name, dtype, layout):
    arrays = qkv(layout=layout, dtype=dtype)
    options = {"layout": layout, **SCORE_OPTIONS[name]}
    assert_attention(dlattn.attention(*arrays, return_lse=True, **options), *arrays, **options)


@pytest.mark.parametrize("name", SCORE_OPTIONS)
def test_score_options_of_other_frameworks(framework, name):
    arrays = qkv()
    options = SCORE_OPTIONS[name]
    theirs = {
        key: framework.array(value) if isinstance(value, np.ndarray) else value
        for key, value in options.items()
    }
    out = dlattn.attention(*map(framework.array, arrays), return_lse=True, **theirs)
    assert_attention(out, *arrays, **options)


def test_bias_of_the_dtype_of_q():
    q, k, v = qkv(dtype="float16")
    bias = normal(4, 5, 7, seed=9, dtype="float16")
    assert_attention(dlattn.attention(q, k, v, bias=bias), q, k, v, bias=bias)


@pytest.mark.parametrize("num_heads_kv", [1, 2, 4])
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"), [(1, 1), (1, 256), (3, 17), (64, 64), (256, 5)]
)
def test_heads_and_head_dims(num_heads_kv, head_dim, head_dim_v):
    arrays = qkv(1, 9, 70, 4, num_heads_kv, head_dim, head_dim_v)
    assert_attention(dlattn.attention(*arrays, causal=True), *arrays, causal=True)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 1), (1, 300), (300, 1), (65, 129)])
@pytest.mark.parametrize("causal", [False, True, "top_left"])
def test_sequence_lengths(seqlen_q, seqlen_k, causal):
    arrays = qkv(1, seqlen_q, seqlen_k, 2, 1, 16)
    out = dlattn.attention(*arrays, causal=causal, return_lse=True)
    assert_attention(out, *arrays, causal=causal)


def test_queries_before_the_first_key_give_zero():
    out, lse = dlattn.attention(*qkv(1, 5, 2), causal=True, return_lse=True)
    assert (out[:, :3] == 0).all() and np.isneginf(lse[:, :, :3]).all()
    assert (out[:, 3:] != 0).all() and np.isfinite(lse[:, :, 3:]).all()


@pytest.mark.parametrize("empty", ["batch", "seqlen_q", "seqlen_k"])
def test_empty_tensors(framework, empty):
    sizes = {"batch": 2, "seqlen_q": 5, "seqlen_k": 7, empty: 0}
    arrays = [framework.array(x) for x in qkv(**sizes)]
    out, lse = dlattn.attention(*arrays, return_lse=True)
    assert tuple(out.shape) == (sizes["batch"], sizes["seqlen_q"], 4, 8)
    assert tuple(lse.shape) == (sizes["batch"], 4, sizes["seqlen_q"])
    assert (to_float64(out) == 0).all() and np.isneginf(to_float64(lse)).all()


def test_out(framework):
    if framework.name == "jax":
        pytest.skip("JAX arrays are immutable")
    arrays = qkv(head_dim_v=6)
    out = framework.array(poisoned(2, 5, 4, 6))
    got = dlattn.attention(*map(framework.array, arrays), out=out)
    assert got is out
    assert_attention(out, *arrays)
    got, lse = dlattn.attention(*map(framework.array, arrays), out=out, return_lse=True)
    assert got is out
    assert_attention((out, lse), *arrays)


def test_out_of_any_strides():
    arrays = qkv()
    whole = poisoned(2, 4, 10, 16)
    out = whole[:, :, ::2, 3:11].transpose(0, 2, 1, 3)
    dlattn.attention(*arrays, out=out)
    assert_attention(out, *arrays)
    written = np.isfinite(whole)
    assert written[:, :, ::2, 3:11].all() and written.sum() == out.size


def test_arguments_by_keyword():
    q, k, v = qkv()
    np.testing.assert_array_equal(dlattn.attention(v=v, q=q, k=k), dlattn.attention(q, k, v))


VARLEN_OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "top_left": {"causal": "top_left", "softmax_scale": 0.2},
    "window": {"window": (1, 1)},
    "softcap": {"softcap": 1.0},
    "bias": {"bias": normal(3, 4, 6, 9, seed=9)},
    "mask": {"mask": normal(3, 1, 6, 9, seed=8) > 0},
    "alibi": {"alibi_slopes": np.abs(normal(3, 4, seed=7))},
    "sinks": {"sinks": normal(4, seed=6)},
    "seqused_k": {"seqused_k": np.array([2, 0, 9], dtype=np.int32), "causal": True},
}


@pytest.mark.parametrize("name", VARLEN_OPTIONS)
def test_varlen(framework, name):
    q, k, v = normal(10, 4, 8, seed=1), normal(14, 2, 8, seed=2), normal(14, 2, 6, seed=3)
    cu_q = np.array([0, 3, 4, 10], dtype=np.int32)
    cu_k = np.array([0, 5, 5, 14], dtype=np.int32)
    options = VARLEN_OPTIONS[name]

    def theirs(x):
        return framework.array(x) if isinstance(x, np.ndarray) else x

    out, lse = dlattn.attention_varlen(
        *map(theirs, (q, k, v, cu_q, cu_k)),
        6,
        9,
        return_lse=True,
        **{key: theirs(value) for key, value in options.items()},
    )
    assert framework.is_array(out) and tuple(out.shape) == (10, 4, 6)
    assert framework.is_array(lse) and tuple(lse.shape) == (4, 10)
    expected = attention_varlen_reference(q, k, v, cu_q, cu_k, 6, 9, **options)
    assert max_error(out, expected[0]) <= 2e-5
    assert max_error(lse, expected[1]) <= 2e-5


def test_a_slice_of_a_pack():
    q, k, v = normal(30, 4, 8, seed=1), normal(40, 2, 8, seed=2), normal(40, 2, 6, seed=3)
    cu_q = np.array([0, 7, 10, 11, 21, 30], dtype=np.int32)
    cu_k = np.array([0, 9, 20, 20, 32, 40], dtype=np.int32)
    whole, whole_lse = dlattn.attention_varlen(q, k, v, cu_q, cu_k, 10, 12, return_lse=True)
    out = np.full((30, 4, 6), np.nan, np.float32)
    _, lse = dlattn.attention_varlen(
        q, k, v, cu_q[1:4], cu_k[1:4], 10, 12, out=out, return_lse=True
    )
    np.testing.assert_array_equal(out[7:11], whole[7:11])
    np.testing.assert_array_equal(lse[:, 7:11], whole_lse[:, 7:11])
    assert np.isnan(out[:7]).all()
    assert np.isnan(out[11:]).all()


def test_varlen_with_heads_before_tokens():
    q, k, v = normal(10, 4, 8, seed=1), normal(14, 2, 8, seed=2), normal(14, 2, 8, seed=3)
    cu_q = np.array([0, 3, 10], dtype=np.int32)
    cu_k = np.array([0, 5, 14], dtype=np.int32)
    want = dlattn.attention_varlen(q, k, v, cu_q, cu_k, 7, 9)
    by_head = [np.ascontiguousarray(x.transpose(1, 0, 2)) for x in (q, k, v)]
    got = dlattn.attention_varlen(*by_head, cu_q, cu_k, 7, 9, layout="bhsd")
    np.testing.assert_array_equal(got.transpose(1, 0, 2), want)


def test_varlen_of_no_tokens():
    q, k, v = normal(0, 4, 8), normal(0, 2, 8), normal(0, 2, 8)
    cu = np.zeros(3, dtype=np.int32)
    out, lse = dlattn.attention_varlen(q, k, v, cu, cu, 0, 0, return_lse=True)
    assert out.shape == (0, 4, 8) and lse.shape == (4, 0)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_merge_states(framework, layout, dtype, stacked):
    parts = 3
    outs = [normal(2, 5, 4, 8, seed=n, dtype=dtype) for n in range(parts)]
    lses = [normal(2, 4, 5, seed=n) for n in range(parts)]
    lses[1][0, 2], lses[0][1, 1] = -np.inf, np.inf
    outs[1][0, :, 2] = outs[0][1, :, 1] = np.nan  # contributes nothing, whatever it holds
    if layout == "bhsd":
        outs = [np.ascontiguousarray(x.transpose(0, 2, 1, 3)) for x in outs]
    expected = merge_states_reference(
        [np.nan_to_num(to_float64(x)) for x in outs], lses, layout=layout
    )
    if stacked:
        theirs = framework.array(np.stack(outs), dtype), framework.array(np.stack(lses))
    else:
        theirs = [framework.array(x, dtype) for x in outs], [framework.array(x) for x in lses]
    out, lse = dlattn.merge_states(*theirs, layout=layout)
    assert framework.is_array(out) and framework.dtype(out) == dtype
    assert framework.is_array(lse) and framework.dtype(lse) == "float32"
    assert max_error(out, expected[0]) <= (4e-3 if dtype == "float16" else 2e-6)
    assert max_error(lse, expected[1]) <= 2e-6


def test_merging_partial_attention_is_attention_over_all_keys():
    q, k, v = qkv(seqlen_k=12)
    parts = [
        dlattn.attention(q, k[:, keys], v[:, keys], return_lse=True)
        for keys in (slice(0, 3), slice(3, 4), slice(4, 12))
    ]
    outs, lses = zip(*parts, strict=True)
    merged = dlattn.merge_states(outs, lses)
    assert_attention(merged, q, k, v)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("slope", [-1000.0, -300.3])
def test_the_furthest_key_has_the_row(dtype, slope):
    """With scores up to 10^6 out is one key's value, to the last bit, and lse as good."""
    options = {"alibi_slopes": np.full(4, slope, np.float32)}
    for seqlen_q, seqlen_k in ((17, 20), (40, 150), (3, 1100)):
        for causal in (False, "top_left", True):
            q, k, v = qkv(seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=24, dtype=dtype)
            out, lse = dlattn.attention(q, k, v, causal=causal, return_lse=True, **options)
            at = np.arange(seqlen_q) + (0 if causal == "top_left" else seqlen_k - seqlen_q)
            last = at if causal else seqlen_k - 1
            furthest = np.where(at > last - at, 0, last)  # never as far as the other end
            np.testing.assert_array_equal(out, np.repeat(v[:, furthest], 2, axis=2))
            exact = attention_reference(q, k, v, causal=causal, **options)[1]
            large = np.abs(exact) > 1e3
            ulps = np.abs(lse - exact) / np.spacing(np.abs(exact).astype(np.float32))
            assert (ulps[large] <= 2.0).all()


def test_merge_with_what_flash_attention_returns_without_keys():
    q, k, v = qkv(seqlen_k=5)
    nothing, nothing_lse, _ = flash_attn_func(q, k[:, :0], v[:, :0], return_attn_probs=True)
    assert np.all(np.isposinf(nothing_lse))
    out, lse = dlattn.attention(q, k, v, return_lse=True)
    for parts in ([(nothing, nothing_lse), (out, lse)], [(out, lse), (nothing, nothing_lse)]):
        merged_out, merged_lse = dlattn.merge_states(*zip(*parts, strict=True))
        np.testing.assert_array_equal(merged_out, out)
        np.testing.assert_array_equal(merged_lse, lse)
    none_out, none_lse = dlattn.merge_states([nothing] * 2, [nothing_lse] * 2)
    assert not none_out.any() and np.all(np.isneginf(none_lse))
    _, of_nan = dlattn.merge_states([out, out], [lse, np.full_like(lse, np.nan)])
    assert np.all(np.isnan(of_nan))


def test_merge_of_one_state_is_that_state():
    out, lse = dlattn.attention(*qkv(), return_lse=True)
    merged_out, merged_lse = dlattn.merge_states([out], [lse])
    np.testing.assert_array_equal(merged_out, out)
    np.testing.assert_array_equal(merged_lse, lse)


def test_supported():
    arrays = qkv()
    yes = dlattn.supported(*arrays)
    assert yes and yes.ok and yes.reasons == () and str(yes) == "supported"
    no = dlattn.supported(*arrays, kernel="scalar")
    assert not no and not no.ok and "scalar" in str(no)
    assert any("kernel" in reason or "scalar" in reason for reason in no.reasons)
    wrong = dlattn.supported(arrays[0], arrays[1], arrays[2][:, :3])
    assert not wrong and "v: seqlen is 3" in wrong.reasons[0]
    assert not dlattn.supported(*arrays, softmax_scale=float("nan"))


def test_supported_of_varlen():
    q, k, v = normal(10, 4, 8, seed=1), normal(14, 2, 8, seed=2), normal(14, 2, 8, seed=3)
    cu_q, cu_k = (np.array([0, 3, n], dtype=np.int32) for n in (10, 14))
    assert dlattn.supported(q, k, v, cu_q, cu_k, 7, 11)
    assert not dlattn.supported(q, k, v, cu_q, cu_k, 6, 11)
    assert dlattn.plan(q, k, v, cu_q, cu_k, 7, 11).kernel == "cpu"


def test_supported_raises_for_what_is_no_tensor():
    with pytest.raises(TypeError, match="k is of type str"):
        dlattn.supported(qkv()[0], "k", "v")


def test_plan(framework):
    arrays = [framework.array(x) for x in qkv()]
    plan = dlattn.plan(*arrays, causal=True)
    assert plan.kernel == "cpu" and plan.dtype == "float32" and plan.device == "cpu"
    assert plan.num_threads >= 1 and plan.grid >= 1 and plan.block_m >= 1 and plan.isa
    assert plan.num_splits >= 1 and plan.workspace_bytes >= 0 and plan.passed_over == ()
    assert plan.num_launches == 1
    assert plan.launches == (f"forward by cpu, {plan.grid} tasks",)
    assert "kernel: cpu" in str(plan) and plan.isa in str(plan)


def test_plan_raises_as_the_call_would():
    with pytest.raises(dlattn.UnsupportedError, match="scalar"):
        dlattn.plan(*qkv(), kernel="scalar")


def test_info():
    info = dlattn.info()
    assert info.version == dlattn.__version__ and "cpu" in info.kernels
    assert info.cpu_threads >= 1 and info.cpu_isa in ("avx512", "avx2", "portable")
    assert info.cuda == bool(info.archs) == bool(info.cuda_version)
    assert ("scalar" in info.kernels) == info.cuda
    assert ("sm90" in info.kernels) == any(arch.startswith("90a") for arch in info.archs)
    assert bool(info.archs_reason) == info.cuda
    assert not set(info.kernels) & set(info.missing_kernels)
    assert ("sm90" in info.missing_kernels) == (info.cuda and "sm90" not in info.kernels)
    assert info.gpu == any(device.served for device in info.devices)
    assert bool(info.devices) != bool(info.device_status)
    text = str(info)
    assert info.version in text and "kernels: cpu" in text and info.cpu_isa in text


def test_info_of_a_gpu_that_the_build_does_not_serve():
    device = dlattn.DeviceInfo(1, "Old GPU", (7, 5), 40, 65536, 4 << 20, "needs 8.0")
    assert not device.served and str(device).endswith("7.5, not served: needs 8.0")


def test_info_tells_which_code_serves_a_gpu():
    device = dlattn.DeviceInfo(0, "GPU", (9, 0), 132, 227 << 10, 50 << 20, "", (9, 0))
    assert device.served and str(device).endswith("9.0, served by machine code for 9.0")
    other = dataclasses.replace(device, code=(8, 0), ptx=True)
    assert str(other).endswith("9.0, served by PTX, which the driver compiles, for 8.0")
    beside = dataclasses.replace(other, arch_specific_code=True)
    assert str(beside) == f"{other}, and by machine code of the kernels for 9.0 alone"
    assert "alone" not in str(dataclasses.replace(device, arch_specific_code=True))


def test_info_of_a_build_for_one_gpu():
    info = dataclasses.replace(
        dlattn.info(),
        cuda=True,
        cuda_version="13.0",
        archs=("89-real", "80-virtual"),
        archs_reason="GPU found: 8.9",
        kernels=("cpu", "wmma"),
        missing_kernels=("sm90",),
    )
    lines = str(info).splitlines()
    assert lines[1] == ("build: CUDA 13.0, machine code for 8.9; PTX for 8.0 (GPU found: 8.9)")
    archs = ("89-real", "120", "80-virtual", "89-virtual", "90a-real")
    assert "machine code for 8.9, 12.0, 9.0a; PTX for 12.0, 8.0, 8.9 (" in str(
        dataclasses.replace(info, archs=archs)
    )
    assert "machine code for none; PTX for 8.0 (" in str(
        dataclasses.replace(info, archs=("80-virtual",))
    )
    assert lines[2] == "kernels: cpu, wmma"
    assert lines[3] == "not in this build: sm90 (DLATTN_ARCHS=all pip install . has all)"
    assert "not in this build" not in str(dataclasses.replace(info, missing_kernels=()))


def test_result_is_the_same_each_time():
    arrays = qkv(2, 70, 90, 4, 2, 32)
    first = dlattn.attention(*arrays, causal=True)
    for _ in range(5):
        np.testing.assert_array_equal(dlattn.attention(*arrays, causal=True), first)


def test_error_bound_notices_a_wrong_result():
    """The comparison that these tests rest on tells a causal result from a full one."""
    arrays = qkv()
    expected = attention_reference(*arrays)
    bound = error_bound(*arrays, expected=expected)
    assert max_error(dlattn.attention(*arrays, causal=True), expected[0]) > 100 * bound.out
