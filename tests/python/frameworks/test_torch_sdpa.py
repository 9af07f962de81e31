"""torch's own scaled_dot_product_attention by dlattn, on the CPU."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import dlattn.torch  # noqa: E402
from dlattn.integrations.torch import activation, sdpa, sdpa_backward  # noqa: E402

F = torch.nn.functional
OPERATOR = "_scaled_dot_product_flash_attention_for_cpu"
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.fixture(autouse=True)
def torchs_own_again() -> Iterator[None]:
    dlattn.torch.deactivate()
    dlattn.torch.stats(reset=True)
    yield
    dlattn.torch.deactivate()


def drawn(
    batch: int = 2,
    heads: int = 4,
    heads_kv: int | None = None,
    seqlen_q: int = 33,
    seqlen_k: int = 47,
    dim: int = 16,
    dtype: Any = torch.float32,
    grad: bool = False,
) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    sizes = [(heads, seqlen_q), (heads_kv or heads, seqlen_k), (heads_kv or heads, seqlen_k)]
    return [
        (torch.randn(batch, *size, dim, generator=generator) + 0.2).to(dtype).requires_grad_(grad)
        for size in sizes
    ]


def served() -> int:
    return dlattn.torch.stats().served.get(OPERATOR, 0)


def compare(q: Any, k: Any, v: Any, calls: int = 1, **options: Any) -> None:
    """out, and gradients where they are asked for, of dlattn and of torch."""
    tolerance = TOLERANCE[q.dtype]
    results = []
    before = served()
    for activated in (False, True):
        if activated:
            dlattn.torch.activate()
        out = F.scaled_dot_product_attention(q, k, v, **options)
        gradients = ()
        if q.requires_grad:
            weights = torch.linspace(-1, 1, out.numel()).reshape(out.shape).to(out.dtype)
            gradients = torch.autograd.grad((out * weights).sum(), (q, k, v))
        results.append((out.detach(), out.stride(), gradients))
    dlattn.torch.deactivate()
    assert served() - before == calls
    (want, strides, want_gradients), (found, found_strides, gradients) = results
    assert found_strides == strides
    torch.testing.assert_close(found, want, rtol=tolerance, atol=tolerance)
    for a, b in zip(gradients, want_gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=4 * tolerance, atol=4 * tolerance)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_dtypes(dtype: Any, grad: bool) -> None:
    compare(*drawn(dtype=dtype, grad=grad))
    compare(*drawn(dtype=dtype, grad=grad, seqlen_k=33), is_causal=True)


@pytest.mark.parametrize("grad", [False, True])
def test_shapes(grad: bool) -> None:
    compare(*drawn(grad=grad), is_causal=True)  # the first query sees the first key
    compare(*drawn(grad=grad, seqlen_q=60), is_causal=True, scale=0.7)
    compare(*drawn(grad=grad, dim=40), scale=0.1)
    compare(*drawn(batch=1, heads=1, seqlen_q=1, seqlen_k=1, grad=grad))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("shape", [(33, 47), (1, 1, 33, 47), (2, 1, 1, 47), (2, 4, 33, 47)])
def test_masks(shape: tuple[int, ...], grad: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    mask = torch.rand(shape, generator=generator) > 0.4
    mask[..., 0] = True
    compare(*drawn(grad=grad), attn_mask=mask)
    compare(*drawn(grad=grad), attn_mask=torch.randn(shape, generator=generator))


def test_rows_that_see_nothing() -> None:
    q, k, v = drawn(grad=True)
    mask = torch.ones(33, 47, dtype=torch.bool)
    mask[5] = False
    with dlattn.torch.active():
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        gradients = torch.autograd.grad(out.square().sum(), (q, k, v))
    assert served() == 1
    assert (out[:, :, 5] == 0).all() and (out[:, :, 4] != 0).any()
    assert all(x.isfinite().all() for x in gradients)
    assert (gradients[0][:, :, 5] == 0).all()


@pytest.mark.parametrize("grad", [False, True])
def test_strides(grad: bool) -> None:
    """Heads behind rows, and q, k and v of one buffer."""
    packed = torch.randn(2, 33, 3, 4, 16, generator=torch.Generator().manual_seed(2))
    tensors = [x.transpose(1, 2).detach().requires_grad_(grad) for x in packed.unbind(2)]
    compare(*tensors)
    compare(*tensors, is_causal=True)


def test_grouped_heads() -> None:
    q, k, v = drawn(heads_kv=2)
    compare(q, k, v, enable_gqa=True, calls=served_by_torch_as_flash(q, k, v))


def served_by_torch_as_flash(q: Any, k: Any, v: Any) -> int:
    """Whether this torch hands grouped heads to the operator."""
    with torch.profiler.profile() as profile:
        F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    return int(any(OPERATOR in event.key for event in profile.key_averages()))


def test_what_is_refused_goes_to_torch_and_is_counted() -> None:
    q, k, v = drawn()
    doubles = [x.double().requires_grad_() for x in (q, k, v)]
    want = F.scaled_dot_product_attention(*doubles)
    want_gradients = torch.autograd.grad(want.square().sum(), doubles)
    with dlattn.torch.active():
        out = F.scaled_dot_product_attention(*doubles)
        gradients = torch.autograd.grad(out.square().sum(), doubles)
        assert torch.equal(out, want)
        assert all(torch.equal(a, b) for a, b in zip(gradients, want_gradients, strict=True))
        huge = F.scaled_dot_product_attention(q, k, v, scale=1e-42)
    torch.testing.assert_close(huge, v.mean(2, keepdim=True).expand_as(huge))
    found = dlattn.torch.stats()
    assert found.served == {}
    reasons = sorted(found.refused)
    assert reasons[0] == f"{OPERATOR}: query is float64"
    assert reasons[1].startswith(f"{OPERATOR}: softmax_scale") and "accepted" in reasons[1]
    assert list(found.refused.values()) == [1, 1]
    assert dlattn.torch.stats(reset=True) == found
    assert dlattn.torch.stats() == dlattn.torch.Stats()


def test_head_dims_that_differ_are_torchs() -> None:
    q, k, v = drawn()
    with dlattn.torch.active():
        out = F.scaled_dot_product_attention(q, k, v[..., :8])
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v[..., :8]))


def dispatch(name: str = OPERATOR) -> str:
    return torch._C._dispatch_dump(f"aten::{name}")


def test_activating_and_deactivating() -> None:
    """The kernels are registered once: other threads may be in them, so a flag alone is flipped."""
    tensors = drawn()
    want = F.scaled_dot_product_attention(*tensors)
    assert not dlattn.torch.is_active()
    registered = None
    for _ in range(2):
        dlattn.torch.activate()
        dlattn.torch.activate()  # again does nothing
        registered = registered or dispatch()
        assert dlattn.torch.is_active() and dispatch() == registered
        F.scaled_dot_product_attention(*tensors)
        dlattn.torch.deactivate()
        dlattn.torch.deactivate()
        assert not dlattn.torch.is_active() and dispatch() == registered
        assert torch.equal(F.scaled_dot_product_attention(*tensors), want)
    assert served() == 2


def test_torchs_own_kernels_are_restored() -> None:
    """Nothing of dlattn's is left in the dispatcher, and activating puts it there again."""
    names = [
        name
        for key, kernels in (*sdpa.KERNELS.items(), *sdpa_backward.KERNELS.items())
        if key == "CPU" or torch.version.cuda
        for name in kernels
    ]
    tensors = [x.requires_grad_() for x in drawn()]
    dlattn.torch.deactivate(remove=True)
    dlattn.torch.stats(reset=True)
    own = {name: dispatch(name) for name in names}
    assert not any("dlattn" in found or "torch_sdpa.cpp" in found for found in own.values())
    want = torch.autograd.grad(F.scaled_dot_product_attention(*tensors).sum(), tensors)
    for gradients in ("torch", "auto", "dlattn"):
        for _ in range(2):
            dlattn.torch.activate(gradients)
            F.scaled_dot_product_attention(*tensors).sum().backward()
            assert dispatch() != own[OPERATOR]
            with dlattn.torch.active(), pytest.raises(RuntimeError, match="1 open blocks"):
                dlattn.torch.deactivate(remove=True)
            dlattn.torch.deactivate(remove=True)
            assert {name: dispatch(name) for name in names} == own
            assert not dlattn.torch.is_active()
            found = torch.autograd.grad(F.scaled_dot_product_attention(*tensors).sum(), tensors)
            assert all(torch.equal(x, y) for x, y in zip(found, want, strict=True))
    assert served() == 6


