"""dlattn.flash_attn: flash-attn's signatures, with the meaning that its source gives them."""

from __future__ import annotations

import inspect
import math

import numpy as np
import pytest
from arrays import FRAMEWORKS, max_error, normal, to_float64

import dlattn
from dlattn import UnsupportedError, _flash_kvcache, flash_attn

# Names and defaults as in flash-attn 2.8.
COMMON = {
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": False,
    "return_attn_probs": False,
}
SEQUENCES = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
# That engines leave out the second one, by keyword, gives the later ones a default too.
LATER = dict.fromkeys(SEQUENCES[1:])
# vLLM's, behind the rest.
OF_VLLM = {
    "seqused_k": None,
    "out": None,
    "return_softmax_lse": False,
    "num_splits": 0,
    "scheduler_metadata": None,
    "fa_version": None,
}
KVCACHE = {
    "k": None,
    "v": None,
    "rotary_cos": None,
    "rotary_sin": None,
    "cache_seqlens": None,
    "cache_batch_idx": None,
    "cache_leftpad": None,
    "block_table": None,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "rotary_interleaved": True,
    "alibi_slopes": None,
    "num_splits": 0,
    "return_softmax_lse": False,
}
SIGNATURES = {
    "flash_attn_func": (("q", "k", "v"), COMMON),
    "flash_attn_qkvpacked_func": (("qkv",), COMMON),
    "flash_attn_kvpacked_func": (("q", "kv"), COMMON),
    "flash_attn_varlen_func": (
        ("q", "k", "v", "cu_seqlens_q"),
        {**LATER, **COMMON, "block_table": None},
    ),
    "flash_attn_with_kvcache": (("q", "k_cache", "v_cache"), KVCACHE),
    "flash_attn_varlen_qkvpacked_func": (("qkv", "cu_seqlens", "max_seqlen"), COMMON),
    "flash_attn_varlen_kvpacked_func": (("q", "kv", *SEQUENCES), COMMON),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    required, defaults = SIGNATURES[name]
    parameters = dict(inspect.signature(getattr(flash_attn, name)).parameters)
    if name in ("flash_attn_func", "flash_attn_varlen_func"):  # FlashAttention-3's, behind the rest
        for keyword in ("q_descale", "k_descale", "v_descale", "s_aux"):
            assert parameters.pop(keyword).kind is inspect.Parameter.KEYWORD_ONLY
    if name == "flash_attn_with_kvcache":
        for keyword in ("k_descale", "v_descale", "s_aux"):
            assert parameters.pop(keyword).kind is inspect.Parameter.KEYWORD_ONLY
    if name == "flash_attn_varlen_func":
        for keyword, default in OF_VLLM.items():
            parameter = parameters.pop(keyword)
            assert parameter.kind is inspect.Parameter.KEYWORD_ONLY
            assert parameter.default == default
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters.values())
    assert list(parameters) == [*required, *defaults]
    assert {p.name: p.default for p in parameters.values() if p.default is not p.empty} == defaults
    assert name in flash_attn.__all__


def test_sinks_are_named_s_aux():
    q, k, v = (normal(6, heads, 16, seed=i).astype(np.float32) for i, heads in enumerate((4, 2, 2)))
    sinks = np.array([0.5, -1.0, 2.0, 0.0], np.float32)
    want = dlattn.attention(q[None], k[None], v[None], causal=True, sinks=sinks)
    found = flash_attn.flash_attn_func(q[None], k[None], v[None], causal=True, s_aux=sinks)
    np.testing.assert_array_equal(found, want)
    starts = np.array([0, 6], np.int32)
    found = flash_attn.flash_attn_varlen_func(
        q, k, v, starts, starts, 6, 6, causal=True, s_aux=sinks
    )
    np.testing.assert_allclose(found[None], want, rtol=1e-5, atol=1e-6)
    assert not np.allclose(
        found, flash_attn.flash_attn_func(q[None], k[None], v[None], causal=True)
    )
    with pytest.raises(UnsupportedError, match=r"^s_aux: dtype is float64; accepted: float32"):
        flash_attn.flash_attn_func(q[None], k[None], v[None], s_aux=np.ones(4))
    with pytest.raises(UnsupportedError, match=r"^s_aux: shape is \(3,\); accepted: \(4,\)"):
        flash_attn.flash_attn_varlen_func(
            q, k, v, starts, starts, 6, 6, s_aux=np.ones(3, np.float32)
        )


