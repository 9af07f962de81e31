"""Gradients of torch's own scaled_dot_product_attention by dlattn, on the CPU.

The operators of CUDA are put under the key of the CPU, so that torch's autograd, compiler and
transforms call them as they would on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import dlattn.torch  # noqa: E402
from dlattn import _core  # noqa: E402
from dlattn.integrations.torch import sdpa, sdpa_backward, sdpa_choice  # noqa: E402

F = torch.nn.functional
FOR_CPU = "_scaled_dot_product_flash_attention_for_cpu"
BACKWARD = f"{FOR_CPU}_backward"
FLASH = "_scaled_dot_product_flash_attention"
EFFICIENT = "_scaled_dot_product_efficient_attention"
CUDNN = "_scaled_dot_product_cudnn_attention"
# Relative to the largest gradient.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 6e-3, torch.bfloat16: 4e-2}


@pytest.fixture(autouse=True)
def torchs_own_again() -> Iterator[None]:
    dlattn.torch.deactivate()
    dlattn.torch.stats(reset=True)
    yield
    dlattn.torch.deactivate()


@pytest.fixture
def cuda_operators() -> Iterator[list[str]]:
    """The names of those that were called, as they are called."""
    called: list[str] = []
    library = torch.library.Library("aten", "IMPL")

    def counting(name: str, kernel: Any) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            called.append(name)
            return kernel(*given, **named)

        return call

    for name in (FLASH, EFFICIENT, CUDNN):
        library.impl(name, counting(name, sdpa.KERNELS["CUDA"][name]), "CPU")
        backward = f"{name}_backward"
        kernel = sdpa_backward.KERNELS["CUDA"][backward]
        library.impl(backward, counting(backward, kernel), "CPU")
    yield called
    library._destroy()


def drawn(
    *shapes: tuple[int, ...], dtype: Any = torch.float32, grad: bool = True, seed: int = 0
) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    tensors = (torch.randn(shape, generator=generator) + 0.2 for shape in shapes)
    return [x.to(dtype).requires_grad_(grad) for x in tensors]


def qkv(heads_kv: int = 4, columns: int = 16, rows: int = 33, **options: Any) -> list[Any]:
    keys = (2, heads_kv, 47)
    return drawn((2, 4, rows, 16), (*keys, 16), (*keys, columns), **options)


def by_float64(inputs: list[Any], bias: Any = None, causal: bool = False, **options: Any) -> Any:
    """The gradients that a plain formula has, of inputs and of bias where it requires grad."""
    q, k, v = (x.detach().double().requires_grad_() for x in inputs)
    wanted = [q, k, v]
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).mT * options.get("scale", q.shape[3] ** -0.5)
    if bias is not None:
        own = bias.detach().double()
        if bias.requires_grad:
            wanted.append(own.requires_grad_())
        scores = scores + own
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    blind = (scores == -torch.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
    out = weights @ v.repeat_interleave(group, 1)
    return torch.autograd.grad((out * weights_of(out)).sum(), wanted)


def weights_of(out: Any) -> Any:
    return (
        torch.linspace(-1, 1.5, out.numel(), dtype=torch.float64).reshape(out.shape).to(out.dtype)
    )


def gradients(out: Any, inputs: Any) -> Any:
    return torch.autograd.grad((out * weights_of(out)).sum(), inputs)


def check(found: Any, want: Any, dtype: Any) -> None:
    for a, b in zip(found, want, strict=True):
        tolerance = TOLERANCE[dtype] * b.abs().max().item()
        torch.testing.assert_close(a.double(), b, rtol=TOLERANCE[dtype], atol=tolerance)


def mask_with_blind_rows(shape: tuple[int, ...] = (33, 47), dtype: Any = torch.float32) -> Any:
    (mask,) = drawn(shape, dtype=dtype, grad=False, seed=1)
    mask[..., 1:, :9] = -torch.inf
    mask[..., 5, :] = -torch.inf
    return mask


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("case", ["full", "causal", "mask", "scale", "packed"])
def test_on_the_cpu(dtype: Any, case: str) -> None:
    inputs = qkv(dtype=dtype)
    given: dict[str, Any] = {
        "causal": {"is_causal": True},
        "mask": {"attn_mask": mask_with_blind_rows(dtype=dtype)},
        "scale": {"scale": 0.7},
    }.get(case, {})
    if case == "packed":
        packed = drawn((2, 33, 3, 4, 16), dtype=dtype, grad=False)[0]
        inputs = [x.transpose(1, 2).detach().requires_grad_() for x in packed.unbind(2)]
    with dlattn.torch.active(gradients="dlattn"):
        found = gradients(F.scaled_dot_product_attention(*inputs, **given), inputs)
    assert dlattn.torch.stats() == dlattn.torch.Stats({FOR_CPU: 1, BACKWARD: 1}, {})
    bias, causal = given.pop("attn_mask", None), given.pop("is_causal", False)
    check(found, by_float64(inputs, bias, causal, **given), dtype)
    assert case != "mask" or (found[0][:, :, 5] == 0).all()


@pytest.mark.parametrize("pair", [(True, False), (False, True)], ids=str)
@pytest.mark.parametrize("case", ["full", "causal", "mask"])
def test_forward_and_backward_of_different_kernels(pair: tuple[bool, bool], case: str) -> None:
    """out and lse mean the same to both: dlattn may be switched on and off between them."""
    inputs = qkv(rows=61)
    bias = mask_with_blind_rows((61, 47)) if case == "mask" else None
    taken = []
    for is_ours in pair:
        if is_ours:
            dlattn.torch.activate(gradients="dlattn")
        else:
            dlattn.torch.deactivate()
        if not taken:
            taken.append(
                F.scaled_dot_product_attention(*inputs, attn_mask=bias, is_causal=case == "causal")
            )
        else:
            found = gradients(taken[0], inputs)
    assert dlattn.torch.stats().served == {FOR_CPU if pair[0] else BACKWARD: 1}
    check(found, by_float64(inputs, bias, case == "causal"), torch.float32)


def test_whose_gradients() -> None:
    """On the CPU dlattn's where torch's kernel is known to be slower."""
    served = []
    for gradients_of in ("torch", "dlattn", "auto"):
        for inputs in (qkv(), qkv(dtype=torch.bfloat16), qkv(rows=31, dtype=torch.bfloat16)):
            with dlattn.torch.active(gradients_of):
                gradients(F.scaled_dot_product_attention(*inputs), inputs)
            served.append(dlattn.torch.stats(reset=True).served.get(BACKWARD, 0))
    assert served == [0, 0, 0, 1, 1, 1, 0, 1, 0]
    for rows, causal, wanted in ((128, True, 1), (128, False, 0), (127, True, 0)):
        inputs = drawn((2, 4, rows, 16), *[(2, 4, 128, 16)] * 2)
        with dlattn.torch.active():
            gradients(F.scaled_dot_product_attention(*inputs, is_causal=causal), inputs)
        assert dlattn.torch.stats(reset=True).served.get(BACKWARD, 0) == wanted
    with pytest.raises(dlattn.UnsupportedError, match="gradients is 'ours'; accepted: 'auto', "):
        dlattn.torch.activate(gradients="ours")  # type: ignore[arg-type]
    assert not dlattn.torch.is_active()


STATE = (torch.empty(0), torch.empty(0))
NO_STARTS = (None, None, 47, 47)


def backward_calls(dtype: Any) -> dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """By what they are compared with: an operator, and the arguments of a call."""
    inputs = qkv(rows=47, dtype=dtype, grad=False)
    dout = torch.ones((), dtype=dtype).expand(inputs[0].shape)
    (bias,) = drawn((2, 4, 47, 47), dtype=dtype, grad=False)
    padded = torch.zeros(2, 4, 64)
    packed = [x.transpose(1, 2) for x in inputs]
    starts = torch.tensor([0, 8, 47], dtype=torch.int32)
    lse = padded[..., :47].contiguous()

    def efficient(bias: Any, wants_dbias: bool) -> Any:
        wanted = [True, True, False, wants_dbias]
        given = (dout, *inputs, bias, inputs[0], padded, *STATE, 0.0, wanted, True)
        return f"{EFFICIENT}_backward", given, {}

    def packed_flash(tensors: list[Any], lse: Any, starts: Any) -> Any:
        given = (torch.ones_like(tensors[0]), *tensors, tensors[0], lse, *starts, 0.0, True, *STATE)
        return "_flash_attention_backward", given, {"window_size_left": 5}

    flash = (dout, *inputs, inputs[0], lse, *NO_STARTS, 0.0, True, *STATE)
    cudnn = (dout, *inputs, inputs[0], lse[..., None], *STATE, None, *NO_STARTS, 0.0, True)
    each = [x[0] for x in packed]
    return {
        "flash": (f"{FLASH}_backward", flash, {"scale": 0.3}),
        "packed flash": packed_flash(each, lse[0], (starts, starts, 39, 39)),
        "dense packed flash": packed_flash(packed, lse, NO_STARTS),
        "efficient": efficient(None, True),
        "efficient, bias": efficient(bias, False),
        "efficient, dbias": efficient(bias, True),
        "cudnn": (f"{CUDNN}_backward", cudnn, {}),
    }


# By kernel: the calls in which it is taken.
TAKEN: dict[str, set[str]] = {
    "sm90": set(backward_calls(torch.float16)),
    "wmma": {"efficient", "efficient, bias"},
    "scalar": set(),
    "cpu": set(),
}


@pytest.mark.parametrize("kernel", TAKEN)
def test_whose_gradients_on_a_gpu(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernel that the plan takes; plans of GPUs are compared in tests/cpp."""
    plan_backward = dlattn.plan_backward

    def plan(*given: Any, **named: Any) -> Any:
        return replace(plan_backward(*given, **named), kernel=kernel)

    monkeypatch.setattr(dlattn, "plan_backward", plan)
    for name, (operator, given, options) in backward_calls(torch.float16).items():
        assert sdpa_choice.PREFERRED[operator](*given, **options) == (name in TAKEN[kernel]), name
    for operator, given, options in backward_calls(torch.float32).values():
        assert not sdpa_choice.PREFERRED[operator](*given, **options)


