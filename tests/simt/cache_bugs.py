"""Bugs of the kernels for prefill over keys in a cache: each breaks one rule of where keys lie.

They name their place by a file and the text there, which says once what is replaced.
"""

from __future__ import annotations

from seed_bugs import SM90, SeedBug

WMMA = ("wmma",)
BOXES = "tile/box_source.cuh"
TENSOR_BOX = "plan/tensor_box.h"


def _wmma(
    kind: str, part: str, replace: str, file: str = "cached_producer.cuh", asan: bool = False
) -> SeedBug:
    return SeedBug(kind, WMMA, "", replace, part=part, file=f"forward/wmma/{file}", asan=asan)


def _sm90(
    kind: str, part: str, replace: str, file: str = "forward/sm90/cached_producer.cuh"
) -> SeedBug:
    return SeedBug(kind, SM90, "", replace, part=part, file=file)


CACHE_BUGS = (
    # Rows by cp.async.
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
    SeedBug(
        "rows of the first page",
        WMMA,
        "",
        "0, static_cast<int>(",
        part="min(max(pages[at], 0), last), static_cast<int>(",
        file="tile/cache_source.cuh",
    ),
    # Boxes by TMA.
    _sm90(
        "keys behind the last one copied",
        "min(rows, seqlen_k - first)}",
        "rows}",
        BOXES,
    ),
    _sm90("pages before all seen keys read", "|| first + rows <= seen.begin", "", BOXES),
    SeedBug(
        "pages behind all seen keys looked up",
        SM90,
        "",
        "",
        part="first >= seen.end ||",
        file=BOXES,
        asan=True,
    ),
    _sm90(
        "queries of varlen batches taken for others'",
        "if (varlen) {\n    use(",
        "if (length < 0) {\n    use(",
        BOXES,
    ),
    _sm90("pages by rows of the page table", "at.index * page_rows", "at.index", BOXES),
    _sm90(
        "a map that begins a box before its pool",
        "return varlen_box(name, x, columns, all_rows, heads, box_rows, element_bytes);",
        "TensorBox box = varlen_box(name, x, columns, all_rows, heads, box_rows);\n"
        "  box.data = static_cast<const char*>(box.data) - box_rows * box.strides[1];\n"
        "  return box;",
        TENSOR_BOX,
    ),
    _sm90(
        "no room for the last page",
        "greater<std::int64_t>(pages - 1, 0) * page_rows(x, pages) + rows",
        "greater<std::int64_t>(pages - 1, 0) * page_rows(x, pages)",
        TENSOR_BOX,
    ),
    _sm90("boxes as long as pages", "p.page_size & -p.page_size", "p.page_size", TENSOR_BOX),
    _sm90("all boxes at the first rows", "+ lane_row * kBlockRowBytes", ""),
    _sm90(
        "pages of the first of several tiles",
        "tiles.begin + left - 1 - lane_tile",
        "tiles.begin + left - 1",
    ),
    _sm90("lengths by the room", "if (params.seqused_k) work.seqlen_k", "if (false) work.seqlen_k"),
    _sm90(
        "the first tile of queries",
        "work.m_block * kBlockM + c * kWarpgroupRows",
        "c * kWarpgroupRows",
    ),
)