def seen_keys(seqlen_q, seqlen_k, causal, window, window_seqlen):
    """The keys that flash-attn's kernel leaves to each query, after its host code's settling."""
    left, right = (-1 if side >= window_seqlen else side for side in window)
    if causal:
        right = 0
    if left < 0 and right >= 0:
        left = window_seqlen
    if left >= 0 and right < 0:
        right = window_seqlen
    row = np.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    column = np.arange(seqlen_k)[None, :]
    if left < 0 and right < 0:
        return np.ones((seqlen_q, seqlen_k), dtype=bool)
    if left < 0 and right == 0:
        return column <= row
    return (column >= row - left) & (column <= row + right)


def flash_reference(
    q,
    k,
    v,
    *,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    window_seqlen=None,
    dtype=np.float64,
):
    """One sequence in the given dtype, written down from flash-attn's definition."""
    q, k, v = (to_float64(x).astype(dtype).swapaxes(0, 1) for x in (q, k, v))  # heads first
    group = q.shape[0] // k.shape[0]
    k, v = k.repeat(group, axis=0), v.repeat(group, axis=0)
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    scores = q @ k.swapaxes(1, 2) * dtype(softmax_scale or 1 / math.sqrt(q.shape[2]))
    if softcap > 0:
        scores = softcap * np.tanh(scores / softcap)
    if alibi_slopes is not None:
        row = np.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
        distance = np.abs(row - np.arange(seqlen_k)[None, :])
        scores = scores - to_float64(alibi_slopes)[:, None, None] * distance
    seen = seen_keys(seqlen_q, seqlen_k, causal, window_size, window_seqlen or seqlen_k)
    scores = np.where(seen, scores, -np.inf).astype(dtype)
    top = np.maximum(scores.max(axis=2, initial=-np.inf, keepdims=True), -1e30)
    weights = np.exp(scores - top)
    total = weights.sum(axis=2, keepdims=True)
    out = weights @ v / np.where(total == 0, 1, total)
    with np.errstate(divide="ignore"):
        lse = np.where(total == 0, np.inf, top + np.log(total))
    return out.swapaxes(0, 1), lse[..., 0]


def check(got, arrays, **options):
    """Compare `got` with the reference, for arrays of a batch."""
    out, lse, dmask = got
    want = [flash_reference(*sequence, **options) for sequence in zip(*arrays, strict=True)]
    plain = [
        flash_reference(*sequence, **options, dtype=np.float32)
        for sequence in zip(*arrays, strict=True)
    ]
    assert dmask.shape == (0,) and dmask.dtype == out.dtype
    for index, actual in enumerate((out, lse)):
        expected = np.stack([result[index] for result in want])
        bound = 2 * max_error(np.stack([result[index] for result in plain]), expected) + 2e-6
        assert max_error(actual, expected) <= bound


def arrays_of(batch=2, seqlen_q=5, seqlen_k=7, num_heads=4, num_heads_kv=2, head_dim=8):
    return (
        normal(batch, seqlen_q, num_heads, head_dim, seed=1),
        normal(batch, seqlen_k, num_heads_kv, head_dim, seed=2),
        normal(batch, seqlen_k, num_heads_kv, head_dim, seed=3),
    )


