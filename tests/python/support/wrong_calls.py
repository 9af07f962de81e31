"""Calls that must raise, and how that is checked."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import pytest
from arrays import qkv

from dlattn import UnsupportedError

Q, K, V = qkv()  # (2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8)


@dataclass
class Wrong:
    """A call of attention(Q, K, V) with some arguments changed, and what its message must hold."""

    changes: dict[str, Any]
    words: tuple[str, ...]
    error: type[Exception] = UnsupportedError
    defaults: dict[str, Any] = field(default_factory=lambda: {"q": Q, "k": K, "v": V})

    def call(self, function: Any) -> Any:
        arguments = {**self.defaults, **self.changes}
        arguments = {
            name: value() if inspect.isfunction(value) else value
            for name, value in arguments.items()
        }
        return function(**arguments)


def check(wrong: Wrong, function: Any) -> None:
    with pytest.raises((UnsupportedError, TypeError)) as caught:
        wrong.call(function)
    assert type(caught.value) is wrong.error
    for word in wrong.words:
        assert word in str(caught.value)
