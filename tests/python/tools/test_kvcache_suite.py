"""The program that runs other projects' tests of caches, on files of tests made up for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from programs import start
from suite_adapters import SUITES

# The outcome of each case is in its name. The functions' names are flash-attn's.
FLASH_ATTN_2 = """
import os

import pytest
import torch
from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn.bert_padding import pad_input, unpad_input
from flash_attn.flash_attn_interface import _get_block_size_n
from flash_attn.layers.rotary import apply_rotary_emb


def problem(head_dim=16, room=8):
    q = torch.randn(2, 1, 2, head_dim, device="cuda")
    k, v = torch.randn(2, 4, room, 2, head_dim, device="cuda")
    return q, k, v


def plain(q, k, v):
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)


@pytest.mark.parametrize("has_batch_idx", [False])
@pytest.mark.parametrize("what,rows", [("right", 8), pytest.param("wrong", 7), ("skipped", 0)])
def test_flash_attn_kvcache(has_batch_idx, what, rows):
    if what == "skipped":
        pytest.skip("nothing to see")
    q, k, v = problem()
    index = torch.tensor([3, 1], dtype=torch.int32).cuda() if has_batch_idx else None
    k_used, v_used = (x[[3, 1]] if has_batch_idx else x[:2] for x in (k, v))
    if not has_batch_idx:
        k, v = k[:2], v[:2]
    window = torch.tensor([20, 20])
    out = flash_attn_with_kvcache(q, k, v, cache_batch_idx=index, window_size=window)
    expected = plain(q, k_used[:, :rows], v_used[:, :rows])
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


def test_flash_attn_kvcache_refused():
    q, k, v = problem()
    flash_attn_with_kvcache(q, k, v, cache_seqlens=9)


def test_flash_attn_kvcache_refusal_expected():
    q, k, v = problem()
    with pytest.raises(RuntimeError, match="cache_seqlens is 9"):
        flash_attn_with_kvcache(q, k[:2], v[:2], cache_seqlens=9)
    flash_attn_with_kvcache(q, k[:2], v[:2], cache_seqlens=8)


def test_flash_attn_kvcache_no_refusal():
    with pytest.raises(RuntimeError):
        pass


def test_flash_attn_kvcache_fails_as_expected():
    pytest.xfail("known to its file")


def test_flash_attn_kvcache_asks_for_what_is_missing():
    _get_block_size_n("cuda", 64, False, True)


def test_flash_attn_kvcache_without_dlattn():
    x = torch.randn(2, 3, 4, device="cuda:0").to(0)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    rows, indices, cu_seqlens, longest, used = unpad_input(x, mask)
    assert cu_seqlens.tolist() == [0, 2, 3] and longest == 2 and used.tolist() == [2, 1]
    assert torch.equal(pad_input(rows, indices, 2, 3), x * mask[..., None])


def test_flash_attn_kvcache_dies():
    os._exit(5)


def test_flash_attn_kvcache_rotary():
    q, k, v = problem(room=12)
    cos, sin = torch.randn(2, 12, 4)
    lengths = torch.tensor([3, 5], dtype=torch.int32)
    for interleaved in (False, True):
        new = torch.randn(2, 1, 2, 16)
        flash_attn_with_kvcache(
            q,
            k[:2],
            v[:2],
            new,
            new,
            cos,
            sin,
            cache_seqlens=lengths,
            rotary_interleaved=interleaved,
        )
        rotated = apply_rotary_emb(new, cos, sin, interleaved, seqlen_offsets=lengths)
        torch.testing.assert_close(k[[0, 1], lengths.long()], rotated[:, 0], rtol=1e-5, atol=1e-5)


def test_flash_attn_varlen_causal():
    rows = torch.randn(3, 2, 16)
    cu_seqlens = torch.tensor([0, 1, 3], dtype=torch.int32)
    flash_attn_varlen_func(rows, rows, rows, cu_seqlens, cu_seqlens, 2, 2, dropout_p=0.5)


def test_of_something_else():
    assert False
"""

FLASH_ATTN_3 = """
import pytest
import torch
from flash_attn_interface import (
    flash_attn_combine,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
)
from padding import pad_input


