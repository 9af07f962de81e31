"""Reads what the compiled kernels need: registers, stack, shared memory, and their machine code.

The kernels come from a library: that of DLATTN_BUILD_DIR, else that of the installed package; where
it has none for sm_89, nvcc compiles them. `python tests/budgets/cubins.py --write`
records the registers as the new budgets.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BUDGETS = Path(__file__).with_name("budgets.json")
SM_89 = "sm_89"
SM_90 = "sm_90"
SM_90A = "sm_90a"

# The kernels of each family of backward that its tiles have. They take any dtype in scalar, which
# has one beside for all tiles.
_BACKWARD = {
    "sm90": (
        "plain",
        "softcap",
        "deterministic",
        "deterministic_softcap",
        "score_mod",
        "score_mod_softcap",
        "pair",
        "late",
        "convert",
    ),
    "wmma": ("keys", "queries", "convert", "bias", "large"),
    "scalar": ("keys", "queries"),
}
_BACKWARD_SOME_TILES = {
    ("sm90", "plain"): (64, 128),
    ("sm90", "score_mod_softcap"): (64, 256),
    ("sm90", "pair"): (256,),
    ("sm90", "late"): (64, 128),
    ("wmma", "large"): (128, 256),
}
_BACKWARD_ANY_TILE = {"scalar": ("bias",)}
_BACKWARD_ANY_DTYPE = ("scalar",)
# Kernels that a backward pass launches beside a family's own.
_BESIDE_BACKWARD = {
    "delta": ("row_blocks", ("float16", "bfloat16", "float32")),
    "reduce": ("partial_sums", ("float32",)),
}

# Without a type of elements kernels are of the one 8-bit type.
_TYPES = {
    "6__half": "float16",
    "13__nv_bfloat16": "bfloat16",
    "f": "float32",
    None: "float8_e4m3fn",
}
_ENUMS = {
    "float16": "kFloat16",
    "bfloat16": "kBFloat16",
    "float32": "kFloat32",
    "float8_e4m3fn": "kFloat8E4M3",
    "int8": "kInt8",
}
_PARAMS = dict(  # of each operation
    re.findall(r"X\(k\w+, (\w+), (\w+)\)", (ROOT / "src/core/operations/operations.h").read_text())
)
# Operations of one family, whose kernels take any head dims, in these dtypes.
_ANY_DIMS = {"merge": "row_per_warp", "append": "token_rows"}
_ANY_DIMS_DTYPES = ("float16", "bfloat16", "float32")
# Tile shapes of the families that have several, in the traits' order, each with the tiles it has.
_ALL = range(1, 257)
_SM90 = ("", "softcap_alibi", "bias_mask", "short", "pairs")
_VARIANTS = {
    "wmma": {
        "wide": _ALL,
        "narrow": _ALL,
        "split": range(1, 129),
        "pipelined": range(129, 257),
        "general": _ALL,
        "single_pass": (64,),
        "persistent": range(64, 257),
    },
    # By the tile of v's head_dim, then by the kernel of the tile.
    "sm90": {
        **{
            f"{v}{kind}": tiles
            for v, tiles in (("", _ALL), ("v128", range(129, 193)))
            for kind in _SM90[:3]
        },
        "short": range(1, 129),
        "pairs": range(193, 257),
    },
    "wmma8": {"": _ALL, "general": _ALL},
    # With the caller's bias or mask: given, for inputs with scales and without.
    "sm90_fp8": {
        "": _ALL,
        "scaled": (64, 128, 256),
        "given": _ALL,
    },
    "decode": {"rows16": (*_ALL, 576), "rows32": (*range(1, 129), 576)},
    "sm90_latent": dict.fromkeys(("rows16", "rows32", "rows64"), (576,)),
}
# Each tile shape of decode has these kernels, by the dtype of the keys, and those that add up parts
# by that of out: after kernels for keys of as many bytes, and of one. General ones serve pages too.
_DECODE = ("", "paged", "general")
_DECODE_SUMS = {"2": "combine", "1": "combine_of_bytes"}
_WIDE = 576  # the tile of decode with one kernel a shape
_DECODE_KEYS = {"a": "int8", "13__nv_fp8_e4m3": "float8_e4m3fn"}
# Kernels of which there is another beside: those that pack heads, those for packed sequences, those
# for keys in a cache.
_TWINS = {
    ("scalar", ""): "cached",
    ("wmma", "narrow"): "packed",
    **{("sm90", v): "varlen" for v in ("", "v128")},  # softcap_alibi is of all lengths
    **{("sm90_fp8", variant): "varlen" for variant in ("", "scaled")},
}
# Kernels of which there is another for keys in a cache, in these tiles.
_CACHED = dict.fromkeys((("wmma", "narrow"), ("sm90", ""), ("sm90", "short")), (64, 128))
_KERNEL = re.compile(
    r"_ZN6dlattn\d+(sm90|sm90_fp8|wmma8|[a-z_]+?)(?:12row_per_warp|10token_rows)?"
    r"(?:6|\d\d(split|general|persistent|int8|cached)_)"
    r"kernelI(6__half|13__nv_bfloat16|f)?"
    r"(?:Li(\d+)E)?(?:Li(\d+)E)?(?:Lb([01])E)?(?:Lb([01])E)?(?:Lb([01])E)?"
    r"(?:LNS0_7VariantE([0-4])E(?:Lb([01])E)?)?(?:LNS_9PrecisionE(\d)E)?EEv\w+"
)
# decode: by the dtypes of what is multiplied and of the keys (S2_: the same), tile and shape.
_DECODE_KERNEL = re.compile(
    r"_ZN6dlattn6decode(?:6kernel|14combine_kernel)"
    r"I(6__half|13__nv_bfloat16)(S2_|a|13__nv_fp8_e4m3)?Li(\d+)ELi([01])E"
    r"(?:Lb([01])ELb([01])E|Li([12])E)EEv\w+"
)
_LATENT_KERNEL = re.compile(
    r"_ZN6dlattn11sm90_latent(?:6|14(combine)_|13narrow_)kernelI(6__half|13__nv_bfloat16)"
    r"(?:Li(16|32)E(S2_|13__nv_fp8_e4m3))?EEv\w+"
)
_LARGE_HEADS_KERNEL = re.compile(
    r"_ZN6dlattn9sm90_wide6kernelI(6__half|13__nv_bfloat16)Li(\d+)EEEv\w+"
)
_WIDE_KERNEL = re.compile(
    r"_ZN6dlattn6decode11wide_kernelI(6__half|13__nv_bfloat16)(S2_|a|13__nv_fp8_e4m3)"
    r"Li([01])EEEv\w+"
)
# key_blocks, which quantises: by the dtype of its inputs, its precision, its columns, and whether
# it is q's.
_QUANTIZE = re.compile(
    r"_ZN6dlattn8quantize10key_blocks6kernelI(6__half|13__nv_bfloat16)"
    r"LNS_9PrecisionE([123])ELi(64|128|256)ELb([01])EEEv\w+"
)
_BACKWARD_KERNEL = re.compile(
    r"_ZN6dlattn\d+backward_([a-z]+(?:\d\d)?)\d+([a-z_]+)_kernel"
    r"I(6__half|13__nv_bfloat16)?(?:Li(\d+)E)?(?:L\w\w?E)*EEv\w+"
)
_BESIDE_BACKWARD_KERNEL = re.compile(
    r"_ZN6dlattn\d(delta|reduce)\d\d\w+?_kernelI(6__half|13__nv_bfloat16|f)EEv\w+"
)
# An instance of int8 has the kernels of two precisions.
_INT8, _INT8_FP16 = "wmma8_int8_", "wmma8_int8_fp16_"
_PRECISIONS = {"1": "int8", "2": "fp8", "3": "int8_fp16"}
_OPCODE = re.compile(r"^ +/\*[0-9a-f]+\*/ +(?:@!?U?P\w+ +)?([A-Z0-9_.]+)", re.M)
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


class NoTools(Exception):
    """Raised where this machine lacks a tool that reads kernels."""


@dataclass(frozen=True)
class Usage:
    """The resources of one kernel on one architecture, without its dynamic shared memory."""

    registers: int
    stack: int
    static_smem: int
    local: int


def tool(name: str) -> str:
    """A program of the CUDA toolkit, or of NVIDIA's wheels on PyPI."""
    found = shutil.which(name)
    if found:
        return found
    places = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin"]
    nvidia = importlib.util.find_spec("nvidia")
    for folder in (nvidia.submodule_search_locations or []) if nvidia else []:
        places += Path(folder).glob("*/bin")
    for place in places:
        if (place / name).is_file():
            return str(place / name)
    raise NoTools(f"{name} is not installed (CUDA toolkit, or pip install nvidia-cuda-{name})")


