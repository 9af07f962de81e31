"""The model's figures as JSON and as the tables of DESIGN.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from sass_model.calibrate import Comparison, summary
from sass_model.devices import DEVICES, Device
from sass_model.kernels import Kernel
from sass_model.predict import Pace, Prediction, Problem
from sass_model.simulate import PIPES, Run

Row = tuple[Device, Problem, Kernel, Prediction, bool]  # the last: the plan's choice


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A markdown table."""
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _percent(share: float) -> str:
    return f"{100 * share:.0f}%"


def counts_table(kernels: Sequence[Kernel]) -> str:
    """Instructions of the long loops, per warp and tile."""
    names = ("HMMA", "MUFU", "FFMA", "FADD", "LDSM", "LDGSTS")
    rows = []
    for kernel in kernels:
        counts, main = kernel.paths.counts(), kernel.paths.main
        named = [counts.get(name, 0) for name in names]
        rest = len(main) - sum(named)
        port = sum(
            i.bytes_per_lane * 32 for i in main if i.name in ("LDSM", "LDGSTS") and not i.never_runs
        )
        shape = kernel.shape
        tile = f"{shape.num_warps} × {shape.rows_per_warp} × {shape.block_n}"
        rows.append(
            [kernel.name, tile, *map(str, named), str(rest), str(len(main)), f"{port // 1024} KB"]
        )
    headers = ["kernel", "warps × rows × keys", *names, "others", "issue slots", "smem port"]
    return table(headers, rows)


def loops_table(
    kernels: Sequence[Kernel],
    paces: dict[tuple[str, str], Pace],
    turns: dict[tuple[str, str], Run],
    devices: Sequence[Device],
) -> str:
    """Clocks of a tile and what is busy, with the SM full of blocks."""
    rows = []
    for device in devices:
        for kernel in kernels:
            pace = paces[device.name, kernel.name]
            run = pace.main[-1]
            other = turns[device.name, kernel.name].busy["tensor"]
            rows.append(
                [
                    device.name,
                    kernel.name,
                    str(pace.resident),
                    f"{run.clocks_per_pass / pace.resident:.0f}",
                    _percent(run.busy["tensor"]),
                    _percent(other),
                    *(_percent(run.busy[p]) for p in ("issue", "mufu", "memory")),
                ]
            )
    headers = ["GPU", "kernel", "blocks per SM", "clocks per tile", "tensor", "(taking turns)"]
    return table([*headers, "issue", "MUFU", "smem port"], rows)


def predictions_table(rows: Sequence[Row]) -> str:
    """Problems by GPU: every variant, the plan's own marked."""
    cells = []
    for device, problem, kernel, prediction, planned in rows:
        shape = ", ".join(map(str, problem.shape))
        cells.append(
            [
                device.name,
                f"({shape}){' causal' if problem.causal else ''}",
                kernel.shape.name + (" (plan)" if planned else ""),
                f"{prediction.seconds * 1e6:.4g} us",
                _percent(prediction.peak_share),
                prediction.bound,
            ]
        )
    return table(["GPU", "(B,H,S,D)", "variant", "time", "of tensor peak", "bound"], cells)


def summary_table(rows: Sequence[Row]) -> str:
    """A line per GPU and problem: the plan's choice, and a faster variant if there is one."""
    groups: dict[tuple[str, Problem], list[Row]] = {}
    for row in rows:
        groups.setdefault((row[0].name, row[1]), []).append(row)
    cells = []
    for (gpu, problem), group in groups.items():
        planned = next((row for row in group if row[4]), group[0])
        fastest = min(group, key=lambda row: row[3].seconds)
        gain = planned[3].seconds / fastest[3].seconds - 1
        other = f"{fastest[2].shape.name}, {fastest[3].seconds * 1e6:.4g} us"
        shape = ", ".join(map(str, problem.shape))
        cells.append(
            [
                gpu,
                f"({shape}){' causal' if problem.causal else ''}",
                planned[2].shape.name,
                f"{planned[3].seconds * 1e6:.4g} us",
                _percent(planned[3].peak_share),
                planned[3].bound,
                other if gain > 0.02 else "",
            ]
        )
    headers = ["GPU", "(B,H,S,D)", "plan", "time", "of tensor peak", "bound", "faster"]
    return table(headers, cells)


