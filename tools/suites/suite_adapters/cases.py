"""The cases of test functions that pytest's `parametrize` makes many of, without collecting them.

One function of FlashAttention's has 600,000 cases, of which a run takes some: a case is a number,
and its values and name are made when they are needed.
"""

from __future__ import annotations

import inspect
import math
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

ROUND = 20  # cases of a function
WORD = 60  # characters of a value in a case's name


@dataclass(frozen=True)
class Axis:
    """One `parametrize`: the arguments that it sets, and the values of each of its cases."""

    names: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]


class Cases:
    """All cases of a test function, by number."""

    def __init__(
        self, function: Callable[..., Any], values: Mapping[str, Sequence[Any]] | None = None
    ) -> None:
        """
        Args:
            values: Of arguments that take other values than the file says.
        """
        self.name = function.__name__
        self.function = function
        self._axes = []
        for mark in getattr(function, "pytestmark", ()):
            if mark.name == "parametrize":
                axis = _axis(*mark.args, **mark.kwargs)
                for name in axis.names if len(axis.names) == 1 else ():
                    if values and name in values:
                        axis = Axis(axis.names, tuple((value,) for value in values[name]))
                self._axes.append(axis)
        set_by_axes = {name for axis in self._axes for name in axis.names}
        missing = [
            name
            for name, parameter in inspect.signature(function).parameters.items()
            if name not in set_by_axes and parameter.default is parameter.empty
        ]
        if missing:
            raise ValueError(f"{self.name} takes {missing}, which no parametrize sets")

    def __len__(self) -> int:
        return math.prod(len(axis.rows) for axis in self._axes)

    def arguments(self, number: int) -> dict[str, Any]:
        """The arguments of a case."""
        found: dict[str, Any] = {}
        for axis in self._axes:
            number, row = divmod(number, len(axis.rows))
            found.update(zip(axis.names, axis.rows[row], strict=True))
        return found

    def title(self, number: int) -> str:
        """The name of a case: `test[a=1,b=float16]`."""
        pairs = sorted(self.arguments(number).items())
        return f"{self.name}[{','.join(f'{name}={_word(value)}' for name, value in pairs)}]"


def _axis(names: Any, values: Any, **_: Any) -> Axis:
    if isinstance(names, str):
        names = tuple(name.strip() for name in names.split(",") if name.strip())
    rows = []
    for value in values:
        if type(value).__name__ == "ParameterSet":  # of pytest.param
            rows.append(tuple(value.values))
        else:
            rows.append(tuple(value) if len(names) > 1 else (value,))
    return Axis(tuple(names), tuple(rows))


def _word(value: Any) -> str:
    text = str(value) if not callable(value) else getattr(value, "__name__", str(value))
    text = text.removeprefix("torch.").replace(" ", "")
    if len(text) > WORD:  # lists of hundreds of lengths
        text = f"{text[:WORD]}~{zlib.crc32(text.encode()):08x}"
    return text


def test_functions(module: ModuleType) -> dict[str, Callable[..., Any]]:
    """The test functions that a module defines itself."""
    return {
        name: thing
        for name, thing in vars(module).items()
        if name.startswith("test")
        and inspect.isfunction(thing)
        and thing.__module__ == module.__name__
    }


def chosen(all_cases: Sequence[Cases], pattern: str, cases: int) -> list[tuple[Cases, int]]:
    """Keep of the cases whose names match at most so many of each function, in the order to run
    them.

    Those with the least CRC-32 come first, in rounds of ROUND cases of each function: when time
    ends, every function has had its turn.
    """
    kept = []
    for order, group in enumerate(all_cases):
        ranked = sorted(
            (zlib.crc32(f"{group.name} {number}".encode()), number)
            for number in range(len(group))
            if not pattern or re.search(pattern, group.title(number))
        )
        for rank, (_, number) in enumerate(ranked[: cases or None]):
            kept.append((rank // ROUND, order, rank, group, number))
    kept.sort(key=lambda entry: entry[:3])
    return [entry[3:] for entry in kept]