# seqlen_q > 2 * seqlen_k and windows around seqlen_k: where the host code's settling shows.
@pytest.mark.parametrize("lengths", [(5, 7), (6, 6), (9, 3), (1, 8), (70, 101)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "window",
    [(-1, -1), (-1, 0), (-1, 2), (2, -1), (0, -1), (1, 1), (0, 0), (2, 3), (7, 0), (3, 7), (-5, 1)],
)
def test_masks(lengths, causal, window):
    arrays = arrays_of(1, *lengths)
    options = {"causal": causal, "window_size": window}
    check(flash_attn.flash_attn_func(*arrays, **options, return_attn_probs=True), arrays, **options)


def test_windows_differ_where_the_host_code_settles_them():
    """test_masks relies on this: sides of -1, of seqlen_k and beyond are told apart."""
    assert not seen_keys(9, 3, False, (0, -1), 3)[:3].any()
    assert seen_keys(9, 3, False, (-1, 3), 3).all()
    assert not seen_keys(9, 3, False, (-1, 2), 3)[0].any()


OPTIONS = {
    "scale": {"softmax_scale": 0.2},
    "softcap": {"softcap": 1.5},
    "softcap off": {"softcap": -1.0},
    "alibi": {"alibi_slopes": np.abs(normal(4, seed=7))},
    "alibi causal": {"alibi_slopes": np.abs(normal(4, seed=7)), "causal": True},
    "alibi window softcap": {
        "alibi_slopes": np.abs(normal(4, seed=7)),
        "window_size": (3, 1),
        "softcap": 2.0,
    },
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(framework, name):
    arrays = arrays_of()
    options = OPTIONS[name]
    theirs = {
        key: framework.array(value) if isinstance(value, np.ndarray) else value
        for key, value in options.items()
    }
    got = flash_attn.flash_attn_func(
        *map(framework.array, arrays), **theirs, return_attn_probs=True
    )
    assert all(framework.is_array(x) for x in got)
    check(got, arrays, **options)
    alone = flash_attn.flash_attn_func(*map(framework.array, arrays), **theirs)
    np.testing.assert_array_equal(to_float64(alone), to_float64(got[0]))


def test_alibi_slopes_of_each_sequence():
    arrays = arrays_of()
    slopes = np.abs(normal(2, 4, seed=7))
    out = flash_attn.flash_attn_func(*arrays, alibi_slopes=slopes, causal=True)
    for b in range(2):
        want, _ = flash_reference(*(x[b] for x in arrays), alibi_slopes=slopes[b], causal=True)
        assert max_error(out[b], want) <= 2e-6


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("scale", [0.0, -0.5, -1e-40])
def test_scales_of_0_and_below(framework, scale):
    """As in flash-attn, whose kernels take any, in every form of the function."""
    q, k, v = (FRAMEWORKS[framework]().array(x, "float32") for x in (Q, K, V))
    shared = np.repeat(K, 2, 2), np.repeat(V, 2, 2)
    scores = scale * np.einsum("bihd,bjhd->bhij", Q, shared[0])
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    want = np.einsum("bhij,bjhd->bihd", weights, shared[1])
    assert max_error(flash_attn.flash_attn_func(q, k, v, softmax_scale=scale), want) < 1e-5
    cached = flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=7, softmax_scale=scale)
    assert max_error(cached, want) < 1e-5
    starts = [FRAMEWORKS[framework]().array(np.array(x), "int32") for x in ([0, 5], [0, 7])]
    out = flash_attn.flash_attn_varlen_func(q[0], k[0], v[0], *starts, 5, 7, softmax_scale=scale)
    assert max_error(out, want[0]) < 1e-5


@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_gradients_of_scales_of_0_and_below(scale):
    torch = pytest.importorskip("torch")
    from dlattn.flash_attn import flash_attn_interface

    q, k, v = (
        torch.from_numpy(x.copy()).requires_grad_()
        for x in (Q, np.repeat(K, 2, 2), np.repeat(V, 2, 2))
    )
    rows = [x.transpose(1, 2) for x in (q, k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(*rows, scale=scale).transpose(1, 2)
    dout = torch.ones_like(out).cumsum(1)
    want = torch.autograd.grad(out, (q, k, v), dout)
    found = flash_attn.flash_attn_func(q, k, v, softmax_scale=scale)
    for got, expected in zip(torch.autograd.grad(found, (q, k, v), dout), want, strict=True):
        torch.testing.assert_close(got, expected)
    x = [y.detach() for y in (q, k, v)]
    out, lse, _, _ = flash_attn_interface._flash_attn_forward(*x, 0.0, scale, False)
    into = [torch.full_like(y, torch.nan) for y in x]
    flash_attn_interface._flash_attn_backward(dout, *x, out, lse, *into, 0.0, scale, False)
    for got, expected in zip(into, want, strict=True):
        torch.testing.assert_close(got, expected)


def test_positional_arguments():
    """In the order of the original, to the last one."""
    arrays = arrays_of()
    slopes = np.abs(normal(4, seed=7))
    got = flash_attn.flash_attn_func(*arrays, 0.0, 0.3, True, (3, -1), 1.5, slopes, True, True)
    options = {"softmax_scale": 0.3, "causal": True, "window_size": (3, -1), "softcap": 1.5}
    check(got, arrays, **options, alibi_slopes=slopes)


def test_rows_that_see_nothing(framework):
    """Zero, and +inf as the log of nothing."""
    arrays = [framework.array(x) for x in arrays_of(1, 9, 3)]
    out, lse, _ = flash_attn.flash_attn_func(*arrays, causal=True, return_attn_probs=True)
    assert (to_float64(out)[:, :6] == 0).all() and np.isposinf(to_float64(lse)[..., :6]).all()
    assert (to_float64(out)[:, 6:] != 0).all() and np.isfinite(to_float64(lse)[..., 6:]).all()
    empty = [framework.array(x) for x in arrays_of(1, 2, 0)]
    out, lse, _ = flash_attn.flash_attn_func(*empty, return_attn_probs=True)
    assert (to_float64(out) == 0).all() and np.isposinf(to_float64(lse)).all()


CU_Q = np.array([0, 3, 4, 4, 13], dtype=np.int32)
CU_K = np.array([0, 5, 5, 8, 12], dtype=np.int32)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (2, -1), (-1, 1), (1, 2), (5, 5), (4, 0)])
def test_varlen(framework, causal, window):
    q, k, v = normal(13, 4, 8, seed=1), normal(12, 2, 8, seed=2), normal(12, 2, 8, seed=3)
    arrays = map(framework.array, (q, k, v, CU_Q, CU_K))
    out, lse, dmask = flash_attn.flash_attn_varlen_func(
        *arrays, 9, 5, causal=causal, window_size=window, return_attn_probs=True
    )
    assert tuple(lse.shape) == (4, 13) and tuple(dmask.shape) == (0,)
    out, lse = to_float64(out), to_float64(lse)
    for b in range(4):
        rows, keys = slice(CU_Q[b], CU_Q[b + 1]), slice(CU_K[b], CU_K[b + 1])
        want = flash_reference(
            q[rows], k[keys], v[keys], causal=causal, window_size=window, window_seqlen=5
        )
        assert max_error(out[rows], want[0]) <= 1e-5
        assert max_error(lse[:, rows], want[1]) <= 1e-5


def test_varlen_options():
    q, k, v = normal(13, 4, 8, seed=1), normal(12, 2, 8, seed=2), normal(12, 2, 8, seed=3)
    slopes = np.abs(normal(4, 4, seed=7))
    out = flash_attn.flash_attn_varlen_func(
        q, k, v, CU_Q, CU_K, 9, 5, 0.0, 0.3, True, (3, -1), 1.5, slopes, False, False, None
    )
    options = {"softmax_scale": 0.3, "causal": True, "window_size": (3, -1), "softcap": 1.5}
    for b in range(4):
        rows, keys = slice(CU_Q[b], CU_Q[b + 1]), slice(CU_K[b], CU_K[b + 1])
        part = (q[rows], k[keys], v[keys])
        want, _ = flash_reference(*part, **options, alibi_slopes=slopes[b], window_seqlen=5)
        assert max_error(out[rows], want) <= 1e-5


ARGUMENTS = {"softmax_scale": 0.3, "causal": True, "window_size": (3, 0), "softcap": 1.5}


def with_views(monkeypatch, library, x, call):
    """Call, and tell whether what came in as q, k or v was memory of `x`."""
    pointers = []
    for module, name in ((flash_attn, "attention"), (_flash_kvcache, "attention_varlen")):
        true = getattr(module, name)

        def seen(*args, true=true, **options):
            pointers.extend(library.pointer(array) for array in args[:3])
            return true(*args, **options)

        monkeypatch.setattr(module, name, seen)
    result = call()
    start = library.pointer(x)
    assert len(pointers) == 3
    return result, [start <= pointer < start + x.nbytes for pointer in pointers]


@pytest.fixture(params=["numpy", "torch"])
def strided(request):
    return FRAMEWORKS[request.param]()


def test_packed_forms_take_views(monkeypatch, strided):
    qkv = strided.array(normal(2, 6, 3, 4, 8, seed=1))
    q, k, v = (qkv[:, :, n] for n in range(3))
    want = flash_attn.flash_attn_func(q, k, v, **ARGUMENTS)
    got, inside = with_views(
        monkeypatch, strided, qkv, lambda: flash_attn.flash_attn_qkvpacked_func(qkv, **ARGUMENTS)
    )
    np.testing.assert_array_equal(got, want)
    assert inside == [True] * 3

    kv = strided.array(normal(2, 9, 2, 2, 8, seed=2))
    want = flash_attn.flash_attn_func(q, kv[:, :, 0], kv[:, :, 1], **ARGUMENTS)
    monkeypatch.undo()
    got, inside = with_views(
        monkeypatch, strided, kv, lambda: flash_attn.flash_attn_kvpacked_func(q, kv, **ARGUMENTS)
    )
    np.testing.assert_array_equal(got, want)
    assert inside == [False, True, True]


def test_packed_varlen_forms_take_views(monkeypatch, strided):
    qkv = strided.array(normal(13, 3, 4, 8, seed=1))
    kv = strided.array(normal(12, 2, 2, 8, seed=2))
    cu_q, cu_k = strided.array(CU_Q), strided.array(CU_K)
    q, k, v = (qkv[:, n] for n in range(3))
    want = flash_attn.flash_attn_varlen_func(q, k, v, cu_q, cu_q, 9, 9, **ARGUMENTS)
    got, inside = with_views(
        monkeypatch,
        strided,
        qkv,
        lambda: flash_attn.flash_attn_varlen_qkvpacked_func(qkv, cu_q, 9, **ARGUMENTS),
    )
    np.testing.assert_array_equal(got, want)
    assert inside == [True] * 3

    monkeypatch.undo()
    k, v = kv[:, 0], kv[:, 1]
    want = flash_attn.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 9, 5, **ARGUMENTS)
    got, inside = with_views(
        monkeypatch,
        strided,
        kv,
        lambda: flash_attn.flash_attn_varlen_kvpacked_func(
            q, kv, cu_q, cu_k, 9, 5, return_attn_probs=True, **ARGUMENTS
        ),
    )
    np.testing.assert_array_equal(got[0], want)
    assert inside == [False, True, True]


