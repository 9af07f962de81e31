"""dlattn.sageattention: SageAttention's signatures, with the meaning that its source gives them."""

from __future__ import annotations

import inspect
import math
from typing import Any

import numpy as np
import pytest
from arrays import FRAMEWORKS, Framework, normal, to_float64

import dlattn
from dlattn import UnsupportedError, sageattention

# Names and defaults as in SageAttention 2.2; `sageattn` hides smooth_k in its keyword arguments.
SIGNATURES: dict[str, dict[str, Any]] = {
    "sageattn": {
        "tensor_layout": "HND",
        "is_causal": False,
        "sm_scale": None,
        "return_lse": False,
        "smooth_k": True,
    },
    "sageattn_varlen": {"is_causal": False, "sm_scale": None, "smooth_k": True},
    "sageattn_qk_int8_pv_fp8_cuda": {
        "tensor_layout": "HND",
        "is_causal": False,
        "qk_quant_gran": "per_thread",
        "sm_scale": None,
        "pv_accum_dtype": "fp32+fp16",
        "smooth_k": True,
        "smooth_v": False,
        "return_lse": False,
    },
    "sageattn_qk_int8_pv_fp16_cuda": {
        "tensor_layout": "HND",
        "is_causal": False,
        "qk_quant_gran": "per_thread",
        "sm_scale": None,
        "pv_accum_dtype": "fp32",
        "smooth_k": True,
        "smooth_v": False,
        "return_lse": False,
    },
    "sageattn_qk_int8_pv_fp8_cuda_sm90": {
        "tensor_layout": "HND",
        "is_causal": False,
        "qk_quant_gran": "per_thread",
        "sm_scale": None,
        "pv_accum_dtype": "fp32+fp32",
        "smooth_k": True,
        "return_lse": False,
    },
}
SEQUENCES = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
FIXED_LENGTH = [name for name in SIGNATURES if name != "sageattn_varlen"]

# The relative L2 error on noise, by simulation 0.036 with probabilities rounded, which they are on
# a GPU.
NOISE = 0.045
FEW_KEYS = 1.5 * NOISE  # rows of few keys, as causal ones are, have none to average errors with
LSE = 0.05

every_framework = pytest.mark.parametrize("library", ["numpy", "torch"])
every_layout = pytest.mark.parametrize("tensor_layout", ["HND", "NHD"])


def of(library: str) -> Framework:
    return FRAMEWORKS[library]()


def problem(
    library: str = "numpy",
    *,
    tensor_layout: str = "HND",
    dtype: str = "float16",
    seqlen_q: int = 130,
    seqlen_k: int = 130,
    num_heads: int = 4,
    num_heads_kv: int = 2,
    head_dim: int = 64,
) -> list[Any]:
    """q, k and v; k has a mean, which all its keys share."""
    shapes = [(num_heads, seqlen_q), (num_heads_kv, seqlen_k), (num_heads_kv, seqlen_k)]
    arrays = [normal(2, *shape, head_dim, seed=i) for i, shape in enumerate(shapes)]
    arrays[1] = arrays[1] + 3 * normal(1, num_heads_kv, 1, head_dim, seed=9)
    if tensor_layout == "NHD":
        arrays = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in arrays]
    return [of(library).array(x, dtype) for x in arrays]


