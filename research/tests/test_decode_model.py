"""The model of decode's time: how keys are dealt, how thread blocks share DRAM, fixed costs."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import ada_model
from sass_model import decode, decode_report, kernels
from sass_model.decode import Call, Plan, predict, stream_seconds
from sass_model.devices import DEVICES

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "research/model/ada-decode.json"
MEASURED = ROOT / "research/model/decode-calls.json"
L4, L40S, RTX_4090, H200 = (DEVICES[name] for name in ("L4", "L40S", "RTX 4090", "H200"))

# One sequence of 8192 keys on 16 SMs: two parts of 64 tiles of each of 8 row blocks.
PLAN = Plan("rows16", 64, 3, 98816, 1, 16, 8, 128, 4, whole=False, part_tiles=64)


def committed() -> dict[str, Any]:
    made: dict[str, Any] = json.loads(RESULTS.read_text())
    return made


def row_of(gpu: str, call: Call) -> dict[str, Any]:
    (row,) = (x for x in committed()["predictions"] if (x["gpu"], x["call"]) == (gpu, call.text))
    return row


def test_bytes_are_those_of_keys_and_values() -> None:
    assert decode_report.TARGET.bytes == 2 * 8 * 8192 * 128 * 2
    assert decode_report.TARGET.text == "(1,32/8,8192,128)"
    assert Call(16, 32, 32, 4096, 128).text == "(16,32,4096,128)"
    assert replace(decode_report.TARGET, key_bytes=1).bytes == decode_report.TARGET.bytes // 2


def test_parts_of_one_size() -> None:
    assert PLAN.parts == [[64]] * 16
    last_is_shorter = replace(PLAN, grid=24, part_tiles=50)
    assert last_is_shorter.parts == [[50], [50], [28]] * 8
    assert replace(PLAN, whole=True).parts == [[128]] * 8


def test_tiles_one_by_one() -> None:
    """As schedule.cuh walks: each row block has `begin` units before its tiles."""
    by_tiles = replace(PLAN, grid=3, row_blocks=2, row_tiles=10, begin=4, part_tiles=0)
    # 28 units, 10 a thread block: 4 + 6 | 4, 4 + 2 | 8.
    assert by_tiles.parts == [[6], [4, 2], [8]]
    # Beginning a row block may be all that a thread block has of it.
    assert replace(by_tiles, grid=7).parts == [[4], [4], [2], [2], [4], [4]]
    for grid in range(1, 40):
        assert sum(map(sum, replace(by_tiles, grid=grid).parts)) == 20


def test_thread_blocks_share_the_bandwidth() -> None:
    assert stream_seconds([[100.0]] * 4, 4, 1000.0, 100.0) == pytest.approx(4.0)
    # Each alone reads no faster than it can.
    assert stream_seconds([[100.0]] * 4, 4, 10.0, 100.0) == pytest.approx(10.0)
    # When the short one is done the long one has what it left.
    assert stream_seconds([[100.0], [300.0]], 2, 1000.0, 100.0) == pytest.approx(4.0)
    # Alone it reads no faster than it can.
    assert stream_seconds([[100.0], [300.0]], 2, 60.0, 100.0) == pytest.approx(2.0 + 200 / 60)


def test_further_parts_begin_without_a_byte() -> None:
    twice = stream_seconds([[100.0, 100.0]], 1, 1e9, 1e9)
    assert twice == pytest.approx(200 / 1e9 + decode.NEXT_SECONDS)
    # As a thread block does that waits for another one's place.
    assert stream_seconds([[100.0]] * 2, 1, 1e9, 1e9) == pytest.approx(twice)
    # Others read in the meantime.
    hidden = stream_seconds([[1.0, 1.0], [1e4]], 2, 1e9, 1e9)
    assert hidden == pytest.approx(10002 / 1e9)


def test_fixed_costs() -> None:
    """Two launches or one; on Ada each of them takes longer."""
    call, whole = decode_report.TARGET, replace(PLAN, whole=True)
    first, both = decode.FIRST_SECONDS, decode.FIRST_SECONDS + decode.COMBINE_SECONDS
    launch = decode.DEPENDENT_LAUNCH_SECONDS
    assert decode.fixed_seconds(call, whole, H200) == pytest.approx(first)
    assert decode.fixed_seconds(call, PLAN, H200) == pytest.approx(both)
    assert decode.fixed_seconds(call, whole, L4) == pytest.approx(first + launch)
    assert decode.fixed_seconds(call, PLAN, L4) == pytest.approx(both + 2 * launch)
    on_device = replace(call, lengths_on_device=True)
    more = decode.fixed_seconds(on_device, PLAN, L4) - decode.fixed_seconds(call, PLAN, L4)
    assert more == pytest.approx(decode.LENGTHS_SECONDS)


def test_what_bounds() -> None:
    call = decode_report.TARGET
    assert predict(call, PLAN, L4).bound == "DRAM"
    slow = predict(call, PLAN, replace(L4, clock_hz=0.5e9))
    assert slow.bound == "thread blocks"
    assert slow.reading == pytest.approx(call.bytes / 16 / slow.block_bytes_per_second)
    # 4 of 16 thread blocks cannot use what the others leave.
    uneven = replace(PLAN, row_blocks=4, grid=8, row_tiles=256, part_tiles=200)
    assert predict(call, uneven, L40S).bound in ("tail", "thread blocks")
    few = Call(1, 32, 8, 1024, 128)
    plan = replace(PLAN, row_tiles=16, part_tiles=8)
    assert predict(few, plan, L4).bound == "DRAM and fixed costs"
    # A stage that is multiplied is not on its way: with two of one byte latency is all.
    short = replace(PLAN, stages=2, block_n=1, row_tiles=8192, part_tiles=4096)
    held = predict(call, short, L4, slower=0.01)
    assert held.block_bytes_per_second == pytest.approx(512 / (600 / 2.04e9))


def test_the_pace_is_that_of_clocks() -> None:
    call = decode_report.TARGET
    on_h200 = decode.key_seconds(call, PLAN, H200)
    assert on_h200 == pytest.approx(11e-9)
    assert decode.key_seconds(call, PLAN, L4) == pytest.approx(on_h200 * 1.85 / 2.04)
    assert decode.key_seconds(call, PLAN, L4, 2.0) == pytest.approx(2 * on_h200 * 1.85 / 2.04)
    of_8_bits = replace(call, key_bytes=1)
    assert decode.key_seconds(of_8_bits, PLAN, H200) == pytest.approx(0.65 * on_h200)


def test_measured_calls_are_read() -> None:
    found = decode_report.measured_calls(MEASURED)
    assert [x.call for x in found if not x.fitted] == [
        Call(4, 16, 4, 4096, 256),
        Call(8, 32, 8, 4096, 128, queries=8),
        Call(8, 32, 8, 4096, 128, lengths_on_device=True),
        Call(8, 32, 8, 32768, 128, lengths_on_device=True),
        Call(8, 32, 8, 32768, 128, key_bytes=1, lengths_on_device=True),
    ]
    assert len(found) == 13
    assert decode_report.TARGET in [x.call for x in found if x.fitted]


def test_constants_are_fitted_to_what_was_measured() -> None:
    """The committed cases are the results file's, and other constants fit them worse."""
    cases = committed()["calibration"]["cases"]
    found = decode_report.measured_calls(MEASURED)
    assert [x["measured_us"] for x in cases] == [round(x.seconds * 1e6, 2) for x in found]
    assert decode_report.rms(cases) == pytest.approx(0.024, abs=0.002)
    for first, combine in ((0.5, 0.0), (-0.5, 0.0), (0.0, 0.5), (0.0, -0.5)):
        moved = [
            {
                **x,
                "predicted_us": x["predicted_us"]
                + first
                + (0.0 if "row block each" in x["dealt"] else combine),
            }
            for x in cases
        ]
        assert decode_report.rms(moved) > decode_report.rms(cases), (first, combine)


