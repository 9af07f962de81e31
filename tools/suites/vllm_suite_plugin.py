"""A plug-in of vLLM's processes, by which `vllm_suite` learns of the calls that reach dlattn.

Each call's output is compared with attention in float64 over the very values of the cache's pages.
A line of JSON for each call goes to the file that SUITE_CALLS names, from whichever process.
"""

from __future__ import annotations

import json
import os
from typing import Any

import dlattn
from dlattn.reference import attention_reference, error_bound, max_error

SCORES = ("causal", "softmax_scale", "window", "softcap", "alibi_slopes", "sinks")
_attend = dlattn.attention_varlen


def kinds(new: list[int], keys: list[int]) -> list[str]:
    """Names of what a step has, by each request's number of queries and of keys."""
    chunks = any(1 < q < k for q, k in zip(new, keys, strict=True))
    found = {
        "single tokens alone": max(new) == 1,
        "single tokens beside prompts": max(new) > 1 and 1 in new,
        "chunks behind others": chunks,
    }
    return [kind for kind, there in found.items() if there]


def error(arguments: Any, options: Any) -> float:
    """The largest error of a call's output, relative to `error_bound`: twice a plain computation's.

    Keys and values are read from the pages and multiplied by their factors, so that neither the
    rounding of a cache in 8 bits nor who wrote it counts.
    """
    q, out = arguments[0].cpu(), options["out"].cpu()
    starts, lengths = arguments[3].tolist(), options["seqused_k"].tolist()
    shared = {
        name: getattr(value, "cpu", lambda value=value: value)()
        for name, value in options.items()
        if name in SCORES and value is not None
    }
    largest = 0.0
    for r, keys in enumerate(lengths):
        rows = slice(starts[r], starts[r + 1])
        if rows.start == rows.stop or keys == 0:
            continue
        k, v = (
            _values(cache, options["page_table"][r], keys, options.get(factor))
            for cache, factor in zip(arguments[1:3], ("k_descale", "v_descale"), strict=True)
        )
        given = (q[None, rows], k[None], v[None])
        dtype = str(q.dtype).removeprefix("torch.")
        expected = attention_reference(*given, **shared)
        allowed = error_bound(*given, dtype=dtype, expected=expected, **shared).out
        found = max_error(out[None, rows], expected[0]) / allowed
        largest = max(largest, found if found == found else float("inf"))
    return largest


def _values(cache: Any, pages: Any, keys: int, factor: Any) -> Any:
    """The float32 values of a request's keys, (keys, heads, head_dim)."""
    import torch

    used = pages[: -(-keys // cache.shape[1])].tolist()
    values = torch.cat([cache[page].detach().float() for page in used])[:keys]
    return (values if factor is None else values * factor.float()).cpu()


def register() -> None:
    """Put functions of this module in the places of those that they call."""
    dlattn.attention_varlen = _counted
    _prepare_cpus()


def _counted(*arguments: Any, **options: Any) -> Any:
    found = _attend(*arguments, **options)
    steps = kinds(arguments[3].diff().tolist(), options["seqused_k"].tolist())
    line = json.dumps({"kinds": steps, "error": error(arguments, options)})
    with open(os.environ["SUITE_CALLS"], "a") as file:
        file.write(f"{line}\n")
    return found


def _prepare_cpus() -> None:
    """Let vLLM's own backend for CPUs run in bfloat16, and write the bytes that dlattn writes.

    Its kernels in bfloat16 use AMX, which a process has to ask the system for.
    vLLM's kernels for CPUs cut what they write to e4m3 off towards zero, where dlattn and vLLM's
    kernels for GPUs round to the nearest. Values that are of e4m3 already are written as they are.
    """
    import torch
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    getattr(torch.cpu, "_init_amx", bool)()
    write = CPUAttentionBackendImpl.do_kv_cache_update
    if hasattr(write, "rounds"):
        return

    def rounded(self: Any, layer: Any, key: Any, value: Any, *others: Any) -> None:
        if self.is_fp8_kv_cache:
            factors = layer._k_scale_float, layer._v_scale_float
            key, value = (
                (x / factor).to(torch.float8_e4m3fn).to(x.dtype) * factor
                for x, factor in zip((key, value), factors, strict=True)
            )
        write(self, layer, key, value, *others)

    rounded.rounds = True  # type: ignore[attr-defined]
    CPUAttentionBackendImpl.do_kv_cache_update = rounded
