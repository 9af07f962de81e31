"""The model of the wmma kernels' speed: its reader of machine code, its rates, its arithmetic."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import ada_model
from sass_model import kernels, report, sass
from sass_model.devices import DEVICES, peak_of, use_of
from sass_model.predict import Pace, Problem, _Walk, blocks_of, dram_seconds, quantisation_seconds
from sass_model.simulate import Run, _Multiprocessor, once, prepare, simulate

ROOT = Path(__file__).resolve().parents[2]
L4 = DEVICES["L4"]


def listing(*lines: str | tuple[str, dict[str, int]]) -> str:
    """As cuobjdump prints it: each line is an instruction and, if wanted, its control word."""
    text = []
    for index, line in enumerate(lines):
        code, control = line if isinstance(line, tuple) else (line, {})
        bits = control.get("stall", 1) | control.get("write", 7) << 5
        bits |= control.get("read", 7) << 8 | control.get("wait", 0) << 11
        text.append(f"        /*{index * 16:04x}*/    {code} ;    /* 0x{index:016x} */")
        text.append(f"                                /* 0x{bits << 41 | index:016x} */")
    return "\n".join(text)


# An outer loop (0x30 to 0x150) over a long loop (0x50 to 0xd0) with a seldom block (0x90, 0xa0),
# then an edge tile with a mask (0x100, 0x110) that it may skip.
NESTED = listing(
    "S2R R0, SR_TID.X",
    "@!P1 EXIT",
    "LDGSTS.E.BYPASS.128 [R5], [R8.64]",
    "ISETP.GE.AND P0, PT, R1, R2, PT",
    "@P0 BRA 0xe0",
    ("HMMA.16816.F32 R16, R4, R8, R16", {"stall": 8}),
    "LDGSTS.E.BYPASS.128 [R5], [R8.64]",
    ("VOTE.ANY P0, P0", {"stall": 4}),
    "@!P0 BRA 0xb0",
    "FMUL R20, R20, R3",
    "FMUL R21, R21, R3",
    "HMMA.16816.F32 R20, R4, R10, R20",
    "ISETP.GT.AND P0, PT, R1, R2, PT",
    "@!P0 BRA P1, 0x50",
    "HMMA.16816.F32 R16, R4, R8, R16",
    "@P3 BRA 0x120",
    "FSEL R16, R16, -INF , P0",
    "FSEL R17, R17, -INF , P0",
    "HMMA.16816.F32 R20, R4, R10, R20",
    "ISETP.GT.AND P0, PT, R1, R2, PT",
    "@!P0 CALL.REL.NOINC 0x160",
    "BRA 0x30",
    "FMUL R16, R16, R3",
    "STG.E.128 [R2.64], R16",
    "@P0 BRA 0x160",
    "EXIT",
    "BRA 0x1a0",
)


def addresses(code: list[sass.Instruction]) -> list[int]:
    return [i.address for i in code]


def test_instructions_are_read() -> None:
    first, second, third = sass.parse(
        listing(
            ("@!P0 LDSM.16.MT88.4 R124, [R146+UR4+0x8000]", {"stall": 3, "write": 1}),
            ("MUFU.EX2 R5, R6", {"wait": 0b100010, "read": 4}),
            "@!PT LDS RZ, [RZ]",
        )
    )
    assert (first.predicate, first.name, first.opcode) == ("@!P0", "LDSM", "LDSM.16.MT88.4")
    assert (first.stall, first.write_scoreboard, first.read_scoreboard) == (3, 1, None)
    assert first.bytes_per_lane == 16
    assert second.waits == (1, 5)
    assert second.read_scoreboard == 4
    assert third.never_runs and not first.never_runs


@pytest.mark.parametrize(
    ("code", "size"),
    [
        ("LDGSTS.E.BYPASS.128 [R5], [R8.64]", 16),
        ("LDGSTS.E.64 [R5], [R8.64]", 8),
        ("LDS R4, [R5]", 4),
        ("STG.E.U16 [R2.64], R4", 2),
        ("LDSM.16.M88.2 R4, [R5]", 8),
    ],
)
def test_bytes_of_an_access(code: str, size: int) -> None:
    assert sass.parse(listing(code))[0].bytes_per_lane == size


def test_registers_of_a_product() -> None:
    product, other = sass.parse(
        listing("HMMA.16816.F32 R16, R4.reuse, R8, RZ", "FFMA R1, R16, c[0x0][0x328], R10")
    )
    assert set(product.registers) == {*range(16, 20), *range(4, 8), 8, 9}
    assert set(other.registers) == {1, 16, 10}


@pytest.mark.parametrize(
    ("code", "operations", "written", "read"),
    [
        (
            "HMMA.16816.F32.BF16 R16, R4, R8, R20",
            4096,
            range(16, 20),
            {*range(4, 10), *range(20, 24)},
        ),
        ("HMMA.16816.F16 R16, R4, R8, RZ", 4096, range(16, 18), {*range(4, 10)}),
        ("HMMA.1688.F32 R16, R4, R8, RZ", 2048, range(16, 20), {*range(4, 10)}),
        (
            "IMMA.16832.S8.S8 R8, R12.reuse.ROW, R6.COL, R8",
            8192,
            range(8, 12),
            {*range(12, 16), 6, 7},
        ),
        (
            "QMMA.16832.F32.E4M3.E4M3 R8, R12.ROW, R6.COL, RZ",
            8192,
            range(8, 12),
            {*range(12, 16), 6, 7},
        ),
        (
            "QMMA.16832.F16.E4M3.E4M3 R8, R12.ROW, R6.COL, R8",
            8192,
            range(8, 10),
            {*range(12, 16), 6, 7},
        ),
        ("F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C R9, R9, R8, R10", 0, (), {8, 9, 10}),
    ],
)
def test_products(code: str, operations: int, written: range, read: set[int]) -> None:
    product = sass.parse(listing(code))[0]
    assert product.operations == operations
    assert set(product.results) == set(written)
    assert set(product.registers) == {*written, *read}


def test_branches() -> None:
    code = sass.parse(NESTED)
    by_address = {i.address: i for i in code}
    assert by_address[0xD0].target == 0x50 and by_address[0xD0].falls_through
    assert by_address[0x140].target == 0x160 and by_address[0x140].falls_through
    assert by_address[0x150].target == 0x30 and not by_address[0x150].falls_through
    assert by_address[0x10].target is None and by_address[0x10].falls_through
    assert not by_address[0x190].falls_through


def test_half_an_encoding_is_an_error() -> None:
    text = listing("HMMA.16816.F32 R16, R4, R8, R16").splitlines()[0]
    with pytest.raises(ValueError, match="second half of the encoding"):
        sass.parse(text)


def test_paths() -> None:
    paths = sass.find_paths(sass.parse(NESTED))
    # Without the seldom block; with both products and the copy.
    assert addresses(paths.main) == [0x50, 0x60, 0x70, 0x80, 0xB0, 0xC0, 0xD0]
    # Without the long loop; with the mask.
    assert addresses(paths.edge) == [0x30, 0x40, *range(0xE0, 0x160, 0x10)]
    assert addresses(paths.prologue) == [0x00, 0x10, 0x20]
    assert addresses(paths.epilogue) == [0x160, 0x170, 0x180, 0x190]
    assert addresses(paths.epilogue_loop) == [0x160, 0x170, 0x180]
    assert paths.counts()["HMMA"] == 2


def test_the_whole_path_hands_tiles_over() -> None:
    """A tile may be left out but for its copy: a path with its products also releases its stage."""
    code = sass.parse(
        listing(
            "ISETP.GE.AND P0, PT, R1, R2, PT",
            "@P0 BRA 0x50",
            "QMMA.16832.F32.E4M3.E4M3 R16, R4, R8, R16",
            "LDGSTS.E.BYPASS.128 [R5], [R8.64]",
            "BRA 0x60",
            "LDGSTS.E.BYPASS.128 [R5], [R8.64]",
            "@P1 BRA 0x80",
            "ATOMS.ARRIVE.64 RZ, [R3+URZ+0x8008]",
            "@!P0 BRA 0x0",
            "EXIT",
        )
    )
    common = sass.find_paths(code).main
    assert not sass.operations(common)
    whole = sass.find_paths(code, sass.whole_path).main
    assert addresses(whole) == [0x00, 0x10, 0x20, 0x30, 0x40, 0x60, 0x70, 0x80]
    assert 0x70 not in addresses(sass.find_paths(code, sass.short_path).main)


def test_the_path_of_stores_is_the_one_that_stores() -> None:
    """Not the one of warps that have nothing to store, and by the widest instructions."""
    code = sass.parse(
        listing(
            "HMMA.16816.F32 R16, R4, R8, R16",
            "@P0 BRA 0x0",
            "@P1 EXIT",
            "@P2 BRA 0x60",
            "STG.E.U16 [R2.64], R16",
            "BRA 0x70",
            "STG.E.64 [R2.64], R16",
            "EXIT",
        )
    )
    assert addresses(sass.find_paths(code).epilogue) == [0x20, 0x30, 0x60, 0x70]


def test_no_products_no_loop() -> None:
    with pytest.raises(ValueError, match="no loop has a tensor core instruction"):
        sass.find_paths(sass.parse(listing("FADD R1, R2, R3", "@P0 BRA 0x0", "EXIT")))


@pytest.mark.parametrize(
    ("name", "tflops"),
    [("L4", 121.0), ("L40S", 366.5), ("RTX 4090", 165.2), ("RTX 5090", 209.5)],
)
def test_peaks_are_those_of_the_documents(name: str, tflops: float) -> None:
    assert DEVICES[name].peak_flops / 1e12 == pytest.approx(tflops, rel=0.005)


@pytest.mark.parametrize(
    ("name", "code", "tflops"),
    [
        ("L4", "IMMA.16832.S8.S8", 242.3),
        ("L40S", "QMMA.16832.F32.E4M3.E4M3", 733.0),
        ("RTX 4090", "IMMA.16832.S8.S8", 660.6),
        ("RTX 4090", "QMMA.16832.F16.E4M3.E4M3", 660.6),
        ("RTX 4090", "QMMA.16832.F32.E4M3.E4M3", 330.3),
        ("RTX 4090", "HMMA.16816.F16", 330.3),
        ("RTX 5090", "QMMA.16832.F32.E4M3.E4M3", 419.0),
        ("RTX 5090", "IMMA.16832.S8.S8", 838.0),
        ("H200", "IMMA.16832.S8.S8", 1231.0),
    ],
)
def test_peaks_in_8_bits(name: str, code: str, tflops: float) -> None:
    product = sass.parse(listing(f"{code} R16, R4.ROW, R8.COL, RZ", "FADD R1, R2, R3"))
    assert peak_of(product, DEVICES[name]) / 1e12 == pytest.approx(tflops, rel=0.005)


def test_the_peak_of_a_mix_is_between() -> None:
    """INT8 at full rate beside e4m3 at half: two thirds of the way down in time."""
    mix = sass.parse(
        listing(
            "IMMA.16832.S8.S8 R16, R4.ROW, R8.COL, RZ",
            "QMMA.16832.F32.E4M3.E4M3 R20, R4.ROW, R8.COL, RZ",
        )
    )
    assert peak_of(mix, DEVICES["RTX 4090"]) / 1e12 == pytest.approx(440.4, rel=0.005)


def test_a_product_that_a_gpu_has_not() -> None:
    product = sass.parse(listing("QMMA.16832.F32.E4M3.E4M3 R16, R4.ROW, R8.COL, RZ"))
    with pytest.raises(ValueError, match=r"H200: no rate is known of QMMA\.16832\.F32\.E4M3\.E4M3"):
        use_of(product[0], DEVICES["H200"])


@pytest.mark.parametrize(
    ("code", "pipe", "clocks"),
    [
        ("IMMA.16832.S8.S8 R8, R8.ROW, R6.COL, RZ", "tensor", 16),
        ("QMMA.16832.F16.E4M3.E4M3 R8, R8.ROW, R6.COL, RZ", "tensor", 16),
        ("F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C R9, R9, R8, R10", "alu", 2),
        ("I2FP.F32.S32 R7, R2", "alu", 2),
        ("F2I.NTZ R7, R2", "mufu", 8),
        ("HADD2.F32 R9, -RZ, R2.H0_H0", "fma", 2),
        ("PRMT R7, R0, 0x5410, R7", "alu", 2),
        ("HMMA.16816.F32 R16, R4, R8, R16", "tensor", 16),
        ("MUFU.EX2 R5, R6", "mufu", 8),
        ("FFMA R1, R2, R3, R4", "fma", 1),
        ("IMAD.MOV.U32 R1, RZ, RZ, R2", "fma", 2),
        ("F2FP.F16.F32.PACK_AB R1, R2, R3", "alu", 2),
        ("LDSM.16.M88.4 R4, [R8]", "memory", 4),
        ("LDGSTS.E.BYPASS.128 [R5], [R8.64]", "memory", 4),
        ("@!PT LDS RZ, [RZ]", "", 0),
        ("BRA 0x0", "", 0),
    ],
)
def test_pipes(code: str, pipe: str, clocks: float) -> None:
    use = use_of(sass.parse(listing(code))[0], L4)
    assert (use.pipe, use.clocks) == (pipe, clocks)


def products(count: int) -> list[str]:
    return [f"HMMA.16816.F32 R{16 + 4 * (i % 16)}, R4, R8, RZ" for i in range(count)]


def test_products_take_turns_on_the_tensor_core() -> None:
    code = sass.parse(listing(*products(16)))
    for blocks in (1, 2, 3):
        run = simulate(code, L4, blocks, 4)
        assert run.clocks_per_pass == pytest.approx(16 * 16 * blocks, rel=0.02)
        assert run.busy["tensor"] == pytest.approx(1, rel=0.02)
    slower = simulate(code, DEVICES["RTX 4090"], 1, 4)
    assert slower.clocks_per_pass == pytest.approx(32 * 16, rel=0.02)


def test_products_in_8_bits_take_turns_at_their_rates() -> None:
    code = [
        "IMMA.16832.S8.S8 R16, R4.ROW, R8.COL, RZ",
        "QMMA.16832.F32.E4M3.E4M3 R20, R4.ROW, R8.COL, RZ",
        "QMMA.16832.F16.E4M3.E4M3 R24, R4.ROW, R8.COL, RZ",
    ]
    run = simulate(sass.parse(listing(*code * 6)), DEVICES["RTX 4090"], 2, 4)
    assert run.clocks_per_pass == pytest.approx(2 * 6 * (16 + 32 + 16), rel=0.03)
    assert run.busy["tensor"] == pytest.approx(1, rel=0.03)


def test_a_dependent_product_waits() -> None:
    chain = ["HMMA.16816.F32 R16, R4, R8, R16"] * 8
    run = simulate(sass.parse(listing(*chain)), L4, 1, 4)
    assert run.clocks_per_pass == pytest.approx(8 * L4.hmma_latency, rel=0.02)


def softmax_and_products() -> list[sass.Instruction]:
    chain = [("MUFU.EX2 R5, R5", {"write": 0, "wait": 1, "stall": 2})] * 10
    return sass.parse(listing(*chain, *products(12)))


def test_one_warps_softmax_hides_behind_anothers_products() -> None:
    code = softmax_and_products()
    alone = simulate(code, L4, 1, 4)
    together = simulate(code, L4, 2, 4)
    assert alone.busy["tensor"] < 0.6
    assert together.busy["tensor"] > 1.5 * alone.busy["tensor"]


def test_barriers_hold_warps_back() -> None:
    """Two warps on a scheduler that cannot drift apart do not hide each other's softmax."""
    free = softmax_and_products()
    barrier = sass.parse(listing("BAR.SYNC.DEFER_BLOCKING 0x0"))
    apart = simulate(free, L4, 1, 8).busy["tensor"]
    assert simulate(barrier + free, L4, 1, 8).busy["tensor"] < apart - 0.1


