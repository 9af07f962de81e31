"""The mutants of the kernels: each is one change of one file of src/cuda, and how it is tried.

Every ``__syncthreads()``, ``__syncwarp()``, bar.sync and cp.async wait of each kernel family (its
kernels and what these include) is removed in turn, every such wait made one group short, the same
for what orders asynchronous copies and products on Hopper, and the bugs of seed_bugs.py,
append_bugs.py, cache_bugs.py, decode_bugs.py, backward_bugs.py, large_head_bugs.py and
latent_bugs.py are put back.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from append_bugs import APPEND_BUGS
from backward_bugs import BACKWARD_BUGS
from cache_bugs import CACHE_BUGS
from decode_bugs import DECODE_BUGS
from large_head_bugs import LARGE_HEAD_BUGS
from latent_bugs import LATENT_BUGS
from markers import marked
from seed_bugs import SEED_BUGS, SeedBug

# Each with its kernels' files; test_<name>.cpp tests it.
FAMILIES = {
    "scalar": "forward/scalar/kernel.cuh",
    "wmma_qk": "forward/wmma_qk/kernel.cuh",
    "wmma_smem": "forward/wmma_smem/kernel.cuh",
    "wmma_halves": "forward/wmma_halves/kernel.cuh",
    "wmma": "forward/wmma/kernel.cuh forward/wmma/cached.cuh",
    "wmma_split": "forward/wmma/split.cuh",
    "wmma_general": "forward/wmma/general.cuh",
    "wmma_persistent": "forward/wmma/persistent.cuh",
    "wmma8": "forward/wmma8/kernel.cuh",
    "wmma8_int8": "forward/wmma8/int8.cuh",
    "sm90": "forward/sm90/kernel.cuh forward/sm90/cached_kernel.cuh",
    "sm90_fp8": "forward/sm90_fp8/kernel.cuh",
    "sm90_fp8_scaled": "forward/sm90_fp8/kernel.cuh",
    "decode": "forward/decode/kernel.cuh tile/key_parts/combine.cuh",
    "decode_wide": "forward/decode/wide_kernel.cuh",
    "sm90_latent": "forward/sm90_latent/kernel.cuh",
    "sm90_wide": "forward/sm90_wide/kernel.cuh",
    "merge": "merge/row_per_warp/kernel.cuh",
    "quantize": "quantize/key_blocks/kernel.cuh",
    "append": "append/token_rows/kernel.cuh",
    "backward_scalar": (
        "backward/scalar/bias.cuh delta/row_blocks/kernel.cuh reduce/partial_sums/kernel.cuh"
    ),
    "backward_sm90": (
        "backward/sm90/kernel.cuh backward/sm90/pair_kernel.cuh backward/sm90/convert.cuh"
    ),
    "backward_wmma": "backward/wmma/launch.cuh",
}
BUGS = SEED_BUGS + APPEND_BUGS + CACHE_BUGS + DECODE_BUGS + BACKWARD_BUGS + LARGE_HEAD_BUGS
BUGS += LATENT_BUGS

# Changes (pattern, replacement) that are made wherever the pattern occurs.
SYNCHRONISATION = {
    "no __syncthreads": (r"__syncthreads\(\);", ";"),
    "no __syncwarp": (r"__syncwarp\([^;]*\);", ";"),
    "no bar.sync": (r"ptx::barrier_sync\([^;]*\);", ";"),
    "no bar.arrive": (r"ptx::barrier_arrive\([^;]*\);", ";"),
    "no cp.async wait": (r"ptx::cp_async_wait<[^;]*\(\);", ";"),
    "cp.async wait one group short": (
        r"ptx::cp_async_wait<([^;]*)>\(\);",
        r"ptx::cp_async_wait<(\1) + 1>();",
    ),
    "no mbarrier wait": (r"ptx::mbarrier_(?:wait|sleep)\([^;]*\);", ";"),
    "mbarrier parity flipped": (r"(ptx::mbarrier_(?:wait|sleep)\([^;]*)\);", r"\1 ^ 1);"),
    "no arrival at an mbarrier": (r"ptx::mbarrier_arrive(?:_at_block)?\([^;]*\);", ";"),
    "no barrier of a cluster": (r"ptx::cluster_(?:sync|leave)\(\);", ";"),
    "no wait for a stage": (r"(?:this->)?\b[\w.]+(?:\(\))?\.wait_full\([^;]*\);", ";"),
    "no wait for an empty stage": (r"(?:this->)?\b[\w.]+(?:\(\))?\.wait_empty\([^;]*\);", ";"),
    "no release of a stage": (r"\b(?:[\w.]+\.)?release\((?:shared[^;]*)?\);", ";"),
    "expect_tx of too few bytes": (r"(ptx::mbarrier_arrive_expect_tx\([^;]*)\);", r"\1 - 16);"),
    "expect_tx of too many bytes": (r"(ptx::mbarrier_arrive_expect_tx\([^;]*)\);", r"\1 + 16);"),
    "no fence after mbarrier.init": (r"ptx::fence_mbarrier_init\(\);", ";"),
    "no fence of the async proxy": (r"ptx::fence_proxy_async\(\);", ";"),
    "no wait for bulk stores": (r"ptx::tma_store_wait_read\(\);", ";"),
    "no wait for the grids ahead": (r"ptx::wait_for_grids_ahead\(\);", ";"),
    "no wgmma fence": (r"ptx::wgmma_fence\(\);", ";"),
    "no wgmma commit": (r"ptx::wgmma_commit\(\);", ";"),
    "no wgmma wait": (r"ptx::wgmma_wait<[^;]*\(\);", ";"),
    "wgmma wait one group short": (
        r"ptx::wgmma_wait<([^;]*)>\(\);",
        r"ptx::wgmma_wait<(\1) + 1>();",
    ),
}
# Changes that change nothing: the family, the kind, and the source from the change on.
EQUIVALENT = (
    # V's tile, which is waited for next, is loaded after the keys' stage has been released.
    ("sm90", "no wait for a stage", "shared.keys.wait_full(use); release(shared.keys, use);"),
    ("sm90_fp8", "no wait for a stage", "shared.keys.wait_full(use); release(shared.keys, use);"),
    (
        "sm90_fp8_scaled",
        "no wait for a stage",
        "shared.keys.wait_full(use); release(shared.keys, use);",
    ),
    # The shapes with mbarriers take Q through K's place, so that two more barriers of the block
    # stand between their initialisation and the first arrival.
    ("wmma", "no __syncthreads", "__syncthreads(); } __device__ __forceinline__ void publish"),
    (
        "wmma_general",
        "no __syncthreads",
        "__syncthreads(); } __device__ __forceinline__ void publish",
    ),
    # The consumer that had the keys has waited for them before it says that P is ready; on a GPU
    # this is what lets the other's products see them.
    (
        "sm90_latent",
        "no wait for a stage",
        "shared.wait_full(owner, use, consumer * kOwnBlocks + i);",
    ),
    # Lanes that wait at one mbarrier go on together here; on a GPU one might come late.
    ("sm90_wide", "no __syncwarp", "__syncwarp();  // no lane may come late"),
    # The same, where a copy may also come before its bytes are expected, as the stage's phase does
    # not end before the arrival that tells of them.
    ("sm90", "no __syncwarp", "__syncwarp();  // the stage's barrier expects the boxes"),
    # All copies have been waited for: the groups that are left are empty.
    ("decode", "no cp.async wait", "ptx::cp_async_wait<0>();"),
    ("decode", "cp.async wait one group short", "ptx::cp_async_wait<0>();"),
    # Q goes through no shared memory.
    ("wmma8_int8", "no __syncthreads", "__syncthreads();  // all warps have it"),
    ("wmma8_int8", "no wait for a stage", "stages().wait_full(0);"),
    # Stages that copies alone fill: no thread stores a tile and says so.
    ("wmma", "no arrival at an mbarrier", "ptx::mbarrier_arrive(full(i));"),
    ("backward_wmma", "no arrival at an mbarrier", "ptx::mbarrier_arrive(full(i));"),
    ("wmma8_int8", "no arrival at an mbarrier", "ptx::mbarrier_arrive(full(i));"),
    ("wmma_persistent", "no arrival at an mbarrier", "ptx::mbarrier_arrive(full + stage(use)"),
    ("sm90", "no arrival at an mbarrier", "ptx::mbarrier_arrive(full + stage(use)"),
    # Results are stored behind two more barriers of the warp's lanes (output.cuh), and what is set
    # aside anew goes where the lane itself has read.
    ("wmma_general", "no __syncwarp", "__syncwarp();  // other lanes may store results there"),
)
# Functions of files that families share, of which these have no instance.
UNUSED = {
    ("sm90_latent", "tile/key_parts/combine.cuh"): "combine_row",
    ("decode", "tile/key_parts/combine.cuh"): "combine_row_block",
}
# Those that the quick run takes one of each of, beside a seed bug of each of the families below:
# one for each way in which tests run kernels and compare results.
QUICK = {
    "no __syncthreads",
    "no __syncwarp",
    "no bar.sync",
    "cp.async wait one group short",
    "mbarrier parity flipped",
    "no wait for the grids ahead",
}
QUICK_FAMILIES = {"scalar", "sm90", "decode", "wmma8_int8", "append", "backward_wmma"}

# Those that show at other tiles than the one below alone, or of which more than the family's test
# is compiled: not for the quick run.
SLOW_TO_SHOW = {
    ("scalar", "copies wider than aligned"),
    ("wmma", "mbarrier parity flipped"),
    ("wmma_general", "mbarrier parity flipped"),
    ("wmma_qk", "copies wider than aligned"),
    ("wmma_smem", "copies wider than aligned"),
    ("wmma8", "copies wider than aligned"),
}

# The variants that are tried, likeliest first. The first has but one tile of head_dim, which takes
# far less time to compile than all: the mutant's. asan alone has the form for fast tensor cores,
# and none of the large tiles unless it is the mutant's.
RACES_FIRST = ("tsan tile", "tsan", "asan tile", "asan", "plain")
NUMBERS_FIRST = ("plain tile", "plain", "asan", "tsan")
ACCESSES_FIRST = ("asan tile", "asan", "plain", "tsan")

USUAL_TILE = 64
# Families most of whose cases have another tile.
FAMILY_TILE = {
    "wmma_halves": 512,
    "decode_wide": 576,
    "sm90_latent": 576,
    "sm90_wide": 512,
    "sm90_fp8": 128,
    "sm90_fp8_scaled": 128,
}
# Changes that kernels of another tile alone show.
KIND_TILE = {
    ("sm90", "no barrier of a cluster"): 256,
    ("wmma_general", "no __syncwarp"): 128,
    ("wmma_general", "no wait for an empty stage"): 256,
}
# Files that only kernels of another tile are made of.
FILE_TILE = {
    "backward/sm90/pair_consumer.cuh": 256,
    "backward/sm90/pair_kernel.cuh": 256,
    "backward/sm90/pair_producer.cuh": 256,
    "backward/sm90/pair_setup.cuh": 256,
    "backward/sm90/wide_consumer.cuh": 256,
    "backward/wmma/large_keys.cuh": 128,
    "backward/wmma/shared_keys.cuh": 256,
}
# The same of one family.
FAMILY_FILE_TILE = {("wmma_general", "tile/stages.cuh"): 256}
# Cases that come first for a mutant of a file, by what their names contain, in tests that take
# minutes. Where all of them pass, all cases are run.
CASES_FIRST = {
    ("sm90_latent", "forward/sm90_latent/narrow_"): "rows16",
    ("sm90_latent", "forward/sm90_latent/"): "rows64 b2 q1 k200 h4/1 d576/512",
    ("backward_sm90", "backward/sm90/pair_"): "backward sm90 pair",
    ("backward_sm90", "backward/sm90/late_"): "backward sm90 float16",
    ("backward_sm90", "backward/sm90/score_"): "backward sm90 score_mod",
    ("backward_sm90", ""): "backward sm90 deterministic float16",
}


@dataclass(frozen=True)
class Mutant:
    family: str
    file: str  # under src/cuda
    statement: str  # that is mutated
    kind: str
    text: str  # the whole mutated file
    variants: tuple[str, ...]
    number: int = 1  # of those in the file that have the same statement
    count: int = 1
    own_tile: int = 0  # that alone shows it
    # Begin and end of the statement in the unchanged file, and what stands there instead, for
    # changes that can be compiled together, to be switched on one at a time.
    span: tuple[int, int] | None = None
    changed: str = ""

    @property
    def tile(self) -> int:
        return (
            self.own_tile
            or FAMILY_FILE_TILE.get((self.family, self.file))
            or KIND_TILE.get((self.family, self.kind))
            or FILE_TILE.get(self.file)
            or FAMILY_TILE.get(self.family, USUAL_TILE)
        )

    @property
    def cases_first(self) -> str:
        """A part of the names of the cases that are tried before all; "" if none are."""
        for (family, file), cases in CASES_FIRST.items():
            if self.family == family and self.file.startswith(file):
                return cases
        return ""

    @property
    def named_variants(self) -> list[str]:
        """Those that are tried, likeliest first."""
        return [name.replace("tile", str(self.tile)) for name in self.variants]

    @property
    def which(self) -> str:
        return f" ({self.number} of {self.count})" if self.count > 1 else ""

    @property
    def place(self) -> str:
        return f"{self.file}: {self.statement}{self.which}"

    @property
    def name(self) -> str:
        return f"{self.family}, {self.kind}, {self.place}"


def without_comments(source: str) -> str:
    """The source with comments blanked out, every other character in its place."""
    return re.sub(r"//[^\n]*", lambda m: " " * len(m.group()), source)


def included(cuda: Path, file: str, seen: set[str]) -> None:
    """Adds ``file`` and all that it includes of src/cuda to ``seen``."""
    if file in seen or not (cuda / file).exists():
        return
    seen.add(file)
    for other in re.findall(r'#include "cuda/([^"]+)"', (cuda / file).read_text()):
        included(cuda, other, seen)


def sources(cuda: Path, family: str) -> dict[str, str]:
    """The files that make up a family's kernel, without the wrappers of instructions."""
    files: set[str] = set()
    for file in FAMILIES[family].split():
        included(cuda, file, files)
    return {f: (cuda / f).read_text() for f in sorted(files) if not f.startswith("ptx/")}


