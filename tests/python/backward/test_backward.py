"""Gradients against float64: every feature, on the CPU. tests/python/gpu has the kernels'."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from arrays import to_float64
from capsules import Exporter
from gradients import (
    FEATURES,
    NAMES,
    array,
    check,
    check_finite_spellings,
    nans,
    random_problem,
    varlen_problem,
)

import dlattn
from dlattn.reference import max_error

DTYPES = ("float16", "bfloat16", "float32", "float64")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(12))
def test_random_problems(seed, dtype):
    check(random_problem(seed, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(3))
def test_all_features_at_once(seed, dtype):
    check(random_problem(seed, dtype, features=FEATURES))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "features",
    [
        (),
        ("seqused_k", "causal", "dlse", "dv"),
        ("bias", "mask", "alibi", "sinks", "softcap", "bhsd", "window"),
    ],
)
def test_varlen(features, seed, dtype):
    """NaN in rows of no sequence, and behind seqused_k, reaches nothing."""
    check(varlen_problem(seed, dtype, features=features))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("factor", [1e-4, 1e3])
def test_dout_of_any_size(factor, dtype):
    """The allowance follows the gradients' size, so that small ones are held to as much."""
    problem = random_problem(5, dtype, features=("causal", "bias", "sinks"))
    problem.dout = array(to_float64(problem.dout) * factor, dtype)
    found = check(problem)
    assert 0.01 * factor < np.max(np.abs(to_float64(found.dv))) < 100 * factor


@pytest.mark.parametrize("has_dout, has_dlse", [(True, False), (False, True), (True, True)])
def test_gradients_of_out_and_lse(has_dout, has_dlse):
    problem = random_problem(6, "float32", features=("dlse", "causal", "softcap", "sinks"))
    problem.dout = problem.dout if has_dout else None
    problem.dlse = problem.dlse if has_dlse else None
    found = check(problem)
    assert (found.dv != 0).any() == has_dout and (found.dk != 0).any()


def test_rows_of_dout_may_be_one_row():
    problem = random_problem(7, "float32", features=("causal",))
    problem.dout = np.broadcast_to(problem.dout[:1, :1, :1], problem.dout.shape)
    assert problem.dout.strides[:3] == (0, 0, 0)
    check(problem)
    # dlse may have any strides.
    dlse = np.float32(0.5)
    problem.dlse = np.broadcast_to(dlse, problem.lse.shape)
    check(problem)


@pytest.mark.parametrize("features", [("mask",), ("mask", "softcap"), ("mask", "sinks", "softcap")])
def test_rows_that_see_nothing(features):
    problem = random_problem(8, "float32", features=(*features, "dlse"))
    found = check(problem)
    blind = problem.inputs["q"].shape[1] // 2
    assert (found.dq[:, blind] == 0).all() and (found.dq[:, 0] != 0).any()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("lowest", [-1e9, -1e20, float(np.finfo(np.float32).min)])
def test_finite_spellings_of_minus_infinity(lowest, dtype):
    check_finite_spellings(lowest, dtype)


def test_keys_that_nobody_sees():
    problem = random_problem(9, "float32", features=())
    mask = np.ones((1, 1, 1, problem.inputs["k"].shape[1]), bool)
    mask[..., 1] = False
    problem.inputs["mask"] = mask
    given = {name: np.full_like(problem.inputs[name[1:]], np.nan) for name in ("dk", "dv")}
    found = check(problem, **given)
    assert (found.dk[:, 1] == 0).all() and (found.dv[:, 1] == 0).all()


@pytest.mark.parametrize("seqlen_q, seqlen_k", [(0, 5), (5, 0), (0, 0)])
def test_no_queries_or_no_keys(seqlen_q, seqlen_k):
    heads, dim = 2, 8
    q, k, v = (np.ones((2, n, heads, dim), np.float32) for n in (seqlen_q, seqlen_k, seqlen_k))
    sinks = np.ones(heads, np.float32)
    out, lse = dlattn.attention(q, k, v, sinks=sinks, return_lse=True)
    given = {
        name: np.full(x.shape, np.nan, np.float32) for name, x in zip("qkv", (q, k, v), strict=True)
    }
    found = dlattn.attention_backward(
        np.ones_like(out),
        q,
        k,
        v,
        out,
        lse,
        dlse=np.ones_like(lse),
        sinks=sinks,
        dq=given["q"],
        dk=given["k"],
        dv=given["v"],
    )
    assert all((x == 0).all() for x in found[:3])
    np.testing.assert_allclose(found.dsinks, np.full(heads, 2.0 * seqlen_q * (seqlen_k == 0)))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("of", ["lse", "q", "dout", "out"])