Q, K, V = arrays_of()
QKV = normal(2, 6, 3, 4, 8, seed=1)
KV = normal(2, 7, 2, 2, 8, seed=1)
PACKED = normal(13, 3, 4, 8, seed=1)
WRONG = {
    "dropout": (
        lambda f: f.flash_attn_func(Q, K, V, 0.1),
        UnsupportedError,
        ("dropout_p is 0.1", "accepted: 0.0"),
    ),
    "dropout an array": (
        lambda f: f.flash_attn_func(Q, K, V, np.zeros(2)),
        TypeError,
        ("dropout_p is of type numpy.ndarray", "accepted: 0.0"),
    ),
    "dropout of packed": (
        lambda f: f.flash_attn_qkvpacked_func(QKV, dropout_p=0.5),
        UnsupportedError,
        ("dropout_p is 0.5", "accepted: 0.0"),
    ),
    "causal a string": (
        lambda f: f.flash_attn_func(Q, K, V, causal="top_left"),
        TypeError,
        ("causal is of type str", "accepted: a bool"),
    ),
    "return_attn_probs a number": (
        lambda f: f.flash_attn_func(Q, K, V, return_attn_probs=1),
        TypeError,
        ("return_attn_probs is of type int", "accepted: a bool"),
    ),
    "window of None": (
        lambda f: f.flash_attn_func(Q, K, V, window_size=(None, 0)),
        TypeError,
        ("window_size is (None, 0)", "accepted: a pair (left, right) of int"),
    ),
    "window of bools": (
        lambda f: f.flash_attn_func(Q, K, V, window_size=(True, 0)),
        TypeError,
        ("window_size is (True, 0)", "accepted"),
    ),
    "window a number": (
        lambda f: f.flash_attn_varlen_func(PACKED, PACKED, PACKED, CU_Q, CU_Q, 9, 9, window_size=4),
        TypeError,
        ("window_size is 4", "accepted"),
    ),
    "softcap a string": (
        lambda f: f.flash_attn_func(Q, K, V, softcap="1"),
        TypeError,
        ("softcap is of type str", "accepted: a float"),
    ),
    "scale not finite": (
        lambda f: f.flash_attn_func(Q, K, V, softmax_scale=math.nan),
        UnsupportedError,
        ("softmax_scale is nan", "accepted"),
    ),
    "alibi of float64": (
        lambda f: f.flash_attn_func(Q, K, V, alibi_slopes=np.ones(4)),
        UnsupportedError,
        ("alibi_slopes: dtype is float64", "accepted: float32"),
    ),
    "last dimension not contiguous": (
        lambda f: f.flash_attn_func(Q[..., ::2], K[..., ::2], V),
        UnsupportedError,
        ("q: the stride of the last dimension is 2", "accepted: 1"),
    ),
    "k no tensor": (
        lambda f: f.flash_attn_func(Q, "k", V, window_size=(1, 1)),
        TypeError,
        ("k is of type str", "accepted: a torch"),
    ),
    "max_seqlen of another type": (
        lambda f: f.flash_attn_varlen_func(
            PACKED[:, 0], PACKED[:, 1], PACKED[:, 2], CU_Q, CU_Q, 9, 9.0, window_size=(1, 1)
        ),
        TypeError,
        ("max_seqlen_k is of type float", "accepted: an int"),
    ),
    "qkv no tensor": (
        lambda f: f.flash_attn_qkvpacked_func(3.0),
        TypeError,
        ("qkv is of type float", "accepted: a torch"),
    ),
    "qkv of rank 4": (
        lambda f: f.flash_attn_qkvpacked_func(PACKED),
        UnsupportedError,
        ("qkv: shape is (13, 3, 4, 8)", "accepted: (batch, seqlen, 3, num_heads, head_dim)"),
    ),
    "kv of three": (
        lambda f: f.flash_attn_kvpacked_func(Q, QKV),
        UnsupportedError,
        ("kv: shape is (2, 6, 3, 4, 8)", "accepted: (batch, seqlen_k, 2, num_heads_kv, head_dim)"),
    ),
    "qkv of integers": (
        lambda f: f.flash_attn_qkvpacked_func(np.ones((1, 2, 3, 4, 8), np.int32)),
        UnsupportedError,
        ("qkv[:, :, 0]: dtype is int32", "accepted: float16"),
    ),
    "kv of another dtype": (
        lambda f: f.flash_attn_kvpacked_func(Q, KV.astype("f2")),
        UnsupportedError,
        ("kv[:, :, 0]: dtype is float16", "accepted: float32, that of q"),
    ),
    "varlen kv of another head_dim": (
        lambda f: f.flash_attn_varlen_kvpacked_func(
            PACKED[:, 0], normal(13, 2, 4, 6), CU_Q, CU_Q, 9, 9
        ),
        UnsupportedError,
        ("kv[:, 0]: head_dim is 6", "accepted: 8, that of q"),
    ),
    "cu_seqlens of int64": (
        lambda f: f.flash_attn_varlen_qkvpacked_func(PACKED, CU_Q.astype(np.int64), 9),
        UnsupportedError,
        ("cu_seqlens: dtype is int64", "accepted: int32"),
    ),
    "max_seqlen too small": (
        lambda f: f.flash_attn_varlen_qkvpacked_func(PACKED, CU_Q, 8),
        UnsupportedError,
        ("cu_seqlens: sequence 3 has 9 tokens", "accepted: up to max_seqlen = 8"),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls(name):
    call, error, words = WRONG[name]
    with pytest.raises(error) as caught:
        call(flash_attn)
    assert type(caught.value) is error
    for word in words:
        assert word in str(caught.value)


def gradients_of(function, *arrays):
    """Gradients of a weighted sum of out and lse; functions return both."""
    torch = pytest.importorskip("torch")
    tensors = [torch.from_numpy(x).clone().requires_grad_() for x in arrays]
    out, lse = function(*tensors)
    weights = torch.linspace(-1, 1, out.shape[-1])
    seen = torch.where(lse.isinf(), 0.0, lse)
    ((out * weights).sum() + (seen * 0.3).sum()).backward()
    return [x.grad for x in tensors]


@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients(deterministic, monkeypatch):
    torch = pytest.importorskip("torch")
    import dlattn.torch
    from dlattn.integrations.torch.ops import KERNELS

    asked = []
    function = dlattn.attention_backward
    monkeypatch.setattr("dlattn._backward._core", Recorder(asked))
    assert function is dlattn.attention_backward
    common = {"causal": True, "softcap": 2.0, "window": (4, None), "return_lse": True}
    with KERNELS.in_python():  # which go by the module that tells
        want = gradients_of(lambda *x: dlattn.torch.attention(*x, **common), Q, K, V)
        options = {"causal": True, "softcap": 2.0, "window_size": (4, -1)}
        options |= {"return_attn_probs": True, "deterministic": deterministic}
        found = gradients_of(lambda *x: flash_attn.flash_attn_func(*x, **options)[:2], Q, K, V)
    for one, other in zip(found, want, strict=True):
        torch.testing.assert_close(one, other)
    assert asked == [False, deterministic]


class Recorder:
    """In the place of the native module: tells what backward passes are asked to be."""

    def __init__(self, asked):
        self._asked = asked

    def attention_backward(self, *arguments):
        self._asked.append(arguments[6])
        return dlattn._core.attention_backward(*arguments)


def test_gradients_of_packed_tensors():
    torch = pytest.importorskip("torch")
    flash = flash_attn.flash_attn_func
    options = {"causal": True, "return_attn_probs": True}
    packed = gradients_of(lambda qkv: flash_attn.flash_attn_qkvpacked_func(qkv, **options)[:2], QKV)
    apart = gradients_of(
        lambda *x: flash(*x, **options)[:2], *(QKV[:, :, i].copy() for i in range(3))
    )
    torch.testing.assert_close(packed[0], torch.stack(apart, dim=2))
    packed = gradients_of(
        lambda q, kv: flash_attn.flash_attn_kvpacked_func(q, kv, **options)[:2], Q, KV
    )
    apart = gradients_of(
        lambda *x: flash(*x, **options)[:2], Q, *(KV[:, :, i].copy() for i in range(2))
    )
    torch.testing.assert_close(packed[0], apart[0])
    torch.testing.assert_close(packed[1], torch.stack(apart[1:], dim=2))


def test_gradients_of_varlen():
    """Each sequence of a pack has the gradients that it has alone."""
    torch = pytest.importorskip("torch")
    batch, seqlen_q, seqlen_k = Q.shape[0], Q.shape[1], K.shape[1]
    starts_q, starts_k = (
        torch.arange(batch + 1, dtype=torch.int32) * n for n in (seqlen_q, seqlen_k)
    )

    def packed(q, k, v):
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        out, lse, _ = flash_attn.flash_attn_varlen_func(
            q, k, v, starts_q, starts_k, seqlen_q, seqlen_k, causal=True, return_attn_probs=True
        )
        return out, lse

    found = gradients_of(packed, Q, K, V)
    want = gradients_of(
        lambda *x: flash_attn.flash_attn_func(*x, causal=True, return_attn_probs=True)[:2], Q, K, V
    )
    for one, other in zip(found, want, strict=True):
        torch.testing.assert_close(one, other)


def test_calls_without_gradients():
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(x).clone().requires_grad_() for x in (Q, K, V))
    descale = torch.ones(1)
    with pytest.raises(UnsupportedError, match="k_descale is given and an input requires grad"):
        flash_attn.flash_attn_func(q, k, v, k_descale=descale)
    lengths = torch.full((q.shape[0],), k.shape[1], dtype=torch.int32)
    with pytest.raises(UnsupportedError, match="requires grad"):
        flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths)