@torch.no_grad()
def test_activating_while_others_call() -> None:
    """The functions that torch's dispatcher calls must not go away meanwhile."""
    tensors = drawn(batch=1, heads=1, seqlen_q=1, seqlen_k=1)
    want = F.scaled_dot_product_attention(*tensors)
    dlattn.torch.activate()
    failed: list[Any] = []
    ended = threading.Event()

    def call() -> None:
        try:
            with torch.no_grad():
                while not ended.is_set():
                    torch.testing.assert_close(F.scaled_dot_product_attention(*tensors), want)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=call) for _ in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        end = time.monotonic() + 1.5
        while time.monotonic() < end and not failed:
            dlattn.torch.deactivate()
            dlattn.torch.activate()
    finally:
        ended.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
    F.scaled_dot_product_attention(*tensors)
    assert not failed and served() > 0


def test_blocks_of_threads_overlap() -> None:
    """A block that ends leaves dlattn active for those that are open."""
    tensors = drawn()
    begun, ended = threading.Event(), threading.Event()
    inside: list[bool] = []

    def second() -> None:
        with dlattn.torch.active():
            begun.set()
            ended.wait(10)
            F.scaled_dot_product_attention(*tensors)
            inside.append(dlattn.torch.is_active())

    thread = threading.Thread(target=second)
    with dlattn.torch.active():
        thread.start()
        begun.wait(10)
    assert dlattn.torch.is_active()
    ended.set()
    thread.join()
    assert inside == [True] and served() == 1
    assert not dlattn.torch.is_active()


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("wanted", [None, False, True])
def test_what_is_wanted_in_a_block_holds_behind_it(before: bool, wanted: bool | None) -> None:
    if before:
        dlattn.torch.activate()
    with dlattn.torch.active():
        if wanted is not None:
            dlattn.torch.activate() if wanted else dlattn.torch.deactivate()
        assert dlattn.torch.is_active()
    assert dlattn.torch.is_active() == (before if wanted is None else wanted)


