"""`python -m dlattn check`: the acceptance table, every kernel of this machine against float64."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import dlattn
from dlattn.cli.devices import CPU_KERNELS, GPU_KERNELS, CpuDevice, Device, find_gpu, gpu_status
from dlattn.cli.errors import CommandError
from dlattn.cli.text import Progress, duration, shape, table
from dlattn.cli.writing import check_writable, write_text
from dlattn.reference import attention_reference, error_bound, max_error

Array = NDArray[Any]

DTYPES = {"cpu": ("float32", "float16"), "cuda": ("float16",)}
OFFSET = 0.25  # a mean that is not zero, so that an indexing error cannot cancel out


@dataclass(frozen=True)
class Case:
    """One problem: (batch, num_heads, seqlen, head_dim) and how often it is drawn."""

    name: str
    sizes: tuple[int, int, int, int]
    causal: bool
    seeds: tuple[int, ...] = (0,)

    @property
    def mask(self) -> str:
        """In words."""
        return "causal" if self.causal else "full"


CASES = (
    *(
        Case(name, (1, 8, seqlen, 64), causal, seeds=(0, 1, 2))
        for name, seqlen in (("tiny", 32), ("small", 64), ("medium", 128), ("mission", 512))
        for causal in (False, True)
    ),
    Case("long", (2, 8, 2048, 64), False),
    Case("long", (2, 8, 2048, 64), True),
    Case("wide", (2, 8, 2048, 128), False),
)


@dataclass(frozen=True)
class Result:
    """What one kernel made of one drawn problem."""

    case: str
    sizes: tuple[int, int, int, int]
    mask: str
    seed: int
    dtype: str
    kernel: str
    max_error: float
    bound: float
    lse_max_error: float
    lse_bound: float
    seconds: float
    failure: str  # what was raised; empty if nothing

    @property
    def passed(self) -> bool:
        """Both results within their bounds."""
        within = self.max_error <= self.bound and self.lse_max_error <= self.lse_bound
        return within and not self.failure

    @property
    def badness(self) -> float:
        """Error in units of the bound: the seed with the most of it is the one that is shown."""
        worst = max(self.max_error / self.bound, self.lse_max_error / self.lse_bound)
        return float("inf") if self.failure else worst


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--kernel", choices=(*CPU_KERNELS, *GPU_KERNELS), help="check this kernel only"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="check this device only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every result there too")


def main(args: argparse.Namespace) -> int:
    """Run the command; 0 if everything passed, else 1."""
    if args.json is not None:
        check_writable(args.json, "--json")
    plans, remarks = _what_to_check(args.kernel, args.device)
    _say_where(plans, remarks)
    results = list(_check(plans))
    if args.json is not None:
        _write_json(args.json, plans, results)
    return _report(results)


def draw(sizes: tuple[int, int, int, int], dtype: str, seed: int) -> tuple[Array, Array, Array]:
    """Normal inputs with a mean that is not zero, as (batch, seqlen, num_heads, head_dim)."""
    batch_size, num_heads, seqlen, head_dim = sizes
    rng = np.random.default_rng(seed)
    full = (batch_size, seqlen, num_heads, head_dim)
    q, k, v = (rng.standard_normal(full, dtype=np.float32) + OFFSET for _ in range(3))
    return q.astype(dtype), k.astype(dtype), v.astype(dtype)


def _what_to_check(
    kernel: str | None, device: str | None
) -> tuple[list[tuple[Device, tuple[str, ...]]], list[str]]:
    """Pairs of a device and its kernels, and remarks on what is left out."""
    wants_cpu = device in (None, "cpu") and kernel in (None, *CPU_KERNELS)
    wants_gpu = device in (None, "cuda") and kernel in (None, *GPU_KERNELS)
    if not wants_cpu and not wants_gpu:
        raise CommandError(f"--kernel {kernel} does not run on --device {device}")
    plans: list[tuple[Device, tuple[str, ...]]] = []
    remarks: list[str] = []
    if wants_cpu:
        plans.append((CpuDevice(), CPU_KERNELS))
    if wants_gpu:
        try:
            if not wants_cpu or not gpu_status():
                gpu = find_gpu()
                kernels = (kernel,) if kernel else _kernels_of(gpu, remarks)
                plans.append((gpu, kernels))
            else:
                remarks.append(f"GPU not checked: {gpu_status()}")
        except CommandError as error:
            if not wants_cpu:
                raise
            remarks.append(f"GPU not checked: {error}")
    return plans, remarks


def _kernels_of(gpu: Device, remarks: list[str]) -> tuple[str, ...]:
    """Those made for this GPU; why not the others, into `remarks`."""
    x = gpu.put(np.ones((1, 16, 1, 64), np.float16))
    kernels = []
    for kernel in GPU_KERNELS:
        support = dlattn.supported(x, x, x, kernel=kernel)
        if support:
            kernels.append(kernel)
        else:
            remarks.append(f"not checked: {'; '.join(support.reasons)}")
    return tuple(kernels)


def _say_where(plans: Iterable[tuple[Device, tuple[str, ...]]], remarks: Iterable[str]) -> None:
    print(f"dlattn {dlattn.__version__}")
    for device, kernels in plans:
        print(f"{device.label}: {', '.join(kernels)}")
    for remark in remarks:
        print(remark)
    print(flush=True)


def _check(plans: list[tuple[Device, tuple[str, ...]]]) -> Iterator[Result]:
    draws = sorted({dtype for device, _ in plans for dtype in DTYPES[device.kind]})
    progress = Progress(sum(len(case.seeds) for case in CASES) * len(draws))
    for case in CASES:
        for dtype in draws:
            for seed in case.seeds:
                progress.step(f"{case.name} {shape(case.sizes)} {case.mask} {dtype} seed {seed}")
                q, k, v = draw(case.sizes, dtype, seed)
                expected = attention_reference(q, k, v, causal=case.causal)
                bound = error_bound(q, k, v, expected=expected, causal=case.causal)
                for device, kernels in plans:
                    if dtype not in DTYPES[device.kind]:
                        continue
                    tensors = [device.put(x) for x in (q, k, v)]
                    for kernel in kernels:
                        outcome = _run(device, kernel, tensors, case.causal, expected)
                        yield Result(
                            case=case.name,
                            sizes=case.sizes,
                            mask=case.mask,
                            seed=seed,
                            dtype=dtype,
                            kernel=kernel,
                            max_error=outcome[0],
                            bound=bound.out,
                            lse_max_error=outcome[1],
                            lse_bound=bound.lse,
                            seconds=outcome[2],
                            failure=outcome[3],
                        )
    progress.close()


def _run(
    device: Device, kernel: Any, tensors: list[Any], causal: bool, expected: tuple[Array, Array]
) -> tuple[float, float, float, str]:
    """Errors of out and lse, seconds of a call, and what was raised."""
    q, k, v = tensors
    target = device.poisoned(expected[0].shape, q)
    try:
        out, lse = dlattn.attention(
            q, k, v, causal=causal, kernel=kernel, out=target, return_lse=True
        )
        errors = (
            max_error(device.get(out), expected[0]),
            max_error(device.get(lse), expected[1]),
        )
        seconds = device.seconds(
            lambda: dlattn.attention(q, k, v, causal=causal, kernel=kernel, out=target)
        )
    except (ValueError, RuntimeError) as error:  # those of dlattn and of the framework
        return float("inf"), float("inf"), float("nan"), str(error)
    return *errors, seconds, ""


def _report(results: list[Result]) -> int:
    groups: dict[tuple[str, str, str, str], list[Result]] = {}
    for result in results:
        key = (result.kernel, result.dtype, result.case, result.mask)
        groups.setdefault(key, []).append(result)
    order = {kernel: i for i, kernel in enumerate((*CPU_KERNELS, *GPU_KERNELS))}
    rows, failures = [], []
    for key in sorted(groups, key=lambda key: (order[key[0]], key[1])):
        group = groups[key]
        worst = max(group, key=lambda result: result.badness)
        rows.append(
            [
                worst.kernel,
                worst.dtype,
                worst.case,
                shape(worst.sizes),
                worst.mask,
                str(len(group)),
                f"{worst.max_error:.2e}",
                f"{worst.bound:.2e}",
                f"{worst.lse_max_error:.1e}",
                f"{worst.lse_bound:.1e}",
                duration(min(result.seconds for result in group)),
                "PASS" if worst.passed else "FAIL",
            ]
        )
        failures += [result for result in group if not result.passed]
    headers = ["kernel", "dtype", "case", "(B,H,S,D)", "mask", "seeds", "max error", "bound"]
    headers += ["lse error", "bound", "latency", ""]
    print(table(headers, rows, right=(5, 6, 7, 8, 9, 10)))
    print("\nErrors are absolute, against float64; of several seeds the worst is shown.")
    print("Bound: twice the error of a plain same-dtype computation, plus a tiny absolute term.")
    for result in failures:
        if result.failure:
            where = f"{result.kernel} {result.dtype} {result.case} {result.mask}"
            print(f"{where} seed {result.seed}: {result.failure}")
    verdict = f"FAIL: {len(failures)} of" if failures else "PASS:"
    print(f"\n{verdict} {len(results)} problems")
    return 1 if failures else 0


def _write_json(
    path: Path, plans: list[tuple[Device, tuple[str, ...]]], results: list[Result]
) -> None:
    document = {
        "dlattn": dlattn.__version__,
        "devices": [device.label for device, _ in plans],
        "passed": all(result.passed for result in results),
        "results": [_entry(result) for result in results],
    }
    write_text(path, json.dumps(document, indent=1, allow_nan=False) + "\n")


def _entry(result: Result) -> dict[str, Any]:
    """A result as JSON can hold it, which knows no infinity: null."""
    finite = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in asdict(result).items()
    }
    return finite | {"passed": result.passed}
