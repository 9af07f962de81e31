"""How torch's operators meet autograd: those with gradients, and those without.

The gradients are `dlattn.attention_backward`'s, by operators of their own, so that torch can trace
them. What is saved is q, k, v, out, lse and the tensors that change scores: memory does not grow
with the square of the sequence. Gradients of gradients are refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

import dlattn
from dlattn.integrations.torch.kernels import run

# The inputs of an operator that may require grad, in the order of their gradients.
WITH_GRADIENTS = ("q", "k", "v", "bias", "alibi_slopes", "sinks")
# The arguments of an operator that its backward operator does not take.
_FORWARD_ALONE = ("precision", "batch_invariant")


def tensors_among(given: Any) -> Iterator[torch.Tensor]:
    for x in given:
        if isinstance(x, torch.Tensor):
            yield x
        elif isinstance(x, (list, tuple)):
            yield from tensors_among(x)


def _any_requires_grad(*arguments: Any, **named: Any) -> bool:
    return any(x.requires_grad for x in tensors_among((*arguments, *named.values())))


any_requires_grad = getattr(torch._C, "_any_requires_grad", _any_requires_grad)


def called_eagerly(*tensors: Any, or_cast: bool = False) -> bool:
    """Whether torch's dispatcher has nothing to do for a call but autograd and a kernel.

    There its way through autograd's kernel in Python is left out. `or_cast`: and to cast tensors.
    """
    if torch.compiler.is_compiling() or forward_ad._current_level >= 0:
        return False
    for x in tensors:
        if x is not None and type(x) is not torch.Tensor and type(x) is not torch.nn.Parameter:
            return False
    return not (
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state()
        or (not or_cast and torch._C._is_any_autocast_enabled())
    )


def autograd_kernel(
    name: str, wanted: Callable[..., Any], written: Callable[[Any], None] | None = None
) -> Callable[..., Any]:
    """The operator where gradients may be wanted; `wanted` gets the arguments where they are.

    Without it torch would trace it as if it were constant. `written` is told of the argument out of
    an operator that writes to it.
    """
    # Every call outside torch.inference_mode() passes here: this is looked up once.
    overload = getattr(torch.ops.dlattn, name).default
    call = getattr(overload, "_op", overload)
    grad_enabled = torch.is_grad_enabled
    below = torch._C._AutoDispatchBelowAutograd
    if written is not None:  # both keys at once, where this torch can
        below = getattr(torch._C, "_AutoDispatchBelowADInplaceOrView", below)

    def autograd_kernel(*arguments: Any, **named: Any) -> Any:
        if forward_ad._current_level >= 0:
            _refuse_tangents(name, (*arguments, *named.values()))
        if grad_enabled() and any_requires_grad(*arguments, **named):
            return wanted(*arguments, **named)
        with below():
            result = run(name, call, arguments, named)
        if written is not None:
            written(named["out"])
        return result

    return autograd_kernel


def forward_only(name: str, written: Callable[[Any], None] | None = None) -> Callable[..., Any]:
    """An operator without gradients, for the key Autograd."""

    def wanted(*_: Any, **__: Any) -> Any:
        raise dlattn.UnsupportedError(
            f"torch.ops.dlattn.{name}: an input requires grad, and this operator has no gradients; "
            "accepted: tensors without requires_grad. Call it under torch.no_grad() or pass "
            "x.detach()"
        )

    return autograd_kernel(name, wanted, written)


def _refuse_tangents(name: str, given: Any) -> None:
    for x in tensors_among(given):
        if forward_ad.unpack_dual(x).tangent is not None:
            raise dlattn.UnsupportedError(
                f"torch.ops.dlattn.{name}: an input has a tangent (torch.autograd.forward_ad), and "
                "dlattn has no derivatives in forward mode; accepted: tensors without one, "
                "x.detach()"
            )


def backward_only_once(name: str) -> Callable[..., Any]:
    """A backward operator for the key Autograd, which makes gradients of gradients raise.

    A graph of it is wanted with create_graph=True, by torch.func.grad always; of a saved input even
    where dout is a constant.
    """
    call = getattr(torch.ops.dlattn, name).default
    function: Any = _Once

    def wanted(*arguments: Any, **named: Any) -> Any:
        with enable_single_level_autograd_function():
            return list(function.apply(call, named, *arguments))

    return autograd_kernel(name, wanted)


def _call_below(call: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Call an operator in the forward pass of its autograd function.

    torch turns gradients off there. Below a transform of torch.func there may be another one, which
    is to see the operator with gradients on.
    """
    if not torch._C._are_functorch_transforms_active():
        return call(*given, **named)
    with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():
        return call(*given, **named)


# Each is called as an operator's kernel, where one transform of torch.func is at work, and no
# other: torch.autograd.Function would hand it to all of them.
class _Once(torch.autograd.function._SingleLevelFunction):
    @staticmethod
    def forward(call: Callable[..., Any], named: dict[str, Any], *given: Any) -> Any:
        return tuple(_call_below(call, *given, **named))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise dlattn.UnsupportedError(
            "gradients of dlattn's attention are differentiated (create_graph=True); accepted: "
            "gradients of out and lse alone, as these have none themselves"
        )


