"""The markers in the kernels' source by which the simt tests' seeded bugs find their place."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

# On the path for these imports alone.
sys.path.insert(0, str(ROOT / "tests" / "simt"))
markers, mutants, mutant_runs, seed_bugs = map(
    importlib.import_module, ("markers", "mutants", "mutant_runs", "seed_bugs")
)
sys.path.remove(str(ROOT / "tests" / "simt"))

CUDA = ROOT / "src" / "cuda"


@pytest.mark.parametrize("bug", mutants.BUGS, ids=lambda bug: f"{bug.kind} {bug.families}")
def test_every_bug_finds_its_place(bug: Any) -> None:
    """Otherwise seed_mutants ends with SystemExit."""
    found = list(mutants.seed_mutants(CUDA, bug))
    assert [mutant.family for mutant in found] == list(bug.families)
    for mutant in found:
        assert mutant.text != (CUDA / mutant.file).read_text()


def test_a_mutant_is_tried_with_a_tile_that_has_its_code_first() -> None:
    assert set(mutants.FAMILY_TILE) <= set(mutants.FAMILIES)
    found = mutants.all_mutants(CUDA)
    tiles = {mutant.file: mutant.tile for mutant in found}
    assert all(tiles.get(file, tile) == tile for file, tile in mutants.FILE_TILE.items())
    assert all((CUDA / file).exists() for file in mutants.FILE_TILE)
    for family, file in mutants.FAMILY_FILE_TILE:
        assert file in mutants.sources(CUDA, family), file
    for family, kind in mutants.KIND_TILE:
        assert any((mutant.family, mutant.kind) == (family, kind) for mutant in found), kind
    pairs = [mutant for mutant in found if " of a pair" in mutant.kind]
    assert pairs and all(mutant.tile == 256 for mutant in pairs)


@pytest.mark.parametrize(("family", "kind", "text"), mutants.EQUIVALENT)
def test_a_change_that_changes_nothing_finds_its_place(family: str, kind: str, text: str) -> None:
    pattern, _ = mutants.SYNCHRONISATION[kind]
    found = [
        file
        for file, source in mutants.sources(CUDA, family).items()
        for match in re.finditer(pattern, mutants.without_comments(source))
        if re.match(mutants.pattern_of(text), source[match.start() :])
    ]
    assert len(found) == 1


def test_sources_that_tests_share_are_compiled_with_a_change_of_what_they_include() -> None:
    """Otherwise the change would be in no test that has it from there, and survive."""
    tests = ROOT / "tests" / "simt"
    for file, source in mutant_runs.SHARED_SOURCES.items():
        assert f'#include "{file}"' in (tests / "attention_test.h").read_text()
        assert (tests / source).exists()


def test_names_of_mutants_tell_them_apart() -> None:
    names = [mutant.name for mutant in mutants.all_mutants(CUDA)]
    assert len(set(names)) == len(names)


def test_all_synchronisation_is_some_familys() -> None:
    of_families = {file for name in mutants.FAMILIES for file in mutants.sources(CUDA, name)}
    patterns = [pattern for pattern, _ in mutants.SYNCHRONISATION.values()]
    for path in sorted(CUDA.rglob("*.cuh")):
        file = path.relative_to(CUDA).as_posix()
        if file in of_families or file.startswith("ptx/"):
            continue
        text = mutants.without_comments(path.read_text())
        assert not any(re.search(pattern, text) for pattern in patterns), file


def test_changes_behind_switches_are_those_of_the_mutants() -> None:
    """With one switch on, a file is the mutant's but for braces."""
    family = [m for m in mutants.all_mutants(CUDA) if m.family == "quantize" and m.span]
    sources = mutants.switched_sources(CUDA, family)
    for number, mutant in enumerate(family, start=1):
        text = sources[mutant.file]
        for n in range(1, len(family) + 1):
            text = text.replace(f"::simt::switched_on({n})", "on" if n == number else "off")
        taken = re.sub(
            r"\{ (?:if \(off\) \{[^{}]*\} else )*(?:if \(on\) \{ ([^{}]*) \} else )?"
            r"(?:if \(off\) \{[^{}]*\} else )*\{ ([^{}]*) \} \}",
            lambda m: m[2] if m[1] is None else m[1],
            text,
        )
        assert taken == mutant.text, mutant.name


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