def _run(*command: str) -> str:
    # cuobjdump runs the nvdisasm that it finds on the path.
    path = os.pathsep.join([str(Path(tool("nvdisasm")).parent), os.environ.get("PATH", "")])
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "PATH": path}
    )
    return done.stdout


def instances(operation: str = "forward") -> list[tuple[str, str, int]]:
    """The (family, dtype, head_dim tile) of instances.cmake."""
    text = (ROOT / "src/cuda/instances.cmake").read_text()
    found = []
    instance = re.compile(rf"^dlattn_instance\({operation} (\w+) (\w+) ([\d ]+)(?:IN \w+)?\)", re.M)
    for family, dtype, tiles in instance.findall(text):
        found += [(family, dtype, int(tile)) for tile in tiles.split()]
    return found


def arch_of(kernel: str) -> str:
    """The architecture that a kernel's budget is about."""
    if kernel.endswith("_persistent"):  # over TMA, which 8.9 has not
        return SM_90
    return SM_90A if kernel.removeprefix("backward_").startswith("sm90") else SM_89


def kernel_name(
    family: str, dtype: str, tile: int | str | None, variant: str = "", kernel: str = ""
) -> str:
    return "_".join(str(part) for part in (family, dtype, tile, variant, kernel) if part)


def variants(family: str, tile: int | None = None) -> list[str]:
    """The names of a family's tile shapes, all or those that serve a head_dim tile."""
    named = _VARIANTS.get(family)
    if named is None:
        return [""]
    return [name for name, tiles in named.items() if tile is None or tile in tiles]