def test_rows_that_are_not_finite_reach_keys_that_they_see_alone(of, value, dtype):
    """Whichever tasks compute dk and dv, and so into whichever tiles they cut the problem."""
    problem = random_problem(3, dtype, features=("causal",), dims=(24,), most=130)
    seqlen_q, seqlen_k = problem.inputs["q"].shape[1], problem.inputs["k"].shape[1]
    problem.forward()
    row = seqlen_q // 2
    first_hidden = max(row + seqlen_k - seqlen_q + 1, 0)
    assert 0 < first_hidden < seqlen_k
    wanted = problem.gradients()
    tensor = {**problem.inputs, "lse": problem.lse, "dout": problem.dout, "out": problem.out}[of]
    tensor[(slice(None), slice(None), row) if of == "lse" else (slice(None), row)] = value
    for asked in ({}, {"needs": ("dk", "dv")}, {"needs": ("dk",)}, {"deterministic": True}):
        found = problem.gradients(**asked)
        for name in ("dk", "dv"):
            if (got := getattr(found, name)) is not None:
                want = getattr(wanted, name)[:, first_hidden:]
                assert max_error(got[:, first_hidden:], to_float64(want)) == 0.0, (name, asked)


def test_rows_that_see_nothing_reach_no_key():
    """NaN in q and dout of rows of padding, whose lse is -inf."""
    problem = random_problem(3, "float32", features=("mask",), dims=(24,), most=130)
    mask = np.ones((1, 1, problem.inputs["q"].shape[1], problem.inputs["k"].shape[1]), bool)
    mask[:, :, 1::3] = False
    problem.inputs["mask"] = mask
    problem.forward()
    wanted = problem.gradients()
    problem.inputs["q"][:, 1::3] = problem.dout[:, 1::3] = np.nan
    for asked in ({}, {"needs": ("dk", "dv")}):
        found = problem.gradients(**asked)
        assert np.array_equal(found.dk, wanted.dk) and np.array_equal(found.dv, wanted.dv)


def test_into_strided_tensors():
    problem = random_problem(10, "float32", features=("causal", "dv"))
    given = {}
    for name in ("dq", "dk", "dv"):
        shape = problem.inputs[name[1:]].shape
        given[name] = nans((*shape[:3], shape[3] + 5), "float32")[..., : shape[3]]
    found = check(problem, **given)
    for name, tensor in given.items():
        assert getattr(found, name) is tensor
        assert np.isnan(tensor.base).sum() == 5 * np.prod(tensor.shape[:3])


@pytest.mark.parametrize(
    "needs",
    [
        ("dq",),
        ("dk",),
        ("dv",),
        ("dk", "dv"),
        ("dbias",),
        ("dsinks",),
        ("dalibi_slopes", "dv"),
        NAMES,
    ],
)
def test_only_what_is_asked_for(needs):
    problem = random_problem(
        11, "float32", features=("bias", "sinks", "alibi", "causal", "softcap")
    )
    check(problem, needs=needs)


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_same_bits_each_time(deterministic):
    problem = random_problem(12, "float32", features=FEATURES, most=90)
    first = problem.gradients(deterministic=deterministic)
    for _ in range(5):
        again = problem.gradients(deterministic=deterministic)
        assert all(np.array_equal(x, y) for x, y in zip(first, again, strict=True))


@pytest.mark.parametrize("causal", [False, True])
def test_the_same_bits_in_any_batch(causal):
    """With `deterministic`, though few heads and many are computed by other tasks."""
    random = np.random.default_rng(31)
    q, k, v, dout = (
        random.normal(0.3, 1.0, (9, 400, heads, 8)).astype(np.float32) for heads in (4, 2, 2, 4)
    )
    out, lse = dlattn.attention(q, k, v, causal=causal, return_lse=True)
    options = {"causal": causal, "deterministic": True}
    whole = dlattn.attention_backward(dout, q, k, v, out, lse, **options)
    for b in (0, 8):
        one = [x[b : b + 1] for x in (dout, q, k, v, out, lse)]
        for x, y in zip(dlattn.attention_backward(*one, **options)[:3], whole[:3], strict=True):
            assert np.array_equal(x[0], y[b])


def test_a_part_of_the_keys():
    """With out and lse of a whole, the gradients are this part's share."""
    problem = random_problem(13, "float32", features=())
    whole = problem.gradients()
    k, v = problem.inputs["k"], problem.inputs["v"]
    half = k.shape[1] // 2 + 1
    dq = 0
    for keys in (slice(0, half), slice(half, None)):
        problem.inputs |= {"k": k[:, keys], "v": v[:, keys]}
        part = problem.gradients()
        dq = dq + part.dq
        np.testing.assert_allclose(part.dk, whole.dk[:, keys], atol=1e-5)
        np.testing.assert_allclose(part.dv, whole.dv[:, keys], atol=1e-5)
    np.testing.assert_allclose(dq, whole.dq, atol=1e-5)