def test_gradients_of_overlapping_blocks() -> None:
    """The last block to begin has its word, whichever ends first."""
    from dlattn.integrations.torch.activation import _state

    first, second, third = map(dlattn.torch.active, ("torch", "dlattn", "torch"))
    before = _state.gradients
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert _state.gradients == "dlattn"
    third.__enter__()
    third.__exit__(None, None, None)
    assert _state.gradients == "dlattn"
    dlattn.torch.activate("torch")
    with dlattn.torch.active("dlattn"):
        assert _state.gradients == "dlattn"
    assert _state.gradients == "torch"
    dlattn.torch.deactivate()
    second.__exit__(None, None, None)
    assert not dlattn.torch.is_active() and before == "auto"


def test_the_context_manager() -> None:
    tensors = drawn()
    with pytest.raises(KeyError), dlattn.torch.active():
        with dlattn.torch.active():
            F.scaled_dot_product_attention(*tensors)
        assert dlattn.torch.is_active()  # as before the inner one
        raise KeyError
    assert not dlattn.torch.is_active()
    assert served() == 1


@pytest.mark.skipif(not activation._HAS_REGISTRY, reason="torch is older than 2.10")
def test_torchs_registry() -> None:
    from torch.nn import attention

    assert "dlattn" in attention.list_flash_attention_impls()
    attention.activate_flash_attention_impl("dlattn")
    assert dlattn.torch.is_active()
    F.scaled_dot_product_attention(*drawn())
    dlattn.torch.deactivate()
    assert attention.current_flash_attention_impl() is None
    assert served() == 1


