"""JAX: attention over the GPUs of one host beside the ideal, one GPU's time over their number.

    python research/jax_ring.py --json research/steps/jax-ring-4.json
    python research/jax_ring.py --only causal --hlo causal.hlo --profile causal-trace
    python research/jax_ring.py --device cpu --devices 4 --rows 64 --whole 128 --repeats 2

Forward alone, and forward and backward, in bfloat16, batch 1, head_dim 128, `--rows` positions a
GPU. A figure is the median of calls; efficiency is the ideal over it. The ideal is measured on the
first GPU in the same run, and where the whole is longer than `--whole` rows, for that many and
scaled by operations. `temp_bytes` is the memory that XLA plans on a GPU beside arguments and
results. In the compiled program that --hlo writes, each collective-permute-start of keys is to
stand before a call of attention and its -done behind it, and in the trace they are to overlap.

XLA computes beside one collective permutation at a time: that of gradients stands alone, and
XLA_FLAGS=--xla_gpu_experimental_parallel_collective_overlap_limit=2 may change it (not tried).
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HEAD_DIM = 128
GROUPED, EACH = (32, 8), (8, 8)
# name: (num_heads, num_heads_kv), options, order; None: arrays split by XLA, without shard_map
CASES: dict[str, tuple[tuple[int, int], dict[str, Any], str | None]] = {
    "causal": (GROUPED, {"causal": True}, "zigzag"),
    "causal_mha": (EACH, {"causal": True}, "zigzag"),
    "full": (GROUPED, {}, "zigzag"),
    "deterministic": (GROUPED, {"causal": True, "deterministic": True}, "zigzag"),
    "window": (GROUPED, {"causal": True, "window": (4096, None)}, "contiguous"),
    "split_causal": (GROUPED, {"causal": True}, None),
    "split_full": (GROUPED, {}, None),
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--devices", type=int, help="all, by default")
    parser.add_argument("--rows", type=int, default=32768, help="positions a device has")
    parser.add_argument("--whole", type=int, default=131072, help="rows that one device computes")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--whole-repeats", type=int, help="calls of the whole, where not as many")
    parser.add_argument("--seconds", type=float, default=3600, help="no case begins later")
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--hlo", type=Path, help="where the last program is written")
    parser.add_argument("--profile", type=Path, help="folder of the last program's trace")
    return parser.parse_args()


ARGUMENTS = parse()
if ARGUMENTS.device == "cpu":  # before JAX is imported
    os.environ["JAX_PLATFORMS"] = "cpu"
    count = f"--xla_force_host_platform_device_count={ARGUMENTS.devices or 4}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {count}"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import dlattn.jax  # noqa: E402

ROWS = P(None, "x")


def inputs(rows: int, heads: tuple[int, int], sharding: Any) -> list[Any]:
    """q, k, v and dout. Their order of rows makes no difference to the time."""

    @functools.partial(jax.jit, out_shardings=sharding)
    def make() -> list[Any]:
        keys = jax.random.split(jax.random.key(1), 4)
        sizes = (heads[0], heads[1], heads[1], heads[0])
        return [
            jax.random.normal(key, (1, rows, h, HEAD_DIM), dtype=jnp.bfloat16)
            for key, h in zip(keys, sizes, strict=True)
        ]

    return jax.block_until_ready(make())


def gradients(attention: Callable[..., Any]) -> Callable[..., Any]:
    def both(q: Any, k: Any, v: Any, dout: Any) -> Any:
        out, pull = jax.vjp(attention, q, k, v)
        return out, pull(dout)

    return both


def milliseconds(function: Callable[..., Any], arrays: list[Any], repeats: int) -> float:
    times = []
    for i in range(repeats + 1):
        start = time.perf_counter()
        jax.block_until_ready(function(*arrays))
        times += [1e3 * (time.perf_counter() - start)] if i else []
    return statistics.median(times)


def operations(rows: int, options: dict[str, Any]) -> float:
    """Scores that are computed, but for a factor that all cases share."""
    seen = min(rows, 1 + options.get("window", (rows, None))[0])
    causal = seen * (seen + 1) / 2 + (rows - seen) * seen
    return causal if options.get("causal") else rows * rows


def attention_of(name: str, mesh: Any) -> Callable[..., Any]:
    _, options, order = CASES[name]
    if order is None:
        return functools.partial(dlattn.jax.attention, **options)
    attend = functools.partial(dlattn.jax.ring_attention, axis_name="x", order=order, **options)
    return jax.shard_map(attend, mesh=mesh, in_specs=(ROWS,) * 3, out_specs=ROWS)


def measure(name: str, mesh: Any, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    n = mesh.size
    heads, options, _ = CASES[name]
    rows = arguments.rows * n
    whole = {x: y for x, y in options.items() if x != "deterministic"}
    fitting = min(rows, arguments.whole)
    results = []
    own = attention_of(name, mesh)
    one = functools.partial(dlattn.jax.attention, **whole)
    for work, function, ideal in (
        ("forward", lambda *x: own(*x[:3]), lambda *x: one(*x[:3])),
        ("forward_backward", gradients(own), gradients(one)),
    ):
        arrays = inputs(rows, heads, NamedSharding(mesh, ROWS))
        compiled = jax.jit(function).lower(*arrays).compile()
        took = milliseconds(compiled, arrays, arguments.repeats)
        text = compiled.as_text()
        if arguments.hlo:
            arguments.hlo.write_text(text)
        if arguments.profile:
            with jax.profiler.trace(str(arguments.profile)):
                jax.block_until_ready(compiled(*arrays))
        memory = compiled.memory_analysis()
        del arrays
        alone = inputs(fitting, heads, jax.sharding.SingleDeviceSharding(jax.devices()[0]))
        repeats = arguments.whole_repeats or arguments.repeats
        ideal_ms = milliseconds(jax.jit(ideal), alone, repeats) / n
        ideal_ms *= operations(rows, whole) / operations(fitting, whole)
        del alone
        results.append(
            {
                "case": name,
                "work": work,
                "num_heads": heads[0],
                "num_heads_kv": heads[1],
                "rows_per_device": arguments.rows,
                "options": options,
                "ms": took,
                "ideal_ms": ideal_ms,
                "efficiency": ideal_ms / took,
                "ideal_measured_rows": fitting,
                "temp_bytes": getattr(memory, "temp_size_in_bytes", None),
                "gathers": " all-gather" in text,
            }
        )
        words = ("case", "work", "ms", "ideal_ms", "efficiency", "temp_bytes", "gathers")
        print(*(f"{word} {results[-1][word]}" for word in words), flush=True)
    return results


def main() -> None:
    devices = jax.devices()[: ARGUMENTS.devices]
    mesh = jax.make_mesh(
        (len(devices),), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=devices
    )
    head = {
        "device": devices[0].device_kind,
        "devices": len(devices),
        "jax": jax.__version__,
        "dlattn": dlattn.__version__,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }
    results: list[dict[str, Any]] = []
    begin = time.monotonic()
    for name in ARGUMENTS.only:
        if time.monotonic() - begin > ARGUMENTS.seconds:
            break
        results += measure(name, mesh, ARGUMENTS)
        if ARGUMENTS.json:
            text = json.dumps({**head, "results": results}, indent=1)
            ARGUMENTS.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
