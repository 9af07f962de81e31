"""A process whose first calls of dlattn come at once, from fresh threads behind a barrier.

    python first_calls.py numpy torch    on the CPU, with tensors of these libraries by turns

Ends with an error if a thread does not come back, raises, or gets another result than one alone.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

import dlattn

THREADS = 32
PATIENCE = 60.0  # seconds


def tensors(library: str, arrays: list[Any]) -> list[Any]:
    if library == "torch":
        import torch

        return [torch.from_numpy(x) for x in arrays]
    if library == "jax":
        import jax

        return [jax.numpy.asarray(x) for x in arrays]
    return arrays


def jobs(library: str) -> list[Callable[[], Any]]:
    random = np.random.default_rng(1)

    def normal(*shape: int) -> Any:
        return (random.standard_normal(shape) + 0.3).astype(np.float32)

    q, k, v = tensors(library, [normal(2, 9, 4, 16), normal(2, 70, 2, 16), normal(2, 70, 2, 16)])
    starts = np.array([0, 4, 9], np.int32)
    packed, cu_seqlens = tensors(library, [normal(9, 2, 16), starts])
    part, lse = tensors(library, [normal(1, 9, 2, 16), normal(1, 2, 9)])
    return [
        lambda: dlattn.attention(q, k, v, causal=True),
        lambda: dlattn.attention_varlen(packed, packed, packed, cu_seqlens, cu_seqlens, 5, 5),
        lambda: dlattn.merge_states([part, part], [lse, lse]),
        lambda: dlattn.supported(q, k, v),
        lambda: dlattn.plan(q, k, v),
        lambda: dlattn.info(),
    ]


def text(result: Any) -> str:
    parts = result if isinstance(result, tuple) else (result,)
    if all(hasattr(part, "__array__") for part in parts):
        return str([np.asarray(part).tolist() for part in parts])
    return str(result)


def main(libraries: list[str]) -> None:
    work = [job for jobs_of_one in zip(*map(jobs, libraries), strict=True) for job in jobs_of_one]
    barrier = threading.Barrier(THREADS)
    results: list[Any] = [None] * THREADS

    def run(index: int) -> None:
        barrier.wait()
        results[index] = work[index % len(work)]()

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    if any(thread.is_alive() for thread in threads):
        faulthandler.dump_traceback()
        os._exit(1)
    for index, result in enumerate(results):
        assert text(result) == text(work[index % len(work)]()), index


if __name__ == "__main__":
    main(sys.argv[1:])
