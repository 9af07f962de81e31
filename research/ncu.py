"""Profile a kernel with Nsight Compute: pipes, stalls, registers, shared memory, as JSON.

python research/ncu.py --json ncu.json      # wmma, head_dim 64 and 128, 4096 tokens
python research/ncu.py --kernel wmma:narrow --head-dim 128 --causal
python research/ncu.py --kernel sm90 --head-dim 64 128 256 --causal both

Nsight Compute holds the clocks at their base and starts a kernel anew for every group of counters,
so durations are longer than those of a benchmark; the shares are what counts.

Needs `ncu` on the PATH (it comes with the CUDA toolkit), torch or CuPy, and leave to read the GPU's
performance counters: as root, or with the driver's NVreg_RestrictProfilingToAdminUsers=0; in a
container also with the capability SYS_ADMIN. Says so, and ends with 3, where that is missing.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from dlattn.bench import environment

SECTIONS = (
    "SpeedOfLight",
    "ComputeWorkloadAnalysis",
    "MemoryWorkloadAnalysis",
    "MemoryWorkloadAnalysis_Tables",
    "SchedulerStats",
    "WarpStateStats",
    "LaunchStats",
    "Occupancy",
)
BATCH_SIZE, SEQLEN, CHANNELS = 4, 4096, 2048
MASKS = {"no": (False,), "yes": (True,), "both": (False, True)}
WARMUP = 3  # calls before the one that is profiled, to load code and to warm the L2

# The metrics that are kept of some hundred, and under which name.
PICKED = (
    (r"gpu__time_duration\.sum", "duration"),
    (r"(?:gpc|sm|smsp)__cycles_elapsed\.avg\.per_second", "SM clock"),
    (r"sm__pipe_tensor_cycles_active\.avg\.pct_of_peak_sustained_active", "tensor pipe active %"),
    (r"sm__pipe_tensor_op_hmma_cycles_active\.avg\.pct_of_peak_sustained_active", "HMMA active %"),
    (r"sm__pipe_tensor_op_gmma_cycles_active\.avg\.pct_of_peak_sustained_active", "GMMA active %"),
    (r"sm(?:sp)?__issue_active\.avg\.pct(?:_of_peak_sustained_active)?", "issue slots busy %"),
    (r"sm__inst_executed_pipe_(\w+)\.(?:avg|sum)\.pct_of_peak_sustained_active", "issued to {} %"),
    (r"sm__throughput\.avg\.pct_of_peak_sustained_elapsed", "SM throughput %"),
    (r"launch__registers_per_thread", "registers per thread"),
    (r"launch__shared_mem_per_block_dynamic", "dynamic shared memory per block"),
    (r"launch__grid_size", "blocks"),
    (r"launch__block_size", "threads per block"),
    (r"launch__occupancy_limit_(\w+)", "blocks per SM by {}"),
    (r"sm__warps_active\.avg\.pct_of_peak_sustained_active", "warps active %"),
    (
        r"l1tex__data_pipe_lsu_wavefronts_mem_shared(_op_ld|_op_st)?\.sum"
        r"\.pct_of_peak_sustained_elapsed",
        "shared memory wavefronts{} %",
    ),
    (
        r"l1tex__data_bank_conflicts_pipe_lsu_mem_shared(_op_ld|_op_st|_op_ldgsts)?\.sum",
        "bank conflicts{}",
    ),
    (r"lts__t_sector_hit_rate\.pct", "L2 hit rate %"),
    (r"lts__throughput\.avg\.pct_of_peak_sustained_elapsed", "L2 throughput %"),
    (r"(?:gpu__)?dram_?_throughput\.avg\.pct_of_peak_sustained_elapsed", "DRAM throughput %"),
    (r"dram__bytes(_read|_write)?\.sum\.per_second", "DRAM bytes{}"),
    (r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio", "stall {}"),
    (r"smsp__average_warps?_latency_issue_stalled_(\w+)\.ratio", "stall {}"),
)


class ProfileError(Exception):
    """No profile, and why."""


class Case(NamedTuple):
    """A call of dlattn.attention on float16, bshd."""

    kernel: str
    head_dim: int
    causal: bool

    @property
    def heads(self) -> int:
        return CHANNELS // self.head_dim


def target(cases: list[Case]) -> None:
    """The program that is profiled: for each case a few calls, the last of them, on torch or CuPy
    arrays."""
    import dlattn

    try:
        import torch

        make: Any = lambda shape: torch.randn(shape, device="cuda", dtype=torch.float16) + 0.25  # noqa: E731
        runtime: Any = torch.cuda.cudart()
    except ImportError:
        import cupy

        make = lambda shape: (cupy.random.standard_normal(shape) + 0.25).astype("f2")  # noqa: E731
        runtime = cupy.cuda.runtime
    start, stop = (
        getattr(runtime, f"cudaProfiler{word}", None) or getattr(runtime, f"profiler{word}")
        for word in ("Start", "Stop")
    )
    for case in cases:
        shape = (BATCH_SIZE, SEQLEN, case.heads, case.head_dim)
        q, k, v = (make(shape) for _ in range(3))
        for call in range(WARMUP + 1):
            if call == WARMUP:
                start()
            dlattn.attention(q, k, v, causal=case.causal, kernel=case.kernel)
        stop()


def profile(
    cases: list[Case], options: list[str], raw: Path | None, commit: str | None
) -> list[dict[str, Any]]:
    """The picked metrics of one launch per case. `options` give this script the same cases."""
    ncu = shutil.which("ncu")
    if ncu is None:
        raise ProfileError("there is no ncu on the PATH: it comes with the CUDA toolkit")
    command = [ncu, "--csv", "--page", "raw", "--profile-from-start", "off"]
    for section in SECTIONS:
        command += ["--section", section]
    command += [sys.executable, str(Path(__file__).resolve()), "--target", *options]
    done = subprocess.run(command, capture_output=True, text=True)
    text = done.stdout + done.stderr
    if "ERR_NVGPUCTRPERM" in text:
        raise ProfileError(
            "this user may not read the GPU's performance counters (ERR_NVGPUCTRPERM): run as "
            "root, or load the driver with NVreg_RestrictProfilingToAdminUsers=0"
        )
    launches = parse(done.stdout)
    if done.returncode != 0 or len(launches) != len(cases):
        last = "\n".join(text.strip().splitlines()[-8:])
        raise ProfileError(
            f"ncu ended with {done.returncode} and {len(launches)} profiles of "
            f"{len(cases)}:\n{last}"
        )
    if raw:
        raw.write_text(done.stdout)
    return [
        {
            "kernel": case.kernel,
            "shape": [BATCH_SIZE, case.heads, SEQLEN, case.head_dim],
            "causal": case.causal,
            "device": metrics.get("device__attribute_display_name", ("", ""))[0],
            "commit": commit,
            "metrics": pick(metrics),
        }
        for case, metrics in zip(cases, launches, strict=True)
    ]


def parse(text: str) -> list[dict[str, tuple[str, str]]]:
    """The value and unit of each launch metric, from ncu's raw page: names, units, values."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    rows = list(csv.reader(io.StringIO("\n".join(lines))))
    if len(rows) < 3 or "ID" not in rows[0]:
        return []
    names, units, *launches = rows
    return [
        {
            name: (value, unit)
            for name, value, unit in zip(names, values, units, strict=False)
            if name
        }
        for values in launches
    ]


