"""dlattn's backend of SGLang: what it registers and refuses, and its numbers on the CPU.

Where SGLang is not installed, `sglang_stub` stands for the part of it that the backend is built on.
"""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import sglang_stub  # noqa: E402
from module_stubs import installed  # noqa: E402
from programs import HERE  # noqa: E402
from sglang_binaries import define_operators  # noqa: E402

import dlattn  # noqa: E402
from dlattn.reference import attention_reference  # noqa: E402

define_operators()
with installed(sglang_stub.MODULES) as STUBBED:
    import dlattn.sglang

    Mode = importlib.import_module("sglang.srt.model_executor.forward_batch_info").ForwardMode
from dlattn.integrations import engines  # noqa: E402
from dlattn.integrations import sglang as integration  # noqa: E402

Arch, Kind = integration.AttentionArch, integration.AttentionType
Backend = dlattn.sglang.DlattnAttnBackend
HEADS, HEADS_KV, DIM, DIM_V, CONTEXT = 4, 2, 16, 8, 24


@pytest.fixture(autouse=True)
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(integration, "get_exec", sglang_stub.get_exec)  # servers alone have one
    with installed(sglang_stub.MODULES):
        yield


def test_what_is_said_without_sglang() -> None:
    code = "import sys; sys.modules['sglang'] = None; import dlattn.sglang"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ImportError: dlattn.sglang needs SGLang, which is not installed" in done.stderr


def test_registering() -> None:
    for _ in range(2):
        dlattn.sglang.register()
    arguments = importlib.import_module("sglang.srt.server_args")
    for choices in (
        "ATTENTION_BACKEND_CHOICES",
        "DETERMINISTIC_ATTENTION_BACKEND_CHOICES",
        "RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND",
    ):
        assert getattr(arguments, choices).count("dlattn") == 1, choices
    registry = importlib.import_module("sglang.srt.layers.attention.attention_registry")
    made = registry.ATTENTION_BACKENDS["dlattn"](Server().runner)
    assert type(made) is Backend


def test_another_sglang_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = importlib.import_module("sglang.srt.server_args")
    monkeypatch.setattr(engines, "_told", set())
    monkeypatch.delattr(arguments, "RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND")
    for _ in range(2):
        dlattn.sglang.register()
    (message,) = caplog.messages
    assert message.startswith("dlattn's attention backend is not registered with sglang ")
    assert "AttributeError: " in message and message.endswith("; accepted: sglang 0.5.23")


def test_the_entry_point() -> None:
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    found = re.search(r'"sglang\.srt\.plugins"\]\ndlattn = "([\w.]+):(\w+)"\n', text)
    assert found is not None
    module, name = found.groups()
    assert getattr(importlib.import_module(module), name) is dlattn.sglang.register


def test_the_plug_in_imports_no_backend() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import module_stubs, sglang_stub\n"
        "there = module_stubs.installed(sglang_stub.MODULES); there.__enter__()\n"
        "from dlattn.integrations.sglang_plugin import register\n"
        "register(); print('dlattn.integrations.sglang' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(HERE)], capture_output=True, text=True)
    assert done.stdout.split()[-1:] == ["False"], done.stderr


def test_signatures_are_those_of_sglang() -> None:
    compared = 0
    for name, method in vars(Backend).items():
        theirs = getattr(integration.AttentionBackend, name, None)
        if name.startswith("_") or not inspect.isfunction(theirs):
            continue
        want, found = (
            [p for p in inspect.signature(f).parameters.values() if p.kind != p.VAR_KEYWORD]
            for f in (theirs, method)
        )
        assert [p.name for p in found[: len(want)]] == [p.name for p in want], name
        assert all(p.default is not p.empty for p in found[len(want) :]), name
        compared += 1
    assert compared >= 6


class Pool:
    """Keys and values of one layer, NaN where no token has been."""

    def __init__(self, slots: int, dtype: Any = torch.float32) -> None:
        self.k = torch.full((slots, HEADS_KV, DIM), float("nan")).to(dtype)
        self.v = torch.full((slots, HEADS_KV, DIM_V), float("nan")).to(dtype)

    def get_kv_buffer(self, layer_id: int) -> Any:
        assert layer_id == 3
        return self.k, self.v

    def set_kv_buffer(self, layer: Any, where: Any, k: Any, v: Any, *scales: Any) -> None:
        assert scales == (layer.k_scale, layer.v_scale)
        for pool, x, scale in ((self.k, k, scales[0]), (self.v, v, scales[1])):
            counted = x if scale is None else x / scale
            pool.view(torch.uint8 if pool.itemsize == 1 else pool.dtype)[where.loc] = (
                counted.to(pool.dtype).view(torch.uint8) if pool.itemsize == 1 else counted
            )