def names(family: str, variant: str, dtype: str = "", tile: int | None = None) -> list[str]:
    """Those of the kernels of a tile shape, apart from family, dtype and tile."""
    if family == "scalar" and dtype in _DECODE_KEYS.values():
        return []  # 8-bit caches are for the kernels of q's dtype
    if family == "sm90_latent" and dtype in _DECODE_KEYS.values():
        return [variant] if variant != "rows64" else []
    if family == "sm90_latent":  # one kernel adds up the parts of all shapes
        return [variant, *(["combine"] if variant == "rows64" else [])]
    if family == "decode":
        walks = ("",) if tile == _WIDE else _DECODE
        sums = () if dtype in _DECODE_KEYS.values() else _DECODE_SUMS.values()
        return [f"{variant}_{kernel}".rstrip("_") for kernel in (*walks, *sums)]
    beside = [twin] if (twin := _TWINS.get((family, variant))) else []
    if tile in _CACHED.get((family, variant), ()):
        beside.append("cached")
    return [variant, *(f"{variant}_{kernel}".lstrip("_") for kernel in beside)]


def backward_kernels() -> list[str]:
    found = {}  # in order, each once
    for family, dtype, tile in instances("backward"):
        named = "" if family in _BACKWARD_ANY_DTYPE else dtype
        for kernel in _BACKWARD[family]:
            if tile not in _BACKWARD_SOME_TILES.get((family, kernel), (tile,)):
                continue
            found[kernel_name(f"backward_{family}", named, tile, kernel)] = None
        for kernel in _BACKWARD_ANY_TILE.get(family, ()):
            found[kernel_name(f"backward_{family}", named, None, kernel)] = None
    for operation, (_, dtypes) in _BESIDE_BACKWARD.items():
        found.update({kernel_name(operation, dtype, None): None for dtype in dtypes})
    return list(found)


def expected_kernels() -> list[str]:
    any_dims = [kernel_name(name, d, None) for name in _ANY_DIMS for d in _ANY_DIMS_DTYPES]
    forward = [
        kernel_name(*instance, name)
        for instance in instances()
        for variant in variants(instance[0], instance[2])
        for name in names(instance[0], variant, instance[1], instance[2])
    ]
    quantizes = [
        kernel_name("quantize", dtype, columns, variant)
        for dtype in ("float16", "bfloat16")
        for columns in (64, 128, 256)
        for variant in ("int8", "fp8", "fp8_queries", "int8_fp16")
    ]
    of_halves = [
        name.replace(_INT8, _INT8_FP16)
        for name in forward
        if name.startswith(_INT8) and not name.endswith("256_general")
    ]
    return forward + of_halves + any_dims + quantizes + backward_kernels()