def test_packed_jax_arrays_are_refused():
    jax = pytest.importorskip("jax")
    with pytest.raises(UnsupportedError, match=r"qkv is of type .*ArrayImpl, of which no view"):
        flash_attn.flash_attn_qkvpacked_func(jax.numpy.asarray(QKV))


def test_half_precision_torch_tensors():
    torch = pytest.importorskip("torch")
    for dtype in (torch.float16, torch.bfloat16):
        qkv = torch.from_numpy(QKV).to(dtype)
        out, lse, dmask = flash_attn.flash_attn_qkvpacked_func(
            qkv, causal=True, return_attn_probs=True
        )
        assert out.dtype == dmask.dtype == dtype and lse.dtype == torch.float32
        want = dlattn.attention(*qkv.unbind(2), causal=True)
        assert torch.equal(out, want)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [(130, 130), (90, 200), (200, 70)])
@pytest.mark.parametrize("window", [(-1, -1), (40, -1), (50, 20), (70, 70)])
@pytest.mark.parametrize("causal", [False, True])
def test_on_a_gpu(causal, window, lengths):
    torch = pytest.importorskip("torch")
    arrays = arrays_of(2, *lengths, head_dim=64)
    tensors = [torch.from_numpy(x).half().cuda() for x in arrays]
    options = {"causal": causal, "window_size": window}
    out, lse, dmask = flash_attn.flash_attn_func(*tensors, **options, return_attn_probs=True)
    assert out.is_cuda and lse.is_cuda and dmask.is_cuda and dmask.dtype == torch.float16
    for b in range(2):
        want = flash_reference(*(x[b] for x in tensors), **options)
        assert max_error(out[b], want[0]) <= 4e-3
        assert max_error(lse[b], want[1]) <= 4e-3