def test_what_auto_takes_in_any_case() -> None:
    """cuDNN's calls with a mask, and what the kernel is to refuse, with its reason."""
    preferred = sdpa_choice.PREFERRED[f"{CUDNN}_backward"]
    assert preferred(*[None] * 8, torch.zeros(1), *[None] * 6)
    operator, given, _ = backward_calls(torch.float16)["efficient"]
    without_lse = (*given[:6], torch.empty(2, 4, 0), *given[7:])
    assert sdpa_choice.PREFERRED[operator](*without_lse)
    operator, given, _ = backward_calls(torch.float16)["flash"]
    assert sdpa_choice.PREFERRED[operator](given[0], given[1].mT, *given[2:])


def test_the_comparison_names_what_torch_has() -> None:
    with pytest.raises(dlattn.UnsupportedError, match="torchs is 'math'; accepted: 'flash', "):
        _core.torch_gradients_are_as_fast("math", "sm90", False, False, False, 1, 1)


def test_whose_gradients_in_blocks() -> None:
    def ours() -> int:
        inputs = qkv()
        gradients(F.scaled_dot_product_attention(*inputs), inputs)
        return dlattn.torch.stats(reset=True).served.get(BACKWARD, 0)

    with dlattn.torch.active("dlattn"):
        with dlattn.torch.active("torch"):
            assert ours() == 0
        assert ours() == 1
    dlattn.torch.activate("dlattn")
    with dlattn.torch.active():
        assert ours() == 0
    assert ours() == 1
    dlattn.torch.deactivate()
    dlattn.torch.activate()
    assert ours() == 0


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("causal", [False, True])
def test_flash(cuda_operators: list[str], dtype: Any, causal: bool) -> None:
    """Grouped heads, and dout of one number."""
    q, k, v = inputs = qkv(heads_kv=2, rows=47, dtype=dtype)
    out = getattr(torch.ops.aten, FLASH)(q, k, v, 0.0, causal, scale=0.3)[0]
    check(gradients(out, inputs), by_float64(inputs, None, causal, scale=0.3), dtype)
    out = getattr(torch.ops.aten, FLASH)(q, k, v)[0]
    want = torch.autograd.grad(out, inputs, torch.ones_like(out), retain_graph=True)
    for a, b in zip(torch.autograd.grad(out.sum(), inputs), want, strict=True):
        assert torch.equal(a, b)
    assert cuda_operators == [FLASH, f"{FLASH}_backward", FLASH, *([f"{FLASH}_backward"] * 2)]