def pick(metrics: dict[str, tuple[str, str]]) -> dict[str, Any]:
    """The metrics asked for, in the order of PICKED; the largest stalls first."""
    picked: dict[str, Any] = {}
    for pattern, name in PICKED:
        found = []
        for metric, (value, unit) in metrics.items():
            match = re.fullmatch(pattern, metric)
            number = _number(value)
            if match is None or number is None:
                continue
            words = ((group or "").replace("_op_", " ") for group in match.groups())
            if not (name.startswith("issued") and number == 0):
                found.append((name.format(*words), number, unit))
        if "stall" in pattern:
            found.sort(key=lambda entry: -entry[1])
        for label, number, unit in found:
            picked.setdefault(label, {"value": number, "unit": unit})
    return picked


def _number(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def show(entry: dict[str, Any]) -> None:
    """As a table."""
    mask = "causal" if entry["causal"] else "full"
    print(f"{entry['kernel']} {tuple(entry['shape'])} {mask}")
    for name, figure in entry["metrics"].items():
        if not (name.startswith("stall") and figure["value"] < 0.02):
            print(f"  {figure['value']:14.6g} {figure['unit']:<12} {name}")
    print(flush=True)


def main() -> int:
    """3 if there can be no profile here."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernel", default="wmma")
    parser.add_argument("--head-dim", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--causal", nargs="?", const="yes", default="no", choices=MASKS)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--commit", metavar="SHA", help="where there is no git")
    parser.add_argument("--raw", type=Path, metavar="FILE", help="keep everything that ncu said")
    parser.add_argument("--target", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    cases = [
        Case(args.kernel, head_dim, causal)
        for head_dim in args.head_dim
        for causal in MASKS[args.causal]
    ]
    if args.target:
        target(cases)
        return 0
    options = ["--kernel", args.kernel, "--causal", args.causal]
    options += ["--head-dim", *map(str, args.head_dim)]
    try:
        entries = profile(cases, options, args.raw, environment.git_state(args.commit)["sha"])
    except ProfileError as error:
        print(f"ncu.py: {error}", file=sys.stderr)
        return 3
    for entry in entries:
        show(entry)
    if args.json:
        args.json.write_text(json.dumps(entries, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
