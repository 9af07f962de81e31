"""dlattn's backend of vLLM: what it answers, what it registers, and its numbers on the CPU.

Where vLLM is not installed, `vllm_stub` stands for the part of it that the backend is built on.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import vllm_stub  # noqa: E402
from module_stubs import installed  # noqa: E402
from programs import HERE  # noqa: E402

import dlattn  # noqa: E402
from dlattn.reference import attention_reference  # noqa: E402

with installed(vllm_stub.MODULES):
    import dlattn.vllm
from dlattn.integrations import engines  # noqa: E402
from dlattn.integrations import vllm as integration  # noqa: E402

Backend, Impl = dlattn.vllm.DlattnBackend, dlattn.vllm.DlattnImpl
HEADS, HEADS_KV, DIM, BLOCK = 4, 2, 16, 4
QUERIES, KEYS = [5, 1, 1, 3], [5, 9, 1, 7]  # a prompt, two steps of decoding, a chunk of a prompt
LAYER = SimpleNamespace()


@pytest.fixture(autouse=True)
def stub() -> Iterator[None]:
    with installed(vllm_stub.MODULES):
        yield


def test_what_is_said_without_vllm() -> None:
    code = "import sys; sys.modules['vllm'] = None; import dlattn.vllm"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ImportError: dlattn.vllm needs vLLM, which is not installed" in done.stderr


def test_registering() -> None:
    registry = importlib.import_module("vllm.v1.attention.backends.registry")
    for _ in range(2):  # vLLM may load plug-ins more than once
        dlattn.vllm.register()
    member = registry.AttentionBackendEnum[Backend.get_name()]
    assert member.get_class() is Backend
    assert Backend.get_impl_cls() is Impl
    assert Backend.get_builder_cls() is dlattn.vllm.DlattnMetadataBuilder


class Config(SimpleNamespace):
    """The questions of vLLM to a backend, as the named tuple that it hands to a platform."""

    def _asdict(self) -> dict[str, Any]:
        return vars(self)


def test_being_chosen_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else `--attention-backend DLATTN` runs vLLM's own backend there, and one line of a log."""
    platforms = importlib.import_module("vllm.platforms")
    registry = importlib.import_module("vllm.v1.attention.backends.registry")

    class Platform(vllm_stub.CpuPlatform):
        pass

    monkeypatch.setattr(platforms, "current_platform", Platform())
    monkeypatch.setattr(integration, "current_platform", Platform())
    for _ in range(2):
        dlattn.vllm.register()
    member = registry.AttentionBackendEnum[Backend.get_name()]
    config = Config(**asking(dtype=torch.float32))
    chosen = Platform.get_attn_backend_cls(member, attn_selector_config=config, num_heads=4)
    assert chosen == "dlattn.vllm.DlattnBackend"
    for other in (None, registry.AttentionBackendEnum.FLASH_ATTN):
        path = Platform.get_attn_backend_cls(other, attn_selector_config=config, num_heads=4)
        assert path.endswith(".CPUAttentionBackend")
    config = Config(**asking(dtype=torch.float32, kv_cache_dtype="fp8"))
    with pytest.raises(ValueError, match=r"DLATTN: kv_cache_dtype fp8 not supported with float32"):
        Platform.get_attn_backend_cls(member, attn_selector_config=config, num_heads=4)
    config = Config(**asking(use_mla=True, head_size=260))
    with pytest.raises(ValueError, match=r"attention backend DLATTN: head_size .*MLA not supp"):
        Platform.get_attn_backend_cls(member, attn_selector_config=config, num_heads=4)


def test_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    for platform, in_32_bits in ((vllm_stub.CpuPlatform(), True), (vllm_stub.GpuPlatform(), False)):
        monkeypatch.setattr(integration, "current_platform", platform)
        assert Backend.supports_dtype(torch.float32) is in_32_bits
        assert Backend.supports_dtype(torch.bfloat16) and not Backend.supports_dtype(torch.float64)


def test_the_entry_point() -> None:
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    found = re.search(r'"vllm\.general_plugins"\]\ndlattn = "([\w.]+):(\w+)"\n', text)
    assert found is not None
    module, name = found.groups()
    assert getattr(importlib.import_module(module), name) is dlattn.vllm.register


def test_the_plug_in_imports_no_backend() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import module_stubs, vllm_stub\n"
        "there = module_stubs.installed(vllm_stub.MODULES); there.__enter__()\n"
        "from dlattn.integrations.vllm_plugin import register\n"
        "register(); print('dlattn.integrations.vllm' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(HERE)], capture_output=True, text=True)
    assert done.stdout.split()[-1:] == ["False"], done.stderr


