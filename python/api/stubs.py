"""The stubs that `write.py` writes for type checkers: overloads, and the names of kernels."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

KERNELS_HEAD = "# Written by python/api/write.py from src/cuda: run that after a change there.\n"

_OVERLOADS_HEAD = """\
from typing import Any, Literal, TypeVar, overload

from numpy.typing import NDArray

from dlattn._types import (
    Causal,
    Kernel,
    Layout,
    OutDType,
    Precision,
    QuantizedKV,
    Tensor,
    Window,
)

_Array = TypeVar("_Array")

"""

_TORCH_HEAD = """\
from typing import Any, Literal, overload

from torch import Tensor

from dlattn._types import Causal, Layout, Precision, Window

"""

# NumPy's types have a dtype, and lse is float32: so out and lse are arrays of any.
_ARRAYS = ("NDArray[Any]", "_Array")

_RESULTS = (
    ("Literal[False] = False", "{0}"),
    ("Literal[True]", "tuple[{0}, {0}]"),
)
_KERNELS_BODY = """\
from typing import Literal, TypeAlias

Kernel: TypeAlias = Literal[
{names}
]
"""


def overloads(functions: Mapping[str, Sequence[str]]) -> str:
    """Each function, given its parameters, with a result of q's type, and with lse if asked."""
    blocks = [_OVERLOADS_HEAD]
    for function, parameters in functions.items():
        forms = [(flag, array, form) for flag, form in _RESULTS for array in _ARRAYS]
        for flag, array, form in (*forms, ("bool", "Tensor", "Any")):  # a flag known when it runs
            lines = "".join(f"    {_typed(line, array, flag)}\n" for line in parameters)
            blocks.append(f"@overload\ndef {function}(\n{lines}) -> {form.format(array)}: ...\n")
    return "".join(blocks)


def torch_overloads(module: str) -> str:
    """Each function of a module whose results are torch's tensors, as its definition has it."""
    blocks = [_TORCH_HEAD]
    found = re.findall(r"^def (\w+)\(\n(.*?)^\) -> Any:", module, re.MULTILINE | re.DOTALL)
    for function, parameters in found:
        for flag, form in (*_RESULTS, ("bool", "Any")):
            lines = re.sub(
                r"^( +)return_lse: .*", rf"\1return_lse: {flag},", parameters, flags=re.MULTILINE
            )
            head = f"@overload\ndef {function}(\n{lines})"
            blocks.append(f"{head} -> {form.format('Tensor')}: ...\n")
    return "".join(blocks)


def kernel_names(root: Path) -> str:
    """All that `kernel` accepts, as a Literal."""
    lines = "\n".join(f'    "{name}",' for name in _names(root))
    return _KERNELS_BODY.format(names=lines)


def _typed(parameter: str, array: str, flag: str) -> str:
    if parameter == "q: Tensor,":
        return f"q: {array},"
    return re.sub(r"^return_lse: .*", f"return_lse: {flag},", parameter)


def _names(root: Path) -> Iterator[str]:
    """ "auto", the CPU's kernel, and each family that computes attention, with its variants."""
    yield "auto"
    yield "cpu"
    instances = (root / "src" / "cuda" / "instances.cmake").read_text(encoding="utf-8")
    found = re.findall(r"^dlattn_family\((?:forward|backward) (\w+)", instances, re.MULTILINE)
    for family in dict.fromkeys(found):
        yield family
        folder = root / "src" / "cuda" / "forward" / family
        plan = folder / "plan.cpp"
        text = plan.read_text(encoding="utf-8") if plan.is_file() else ""
        if "accepted_variants()" not in text:
            continue
        traits = (folder / "traits.h").read_text(encoding="utf-8")
        table = re.search(r"kVariantNames\[\w*\] = \{([^}]*)\}", traits)
        if table is None:
            raise SystemExit(f"{folder}/traits.h has no kVariantNames")
        variants = re.findall(r'"(\w+)"', table[1])
        packing = ("packed", "unpacked") if '"unpacked"' in text else ()
        for variant in variants:
            yield f"{family}:{variant}"
            yield from (f"{family}:{variant}+{word}" for word in packing)
        yield from (f"{family}:{word}" for word in packing)
