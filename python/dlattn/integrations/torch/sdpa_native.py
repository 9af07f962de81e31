"""Native kernels in the place of torch's attention, which run without Python and the GIL.

They lie above Python's (`activation`), which serve where there is no native one. Calls that dlattn
does not serve the CPU's hand on to torch's own kernel, which they call by its function in torch's C
ABI: so they are put only where torch's own kernel is, and no other one that somebody put there.
That function turns every exception into a RuntimeError, and torch.OutOfMemoryError is to stay one:
so CUDA's leave such calls, and those whose memory is not to be had, to the kernel in Python, by an
operator of the same name in `torch.ops.dlattn`. What that raises they let torch raise again.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from dlattn import _core
from dlattn.integrations.torch.sdpa_stats import count_refused

Kernel = Callable[..., Any]  # in Python, of a set of dispatch keys and an operator's arguments

_FOR_CPU = "_scaled_dot_product_flash_attention_for_cpu"
_FOR_CUDA = [f"_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn")]

# Whether CUDA's kernels are native where they can be. If not, Python's serve.
ON_CUDA = os.environ.get("DLATTN_NATIVE_ON_CUDA") != "0"

# The operators with native kernels, and the key of torch's dispatcher that these are for.
NATIVE = {_FOR_CPU: "CPU", f"{_FOR_CPU}_backward": "CPU"} | {
    name: "CUDA" for forward in _FOR_CUDA for name in (forward, f"{forward}_backward")
}
# This one's hands calls on alone, those that are for dlattn to Python.
NATIVE["_flash_attention_backward"] = "CUDA"

# Why an operator's kernel is not native; empty if it is.
why: dict[str, str] = {}

_FOLDER = str(Path(torch.__file__).parent / "lib")
_library: Any = torch.library.Library("dlattn", "FRAGMENT")


def replaceable(names: Iterable[str]) -> set[str]:
    """Those of the operators in NATIVE for which the dispatcher has torch's own kernel now."""
    found = set()
    for name in names:
        own = re.compile(rf"^{NATIVE[name]}: registered at .*Register{NATIVE[name]}\w*\.cpp:", re.M)
        if NATIVE[name] == "CUDA" and not ON_CUDA:
            why[name] = "it is switched off"
        elif own.search(torch._C._dispatch_dump(f"aten::{name}")):
            found.add(name)
        else:
            why[name] = "it was replaced before"
    return found


def register(kernels: dict[str, Kernel]) -> None:
    """Put native kernels into torch's dispatcher, above Python's `kernels`, while none serves."""
    for name, kernel in kernels.items():
        if NATIVE[name] == "CUDA":
            leave_calls_to(kernel, name, "CUDA")
    why.update(_register(kernels))
    if any(not why[name] and not _is_reached(name) for name in kernels if NATIVE[name] == "CPU"):
        _core.unregister_torch_sdpa()
        why.update(dict.fromkeys(kernels, "torch's own kernel is not reached by its function"))


def _register(names: Iterable[str]) -> dict[str, str]:
    return {name: _register_for(NATIVE[name], name) for name in names}


def _register_for(key: str, name: str) -> str:
    if NATIVE[name] == "CUDA" and (reason := why_exceptions_are_lost()):
        return reason
    arguments = getattr(torch.ops.aten, name).default._schema.arguments
    schemas = {name: tuple(f"{argument.type} {argument.name}" for argument in arguments)}
    return _core.register_torch_sdpa(_FOLDER, key, schemas, count_refused)


class _Raised(threading.local):
    """The last exception of a kernel in Python on this thread; float() raises it again."""

    error: BaseException | None = None

    def __float__(self) -> float:
        error, self.error = self.error, None
        try:
            raise error or RuntimeError("torch did not call a kernel of dlattn's")
        finally:
            del error


_raised = _Raised()


def in_passing_order(results: Sequence[Any]) -> list[Any]:
    """Results of an operator, or their types, as a native kernel gets them from one in Python.

    torch's C function that calls an operator gives the last result the type of the first, and so
    on, so the types must read the same both ways. Of nine results the fifth and sixth are numbers
    and the others are tensors: the fourth and fifth change places.
    """
    if len(results) != 9:
        return list(results)
    return [*results[:3], results[4], results[3], *results[5:]]


# The kernels in Python that get calls, by operator and key.
_left: dict[tuple[str, str], Kernel] = {}


def leave_calls_to(kernel: Kernel, name: str, key: str) -> None:
    """Give the operator of this name in torch.ops.dlattn the kernel."""
    schema = getattr(torch.ops.aten, name).default._schema
    types = in_passing_order([str(result.type) for result in schema.returns])
    nothing = tuple(0 if kind == "int" else None for kind in types)

    def keep_what_is_raised(*arguments: Any, **options: Any) -> Any:
        try:
            return tuple(in_passing_order(_left[name, key](*arguments, **options)))
        except BaseException as error:
            _raised.error = error
            return nothing

    if not hasattr(torch.ops.dlattn, name):
        arguments = str(schema).removeprefix("aten::").rpartition(" -> ")[0]
        _library.define(f"{arguments} -> ({', '.join(types)})")
    if (name, key) not in _left:
        _library.impl(name, keep_what_is_raised, key, with_keyset=True)
    _left[name, key] = kernel


class _Probe(BaseException):
    pass


@cache
def why_exceptions_are_lost() -> str:
    """Empty if torch raises what a kernel in Python raised when a native one asks for it."""
    _library.define("_raise(Tensor x) -> Tensor")
    if reason := _core.register_torch_raise(_FOLDER, _raised):
        return reason
    with _disable_current_modes():
        _raised.error = probe = _Probe()
        try:
            torch.ops.dlattn._raise(torch.empty(0, device="cpu"))
        except BaseException as error:
            return "" if error is probe else f"torch raises {error!r} instead of an exception"
    return "torch raises no exception"


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


def remove() -> None:
    """Take native kernels out of torch's dispatcher, which no other thread may be calling."""
    _core.unregister_torch_sdpa()
    why.clear()


@contextmanager
def in_python() -> Iterator[None]:
    """Python's kernels for a block of code. For tests."""
    names = [name for name, reason in why.items() if not reason]
    _core.unregister_torch_sdpa()
    try:
        yield
    finally:
        why.update(_register(names))