@pytest.mark.parametrize("operator", [EFFICIENT, CUDNN])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("mask_dtype", [None, torch.float32])
def test_masks(cuda_operators: list[str], operator: str, dtype: Any, mask_dtype: Any) -> None:
    """A float32 mask beside 16-bit tensors, rows that see nothing, a head_dim of v's own."""
    inputs = qkv(columns=24, dtype=dtype)
    mask = mask_with_blind_rows(dtype=mask_dtype or dtype)
    out = getattr(torch.ops.aten, operator)(*inputs, mask.expand(2, 4, 33, 47), True)[0]
    found = gradients(out, inputs)
    check(found, by_float64(inputs, mask), dtype)
    assert (found[0][:, :, 5] == 0).all()
    out = getattr(torch.ops.aten, operator)(*inputs, None, True, 0.0, True)[0]
    check(gradients(out, inputs), by_float64(inputs, None, True), dtype)


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("shape", [(33, 47), (4, 1, 47), (2, 4, 1, 47), (2, 4, 33, 47)])
def test_a_mask_that_requires_grad(
    cuda_operators: list[str], alone: bool, shape: tuple[int, ...]
) -> None:
    inputs = qkv(grad=not alone)
    (bias,) = drawn(shape, seed=1)
    expanded = bias.expand(2, 4, 33, 47)
    out = getattr(torch.ops.aten, EFFICIENT)(*inputs, expanded, not alone)[0]
    found = gradients(out, [*([] if alone else inputs), bias])
    check(found, by_float64(inputs, bias)[-len(found) :], torch.float32)
    assert cuda_operators == [EFFICIENT, f"{EFFICIENT}_backward"]


