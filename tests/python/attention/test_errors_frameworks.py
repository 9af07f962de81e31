"""Wrong calls with tensors of torch and JAX, and of devices that are not there."""

from __future__ import annotations

import pytest
from arrays import poisoned
from capsules import device_tensor
from wrong_calls import K, Q, V, Wrong, check

import dlattn
from dlattn import UnsupportedError


class TestTorch:
    @pytest.fixture(params=["exchange API", "__dlpack__"], autouse=True)
    def setup(self, request):
        self.torch = pytest.importorskip("torch")
        self.q, self.k, self.v = (self.torch.from_numpy(x) for x in (Q, K, V))
        dlattn._core.use_exchange_api(request.param == "exchange API")
        yield
        dlattn._core.use_exchange_api(True)

    def raises(self, error, *words, **changes):
        wrong = Wrong(changes, words, error, {"q": self.q, "k": self.k, "v": self.v})
        check(wrong, dlattn.attention)

    def test_requires_grad(self):
        k = self.k.clone().requires_grad_()
        self.raises(UnsupportedError, "k requires grad", "torch.no_grad()", "k.detach()", k=k)
        with self.torch.no_grad():
            dlattn.attention(self.q, k, self.v)
        dlattn.attention(self.q, k.detach(), self.v)

    def test_a_parameter_counts_as_a_tensor(self):
        q = self.torch.nn.Parameter(self.q)
        self.raises(UnsupportedError, "q requires grad", "accepted", q=q)
        with self.torch.inference_mode():
            assert type(dlattn.attention(q, self.k, self.v)) is self.torch.Tensor

    def test_conjugated(self):
        q = self.q.to(self.torch.complex64).conj()
        self.raises(UnsupportedError, "q is a conjugated view", "accepted", q=q)

    def test_negated(self):
        q = self.torch.complex(self.q, self.q).conj().imag
        assert q.is_neg()
        self.raises(UnsupportedError, "q is a negated view", "resolve_neg()", q=q)

    def test_sparse(self):
        self.raises(TypeError, "v: torch.Tensor", "accepted: a dense", v=self.v.to_sparse())

    def test_meta(self):
        self.raises(TypeError, "q: torch.Tensor", "meta", "accepted", q=self.q.to("meta"))

    def test_fake(self):
        with pytest.importorskip("torch._subclasses").FakeTensorMode():
            q = self.torch.randn(2, 5, 4, 8)
        self.raises(TypeError, "q is a torch._subclasses", "accepted: a plain torch.Tensor", q=q)

    def test_plain_tensors_in_fake_mode(self):
        with pytest.importorskip("torch._subclasses").FakeTensorMode():
            self.raises(UnsupportedError, "q is a plain torch.Tensor", "FakeTensorMode", "accepted")
            self.raises(UnsupportedError, "k is a plain torch.Tensor", "FakeTensorMode", q=Q)
            with pytest.raises(UnsupportedError, match="outs is a plain"):
                dlattn.merge_states([self.q], [self.q])
        dlattn.attention(self.q, self.k, self.v)

    def test_a_tangent(self):
        forward_ad = self.torch.autograd.forward_ad
        with forward_ad.dual_level():
            k = forward_ad.make_dual(self.k, self.k)
            self.raises(UnsupportedError, "k has a tangent", "accepted", "k.detach()", k=k)
            out = forward_ad.make_dual(self.q.clone(), self.q)
            self.raises(UnsupportedError, "out has a tangent", "accepted", out=out)
            with self.torch.no_grad():  # stops gradients that go backward alone
                self.raises(UnsupportedError, "k has a tangent", k=k)
            want = dlattn.attention(self.q, self.k, self.v)
            assert self.torch.equal(dlattn.attention(self.q, k.detach(), self.v), want)
            with self.torch.inference_mode():
                assert self.torch.equal(dlattn.attention(self.q, k, self.v), want)

    @pytest.mark.parametrize("pre_dispatch", [False, True])
    def test_make_fx(self, pre_dispatch):
        proxies = pytest.importorskip("torch.fx.experimental.proxy_tensor")
        words = r" while torch traces \(ProxyTorchDispatchMode\).*accepted: a call outside make_fx"
        trace = proxies.make_fx(
            lambda *arrays: dlattn.attention(*arrays), pre_dispatch=pre_dispatch
        )
        with pytest.raises(UnsupportedError, match="q is a torch.Tensor" + words):
            trace(self.q, self.k, self.v)
        trace = proxies.make_fx(lambda v: dlattn.attention(Q, K, v), pre_dispatch=pre_dispatch)
        with pytest.raises(UnsupportedError, match="v is a torch.Tensor" + words):
            trace(self.v)
        support = []
        proxies.make_fx(lambda q: support.append(dlattn.supported(q, self.k, self.v)))(self.q)
        assert "while torch traces" in str(support[0])

    def test_jit_trace(self):
        def model(q):
            return q + dlattn.attention(q, self.k, self.v)

        with pytest.raises(UnsupportedError, match=r"q is .*torch traces \(torch\.jit\.trace\)"):
            self.torch.jit.trace(model, (self.q,))

    def test_functionalized(self):
        with pytest.raises(TypeError, match=r"q.* null pointer; accepted: memory of 320 element"):
            self.torch.func.functionalize(lambda q: dlattn.attention(q, self.k, self.v))(self.q)

    def test_a_jax_out(self):
        jax = pytest.importorskip("jax")
        out = jax.numpy.asarray(poisoned(2, 5, 4, 8))
        self.raises(UnsupportedError, "out: JAX arrays are immutable", "accepted: None", out=out)
        with pytest.raises(UnsupportedError, match="out: JAX arrays are immutable"):
            dlattn.attention(Q, K, V, out=out)
        assert jax.numpy.isnan(out).all()

    @pytest.mark.filterwarnings("ignore::UserWarning")
    def test_nested(self):
        q = self.torch.nested.nested_tensor([self.q[0], self.q[0]])
        self.raises(TypeError, "q: torch.Tensor", "accepted: a dense", q=q)

    def test_inside_vmap(self):
        with pytest.raises(TypeError, match=r"q: torch\.Tensor.*accepted: a dense"):
            self.torch.func.vmap(lambda q: dlattn.attention(q, self.k, self.v))(self.q[None])

    def test_float8(self):
        q = self.q.to(self.torch.float8_e5m2)
        self.raises(UnsupportedError, "q: dtype is float8_e5m2; accepted: float16", q=q)

    def test_an_expanded_out_overlaps_itself(self):
        out = self.torch.empty(1, 5, 4, 8).expand(2, 5, 4, 8)
        self.raises(UnsupportedError, "out: a stride of 0", "at least", out=out)


