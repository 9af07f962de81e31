"""The markers in the kernels' source by which the simt tests' seeded bugs find their place."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

# On the path for these imports alone.
sys.path.insert(0, str(ROOT / "tests" / "simt"))
markers, mutate, seed_bugs = map(importlib.import_module, ("markers", "mutate", "seed_bugs"))
sys.path.remove(str(ROOT / "tests" / "simt"))

CUDA = ROOT / "src" / "cuda"


@pytest.mark.parametrize("bug", mutate.BUGS, ids=lambda bug: f"{bug.kind} {bug.families}")
def test_every_bug_finds_its_place(bug: Any) -> None:
    """Otherwise seed_mutants ends with SystemExit."""
    mutants = list(mutate.seed_mutants(CUDA, bug))
    assert [mutant.family for mutant in mutants] == list(bug.families)
    for mutant in mutants:
        assert mutant.text != (CUDA / mutant.file).read_text()


def test_a_mutant_is_tried_with_a_tile_that_has_its_code_first() -> None:
    assert set(mutate.FAMILY_TILE) <= set(mutate.FAMILIES)
    mutants = mutate.all_mutants(CUDA)
    tiles = {mutant.file: mutant.tile for mutant in mutants}
    assert all(tiles.get(file, tile) == tile for file, tile in mutate.FILE_TILE.items())
    assert all((CUDA / file).exists() for file in mutate.FILE_TILE)
    pairs = [mutant for mutant in mutants if " of a pair" in mutant.kind]
    assert pairs and all(mutant.tile == 256 for mutant in pairs)


def test_no_marker_is_left_over() -> None:
    used = {bug.marker for bug in seed_bugs.SEED_BUGS}
    files = [path for path in CUDA.rglob("*") if path.suffix in {".h", ".cuh", ".cpp"}]
    found = {name for path in files for name in markers.names(path.read_text())}
    assert found == used


def test_what_a_marker_marks() -> None:
    source = """
  // seed: head
  if (a[0] || f({1, 2})) {
    // seed: two
    const int x[2] = {g([&] { return 1; }), 2};  // why; not an end
    h(x);
  }
"""
    texts = {
        name: [source[slice(*span)] for span in markers.marked(source, name, statements)]
        for name, statements in (("head", 1), ("two", 2))
    }
    assert texts["head"] == ["if (a[0] || f({1, 2})) {"]
    assert texts["two"][0].startswith("const int x[2]") and texts["two"][0].endswith("h(x);")
    assert markers.names(source) == ["head", "two"]
