"""Attention over processes on one GPU: threads stand for processes, queues for their messages.

NCCL has no part in it: it shows that kernels take every call of the ring.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("torch.distributed is not available", allow_module_level=True)

from ring_cases import CASES, Case, imprecise, tensors  # noqa: E402

from dlattn.integrations.ring import passes, shards  # noqa: E402
from dlattn.integrations.ring.calls import Problem  # noqa: E402
from dlattn.integrations.ring.schedule import mask_of  # noqa: E402
from dlattn.integrations.ring.sharding import take_rows  # noqa: E402

pytestmark = pytest.mark.gpu

SECONDS = 60.0  # for a message

NAMES = [name for name, case in CASES.items() if case.mode == "ring" and case.processes == 4]


@dataclasses.dataclass(frozen=True)
class Thread:
    """One of n threads as `communication.Group` is one of n processes."""

    n: int
    rank: int
    queues: Any = dataclasses.field(compare=False)

    def start(self, sends: Any, receives: Any) -> Any:
        for to, x in sends:
            if x.numel():
                assert x.is_contiguous()
                self.queues[self.rank, to].put(x)
        return _Arriving([(self.queues[at, self.rank], x) for at, x in receives if x.numel()])


class _Arriving:
    def __init__(self, expected: list[tuple[Queue[Any], Any]]) -> None:
        self.expected = expected

    def wait(self) -> None:
        for queue, x in self.expected:
            found = queue.get(timeout=SECONDS)
            assert found.dtype == x.dtype and found.shape == x.shape
            x.copy_(found)
        self.expected = []


def by_threads(case: Case, given: dict[str, Any]) -> list[Any]:
    """out, dq, dk, dv of the whole, and dsinks, by four threads."""
    queues: Any = defaultdict(Queue)
    for a in range(4):
        for b in range(4):
            queues[a, b] = Queue()
    packed = case.batch is None
    dim = 0 if packed else 1
    slopes, sinks = given["alibi_slopes"], given["sinks"]
    each = [shards.rows(case.lengths, 4, rank, case.order) for rank in range(4)]

    def run(rank: int) -> list[Any]:
        mask = mask_of(case.causal, case.window, slopes is not None)
        problem = Problem(
            Thread(4, rank, queues),  # type: ignore[arg-type]
            case.lengths,
            packed,
            case.order,
            mask,
            None,
            case.softcap,
            "bshd",
            True,
        )
        names = ("q", "k", "v", "dout")
        whole = [given[name][0] if packed else given[name] for name in names]
        q, k, v, dout = (take_rows(x, each[rank], dim) for x in whole)
        out, lse = passes.forward(problem, q, k, v, sinks, slopes)
        found = [out, *passes.backward(problem, dout, q, k, v, out, lse, slopes)]
        if sinks is not None:
            found.append(passes._sink_gradients(problem, dout, out, lse, sinks))
        return found

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(run, range(4)))
    wholes = []
    for parts in list(zip(*results, strict=True))[:4]:
        shape = list(parts[0].shape)
        shape[dim] = sum(case.lengths)
        whole = parts[0].new_full(shape, torch.nan)
        for part, ranges in zip(parts, each, strict=True):
            row = 0
            for a, b in ranges:
                whole.narrow(dim, a, b - a).copy_(part.narrow(dim, row, b - a))
                row += b - a
        wholes.append(whole[None] if packed else whole)
    return [*wholes, *([] if sinks is None else [sum(parts[4] for parts in results)])]


def check(name: str, device: str, dtype: str) -> None:
    case = dataclasses.replace(CASES[name], dtype=dtype, dims=(64, 64))
    given = {
        key: x if x is None else x.to(device)
        for key, x in tensors(case, sorted(CASES).index(name)).items()
    }
    assert imprecise(case, given, by_threads(case, given)) == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", NAMES)
def test_threads_on_a_gpu(name: str, dtype: str) -> None:
    check(name, "cuda", dtype)