class TestJax:
    @pytest.fixture(autouse=True)
    def setup(self):
        self.jax = pytest.importorskip("jax")
        self.arrays = [self.jax.numpy.asarray(x) for x in (Q, K, V)]

    def test_out(self):
        with pytest.raises(UnsupportedError, match="out: JAX arrays are immutable; accepted: None"):
            dlattn.attention(*self.arrays, out=self.arrays[0])

    def test_an_out_of_another_library(self):
        out = poisoned(2, 5, 4, 8)
        with pytest.raises(UnsupportedError, match="out: JAX arrays are immutable; accepted: None"):
            dlattn.attention(*self.arrays, out=out)
        assert "immutable" in str(dlattn.supported(*self.arrays, out=out))

    def test_tracer(self):
        with pytest.raises(
            TypeError, match=r"q is a JAX tracer.*concrete array.*dlattn\.jax\.attention"
        ):
            self.jax.jit(lambda q: dlattn.attention(q, *self.arrays[1:]))(self.arrays[0])
        with pytest.raises(TypeError, match="k is a JAX tracer"):
            self.jax.vmap(lambda k: dlattn.attention(self.arrays[0], k, self.arrays[2]))(
                self.arrays[1][None]
            )

    def test_random_keys(self):
        keys = self.jax.random.split(self.jax.random.key(0), (2, 5, 4, 8))
        with pytest.raises(TypeError, match=r"q is a JAX array of key.*accepted: an array of numb"):
            dlattn.attention(keys, *self.arrays[1:])
        with pytest.raises(TypeError, match=r"v is a JAX array of key.*accepted"):
            dlattn.attention(*self.arrays[:2], keys)

    def test_what_is_no_array(self):
        for thing in (self.jax.ShapeDtypeStruct((2, 5, 4, 8), "float32"), self.jax.jit(abs)):
            with pytest.raises(
                TypeError, match=r"q is a .*no memory; accepted: a concrete JAX arr"
            ):
                dlattn.attention(thing, *self.arrays[1:])

    def test_stream(self):
        with pytest.raises(UnsupportedError, match=r"stream.*accepted: None"):
            dlattn.attention(*self.arrays, stream=1)

    def test_deleted(self):
        q = self.arrays[0] + 1
        q.delete()
        with pytest.raises((TypeError, RuntimeError), match=r"delete"):
            dlattn.attention(q, *self.arrays[1:])


