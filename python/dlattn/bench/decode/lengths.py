"""How many keys each sequence of a batch has: mixes written out, and batches drawn from traces.

Of two published traces of requests the statistics below are known: quantiles of the numbers of
input and of output tokens. A sequence's length is an input's, drawn from its distribution, and a
uniform part of an output's, as a step of generation finds it. Between quantiles the logarithm of
the length is interpolated. The shortest and the longest are not among the statistics: with the
bounds used, the distributions' means are within 6% of the published ones.

- Mooncake conversation (kvcache-ai/Mooncake, Apache-2.0): input 12035 in the mean, output 343.
- Azure 2023 conversation (Azure/AzurePublicDataset, CC-BY): input 1155 in the mean, output 211.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

Lengths = tuple[int, ...]
Quantiles = tuple[tuple[int, int], ...]  # (percent of requests, tokens that they have at most)

BATCHES = (1, 8, 32, 128)  # sequences of a trace's batches: the first of its lengths


def parse(text: str) -> Lengths:
    """The lengths that `1x16k+15x64` stands for, in that order."""
    lengths: list[int] = []
    for part in text.split("+"):
        found = re.fullmatch(r"(\d+)x(\d+)(k?)", part)
        if found is None:
            raise ValueError(f"{part!r} in {text!r}; accepted: COUNTxLENGTH such as 31x4k")
        lengths += int(found[1]) * [int(found[2]) * (1024 if found[3] else 1)]
    return tuple(lengths)


@dataclass(frozen=True)
class Trace:
    """The published figures of a trace, and lengths drawn by it."""

    name: str
    inputs: Quantiles
    outputs: Quantiles
    lengths: Lengths


def draw(trace: Trace, seed: int = 0) -> Lengths:
    """The lengths that a trace's quantiles give: how the stored ones were made."""
    random = np.random.default_rng(seed).random((max(BATCHES), 3))
    tokens = _at(trace.inputs, random[:, 0]) + random[:, 2] * _at(trace.outputs, random[:, 1])
    return tuple(int(n) for n in np.rint(tokens))


def _at(quantiles: Quantiles, share: np.ndarray) -> np.ndarray:
    percents, tokens = zip(*quantiles, strict=True)
    return np.exp(np.interp(100 * share, percents, np.log(tokens)))


# fmt: off
MOONCAKE = Trace(
    "Mooncake conversation",
    inputs=((0, 64), (10, 964), (25, 2306), (50, 6909), (75, 15368), (90, 27367), (99, 85401),
            (100, 126000)),
    outputs=((0, 16), (50, 350), (90, 597), (100, 2000)),
    lengths=(
        10710, 586, 9975, 42642, 23245, 1804, 2874, 1395, 10163, 76348, 12646, 14141, 7042,
        3825, 9391, 26402, 1054, 2202, 3383, 18369, 4549, 9001, 2082, 1381, 5896, 5385, 51023,
        7117, 5091, 41071, 38730, 25320, 2558, 20374, 18974, 8054, 485, 146, 16176, 421, 3708,
        8449, 26152, 2946, 19446, 5049, 57850, 9411, 4613, 20500, 96, 11316, 47647, 393, 7746,
        3059, 25590, 103421, 25705, 57890, 23538, 11979, 4748, 8904, 7474, 8694, 73751, 1689,
        9244, 715, 1521, 14238, 24986, 16430, 492, 10664, 12123, 6085, 869, 19543, 2586, 6684,
        11392, 21366, 100127, 4970, 13866, 3284, 3889, 1037, 15172, 13784, 22260, 70010, 32861,
        13238, 8672, 602, 4992, 42313, 27048, 13904, 8187, 3603, 15691, 1263, 1953, 6506, 12958,
        12133, 47571, 161, 17957, 8323, 14078, 515, 6020, 1579, 1271, 27785, 20443, 2370, 8973,
        1110, 2395, 14231, 7370, 1833,
    ),
)
AZURE = Trace(
    "Azure 2023 conversation",
    inputs=((0, 32), (10, 207), (25, 396), (50, 1020), (75, 1189), (90, 2735), (99, 4142),
            (100, 8192)),
    outputs=((0, 16), (50, 129), (90, 424), (100, 1500)),
    lengths=(
        1111, 343, 1228, 3216, 2172, 493, 481, 369, 1174, 4116, 1156, 1212, 1351, 647, 1106,
        2617, 427, 401, 562, 1540, 714, 1109, 582, 388, 1236, 952, 3510, 1121, 923, 3190, 3118,
        3367, 1200, 1805, 1738, 1139, 226, 58, 1367, 134, 659, 1071, 2565, 550, 1701, 942, 3633,
        1133, 737, 1856, 44, 1155, 3371, 131, 1842, 537, 2511, 5803, 2667, 4020, 2205, 1173,
        958, 1089, 1058, 1078, 3978, 344, 1238, 219, 294, 1181, 2466, 1364, 145, 1128, 1178,
        982, 213, 1764, 1049, 1148, 1155, 1932, 5596, 796, 1403, 591, 655, 219, 1236, 1485,
        2094, 3945, 3016, 1196, 1074, 177, 785, 3380, 2693, 1292, 1367, 592, 1268, 304, 521,
        998, 1161, 1159, 3364, 78, 1513, 1069, 1287, 152, 1936, 377, 285, 2765, 1851, 406, 1106,
        255, 541, 1179, 1036, 433,
    ),
)
# fmt: on
TRACES = (MOONCAKE, AZURE)