def name_of(symbol: str) -> str | None:
    """The name of a kernel; None for what is no kernel of these lists."""
    if match := _QUANTIZE.fullmatch(symbol):
        element, precision, columns, queries = match.groups()
        variant = _PRECISIONS[precision] + ("_queries" if queries == "1" else "")
        return kernel_name("quantize", _TYPES[element], columns, variant)
    if match := _DECODE_KERNEL.fullmatch(symbol):
        element, keys, tile, variant, paged, general, key_bytes = match.groups()
        dtype = _DECODE_KEYS.get(keys or "", _TYPES[element])
        kernel = _DECODE_SUMS[key_bytes] if key_bytes else _DECODE[int(paged) + int(general)]
        return kernel_name("decode", dtype, tile, variants("decode")[int(variant)], kernel)
    if match := _LATENT_KERNEL.fullmatch(symbol):
        combine, element, rows, keys = match.groups()
        dtype = _DECODE_KEYS.get(keys or "", _TYPES[element])
        return kernel_name("sm90_latent", dtype, _WIDE, combine or f"rows{rows or 64}")
    if match := _LARGE_HEADS_KERNEL.fullmatch(symbol):
        return kernel_name("sm90_wide", _TYPES[match[1]], match[2])
    if match := _WIDE_KERNEL.fullmatch(symbol):
        element, keys, variant = match.groups()
        dtype = _DECODE_KEYS.get(keys, _TYPES[element])
        return kernel_name("decode", dtype, _WIDE, variants("decode")[int(variant)])
    if match := _BESIDE_BACKWARD_KERNEL.fullmatch(symbol):
        operation, element = match.groups()
        return kernel_name(operation, _TYPES[element], None)
    if match := _BACKWARD_KERNEL.fullmatch(symbol):
        family, kernel, element, tile = match.groups()
        tile = None if kernel in _BACKWARD_ANY_TILE.get(family, ()) else tile
        return kernel_name(f"backward_{family}", _TYPES[element] if element else "", tile, kernel)
    match = _KERNEL.fullmatch(symbol)
    return _parsed_name(match) if match else None


def _parsed_name(match: re.Match[str]) -> str:
    family, name, element, tile, variant, twin, scaled, given, mod, varlen, precision = (
        match.groups()
    )
    if name == "cached":
        shape = _SM90[int(mod)] if family == "sm90" else variants(family)[int(variant)]
        return kernel_name(family, _TYPES[element], tile, shape, name)
    if family == "sm90":
        name = (f"v{variant}" if variant != tile else "") + _SM90[int(mod)]
        twin = varlen if (family, name) in _TWINS else None
    elif family == "wmma8":
        dtype = _PRECISIONS[precision] if name else _TYPES[element]
        return kernel_name(family, dtype, tile, variants(family)[int(twin)])
    elif family == "sm90_fp8":
        name = variants(family)[2 if given == "1" else int(scaled)]
    elif variant:
        name = variants(family)[int(variant)]
    name = names(family, name or "")[twin == "1"]
    return kernel_name(family, _TYPES[element], tile, name)


def installed_library() -> Path | None:
    spec = importlib.util.find_spec("dlattn")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for library in sorted(Path(folder).rglob("libdlattn.so*")):
            return library
    return None


def _following(family: str) -> list[str]:
    """The operations of launches that may follow those of a family of attention."""
    text = (ROOT / "src/cuda/instances.cmake").read_text()
    return re.findall(rf"^dlattn_family\(forward {family}\b.* THEN (\w+)\)", text, re.M)


def _instantiation(
    template: str, operation: str, family: str, dtype: str, tile: int, launched: str = ""
) -> str:
    """The source that CMake makes of instance.cu.in, for `operation` or one that follows it."""
    space = {"forward": family, "backward": f"backward_{family}"}.get(
        operation, f"{operation}::{family}"
    )
    values = {
        "operation": operation,
        "family": family,
        "_space": f"{space}::{launched}" if launched else space,
        "_params": _PARAMS[launched or operation],
        "_enum": _ENUMS[dtype],
        "tile": str(tile),
    }
    for name, value in values.items():
        template = template.replace(f"@{name}@", value)
    return template


