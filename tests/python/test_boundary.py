"""How tensors come in and go out: without a copy, in any strides, from whoever exports them."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from typing import Any

import numpy as np
import pytest
from arrays import FRAMEWORKS, assert_attention, normal, poisoned, qkv, to_float64
from capsules import Exporter, OldestExporter, OldExporter, device_tensor

import dlattn
from dlattn import _core


def memory_bytes(kind: str) -> int:
    """Memory of this process: "resident" in the machine's, or "virtual", touched or not."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[kind == "resident"]) * os.sysconf("SC_PAGESIZE")


# No copy


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_tensors_come_in_where_they_are(framework, dtype):
    x = framework.array(normal(2, 5, 4, 8), dtype)
    seen = _core.inspect(x)
    assert seen["pointer"] == framework.pointer(x)
    assert seen["dtype"] == dtype and seen["device"] == "cpu"
    assert seen["shape"] == (2, 5, 4, 8) and seen["strides"] == (160, 32, 8, 1)


def test_torch_comes_in_by_the_exchange_api_if_it_can():
    torch = pytest.importorskip("torch")
    x = torch.zeros(2)
    offers = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
    assert _core.inspect(x)["exchange_api"] == offers


def test_torch_without_the_exchange_api(no_exchange_api):
    torch = pytest.importorskip("torch")
    arrays = [torch.from_numpy(x) for x in qkv(head_dim_v=6)]
    assert not _core.inspect(arrays[0])["exchange_api"]
    assert _core.inspect(arrays[0])["pointer"] == arrays[0].data_ptr()
    out, lse = dlattn.attention(*arrays, causal=True, return_lse=True)
    assert type(out) is torch.Tensor and out.dtype == torch.float32
    assert_attention((out, lse), *arrays, causal=True)
    half = [x.to(torch.bfloat16) for x in arrays]
    assert dlattn.attention(*half).dtype == torch.bfloat16
    given = torch.full((2, 5, 4, 6), torch.nan)
    assert dlattn.attention(*arrays, out=given) is given
    assert_attention(given, *arrays)


def test_torch_compile_runs_the_call_as_it_is():
    torch = pytest.importorskip("torch")
    arrays = [torch.from_numpy(x) for x in qkv()]

    @torch.compile(backend="eager")
    def model(q: Any, k: Any, v: Any) -> Any:
        return dlattn.attention(2 * q, k, v, causal=True) + 1

    want = dlattn.attention(2 * arrays[0], *arrays[1:], causal=True) + 1
    torch.testing.assert_close(model(*arrays), want)


def test_views_come_in_with_their_offset(framework):
    if framework.name == "jax":
        pytest.skip("JAX has no views")
    whole = framework.array(normal(2, 5, 4, 8))
    seen = _core.inspect(whole[:, 1:, 2:, 4:])
    assert seen["pointer"] == framework.pointer(whole) + 4 * (32 + 16 + 4)
    assert seen["shape"] == (2, 4, 2, 4) and seen["strides"] == (160, 32, 8, 1)


def test_out_is_written_in_place(framework):
    if framework.name == "jax":
        pytest.skip("JAX arrays are immutable")
    out = framework.array(poisoned(2, 5, 4, 8))
    before = framework.pointer(out)
    dlattn.attention(*map(framework.array, qkv()), out=out)
    assert framework.pointer(out) == before and np.isfinite(to_float64(out)).all()


def test_jax_takes_the_result_over_without_a_copy(monkeypatch):
    jax = FRAMEWORKS["jax"]()
    pointers = []
    framework = sys.modules["dlattn._frameworks"]._FRAMEWORKS["jax"]
    empty = type(framework).empty

    def spied(self: Any, *arguments: Any) -> Any:
        buffer = empty(self, *arguments)
        pointers.append(_core.inspect(buffer)["pointer"])
        return buffer

    monkeypatch.setattr(type(framework), "empty", spied)
    result = dlattn.attention(*map(jax.array, qkv()), return_lse=True)
    assert [jax.pointer(x) for x in result] == pointers
    assert all(pointer % 64 == 0 for pointer in pointers)


