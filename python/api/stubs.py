"""The stubs that `write.py` writes for type checkers: overloads, and the names of kernels."""

from __future__ import annotations

import re
from collections.abc import Iterator
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

_KERNELS_BODY = """\
from typing import Literal, TypeAlias

Kernel: TypeAlias = Literal[
{names}
]
"""

# By module, the head of its stub and the types of results. NumPy's types have a dtype, and lse is
# float32: so out and lse are arrays of any.
MODULES = {
    "_attention.py": (_OVERLOADS_HEAD, ("NDArray[Any]", "_Array")),
    "integrations/torch/_functions.py": (_TORCH_HEAD, ("Tensor",)),
}
_RESULTS = (("Literal[False] = False", "{0}"), ("Literal[True]", "tuple[{0}, {0}]"))


def overloads(name: str, module: str) -> str:
    """Each function of a written module, with a result of q's type, and with lse if asked."""
    head, arrays = MODULES[name]
    blocks = [head]
    signatures = re.compile(r"^def _?(\w+)\(\n(    q: Tensor,\n.*?)^\) -> Any:", re.M | re.S)
    for function, parameters in signatures.findall(module):
        forms = [(flag, array, form) for flag, form in _RESULTS for array in arrays]
        for flag, array, form in (*forms, ("bool", "Tensor", "Any")):  # a flag known when it runs
            typed = parameters.replace("    q: Tensor,", f"    q: {array},")
            typed = re.sub(r"\breturn_lse: .*", f"return_lse: {flag},", typed)
            blocks.append(f"@overload\ndef {function}(\n{typed}) -> {form.format(array)}: ...\n")
    return "".join(blocks)


def kernel_names(root: Path) -> str:
    """All that `kernel` accepts, as a Literal."""
    lines = "\n".join(f'    "{name}",' for name in _names(root))
    return _KERNELS_BODY.format(names=lines)


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