def synchronisation_mutants(cuda: Path) -> Iterator[Mutant]:
    for family in FAMILIES:
        for file, source in sources(cuda, family).items():
            for kind, (pattern, replacement) in SYNCHRONISATION.items():
                matches = list(re.finditer(pattern, without_comments(source)))
                statements = [" ".join(match[0].split()) for match in matches]
                for i, (match, statement) in enumerate(zip(matches, statements, strict=True)):
                    if is_equivalent(family, kind, source[match.start() :]):
                        continue
                    if is_unused(family, file, source, match.start()):
                        continue
                    changed = match.expand(replacement)
                    mutated = source[: match.start()] + changed + source[match.end() :]
                    number = statements[: i + 1].count(statement)
                    yield Mutant(
                        family,
                        file,
                        statement,
                        kind,
                        mutated,
                        RACES_FIRST,
                        number,
                        statements.count(statement),
                        span=match.span(),
                        changed=changed,
                    )


def pattern_of(text: str) -> str:
    """A pattern for ``text`` whatever white space the source has between its tokens."""
    return r"\s*".join(re.escape(token) for token in re.findall(r"\w+|[^\w\s]", text))


def is_equivalent(family: str, kind: str, source: str) -> bool:
    return any(
        (family, kind) == (f, k) and re.match(pattern_of(text), source) for f, k, text in EQUIVALENT
    )


