"""torch's attention by dlattn on a GPU: results and gradients against torch's own kernels."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest

torch = pytest.importorskip("torch")

import dlattn.torch  # noqa: E402
from dlattn.integrations.torch import sdpa  # noqa: E402

pytestmark = pytest.mark.gpu

F = torch.nn.functional
FLASH = "_scaled_dot_product_flash_attention"
EFFICIENT = "_scaled_dot_product_efficient_attention"
CUDNN = "_scaled_dot_product_cudnn_attention"
BACKENDS = torch.nn.attention.SDPBackend
CHOSEN = {
    FLASH: BACKENDS.FLASH_ATTENTION,
    EFFICIENT: BACKENDS.EFFICIENT_ATTENTION,
    CUDNN: BACKENDS.CUDNN_ATTENTION,
}
BACKWARD_OF = {"_flash_attention_forward": "_flash_attention_backward"}
# Both sides of a comparison round to bfloat16 and float16.
TOLERANCE = {torch.float16: 6e-3, torch.bfloat16: 5e-2, torch.float32: 2e-4}


@pytest.fixture(autouse=True)
def torchs_own_again() -> Iterator[None]:
    dlattn.torch.deactivate()
    dlattn.torch.stats(reset=True)
    yield
    dlattn.torch.deactivate()


def is_ours_in_auto(operator: str, tensors: list[Any]) -> bool:
    """Whether dlattn computes the gradients; of cuDNN's without a mask, and of few queries."""
    hopper = torch.cuda.get_device_capability()[0] == 9
    if tensors[0].dtype == torch.float32:
        return False
    return hopper or operator == EFFICIENT


def drawn(
    batch: int = 2,
    heads: int = 4,
    heads_kv: int | None = None,
    seqlen_q: int = 130,
    seqlen_k: int | None = None,
    dim: int = 64,
    dtype: Any = torch.float16,
    grad: bool = True,
) -> list[Any]:
    generator = torch.Generator("cuda").manual_seed(0)
    keys = (heads_kv or heads, seqlen_k or seqlen_q)
    return [
        (torch.randn(batch, *size, dim, device="cuda", generator=generator) + 0.2)
        .to(dtype)
        .requires_grad_(grad)
        for size in ((heads, seqlen_q), keys, keys)
    ]


def stock_and_ours(
    function: Any, tensors: list[Any], gradients_of: Any = "auto"
) -> list[tuple[Any, ...]]:
    """out and gradients of torch, then of dlattn."""
    results = []
    for activated in (False, True):
        if activated:
            dlattn.torch.activate(gradients_of)
        out = function(*tensors)
        gradients: tuple[Any, ...] = ()
        if tensors[0].requires_grad:
            weights = torch.linspace(-1, 1, out.numel(), device="cuda").reshape(out.shape)
            gradients = torch.autograd.grad((out.float() * weights).sum(), tensors)
        results.append((out.detach(), *gradients))
    dlattn.torch.deactivate()
    return results


def skip_without_kernel(error: RuntimeError) -> NoReturn:
    """Skip the test if the error is that of a call for which torch has no kernel, else raise it."""
    said = "No available kernel|cuDNN|FlashAttention only supports|invalid dtype for bias"
    if not re.search(said, str(error)):
        raise error
    pytest.skip(f"torch has no such kernel for it: {error}")


def compare(
    function: Any,
    tensors: list[Any],
    operator: str,
    gradients_of: str = "auto",
    ours_backward: bool = False,
) -> None:
    """By the operator, if torch can take it; without, the test is skipped."""

    def chosen(*arguments: Any) -> Any:
        if operator not in CHOSEN:
            return function(*arguments)
        with torch.nn.attention.sdpa_kernel(CHOSEN[operator]):
            return function(*arguments)

    try:
        chosen(*tensors)
    except RuntimeError as error:
        skip_without_kernel(error)
    want, found = stock_and_ours(chosen, tensors, gradients_of)
    stats = dlattn.torch.stats(reset=True)
    served = {operator: 1}
    ours = gradients_of == "dlattn" or ours_backward or is_ours_in_auto(operator, tensors)
    if ours and tensors[0].requires_grad:
        served[BACKWARD_OF.get(operator, f"{operator}_backward")] = 1
    assert (stats.served, stats.refused) == (served, {})
    assert found[0].stride() == want[0].stride()
    tolerance = TOLERANCE[tensors[0].dtype]
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * b.abs().max().item())