def plain(q, k, v, position, leftpad, chunk):
    # One sequence: causal to the bottom right, of keys behind leftpad in the query's own chunk.
    key = torch.arange(k.shape[0]) - leftpad
    begin = position[:, None] // chunk * chunk if chunk else 0
    seen = (key <= position[:, None]) & (key >= 0) & (key >= begin)
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~seen, -1e9).softmax(-1) * seen
    return torch.einsum("hqk,khd->qhd", weights, v)


@pytest.mark.parametrize("chunk", [0, 3])
@pytest.mark.parametrize("varlen_q", [False, True])
@pytest.mark.parametrize("paged", [False, True])
def test_flash_attn_kvcache(chunk, varlen_q, paged):
    lengths = torch.tensor([5, 7], dtype=torch.int32)
    leftpad = torch.tensor([1, 2], dtype=torch.int32)
    counts = [2, 1] if varlen_q else [2, 2]
    cu_seqlens = torch.tensor([0, counts[0], sum(counts)], dtype=torch.int32)
    k, v = torch.randn(2, 3, 10, 2, 16)
    index = torch.tensor([2, 0], dtype=torch.int32)
    q, new_k, new_v = torch.randn(3, sum(counts), 2, 16)
    caches = [k.clone(), v.clone()]
    table = None
    if paged:
        caches = [x.reshape(6, 5, 2, 16).flip(0).contiguous() for x in caches]
        table = torch.arange(5, -1, -1, dtype=torch.int32).reshape(3, 2)
    by_sequence = (lambda x: x) if varlen_q else (lambda x: x.unflatten(0, (2, 2)))
    cos, sin = torch.zeros(2, 20, 8)  # a turn of 90 degrees: all become 0 or change places
    out, lse = flash_attn_with_kvcache(
        by_sequence(q),
        *caches,
        by_sequence(new_k),
        by_sequence(new_v),
        rotary_cos=cos + 1,
        rotary_sin=sin,
        cache_seqlens=lengths,
        cache_batch_idx=index,
        cache_leftpad=leftpad,
        page_table=table,
        cu_seqlens_q=cu_seqlens if varlen_q else None,
        cu_seqlens_k_new=cu_seqlens if varlen_q else None,
        max_seqlen_q=2 if varlen_q else None,
        rotary_seqlens=lengths,
        causal=True,
        attention_chunk=chunk,
        scheduler_metadata=get_scheduler_metadata(),
        num_splits=3,
        return_softmax_lse=True,
    )
    out = out if varlen_q else out.flatten(0, 1)
    for b, count in enumerate(counts):
        rows = slice(*cu_seqlens[b : b + 2].tolist())
        keys = [
            torch.cat((old[index[b], : lengths[b]], new[rows]))
            for old, new in ((k, new_k), (v, new_v))
        ]
        position = torch.arange(count) + lengths[b] - leftpad[b]
        expected = plain(q[rows], *keys, position, leftpad[b], chunk)
        torch.testing.assert_close(out[rows], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("parts", [2, 40])
def test_flash_attn_combine(parts):
    outs = torch.randn(parts, 1, 3, 2, 16)
    lses = torch.randn(parts, 1, 3, 2)
    out, lse = flash_attn_combine(outs, lses, out_dtype=torch.bfloat16)
    weights = (lses - lses.logsumexp(0)).exp()
    torch.testing.assert_close(lse, lses.logsumexp(0))
    expected = (weights[..., None] * outs).sum(0)
    torch.testing.assert_close(out, expected.bfloat16(), rtol=1e-2, atol=1e-2)
"""

FLASHINFER = """
import pytest
import torch
from tests.test_helpers.jit_utils import gen_decode_attention_modules

import flashinfer
from flashinfer.utils import get_compute_capability, has_flashinfer_jit_cache


@pytest.fixture(autouse=not has_flashinfer_jit_cache(), scope="module")
def warmup_jit():
    flashinfer.jit.build_jit_specs(gen_decode_attention_modules([torch.float16]))
    yield


def lists():
    counts = (("indptr", [0, 2, 3]), ("indices", [4, 1, 2]), ("last_page_len", [3, 1]))
    return {name: torch.tensor(x, dtype=torch.int32, device="cuda:0") for name, x in counts}


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("off", [0, 1])
def test_batch_decode(kv_layout, off):
    shape = (5, 2, 4, 2, 16) if kv_layout == "NHD" else (5, 2, 2, 4, 16)
    cache = torch.randn(shape, device="cuda:0")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(8), kv_layout)
    wrapper.plan(**lists(), num_qo_heads=4, num_kv_heads=2, head_dim=16, page_size=4)
    q = torch.randn(2, 4, 16)
    out, lse = wrapper.run(q, cache, return_lse=True)
    buffer = torch.full_like(out, float("nan"))
    wrapper.run(q, cache, out=buffer)
    assert torch.equal(out, buffer)
    cache = cache if kv_layout == "NHD" else cache.transpose(2, 3)
    rows = torch.cat((cache[4], cache[1, :, : 3 - off]), 1)
    single = flashinfer.single_decode_with_kv_cache(q[0], *rows, return_lse=True)
    torch.testing.assert_close((out[0], lse[0]), single, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", ["NONE", "ROPE_LLAMA"])
@pytest.mark.parametrize("use_tensor_cores", [True])
def test_single_tensor_cores(mode, use_tensor_cores):
    q, k, v = torch.randn(4, 16), torch.randn(9, 2, 16), torch.randn(9, 2, 16)
    plain = flashinfer.single_decode_with_kv_cache(q, k, v, pos_encoding_mode=mode)
    out = flashinfer.single_decode_with_kv_cache(q, k, v, use_tensor_cores=use_tensor_cores)
    torch.testing.assert_close(out, plain, rtol=1e-4, atol=1e-4)


def test_cascade():
    k, v, q = torch.randn(3, 14, 2, 16).unbind()
    kv, at = torch.zeros(5, 2, 4, 2, 16), lists()
    at["indptr"] = torch.tensor([0, 3], dtype=torch.int32)
    at["last_page_len"] = torch.tensor([2], dtype=torch.int32)
    lengths = flashinfer.get_seq_lens(at["indptr"], at["last_page_len"], 4)
    rows = torch.tensor([0, 10], dtype=torch.int32)
    where = flashinfer.get_batch_indices_positions(rows, lengths, 10)
    flashinfer.append_paged_kv_cache(
        k[:10], v[:10], *where, kv, at["indices"], at["indptr"], at["last_page_len"]
    )
    torch.testing.assert_close(kv[2, 1, :2], v[8:10])
    parts = [
        flashinfer.single_prefill_with_kv_cache(q[:2], k[part], v[part], return_lse=True)
        for part in (slice(0, 10), slice(10, 14))
    ]
    whole = flashinfer.single_prefill_with_kv_cache(q[:2], k, v, return_lse=True)
    torch.testing.assert_close(flashinfer.merge_state(*parts[0], *parts[1]), whole)


def test_xqa_of_a_tree():
    # Neither of two drafts sees the other.
    cache, q = torch.randn(5, 2, 4, 2, 16), torch.randn(4, 4, 16)
    table = torch.tensor([[4, 1], [2, -1]], dtype=torch.int32)
    bits = torch.tensor([[1, 0], [2, 0]], dtype=torch.int16).expand(2, 2, 2).contiguous()
    out = flashinfer.decode.xqa_batch_decode_with_kv_cache(
        q,
        cache,
        torch.empty(8),
        table,
        torch.tensor([7, 3], dtype=torch.int32),
        7,
        0.25,
        q_len_per_req=2,
        mask=bits.view(torch.uint16),
    )
    for b, (pages, length) in enumerate((([4, 1], 7), ([2], 3))):
        k, v = cache[pages].transpose(0, 1).flatten(1, 2)[:, :length]
        seen = torch.ones(2, length, dtype=torch.bool)
        seen[0, -1] = seen[1, -2] = False
        rows = slice(2 * b, 2 * b + 2)
        expected = flashinfer.single_prefill_with_kv_cache(q[rows], k, v, custom_mask=seen)
        torch.testing.assert_close(out[rows], expected, rtol=1e-4, atol=1e-4)


def test_batch_attention_correctness():
    kv = torch.randn(5, 2, 4, 2, 16)
    at, rows = lists(), torch.tensor([0, 3, 4], dtype=torch.int32)
    shape = {"num_qo_heads": 4, "num_kv_heads": 2, "page_size": 4, "causal": True}
    plain = flashinfer.BatchPrefillWithPagedKVCacheWrapper(torch.empty(8))
    plain.plan(rows, *at.values(), head_dim_qk=16, **shape)
    ours = flashinfer.BatchAttention()
    lengths = flashinfer.get_seq_lens(at["indptr"], at["last_page_len"], 4)
    ours.plan(
        rows, at["indptr"], at["indices"], lengths, head_dim_qk=16, head_dim_vo=16, **shape
    )
    q = torch.randn(4, 4, 16)
    expected = plain.run(q, kv, return_lse=True, v_scale=2.0)
    torch.testing.assert_close(ours.run(q, kv, v_scale=2.0), expected, rtol=1e-4, atol=1e-4)


def test_cuda_graph():
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        pass


def test_nvfp4_cache():
    raise AssertionError
"""


# Gradients, and what FlashAttention-3 and -4 have besides.
GRADIENTS_PLAIN = """
def plain(q, k, v, window=(None, None), used=(0, 0), chunk=0, sink=None):
    # One sequence, of which so many rows and keys are used; aligned to the bottom right.
    rows, keys = used[0] or len(q), used[1] or len(k)
    q, k, v = q[:rows], k[:keys], v[:keys]
    at = torch.arange(rows)[:, None] + keys - rows
    key = torch.arange(keys)
    seen = torch.ones(rows, keys, dtype=torch.bool)
    if window[0] is not None:
        seen &= key >= at - window[0]
    if window[1] is not None:
        seen &= key <= at + window[1]
    if chunk:
        seen &= key // chunk == at // chunk
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~seen, -torch.inf)
    if sink is not None:
        column = sink[:, None, None].expand(-1, rows, 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1).nan_to_num()[..., :keys]
    return torch.einsum("hqk,khd->qhd", weights, v)


