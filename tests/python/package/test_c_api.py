"""The C API as other languages see it: by ctypes, from structs that are read out of dlattn/c.h."""

from __future__ import annotations

import ctypes
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arrays import assert_attention

import dlattn
from dlattn import _core

HEADER = Path(__file__).resolve().parents[3] / "src" / "include" / "dlattn" / "c.h"
TEXT = re.sub(r"//[^\n]*", "", HEADER.read_text())
CONSTANTS = {name: int(value) for name, value in re.findall(r"\b(DLATTN_[A-Z0-9_]+) = (\d+)", TEXT)}
SCALARS = {
    "size_t": ctypes.c_size_t,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "double": ctypes.c_double,
    "char": ctypes.c_char,
}


def structs() -> dict[str, type[ctypes.Structure]]:
    made: dict[str, Any] = {}
    for body, name in re.findall(r"typedef struct \{(.*?)\} (\w+);", TEXT, re.DOTALL):
        fields: list[tuple[str, Any]] = []
        for line in filter(None, (" ".join(words.split()) for words in body.split(";"))):
            function = re.fullmatch(r".*\(\*(\w+)\)\(.*\)", line)
            pointer = re.fullmatch(r"(?:const )?\w+\* (\w+)", line)
            value = re.fullmatch(r"(\w+) (\w+)(?:\[(\d+)\])?", line)
            if function or pointer:
                field = (function or pointer)[1]  # type: ignore[index]
                fields.append((field, ctypes.c_char_p if "char*" in line else ctypes.c_void_p))
            else:
                assert value, line
                kind = SCALARS.get(value[1]) or made[value[1]]
                fields.append((value[2], kind * int(value[3]) if value[3] else kind))
        made[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    return made


STRUCTS = structs()
LIBRARY = ctypes.CDLL(_core.__file__)  # whose libdlattn.so's symbols it finds as well
for _name in re.findall(r"DLATTN_API int32_t (dlattn_\w+)\(", TEXT):
    getattr(LIBRARY, _name).restype = ctypes.c_int32
for _name in re.findall(r"DLATTN_API const char\* (dlattn_\w+)\(", TEXT):
    getattr(LIBRARY, _name).restype = ctypes.c_char_p


def make(name: str, **fields: Any) -> Any:
    struct: Any = STRUCTS[name]()
    struct.struct_size = ctypes.sizeof(struct)
    for field, value in fields.items():
        setattr(struct, field, value)
    return struct


def last_error() -> str:
    text: bytes = LIBRARY.dlattn_last_error()
    return text.decode()


DTYPES = {
    "bfloat16": CONSTANTS["DLATTN_BFLOAT16"],
    "float8_e4m3fn": CONSTANTS["DLATTN_FLOAT8_E4M3"],
    "float16": CONSTANTS["DLATTN_FLOAT16"],
    "float32": CONSTANTS["DLATTN_FLOAT32"],
    "float64": CONSTANTS["DLATTN_FLOAT64"],
    "int8": CONSTANTS["DLATTN_INT8"],
}


def tensor(array: np.ndarray, *dims: str) -> Any:
    view: Any = STRUCTS["DlattnTensor"](
        data=array.ctypes.data, dtype=DTYPES.get(str(array.dtype), 0)
    )
    for dim, stride in zip(dims, array.strides, strict=True):
        setattr(view, f"{dim}_stride", stride // array.itemsize)
    return view


BSHD = ("batch", "row", "head", "col")


def arrays(dtype: str) -> list[np.ndarray]:
    """q, k and v: slices of padded buffers."""
    random = np.random.default_rng(5)
    shapes = [(2, 19, 4, 40), (2, 33, 2, 40), (2, 33, 2, 24)]
    return [
        (random.standard_normal((*shape[:3], shape[3] + 8)) + 0.3).astype(dtype)[..., : shape[3]]
        for shape in shapes
    ]


def problem(q: np.ndarray, k: np.ndarray, v: np.ndarray, out: np.ndarray, lse: np.ndarray) -> Any:
    return make(
        "DlattnAttention",
        **{name: tensor(x, *BSHD) for name, x in zip("qkv", (q, k, v), strict=True)},
        out=tensor(out, *BSHD),
        lse=tensor(lse, "batch", "head", "row"),
        batch_size=q.shape[0],
        seqlen_q=q.shape[1],
        seqlen_k=k.shape[1],
        num_heads=q.shape[2],
        num_heads_kv=k.shape[2],
        head_dim=q.shape[3],
        head_dim_v=v.shape[3],
    )


def results(q: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    out = np.full((*q.shape[:3], v.shape[3]), np.nan, q.dtype)
    return out, np.full((q.shape[0], q.shape[2], q.shape[1]), np.nan, np.float32)


def test_8_bit_cache() -> None:
    q, k, v = arrays("float16")
    k, v = (np.clip(np.rint(x * np.float16(30)), -128, 127).astype(np.int8) for x in (k, v))
    scales = {name: np.array([[0.03, 0.02], [0.04, 0.05]], np.float32) for name in ("k", "v")}
    lengths = np.array([33, 17], np.int32)
    out, lse = results(q, v)
    params = problem(q, k, v, out, lse)
    params.k_descale, params.v_descale = (tensor(x, "batch", "head") for x in scales.values())
    params.seqused_k = lengths.ctypes.data
    assert LIBRARY.dlattn_attention(ctypes.byref(params), None, None) == 0, last_error()
    expected = dlattn.attention_with_kvcache(
        q, k, v, seqused_k=lengths, k_descale=scales["k"], v_descale=scales["v"], return_lse=True
    )
    assert np.array_equal(out, expected[0]) and np.array_equal(lse, expected[1])
    params.k_descale = make("DlattnTensor")
    assert LIBRARY.dlattn_attention(ctypes.byref(params), None, None) != 0
    assert last_error().startswith("k_descale is null with a cache of int8; accepted: ")


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_attention(dtype: str) -> None:
    q, k, v = arrays(dtype)
    out, lse = results(q, v)
    params = problem(q, k, v, out, lse)
    bias = np.random.default_rng(6).standard_normal((4, 19, 33)).astype(np.float32)
    sinks = np.array([0.5, -1.0, 2.0, 0.0], np.float32)
    params.bias = tensor(bias, "head", "row", "col")
    params.sinks = tensor(sinks, "head")
    params.causal = CONSTANTS["DLATTN_BOTTOM_RIGHT"]
    params.has_window_left, params.window_left = 1, 11
    params.softcap = 3.0
    assert LIBRARY.dlattn_attention(ctypes.byref(params), None, None) == 0, last_error()
    options: Any = {
        "bias": bias,
        "sinks": sinks,
        "causal": True,
        "window": (11, None),
        "softcap": 3.0,
    }
    assert_attention((out, lse), q, k, v, **options)
    same = dlattn.attention(q, k, v, **options)
    np.testing.assert_array_equal(out, same)


def test_columns_that_are_broadcast() -> None:
    q, k, v = arrays("float32")
    out, lse = results(q, v)
    params = problem(q, k, v, out, lse)
    rows = np.random.default_rng(7).integers(0, 2, 19).astype(np.uint8)  # each sees all or nothing
    params.mask = tensor(rows, "row")
    assert LIBRARY.dlattn_attention(ctypes.byref(params), None, None) == 0, last_error()
    np.testing.assert_array_equal(out, dlattn.attention(q, k, v, mask=rows[:, None].astype(bool)))
    assert np.isneginf(lse[:, :, rows == 0]).all() and np.isfinite(lse[:, :, rows == 1]).all()


@pytest.mark.parametrize("q_heads", [2, 4])
def test_float8_with_descales(q_heads: int) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    q, k, v = (x.astype(ml_dtypes.float8_e4m3fn) for x in arrays("float32"))
    random = np.random.default_rng(8)
    heads = {"q_descale": q_heads, "k_descale": 2, "v_descale": 2}
    descales = {name: random.uniform(0.5, 2.0, (2, n)).astype("f4") for name, n in heads.items()}
    out = np.full((*q.shape[:3], v.shape[3]), np.nan, np.float32)
    params = problem(q, k, v, out, results(q, v)[1])
    for name, descale in descales.items():
        setattr(params, name, tensor(descale, "batch", "head"))
    params.heads_per_q_descale = 4 // q_heads
    assert LIBRARY.dlattn_attention(ctypes.byref(params), None, None) == 0, last_error()
    np.testing.assert_array_equal(out, dlattn.attention(q, k, v, **descales, out_dtype="float32"))
    params.heads_per_q_descale = 0
    code = LIBRARY.dlattn_attention(ctypes.byref(params), None, None)
    assert code == 0  # 0 is 1; of two heads, the stride leads to a head of the next batch entry
    params.heads_per_q_descale = 3
    assert LIBRARY.dlattn_attention(ctypes.byref(params), None, None) != 0
    assert last_error().startswith("heads_per_q_descale is 3; accepted: 1 or ")


def test_varlen_and_quantized_keys() -> None:
    cu_seqlens = np.array([1, 60, 60, 190], np.int32)
    used = np.array([41, 0, 130], np.int32)
    random = np.random.default_rng(9)
    q, k, v = (random.standard_normal((200, heads, 64)).astype("f2") for heads in (4, 2, 2))
    quantized = dlattn.quantize_kv(
        k, v, precision="fp8", cu_seqlens_k=cu_seqlens, max_seqlen_k=130, seqused_k=used
    )
    dims = ("row", "head", "col")
    task = make(
        "DlattnQuantize",
        precision=CONSTANTS["DLATTN_FP8"],
        k=tensor(k, *dims),
        v=tensor(v, *dims),
        batch_size=3,
        seqlen_k=130,
        num_heads_kv=2,
        head_dim=64,
        head_dim_v=64,
        cu_seqlens_k=cu_seqlens.ctypes.data,
        seqused_k=used.ctypes.data,
        total_k=200,
    )
    count = ctypes.c_int64()
    code = LIBRARY.dlattn_quantized_kv_bytes(ctypes.byref(task), ctypes.byref(count))
    assert code == 0 and count.value == quantized.nbytes
    buffer = np.zeros(count.value // 4, np.float32)
    task.quantized_kv = buffer.ctypes.data
    assert LIBRARY.dlattn_quantize_kv(ctypes.byref(task), None) == 0, last_error()

    out = np.full(q.shape, 7, np.float16)
    params = make(
        "DlattnAttention",
        q=tensor(q, *dims),
        out=tensor(out, *dims),
        precision=CONSTANTS["DLATTN_FP8"],
        quantized_kv=buffer.ctypes.data,
        batch_size=3,
        seqlen_q=130,
        seqlen_k=130,
        num_heads=4,
        num_heads_kv=2,
        head_dim=64,
        head_dim_v=64,
        cu_seqlens_q=cu_seqlens.ctypes.data,
        cu_seqlens_k=cu_seqlens.ctypes.data,
        seqused_k=used.ctypes.data,
        total_q=200,
        total_k=200,
    )
    assert LIBRARY.dlattn_attention(ctypes.byref(params), None, None) == 0, last_error()
    expected = dlattn.attention_varlen(
        q, quantized, None, cu_seqlens, cu_seqlens, 130, 130, seqused_k=used, precision="fp8",
        out=np.full(q.shape, 7, np.float16),
    )  # fmt: skip
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("paged", [True, False], ids=["pages", "entries"])
def test_keys_in_a_cache(paged: bool) -> None:
    """The bits of the same keys side by side, without those before leftpad_k."""
    random = np.random.default_rng(10)
    q = (random.standard_normal((2, 3, 4, 40)) + 0.3).astype(np.float32)
    used, leftpad = np.array([19, 5], np.int32), np.array([2, 0], np.int32)
    shape = (9, 4) if paged else (5, 20)
    k, v = ((random.standard_normal((*shape, 2, d)) + 0.3).astype("f4") for d in (40, 24))
    table = np.array([[7, 3, 0, 2, 8, -1], [6, 1, -1, -1, -1, -1]], np.int32)
    entries = np.array([4, 1], np.int32)
    rows = [
        (table[b, :, None] * 4 + np.arange(4) if paged else entries[b] * 20 + np.arange(20)).ravel()
        for b in range(2)
    ]
    out, lse = results(q, v)
    params = problem(q, k, v, out, lse)
    params.seqlen_k, params.causal = 20, CONSTANTS["DLATTN_BOTTOM_RIGHT"]
    params.seqused_k, params.leftpad_k = used.ctypes.data, leftpad.ctypes.data
    if paged:
        params.page_table, params.page_table_batch_stride = table.ctypes.data, 6
        params.page_size, params.num_pages = 4, 9
    else:
        params.cache_batch_idx, params.cache_batch_size = entries.ctypes.data, 5
    assert LIBRARY.dlattn_attention(ctypes.byref(params), None, None) == 0, last_error()
    for b in range(2):
        own = rows[b][leftpad[b] : used[b]]
        keys, values = (x.reshape(-1, *x.shape[2:])[own][None] for x in (k, v))
        expected = dlattn.attention(q[b : b + 1], keys, values, causal=True, return_lse=True)
        assert_attention((out[b : b + 1], lse[b : b + 1]), q[b : b + 1], keys, values, causal=True)
        np.testing.assert_array_equal(out[b : b + 1], expected[0])
    used[0] = 21
    assert LIBRARY.dlattn_attention(ctypes.byref(params), None, None) != 0
    assert last_error() == (
        "seqused_k[0] is 21; accepted: 0 to 20, the most keys that a sequence can have"
    )


@pytest.mark.parametrize("cache_dtype", ["float16", "int8"])
@pytest.mark.parametrize("where", ["rows", "pages", "slots"])
def test_append(cache_dtype: str, where: str) -> None:
    """The bits of Python's, with every field that tells where rows go, and rotation."""
    random = np.random.default_rng(11)
    total, dims = 7, ("row", "head", "col")
    k, v, q = (random.normal(0.4, 1.5, (total, h, 32)).astype(np.float16) for h in (2, 2, 4))
    tables = [random.normal(0, 0.7, (12, 8)).astype(np.float32) for _ in "cs"]
    offsets, used = np.array([0, 4, 7], np.int32), np.array([5, 2], np.int32)
    leftpad = np.array([1, 3], np.int32)
    params = make(
        "DlattnAppend",
        **{n: tensor(x, *dims) for n, x in {"k": k, "v": v, "q": q}.items()},
        rotary_cos=tensor(tables[0], "row", "col"),
        rotary_sin=tensor(tables[1], "row", "col"),
        batch_size=2,
        num_heads=4,
        num_heads_kv=2,
        head_dim=32,
        head_dim_v=32,
        total_new=total,
        rotary_positions=12,
        rotary_dim=16,
        rotary_interleaved=1,
        q_fixed_position=1,
    )
    options: dict[str, Any] = {"cu_seqlens_q": offsets, "seqused_k": used, "leftpad_k": leftpad}
    shape = (5, 12) if where == "rows" else (9, 3)
    if where == "rows":
        options["cache_batch_idx"] = np.array([4, 1], np.int32)
        params.cache_batch_size, params.seqlen_k = shape
    else:
        params.num_pages, params.page_size = shape
    if where == "pages":
        options["page_table"] = np.array([[8, 0, 3, 7], [1, 6, -1, -1]], np.int32)
        params.page_table_batch_stride, params.seqlen_k = 4, 12
    if where == "slots":
        options["slots"] = np.array([3, -1, 26, 0, 7, 8, 9], np.int32)
        params.slot_bytes = 4
    for name, array in options.items():
        setattr(params, name, array.ctypes.data)
    caches = [np.full((*shape, 2, 32), 3, cache_dtype) for _ in "kv"]
    params.k_cache, params.v_cache = (tensor(x, *BSHD) for x in caches)
    if cache_dtype == "int8":
        scales = [random.uniform(0.02, 0.05, (2, 2)).astype(np.float32) for _ in "kv"]
        params.k_descale, params.v_descale = (tensor(x, "batch", "head") for x in scales)
        options |= {"k_descale": scales[0], "v_descale": scales[1]}
    out = np.full_like(q, np.nan)
    params.q_out = tensor(out, *dims)
    assert LIBRARY.dlattn_append_kv(ctypes.byref(params), None, None) == 0, last_error()
    same = [np.full_like(cache, 3) for cache in caches]
    expected = dlattn.append_kv(
        *(k, v, *same),
        q=q,
        rotary_cos=tables[0],
        rotary_sin=tables[1],
        rotary_interleaved=True,
        q_fixed_position=True,
        **options,
    )
    for got, want in zip((*caches, out), (*same, expected), strict=True):
        np.testing.assert_array_equal(got, want)
    assert not (caches[0] == 3).all() and not (caches[1] == 3).all()


def test_a_device_that_there_is_not() -> None:
    k = np.zeros((1, 2, 1, 64), np.float32)
    half = k.astype(np.float16)
    out, lse = results(k, k)
    parts = tensor(k, *BSHD), tensor(lse, "batch", "head", "row")
    merge = make("DlattnMerge", num_states=1, batch_size=1, seqlen_q=2, num_heads=1, head_dim_v=64)
    merge.outs, merge.lses = map(ctypes.addressof, parts)
    merge.out, merge.lse = tensor(out, *BSHD), tensor(np.zeros_like(lse), "batch", "head", "row")
    buffer = np.zeros(1 << 16, np.uint8)
    task = make("DlattnQuantize", precision=1, k=tensor(half, *BSHD), v=tensor(half, *BSHD))
    task.quantized_kv = -(-buffer.ctypes.data // 256) * 256
    for name in ("batch_size", "num_heads_kv"):
        setattr(task, name, 1)
    task.seqlen_k, task.head_dim, task.head_dim_v = 2, 64, 64
    attention = problem(k, k, k, out, lse)
    caches, used = np.zeros((2, 1, 4, 1, 64), np.float32), np.zeros(1, np.int32)
    append = make("DlattnAppend", k=tensor(k, *BSHD), v=tensor(k, *BSHD), seqlen_new=2, seqlen_k=4)
    append.k_cache, append.v_cache = (tensor(x, *BSHD) for x in caches)
    append.seqused_k = used.ctypes.data
    append.batch_size = append.num_heads_kv = 1
    append.head_dim = append.head_dim_v = 64
    for struct, call in (
        (append, lambda s: LIBRARY.dlattn_append_kv(s, None, None)),
        (attention, lambda s: LIBRARY.dlattn_attention(s, None, None)),
        (merge, lambda s: LIBRARY.dlattn_merge_states(s, None, None)),
        (task, lambda s: LIBRARY.dlattn_quantize_kv(s, None)),
    ):
        assert call(ctypes.byref(struct)) == 0, last_error()
        struct.device_type, struct.device_index = CONSTANTS["DLATTN_CUDA"], 1000
        assert call(ctypes.byref(struct)) == CONSTANTS["DLATTN_DEVICE_ERROR"], last_error()
        assert last_error()


@pytest.mark.gpu
@pytest.mark.parametrize("precision", [None, "int8_fp8", "fp8"])
@pytest.mark.parametrize("by", ["workspace", "allocate"])
def test_on_a_gpu(precision: str | None, by: str) -> None:
    """The same bits as by Python, on torch's stream, with a workspace of the caller's."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU")
    q, k, v = (torch.randn(2, 300, heads, 64, device="cuda").half() for heads in (8, 2, 2))
    if not dlattn.supported(q, k, v, causal=True, precision=precision):
        pytest.skip(f"this GPU has no kernel for precision {precision}")
    expected = dlattn.attention(q, k, v, causal=True, precision=precision)
    out = torch.full_like(q, float("nan"))

    def view(x: Any) -> Any:
        names = (f"{dim}_stride" for dim in BSHD)
        strides = dict(zip(names, x.stride(), strict=True))
        return STRUCTS["DlattnTensor"](data=x.data_ptr(), **strides)

    params = make(
        "DlattnAttention",
        device_type=CONSTANTS["DLATTN_CUDA"],
        device_index=q.device.index,
        **{name: view(x) for name, x in {"q": q, "k": k, "v": v, "out": out}.items()},
        batch_size=2,
        seqlen_q=300,
        seqlen_k=300,
        num_heads=8,
        num_heads_kv=2,
        head_dim=64,
        head_dim_v=64,
        causal=CONSTANTS["DLATTN_BOTTOM_RIGHT"],
        precision={None: 0, "int8_fp8": 1, "fp8": 2}[precision],
    )
    plan = make("DlattnPlan")
    code = LIBRARY.dlattn_attention_plan(ctypes.byref(params), None, ctypes.byref(plan), None, 0)
    assert code == 0, last_error()
    own = dlattn.plan(q, k, v, causal=True, precision=precision)
    assert (plan.kernel.decode(), plan.workspace_bytes) == (own.kernel, own.workspace_bytes)
    assert plan.predicted_ns == pytest.approx(own.predicted_ns)
    assert plan.num_launches == own.num_launches == {None: 1, "fp8": 3}.get(precision, 2)
    memory = torch.empty(max(plan.workspace_bytes, 1), dtype=torch.uint8, device="cuda")
    asked: list[int] = []

    def allocate(_: Any, count: int) -> int:
        asked.append(count)
        address: int = memory.data_ptr()
        return address

    function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)(allocate)
    options = make("DlattnOptions")
    if by == "allocate":
        options.allocate = ctypes.cast(function, ctypes.c_void_p).value
    else:
        params.workspace, params.workspace_bytes = memory.data_ptr(), plan.workspace_bytes
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    code = LIBRARY.dlattn_attention(ctypes.byref(params), stream, ctypes.byref(options))
    assert code == 0, last_error()
    assert torch.equal(out, expected)
    assert asked == ([plan.workspace_bytes] if by == "allocate" and plan.workspace_bytes else [])
    info = make("DlattnDeviceInfo")
    assert LIBRARY.dlattn_device_info(1, q.device.index, ctypes.byref(info)) == 0, last_error()
    device = dlattn.info().devices[q.device.index]
    assert (info.compute_major, info.compute_minor) == device.compute_capability
    assert (info.num_sms, info.l2_bytes) == (device.num_sms, device.l2_bytes)
    assert (info.device_type, info.device_index) == (1, device.index)
    assert info.max_smem_per_block == device.max_smem_per_block and info.smem_per_sm > 0
    assert info.code == 10 * device.code[0] + device.code[1] and bool(info.ptx) == device.ptx


def test_structs_are_as_the_library_has_them() -> None:
    """A struct that is one field short is refused, with the size that the library knows."""
    calls = {
        "DlattnAttention": lambda s: LIBRARY.dlattn_attention(s, None, None),
        "DlattnBackward": lambda s: LIBRARY.dlattn_attention_backward(s, None, None),
        "DlattnMerge": lambda s: LIBRARY.dlattn_merge_states(s, None, None),
        "DlattnQuantize": lambda s: LIBRARY.dlattn_quantize_kv(s, None),
        "DlattnAppend": lambda s: LIBRARY.dlattn_append_kv(s, None, None),
        "DlattnOptions": lambda s: LIBRARY.dlattn_attention(None, None, s),
        "DlattnDeviceInfo": lambda s: LIBRARY.dlattn_device_info(0, 0, s),
    }
    assert {*calls, "DlattnPlan", "DlattnTensor"} == set(STRUCTS)
    for name, call in calls.items():
        struct = make(name)
        struct.struct_size -= 4
        assert call(ctypes.byref(struct)) == CONSTANTS["DLATTN_UNSUPPORTED"]
        size = ctypes.sizeof(struct)
        assert (
            last_error()
            == f"{name}: struct_size is {size - 4}; accepted: at least {size}, its sizeof"
        )
        struct.struct_size = 2**40  # of a struct that nobody set to 0
        assert call(ctypes.byref(struct)) == CONSTANTS["DLATTN_UNSUPPORTED"]
        assert last_error() == f"{name}: struct_size is {2**40}; accepted: {size} to 65536"


def test_plan_and_workspace() -> None:
    q, k, v = arrays("float32")
    params = problem(q, k, v, *results(q, v))
    plan, text = make("DlattnPlan"), ctypes.create_string_buffer(1000)
    code = LIBRARY.dlattn_attention_plan(ctypes.byref(params), None, ctypes.byref(plan), text, 1000)
    assert code == 0, last_error()
    own = dlattn.plan(q, k, v, return_lse=True)
    assert plan.kernel.decode() == own.kernel == "cpu"
    assert plan.workspace_bytes == own.workspace_bytes
    assert text.value.decode().strip() == str(own).strip()


def test_words_of_a_refusal_are_those_of_python() -> None:
    q, k, v = arrays("float32")
    params = problem(q, k, v, *results(q, v))
    params.softcap = -1.0
    why = ctypes.create_string_buffer(500)
    code = LIBRARY.dlattn_supported(ctypes.byref(params), None, why, 500)
    assert code == CONSTANTS["DLATTN_UNSUPPORTED"]
    with pytest.raises(dlattn.UnsupportedError) as raised:
        dlattn.attention(q, k, v, softcap=-1.0)
    assert why.value.decode() == last_error() == str(raised.value)


def test_errors_are_a_threads_own() -> None:
    LIBRARY.dlattn_attention(None, None, None)
    seen: list[str] = []

    def other() -> None:
        seen.append(last_error())
        LIBRARY.dlattn_quantize_kv(None, None)
        seen.append(last_error())

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == ["", "DlattnQuantize is null"]
    assert last_error() == "DlattnAttention is null"


def test_devices_are_those_of_info() -> None:
    count, why = ctypes.c_int32(-1), ctypes.create_string_buffer(500)
    assert LIBRARY.dlattn_device_count(ctypes.byref(count), why, 500) == 0
    info = dlattn.info()
    gpus = [device for device in info.devices if device.type == "cuda"]
    assert count.value == len(gpus)
    assert bool(why.value) == (count.value == 0)
    for index in range(count.value):
        device = make("DlattnDeviceInfo")
        code = LIBRARY.dlattn_device_info(CONSTANTS["DLATTN_CUDA"], index, ctypes.byref(device))
        assert code == 0 and device.name.decode() == gpus[index].name
    names = []
    while (name := LIBRARY.dlattn_kernel_name(len(names))) is not None:
        names.append(name.decode())
    assert names[:2] == ["auto", "cpu"] and set(info.kernels) <= set(names)
    version = LIBRARY.dlattn_version()
    parts = version // 10000, version // 100 % 100, version % 100
    assert ".".join(map(str, parts)) == dlattn.__version__
