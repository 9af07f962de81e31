"""The decode family's figures as JSON and as the tables of ADA.md."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sass_model.decode import (
    MEASURED_ON,
    SUSTAINED_SHARE,
    TARGET_SHARE,
    Call,
    Plan,
    Prediction,
    in_parts,
    plans,
    predict,
    share_needed,
    sustained,
)
from sass_model.devices import Device
from sass_model.report import Document, table

# The long loop's clocks for a tile by those on an H200, by GPU and variant (kernels.Shape.name).
Slower = dict[tuple[str, str], float]

_FITTED = "contiguous: 1 query, cold"  # at head_dims up to 128
_LENGTHS = "lengths on the device"
_NAMES = {
    "drafts: 8 queries, cold": "8 queries",
    f"pages: {_LENGTHS}, cold": _LENGTHS,
    f"eight_bit: {_LENGTHS}, cold": _LENGTHS,
    f"eight_bit: float8_e4m3fn cache, {_LENGTHS}, cold": f"8-bit cache, {_LENGTHS}",
}

CALLS = (
    Call(1, 32, 8, 1024, 128),
    Call(1, 32, 8, 8192, 128),
    Call(1, 32, 8, 131072, 128),
    Call(8, 32, 8, 4096, 128),
    Call(8, 32, 8, 32768, 128, key_bytes=1, lengths_on_device=True),
)
TARGET = CALLS[1]  # 33 MB of K and V


@dataclass(frozen=True)
class Measured:
    """A call that was timed on an H200."""

    call: Call
    seconds: float
    fitted: bool  # whether the model's constants are fitted to it
    what: str  # beside one query


def measured_calls(path: Path) -> list[Measured]:
    """The decode family's calls in a results file, with K and V cold, without pages."""
    found = []
    for result in json.loads(path.read_text())["results"]:
        ours = result["contestant"] == "dlattn auto" and result["plan"].startswith("decode:")
        name = result["variant"]
        if not ours or result["wrong"] or not (name == _FITTED or name in _NAMES):
            continue
        batch, heads, keys, head_dim = result["shape"]
        call = Call(
            batch,
            heads,
            result["num_heads_kv"],
            keys,
            head_dim,
            key_bytes=1 if "float8" in name else 2,
            queries=8 if "8 queries" in name else 1,
            lengths_on_device=_LENGTHS in name,
        )
        fitted = name == _FITTED and head_dim <= 128
        found.append(Measured(call, float(result["seconds"]), fitted, _NAMES.get(name, "")))
    return found


def _what(call: Call) -> str:
    """A call beside its shape."""
    names = ["8-bit cache"] if call.key_bytes == 1 else []
    return ", ".join([*names, *([_LENGTHS] if call.lengths_on_device else [])])


def _dealt(plan: Plan) -> str:
    """How many thread blocks read how much of how many row blocks."""
    if plan.whole:
        return f"{plan.row_blocks} blocks, a row block each"
    parts = plan.parts
    longest = max(sum(own) for own in parts)
    if plan.part_tiles:
        return f"{len(parts)} blocks, a part of {longest} tiles or less each"
    return f"{len(parts)} blocks, {longest} tiles or less each"


def variant_of(call: Call, plan: Plan) -> str:
    """As kernels.Shape names it."""
    return plan.variant + ("_8_bit" if call.key_bytes == 1 else "")


def _figures(call: Call, device: Device, prediction: Prediction) -> dict[str, Any]:
    return {
        "microseconds": round(prediction.seconds * 1e6, 2),
        "fixed_microseconds": round(prediction.fixed * 1e6, 2),
        "bandwidth_share": round(prediction.share(call, device), 4),
        "bound": prediction.bound,
        "block_gb_per_s": round(prediction.block_bytes_per_second / 1e9, 1),
        "blocks": prediction.blocks,
        "bytes_on_their_way": round(prediction.bytes_on_their_way),
        "bytes_needed": round(prediction.bytes_needed),
    }