def test_every_framework(framework):
    problem = random_problem(14, "float32", features=("bias", "sinks", "alibi", "dlse"))
    expected = problem.gradients()
    inputs = {name: framework.array(x) for name, x in problem.inputs.items()}
    given = (problem.dout, problem.out, problem.lse, problem.dlse)
    dout, out, lse, dlse = (framework.array(x) for x in given)
    found = dlattn.attention_backward(dout, out=out, lse=lse, dlse=dlse, **inputs)
    for name, one, other in zip(NAMES, found, expected, strict=True):
        assert framework.is_array(one) and max_error(one, other) == 0, name
    some = dlattn.attention_backward(dout, out=out, lse=lse, needs=["dk"], **inputs)
    assert framework.is_array(some.dk) and [x is None for x in some].count(True) == 5


def problem_for_errors() -> tuple[Any, dict[str, Any]]:
    problem = random_problem(15, "float32", features=())
    problem.forward()
    given = {**problem.inputs, "dout": problem.dout, "out": problem.out, "lse": problem.lse}
    return problem, given


def float16(x: Any) -> Any:
    return x.astype(np.float16)


@pytest.mark.parametrize(
    "changed, message",
    [
        (lambda g: {"dout": g["dout"][:, :-1]}, r"^dout: shape is .*accepted: .*that of out"),
        (lambda g: {"dout": float16(g["dout"])}, r"^dout: dtype is float16; accepted: float32"),
        (lambda g: {"dout": np.asfortranarray(g["dout"])}, r"^dout: the stride of the last"),
        (lambda g: {"dout": None}, r"^dout and dlse are null; accepted: at least one"),
        (lambda g: {"out": g["out"][..., :-1]}, r"^out: shape is "),
        (lambda g: {"out": float16(g["out"])}, r"^out: dtype is float16"),
        (lambda g: {"lse": g["lse"][..., :-1]}, r"^lse: shape is "),
        (lambda g: {"lse": g["lse"].astype(np.float64)}, r"^lse: dtype is float64; accepted: floa"),
        (lambda g: {"dlse": g["lse"][:, :-1]}, r"^dlse: shape is .*that of lse"),
        (lambda g: {"dlse": g["lse"].astype(np.float64)}, r"^dlse: dtype is float64"),
        (lambda g: {"dq": g["q"][:, :-1].copy()}, r"^dq: shape is .*that of q"),
        (lambda g: {"dk": float16(g["k"])}, r"^dk: dtype is float16; accepted: float32"),
        (lambda g: {"dv": np.asfortranarray(g["v"])}, r"^dv: the stride of the last"),
        (lambda g: {"dq": np.broadcast_to(g["q"], g["q"].shape)}, r"^dq is read-only; accepted"),
        (lambda g: {"dk": Exporter(g["k"], copied=True)}, r"^dk: its exporter gave a copy, by"),
        (lambda g: {"dq": g["q"]}, r"dq.*q|q.*dq"),
        (lambda g: {"dq": np.empty_like(g["q"]), "needs": ["dk"]}, r"^dq is given and is not am"),
        (lambda g: {"needs": "dq"}, r"^needs is a str; accepted"),
        (lambda g: {"needs": b"dq"}, r"^needs is a bytes; accepted"),
        (lambda g: {"needs": ["q"]}, r"^needs has 'q'; accepted: dq, dk"),
        (lambda g: {"needs": [3]}, r"^needs has 3; accepted: dq, dk"),
        (lambda g: {"needs": ["dbias"]}, r"^needs has dbias and bias is None"),
        (lambda g: {"needs": []}, r"^needs is \[\], .*accepted: at least one of them"),
        (lambda g: {"kernel": "decode"}, r"^kernel is 'decode'; accepted: \"auto\", \"cpu\", \"s"),
        (lambda g: {"kernel": "fast"}, r"^kernel is 'fast'; accepted: \"auto\", \"cpu\", \"s"),
        (lambda g: {"softcap": -1.0}, r"^softcap is -1"),
    ],
)
def test_wrong_calls(changed, message):
    _, given = problem_for_errors()
    given |= changed(given)
    with pytest.raises(dlattn.UnsupportedError, match=message):
        dlattn.attention_backward(**given)