def exact(
    q: Any, k: Any, v: Any, *, tensor_layout: str = "HND", causal: bool = False, scale: Any = None
) -> tuple[np.ndarray, np.ndarray]:
    """Attention in float64, written down from SageAttention's definition: out and lse."""
    q, k, v = (to_float64(x) for x in (q, k, v))
    if tensor_layout == "NHD":
        q, k, v = (x.swapaxes(-2, -3) for x in (q, k, v))
    group = q.shape[-3] // k.shape[-3]
    k, v = np.repeat(k, group, -3), np.repeat(v, group, -3)
    scores = q @ k.swapaxes(-1, -2) * (scale or 1 / math.sqrt(q.shape[-1]))
    if causal:
        keys, rows = np.arange(k.shape[-2]), np.arange(q.shape[-2])
        scores = np.where(keys[None, :] <= rows[:, None], scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    out = weights / total @ v
    return out if tensor_layout == "HND" else out.swapaxes(-2, -3), (np.log(total) + top)[..., 0]


def relative(out: Any, expected: np.ndarray) -> float:
    assert tuple(out.shape) == expected.shape
    return float(np.linalg.norm(to_float64(out) - expected) / np.linalg.norm(expected))


def rms(a: Any, b: np.ndarray) -> float:
    assert tuple(a.shape) == b.shape
    return float(np.sqrt(np.mean((to_float64(a) - b) ** 2)))


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name: str) -> None:
    parameters = dict(inspect.signature(getattr(sageattention, name)).parameters)
    assert parameters.pop("kwargs").kind is inspect.Parameter.VAR_KEYWORD
    keyword_only = {"smooth_k"} if name == "sageattn" else set()
    for parameter in parameters.values():
        alone = parameter.kind is parameter.KEYWORD_ONLY
        assert alone == (parameter.name in keyword_only), parameter
    required = ("q", "k", "v", *(SEQUENCES if name == "sageattn_varlen" else ()))
    assert list(parameters) == [*required, *SIGNATURES[name]]
    defaults = {p.name: p.default for p in parameters.values() if p.default is not p.empty}
    assert defaults == SIGNATURES[name]
    assert name in sageattention.__all__


@every_framework
@every_layout
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_against_float64(library: str, tensor_layout: str, dtype: str, is_causal: bool) -> None:
    arrays = problem(library, tensor_layout=tensor_layout, dtype=dtype)
    out, lse = sageattention.sageattn(*arrays, tensor_layout, is_causal, None, True)
    want, want_lse = exact(*arrays, tensor_layout=tensor_layout, causal=is_causal)
    assert of(library).is_array(out) and of(library).is_array(lse)
    assert of(library).dtype(out) == dtype and of(library).dtype(lse) == "float32"
    assert 1e-3 < relative(out, want) < (FEW_KEYS if is_causal else NOISE)
    assert rms(lse, want_lse) < LSE
    assert np.abs(want_lse).max() > 5, "k has a mean that lse must have"
    alone = sageattention.sageattn(*arrays, tensor_layout=tensor_layout, is_causal=is_causal)
    np.testing.assert_array_equal(to_float64(alone), to_float64(out))


@pytest.mark.parametrize(("num_heads", "num_heads_kv"), [(1, 1), (4, 4), (6, 2), (5, 1)])
def test_heads_share_keys(num_heads: int, num_heads_kv: int) -> None:
    arrays = problem(num_heads=num_heads, num_heads_kv=num_heads_kv)
    out = sageattention.sageattn(*arrays)
    assert relative(out, exact(*arrays)[0]) < NOISE


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(40, 100), (100, 40), (1, 70), (70, 1)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_lengths_that_differ(seqlen_q: int, seqlen_k: int, is_causal: bool) -> None:
    """Causal positions count from the first, where `attention` counts from the last."""
    arrays = problem(seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    out, lse = sageattention.sageattn(*arrays, is_causal=is_causal, return_lse=True)
    want, want_lse = exact(*arrays, causal=is_causal)
    assert relative(out, want) < FEW_KEYS
    assert rms(lse, want_lse) < LSE


@pytest.mark.parametrize("head_dim", [40, 64, 72, 128])
def test_head_dims_and_scale(head_dim: int) -> None:
    arrays = problem(head_dim=head_dim)
    out = sageattention.sageattn(*arrays, sm_scale=0.1)
    assert relative(out, exact(*arrays, scale=0.1)[0]) < NOISE
    assert relative(out, exact(*arrays)[0]) > (2 * NOISE if head_dim == 40 else -1)


@pytest.mark.parametrize("name", FIXED_LENGTH)
def test_every_name_is_the_same_attention(name: str) -> None:
    arrays = problem()
    precision = "int8_fp16" if "fp16" in name else "int8_fp8"
    want = dlattn.attention(*arrays, precision=precision, layout="bhsd", return_lse=True)
    options: dict[str, Any] = {"return_lse": True}
    for got in (
        getattr(sageattention, name)(*arrays, **options),
        getattr(sageattention, name)(*arrays, **options, smooth_k=False),
        getattr(sageattention, name)(*arrays, **options, attn_mask=None, dropout_p=0.0),
    ):
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a, b)


