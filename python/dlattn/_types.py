"""Types of the public functions' arguments, and what `supported`, `plan` and `info` return."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from dlattn._kernel_names import Kernel as Kernel
else:
    Kernel: TypeAlias = str  # the names are a stub, which costs an import nothing

Tensor: TypeAlias = Any
"""A torch, CuPy, JAX or NumPy array, or any object with __dlpack__ or __cuda_array_interface__."""
Causal: TypeAlias = bool | Literal["bottom_right", "top_left"]
Window: TypeAlias = tuple[int | None, int | None]
Layout: TypeAlias = Literal["bshd", "bhsd"]
OutDType: TypeAlias = Literal["bfloat16", "float16", "float32", "float64"]
Gradient: TypeAlias = Literal["dq", "dk", "dv", "dbias", "dalibi_slopes", "dsinks"]
Precision: TypeAlias = Literal["int8_fp8", "int8_fp16", "fp8"]


@dataclass(frozen=True, eq=False)
class QuantizedKV:
    """Keys and values in 8 bits, as `quantize_kv` returns them. Usable as k of `attention`."""

    buffer: Tensor
    """All of it, a tensor of k's framework and device. Its layout is dlattn's matter."""
    precision: Precision
    batch_size: int
    """With variable length the number of sequences."""
    seqlen_k: int
    """With variable length max_seqlen_k."""
    total_k: int | None
    """Tokens of all sequences; None: fixed length."""
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    key_lengths: bytes | None = field(default=None, repr=False)
    """On the CPU with variable length: cu_seqlens_k and each sequence's number of keys as int32,
    to which those of a call are compared. None: not known to the host."""

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        size = 1
        for n in self.buffer.shape:
            size *= int(n)
        return 4 * size


@dataclass(frozen=True)
class Support:
    """Whether a call would run. It is true or false in a condition, as `ok` is."""

    ok: bool
    reasons: tuple[str, ...]
    """Why it would not, one line per kernel or mistake; empty if it would."""

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        return (
            "supported"
            if self.ok
            else "not supported:\n" + "\n".join(f"  {r}" for r in self.reasons)
        )


@dataclass(frozen=True)
class Plan:
    """How a call would be computed. Fields of the other kind of device are 0 or empty."""

    kernel: str
    """One of `info().kernels`."""
    variant: str
    """Which of the kernel's variants: a tile shape, or the score modifications that it is made for.
    kernel="<kernel>:<variant>" asks for it; where it is empty, kernel="<kernel>"."""
    dtype: str
    """Element type of q: "float16", "bfloat16", "float32", "float64" or "float8_e4m3fn"; of 8-bit
    keys in a cache theirs, "int8" or "float8_e4m3fn"."""
    device: str
    """"cpu", or "cuda:0" and so on."""
    head_dim_tile: int
    """Both head dimensions rounded up to the kernel's instance that serves them."""
    packed_heads: int
    """How many query heads of a KV head share a tile (pack_gqa); 1: heads are not packed."""
    block_m: int
    """Query rows per tile."""
    block_n: int
    """Keys per tile."""
    num_warps: int
    """Warps per thread block."""
    num_stages: int
    """K/V tiles in flight."""
    copy_bytes: int
    """Bytes per global-to-shared copy, by the alignment of q, k and v."""
    grid: int
    """Thread blocks, or tasks on the CPU."""
    smem_bytes: int
    """Shared memory per thread block."""
    num_launches: int
    """Kernels that a call launches, or 1 on the CPU; 0 where there is nothing to compute."""
    launches: tuple[str, ...]
    """These in order, each its operation, kernel and grid: "combine by decode:rows16, 32 blocks of
    4 warps"."""
    num_splits: int
    """Parts into which the keys of a row are split, about; as many as num_splits asked for."""
    split_size: int
    """Keys of a part, which begins at a multiple of it; 0: parts of any size."""
    workspace_bytes: int
    """Memory beyond inputs, out and lse."""
    num_threads: int
    """Threads of the CPU that share the tasks."""
    isa: str
    """The CPU's instruction set in use."""
    predicted_ns: float
    """The time on a GPU, in nanoseconds, by the kernel's model; 0: unknown."""
    passed_over: tuple[str, ...]
    """Why the other kernels of this device cannot run the call."""
    text: str
    """All of this in lines for people, as `str` prints it before `passed_over`."""

    def __str__(self) -> str:
        lines = [self.text.rstrip()]
        lines += [f"passed over: {reason}" for reason in self.passed_over]
        return "\n".join(lines)