def test_committed_figures_are_the_models() -> None:
    """The plans and paces that they were made with."""
    calls = {call.text: call for call in decode_report.CALLS}
    rows = committed()["predictions"]
    assert len(rows) == 3 * len(calls)
    for row in rows:
        device = DEVICES[row["gpu"]]
        call, plan = calls[row["call"]], Plan(**row["plan"])
        found = predict(call, plan, device, slower=row["slower"])
        assert found.seconds * 1e6 == pytest.approx(row["microseconds"], rel=1e-3)
        assert found.share(call, device) == pytest.approx(row["bandwidth_share"], rel=1e-3)
        assert found.bound == row["bound"]
        best = predict(
            call, plan, device, slower=row["slower"], bandwidth=device.dram_bytes_per_second
        )
        assert best.seconds * 1e6 == pytest.approx(row["at_nominal"]["microseconds"], rel=1e-3)
        assert sum(map(sum, plan.parts)) == plan.row_blocks * plan.row_tiles


@pytest.mark.parametrize("device", [L4, L40S, RTX_4090], ids=lambda device: device.name)
def test_the_share_that_reads_must_reach(device: Any) -> None:
    """With it the call comes to the target; there is none where fixed costs alone take too long."""
    call = decode_report.TARGET
    row = row_of(device.name, call)
    plan = Plan(**row["plan"])
    needed = decode.share_needed(call, predict(call, plan, device, slower=row["slower"]), device)
    assert (needed <= 1) == (device is L4)
    if needed <= 1:
        reached = predict(
            call,
            plan,
            device,
            slower=row["slower"],
            bandwidth=needed * device.dram_bytes_per_second,
        )
        assert reached.share(call, device) == pytest.approx(decode.TARGET_SHARE, rel=1e-6)
    else:
        assert row["at_nominal"]["bandwidth_share"] < decode.TARGET_SHARE