@pytest.mark.skipif(bool(dlattn.info().devices), reason="there is a CUDA device")
def test_cuda_tensors_without_a_device():
    arrays = [device_tensor(2, 0, x) for x in (Q, K, V)]
    out = device_tensor(2, 0, poisoned(2, 5, 4, 8))
    with pytest.raises(dlattn.DeviceError, match="CUDA"):
        dlattn.attention(*arrays, out=out, stream=0)
    assert "CUDA" in str(dlattn.supported(*arrays, out=out, stream=0))


@pytest.mark.skipif(bool(dlattn.info().devices), reason="it would be used")
def test_stream_of_the_wrong_kind():
    arrays = [device_tensor(2, 0, x) for x in (Q, K, V)]
    out = device_tensor(2, 0, poisoned(2, 5, 4, 8))

    class Stream:
        def __init__(self, told):
            self.__cuda_stream__ = told

    for stream, error, words in [
        ("0", TypeError, ("stream is of type str", "cuda_stream, ptr or __cuda_stream__")),
        (1.5, TypeError, ("stream is of type float", "accepted: an int")),
        (True, TypeError, ("stream is of type bool", "accepted: an int")),
        (-1, UnsupportedError, ("stream is -1", "accepted", ">= 0")),
        (2**70, UnsupportedError, (f"stream is {2**70}", "accepted: the handle of a CUDA stream")),
        (Stream(5), TypeError, ("its __cuda_stream__ is 5; accepted: a pair (version, handle)",)),
        (Stream((0,)), TypeError, ("its __cuda_stream__ is (0,); accepted: a pair",)),
        (Stream((0, "7")), TypeError, ("stream is of type", "accepted: an int")),
        (None, UnsupportedError, ("stream is None", "does not tell", "accepted")),
    ]:
        with pytest.raises(error) as caught:
            dlattn.attention(*arrays, out=out, stream=stream)
        assert type(caught.value) is error
        for word in words:
            assert word in str(caught.value)
    assert "stream is None" in str(dlattn.supported(*arrays, out=out))
    with pytest.raises(TypeError, match="stream is of type str"):
        dlattn.supported(*arrays, out=out, stream="0")


@pytest.mark.skipif(bool(dlattn.info().devices), reason="it would be used")
def test_no_way_to_allocate():
    arrays = [device_tensor(2, 0, x) for x in (Q, K, V)]
    with pytest.raises(UnsupportedError, match=r"out is None.*accepted: a tensor to write to"):
        dlattn.attention(*arrays, stream=0)