def test_copies_are_waited_for() -> None:
    copies = sass.parse(
        listing(
            "LDGSTS.E.BYPASS.128 [R5], [R8.64]",
            ("LDGDEPBAR", {"write": 0}),
            ("DEPBAR.LE SB0, 0x0", {"stall": 4}),
            "BAR.SYNC.DEFER_BLOCKING 0x0",
        )
    )
    assert once(copies, L4, 4) > L4.memory_latency
    outstanding = [replace(i, operands=i.operands.replace("0x0", "0x1")) for i in copies]
    assert once(outstanding[:3] * 2, L4, 4) < 3 * L4.memory_latency


def handed_over(count: int) -> list[sass.Instruction]:
    """A tile with mbarriers in place of a barrier: waits, a copy, `count` products, release."""
    return sass.parse(
        listing(
            ("LDS R56, [R57+0x8004]", {"write": 0}),
            ("LOP3.LUT P0, RZ, R56, 0x80000000, R3, 0x48, !PT", {"wait": 1, "stall": 4}),
            "@!P0 BRA 0x0",
            ("LDS R56, [R57+0x800c]", {"write": 0}),
            ("LOP3.LUT P0, RZ, R56, 0x80000000, R3, 0x48, !PT", {"wait": 1, "stall": 4}),
            "@!P0 BRA 0x30",
            "@!PT LDS RZ, [RZ]",
            "LDGSTS.E.BYPASS.128 [R5], [R8.64]",
            "ARRIVES.LDGSTSBAR.64 [UR4+0x8000]",
            *products(count),
            "MEMBAR.ALL.CTA",
            "ATOMS.ARRIVE.64 RZ, [R3+URZ+0x8008]",
        )
    )


