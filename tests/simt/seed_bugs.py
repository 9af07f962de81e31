"""Bugs that earlier kernels of this line had, as edits of today's source that put them back."""

from __future__ import annotations

from dataclasses import dataclass

SCALAR = ("scalar",)
QK = ("wmma_qk",)
SMEM = ("wmma_smem",)
WMMA = QK + SMEM
ALL = SCALAR + WMMA
SM90 = ("sm90",)
SM90_FP8 = ("sm90_fp8",)
SM90_FP8_SCALED = ("sm90_fp8_scaled",)
HOPPER = SM90 + SM90_FP8
HALVES = ("wmma_halves",)
GENERAL = ("wmma_general",)
WMMA8 = ("wmma8",)
WMMA8_INT8 = ("wmma8_int8",)


@dataclass(frozen=True)
class SeedBug:
    """Replaces the statements behind a marker ``// seed: <marker>`` in a family's kernel.

    The marker stands exactly once in what the kernel includes. In a longer statement, ``part`` is
    what is replaced; white space in it matches any white space. With ``file``, of src/cuda, no
    marker is needed: ``part`` stands there exactly once.
    """

    kind: str
    families: tuple[str, ...]
    marker: str
    replace: str
    statements: int = 1
    part: str = ""
    file: str = ""
    # Is what AddressSanitizer or UBSan sees, or needs their build's short runs of keys.
    asan: bool = False
    tile: int = 0  # of head_dim, where that of most cases does not show it


