"""Measures the cost of warp instructions on the GPU at hand, beside the one that the model of Ada
takes.

    python research/rates.py --build build/rates          # compiles rates/rates.cu for sm_90a
    build/rates > rates.json                              # on an H200: seconds, without Python
    python research/rates.py --measured rates.json --json research/steps/h200-rates.json

rates.cu measures, by clock64, the clocks that an instruction keeps a quarter of a multiprocessor
busy, with 1, 2 and 4 warps on it, and the clocks until its result is there. Then a tile of 8-bit
attention in small: INT8 products, softmax, P V of integers, by which blocks a multiprocessor has.
The last command puts beside each what sass_model predicts of the same machine code: the largest sum
of clocks over pipes or issue slots, and of the tile what running it clock by clock gives.

Needs nvcc, cuobjdump and nvdisasm; the program itself nothing but a driver.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from sass_model import kernels
from sass_model.devices import DEVICES, Device, use_of
from sass_model.report import table
from sass_model.sass import Flow, Instruction, parse
from sass_model.simulate import simulate

SOURCE = Path(__file__).resolve().parent / "rates" / "rates.cu"
ARCHS = {"H200": "sm_90a"}
STEPS = 64  # of rates.cu: instructions of a loop
TILE_WARPS = 4
_RATE = re.compile(r"4rateINS_\d+(\w+?)ELi(\d+)EE")


def compile_source(target: Path, arch: str, *options: str) -> None:
    """The program, or by "-cubin" its machine code."""
    command = [kernels.cubins.tool("nvcc"), "-std=c++17", "-O3", f"-arch={arch}", *options]
    subprocess.run([*command, "-o", str(target), str(SOURCE)], check=True)


def loops(arch: str) -> dict[str, list[Instruction]]:
    """The timed loops by the instruction's name in rates.cu, "tile" among them."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "rates.cubin"
        compile_source(cubin, arch, "-cubin")
        for symbol, listing in kernels.cubins.listings(cubin, arch):
            rate = _RATE.search(symbol)
            if rate and rate[2] == "1":  # that of the latency
                continue
            flow = Flow(parse(listing))
            longest = max(flow.loops, key=lambda loop: len(flow.instructions(loop.blocks)))
            found[rate[1] if rate else "tile"] = flow.instructions(sorted(longest.blocks))
    return found


def clocks_by_the_model(loop: list[Instruction], device: Device) -> float:
    """The part of a turn that an instruction takes on the busiest pipe, or of issuing."""
    pipes: dict[str, float] = {"issue": float(len(loop))}
    for i in loop:
        use = use_of(i, device)
        # Shared memory's port serves the four quarters in turn.
        quarters = 4 if use.pipe == "memory" else 1
        pipes[use.pipe] = pipes.get(use.pipe, 0.0) + use.clocks * quarters
    return max(pipes.values()) / STEPS


def opcodes(loop: list[Instruction]) -> str:
    """The names of the instructions that are measured."""
    many = [i.opcode for i in loop]
    return " + ".join(x for x in dict.fromkeys(many) if many.count(x) > STEPS // 2)


def compare(measured: dict[str, Any], code: dict[str, list[Instruction]]) -> dict[str, Any]:
    """The measured costs beside those that the model takes for the same code."""
    (name,) = (name for name in DEVICES if name in measured["gpu"])
    device = DEVICES[name]
    instructions = []
    for entry in measured["instructions"]:
        loop = code[entry["name"]]
        try:
            model: float | None = round(clocks_by_the_model(loop, device), 3)
        except ValueError:  # a product whose rate is not known yet
            model = None
        instructions.append({**entry, "opcode": opcodes(loop), "model_clocks": model})
    tiles = []
    for blocks, clocks in measured["tile"].items():
        run = simulate(code["tile"], device, int(blocks), TILE_WARPS)
        turns = simulate(code["tile"], device, int(blocks), TILE_WARPS, take_turns=True)
        tiles.append(
            {
                "blocks": int(blocks),
                "clocks": clocks,
                "model_clocks": round(run.clocks_per_pass, 1),
                "model_clocks_taking_turns": round(turns.clocks_per_pass, 1),
                "model_busy": {pipe: round(share, 3) for pipe, share in run.busy.items()},
            }
        )
    about = {key: value for key, value in measured.items() if key not in ("instructions", "tile")}
    return {**about, "instructions": instructions, "tile": tiles}


def text(document: dict[str, Any]) -> str:
    """Two tables."""
    rows = []
    for entry in document["instructions"]:
        least, model = min(entry["clocks"].values()), entry["model_clocks"]
        rows.append(
            [
                entry["opcode"],
                *(f"{clocks:.2f}" for clocks in entry["clocks"].values()),
                "-" if model is None else f"{model:.2f}",
                "-" if model is None else f"{100 * (model / least - 1):+.0f}%",
                f"{entry['latency']:.1f}",
            ]
        )
    warps = [f"{n} a scheduler" for n in document["instructions"][0]["clocks"]]
    headers = ["instruction", *warps, "model", "against the least", "latency"]
    tiles = [
        [
            str(tile["blocks"]),
            f"{tile['clocks']:.0f}",
            f"{tile['model_clocks']:.0f}",
            f"{100 * (tile['model_clocks'] / tile['clocks'] - 1):+.1f}%",
            f"{tile['model_clocks_taking_turns']:.0f}",
            f"{100 * tile['model_busy']['tensor']:.0f}%",
        ]
        for tile in document["tile"]
    ]
    tile_headers = ["blocks per SM", "clocks of a tile", "model", "", "taking turns", "tensor"]
    return f"{table(headers, rows)}\n\n{table(tile_headers, tiles)}"


def main() -> int:
    """Build the program, or compare what it measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=Path, metavar="PROGRAM")
    parser.add_argument("--gpu", choices=ARCHS, default="H200")
    parser.add_argument("--measured", type=Path, metavar="JSON", help="what the program printed")
    parser.add_argument("--json", type=Path, help="write the comparison there")
    args = parser.parse_args()
    if args.build:
        args.build.parent.mkdir(parents=True, exist_ok=True)
        compile_source(args.build, ARCHS[args.gpu])
    if args.measured:
        document = compare(json.loads(args.measured.read_text()), loops(ARCHS[args.gpu]))
        print(text(document))
        if args.json:
            args.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
