"""torch's own scaled_dot_product_attention by dlattn: its kernels are replaced, nothing above them.

`activate()` puts dlattn's kernels where torch keeps flash-attention, memory-efficient attention and
cuDNN's (CUDA) and flash-attention for the CPU, and of their backward operators. All that leads
there is served: F.scaled_dot_product_attention, nn.MultiheadAttention, varlen_attn, compiled
graphs. Which of these operators it is torch decides as before. Forward and backward meet in out and
the logarithms of the softmax's denominators alone, which mean the same to torch's kernels and to
dlattn's: whose they are is decided for each call.

What dlattn does not serve goes to the kernel that was there, and is counted with the reason.

Source: torch.library, and torch.nn.attention's registry of flash-attention implementations (2.10
and later).
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch.nn import attention as torch_attention

import dlattn
from dlattn.integrations.torch import sdpa, sdpa_backward, sdpa_choice, sdpa_native
from dlattn.integrations.torch.sdpa import Refused
from dlattn.integrations.torch.sdpa_stats import count_refused, count_served

Gradients = Literal["auto", "dlattn", "torch"]

NAME = "dlattn"
_HAS_REGISTRY = hasattr(torch_attention, "activate_flash_attention_impl")


class _Block:
    """A block of `active()`: whose backward kernels compute while no later one is open."""

    def __init__(self, gradients: Gradients) -> None:
        self.gradients = gradients


class _State:
    """The state of dlattn in torch's dispatcher; `changing` is held to change it.

    Attributes:
        library: Holds the kernels. They stay: other threads may be calling them.
        installed: The names of those that are there.
        serving: They compute. Otherwise they hand every call on to what was there before.
        gradients: Whose backward kernels compute while they do.
        blocks: The blocks of `active()` that are open, the last to begin last.
        then_serving: Whether dlattn stays active when the last of them ends, ...
        then_gradients: ... with whose backward kernels, and else ...
        then_other: ... which other implementation of torch's registry is to be active.
    """

    def __init__(self) -> None:
        self.changing = threading.RLock()
        self.library: Any = torch.library.Library("aten", "IMPL")
        self.installed: set[str] = set()
        self.serving = False
        self.gradients: Gradients = "auto"
        self.blocks: list[_Block] = []
        self.then_serving = False
        self.then_gradients: Gradients = "auto"
        self.then_other: str | None = None

    def serve(self, serving: bool, gradients: Gradients) -> None:
        self.serving, self.gradients = serving, gradients
        sdpa_native.serve(serving, gradients)


_state = _State()


def _where_gradients_are_ours(name: str) -> Callable[..., bool]:
    preferred = sdpa_choice.PREFERRED[name]

    def ours(*arguments: Any, **options: Any) -> bool:
        if _state.gradients != "auto":
            return _state.gradients == "dlattn"
        return preferred(*arguments, **options)

    return ours


def _with_fallback(
    name: str, kernel: Callable[..., Any], before: Any, ours: Callable[..., bool] | None
) -> Callable[..., Any]:
    """`ours` tells which calls the kernel is for; None: all."""

    def serve(keys: Any, *arguments: Any, **options: Any) -> Any:
        if _state.serving and (ours is None or ours(*arguments, **options)):
            try:
                results = kernel(*arguments, **options)
            except Refused as refusal:
                count_refused(name, str(refusal))
            else:
                count_served(name)
                return results
        return before.call_boxed(keys, *arguments, **options)

    return serve


def _install(backward_too: bool) -> None:
    """Put dlattn's kernels into torch's dispatcher, each once."""
    # The kernels that were there must be asked for before anything is put in their place.
    replaced = []
    for backend in ("CPU", *(["CUDA"] if torch.version.cuda else [])):
        backward = sdpa_backward.KERNELS[backend]
        for name, kernel in (sdpa.KERNELS[backend] | backward).items():
            is_wanted = backward_too or name not in backward
            packet = getattr(torch.ops.aten, name, None)
            if packet is None or not is_wanted or name in _state.installed:
                continue
            before = torch.library.get_kernel(packet.default, backend)
            ours = _where_gradients_are_ours(name) if name in backward else None
            serve = _with_fallback(name, kernel, before, ours)
            replaced.append((name, packet.default, backend, serve))
    native = sdpa_native.replaceable(name for name, *_ in replaced if name in sdpa_native.NATIVE)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*previously registered kernel")
        for name, operator, backend, function in replaced:
            _state.library.impl(operator, function, backend, with_keyset=True, allow_override=True)
            _state.installed.add(name)
    sdpa_native.register({name: serve for name, *_, serve in replaced if name in native})


class _Active:
    """That dlattn serves, as torch's registry holds it, until `remove`."""

    def __init__(self) -> None:
        with _state.changing:
            _install(_state.gradients != "torch")
            _state.serve(True, _state.gradients)

    def remove(self) -> None:
        with _state.changing:
            _state.serve(False, "auto")