def test_mbarriers_are_found() -> None:
    code = handed_over(1)
    expected = {0x00: "full", 0x30: "empty", 0x80: "fill", code[-1].address: "release"}
    assert sass.handovers(code) == expected
    hopper = sass.parse(
        listing(
            "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R2+UR5+0xc000], R1",
            "@P0 BRA 0x40",
            "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R2+UR5+0xc000], R1",
            "@!P0 BRA 0x20",
            "SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R2+UR5+0xc008], RZ",
        )
    )
    assert sass.handovers(hopper) == {0x00: "full", 0x40: "release"}
    # A warp that has stored its part itself arrives where copies do.
    stored = sass.parse(listing("ATOMS.ARRIVE.64 RZ, [R3+URZ+0x8000]"))
    assert sass.handovers(stored) == {0x00: "fill"}


def test_mbarriers_are_waited_for() -> None:
    short, long = handed_over(4), handed_over(64)
    assert simulate(short, L4, 1, 4).clocks_per_pass > L4.memory_latency  # for its tile to land
    assert simulate(long, L4, 1, 4).busy["tensor"] > 0.8
    # A warp at its third tile waits for one that has not filled its part of it.
    sm = _Multiprocessor(prepare(short, L4), L4, 1, 4, 4)
    slow, fast = sm.warps[0], sm.warps[1]
    fast.issued = 2 * len(short)
    slow.fills, slow.releases = [100.0], [150.0]
    for warp in sm.warps[1:]:
        warp.fills, warp.releases = [110.0, 210.0], [120.0, 220.0]
    assert sm.earliest(1, fast) == float("inf")
    slow.fills.append(500.0)
    assert sm.earliest(1, fast) == 500.0