def test_jax_results_outlive_everything_else():
    jax = FRAMEWORKS["jax"]()
    arrays = [jax.array(x) for x in qkv()]
    results = [dlattn.attention(*arrays) for _ in range(50)]
    del arrays
    gc.collect()
    for result in results:
        assert_attention(result, *qkv())
    total = sum(results[1:], start=results[0])  # JAX computes with them
    np.testing.assert_allclose(np.asarray(total), 50 * np.asarray(results[0]), rtol=1e-5)


# Strides


def strided(x: np.ndarray, kind: str) -> np.ndarray:
    """The numbers of x in other strides, the last dimension contiguous."""
    b, s, h, d = x.shape
    if kind == "sliced":
        whole = poisoned(b + 1, 2 * s, h + 2, d + 5, dtype=x.dtype.name)
        view = whole[1:, ::2, 1:-1, 3 : d + 3]
    elif kind == "transposed":
        view = poisoned(h, b, s, d, dtype=x.dtype.name).transpose(1, 2, 0, 3)
    elif kind == "odd rows":
        view = poisoned(b, s, h, d + 1, dtype=x.dtype.name)[..., 1:]
    else:
        raise AssertionError(kind)
    view[...] = x
    return view


@pytest.mark.parametrize("kind", ["sliced", "transposed", "odd rows"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_strides(kind, dtype):
    arrays = [strided(x, kind) for x in qkv(2, 33, 40, 4, 2, 24, dtype=dtype)]
    seen = _core.inspect(arrays[0])
    assert seen["strides"] == tuple(s // arrays[0].itemsize for s in arrays[0].strides)
    assert_attention(dlattn.attention(*arrays, causal=True), *arrays, causal=True)


@pytest.mark.parametrize("kind", ["sliced", "transposed", "odd rows"])
@pytest.mark.parametrize("exchange", [True, False])
def test_strides_of_torch(kind, exchange):
    torch = pytest.importorskip("torch")
    _core.use_exchange_api(exchange)
    try:
        arrays = [torch.from_numpy(strided(x, kind)) for x in qkv()]
        assert _core.inspect(arrays[0])["strides"] == arrays[0].stride()
        assert_attention(dlattn.attention(*arrays), *arrays)
    finally:
        _core.use_exchange_api(True)


def test_broadcast_by_zero_strides():
    q, k, v = qkv()
    one = (np.broadcast_to(k[:1, :, :1], k.shape), np.broadcast_to(v[:, :1], v.shape))
    assert _core.inspect(one[0])["strides"] == (0, 16, 0, 1)
    assert_attention(dlattn.attention(q, *one), q, *one)
    scores = normal(1, 4, 1, 7, seed=5)
    bias, mask = np.broadcast_to(scores, (2, 4, 5, 7)), np.broadcast_to(scores > -0.5, (2, 4, 5, 7))
    assert bias.strides[2] == 0
    assert_attention(dlattn.attention(q, k, v, bias=bias, mask=mask), q, k, v, bias=bias, mask=mask)


def test_offsets_beyond_32_bits():
    """Batches more than 2^31 elements apart, in memory that is mapped but hardly touched."""
    far = 2**31 + 4096
    memory = np.empty(far + (1 << 20), np.float16)

    def place(x: np.ndarray, offset: int) -> np.ndarray:
        view = np.lib.stride_tricks.as_strided(
            memory[offset:], x.shape, (2 * far, *x[0].strides), writeable=True
        )
        view[...] = x
        return view

    arrays = [place(x, 8192 * n) for n, x in enumerate(qkv(2, 33, 40, 2, 2, 32, dtype="float16"))]
    out = place(poisoned(2, 33, 2, 32, dtype="float16"), 4 * 8192)
    dlattn.attention(*arrays, out=out, causal=True)
    assert_attention(out, *arrays, causal=True)


def test_bias_and_mask_of_any_strides():
    q, k, v = qkv()
    bias = normal(2, 7, 4, 10, seed=5).transpose(0, 2, 3, 1)[:, :, ::-2][:, :, ::-1]
    mask = normal(7, 5, seed=6).T > -0.5
    assert bias.shape == (2, 4, 5, 7)
    assert_attention(dlattn.attention(q, k, v, bias=bias, mask=mask), q, k, v, bias=bias, mask=mask)


def test_slopes_and_sinks_of_any_strides():
    q, k, v = qkv()
    slopes, sinks = np.abs(normal(4, 6, seed=5)).T[::3], normal(8, seed=6)[::2]
    assert_attention(
        dlattn.attention(q, k, v, alibi_slopes=slopes, sinks=sinks), q, k, v, alibi_slopes=slopes,
        sinks=sinks,
    )  # fmt: skip


@pytest.mark.parametrize("stride", [0, -7, 3, 2**62, -(2**62)])
def test_strides_of_dimensions_of_one_element_mean_nothing(stride):
    q, k, v = qkv(1, 1, 7, 1, 1)
    odd = Exporter(q, strides=(stride, stride, stride, 1))
    np.testing.assert_array_equal(dlattn.attention(odd, k, v), dlattn.attention(q, k, v))
    out = poisoned(1, 1, 1, 8)
    dlattn.attention(q, k, v, out=Exporter(out, strides=(stride, stride, stride, 1)))
    assert_attention(out, q, k, v)


def test_head_dim_of_one_may_have_any_stride():
    q, k, v = (x[..., :1] for x in qkv())
    assert q.strides[-2] == 32
    odd = [Exporter(x, strides=(*(s // 4 for s in x.strides[:3]), 5)) for x in (q, k, v)]
    np.testing.assert_array_equal(dlattn.attention(*odd), dlattn.attention(q, k, v))


def test_strides_left_out_mean_contiguous():
    q, k, v = qkv()
    old = Exporter(q, strides=None, version=None)
    assert _core.inspect(old)["strides"] == (160, 32, 8, 1)
    np.testing.assert_array_equal(dlattn.attention(old, k, v), dlattn.attention(q, k, v))


def test_byte_offset():
    q, k, v = qkv()
    whole = np.concatenate([normal(3), q.ravel()])
    shifted = Exporter(whole, shape=q.shape, strides=(160, 32, 8, 1), byte_offset=12)
    assert _core.inspect(shifted)["pointer"] == whole.ctypes.data + 12
    np.testing.assert_array_equal(dlattn.attention(shifted, k, v), dlattn.attention(q, k, v))


def test_empty_tensors_may_have_any_strides_and_no_memory():
    q = Exporter(normal(1), shape=(0, 5, 4, 8), strides=(-3, 7, 2**62, 9), pointer=0)
    k = Exporter(normal(1), shape=(0, 7, 2, 8), strides=(-3, 7, 2**62, 9), pointer=0)
    out = dlattn.attention(q, k, k)
    assert type(out) is np.ndarray and out.shape == (0, 5, 4, 8)


def test_memory_mapped_arrays_and_other_subclasses(tmp_path):
    q, k, v = qkv()
    q.tofile(tmp_path / "q.bin")
    mapped = np.memmap(tmp_path / "q.bin", np.float32, "r", shape=q.shape)
    out = dlattn.attention(mapped, k, v)
    assert type(out) is np.ndarray
    np.testing.assert_array_equal(out, dlattn.attention(q, k, v))


def test_read_only_inputs_are_fine():
    arrays = qkv()
    for x in arrays:
        x.flags.writeable = False
    assert _core.inspect(arrays[0])["read_only"]
    assert_attention(dlattn.attention(*arrays), *arrays)


# Other exporters, and mixing


@pytest.mark.parametrize("kind", [Exporter, OldExporter, OldestExporter])
def test_exporters_of_any_age(kind):
    q, k, v = qkv()
    exporters = [kind(x) for x in (q, k, v)]
    out = dlattn.attention(*exporters)
    assert type(out) is np.ndarray  # who cannot allocate gets NumPy arrays, on the CPU
    np.testing.assert_array_equal(out, dlattn.attention(q, k, v))
    assert [x.alive for x in exporters] == [0, 0, 0]
    assert all(x.streams == [None] for x in exporters)


def test_frameworks_mix_on_the_cpu():
    torch, jax = FRAMEWORKS["torch"](), FRAMEWORKS["jax"]()
    q, k, v = qkv()
    want = dlattn.attention(q, k, v)
    for first, second, third in [
        (torch.array(q), jax.array(k), v),
        (jax.array(q), v * 0 + k, torch.array(v)),
        (q, Exporter(k), torch.array(v)),
        (Exporter(q), torch.array(k), jax.array(v)),
    ]:
        got = dlattn.attention(first, second, third)
        np.testing.assert_array_equal(np.asarray(got), want)
        assert type(got) is (type(first) if not isinstance(first, Exporter) else np.ndarray)
    out = torch.array(poisoned(2, 5, 4, 8))
    assert dlattn.attention(q, k, v, out=out) is out
    np.testing.assert_array_equal(out.numpy(), want)


def test_pinned_host_memory_is_cpu_memory():
    q, k, v = qkv()
    pinned = [device_tensor(3, 0, x) for x in (q, k, v)]
    assert _core.inspect(pinned[0])["device"] == "cpu"
    np.testing.assert_array_equal(dlattn.attention(*pinned), dlattn.attention(q, k, v))


@pytest.mark.skipif(bool(dlattn.info().devices), reason="the fake memory would be used")
@pytest.mark.parametrize("device_type", [2, 13])
def test_cuda_exporters_are_asked_for_the_right_stream(device_type):
    arrays = qkv()

    class TorchStream:
        cuda_stream = 0x5000

    class CupyStream:
        ptr = 0x6000

    class CudaStream:
        def __cuda_stream__(self) -> tuple[int, int]:
            return (0, 0x7000)

    for stream, asked in [
        (0, 1),  # DLPack's name for the legacy default stream
        (1, 1),
        (2, 2),
        (0x4000, 0x4000),
        (np.int64(0x4000), 0x4000),
        (TorchStream(), 0x5000),
        (CupyStream(), 0x6000),
        (CudaStream(), 0x7000),
    ]:
        tensors = [device_tensor(device_type, 0, x) for x in arrays]
        out = device_tensor(device_type, 0, poisoned(2, 5, 4, 8))
        assert not dlattn.supported(*tensors, out=out, stream=stream)
        assert [x.streams for x in [*tensors, out]] == [[asked]] * 4


def test_device_of_the_capsule_counts():
    q, k, v = qkv()
    liar = Exporter(k, device=(1, 0), capsule_device=(2, 0))
    with pytest.raises(dlattn.UnsupportedError, match="k is on cuda:0; accepted: cpu"):
        dlattn.attention(q, liar, v)
    assert liar.alive == 0


def test_a_capsule_is_consumed_once():
    exporter = Exporter(normal(2, 3))
    exporter.capsule = capsule = exporter.__dlpack__()
    _core.inspect(exporter)
    assert '"used_dltensor"' in repr(capsule)
    assert exporter.alive == 0
    with pytest.raises(dlattn.UnsupportedError, match="used before"):
        _core.inspect(exporter)


def test_capsules_are_released_when_a_call_fails():
    q, k, v = (Exporter(x) for x in qkv())
    with pytest.raises(dlattn.UnsupportedError):
        dlattn.attention(q, k, v, softmax_scale=-1.0)
    with pytest.raises(dlattn.UnsupportedError):
        dlattn.attention(q, k, Exporter(normal(2, 7, 3, 8)))
    assert (q.alive, k.alive, v.alive) == (0, 0, 0)


def test_host_buffer_exports_itself():
    buffer = _core.HostBuffer((2, 3), "bfloat16")
    assert buffer.__dlpack_device__() == (1, 0)
    assert "dltensor_versioned" in repr(buffer.__dlpack__(max_version=(1, 0)))
    assert '"dltensor"' in repr(buffer.__dlpack__(stream=None, copy=False))
    assert _core.inspect(buffer)["dtype"] == "bfloat16"
    assert np.from_dlpack(_core.HostBuffer((4, 5), "float32")).shape == (4, 5)
    with pytest.raises(dlattn.UnsupportedError, match=r"dtype is int8; accepted: float16"):
        _core.HostBuffer((2,), "int8")


# Objects and memory


def test_no_references_are_kept(framework):
    arrays = [framework.array(x) for x in qkv()]
    bias = framework.array(normal(5, 7))
    tensors = [*arrays, bias]
    out, lse = dlattn.attention(*arrays, bias=bias, return_lse=True)
    gc.collect()
    before = [sys.getrefcount(x) for x in tensors]
    for _ in range(10):
        out, lse = dlattn.attention(*arrays, bias=bias, return_lse=True)
        dlattn.plan(*arrays, bias=bias)
        dlattn.merge_states([out, out], [lse, lse])
        with pytest.raises(dlattn.UnsupportedError):
            dlattn.attention(*arrays, bias=bias, softmax_scale=0)
    gc.collect()
    assert [sys.getrefcount(x) for x in tensors] == before


def test_inputs_die_when_their_caller_lets_go():
    torch = pytest.importorskip("torch")
    arrays = [torch.from_numpy(x) for x in qkv()]
    watched = [weakref.ref(x) for x in arrays]
    out = dlattn.attention(*arrays)
    arrays.clear()
    gc.collect()
    assert [x() for x in watched] == [None] * 3 and out.isfinite().all()


@pytest.mark.parametrize("name", ["numpy", "torch", "jax", "exporter"])
def test_no_leak_over_many_calls(name):
    make = Exporter if name == "exporter" else FRAMEWORKS[name]().array
    arrays = [make(x) for x in qkv(1, 64, 64, 4, 4, 64)]  # out: 64 kB
    calls = 10_000 if name in ("numpy", "torch") else 2_000

    def run(count: int) -> None:
        for n in range(count):
            dlattn.attention(*arrays, return_lse=n % 2 == 0)
            if n % 8 == 0:
                with pytest.raises((TypeError, dlattn.UnsupportedError)):
                    dlattn.attention(*arrays[:2], arrays[2] if n % 16 else None, layout="x")

    run(200)
    gc.collect()
    objects, before = len(gc.get_objects()), memory_bytes("resident")
    run(calls)
    gc.collect()
    assert memory_bytes("resident") - before < 100 * 65536
    assert len(gc.get_objects()) - objects < 100


def test_a_refused_call_gives_its_output_back(framework):
    """What is wrong with the numbers is found when the output is there already."""
    arrays = [framework.array(x) for x in qkv(1, 512, 2, 8, 8, 64)]  # out: 1 MB, never touched

    def run(count: int) -> None:
        for _ in range(count):
            with pytest.raises(dlattn.UnsupportedError, match="softmax_scale"):
                dlattn.attention(*arrays, softmax_scale=-1.0)

    run(20)
    before = memory_bytes("virtual")
    run(500)
    assert memory_bytes("virtual") - before < 200 << 20


def test_two_threads_at_once():
    q, k, v = qkv(2, 65, 130, 4, 2, 32)
    torch = FRAMEWORKS["torch"]()
    want = {causal: dlattn.attention(q, k, v, causal=causal) for causal in (False, True)}
    start = threading.Barrier(4, timeout=60)
    failures: list[BaseException] = []

    def work(causal: bool, array: Any) -> None:
        try:
            arrays = [array(x) for x in (q, k, v)]
            start.wait()
            for _ in range(50):
                got = dlattn.attention(*arrays, causal=causal)
                np.testing.assert_array_equal(np.asarray(got), want[causal])
        except BaseException as error:
            failures.append(error)

    threads = [
        threading.Thread(target=work, args=(causal, array))
        for causal in (False, True)
        for array in (np.array, torch.array)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_other_threads_run_meanwhile():
    """The GIL is released: a thread counts while another computes one long call."""
    arrays = qkv(1, 2048, 2048, 8, 8, 64)
    counted, done = 0, threading.Event()

    def work() -> None:
        dlattn.attention(*arrays)
        done.set()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # only a release lets the counter run
    thread = threading.Thread(target=work)
    try:
        thread.start()
        while not done.wait(0.001):
            counted += 1
    finally:
        thread.join()
        sys.setswitchinterval(interval)
    assert counted > 1


def test_import_brings_no_framework():
    code = (
        "import sys, dlattn; "
        "heavy = {'torch', 'cupy', 'jax', 'jaxlib', 'ml_dtypes'} & set(sys.modules); "
        "assert not heavy, heavy; "
        "import numpy as np; x = np.ones((1, 2, 1, 8), np.float16); dlattn.attention(x, x, x); "
        "heavy = {'torch', 'cupy', 'jax', 'jaxlib', 'ml_dtypes'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# JAX on a GPU, as far as it can be told without one: its streams and events are played by these.


class FakeEvents:
    """What has been enqueued, in order."""

    def __init__(self) -> None:
        self.log: list[tuple[str, Any]] = []


class FakeJaxDevice:
    platform = "gpu"


class FakeJaxArray:
    """An array that logs the streams it is exported to."""

    def __init__(self, events: FakeEvents, name: str) -> None:
        self.events = events
        self.name = name
        self.ready = False

    def devices(self) -> set[FakeJaxDevice]:
        return {FakeJaxDevice()}

    def is_ready(self) -> bool:
        return self.ready

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)

    def __dlpack__(self, *, stream: int) -> str:
        self.events.log.append(("export", (self.name, stream)))
        return f"capsule of {self.name}"


@pytest.fixture
def fake_jax(monkeypatch):
    from dlattn import _frameworks

    events = FakeEvents()
    streams = iter(range(100, 1000))

    def from_dlpack(exporter: Any) -> FakeJaxArray:
        assert exporter.__dlpack_device__() == (2, 0)
        stream = next(streams)
        capsule = exporter.__dlpack__(stream=stream)
        events.log.append(("import", (capsule, stream)))
        return FakeJaxArray(events, capsule.replace("capsule of", "result"))

    class Dlpack:
        pass

    class Module:
        dlpack = Dlpack

    Dlpack.from_dlpack = staticmethod(from_dlpack)
    monkeypatch.setitem(sys.modules, "jax", Module)
    framework = _frameworks.Jax()
    monkeypatch.setattr(
        framework, "empty", lambda like, shape, dtype: FakeJaxArray(events, f"sentinel {shape}")
    )
    return framework, events


class Memory:
    """Stands for the capsule of an input."""


def test_jax_on_a_gpu_is_ordered_by_its_own_streams(fake_jax):
    framework, events = fake_jax

    def launch(stream: int) -> tuple[list[Any], list[Any]]:
        events.log.append(("launch", stream))
        return [FakeJaxArray(events, "out"), FakeJaxArray(events, "lse")], [Memory()]

    outputs = framework.run(FakeJaxArray(events, "q"), launch)
    assert [x.name for x in outputs] == ["result out", "result lse"]
    assert events.log == [
        ("launch", 100),  # on the stream that JAX waits for
        ("export", ("out", 100)),
        ("import", ("capsule of out", 100)),
        ("export", ("result out", 101)),  # lse's stream waits for the kernel
        ("export", ("lse", 101)),
        ("import", ("capsule of lse", 101)),
        ("export", ("result out", 102)),
        ("export", ("sentinel (1,)", 102)),
        ("import", ("capsule of sentinel (1,)", 102)),
    ]


def test_jax_memory_is_held_until_the_kernel_is_done(fake_jax):
    framework, events = fake_jax
    watched = []

    def launch(stream: int) -> tuple[list[Any], list[Any]]:
        memory = Memory()
        watched.append(weakref.ref(memory))
        return [FakeJaxArray(events, "out")], [memory]

    for _ in range(3):
        framework.run(FakeJaxArray(events, "q"), launch)
    assert all(memory() for memory in watched)
    framework._in_flight[0][0].ready = True
    framework.run(FakeJaxArray(events, "q"), launch)
    assert [memory() is not None for memory in watched] == [False, True, True, True]
    for sentinel in [entry[0] for entry in framework._in_flight]:
        sentinel.ready = True
    framework.run(FakeJaxArray(events, "q"), launch)
    assert [memory() is not None for memory in watched] == [False] * 4 + [True]


def test_jax_errors_before_the_launch_come_out(fake_jax):
    framework, events = fake_jax

    def launch(stream: int) -> tuple[list[Any], list[Any]]:
        raise dlattn.UnsupportedError("no kernel")

    with pytest.raises(dlattn.UnsupportedError, match="no kernel"):
        framework.run(FakeJaxArray(events, "q"), launch)
    assert events.log == [] and not framework._in_flight