@pytest.mark.gpu
@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_packed_on_a_gpu(library):
    module = pytest.importorskip(library)
    if library == "torch":
        qkv = module.from_numpy(normal(300, 3, 4, 64, seed=1)).half().cuda()
        cu = module.tensor([0, 1, 130, 300], dtype=module.int32, device="cuda")
    else:
        qkv = module.asarray(normal(300, 3, 4, 64, seed=1).astype("f2"))
        cu = module.asarray([0, 1, 130, 300], dtype="i4")
    out, lse, _ = flash_attn.flash_attn_varlen_qkvpacked_func(
        qkv, cu, 170, causal=True, return_attn_probs=True
    )
    for begin, end in ((0, 1), (1, 130), (130, 300)):
        part = [qkv[begin:end, n] for n in range(3)]
        want = flash_reference(*part, causal=True)
        assert max_error(out[begin:end], want[0]) <= 4e-3
        assert max_error(lse[:, begin:end], want[1]) <= 4e-3


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [(130, 130), (90, 200), (200, 90), (300, 70)])
@pytest.mark.parametrize("causal", [False, True])
def test_against_the_kernel_in_torch(causal, lengths):
    """torch carries flash-attn's own kernel and host code: the same masks, to the last row."""
    torch = pytest.importorskip("torch")
    kernel = torch.ops.aten._flash_attention_forward
    q, k, v = (torch.from_numpy(x).half().cuda() for x in arrays_of(2, *lengths, head_dim=64))
    sizes = (None, None, q.shape[1], k.shape[1])
    for left, right in [
        (-1, -1),
        (-1, 20),
        (40, -1),
        (0, -1),
        (50, 20),
        (70, 70),
        (90, 0),
        (-3, 5),
    ]:
        try:
            want, want_lse, *_ = kernel(
                *(q, k, v, *sizes, 0.0, causal, False),
                window_size_left=left,
                window_size_right=right,
            )
        except (RuntimeError, TypeError) as error:
            pytest.skip(f"this torch has no such kernel: {error}")
        out, lse, _ = flash_attn.flash_attn_func(
            q, k, v, causal=causal, window_size=(left, right), return_attn_probs=True
        )
        assert max_error(out, to_float64(want)) <= 4e-3
        assert max_error(lse, to_float64(want_lse)) <= 4e-3
