"""The model's figures as JSON and as the tables of ADA.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from sass_model.calibrate import Comparison, summary
from sass_model.devices import DEVICES, Device
from sass_model.kernels import Kernel
from sass_model.predict import Pace, Prediction, Problem, quantisation_seconds
from sass_model.sass import WARP_LANES
from sass_model.simulate import PIPES, Run

Row = tuple[Device, Problem, Kernel, Prediction, bool]  # the last: the plan's choice
Document = dict[str, Any]  # as document() makes it


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A markdown table."""
    lines = [f"| {' | '.join(line)} |" for line in (headers, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(headers), *lines[1:]])


def _rows_of_a_tile(shape: dict[str, Any]) -> str:
    rows = shape["block_m"] * shape["key_groups"] // shape["num_warps"]
    return f"{shape['num_warps']} × {rows} × {shape['block_n']}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f}%"


def _shape_text(entry: dict[str, Any]) -> str:
    """A problem in words: "(1, 8, 512, 64) causal"."""
    shape = ", ".join(map(str, entry["shape"]))
    return f"({shape}){' causal' if entry['causal'] else ''}"


_NAMED = ("HMMA", "MUFU", "FFMA", "FADD", "LDSM", "LDGSTS")
_NAMED_8_BIT = ("IMMA", "QMMA", "MUFU", "FFMA", "FADD", "F2FP", "PRMT", "LDSM", "LDGSTS")


def counts_table(document: Document, names: Sequence[str] = _NAMED) -> str:
    """Instructions of the long loops for Ada, per warp and tile."""
    rows = []
    for kernel in document["kernels"]:
        if kernel["arch"] != "sm_89":
            continue
        shape, counts = kernel["tile"], kernel["instructions"]
        named = [counts.get(name, 0) for name in names]
        total = sum(counts.values())
        tile = _rows_of_a_tile(shape)
        others = [str(total - sum(named)), str(total), f"{kernel['smem_port_bytes'] // 1024} KB"]
        rows.append([kernel["kernel"], tile, *map(str, named), *others])
    headers = ["kernel", "warps × rows × keys", *names, "others", "issue slots", "smem port"]
    return table(headers, rows)


def loops_table(document: Document) -> str:
    """Clocks of a tile and what is busy, SM full of blocks; without the general kernel."""
    gpus = ("L4", "RTX 4090")
    tiles = {(tile["gpu"], tile["kernel"]): tile for tile in document["tiles"]}
    rows = []
    for name in (tile["kernel"] for tile in document["tiles"] if tile["gpu"] == gpus[0]):
        if name.endswith("general"):
            continue
        cells = []
        for gpu in gpus:
            tile = tiles[gpu, name]
            full, blocks = tile["by_resident_blocks"][-1], len(tile["by_resident_blocks"])
            turns = _percent(tile["tensor_taking_turns"])
            cells.append(f"{full['clocks'] / blocks:.0f}")
            cells.append(f"{_percent(full['busy']['tensor'])} ({turns})")
        loops = tiles[gpus[0], name]["by_resident_blocks"]
        busy = ", ".join(_percent(loops[-1]["busy"][p]) for p in ("issue", "mufu", "memory"))
        rows.append([name, str(len(loops)), *cells, busy])
    headers = ["kernel", "blocks per SM"]
    for gpu in gpus:
        headers += [f"{gpu}: clocks per tile", "tensor"]
    return table([*headers, f"issue, MUFU, shared memory on {gpus[0]}"], rows)


def predictions_table(document: Document) -> str:
    """Problems by GPU: every variant, the plan's own marked."""
    cells = [
        [
            row["gpu"],
            _shape_text(row),
            row["variant"] + (" (plan)" if row["planned"] else ""),
            f"{row['microseconds']:.4g} us",
            _percent(row["peak_share"]),
            row["bound"],
        ]
        for row in document["predictions"]
    ]
    return table(["GPU", "(B,H,S,D)", "variant", "time", "of tensor peak", "bound"], cells)


def rates_table(document: Document) -> str:
    """Problems by GPU, with the operations per second that papers tell.

    In brackets: with the time that it takes to quantise k and v before.
    """
    cells = []
    for row in document["predictions"]:
        problem = Problem(*row["shape"], row["causal"])
        rate = f"{problem.flops / row['microseconds'] / 1e6:.0f}"
        if row.get("quantisation_microseconds"):
            whole = row["microseconds"] + row["quantisation_microseconds"]
            rate += f" ({problem.flops / whole / 1e6:.0f})"
        cells.append(
            [
                row["gpu"],
                _shape_text(row),
                row["variant"],
                f"{row['microseconds']:.4g} us",
                rate,
                _percent(row["peak_share"]),
                row["bound"],
            ]
        )
    headers = ["GPU", "(B,H,S,D)", "variant", "time", "TFLOP/s", "of tensor peak", "bound"]
    return table(headers, cells)


