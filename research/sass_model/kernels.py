"""Fetches the machine code of the kernels, with the shapes that the plan reads."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from sass_model.devices import SUB_PARTITIONS, Device
from sass_model.sass import WARP_LANES, Paths, find_paths, operations, parse, whole_path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "budgets"))
import cubins  # noqa: E402

# The kernels' names in each family, with groups for a named kernel, its tile and its variant.
_SYMBOLS = {
    "wmma": re.compile(
        r"_ZN6dlattn4wmma\d+(?:(split|general|persistent)_)?kernelI6__halfLi(\d+)E(?:Li(\d+)E)?(?:Lb0E)?E\w*"
    ),
    # Only the kernels of precision int8_fp8 of the integers': those of int8_fp16 are not modelled.
    "wmma8": re.compile(
        r"_ZN6dlattn5wmma8\d+(?:(int8)_)?kernelILi(\d+)ELb([01])E(?:LNS_9PrecisionE1E)?E\w*"
    ),
    "wmma_halves": re.compile(r"_ZN6dlattn11wmma_(halves)6kernelI6__halfLi(\d+)E(Li)?E\w*"),
    # Those without pages and without score modification.
    "decode": re.compile(
        r"_ZN6dlattn6decode\d+kernelI6__half(S\d*_|13__nv_fp8_e4m3)Li(\d+)ELi(\d)ELb0ELb0EE\w*"
    ),
}
# The dtypes of the instances.
_DTYPES = {
    "wmma": ("float16",),
    "wmma8": ("float8_e4m3fn", "int8"),
    "wmma_halves": ("float16",),
    "decode": ("float16", "float8_e4m3fn"),
}
# The first variant of wmma8's 8-bit integers, of those that tile_shapes() tells, and of decode's
# 8-bit caches.
_INT8 = 2
# No plan takes these on Ada: one has no loop, TMA brings the tiles of the other.
NOT_MODELLED = ("single_pass", "persistent")
_CORE = ("operations", "plan", "validate")  # folders
_REGISTERS_PER_SM = 65536
RESERVED_SMEM = 1024  # bytes per block that CUDA takes for itself


@dataclass(frozen=True)
class Shape:
    """A tile shape of traits.h."""

    head_dim: int  # tile
    variant: int
    name: str  # "wide", ...
    block_m: int
    block_n: int
    num_warps: int
    smem_bytes: int
    key_groups: int = 1  # that a block's warps form, each with tiles of keys of its own

    @property
    def rows_per_warp(self) -> int:
        """Query rows."""
        return self.block_m * self.key_groups // self.num_warps

    @property
    def operations_per_warp(self) -> int:
        """Those of Q·Kᵀ and P·V of a tile."""
        return 4 * self.rows_per_warp * self.block_n * self.head_dim


@dataclass(frozen=True)
class Kernel:
    """One instance on one architecture."""

    shape: Shape
    arch: str
    registers: int
    listing: str

    @property
    def name(self) -> str:
        """As "128 wide"."""
        return f"{self.shape.head_dim} {self.shape.name}"

    @cached_property
    def paths(self) -> Paths:
        """The pieces of the code. Raises ValueError if the long loop is not what the tile asks."""
        expected = self.shape.operations_per_warp
        code = parse(self.listing)
        paths = find_paths(code)
        if operations(paths.main) < expected:  # that path leaves the loop halfway through a tile
            paths = find_paths(code, whole_path)
        found = operations(paths.main)
        if found != expected:
            raise ValueError(
                f"{self.name}, {self.arch}: the products of the long loop do {found} operations, "
                f"its tile takes {expected}"
            )
        # Its one loop has the score modification, which a plain problem leaves out on edges too.
        return replace(paths, edge=paths.main) if self.shape.name == "halves" else paths

    def blocks_per_sm(self, device: Device) -> int:
        """How many blocks registers, shared memory and warps leave room for."""
        warps = self.shape.num_warps
        registers = -(-self.registers // 8) * 8 * WARP_LANES
        per_sub_partition = _REGISTERS_PER_SM // SUB_PARTITIONS // registers
        return min(
            per_sub_partition * SUB_PARTITIONS // warps,
            device.smem_per_sm // (self.shape.smem_bytes + RESERVED_SMEM),
            device.max_warps_per_sm // warps,
        )


def _run_cpp(text: str, generated: dict[str, str] | None = None) -> str:
    """Compiles a small host program, with other files that it consists of, by name, and returns
    what it prints."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if not compiler:
        raise cubins.NoTools("no C++ compiler is installed")
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder) / "main.cpp", Path(folder) / "main"
        source.write_text(text)
        files = [str(source)]
        for name, content in (generated or {}).items():
            (Path(folder) / name).write_text(content)
            if name.endswith(".cpp"):
                files.append(str(Path(folder) / name))
        includes = [
            f"-I{folder}",
            f"-I{ROOT / 'src'}",
            f"-I{ROOT / 'src/include'}",
            "-DDLATTN_STATIC",
        ]
        subprocess.run([compiler, "-std=c++17", *includes, "-o", str(program), *files], check=True)
        return subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout


# A program that prints the shapes of a tile: head_dim tile, variant, its name, block_m, block_n,
# warps, bytes of shared memory, groups of keys.
_PRINT_SHAPES = {
    "wmma": """
            for (int v = 0; v < kNumVariants; ++v) {
              if (!has_variant(tile, v)) continue;
              const auto c = tile_config(tile, v);
              std::printf("%d %d %s %d %d %d %d %d\\n", tile, v, kVariantNames[v], c.block_m,
                          c.block_n, c.num_warps, c.smem_bytes,
                          splits_keys(v) ? split_shape(tile, v == kSinglePass).key_groups : 1);
            }""",
    "wmma8": """
            for (int v = 0; v < (tile <= dlattn::kMaxQuantizedHeadDim ? 4 : 2); ++v) {
              const char* const names[] = {"plain", "general", "int8", "int8_general"};
              const auto c = tile_config(tile);
              std::printf("%d %d %s %d %d %d %d 1\\n", tile, v, names[v], c.block_m, c.block_n,
                          c.num_warps, c.smem_bytes);
            }""",
    "wmma_halves": """{
              const auto c = tile_config(tile);
              std::printf("%d 0 halves %d %d %d %d 1\\n", tile, c.block_m, c.block_n, c.num_warps,
                          c.smem_bytes);
            }""",
    # A group's tile is its slice.
    "decode": """
            for (int v = 0; v < 2 * kNumVariants; ++v) {
              if (!has_variant(tile, v % kNumVariants)) continue;
              const int key_bytes = v < kNumVariants ? 2 : 1;
              const auto s = shape_of(tile, v % kNumVariants, key_bytes);
              std::printf("%d %d %s%s %d %d %d %d %d\\n", tile, v, kVariantNames[v % kNumVariants],
                          key_bytes == 1 ? "_8_bit" : "", block_m(s), s.slice, num_warps(s),
                          smem_map(tile, s).total, s.key_groups);
            }""",
}


def tile_shapes(family: str = "wmma") -> dict[tuple[int, str], Shape]:
    """The shapes of every instance, by head_dim tile and variant, from traits.h itself."""
    tiles = sorted({tile for name, _, tile in cubins.instances() if name == family})
    if not tiles:
        raise ValueError(f"instances.cmake has none of {family}")
    text = f"""
        #include "core/problem/quantized.h"
        #include "cuda/forward/{family}/traits.h"
        #include <cstdio>
        #include <initializer_list>
        using namespace dlattn::{family};
        int main() {{
          for (int tile : {{{", ".join(map(str, tiles))}}})
            {_PRINT_SHAPES[family]}
        }}"""
    shapes = {}
    for line in _run_cpp(text).splitlines():
        tile, variant, name, *rest = line.split()
        shapes[int(tile), name] = Shape(int(tile), int(variant), name, *map(int, rest))
    return shapes


def planned_variants(
    problems: list[tuple[Device, tuple[int, int, int, int], bool]],
) -> list[str]:
    """The variants that the plan takes for (batch, heads, seqlen, head_dim) on devices, by name.

    The bool: whether causal.
    """
    calls = [
        (device, (batch, heads, seqlen, head_dim, int(causal)))
        for device, (batch, heads, seqlen, head_dim), causal in problems
    ]
    problem = """
          p.q.dtype = p.k.dtype = p.v.dtype = p.out.dtype = DType::kFloat16;
          p.batch_size = batch, p.num_heads = p.num_heads_kv = heads;
          p.seqlen_q = p.seqlen_k = seqlen, p.head_dim = p.head_dim_v = dim;
          p.q.row_stride = p.k.row_stride = p.v.row_stride = p.out.row_stride = dim;
          p.q.head_stride = p.k.head_stride = p.v.head_stride = p.out.head_stride = seqlen * dim;
          p.q.batch_stride = p.k.batch_stride = p.v.batch_stride = p.out.batch_stride =
              std::int64_t{heads} * seqlen * dim;
          if (causal) p.causal = Causal::kBottomRight;"""
    show = "std::puts(core::make_plan(p, d, options).variant_name);"
    return run_planner("wmma", "batch, heads, seqlen, dim, causal", calls, problem, show)