def test_pickles_of_the_member() -> None:
    registry = importlib.import_module("vllm.v1.attention.backends.registry")
    dlattn.vllm.register()
    member = registry.AttentionBackendEnum[Backend.get_name()]
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps({"backend": member}, protocol))["backend"] is member
    assert copy.copy(member) is member and copy.deepcopy([member])[0] is member
    other = registry.AttentionBackendEnum.FLASH_ATTN
    assert pickle.loads(pickle.dumps(other)) is other


def test_a_process_that_is_spawned_before_it_loads_plug_ins() -> None:
    program = HERE / "vllm_spawn.py"
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True)
    assert done.stdout.split() == ["DLATTN", "0"], done.stderr


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "_told", set())


def test_another_vllm_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As 0.12, which has no such module; one that registers no names; and whatever else."""
    name = "vllm.v1.attention.backends.registry"
    registry = importlib.import_module(name)
    members = SimpleNamespace(__members__={})

    def fail(*_: Any) -> None:
        raise TypeError("register_backend() takes 1 argument")

    for changes, words in (
        (None, "ModuleNotFoundError: "),
        ({"register_backend": None}, "ImportError: cannot import name 'register_backend'"),
        (
            {"AttentionBackendEnum": members, "register_backend": lambda *_: None},
            "RuntimeError: register_backend adds no member for a name",
        ),
        ({"AttentionBackendEnum": members, "register_backend": fail}, "TypeError: register_back"),
    ):
        forget(monkeypatch)
        caplog.clear()
        module = None
        if changes is not None:
            given = {**vars(registry), **changes}
            module = ModuleType(name)
            vars(module).update({n: x for n, x in given.items() if x is not None})
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, name, module)
            for _ in range(2):
                dlattn.vllm.register()
        (message,) = caplog.messages
        assert message.startswith("dlattn's attention backend is not registered with vllm ")
        assert words in message and message.endswith("; accepted: vllm 0.32 or 0.33")


@pytest.mark.parametrize("cls", [Backend, Impl, dlattn.vllm.DlattnMetadataBuilder])
def test_signatures_are_those_of_vllm(cls: Any) -> None:
    """Every method that the base class has takes the same arguments, and maybe more behind them."""
    base = next(c for c in cls.__mro__[1:] if c.__name__.startswith("Attention"))
    compared = 0
    for name, method in vars(cls).items():
        method = getattr(method, "__func__", method)
        theirs = getattr(base, name, None)
        if not callable(theirs) or (name.startswith("_") and name != "__init__"):
            continue
        theirs = getattr(theirs, "__func__", theirs)
        want, found = (list(inspect.signature(f).parameters.values()) for f in (theirs, method))
        assert [p.name for p in found[: len(want)]] == [p.name for p in want], name
        assert all(p.default is not p.empty for p in found[len(want) :]), name
        compared += 1
    assert compared >= 2


def asking(**changes: Any) -> dict[str, Any]:
    """The questions of vLLM to a backend, but for the GPU."""
    given = {
        "head_size": 128,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": "auto",
        "block_size": 16,
        "use_mla": False,
        "has_sink": True,
        "use_sparse": False,
        "use_mm_prefix": False,
        "use_per_head_quant_scales": False,
        "attn_type": "decoder",
        "has_sliding_window": True,
        "use_non_causal": True,
        "use_batch_invariant": True,
    }
    return given | changes


def asked(**changes: Any) -> list[str]:
    given = {"device_capability": vllm_stub.DeviceCapability(9, 0), **asking(**changes)}
    reasons: list[str] = Backend.validate_configuration(**given)
    return reasons


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"block_size": 1}, ""),
        ({"kv_cache_dtype": "bfloat16"}, ""),
        ({"kv_cache_dtype": "float16"}, "kv_cache_dtype float16 not supported with bfloat16"),
        ({"kv_cache_dtype": "float16", "dtype": torch.float16}, ""),
        ({"device_capability": vllm_stub.DeviceCapability(12, 0)}, ""),
        ({"head_size": 100}, "head_size"),
        ({"head_size": 264}, "head_size"),
        ({"head_size": 512}, ""),
        ({"head_size": 512, "kv_cache_dtype": "fp8"}, ""),
        ({"head_size": 528}, "head_size"),
        ({"dtype": torch.float64}, "dtype"),
        ({"kv_cache_dtype": "fp8"}, ""),
        ({"kv_cache_dtype": "fp8_e4m3"}, ""),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype"),
        ({"kv_cache_dtype": "int8_per_token_head"}, "kv_cache_dtype"),
        ({"device_capability": vllm_stub.DeviceCapability(7, 5)}, "compute capability"),
        ({"device_capability": None}, ""),
        ({"attn_type": "encoder_only"}, "attention type"),
        ({"use_mla": True}, "MLA"),
        ({"use_mm_prefix": True}, "multimodal"),
        ({"use_rswa": True}, "R-SWA"),
    ],
)
def test_what_it_accepts(changes: dict[str, Any], words: str) -> None:
    reasons = asked(**changes)
    assert (not reasons) if not words else (len(reasons) == 1 and words in reasons[0]), reasons


class Step:
    """A step of four requests, with tables, lengths and slots as vLLM has them.

    Attributes:
        cache: (num_blocks, heads_kv, block, 2 * dim), in memory as `order` says; NaN where no token
            has been.
        dense: For each request its keys and values, those of this step last.
    """

    def __init__(self, order: str = "NHD", dtype: Any = torch.float32, padding: int = 2) -> None:
        generator = torch.Generator().manual_seed(0)

        def drawn(*shape: int) -> Any:
            return torch.randn(*shape, generator=generator).to(dtype)

        tokens = sum(QUERIES)
        self.query = drawn(tokens + padding, HEADS, DIM)
        self.key, self.value = (
            drawn(tokens + padding, HEADS_KV, DIM),
            drawn(tokens + padding, HEADS_KV, DIM),
        )
        shape = {"NHD": (12, BLOCK, HEADS_KV), "HND": (12, HEADS_KV, BLOCK)}[order]
        self.cache = torch.full((*shape, 2 * DIM), float("nan"), dtype=dtype)
        if order == "NHD":
            self.cache = self.cache.transpose(1, 2)
        blocks = iter(torch.randperm(12, generator=generator).tolist())
        self.table = torch.full((len(KEYS), 4), -1, dtype=torch.int32)
        self.dense: list[tuple[Any, Any]] = []
        slots: list[int] = []
        row = 0
        for r, (new, total) in enumerate(zip(QUERIES, KEYS, strict=True)):
            for page in range(-(-total // BLOCK)):
                self.table[r, page] = next(blocks)
            places = [int(self.table[r, j // BLOCK]) * BLOCK + j % BLOCK for j in range(total)]
            k, v = drawn(total, HEADS_KV, DIM), drawn(total, HEADS_KV, DIM)
            k[total - new :], v[total - new :] = (
                self.key[row : row + new],
                self.value[row : row + new],
            )
            for j, place in enumerate(places[: total - new]):
                self.cache[place // BLOCK, :, place % BLOCK] = torch.cat([k[j], v[j]], -1)
            slots += places[total - new :]
            self.dense.append((k, v))
            row += new
        starts = torch.tensor([0, *QUERIES]).cumsum(0).to(torch.int32)
        self.common = sys.modules["vllm.v1.attention.backend"].CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor(KEYS, dtype=torch.int32),
            num_reqs=len(KEYS),
            num_actual_tokens=tokens,
            max_query_len=max(QUERIES),
            max_seq_len=100,  # the model's limit, beyond the table's room
            block_table_tensor=self.table,
            slot_mapping=torch.tensor(slots),
        )

    def metadata(self, **changes: Any) -> Any:
        common = self.common
        for name, value in changes.items():
            setattr(common, name, value)
        return builder().build(0, common)

    def want(self, **options: Any) -> Any:
        """float64, of each request alone."""
        outs, row = [], 0
        for new, (k, v) in zip(QUERIES, self.dense, strict=True):
            q = self.query[row : row + new]
            out, _ = attention_reference(q[None], k[None], v[None], **options)
            outs.append(torch.as_tensor(out[0]))
            row += new
        return torch.cat(outs)


def builder() -> Any:
    make: Any = dlattn.vllm.DlattnMetadataBuilder
    return make(
        SimpleNamespace(block_size=BLOCK), ["layer"], SimpleNamespace(), torch.device("cpu")
    )


def layer(**options: Any) -> Any:
    return Impl(HEADS, DIM, 0.3, HEADS_KV, **options)


def run(impl: Any, step: Step, **changes: Any) -> Any:
    """The step's output, with rows of padding that must stay as they are."""
    metadata = step.metadata(**changes)
    impl.do_kv_cache_update(LAYER, step.key, step.value, step.cache, metadata.slot_mapping)
    out = torch.full_like(step.query, 7.0)
    found = impl.forward(LAYER, step.query, step.key, step.value, step.cache, metadata, out)
    assert found is out
    tokens = sum(QUERIES)
    assert (out[tokens:] == 7.0).all()
    return out[:tokens]