@pytest.mark.parametrize("blind", [torch.inf, -torch.inf, 0.0])
def test_what_torchs_own_forward_has_for_rows_that_see_nothing(blind: float) -> None:
    """And behind the last row, where lse is padded: anything."""
    inputs = qkv(grad=False)
    mask = mask_with_blind_rows().expand(2, 4, 33, 47)
    out, lse = sdpa._efficient(*inputs, mask, True)[:2]
    lse[:, :, 5] = blind
    lse[..., 33:] = torch.nan
    weights = weights_of(out)
    asked = [True, True, True, False]
    state = (torch.empty(0), torch.empty(0))
    found = sdpa_backward.efficient(weights, *inputs, mask, out, lse, *state, 0.0, asked)
    assert found[3] is None
    check(found[:3], by_float64(inputs, mask), torch.float32)


def test_varlen() -> None:
    tensors = drawn((20, 4, 16), (20, 2, 16), (20, 2, 16), grad=False)
    starts = torch.tensor([0, 8, 8, 20], dtype=torch.int32)
    given = (starts, starts, 12, 12, 0.0, True)
    window = {"window_size_left": 3, "window_size_right": -1}
    out, lse = sdpa._flash_forward(*tensors, *given, False, **window)[:2]
    state = (torch.empty(0), torch.empty(0))
    weights = weights_of(out)
    found = sdpa_backward.flash_backward(weights, *tensors, out, lse, *given, *state, **window)
    for begin, end in ((0, 8), (8, 20)):
        own = [x[None, begin:end].transpose(1, 2) for x in tensors]
        i = torch.arange(end - begin)
        hidden = (i[None] > i[:, None]) | (i[None] < i[:, None] - 3)
        bias = torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)
        q, k, v = (x.double().requires_grad_() for x in own)
        dense = F.scaled_dot_product_attention(q, k, v, bias.double(), enable_gqa=True)
        dense.backward(weights[None, begin:end].transpose(1, 2).double())
        want = [x.grad[0].transpose(0, 1) for x in (q, k, v)]
        check([x[begin:end] for x in found], want, torch.float32)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("operator", [FLASH, EFFICIENT, CUDNN])