SEED_BUGS = (
    # A warp computed one row, or the block its first row group; the rest of the tile was left out.
    SeedBug(
        "rows left uncomputed",
        SCALAR,
        "stored-rows",
        "if (row >= seq.seqlen_q || r > 0) continue;",
    ),
    SeedBug(
        "rows left uncomputed",
        WMMA,
        "warp-rows",
        "const int warp_row = 0;",
    ),
    # The output started anew with every tile of keys.
    SeedBug(
        "accumulator lost between tiles",
        SCALAR,
        "rescale-output",
        "acc_o[r][c][e] = 0.0f * factor;",
        part="acc_o[r][c][e] *= factor;",
    ),
    SeedBug(
        "accumulator lost between tiles",
        QK,
        "rescale-output",
        "acc_o[r][c][e] = 0.0f * row_factor;",
        part="acc_o[r][c][e] *= row_factor;",
    ),
    SeedBug(
        "accumulator lost between tiles",
        SMEM,
        "rescale-output",
        "acc_o[i].x[t] = 0.0f * factors.x[t];",
        part="acc_o[i].x[t] *= factors.x[t];",
    ),
    # It was kept, but not rescaled when a row's maximum rose.
    SeedBug(
        "accumulator not rescaled",
        SCALAR,
        "rescale-output",
        "(void)factor;",
        part="acc_o[r][c][e] *= factor;",
    ),
    SeedBug(
        "accumulator not rescaled",
        QK,
        "rescale-output",
        "(void)row_factor;",
        part="acc_o[r][c][e] *= row_factor;",
    ),
    SeedBug(
        "accumulator not rescaled",
        SMEM,
        "rescale-output",
        "(void)factors;",
        part="acc_o[i].x[t] *= factors.x[t];",
    ),
    # Once where the product was stored and again where the softmax read it.
    SeedBug(
        "score scaled twice",
        SCALAR,
        "score-scale",
        "const float scale_log2 = shape.scale_log2 * static_cast<float>(params.softmax_scale);",
    ),
    SeedBug(
        "score scaled twice",
        WMMA,
        "probability",
        "x[i][e] = softmax.probability(x[i][e], scale_log2 * scale_log2);",
    ),
    # A column-major operand's leading dimension is its rows, padded; it was given its columns.
    SeedBug(
        "wrong leading dimension for K",
        WMMA,
        "load-k",
        "ptx::load_matrix(rK, sK + n * kLd + d, kKeys);",
    ),
    # A row group of fewer than 16 rows was skipped, or loaded and stored as if it were whole.
    SeedBug(
        "partial row group skipped",
        QK,
        "stored-rows",
        "if (first_row + kRows > seq.seqlen_q) continue;",
    ),
    SeedBug(
        "partial row group skipped",
        SMEM,
        "stored-rows",
        "const bool row_exists = first_row + kRows <= seq.seqlen_q;",
    ),
    SeedBug("partial row group read whole", ALL, "query-rows", "kBlockM", part="seq.seqlen_q - m0"),
    SeedBug("partial row group stored whole", SCALAR, "stored-rows", ";"),
    SeedBug("partial row group stored whole", QK, "stored-rows", ";"),
    SeedBug(
        "partial row group stored whole",
        SMEM,
        "stored-rows",
        "const bool row_exists = true;",
    ),
    # Lanes without a key of the tile took part in the softmax with whatever they held.
    SeedBug(
        "scores of absent keys used",
        SCALAR,
        "masked",
        "const bool masked = false;",
    ),
    SeedBug(
        "scores of absent keys used",
        WMMA,
        "hide-keys",
        ";",
    ),
    SeedBug(
        "absent keys left uninitialised",
        ALL,
        "copy-row",
        "if (row < end) ptx::cp_async<16>(",
        part="ptx::cp_async<16>(",
    ),
    # Only some lanes held a row's result, and others went on with their own part.
    SeedBug(
        "maximum not broadcast",
        SCALAR,
        "row-max",
        "softmax[r].raise_max(x, scale_log2)",
        part="softmax[r].raise_max(tile::reduce_max<32>(x), scale_log2)",
    ),
    SeedBug(
        "maximum not broadcast",
        WMMA,
        "row-max",
        "softmax.raise_max(tile_max, scale_log2)",
        part="softmax.raise_max(reduce_max<2>(tile_max), scale_log2)",
    ),
    SeedBug(
        "factor not broadcast",
        QK,
        "row-factor",
        "row_factor = factor",
        part="row_factor = __shfl_sync(tile::kFullMask, factor, 2 * r)",
    ),
    SeedBug(
        "sum not broadcast",
        SCALAR,
        "row-sum",
        ";",
    ),
    SeedBug(
        "sum not broadcast",
        WMMA,
        "row-sum",
        ";",
    ),
    # cp.async moves 4, 8 or 16 bytes between addresses aligned to that; stores are no different.
    SeedBug(
        "copies wider than aligned",
        ALL,
        "copy-bytes",
        "shape.copy_bytes = 16;",
    ),
    SeedBug(
        "stores wider than aligned",
        ALL,
        "store-bytes",
        "shape.store_bytes = 16;",
        asan=True,
    ),
    # sm90: operands and registers of asynchronous products, overflows of the speculative row max.
    SeedBug(
        "wrong leading dimension for V",
        SM90,
        "v-descriptor",
        "ptx::wgmma_descriptor(sV, kHeadDim * kBlockRowBytes)",
        part="ptx::wgmma_descriptor(sV, kBlockN * kBlockRowBytes)",
    ),
    SeedBug(
        "wrong step along K",
        SM90,
        "step-along-k",
        "ptx::wgmma_advance(k, block * kBlockN * kBlockRowBytes)",
        part="ptx::wgmma_advance(k, block * kBlockN * kBlockRowBytes + byte)",
    ),
    SeedBug(
        "probabilities packed while the product reads them",
        SM90,
        "finish-values",
        "softmax.add(sums); tile::wgmma::pack_probabilities<T>(rP, acc_s);"
        " if constexpr (kPipelined) finish_values();",
        statements=2,
    ),
    SeedBug(
        "overflow of the row max ignored",
        HOPPER,
        "overflow",
        "if (false) {",
    ),
    SeedBug(
        "scores made again not masked",
        SM90,
        "recompute-scores",
        ";",
    ),
    SeedBug("probabilities not scaled down", HOPPER, "scale-probabilities", ";"),
    SeedBug("tile's sum not scaled down", HOPPER, "scale-sum", ";"),
    SeedBug(
        "row max of each lane's own",
        HOPPER,
        "sums-of-rows",
        "{sums[0], sums[1]}",
        part="{tile::reduce_sum<4>(sums[0]), tile::reduce_sum<4>(sums[1])}",
    ),
    SeedBug(
        "overflown sums scaled down",
        HOPPER,
        "may-scale",
        "return false;",
    ),
    SeedBug(
        "Q's stage released before its last product",
        SM90,
        "key-loop",
        "if (kFromRegisters) release(shared.queries, query_use); "
        "for (int n = own_tile(walk, walk.tiles.end - 1) - kKeyGroups; n >= walk.tiles.begin; "
        "n -= kKeyGroups) step(walk, n, score_mod);",
        statements=2,
    ),
    SeedBug(
        "heads counted from the last eight on",
        SM90,
        "first-head",
        "const unsigned first_head = head / kHeadsTogether * kHeadsTogether;",
    ),
    SeedBug(
        "heads that are left walked as a full group",
        SM90,
        "heads-of-group",
        "const Divider& heads = groups.together;",
    ),
    # Two consumers that share rows.
    SeedBug(
        "sums of one group of keys lost",
        SM90,
        "merge-sums",
        "row_sum[h] *= factors[h];",
    ),
    SeedBug(
        "both groups of keys scaled alike",
        SM90,
        "merge-parts",
        "acc = fmaf(x.x[e], factors[e / 2], acc * factors[e / 2]);",
    ),
    SeedBug(
        "unscaled row max taken for a scaled one",
        SM90,
        "merge-mode",
        "other.set_mode(Softmax::kScaled);",
    ),
    SeedBug(
        "groups of keys count uses apart",
        SM90,
        "even-out",
        ";",
    ),
    SeedBug(
        "results of other columns",
        SM90,
        "transpose-results",
        ";",
    ),
    SeedBug("accumulator not rescaled", SM90, "rescale-output", ";"),
    SeedBug("accumulator not rescaled", SM90_FP8, "rescale-output", "if (false) {"),
    SeedBug(
        "scores of absent keys used",
        HOPPER,
        "hide-keys",
        ";",
    ),
    SeedBug(
        "tile stored unswizzled",
        SM90,
        "store-swizzled",
        "sO + d * 128 + row * 128 + lane / 16 * 16",
        part="sO + swizzled_offset(row, d / 8 + lane / 16, kWarpgroupRows)",
    ),
    # sm90_fp8.
    SeedBug(
        "work tiles by twos that two blocks have",
        SM90_FP8,
        "by-twos",
        "if (by_twos()) return (round & ~1u) * gridDim.x + blockIdx.x + (round & 1u);",
    ),
    SeedBug(
        "keys of V in their own order",
        SM90_FP8,
        "key-order",
        "const std::uint32_t even = ptx::permute_bytes<0x6240>(pairs[i], pairs[i + 1]);",
    ),
    SeedBug(
        "columns of out in the order of the accumulators",
        SM90_FP8,
        "column-order",
        "const float x[4] = {even[0], even[1], odd[0], odd[1]};",
    ),
    SeedBug(
        "probabilities packed while the product reads them",
        SM90_FP8,
        "finish-values",
        "pack_probabilities(rP, acc_s); finish_values();",
    ),
    SeedBug(
        "product with V lost",
        SM90_FP8,
        "promote",
        ";",
    ),
    SeedBug(
        "columns of the product with V lost",
        SM90_FP8,
        "add-columns",
        ";",
    ),
    SeedBug(
        "columns of V added to others of out",
        SM90_FP8,
        "add-columns",
        "add(acc_o[i * kColumns / 2 + d], acc_pv[i % kInFlight][kColumns / 2 - 1 - d])",
        part="add(acc_o[i * kColumns / 2 + d], acc_pv[i % kInFlight][d])",
    ),
    SeedBug(
        "Q's stage released before its last product",
        SM90_FP8,
        "key-loop",
        "release(shared.queries, query_use); "
        "for (int n = walk.tiles.end - (kGiven ? 1 : 2); n >= walk.tiles.begin; --n)"
        " step(walk, n);",
        statements=2,
    ),
    SeedBug(
        "scale of another tile's keys",
        SM90_FP8_SCALED,
        "scores-scale",
        "loaded.keys = k[max(keys, 0) / 2 * 2];",
    ),
    SeedBug(
        "scale of another tile's values",
        SM90_FP8_SCALED,
        "values-scale",
        "loaded.values = k[k_to_v + values / 2 * 2];",
    ),
    SeedBug(
        "row max left in the units of another tile",
        SM90_FP8_SCALED,
        "change-units",
        ";",
    ),
    # sm90's score modification.
    SeedBug(
        "large scores capped as small ones",
        SM90,
        "softcap-exponents",
        ";",
    ),
    SeedBug(
        "large scores capped as small ones where softcap is not alone",
        SM90,
        "softcap-range",
        ";",
    ),
    SeedBug(
        "second row's distance that of the first",
        SM90,
        "second-row",
        "shift[1] = shift[0];",
    ),
    SeedBug(
        "slopes of keys after their rows as of those before",
        SM90,
        "slope-sign",
        "const float rising = slope;",
    ),
    SeedBug(
        "overflow of the row max ignored",
        SM90,
        "modified-overflow",
        "break;",
    ),
    SeedBug(
        "score modification left out where a tile's maxima come first",
        SM90,
        "modify-scores",
        "if (!raises) score_mod.apply(acc_s, softmax, walk.position(n), walk.is_edge(n), raises);",
    ),
    SeedBug(
        "bias and mask released before they are used",
        SM90,
        "bias-mask-wait",
        "bias_mask.wait_full(); bias_mask.release(); float sums[2], factors[2];",
        statements=2,
    ),
    SeedBug(
        "second half of a wide bias taken from the first",
        SM90,
        "wide-bias",
        "{n0, first_row,",
        part="{n0 + kWideColumns, first_row,",
    ),
    SeedBug("mask read unswizzled", SM90, "mask-swizzle", "^ 0", part="^ (row / 2 % 4)"),
    # wmma's general kernel: overflows of the speculative row max with score modification.
    SeedBug(
        "lost scores not made again",
        GENERAL,
        "lost-scores",
        "copy_next_tile();",
        statements=2,
    ),
    SeedBug(
        "probabilities not scaled down with score modification",
        GENERAL,
        "scale-down",
        ";",
    ),
    SeedBug(
        "bias and mask of the next tile fetched before this one's scores are needed no more",
        GENERAL,
        "mask-scores",
        "make_scores(); if (n > tiles.begin) copy_bias_mask(n - 1); mask_scores(); if (raises)",
        statements=3,
        part="make_scores(); mask_scores(); if (raises)",
    ),
    # Rows of many keys.
    SeedBug(
        "what is set aside not taken back",
        GENERAL,
        "restore-flushed",
        "pair[i] += 0.0f * upper[i];",
        part="pair[i] += upper[i];",
    ),
    SeedBug(
        "what is set aside not scaled",
        GENERAL,
        "scale-down",
        "if (overflows(sums) && (",
        part="if (overflows(sums) && (is_flushed ||",
        asan=True,
        tile=256,
    ),
    SeedBug(
        "what is set aside not scaled",
        GENERAL,
        "would-raise",
        "lost = false;",
    ),
    SeedBug(
        "a tile waited for again whose scores are made again",
        GENERAL,
        "wait-tile",
        "stages.template wait_full<1>(i);",
    ),
    SeedBug(
        "totals of the runs before not scaled",
        SCALAR + QK,
        "add-run-total",
        "*total = *total + acc[r][c][e];",
        asan=True,
    ),
    SeedBug(
        "totals of the runs before lost",
        SCALAR + QK,
        "add-run-total",
        "*total = acc[r][c][e];",
        asan=True,
    ),
    SeedBug(
        "sums of the runs before lost",
        SCALAR,
        "add-run-sum",
        "total.row_sum = run.row_sum;",
        asan=True,
    ),
    SeedBug(
        "a run's sum counted again",
        QK,
        "new-run",
        "",
        asan=True,
    ),
    # wmma8.
    SeedBug(
        "partial row group read whole",
        WMMA8,
        "query-rows",
        "kBlockM",
        part="seq.seqlen_q - m0",
    ),
    SeedBug("partial row group stored whole", WMMA8, "stored-rows", "const bool exists = true;"),
    SeedBug("scores of absent keys used", WMMA8, "hide-keys", ";"),
    SeedBug(
        "absent keys read",
        WMMA8,
        "copy-row",
        "in_columns",
        part="kAll ? in_columns : first < exist",
    ),
    SeedBug(
        "row max of each lane's own",
        WMMA8,
        "row-max",
        "largest",
        part="reduce_max<4>(largest)",
    ),
    SeedBug(
        "sum not broadcast",
        WMMA8,
        "row-sum",
        "softmax.row_sum",
        part="tile::reduce_sum<4>(softmax.row_sum)",
    ),
    SeedBug(
        "accumulator not rescaled",
        WMMA8,
        "promote",
        "return o + product;",
    ),
    SeedBug(
        "keys of V in their own order",
        WMMA8,
        "key-order",
        "0x6240",
        part="0x6420",
    ),
    SeedBug(
        "keys of P in another order",
        WMMA8,
        "pack-keys",
        "p[j][e], p[j + 1][e], p[j][e + 1], p[j + 1][e + 1]",
        part="p[j][e], p[j][e + 1], p[j + 1][e], p[j + 1][e + 1]",
    ),
    SeedBug("descales left out", WMMA8, "descales", ";", part="* descale;"),
    SeedBug("copies wider than aligned", WMMA8, "copy-bytes", "shape.copy_bytes = 16;"),
    SeedBug(
        "stores wider than aligned", WMMA8, "store-bytes", "shape.store_bytes = 16;", asan=True
    ),
    # wmma8 in 8-bit integers.
    SeedBug("scores of absent keys used", WMMA8_INT8, "hide-keys", ";"),
    SeedBug(
        "partial row group stored whole", WMMA8_INT8, "stored-rows", "const bool exists = true;"
    ),
    SeedBug(
        "partial row group read whole",
        WMMA8_INT8,
        "query-exists",
        "true",
        part="row < seqlen_q",
    ),
    SeedBug("q rotated without signs", WMMA8_INT8, "rotation-signs", ";"),
    SeedBug(
        "q rotated in each lane alone",
        WMMA8_INT8,
        "rotation-lanes",
        ";",
    ),
    SeedBug(
        "scale of each lane's own",
        WMMA8_INT8,
        "query-largest",
        ";",
    ),
    SeedBug(
        "tile's maximum of each lane's own",
        WMMA8_INT8,
        "tile-max",
        ";",
    ),
    SeedBug("accumulator not rescaled", WMMA8_INT8, "rescale-output", ";"),
    SeedBug("sum not rescaled", WMMA8_INT8, "rescale-sum", ";"),
    SeedBug("products not weighed", WMMA8_INT8, "promote-tile", "return o + product;"),
    SeedBug("scale of v left out", WMMA8_INT8, "v-scale", "factors[h] = weight;"),
    SeedBug("sum not broadcast", WMMA8_INT8, "tile-row-sum", ";"),
    SeedBug("what k was stored without left out of lse", WMMA8_INT8, "shift", ";"),
    SeedBug(
        "mask of a row that is none read",
        WMMA8_INT8,
        "given-rows",
        "",
        part="exists &&",
        asan=True,
    ),
    SeedBug("mask left out", WMMA8_INT8 + WMMA8, "given-mask", "!seen", part="!seen || !*given"),
    SeedBug("bias left out", WMMA8_INT8 + WMMA8, "given-bias", ";"),
    SeedBug(
        "scale of another tile",
        WMMA8_INT8,
        "shared-scale",
        "",
        part="/ kTilesOfScale",
    ),
    SeedBug(
        "stores wider than aligned", WMMA8_INT8, "store-bytes", "shape.store_bytes = 16;", asan=True
    ),
    # Pairs of warps with one half of the columns each.
    SeedBug(
        "accumulator not rescaled",
        HALVES,
        "rescale-output",
        "",
        part="acc_o[0][j][e] *= factors[e / 2]",
    ),
    SeedBug("scores of one half of the columns", HALVES, "add-parts", ";"),
    SeedBug("half of the columns counted twice", HALVES, "modified-rest", ";"),
    SeedBug("sum not broadcast", HALVES, "row-sum", ";"),
    SeedBug("accumulators set aside are not taken back", HALVES, "flushed-results", ";", asan=True),
)