def test_options_of_the_names_for_gpus() -> None:
    arrays = problem()
    want = sageattention.sageattn(*arrays, is_causal=True, sm_scale=0.2)
    names = sageattention.sageattn_qk_int8_pv_fp8_cuda
    for accumulator in ("fp32", "fp32+fp32", "fp32+fp16"):
        for granularity in ("per_warp", "per_thread"):
            got = names(*arrays, "HND", True, granularity, 0.2, accumulator, False, True)
            np.testing.assert_array_equal(got, want)
    sm90 = sageattention.sageattn_qk_int8_pv_fp8_cuda_sm90
    got = sm90(*arrays, "HND", True, "per_warp", 0.2, "fp32+fp32", False)
    np.testing.assert_array_equal(got, want)


@every_framework
@pytest.mark.parametrize("is_causal", [False, True])
def test_varlen(library: str, is_causal: bool) -> None:
    lengths_q = [130, 1, 60]
    lengths_k = lengths_q if is_causal else [70, 200, 9]
    cu_q, cu_k = (np.cumsum([0, *n]).astype(np.int32) for n in (lengths_q, lengths_k))
    shapes = [(cu_q[-1], 4), (cu_k[-1], 2), (cu_k[-1], 2)]
    arrays = [
        of(library).array(normal(*shape, 64, seed=i), "float16") for i, shape in enumerate(shapes)
    ]
    lengths = [of(library).array(x) for x in (cu_q, cu_k)]
    out = sageattention.sageattn_varlen(*arrays, *lengths, 130, max(lengths_k), is_causal)
    assert of(library).is_array(out) and of(library).dtype(out) == "float16"
    q, k, v = (to_float64(x) for x in arrays)
    for i in range(3):
        rows, keys = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        want, _ = exact(q[rows], k[keys], v[keys], tensor_layout="NHD", causal=is_causal)
        assert relative(out[rows], want) < FEW_KEYS


def test_views_are_taken_as_they_are() -> None:
    """q, k and v as slices of one buffer, as diffusion models have them."""
    torch = pytest.importorskip("torch")
    qkv = torch.from_numpy(normal(2, 100, 3, 4, 64)).half()
    q, k, v = qkv.unbind(2)
    out = sageattention.sageattn(q, k, v, tensor_layout="NHD")
    want = sageattention.sageattn(*(x.contiguous() for x in (q, k, v)), tensor_layout="NHD")
    assert torch.equal(out, want)


def refused(match: str, *arrays: Any, error: Any = UnsupportedError, **options: Any) -> None:
    with pytest.raises(error, match=match):
        sageattention.sageattn(*arrays, **options)


def test_what_is_refused_is_named() -> None:
    arrays = problem()
    mask = np.ones((130, 130), bool)
    refused(
        "attn_mask is of type numpy.ndarray; accepted: None. For a mask", *arrays, attn_mask=mask
    )
    refused("dropout_p is 0.1, and", *arrays, dropout_p=0.1)
    refused(
        r"sageattn\(\) got an unexpected keyword argument 'scale'",
        *arrays,
        scale=1.0,
        error=TypeError,
    )
    refused("tensor_layout is 'BHSD'; accepted: 'HND' or 'NHD'", *arrays, tensor_layout="BHSD")
    refused("tensor_layout is of type numpy.ndarray", *arrays, mask, error=TypeError)
    for name in ("is_causal", "return_lse", "smooth_k"):
        refused(f"{name} is of type int; accepted: a bool", *arrays, error=TypeError, **{name: 1})
    # numpy.bool is called bool too.
    refused(
        "is_causal is of type numpy.bool; accepted", *arrays, error=TypeError, is_causal=mask[0, 0]
    )
    refused("^sm_scale is 0; accepted: 1.18e-38", *arrays, sm_scale=0.0)
    refused("^sm_scale is of type str; accepted: a float", *arrays, sm_scale="1", error=TypeError)
    accepted = "accepted: float16 or bfloat16$"
    refused(f"^q: dtype is float32; {accepted}", *(x.astype(np.float32) for x in arrays))
    refused("^k: dtype is float32", arrays[0], arrays[1].astype(np.float32), arrays[2])
    refused("num_heads_kv = 3 does not divide num_heads = 4", *problem(num_heads_kv=3))
    refused("head_dim is 264; accepted: 1 to 256", *problem(head_dim=264))
    refused("stride of the last dimension is 2", *(x[..., ::2] for x in arrays))
    refused("q has 3 dimensions", arrays[0][0], *arrays[1:])


