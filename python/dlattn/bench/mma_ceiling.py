"""The ceiling of warp-level matrix instructions on this GPU: products on registers alone.

A kernel made of `mma.sync` cannot be faster, whatever it does about memory and softmax; larger
matrix products of a vendor's library may be, with instructions that such a kernel does not have.
The kernel is PTX text, which the driver compiles: no compiler is needed and no header.
"""

from __future__ import annotations

import ctypes
import importlib
import statistics
from typing import Any

from dlattn.bench.timing import GpuClock, Prepared, Windows

_WARPS = 8  # per block
_BLOCKS_PER_SM = 2
_CHAINS = 8  # independent accumulators of a warp, so that no product waits for another
_TURNS = 4096  # of the loop
_FLOPS = 2 * 16 * 8 * 16  # of an m16n8k16


def measure(dtype: str, windows: Windows) -> float | None:
    """TFLOP/s of mma.sync.m16n8k16 with fp32 accumulators; None for another dtype.

    Raises RuntimeError if the driver refuses.
    """
    kinds = {"float16": "f16", "bfloat16": "bf16"}
    if dtype not in kinds:
        return None
    torch: Any = importlib.import_module("torch")
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    blocks = _BLOCKS_PER_SM * properties.multi_processor_count
    sink = torch.zeros(1, device="cuda")  # and thereby torch's context is the current one
    launch = _loaded(ptx(kinds[dtype]), blocks, 32 * _WARPS, sink.data_ptr(), torch)
    seconds = statistics.median(GpuClock().window(Prepared(launch, 1), windows))
    return blocks * _WARPS * _CHAINS * _TURNS * _FLOPS / seconds / 1e12


def ptx(kind: str) -> str:
    """The kernel: `mma_ceiling(float* sink)`."""
    lines = [
        ".version 7.0",
        ".target sm_80",
        ".address_size 64",
        ".visible .entry mma_ceiling(.param .u64 sink)",
        "{",
        ".reg .pred %more, %never;",
        ".reg .b32 %lane, %turn, %a<4>, %b<2>;",
        f".reg .f32 %d<{4 * _CHAINS}>, %sum;",
        ".reg .b64 %to;",
        "mov.u32 %lane, %tid.x;",
    ]
    # Operands that differ from lane to lane: numbers near +-1 with busy mantissas, for zeros would
    # cost less power and so run at a higher clock. 0x3c00 and 0x3f80 are 1 in the two dtypes.
    one = 0x3C00 if kind == "f16" else 0x3F80
    mantissa = 0x03FF if kind == "f16" else 0x007F
    keep = (0x8000 | mantissa) << 16 | 0x8000 | mantissa
    for i, name in enumerate(("%a0", "%a1", "%a2", "%a3", "%b0", "%b1")):
        lines += [
            f"mad.lo.u32 {name}, %lane, {2654435761 + 40503 * i}, {0x9E3779B9 ^ 77777 * i};",
            f"and.b32 {name}, {name}, {keep};",
            f"or.b32 {name}, {name}, {one << 16 | one};",
        ]
    lines += [f"mov.f32 %d{i}, 0f00000000;" for i in range(4 * _CHAINS)]
    lines += [f"mov.u32 %turn, {_TURNS};", "again:"]
    for chain in range(_CHAINS):
        d = ", ".join(f"%d{4 * chain + i}" for i in range(4))
        lines.append(
            f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
            f"{{{d}}}, {{%a0, %a1, %a2, %a3}}, {{%b0, %b1}}, {{{d}}};"
        )
    lines += [
        "sub.u32 %turn, %turn, 1;",
        "setp.ne.u32 %more, %turn, 0;",
        "@%more bra again;",
        "mov.f32 %sum, %d0;",
    ]
    # Stored if it is one particular number, which nobody can exclude: so no product is left out.
    lines += [f"add.f32 %sum, %sum, %d{i};" for i in range(1, 4 * _CHAINS)]
    lines += [
        "setp.eq.f32 %never, %sum, 0f4B3C614E;",
        "ld.param.u64 %to, [sink];",
        "cvta.to.global.u64 %to, %to;",
        "@%never st.global.f32 [%to], %sum;",
        "ret;",
        "}",
    ]
    return "\n".join(lines) + "\n"


def _loaded(text: str, blocks: int, threads: int, sink: int, torch: Any) -> Any:
    """A call that launches the kernel on torch's current stream."""
    driver = ctypes.CDLL("libcuda.so.1")
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    _check(driver.cuModuleLoadData(ctypes.byref(module), text.encode()))
    _check(driver.cuModuleGetFunction(ctypes.byref(function), module, b"mma_ceiling"))
    argument = ctypes.c_uint64(sink)
    arguments = (ctypes.c_void_p * 1)(ctypes.addressof(argument))

    def launch() -> int:
        # `argument` must live as long as `arguments` points to it.
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        done: int = driver.cuLaunchKernel(
            function, blocks, 1, 1, threads, 1, 1, 0, stream, arguments, None
        )
        _check(done)
        return int(argument.value)

    return launch


def _check(code: int) -> None:
    if code != 0:
        raise RuntimeError(f"the CUDA driver answered {code}")