def is_unused(family: str, file: str, source: str, at: int) -> bool:
    """Whether a place lies in a function of which the family has no instance."""
    name = UNUSED.get((family, file))
    if not name:
        return False
    begin = source.index(f" {name}(")
    return begin < at < source.index("\n}\n", begin)


def place_of_bug(cuda: Path, family: str, bug: SeedBug) -> tuple[str, str, tuple[int, int]]:
    """File, source, and the span that a bug's text or marker is searched in."""
    if bug.file:
        source = (cuda / bug.file).read_text()
        return bug.file, source, (0, len(source))
    found = [
        (file, source, span)
        for file, source in sources(cuda, family).items()
        for span in marked(source, bug.marker, bug.statements)
    ]
    if len(found) != 1:
        sys.exit(f"{bug.kind}: {len(found)} markers {bug.marker}, not 1, in {family}")
    return found[0]


def seed_mutants(cuda: Path, bug: SeedBug) -> Iterator[Mutant]:
    for family in bug.families:
        file, source, (begin, end) = place_of_bug(cuda, family, bug)
        if bug.part:
            parts = list(re.compile(pattern_of(bug.part)).finditer(source, begin, end))
            if len(parts) != 1:
                sys.exit(f"{bug.kind}: {len(parts)} places, not 1, of the text: {bug.part}")
            begin, end = parts[0].span()
        mutated = source[:begin] + bug.replace + source[end:]
        statement = " ".join(source[begin:end].split())
        variants = ACCESSES_FIRST if bug.asan else NUMBERS_FIRST
        yield Mutant(family, file, statement, bug.kind, mutated, variants, own_tile=bug.tile)


