"""Bugs of decode: each breaks one rule of where keys lie, which are seen, or how parts add up.

They name their place by a file and the text there, which says once what is replaced. A limit of
leftpad_k by the length is not among them, because it changes nothing: what begins behind its end
is empty.
"""

from __future__ import annotations

from seed_bugs import SeedBug

DECODE = ("decode",)
WIDE = ("decode_wide",)
# Files of what sm90_latent has in common with decode.
SHARED = ("sequence.cuh", "schedule.cuh", "parts.cuh", "combine.cuh")


def _path(file: str) -> str:
    if "/" in file:
        return file
    return f"tile/key_parts/{file}" if file in SHARED else f"forward/decode/{file}"


def _decode(kind: str, file: str, part: str, replace: str) -> SeedBug:
    return SeedBug(kind, DECODE, "", replace, part=part, file=_path(file))


def _wide(kind: str, file: str, part: str, replace: str) -> SeedBug:
    return SeedBug(kind, WIDE, "", replace, part=part, file=f"forward/decode/wide_{file}")


def _mask(kind: str, part: str, replace: str) -> SeedBug:
    return SeedBug(kind, DECODE, "", replace, part=part, file="tile/mask.cuh")


def _read_or_write(kind: str, file: str, part: str, replace: str) -> SeedBug:
    """A change whose fault is no wrong number: an access beyond memory or off its alignment, an
    overflow."""
    return SeedBug(kind, DECODE, "", replace, part=part, file=_path(file), asan=True)


PAGE = "min(max(pages[at], 0), static_cast<int>(params.num_pages) - 1)"
ENTRY = "min(max(p.cache_batch_idx[sequence], 0), last)"
LOOKED_UP = "lane < kSlice && i < count && n >= begin && n < end"
COPIED_V = "rows.v.data, v_offset, row, seen &&"