def test_what_the_page_says_of_plans() -> None:
    """The times of 8 thread blocks on a slow L4, of parts of one tile, and how many a 4090
    needs."""
    call = decode_report.TARGET
    row = row_of("L4", call)
    plan, slow = Plan(**row["plan"]), replace(L4, clock_hz=1.2e9)
    assert plan.whole and len(plan.parts) == 8 and row["enough_blocks_above_ghz"] == 1.68
    assert predict(call, plan, slow, slower=row["slower"]).seconds * 1e6 == pytest.approx(
        177, abs=0.5
    )
    on_all = decode.in_parts(plan, slow)
    assert len(on_all.parts) == 56
    assert predict(call, on_all, slow, slower=row["slower"]).seconds * 1e6 == pytest.approx(
        133, abs=0.5
    )
    few = decode_report.CALLS[0]
    for device in (L40S, RTX_4090):
        row = row_of(device.name, few)
        plan = Plan(**row["plan"])
        assert plan.part_tiles == 2
        one = predict(few, replace(plan, grid=128, part_tiles=1), device, slower=row["slower"])
        assert one.seconds * 1e6 == pytest.approx(row["microseconds"], rel=1e-3)
    row = row_of("RTX 4090", call)
    assert 25 < decode.sustained(RTX_4090) / (row["block_gb_per_s"] * 1e9) < 26
    for row in committed()["predictions"]:
        assert row["bytes_on_their_way"] > 6 * row["bytes_needed"]


def test_the_page_has_the_committed_figures_of_decode(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        sys, "argv", ["ada_model.py", "--family", "decode", "--print", str(RESULTS)]
    )
    assert ada_model.main() == 0
    printed = capsys.readouterr().out
    page = (ROOT / "research/ADA.md").read_text()
    made = committed()
    for make in (
        decode_report.target_table,
        decode_report.predictions_table,
        decode_report.calibration_table,
    ):
        assert make(made) in printed
        assert make(made) in page


def test_the_page_tells_the_models_constants() -> None:
    page = (ROOT / "research/ADA.md").read_text()
    for told, seconds in (
        ("launch, first byte, end", decode.FIRST_SECONDS),
        ("adding parts up", decode.COMBINE_SECONDS),
        ("lengths on the device", decode.LENGTHS_SECONDS),
        ("each launch without programmatic dependent launch", decode.DEPENDENT_LAUNCH_SECONDS),
        ("each further part of a thread block", decode.NEXT_SECONDS),
    ):
        assert f"| {told} | {seconds * 1e6:.1f} us |" in page


def test_the_kernels_of_decode_are_known() -> None:
    """Those without pages and without score modification, by type of the keys."""
    of_16_bits = (
        "_ZN6dlattn6decode6kernelI6__halfS2_Li128ELi0ELb0ELb0EEEvNS_15AttentionParamsENS0_"
        "11DecodeShapeE"
    )
    known = kernels._SYMBOLS["decode"]
    match = known.fullmatch(of_16_bits)
    assert match and match.groups() == ("S2_", "128", "0")
    match = known.fullmatch(of_16_bits.replace("S2_", "13__nv_fp8_e4m3"))
    assert match and match.groups() == ("13__nv_fp8_e4m3", "128", "0")
    assert not known.fullmatch(of_16_bits.replace("ELb0ELb0E", "ELb1ELb0E"))


@pytest.mark.slow
def test_the_family_is_asked() -> None:
    call = decode_report.TARGET
    asked = [(device, call) for device in (L4, RTX_4090, H200)]
    for (device, _), plan in zip(asked, decode.plans(asked), strict=True):
        assert plan.row_blocks * plan.row_tiles * plan.block_n == 8 * 8192, device.name
        assert plan.smem_bytes <= device.smem_per_sm
        assert sum(map(sum, plan.parts)) == plan.row_blocks * plan.row_tiles
    refused = replace(call, keys=1 << 21)
    with pytest.raises(ValueError, match=r"L4, \(1,32/8,2097152,128\): refused: .*seqlen_k"):
        decode.plans([(L4, refused)])