def problem(*, columns=16, rows=6, keys=9, batch=2):
    made = [(batch, rows, 2, 16), (batch, keys, 2, 16), (batch, keys, 2, columns)]
    return [torch.randn(*sizes, device="cuda", requires_grad=True) for sizes in made]


def check(out, expected, inputs):
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    g = torch.randn_like(out)
    found = torch.autograd.grad(out, inputs, g)
    for x, y in zip(found, torch.autograd.grad(expected, inputs, g)):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)
"""

GRADIENTS_2 = """
import pytest
import torch
from flash_attn import flash_attn_func
"""
GRADIENTS_2 += GRADIENTS_PLAIN
GRADIENTS_2 += """
@pytest.mark.parametrize("dropout_p", [0.0, 0.17])
@pytest.mark.parametrize("wrong", [False, True])
def test_flash_attn_output(dropout_p, wrong):
    q, k, v = problem()
    out, lse, _ = flash_attn_func(q, k, v, dropout_p, return_attn_probs=True)
    expected = torch.stack([plain(*x) for x in zip(q, k * 1.01 if wrong else k, v)])
    check(out, expected, (q, k, v))


@pytest.mark.parametrize("paged_kv_block_size", [None, 256])
def test_flash_attn_varlen_causal(paged_kv_block_size):
    assert paged_kv_block_size is None