def all_mutants(cuda: Path) -> list[Mutant]:
    mutants = list(synchronisation_mutants(cuda))
    for bug in BUGS:
        mutants += seed_mutants(cuda, bug)
    return mutants


def switched_sources(cuda: Path, mutants: list[Mutant]) -> dict[str, str]:
    """The files of one family's mutants with all changes in them, behind switches.

    The test of these is the unchanged one, but that `simt::switched_on(n)` of the n-th mutant,
    counted from 1, makes its change. So one compilation serves them all.
    """
    places: dict[str, dict[tuple[int, int], list[tuple[int, Mutant]]]] = {}
    for number, mutant in enumerate(mutants, start=1):
        if mutant.span:
            spans = places.setdefault(mutant.file, {})
            spans.setdefault(mutant.span, []).append((number, mutant))
    sources = {}
    for file, spans in places.items():
        source = (cuda / file).read_text()
        for (begin, end), changes in sorted(spans.items(), reverse=True):
            switches = "".join(
                f"if (::simt::switched_on({n})) {{ {m.changed} }} else " for n, m in changes
            )
            statement = f"{{ {switches}{{ {source[begin:end]} }} }}"
            source = source[:begin] + statement + source[end:]
        sources[file] = source
    return sources


def one_of_each_kind(mutants: list[Mutant]) -> list[Mutant]:
    """The first mutant of each kind in QUICK, and a seed bug of each family in QUICK_FAMILIES.

    The first families are the quickest to compile and run.
    """
    mutants = [m for m in mutants if (m.family, m.kind) not in SLOW_TO_SHOW]
    removed = {m.kind: m for m in reversed(mutants) if m.kind in QUICK}
    numbers = [m for m in mutants if m.variants == NUMBERS_FIRST]
    seeds = {m.family: m for m in numbers if m.family in QUICK_FAMILIES}
    return list(removed.values()) + list(seeds.values())
