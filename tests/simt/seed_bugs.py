"""Bugs that earlier kernels of this line had, as edits of today's source that put them back."""

from __future__ import annotations

from dataclasses import dataclass

SCALAR = ("scalar",)
QK = ("wmma_qk",)
SMEM = ("wmma_smem",)
WMMA = QK + SMEM
ALL = SCALAR + WMMA
SM90 = ("sm90",)
GENERAL = ("wmma_general",)


@dataclass(frozen=True)
class SeedBug:
    """Replaces ``search``, which must occur exactly once in what a family's kernel includes.

    White space in ``search`` matches any white space, so that formatting the source breaks nothing.
    """

    kind: str
    families: tuple[str, ...]
    search: str
    replace: str


SEED_BUGS = (
    # A warp computed one row, or the block its first row group; the rest of the tile was left out.
    SeedBug(
        "rows left uncomputed",
        SCALAR,
        "if (row >= seq.seqlen_q) continue;",
        "if (row >= seq.seqlen_q || r > 0) continue;",
    ),
    SeedBug(
        "rows left uncomputed",
        WMMA,
        "const int warp_row = threadIdx.x / 32 * kRows;",
        "const int warp_row = 0;",
    ),
    # The output started anew with every tile of keys.
    SeedBug(
        "accumulator lost between tiles",
        SCALAR,
        "acc_o[r][c][e] *= factor;",
        "acc_o[r][c][e] = 0.0f * factor;",
    ),
    SeedBug(
        "accumulator lost between tiles",
        QK,
        "acc_o[r][c][e] *= row_factor;",
        "acc_o[r][c][e] = 0.0f * row_factor;",
    ),
    SeedBug(
        "accumulator lost between tiles",
        SMEM,
        "acc_o[i].x[t] *= factors.x[t];",
        "acc_o[i].x[t] = 0.0f * factors.x[t];",
    ),
    # It was kept, but not rescaled when a row's maximum rose.
    SeedBug("accumulator not rescaled", SCALAR, "acc_o[r][c][e] *= factor;", "(void)factor;"),
    SeedBug("accumulator not rescaled", QK, "acc_o[r][c][e] *= row_factor;", "(void)row_factor;"),
    SeedBug("accumulator not rescaled", SMEM, "acc_o[i].x[t] *= factors.x[t];", "(void)factors;"),
    # Once where the product was stored and again where the softmax read it.
    SeedBug(
        "score scaled twice",
        SCALAR,
        "const float scale_log2 = score_mod.any ? tile::kLog2e : shape.scale_log2;",
        "const float scale_log2 = shape.scale_log2 * static_cast<float>(params.softmax_scale);",
    ),
    SeedBug(
        "score scaled twice",
        WMMA,
        "x[i][e] = softmax.probability(x[i][e], scale_log2);",
        "x[i][e] = softmax.probability(x[i][e], scale_log2 * scale_log2);",
    ),
    # A column-major operand's leading dimension is its rows, padded; it was given its columns.
    SeedBug(
        "wrong leading dimension for K",
        WMMA,
        "ptx::load_matrix(rK, sK + n * kLd + d, kLd);",
        "ptx::load_matrix(rK, sK + n * kLd + d, kKeys);",
    ),
    # A row group of fewer than 16 rows was skipped, or loaded and stored as if it were whole.
    SeedBug(
        "partial row group skipped",
        QK,
        "if (first_row + r >= seq.seqlen_q) continue;",
        "if (first_row + kRows > seq.seqlen_q) continue;",
    ),
    SeedBug(
        "partial row group skipped",
        SMEM,
        "const bool row_exists = own_row < seq.seqlen_q;",
        "const bool row_exists = first_row + kRows <= seq.seqlen_q;",
    ),
    SeedBug("partial row group read whole", ALL, "seq.seqlen_q - m0", "kBlockM"),
    SeedBug("partial row group stored whole", SCALAR, "if (row >= seq.seqlen_q) continue;", ";"),
    SeedBug(
        "partial row group stored whole", QK, "if (first_row + r >= seq.seqlen_q) continue;", ";"
    ),
    SeedBug(
        "partial row group stored whole",
        SMEM,
        "const bool row_exists = own_row < seq.seqlen_q;",
        "const bool row_exists = true;",
    ),
    # Lanes without a key of the tile took part in the softmax with whatever they held.
    SeedBug(
        "scores of absent keys used",
        SCALAR,
        "const bool masked = !tile::contains_all(unmasked, n0, kBlockN);",
        "const bool masked = false;",
    ),
    SeedBug(
        "scores of absent keys used",
        WMMA,
        "if (!contains(visible, n0 + lane_column(lane, i) + e)) x[i][e] = -INFINITY;",
        ";",
    ),
    SeedBug(
        "absent keys left uninitialised",
        ALL,
        "ptx::cp_async<16>(",
        "if (row < end) ptx::cp_async<16>(",
    ),
    # Only some lanes held a row's result, and others went on with their own part.
    SeedBug(
        "maximum not broadcast",
        SCALAR,
        "softmax[r].raise_max(tile::reduce_max<32>(x), scale_log2)",
        "softmax[r].raise_max(x, scale_log2)",
    ),
    SeedBug(
        "maximum not broadcast",
        WMMA,
        "softmax.raise_max(reduce_max<2>(tile_max), scale_log2)",
        "softmax.raise_max(tile_max, scale_log2)",
    ),
    SeedBug(
        "factor not broadcast",
        QK,
        "row_factor = __shfl_sync(tile::kFullMask, factor, 2 * r)",
        "row_factor = factor",
    ),
    SeedBug(
        "sum not broadcast",
        SCALAR,
        "softmax[r].row_sum = tile::reduce_sum<32>(softmax[r].row_sum);",
        ";",
    ),
    SeedBug(
        "sum not broadcast",
        WMMA,
        "softmax.row_sum = tile::reduce_sum<2>(softmax.row_sum);",
        ";",
    ),
    # cp.async moves 4, 8 or 16 bytes between addresses aligned to that; stores are no different.
    SeedBug(
        "copies wider than aligned",
        ALL,
        "shape.copy_bytes = plan.copy_bytes;",
        "shape.copy_bytes = 16;",
    ),
    SeedBug(
        "stores wider than aligned",
        ALL,
        "shape.store_bytes = store_bytes(p);",
        "shape.store_bytes = 16;",
    ),
    # sm90: operands and registers of asynchronous products, overflows of the speculative row max.
    SeedBug(
        "wrong leading dimension for V",
        SM90,
        "ptx::wgmma_descriptor(sV, kBlockN * kBlockRowBytes)",
        "ptx::wgmma_descriptor(sV, kHeadDim * kBlockRowBytes)",
    ),
    SeedBug(
        "wrong step along K",
        SM90,
        "ptx::wgmma_advance(k, block * kBlockN * kBlockRowBytes + byte)",
        "ptx::wgmma_advance(k, block * kBlockN * kBlockRowBytes)",
    ),
    SeedBug(
        "probabilities packed while the product reads them",
        SM90,
        "softmax.add(sums); if constexpr (kPipelined) finish_values();",
        "softmax.add(sums); pack_probabilities<T>(rP, acc_s);"
        " if constexpr (kPipelined) finish_values();",
    ),
    SeedBug(
        "overflow of the row max ignored",
        SM90,
        "if (softmax.overflows(sums)) {",
        "if (false) {",
    ),
    SeedBug(
        "scores made again not masked",
        SM90,
        "score_mod.apply(acc_s, walk.position(n)); hide_unseen(walk, n);",
        "score_mod.apply(acc_s, walk.position(n));",
    ),
    SeedBug("probabilities not scaled down", SM90, "rescale(probabilities, factors);", ";"),
    SeedBug("tile's sum not scaled down", SM90, "sums[h] *= factors[h];", ";"),
    SeedBug(
        "row max of each lane's own",
        SM90,
        "{tile::reduce_sum<4>(sums[0]), tile::reduce_sum<4>(sums[1])}",
        "{sums[0], sums[1]}",
    ),
    SeedBug(
        "overflown sums scaled down",
        SM90,
        "return row_sums[h] > tile::kLargest || !tile::can_raise(words[h]);",
        "return false;",
    ),
    SeedBug(
        "Q's stage released before its last product",
        SM90,
        "for (int n = walk.tiles.end - 2; n >= walk.tiles.begin; --n) step(walk, n, score_mod); "
        "if (kFromRegisters) release(shared.queries, query_use);",
        "if (kFromRegisters) release(shared.queries, query_use); "
        "for (int n = walk.tiles.end - 2; n >= walk.tiles.begin; --n) step(walk, n, score_mod);",
    ),
    SeedBug(
        "results of other columns",
        SM90,
        "transpose_in_quad(words.x, lane);",
        ";",
    ),
    SeedBug("accumulator not rescaled", SM90, "if (raised) rescale(acc_o, factors);", ";"),
    SeedBug(
        "scores of absent keys used",
        SM90,
        "if ((bits & 1u << i) == 0) acc_s[i / 2 * 4 + 2 * h + i % 2] = -INFINITY;",
        ";",
    ),
    SeedBug(
        "tile stored unswizzled",
        SM90,
        "sO + swizzled_offset(row, d / 8 + lane / 16, kWarpgroupRows)",
        "sO + d * 128 + row * 128 + lane / 16 * 16",
    ),
    # Its score modification.
    SeedBug(
        "large scores capped as small ones",
        SM90,
        "if (exponents != exponent_bits(ratio.offset)) sums[0] = INFINITY;",
        ";",
    ),
    SeedBug(
        "large scores capped as small ones where softcap is not alone",
        SM90,
        "if (beyond) sums[0] = INFINITY;",
        ";",
    ),
    SeedBug(
        "second row's distance that of the first",
        SM90,
        "shift[1] = -rising * scale * (lane + 8.0f);",
        "shift[1] = shift[0];",
    ),
    SeedBug(
        "slopes of keys after their rows as of those before",
        SM90,
        "const float rising = after ? -slope : slope;",
        "const float rising = slope;",
    ),
    SeedBug(
        "score modification left out where a tile is done again",
        SM90,
        "score_mod.apply(acc_s, walk.position(n)); hide_unseen(walk, n); "
        "raise(score_mod, sums, factors);",
        "hide_unseen(walk, n); raise(score_mod, sums, factors);",
    ),
    SeedBug(
        "bias and mask released before they are used",
        SM90,
        "bias_mask.wait_full(); float sums[2], factors[2];",
        "bias_mask.wait_full(); bias_mask.release(); float sums[2], factors[2];",
    ),
    SeedBug(
        "second half of a wide bias taken from the first",
        SM90,
        "{n0 + kWideColumns, first_row,",
        "{n0, first_row,",
    ),
    SeedBug("mask read unswizzled", SM90, "^ (row / 2 % 4)", "^ 0"),
    # wmma's general kernel: overflows of the speculative row max with score modification.
    SeedBug(
        "lost scores not made again",
        GENERAL,
        "if (lost) continue;  // the same tile again copy_next_tile();",
        "copy_next_tile();",
    ),
    SeedBug(
        "probabilities not scaled down with score modification",
        GENERAL,
        "if (overflows(sums) && (is_aside || !scale_down<kFirst, kKeys>(acc_s, sums, acc_o))) "
        "return false;",
        ";",
    ),
    SeedBug(
        "bias and mask of the next tile fetched before this one's scores are needed no more",
        GENERAL,
        "make_scores(); mask_scores(); if (raises)",
        "make_scores(); if (n > tiles.begin) copy_bias_mask(n - 1); mask_scores(); if (raises)",
    ),
    # Rows of many keys.
    SeedBug(
        "what is set aside not taken back",
        GENERAL,
        "pair[i] += upper[i];",
        "pair[i] += 0.0f * upper[i];",
    ),
    SeedBug(
        "what is set aside not scaled",
        GENERAL,
        "if (overflows(sums) && (is_aside ||",
        "if (overflows(sums) && (",
    ),
    SeedBug(
        "what is set aside not scaled",
        GENERAL,
        "lost = is_aside && softmax.would_raise(acc_s, scale_log2, score_mod.faint());",
        "lost = false;",
    ),
    SeedBug(
        "a tile waited for again whose scores are made again",
        GENERAL,
        "if (!lost) stages.template wait_full<1>(i);",
        "stages.template wait_full<1>(i);",
    ),
    SeedBug(
        "totals of the runs before not scaled",
        SCALAR + QK,
        "*total = *total * row_factor + acc[r][c][e];",
        "*total = *total + acc[r][c][e];",
    ),
    SeedBug(
        "totals of the runs before lost",
        SCALAR + QK,
        "*total = *total * row_factor + acc[r][c][e];",
        "*total = acc[r][c][e];",
    ),
    SeedBug(
        "sums of the runs before lost",
        SCALAR,
        "total.row_sum += run.row_sum;",
        "total.row_sum = run.row_sum;",
    ),
    SeedBug(
        "a run's sum counted again",
        QK,
        "softmax.row_sum = 0.0f;",
        "",
    ),
)