class Server:
    """A model runner with a pool and a table of four requests, and forward passes over them."""

    def __init__(self, page_size: int = 1, **changes: Any) -> None:
        self.generator = torch.Generator().manual_seed(0)
        pages = torch.randperm(48 // page_size * 2, generator=self.generator)
        slots = (pages[:, None] * page_size + torch.arange(page_size)).flatten()
        self.table = slots[: 4 * CONTEXT].view(4, CONTEXT).to(torch.int32)
        self.pool = Pool(96, changes.get("kv_cache_dtype", torch.float32))
        config = SimpleNamespace(
            attention_arch=Arch.MHA,
            is_encoder_decoder=False,
            context_len=CONTEXT,
            attention_chunk_size=None,
            dtype=torch.float32,
        )
        runner = {
            "model_config": config,
            "token_to_kv_pool": self.pool,
            "req_to_token_pool": SimpleNamespace(req_to_token=self.table),
            "kv_cache_dtype": torch.float32,
            "device": "cpu",
            "page_size": page_size,
        }
        for name, value in changes.items():
            (vars(config) if hasattr(config, name) else runner)[name] = value
        self.runner = SimpleNamespace(**runner)
        nothing = self.drawn(0, HEADS_KV, DIM), self.drawn(0, HEADS_KV, DIM_V)
        self.keys = dict.fromkeys(range(4), nothing)

    def drawn(self, *shape: int) -> Any:
        return torch.randn(*shape, generator=self.generator)

    def batch(self, requests: list[int], new: list[int], mode: Any, known: bool = True) -> Any:
        """A forward pass of new tokens, with their q, k and v."""
        tokens = sum(new)
        q, k, v = (
            self.drawn(tokens, h, d) for h, d in ((HEADS, DIM), (HEADS_KV, DIM), (HEADS_KV, DIM_V))
        )
        slots, row = [], 0
        for r, count in zip(requests, new, strict=True):
            old_k, old_v = self.keys[r]
            slots.append(self.table[r, len(old_k) : len(old_k) + count].long())
            news = k[row : row + count], v[row : row + count]
            self.keys[r] = torch.cat([old_k, news[0]]), torch.cat([old_v, news[1]])
            row += count
        lengths = torch.tensor([len(self.keys[r][0]) for r in requests])
        batch = SimpleNamespace(
            forward_mode=mode,
            batch_size=len(requests),
            req_pool_indices=torch.tensor(requests),
            seq_lens=lengths,
            seq_lens_cpu=lengths if known else None,
            extend_seq_lens=torch.tensor(new),
            extend_seq_lens_cpu=new,
            out_cache_loc=torch.cat(slots),
            out_cache_loc_is_physical=False,
            spec_info=None,
        )
        return batch, q.flatten(1), k, v

    def want(self, requests: list[int], new: list[int], q: Any, **options: Any) -> Any:
        outs, row = [], 0
        for r, count in zip(requests, new, strict=True):
            k, v = self.keys[r]
            rows = q[row : row + count].view(1, count, HEADS, DIM)
            out, _ = attention_reference(rows, k[None], v[None], **options)
            outs.append(torch.as_tensor(out[0]).flatten(1))
            row += count
        return torch.cat(outs).float()


def layer(**changes: Any) -> Any:
    given = {
        "layer_id": 3,
        "tp_q_head_num": HEADS,
        "tp_k_head_num": HEADS_KV,
        "qk_head_dim": DIM,
        "v_head_dim": DIM_V,
        "scaling": 0.3,
        "logit_cap": 0.0,
        "logit_capping_method": "tanh",
        "sliding_window_size": -1,
        "is_cross_attention": False,
        "attn_type": Kind.DECODER,
        "xai_temperature_len": -1,
        "k_scale": None,
        "v_scale": None,
    }
    return SimpleNamespace(**(given | changes))


def close(found: Any, want: Any) -> None:
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("page_size", [1, 4])
def test_prompts_then_decoding(page_size: int, known: bool) -> None:
    """Prompts, chunks behind cached prefixes, and single tokens of some of the requests."""
    server = Server(page_size)
    backend = Backend(server.runner)
    for requests, new, mode in (
        ([2, 0, 3], [5, 9, 1], Mode.EXTEND),
        ([0, 1], [3, 7], Mode.MIXED),
        ([1, 3, 0, 2], [1, 1, 1, 1], Mode.DECODE),
        ([3, 2], [1, 1], Mode.DECODE),
    ):
        batch, q, k, v = server.batch(requests, new, mode, known)
        backend.init_forward_metadata(batch)
        found = backend.forward(q, k, v, layer(), batch)
        assert found.shape == (sum(new), HEADS * DIM_V)
        close(found, server.want(requests, new, q, causal=True, softmax_scale=0.3))


@pytest.mark.parametrize("mode", [Mode.EXTEND, Mode.DECODE])
@pytest.mark.parametrize(
    ("given", "options"),
    [
        ({"sliding_window_size": 2}, {"window": (2, 0), "causal": True}),
        ({"logit_cap": 2.0}, {"softcap": 2.0, "causal": True}),
        ({"sinks": [1.0, -1.0, 0.5, 0.0]}, {"causal": True}),
        ({"attn_type": Kind.DECODER_BIDIRECTIONAL}, {}),
        (
            {"attn_type": Kind.DECODER_BIDIRECTIONAL, "sliding_window_size": 1},
            {"window": (1, 1)},
        ),
    ],
)
def test_score_modifications(given: dict[str, Any], options: dict[str, Any], mode: Any) -> None:
    server, given, options = Server(), dict(given), dict(options)
    backend = Backend(server.runner)
    sinks = given.pop("sinks", None)
    if sinks is not None:
        options["sinks"] = torch.tensor(sinks)
        sinks = torch.nn.Parameter(torch.tensor(sinks, dtype=torch.bfloat16))
    prompt, q, k, v = server.batch([0, 1], [6, 4], Mode.EXTEND)
    backend.init_forward_metadata(prompt)
    found = backend.forward(q, k, v, layer(**given), prompt, sinks=sinks)
    new = [6, 4]
    if mode == Mode.DECODE:
        new = [1, 1]
        step, q, k, v = server.batch([0, 1], new, mode)
        backend.init_forward_metadata(step)
        found = backend.forward(q, k, v, layer(**given), step, sinks=sinks)
    close(found, server.want([0, 1], new, q, softmax_scale=0.3, **options))


@pytest.mark.parametrize("factors", [(None, None), (0.5, 3.0)])
@pytest.mark.parametrize("page_size", [1, 4])
def test_pools_of_8_bits(page_size: int, factors: Any) -> None:
    """The pool rounds keys and values, by a layer's factors if it has any."""
    server, dtype = Server(page_size, kv_cache_dtype=torch.float8_e4m3fn), torch.float8_e4m3fn
    backend = Backend(server.runner)
    given = [None if x is None else torch.nn.Parameter(torch.tensor(x)) for x in factors]
    own = layer(k_scale=given[0], v_scale=given[1])
    for requests, new, mode in (
        ([2, 0, 3], [5, 9, 1], Mode.EXTEND),
        ([3, 0, 2], [1, 1, 1], Mode.DECODE),
    ):
        batch, q, k, v = server.batch(requests, new, mode)
        backend.init_forward_metadata(batch)
        with torch.no_grad():
            found = backend.forward(q.half(), k, v, own, batch)
        exact = server.keys
        server.keys = {
            r: tuple(
                (x / (scale or 1.0)).to(dtype).float() * (scale or 1.0)
                for x, scale in zip(pair, factors, strict=True)
            )
            for r, pair in exact.items()
        }
        want = server.want(requests, new, q.half(), causal=True, softmax_scale=0.3)
        torch.testing.assert_close(found.float(), want, rtol=2e-3, atol=2e-3)
        server.keys = exact


@pytest.mark.skipif(STUBBED, reason="SGLang is not installed: it has the pool")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("page_size", [1, 4])
def test_the_pool_of_sglang(page_size: int, dtype: Any) -> None:
    """Keys and values as SGLang's own pool keeps them, and its class of where they are written."""
    pool = importlib.import_module("sglang.srt.mem_cache.memory_pool").MHATokenToKVPool(
        size=96,
        page_size=page_size,
        dtype=dtype,
        head_num=HEADS_KV,
        head_dim=DIM,
        v_head_dim=DIM_V,
        layer_num=1,
        device="cpu",
        enable_memory_saver=False,
        start_layer=3,
    )
    server = Server(page_size, token_to_kv_pool=pool, kv_cache_dtype=dtype)
    backend = Backend(server.runner)
    for requests, new, mode in (
        ([2, 0, 3], [5, 9, 1], Mode.EXTEND),
        ([3, 0, 2], [1, 1, 1], Mode.DECODE),
    ):
        batch, q, k, v = server.batch(requests, new, mode)
        backend.init_forward_metadata(batch)
        given = torch.float16 if dtype.itemsize == 1 else dtype
        q, k, v = (x.to(given) for x in (q, k, v))
        found = backend.forward(q, k, v, layer(), batch)
        server.keys = {
            r: tuple(x.to(given).to(dtype).float() for x in pair) for r, pair in server.keys.items()
        }
        want = server.want(requests, new, q, causal=True, softmax_scale=0.3)
        tolerance = 2e-3 if dtype.itemsize == 1 else 1e-5
        torch.testing.assert_close(found.float(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("page_size", [1, 4])
def test_graphs_of_decoding(page_size: int) -> None:
    """The tensors that a graph was captured with are those that later steps are told by."""
    server = Server(page_size)
    backend = Backend(server.runner)
    backend.init_cuda_graph_state(max_bs=4, max_num_tokens=4)
    prompt, q, k, v = server.batch([0, 1, 2], [6, 11, 1], Mode.EXTEND)
    backend.init_forward_metadata(prompt)
    backend.forward(q, k, v, layer(), prompt)

    padding = SimpleNamespace(
        forward_mode=Mode.DECODE,
        batch_size=3,
        req_pool_indices=torch.zeros(3, dtype=torch.int64),
        seq_lens=torch.full((3,), backend.get_cuda_graph_seq_len_fill_value()),
        seq_lens_cpu=torch.ones(3, dtype=torch.int64),
        spec_info=None,
    )
    backend.init_forward_metadata_out_graph(padding, in_capture=True)
    backend.init_forward_metadata_in_graph(padding)
    captured = backend.forward_metadata
    assert captured.page_table.shape == (3, CONTEXT // page_size)
    for requests in ([0, 1, 2], [2, 0, 1]):
        batch, q, k, v = server.batch(requests, [1, 1, 1], Mode.DECODE)
        backend.init_forward_metadata_out_graph(batch)
        assert backend.forward_metadata.seq_lens.data_ptr() == captured.seq_lens.data_ptr()
        backend.forward_metadata = captured  # the lists that a replayed graph reads
        found = backend.forward(q, k, v, layer(), batch)
        close(found, server.want(requests, [1, 1, 1], q, causal=True, softmax_scale=0.3))
    prompt, *_ = server.batch([3], [2], Mode.EXTEND)
    with pytest.raises(NotImplementedError, match="a CUDA graph of prompts"):
        backend.init_forward_metadata_out_graph(prompt)


def test_keys_that_are_in_the_cache_already() -> None:
    server = Server()
    backend = Backend(server.runner)
    batch, q, k, v = server.batch([0], [4], Mode.EXTEND)
    backend.init_forward_metadata(batch)
    want = backend.forward(q, k, v, layer(), batch)
    before = server.pool.k.clone()
    assert torch.equal(backend.forward(q, -k, -v, layer(), batch, save_kv_cache=False), want)
    assert torch.equal(backend.forward(q, None, None, layer(), batch), want)
    assert torch.equal(server.pool.k.nan_to_num(), before.nan_to_num())


def test_rows_of_padding_and_idle_ranks() -> None:
    server = Server()
    backend = Backend(server.runner)
    batch, q, k, v = server.batch([0, 1], [4, 2], Mode.EXTEND)
    backend.init_forward_metadata(batch)
    padded = torch.cat([q, torch.full_like(q[:2], float("nan"))])
    found = backend.forward(padded, k, v, layer(), batch)
    close(found[:6], server.want([0, 1], [4, 2], q, causal=True, softmax_scale=0.3))
    assert (found[6:] == 0).all()
    batch.forward_mode = Mode.IDLE
    assert backend.forward(q[:0], k[:0], v[:0], layer(), batch).shape == (0, HEADS * DIM_V)


def test_deterministic_inference(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def count(attend: Any) -> Any:
        def counted(*arguments: Any, **options: Any) -> Any:
            most = arguments[5] if len(arguments) > 5 else 1
            seen.append((options["batch_invariant"], most))
            return attend(*arguments, **options)

        return counted

    for name in ("attention_varlen", "attention_with_kvcache"):
        monkeypatch.setattr(dlattn, name, count(getattr(dlattn, name)))
    for asked in (False, True):
        monkeypatch.setattr(sglang_stub.EXEC.deterministic, "enable_deterministic_inference", asked)
        server = Server()
        backend = Backend(server.runner)
        for mode, tokens in ((Mode.EXTEND, 3), (Mode.DECODE, 1)):
            batch, q, k, v = server.batch([0], [tokens], mode)
            backend.init_forward_metadata(batch)
            backend.forward(q, k, v, layer(), batch)
    assert seen == [(False, 3), (False, 1), (True, 3), (True, 1)]
    mixed, *_ = server.batch([0, 1], [1, 2], Mode.MIXED)
    with pytest.raises(NotImplementedError, match="deterministic inference of batches that mix"):
        backend.init_forward_metadata(mixed)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_cache_dtype": torch.float8_e5m2}, "kv_cache_dtype is float8_e5m2; accepted: fl"),
        ({"kv_cache_dtype": torch.float32, "device": "cuda"}, "kv_cache_dtype is float32"),
        ({"attention_arch": Arch.MLA}, "the model's attention is MLA"),
        ({"is_encoder_decoder": True}, "the model has an encoder"),
        ({"attention_chunk_size": 8}, "the model attends to chunks"),
        ({"token_to_kv_pool": SimpleNamespace(swa_layer_nums=2)}, "--disable-hybrid-swa-memory"),
        (
            {"kv_cache_dtype": torch.bfloat16, "dtype": torch.float16},
            "kv_cache_dtype is bfloat16 .* float16; accepted: the model's dtype, float8_e4m3fn",
        ),
        ({"token_to_kv_pool": SimpleNamespace(k_scale_buffer=[0])}, "factors for blocks of a row"),
        (
            {"token_to_kv_pool": SimpleNamespace(full_kv_pool=SimpleNamespace(k_scale_buffer=[0]))},
            "factors for blocks of a row",
        ),
        (
            {"token_to_kv_pool": SimpleNamespace(kv_cache_layout="hnd")},
            "the pool's layout is hnd; accepted: nhd",
        ),
    ],
)
def test_models_that_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(NotImplementedError, match=f"attention backend dlattn: .*{words}"):
        Backend(Server(**changes).runner)


def test_calls_that_are_refused() -> None:
    server = Server()
    backend = Backend(server.runner)
    batch, q, k, v = server.batch([0], [4], Mode.EXTEND)
    backend.init_forward_metadata(batch)
    for changes, options, words in (
        ({}, {"q_rope": q}, "q_rope is given"),
        ({}, {"return_lse": True}, "return_lse is given"),
        ({"is_cross_attention": True}, {}, "no cache of its own"),
        ({"attn_type": Kind.ENCODER_ONLY}, {}, "no cache of its own"),
        ({"xai_temperature_len": 8}, {}, "a temperature by position"),
        ({"logit_capping_method": "sigmoid"}, {}, "a cap that is no tanh"),
    ):
        with pytest.raises(NotImplementedError, match=words):
            backend.forward(q, k, v, layer(**changes), batch, **options)
    assert backend.forward(q, k, v, layer(), batch, q_rope=None, return_lse=False).isfinite().all()
    batch.spec_info = object()
    with pytest.raises(NotImplementedError, match="speculative decoding"):
        backend.init_forward_metadata(batch)
    batch.spec_info, batch.forward_mode = None, Mode.DLLM_EXTEND
    with pytest.raises(NotImplementedError, match="a diffusion language model"):
        backend.init_forward_metadata(batch)
