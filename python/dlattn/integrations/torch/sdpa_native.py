"""Native kernels in the place of torch's attention, which run without Python and the GIL.

They lie above Python's (`activation`), which serve where there is no native one. What dlattn does
not serve they hand on to torch's own kernel, which they call by its function in torch's C ABI: so
they are put only where torch's own kernel is, and no other one that somebody put there.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.utils._python_dispatch import _disable_current_modes

from dlattn import _core
from dlattn.integrations.torch.sdpa_stats import count_refused

_FOR_CPU = "_scaled_dot_product_flash_attention_for_cpu"

# The operators with native kernels, and the key of torch's dispatcher that these are for.
NATIVE = {_FOR_CPU: "CPU", f"{_FOR_CPU}_backward": "CPU"}

# Why an operator's kernel is not native; empty if it is.
why: dict[str, str] = {}


def replaceable(names: Collection[str]) -> set[str]:
    """Those of the operators in NATIVE for which the dispatcher has torch's own kernel now."""
    found = set()
    for name in names:
        own = re.compile(rf"^{NATIVE[name]}: registered at .*Register{NATIVE[name]}\w*\.cpp:", re.M)
        if own.search(torch._C._dispatch_dump(f"aten::{name}")):
            found.add(name)
        else:
            why[name] = "it was replaced before"
    return found


def register(names: Collection[str]) -> None:
    """Put native kernels into torch's dispatcher, above any that are there, while none serves."""
    why.update(_register(names))
    if any(not why[name] and not _is_reached(name) for name in names):
        _core.unregister_torch_sdpa()
        why.update(dict.fromkeys(names, "torch's own kernel is not reached by its function"))


def _register(names: Collection[str]) -> dict[str, str]:
    folder = str(Path(torch.__file__).parent / "lib")
    found = {}
    for name in names:
        schema = getattr(torch.ops.aten, name).default._schema
        arguments = tuple(f"{argument.type} {argument.name}" for argument in schema.arguments)
        found[name] = _core.register_torch_sdpa(
            folder, NATIVE[name], {name: arguments}, count_refused
        )
    return found


def _is_reached(name: str) -> bool:
    """Whether a native kernel that serves nothing leads to torch's own.

    It would call itself where torch's function called the operator, and raises then.
    """
    call = getattr(torch.ops.aten, name).default
    with _disable_current_modes(), torch.no_grad():
        x = torch.zeros(1, 1, 1, 8, device="cpu", dtype=torch.float32)
        backward = (x, x, x, x, x, x[..., 0], 0.0, False)
        try:
            call(*(backward if name.endswith("_backward") else backward[:3]))
        except RuntimeError:
            return False
    return True


def serve(serving: bool, gradients: str) -> None:
    """Let native kernels serve calls, and which backward ones, or hand all on."""
    _core.serve_torch_sdpa(serving, gradients)


@contextmanager
def in_python() -> Iterator[None]:
    """Python's kernels for a block of code. For tests."""
    names = [name for name, reason in why.items() if not reason]
    _core.unregister_torch_sdpa()
    try:
        yield
    finally:
        why.update(_register(names))