def test_warps_that_wait_for_ever_are_an_error() -> None:
    never_filled = [i for i in handed_over(4) if not i.opcode.startswith("ARRIVES")]
    with pytest.raises(ValueError, match="none can go on"):
        simulate(never_filled, L4, 1, 4)


def test_libraries_without_code_for_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is compiled in their place; the first that has some is read."""
    kernel = kernels.Kernel(kernels.tile_shapes()[64, "wide"], "sm_89", 128, "")

    def kernels_of(library: Path, arch: str, *_: object) -> list[kernels.Kernel]:
        return [kernel] if (library.name, arch) == ("of_ada.so", "sm_89") else []

    monkeypatch.setattr(kernels, "_kernels_of", kernels_of)
    both = [Path("of_hopper.so"), Path("of_ada.so")]
    assert kernels.load("sm_89", both) == [kernel]
    assert kernels.load("sm_90", both) == []
    monkeypatch.setattr(sys, "argv", ["ada_model.py", "--library", "of_hopper.so"])
    with pytest.raises(SystemExit):
        ada_model.main()
    assert "of_hopper.so: no code for sm_89 of wmma" in capsys.readouterr().err


def make_shape(block_m: int, block_n: int) -> kernels.Shape:
    return kernels.Shape(64, 0, "wide", block_m, block_n, 4, 49152)


def test_products_of_a_tile() -> None:
    product = 2 * 16 * 8 * 16
    assert make_shape(128, 64).operations_per_warp == 2 * (2 * 8 * 4) * product
    assert make_shape(64, 32).operations_per_warp == 2 * (1 * 4 * 4) * product


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen", "heads"), [(512, 8), (500, 3), (64, 20)])
def test_blocks_see_every_tile(seqlen: int, heads: int, causal: bool) -> None:
    shape = make_shape(128, 64)
    blocks = list(blocks_of(Problem(1, heads, seqlen, 64, causal), shape))
    assert len(blocks) == -(-seqlen // 128) * heads
    expected = 0
    for m0 in range(0, seqlen, 128):
        last = min(m0 + 127, seqlen - 1) if causal else seqlen - 1
        expected += heads * (last // 64 + 1)
    assert sum(edge + main for edge, main in blocks) == expected
    assert all(edge >= 1 for edge, _ in blocks)
    if causal:
        assert blocks[0] == max(blocks, key=sum)  # longest first


def paces(*clocks: float) -> Pace:
    runs = tuple(Run(c, {"tensor": 0.5}) for c in clocks)
    return Pace(main=runs, edge=runs, start=100.0, end=50.0)


def walk(pace: Pace, sms: int, blocks: list[tuple[int, int]]) -> float:
    return _Walk(pace, replace(L4, num_sms=sms), iter(blocks)).clocks()


def test_waves() -> None:
    one_at_a_time = paces(10.0)
    block = (1, 9)
    assert walk(one_at_a_time, 4, [block] * 4) == pytest.approx(250)
    assert walk(one_at_a_time, 4, [block] * 5) == pytest.approx(500)
    two_at_a_time = paces(10.0, 16.0)
    # Five blocks on four: one SM has two, at the pace of two.
    assert walk(two_at_a_time, 4, [block] * 5) == pytest.approx(310)
    # A block that is left alone goes on at the pace of one.
    assert walk(two_at_a_time, 1, [(1, 9), (1, 19)]) == pytest.approx(100 + 160 + 100 + 50)


def test_dram_reads_fewer_bytes_of_8_bits() -> None:
    wide, narrow = (Problem(1, 8, 512, 64, input_bytes=size) for size in (2, 1))
    elements = 8 * 512 * 64
    shape = make_shape(128, 64)
    assert dram_seconds(wide, L4, shape) == pytest.approx(8 * elements / 300e9)
    assert dram_seconds(narrow, L4, shape) == pytest.approx(5 * elements / 300e9)


def test_what_quantises_has_its_own_time() -> None:
    problem = Problem(1, 8, 8192, 128, input_bytes=1, quantises=True)
    elements = 8 * 8192 * 128
    shape = make_shape(128, 64)
    assert dram_seconds(problem, L4, shape) == pytest.approx(6 * elements / 300e9)
    assert quantisation_seconds(replace(problem, quantises=False), L4) == 0
    moving = 6 * elements / (0.8 * 300e9)
    assert quantisation_seconds(problem, L4) == pytest.approx(moving, rel=0.02)


def test_the_kernel_of_8_bit_integers_is_known() -> None:
    symbol = "_ZN6dlattn5wmma811int8_kernelILi128ELb1EEEvNS_15AttentionParamsENS_11LaunchShapeE"
    match = kernels._SYMBOLS["wmma8"].fullmatch(symbol)
    assert match and match.groups() == ("int8", "128", "1")
    match = kernels._SYMBOLS["wmma8"].fullmatch(symbol.replace("11int8_kernel", "6kernel"))
    assert match and match.groups() == (None, "128", "1")


def prediction(gpu: str, variant: str, microseconds: float, planned: bool) -> dict[str, object]:
    problem = {"gpu": gpu, "shape": [1, 8, 512, 64], "causal": True}
    times = {"microseconds": microseconds, "peak_share": 0.284, "bound": "tensor"}
    return {**problem, **times, "variant": variant, "planned": planned}


def test_the_summary_is_about_the_plans_choice() -> None:
    """Not about the last variant, and says which is faster by more than 2%."""
    document = {
        "predictions": [
            prediction("L4", "wide", 98.1, False),
            prediction("L4", "narrow", 100.0, True),
            prediction("L4", "split", 99.0, False),
            prediction("L40S", "narrow", 50.0, False),
            prediction("L40S", "split", 51.5, True),
        ]
    }
    first, second = report.summary_table(document).splitlines()[2:]
    problem = "(1, 8, 512, 64) causal"
    assert first == f"| L4 | {problem} | narrow | 100 us | 28% | tensor |  |"
    assert second == f"| L40S | {problem} | split | 51.5 us | 28% | tensor | narrow, 50 us |"


def test_the_page_has_the_committed_figures(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tables of ADA.md are what the committed JSON prints."""
    results = ROOT / "research/model/ada.json"
    monkeypatch.setattr(sys, "argv", ["ada_model.py", "--print", str(results)])
    assert ada_model.main() == 0
    printed = capsys.readouterr().out
    document = json.loads(results.read_text())
    page = (ROOT / "research/ADA.md").read_text()
    for table in (report.loops_table(document), report.summary_table(document)):
        assert table in printed
        assert table in page


