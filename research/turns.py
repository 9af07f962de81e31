"""Simulated cost of the turns by which sm90's deterministic backward pass adds to dq.

    python research/turns.py

Blocks of keys draw tickets and start on the SM that is free first; a step's additions come after
those of the block before in the tile's order, by the time of a turn. A ratio is the time without
turns, in the fast kernels' order of blocks, over that with them. The times of steps and blocks are
those of `src/cuda/backward/sm90/plan.cpp`; nobody has measured the time of a turn.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

SMS = 132
TOGETHER = 8  # heads that are walked together
STEP, BLOCK = 2.56, 3.0  # us: a step, which head_dim does not change; a block beside its steps
ELEMENTS = 1 << 25  # rows times heads times head_dim


@dataclass(frozen=True)
class Problem:
    seqlen: int
    heads: int
    head_dim: int
    causal: bool

    @property
    def keys(self) -> int:
        return 64 if self.head_dim > 128 else 128

    @property
    def queries(self) -> int:
        return 128 if self.head_dim == 64 else 64


def tickets(problem: Problem, together: int, last_first: bool) -> list[tuple[int, int]]:
    """The head and the block of keys of each ticket."""
    blocks = range(-(-problem.seqlen // problem.keys))
    found = []
    for first in range(0, problem.heads, together):
        heads = range(first, min(first + together, problem.heads))
        found += [(h, n) for n in (reversed(blocks) if last_first else blocks) for h in heads]
    return found


def microseconds(
    problem: Problem, turn: float | None = None, together: int = TOGETHER, last_first: bool = True
) -> float:
    """The time of the grid. `turn`: from a block's additions to the next one's; None: no turns."""
    free = [0.0] * SMS
    tiles = -(-problem.seqlen // problem.queries)
    added: dict[int, list[float]] = {}  # by head: when the last additions to each tile were
    for head, block in tickets(problem, together, last_first):
        now = heapq.heappop(free) + BLOCK
        last = added.setdefault(head, [-1e9] * tiles)
        for m in range(block * problem.keys // problem.queries if problem.causal else 0, tiles):
            now += STEP
            if turn is not None:
                now = last[m] = max(now, last[m] + turn)
        heapq.heappush(free, now)
    return max(free)


def ratio(problem: Problem, turn: float, **order: bool) -> float:
    together = TOGETHER if problem.causal else 1
    fast = microseconds(problem, together=together, last_first=False)
    return fast / microseconds(problem, turn, **order)


def main() -> None:
    turns = (1.5, 2.5, 4.0)
    print("head_dim seqlen mask  ", *(f"{turn:5} us" for turn in turns))
    for head_dim in (64, 128, 256):
        for seqlen in (1024, 4096, 16384):
            for causal in (False, True):
                heads = ELEMENTS // (seqlen * head_dim)
                problem = Problem(seqlen, heads, head_dim, causal)
                ratios = (f"{ratio(problem, turn):8.2f}" for turn in turns)
                print(f"{head_dim:8} {seqlen:6} {'causal' if causal else 'full':6}", *ratios)


if __name__ == "__main__":
    main()