def test_words_of_packed_sequences():
    """lse has the tokens of all sequences, one after the other."""
    problem = varlen_problem(1, "float32", features=())
    problem.forward()
    given = {**problem.inputs, **problem.lengths, "dout": problem.dout, "out": problem.out}
    heads, tokens = problem.lse.shape
    message = rf"^lse: shape is \({heads}, {tokens - 1}\); accepted: .*, \(num_heads, total_q\)$"
    with pytest.raises(dlattn.UnsupportedError, match=message):
        dlattn.attention_varlen_backward(**given, lse=problem.lse[:, :-1])


def test_more_rows_than_a_machine_has_memory_for():
    """Tensors repeat one element here, so that the call alone would need memory."""
    rows = np.broadcast_to(np.ones(8, np.float32), (2**31 - 1, 1, 2**16, 8))
    given = {
        **dict.fromkeys(("dout", "q", "k", "v", "out"), rows),
        "lse": np.broadcast_to(np.ones((1, 1, 1), np.float32), (2**31 - 1, 2**16, 1)),
        "sinks": np.ones(2**16, np.float32),
        "needs": ["dsinks"],
    }
    message = r"batch_size is 2147483647, num_heads 65536, and q has 1 rows; accepted: as many as"
    with pytest.raises(dlattn.UnsupportedError, match=message):
        dlattn.attention_backward(**given)
    assert not dlattn.supported_backward(**given)


@pytest.mark.parametrize("varlen", [False, True])
def test_plan(varlen):
    problem = (varlen_problem if varlen else random_problem)(17, "float32", features=("bias",))
    problem.forward()
    given = {**problem.inputs, **problem.lengths, "out": problem.out, "lse": problem.lse}
    given |= {"dout": problem.dout, **problem.options}
    assert dlattn.supported_backward(**given)
    plan = dlattn.plan_backward(**given)
    assert (plan.kernel, plan.dtype, plan.passed_over) == ("cpu", "float32", ())
    assert str(plan).startswith("operation: backward")


def test_plans_of_wrong_calls():
    _, given = problem_for_errors()
    for wrong, message in (
        ({"kernel": "wmma"}, "wmma: the tensors are on the CPU"),
        ({"kernel": "decode"}, "kernel is 'decode'"),
        ({"needs": ["dbias"]}, "needs has dbias and bias is None"),
        ({"dq": np.empty_like(given["q"])[:, 1:]}, "dq: shape is"),
        ({"seqused_k": np.ones(1, np.int32)}, "seqused_k is given; accepted: None"),
        ({"cu_seqlens_q": np.zeros(2, np.int32)}, "max_seqlen_q is of type NoneType"),
    ):
        with pytest.raises((dlattn.UnsupportedError, TypeError), match=message):
            dlattn.plan_backward(**{**given, **wrong})
        if "cu_seqlens_q" not in wrong:
            support = dlattn.supported_backward(**{**given, **wrong})
            assert not support and message in "; ".join(support.reasons)
    with pytest.raises(TypeError, match="needs"):
        dlattn.supported_backward(**given, needs=3)


def test_wrong_kinds_of_objects():
    _, given = problem_for_errors()
    for name in ("out", "lse", "q"):
        with pytest.raises(TypeError, match=rf"^{name} is None|{name}"):
            dlattn.attention_backward(**{**given, name: None})
    with pytest.raises(TypeError, match="deterministic"):
        dlattn.attention_backward(**given, deterministic="yes")
    with pytest.raises(TypeError, match="needs"):
        dlattn.attention_backward(**given, needs=3)


@pytest.mark.parametrize("varlen", [False, True])
def test_quantised_keys_are_refused(varlen):
    lengths = {"cu_seqlens_k": np.array([0, 9], np.int32), "max_seqlen_k": 9} if varlen else {}
    shape = (9, 2, 8) if varlen else (1, 9, 2, 8)
    q = np.ones(shape, np.float16)
    kv = dlattn.quantize_kv(q, q, **lengths)
    lse = np.zeros((2, 9) if varlen else (1, 2, 9), np.float32)
    offsets = [lengths["cu_seqlens_k"]] * 2 + [9, 9] if varlen else []
    call = (q, q, kv, None, q, lse, *offsets)
    words = "k is a QuantizedKV; accepted: a tensor, as quantised keys have no gradients"
    function = dlattn.attention_varlen_backward if varlen else dlattn.attention_backward
    for ask in (function, dlattn.plan_backward):
        with pytest.raises(dlattn.UnsupportedError, match=words):
            ask(*call)
    assert any(words in why for why in dlattn.supported_backward(*call).reasons)


def test_8_bit_tensors_are_refused():
    problem, given = problem_for_errors()
    float8 = {name: array(x, "float8_e4m3fn") for name, x in problem.inputs.items()}
    with pytest.raises(dlattn.UnsupportedError, match="float8_e4m3fn"):
        dlattn.attention_backward(**{**given, **float8})
