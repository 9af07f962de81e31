"""The boundary on a GPU: no copy, no hidden wait, the right stream, graphs, threads, devices."""

from __future__ import annotations

import gc
import sys
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest
from arrays import assert_attention, max_error, normal, qkv

import dlattn
from dlattn import UnsupportedError, _core
from dlattn.reference import merge_states_reference

pytestmark = pytest.mark.gpu

HALF_SECOND = 1_000_000_000  # clock cycles, about
KERNELS = ("auto", "scalar", "wmma_qk", "wmma_smem", "wmma", "decode", "sm90")
SIZES = {"batch": 1, "seqlen_q": 512, "seqlen_k": 512, "num_heads": 8, "num_heads_kv": 8,
           "head_dim": 64}  # fmt: skip


def on_this_device(torch: Any, kernel: str) -> bool:
    """sm90 is for compute capability 9.0, and builds for others lack it."""
    if kernel != "sm90":
        return True
    capability = torch.cuda.get_device_capability()
    return capability == (9, 0) and kernel in dlattn.info().kernels


@pytest.fixture(params=KERNELS)
def kernel(torch, request):
    if not on_this_device(torch, request.param):
        pytest.skip(f"{request.param} is not for this device or not in this build")
    return request.param


@pytest.fixture
def cupy():
    cupy = pytest.importorskip("cupy")
    yield cupy
    cupy.cuda.Device().synchronize()


@pytest.fixture(params=["exchange API", "__dlpack__"])
def either_way(request):
    """Both ways in, as for torch from 2.10 on and for older ones."""
    _core.use_exchange_api(request.param == "exchange API")
    yield request.param
    _core.use_exchange_api(True)


def on_gpu(
    torch: Any, *arrays: np.ndarray, dtype: str = "float16", device: Any = "cuda"
) -> list[Any]:
    return [torch.from_numpy(x).to(device, getattr(torch, dtype)) for x in arrays]


def arrays_of(torch: Any, dtype: str = "float16", device: Any = "cuda", **sizes: int) -> list[Any]:
    return on_gpu(torch, *qkv(**{**SIZES, **sizes}), dtype=dtype, device=device)


def spin(cupy: Any) -> None:
    """Occupy CuPy's current stream for about half a second."""
    kernel = cupy.RawKernel(
        'extern "C" __global__ void spin(long long cycles) {'
        "  const long long start = clock64();"
        "  while (clock64() - start < cycles) {}"
        "}",
        "spin",
    )
    kernel((1,), (1,), (np.int64(HALF_SECOND),))


