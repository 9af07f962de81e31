"""JAX with two devices of the CPU: results are where q is. A program, as JAX fixes their number."""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
)

from typing import Any

import jax
import numpy as np

import dlattn
import dlattn.jax
from dlattn import flash_attn
from dlattn._flash_kvcache import _lengths
from dlattn.reference import attention_reference, error_bound, max_error
from dlattn.sageattention import sageattn

LAST = jax.devices()[-1]


def put(x: Any, dtype: str) -> Any:
    return jax.device_put(np.asarray(x, dtype), LAST)


def check(name: str, result: Any) -> None:
    for x in jax.tree.leaves(result):
        assert x.devices() == {LAST}, (name, x.devices())
        assert np.isfinite(np.asarray(x)).all(), name


def main() -> None:
    assert len(jax.devices()) == 2
    random = np.random.default_rng(0)
    q, k, v = (put(random.random((2, 5, 4, 8)) + 0.1, "float32") for _ in range(3))
    half = [x.astype("float16") for x in (q, k, v)]
    packed = [x.reshape(10, 4, 8) for x in (q, k, v)]
    starts, lengths, some = put([0, 5, 10], "int32"), put([5, 3], "int32"), put([2, 2], "int32")

    out, lse = dlattn.attention(q, k, v, return_lse=True)
    expected = attention_reference(q, k, v)
    bound = error_bound(q, k, v, expected=expected)
    assert max_error(np.asarray(out), expected[0]) <= bound.out
    check("attention", (out, lse))
    check("attention_varlen", dlattn.attention_varlen(*packed, starts, starts, 5, 5))
    check("attention_with_kvcache", dlattn.attention_with_kvcache(q, k, v, seqused_k=lengths))
    check("merge_states", dlattn.merge_states([out, out], [lse, lse]))
    quantized = dlattn.quantize_kv(*half[1:])
    check("quantize_kv", quantized.buffer)
    check("attention of them", dlattn.attention(half[0], quantized, None))
    check("scaled_dot_product_attention", dlattn.scaled_dot_product_attention(q, k, v))
    check("flash_attn_func", flash_attn.flash_attn_func(q, k, v, return_attn_probs=True))
    check("a length for all", flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=3))
    check("which is", _lengths(3, q, 5, None))
    check("sageattn", sageattn(*half, tensor_layout="NHD"))
    for pages in (0, 3):
        given = put([0, pages, pages], "int32"), put(np.arange(pages), "int32"), some
        table = dlattn.page_table_from_csr(*given, page_size=4, max_pages=4)
        check(f"a table of {pages} pages", table)
    for call in (dlattn.jax.attention, jax.jit(dlattn.jax.attention)):
        check("dlattn.jax.attention", call(q, k, v))
    print("passed")


if __name__ == "__main__":
    main()
