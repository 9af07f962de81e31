"""Rules that the sources keep, read from the text: no compiler needed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCES = Path(__file__).resolve().parents[2] / "src"
BINDINGS = SOURCES.parent / "python" / "bindings"
SUFFIXES = {".h", ".cpp", ".cu", ".cuh", ".in"}


def sources(*folders: str) -> Iterator[Path]:
    for folder in folders:
        files = [p for p in sorted((SOURCES / folder).rglob("*")) if p.suffix in SUFFIXES]
        assert files, f"nothing in {folder}"
        yield from files


def code(text: str) -> str:
    """Without comments and the contents of string literals."""
    pattern = r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"'
    return re.sub(pattern, lambda m: '""' if m[0][0] == '"' else " ", text, flags=re.S)


def includes(text: str) -> list[str]:
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', text, re.M)


ASM = re.compile(r"\b(?:asm|__asm__)\b")
HOST_ONLY = re.compile(
    r"^(?:cuda|cudart|curand|crt/|mma\.h|cub/|thrust/|Python\.h|nanobind|torch|ATen)"
)
# Headers that plans read beside kernels are plain C++, and end in .h; device code is in .cuh files.
READ_BY_PLANS = re.compile(r"^cuda/(?:plan|tile|\w+/\w+)/\w+\.h$")
BUILT_INS = re.compile(r"\b(?:threadIdx|blockIdx|__global__|__device__|__shared__)\b")


def test_asm_stands_under_ptx_only() -> None:
    guilty = [
        str(path.relative_to(SOURCES))
        for path in sources(".")
        if ASM.search(code(path.read_text())) and path.parent != SOURCES / "cuda" / "ptx"
    ]
    assert not guilty


def test_public_and_core_headers_are_plain_cpp() -> None:
    """They include nothing of cuda/ either."""
    for path in sources("include", "core", "cpu"):
        for name in includes(path.read_text()):
            assert not HOST_ONLY.match(name), f"{path} includes {name}"


def test_core_knows_no_family() -> None:
    """They come to it as records, from the list that instances.cmake makes."""
    text = (SOURCES / "cuda" / "instances.cmake").read_text()
    families = re.findall(r"^dlattn_family\(\w+ (\w+)", text, re.M)
    assert len(families) >= 5
    for path in sources("core", "include"):
        text = path.read_text()
        named = re.search(rf"\b(?:{'|'.join(families)})\b", re.sub(r"//[^\n]*", "", text))
        assert not named, f"{path} names {named and named[0]}"


def family_folders() -> set[str]:
    return {str(p.parent.relative_to(SOURCES)) for p in (SOURCES / "cuda").rglob("plan.cpp")}


def other_families(path: str, text: str, folders: set[str]) -> list[str]:
    """The headers of families that a file includes from outside of their folders."""
    return [
        name
        for name in includes(text)
        if (folder := name.rpartition("/")[0]) in folders and folder != path.rpartition("/")[0]
    ]


def test_families_include_no_other_family() -> None:
    """Code that two of them use stands in cuda/plan/ and cuda/tile/, which include none."""
    folders = family_folders()
    assert len(folders) >= 10
    for path in sources("."):
        name = str(path.relative_to(SOURCES))
        assert not other_families(name, path.read_text(), folders), name


def test_the_harness_of_the_simt_tests_knows_no_family() -> None:
    """Only headers that are named after one do: wmma_test.h."""
    folders = family_folders()
    families = {folder.rpartition("/")[2] for folder in folders}
    simt = SOURCES.parent / "tests" / "simt"
    files = [*sorted((simt / "harness").iterdir()), *sorted(simt.glob("*.h"))]
    assert len(files) >= 20
    for path in files:
        included = other_families("", path.read_text(), folders)
        own = [family for family in families if path.name.startswith(f"{family}_")]
        assert all(name.split("/")[-2] in own for name in included), path
        assert path.parent == simt or not re.search(r'"cuda/', path.read_text()), path


def test_plans_are_host_code() -> None:
    """They stand beside their kernels, and are compiled in builds without CUDA too."""
    plans = sorted((SOURCES / "cuda").rglob("plan.cpp"))
    shared = sorted((SOURCES / "cuda" / "plan").glob("*"))
    assert len(plans) >= 5 and len(shared) >= 5
    headers = [p for p in sources("cuda") if READ_BY_PLANS.match(str(p.relative_to(SOURCES)))]
    for path in {*plans, *shared, *headers}:
        text = path.read_text()
        assert not BUILT_INS.search(code(text)), f"{path} has device code"
        for name in includes(text):
            allowed = READ_BY_PLANS.match(name)
            assert allowed or not HOST_ONLY.match(name), f"{path} includes {name}"


def test_kernels_include_from_the_root_of_the_sources() -> None:
    """So that the CPU tests of the kernels can put their models in front."""
    for path in sources("cuda"):
        for name in re.findall(r'^\s*#\s*include\s*"([^"]+)"', path.read_text(), re.M):
            known = (SOURCES / name, SOURCES / "include" / name)
            assert any(p.is_file() for p in known) or name.endswith(".inc") or "@" in name, (
                f"{path}: {name} is not a path from src/"
            )


def test_shared_memory_is_dynamic() -> None:
    for path in sources("cuda"):
        if path.parent.name != "ptx":
            assert "__shared__" not in code(path.read_text()), f"{path} has static shared memory"


# A thread that holds the GIL must find no lock to wait for: its holder may want the GIL, or have
# been another process's. The guard of a function's static that is made at run time is one, too.
GUARDED_STATIC = re.compile(
    r"^[ \t]+static (?!constexpr\b|std::atomic<|[^=;{]*\)(?: const)?(?: noexcept)? \{)", re.M
)
LOCK = re.compile(r"\b(?:mutex|lock_guard|unique_lock|scoped_lock|shared_lock|call_once)\b")
GIL = re.compile(r"\b(?:gil_scoped_\w+|PyEval_\w+Thread|PyGILState_\w+)\b")
PYTHON_CALL = re.compile(r"\.attr\((?:\"\"|\w+)\)\(")


def test_only_the_thread_pool_locks() -> None:
    for path in [*sources("."), *sorted(BINDINGS.glob("*.*"))]:
        text = code(path.read_text())
        assert not GUARDED_STATIC.search(text), f"{path} has a static that is made at run time"
        assert not LOCK.search(text) or path == SOURCES / "cpu" / "thread_pool.cpp", path


def test_the_gil_is_given_up_in_one_place() -> None:
    for path in sorted(BINDINGS.glob("*.*")):
        text = code(path.read_text())
        assert not GIL.search(text) or path.stem == "gil", f"{path}: see gil.h"
        assert not PYTHON_CALL.search(text), f"{path} calls Python without call_method"


RESEARCH = re.compile(
    r"^\s*(?:import|from) (?:research|ada_model|sass_model|softmax_forms|choices|compare_builds"
    r"|ncu|eight_bit|rates)\b|research/",
    re.M,
)


def test_nothing_that_is_shipped_needs_research() -> None:
    """It is in neither the sdist nor the wheel."""
    root = SOURCES.parent
    package = [*sorted((root / "python").rglob("*.py")), *sorted((root / "_build").rglob("*.py"))]
    build = [root / "CMakeLists.txt", *sorted((root / "cmake").iterdir())]
    build += [
        p for f in ("src", "tests", "python") for p in sorted((root / f).rglob("CMakeLists.txt"))
    ]
    assert len(package) >= 20 and len(build) >= 8
    for path in (*package, *build):
        assert not RESEARCH.search(re.sub(r"#[^\n]*", "", path.read_text())), path
    for path in [*sources("."), *sorted(BINDINGS.glob("*.*"))]:
        assert not any("research" in name for name in includes(path.read_text())), path


@pytest.mark.parametrize("name", ["torch", "ATen", "cupy", "jax", "Python.h", "nanobind"])
def test_no_framework_in_the_library(name: str) -> None:
    for path in sources("."):
        assert not any(name in included for included in includes(path.read_text())), path


ROOT = SOURCES.parent
NOTES = [*sorted(SOURCES.rglob("*.md")), *sorted((ROOT / "research").glob("*.md"))]


@pytest.mark.parametrize("note", NOTES, ids=lambda p: str(p.relative_to(ROOT)))
def test_design_notes_are_finished(note: Path) -> None:
    """They are short, and their links lead somewhere, into research/ too where it is there."""
    text = note.read_text()
    assert note.name != "DESIGN.md" or text.count("\n") <= 150
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", text):
        path = (note.parent / target).resolve() if target else note
        if (ROOT / "research") in path.parents and not (ROOT / "research").exists():
            continue
        assert path.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", path.read_text(), re.M)
            slugs = [re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings]
            assert anchor in slugs, f"{target}#{anchor}"


def test_the_rules_see_what_they_forbid() -> None:
    assert ASM.search(code('int x; asm volatile("nop;");'))
    assert not ASM.search(code('// asm\nconst char* s = "asm";'))
    assert HOST_ONLY.match("cuda_fp16.h")
    assert HOST_ONLY.match("cuda/ptx/math.cuh")
    assert not READ_BY_PLANS.match("cuda/ptx/math.cuh")
    assert not READ_BY_PLANS.match("cuda/device_guard.h")
    assert READ_BY_PLANS.match("cuda/merge/row_per_warp/traits.h")
    families = {"cuda/forward/a", "cuda/forward/b"}
    text = '#include "cuda/forward/a/traits.h"\n#include "cuda/tile/mask.cuh"\n'
    assert other_families("cuda/forward/b/kernel.cuh", text, families) == [
        "cuda/forward/a/traits.h"
    ]
    assert other_families("cuda/tile/mask.cuh", text, families)
    assert not other_families("cuda/forward/a/kernel.cuh", text, families)
    assert GUARDED_STATIC.search("void f() {\n  static const X x = g();\n}")
    assert GUARDED_STATIC.search("void f() {\n  static std::vector<int> x(g());\n}")
    assert not GUARDED_STATIC.search("static int f();\n  static constexpr int x = 1;")
    assert GUARDED_STATIC.search("  static const bool on = [](int x) { return x; }(3);")
    assert GUARDED_STATIC.search("  static Members all{list()};")
    assert not GUARDED_STATIC.search("  static float member(float x) { return x; }")
    assert not GUARDED_STATIC.search("  static std::atomic<X*> x{nullptr};\n  static_assert(y);")
    assert LOCK.search(code("const std::lock_guard lock(mutex);"))
    assert GIL.search(code("nb::gil_scoped_release unlocked;"))
    assert PYTHON_CALL.search(code('x.attr("name")(y)'))
    assert not PYTHON_CALL.search(code('text(x.attr("name"))'))
    assert RESEARCH.search("import json\nfrom sass_model import sass")
    assert RESEARCH.search('add_test(NAME x COMMAND "research/x.py")')
    assert not RESEARCH.search("from dlattn.bench import scores  # a study")
    assert includes('#include "cuda/x.h"\n# include <mma.h>\n') == ["cuda/x.h", "mma.h"]


def test_kernels_are_compiled_without_dear_headers() -> None:
    """Those of strings, vectors and CUDA's types take as long as a small kernel, in each file."""
    template = (SOURCES / "cuda" / "instance.cu.in").read_text()
    assert "#define DLATTN_PARAMETERS_ONLY\n" in template.split("#include")[0]
    left_out = re.compile(r"^#ifndef DLATTN_PARAMETERS_ONLY.*?^#endif", re.M | re.S)
    dear = ["string", "vector", "stdexcept", "functional", "algorithm", "atomic"]
    dear += ["cuda_fp16.h", "cuda_bf16.h", "cuda_fp8.h", "mma.h"]
    needed = {  # elements.cuh includes them beside others
        ("cuda/ptx/elements.cuh", "cuda_bf16.h"),
        ("cuda/ptx/elements.cuh", "cuda_fp8.h"),
        ("cuda/ptx/wmma.cuh", "mma.h"),
        ("cuda/forward/scalar/cached_keys.cuh", "cuda_fp8.h"),
        ("cuda/forward/wmma8/launch.cuh", "cuda_fp16.h"),
        ("cuda/forward/wmma_qk/kernel.cuh", "mma.h"),
        ("cuda/forward/wmma_smem/kernel.cuh", "mma.h"),
    }
    waiting = [str(p.relative_to(SOURCES)) for p in (SOURCES / "cuda").rglob("launch.cuh")]
    found = set(waiting)
    while waiting:
        name = waiting.pop()
        path = SOURCES / ("include" if name.startswith("dlattn/") else "") / name
        for other in includes(left_out.sub("", path.read_text())):
            assert other not in dear or (name, other) in needed, name
            if "/" in other and other not in found:
                found.add(other)
                waiting.append(other)
    assert "dlattn/types.h" in found and "dlattn/error.h" not in found