def test_flash_attn_kvcache():
    assert False
"""

GRADIENTS_3 = """
import os

import pytest
import torch
from flash_attn_interface import flash_attn_func, flash_attn_varlen_func

assert os.environ["FLASH_ATTENTION_DISABLE_FP8"] == "TRUE"
"""
GRADIENTS_3 += GRADIENTS_PLAIN
GRADIENTS_3 += """
@pytest.mark.parametrize("has_qv", [False, True])
@pytest.mark.parametrize("V_colmajor", [False, True])
@pytest.mark.parametrize("seqlen_k", [1, 9])
def test_flash_attn_output(has_qv, V_colmajor, seqlen_k):
    assert not has_qv and not V_colmajor and seqlen_k == 9
    q, k, v = problem(columns=300)
    for chunk, splits in ((0, 3), (4, 1)):
        out = flash_attn_func(q, k, v, attention_chunk=chunk, num_splits=splits, pack_gqa=True)
        expected = torch.stack([plain(*x, chunk=chunk) for x in zip(q, k, v)])
        if chunk:
            torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
        else:
            check(out, expected, (q, k, v))


@pytest.mark.parametrize("chunk", [0, 4])
def test_flash_attn_varlen_output(chunk):
    q, k, v = problem()
    rows, keys = (torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (6, 9))
    used_q, used_k = torch.tensor([[4, 6], [9, 5]], dtype=torch.int32)
    lists = [x.flatten(0, 1) for x in (q, k, v)]
    out = flash_attn_varlen_func(
        *lists, rows, keys, 6, 9, used_q, used_k, window_size=torch.tensor([3, 1]), num_splits=0,
        attention_chunk=chunk,
    )
    parts = []
    for i, (m, n) in enumerate(((4, 9), (6, 5))):
        part = plain(q[i], k[i], v[i], (3, 1), (m, n), chunk)
        parts.append(torch.nn.functional.pad(part, (0, 0, 0, 0, 0, 6 - m)))
    if chunk:
        torch.testing.assert_close(out, torch.cat(parts), rtol=1e-4, atol=1e-4)
    else:
        check(out, torch.cat(parts), (q, k, v))


