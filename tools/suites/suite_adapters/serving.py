"""The parts of the adapters' functions: calls of dlattn that are counted, and what is missing.

A test that asks for what dlattn refuses by name, or for what its project has beside attention, is
not one that fails: it ends with `Refused`, and the reason is counted.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

from dlattn import UnsupportedError


class Refused(RuntimeError):
    """dlattn does not serve the call, and said so; RuntimeError is what the peers raise."""


served: Counter[str] = Counter()
"""Calls that dlattn computed since `reset`, by function."""
refused: Counter[str] = Counter()
"""Why it did not compute others."""


def reset() -> None:
    """Forget the calls up to now."""
    served.clear()
    refused.clear()


def refuse(reason: str) -> NoReturn:
    """End a test that needs what is not there."""
    refused[reason] += 1
    raise Refused(reason)


def serve(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of dlattn whose calls are counted, as are its refusals."""

    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        try:
            result = function(*args, **kwargs)
        except UnsupportedError as error:
            refused[str(error)] += 1
            raise Refused(str(error)) from error
        served[function.__name__] += 1
        return result

    return counted


class Module(ModuleType):
    """A module of the peer's. Other names can be imported, and are refused when called."""

    def __init__(self, name: str, **contents: Any) -> None:
        super().__init__(name)
        self.__path__: list[str] = []  # a package, so that modules in it are asked for by name
        self.__dict__.update(contents)
        sys.modules[name] = self
        parent, _, last = name.rpartition(".")
        if parent in sys.modules:
            setattr(sys.modules[parent], last, self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self.__name__}.{name}")


class Missing:
    """Something of a peer's that no adapter offers: it may be named, but not used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        refuse(f"{self._name}: not offered by the adapter")