def compile_instances(
    folder: Path,
    arch: str = SM_89,
    wanted: Container[tuple[str, str, int]] | None = None,
    ptx: str = "",
    options: Sequence[str] = (),
) -> list[Path]:
    """The instances, or those wanted of them, as cubins of an architecture.

    `ptx`: the compute capability of the PTX that they are made of, "80", if not that of the cubin.
    """
    nvcc = tool("nvcc")
    template = (ROOT / "src/cuda/instance.cu.in").read_text()
    sources = {}
    for family, dtype, tile in instances():
        if wanted is not None and (family, dtype, tile) not in wanted:
            continue
        if not names(family, variants(family)[0], dtype):
            continue
        source = folder / f"{kernel_name(family, dtype, tile)}.cu"
        source.write_text(
            "".join(
                _instantiation(template, "forward", family, dtype, tile, launched)
                for launched in ("", *_following(family))
            )
        )
        sources[source] = source.with_suffix(".cubin")
    if wanted is None:
        for operation, family in _ANY_DIMS.items():
            source = folder / f"{operation}.cu"
            source.write_text(
                "".join(
                    _instantiation(template, operation, family, dtype, 0)
                    for dtype in _ANY_DIMS_DTYPES
                )
            )
            sources[source] = source.with_suffix(".cubin")
        quantize = folder / "quantize.cu"
        quantize.write_text(
            "".join(
                _instantiation(template, "quantize", "key_blocks", dtype, columns)
                for dtype in ("int8", "float8_e4m3fn")
                for columns in (64, 128, 256)
            )
        )
        sources[quantize] = quantize.with_suffix(".cubin")
        for operation in ("backward", *_BESIDE_BACKWARD):
            for family in dict.fromkeys(family for family, _, _ in instances(operation)):
                own = (i for i in instances(operation) if i[0] == family)
                texts = [_instantiation(template, operation, *instance) for instance in own]
                source = folder / f"{operation}_{family}.cu"
                source.write_text("".join(texts))
                sources[source] = source.with_suffix(".cubin")

    def build(source: Path) -> None:
        number = (SM_90A if arch_of(source.stem) == SM_90A else arch).removeprefix("sm_")
        code = f"arch=compute_{ptx or number},code=sm_{number}"
        flags = [*options, "-std=c++17", "--expt-relaxed-constexpr", "-gencode", code, "-cubin"]
        includes = [f"-I{ROOT / 'src'}", f"-I{ROOT / 'src/include'}"]
        subprocess.run(
            [nvcc, *flags, *includes, "-o", str(sources[source]), str(source)], check=True
        )

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(build, sources))
    return list(sources.values())


@dataclass
class Kernels:
    """The kernels of one build."""

    usage: dict[str, dict[str, Usage]]  # by kernel, then by architecture
    code: dict[str, str]  # of those of reads_code(): machine code for its budget's architecture
    source: str  # where they come from


def usage_of_symbols(binary: Path) -> Iterator[tuple[str, str, Usage]]:
    """(mangled name, architecture, what it needs) of each kernel of a library or cubin."""
    arch = name = ""
    for line in _run(tool("cuobjdump"), "--dump-resource-usage", str(binary)).splitlines():
        # A fat binary names the architecture; a bare cubin leaves it to its file's maker.
        if match := re.match(r"arch = (sm_\w+)", line):
            arch = match[1]
        elif match := re.search(r"Function (\w+):", line):
            name = match[1]
        elif match := _USAGE.search(line):
            yield name, arch or arch_of(binary.stem), Usage(*map(int, match.groups()))


