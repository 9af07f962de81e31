"""Fetches the machine code of the wmma kernels, with the tile shapes that the plan reads."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from sass_model.devices import SUB_PARTITIONS, Device
from sass_model.sass import WARP_LANES, Paths, count, find_paths, parse

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "budgets"))
import cubins  # noqa: E402

_SYMBOL = re.compile(r"_ZN6dlattn4wmma6kernelI6__halfLi(\d+)ELi(\d+)E\w*")
_REGISTERS_PER_SM = 65536
_RESERVED_SMEM = 1024  # bytes per block that CUDA takes for itself


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

    @property
    def products_per_warp(self) -> int:
        """HMMA that Q·Kᵀ and P·V of a tile take per warp."""
        return 2 * self.block_m * self.block_n * self.head_dim // (16 * 8 * 16) // self.num_warps


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
        paths = find_paths(parse(self.listing))
        found, expected = count(paths.main, "HMMA"), self.shape.products_per_warp
        if found != expected:
            raise ValueError(
                f"{self.name}, {self.arch}: the long loop has {found} HMMA, its tile {expected}"
            )
        return paths

    def blocks_per_sm(self, device: Device) -> int:
        """How many blocks registers, shared memory and warps leave room for."""
        warps = self.shape.num_warps
        registers = -(-self.registers // 8) * 8 * WARP_LANES
        per_sub_partition = _REGISTERS_PER_SM // SUB_PARTITIONS // registers
        return min(
            per_sub_partition * SUB_PARTITIONS // warps,
            device.smem_per_sm // (self.shape.smem_bytes + _RESERVED_SMEM),
            device.max_warps_per_sm // warps,
        )


def _run_cpp(text: str, *sources: Path) -> str:
    """Compiles a small host program and returns what it prints."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if not compiler:
        raise cubins.NoTools("no C++ compiler is installed")
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder) / "main.cpp", Path(folder) / "main"
        source.write_text(text)
        includes = [f"-I{ROOT / 'src'}", f"-I{ROOT / 'src/include'}", "-DDLATTN_STATIC"]
        files = [str(source), *map(str, sources)]
        subprocess.run([compiler, "-std=c++17", *includes, "-o", str(program), *files], check=True)
        return subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout


def tile_shapes() -> dict[tuple[int, int], Shape]:
    """The shapes of every instance, by head_dim tile and variant, from traits.h itself."""
    tiles = sorted({tile for family, _, tile in cubins.instances() if family == "wmma"})
    text = '#include "cuda/wmma/traits.h"\n#include <cstdio>\n#include <initializer_list>\n'
    text += "int main() {\nusing namespace dlattn::wmma;\n"
    text += f"for (int tile : {{{', '.join(map(str, tiles))}}})\n"
    text += "for (int v = 0; v < kNumVariants; ++v) {\nif (!has_variant(tile, v)) continue;\n"
    text += "const auto c = tile_config(tile, v);\n"
    text += 'std::printf("%d %d %s %d %d %d %d\\n", tile, v, kVariantNames[v], c.block_m, '
    text += "c.block_n, c.num_warps, c.smem_bytes);\n}\n}\n"
    shapes = {}
    for line in _run_cpp(text).splitlines():
        tile, variant, name, *rest = line.split()
        shapes[int(tile), int(variant)] = Shape(int(tile), int(variant), name, *map(int, rest))
    return shapes


def planned_variants(problems: list[tuple[Device, tuple[int, int, int, int]]]) -> list[str]:
    """The variant that the plan takes for (batch, heads, seqlen, head_dim) on a device, by name."""
    text = '#include "core/wmma_plan.h"\n#include "cuda/wmma/traits.h"\n#include <cstdio>\n'
    text += "int main() {\nusing namespace dlattn;\n"
    for device, (batch, heads, seqlen, head_dim) in problems:
        text += "{ AttentionParams p{}; DeviceInfo d; d.type = DeviceType::kCuda;\n"
        text += f"d.compute_major = {device.arch[3:-1]}; d.compute_minor = {device.arch[-1]};\n"
        text += f"d.num_sms = {device.num_sms}; d.smem_per_sm = {device.smem_per_sm};\n"
        text += f"d.max_smem_per_block = {device.smem_per_sm - _RESERVED_SMEM};\n"
        text += f"d.l2_bytes = {device.l2_bytes};\n"
        text += f"p.batch_size = {batch}; p.num_heads = p.num_heads_kv = {heads};\n"
        text += f"p.seqlen_q = p.seqlen_k = {seqlen}; p.head_dim = p.head_dim_v = {head_dim};\n"
        text += "p.dtype = DType::kFloat16;\n"
        text += f"const int v = core::choose_wmma_variant(p, d, {head_dim});\n"
        text += "std::puts(wmma::kVariantNames[v]); }\n"
    return _run_cpp(text + "}\n", ROOT / "src/core/wmma_plan.cpp").split()


def _kernels_of(binary: Path, arch: str, shapes: dict[tuple[int, int], Shape]) -> Iterator[Kernel]:
    bare = binary.suffix == ".cubin"
    usage = {
        symbol: use
        for symbol, its_arch, use in cubins.usage_of_symbols(binary)
        if bare or its_arch == arch
    }
    if not usage:
        return
    for symbol, listing in cubins.listings(binary, arch):
        if match := _SYMBOL.fullmatch(symbol):
            shape = shapes[int(match[1]), int(match[2])]
            yield Kernel(shape, arch, usage[symbol].registers, listing)


def load(arch: str, library: Path | None = None, tiles: list[int] | None = None) -> list[Kernel]:
    """The float16 instances for an architecture.

    From a library if it has code for it (where none is given, DLATTN_BUILD_DIR's or the installed
    package's), else compiled here. Raises cubins.NoTools where neither can be had.
    """
    shapes = tile_shapes()
    if library is None:
        build = os.environ.get("DLATTN_BUILD_DIR")
        library = Path(build) / "libdlattn.so" if build else cubins.installed_library()
    found = list(_kernels_of(library, arch, shapes)) if library else []
    if not found:
        wanted = {("wmma", "float16", t) for t in tiles or {tile for tile, _ in shapes}}
        with tempfile.TemporaryDirectory() as folder:
            for cubin in cubins.compile_instances(Path(folder), arch, wanted):
                found += _kernels_of(cubin, arch, shapes)
    order = sorted(found, key=lambda k: (k.shape.head_dim, k.shape.variant))
    return [k for k in order if tiles is None or k.shape.head_dim in tiles]
