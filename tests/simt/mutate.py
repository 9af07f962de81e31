"""Shows that the simt tests bite: breaks the kernels in one place at a time and demands a red test.

Mutants are made in a copy of src/: every ``__syncthreads()``, ``__syncwarp()``, bar.sync and
cp.async wait of each kernel family (its kernel and what that includes) removed in turn, every such
wait made one group short, the same for what orders asynchronous copies and products on Hopper, and
the bugs of seed_bugs.py, append_bugs.py, cache_bugs.py, decode_bugs.py and backward_bugs.py put
back. Each is compiled into the family's test, under ThreadSanitizer, AddressSanitizer or
neither, until one of them fails. A mutant that survives all three, or an edit that does not
apply, makes the exit status 1.

    python mutate.py --config <build folder>/tests/simt/simt.json [--quick] [--table MUTANTS.md]

A full run takes an hour or so. With ``--state FILE`` what was found is kept there, and a mutant
of which nothing that its test is compiled from has changed since is not run again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from append_bugs import APPEND_BUGS
from backward_bugs import BACKWARD_BUGS
from cache_bugs import CACHE_BUGS
from decode_bugs import DECODE_BUGS
from large_head_bugs import LARGE_HEAD_BUGS
from markers import marked
from seed_bugs import SEED_BUGS, SeedBug

# Each with its kernel's files; test_<name>.cpp tests it.
FAMILIES = {
    "scalar": "forward/scalar/kernel.cuh",
    "wmma_qk": "forward/wmma_qk/kernel.cuh",
    "wmma_smem": "forward/wmma_smem/kernel.cuh",
    "wmma_halves": "forward/wmma_halves/kernel.cuh",
    "wmma": "forward/wmma/kernel.cuh",
    "wmma_split": "forward/wmma/split.cuh",
    "wmma_general": "forward/wmma/general.cuh",
    "wmma_persistent": "forward/wmma/persistent.cuh",
    "wmma8": "forward/wmma8/kernel.cuh",
    "wmma8_int8": "forward/wmma8/int8.cuh",
    "sm90": "forward/sm90/kernel.cuh",
    "sm90_fp8": "forward/sm90_fp8/kernel.cuh",
    "sm90_fp8_scaled": "forward/sm90_fp8/kernel.cuh",
    "decode": "forward/decode/kernel.cuh tile/key_parts/combine.cuh",
    "decode_wide": "forward/decode/wide_kernel.cuh",
    "sm90_latent": "forward/sm90_latent/kernel.cuh",
    "sm90_wide": "forward/sm90_wide/kernel.cuh",
    "merge": "merge/row_per_warp/kernel.cuh",
    "quantize": "quantize/key_blocks/kernel.cuh",
    "append": "append/token_rows/kernel.cuh",
    "backward_scalar": "backward/scalar/bias.cuh",
    "backward_sm90": "backward/sm90/kernel.cuh",
    "backward_wmma": "backward/wmma/launch.cuh",
}
TIMEOUT_S = 300
BUGS = SEED_BUGS + APPEND_BUGS + CACHE_BUGS + DECODE_BUGS + BACKWARD_BUGS + LARGE_HEAD_BUGS

# Changes (pattern, replacement) that are made wherever the pattern occurs.
SYNCHRONISATION = {
    "no __syncthreads": (r"__syncthreads\(\);", ";"),
    "no __syncwarp": (r"__syncwarp\([^;]*\);", ";"),
    "no bar.sync": (r"ptx::barrier_sync\([^;]*\);", ";"),
    "no bar.arrive": (r"ptx::barrier_arrive\([^;]*\);", ";"),
    "no cp.async wait": (r"ptx::cp_async_wait<[^;]*\(\);", ";"),
    "cp.async wait one group short": (
        r"ptx::cp_async_wait<([^;]*)>\(\);",
        r"ptx::cp_async_wait<\1 + 1>();",
    ),
    "no mbarrier wait": (r"ptx::mbarrier_(?:wait|sleep)\([^;]*\);", ";"),
    "mbarrier parity flipped": (r"(ptx::mbarrier_(?:wait|sleep)\([^;]*)\);", r"\1 ^ 1);"),
    "no wait for a stage": (r"\b[\w.]+\.wait_full\([^;]*\);", ";"),
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
        r"ptx::wgmma_wait<\1 + 1>();",
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
    # Lanes that wait at one mbarrier go on together here; on a GPU one might come late.
    ("sm90_wide", "no __syncwarp", "__syncwarp();  // no lane may come late"),
    # All copies have been waited for: the groups that are left are empty.
    ("decode", "no cp.async wait", "ptx::cp_async_wait<0>();"),
    ("decode", "cp.async wait one group short", "ptx::cp_async_wait<0>();"),
    # Q goes through no shared memory.
    ("wmma8_int8", "no __syncthreads", "__syncthreads();  // all warps have it"),
)
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

# Those that show at other tiles than the one below alone: not for the quick run.
SLOW_TO_SHOW = {
    ("wmma", "mbarrier parity flipped"),
    ("wmma_general", "mbarrier parity flipped"),
    ("wmma_qk", "copies wider than aligned"),
    ("wmma_smem", "copies wider than aligned"),
    ("wmma8", "copies wider than aligned"),
}

# The variants that are tried, likeliest first. The first has but one tile of head_dim, which takes
# far less time to compile than all: the mutant's.
RACES_FIRST = ("tsan tile", "tsan", "asan", "plain")
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

    @property
    def tile(self) -> int:
        usual = FAMILY_TILE.get(self.family, USUAL_TILE)
        return self.own_tile or FILE_TILE.get(self.file, usual)

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
                    changed = match.expand(replacement)
                    mutated = source[: match.start()] + changed + source[match.end() :]
                    number = statements[: i + 1].count(statement)
                    count = statements.count(statement)
                    yield Mutant(family, file, statement, kind, mutated, RACES_FIRST, number, count)


def pattern_of(text: str) -> str:
    """A pattern for ``text`` whatever white space the source has between its tokens."""
    return r"\s*".join(re.escape(token) for token in re.findall(r"\w+|[^\w\s]", text))


def is_equivalent(family: str, kind: str, source: str) -> bool:
    return any(
        (family, kind) == (f, k) and re.match(pattern_of(text), source) for f, k, text in EQUIVALENT
    )


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


def one_of_each_kind(mutants: list[Mutant]) -> list[Mutant]:
    """The first mutant of each kind in QUICK, and a seed bug of each family in QUICK_FAMILIES.

    The first families are the quickest to compile and run.
    """
    mutants = [m for m in mutants if (m.family, m.kind) not in SLOW_TO_SHOW]
    removed = {m.kind: m for m in reversed(mutants) if m.kind in QUICK}
    numbers = [m for m in mutants if m.variants == NUMBERS_FIRST]
    seeds = {m.family: m for m in numbers if m.family in QUICK_FAMILIES}
    return list(removed.values()) + list(seeds.values())


class Bench:
    """Builds and runs a family's test on a copy of the source."""

    def __init__(
        self, config: dict[str, Any], source: Path, scratch: Path, check_baselines: bool
    ) -> None:
        self.config = config
        self.source = source
        self.scratch = scratch
        self.check_baselines = check_baselines
        self.baselines: dict[tuple[str, str], str | None] = {}
        self.digests: dict[str, str] = {}
        self.lock = Lock()

    def command(self, source: Path, family: str, variant: str) -> list[str]:
        """Return the command that compiles the test of a family, but for libraries and output."""
        c = self.config
        variant, _, tile = variant.partition(" ")
        includes = [f"{c['tests']}/model", c["tests"], source, source / "include", c["generated"]]
        command = [c["compiler"], *c["flags"], *c["variants"][variant]["flags"]]
        command += [f"-I{path}" for path in includes]
        command += [f"-isystem{path}" for path in c["system_includes"]]
        command += [f"-DSIMT_TILE={tile}"] if tile else []
        return [*command, "-include", f"{c['tests']}/prelude.h", f"{c['tests']}/test_{family}.cpp"]

    def build(self) -> str:
        """The compiler and the flags of all variants, without the folders of this checkout."""
        c = self.config
        asked = [c["compiler"], "--version"]
        version = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
        flags = {name: variant["flags"] for name, variant in sorted(c["variants"].items())}
        return json.dumps([version, c["flags"], flags])

    def inputs(self, mutant: Mutant) -> str:
        """A digest of the mutant, and of all that its test is compiled from and by."""
        with self.lock:
            if mutant.family not in self.digests:
                command = [*self.command(self.source, mutant.family, "plain"), "-M"]
                listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
                files = {
                    Path(name) for name in listed.partition(":")[2].replace("\\\n", "").split()
                }
                tests = Path(self.config["tests"])
                files |= {x for x in tests.rglob("harness/*") if x.is_file()}
                # Every test is linked with these.
                own = ("test_", "self_test")
                files |= {x for x in tests.glob("*.cpp") if not x.name.startswith(own)}
                digest = hashlib.sha256(self.build().encode())
                for content in sorted(path.read_bytes() for path in files):
                    digest.update(content)
                self.digests[mutant.family] = digest.hexdigest()
        return hashlib.sha256((self.digests[mutant.family] + mutant.text).encode()).hexdigest()

    def outcome(self, source: Path, family: str, variant: str, work: Path) -> str | None:
        """How the test fails; None if it passes."""
        c = self.config
        binary = work / "test"
        command = self.command(source, family, variant)
        link = c["variants"][variant.partition(" ")[0]]["link"]
        command += [*link, *c["libraries"], "-o", str(binary)]
        built = subprocess.run(command, capture_output=True, text=True, check=False)
        if built.returncode != 0:
            first_errors = "\n".join(built.stderr.splitlines()[:20])
            sys.exit(f"{family} under {variant} does not compile:\n{first_errors}")
        try:
            ran = subprocess.run(
                [str(binary)],
                env={**os.environ, "SIMT_STOP_AT_FAILURE": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"no end within {TIMEOUT_S} s"
        return None if ran.returncode == 0 else evidence(ran.stdout, ran.returncode)

    def check_baseline(self, family: str, variant: str) -> None:
        """The unchanged source must pass, or a red test would mean nothing."""
        if not self.check_baselines:
            return
        with self.lock:
            key = (family, variant)
            if key not in self.baselines:
                work = Path(tempfile.mkdtemp(dir=self.scratch))
                self.baselines[key] = self.outcome(self.source, family, variant, work)
                shutil.rmtree(work)
            if self.baselines[key] is not None:
                sys.exit(f"{family} under {variant} fails unchanged: {self.baselines[key]}")

    def try_mutant(self, mutant: Mutant) -> str | None:
        """Which variant caught it, and how; None if it survives."""
        work = Path(tempfile.mkdtemp(dir=self.scratch))
        source = work / "src"
        shutil.copytree(self.source, source)
        (source / "cuda" / mutant.file).write_text(mutant.text)
        caught = None
        for name in mutant.variants:
            variant = name.replace("tile", str(mutant.tile))
            self.check_baseline(mutant.family, variant)
            how = self.outcome(source, mutant.family, variant, work)
            if how is not None:
                caught = f"{variant}: {how}"
                break
        shutil.rmtree(work)
        return caught


def evidence(output: str, status: int) -> str:
    """A short account of why a test failed."""
    output = re.sub(r"0x[0-9a-f]{6,}", "an address", output)
    race = re.search(r"ThreadSanitizer: data race(.*?)\n\n(.*?)\n\n", output, re.DOTALL)
    if race:
        places = [place_of(race.group(1)), place_of(race.group(2))]
        return "data race, " + " with ".join(places)
    error = re.search(r"AddressSanitizer: (\S+)(.*?)\n\n", output, re.DOTALL)
    if error:
        return f"{error.group(1)}, {place_of(error.group(2))}"
    error = re.search(r"(\w+/\w+\.\w+:\d+):\d+: runtime error: ([^\n]*)", output)
    if error:
        return f"{error.group(2)}, {error.group(1)}"
    error = re.search(r"^simt: ([^\n(]*)", output, re.MULTILINE)
    if error:
        return error.group(1).strip()
    if re.search(r"^FAIL ", output, re.MULTILINE):
        return "wrong results"
    return f"ended by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


def place_of(stack: str) -> str:
    """The innermost frame in the kernels' source, or in the model of an instruction."""
    frames = re.findall(r"/src/cuda/(\S+?:\d+)", stack) or re.findall(r"/simt/(\S+?:\d+)", stack)
    return frames[0] if frames else "unknown place"


def revision(source: Path) -> str:
    """The commit that a folder is of, and whether it has changed since; "unknown" without git."""
    asked = ["git", "-C", str(source)]
    head = subprocess.run(
        [*asked, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False
    )
    if head.returncode != 0:
        return "unknown"
    unchanged = subprocess.run([*asked, "diff", "--quiet", "HEAD", "--", "."], check=False)
    return head.stdout.strip() + (" with changes" if unchanged.returncode else "")


def table(results: list[tuple[Mutant, str | None]], not_run: list[Mutant], made_on: str) -> str:
    """The results as Markdown, without line numbers, which the next edit would make wrong."""
    caught = sum(how is not None for _, how in results)
    left = Counter(mutant.family for mutant in not_run)
    missing = ", ".join(f"{count} of {family}" for family, count in left.items())
    lines = [
        "# Mutants of the kernels",
        "",
        "Generated by `mutate.py`. Each row is one change of the kernels' source and the first",
        "of the variants that turned red: `tsan`, `asan` (which includes UBSan) or `plain`, of all",
        "tiles of head_dim or of the one that is named.",
        "",
        f"{caught} of {len(results)} caught." + (f" Not run: {missing}." if missing else ""),
        f"Made on revision {made_on}, whose files and statements it names.",
        "",
        "| family | change | file | statement | caught by |",
        "|---|---|---|---|---|",
    ]
    for m, how in results:
        statement = f"`{m.statement}`{m.which}".replace("|", "\\|")
        seen = re.sub(r"(\.(?:cuh|cpp|h)):\d+", r"\1", how or "**survives**")
        lines.append(f"| {m.family} | {m.kind} | {m.file} | {statement} | {seen} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="Mutation test of the simt tests.")
    parser.add_argument("--config", type=Path, required=True, help="simt.json of the build folder")
    parser.add_argument("--quick", action="store_true", help="one mutant of each kind")
    parser.add_argument(
        "--only", nargs="+", default=[""], help="only mutants whose name contains one of these"
    )
    parser.add_argument("--list", action="store_true", help="name the mutants, run nothing")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--table", type=Path, help="write the results there, as Markdown")
    parser.add_argument("--state", type=Path, help="keep results there, and do not repeat them")
    parser.add_argument("--known", action="store_true", help="run nothing, tell what --state has")
    args = parser.parse_args()

    config = json.loads(args.config.read_text())
    results: list[tuple[Mutant, str | None]] = []
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(args.jobs) as pool:
        # A copy, so that edits of the source during a long run do not mix with the mutants.
        source = Path(scratch) / "unchanged"
        shutil.copytree(config["source"], source)
        mutants = [m for m in all_mutants(source / "cuda") if any(x in m.name for x in args.only)]
        if args.quick:
            mutants = one_of_each_kind(mutants)
        if args.list:
            print("\n".join(m.name for m in mutants))
            return 0
        # The quick run is a test beside the tests themselves, which show that the source passes.
        bench = Bench(config, source, Path(scratch), check_baselines=not args.quick)
        known = json.loads(args.state.read_text()) if args.state and args.state.exists() else {}

        not_run = []
        if args.known:
            not_run = [m for m in mutants if bench.inputs(m) not in known]
            mutants = [m for m in mutants if bench.inputs(m) in known]

        keeping = Lock()

        def find_out(mutant: Mutant) -> str | None:
            key = bench.inputs(mutant) if args.state else ""
            if key in known:
                return known[key]
            how = bench.try_mutant(mutant)
            if args.state and how:
                with keeping:  # at once: the mutants before may take longer than there is time
                    known[key] = how
                    args.state.write_text(json.dumps(known, indent=1) + "\n")
            return how

        for mutant, how in zip(mutants, pool.map(find_out, mutants), strict=True):
            results.append((mutant, how))
            print(f"{'ok  ' if how else 'FAIL'} {mutant.name}: {how or 'survives'}", flush=True)
    if args.table:
        args.table.write_text(table(results, not_run, revision(Path(config["source"]))))
    caught = sum(how is not None for _, how in results)
    print(f"{caught} passed, {len(results) - caught} failed")
    return 0 if results and caught == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