def listings(
    binary: Path, arch: str = SM_89, wanted: set[str] | None = None
) -> Iterator[tuple[str, str]]:
    """(mangled name, machine code as text) of the kernels of a library or cubin.

    Of a library's with `wanted` alone, which takes as much less time as there are fewer of them.
    """
    with tempfile.TemporaryDirectory() as temporary:
        sources = [([] if binary.suffix == ".cubin" else ["-arch", arch], binary)]
        if wanted is not None and binary.suffix != ".cubin":
            sources = [([], cubin) for cubin, _ in _extracted(binary, {arch: wanted}, temporary)]
        for options, source in sources:
            text = _run(tool("cuobjdump"), "-sass", *options, str(source))
            yield from _functions(text, "\t\tFunction : ")


def _functions(text: str, title: str) -> Iterator[tuple[str, str]]:
    """(name, what follows) of each function of a listing; `title` stands before the names."""
    for function in text.split("\n" + title)[1:]:
        name, _, code = function.partition("\n")
        yield name.rstrip(":"), code


def reads_code(kernel: str) -> bool:
    """Whether tests read a kernel's machine code. That of bfloat16 differs from float16's in the
    types of its instructions alone; only .ci/nightly reads both."""
    return kernel.startswith(("wmma", "sm90")) and (
        "_bfloat16_" not in kernel or bool(os.environ.get("DLATTN_NIGHTLY"))
    )


def opcodes(code: str) -> Counter[str]:
    """How often each instruction is in machine code, by the name that it has before operands."""
    return Counter(_OPCODE.findall(code))


def _extracted(
    library: Path, wanted: dict[str, set[str]], folder: str
) -> list[tuple[Path, set[str]]]:
    """The cubins of a library with kernels wanted of their architecture, and which those are."""
    command = [tool("cuobjdump"), "-xelf", "all", str(library.resolve())]
    subprocess.run(command, cwd=folder, capture_output=True, check=True)
    return [
        (cubin, symbols)
        for arch, symbols in wanted.items()
        for cubin in sorted(Path(folder).glob(f"*.{arch}.cubin"))
        for content in [cubin.read_bytes()]
        if any(symbol.encode() in content for symbol in symbols)
    ]


def _code(binary: Path, wanted: dict[str, set[str]]) -> Iterator[tuple[str, str]]:
    """(mangled name, instructions) of the kernels wanted of each architecture.

    nvdisasm prints instructions alone, in a quarter of the time that cuobjdump takes.
    """
    with tempfile.TemporaryDirectory() as temporary:
        if binary.suffix == ".cubin":
            cubins = [(binary, symbols) for symbols in wanted.values()]
        else:
            cubins = _extracted(binary, wanted, temporary)
        with ThreadPoolExecutor(2) as pool:
            texts = pool.map(lambda job: _run(tool("nvdisasm"), "-c", str(job[0])), cubins)
            for text, (_, symbols) in zip(texts, cubins, strict=True):
                for symbol, code in _functions(text, ".text."):
                    if symbol in symbols:
                        yield symbol, code


def _read(binaries: list[Path], source: str) -> Kernels:
    kernels = Kernels({}, {}, source)
    for binary in binaries:
        wanted: dict[str, set[str]] = {}  # symbols, by the architecture of their budget
        for symbol, arch, usage in usage_of_symbols(binary):
            if name := name_of(symbol):
                kernels.usage.setdefault(name, {})[arch] = usage
                if arch == arch_of(name) and reads_code(name):
                    wanted.setdefault(arch, set()).add(symbol)
        for symbol, code in _code(binary, wanted):
            if name := name_of(symbol):
                kernels.code[name] = code
    return kernels


def load() -> Kernels:
    """The kernels to check. Raises NoTools."""
    if folder := os.environ.get("DLATTN_BUILD_DIR"):
        library = Path(folder) / "libdlattn.so"
        if not library.exists():
            raise FileNotFoundError(f"DLATTN_BUILD_DIR: there is no {library}")
        return _read([library], str(library))
    installed = installed_library()
    if installed:
        kernels = _read([installed], str(installed))
        if any(SM_89 in archs for archs in kernels.usage.values()):
            return kernels
    with tempfile.TemporaryDirectory() as temporary:
        return _read(compile_instances(Path(temporary)), "compiled by nvcc")


