"""Random shapes, strides, exporters and options: each call is right, or raises what it should.

A crash would end the whole run, so the calls run in a process of their own.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from arrays import NumPy, assert_attention
from capsules import Exporter, OldestExporter, OldExporter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dlattn

EXAMPLES = int(os.environ.get("DLATTN_FUZZ_EXAMPLES", "200"))
quickly = settings(
    max_examples=EXAMPLES, deadline=None, derandomize=True, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip

sizes = st.sampled_from([0, 1, 1, 2, 3, 5, 8, 17, 33])
dtypes = st.sampled_from(["float16", "bfloat16", "float32", "float64"])


@st.composite
def laid_out(draw: Any, shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    """An array of `shape`, its last dimension contiguous, the others in any order and spacing."""
    last = len(shape) - 1
    order = [*draw(st.permutations(range(last))), last]
    spacing = draw(st.lists(st.integers(1, 3), min_size=len(shape), max_size=len(shape)))
    repeat = draw(st.sets(st.sampled_from(range(last)))) if draw(st.booleans()) else set()
    stored = [1 if i in repeat else shape[i] for i in order]
    values = np.random.default_rng(seed).standard_normal(
        [n * s for n, s in zip(stored, spacing, strict=True)]
    )
    values = NumPy().array(values + 0.25, dtype)
    cut = tuple(slice(0, n) if i == last else slice(0, None, s)
                for i, n, s in zip(order, stored, spacing, strict=True))  # fmt: skip
    view = values[cut].transpose(np.argsort(order))
    return np.broadcast_to(view, shape)


@st.composite
def correct_calls(draw: Any) -> tuple[list[np.ndarray], dict[str, Any]]:
    batch, seqlen_q, seqlen_k = draw(sizes), draw(sizes), draw(sizes)
    num_heads_kv = draw(st.sampled_from([1, 2, 3]))
    num_heads = num_heads_kv * draw(st.sampled_from([1, 2, 3]))
    head_dim = draw(st.sampled_from([1, 2, 7, 8, 16, 31]))
    head_dim_v = draw(st.sampled_from([head_dim, head_dim, 1, 9]))
    dtype = draw(dtypes)
    layout = draw(st.sampled_from(["bshd", "bhsd"]))
    arrays = []
    for seed, (s, h, d) in enumerate([
        (seqlen_q, num_heads, head_dim),
        (seqlen_k, num_heads_kv, head_dim),
        (seqlen_k, num_heads_kv, head_dim_v),
    ]):  # fmt: skip
        shape = (batch, s, h, d) if layout == "bshd" else (batch, h, s, d)
        arrays.append(draw(laid_out(shape, dtype, seed)))
    full = (batch, num_heads, seqlen_q, seqlen_k)

    def broadcastable(seed: int, dtype: str) -> Any:
        shape = [n if draw(st.booleans()) else 1 for n in full][draw(st.integers(0, 3)) :]
        return NumPy().array(np.random.default_rng(seed).standard_normal(shape), dtype)

    side = st.one_of(st.none(), st.integers(0, 40), st.just(2**50))
    options: dict[str, Any] = {"layout": layout}
    if draw(st.booleans()):
        options["causal"] = draw(st.sampled_from([True, False, "bottom_right", "top_left"]))
    if draw(st.booleans()):
        options["window"] = (draw(side), draw(side))
    if draw(st.booleans()):
        options["softmax_scale"] = draw(st.floats(1e-3, 2.0))
    if draw(st.integers(0, 3)) == 0:
        options["softcap"] = draw(st.floats(0.5, 30.0))
    if draw(st.integers(0, 3)) == 0:
        options["bias"] = broadcastable(7, draw(st.sampled_from([dtype, "float32"])))
    if draw(st.integers(0, 3)) == 0:
        options["mask"] = broadcastable(8, "float32") > -0.5
    if draw(st.integers(0, 3)) == 0:
        shape = (batch, num_heads) if draw(st.booleans()) else (num_heads,)
        options["alibi_slopes"] = np.abs(
            NumPy().array(np.random.default_rng(9).random(shape), "float32")
        )
    if draw(st.integers(0, 3)) == 0:
        options["sinks"] = NumPy().array(np.random.default_rng(10).random(num_heads), "float32")
    return arrays, options


@pytest.mark.skipif("DLATTN_FUZZ" not in os.environ, reason="runs in a process of its own")
class TestFuzz:
    @quickly
    @given(correct_calls(), st.booleans())
    def test_correct_calls_are_right(self, call, return_lse):
        arrays, options = call
        assert dlattn.supported(*arrays, **options)
        got = dlattn.attention(*arrays, return_lse=return_lse, **options)
        assert_attention(got, *arrays, **options)

    @quickly
    @given(correct_calls(), st.data())
    def test_distorted_calls_raise_what_they_should(self, call, data):
        """One tensor is replaced by one of another shape, dtype, device or exporter."""
        arrays, options = call
        tensors: dict[str, Any] = dict(zip("qkv", arrays, strict=True))
        tensors |= {
            n: options[n] for n in ("bias", "mask", "alibi_slopes", "sinks") if n in options
        }
        name = data.draw(st.sampled_from(sorted(tensors)))
        target = tensors[name]
        kind = data.draw(st.sampled_from(["shape", "dtype", "export", "strides", "object", "drop"]))
        if kind == "shape":
            shape = data.draw(st.lists(st.integers(0, 4), max_size=10))
            tensors[name] = np.ones(shape, target.dtype)
        elif kind == "dtype":
            codes = st.tuples(*[st.integers(0, 20)] * 3)
            tensors[name] = Exporter(np.ones(target.shape, "f8"), dtype=data.draw(codes))
        elif kind == "export" and target.dtype.kind in "fb":
            version = st.sampled_from([None, (1, 0), (1, 9), (0, 8), (3, 1)])
            device = st.tuples(st.sampled_from([1, 3, 2, 13, 8, 10, 77, -1]), st.integers(-1, 3))
            exporter = data.draw(st.sampled_from([Exporter, OldExporter, OldestExporter]))
            tensors[name] = exporter(target, version=data.draw(version), device=data.draw(device))
        elif kind == "strides" and target.dtype.kind in "fb" and target.ndim:
            # Strides that stay inside a large enough block of memory.
            memory = np.ones(200_000, target.dtype)
            strides = data.draw(
                st.lists(st.integers(-1, 40), min_size=target.ndim, max_size=target.ndim)
            )
            tensors[name] = Exporter(
                memory, shape=target.shape, strides=strides, pointer=memory[100_000:].ctypes.data
            )
        elif kind == "object":
            tensors[name] = data.draw(
                st.one_of(st.none(), st.integers(), st.text(), st.lists(st.floats()), st.binary())
            )
        elif kind == "drop" and target.ndim:
            tensors[name] = target[data.draw(st.integers(0, 2)) :]
        q, k, v = (tensors.pop(n) for n in "qkv")
        self.run(q, k, v, **{**options, **tensors})

    @quickly
    @given(correct_calls(), st.data())
    def test_distorted_options_raise_what_they_should(self, call, data):
        arrays, options = call
        anything = st.one_of(
            st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8),
            st.sampled_from(["bshd", "bhsd", "auto", "cpu", "scalar", "top_left", 2**64, -(2**64)]),
            st.tuples(st.integers(), st.integers()),
            st.lists(st.one_of(st.none(), st.integers(), st.floats()), max_size=3),
            st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
        )  # fmt: skip
        names = ["causal", "softmax_scale", "window", "softcap", "layout", "out", "return_lse",
                 "stream", "kernel", "bias", "mask", "alibi_slopes", "sinks"]  # fmt: skip
        changed = data.draw(
            st.dictionaries(st.sampled_from(names), anything, min_size=1, max_size=3)
        )
        self.run(*arrays, **{**options, **changed})

    @quickly
    @given(st.data())
    def test_varlen(self, data):
        def cu_seqlens() -> np.ndarray:
            if data.draw(st.integers(0, 4)) == 0:
                values = data.draw(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5))
            else:
                lengths = data.draw(st.lists(st.integers(0, 9), min_size=2, max_size=2))
                values = list(itertools.accumulate(lengths, initial=0))
            return np.array(values, np.int32)

        cu_q, cu_k = cu_seqlens(), cu_seqlens()
        honest = data.draw(st.integers(0, 4)) > 0
        total_q = int(cu_q[-1]) if honest and cu_q.size and 0 <= cu_q[-1] < 100 else 5
        total_k = int(cu_k[-1]) if honest and cu_k.size and 0 <= cu_k[-1] < 100 else 7
        rng = np.random.default_rng(0)
        q, k, v = (
            rng.standard_normal((n, 2, 8)).astype(np.float32) for n in (total_q, total_k, total_k)
        )
        used = data.draw(st.one_of(st.none(), st.lists(st.integers(-2, 9), max_size=3)))
        self.run(
            q, k, v, cu_q, cu_k,
            data.draw(st.integers(-1, 12)),
            data.draw(st.integers(-1, 12)),
            function=dlattn.attention_varlen,
            seqused_k=None if used is None else np.array(used, np.int32),
            causal=data.draw(st.booleans()),
        )  # fmt: skip

    @quickly
    @given(st.data())
    def test_merge_states(self, data):
        shape = data.draw(st.lists(st.integers(0, 4), min_size=3, max_size=5))
        lse_shape = data.draw(st.one_of(
            st.just([shape[0], shape[2], shape[1]]), st.lists(st.integers(0, 4), max_size=5)
        ))  # fmt: skip
        parts, lse_parts = data.draw(st.integers(0, 34)), data.draw(st.integers(0, 34))
        rng = np.random.default_rng(0)
        dtype = data.draw(st.sampled_from(["float16", "float32", "float64", "int32"]))
        outs = [rng.standard_normal(shape).astype(dtype) for _ in range(parts)]
        lses = [
            rng.standard_normal(lse_shape).astype(np.float32)
            for _ in range(parts if data.draw(st.booleans()) else lse_parts)
        ]
        if outs and lses and data.draw(st.booleans()):
            outs, lses = np.stack(outs), np.stack(lses)
        self.run(outs, lses, function=dlattn.merge_states)

    @staticmethod
    def run(*arguments: Any, function: Any = dlattn.attention, **options: Any) -> None:
        """Only the promised exceptions, and what `supported` says is what happens."""
        try:
            result = function(*arguments, **options)
        except (TypeError, dlattn.UnsupportedError, dlattn.DeviceError) as error:
            assert str(error)
            raised: type | None = type(error)
        else:
            raised = None
            out = result[0] if isinstance(result, tuple) else result
            assert out is not None
        if function is dlattn.merge_states:
            return
        if raised is TypeError:
            with pytest.raises(TypeError):
                dlattn.supported(*arguments, **options)
        else:
            assert bool(dlattn.supported(*arguments, **options)) == (raised is None)


# The same examples each time: there are more of them in the nightly run.
@pytest.mark.slow
@pytest.mark.parametrize("examples", [EXAMPLES, pytest.param(2000, marks=pytest.mark.nightly)])
def test_fuzz_in_a_process_of_its_own(examples):
    command = [sys.executable, "-X", "faulthandler", "-m", "pytest", "-q", "-x", "-p",
               "no:cacheprovider", __file__, "-k", "TestFuzz"]  # fmt: skip
    done = subprocess.run(
        command,
        env={**os.environ, "DLATTN_FUZZ": "1", "DLATTN_FUZZ_EXAMPLES": str(examples)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    assert "5 passed" in done.stdout
