"""The peers of the benchmark's decode set, made up, as they need a GPU or are not installed."""

from __future__ import annotations

import importlib
import math
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from quick_bench import run_to_json

from dlattn.bench import decode
from dlattn.bench.decode import contestants
from dlattn.bench.decode.cases import COLD, E4M3, INT8, SCALES, DecodeCase, turn_groups
from dlattn.bench.features import Context
from dlattn.bench.peers import Problem, UnavailableError
from dlattn.console.errors import CommandError

torch = pytest.importorskip("torch")

from dlattn.bench.decode import caches  # noqa: E402

EVEN = DecodeCase("contiguous", (48, 48), 4, 2, 16)
DRAFTS = replace(EVEN, group="drafts", queries=5)
LENGTHS = replace(EVEN, group="pages", on_device=True)
PAGED = replace(LENGTHS, page_size=16)
UNEVEN = DecodeCase("mixes", (40, 1, 32), 4, 2, 16, page_size=16)
EIGHT_BIT = replace(EVEN, group="eight_bit", on_device=True, cache_dtype=E4M3)


def attend(q: Any, k: Any, v: Any, causal: bool = False) -> Any:
    """One sequence's: (rows, heads, dim)."""
    q, k, v = (x.float().transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[0] // k.shape[0], 0) for x in (k, v))
    x = q @ k.mT / math.sqrt(q.shape[2])
    if causal:  # aligned at the last key
        x = x.masked_fill(torch.ones(x.shape[1:]).triu(x.shape[2] - x.shape[1] + 1).bool(), -1e9)
    return (x.softmax(2) @ v).transpose(0, 1)


def gathered(x: Any, table: Any, length: int) -> Any:
    """Keys of a sequence in pages."""
    return torch.cat([x[int(page)] for page in table])[:length]


class FlashInferWrapper:
    """FlashInfer's decode wrapper, sequence by sequence."""

    def __init__(self, workspace: Any, layout: str, use_tensor_cores: bool) -> None:
        assert workspace.dtype == torch.uint8 and layout == "NHD"
        self.tensor_cores = use_tensor_cores

    def plan(
        self,
        indptr: Any,
        indices: Any,
        last_page_len: Any,
        num_heads: int,
        num_heads_kv: int,
        head_dim: int,
        page_size: int,
        *,
        q_data_type: Any,
        kv_data_type: Any,
    ) -> None:
        assert all(x.dtype == torch.int32 for x in (indptr, indices, last_page_len))
        assert self.tensor_cores is (num_heads > num_heads_kv)
        self.heads = (num_heads, num_heads_kv, head_dim)
        assert ((last_page_len >= 1) & (last_page_len <= page_size)).all()
        self.lists = (indptr.tolist(), indices, last_page_len.tolist())
        self.page_size, self.types = page_size, (q_data_type, kv_data_type)

    def run(self, q: Any, kv: Any, k_scale: float = 1.0, v_scale: float = 1.0) -> Any:
        (indptr, indices, last), (k, v) = self.lists, kv
        assert self.heads == (q.shape[1], *k.shape[2:])
        assert self.types == (q.dtype, k.dtype) and k.shape[1] == self.page_size
        outs = []
        for b in range(q.shape[0]):
            pages = indices[indptr[b] : indptr[b + 1]]
            length = (len(pages) - 1) * self.page_size + last[b]
            own = [gathered(x.float(), pages, length) for x in (k, v)]
            outs.append(attend(q[b][None], own[0] * k_scale, own[1] * v_scale)[0])
        return torch.stack(outs).to(q.dtype)


def trtllm(
    query: Any,
    kv_cache: Any,
    workspace_buffer: Any,
    block_tables: Any,
    seq_lens: Any,
    max_seq_len: int,
    bmm1_scale: float = 1.0,
    bmm2_scale: float = 1.0,
    kv_layout: str = "HND",
) -> Any:
    assert kv_layout == "NHD" and max_seq_len == int(seq_lens.max())
    assert int(block_tables.min()) >= 0 and not workspace_buffer.any()
    outs = []
    for b, length in enumerate(seq_lens.tolist()):
        k, v = (gathered(x.float(), block_tables[b], length) for x in kv_cache)
        scale = bmm1_scale * math.sqrt(query.shape[2])
        outs.append(attend(query[b][None] * scale, k, v * bmm2_scale)[0])
    return torch.stack(outs).to(query.dtype)


def flash_attn_with_kvcache(
    q: Any, k: Any, v: Any, *, cache_seqlens: Any, causal: bool, block_table: Any = None
) -> Any:
    assert causal
    outs = []
    for b, length in enumerate(cache_seqlens.tolist()):
        own = [k[b], v[b]] if block_table is None else [
            gathered(x, block_table[b], length) for x in (k, v)
        ]  # fmt: skip
        outs.append(attend(q[b], *(x[:length] for x in own), causal))
    return torch.stack(outs)


def flash_4(q: Any, k: Any, v: Any, *, causal: bool) -> tuple[Any, None]:
    outs = [attend(*each, causal) for each in zip(q, k, v, strict=True)]
    return torch.stack(outs), None


class Operators:
    """torch's, on a CPU."""

    @staticmethod
    def _flash_attention_forward(
        q: Any, k: Any, v: Any, starts_q: Any, starts_k: Any, longest_q: int, longest_k: int,
        dropout: float, causal: bool, debug: bool,
    ) -> tuple[Any]:  # fmt: skip
        assert starts_q.dtype == starts_k.dtype == torch.int32 and not (dropout or causal or debug)
        assert longest_q == 1 and longest_k == int(starts_k.diff().max())
        parts = [x.tensor_split(starts_k[1:-1].tolist()) for x in (k, v)]
        outs = [attend(q[b][None], parts[0][b], parts[1][b]) for b in range(len(parts[0]))]
        return (torch.cat(outs),)

    @staticmethod
    def _scaled_dot_product_flash_attention(
        q: Any, k: Any, v: Any, dropout: float, causal: bool
    ) -> tuple[Any]:
        assert causal and not dropout
        by_row = [x.transpose(1, 2) for x in (q, k, v)]
        return (flash_4(*by_row, causal=True)[0].transpose(1, 2),)


class Torch(ModuleType):
    """With operators that work here."""

    ops = SimpleNamespace(aten=Operators)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.fixture
def everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    """All peers, installed."""
    flash_attn = ModuleType("flash_attn")
    flash_attn.__dict__.update(__path__=[], flash_attn_with_kvcache=flash_attn_with_kvcache)
    modules = {
        "flashinfer": SimpleNamespace(
            __path__=[], BatchDecodeWithPagedKVCacheWrapper=FlashInferWrapper
        ),
        "flashinfer.decode": SimpleNamespace(trtllm_batch_decode_with_kv_cache=trtllm),
        "flash_attn": flash_attn,
        "flash_attn.cute": SimpleNamespace(flash_attn_func=flash_4),
        "fa3_fwd_interface": SimpleNamespace(flash_attn_with_kvcache=flash_attn_with_kvcache),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    fake = Torch("torch")
    monkeypatch.setattr(contestants.tensors, "torch_module", lambda: fake)
    monkeypatch.setattr(contestants, "_WORKSPACE_BYTES", 16)
    attention = importlib.import_module("torch.nn.attention")
    monkeypatch.setattr(attention, "sdpa_kernel", lambda pinned: nullcontext(pinned))
    monkeypatch.setattr(decode, "l2_bytes", lambda device: 1 << 14)
    monkeypatch.setattr(decode, "_memory_bytes", lambda device: 1e12)


def bind(name: str, case: DecodeCase, dtype: str = "float32") -> tuple[Any, Any]:
    (peer,) = (peer for peer in contestants.PEERS["cuda"] if peer.name == name)
    assert peer.takes(case) and peer.missing() == ""
    inputs = caches.draw(case, dtype, "cpu", 3)
    own = caches.Caches(inputs, 3)
    problem = Problem(case.as_case(dtype, COLD), inputs.q, *own.pairs[0], caches=own)
    return peer.contestant().bind(problem), inputs


@pytest.mark.usefixtures("everybody")
@pytest.mark.parametrize(
    ("name", "case", "note"),
    [
        ("torch-cudnn", EVEN, ""),
        ("torch-cudnn", DRAFTS, "mask as a bias that was made once"),
        ("torch-cudnn", LENGTHS, "the host knows the lengths"),
        ("torch-flash", EVEN, ""),
        ("torch-flash", DRAFTS, ""),
        ("torch-flash varlen", UNEVEN, "keys without pages"),
        ("flashinfer", EVEN, "planned before"),
        ("flashinfer", UNEVEN, "planned before"),
        ("flashinfer", replace(PAGED, page_size=1), "planned before"),
        ("flashinfer", EIGHT_BIT, "planned before"),
        ("flashinfer-trtllm", EVEN, ""),
        ("flashinfer-trtllm", UNEVEN, ""),
        ("flashinfer-trtllm", EIGHT_BIT, ""),
        ("flash-attn", EVEN, ""),
        ("flash-attn", DRAFTS, ""),
        ("flash-attn", replace(PAGED, page_size=256), ""),
        ("fa3", EVEN, ""),
        ("fa3", DRAFTS, ""),
        ("fa4", DRAFTS, ""),
        ("fa4", LENGTHS, "the host knows the lengths"),
    ],
    ids=lambda x: x.what if isinstance(x, DecodeCase) else None,
)
def test_peers(name: str, case: DecodeCase, note: str) -> None:
    bound, inputs = bind(name, case)
    assert bound.note == note and bound.plan == ""
    with bound.context():
        assert inputs.expected.errors(bound.call())[1] <= 1
        assert len(bound.turn) == 24
        for k, v in inputs.pairs[1:]:
            k.view(torch.uint8).fill_(0), v.view(torch.uint8).fill_(0)
        if name == "torch-flash varlen":  # it has copies of its own
            for _, v in inputs.packed[1:]:
                v.fill_(0)
        outs = [float(call().abs().sum()) for call in bound.turn]
    assert outs[0] == outs[3] > 0 and outs[1] == outs[2] == outs[23] == 0


@pytest.mark.usefixtures("everybody")
def test_who_takes_which_case() -> None:
    study = decode.study(Context("cuda", "bfloat16", [], None))
    names = [peer.name for peer in study.peers]
    assert names == list(contestants.names("cuda")) and not study.left_out

    def takers(group: str, what: str) -> set[str]:
        cases = {case for members in turn_groups(SCALES["cuda"]) for case in members}
        (case,) = {c for c in cases if c.group == group and c.what == what and c.head_dim == 128
                   and (group != "contiguous" or c.label == "(8,32/8,4096,128)")}  # fmt: skip
        return {peer.name for peer in study.peers if peer.takes(case)}

    sdpa = {"torch-cudnn", "torch-flash", "fa3", "fa4"}
    paged = {"flashinfer", "flashinfer-trtllm"}
    assert takers("contiguous", "1 query") == sdpa | paged | {"flash-attn"}
    assert takers("drafts", "8 queries") == sdpa | {"flash-attn"}
    assert takers("pages", "page 16") == paged
    assert takers("pages", "page 1") == {"flashinfer"}
    assert takers("pages", "page 256") == {"flashinfer", "flash-attn"}
    assert takers("eight_bit", f"{E4M3} cache, lengths on the device") == paged
    assert takers("eight_bit", f"{INT8} cache, lengths on the device") == set()
    assert takers("skewed", "31x4k+1x128k, page 16") == paged | {"torch-flash varlen"}


@pytest.mark.usefixtures("everybody")
def test_peers_can_be_chosen() -> None:
    study = decode.study(Context("cuda", "bfloat16", [], ["fa4", "torch-cudnn"]))
    assert [peer.name for peer in study.peers] == ["torch-cudnn", "fa4"]
    with pytest.raises(CommandError, match="--peers xqa; accepted here: torch-cudnn, torch-flash"):
        decode.study(Context("cuda", "bfloat16", [], ["xqa"]))


@pytest.mark.usefixtures("everybody")
def test_what_is_not_installed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("flashinfer", "flashinfer.decode", "flash_attn.cute", "fa3_fwd_interface"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(__path__=[]))
    study = decode.study(Context("cuda", "bfloat16", [], None))
    assert [p.name for p in study.peers] == ["torch-cudnn", "torch-flash", "torch-flash varlen"]
    missing = {"flashinfer", "flashinfer-trtllm", "flash-attn", "fa3", "fa4"}
    assert set(study.left_out) == missing
    assert study.left_out["flashinfer"].startswith("flashinfer is not installed: ")
    assert study.left_out["flash-attn"] == "flash_attn has no flash_attn_with_kvcache"
    assert study.about()["left_out"] is study.left_out


@pytest.mark.usefixtures("everybody")
def test_keys_that_are_no_whole_pages() -> None:
    with pytest.raises(UnavailableError, match="keys are 40; accepted without pages: multiples"):
        bind("flashinfer", replace(EVEN, lengths=(40, 40)))


@pytest.mark.usefixtures("everybody", "instant")
def test_a_run_with_everybody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(contestants.PEERS, "cpu", contestants.PEERS["cuda"])
    document = run_to_json(tmp_path, "--shape", "decode")
    assert not document["decode"]["left_out"]
    names = set(contestants.names("cuda"))
    for result in document["results"]:
        assert not result["wrong"], result
        if result["seconds"] is None:  # keys that are no whole pages, 8-bit caches of ours
            refused = result["note"].startswith(("keys are 40; ", "refused: "))
            assert refused, result
    for temperature in (COLD, "warm"):
        timed = {e["contestant"] for e in document["decode"]["cases"] if e[temperature]["seconds"]}
        assert timed == {"dlattn auto", *names}
    paged = {e["contestant"]: e for e in document["decode"]["cases"] if e["what"] == "page 1"}
    assert set(paged) == {"dlattn auto", "flashinfer"}
    ratio = paged["flashinfer"][COLD]["seconds"] / paged["dlattn auto"][COLD]["seconds"]
    assert paged["dlattn auto"][COLD]["vs_best_peer"] == pytest.approx(ratio)
    host = document["host_seconds"]
    assert all(host.values()) and {"fa4", "flashinfer, page 16"} <= set(host)


def test_they_decode_from_caches_only() -> None:
    case = EVEN.as_case("float32", COLD)
    x = torch.zeros(2, 4, 48, 16)
    for peer in contestants.PEERS["cpu"]:
        with pytest.raises(UnavailableError, match="decodes from caches only"):
            peer.contestant().bind(Problem(case, x, x, x))
