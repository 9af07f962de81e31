"""JAX: gradients of attention beside jax.nn's cuDNN path and FlashAttention-3: times, and memory as
sequences grow.

    python research/jax_training.py --json research/steps/jax-training.json
    python research/jax_training.py --device cpu --rows 128 256 --repeats 2

Forward and backward of one call under jit, bfloat16, batch 1, 16 heads, head_dim 128.
FlashAttention-3 takes part where the package `flash-attn3-jax` is there. A time is the median of
`--repeats` windows of as many calls as take `--seconds`, contestants in turns. `temp_bytes` is the
memory that XLA plans beside arguments and results, and `errors` the largest difference of a
gradient from float32 by jax.nn without a kernel, over its largest element, at the first of
`--rows`. The JSON is written after each of `--rows`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HEADS, HEAD_DIM = 16, 128
FLASH_3 = "flash_attn3_jax"
MOST_CALLS = 200  # of a window


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--rows", type=int, nargs="+", default=[2048, 4096, 8192, 16384])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.1, help="of a window")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", metavar="SHA", help="of dlattn, to record")
    return parser.parse_args()


ARGUMENTS = parse()
if ARGUMENTS.device == "cpu":  # before JAX is imported
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

import dlattn.jax  # noqa: E402

Attention = Callable[..., Any]


def by_dlattn(q: Any, k: Any, v: Any, causal: bool) -> Any:
    return dlattn.jax.attention(q, k, v, causal=causal)


def by_jax(q: Any, k: Any, v: Any, causal: bool, implementation: str | None) -> Any:
    return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation=implementation)


def by_flash_3(q: Any, k: Any, v: Any, causal: bool) -> Any:
    return importlib.import_module(FLASH_3).flash_mha(q, k, v, is_causal=causal)


def contestants() -> dict[str, Attention]:
    found: dict[str, Attention] = {"dlattn": by_dlattn}
    kind = "cudnn" if ARGUMENTS.device == "cuda" else "xla"
    found[f"jax.nn, {kind}"] = functools.partial(by_jax, implementation=kind)
    if ARGUMENTS.device == "cuda" and importlib.util.find_spec(FLASH_3) is not None:
        found["FlashAttention-3"] = by_flash_3
    return found


def step(attention: Attention, causal: bool, given: tuple[Any, ...]) -> Any:
    """The compiled gradients of a loss whose gradient by out is given[3]."""

    def loss(q: Any, k: Any, v: Any, dout: Any) -> Any:
        return (attention(q, k, v, causal).astype(jnp.float32) * dout).sum()

    return jax.jit(jax.grad(loss, (0, 1, 2))).lower(*given).compile()


def inputs(rows: int, dtype: Any) -> tuple[Any, ...]:
    keys = jax.random.split(jax.random.key(rows), 4)
    shape = (1, rows, HEADS, HEAD_DIM)
    return tuple(jax.random.normal(key, shape, dtype="bfloat16").astype(dtype) for key in keys)


def errors(found: Any, causal: bool, rows: int) -> list[float]:
    """The errors of dq, dk and dv; the scores of all heads are kept for them."""
    exact = step(functools.partial(by_jax, implementation="xla"), causal, inputs(rows, "float32"))
    pairs = zip(found, exact(*inputs(rows, "float32")), strict=True)
    return [float(jnp.abs(x.astype(jnp.float32) - y).max() / jnp.abs(y).max()) for x, y in pairs]


def window(call: Callable[[], Any], calls: int) -> float:
    """Milliseconds of a call."""
    begin = time.perf_counter()
    for _ in range(calls):
        result = call()
    jax.block_until_ready(result)
    return 1e3 * (time.perf_counter() - begin) / calls


def calls_of(call: Callable[[], Any]) -> int:
    """How many calls a window has."""
    window(call, 1)  # the first one loads kernels
    return max(1, min(MOST_CALLS, round(1e3 * ARGUMENTS.seconds / window(call, 2))))


def measure(rows: int, causal: bool) -> list[dict[str, Any]]:
    given = inputs(rows, "bfloat16")
    compiled = {name: step(x, causal, given) for name, x in contestants().items()}
    wrong = {}
    if rows == ARGUMENTS.rows[0]:
        wrong = {name: errors(x(*given), causal, rows) for name, x in compiled.items()}
    calls = {name: functools.partial(x, *given) for name, x in compiled.items()}
    counts = {name: calls_of(call) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ARGUMENTS.repeats + 1):
        for name, call in calls.items():
            times[name].append(window(call, counts[name]))
    return [
        {
            "contestant": name,
            "rows": rows,
            "causal": causal,
            "ms": statistics.median(times[name][1:]),
            "temp_bytes": x.memory_analysis().temp_size_in_bytes,
            **({"errors": wrong[name]} if wrong else {}),
        }
        for name, x in compiled.items()
    ]


def versions() -> dict[str, str]:
    found = {"jax": jax.__version__, "dlattn": dlattn.__version__}
    for package in ("nvidia-cudnn-cu13", "flash-attn3-jax"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def main() -> None:
    results: list[dict[str, Any]] = []
    head = {
        "device": jax.devices()[0].device_kind,
        "commit": ARGUMENTS.commit,
        "versions": versions(),
        "shape": f"(1, rows, {HEADS}, {HEAD_DIM}), bfloat16, forward and backward",
        "window_seconds": ARGUMENTS.seconds,
        "repeats": ARGUMENTS.repeats,
    }
    for rows in ARGUMENTS.rows:
        for causal in (False, True):
            found = measure(rows, causal)
            results += found
            for x in found:
                told = {key: x[key] for key in ("contestant", "rows", "causal", "ms", "temp_bytes")}
                print(told, flush=True)
        if ARGUMENTS.json:
            ARGUMENTS.json.write_text(json.dumps({**head, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