def dynamic_smem() -> dict[str, int]:
    """Bytes of dynamic shared memory of each instance, from the traits that the plan reads."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if not compiler:
        raise NoTools("no C++ compiler is installed")
    families = sorted({family for family, _, _ in instances()})
    lines = [f'#include "cuda/forward/{family}/traits.h"' for family in families]
    lines += [
        f'#include "cuda/{operation}/{family}/traits.h"'
        for operation in ("backward", *_BESIDE_BACKWARD)
        for family in dict.fromkeys(family for family, _, _ in instances(operation))
    ]
    lines += ["#include <cstdio>", "int main() {"]
    for kernel in backward_kernels():
        space = kernel.split("_")[0]
        if space in _BESIDE_BACKWARD:
            space += f"::{_BESIDE_BACKWARD[space][0]}"
        else:
            space = "_".join(kernel.split("_")[:2])
        size = "kSmemBytes"
        if space == "backward_wmma":
            tile, own = kernel.split("_")[-2:]
            size = f"smem_bytes({tile}, {_BACKWARD['wmma'].index(own)})"
        lines.append(f'std::printf("{kernel} %d\\n", dlattn::{space}::{size});')
    for family, dtype, tile in instances():
        size = 4 if dtype == "float32" else 2
        for variant in variants(family, tile):
            arguments = f"{size}, {tile}" if family == "scalar" else str(tile)
            if family == "sm90":
                tile_v = 128 if variant.startswith("v128") else tile
                mod = _SM90.index(variant.removeprefix("v128"))
                arguments += f", {tile_v}, dlattn::sm90::Variant({mod})"
            elif variant and family not in ("wmma8", "sm90_fp8"):
                arguments += f", {variants(family).index(variant)}"
            if family in ("decode", "sm90_latent"):
                arguments += ", 1" if dtype in _DECODE_KEYS.values() else ", 2"
            config = f"dlattn::{family}::tile_config({arguments})"
            for name in names(family, variant, dtype, tile):
                whole = kernel_name(family, dtype, tile, name)
                bytes_ = f"{config}.smem_bytes"
                if "combine" in name.split("_"):
                    bytes_ = "dlattn::tile::key_parts::combine_smem_bytes()"
                lines.append(f'std::printf("{whole} %d\\n", {bytes_});')
            if whole.startswith(_INT8):
                halves = config.replace(f"({tile})", f"({tile}, 2)")
                whole = whole.replace(_INT8, _INT8_FP16)
                lines.append(f'std::printf("{whole} %d\\n", {halves}.smem_bytes);')
    lines.append("}")
    with tempfile.TemporaryDirectory() as temporary:
        source, program = Path(temporary) / "smem.cpp", Path(temporary) / "smem"
        source.write_text("\n".join(lines))
        includes = [f"-I{ROOT / 'src'}", f"-I{ROOT / 'src/include'}"]
        command = [compiler, "-std=c++17", *includes, "-o", str(program), str(source)]
        subprocess.run(command, check=True)
        done = subprocess.run([str(program)], capture_output=True, text=True, check=True)
    return {name: int(size) for name, size in (line.split() for line in done.stdout.splitlines())}


def cuda_version() -> str:
    """The version of the compiler that made the kernels: the installed package's, else that of
    nvcc."""
    if not os.environ.get("DLATTN_BUILD_DIR") and installed_library():
        import dlattn

        if dlattn.info().cuda:
            return str(dlattn.info().cuda_version)
    match = re.search(r"release (\d+\.\d+)", _run(tool("nvcc"), "--version"))
    return match[1] if match else "unknown"


def budgets() -> Any:
    """The recorded budgets, of kernels by today's names."""
    return json.loads(BUDGETS.read_text())


def write() -> None:
    kernels, smem = load(), dynamic_smem()
    budgets = {
        name: {
            "dynamic_smem": smem.get(name, 0),
            "registers": {arch: use.registers for arch, use in sorted(archs.items())},
        }
        for name, archs in sorted(kernels.usage.items())
    }
    document = {"cuda": cuda_version(), "kernels": budgets}
    BUDGETS.write_text(json.dumps(document, indent=1) + "\n")
    print(f"{BUDGETS}: {len(budgets)} kernels, {kernels.source}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Registers and shared memory of the kernels")
    parser.add_argument("--write", action="store_true", help="record them as the new budgets")
    if parser.parse_args().write:
        write()
        sys.exit()
    for kernel, archs in sorted(load().usage.items()):
        for arch, use in sorted(archs.items()):
            print(f"{kernel:24} {arch:7} {use}")
