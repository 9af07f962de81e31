"""Bugs of sm90_latent that no change of one barrier or wait makes: of what the two blocks of a
cluster owe each other, and of the narrow shapes' transposition.

They name their place by a file and the text there, which says once what is replaced.
"""

from __future__ import annotations

from seed_bugs import SeedBug


def _latent(kind: str, file: str, part: str, replace: str) -> SeedBug:
    place = file if "/" in file else f"forward/sm90_latent/{file}"
    return SeedBug(kind, ("sm90_latent",), "", replace, part=part, file=place)


LATENT_BUGS = (
    # Row blocks side by side.
    _latent(
        "stages released to the own block alone",
        "consumer.cuh",
        "empty, 1 - blockIdx.x % 2",
        "empty, blockIdx.x % 2",
    ),
    _latent(
        "stages filled when one block has emptied them",
        "setup.cuh",
        "kWarps << shape.pair_log2",
        "kWarps",
    ),
    _latent("columns for one block alone", "producer.cuh", "box.box.load_to_pair", "box.box.load"),
    _latent(
        "keys that the other block's rows see left out",
        "producer.cuh",
        "kBlockM << shape.pair_log2",
        "kBlockM",
    ),
    _latent(
        "both blocks have the first row block",
        "tile/key_parts/schedule.cuh",
        "(segment->row_block << log2) + rank",
        "segment->row_block << log2",
    ),
    _latent(
        "parts of both blocks in one place",
        "tile/key_parts/schedule.cuh",
        "(segment->part << log2) + rank",
        "segment->part << log2",
    ),
    _latent(
        "parts of the first row block for both",
        "tile/key_parts/combine.cuh",
        "((parts.first + static_cast<unsigned>(group_)) << log2) + rank",
        "(parts.first + static_cast<unsigned>(group_)) << log2",
    ),
    # Joined parts.
    _latent("the row kept is given too", "join.cuh", "rank() == 0 ? second : first", "first"),
    _latent(
        "joined parts of one weight",
        "consumer.cuh",
        "fmaf(weight, x[e], factor * Join::kept(acc_o[at], acc_o[at + 2]))",
        "x[e] + factor * Join::kept(acc_o[at], acc_o[at + 2])",
    ),
    _latent(
        "sums of joined parts of one weight",
        "consumer.cuh",
        "fmaf(weight, x[1], row.row_sum)",
        "x[1] + row.row_sum",
    ),
    _latent(
        "joined parts stored to the wrong rows",
        "consumer.cuh",
        "row_of_block(h ^ kept)",
        "row_of_block(h)",
    ),
    _latent(
        "joined parts added up again",
        "tile/key_parts/combine.cuh",
        "parts.is_done || is_joined(shape, schedule.part_tiles, schedule.of_block, begin)",
        "parts.is_done",
    ),
    _latent(
        "parts of two clusters joined",
        "tile/key_parts/schedule.cuh",
        "units == 2 && first % 2 == 0",
        "units == 2",
    ),
    # Narrow shapes.
    _latent(
        "maxima of one warp",
        "narrow_consumer.cuh",
        "w < kNarrowWarps; ++w) most = fmaxf(most, own_of_rows(w)[of_lane(own)]);",
        "w < 1; ++w) most = fmaxf(most, own_of_rows(w)[of_lane(own)]);",
    ),
    _latent(
        "output of narrow shapes not rescaled",
        "narrow_consumer.cuh",
        "acc_o[b][i] *= factors[of_score(i)];",
        ";",
    ),
    _latent(
        "sums of half of the keys",
        "narrow_consumer.cuh",
        "acc_s[score_of(own, 0)] + acc_s[score_of(own, 1)];",
        "acc_s[score_of(own, 0)];",
    ),
    _latent(
        "keys of the second eight masked as the first",
        "narrow_consumer.cuh",
        "tile::contains(visible, 8 * second)",
        "tile::contains(visible, 0)",
    ),
    _latent(
        "rows joined stored where the others go",
        "narrow_consumer.cuh",
        "joined && row % 2 != kept",
        "joined && row % 2 == kept",
    ),
    _latent(
        "joined parts of narrow shapes of one weight",
        "narrow_consumer.cuh",
        "fmaf(weight, x[e], factor * Join::kept(pair[0], pair[1]))",
        "x[e] + factor * Join::kept(pair[0], pair[1])",
    ),
    _latent(
        "parts of narrow shapes not relative to their maxima",
        "narrow_consumer.cuh",
        "{row_max, softmax[own].row_sum * factor}",
        "{0.0f, softmax[own].row_sum * factor}",
    ),
    # Keys of 8 bits.
    _latent(
        "what rows' products count left out",
        "narrow_consumer.cuh",
        "acc_s[score_of(own, 0)] *= factor, acc_s[score_of(own, 1)] *= factor;",
        ";",
    ),
    _latent(
        "v's factor left out",
        "narrow_consumer.cuh",
        "result.scale *= value_scale<sizeof(KV)>(params, segment.sequence, segment.head_kv);",
        ";",
    ),
    _latent(
        "v's factor of parts left out",
        "kernel.cuh",
        "combine_row_block<T, kWideTile, kBlockM, kBlockN, 1>",
        "combine_row_block<T, kWideTile, kBlockM, kBlockN, 2>",
    ),
    _latent(
        "results of bfloat16 as float16",
        "narrow_consumer.cuh",
        "if (shape.is_bfloat16) return",
        "if (false) return",
    ),
    _latent(
        "columns of V swapped",
        "narrow_bytes.cuh",
        "alternating(bytes[i], &step[0], &step[1])",
        "alternating(bytes[i], &step[1], &step[0])",
    ),
    _latent(
        "columns of K 8 further on taken for those before",
        "narrow_bytes.cuh",
        "&step[i % 2], &step[i % 2 + 2]",
        "&step[i % 2 + 2], &step[i % 2]",
    ),
    _latent(
        "Q in the order of 16-bit keys",
        "narrow_bytes.cuh",
        "= {words[0], words[2]};",
        "= {words[0], words[1]};",
    ),
    _latent(
        "Q's power of two not taken back",
        "narrow_bytes.cuh",
        "kIsHalf ? 1.0f : scale.of_products",
        "1.0f",
    ),
    # Copies.
    _latent(
        "blocks of another warp",
        "narrow_producer.cuh",
        "own.advance(warp + lane * kWarps);",
        "own.advance(lane * kWarps);",
    ),
)