def calibration_text(comparisons: Sequence[Comparison]) -> str:
    """One line on the error, and the cases."""
    found = summary(list(comparisons))
    rows = [
        [
            f"({', '.join(map(str, c.problem.shape))}){' causal' if c.problem.causal else ''}",
            c.kernel,
            f"{c.measured * 1e6:.4g} us",
            f"{c.predicted * 1e6:.4g} us",
            f"{100 * c.error:+.1f}%",
        ]
        for c in comparisons
    ]
    head = (
        f"{len(rows)} cases on an H200: predicted over measured {found['geometric_mean']:.3f} "
        f"(geometric mean), root mean square {100 * found['rms']:.1f}%, worst "
        f"{100 * found['worst']:+.1f}%.\n\n"
    )
    return head + table(["(B,H,S,D)", "kernel", "measured", "predicted", "error"], rows)


def published_table(found: Sequence[dict[str, Any]]) -> str:
    """Published shares of the tensor peak beside those of the model's long loop."""
    rows = [
        [x["name"], x["device"], f"{100 * x['share']:.1f}%", f"{100 * x['predicted_share']:.1f}%"]
        for x in found
    ]
    return table(["kernel", "GPU", "published", "long loop by the model"], rows)


def document(
    kernels: Sequence[Kernel],
    paces: dict[tuple[str, str], Pace],
    rows: Sequence[Row],
    comparisons: Sequence[Comparison],
    published: Sequence[dict[str, Any]],
    about: dict[str, Any],
) -> dict[str, Any]:
    """Everything, for results/."""
    return {
        **about,
        "devices": {
            d.name: {**asdict(d), "peak_tflops": d.peak_flops / 1e12} for d in DEVICES.values()
        },
        "kernels": [
            {
                "kernel": k.name,
                "arch": k.arch,
                "registers": k.registers,
                "tile": asdict(k.shape),
                "instructions": k.paths.counts(),
                "edge_instructions": len(k.paths.edge),
            }
            for k in kernels
        ],
        "tiles": [
            {
                "gpu": gpu,
                "kernel": kernel,
                "start_clocks": round(pace.start),
                "end_clocks": round(pace.end),
                "by_resident_blocks": [
                    {
                        "clocks": round(main.clocks_per_pass),
                        "edge_clocks": round(edge.clocks_per_pass),
                        "busy": {p: round(main.busy[p], 4) for p in (*PIPES, "issue")},
                    }
                    for main, edge in zip(pace.main, pace.edge, strict=True)
                ],
            }
            for (gpu, kernel), pace in paces.items()
        ],
        "predictions": [
            {
                "gpu": device.name,
                "shape": list(problem.shape),
                "causal": problem.causal,
                "variant": kernel.shape.name,
                "planned": planned,
                "microseconds": round(prediction.seconds * 1e6, 2),
                "peak_share": round(prediction.peak_share, 4),
                "loop_share": round(prediction.loop_share, 4),
                "bound": prediction.bound,
            }
            for device, problem, kernel, prediction, planned in rows
        ],
        "calibration": {
            **(summary(list(comparisons)) if comparisons else {}),
            "cases": [
                {
                    "shape": list(c.problem.shape),
                    "causal": c.problem.causal,
                    "kernel": c.kernel,
                    "measured_us": round(c.measured * 1e6, 2),
                    "predicted_us": round(c.predicted * 1e6, 2),
                }
                for c in comparisons
            ],
            "published": list(published),
        },
    }
