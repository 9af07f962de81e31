"""Bugs of a backward pass: each breaks a term of a gradient, or who writes which number.

They name their place by a file and the text there, which says once what is replaced.
"""

from __future__ import annotations

from seed_bugs import SeedBug

BACKWARD_SCALAR = ("backward_scalar",)
HEAD = "backward/scalar/head.cuh"
KERNEL = "backward/scalar/kernel.cuh"
BIAS = "backward/scalar/bias.cuh"
DELTA = "delta/row_blocks/kernel.cuh"
REDUCE = "reduce/partial_sums/kernel.cuh"


def _backward(kind: str, file: str, part: str, replace: str) -> SeedBug:
    return SeedBug(kind, BACKWARD_SCALAR, "", replace, part=part, file=file)


BACKWARD_BUGS = (
    _backward("delta added", HEAD, "(g.ds[r][c] - delta)", "(g.ds[r][c] + delta)"),
    _backward("softcap forgotten in gradients", HEAD, "g.ds[r][c] * factor[c]", "g.ds[r][c]"),
    _backward("rows that see nothing", HEAD, "if (lse == -INFINITY) lse = INFINITY;", ""),
    _backward("the group's other heads left out", KERNEL, "h < group", "h < 1"),
    _backward("slope's sum without its sign", KERNEL, "slope -= slope_sum", "slope += slope_sum"),
    _backward("the last keys left out", KERNEL, "n < tiles.end", "n + 1 < tiles.end"),
    _backward("one query of a tile in dbias", BIAS, "row + 1 : kTile", "row + 1 : 1"),
    _backward("one head in dbias", BIAS, "h < heads.end", "h < heads.begin + 1"),
    _backward("dlse added", DELTA, "sum -= b.dlse", "sum += b.dlse"),
    _backward(
        "sequence that begins at its row passed over",
        DELTA,
        "middle, total) <= row",
        "middle, total) < row",
    ),
    _backward("rows of no sequence left as they are", DELTA, "if (exists) continue;", "continue;"),
    _backward("a sink's sum of warps without a barrier", DELTA, "__syncthreads();", ""),
    _backward("parts of one sequence for all", REDUCE, "(b * p.num_heads + h)", "h"),
    _backward("a sum of warps without a barrier", REDUCE, "__syncthreads();", ""),
)