def test_compiled(cuda_operators: list[str], backend: str, operator: str) -> None:
    (bias,) = drawn((2, 4, 33, 47), seed=1, grad=operator == EFFICIENT)
    more = () if operator == FLASH else (bias, True)

    def function(q: Any, k: Any, v: Any, *more: Any) -> Any:
        return getattr(torch.ops.aten, operator)(q, k, v, *more)[0].tanh()

    tensors = qkv()
    wanted = [*tensors, *([bias] if operator == EFFICIENT else [])]
    want = gradients(function(*tensors, *more), wanted)
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    for a, b in zip(gradients(compiled(*tensors, *more), wanted), want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert cuda_operators == [operator, f"{operator}_backward"] * 2


def test_mapped_checkpointed_and_hooked(cuda_operators: list[str]) -> None:
    from torch.utils.checkpoint import checkpoint

    q, k, v = tensors = qkv()

    def function(q: Any, k: Any, v: Any) -> Any:
        return getattr(torch.ops.aten, EFFICIENT)(q, k, v, None, True, 0.0, True)[0]

    want = gradients(function(q, k, v), tensors)
    out = checkpoint(function, q, k, v, use_reentrant=False)
    seen: list[Any] = []
    q_handle = q.register_hook(lambda gradient: seen.append(gradient))
    for a, b in zip(gradients(out, tensors), want, strict=True):
        assert torch.equal(a, b)
    q_handle.remove()
    assert len(seen) == 1 and torch.equal(seen[0], want[0])

    def one(q: Any, k: Any, v: Any, weights: Any) -> Any:
        return (function(q[None], k[None], v[None])[0] * weights).sum()

    each = torch.func.vmap(torch.func.grad(one, argnums=(0, 1, 2)))
    found = each(*(x.detach() for x in tensors), weights_of(out))
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("operator", [FLASH, EFFICIENT, CUDNN])
def test_gradients_of_gradients_are_refused(cuda_operators: list[str], operator: str) -> None:
    tensors = qkv()
    more = () if operator == FLASH else (None, True)
    out = getattr(torch.ops.aten, operator)(*tensors, *more)[0]
    first = torch.autograd.grad(out.square().sum(), tensors, create_graph=True)
    assert cuda_operators[-1] == f"{operator}_backward"
    with pytest.raises(RuntimeError, match=r"derivative for aten::.* is not implemented"):
        torch.autograd.grad(first[0].square().sum(), tensors)


@pytest.mark.parametrize("operator", [FLASH, EFFICIENT, CUDNN])
def test_results_are_promised(operator: str) -> None:
    """Shapes, strides and dtypes are those that torch's meta functions tell a compiler."""
    for rows_first in (False, True):
        inputs = qkv(grad=False)
        if rows_first:
            inputs = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
        (bias,) = drawn((2, 4, 33, 47), grad=False)
        more = () if operator == FLASH else (bias, True)
        out, lse = sdpa.KERNELS["CUDA"][operator](*inputs, *more)[:2]
        state, starts = (torch.empty(0), torch.empty(0)), (None, None, 33, 47)
        arguments: dict[str, tuple[Any, ...]] = {
            FLASH: (out, lse, *starts, 0.0, False, *state),
            EFFICIENT: (bias, out, lse, *state, 0.0, [True] * 4),
            CUDNN: (out, lse, *state, bias, *starts, 0.0, False),
        }
        given = (weights_of(out), *inputs, *arguments[operator])
        found = sdpa_backward.KERNELS["CUDA"][f"{operator}_backward"](*given)
        metas = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in given]
        promised = getattr(torch.ops.aten, f"{operator}_backward")(*metas)
        for x, meta in zip(found, promised, strict=True):
            assert (x.shape, x.stride(), x.dtype) == (meta.shape, meta.stride(), meta.dtype)


def test_what_is_refused_goes_to_torch() -> None:
    inputs = qkv(grad=False)
    out, lse = sdpa._efficient(*inputs, None, True)[:2]
    state = (torch.empty(0), torch.empty(0))
    all_of = [True, True, True, False]
    dout = torch.ones_like(out)

    def efficient(lse: Any = lse, dropout_p: float = 0.0) -> Any:
        return sdpa_backward.efficient(dout, *inputs, None, out, lse, *state, dropout_p, all_of)

    with pytest.raises(sdpa.Refused, match="dropout_p is above 0"):
        efficient(dropout_p=0.1)
    with pytest.raises(sdpa.Refused, match="logsumexp was not computed"):
        efficient(lse=lse[..., :0])
    starts = (torch.zeros(2), None, 33, 47)
    flash = (dout, *inputs, out, lse, *starts, 0.0, False, *state)
    with pytest.raises(sdpa.Refused, match="one of cum_seq_q and cum_seq_k is None"):
        sdpa_backward.flash_backward(*flash)
    cudnn = (dout, *inputs, out, lse, *state, None, *starts, 0.0, False)
    with pytest.raises(sdpa.Refused, match="cum_seq_q or cum_seq_k is given"):
        sdpa_backward.cudnn(*cudnn)
    doubles = [x.double().requires_grad_() for x in inputs]
    with dlattn.torch.active("dlattn"):
        check(
            gradients(F.scaled_dot_product_attention(*doubles), doubles),
            by_float64(inputs),
            torch.float32,
        )
    assert dlattn.torch.stats().refused == {
        f"{name}: query is float64": 1 for name in (FOR_CPU, BACKWARD)
    }


def test_the_operators_are_torchs() -> None:
    """Arguments of every kernel are those of the operator that it replaces, in their order."""
    import inspect

    for kernels in sdpa_backward.KERNELS.values():
        for name, kernel in kernels.items():
            schema = getattr(torch.ops.aten, name).default._schema
            given = inspect.signature(kernel).parameters
            assert list(given) == [argument.name for argument in schema.arguments], name
            for argument in schema.arguments:
                keyword = given[argument.name].kind is inspect.Parameter.KEYWORD_ONLY
                assert keyword == argument.kwarg_only, (name, argument.name)
