"""Bugs of the kernel that appends to caches: each breaks one rule of which row goes where, or how.

They name their place by a file and the text there, which says once what is replaced.
"""

from __future__ import annotations

from seed_bugs import SeedBug

APPEND = ("append",)
TOKEN_ROWS = "append/token_rows/kernel.cuh"
TRAITS = "append/token_rows/traits.h"
PLACES = "../core/problem/append.h"


def _append(
    kind: str, part: str, replace: str, file: str = TOKEN_ROWS, asan: bool = False
) -> SeedBug:
    return SeedBug(kind, APPEND, "", replace, part=part, file=file, asan=asan)


APPEND_BUGS = (
    # Which sequence a new row is of.
    _append(
        "sequence that begins at its row passed over", "p.total_new) <= n;", "p.total_new) < n;"
    ),
    _append(
        "starts behind the last one read",
        "candidate < end && tile::sequence_start",
        "tile::sequence_start",
    ),
    _append("search begins a step late", "first + (lane + 1) * step", "first + lane * step"),
    _append(
        "search forgets its end", "end = min(end, first + step);", "end = first + step;", asan=True
    ),
    _append("rows before all sequences written", "row < start || row >= end", "row >= end"),
    _append("rows behind all sequences written", "row < start || row >= end", "row < start"),
    _append(
        "rows counted from the first sequence on",
        "return {sequence, row - start};",
        "return {sequence, row};",
    ),
    _append("rows counted from the first entry on", "n - sequence * length", "n"),
    # Which head's row it is, and where that lies.
    _append("q's heads begin at v's", "(of_q ? 2 : of_v ? 1 : 0)", "(of_q || of_v ? 1 : 0)"),
    _append(
        "v's first head taken for one of k",
        "!of_q && index >= p.num_heads_kv;",
        "!of_q && index > p.num_heads_kv;",
    ),
    _append("a head too many", "if (index >= 2 * keys", "if (index > 2 * keys"),
    _append(
        "rows of a batch one behind the other",
        "at.sequence * x.batch_stride + at.index * x.row_stride",
        "n * x.row_stride",
    ),
    _append(
        "rows of a varlen batch counted in their sequence",
        "? n * x.row_stride",
        "? at.index * x.row_stride",
    ),
    _append("v written over k", "of_v ? p.v_cache : p.k_cache", "p.k_cache"),
    _append("v read from k", "of_v ? p.v : p.k,", "p.k,"),
    _append(
        "heads of a cache as if rows came first", "head * cache.head_stride", "head * p.head_dim"
    ),
    _append("page left out", "to.entry * cache.batch_stride +", "0 * cache.batch_stride +"),
    _append("columns of v as many as of k", "of_v ? p.head_dim_v : p.head_dim", "p.head_dim"),
    _append("bytes of an 8-bit cache as of k", "(scale.data ? 1 : sizeof(T))", "sizeof(T)"),
    _append("rows of no place written", "if (to.entry < 0) return false;", ";"),
    # 8 bits.
    _append("v's scale is k's", "of_v ? p.v_descale : p.k_descale", "p.k_descale"),
    _append("scale of the first sequence", "at.sequence * scale.batch_stride +", "0 +"),
    _append("scale of the first head", "+ head * scale.head_stride]", "]"),
    _append(
        "columns behind the rotated ones copied by way of fp32", "if (in_8_bits) {", "if (true) {"
    ),
    # Rotation.
    _append(
        "slots without positions", "!p.slots || rotates ? position_of", "!p.slots ? position_of"
    ),
    _append(
        "queries of a fixed position at their own",
        "at_first ? position_of(p, {at.sequence, 0}) : position",
        "position",
    ),
    _append(
        "keys at the queries' fixed position", "of_q && p.q_fixed_position", "p.q_fixed_position"
    ),
    _append("rows that the tables lack", "if (rotary < 0) return false;", ";"),
    _append("v rotated", "rotates && !of_v ? p.rotary_dim", "rotates ? p.rotary_dim"),
    _append(
        "tables of float32 as of k's dtype",
        "p.rotary_cos.dtype == DType::kFloat32 ? 4 : sizeof(T)",
        "sizeof(T)",
    ),
    _append(
        "sines' rows as cosines'",
        "rotary * p.rotary_sin.row_stride",
        "rotary * p.rotary_cos.row_stride",
    ),
    _append("pairs not side by side", "p.rotary_interleaved ? 2 * j : j", "j"),
    _append(
        "second half a chunk behind the first",
        "at + kWidth : at + row.half",
        "at + kWidth : at + kWidth",
    ),
    _append(
        "neighbours not pairs",
        "&number(2 * i), &number(2 * i + 1)",
        "&number(i), &number(i + kWidth)",
    ),
    _append("second chunk not stored", "store_numbers<T>(row, in_8_bits, next, y);", ""),
    _append("rotated columns copied over", "c = 2 * row.half + lane", "c = row.half + lane"),
    _append("one chunk a lane", "c < row.columns; c += kStep", "c < kStep; c += kStep"),
    # Accesses wider than aligned.
    _append("q moved as k", "index < 2 * keys ? shape.wide_v : shape.wide_q", "shape.wide_v"),
    _append(
        "alignment of k's cache",
        "is_aligned(p.k_cache, cached) && tables_aligned",
        "tables_aligned",
        TRAITS,
    ),
    _append("alignment of v's cache", "&& is_aligned(p.v_cache, cached)", "", TRAITS),
    _append(
        "alignment of the rotated q",
        "is_aligned(p.q_out, queries) && tables_aligned",
        "tables_aligned",
        TRAITS,
    ),
    _append("alignment of cosines", "is_aligned(p.rotary_cos, tables) &&", "", TRAITS),
    _append("alignment of sines", "&& is_aligned(p.rotary_sin, tables)", "", TRAITS),
    _append("chunks of both halves", "p.rotary_dim % (2 * width) == 0 &&", "", TRAITS),
    # Where positions and slots are.
    _append(
        "slots beyond the cache",
        "if (!is_within(slot, p.num_pages * p.page_size)) return nowhere();",
        "",
        PLACES,
    ),
    _append(
        "positions beyond the room",
        "if (!is_within(position, p.seqlen_k)) return nowhere();",
        "",
        PLACES,
    ),
    _append(
        "pages that there are not",
        "if (!is_within(page, p.num_pages)) return nowhere();",
        "",
        PLACES,
    ),
    _append(
        "entries that there are not",
        "is_within(entry, p.cache_batch_size) ? entry : -1",
        "entry",
        PLACES,
    ),
    _append(
        "keys before the first", "first < 0 ? -1 : first + row.index", "first + row.index", PLACES
    ),
    _append(
        "padding counted",
        "p.leftpad_k ? position - p.leftpad_k[sequence] : position",
        "position",
        PLACES,
    ),
    _append(
        "padding before the tables", "greater(from_first, std::int64_t{0})", "from_first", PLACES
    ),
    _append("positions beyond the tables", "row < p.rotary_positions ? row : -1", "row", PLACES),
    _append("slots of 64 bits", "p.slot_bytes == 4 ?", "false ?", PLACES),
    _append(
        "rows of the next page", "page, position - index * p.page_size", "page, position", PLACES
    ),
)
