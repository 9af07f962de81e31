"""Modules that stand for a package which is not installed, for the time of a test."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


@contextmanager
def installed(modules: dict[str, dict[str, Any]]) -> Iterator[bool]:
    """Let these be imported, by name and with these members, unless the package itself is there.

    Args:
        modules: Packages before what is in them, the first one first.

    Yields:
        Whether they stand for it.
    """
    package = next(iter(modules))
    if package in sys.modules or importlib.util.find_spec(package) is not None:
        yield False
        return
    for name, members in modules.items():
        module = ModuleType(name)
        module.__path__ = []
        vars(module).update(members)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    try:
        yield True
    finally:
        for name in modules:
            sys.modules.pop(name, None)
