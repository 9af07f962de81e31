"""Bugs of sm90_wide, and of sm90's blocks in pairs, that no change of one barrier or wait makes: of
what the two blocks of a cluster and the two consumers of a block owe each other.

They name their place by a file and the text there, which says once what is replaced.
"""

from __future__ import annotations

from seed_bugs import SeedBug


def _wide(kind: str, file: str, part: str, replace: str) -> SeedBug:
    place = f"forward/sm90_wide/{file}"
    return SeedBug(kind, ("sm90_wide",), "", replace, part=part, file=place)


def _pair(kind: str, file: str, part: str, replace: str) -> SeedBug:
    place = f"forward/sm90/{file}"
    return SeedBug(kind, ("sm90",), "", replace, part=part, file=place, tile=256)


LARGE_HEAD_BUGS = (
    _pair(
        "stages of a pair released to the own block alone",
        "consumer.cuh",
        "if (rank < cluster_blocks(kVariant))",
        "if (rank == blockIdx.x % 2)",
    ),
    _pair(
        "stages of a pair filled when one block has emptied them",
        "setup.cuh",
        "keys.init(kClusterBlocks * row_groups(kShape) * 4)",
        "keys.init(row_groups(kShape) * 4)",
    ),
    _pair("tiles of a pair for one block alone", "producer.cuh", "keys.load_to_pair", "keys.load"),
    _pair(
        "both blocks of a pair copy the same columns",
        "producer.cuh",
        "static_cast<int>(blockIdx.x % 2)",
        "0",
    ),
    _wide(
        "slots released to the own block alone",
        "setup.cuh",
        "if (lane < kClusterBlocks)",
        "if (lane == blockIdx.x % kClusterBlocks)",
    ),
    _wide(
        "slots filled when one block has emptied them",
        "setup.cuh",
        "kClusterBlocks * kWarpgroupThreads / 32",
        "kWarpgroupThreads / 32",
    ),
    _wide("copies to one block alone", "producer.cuh", "(1u << kClusterBlocks) - 1", "1"),
    _wide(
        "products not waited for",
        "consumer.cuh",
        "(ptx::wgmma_wait<static_cast<int>(sizeof...(kIndices)) - 1 - kIndices>(), "
        "run(static_cast<unsigned>(kIndices)))",
        "run(static_cast<unsigned>(kIndices))",
    ),
    _wide(
        "products waited for one group late",
        "consumer.cuh",
        "(sizeof...(kIndices)) - 1 - kIndices>",
        "(sizeof...(kIndices)) - kIndices>",
    ),
    _wide(
        "values of the other's tile not released",
        "consumer.cuh",
        "if (i > begin) release<kSteps>(other_values)",
        "",
    ),
    _wide(
        "row maxima of the other's tile left out",
        "consumer.cuh",
        "ptx::barrier_sync(kReadyBarrier + owner, kConsumers * kWarpgroupThreads);\n"
        "    const float maxima[2] = {Shared::row_max(owner)[row_of_block(0)],\n"
        "                             Shared::row_max(owner)[row_of_block(1)]};",
        "ptx::barrier_sync(kReadyBarrier + owner, kConsumers * kWarpgroupThreads);\n"
        "    const float maxima[2] = {softmax[0].row_max, softmax[1].row_max};",
    ),
    _wide(
        "sums of own tiles alone",
        "consumer.cuh",
        "Shared::row_sum(0)[row_of_block(h)] +",
        "",
    ),
    _wide(
        "both blocks have the first rows",
        "setup.cuh",
        "shape, work), rank_in_cluster()",
        "shape, work), 0",
    ),
)