@pytest.mark.skipif(not activation._HAS_REGISTRY, reason="torch is older than 2.10")
def test_another_implementation_is_active_again() -> None:
    from torch.nn import attention

    class Handle:
        def remove(self) -> None: ...

    attention.register_flash_attention_impl("other", register_fn=Handle)
    attention.activate_flash_attention_impl("other")
    try:
        with dlattn.torch.active():
            assert attention.current_flash_attention_impl() == "dlattn"
        assert attention.current_flash_attention_impl() == "other"
    finally:
        attention.restore_flash_attention_impl()
        attention._registry._FLASH_ATTENTION_IMPLS.pop("other")


def test_without_a_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation, "_HAS_REGISTRY", False)
    with dlattn.torch.active():
        F.scaled_dot_product_attention(*drawn())
        assert dlattn.torch.is_active()
    assert not dlattn.torch.is_active()
    dlattn.torch.activate()
    assert dlattn.torch.is_active()
    dlattn.torch.deactivate()
    F.scaled_dot_product_attention(*drawn())
    assert not dlattn.torch.is_active() and served() == 1


def test_old_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.library, "get_kernel")
    with pytest.raises(RuntimeError, match=r"torch is .*; accepted: 2\.9 or later"):
        dlattn.torch.activate()


def test_multihead_attention() -> None:
    torch.manual_seed(0)
    layer = torch.nn.MultiheadAttention(64, 4, batch_first=True)
    x = torch.randn(2, 9, 64)
    results = []
    for activated in (False, True):
        if activated:
            dlattn.torch.activate()
        layer.zero_grad()
        out = layer(x, x, x, need_weights=False)[0]
        out.square().sum().backward()
        results.append((out.detach(), layer.in_proj_weight.grad.clone()))
    assert served() == 1
    for found, want in zip(*reversed(results), strict=True):
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend: str) -> None:
    def function(q: Any, k: Any, v: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).tanh()

    tensors = drawn(grad=True)
    want = function(*tensors)
    want_gradients = torch.autograd.grad(want.sum(), tensors)
    with dlattn.torch.active():
        torch._dynamo.reset()
        compiled = torch.compile(function, fullgraph=True, backend=backend)
        out = compiled(*tensors)
        gradients = torch.autograd.grad(out.sum(), tensors)
    assert served() >= 1
    for a, b in zip((out, *gradients), (want, *want_gradients), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_autocast_checkpoints_and_threads() -> None:
    from torch.utils.checkpoint import checkpoint

    q, k, v = drawn(grad=True)

    def loss() -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            out = checkpoint(F.scaled_dot_product_attention, q, k, v, use_reentrant=False)
        assert out.dtype == torch.bfloat16
        return out.float().square().sum()

    want = torch.autograd.grad(loss(), (q, k, v))
    found: list[Any] = []
    with dlattn.torch.active():
        threads = [
            threading.Thread(target=lambda: found.append(torch.autograd.grad(loss(), (q, k, v))))
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert served() == 6 and len(found) == 3  # forward, and again in backward
    for gradients in found:
        for a, b in zip(gradients, want, strict=True):
            torch.testing.assert_close(a, b, rtol=5e-2, atol=5e-2)


def test_errors_of_torch_stay_torchs() -> None:
    q, k, v = drawn()
    with dlattn.torch.active(), pytest.raises(RuntimeError):
        F.scaled_dot_product_attention(q, k[..., :8], v)


def test_gradients_are_on_again_after_a_refusal() -> None:
    q, k, v = drawn(grad=True)
    with dlattn.torch.active():
        F.scaled_dot_product_attention(q, k, v, scale=1e-42)
        assert torch.is_grad_enabled()
        F.scaled_dot_product_attention(q, k, v)
        assert torch.is_grad_enabled()


# The operators of CUDA, of which dlattn's part can be called on the CPU too.


def exact(q: Any, k: Any, v: Any, *, causal: int | None = None, bias: Any = 0.0) -> tuple[Any, Any]:
    """out and lse of (batch, heads, rows, dim); `causal`: what row i sees beyond key i."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q.double() @ k.double().mT / q.shape[3] ** 0.5 + bias
    if causal is not None:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(causal)
        scores = scores.masked_fill(~seen, -torch.inf)
    lse = scores.logsumexp(-1)
    out = scores.softmax(-1).nan_to_num(0.0) @ v.double()
    return out, torch.where(lse == -torch.inf, torch.inf, lse)


def close(found: Any, want: Any) -> None:
    torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-5)


def test_flash_of_cuda() -> None:
    """Bottom-right: the last query sees the last key."""
    q, k, v = drawn(seqlen_q=47, seqlen_k=33, heads_kv=2)
    with torch.device("meta"):
        promised = torch.ops.aten._scaled_dot_product_flash_attention(
            *(x.to("meta") for x in (q, k, v)), 0.0, True
        )
    found = sdpa._flash(q, k, v, 0.0, True)
    want = exact(q, k, v, causal=33 - 47)
    close(found[0], want[0])
    close(found[1], want[1])
    assert (found[1][:, :, :14] == torch.inf).all() and found[2] is None and found[3] is None
    check_promise(found, promised)


def check_promise(found: Any, promised: Any) -> None:
    assert len(found) == len(promised)
    for x, meta in zip(found, promised, strict=True):
        if isinstance(x, torch.Tensor):
            assert (x.shape, x.stride(), x.dtype) == (meta.shape, meta.stride(), meta.dtype)
        else:
            assert x == meta


def test_strides_of_flash() -> None:
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in drawn())
    promised = torch.ops.aten._scaled_dot_product_flash_attention(
        *(x.to("meta") for x in (q, k, v)), 0.0, False
    )
    check_promise(sdpa._flash(q, k, v), promised)


@pytest.mark.parametrize("with_lse", [True, False])
def test_efficient_of_cuda(with_lse: bool) -> None:
    """Top-left; lse is padded to 32 rows, and infinite behind them."""
    q, k, v = drawn()
    v = v[..., :8].contiguous()
    bias = torch.randn(1, 1, 33, 48, generator=torch.Generator().manual_seed(1))[..., :47]
    bias[..., 4, :] = -torch.inf
    expanded = bias.expand(2, 4, 33, 47)
    for given, causal in ((expanded, None), (None, 0)):
        arguments = (given, with_lse, 0.0, causal is not None)
        found = sdpa._efficient(q, k, v, *arguments)
        want = exact(q, k, v, bias=0.0 if given is None else given.double(), causal=causal)
        close(found[0], want[0])
        promised = torch.ops.aten._scaled_dot_product_efficient_attention(
            *(x.to("meta") for x in (q, k, v)),
            None if given is None else given.to("meta"),
            *arguments[1:],
        )
        check_promise(found, promised)
        if with_lse:
            close(found[1][..., :33], want[1])
            assert (found[1][..., 33:] == torch.inf).all() and found[1].shape[-1] == 64


@pytest.mark.parametrize("columns", [16, 8])
@pytest.mark.parametrize("rows_first", [False, True])
def test_cudnn_of_cuda(columns: int, rows_first: bool) -> None:
    """Top-left; out lies in memory as query does."""
    q, k, v = drawn(heads_kv=2)
    v = v[..., :columns].contiguous()
    if rows_first:
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
    bias = torch.randn(1, 1, 33, 47, generator=torch.Generator().manual_seed(1))
    bias[..., 4, :] = -torch.inf
    for given, causal in ((bias.expand(2, 4, 33, 47), None), (None, 0)):
        arguments = (given, True, 0.0, causal is not None)
        found = sdpa._cudnn(q, k, v, *arguments)
        want = exact(q, k, v, bias=0.0 if given is None else given.double(), causal=causal)
        close(found[0], want[0])
        close(found[1], want[1][..., None])
        promised = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *(x.to("meta") for x in (q, k, v)),
            None if given is None else given.to("meta"),
            *arguments[1:],
        )
        check_promise(found, promised)


# Calls of the operators, and which of their results is the log-sum-exp.
WITHOUT_BIAS = {
    "flash": lambda q, k, v, causal: sdpa._flash(q, k, v, 0.0, causal)[1],
    "efficient": lambda q, k, v, causal: sdpa._efficient(q, k, v, None, True, 0.0, causal)[1],
    "cudnn": lambda q, k, v, causal: sdpa._cudnn(q, k, v, None, True, 0.0, causal)[1],
    "for_cpu": lambda q, k, v, causal: sdpa._for_cpu(q, k, v, 0.0, causal)[1],
}


@pytest.mark.parametrize("name", WITHOUT_BIAS)
@pytest.mark.parametrize("causal", [False, True])
def test_rows_are_looked_at_only_where_some_may_see_nothing(name: str, causal: bool) -> None:
    call = WITHOUT_BIAS[name]
    with torch.profiler.profile() as profile:
        lse = call(*drawn(), causal)
    assert lse[:, :, :33].isfinite().all()
    assert not any("masked_fill" in event.key for event in profile.key_averages())
    q, k, v = drawn(seqlen_k=0)
    assert (call(q, k, v, causal) == torch.inf).all()


@pytest.mark.parametrize("window", [(None, None), (-1, -1), (3, 2), (4, 0)])
def test_flash_forward_of_cuda(window: tuple[int | None, int | None]) -> None:
    q, k, v = (x.transpose(1, 2).contiguous() for x in drawn(seqlen_q=47))
    slopes = torch.linspace(0.1, 0.4, 4)
    arguments = (None, None, 47, 47, 0.0, False, False)
    left, right = (None if side is None or side < 0 else side for side in window)
    for alibi in (None, slopes):
        options = {
            "scale": 0.3,
            "window_size_left": window[0],
            "window_size_right": window[1],
            "alibi_slopes": alibi,
        }
        want = dlattn.attention(
            q, k, v, softmax_scale=0.3, window=(left, right), alibi_slopes=alibi, return_lse=True
        )
        found = sdpa._flash_forward(q, k, v, *arguments, **options)
        close(found[0], want[0].double())
        close(found[1], want[1].double())
        into = torch.full_like(q, torch.nan)
        lse = sdpa._flash_forward_into(into, q, k, v, *arguments, **options)
        assert torch.equal(into, found[0]) and torch.equal(lse, found[1])
        promised = torch.ops.aten._flash_attention_forward(
            *(x.to("meta") for x in (q, k, v)), *arguments, scale=0.3
        )
        check_promise(found[:3], promised[:3])


def test_varlen_of_cuda() -> None:
    q, k, v = (torch.randn(20, 4, 16, generator=torch.Generator().manual_seed(i)) for i in range(3))
    starts = torch.tensor([0, 8, 8, 20], dtype=torch.int32)
    used = torch.tensor([3, 0, 12], dtype=torch.int32)
    arguments = (starts, starts, 12, 12, 0.0, True, False)
    found = sdpa._flash_forward(q, k, v, *arguments, seqused_k=used)
    want, want_lse = dlattn.attention_varlen(
        q, k, v, starts, starts, 12, 12, causal=True, seqused_k=used, return_lse=True
    )
    assert torch.equal(found[0], want)
    assert torch.equal(found[1], want_lse.masked_fill(want_lse == -torch.inf, torch.inf))
    assert (found[1] == torch.inf).any()
    promised = torch.ops.aten._flash_attention_forward(
        *(x.to("meta") for x in (q, k, v)), starts.to("meta"), starts.to("meta"), *arguments[2:]
    )
    check_promise(found[:2], promised[:2])


@pytest.mark.parametrize("captured", [False, True])
def test_seeds_are_where_a_graph_can_keep_them(
    captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor of the device "meta" stands for one of a GPU."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captured)
    query = SimpleNamespace(is_cuda=True, device=torch.device("meta"))
    for made in sdpa._unused_seed_and_offset(query):
        assert made.device.type == ("meta" if captured else "cpu") and made.dtype == torch.int64


def test_a_dropout_that_drops_nothing() -> None:
    """1e-11 is less than any number that torch draws, but 0."""
    for kernel, *more in ((sdpa._flash,), (sdpa._efficient, None, True), (sdpa._cudnn, None, True)):
        found, want = (kernel(*drawn(), *more, dropout_p=p)[0] for p in (1e-11, 0.0))
        assert torch.equal(found, want)
        with pytest.raises(sdpa.Refused, match="dropout_p is above 0"):
            kernel(*drawn(), *more, dropout_p=2.0**-32)
        assert torch.equal(kernel(*drawn(), *more, dropout_p=-0.0)[0], want)


@pytest.mark.parametrize("dropout_p", [-1.0, -1e-12, float("nan")])
def test_a_dropout_that_is_none(dropout_p: float) -> None:
    """torch says what it says to it."""
    for kernel, *more in ((sdpa._flash,), (sdpa._efficient, None, True), (sdpa._cudnn, None, True)):
        with pytest.raises(sdpa.Refused, match="dropout_p is no probability"):
            kernel(*drawn(), *more, dropout_p=dropout_p)
    with pytest.raises(RuntimeError) as own:
        F.scaled_dot_product_attention(*drawn(), dropout_p=dropout_p)
    with dlattn.torch.active(), pytest.raises(RuntimeError) as ours:
        F.scaled_dot_product_attention(*drawn(), dropout_p=dropout_p)
    assert str(ours.value).splitlines()[0] == str(own.value).splitlines()[0]
    assert dlattn.torch.stats() == dlattn.torch.Stats({}, {f"{OPERATOR}: dropout_p is not 0": 1})


@pytest.mark.parametrize(
    "wrong",
    [
        {"dropout_p": 1e-11},
        {"attn_mask": torch.ones(33, 47, dtype=torch.bool)},
        {"attn_mask": torch.ones(4, 33, 47)},
        {"attn_mask": torch.ones(47)},
        {"attn_mask": torch.ones(1, 2, 4, 33, 47)},
    ],
)
def test_what_the_operator_of_the_cpu_refuses(wrong: dict[str, Any]) -> None:
    """torch's function hands none of these to it."""
    operator = getattr(torch.ops.aten, OPERATOR)
    with pytest.raises(RuntimeError) as own:
        operator(*drawn(), **wrong)
    with dlattn.torch.active(), pytest.raises(RuntimeError) as ours:
        operator(*drawn(), **wrong)
    assert str(ours.value).splitlines()[0] == str(own.value).splitlines()[0]


SIZES = [{"batch": 0}, {"heads": 0, "heads_kv": 0}, {"seqlen_q": 0}, {"seqlen_k": 0}, {"dim": 0}]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_sizes_of_0_and_masks_of_any_rank_are_torchs(sizes: dict[str, int], causal: bool) -> None:
    def outcome(**options: Any) -> Any:
        tensors = drawn(**sizes, grad=True)
        try:
            out = F.scaled_dot_product_attention(*tensors, **options)
            return out, *torch.autograd.grad(out.sum(), tensors)
        except (RuntimeError, IndexError) as error:
            return str(error).splitlines()[0]

    rows, keys = sizes.get("seqlen_q", 33), sizes.get("seqlen_k", 47)
    asked: list[dict[str, Any]] = [{"is_causal": causal}]
    if not causal:
        shapes = ((rows, keys), (1,) * 5 + (keys,), (1, 1, 1, rows, keys), (keys,), ())
        asked += [{"attn_mask": torch.ones(shape)} for shape in shapes]
    for options in asked:
        want = outcome(**options)
        with dlattn.torch.active():
            found = outcome(**options)
        if isinstance(want, str):
            assert found == want
        else:
            torch.testing.assert_close(found, want)


def test_a_bias_alone_that_requires_grad() -> None:
    """torch asks for no log-sum-exp then, without which its backward kernel fails."""
    q, k, v = drawn()
    bias = torch.randn(33, 47, generator=torch.Generator().manual_seed(1)).requires_grad_()
    found = sdpa._efficient(q, k, v, bias.expand(2, 4, 33, 47), False)[1]
    assert found.shape == (2, 4, 64)
    close(found[..., :33], exact(q, k, v, bias=bias.detach().double())[1])
    with dlattn.torch.active():
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        (gradient,) = torch.autograd.grad(out.square().sum(), bias)
    out = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), bias.double())
    (want,) = torch.autograd.grad(out.square().sum(), bias)
    torch.testing.assert_close(gradient, want, rtol=1e-4, atol=1e-4)