def text_8_bit(document: Document) -> str:
    """The tables of a family that computes in 8 bits."""
    tables = [counts_table(document, _NAMED_8_BIT), loops_table(document), rates_table(document)]
    return "\n\n".join(tables)


def text_large_heads(document: Document) -> str:
    """The tables of wmma_halves."""
    return "\n\n".join(make(document) for make in (counts_table, loops_table, rates_table))


def summary_table(document: Document) -> str:
    """A line per GPU and problem: the plan's choice, and a faster variant if there is one."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in document["predictions"]:
        groups.setdefault((row["gpu"], _shape_text(row)), []).append(row)
    cells = []
    for (gpu, shape), group in groups.items():
        (planned,) = (row for row in group if row["planned"])
        fastest = min(group, key=lambda row: row["microseconds"])
        gain = planned["microseconds"] / fastest["microseconds"] - 1
        other = f"{fastest['variant']}, {fastest['microseconds']:.4g} us"
        cells.append(
            [
                gpu,
                shape,
                planned["variant"],
                f"{planned['microseconds']:.4g} us",
                _percent(planned["peak_share"]),
                planned["bound"],
                other if gain > 0.02 else "",
            ]
        )
    headers = ["GPU", "(B,H,S,D)", "plan", "time", "of tensor peak", "bound", "faster"]
    return table(headers, cells)


def calibration_text(document: Document) -> str:
    """One line on the error, and the cases."""
    found = document["calibration"]
    rows = [
        [
            _shape_text(case),
            case["kernel"],
            f"{case['measured_us']:.4g} us",
            f"{case['predicted_us']:.4g} us",
            f"{100 * (case['predicted_us'] / case['measured_us'] - 1):+.1f}%",
        ]
        for case in found["cases"]
    ]
    head = (
        f"{len(rows)} cases on an H200: predicted over measured {found['geometric_mean']:.3f} "
        f"(geometric mean), root mean square {100 * found['rms']:.1f}%, worst "
        f"{100 * found['worst']:+.1f}%.\n\n"
    )
    text = head + table(["(B,H,S,D)", "kernel", "measured", "predicted", "error"], rows)
    if found["kernels_changed_since_measured"]:
        text += "\n\nThe kernels have changed since: part of the error is theirs."
    return text


def published_table(document: Document) -> str:
    """Published shares of the tensor peak beside those of the model's long loop."""
    rows = [
        [x["name"], x["device"], f"{100 * x['share']:.1f}%", f"{100 * x['predicted_share']:.1f}%"]
        for x in document["calibration"]["published"]
    ]
    return table(["kernel", "GPU", "published", "long loop by the model"], rows)


def text(document: Document) -> str:
    """All tables."""
    tables = [counts_table, loops_table, summary_table, predictions_table]
    if document["calibration"]["cases"]:
        tables.append(calibration_text)
    if document["calibration"]["published"]:
        tables.append(published_table)
    return "\n\n".join(make(document) for make in tables)


def _port_bytes(kernel: Kernel) -> int:
    """The bytes that a warp's tile moves through the shared memory's port."""
    main = kernel.paths.main
    return sum(
        i.bytes_per_lane * WARP_LANES
        for i in main
        if i.name in ("LDSM", "LDGSTS") and not i.never_runs
    )


def document(
    kernels: Sequence[Kernel],
    paces: dict[tuple[str, str], Pace],
    turns: dict[tuple[str, str], Run],
    rows: Sequence[Row],
    comparisons: Sequence[Comparison],
    changed_since_measured: bool,
    published: Sequence[dict[str, Any]],
    about: dict[str, Any],
) -> Document:
    """Everything, for model/; `turns` has the long loops where warps take turns, if known."""
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
                "smem_port_bytes": _port_bytes(k),
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
                "tensor_taking_turns": (
                    round(turns[gpu, kernel].busy["tensor"], 4) if (gpu, kernel) in turns else None
                ),
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
                "quantisation_microseconds": round(1e6 * quantisation_seconds(problem, device), 2),
            }
            for device, problem, kernel, prediction, planned in rows
        ],
        "calibration": {
            **(summary(list(comparisons)) if comparisons else {}),
            "kernels_changed_since_measured": changed_since_measured,
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