def activate(gradients: Gradients = "auto") -> None:
    """Let torch's attention be computed by dlattn, in all of the process, until `deactivate()`.

    Args:
        gradients: Whose kernels compute gradients. "dlattn": dlattn's, of all calls they serve.
            "torch": torch's own. "auto": those that took less time where both were measured. On
            Hopper these are dlattn's in place of flash-attention's and memory-efficient
            attention's, and of cuDNN's up to head_dim 64 or 512 queries; on other GPUs in place of
            memory-efficient attention's, but for the gradient of a mask. In place of cuDNN's with a
            mask, which are NaN where a row sees nothing or a float32 mask is beside 16-bit tensors,
            always. On the CPU dlattn's are for 16-bit tensors of 32 to 128 queries, at most 128
            keys and head_dim at most 128, and for float32 with a causal mask from 128 queries and
            keys on and head_dim at most 256.

    In torch's registry dlattn is the flash-attention implementation "dlattn"
    (`torch.nn.attention.activate_flash_attention_impl("dlattn")` is the same); another that is
    active is restored to torch's own first. Graphs that were compiled before are served too: they
    call the same operators.

    The first time, and after "torch" the first time with another word, kernels are put into torch's
    dispatcher, which no other thread may be calling meanwhile. They stay there until
    `deactivate(remove=True)`, and till then any thread may activate and deactivate.

    Raises:
        UnsupportedError: `gradients` is none of these.
        RuntimeError: torch is older than 2.9, which has no way to call a kernel that is replaced.
    """
    _check_gradients(gradients)
    with _state.changing:
        _serve(gradients)
        _state.then_serving, _state.then_gradients = True, gradients
        if _state.blocks:
            _state.blocks[-1].gradients = gradients


def _check_gradients(gradients: Any) -> None:
    if gradients not in get_args(Gradients):
        raise dlattn.UnsupportedError(
            f"gradients is {gradients!r}; accepted: 'auto', 'dlattn', 'torch'"
        )


def _serve(gradients: Gradients) -> None:
    if not hasattr(torch.library, "get_kernel"):
        raise RuntimeError(f"torch is {torch.__version__}; accepted: 2.9 or later")
    _state.serve(_state.serving, gradients)
    if is_active():
        _install(gradients != "torch")
    if not _HAS_REGISTRY:
        _Active()
    elif torch_attention.current_flash_attention_impl() != NAME:
        torch_attention.activate_flash_attention_impl(NAME)


def deactivate(remove: bool = False) -> None:
    """Let torch's own kernels compute again; nothing happens where dlattn is not active.

    Args:
        remove: Take dlattn's kernels out of torch's dispatcher too, which no other thread may be
            calling meanwhile: then nothing of dlattn's is left in the way of a call. Otherwise
            torch's kernels are called through dlattn's: on the CPU by native ones (torch 2.13 and
            later), on CUDA so for gradients, else through Python, which takes some tens of
            microseconds.

    Blocks of `active()` keep dlattn active until the last of them ends.

    Raises:
        RuntimeError: `remove` is true while a block of `active()` is open.
    """
    with _state.changing:
        if remove:
            _remove()
            return
        if _state.blocks:
            _state.then_serving, _state.then_other = False, None
        else:
            _stop_serving()


def _remove() -> None:
    if _state.blocks:
        raise RuntimeError(
            f"remove is True with {len(_state.blocks)} open blocks of active(); accepted: False"
        )
    _stop_serving()
    sdpa_native.remove()
    _state.library._destroy()
    _state.library = torch.library.Library("aten", "IMPL")
    _state.installed.clear()


def _stop_serving() -> None:
    if not _HAS_REGISTRY:
        _state.serve(False, "auto")
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
def active(gradients: Gradients = "auto") -> Iterator[None]:
    """`activate()` for a block of code; what was active before is so again behind it.

    Blocks may be nested and overlap, in threads too: the last one that ends restores what the first
    one found. `gradients` is as for `activate`, and holds for all of the process; of several open
    blocks that of the last to begin does.
    """
    _check_gradients(gradients)
    with _state.changing:
        if not _state.blocks:
            _state.then_serving, _state.then_gradients = is_active(), _state.gradients
            _state.then_other = (
                torch_attention.current_flash_attention_impl() if _HAS_REGISTRY else None
            )
        _serve(gradients)
        block = _Block(gradients)
        _state.blocks.append(block)
    try:
        yield
    finally:
        with _state.changing:
            _state.blocks.remove(block)
            last = _state.blocks[-1].gradients if _state.blocks else _state.then_gradients
            _state.serve(_state.serving, last)
            if not _state.blocks and is_active() and not _state.then_serving:
                _stop_serving()
                if _state.then_other is not None:
                    torch_attention.activate_flash_attention_impl(_state.then_other)


if _HAS_REGISTRY:
    torch_attention.register_flash_attention_impl(NAME, register_fn=_Active)