# Correctness through the Python API; the kernels have tests of their own


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("causal", [False, True, "top_left"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_torch(torch, either_way, dtype, causal, layout):
    arrays = on_gpu(torch, *qkv(2, 70, 90, 4, 2, 32, layout=layout), dtype=dtype)
    out, lse = dlattn.attention(*arrays, causal=causal, layout=layout, return_lse=True)
    assert out.device == arrays[0].device and out.dtype == arrays[0].dtype
    assert lse.device == arrays[0].device and lse.dtype == torch.float32
    assert out.is_contiguous() and lse.is_contiguous()
    assert_attention((out, lse), *arrays, causal=causal, layout=layout)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_kernels_by_name(torch, dtype, kernel):
    arrays = on_gpu(torch, *qkv(2, 70, 90, 4, 2, 64), dtype=dtype)
    plan = dlattn.plan(*arrays, kernel=kernel)
    assert plan.device == "cuda:0" and plan.kernel == (kernel if kernel != "auto" else plan.kernel)
    assert plan.grid > 0 and plan.num_warps > 0 and plan.smem_bytes >= 0 and plan.copy_bytes == 16
    assert_attention(dlattn.attention(*arrays, causal=True, kernel=kernel), *arrays, causal=True)


def test_plan_tells_which_kernels_were_passed_over(torch):
    arrays = on_gpu(torch, *qkv(head_dim=24))
    plan = dlattn.plan(*arrays)
    assert plan.kernel in ("wmma", "sm90")
    assert any("wmma_smem: head_dim is 24" in reason for reason in plan.passed_over)
    assert "passed over: wmma_smem" in str(plan)


def test_strides(torch, either_way):
    q, k, v = qkv(2, 33, 40, 4, 2, 32)
    for step, pad in [(1, 1), (2, 8), (2, 3)]:
        arrays = []
        for x in (q, k, v):
            b, s, h, d = x.shape
            whole = torch.full((b, h, s * step, d + pad), torch.nan, device="cuda").half()
            view = whole[:, :, ::step, pad:].transpose(1, 2)
            view.copy_(torch.from_numpy(x))
            arrays.append(view)
        assert _core.inspect(arrays[0])["strides"] == arrays[0].stride()
        out = torch.full((2, 33, 4, 32 + pad), torch.nan, device="cuda").half()[..., pad:]
        dlattn.attention(*arrays, causal=True, out=out)
        assert_attention(out, *arrays, causal=True)


def test_zero_strides(torch):
    q, k, v = on_gpu(torch, *qkv(2, 33, 40, 4, 2, 32))
    k, v = k[:1, :, :1].expand(2, 40, 2, 32), v[:, :1].expand(2, 40, 2, 32)
    assert_attention(dlattn.attention(q, k, v), q, k, v)


def test_offsets_beyond_32_bits(torch):
    if torch.cuda.mem_get_info()[0] < 6 << 30:
        pytest.skip("needs 6 GiB of free GPU memory")
    far = 2**31 + 4096
    memory = torch.empty(far + (1 << 20), dtype=torch.float16, device="cuda")
    arrays, offset = [], 0
    for x in on_gpu(torch, *qkv(2, 64, 64, 2, 2, 64)):
        view = memory.as_strided(x.shape, (far, *x.stride()[1:]), offset)
        view.copy_(x)
        arrays.append(view)
        offset += x[0].numel()
    out = memory.as_strided((2, 64, 2, 64), (far, 128, 64, 1), offset)
    out.fill_(torch.nan)
    for kernel in filter(partial(on_this_device, torch), KERNELS):
        dlattn.attention(*arrays, out=out, kernel=kernel)
        assert_attention(out, *arrays)
        out.fill_(torch.nan)


@pytest.mark.parametrize("empty", ["batch", "seqlen_q", "seqlen_k"])
def test_empty_tensors(torch, either_way, empty):
    sizes = {"batch": 2, "seqlen_q": 5, "seqlen_k": 7, empty: 0}
    arrays = on_gpu(torch, *qkv(**sizes))
    out, lse = dlattn.attention(*arrays, return_lse=True)
    assert tuple(out.shape) == (sizes["batch"], sizes["seqlen_q"], 4, 8)
    assert (out == 0).all() and lse.isneginf().all()


def test_merge_states(torch):
    outs = [normal(2, 5, 4, 8, seed=n) for n in range(3)]
    lses = [normal(2, 4, 5, seed=n) for n in range(3)]
    lses[1][0, 2] = -np.inf
    theirs = on_gpu(torch, *outs, dtype="float32"), on_gpu(torch, *lses, dtype="float32")
    out, lse = dlattn.merge_states(*theirs)
    expected = merge_states_reference(outs, lses)
    assert out.is_cuda and lse.is_cuda
    assert max_error(out, expected[0]) <= 2e-6 and max_error(lse, expected[1]) <= 2e-6
    stacked = dlattn.merge_states(torch.stack(theirs[0]), torch.stack(theirs[1]))
    assert torch.equal(stacked[0], out) and torch.equal(stacked[1], lse)


FEATURES = {
    "window": {"window": (3, None)},
    "softcap": {"softcap": 2.0},
    "bias": {"bias": normal(5, 7)},
    "mask": {"mask": normal(5, 7) > 0},
    "alibi_slopes": {"alibi_slopes": normal(4)},
    "sinks": {"sinks": normal(4)},
}


@pytest.mark.parametrize("name", FEATURES)
def test_features_work_or_are_refused_by_name(torch, name, kernel):
    arrays = on_gpu(torch, *qkv(head_dim=16), dtype="float16")
    options = {
        key: torch.from_numpy(value).cuda() if isinstance(value, np.ndarray) else value
        for key, value in FEATURES[name].items()
    }
    support = dlattn.supported(*arrays, kernel=kernel, **options)
    if support:
        assert_attention(
            dlattn.attention(*arrays, kernel=kernel, **options), *arrays, **FEATURES[name]
        )
        return
    assert all(name in reason for reason in support.reasons)
    with pytest.raises(UnsupportedError, match=name):
        dlattn.attention(*arrays, kernel=kernel, **options)


# No copy


def test_tensors_come_in_where_they_are(torch, either_way):
    x = arrays_of(torch)[0]
    seen = _core.inspect(x)
    assert seen["pointer"] == x.data_ptr() and seen["device"] == "cuda:0"
    assert seen["exchange_api"] == (
        either_way == "exchange API" and hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
    )


@pytest.mark.parametrize("return_lse", [False, True])
def test_peak_memory_is_what_the_plan_says(torch, either_way, kernel, return_lse):
    arrays = arrays_of(torch)
    dlattn.attention(*arrays, kernel=kernel, return_lse=return_lse)
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = dlattn.attention(*arrays, kernel=kernel, return_lse=return_lse)
    outputs = result if return_lse else (result,)
    torch.cuda.synchronize()
    expected = sum(x.numel() * x.element_size() for x in outputs)
    expected += dlattn.plan(*arrays, kernel=kernel).workspace_bytes
    assert torch.cuda.max_memory_allocated() - before == expected
    assert torch.cuda.memory_allocated() - before == expected


def test_out_given_allocates_nothing(torch, either_way):
    arrays = arrays_of(torch)
    out = torch.empty_like(arrays[0])
    dlattn.attention(*arrays, out=out)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    assert dlattn.attention(*arrays, out=out) is out
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_device_memory_outside_the_allocator_does_not_grow(torch):
    arrays = arrays_of(torch)
    out = torch.empty_like(arrays[0])
    dlattn.attention(*arrays, out=out)
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0]
    for _ in range(100):
        dlattn.attention(*arrays, out=out)
    torch.cuda.synchronize()
    assert torch.cuda.mem_get_info()[0] == free


# No hidden synchronisation, and the right order


def test_the_call_returns_while_the_stream_is_busy(torch, either_way):
    arrays = arrays_of(torch)
    expected = dlattn.attention(*arrays, return_lse=True)
    dlattn.merge_states([expected[0]] * 2, [expected[1]] * 2)  # loading a kernel may wait
    torch.cuda.synchronize()
    torch.cuda._sleep(2 * HALF_SECOND)
    slept = torch.cuda.Event()
    slept.record()
    got = dlattn.attention(*arrays, return_lse=True)
    merged = dlattn.merge_states([got[0], got[0]], [got[1], got[1]])
    dlattn.plan(*arrays)
    dlattn.supported(*arrays)
    assert not slept.query(), "the call waited for the stream"
    torch.cuda.synchronize()
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
    assert (merged[0] - got[0]).abs().max() < 1e-3


def test_order_on_a_side_stream(torch, either_way):
    """Inputs arrive late on the stream; who computes on another stream sees NaN."""
    arrays = arrays_of(torch)
    expected = dlattn.attention(*arrays)
    late = [torch.full_like(x, torch.nan) for x in arrays]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(HALF_SECOND)
        for x, y in zip(late, arrays, strict=True):
            x.copy_(y)
        out = dlattn.attention(*late)
        doubled = out + out  # later work on the stream sees the result
    stream.synchronize()
    assert torch.equal(out, expected) and torch.equal(doubled, expected + expected)


@pytest.mark.parametrize("kind", ["handle", "torch", "cupy", "protocol"])
def test_stream_argument(torch, either_way, kind):
    arrays = arrays_of(torch)
    expected = dlattn.attention(*arrays)
    late = [torch.full_like(x, torch.nan) for x in arrays]
    out = torch.full_like(expected, torch.nan)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    if kind == "cupy":
        argument: Any = pytest.importorskip("cupy").cuda.Stream(non_blocking=True)
        stream = torch.cuda.ExternalStream(argument.ptr)
    elif kind == "handle":
        argument = stream.cuda_stream
    elif kind == "torch":
        argument = stream
    else:
        argument = type("Stream", (), {"__cuda_stream__": lambda self: (0, stream.cuda_stream)})()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(HALF_SECOND)
        for x, y in zip(late, arrays, strict=True):
            x.copy_(y)
    dlattn.attention(*late, out=out, stream=argument)
    stream.synchronize()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("stream", [0, 1, 2])
def test_default_streams_by_handle(torch, stream):
    """The legacy default stream is 0 and 1, the thread's own default stream 2."""
    arrays = arrays_of(torch)
    torch.cuda.synchronize()
    out = dlattn.attention(*arrays, stream=stream)
    torch.cuda.synchronize()
    assert_attention(out, *arrays)


def test_order_on_a_cupy_stream(cupy):
    arrays = [cupy.asarray(x, dtype=cupy.float16) for x in qkv(**SIZES)]
    expected = dlattn.attention(*arrays)
    late = [cupy.full_like(x, cupy.nan) for x in arrays]
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        spin(cupy)
        for x, y in zip(late, arrays, strict=True):
            cupy.copyto(x, y)
        out = dlattn.attention(*late)
        assert not stream.done, "the call waited for the stream"
        doubled = out + out
    stream.synchronize()
    assert (out == expected).all() and (doubled == expected + expected).all()


def test_torch_and_cupy_tensors_in_one_call(torch, cupy):
    """A tensor of another framework is ordered after that framework's current stream."""
    q, k, v = arrays_of(torch)
    expected = dlattn.attention(q, k, v)
    late = cupy.full(k.shape, cupy.nan, dtype=cupy.float16)
    source = cupy.from_dlpack(k)
    torch.cuda.synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        spin(cupy)
        cupy.copyto(late, source)
        out = dlattn.attention(q, late, v)
    torch.cuda.synchronize()
    assert type(out) is torch.Tensor and torch.equal(out, expected)


# CUDA graphs


def test_graph_capture_and_replay(torch, either_way, kernel):
    arrays = arrays_of(torch)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        dlattn.attention(*arrays, causal=True, kernel=kernel, return_lse=True)  # loads the kernel
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = dlattn.attention(*arrays, causal=True, kernel=kernel, return_lse=True)
    for seed in range(3):
        for n, x in enumerate(arrays):
            x.copy_(torch.from_numpy(normal(*x.shape, seed=10 * seed + n)))
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert_attention((out, lse), *arrays, causal=True)


# Threads, devices, leaks


def test_two_threads_at_once(torch):
    start = threading.Barrier(3, timeout=60)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            arrays = [x * (1 + seed) for x in arrays_of(torch)]
            want = dlattn.attention(*arrays, causal=bool(seed))
            torch.cuda.synchronize()
            with torch.cuda.stream(torch.cuda.Stream()):
                start.wait()
                for _ in range(200):
                    got = dlattn.attention(*arrays, causal=bool(seed))
                torch.cuda.current_stream().synchronize()
                assert torch.equal(got, want)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_second_gpu(torch, either_way):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    assert torch.cuda.current_device() == 0
    arrays = arrays_of(torch, device="cuda:1")
    out, lse = dlattn.attention(*arrays, return_lse=True)
    assert out.device == lse.device == torch.device("cuda:1")
    assert torch.cuda.current_device() == 0
    assert dlattn.plan(*arrays).device == "cuda:1"
    assert_attention((out, lse), *arrays)
    merged = dlattn.merge_states([out], [lse])
    assert merged[0].device == torch.device("cuda:1")
    late = [torch.full_like(x, torch.nan) for x in arrays]
    torch.cuda.synchronize(1)
    with torch.cuda.stream(torch.cuda.Stream("cuda:1")):
        torch.cuda._sleep(HALF_SECOND)
        for x, y in zip(late, arrays, strict=True):
            x.copy_(y)
        again = dlattn.attention(*late)
        torch.cuda.current_stream().synchronize()
    assert torch.equal(again, out)


def test_mixed_gpus(torch, either_way):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    q, k, v = arrays_of(torch)
    with pytest.raises(UnsupportedError, match=r"k is on cuda:1; accepted: cuda:0, where q is"):
        dlattn.attention(q, k.to("cuda:1"), v)
    with pytest.raises(UnsupportedError, match=r"out is on cuda:1; accepted: cuda:0"):
        dlattn.attention(q, k, v, out=torch.empty_like(q, device="cuda:1"))


def test_mixed_with_the_cpu(torch, either_way):
    q, k, v = arrays_of(torch)
    with pytest.raises(UnsupportedError, match=r"k is on cpu; accepted: cuda:0, where q is"):
        dlattn.attention(q, k.cpu(), v)
    with pytest.raises(UnsupportedError, match=r"v is on cuda:0; accepted: cpu, where q is"):
        dlattn.attention(q.cpu(), k.cpu(), v)
    with pytest.raises(UnsupportedError, match=r"k is on cpu; accepted: cuda:0"):
        dlattn.attention(q, k.cpu().numpy(), v)
    with pytest.raises(UnsupportedError, match=r"cpu: the tensors are on a CUDA device"):
        dlattn.attention(q, k, v, kernel="cpu")


def test_pinned_memory_computes_on_the_cpu(torch):
    arrays = [torch.from_numpy(x).pin_memory() for x in qkv()]
    out = dlattn.attention(*arrays)
    assert out.device.type == "cpu"
    assert_attention(out, *arrays)


def test_a_refused_call_leaves_cuda_as_it_was(torch):
    arrays = arrays_of(torch, dtype="float64")
    with pytest.raises(UnsupportedError, match="float64"):
        dlattn.attention(*arrays)
    torch.cuda.synchronize()
    assert float(torch.ones(3, device="cuda").sum()) == 3


def test_no_leak_over_many_calls(torch, either_way):
    arrays = on_gpu(torch, *qkv(1, 64, 64, 4, 4, 64))

    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    def run(count: int) -> None:
        for n in range(count):
            dlattn.attention(*arrays, return_lse=n % 2 == 0)
        torch.cuda.synchronize()
        gc.collect()

    run(500)
    device, host, objects = torch.cuda.memory_allocated(), resident(), len(gc.get_objects())
    references = [sys.getrefcount(x) for x in arrays]
    run(10_000)
    assert torch.cuda.memory_allocated() == device
    assert resident() - host < 8 << 20
    assert len(gc.get_objects()) - objects < 100
    assert [sys.getrefcount(x) for x in arrays] == references


# CuPy


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_cupy(cupy, dtype):
    arrays = [cupy.asarray(x, dtype=dtype) for x in qkv(2, 70, 90, 4, 2, 32)]
    assert _core.inspect(arrays[0])["pointer"] == arrays[0].data.ptr
    out, lse = dlattn.attention(*arrays, causal=True, return_lse=True)
    assert type(out) is cupy.ndarray and out.dtype == dtype and out.device == arrays[0].device
    assert type(lse) is cupy.ndarray and lse.dtype == cupy.float32
    assert_attention((out, lse), *arrays, causal=True)
    given = cupy.full_like(out, cupy.nan)
    assert dlattn.attention(*arrays, causal=True, out=given) is given
    assert (given == out).all()


def test_cupy_managed_memory(cupy):
    with cupy.cuda.using_allocator(cupy.cuda.malloc_managed):
        arrays = [cupy.asarray(x, dtype=cupy.float16) for x in qkv(2, 70, 90, 4, 2, 32)]
    assert int(arrays[0].__dlpack_device__()[0]) == 13
    assert _core.inspect(arrays[0])["device"] == "cuda:0"
    assert_attention(dlattn.attention(*arrays, causal=True), *arrays, causal=True)


def test_cupy_stream_argument(cupy):
    arrays = [cupy.asarray(x, dtype=cupy.float16) for x in qkv(**SIZES)]
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    out = dlattn.attention(*arrays, stream=stream)
    stream.synchronize()
    assert_attention(out, *arrays)
