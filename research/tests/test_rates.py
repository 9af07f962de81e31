"""The measured rates of instructions: that each loop has what it is said to measure."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import rates
from sass_model.devices import DEVICES

H200 = DEVICES["H200"]


@pytest.fixture(scope="module")
def loops() -> dict[str, list[rates.Instruction]]:
    try:
        return rates.loops("sm_90a")
    except rates.kernels.cubins.NoTools as missing:
        pytest.skip(str(missing))


EXPECTED = {
    "HmmaF32": ("HMMA.16816.F32", 6.5),
    "Imma": ("IMMA.16832.S8.S8", 6.5),
    "ImmaU8": ("IMMA.16832.U8.S8", 6.5),
    "Ffma": ("FFMA", 1.05),
    "Ex2": ("MUFU.EX2", 8.0),
    "Prmt": ("PRMT", 2.0),
    "CvtF32S32": ("I2FP.F32.S32", 2.0),
    "CvtS32F32": ("F2I.NTZ", 8.0),
    "CvtF32F16": ("HADD2.F32", 2.0),
    "Ldsm": ("LDSM.16.M88.4", 16.0),
    "LdsmTrans": ("LDSM.16.MT88.4", 16.0),
}


@pytest.mark.slow
def test_loops(loops: dict[str, list[rates.Instruction]]) -> None:
    for name, (opcode, clocks) in EXPECTED.items():
        assert rates.opcodes(loops[name]) == opcode
        assert len(loops[name]) < 1.15 * rates.STEPS, name
        found = rates.clocks_by_the_model(loops[name], H200)
        assert found == pytest.approx(clocks, rel=0.07), name
    assert "E4M3.F32" in rates.opcodes(loops["CvtE4m3F32"])
    tile = [i.name for i in loops["tile"]]
    for name, count in (("IMMA", 64), ("LDSM", 32), ("MUFU", 32), ("PRMT", 64), ("F2FP", 16)):
        assert tile.count(name) == count
    assert not {"LDL", "STL"} & set(tile)


@pytest.mark.slow
def test_comparison(loops: dict[str, list[rates.Instruction]]) -> None:
    measured = {
        "gpu": "NVIDIA H200",
        "num_sms": 132,
        "instructions": [
            {"name": "Imma", "clocks": {"1": 7.0, "4": 6.5}, "latency": 30.0},
            {"name": "HmmaF16", "clocks": {"1": 7.0, "4": 6.5}, "latency": 30.0},
        ],
        "tile": {"1": 900.0},
    }
    document = rates.compare(measured, loops)
    (imma, other), (tile,) = document["instructions"], document["tile"]
    assert other["model_clocks"] is None  # of which no rate is known
    assert imma["opcode"] == "IMMA.16832.S8.S8" and imma["model_clocks"] == 6.5
    assert tile["model_clocks"] > 64 * 6.5
    printed = rates.text(document)
    assert "| IMMA.16832.S8.S8 | 7.00 | 6.50 | 6.50 | +0% | 30.0 |" in printed
