"""Operators of torchvision, for a torch that cannot load them: SGLang imports torchvision."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

_defined: list[Any] = []  # a library's operators go when it does


def define_operators() -> None:
    """Declare what torchvision registers functions for, if SGLang is here and its library is not.

    As beside a torch for CPUs, where torchvision comes built for CUDA. Nothing computes with them.
    """
    if importlib.util.find_spec("sglang") is None:
        return
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        library = importlib.import_module("torch").library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _defined.append(library)
    except ImportError:
        pass  # SGLang will tell
