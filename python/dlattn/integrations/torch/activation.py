"""torch's own scaled_dot_product_attention by dlattn: its kernels are replaced, nothing above them.

`activate()` puts dlattn's kernels where torch keeps flash-attention, memory-efficient attention and
cuDNN's (CUDA) and flash-attention for the CPU. All that leads there is served:
F.scaled_dot_product_attention, nn.MultiheadAttention, varlen_attn, compiled graphs. Which of these
operators it is torch decides as before, and so whose backward kernel computes gradients: it gets
out and the logarithms of the softmax's denominators as torch's own forward has them.

What dlattn does not serve goes to the kernel that was there, and is counted with the reason.

Source: torch.library, and torch.nn.attention's registry of flash-attention implementations (2.10
and later).
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import attention as torch_attention

from dlattn.integrations.torch.sdpa import KERNELS, Refused
from dlattn.integrations.torch.sdpa_stats import count_refused, count_served

NAME = "dlattn"
_HAS_REGISTRY = hasattr(torch_attention, "activate_flash_attention_impl")


class _State:
    """The state of dlattn in torch's dispatcher; `changing` is held to change it.

    Attributes:
        installed: The kernels are there. They stay: other threads may be calling them.
        serving: They compute. Otherwise they hand every call on to what was there before.
        blocks: How many blocks of `active()` are open.
        then_serving: Whether dlattn stays active when the last of them ends, and else ...
        then_other: ... which other implementation of torch's registry is to be active.
    """

    def __init__(self) -> None:
        self.changing = threading.RLock()
        self.installed: Any = None
        self.serving = False
        self.blocks = 0
        self.then_serving = False
        self.then_other: str | None = None


_state = _State()


def _with_fallback(name: str, kernel: Callable[..., Any], before: Any) -> Callable[..., Any]:
    def serve(keys: Any, *arguments: Any, **options: Any) -> Any:
        if _state.serving:
            try:
                results = kernel(*arguments, **options)
            except Refused as refusal:
                count_refused(name, str(refusal))
            else:
                count_served(name)
                return results
        return before.call_boxed(keys, *arguments, **options)

    return serve


def _install() -> None:
    """Put dlattn's kernels into torch's dispatcher, once."""
    if _state.installed is not None:
        return
    library: Any = torch.library.Library("aten", "IMPL")
    backends = ["CPU", *(["CUDA"] if torch.version.cuda else [])]
    # The kernels that were there must be asked for before anything is put in their place.
    replaced = []
    for backend in backends:
        for name, kernel in KERNELS[backend].items():
            packet = getattr(torch.ops.aten, name, None)
            if packet is not None:
                before = torch.library.get_kernel(packet.default, backend)
                replaced.append((packet.default, backend, _with_fallback(name, kernel, before)))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*previously registered kernel")
        for operator, backend, function in replaced:
            library.impl(operator, function, backend, with_keyset=True, allow_override=True)
    _state.installed = library


class _Active:
    """That dlattn serves, as torch's registry holds it, until `remove`."""

    def __init__(self) -> None:
        with _state.changing:
            _install()
            _state.serving = True

    def remove(self) -> None:
        _state.serving = False


def activate() -> None:
    """Let torch's attention be computed by dlattn, in all of the process, until `deactivate()`.

    In torch's registry dlattn is the flash-attention implementation "dlattn"
    (`torch.nn.attention.activate_flash_attention_impl("dlattn")` is the same); another that is
    active is restored to torch's own first. Graphs that were compiled before are served too: they
    call the same operators.

    The first time, kernels are put into torch's dispatcher, which no other thread may be calling
    meanwhile. They stay there, and from then on any thread may activate and deactivate.

    Raises:
        RuntimeError: torch is older than 2.9, which has no way to call a kernel that is replaced.
    """
    with _state.changing:
        _serve()
        _state.then_serving = True


def _serve() -> None:
    if not hasattr(torch.library, "get_kernel"):
        raise RuntimeError(f"torch is {torch.__version__}; accepted: 2.9 or later")
    if not _HAS_REGISTRY:
        _Active()
    elif torch_attention.current_flash_attention_impl() != NAME:
        torch_attention.activate_flash_attention_impl(NAME)


def deactivate() -> None:
    """Let torch's own kernels compute again; nothing happens where dlattn is not active.

    They are called through Python then, which takes some microseconds a call. Blocks of `active()`
    keep dlattn active until the last of them ends.
    """
    with _state.changing:
        if _state.blocks:
            _state.then_serving, _state.then_other = False, None
        else:
            _stop_serving()


def _stop_serving() -> None:
    if not _HAS_REGISTRY:
        _state.serving = False
    elif torch_attention.current_flash_attention_impl() == NAME:
        _restore()


def _restore() -> None:
    if hasattr(torch_attention, "restore_flash_attention_impl"):
        torch_attention.restore_flash_attention_impl()
        return
    # 2.10 has no function for it: what it does when another implementation is activated.
    registry: Any = torch_attention._registry
    registry._FLASH_ATTENTION_ACTIVE[1].remove()
    registry._FLASH_ATTENTION_ACTIVE = None


def is_active() -> bool:
    """Whether torch's attention is dlattn's now."""
    return _state.serving


@contextmanager
def active() -> Iterator[None]:
    """`activate()` for a block of code; what was active before is so again behind it.

    Blocks may be nested and overlap, in threads too: the last one that ends restores what the first
    one found.
    """
    with _state.changing:
        if _state.blocks == 0:
            _state.then_serving = is_active()
            _state.then_other = (
                torch_attention.current_flash_attention_impl() if _HAS_REGISTRY else None
            )
        _serve()
        _state.blocks += 1
    try:
        yield
    finally:
        with _state.changing:
            _state.blocks -= 1
            if _state.blocks == 0 and is_active() and not _state.then_serving:
                _stop_serving()
                if _state.then_other is not None:
                    torch_attention.activate_flash_attention_impl(_state.then_other)


if _HAS_REGISTRY:
    torch_attention.register_flash_attention_impl(NAME, register_fn=_Active)
