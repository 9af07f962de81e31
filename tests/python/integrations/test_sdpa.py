"""dlattn.scaled_dot_product_attention: torch's signature and meaning."""

from __future__ import annotations

import inspect
import math
import sys

import numpy as np
import pytest
from arrays import FRAMEWORKS, max_error, normal, to_float64

import dlattn
from dlattn import UnsupportedError, _sdpa, scaled_dot_product_attention

torch = pytest.importorskip("torch")
TORCH = torch.nn.functional.scaled_dot_product_attention


def test_signature():
    parameters = inspect.signature(scaled_dot_product_attention).parameters
    names = [
        "query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"
    ]  # fmt: skip
    assert list(parameters) == names
    defaults = [parameters[name].default for name in names[3:]]
    assert defaults == [None, 0.0, False, None, False]
    # torch takes these two by keyword alone.
    x = torch.ones(1, 1, 2, 4)
    for function in (TORCH, scaled_dot_product_attention):
        with pytest.raises(TypeError):
            function(x, x, x, None, 0.0, False, 0.5)


def reference(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """In float64, as torch documents it; a row that sees nothing gives 0."""
    query, key, value = (to_float64(x) for x in (query, key, value))
    if enable_gqa:
        heads = query.shape[-3] if query.ndim > 2 else 1
        key, value = (x.repeat(heads // x.shape[-3], axis=-3) for x in (key, value))
    scores = query @ key.swapaxes(-1, -2) * (scale or 1 / math.sqrt(query.shape[-1]))
    if is_causal:
        seen = np.arange(scores.shape[-1])[None, :] <= np.arange(scores.shape[-2])[:, None]
        scores = np.where(seen, scores, -np.inf)
    if attn_mask is not None:
        mask = np.asarray(attn_mask)
        scores = np.where(mask, scores, -np.inf) if mask.dtype == bool else scores + mask
    top = np.maximum(scores.max(axis=-1, initial=-np.inf, keepdims=True), -1e30)
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    return weights @ value / np.where(total == 0, 1, total)


def compare(shapes, mask=None, dtype="float32", **options):
    """Against float64, within twice torch's own error, as tensors of torch and of NumPy."""
    library = FRAMEWORKS["torch"]()
    arrays = [normal(*shape, seed=n, dtype="float32") for n, shape in enumerate(shapes)]
    tensors = [library.array(x, dtype) for x in arrays]
    attn_mask = None if mask is None else torch.from_numpy(mask)
    if attn_mask is not None and mask.dtype != bool:
        attn_mask = attn_mask.to(tensors[0].dtype)
    want = reference(
        *tensors, None if attn_mask is None else np.asarray(attn_mask.tolist()), **options
    )
    theirs = TORCH(*tensors, attn_mask=attn_mask, **options)
    ours = scaled_dot_product_attention(*tensors, attn_mask=attn_mask, **options)
    assert type(ours) is torch.Tensor and ours.shape == theirs.shape and ours.dtype == theirs.dtype
    absolute = {"float64": 1e-14, "float32": 2e-6, "bfloat16": 1e-2, "float16": 1e-3}[dtype]
    assert max_error(theirs, want) <= 20 * absolute  # the reference and torch mean the same
    assert max_error(ours, want) <= 2 * max_error(theirs, want) + absolute
    if dtype in ("float32", "float64"):
        inputs = [x.numpy() for x in tensors]
        got = scaled_dot_product_attention(*inputs, None if mask is None else mask.astype(
            bool if mask.dtype == bool else inputs[0].dtype), **options)  # fmt: skip
        assert type(got) is np.ndarray
        np.testing.assert_array_equal(got, ours.numpy())


QUERY, KEY, VALUE = (2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_four_dimensions(dtype, is_causal):
    compare([QUERY, KEY, VALUE], dtype=dtype, is_causal=is_causal)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(5, 5), (9, 4), (4, 9), (1, 70), (130, 99)])
def test_is_causal_counts_from_the_first_key(seqlen_q, seqlen_k):
    shapes = [(1, 2, seqlen_q, 16), (1, 2, seqlen_k, 16), (1, 2, seqlen_k, 16)]
    compare(shapes, is_causal=True)


@pytest.mark.parametrize("scale", [0.0, -0.0, 0, -0.5, 1e-39, -1e-39, np.float32(-0.5)])
@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
def test_scales_of_0_and_below(library, scale):
    """As in torch, whose function takes any; a row that sees nothing stays 0."""
    arrays = [normal(2, 3, 9, 16, seed=seed) for seed in range(3)]
    mask = np.arange(9) < np.array([0, 3, 5, 9, 9, 9, 9, 9, 9])[:, None]
    scores = np.where(mask, float(scale) * (arrays[0] @ arrays[1].swapaxes(2, 3)), -np.inf)
    weights = np.exp(scores - np.maximum(scores.max(-1, keepdims=True), -1e30))
    want = weights @ arrays[2] / np.maximum(weights.sum(-1, keepdims=True), 1e-30)
    before = [np.copy(x) for x in arrays]
    given = [FRAMEWORKS[library]().array(x, "float32") for x in arrays]
    mask = FRAMEWORKS[library]().array(mask, "bool") if library != "numpy" else mask
    out = scaled_dot_product_attention(*given, attn_mask=mask, scale=scale)
    assert max_error(out, want) < 1e-5
    assert all(np.array_equal(to_float64(x), y) for x, y in zip(given, before, strict=True))


def test_scale():
    compare([QUERY, KEY, VALUE], scale=0.2)


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_enable_gqa(heads):
    compare([QUERY, (2, heads, 7, 8), (2, heads, 7, 6)], enable_gqa=True, is_causal=True)


RANKS = {
    "two": [(5, 8), (7, 8), (7, 6)],
    "three": [(3, 5, 8), (3, 7, 8), (3, 7, 6)],
    "five": [(2, 3, 4, 5, 8), (2, 3, 4, 7, 8), (2, 3, 4, 7, 6)],
    "six": [(2, 1, 3, 4, 5, 8), (2, 1, 3, 4, 7, 8), (2, 1, 3, 4, 7, 6)],
    "mixed": [(2, 4, 5, 8), (4, 7, 8), (7, 6)],
    "query of fewer": [(5, 8), (2, 4, 7, 8), (2, 4, 7, 6)],
    "batch broadcast": [(2, 4, 5, 8), (1, 4, 7, 8), (1, 4, 7, 6)],
    "query broadcast": [(1, 1, 5, 8), (2, 4, 7, 8), (2, 4, 7, 6)],
    "one key head": [(2, 4, 5, 8), (2, 1, 7, 8), (2, 1, 7, 6)],
    "one value head": [(2, 4, 5, 8), (2, 4, 7, 8), (2, 1, 7, 6)],
    "five broadcast": [(2, 3, 4, 5, 8), (1, 1, 4, 7, 8), (2, 3, 4, 7, 6)],
    "five to four": [(2, 3, 4, 5, 8), (4, 7, 8), (4, 7, 6)],
}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", RANKS)
def test_leading_dimensions(name, is_causal):
    compare(RANKS[name], is_causal=is_causal)


@pytest.mark.parametrize(
    "shapes",
    [
        [(4, 5, 8), (2, 7, 8), (2, 7, 6)],
        [(2, 3, 4, 5, 8), (2, 3, 2, 7, 8), (2, 3, 2, 7, 6)],
        [(2, 4, 5, 8), (2, 7, 8), (2, 7, 6)],
        [(2, 4, 5, 8), (1, 2, 7, 8), (1, 2, 7, 6)],
    ],
)
def test_enable_gqa_with_other_ranks(shapes):
    compare(shapes, enable_gqa=True)


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("shape", [(5, 7), (1, 7), (5, 1), (2, 1, 5, 7), (1, 4, 1, 7), (4, 5, 7)])
def test_attn_mask(kind, shape):
    values = normal(*shape, seed=9)
    compare([QUERY, KEY, VALUE], mask=values > 0 if kind == "bool" else values)


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize(
    ("shapes", "shape"),
    [
        (RANKS["two"], (5, 7)),
        (RANKS["three"], (3, 1, 7)),
        (RANKS["five"], (5, 7)),
        (RANKS["five"], (1, 5, 7)),
        (RANKS["five"], (1, 1, 4, 5, 7)),
        (RANKS["five"], (2, 3, 1, 5, 7)),
        (RANKS["five"], (1, 4, 1, 7)),
    ],
)
def test_attn_mask_with_other_ranks(kind, shapes, shape):
    values = normal(*shape, seed=9)
    compare(shapes, mask=values > 0 if kind == "bool" else values)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_rows_that_a_mask_hides_wholly(dtype):
    mask = normal(5, 7, seed=9) > 0
    mask[2] = False
    compare([QUERY, KEY, VALUE], mask=mask, dtype=dtype)
    compare([QUERY, KEY, VALUE], mask=np.where(mask, 0.5, -np.inf).astype("f4"), dtype=dtype)
    query, key, value = (torch.from_numpy(normal(*shape)) for shape in (QUERY, KEY, VALUE))
    out = scaled_dot_product_attention(query, key, value, torch.from_numpy(mask))
    assert (out[:, :, 2] == 0).all() and (out[:, :, [0, 1, 3, 4]] != 0).all()


def test_float32_mask_of_half_precision():
    query, key, value = (torch.from_numpy(normal(*s)).half() for s in (QUERY, KEY, VALUE))
    mask = torch.from_numpy(normal(5, 7, seed=9))
    want = reference(query, key, value, mask)
    assert max_error(scaled_dot_product_attention(query, key, value, mask), want) <= 2e-3
    assert max_error(TORCH(query, key, value, mask), want) <= 2e-3


def test_all_dimensions_are_views(monkeypatch):
    """No array is copied: what reaches attention lies in the caller's memory."""
    tensors = [torch.from_numpy(normal(*shape)) for shape in RANKS["five broadcast"]]
    mask = torch.from_numpy(normal(2, 3, 1, 5, 7) > 0)
    taken = []

    def seen(*arrays, **options):
        taken.extend((*arrays, options["mask"]))
        return dlattn.attention(*arrays, **options)

    monkeypatch.setattr(_sdpa, "attention", seen)
    scaled_dot_product_attention(*tensors, mask)
    assert [x.data_ptr() for x in taken] == [x.data_ptr() for x in (*tensors, mask)]
    assert [tuple(x.shape[:2]) for x in taken] == [(6, 4), (6, 4), (6, 4), (6, 1)]


def test_transposed_tensors():
    """As model code has them: heads moved before the tokens by a view."""
    query, key, value = (
        torch.from_numpy(normal(2, 7, 4, 8, seed=n)).transpose(1, 2) for n in range(3)
    )
    got = scaled_dot_product_attention(query, key, value, is_causal=True)
    assert max_error(got, reference(query, key, value, is_causal=True)) <= 2e-6


def test_jax_arrays():
    jax = FRAMEWORKS["jax"]()
    arrays = [jax.array(normal(*shape)) for shape in (QUERY, KEY, VALUE)]
    out = scaled_dot_product_attention(*arrays, jax.array(normal(5, 7) > 0))
    assert jax.is_array(out)
    assert max_error(out, reference(*arrays, normal(5, 7) > 0)) <= 2e-6
    with pytest.raises(UnsupportedError) as caught:
        scaled_dot_product_attention(*(x[0] for x in arrays))
    assert "ArrayImpl, of which no view can be taken" in str(caught.value)
    assert "accepted: 4 dimensions" in str(caught.value)


def test_no_torch_is_needed(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    out = scaled_dot_product_attention(*(normal(*shape) for shape in RANKS["five"]))
    assert out.shape == (2, 3, 4, 5, 6)


Q, K, V = normal(*QUERY), normal(*KEY), normal(*VALUE)
MASK = normal(5, 7) > 0
FIVE = [normal(*shape) for shape in RANKS["five"]]
WRONG = {
    "dropout": ((Q, K, V, None, 0.1), {}, UnsupportedError, ("dropout_p is 0.1", "accepted: 0.0")),
    "mask and causal": (
        (Q, K, V, MASK),
        {"is_causal": True},
        UnsupportedError,
        ("attn_mask is given and is_causal is True", "accepted: one of the two"),
    ),
    "is_causal a string": (
        (Q, K, V),
        {"is_causal": "top_left"},
        TypeError,
        ("is_causal is of type str", "accepted: a bool"),
    ),
    "enable_gqa a number": (
        (Q, K, V),
        {"enable_gqa": 1},
        TypeError,
        ("enable_gqa is of type int", "accepted: a bool"),
    ),
    "scale not finite": (
        (Q, K, V),
        {"scale": -math.inf},
        UnsupportedError,
        ("scale is inf; accepted", ),
    ),
    "scale a string": (
        (Q, K, V), {"scale": "1"}, TypeError, ("scale is of type str; accepted: a float",)
    ),
    "query no tensor": (
        ("q", K, V), {}, TypeError, ("query is of type str", "accepted: a torch"),
    ),
    "attn_mask no tensor": (
        (Q, K, V, 1.0), {}, TypeError, ("attn_mask is of type float", "accepted: a torch"),
    ),
    "key of one dimension": (
        (Q, K[0, 0, 0], V), {}, UnsupportedError,
        ("key: shape is (8,)", "accepted: at least 2 dimensions"),
    ),
    "heads without enable_gqa": (
        (Q, K[:, :2], V[:, :2]), {}, UnsupportedError,
        ("key: num_heads is 2", "(2, 2, 7, 8)", "accepted: 4 or 1, or enable_gqa=True"),
    ),
    "heads that do not divide": (
        (Q, K[:, :3], V[:, :3]), {"enable_gqa": True}, UnsupportedError,
        ("key: num_heads_kv = 3 does not divide num_heads = 4 of query",),
    ),
    "heads of value with enable_gqa": (
        (Q, K[:, :2], V), {"enable_gqa": True}, UnsupportedError,
        ("value: num_heads is 4", "accepted: 2, that of key"),
    ),
    "batch": (
        (normal(3, 4, 5, 8), K, V), {}, UnsupportedError,
        ("query, key and value: shapes are (3, 4, 5, 8), (2, 4, 7, 8)", "accepted", "broadcast"),
    ),
    "dtype": (
        (Q, K.astype("f2"), V), {}, UnsupportedError,
        ("key: dtype is float16", "accepted: float32, that of query"),
    ),
    "seqlen of value": (
        (Q, K, V[:, :, :6]), {}, UnsupportedError,
        ("value: seqlen is 6", "accepted: 7, that of key"),
    ),
    "mask of integers": (
        (Q, K, V, MASK.astype(np.int32)), {}, UnsupportedError,
        ("attn_mask: dtype is int32", "accepted: that of query, or float32"),
    ),
    "shape of mask": (
        (Q, K, V, MASK[:, :6]), {}, UnsupportedError,
        ("attn_mask: shape is (5, 6)", "accepted: one that broadcasts", "(2, 4, 5, 7)"),
    ),
    "shape of float mask": (
        (Q, K, V, normal(3, 1, 5, 7)), {}, UnsupportedError,
        ("attn_mask: shape is (3, 1, 5, 7)", "accepted: one that broadcasts"),
    ),
    "mask of six dimensions": (
        (Q, K, V, MASK[None, None, None, None]), {}, UnsupportedError,
        ("attn_mask: shape is (1, 1, 1, 1, 5, 7)", "accepted: one that broadcasts"),
    ),
    "mask of another batch": (
        (*FIVE, normal(3, 3, 1, 5, 7)), {}, UnsupportedError,
        ("attn_mask: shape is (3, 3, 1, 5, 7)", "accepted: one that broadcasts to (*(2, 3), num"),
    ),
    "no view": (
        (FIVE[0], FIVE[1].swapaxes(0, 1).copy().swapaxes(0, 1), FIVE[2]), {}, UnsupportedError,
        ("key: its leading dimensions (2, 3) have the strides", "accepted: dimensions that lie"),
    ),
    "no view of what is broadcast": (
        (FIVE[0], FIVE[1][:1], FIVE[2]), {}, UnsupportedError,
        ("key: its leading dimensions (2, 3) have the strides (0, ", "accepted"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls(name, library):
    arguments, options, error, words = WRONG[name]
    if library == "torch":
        arguments = [torch.from_numpy(x) if isinstance(x, np.ndarray) else x for x in arguments]
    with pytest.raises(error) as caught:
        scaled_dot_product_attention(*arguments, **options)
    assert type(caught.value) is error
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("name", ["query", "key", "value", "attn_mask"])
def test_tensors_that_require_grad(name):
    tensors = {"query": Q, "key": K, "value": V, "attn_mask": normal(5, 7)}
    tensors = {key: torch.from_numpy(x).clone() for key, x in tensors.items()}
    tensors[name].requires_grad_()
    with pytest.raises(UnsupportedError) as caught:
        scaled_dot_product_attention(**tensors)
    assert str(caught.value).startswith(f"{name} requires grad")
    assert f"pass {name}.detach()" in str(caught.value)
    with torch.no_grad():
        scaled_dot_product_attention(**tensors)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("shapes", "mask", "options"),
    [
        ([(2, 4, 130, 64), (2, 4, 200, 64), (2, 4, 200, 64)], None, {"is_causal": True}),
        ([(2, 4, 130, 64), (2, 2, 70, 64), (2, 2, 70, 64)], None, {"enable_gqa": True}),
        ([(3, 130, 64), (3, 70, 64), (3, 70, 64)], (130, 70), {}),
        ([(2, 3, 4, 90, 64), (2, 3, 4, 90, 64), (2, 3, 4, 90, 64)], (2, 3, 1, 90, 90), {}),
    ],
)
def test_on_a_gpu(shapes, mask, options, dtype):
    tensors = [torch.from_numpy(normal(*s, seed=n)) for n, s in enumerate(shapes)]
    tensors = [x.to(getattr(torch, dtype)).cuda() for x in tensors]
    hidden = None if mask is None else torch.from_numpy(normal(*mask, seed=9) > 0)
    for attn_mask in (hidden, None if hidden is None else torch.where(hidden, 0.5, -math.inf)):
        on_gpu = None if attn_mask is None else attn_mask.cuda()
        got = scaled_dot_product_attention(*tensors, on_gpu, **options)
        assert got.is_cuda and got.dtype == tensors[0].dtype
        want = reference(*tensors, None if attn_mask is None else attn_mask.numpy(), **options)
        assert max_error(got, want) <= {"float16": 4e-3, "bfloat16": 3e-2}[dtype]
