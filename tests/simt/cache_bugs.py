"""Bugs of the kernels for prefill over keys in a cache: each breaks one rule of where keys lie.

They name their place by a file and the text there, which says once what is replaced. Removed waits
and barriers of these kernels stand here too: mutate.py finds those of a family's kernel.cuh alone.
"""

from __future__ import annotations

from seed_bugs import SeedBug

WMMA = ("wmma",)


def _wmma(
    kind: str, part: str, replace: str, file: str = "cached_producer.cuh", asan: bool = False
) -> SeedBug:
    return SeedBug(kind, WMMA, "", replace, part=part, file=f"forward/wmma/{file}", asan=asan)


CACHE_BUGS = (
    _wmma("rows copied that nobody sees", "tile::contains(seen, next + row)", "row >= 0"),
    _wmma(
        "pages of hidden keys looked up",
        "lane < kOwnRows && tile::contains(seen, n)",
        "lane < kOwnRows",
        asan=True,
    ),
    _wmma(
        "rows that another pass copies", "first / Copy::kStep * kWarpRows + threadIdx", "threadIdx"
    ),
    _wmma("rows of the first warp", "+ warp * kWarpRows + lane", "+ lane"),
    _wmma(
        "rows of the tile before",
        "this->stages.publish(i + 1);\n    look_up();",
        "this->stages.publish(i + 1);",
    ),
    _wmma("the first tile again", "next -= kBlockN;", ";"),
    _wmma("the first sequence's keys", "sequence = work.batch;", "sequence = 0;"),
    _wmma(
        "a stage that is in use",
        "if (i > 0) this->stages.wait_empty(i - 1);",
        ";",
    ),
    _wmma(
        "padding seen",
        "seq.seqlen_k, seq.first_key);",
        "seq.seqlen_k, 0);",
        "consumer.cuh",
    ),
    _wmma("no wait for the grids ahead", "ptx::wait_for_grids_ahead();", ";", "cached.cuh"),
    SeedBug(
        "rows of the first page",
        WMMA,
        "",
        "0, static_cast<int>(",
        part="min(max(pages[at], 0), last), static_cast<int>(",
        file="tile/cache_source.cuh",
    ),
)