@pytest.mark.parametrize("operator", [FLASH, CUDNN])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [64, 128, 256, 72])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("gradients_of", ["auto", "dlattn"])
def test_dense(operator: str, dtype: Any, dim: int, causal: bool, gradients_of: str) -> None:
    tensors = drawn(dim=dim, dtype=dtype)
    compare(
        lambda *x: F.scaled_dot_product_attention(*x, is_causal=causal),
        tensors,
        operator,
        gradients_of,
    )


@pytest.mark.parametrize("operator", [FLASH, CUDNN])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("gradients_of", ["auto", "dlattn"])
def test_grouped_heads(operator: str, grad: bool, gradients_of: str) -> None:
    tensors = drawn(heads=8, heads_kv=2, grad=grad)
    compare(
        lambda *x: F.scaled_dot_product_attention(*x, is_causal=True, enable_gqa=True),
        tensors,
        operator,
        gradients_of,
    )


@pytest.mark.parametrize("gradients_of", ["auto", "dlattn"])
def test_a_mask_alone_that_requires_grad(gradients_of: Any) -> None:
    """torch asks for no log-sum-exp there, and its own backward kernel fails without it."""
    tensors = drawn(seqlen_q=128, grad=False)
    mask = torch.randn(128, 128, device="cuda", dtype=torch.float16).requires_grad_()

    def gradient(inputs: list[Any], bias: Any) -> Any:
        out = F.scaled_dot_product_attention(*inputs, attn_mask=bias)
        return torch.autograd.grad(out.float().square().sum(), mask)[0].float()

    efficient = torch.nn.attention.sdpa_kernel(BACKENDS.EFFICIENT_ATTENTION)
    with dlattn.torch.active(gradients_of), efficient:
        found = gradient(tensors, mask)
    ours = {EFFICIENT: 1, f"{EFFICIENT}_backward": 1}
    served = dlattn.torch.stats().served
    # auto takes ours by the kernel that the plan has, which the card decides.
    assert served == ours or (gradients_of == "auto" and served == {EFFICIENT: 1})
    with torch.nn.attention.sdpa_kernel(BACKENDS.MATH):
        want = gradient([x.float() for x in tensors], mask.float())
    torch.testing.assert_close(found, want, rtol=2e-2, atol=2e-2 * want.abs().max().item())


@pytest.mark.parametrize("operator", [FLASH, EFFICIENT, CUDNN])
def test_strides(operator: str) -> None:
    packed = torch.randn(2, 130, 3, 4, 64, device="cuda", dtype=torch.float16)
    tensors = [x.transpose(1, 2).requires_grad_() for x in packed.unbind(2)]
    compare(lambda *x: F.scaled_dot_product_attention(*x), tensors, operator)


def test_gradients_that_auto_leaves_to_torch() -> None:
    """Wide heads of many queries by cuDNN's operator, and float32."""

    def served(operator: str, tensors: list[Any]) -> set[str]:
        dlattn.torch.stats(reset=True)
        with dlattn.torch.active(), torch.nn.attention.sdpa_kernel(CHOSEN[operator]):
            try:
                out = F.scaled_dot_product_attention(*tensors)
            except RuntimeError as error:
                skip_without_kernel(error)
            found = torch.autograd.grad(out, tensors, torch.ones_like(out))
        assert all(x.isfinite().all() for x in found)
        return set(dlattn.torch.stats().served)

    assert served(EFFICIENT, drawn(dtype=torch.float32)) == {EFFICIENT}
    assert served(CUDNN, drawn(seqlen_q=640, dim=128)) == {CUDNN}


@pytest.mark.parametrize("operator", [EFFICIENT, CUDNN])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(130, 130), (2, 1, 1, 130), (2, 4, 130, 130)])
@pytest.mark.parametrize("kind", ["bool", "bias"])
@pytest.mark.parametrize("gradients_of", ["auto", "dlattn"])
def test_with_a_mask(
    operator: str, dtype: Any, shape: tuple[int, ...], kind: str, gradients_of: str
) -> None:
    tensors = drawn(dtype=dtype)
    generator = torch.Generator("cuda").manual_seed(1)
    mask = torch.randn(shape, device="cuda", generator=generator).to(dtype)
    if kind == "bool":
        mask = mask > -0.3
        mask[..., 0] = True
    compare(
        lambda *x: F.scaled_dot_product_attention(*x, attn_mask=mask),
        tensors,
        operator,
        gradients_of,
        ours_backward=operator == CUDNN,
    )


