"""Machine code for 8.9 that is made of PTX for 8.0 is what it would be of PTX for 8.9.

Builds without a GPU make it so, of all files without fp8 (cmake/Archs.cmake).
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import cubins
import pytest

CMAKE = (cubins.ROOT / "cmake" / "Archs.cmake").read_text()
DEFINITION = "-DDLATTN_CODE_OF_89"
FP8 = "float8_e4m3fn"
BESIDE_FP8 = [("scalar", "int8")]  # kernels that take both
# sm90 has nothing for 8.9.
FAMILIES = sorted({f for f, d, _ in cubins.instances() if d != FP8} - {"sm90"})


def code(folder: Path, instance: tuple[str, str, int], **options: object) -> dict[str, list[str]]:
    """The instructions of each kernel."""
    folder.mkdir()
    (cubin,) = cubins.compile_instances(folder, wanted=[instance], **options)  # type: ignore[arg-type]
    instruction = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(.*?;)", re.M)
    return {name: instruction.findall(text) for name, text in cubins.listings(cubin)}


@pytest.mark.nightly
@pytest.mark.skipif(not os.environ.get("DLATTN_NIGHTLY"), reason="for .ci/nightly")
@pytest.mark.parametrize("family", FAMILIES)
def test_machine_code_is_the_same(family: str, tmp_path: Path) -> None:
    own_family = [i for i in cubins.instances() if i[0] == family]
    instances = [i for i in own_family if i[1] != FP8 and i[:2] not in BESIDE_FP8]
    assert DEFINITION in CMAKE
    try:
        for number, instance in enumerate({instances[0], instances[-1]}):
            own = code(tmp_path / f"own{number}", instance)
            shared = code(tmp_path / f"shared{number}", instance, ptx="80", options=[DEFINITION])
            assert own and all(own.values())
            assert shared == own
    except cubins.NoTools as missing:
        pytest.skip(str(missing))


@pytest.mark.nightly
@pytest.mark.skipif(not os.environ.get("DLATTN_NIGHTLY"), reason="for .ci/nightly")
def test_code_for_9_0_stays(tmp_path: Path) -> None:
    """The definition is there when the same file is compiled for 9.0 too."""
    instance = ("wmma", "float16", 32)
    try:
        own = code(tmp_path / "own", instance, arch=cubins.SM_90)
        assert code(tmp_path / "other", instance, arch=cubins.SM_90, options=[DEFINITION]) == own
    except cubins.NoTools as missing:
        pytest.skip(str(missing))


@pytest.mark.nightly
@pytest.mark.skipif(not os.environ.get("DLATTN_NIGHTLY"), reason="for .ci/nightly")
def test_comparison_notices_other_code(tmp_path: Path) -> None:
    """Without the definition, PTX for 8.0 hands the stages of wmma over as 8.0 wants."""
    instance = ("wmma", "float16", 32)
    try:
        own = code(tmp_path / "own", instance)
        assert code(tmp_path / "other", instance, ptx="80") != own
    except cubins.NoTools as missing:
        pytest.skip(str(missing))
