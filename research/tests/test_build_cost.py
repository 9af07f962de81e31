"""The cost of a build: which part a compiler's time counts for, and the table."""

from __future__ import annotations

import sys
from pathlib import Path

RESEARCH = Path(__file__).resolve().parents[1]
ROOT = RESEARCH.parent
sys.path.insert(0, str(RESEARCH))

import build_cost  # noqa: E402

FAMILIES = ["forward/wmma", "forward/wmma_smem", "forward/wmma8", "merge/row_per_warp"]
LOG = f"""\
10.25 0.50 nvcc -O3 -MD -x cu -c /tmp/b/generated/forward_wmma_float16_32.cu -o a.o
4.00 0.00 nvcc -x cu -c /tmp/b/generated/forward_wmma_smem.cu -o b.o
2.00 0.25 nvcc -x cu -c /tmp/b/generated/forward_wmma8.cu -o c.o
1.00 0.50 nvcc -x cu -c /tmp/b/generated/merge_row_per_warp.cu -o d.o
3.00 0.25 g++ -o e.o -c {ROOT}/src/core/plan/plan.cpp
1.00 0.00 g++ -o f.o -c {ROOT}/src/core/calls/merge.cpp
0.75 0.00 g++ -o g.o -c {ROOT}/src/cuda/forward/wmma/plan.cpp
6.00 1.00 g++ -o h.o -c /usr/lib/nanobind/src/nb_combined.cpp
Command exited with non-zero status 1
"""


def test_times_are_counted_by_family_and_part():
    assert build_cost.read(LOG, FAMILIES) == {
        "forward/wmma": 10.75,
        "forward/wmma_smem": 4.0,
        "forward/wmma8": 2.25,
        "merge/row_per_warp": 1.5,
        "core": 4.25,
        "CUDA, host code": 0.75,
        "Python module": 7.0,
    }


def test_every_generated_file_is_a_familys():
    families = build_cost.families_of_sources()
    for name, part in (
        ("backward_sm90", "backward/sm90"),
        ("quantize_key_blocks", "quantize/key_blocks"),
        ("forward_sm90_latent_and_wide", "forward/sm90_latent and wide"),
        ("small_operations", "small operations"),
    ):
        assert build_cost.part_of(f"/tmp/b/generated/{name}.cu", families) == part


def test_table_has_the_dearest_first():
    builds = {"common": build_cost.read(LOG, FAMILIES), "90": {"forward/wmma": 7.0, "core": 2.0}}
    lines = build_cost.table(builds).splitlines()
    assert lines[0] == "| operation or part | without a GPU | for 9.0 | families |"
    assert lines[2:5] == [
        "| forward | 17 | 7 | wmma 11, wmma_smem 4, wmma8 2 |",
        "| Python module | 7 | 0 | |",
        "| core | 4 | 2 | |",
    ]
    assert lines[-1] == "| all | 30 | 9 | |"


def test_columns_are_named_by_their_gpus():
    names = ["common", "89", "89;120", "OFF"]
    expected = ["without a GPU", "for 8.9", "for 8.9;12.0", "CPU alone"]
    assert [build_cost.column_name(name) for name in names] == expected
