"""Predict the speed on Ada GPUs of the kernels of mma.sync, and of decode, from their machine code.

python research/ada_model.py                                  # compiles what it needs, prints
DLATTN_BUILD_DIR=build python research/ada_model.py           # reads a build's libdlattn.so
python research/ada_model.py --json research/model/ada.json
python research/ada_model.py --print research/model/ada.json   # the output of that run
python research/ada_model.py --family wmma8                     # the 8-bit kernels
python research/ada_model.py --family wmma_halves               # head dims above 256
python research/ada_model.py --family decode                    # few queries over many keys
python research/ada_model.py --family backward --cubins ... --peers ...  # gradients, of cubins

Needs cuobjdump and nvdisasm (CUDA toolkit or PyPI), a C++ compiler, and nvcc for architectures that
the library has no code for.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from sass_model import backward, calibrate, decode, decode_report, kernels, report
from sass_model.devices import DEVICES, Device
from sass_model.predict import Pace, Problem, pace, predict
from sass_model.simulate import Run, simulate

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"  # measured, which the model is held against
ADA = [d for d in DEVICES.values() if d.arch == "sm_89"]
TILE_OF_DECODE = 128  # head_dim, of all calls that are predicted
_TEXT = {"wmma": report.text, "wmma8": report.text_8_bit, "decode": decode_report.text}
_TEXT["wmma_halves"] = report.text_large_heads
_TEXT["backward"] = backward.loops_table


def problems() -> list[Problem]:
    """(1,8,512,64), small grids, and the sweep's shapes at 512 and 4096 tokens."""
    found = []
    for causal in (False, True):
        found += [Problem(1, 8, 512, 64, causal), Problem(2, 8, 2048, 64, causal)]
        for head_dim in (64, 128, 256):
            for seqlen in (512, 4096):
                found.append(Problem(16384 // seqlen, 2048 // head_dim, seqlen, head_dim, causal))
    return found


def problems_8_bit() -> list[Problem]:
    """Long sequences, as the papers on 8-bit attention have them."""
    return [
        Problem(1, 4096 // head_dim, seqlen, head_dim, causal, input_bytes=1)
        for head_dim in (64, 128, 256)
        for seqlen in (4096, 8192)
        for causal in (False, True)
    ]


def problems_large_heads() -> list[Problem]:
    """Prompts of 4096 and 16384 tokens at the largest head_dim."""
    shapes = [(1, 16, 4096, 512), (1, 16, 16384, 512), (4, 16, 1024, 512)]
    return [Problem(*shape, causal) for shape in shapes for causal in (False, True)]


def rows_of(
    found: list[kernels.Kernel], paces: dict[tuple[str, str], Pace], devices: list[Device]
) -> list[report.Row]:
    """Every variant for every problem."""
    asked = [(device, problem) for device in devices for problem in problems()]
    planned = kernels.planned_variants([(d, p.shape, p.causal) for d, p in asked])
    rows = []
    for (device, problem), variant in zip(asked, planned, strict=True):
        for kernel in found:
            fast = kernel.shape.name != "general"  # which serves what the others lack
            if fast and kernel.shape.head_dim == problem.head_dim:
                prediction = predict(kernel, paces[device.name, kernel.name], device, problem)
                rows.append((device, problem, kernel, prediction, kernel.shape.name == variant))
    return rows


def rows_of_all(
    found: list[kernels.Kernel],
    paces: dict[tuple[str, str], Pace],
    devices: list[Device],
    problems: list[Problem],
) -> list[report.Row]:
    """Every kernel for every problem, that for 8-bit integers with what quantises before it."""
    return [
        (
            device,
            problem,
            kernel,
            predict(kernel, paces[device.name, kernel.name], device, problem),
            True,
        )
        for device in devices
        for asked in problems
        for kernel in found
        if kernel.shape.head_dim == asked.head_dim
        for problem in [replace(asked, quantises=kernel.shape.name == "int8")]
    ]


def in_clocks(device: Device) -> Device:
    """The properties that matter to a multiprocessor alone: L4 and L40S are the same then."""
    return replace(
        device, name="", num_sms=0, clock_hz=0.0, dram_bytes_per_second=0.0, l2_bytes=0, source=""
    )


def pace_and_turns(kernel: kernels.Kernel, device: Device) -> tuple[Pace, Run]:
    """The clocks of a kernel's pieces, and its long loop where warps take turns."""
    try:
        own = pace(kernel, device)
        shape = kernel.shape
        turns = simulate(
            kernel.paths.main,
            device,
            own.resident,
            shape.num_warps,
            meeting=shape.num_warps // shape.key_groups,
            take_turns=True,
        )
    except ValueError as error:
        raise ValueError(f"{kernel.name}, {kernel.arch}: {error}") from error
    return own, turns


def paces_of(
    found: list[kernels.Kernel], devices: list[Device]
) -> tuple[dict[tuple[str, str], Pace], dict[tuple[str, str], Run]]:
    """The same of every kernel, on all cores."""
    asked = {(in_clocks(d), kernel.name): (kernel, d) for d in devices for kernel in found}
    with ProcessPoolExecutor() as pool:
        runs = [pool.submit(pace_and_turns, kernel, device) for kernel, device in asked.values()]
        done = {key: run.result() for key, run in zip(asked, runs, strict=True)}
    paces, turns = {}, {}
    for device in devices:
        for kernel in found:
            own, turn = done[in_clocks(device), kernel.name]
            paces[device.name, kernel.name], turns[device.name, kernel.name] = own, turn
    return paces, turns


def slower_loops(loops: list[kernels.Kernel], devices: list[Device]) -> decode_report.Slower:
    """The clocks of decode's long loops by those of the same code on an H200."""
    found = {}
    for kernel in loops:
        measured = decode.loop_clocks(kernel, decode.MEASURED_ON)
        for device in devices:
            clocks = decode.loop_clocks(kernel, device)
            found[device.name, kernel.shape.name] = clocks / measured
    return found


def changed_since(path: Path) -> bool:
    """Whether the kernels have changed since a results file was measured."""
    sha = json.loads(path.read_text())["git"]["sha"]
    command = ["git", "-C", str(ROOT), "diff", "--quiet", sha, "--", "src/cuda/forward/wmma"]
    return subprocess.run(command, stderr=subprocess.DEVNULL).returncode != 0


def about() -> dict[str, Any]:
    """Where the figures come from."""
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    sha = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    nvcc = subprocess.run(
        [kernels.cubins.tool("nvcc"), "--version"], capture_output=True, text=True
    ).stdout
    release = re.search(r"release ([\d.]+)", nvcc)
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "git": sha,
        "nvcc": release[1] if release else None,
        "made_by": "research/ada_model.py: a model, no measurement",
    }


def main() -> int:
    """Print the tables; write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--library",
        type=Path,
        nargs="+",
        default=[],
        help="libdlattn.so, or several with code of different GPUs; else DLATTN_BUILD_DIR's",
    )
    parser.add_argument("--family", choices=tuple(_TEXT), default="wmma")
    parser.add_argument("--tiles", type=int, nargs="+", help="head_dim tiles; all by default")
    parser.add_argument("--json", type=Path, help="write everything there")
    parser.add_argument("--published", type=Path, help="folder of listings, see calibrate.py")
    parser.add_argument("--cubins", type=Path, nargs="+", default=[], help="of backward, sm_89")
    parser.add_argument("--peers", type=Path, nargs="+", default=[], help="of FlashAttention-2")
    parser.add_argument("--print", type=Path, help="print such a JSON instead", dest="made")
    args = parser.parse_args()
    if args.made:
        made = json.loads(args.made.read_text())
        print(_TEXT[args.family](made))
        return 0

    if args.family == "backward":
        document = backward.document(args.cubins, args.peers, about())
        print(backward.loops_table(document))
        _write(document, args.json)
        return 0

    tiles = [TILE_OF_DECODE] if args.family == "decode" else args.tiles
    found = kernels.load("sm_89", args.library, tiles, args.family)
    if not found:
        names = ", ".join(map(str, args.library))
        parser.error(f"{names}: no code for sm_89 of {args.family}; without --library it is made")

    if args.family == "decode":
        measured = decode_report.measured_calls(ROOT / "research/model/decode-calls.json")
        document = decode_report.document(ADA, slower_loops(found, ADA), measured, about())
        print(decode_report.text(document))
        _write(document, args.json)
        return 0

    if args.family in ("wmma8", "wmma_halves"):
        found = [kernel for kernel in found if not kernel.shape.name.endswith("general")]
        paces, turns = paces_of(found, ADA)
        asked = problems_8_bit() if args.family == "wmma8" else problems_large_heads()
        rows = rows_of_all(found, paces, ADA, asked)
        document = report.document(found, paces, turns, rows, [], False, [], about())
        print(_TEXT[args.family](document))
        _write(document, args.json)
        return 0

    measured_on = DEVICES[calibrate.MEASURED_ON]
    hopper = kernels.load(measured_on.arch, args.library, args.tiles)
    if not hopper:
        print(
            f"no code for {measured_on.arch} of wmma: nothing to compare with measured times",
            file=sys.stderr,
        )
    paces, turns = paces_of(found, ADA)
    hopper_paces = {name: p for (_, name), p in paces_of(hopper, [measured_on])[0].items()}
    cases = []
    for name in ("h200-sweep.json", "h200-basic.json"):
        cases += calibrate.measured_cases(RESULTS / name)
    comparisons = calibrate.compare(cases, hopper, hopper_paces)
    published = calibrate.compare_published(args.published) if args.published else []
    rows = rows_of(found, paces, ADA)

    changed = changed_since(RESULTS / "h200-sweep.json")
    paces |= {(measured_on.name, name): p for name, p in hopper_paces.items()}
    document = report.document(
        [*found, *hopper], paces, turns, rows, comparisons, changed, published, about()
    )
    print(report.text(document))
    _write(document, args.json)
    return 0


def _write(document: report.Document, path: Path | None) -> None:
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