class Differentiable:
    """An operator with gradients: `torch.ops.dlattn.attention` or `attention_varlen`.

    Attributes:
        call_below: It, as it is called below autograd.
        names: Its arguments.
        places: Where WITH_GRADIENTS stand among them, ...
        tensors: ... all tensors, q, k and v first, ...
        settings: ... and what else its backward operator takes.
        behind: What that takes behind out, lse and dlse, as places among these tensors and
            settings.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.call = getattr(torch.ops.dlattn, name).default
        self.call_below = getattr(self.call, "_op", self.call)
        arguments = self.call._schema.arguments
        self.names = [a.name for a in arguments]
        self._defaults = tuple(a.default_value for a in arguments)
        self.places = [self.names.index(x) for x in WITH_GRADIENTS]
        self.tensors = [i for i, a in enumerate(arguments) if "Tensor" in str(a.type)]
        kept = [i for i, name in enumerate(self.names) if name not in _FORWARD_ALONE]
        self.settings = [i for i in kept if i not in self.tensors]
        saved = [*self.tensors, *self.settings]
        self.behind = [saved.index(i) for i in kept[3:]]
        self._precision = self.names.index("precision")

    def eagerly(self, given: list[Any]) -> Any:
        """The operator for all of its arguments, where `called_eagerly`."""
        if torch.is_grad_enabled() and any_requires_grad(*given):
            self._refuse_8_bits(given)
            eagerly: Any = _Eagerly
            return eagerly.apply(self, given, *(given[place] for place in self.places))
        with torch._C._AutoDispatchBelowAutograd():
            return run(self.name, self.call_below, given, {})

    def _refuse_8_bits(self, given: list[Any]) -> None:
        """Products of 8 bits have no gradients: better no forward pass either."""
        q = given[self.tensors[0]]
        if q is not None and q.dtype.itemsize == 1:
            raise dlattn.UnsupportedError(
                f"q: dtype is {str(q.dtype).removeprefix('torch.')} and an input requires grad; "
                "accepted: float16, bfloat16, float32, float64, as 8-bit elements have no gradients"
            )
        if given[self._precision] is not None:
            raise dlattn.UnsupportedError(
                f"precision is {given[self._precision]!r} and an input requires grad; accepted: "
                "None, as 8-bit products have no gradients"
            )

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        given = [*arguments, *self._defaults[len(arguments) :]]
        for name, value in named.items():
            given[self.names.index(name)] = value
        self._refuse_8_bits(given)
        function: Any = _Attention
        with enable_single_level_autograd_function():
            return function.apply(self, given, *(given[place] for place in self.places))


class _Asked(threading.local):
    deterministic = False


ASKED = _Asked()


@contextmanager
def deterministic_gradients(deterministic: bool) -> Iterator[None]:
    """Operators that are called inside have gradients of the same bits each time, if it is true."""
    before = ASKED.deterministic
    ASKED.deterministic = deterministic
    try:
        yield
    finally:
        ASKED.deterministic = before


class _Attention(torch.autograd.function._SingleLevelFunction):
    """Gets all arguments in one list, and beside it those that may require grad."""

    @staticmethod
    def forward(operator: Differentiable, given: list[Any], *_: Any) -> Any:
        if torch._C._are_functorch_transforms_active():
            return _call_below(operator.call, *given)
        with torch._C._AutoDispatchBelowAutograd():
            return run(operator.name, operator.call_below, given, {})

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _save(ctx, inputs[0], inputs[1], output)

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any) -> Any:
        return _gradients_of(ctx, dout, dlse)


class _Eagerly(torch.autograd.function._SingleLevelFunction):
    """The same where `called_eagerly`: without `setup_context`, which costs a call of Python more
    and which transforms of torch.func alone need."""

    @staticmethod
    def forward(ctx: Any, operator: Differentiable, given: list[Any], *_: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            output = run(operator.name, operator.call_below, given, {})
        _save(ctx, operator, given, output)
        return output

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any) -> Any:
        return _gradients_of(ctx, dout, dlse)


def _save(ctx: Any, operator: Differentiable, given: list[Any], output: Any) -> None:
    ctx.set_materialize_grads(False)
    ctx.operator = operator
    ctx.deterministic = ASKED.deterministic
    ctx.save_for_backward(*[given[i] for i in operator.tensors], *output)
    ctx.settings = [given[i] for i in operator.settings]


def _gradients_of(ctx: Any, dout: Any, dlse: Any) -> Any:
    """The results of a function's backward pass: None for its first two inputs."""
    wanted = list(ctx.needs_input_grad[2:])
    if (dout is None and dlse is None) or not any(wanted):
        return (None,) * (2 + len(wanted))
    operator = ctx.operator
    *saved, out, lse = ctx.saved_tensors
    given = [*saved, *ctx.settings]
    found = _gradients(
        operator.name,
        (
            with_rows_side_by_side(dout, out),
            *(*saved[:3], out, lse),
            None if dlse is None else dlse.to(torch.float32),
            *[given[i] for i in operator.behind],
        ),
        wanted,
        ctx.deterministic or torch.are_deterministic_algorithms_enabled(),
    )
    left = iter(found)
    return (None, None, *[next(left) if is_wanted else None for is_wanted in wanted])


def _gradients(name: str, given: Any, needs: list[bool], deterministic: bool) -> Any:
    """Call a backward operator: below autograd, unless gradients of gradients may be asked for."""
    call = backward_operator(name)
    asked = {"needs": needs, "deterministic": deterministic}
    if torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
        return call(*given, **asked)
    with torch._C._AutoDispatchBelowAutograd():
        return run(f"{name}_backward", getattr(call, "_op", call), given, asked)


@cache
def backward_operator(name: str) -> Callable[..., Any]:
    """`torch.ops.dlattn.attention_backward` or `attention_varlen_backward`, of backward.py."""
    operator: Callable[..., Any] = getattr(torch.ops.dlattn, f"{name}_backward").default
    return operator


def with_rows_side_by_side(dout: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor | None:
    """dout in out's dtype, its rows contiguous: those of x.expand() may not be."""
    if dout is None:
        return None
    if dout.dtype != out.dtype:
        dout = dout.to(out.dtype)
    return dout if dout.stride(-1) == 1 or dout.shape[-1] <= 1 else dout.contiguous()
