"""No module of the package imports itself by way of others, imports inside functions included."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

Graph = dict[str, set[str]]


def modules_in(package: Path) -> dict[str, Path]:
    """Files of a package by the names of their modules: a stub where there is nothing else."""
    files = [*package.rglob("*.pyi"), *package.rglob("*.py")]
    modules = {}
    for file in files:
        parts = file.relative_to(package.parent).with_suffix("").parts
        modules[".".join(part for part in parts if part != "__init__")] = file
    return modules


def imported_by(file: Path, modules: Iterable[str]) -> set[str]:
    """Those of the modules that a file imports, wherever it does, not for type checkers alone."""
    found = set()
    pending: list[ast.AST] = [ast.parse(file.read_text())]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            pending += node.orelse
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None and node.level == 0, f"{file}: a relative import"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found.add(name if name in modules else node.module)
        pending += ast.iter_child_nodes(node)
    return found.intersection(modules)


def graph_of(package: Path) -> Graph:
    """Modules, and those that run before they do: importing a.b.c runs a and a.b as well.

    What a module imports of its own parents counts; that they are imported before it does not.
    """
    modules = modules_in(package)
    graph: Graph = {}
    for module, file in modules.items():
        graph[module] = set()
        for name in imported_by(file, modules):
            parts = name.split(".")
            parents = {".".join(parts[:n]) for n in range(1, len(parts))}
            graph[module] |= {name, *(p for p in parents if not module.startswith(f"{p}."))}
        graph[module].discard(module)
    return graph


def cycle_of(graph: Graph) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_dlattn_has_no_import_cycle() -> None:
    graph = graph_of(ROOT / "python" / "dlattn")
    assert "dlattn._core" in graph["dlattn._attention"]
    assert cycle_of(graph) == []


def test_cycles_are_found(tmp_path: Path) -> None:
    """By way of a parent package and of an import inside a function."""
    package = tmp_path / "made_up"
    texts = {
        "__init__": "from made_up import high",
        "high/__init__": "def f():\n    from made_up import low",
        "high/words": "import sys",
        "low": "from made_up.high.words import table",
    }
    for name, text in texts.items():
        path = package / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert set(cycle_of(graph_of(package))) == {"made_up.high", "made_up.low"}
    (package / "low.py").write_text("if TYPE_CHECKING:\n    from made_up.high import words")
    assert cycle_of(graph_of(package)) == []
    (package / "low.py").write_text("from made_up import __version__")  # which low's parent has
    assert set(cycle_of(graph_of(package))) == {"made_up", "made_up.high", "made_up.low"}