def test_the_page_has_the_committed_figures_of_8_bits() -> None:
    """Those of the long loops, and of 8192 tokens."""
    document = json.loads((ROOT / "research/model/ada-8-bit.json").read_text())
    page = (ROOT / "research/ADA.md").read_text()
    assert report.loops_table(document) in page
    lines = report.rates_table(document).splitlines()
    told = [x for x in lines if ", 8192, " in x]
    assert "\n".join([*lines[:2], *told]) in page
    assert len(told) == 3 * 3 * 2 * 2


def test_the_page_has_the_committed_figures_of_large_heads() -> None:
    document = json.loads((ROOT / "research/model/ada-large-heads.json").read_text())
    page = (ROOT / "research/ADA.md").read_text()
    for table in (report.loops_table(document), report.rates_table(document)):
        assert table in page
        assert table in report.text_large_heads(document)


def test_the_tile_of_large_heads() -> None:
    """Two warps share 16 rows, so that each has the operations of 8 whole ones."""
    (shape,) = kernels.tile_shapes("wmma_halves").values()
    assert (shape.head_dim, shape.name, shape.rows_per_warp) == (512, "halves", 8)


def test_the_page_of_8_bit_kernels_tells_rates() -> None:
    row = prediction("RTX 4090", "plain", 1000.0, True)
    row["shape"] = [1, 32, 8192, 128]
    row["causal"] = False
    line = report.rates_table({"predictions": [row]}).splitlines()[2]
    assert line == "| RTX 4090 | (1, 32, 8192, 128) | plain | 1000 us | 1100 | 28% | tensor |"
    row["quantisation_microseconds"] = 100.0
    assert "| 1000 us | 1100 (1000) | 28% |" in report.rates_table({"predictions": [row]})


