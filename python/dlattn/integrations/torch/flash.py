"""The functions of `dlattn.flash_attn` for torch tensors of which a gradient is wanted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import dlattn.integrations.torch.backward  # noqa: F401  registers operators
from dlattn._errors import UnsupportedError
from dlattn.integrations.torch import _functions
from dlattn.integrations.torch.gradients import deterministic_gradients


def attention(*given: Any, deterministic: bool, **named: Any) -> Any:
    """`dlattn.attention` with gradients, for the keywords that flash-attn's functions pass."""
    return _call(_functions.attention, deterministic, given, named)


def attention_varlen(*given: Any, deterministic: bool, **named: Any) -> Any:
    """The same of `dlattn.attention_varlen`."""
    return _call(_functions.attention_varlen, deterministic, given, named)


def _call(function: Callable[..., Any], deterministic: bool, given: Any, named: Any) -> Any:
    for argument in ("q_descale", "k_descale", "v_descale", "page_table", "out"):
        if named.pop(argument, None) is not None:
            raise UnsupportedError(
                f"{argument} is given and an input requires grad; accepted: None, as a call with "
                "it has no gradients"
            )
    with deterministic_gradients(deterministic), _without_autocast():
        return function(*given, **named)


@contextmanager
def _without_autocast() -> Iterator[None]:
    """Gradients change no dtype: calls of which none is wanted cast nothing under autocast."""
    enabled = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    try:
        for device in enabled:
            torch.set_autocast_enabled(device, False)
        yield
    finally:
        for device in enabled:
            torch.set_autocast_enabled(device, True)