@pytest.mark.parametrize("operator", [EFFICIENT, CUDNN])
@pytest.mark.parametrize("gradients_of", ["auto", "dlattn"])
def test_float32_masks_and_rows_that_see_nothing(operator: str, gradients_of: Any) -> None:
    """cuDNN as torch calls it has NaN for both."""
    tensors = drawn(dtype=torch.bfloat16)
    generator = torch.Generator("cuda").manual_seed(1)
    mask = torch.randn(130, 130, device="cuda", generator=generator)
    mask[5] = -torch.inf

    def gradients(inputs: list[Any], bias: Any) -> Any:
        out = F.scaled_dot_product_attention(*inputs, attn_mask=bias)
        return torch.autograd.grad(out.float().square().sum(), inputs)

    with dlattn.torch.active(gradients_of), torch.nn.attention.sdpa_kernel(CHOSEN[operator]):
        try:
            found = gradients(tensors, mask)
        except RuntimeError as error:
            skip_without_kernel(error)
    with torch.nn.attention.sdpa_kernel(BACKENDS.MATH):
        doubles = [x.detach().double().requires_grad_() for x in tensors]
        want = gradients(doubles, mask.double())
    assert (found[0][:, :, 5] == 0).all()
    for a, b in zip(found, want, strict=True):
        b = b.nan_to_num(0.0)
        torch.testing.assert_close(a.double(), b, rtol=5e-2, atol=5e-2 * b.abs().max().item())


def test_whatever_torch_takes_is_served() -> None:
    want, found = stock_and_ours(F.scaled_dot_product_attention, drawn())
    stats = dlattn.torch.stats()
    forward = [name for name in stats.served if not name.endswith("_backward")]
    assert len(forward) == 1 and not stats.refused
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, rtol=6e-3, atol=6e-3 * b.abs().max().item())


def test_efficient_with_rows_that_see_nothing() -> None:
    """torch tells its kernel of hidden keys by a large negative number: the mean of v, or 0."""
    tensors = drawn()
    mask = torch.ones(130, 130, dtype=torch.bool, device="cuda")
    mask[5] = False
    with torch.nn.attention.sdpa_kernel(BACKENDS.EFFICIENT_ATTENTION):
        want, found = stock_and_ours(
            lambda *x: F.scaled_dot_product_attention(*x, attn_mask=mask), tensors
        )
    torch.testing.assert_close(found[0], want[0], rtol=6e-3, atol=6e-3)
    assert all(x.isfinite().all() for x in found)


def test_efficient_with_other_head_dims() -> None:
    q, k, v = drawn()
    tensors = [q, k, v.detach()[..., :32].contiguous().requires_grad_()]
    compare(lambda *x: F.scaled_dot_product_attention(*x), tensors, EFFICIENT)


def test_dropout_goes_to_torch() -> None:
    q, k, v = drawn()
    results = []
    for activated in (False, True):
        if activated:
            dlattn.torch.activate()
        torch.manual_seed(3)
        with torch.nn.attention.sdpa_kernel(BACKENDS.FLASH_ATTENTION):
            out = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3)
        results.append((out, *torch.autograd.grad(out.sum(), (q, k, v))))
    # torch's own kernel calls the operator of packed sequences, which is dlattn's too.
    refused = dlattn.torch.stats().refused
    assert refused.pop(f"{FLASH}: dropout_p is above 0") == 1
    packed = ("_flash_attention_forward", "_flash_attention_backward")
    assert set(refused) <= {
        f"{name}: dropout_p is above 0" for name in (*packed, f"{FLASH}_backward")
    }
    for found, want in zip(*results, strict=True):
        torch.testing.assert_close(found, want)


@pytest.mark.parametrize("gradients_of", ["auto", "dlattn"])
def test_varlen(gradients_of: str) -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    starts = torch.tensor([0, 100, 100, 230], dtype=torch.int32, device="cuda")
    tensors = [
        torch.randn(230, 4, 64, device="cuda", dtype=torch.float16).requires_grad_()
        for _ in range(3)
    ]
    parameters = __import__("inspect").signature(varlen.varlen_attn).parameters
    causal = {"window_size": (-1, 0)} if "window_size" in parameters else {"is_causal": True}
    compare(
        lambda *x: varlen.varlen_attn(*x, starts, starts, 130, 130, **causal),
        tensors,
        "_flash_attention_forward",
        gradients_of,
    )


