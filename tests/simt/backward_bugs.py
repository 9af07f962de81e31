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


BACKWARD_SM90 = ("backward_sm90",)
CONSUMER = "backward/sm90/consumer.cuh"
LATE_CONSUMER = "backward/sm90/late_consumer.cuh"
WIDE_CONSUMER = "backward/sm90/wide_consumer.cuh"
PRODUCER = "backward/sm90/producer.cuh"
SCORES = "backward/sm90/scores.cuh"
SETUP = "backward/sm90/setup.cuh"
PRODUCTS = "backward/sm90/products.cuh"
SCORE_TILES = "backward/sm90/score_tiles.cuh"
SCORE_MOD = "backward/sm90/score_mod.cuh"
SEMAPHORE = "backward/sm90/dq_semaphore.cuh"
SENDER = "backward/sm90/dq_sender.cuh"
DQ_PART = "backward/sm90/dq_part.cuh"
CONVERT = "backward/sm90/convert.cuh"
SM90_KERNEL = "backward/sm90/kernel.cuh"
PAIR_CONSUMER = "backward/sm90/pair_consumer.cuh"
PAIR_PRODUCER = "backward/sm90/pair_producer.cuh"
PAIR_SETUP = "backward/sm90/pair_setup.cuh"


def _sm90(kind: str, file: str, part: str, replace: str, asan: bool = False) -> SeedBug:
    return SeedBug(kind, BACKWARD_SM90, "", replace, part=part, file=file, asan=asan)


def _backward(kind: str, file: str, part: str, replace: str) -> SeedBug:
    return SeedBug(kind, BACKWARD_SCALAR, "", replace, part=part, file=file)


WMMA_KEY_BLOCK = "backward/wmma/key_block.cuh"
WMMA_WARP_KEYS = "backward/wmma/warp_keys.cuh"
WMMA_SHARED_KEYS = "backward/wmma/shared_keys.cuh"
WMMA_LARGE_KEYS = "backward/wmma/large_keys.cuh"
WMMA_WALK = "backward/wmma/key_walk.cuh"
WMMA_QUERIES = "backward/wmma/queries.cuh"
WMMA_BIAS = "backward/wmma/bias.cuh"


def _wmma(kind: str, file: str, part: str, replace: str) -> SeedBug:
    return SeedBug(kind, ("backward_wmma",), "", replace, part=part, file=file)


WMMA_BUGS = (
    _wmma("delta added", WMMA_KEY_BLOCK, "[e] - rDelta[e % 2]) * x", "[e] + rDelta[e % 2]) * x"),
    _wmma("a slope's sum without its sign", WMMA_KEY_BLOCK, "[warp] = -sum", "[warp] = sum"),
    _wmma("unscaled dk", WMMA_WARP_KEYS, "shape.softmax_scale, acc_dk", "1.0f, acc_dk"),
    _wmma("unscaled dk", WMMA_SHARED_KEYS, "shape.softmax_scale, acc_dk", "1.0f, acc_dk"),
    _wmma("unscaled dk", WMMA_LARGE_KEYS, "shape.softmax_scale, acc_dk", "1.0f, acc_dk"),
    _wmma(
        "queries of other warps left out", WMMA_LARGE_KEYS, "other < Base::kSharers", "other < 1"
    ),
    _wmma(
        "one of two steps in dq",
        WMMA_WARP_KEYS,
        "this->add_dq(before_that, before, 0);\n        if constexpr",
        "this->add_dq(before_that, before_that, 0);\n        if constexpr",
    ),
    _wmma("no release of queries", WMMA_WARP_KEYS, "stages().release(i, lane);", ";"),
    _wmma("no arrival for dS", WMMA_WARP_KEYS, "arrive(ds_written());", ";"),
    _wmma("no arrival of its readers", WMMA_WARP_KEYS, "arrive(ds_read());", ";"),
    # None for the wait for readers of dS in shared keys: copies arrive as late as they can in these
    # tests, and so behind those reads.
    _wmma("no wait for dS", WMMA_SHARED_KEYS, "wait(kDsWritten, i);", ";"),
    _wmma("no wait for readers of dO", WMMA_SHARED_KEYS, "wait(kDoutRead, i);", ";"),
    _wmma("no wait for queries", WMMA_SHARED_KEYS, "wait(kFull, i);", ";"),
    _wmma(
        "softcap forgotten in dk", WMMA_KEY_BLOCK, "rDelta[e % 2], factor,", "rDelta[e % 2], 1.0f,"
    ),
    _wmma(
        "dq of the last step left out",
        WMMA_WARP_KEYS,
        "if (shape.dq_sum && before.m >= 0) {",
        "if (!walk.any()) {",
    ),
    _wmma(
        "delta of the other stage",
        WMMA_KEY_BLOCK,
        "own_stage = kMap.dout_stage == 0 ? 0 : stage",
        "own_stage = stage",
    ),
    _wmma(
        "a last tile of queries without a mask",
        WMMA_WALK,
        "block_n <= seq.seqlen_k ? mask",
        "0 <= seq.seqlen_k ? mask",
    ),
    _wmma("the group's other heads left out", WMMA_WALK, "group_head < group()", "group_head < 1"),
    _wmma("softcap forgotten in dq", WMMA_QUERIES, "dp[0][i / 4][i % 4] *= factor", "(void)factor"),
    _wmma(
        "one head in dbias", WMMA_BIAS, "++at->head < heads().end", "++at->head <= heads().begin"
    ),
)