def test_flash_attn_race_condition():
    assert False
"""

GRADIENTS_4 = """
import pytest
import torch
from flash_attn.cute.cache_utils import JITCache
from flash_attn.cute.interface import (
    _flash_attn_fwd,
    flash_attn_func,
    flash_attn_varlen_func,
    get_scheduler_metadata,
)
from flash_attn.cute.testing import NAME

assert NAME == "of the project"
"""
GRADIENTS_4 += GRADIENTS_PLAIN
GRADIENTS_4 += """
@pytest.mark.parametrize("window_size", [(None, None), (3, None), (None, 0), (None, -2)])
@pytest.mark.parametrize("has_sink", [False, True])
def test_flash_attn_output(window_size, has_sink):
    q, k, v = problem()
    sink = torch.randn(2, dtype=torch.float64, requires_grad=True) if has_sink else None
    out, lse = flash_attn_func(
        q, k, v, window_size=window_size, learnable_sink=sink, num_splits=1, pack_gqa=None
    )
    assert lse.shape == (2, 2, 6)
    made = [plain(*x, window_size, sink=None if sink is None else sink.float())
            for x in zip(q, k, v)]
    check(out, torch.stack(made), (q, k, v) if sink is None else (q, k, v, sink))


@pytest.mark.parametrize("unpad_q", [False, True])
@pytest.mark.parametrize("unpad_kv", [False, True])
def test_flash_attn_varlen_output(unpad_q, unpad_kv):
    assert get_scheduler_metadata(nheads=2) is None
    q, k, v = problem()
    rows, keys = (torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (6, 9))
    used_q, used_k = torch.tensor([[4, 6], [9, 5]], dtype=torch.int32)
    out, lse = flash_attn_varlen_func(
        q.flatten(0, 1) if unpad_q else q,
        *(x.flatten(0, 1) if unpad_kv else x for x in (k, v)),
        cu_seqlens_q=rows if unpad_q else None,
        cu_seqlens_k=keys if unpad_kv else None,
        seqused_q=used_q,
        seqused_k=used_k,
        causal=True,
    )
    parts = []
    for i, (m, n) in enumerate(((4, 9), (6, 5))):
        part = plain(q[i], k[i], v[i], (None, 0), (m, n))
        parts.append(torch.nn.functional.pad(part, (0, 0, 0, 0, 0, 6 - m)))
    expected = torch.stack(parts)
    assert out.shape == (q.flatten(0, 1) if unpad_q else q).shape
    check(out.reshape(expected.shape), expected, (q, k, v))


def test_flash_attn_lse_grad():
    q, k, v = problem()
    flash_attn_func(q, k, v, score_mod=lambda *_: 0, return_lse=True)


def test_flash_attn_small_head_dim():
    _flash_attn_fwd()
"""

PROGRAM = Path(__file__).resolve().parents[3] / "tools" / "suites" / "kvcache_suite.py"


def run(
    suite: str, folder: Path, text: str, *arguments: str, **files: str
) -> tuple[int, dict[str, Any], str]:
    """The program's exit status, what it wrote of its one file, and what it printed."""
    path, results = folder / "tests" / "test_made_up.py", folder / "results.json"
    path.parent.mkdir()
    path.write_text(text)
    for name in ("__init__", "test_helpers/__init__") if suite == "flashinfer" else ():
        (path.parent / f"{name}.py").parent.mkdir(exist_ok=True)
        (path.parent / f"{name}.py").write_text("")
    process = start(str(PROGRAM), suite, str(path), "--json", str(results), *arguments)
    out, err = process.communicate(timeout=240)
    summary = json.loads(results.read_text()) if results.exists() else {}
    return process.returncode, summary, out + err