def run_planner(
    family: str,
    parameters: str,
    calls: Sequence[tuple[Device, Sequence[int]]],
    problem: str,
    show: str,
    header: str = "core/plan/plan.h",
) -> list[str]:
    """Compiles a host program with the plans of all families, and returns the lines that it prints.

    Args:
        family: Whose plans are asked for.
        parameters: Names of ints, which `calls` has the values of beside each device.
        problem: C++ that describes AttentionParams `p` by them.
        show: C++ that prints the line of a call, of `p`, DeviceInfo `d` and `options`.
        header: What `show` needs beside core/plan/plan.h.
    """
    cases = [
        f"show({device.arch[3:-1]}, {device.arch[-1]}, {device.num_sms}, {device.smem_per_sm}, "
        f"{device.l2_bytes}, {', '.join(map(str, values))});"
        for device, values in calls
    ]
    ints = ", ".join(f"int {name}" for name in parameters.split(", "))
    text = f"""
        #include "core/plan/plan.h"
        #include "{header}"
        #include <cstdio>
        using namespace dlattn;
        void show(int major, int minor, int sms, int smem, int l2, {ints}) {{
          AttentionParams p;
          {problem}
          DeviceInfo d;
          d.type = DeviceType::kCuda;
          d.compute_major = major, d.compute_minor = minor, d.num_sms = sms;
          d.smem_per_sm = smem, d.max_smem_per_block = smem - {RESERVED_SMEM}, d.l2_bytes = l2;
          p.device.type = DeviceType::kCuda;
          Options options;
          options.kernel = "{family}";
          {show}
        }}
        int main() {{
          {" ".join(cases)}
        }}"""
    enums = {
        "float16": "kFloat16",
        "bfloat16": "kBFloat16",
        "float32": "kFloat32",
        "float8_e4m3fn": "kFloat8E4M3",
        "int8": "kInt8",
    }
    instances = "".join(
        f"DLATTN_INSTANCE(kForward, {family}, {family}, {enums[dtype]}, {tile})\n"
        for family, dtype, tile in cubins.instances()
    )
    families = dict.fromkeys(family for family, _, _ in cubins.instances())
    core = [ROOT / "src/core/types.cpp", Path(__file__).with_name("plan_only.cpp")]
    core += [x for name in _CORE for x in sorted((ROOT / "src/core" / name).glob("*.cpp"))]
    plans = sorted((ROOT / "src/cuda/plan").glob("*.cpp"))
    plans += [ROOT / f"src/cuda/forward/{family}/plan.cpp" for family in families]
    generated = {
        "instances.inc": instances,
        "families.inc": "".join(
            f"DLATTN_FAMILY(kForward, {family}, {family})\n" for family in families
        ),
        # Joined, as pip's build does: headers are read once.
        "core.cpp": "".join(f'#include "{path}"\n' for path in core),
        "plans.cpp": "".join(f'#include "{path}"\n' for path in plans),
    }
    return _run_cpp(text, generated).splitlines()


def _kernels_of(
    binary: Path, arch: str, family: str, shapes: dict[tuple[int, str], Shape]
) -> Iterator[Kernel]:
    bare = binary.suffix == ".cubin"
    usage = {
        symbol: use
        for symbol, its_arch, use in cubins.usage_of_symbols(binary)
        if bare or its_arch == arch
    }
    if not usage:
        return
    wanted = {symbol for symbol in usage if _SYMBOLS[family].fullmatch(symbol)}
    for symbol, listing in cubins.listings(binary, arch, wanted):
        if match := _SYMBOLS[family].fullmatch(symbol):
            kind, tile, variant = match.groups()
            names = {s.variant: s.name for s in shapes.values()}
            if kind in ("int8", "13__nv_fp8_e4m3"):
                variant = int(variant) + _INT8
            shape = shapes[int(tile), names[int(variant)] if variant is not None else kind]
            if shape.name in NOT_MODELLED:
                continue
            yield Kernel(shape, arch, usage[symbol].registers, listing)


def load(
    arch: str,
    libraries: Sequence[Path] = (),
    tiles: list[int] | None = None,
    family: str = "wmma",
) -> list[Kernel]:
    """The instances for an architecture, of wmma those in float16.

    From the first of the libraries that has code for it; if none has, there are none. Where no
    library is given, from DLATTN_BUILD_DIR's or the installed package's, else compiled here. Raises
    cubins.NoTools where neither can be had.
    """
    shapes = tile_shapes(family)
    compiles = not libraries
    if compiles:
        build = os.environ.get("DLATTN_BUILD_DIR")
        built = Path(build) / "libdlattn.so" if build else cubins.installed_library()
        libraries = [built] if built else []
    found: list[Kernel] = []
    for library in libraries:
        found = found or list(_kernels_of(library, arch, family, shapes))
    if not found and compiles:
        wanted = {
            (family, dtype, tile)
            for dtype in _DTYPES[family]
            for tile in tiles or {tile for tile, _ in shapes}
        }
        with tempfile.TemporaryDirectory() as folder:
            for cubin in cubins.compile_instances(Path(folder), arch, wanted):
                found += _kernels_of(cubin, arch, family, shapes)
    order = sorted(found, key=lambda k: (k.shape.head_dim, k.shape.variant))
    return [k for k in order if tiles is None or k.shape.head_dim in tiles]