@pytest.mark.filterwarnings("ignore")
def test_nested() -> None:
    def nested() -> list[Any]:
        generator = torch.Generator("cuda").manual_seed(0)
        parts = [
            [torch.randn(n, 4, 64, device="cuda", generator=generator).half() for n in (37, 90)]
            for _ in range(3)
        ]
        return [torch.nested.nested_tensor(x, layout=torch.jagged) for x in parts]

    results = []
    for activated in (False, True):
        if activated:
            dlattn.torch.activate()
        q, k, v = (x.transpose(1, 2) for x in nested())
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        results.append(out.transpose(1, 2).values())
    assert sum(dlattn.torch.stats().served.values()) == 1
    torch.testing.assert_close(*reversed(results), rtol=6e-3, atol=6e-3)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend: str) -> None:
    def function(q: Any, k: Any, v: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).tanh()

    tensors = drawn()
    want = function(*tensors)
    want_gradients = torch.autograd.grad(want.float().sum(), tensors)
    with dlattn.torch.active():
        torch._dynamo.reset()
        out = torch.compile(function, fullgraph=True, backend=backend)(*tensors)
        gradients = torch.autograd.grad(out.float().sum(), tensors)
    assert sum(dlattn.torch.stats().served.values()) >= 1
    for a, b in zip((out, *gradients), (want, *want_gradients), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)


def test_captured() -> None:
    q, k, v = drawn(grad=False)
    with dlattn.torch.active():
        F.scaled_dot_product_attention(q, k, v)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = F.scaled_dot_product_attention(q, k, v)
            by_operator = dlattn.torch.attention(q, k, v, layout="bhsd")
        q.copy_(torch.randn_like(q))
        graph.replay()
        want = F.scaled_dot_product_attention(q, k, v)
    assert torch.equal(out, want) and torch.equal(by_operator, want)


@pytest.mark.parametrize("operator", [FLASH, EFFICIENT, CUDNN])
def test_results_in_a_captured_graph(operator: str) -> None:
    """Every one is on the GPU, and the gradients can be captured too."""
    more = [] if operator == FLASH else [None, True]
    call = getattr(torch.ops.aten, operator)
    tensors = drawn()
    with dlattn.torch.active():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # objects that are made once are made before
            torch.autograd.grad(call(*tensors, *more)[0].sum(), tensors)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = call(*tensors, *more)
            gradients = torch.autograd.grad(results[0].sum(), tensors)
        graph.replay()
        want = torch.autograd.grad(call(*tensors, *more)[0].sum(), tensors)
        is_ours = is_ours_in_auto(operator, tensors)
        served = {operator: 3} | ({f"{operator}_backward": 3} if is_ours else {})
        assert dlattn.torch.stats().served == served
    assert all(x.is_cuda for x in results if isinstance(x, torch.Tensor))
    for a, b in zip(gradients, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)


def test_the_operator_on_another_stream() -> None:
    q, k, v = drawn(grad=False)
    want = dlattn.attention(q, k, v, layout="bhsd")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = dlattn.torch.attention(q, k, v, layout="bhsd")
    stream.synchronize()
    assert torch.equal(found, want)
    torch.library.opcheck(torch.ops.dlattn.attention, (q, k, v), {"bhsd": True})


def test_autocast_and_checkpoints() -> None:
    from torch.utils.checkpoint import checkpoint

    q, k, v = drawn(dtype=torch.float32)

    def loss() -> Any:
        with torch.autocast("cuda", torch.bfloat16):
            out = checkpoint(F.scaled_dot_product_attention, q, k, v, use_reentrant=False)
        assert out.dtype == torch.bfloat16
        return out.float().square().sum()

    want = torch.autograd.grad(loss(), (q, k, v))
    with dlattn.torch.active():
        found = torch.autograd.grad(loss(), (q, k, v))
    served = dlattn.torch.stats().served
    forward = sum(n for name, n in served.items() if not name.endswith("_backward"))
    assert forward == 2  # and again in backward
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, rtol=5e-2, atol=5e-2 * b.abs().max().item())


def test_results_of_operators_are_promised() -> None:
    """Shapes, strides and dtypes are those that torch's meta functions tell a compiler."""
    q, k, v = drawn(seqlen_q=130, seqlen_k=70, grad=False)
    metas = [x.to("meta") for x in (q, k, v)]
    bias = torch.zeros(1, 1, 130, 70, device="cuda", dtype=q.dtype).expand(2, 4, 130, 70)
    cases = (
        (FLASH, sdpa._flash(q, k, v, 0.0, True), (*metas, 0.0, True)),
        (EFFICIENT, sdpa._efficient(q, k, v, bias, True), (*metas, bias.to("meta"), True)),
        (CUDNN, sdpa._cudnn(q, k, v, bias, True), (*metas, bias.to("meta"), True)),
    )
    for name, found, arguments in cases:
        promised = getattr(torch.ops.aten, name)(*arguments)
        for x, meta in zip(found, promised, strict=True):
            if isinstance(x, torch.Tensor) and x.dtype not in (torch.int64, torch.uint64):
                assert (x.shape, x.stride(), x.dtype) == (meta.shape, meta.stride(), meta.dtype)