@pytest.fixture(scope="module")
def compiled() -> Iterator[list[kernels.Kernel]]:
    try:
        yield kernels.load("sm_89")
    except kernels.cubins.NoTools as missing:
        pytest.skip(str(missing))


@pytest.mark.slow
def test_every_long_loop_is_found(compiled: list[kernels.Kernel]) -> None:
    """Its products are those of the tile, its copies those of K and V."""
    shapes = {shape for shape in kernels.tile_shapes() if shape[1] not in kernels.NOT_MODELLED}
    assert {(k.shape.head_dim, k.shape.name) for k in compiled} == shapes
    for kernel in compiled:
        shape, paths = kernel.shape, kernel.paths
        products = sass.count(paths.main, "HMMA")
        assert products * 2 * 16 * 8 * 16 == shape.operations_per_warp, kernel.name
        copied = 2 * shape.block_n * shape.head_dim * 2 * shape.key_groups
        if shape.name != "general":  # which copies bias and mask as well
            assert sass.copied_bytes(paths.main) * shape.num_warps == copied, kernel.name
        exponentials = shape.rows_per_warp * shape.block_n // 32
        assert sass.count(paths.main, "MUFU") >= exponentials, kernel.name
        # Some go through an edge tile 32 keys at a time, or 16.
        parts = products / sass.count(paths.edge, "HMMA")
        keys = 16 if shape.head_dim > 128 else 32
        assert parts == 1 or parts == shape.block_n / keys, kernel.name
        assert any(i.name == "STG" for i in paths.epilogue), kernel.name
        assert kernel.blocks_per_sm(L4) >= 1, kernel.name