DECODE_BUGS = (
    # Pages and entries.
    _decode("pages as they stand in the table", "producer.cuh", PAGE, "pages[at]"),
    _decode("pages below the first", "producer.cuh", "max(pages[at], 0)", "pages[at]"),
    _decode(
        "the page behind the last one",
        "producer.cuh",
        "static_cast<int>(params.num_pages) - 1",
        "static_cast<int>(params.num_pages)",
    ),
    _read_or_write(
        "pages of keys that nobody sees looked up",
        "producer.cuh",
        LOOKED_UP,
        "lane < kSlice && i < count && n >= begin",
    ),
    _decode(
        "pages of another sequence",
        "producer.cuh",
        "sequence * params.page_table.batch_stride",
        "0",
    ),
    _decode("row of a page by the whole key", "producer.cuh", "shape.page_size.remainder(n)", "n"),
    _decode(
        "page by the row in it",
        "producer.cuh",
        "shape.page_size.quotient(static_cast<unsigned>(n))",
        "shape.page_size.remainder(static_cast<unsigned>(n))",
    ),
    _decode(
        "V's pages as far apart as K's",
        "producer.cuh",
        "offset(params.v, i, page)",
        "offset(params.k, i, page)",
    ),
    _decode(
        "pages of the slice before",
        "producer.cuh",
        "static_cast<unsigned>(key(i) + lane)",
        "static_cast<unsigned>(key(i - 1) + lane)",
    ),
    _decode(
        "rows of a slice all as its first one",
        "producer.cuh",
        "__shfl_sync(tile::kFullMask, k_of_lane, row)",
        "__shfl_sync(tile::kFullMask, k_of_lane, 0)",
    ),
    _decode(
        "entries as they stand in the list", "producer.cuh", ENTRY, "p.cache_batch_idx[sequence]"
    ),
    _decode(
        "entries below the first",
        "producer.cuh",
        "max(p.cache_batch_idx[sequence], 0)",
        "p.cache_batch_idx[sequence]",
    ),
    _decode(
        "keys of the sequence's own entry",
        "producer.cuh",
        "begin_at_batch(p, entry_of(p, sequence))",
        "begin_at_batch(p, sequence)",
    ),
    # Changes in what is copied.
    _decode("V behind the keys copied", "producer.cuh", COPIED_V, "rows.v.data, v_offset, row, "),
    _read_or_write(
        "K behind the keys copied",
        "producer.cuh",
        "rows.k.data, k_offset, row, seen &&",
        "rows.k.data, k_offset, row, ",
    ),
    _decode(
        "keys before the first copied",
        "producer.cuh",
        "const bool seen = n >= begin && n < end;",
        "const bool seen = n < end;",
    ),
    _decode(
        "a key less copied",
        "producer.cuh",
        "const bool seen = n >= begin && n < end;",
        "const bool seen = n >= begin && n < end - 1;",
    ),
    _decode(
        "columns of V as many as of K",
        "producer.cuh",
        "chunk * kOfChunk < params.head_dim_v",
        "chunk * kOfChunk < params.head_dim",
    ),
    _decode(
        "groups all at the first one's keys",
        "producer.cuh",
        "segment.tile * kBlockN + group() * kSlice",
        "segment.tile * kBlockN",
    ),
    _decode(
        "slices behind the segment copied",
        "producer.cuh",
        "if (i < count) {\n      const int n0",
        "if (true) {\n      const int n0",
    ),
    # Pages are asked for before they are used.
    _decode(
        "first pages a slice late",
        "consumer.cuh",
        "next_page = producer.page(i + 1);",
        "next_page = producer.page(i);",
    ),
    _decode(
        "next page a slice early",
        "consumer.cuh",
        "producer.page(i + kStages + 1)",
        "producer.page(i + kStages)",
    ),
    _decode(
        "next page a slice late, with queries in shared memory",
        "consumer.cuh",
        "next_page = producer.page(i + kStages);",
        "next_page = producer.page(i + kStages + 1);",
    ),
    # Which keys are seen.
    _read_or_write(
        "lengths beyond the room",
        "sequence.cuh",
        "min(max(p.seqused_k[sequence], 0), seqlen_k)",
        "max(p.seqused_k[sequence], 0)",
    ),
    _read_or_write(
        "lengths below zero",
        "sequence.cuh",
        "max(p.seqused_k[sequence], 0)",
        "p.seqused_k[sequence]",
    ),
    _decode(
        "padding below zero",
        "sequence.cuh",
        "max(p.leftpad_k[sequence], 0)",
        "p.leftpad_k[sequence]",
    ),
    _mask(
        "padding left out of a row's keys",
        "max(range.begin, first_key - origin)",
        "range.begin",
    ),
    _mask(
        "padding left out of the rows' keys",
        "Base::any_row(first, last);\n    return {max(range.begin, first_key), range.end};",
        "Base::any_row(first, last);\n    return range;",
    ),
    _mask(
        "padding left out of whole tiles",
        "Base::every_row(first, last);\n    return {max(range.begin, first_key), range.end};",
        "Base::every_row(first, last);\n    return range;",
    ),
    _decode(
        "positions by the room",
        "sequence.cuh",
        "position_shift(p.causal, seqlen_q, seqlen_k)",
        "position_shift(p.causal, seqlen_q, static_cast<int>(p.seqlen_k))",
    ),
    _read_or_write(
        "mask behind the keys read",
        "consumer.cuh",
        "(key >= mask.seqlen_k || !visible",
        "(!visible",
    ),
    _decode(
        "edge of a tile not masked",
        "consumer.cuh",
        "mask.every_row(first_row, last_row)",
        "mask.any_row(first_row, last_row)",
    ),
    # How the work is partitioned.
    _decode(
        "two parts of a block in one place",
        "schedule.cuh",
        "(begins ? part_behind(shape_) : 0)",
        "0",
    ),
    _decode(
        "units shared out rounded down",
        "schedule.cuh",
        "quotient(total - 1) + 1",
        "quotient(total)",
    ),
    _decode(
        "a row block's later part as its first",
        "schedule.cuh",
        "(begins ? part_behind(shape_) : 0)",
        "part_behind(shape_)",
    ),
    _decode("parts taken for the whole", "schedule.cuh", "segment->count == blocks_.tiles", "true"),
    _decode(
        "the whole taken for a part",
        "schedule.cuh",
        "segment->count == blocks_.tiles",
        "shape_.whole",
    ),
    _decode(
        "units of the next block", "schedule.cuh", "min(units - unit, end_ - unit_)", "units - unit"
    ),
    _decode(
        "tiles from key 0 on",
        "schedule.cuh",
        "begin = blocks_.first_tile + static_cast<int>(unit)",
        "begin = static_cast<int>(unit)",
    ),
    _decode(
        "a block that only begins a row block has it",
        "schedule.cuh",
        "begins = begin <= blocks_.first_tile",
        "begins = begin < blocks_.first_tile",
    ),
    _decode(
        "units for beginning left out of the search",
        "combine.cuh",
        "begin : begin + kBegin)",
        "begin : begin)",
    ),
    _decode(
        "parts end behind the row block",
        "schedule.cuh",
        "min(end, blocks_.end()) - segment->tile",
        "end - segment->tile",
    ),
    _decode(
        "parts of a size from the first tile on",
        "schedule.cuh",
        "first_tile - first_tile % shape.split_tiles : first_tile",
        "first_tile : first_tile",
    ),
    _decode(
        "the last part of a row block left out",
        "schedule.cuh",
        "(end() - origin(shape) + each - 1) / each",
        "(end() - origin(shape)) / each",
    ),
    _decode(
        "what was decided not written",
        "schedule.cuh",
        "static_cast<unsigned>(part_tiles_);",
        "0;",
    ),
    _decode(
        "parts left to be added up taken for none",
        "schedule.cuh",
        "static_cast<int>(most) <= part_tiles_ &&",
        "",
    ),
    _decode("rows without keys taken for done", "schedule.cuh", "&& least > 0;", ";"),
    # Lengths before the wait.
    _decode("lengths not confirmed", "kernel.cuh", "now.is(lists)", "true"),
    _decode("lengths of before the wait again", "kernel.cuh", "lists = now;", ""),
    _decode(
        "lengths of the lane alone confirmed",
        "sequence.cuh",
        "__all_sync(tile::kFullMask, used == other.used && start == other.start)",
        "used == other.used && start == other.start",
    ),
    _decode("keys in use not confirmed", "sequence.cuh", "used == other.used &&", ""),
    _decode("queries not confirmed", "sequence.cuh", " && start == other.start", ""),
    _decode(
        "queries up to the own start",
        "sequence.cuh",
        "__shfl_sync(tile::kFullMask, row, sequence + 1)",
        "begin",
    ),
    _decode(
        "an only sequence's queries in one lane",
        "sequence.cuh",
        "__shfl_sync(tile::kFullMask, row, sequence);",
        "row;",
    ),
    _decode(
        "row blocks of the first lengths again",
        "schedule.cuh",
        "if (!kKeepsLane || looked_at > 32 || !again)",
        "if (looked_at > 32 || again)",
    ),
    _decode("starts where sequences end", "schedule.cuh", "before + sum - own;", "before + sum;"),
    _decode(
        "starts of 32 sequences again",
        "schedule.cuh",
        "before += __shfl_sync(tile::kFullMask, sum, 31);",
        ";",
    ),
    _decode(
        "end of the last sequence not written",
        "schedule.cuh",
        "shape_.starts[sequences()] = is_complete_ ? Partition::kComplete : before;",
        "",
    ),
    _decode(
        "sequence that ends where the unit begins",
        "schedule.cuh",
        "before_ + sum > unit_",
        "before_ + sum >= unit_",
    ),
    _decode(
        "units of the sequence just done not counted",
        "schedule.cuh",
        "before_ += each;",
        ";",
    ),
    _decode(
        "sequence just done searched again",
        "schedule.cuh",
        "int base = last + 1;",
        "int base = max(last, 0);",
    ),
    _decode(
        "units of 32 sequences not counted",
        "schedule.cuh",
        "before_ += all;",
        ";",
    ),
    _decode(
        "units of the sequence itself before it",
        "schedule.cuh",
        "lane_ < sequence ? units",
        "lane_ <= sequence ? units",
    ),
    # How parts of several blocks add up.
    _decode("sums not scaled down to a later part", "parts.cuh", "acc[e] *= factor;", ""),
    _decode(
        "parts of one weight",
        "parts.cuh",
        "exists ? row.probability(stats.row_max, 1.0f) : 0.0f",
        "exists && stats.row_max > -INFINITY ? 1.0f : 0.0f",
    ),
    _decode(
        "statistics not weighed",
        "parts.cuh",
        "fmaf(weight, stats.row_sum, row.row_sum)",
        "stats.row_sum + row.row_sum",
    ),
    _decode(
        "rows of one block again",
        "combine.cuh",
        "parts.is_done = parts.end - parts.first == 1;",
        "",
    ),
    _decode(
        "last part left out",
        "combine.cuh",
        "parts.end = (begin + schedule.of_block - 1) / per + 1;",
        "parts.end = (begin + schedule.of_block - 1) / per;",
    ),
    _decode(
        "a part too many",
        "combine.cuh",
        "parts.end = (begin + schedule.of_block - 1) / per + 1;",
        "parts.end = (begin + schedule.of_block) / per + 1;",
    ),
    _decode(
        "a part behind a group's last",
        "combine.cuh",
        "(left - group_ + kGroups - 1) / kGroups;",
        "(left - group_ + kGroups - 1) / kGroups + 1;",
    ),
    _decode(
        "statistics of the lane alone",
        "combine.cuh",
        "tile::reduce_sum<kAtOnce>(sum.row.row_sum)",
        "sum.row.row_sum",
    ),
    _decode(
        "statistics of the first part where others have them",
        "combine.cuh",
        "(of_lane == 0 ? further : 0)",
        "0",
    ),
    _decode(
        "the first part where others are",
        "combine.cuh",
        "out_ + further * kColumns",
        "out_",
    ),
    _decode(
        "the first part again",
        "combine.cuh",
        ", first_out = out;",
        ";",
    ),
    _decode(
        "statistics of the first part again",
        "combine.cuh",
        ", first_stats = stats;",
        ";",
    ),
    _decode("parts of the first row", "combine.cuh", "* kBlockM + parts.row_of_block", "* kBlockM"),
    _decode(
        "parts of the first row block",
        "combine.cuh",
        "(head_kv * blocks.of_head + row_block)",
        "(head_kv * blocks.of_head)",
    ),
    _decode(
        "rows of no sequence written",
        "combine.cuh",
        "if (row.query >= Lengths(params, row.sequence).seqlen_q) {",
        "if (false) {",
    ),
    _decode(
        "groups' sums not added up",
        "combine.cuh",
        "store(RunningSum::of(of_groups, x), of_values);",
        "store(sum, of_values);",
    ),
    _decode("one row of several", "combine.cuh", "item += gridDim.x", "item = items"),
    _decode(
        "parts of a row alone in other bits",
        "combine.cuh",
        "adder.template add_up_few<kFewParts>();",
        "adder.add_up();",
    ),
    _decode(
        "the first half of few parts again", "combine.cuh", "out += kHalf * next()", "out += 0"
    ),
    _decode(
        "parts of a row by those who do not share it",
        "combine.cuh",
        "kGroups == 1 ? 0 : static_cast<int>(threadIdx.x) / kLanes",
        "static_cast<int>(threadIdx.x) / kLanes",
    ),
    # How parts of a block's groups add up, and results.
    _decode(
        "groups of one weight",
        "consumer.cuh",
        "weights[g] = whole.probability(parts_of_row[g].row_max, 1.0f);",
        "weights[g] = 1.0f;",
    ),
    _decode(
        "row max of the first group",
        "consumer.cuh",
        "fmaxf(whole.row_max, parts_of_row[g].row_max)",
        "parts_of_row[0].row_max",
    ),
    _decode(
        "nine rows taken for few",
        "consumer.cuh",
        "num_rows - m0 <= 8",
        "num_rows - m0 <= 9",
    ),
    _decode(
        "columns of half of the groups, where rows are few",
        "consumer.cuh",
        "(few ? group : group / 2) * pairs",
        "group / 2 * pairs",
    ),
    _decode(
        "parts without their statistics",
        "consumer.cuh",
        "static_cast<PartStats*>(shape.stats)[at] = all;",
        ";",
    ),
    _read_or_write("pairs stored wider than aligned", "parts.cuh", "store_bytes >= 4 &&", ""),
    _decode("sinks left out", "parts.cuh", "stats.row_sum, sink)", "stats.row_sum, nullptr)"),
    _decode(
        "columns behind the last one",
        "parts.cuh",
        "store_bytes >= 4 && column + 2 <= columns",
        "store_bytes >= 4",
    ),
    # Clusters.
    _decode(
        "tiles of the cluster's first block for all",
        "schedule.cuh",
        "segment->tile += before;",
        ";",
    ),
    _decode(
        "last block of the cluster as many tiles as any",
        "schedule.cuh",
        "min(each, all - before)",
        "each",
    ),
    _decode(
        "statistics of the first group for the block's",
        "consumer.cuh",
        "stats(row_of_block)[0] = all;",
        ";",
    ),
    _decode(
        "statistics of the block itself for all of the cluster",
        "consumer.cuh",
        "load_of_block(of_block, sStats, static_cast<unsigned>(min(i, size - 1)))",
        "load_of_block(of_block, sStats, rank_in_cluster(shape))",
    ),
    _decode(
        "one block of the cluster left out",
        "consumer.cuh",
        "if (i < size) ptx::load_of_block(x[i]",
        "if (i < size - 1) ptx::load_of_block(x[i]",
    ),
    _decode(
        "columns of the cluster's next line",
        "consumer.cuh",
        "line % kPairs * 16",
        "first % kPairs * 16",
    ),
    _decode("the cluster's first line again", "consumer.cuh", "load_line(x, line, size);", ";"),
    _decode(
        "lines of a row block without its last eight rows",
        "consumer.cuh",
        "(num_rows - m0 + 7) / 8",
        "(num_rows - m0) / 8",
    ),
    # Keys of 8 bits.
    _decode("bytes in the wrong order", "tile/byte_factors.cuh", "two<0x4342>", "two<0x4243>"),
    _decode("columns of V swapped", "tile/byte_factors.cuh", "two<0x4341>", "two<0x4143>"),
    _decode("e4m3's columns of V swapped", "tile/byte_factors.cuh", "<0x3120>", "<0x2130>"),
    _decode(
        "int8 off by one", "tile/byte_factors.cuh", "k1152 = 0x64806480u", "k1152 = 0x64816481u"
    ),
    _decode(
        "keys 8 further on taken for those before",
        "byte_products.cuh",
        "rP[0][n / 16], even[0], even[1]",
        "rP[0][n / 16], even[1], even[0]",
    ),
    _decode(
        "Q in the order of 16-bit keys",
        "byte_queries.cuh",
        "= {words[0], words[2]};",
        "= {words[0], words[1]};",
    ),
    _decode(
        "Q's power of two not taken back",
        "byte_queries.cuh",
        "return scale.of_products;",
        "return 1.0f;",
    ),
    _decode(
        "k's factor left out",
        "byte_queries.cuh",
        "scales[row] = scale * of_keys;",
        "scales[row] = scale;",
    ),
    _decode("v's factor left out", "parts.cuh", "result.scale *= of_values;", ";"),
    _decode(
        "columns in the order of 16-bit keys",
        "consumer.cuh",
        "kOfPair = kBytes ? 4 : 2",
        "kOfPair = 2",
    ),
    # Wide heads.
    _wide("pages as they stand", "producer.cuh", PAGE, "pages[at]"),
    _wide(
        "keys that nobody sees copied",
        "producer.cuh",
        "i < segment.count && n >= begin && n < end",
        "i < segment.count && n >= begin",
    ),
    _wide("columns that there are not copied", "producer.cuh", "column < columns", "columns > 0"),
    _wide("first row of a varlen sequence", "producer.cuh", "first_row + n", "n"),
    _wide("V of its own not copied", "producer.cuh", "if (!shape.latent)", "if (false)"),
    _wide(
        "scores of one warp's columns",
        "consumer.cuh",
        "acc_s[0][j][e] += x[e];",
        "acc_s[0][j][e] = x[e];",
    ),
    _wide("parts of modified scores kept", "consumer.cuh", "part[j][lane_idx].x[e] = 0.0f;", ""),
    _wide(
        "output not rescaled",
        "consumer.cuh",
        "rows.acc_o[i][e / 4][e % 4] *= factors[e / 2 % 2];",
        ";",
    ),
    _wide("slices taken for the next ones", "producer.cuh", "(segment.tile + i)", "(i)"),
    _wide(
        "parts without their statistics",
        "consumer.cuh",
        "static_cast<PartStats*>(shape.stats)[at] = {row_max, softmax.row_sum * factor};",
        ";",
    ),
    # The same with keys of 8 bits.
    _wide(
        "products of a row by the other row's factor",
        "products.cuh",
        "acc_s[j][e] *= rows.scales[e / 2];",
        "acc_s[j][e] *= rows.scales[0];",
    ),
    _wide(
        "keys 8 further on taken for those before",
        "products.cuh",
        "rP[0][n], even[0], even[1]",
        "rP[0][n], even[1], even[0]",
    ),
    _wide("even columns for odd ones", "products.cuh", "odd[0], odd[1]", "even[0], even[1]"),
    _wide(
        "Q in the order of 16-bit keys",
        "consumer.cuh",
        "(column_warp, i) + lane_idx % 4 * 4",
        "(column_warp, i) + lane_idx % 4 * 2",
    ),
    _wide(
        "Q's power of two not taken back",
        "consumer.cuh",
        "rows.scales[h] *= scale.of_products;",
        ";",
    ),
    _wide(
        "columns of out in the order of 16-bit keys",
        "consumer.cuh",
        "first + lane_idx % 4 * 4 + half * 2",
        "first + lane_idx % 4 * 2 + half * 8",
    ),
    _wide(
        "v's factor left out",
        "consumer.cuh",
        "if (kBytes && result.scale",
        "if (false && result.scale",
    ),
)