@dataclass(frozen=True)
class DeviceInfo:
    """A CUDA device."""

    index: int
    """The number in cuda:<index>."""
    name: str
    compute_capability: tuple[int, int]
    """(8, 9) for 8.9."""
    num_sms: int
    """Streaming multiprocessors."""
    max_smem_per_block: int
    """Shared memory that a thread block may have, in bytes."""
    l2_bytes: int
    """Size of the L2 cache, in bytes."""
    unserved: str
    """Why this build's kernels do not run on it; empty if they do."""
    code: tuple[int, int] = (0, 0)
    """The compute capability of the code that runs on it; (0, 0) for none."""
    ptx: bool = False
    """Whether that is PTX, which the driver compiles when it first loads it."""
    arch_specific_code: bool = False
    """Whether there is also machine code of kernels for this compute capability alone."""

    @property
    def served(self) -> bool:
        return not self.unserved

    def __str__(self) -> str:
        major, minor = self.compute_capability
        status = f"not served: {self.unserved}"
        if self.served:
            kind = "PTX, which the driver compiles," if self.ptx else "machine code"
            status = f"served by {kind} for {self.code[0]}.{self.code[1]}"
            if self.ptx and self.arch_specific_code:
                status += f", and by machine code of the kernels for {major}.{minor} alone"
        return f"cuda:{self.index} {self.name}, compute capability {major}.{minor}, {status}"


@dataclass(frozen=True)
class Info:
    """The contents of this build and the devices that it found."""

    version: str
    cuda: bool
    """Whether the build has CUDA kernels."""
    cuda_version: str
    """The version of the toolkit that compiled the kernels."""
    archs: tuple[str, ...]
    """Machine code ("89-real"), PTX ("89-virtual") or both ("89") in this build."""
    archs_reason: str
    """Why those: what the build was asked for, or the GPU that it found."""
    kernels: tuple[str, ...]
    missing_kernels: tuple[str, ...]
    """The kernels that this build lacks, as it has no code for the compute capability that they are
    for."""
    devices: tuple[DeviceInfo, ...]
    device_status: str
    """Why there are no devices; empty if there are."""
    cpu_isa: str
    cpu_threads: int

    def _capabilities(self, other: str) -> str:
        """The capabilities of machine code (`other`: "-virtual") or of PTX (`other`: "-real")."""
        names = (re.match(r"(\d+)(\d[af]?)", arch) for arch in self.archs if other not in arch)
        return ", ".join(dict.fromkeys(f"{name[1]}.{name[2]}" for name in names if name)) or "none"

    @property
    def gpu(self) -> bool:
        """Whether there is a CUDA device that this build's kernels run on."""
        return any(device.served for device in self.devices)

    def __str__(self) -> str:
        built = "CPU only (built without CUDA)"
        if self.cuda:
            built = (
                f"CUDA {self.cuda_version}, machine code for {self._capabilities('-virtual')}; "
                f"PTX for {self._capabilities('-real')} ({self.archs_reason})"
            )
        lines = [
            f"dlattn {self.version}",
            f"build: {built}",
            f"kernels: {', '.join(self.kernels)}",
            f"cpu: {self.cpu_isa}, {self.cpu_threads} threads",
        ]
        if self.missing_kernels:
            missing = ", ".join(self.missing_kernels)
            lines.insert(
                3, f"not in this build: {missing} (DLATTN_ARCHS=all pip install . has all)"
            )
        lines += [str(device) for device in self.devices] or [f"gpu: {self.device_status}"]
        return "\n".join(lines)