def test_flash_attention_2(tmp_path: Path) -> None:
    status, results, printed = run(
        "flash-attention-2", tmp_path, FLASH_ATTN_2, "--suite-commit", "abc"
    )
    assert status == 1
    file = results["files"]["test_made_up.py"]
    assert results["suite"]["commit"] == "abc" and results["suite"]["name"] == "flash-attention-2"
    functions = file["functions"]
    # has_batch_idx is turned on, and a case of each is wrong or skipped
    assert functions["test_flash_attn_kvcache"] == {
        "cases": 6,
        "passed": 2,
        "failed": 2,
        "skipped": 2,
    }
    ends = {name.removeprefix("test_flash_attn_"): row for name, row in functions.items()}
    assert ends["kvcache_refused"] == {"cases": 1, "refused": 1}
    assert ends["kvcache_refusal_expected"] == {"cases": 1, "passed": 1}
    assert ends["kvcache_no_refusal"] == {"cases": 1, "failed": 1}
    assert ends["kvcache_fails_as_expected"] == {"cases": 1, "xfailed": 1}
    assert ends["kvcache_asks_for_what_is_missing"] == {"cases": 1, "refused": 1}
    assert ends["kvcache_without_dlattn"] == {"cases": 1, "passed without dlattn": 1}
    assert ends["kvcache_dies"] == {"cases": 1, "crashed": 1}
    assert ends["kvcache_rotary"] == {"cases": 1, "passed": 1}
    assert ends["varlen_causal"] == {"cases": 1, "refused": 1}  # asks for dropout
    assert "test_of_something_else" not in functions
    assert results["compared"] == 4 and file["served"] == {"flash_attn_with_kvcache": 7}
    missing = "flash_attn.flash_attn_interface._get_block_size_n: not offered by the adapter"
    assert file["refused"][missing] == 1
    assert any("dropout_p is 0.5" in reason for reason in file["refused"])
    messages = {case["test"]: case["message"] for case in file["failed"]}
    assert len(messages) == 4
    assert "not close" in messages["test_flash_attn_kvcache[has_batch_idx=True,rows=7,what=wrong]"]
    assert "exit status 5" in messages["test_flash_attn_kvcache_dies[]"]
    assert "4 compared, 4 failed" in printed


def test_flash_attention_3(tmp_path: Path) -> None:
    status, results, printed = run("flash-attention-3", tmp_path, FLASH_ATTN_3)
    assert status == 0, printed
    file = results["files"]["test_made_up.py"]
    assert file["functions"] == {
        "test_flash_attn_kvcache": {"cases": 8, "passed": 8},
        "test_flash_attn_combine": {"cases": 2, "passed": 1, "refused": 1},
    }
    assert file["served"] == {
        "attention_varlen": 4,
        "append_kv": 6,
        "flash_attn_with_kvcache": 2,
        "attention_with_kvcache": 2,
        "merge_states": 1,
    }


def test_gradients_of_flash_attention_2(tmp_path: Path) -> None:
    status, results, printed = run("flash-attention-2-gradients", tmp_path, GRADIENTS_2)
    assert status == 1, printed
    file = results["files"]["test_made_up.py"]
    assert file["functions"] == {
        "test_flash_attn_output": {"cases": 2, "passed": 1, "failed": 1},
        "test_flash_attn_varlen_causal": {"cases": 1, "passed without dlattn": 1},
    }
    assert "wrong=True" in file["failed"][0]["test"]


def test_gradients_of_flash_attention_3(tmp_path: Path) -> None:
    status, results, printed = run("flash-attention-3-gradients", tmp_path, GRADIENTS_3)
    assert status == 0, printed
    file = results["files"]["test_made_up.py"]
    assert file["functions"] == {
        "test_flash_attn_output": {"cases": 2, "passed": 1, "not promised": 1},
        "test_flash_attn_varlen_output": {"cases": 2, "passed": 2},
    }
    assert list(file["not_promised"].values()) == [1]
    assert "test_flash_attn_race_condition" in file["left_out"]


