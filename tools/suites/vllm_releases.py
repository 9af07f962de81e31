"""dlattn's plug-in beside releases of vLLM: does it register, what is said, what is missing?

    pip download --no-deps --no-binary vllm vllm==0.33.0 && tar xf vllm-0.33.0.tar.gz
    python tools/suites/vllm_releases.py vllm-*/ --json tests/python/support/vllm_releases.json

Each folder is an unpacked source distribution or wheel of vLLM. Its registry of attention backends
runs as it is, with stand-ins for what it imports; the rest is read, not run, so that nothing else
need be installed. The tests have stand-ins of each release made of these facts.
"""

from __future__ import annotations

import argparse
import ast
import json
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from dlattn.integrations import engines, vllm_plugin

REGISTRIES = ("vllm.v1.attention.backends.registry", "vllm.attention.backends.registry")
PLATFORM = "vllm.platforms.cpu"
OWN = "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"


class Answers(logging.Handler):
    """Keeps the lines that the plug-in logs."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def facts(folder: Path) -> dict[str, Any]:
    """A release's form, what the plug-in did there, and the names that the backend lacks."""
    path = next(name for name in REGISTRIES if source(folder, name).exists())
    platform = parameters(tree(folder, PLATFORM), "get_attn_backend_cls")
    with_names, lines = registered(folder, path, platform)
    return {
        "registry": path,
        "register_backend": parameters(tree(folder, path), "register_backend"),
        "platform": platform,
        "registered": with_names,
        "said": [re.sub(r"vllm [\w ]+ \(", "vllm (", line) for line in lines],
        "missing": missing(folder),
    }


def source(folder: Path, module: str) -> Path:
    """A module's file, or that of a package."""
    path = folder.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def tree(folder: Path, module: str) -> ast.Module:
    """A module as the interpreter would parse it."""
    return ast.parse(source(folder, module).read_text())


def parameters(module: ast.Module, function: str) -> list[str]:
    """The names of a function's or method's parameters, without cls."""
    (found,) = (
        n for n in ast.walk(module) if isinstance(n, ast.FunctionDef) and n.name == function
    )
    return [p.arg for p in (*found.args.args, *found.args.kwonlyargs) if p.arg != "cls"]


def missing(folder: Path) -> list[str]:
    """Names that dlattn's backend imports, and this release has not."""
    backend = Path(vllm_plugin.__file__).with_name("vllm.py")
    lacking = []
    for node in ast.walk(ast.parse(backend.read_text())):
        if isinstance(node, ast.Import):
            asked = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            asked = [(node.module, alias.name) for alias in node.names]
        else:
            continue
        for module, name in asked:
            if module.partition(".")[0] != "vllm":
                continue
            there = source(folder, module).exists()
            if not there or (name and name not in set(defined(tree(folder, module)))):
                lacking.append(f"{module}.{name}".rstrip("."))
    return sorted(lacking)


def defined(module: ast.Module) -> Iterator[str]:
    """Names that a module has: of classes, functions, imports and assignments, under any `if`."""
    for node in ast.walk(module):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.Assign):
            yield from (t.id for t in node.targets if isinstance(t, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value  # vllm.platforms makes current_platform in __getattr__


def registered(folder: Path, path: str, parameters: list[str]) -> tuple[bool, list[str]]:
    """Whether the registry takes the plug-in, twice as well as once, and what is logged."""
    found: dict[str, Any] = {"OWN": OWN}
    code = f"def get_attn_backend_cls(cls, {', '.join(parameters)}): return OWN"
    exec(code, found)
    platform = type(
        "CpuPlatform",
        (),
        {
            "is_cpu": classmethod(lambda cls: True),
            "get_attn_backend_cls": classmethod(found["get_attn_backend_cls"]),
        },
    )
    hook = platform.__dict__["get_attn_backend_cls"]
    modules: dict[str, dict[str, Any]] = {
        "vllm.logger": {"init_logger": logging.getLogger},
        "vllm.utils.import_utils": {"resolve_obj_by_qualname": str},
        "vllm.platforms": {"current_platform": platform()},
        path: {},
    }
    stand_in(modules)
    answers, log = Answers(), logging.getLogger(engines.__name__)
    log.addHandler(answers)
    try:
        registry = sys.modules[path]
        exec(compile(tree(folder, path), str(source(folder, path)), "exec"), vars(registry))
        enumeration: Any = vars(registry)["AttentionBackendEnum"]
        members = set(enumeration.__members__)
        engines._told.clear()
        for _ in range(2):
            vllm_plugin.register()
        more = set(enumeration.__members__) - members
        overrides = vars(registry).get("_ATTN_OVERRIDES", {})
    finally:
        log.removeHandler(answers)
        for name in [n for n in sys.modules if n.partition(".")[0] == "vllm"]:
            del sys.modules[name]
    hooked = platform.__dict__["get_attn_backend_cls"] is not hook
    complete = {vllm_plugin.NAME} if hooked and overrides else set()
    if more != complete or hooked != bool(overrides):
        raise RuntimeError(f"half registered with {folder}: {more}, {overrides}, hook: {hooked}")
    return bool(more), answers.lines


def stand_in(modules: dict[str, dict[str, Any]]) -> None:
    """Have these modules, and the packages around them, be imported in the place of vLLM's."""
    for name, members in modules.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            inner = ".".join(parts[:end])
            if inner not in sys.modules:
                made = ModuleType(inner)
                made.__path__ = []
                sys.modules[inner] = made
                if end > 1:
                    setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], made)
        vars(sys.modules[name]).update(members)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path, help="vllm-VERSION, unpacked")
    parser.add_argument("--json", type=Path, help="where the facts go")
    args = parser.parse_args()
    found = {}
    for folder in args.folders:
        version = re.sub(r"^vllm-", "", folder.resolve().name)
        found[version] = facts(folder)
        print(version, found[version])
    ordered = sorted(found, key=lambda version: [int(part) for part in version.split(".")])
    if args.json:
        rows = ",\n".join(f" {json.dumps(v)}: {json.dumps(found[v])}" for v in ordered)
        args.json.write_text(f"{{\n{rows}\n}}\n")


if __name__ == "__main__":
    main()