@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_prompts_and_decoding_in_one_batch(order: str, dtype: Any, tolerance: float) -> None:
    step = Step(order, dtype)
    found = run(layer(), step)
    want = step.want(causal=True, softmax_scale=0.3).to(dtype)
    torch.testing.assert_close(found, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
@pytest.mark.parametrize("name", ["auto", "fp8"])
def test_a_layer_of_a_cache_for_several(layout: str, name: str) -> None:
    """A layer's blocks may lie between those of others, in each order that vLLM knows."""
    step = Step(dtype=torch.float16)
    if name == "fp8":
        step.cache = step.cache.to(torch.float8_e4m3fn).view(torch.uint8)
        step.dense = [
            (k.to(torch.float8_e4m3fn).half(), v.to(torch.float8_e4m3fn).half())
            for k, v in step.dense
        ]
    sizes = dict(zip("LBHNC", (3, *step.cache.shape), strict=True))
    memory = torch.full([sizes[axis] for axis in layout], 77, dtype=step.cache.dtype)
    layers = memory.permute([layout.index(axis) for axis in "LBHNC"])
    layers[1].copy_(step.cache)
    step.cache = layers[1]
    factors = SimpleNamespace(_k_scale=torch.tensor(1.0), _v_scale=torch.tensor(1.0))
    metadata, impl, out = step.metadata(), layer(kv_cache_dtype=name), torch.empty_like(step.query)
    impl.do_kv_cache_update(factors, step.key, step.value, step.cache, metadata.slot_mapping)
    impl.forward(factors, step.query, step.key, step.value, step.cache, metadata, out)
    want = step.want(causal=True, softmax_scale=0.3).half()
    torch.testing.assert_close(out[: sum(QUERIES)], want, rtol=2e-3, atol=2e-3)
    assert (layers[0] == 77).all() and (layers[2] == 77).all()


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ({"sliding_window": 3}, {"window": (2, 0)}),
        ({"logits_soft_cap": 2.0}, {"softcap": 2.0}),
        ({"alibi_slopes": [0.5, 0.25, 0.1, 0.0]}, {"alibi_slopes": [0.5, 0.25, 0.1, 0.0]}),
        ({"sinks": [1.0, -1.0, 0.5, 0.0]}, {"sinks": [1.0, -1.0, 0.5, 0.0]}),
    ],
)
def test_score_modifications(given: dict[str, Any], options: dict[str, Any]) -> None:
    if "sinks" in given:
        given = {"sinks": torch.nn.Parameter(torch.tensor(given["sinks"], dtype=torch.bfloat16))}
    step = Step()
    options = {k: torch.tensor(v) if isinstance(v, list) else v for k, v in options.items()}
    found, want = run(layer(**given), step), step.want(causal=True, softmax_scale=0.3, **options)
    torch.testing.assert_close(found, want.float(), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(found, step.want(causal=True, softmax_scale=0.3).float(), atol=1e-3)


@pytest.mark.parametrize(("window", "option"), [(None, (None, None)), (3, (2, 2))])
def test_not_causal(window: Any, option: Any) -> None:
    step = Step()
    found = run(layer(sliding_window=window), step, causal=False)
    want = step.want(softmax_scale=0.3, window=option)
    torch.testing.assert_close(found, want.float(), rtol=1e-5, atol=1e-5)
    with pytest.raises(NotImplementedError, match="causal is a tensor"):
        step.metadata(causal=torch.ones(4, dtype=torch.int32))


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3"])
@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_caches_of_8_bits(order: str, name: str) -> None:
    """Bytes of e4m3, and a layer's factors in tensors that are read when they are needed."""
    step, dtype = Step(order, torch.float16), torch.float8_e4m3fn
    factors = SimpleNamespace(_k_scale=torch.tensor(1.0), _v_scale=torch.tensor([3.0]))
    impl = layer(kv_cache_dtype=name)
    factors._k_scale.fill_(0.5)
    scale = torch.cat([torch.full((DIM,), 0.5), torch.full((DIM,), 3.0)])
    step.cache = (step.cache / scale).to(dtype).view(torch.uint8)
    rounded = [
        tuple(((x / s).to(dtype).float() * s).half() for x, s in ((k, 0.5), (v, 3.0)))
        for k, v in step.dense
    ]
    exact, step.dense = step.dense, rounded
    metadata = step.metadata()
    impl.do_kv_cache_update(factors, step.key, step.value, step.cache, metadata.slot_mapping)
    out = torch.full_like(step.query, 7.0)
    impl.forward(factors, step.query, step.key, step.value, step.cache, metadata, out)
    tokens = sum(QUERIES)
    assert (out[tokens:] == 7.0).all()
    want = step.want(causal=True, softmax_scale=0.3).half()
    torch.testing.assert_close(out[:tokens], want, rtol=2e-3, atol=2e-3)
    step.dense = exact
    want = step.want(causal=True, softmax_scale=0.3).half()
    assert not torch.allclose(out[:tokens], want, rtol=2e-3, atol=2e-3)


def test_slots_of_no_token_are_skipped() -> None:
    """Padded steps have slots of -1, and keys behind those that have slots."""
    step = Step()
    slots = step.common.slot_mapping.clone()
    slots[[1, 6]] = -1
    before = step.cache.clone()
    layer().do_kv_cache_update(LAYER, step.key, step.value, step.cache, slots)
    written = set(slots.tolist()) - {-1}
    for place in range(12 * BLOCK):
        row, old = (x[place // BLOCK, :, place % BLOCK] for x in (step.cache, before))
        if place in written:
            i = slots.tolist().index(place)
            assert torch.equal(row, torch.cat([step.key[i], step.value[i]], -1))
        else:
            assert torch.equal(row.isnan(), old.isnan())
            assert torch.equal(row.nan_to_num(), old.nan_to_num())


def test_requests_of_padding() -> None:
    """A CUDA graph's batch has more requests than there are: no queries, no keys."""
    step = Step()
    common = step.common
    more = torch.tensor([sum(QUERIES)] * 2, dtype=torch.int32)
    found = run(
        layer(),
        step,
        query_start_loc=torch.cat([common.query_start_loc, more]),
        seq_lens=torch.cat([common.seq_lens, torch.zeros(2, dtype=torch.int32)]),
        block_table_tensor=torch.cat([step.table, step.table[:2]]),
        num_reqs=6,
    )
    want = step.want(causal=True, softmax_scale=0.3).float()
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)


def test_the_run_that_measures_memory() -> None:
    step, impl = Step(), layer()
    out = torch.full_like(step.query, float("nan"))
    empty = torch.empty(0)
    assert impl.forward(LAYER, step.query, step.key, step.value, empty, None, out) is out
    assert (out == 0).all()


def test_metadata_refers_to_what_vllm_updates() -> None:
    step, made = Step(), builder()
    assert made.get_cudagraph_support(None, None).name == "ALWAYS"
    metadata = made.build(0, step.common)
    assert metadata.seq_lens is step.common.seq_lens
    assert metadata.block_table is step.common.block_table_tensor
    assert metadata.max_seq_len == 4 * BLOCK
    step.common.max_seq_len = 3
    assert made.build(0, step.common).max_seq_len == 3
    captured = made.build_for_cudagraph_capture(step.common)
    assert captured.max_seq_len == 4 * BLOCK  # replays may have as many keys as there is room for
    other = made.update_block_table(metadata, step.table[:, :2], step.common.slot_mapping[:3])
    assert other.block_table.shape == (4, 2) and metadata.block_table.shape == (4, 4)
    assert other.seq_lens is metadata.seq_lens and len(other.slot_mapping) == 3
    made.update_draft_decode_metadata(metadata)


def test_batch_invariance(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bool, int]] = []
    attend = dlattn.attention_varlen

    def counted(*arguments: Any, **options: Any) -> Any:
        seen.append((options["batch_invariant"], arguments[5]))
        return attend(*arguments, **options)

    monkeypatch.setattr(dlattn, "attention_varlen", counted)
    run(layer(), Step())
    monkeypatch.setattr(integration.envs, "VLLM_BATCH_INVARIANT", True, raising=False)
    run(layer(), Step())
    assert seen == [(False, max(QUERIES)), (True, max(QUERIES))]


def test_refusals() -> None:
    with pytest.raises(NotImplementedError, match=r"kv_cache_dtype is 'fp8_e5m2'; .* accepts auto"):
        layer(kv_cache_dtype="fp8_e5m2")
    with pytest.raises(NotImplementedError, match=r"attn_type is 'encoder_only'"):
        layer(attn_type="encoder_only")
    step, impl = Step(), layer()
    with pytest.raises(NotImplementedError, match="no quantized output"):
        impl.forward(
            LAYER,
            step.query,
            step.key,
            step.value,
            step.cache,
            step.metadata(),
            torch.empty_like(step.query),
            output_scale=torch.ones(1),
        )