def test_gradients_of_flash_attention_4(tmp_path: Path) -> None:
    testing = tmp_path / "flash_attn" / "cute" / "testing.py"
    testing.parent.mkdir(parents=True)
    testing.write_text("NAME = 'of the project'\n")
    status, results, printed = run("flash-attention-4-gradients", tmp_path, GRADIENTS_4)
    assert status == 0, printed
    file = results["files"]["test_made_up.py"]
    assert file["functions"] == {
        "test_flash_attn_output": {"cases": 8, "passed": 6, "refused": 2},
        "test_flash_attn_varlen_output": {"cases": 4, "passed": 4},
        "test_flash_attn_lse_grad": {"cases": 1, "refused": 1},
        "test_flash_attn_small_head_dim": {"cases": 1, "refused": 1},
    }
    assert file["refused"]["score_mod: not an argument of dlattn.flash_attn"] == 1


@pytest.mark.nightly  # seconds to import torch, to tell what is missing
def test_flash_attention_4_needs_its_reference(tmp_path: Path) -> None:
    status, _, printed = run("flash-attention-4-gradients", tmp_path, GRADIENTS_4)
    assert status == 1
    assert "no flash_attn/cute/testing.py: bring it beside the project's tests" in printed


def test_flashinfer(tmp_path: Path) -> None:
    status, results, printed = run("flashinfer", tmp_path, FLASHINFER)
    assert status == 1
    file = results["files"]["test_made_up.py"]
    assert file["functions"] == {
        "test_batch_decode": {"cases": 4, "passed": 2, "failed": 2},
        "test_single_tensor_cores": {"cases": 2, "passed": 1, "refused": 1},
        "test_cascade": {"cases": 1, "passed": 1},
        "test_xqa_of_a_tree": {"cases": 1, "passed": 1},
        "test_batch_attention_correctness": {"cases": 1, "passed": 1},
        "test_cuda_graph": {"cases": 1, "refused": 1},
    }
    assert all("off=1" in case["test"] for case in file["failed"]), printed
    assert file["left_out"] == {"test_nvfp4_cache": "caches of 4-bit numbers"}
    # The wrappers are compared with functions that are not dlattn's.
    assert file["served"]["attention_with_kvcache"] == 8 + 1 + 1
    assert file["served"]["attention_varlen"] == 1 and file["served"]["attention"] == 2


@pytest.mark.nightly  # seconds to import torch, for a tool that changes seldom
def test_only_some_cases(tmp_path: Path) -> None:
    status, results, printed = run(
        "flash-attention-2", tmp_path, FLASH_ATTN_2, "-k", "what=right", "--cases", "1"
    )
    assert status == 0, printed
    assert results["outcomes"] == {"passed": 1}
    assert results["options"]["cases"] == 1


@pytest.mark.nightly  # seconds to import torch, for a tool that changes seldom
def test_nothing_that_dlattn_served_proves_nothing(tmp_path: Path) -> None:
    status, results, _ = run("flash-attention-2", tmp_path, FLASH_ATTN_2, "-k", "without_dlattn")
    assert status == 1 and results["outcomes"] == {"passed without dlattn": 1}


@pytest.mark.nightly  # it waits
def test_a_case_that_hangs(tmp_path: Path) -> None:
    sleeps = FLASH_ATTN_2.replace("os._exit(5)", "__import__('time').sleep(600)")
    status, results, _ = run(
        "flash-attention-2", tmp_path, sleeps, "-k", "dies|right", "--patience", "15", "--jobs", "2"
    )
    assert status == 1 and results["outcomes"] == {"passed": 2, "crashed": 1}


@pytest.mark.nightly  # seconds to import torch, for a tool that changes seldom
def test_a_file_that_does_not_load(tmp_path: Path) -> None:
    status, results, _ = run("flashinfer", tmp_path, "import no_such_module\n")
    assert status == 1 and results["compared"] == 0
    assert "no_such_module" in results["files"]["test_made_up.py"]["troubles"][0]


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="Dao-AILab/flash-attention"):
        SUITES["flash-attention-3"].paths(tmp_path)
