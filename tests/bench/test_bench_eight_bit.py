"""The benchmark's 8-bit set: its tensors, its peers (made up, as they need a GPU), its figures."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from quick_bench import run_bench, run_to_json

import dlattn
from dlattn.bench import accuracy, eight_bit, figures, peers, plot, precision, report
from dlattn.bench.cases import FLOAT8, Case
from dlattn.bench.features import Context
from dlattn.bench.precision import ALONE, KEPT, PRECISIONS
from dlattn.cli import main

torch = pytest.importorskip("torch")

from dlattn.bench import cudnn_fp8, tensors  # noqa: E402

Captured = pytest.CaptureFixture[str]

pytestmark = pytest.mark.usefixtures("instant")


def problem(causal: bool = False, heads_kv: int = 2, dtype: str = "float32") -> peers.Problem:
    case = Case((2, 4, 40, 16), causal, dtype, heads_kv)
    return peers.Problem(case, *tensors.draw(case, "cpu"))


def packed(lengths: tuple[int, ...], causal: bool) -> peers.Problem:
    case = Case((len(lengths), 4, max(lengths), 16), causal, "float32", 2, "varlen")
    drawn = tensors.draw(replace(case, sizes=(1, 4, sum(lengths), 16)), "cpu")
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in drawn)
    starts = torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=torch.int32)
    return peers.Problem(case, q, k, v, varlen=peers.Varlen(lengths, starts))


# Tensors and exact results


def test_float8_has_the_values_but_for_its_rounding() -> None:
    wide = problem()
    narrow = eight_bit.to_float8(wide)
    assert narrow.case.dtype == FLOAT8
    for name in ("q", "k", "v"):
        x, descale = getattr(narrow, name), narrow.options[f"{name}_descale"]
        assert x.dtype == torch.float8_e4m3fn
        assert (tuple(descale.shape), descale.dtype) == ((2, 2), torch.float32)
        assert float(x.float().abs().max()) == 448
        back = tensors.dequantised(x, descale, torch.float64)
        assert float((back - getattr(wide, name)).abs().max()) <= 2**-4 * float(back.abs().max())
    several = packed((5, 9, 1), causal=True)
    assert tuple(eight_bit.to_float8(several).options["k_descale"].shape) == (3, 2)


@pytest.mark.parametrize("causal", [False, True])
def test_the_exact_result_is_of_the_dequantised_tensors(causal: bool) -> None:
    narrow = eight_bit.to_float8(problem(causal))
    options = dict(narrow.options)
    for i, name in enumerate(tensors.DESCALES):  # one for each head, none like the other
        options[name] = options[name] * torch.tensor([[1.0, 2.0], [3.0, 5.0]]) * (i + 1)
    back = [
        tensors.dequantised(getattr(narrow, name[0]), options[name], torch.float64)
        for name in tensors.DESCALES
    ]
    want, want_lse = tensors.attention(back[0], back[1], back[2], causal=causal)
    out, lse = tensors.attention(narrow.q, narrow.k, narrow.v, causal=causal, **options)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)


def rounded_weights(q: Any, k: Any, v: Any, causal: bool) -> Any:
    """Attention whose weights are rounded to e4m3 relative to their row's maximum."""
    x = q @ k.repeat_interleave(2, 1).transpose(2, 3) / math.sqrt(q.shape[3])
    if causal:
        x = x.masked_fill(torch.ones(x.shape[2:]).triu(1).bool(), -math.inf)
    p = torch.exp(x - x.amax(3, keepdim=True))
    weights = (p * 448).to(torch.float8_e4m3fn).double() / 448
    return weights @ v.repeat_interleave(2, 1) / p.sum(3, keepdim=True)