def test_gradients_are_refused() -> None:
    torch = pytest.importorskip("torch")
    q, k, v = problem("torch")
    q.requires_grad_()
    refused("q requires grad", q, k, v)
    with torch.no_grad():
        sageattention.sageattn(q, k, v)


def test_wrong_options_of_the_names_for_gpus() -> None:
    arrays = problem()
    names = sageattention.sageattn_qk_int8_pv_fp8_cuda
    with pytest.raises(UnsupportedError, match="qk_quant_gran is 'per_block'; accepted"):
        names(*arrays, qk_quant_gran="per_block")
    with pytest.raises(UnsupportedError, match="pv_accum_dtype is 'fp16'; accepted: 'fp32' or"):
        names(*arrays, pv_accum_dtype="fp16")
    with pytest.raises(TypeError, match="smooth_v is of type int"):
        names(*arrays, smooth_v=1)
    with pytest.raises(TypeError, match=r"fp8_cuda\(\) got an unexpected keyword argument 'scale'"):
        names(*arrays, scale=1.0)
    fp16 = sageattention.sageattn_qk_int8_pv_fp16_cuda
    with pytest.raises(UnsupportedError, match="pv_accum_dtype is 'fp32\\+fp16'; accepted: 'fp16'"):
        fp16(*arrays, pv_accum_dtype="fp32+fp16")
    floats = [x.astype(np.float32) for x in arrays]
    with pytest.raises(UnsupportedError, match=r"^q: dtype is float32; accepted: float16 or"):
        fp16(*floats)
    sm90 = sageattention.sageattn_qk_int8_pv_fp8_cuda_sm90
    with pytest.raises(UnsupportedError, match=r"pv_accum_dtype is 'fp32'; accepted: 'fp32\+fp32'"):
        sm90(*arrays, pv_accum_dtype="fp32")
    with pytest.raises(TypeError, match="unexpected keyword argument 'smooth_v'"):
        sm90(*arrays, smooth_v=False)


def test_varlen_refusals() -> None:
    q, k, v = (x[0].swapaxes(0, 1) for x in problem())
    cu = np.array([0, 130], np.int32)
    varlen = sageattention.sageattn_varlen
    with pytest.raises(UnsupportedError, match=r"attn_mask is of type numpy\.ndarray"):
        varlen(q, k, v, cu, cu, 130, 130, attn_mask=cu)
    with pytest.raises(TypeError, match="unexpected keyword argument 'return_lse'"):
        varlen(q, k, v, cu, cu, 130, 130, return_lse=True)
    with pytest.raises(UnsupportedError, match=r"^sm_scale is 0; accepted"):
        varlen(q, k, v, cu, cu, 130, 130, sm_scale=0.0)
    with pytest.raises(UnsupportedError, match="cu_seqlens_q: dtype is int64"):
        varlen(q, k, v, cu.astype(np.int64), cu, 130, 130)


def test_other_names_are_absent() -> None:
    name = "sageattn_qk_int8_pv_fp16_triton"
    with pytest.raises(ImportError, match=f"has no {name}: .* use sageattn_qk_int8_pv_fp16_cuda"):
        exec(f"from dlattn.sageattention import {name}")
    with pytest.raises(ImportError, match="cannot import name 'sageattn_blackwell'"):
        exec("from dlattn.sageattention import sageattn_blackwell")
    assert not hasattr(sageattention, "sageattn_blackwell")