def test_reasons_do_not_grow_with_their_numbers() -> None:
    q, k, v = drawn()
    with dlattn.torch.active():
        for scale in (1e-42, 2e-42, float("nan"), 0.0, -0.5, 1e300):
            F.scaled_dot_product_attention(q, k, v, scale=scale)
        for rows in (3, 4, 51):
            F.scaled_dot_product_attention(q[:, :, :rows].double(), k.double(), v.double())
    refused = dlattn.torch.stats().refused
    assert sorted(refused.values()) == [3, 6]
    (first,) = (reason for reason, count in refused.items() if count == 6)
    assert "softmax_scale is 1e-42; accepted: " in first


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dropout_p": 0.1}, "dropout_p is above 0"),
        ({"return_debug_mask": True}, "return_debug_mask is True"),
        ({"block_table": torch.zeros(1)}, "block_table is not None"),
        ({"seqused_k": torch.zeros(1)}, "seqused_k without cum_seq_q"),
        ({"cum_seq_q": torch.zeros(2)}, "one of cum_seq_q and cum_seq_k is None"),
    ],
)
def test_reasons_of_flash_forward(change: dict[str, Any], reason: str) -> None:
    arguments = {
        "cum_seq_q": None,
        "cum_seq_k": None,
        "max_q": 47,
        "max_k": 47,
        "dropout_p": 0.0,
        "is_causal": False,
        "return_debug_mask": False,
        **change,
    }
    with pytest.raises(sdpa.Refused, match=reason):
        sdpa._flash_forward(*(x.transpose(1, 2) for x in drawn()), **arguments)


def test_the_operators_are_torchs() -> None:
    """Arguments of every kernel are those of the operator that it replaces, in their order."""
    import inspect

    for kernels in sdpa.KERNELS.values():
        for name, kernel in kernels.items():
            operator = getattr(torch.ops.aten, name, None)
            if operator is None:  # of a later torch
                continue
            schema = operator.default._schema
            given = inspect.signature(
                sdpa._flash_forward_into if kernel is sdpa._flash_forward else kernel
            ).parameters
            wanted = [argument.name for argument in schema.arguments]
            found = list(given)[1:] if kernel is sdpa._flash_forward else list(given)
            assert [x for x in found if x in wanted] == wanted, name
            for argument in schema.arguments:
                keyword = given[argument.name].kind is inspect.Parameter.KEYWORD_ONLY
                assert keyword == argument.kwarg_only, (name, argument.name)