@pytest.mark.parametrize("causal", [False, True])
def test_the_bound_is_that_of_rounded_weights(causal: bool) -> None:
    narrow = eight_bit.to_float8(problem(causal))
    asked = {"causal": causal, **narrow.options}
    inputs = (narrow.q, narrow.k, narrow.v)
    expected = tensors.Expected(*inputs, asked)
    plain, _ = tensors.attention(*inputs, plain=True, **asked)
    assert 0.1 < expected.errors(plain)[1] <= 0.51
    back = [
        tensors.dequantised(x, narrow.options[name], torch.float64)
        for x, name in zip(inputs, tensors.DESCALES, strict=True)
    ]
    assert expected.errors(rounded_weights(*back, causal))[1] < 1
    wrong = {**asked, "v_descale": asked["v_descale"] * 1.5}
    assert expected.errors(tensors.attention(*inputs, **wrong)[0])[1] > 1


def test_a_sample_and_packed_sequences_take_their_descales(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    narrow = eight_bit.to_float8(problem())
    options = dict(narrow.options)
    options["v_descale"] = options["v_descale"] * torch.tensor([[1.0, 2.0], [3.0, 5.0]])
    inputs = (narrow.q, narrow.k, narrow.v)
    exact, _ = tensors.attention(*inputs, **options)
    monkeypatch.setattr(tensors, "_ALL_SCORES", 100)
    monkeypatch.setattr(tensors, "_SAMPLE_ROWS", 6)
    assert tensors.Expected(*inputs, options).errors(exact)[1] < 1e-3

    lengths = (5, 1, 9, 3)
    narrow = eight_bit.to_float8(packed(lengths, causal=True))
    options = {"causal": True, **narrow.options}
    options["q_descale"] = options["q_descale"] * torch.arange(1.0, 9.0).reshape(4, 2)
    inputs = (narrow.q, narrow.k, narrow.v)
    outs = []
    for b, end in enumerate(np.cumsum(lengths)):
        part = [x[end - lengths[b] : end].transpose(0, 1)[None] for x in inputs]
        own = {name: options[name][b : b + 1] for name in tensors.DESCALES}
        outs.append(tensors.attention(*part, causal=True, **own)[0][0].transpose(0, 1))
    expected = tensors.ExpectedVarlen(*inputs, lengths, options)
    assert expected.errors(torch.cat(outs))[1] < 1e-3
    assert expected.errors(torch.cat(outs) * 1.5)[1] > 1


# cuDNN's frontend, made up


class FakeTensor:
    """A tensor of a graph: sizes, strides, and that an output has them set."""

    def __init__(self, uid: int, dim: Any = None, stride: Any = None, data_type: Any = None):
        self.uid, self.dim, self.stride, self.data_type = uid, dim, stride, data_type
        self.output, self.offset = False, None

    def get_uid(self) -> int:
        return self.uid

    def set_output(self, yes: bool) -> FakeTensor:
        self.output = yes
        return self

    def set_dim(self, dim: Any) -> FakeTensor:
        self.dim = dim
        return self

    def set_stride(self, stride: Any) -> FakeTensor:
        self.stride = stride
        return self

    def set_data_type(self, data_type: Any) -> FakeTensor:
        self.data_type = data_type
        return self

    def set_ragged_offset(self, offset: FakeTensor) -> None:
        self.offset = offset


class FakeGraph:
    """Computes what the frontend's documentation says of sdpa_fp8, sequence by sequence."""

    built: list[str]

    def __init__(self, **about: Any) -> None:
        assert about["handle"] == 7
        self.tensors: list[FakeTensor] = []
        self.built = []

    def tensor(self, *, name: str, dim: Any, stride: Any, data_type: Any) -> FakeTensor:
        self.tensors.append(FakeTensor(len(self.tensors), list(dim), list(stride), data_type))
        return self.tensors[-1]

    def sdpa_fp8(self, **given: Any) -> list[Any]:
        assert given["generate_stats"] is False
        self.given = given
        self.outputs = [FakeTensor(100), FakeTensor(101), FakeTensor(102)]
        return [self.outputs[0], None, *self.outputs[1:]]

    def __getattr__(self, name: str) -> Any:
        if name not in ("validate", "build_operation_graph", "create_execution_plans"):
            assert name in ("check_support", "build_plans"), name
        return lambda *_: self.built.append(name)

    def get_workspace_size(self) -> int:
        return 0

    def execute(self, memory: dict[int, Any], workspace: Any, handle: int) -> None:
        assert self.built[-1] == "build_plans" and handle == 7 and workspace.numel() == 1
        given = self.given
        scale = {name: memory[given[name].uid] for name in cudnn_fp8._SCALES}
        assert all(x.shape == (1,) and x.dtype == torch.float32 for x in scale.values())
        out_tensor = self.outputs[0]
        assert out_tensor.output and all(x.dim == [1] * 4 for x in self.outputs[1:])
        batch_size = given["q"].dim[0]
        largest = 0.0
        for b in range(batch_size):
            views = [self._view(given[name], memory, b) for name in ("q", "k", "v")]
            q, k, v = (
                x.double() * scale[f"descale_{name}"].double()
                for x, name in zip(views, "qkv", strict=True)
            )
            x = q @ k.repeat_interleave(q.shape[0] // k.shape[0], 0).mT * given["attn_scale"]
            if given.get("right_bound") == 0:
                x = x.masked_fill(torch.ones(x.shape[1:]).triu(1).bool(), -math.inf)
            p = torch.exp(x - x.amax(2, keepdim=True))
            weights = (p * scale["scale_s"]).to(torch.float8_e4m3fn).double() * scale["descale_s"]
            out = weights @ v.repeat_interleave(q.shape[0] // v.shape[0], 0)
            out /= p.sum(2, keepdim=True)
            largest = max(largest, float(out.abs().max()))
            where = self._view(out_tensor, memory, b)
            where.copy_((out * scale["scale_o"]).to(torch.float8_e4m3fn))
        memory[102].fill_(largest)

    def _view(self, tensor: FakeTensor, memory: dict[int, Any], b: int) -> Any:
        """One batch entry's, (heads, seqlen, dim)."""
        x, sizes, strides = memory[tensor.uid], list(tensor.dim[1:]), tensor.stride[1:]
        if tensor.offset is None:
            return x.as_strided(sizes, strides, b * tensor.stride[0])
        assert self.given["use_padding_mask"]
        sizes[1] = int(memory[self.given["seq_len_q"].uid][b])
        return x.as_strided(sizes, strides, int(memory[tensor.offset.uid][b]))


def fake_cudnn() -> Any:
    types = SimpleNamespace(FP8_E4M3="fp8", FLOAT="float", INT64="int64", INT32="int32")
    return SimpleNamespace(
        data_type=types,
        heur_mode=SimpleNamespace(A=0, FALLBACK=1),
        diagonal_alignment=SimpleNamespace(TOP_LEFT=0),
        set_stream=lambda handle, stream: None,
        pygraph=FakeGraph,
    )


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn_fp8, "_handle", lambda: 7)
    monkeypatch.setitem(sys.modules, "cudnn", fake_cudnn())
    stream = SimpleNamespace(cuda_stream=0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)


@pytest.mark.usefixtures("cudnn")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("varlen", [False, True])
def test_cudnn_fp8(causal: bool, varlen: bool) -> None:
    narrow = eight_bit.to_float8(packed((7, 12, 30), causal) if varlen else problem(causal))
    bound = cudnn_fp8.bind(narrow)
    inputs = (narrow.q, narrow.k, narrow.v)
    options = {"causal": causal, **narrow.options}
    expected: Any = tensors.Expected
    if narrow.varlen is not None:
        expected = tensors.ExpectedVarlen(*inputs, narrow.varlen.lengths, options)
    else:
        expected = tensors.Expected(*inputs, options)
    assert bound.checked is not None and bound.averaged is not None
    once, averaged = expected.errors(bound.checked())[1], expected.errors(bound.averaged())[1]
    assert averaged < 1.5 and averaged < once < 6  # the result is rounded to e4m3
    assert bound.call().dtype == torch.float8_e4m3fn
    assert 224 < float(bound.call().float().abs().max()) <= 448


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("varlen", [False, True])
def test_cudnn_fp8_on_a_gpu(head_dim: int, causal: bool, varlen: bool) -> None:
    pytest.importorskip("cudnn")
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("cuDNN has float8 attention from compute capability 9.0 on")
    case = Case((2, 4, 512, head_dim), causal, "float32", 2)
    asked = peers.Problem(case, *tensors.draw(case, "cuda"))
    if varlen:
        lengths = (512, 384)
        q, k, v = (
            torch.cat([x[b, :, :n].transpose(0, 1) for b, n in enumerate(lengths)])
            for x in (asked.q, asked.k, asked.v)
        )
        starts = torch.tensor([0, 512, 896], dtype=torch.int32, device="cuda")
        asked = peers.Problem(case, q, k, v, varlen=peers.Varlen(lengths, starts))
    narrow = eight_bit.to_float8(asked)
    inputs, options = (narrow.q, narrow.k, narrow.v), {"causal": causal, **narrow.options}
    expected: Any = tensors.Expected(*inputs, options) if not varlen else None
    if narrow.varlen is not None:
        expected = tensors.ExpectedVarlen(*inputs, narrow.varlen.lengths, options)
    bound = cudnn_fp8.bind(narrow)
    assert bound.checked is not None and bound.averaged is not None
    # A wrong scale or layout is off by a hundred times the bound; e4m3 results by some.
    assert expected.errors(bound.checked())[1] < 10
    assert expected.errors(bound.averaged())[1] < 5


@pytest.mark.usefixtures("cudnn")
def test_what_cudnn_fp8_does_not_take() -> None:
    narrow = eight_bit.to_float8(problem())
    with pytest.raises(peers.UnavailableError, match="takes float8 tensors only"):
        cudnn_fp8.bind(problem())
    with pytest.raises(peers.UnavailableError, match="is timed without softcap"):
        cudnn_fp8.bind(replace(narrow, options={**narrow.options, "softcap": 1.0}))
    several = narrow.options["k_descale"] * torch.tensor([[1.0, 2.0]])
    with pytest.raises(peers.UnavailableError, match="one scale for each tensor"):
        cudnn_fp8.bind(replace(narrow, options={**narrow.options, "k_descale": several}))
    without = cudnn_fp8.bind(replace(narrow, options={}))
    with_ones = {name: torch.ones(2, 2) for name in tensors.DESCALES}
    assert torch.equal(
        without.call().float(), cudnn_fp8.bind(replace(narrow, options=with_ones)).call().float()
    )


def test_peers_that_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cudnn", None)
    monkeypatch.setitem(sys.modules, "comfy_kitchen", None)
    with pytest.raises(peers.UnavailableError, match="nvidia-cudnn-frontend is not installed"):
        cudnn_fp8.bind(eight_bit.to_float8(problem()))
    with pytest.raises(peers.UnavailableError, match="comfy-kitchen is not installed"):
        peers.COMFY_INT8.bind(problem())


def test_comfy_int8(monkeypatch: pytest.MonkeyPatch) -> None:
    sdpa = torch.nn.functional.scaled_dot_product_attention
    available = [True]
    module = SimpleNamespace(
        int8_attention=lambda q, k, v: sdpa(q, k, v, enable_gqa=True),
        int8_attention_is_available=lambda device: available[0],
    )
    monkeypatch.setitem(sys.modules, "comfy_kitchen", module)
    asked = problem()
    out = peers.COMFY_INT8.bind(asked).call()
    assert tensors.Expected(asked.q, asked.k, asked.v, {}).errors(out)[1] <= 1
    with pytest.raises(peers.UnavailableError, match="without a causal mask"):
        peers.COMFY_INT8.bind(problem(causal=True))
    available[0] = False
    with pytest.raises(peers.UnavailableError, match="no int8 attention for this device"):
        peers.COMFY_INT8.bind(asked)


# A whole run


def test_run(tmp_path: Any, capsys: Captured) -> None:
    document = run_to_json(tmp_path, "--shape", "eight_bit")
    printed = capsys.readouterr().out
    results = {
        (r["contestant"], r["dtype"], r["causal"], r["variant"]): r for r in document["results"]
    }
    for causal in (False, True):
        float8 = results["dlattn auto", FLOAT8, causal, ""]
        assert float8["seconds"] > 0, float8["note"]
        assert float8["bound_ratio"] <= 1
        assert float8["baseline"] == "cudnn-fp8"
        assert set(float8["facts"]) == {"vs dlattn auto float32", "vs torch float32"}
        missing = results["cudnn-fp8", FLOAT8, causal, ""]
        assert missing["seconds"] is None
        assert "nvidia-cudnn-frontend is not installed" in missing["note"]
        assert results["torch", "float32", causal, ""]["seconds"] > 0
        (varlen,) = (
            r for key, r in results.items() if key[0][:6] == "dlattn" and key[2] is causal
            and key[3].startswith("varlen")
        )  # fmt: skip
        assert varlen["baseline"] == "dlattn auto, one length"
        assert varlen["vs_baseline"] > 0
    found = document["eight_bit"]
    (fixed,) = (
        line for line in found["summary"]
        if (line["cases_of"], line["ratio"]) == ("head_dim 16", "vs dlattn auto float32")
    )  # fmt: skip
    assert fixed["cases"] == 2 and fixed["least"] <= fixed["geometric_mean"]
    mean = {entry["scheme"]: entry for entry in found["mean_of_v"]}
    assert mean["dlattn auto float8_e4m3fn"]["mean_ratio"] == pytest.approx(1, abs=1e-3)
    assert "not installed" in mean["cudnn-fp8 float8_e4m3fn"]["note"]
    errors = {(e["scheme"], e["distribution"], e["head_dim"]): e for e in found["distributions"]}
    assert {key[1] for key in errors} == set(accuracy.KINDS)
    assert 0.03 < errors["dlattn auto float8_e4m3fn", "noise", 128]["relative_l2"] < 0.06
    assert errors["dlattn auto float32", "noise", 128]["relative_l2"] < 1e-5
    assert len(found["dequantised"]) == 4  # ours and cuDNN's, full and causal
    assert "geometric mean" in printed and "mean of V ~ N(1,1) that is left" in printed
    assert "noise, 128" in printed
    assert report.from_json(document)

    for asked in PRECISIONS:
        name = f"dlattn precision={asked}"
        for causal in (False, True):
            for variant in ("", KEPT):
                found = results[name, "bfloat16", causal, variant]
                assert found["seconds"] > 0, found["note"]
                assert 0.01 < found["bound_ratio"] <= 1
                assert (found["baseline"], found["note"]) == ("dlattn auto", "")
                assert found["vs_baseline"] > 0
            assert results[name, "bfloat16", causal, ""]["facts"].keys() == {"vs torch float32"}
        entry = errors[f"{name} float16", "noise", 128]
        half = asked == "int8_fp16"  # of v, and of probabilities on a GPU
        least, most = (0.005, 0.02) if half else (0.02, 0.06)
        assert least < entry["relative_l2"] < most
        assert least < entry["relative_l1"] < most
        assert least**2 / 2 < entry["one_minus_cosine"] < most**2 / 1.5
        assert mean[f"{name} float16"]["mean_ratio"] == pytest.approx(1, abs=5e-3)
        alone = results[f"dlattn quantize_kv {asked}", "bfloat16", False, ALONE]
        moved = (3 + (4 if half else 3)) * 2 * 96 * 16
        assert alone["facts"] == {"bytes": moved}
        assert (alone["tflops"], alone["bound_ratio"] <= 1) == (0, True)
        (rate,) = (
            line for line in document["eight_bit"]["quantising"]
            if line["contestant"] == alone["contestant"]
        )  # fmt: skip
        assert rate["gb_per_s"] == pytest.approx(moved / alone["seconds"] / 1e9)
        copy = document["ceiling"]["copy_gb_per_s"]
        assert rate["of_copy"] == pytest.approx(rate["gb_per_s"] / copy)
        assert rate["reached"] is (rate["of_copy"] >= 0.8)
    (fixed,) = (
        line for line in document["eight_bit"]["summary"]
        if (line["contestant"], line["ratio"]) == ("dlattn precision=fp8", "vs dlattn auto")
        and line["cases_of"] == "head_dim 16"
    )  # fmt: skip
    assert fixed["cases"] == 2
    assert "dlattn quantize_kv int8_fp8" in printed and "of a copy's" in printed
    assert "relative L1 error" in printed and "1 - cosine" in printed

    path = tmp_path / "bench.json"
    page = figures.figures_markdown([path], tmp_path)
    assert "| mean of V ~ N(1,1) that is left | (1,1,128,16) |" in page
    assert "| dlattn auto float8_e4m3fn | 1.0000 |" in page


def test_a_part_of_it(tmp_path: Any, capsys: Captured) -> None:
    arguments = ("--shape", "eight_bit", "--only", "varlen", "--full", "--peers")
    document = run_to_json(tmp_path, *arguments)
    assert {r["contestant"] for r in document["results"]} == {"dlattn auto"}
    assert not any(r["causal"] for r in document["results"])
    assert set(document["eight_bit"]) == {"summary", "quantising"}
    assert run_bench("--shape", "eight_bit", "--peers", "fa4") == 2
    assert "--peers fa4; accepted here: cudnn-fp8, torch" in capsys.readouterr().err


def test_quantising_alone(tmp_path: Any) -> None:
    document = run_to_json(tmp_path, "--shape", "eight_bit", "--only", "quantize", "--causal")
    assert [(r["contestant"], r["variant"], r["causal"]) for r in document["results"]] == [
        ("dlattn precision=int8_fp8", KEPT, True),
        ("dlattn quantize_kv int8_fp8", ALONE, True),
        ("dlattn precision=fp8", KEPT, True),
        ("dlattn quantize_kv fp8", ALONE, True),
        ("dlattn precision=int8_fp16", KEPT, True),
        ("dlattn quantize_kv int8_fp16", ALONE, True),
        ("dlattn auto", "", True),
    ]


@pytest.mark.gpu
def test_precisions_on_a_gpu(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = (((1, 4, 512, 64), 2),)
    small = replace(eight_bit.SCALES["cpu"], fixed=sizes, seqlen=512, quantised=sizes)
    monkeypatch.setitem(eight_bit.SCALES, "cuda", small)
    path = tmp_path / "bench.json"
    command = ["bench", "--quick", "--device", "cuda", "--json", str(path), "--shape", "eight_bit"]
    assert main([*command, "--only", "head_dim 64", "quantize"]) == 0
    document = json.loads(path.read_text())
    found = [r for r in document["results"] if "precision" in r["contestant"]]
    assert len(found) == 12  # three precisions, two masks, quantised in the call and before
    capability = torch.cuda.get_device_capability()
    for result in found:
        int8 = "int8_fp8" in result["contestant"]
        half = "int8_fp16" in result["contestant"]
        if capability == (9, 0) or half or (int8 and capability > (8, 8)):
            assert result["seconds"], result["note"]
        assert result["seconds"] or result["note"]
        emulated = capability == (9, 0) and result["plan"].startswith("wmma8") and not half
        assert ("emulation" in result["note"]) is emulated


@pytest.mark.parametrize("causal", [False, True])
def test_the_bound_of_a_precision(causal: bool) -> None:
    """The library's results are within it, a wrong scale of v or of the scores is not."""
    asked = precision.in_precision(problem(causal), "fp8")
    assert asked.case.dtype == "bfloat16" and asked.q.dtype == torch.bfloat16
    inputs, options = (asked.q, asked.k, asked.v), {**asked.options, "causal": causal}
    expected = tensors.Expected(*inputs, options)
    for name in PRECISIONS:
        bound = precision.computing_in(name).bind(precision.in_precision(asked, name))
        assert bound.checked is not None and bound.note == ""
        assert expected.errors(bound.checked())[1] <= 1
        torch.testing.assert_close(bound.call(), bound.checked())
        kept = precision.attending_to_kept(name).bind(precision.in_precision(asked, name))
        torch.testing.assert_close(kept.call(), bound.call())
    exact = expected.errors(tensors.attention(*inputs, causal=causal)[0])
    assert exact[0] < 1e-6
    assert expected.errors(1.2 * tensors.attention(*inputs, causal=causal)[0])[1] > 1
    scores, _ = tensors.attention(*inputs, causal=causal, softmax_scale=0.5)
    assert expected.errors(scores)[1] > 1


def test_a_precision_that_is_not_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = precision.in_precision(problem(), "int8_fp8")
    no = dlattn.Support(False, ("wmma8: compute capability is 8.0; accepted: from 8.9 on",))
    monkeypatch.setattr(dlattn, "supported", lambda *_, **__: no)
    for contestant in (
        precision.computing_in("int8_fp8"),
        precision.attending_to_kept("int8_fp8"),
        precision.quantising("int8_fp8"),
    ):
        with pytest.raises(peers.UnavailableError, match=r"capability is 8\.0"):
            contestant.bind(asked)


def test_emulation_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = precision.in_precision(problem(), "int8_fp8")
    plan = SimpleNamespace(kernel="wmma8", variant="")
    monkeypatch.setattr(dlattn, "plan", lambda *_, **__: plan)
    for capability, told in (((9, 0), True), ((8, 9), False), (None, False)):
        monkeypatch.setattr(precision, "_capability", lambda _, found=capability: found)
        note = precision.computing_in("int8_fp8").bind(asked).note
        assert ("emulation" in note) is told
        assert precision.computing_in("int8_fp16").bind(asked).note == ""


def test_rates_of_quantising() -> None:
    case = Case((1, 16, 8192, 128), False, "bfloat16", variant=ALONE)
    results = [
        report.Result(case, "dlattn quantize_kv fp8", True, times=[s], facts={"bytes": 4e9})
        for s in (1.0, 2.0)
    ]
    results.append(replace(results[0], case=replace(case, variant=KEPT)))
    lines = precision.quantising_rates(results, copy_gb_per_s=4.9)
    assert [(line["gb_per_s"], line["reached"]) for line in lines] == [(4.0, True), (2.0, False)]
    _, rows = precision.rates_table(lines)
    assert rows[1][2:] == ["4e+03 MB", "2.00 s", "2 GB/s", "0.41", "no"]


def test_the_set() -> None:
    context = Context("cuda", "bfloat16", [], None)
    groups = eight_bit.groups(context)
    assert {name: len(members) for name, members in groups.items()} == {
        "head_dim 128": 16,
        "head_dim 64": 4,
        "head_dim 256": 2,
        "varlen": 4,
        "quantize": 7,  # the longest for quantize_kv alone, which knows no mask
    }
    only = eight_bit.groups(replace(context, head_dims=[64], masks=[True]))
    assert {name: len(members) for name, members in only.items()} == {
        "head_dim 64": 2,
        "varlen": 0,
        "quantize": 1,
    }
    wide = ["torch-cudnn", "comfy-int8", "sageattention"]
    assert [x.name for x in eight_bit.peers(context).wide] == wide


def panels_of(document: dict[str, Any], path: Any) -> list[set[str]]:
    """Draws, and returns the labels of each panel's lines and points."""
    from matplotlib import pyplot

    figures = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pyplot, "close", figures.append)
        plot.draw(document, path)
    panels = [{str(x.get_label()) for x in a.lines} for a in figures[0].axes if a.get_visible()]
    pyplot.close(figures[0])
    return panels


def test_plot(tmp_path: Any) -> None:
    pytest.importorskip("matplotlib")
    results = []
    for seqlen in (4096, 8192):
        for name, ours, dtype in (
            ("dlattn auto", True, FLOAT8),
            ("dlattn auto", True, "bfloat16"),
            ("cudnn-fp8", False, FLOAT8),
        ):
            case = Case((1, 16, seqlen, 128), False, dtype)
            results.append(report.Result(case, name, ours, 0.0, 0.1, [1e-3], vs_baseline=1.0))
    at_one_length = replace(results[-1], case=Case((1, 16, 8192, 128), False, "bfloat16"))
    results.append(replace(at_one_length, contestant="dlattn precision=fp8"))
    alone = replace(at_one_length.case, variant=ALONE)
    results.append(replace(results[-1], case=alone, operations=0.0, vs_baseline=None))
    results.append(replace(results[0], case=Case((1, 8, 8192, 256), False, FLOAT8)))
    about = {
        "date": "2026-01-01T00:00:00",
        "git": {"sha": None, "dirty": None},
        "machine": {"cpu": "x"},
        "versions": {"dlattn": "0"},
    }
    protocol = {"method": "", "threads": None}
    ceiling = {"matmul": "a product", "tflops": 1.0, "float8_tflops": 2.0}
    document = report.to_json(about, protocol, ceiling, results, {})
    mean = {"shape": [1, 4, 2048, 128], "scheme": f"cudnn-fp8 {FLOAT8}", "mean_ratio": 0.9}
    error = {"distribution": "noise", "head_dim": 128, "relative_l2": 0.05}
    about_errors = [
        {**error, "scheme": f"dlattn auto {FLOAT8}"},
        {**error, "scheme": "dlattn auto float16", "relative_l2": 3e-4},
        {**error, "scheme": f"cudnn-fp8 {FLOAT8}", "distribution": "outliers"},
    ]
    document["eight_bit"] = {"summary": [], "mean_of_v": [mean], "distributions": about_errors}
    drawn = panels_of(document, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000
    sweep, of_mean, of_errors = drawn
    # A contestant that ran at one length alone makes no line.
    assert sweep == {f"dlattn auto {FLOAT8}", "dlattn auto bfloat16", f"cudnn-fp8 {FLOAT8}"}
    assert len(of_mean) == 1
    assert of_errors == {f"dlattn auto {FLOAT8}", "dlattn auto 16 bits"}
    del document["eight_bit"]["mean_of_v"]
    document["results"] = document["results"][-1:]  # of one length there are bars
    plot.draw(document, tmp_path / "bars.png")
    assert (tmp_path / "bars.png").stat().st_size > 5_000


def test_percentages_of_float8_are_of_its_own_ceiling() -> None:
    case = Case((1, 16, 4096, 128), False, FLOAT8)
    results = [report.Result(case, "a", True, 0.0, 0.1, [case.flops / 1e12])]
    results.append(replace(results[0], case=replace(case, dtype="bfloat16")))
    ceiling = {"matmul": "a product", "tflops": 4.0, "mma_sync_tflops": 3.0, "copy_gb_per_s": 1.0}
    printed = report.print_results(results, {**ceiling, "float8_tflops": 2.0})
    assert [line.split()[-2] for line in printed.splitlines()[2:5:2]] == ["50.0", "25.0"]
    assert "2.00 TFLOP/s (float8 product)" in printed


# Accuracy


def test_distributions() -> None:
    made = {kind: accuracy.make(kind, 128) for kind in accuracy.KINDS}
    for q, k, v in made.values():
        assert (q.shape, k.shape, v.shape) == ((512, 128), (2048, 128), (2048, 128))
        assert q.dtype == np.float32 and np.array_equal(q, q.astype(np.float16))
    q, k, _ = made["sink"]
    x = q @ k.T / math.sqrt(128)
    assert (x[:, :4].mean() - x[:, 4:].mean()) == pytest.approx(8, abs=0.3)
    q, k, _ = made["peaked"]
    assert (q @ k.T / math.sqrt(128)).std() == pytest.approx(4, rel=0.05)
    _, k, v = made["biases"]
    assert k.mean(0).std() == pytest.approx(5, rel=0.2)
    assert v.mean(0).std() == pytest.approx(1, rel=0.2)
    assert np.abs(made["outliers"][1]).max() > 20
    assert (made["channels"][1].std(0) > 6).sum() == 4
    again = accuracy.make("outliers", 128)
    assert all(np.array_equal(a, b) for a, b in zip(again, made["outliers"], strict=True))


def test_errors() -> None:
    exact = np.array([3.0, 4.0])
    found = accuracy.errors(np.array([3.0, 4.5]), exact)
    assert found.relative_l2 == pytest.approx(0.1)
    assert found.relative_l1 == pytest.approx(0.5 / 7)
    assert found.largest == 0.5
    assert found.one_minus_cosine == pytest.approx(1 - 27 / (5 * math.hypot(3, 4.5)))
    assert accuracy.errors(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == found