BACKWARD_BUGS = (
    *WMMA_BUGS,
    _backward("delta added", HEAD, "(g.ds[r][c] - delta)", "(g.ds[r][c] + delta)"),
    _backward("softcap forgotten in gradients", HEAD, "g.ds[r][c] * factor[c]", "g.ds[r][c]"),
    _backward("rows that see nothing", HEAD, "if (lse == -INFINITY) lse = INFINITY;", ""),
    _backward("the group's other heads left out", KERNEL, "h < group", "h < 1"),
    _backward("slope's sum without its sign", KERNEL, "slope -= slope_sum", "slope += slope_sum"),
    _backward("the last keys left out", KERNEL, "n < tiles.end", "n + 1 < tiles.end"),
    _backward("one query of a tile in dbias", BIAS, "row + 1 : kTile", "row + 1 : 1"),
    _backward("one head in dbias", BIAS, "h < heads.end", "h < heads.begin + 1"),
    _backward("dlse added", DELTA, "delta - dlse", "delta + dlse"),
    _backward("delta of one of a thread's rows for all", DELTA, "if (r == lane)", "if (r == 0)"),
    _backward("dout of columns that there are not", DELTA, "group > 0 && at >= columns", "false"),
    _backward(
        "rows before the first sequence taken for its own", DELTA, "row >= rows.start && ", ""
    ),
    _backward("rows of no sequence left as they are", DELTA, "if (exists) continue;", "continue;"),
    _backward("parts of one sequence for all", REDUCE, "(b * p.num_heads + h)", "h"),
    # Barriers and fences of sm90, then its terms.
    _sm90("the next tile's head", CONSUMER, "if (next <= m) end_head(head++);", ""),
    _sm90(
        "the next tile's head in wide heads", WIDE_CONSUMER, "if (next <= m) end_head(head++);", ""
    ),
    _sm90(
        "stage released before dK is done",
        CONSUMER,
        "ptx::wgmma_wait<1>();  // dK and dV",
        "",
    ),
    _sm90("stage full without its rows' numbers", SETUP, "1 + 32", "1"),
    _sm90(
        "dQ written before it is sent", CONSUMER, "dq_part().wait_until_sent();\n    ptx::", "ptx::"
    ),
    # Consumers that compute dQ a step late.
    _sm90(
        "no wait for the other's late dS",
        LATE_CONSUMER,
        "if (has_last) shared.score_gradients.wait_full(use - 1);",
        "",
    ),
    _sm90(
        "late dQ written before it is sent", LATE_CONSUMER, "meet();\n    // Nobody", "// Nobody"
    ),
    _sm90(
        "stage released before late dK is done",
        LATE_CONSUMER,
        "ptx::wgmma_wait<1>();  // dK and dV",
        "",
    ),
    _sm90(
        "late dQ of this tile", LATE_CONSUMER, "dq_sum(last_head, last_m)", "dq_sum(last_head, 0)"
    ),
    # Pairs of blocks.
    _sm90(
        "dO freed in the own block alone",
        PAIR_SETUP,
        "lane < kPairBlocks",
        "lane == blockIdx.x % kPairBlocks",
    ),
    _sm90("the next tile's head in pairs", PAIR_CONSUMER, "if (next <= m) ++head;", ""),
    _sm90("one half of dQ's columns twice", PAIR_CONSUMER, "kRank * kNumConsumers + all", "all"),
    _sm90("P sent in another scale", PAIR_CONSUMER, "high * 0x1p-100f", "high * 0x1p-99f"),
    # Turns of deterministic sums.
    _sm90(
        "no wait for the turn of a tile",
        SEMAPHORE,
        "if (dlattn::contains(before, tile.m)) ptx::wait_for_counter(counter(tile), turn());",
        "",
    ),
    _sm90("a turn not passed on", SEMAPHORE, "ptx::raise_counter(own, turn() + 1);", ""),
    _sm90("a turn passed on too early", SEMAPHORE, "shared.wait_added(use);", ""),
    _sm90("turns of other tiles", SEMAPHORE, "kBlockM + tile.m;", "kBlockM;"),
    _sm90(
        "a first part not waited for",
        SENDER,
        "if (!is_first) ptx::wait_for_counter(own, kFirstIsStored);",
        "",
    ),
    _sm90("a first part told of too early", SENDER, "ptx::tma_store_wait();", ""),
    _sm90(
        "a first part not told of",
        SENDER,
        "ptx::raise_counter_by(counter(tile), kFirstIsStored);",
        "",
    ),
    _sm90("later parts stored too", SENDER, "% kFirstIsStored == 0;", "% kFirstIsStored < 2;"),
    _sm90("claims of other tiles", SENDER, "+ tile.m * Memory::kBlockM;", "+ 0 * tile.m;"),
    _sm90("sums of tiles that see no keys", CONVERT, "*counter == 0", "*counter == ~0u"),
    _sm90(
        "a part left before the last one is sent",
        DQ_PART,
        "if constexpr (kIsSent) shared.dq_parts.wait_empty(kNumConsumers * use + consumer);",
        "",
    ),
    _sm90(
        "a part sent before it is left",
        SENDER,
        "shared.dq_parts.wait_full(kNumConsumers * use + part);",
        "",
    ),
    _sm90("a claim before the last one is known", SENDER, "shared.dq_claims.wait_empty(use);", ""),
    _sm90("a claim taken for the last one", SENDER, "shared.dq_claims.wait_full(use);", ""),
    _sm90("turns of other heads", SEMAPHORE, "head_row(problem, tile)", "first_row"),
    _sm90(
        "blocks by number instead of by ticket",
        SM90_KERNEL,
        "in_order ? ptx::take_ticket(problem.tickets) : blockIdx.x",
        "blockIdx.x",
    ),
    # ALiBi, bias and mask.
    _sm90(
        "the first head's bias for all",
        SCORE_TILES,
        "heads_per_kv_head + tile.head",
        "heads_per_kv_head",
    ),
    _sm90("keys behind the last one", SCORE_TILES, "e < keys ? *rows", "true ? *rows"),
    _sm90("a mask's tile that is the bias's", SCORE_TILES, "copier.hide(use);", ""),
    _sm90("one entry of the batch in dbias", SCORE_TILES, "if (adds) {", "if (false) {"),
    _sm90("dbias as it was where nobody sees", SCORE_TILES, "copier.clear_dbias();", ""),
    _sm90("one distance for all", SCORES, "slope, distance + further", "slope, distance"),
    _sm90("a slope's sum without its sign", SCORE_MOD, "= -sum", "= sum"),
    _sm90(
        "a slope's sum that goes on with the next head",
        CONSUMER,
        "work.batch + pass, head_of_q(head)); slope_sum = 0.0f;",
        "work.batch + pass, head_of_q(head));",
    ),
    _sm90("softcap's slope forgotten beside a bias", SCORE_MOD, "fmaf(-t[0], t[0], 1.0f)", "1.0f"),
    _sm90(
        "bias over dS in wide heads",
        WIDE_CONSUMER,
        "shared.ds(use) + consumer * kRowBytes);",
        "shared.p(use) + consumer * kRowBytes);",
    ),
    _sm90(
        "turns not waited for beside a bias",
        SCORE_TILES,
        "semaphore.wait(use);",
        "shared.may_add.wait_empty(use), shared.may_add.end_fill(use);",
    ),
    _sm90("delta added", SCORES, "(x - pair.delta[i % 2])", "(x + pair.delta[i % 2])"),
    _sm90("softcap's slope forgotten", SCORES, "* fmaf(-x, x, 1.0f)", ""),
    _sm90("edge of a walk taken for whole", SETUP, "m < whole.begin || m >= whole.end", "false"),
    _sm90(
        "rows of dS in another order",
        PRODUCTS,
        "(chunk ^ (lane % 8)) * 16;  // rows",
        "chunk * 16;  // rows",
    ),
)
