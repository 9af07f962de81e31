"""`python -m dlattn check`: the acceptance table, every kernel of this machine against float64."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import dlattn
from dlattn.cli.check_features import FeatureResult, check_features
from dlattn.console.devices import (
    CPU_KERNELS,
    FLOAT8,
    GPU_KERNELS,
    CpuDevice,
    Device,
    find_gpu,
    gpu_status,
)
from dlattn.console.errors import CommandError
from dlattn.console.text import Progress, duration, shape, table
from dlattn.console.writing import check_writable, write_text
from dlattn.frameworks.base import numpy_dtype
from dlattn.reference import Bound, attention_reference, error_bound, max_error

Array = NDArray[Any]

DTYPES = {"cpu": ("float32", "float16", FLOAT8), "cuda": ("float16", FLOAT8)}
OFFSET = 0.25  # a mean that is not zero, so that an indexing error cannot cancel out
LARGEST_FLOAT8 = 448.0
COMMON_HEAD_DIMS = (512, 64)  # each kernel that serves a dtype serves one of these
# The largest errors of a GPU's results from inputs of 8 bits, full and causal, whose first rows see
# few keys.
FLOAT8_LARGEST_ERROR = {False: 1e-2, True: 6e-2}

# A device, and the kernels to check there by dtype.
Plan = tuple[Device, dict[str, tuple[str, ...]]]


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
        for name, seqlen in (("tiny", 32), ("small", 64), ("medium", 128), ("large", 512))
        for causal in (False, True)
    ),
    Case("long", (2, 8, 2048, 64), False),
    Case("long", (2, 8, 2048, 64), True),
    Case("wide", (2, 8, 2048, 128), False),
    Case("large heads", (1, 4, 256, 512), True),
)


@dataclass(frozen=True)
class Result:
    """The result of one kernel for one drawn problem."""

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
    failure: str  # the exception raised; empty if none

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
    features = [x for device, _ in plans for x in check_features(device, args.kernel)]
    if args.json is not None:
        _write_json(args.json, plans, results, features)
    return _report(results, features)


def draw(sizes: tuple[int, int, int, int], dtype: str, seed: int) -> dict[str, Any]:
    """Normal inputs with a mean that is not zero, as (batch, seqlen, num_heads, head_dim).

    Of 8 bits with descales by head: the largest number of each head is the largest of its type.
    """
    batch_size, num_heads, seqlen, head_dim = sizes
    rng = np.random.default_rng(seed)
    full = (batch_size, seqlen, num_heads, head_dim)
    inputs: dict[str, Any] = {}
    for name in "qkv":
        values = rng.standard_normal(full, dtype=np.float32) + np.float32(OFFSET)
        if dtype == FLOAT8:
            descale = np.max(np.abs(values), axis=(1, 3)) / np.float32(LARGEST_FLOAT8)
            values = values / descale[:, None, :, None]
            inputs[f"{name}_descale"] = descale
        inputs[name] = values.astype(numpy_dtype(np, dtype))
    return inputs


def _what_to_check(kernel: str | None, device: str | None) -> tuple[list[Plan], list[str]]:
    """The devices, with the kernels to check by dtype, and remarks on what is left out."""
    wants_cpu = device in (None, "cpu") and kernel in (None, *CPU_KERNELS)
    wants_gpu = device in (None, "cuda") and kernel in (None, *GPU_KERNELS)
    if not wants_cpu and not wants_gpu:
        raise CommandError(f"--kernel {kernel} does not run on --device {device}")
    plans: list[Plan] = []
    remarks: list[str] = []
    float8 = find_spec("ml_dtypes") is not None
    if not float8:
        remarks.append(
            f"bfloat16 and {FLOAT8} not checked: they need ml_dtypes (pip install ml_dtypes)"
        )
    if wants_cpu:
        dtypes = DTYPES["cpu"] if float8 else DTYPES["cpu"][:-1]
        plans.append((CpuDevice(), dict.fromkeys(dtypes, CPU_KERNELS)))
    if wants_gpu:
        try:
            if not wants_cpu or not gpu_status():
                gpu, holds_float8 = _gpu(float8, remarks)
                by_dtype = {"float16": (kernel,) if kernel else _kernels_of(gpu, remarks)}
                if holds_float8:
                    asked = (kernel,) if kernel else GPU_KERNELS
                    by_dtype[FLOAT8] = tuple(k for k in asked if _supports(gpu, k, FLOAT8))
                if kernel and by_dtype.get(FLOAT8) and not _supports(gpu, kernel, "float16"):
                    del by_dtype["float16"]
                plans.append((gpu, by_dtype))
            else:
                remarks.append(f"GPU not checked: {gpu_status()}")
        except CommandError as error:
            if not wants_cpu:
                raise
            remarks.append(f"GPU not checked: {error}")
    return plans, remarks


def _gpu(float8: bool, remarks: list[str]) -> tuple[Device, bool]:
    """The GPU, through what holds arrays of 8 bits if there is such a thing, and whether it is."""
    if float8:
        try:
            return find_gpu(float8=True), True
        except CommandError as error:
            remarks.append(f"{FLOAT8} not checked on the GPU: {error}")
    return find_gpu(), False


def _supports(
    device: Device, kernel: Any, dtype: str, head_dims: Iterable[int] = COMMON_HEAD_DIMS
) -> dlattn.Support:
    """Whether a kernel serves a dtype with one of these head dims; if not, why not the last."""
    for head_dim in head_dims:
        ones = np.ones((1, 16, 1, head_dim), numpy_dtype(np, dtype))
        x, v = device.put(ones), device.put(ones.copy())  # v is not the same memory as k
        support = dlattn.supported(x, x, v, kernel=kernel)
        if support:
            break
    return support


def _is_for(device: Device, kernel: Any, dtype: str, case: Case) -> bool:
    """Whether a kernel has the head_dim of a case, or none, of which it is to say why."""
    if _supports(device, kernel, dtype, case.sizes[3:]):
        return True
    return not _supports(device, kernel, dtype)


def _kernels_of(gpu: Device, remarks: list[str]) -> tuple[str, ...]:
    """Those made for this GPU and 16 bits; why not the others, into `remarks`."""
    kernels = []
    for kernel in GPU_KERNELS:
        support = _supports(gpu, kernel, "float16")
        if support:
            kernels.append(kernel)
        else:
            remarks.append(f"not checked: {'; '.join(support.reasons)}")
    return tuple(kernels)


def _say_where(plans: Iterable[Plan], remarks: Iterable[str]) -> None:
    print(f"dlattn {dlattn.__version__}")
    for device, by_dtype in plans:
        kernels = dict.fromkeys(kernel for kernels in by_dtype.values() for kernel in kernels)
        print(f"{device.label}: {', '.join(kernels)}")
    for remark in remarks:
        print(remark)
    print(flush=True)


def _check(plans: list[Plan]) -> Iterator[Result]:
    draws = sorted({dtype for _, by_dtype in plans for dtype in by_dtype})
    progress = Progress(sum(len(case.seeds) for case in CASES) * len(draws))
    for case in CASES:
        for dtype in draws:
            for seed in case.seeds:
                progress.step(f"{case.name} {shape(case.sizes)} {case.mask} {dtype} seed {seed}")
                inputs = draw(case.sizes, dtype, seed)
                expected = attention_reference(**inputs, causal=case.causal)
                for device, by_dtype in plans:
                    if not by_dtype.get(dtype):
                        continue
                    bound = _bound(device, dtype, inputs, case.causal, expected)
                    tensors = {name: device.put(x) for name, x in inputs.items()}
                    for kernel in by_dtype[dtype]:
                        if not _is_for(device, kernel, dtype, case):
                            continue
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


def _bound(
    device: Device,
    dtype: str,
    inputs: dict[str, Any],
    causal: bool,
    expected: tuple[Array, Array],
) -> Bound:
    """How far off results may be.

    Of 8 bits the CPU computes in float32, and on a GPU probabilities are of 8 bits too; from 512
    keys on `FLOAT8_LARGEST_ERROR` holds as well.
    """
    options: dict[str, Any] = {"expected": expected, "causal": causal}
    if dtype != FLOAT8:
        return error_bound(**inputs, **options)
    if device.kind == "cpu":
        return error_bound(**inputs, dtype="float32", **options)
    bound = error_bound(**inputs, out_dtype="float32", **options)
    if inputs["k"].shape[1] >= 512:
        return bound._replace(out=min(bound.out, FLOAT8_LARGEST_ERROR[causal]))
    return bound


def _run(
    device: Device,
    kernel: Any,
    tensors: dict[str, Any],
    causal: bool,
    expected: tuple[Array, Array],
) -> tuple[float, float, float, str]:
    """Errors of out and lse, seconds of a call, and what was raised."""
    # With inputs of 8 bits, whose descales come with them, out is of float32.
    options = {**tensors, "causal": causal, "kernel": kernel}
    if "q_descale" in tensors:
        options["out_dtype"] = "float32"
    options["out"] = device.poisoned(expected[0].shape, tensors.get("q_descale", tensors["q"]))
    try:
        out, lse = dlattn.attention(**options, return_lse=True)
        errors = (
            max_error(device.get(out), expected[0]),
            max_error(device.get(lse), expected[1]),
        )
        seconds = device.seconds(lambda: dlattn.attention(**options))
    except (ValueError, RuntimeError) as error:  # those of dlattn and of the framework
        return float("inf"), float("inf"), float("nan"), str(error)
    return *errors, seconds, ""


def _report_features(features: list[FeatureResult]) -> None:
    """A row for each feature and dtype, with the kernels that serve it."""
    groups: dict[tuple[str, str, bool], list[FeatureResult]] = {}
    for result in features:
        on_cpu = result.kernel in CPU_KERNELS
        groups.setdefault((result.feature, result.dtype, on_cpu), []).append(result)
    rows = []
    for (feature, dtype, _), group in groups.items():
        worst = max(result.error_over_bound for result in group)
        verdict = "PASS" if all(result.passed for result in group) else "FAIL"
        kernels = ", ".join(result.kernel for result in group)
        rows.append([feature, dtype, f"{worst:.2f}", verdict, kernels])
    if rows:
        headers = ["feature", "dtype", "error / bound", "", "kernels"]
        print("\n" + table(headers, rows, right=(2,)))


def _report(results: list[Result], features: list[FeatureResult]) -> int:
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
    _report_features(features)
    print("\nErrors are absolute, against float64; of several seeds the worst is shown.")
    print("Bound: twice the error of a plain same-dtype computation, plus a tiny absolute term.")
    for result in failures:
        if result.failure:
            where = f"{result.kernel} {result.dtype} {result.case} {result.mask}"
            print(f"{where} seed {result.seed}: {result.failure}")
    for feature in (x for x in features if x.failure):
        print(f"{feature.kernel} {feature.dtype} {feature.feature}: {feature.failure}")
    failed = len(failures) + sum(not feature.passed for feature in features)
    verdict = f"FAIL: {failed} of" if failed else "PASS:"
    print(f"\n{verdict} {len(results) + len(features)} problems")
    return 1 if failed else 0


def _write_json(
    path: Path, plans: list[Plan], results: list[Result], features: list[FeatureResult]
) -> None:
    document = {
        "dlattn": dlattn.__version__,
        "devices": [device.label for device, _ in plans],
        "passed": all(x.passed for x in results) and all(x.passed for x in features),
        "results": [_entry(result) for result in results],
        "features": [feature.entry() for feature in features],
    }
    write_text(path, json.dumps(document, indent=1, allow_nan=False) + "\n")


def _entry(result: Result) -> dict[str, Any]:
    """A result as JSON can hold it, which knows no infinity: null."""
    finite = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in asdict(result).items()
    }
    return finite | {"passed": result.passed}