@pytest.mark.slow
def test_long_loops_in_8_bits() -> None:
    """Their products are those of the tile, and every tile is waited for, filled and released."""
    try:
        found = kernels.load("sm_89", tiles=[64], family="wmma8")
    except kernels.cubins.NoTools as missing:
        pytest.skip(str(missing))
    assert {k.shape.name for k in found} == {"plain", "general", "int8", "int8_general"}
    for kernel in found:
        main = kernel.paths.main
        integers, floats = sass.count(main, "IMMA"), sass.count(main, "QMMA")
        assert (integers, floats) == ((16, 16) if "int8" in kernel.shape.name else (0, 32))
        if "general" in kernel.shape.name:
            continue
        assert set(sass.handovers(main).values()) == {"full", "empty", "fill", "release"}
        pace = simulate(main, L4, 1, kernel.shape.num_warps).clocks_per_pass
        assert sum(i.operations > 0 for i in main) * L4.qmma_clocks < pace < 4000


@pytest.mark.slow
def test_the_plan_is_asked(compiled: list[kernels.Kernel]) -> None:
    names = {k.shape.name for k in compiled} | set(kernels.NOT_MODELLED)
    problem = (4, 16, 4096, 128)
    problems = [(L4, problem, False), (DEVICES["H200"], problem, True)]
    assert set(kernels.planned_variants(problems)) <= names