def document(
    devices: Sequence[Device], slower: Slower, measured: Sequence[Measured], about: dict[str, Any]
) -> Document:
    """Everything, for model/. `slower`: as decode.key_seconds() has it."""
    asked = [(device, call) for device in devices for call in CALLS]
    rows = []
    for (device, call), plan in zip(asked, plans(asked), strict=True):
        times = slower[device.name, variant_of(call, plan)]
        prediction = predict(call, plan, device, slower=times)
        nominal = predict(call, plan, device, slower=times, bandwidth=device.dram_bytes_per_second)
        entry = {
            "gpu": device.name,
            "call": call.text,
            "what": _what(call),
            "bytes": call.bytes,
            "plan": asdict(plan),
            "dealt": _dealt(plan),
            "slower": round(times, 3),
            **_figures(call, device, prediction),
            "at_nominal": _figures(call, device, nominal),
        }
        if plan.whole:
            # The time with a thread block on each SM, and the clock below which thread blocks are
            # too few for the bandwidth.
            parts = in_parts(plan, device)
            entry["in_parts"] = _figures(call, device, predict(call, parts, device, slower=times))
            at_a_time = min(prediction.blocks, plan.resident * device.num_sms)
            reached = at_a_time * prediction.block_bytes_per_second
            busy = min(1.0, sustained(device) / reached)
            entry["enough_blocks_above_ghz"] = round(busy * device.clock_hz / 1e9, 2)
        if call == TARGET:
            needed = share_needed(call, prediction, device)
            entry["share_needed"] = round(needed, 4) if needed < math.inf else None
        rows.append(entry)
    found = plans([(MEASURED_ON, case.call) for case in measured])
    cases = [
        {
            "call": case.call.text,
            "what": case.what,
            "fitted": case.fitted,
            "dealt": _dealt(plan),
            "measured_us": round(case.seconds * 1e6, 2),
            "predicted_us": round(predict(case.call, plan, MEASURED_ON).seconds * 1e6, 2),
        }
        for case, plan in zip(measured, found, strict=True)
    ]
    return {
        **about,
        "sustained_share": SUSTAINED_SHARE,
        "target_share": TARGET_SHARE,
        "predictions": rows,
        "calibration": {"rms": round(rms(cases), 4), "cases": cases},
    }


def rms(cases: Sequence[dict[str, Any]]) -> float:
    """Root mean square error, relative, of the calls that the constants are fitted to."""
    logs = [math.log(x["predicted_us"] / x["measured_us"]) for x in cases if x["fitted"]]
    return math.sqrt(sum(x * x for x in logs) / len(logs))


def _percent(share: float) -> str:
    return f"{100 * share:.0f}%"


def _named(entry: dict[str, Any]) -> str:
    return entry["call"] + (f" {entry['what']}" if entry["what"] else "")


def predictions_table(made: Document) -> str:
    """A line per GPU and call; in brackets with the data sheet's bandwidth."""
    rows = []
    for row in made["predictions"]:
        best = row["at_nominal"]
        parts = row.get("in_parts")
        rows.append(
            [
                row["gpu"],
                _named(row),
                row["dealt"],
                f"{row['microseconds']:.4g} us ({best['microseconds']:.4g})",
                f"{row['fixed_microseconds']:.1f} us",
                f"{_percent(row['bandwidth_share'])} ({_percent(best['bandwidth_share'])})",
                row["bound"],
                f"{parts['microseconds']:.4g} us" if parts else "",
            ]
        )
    headers = ["GPU", "call", "dealt to", "time", "fixed", "of bandwidth", "bound", "in parts"]
    return table(headers, rows)


def target_table(made: Document) -> str:
    """The time that the call of 33 MB of K and V is allowed, takes, and would need."""
    rows = []
    for row in made["predictions"]:
        if "share_needed" not in row:
            continue
        bare = row["microseconds"] * row["bandwidth_share"]
        allowed = bare / made["target_share"]
        needed = row["share_needed"]
        reachable = needed is not None and needed <= 1
        rows.append(
            [
                row["gpu"],
                f"{bare:.1f} us",
                f"{allowed:.1f} us",
                f"{row['microseconds']:.1f} us",
                f"{row['fixed_microseconds']:.1f} of {allowed - bare:.1f} us",
                f"{100 * needed:.1f}%" if reachable else "more than 100%",
                f"{row['bytes_on_their_way'] / 1e6:.2f} of {row['bytes_needed'] / 1e6:.2f} MB",
            ]
        )
    headers = [
        "GPU",
        "bytes over bandwidth",
        "allowed",
        "predicted",
        "fixed, of what is allowed for it",
        "reads must reach",
        "on their way, of what is needed",
    ]
    return table(headers, rows)


def calibration_table(made: Document) -> str:
    """Calls that were measured on an H200."""
    rows = [
        [
            _named(case),
            "yes" if case["fitted"] else "no",
            f"{case['measured_us']:.4g} us",
            f"{case['predicted_us']:.4g} us",
            f"{100 * (case['predicted_us'] / case['measured_us'] - 1):+.1f}%",
        ]
        for case in made["calibration"]["cases"]
    ]
    return table(["call", "fitted", "measured", "predicted", "error"], rows)


def text(made: Document) -> str:
    """All tables."""
    return "\n\n".join(make(made) for make in (target_table, predictions_table, calibration_table))
