"""Peers with packages that tests' machines lack, and a cuDNN of the user's choice."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from quick_bench import run_bench

from dlattn import bench
from dlattn.bench import cudnn_fp8, cudnn_library, peers, tensors
from dlattn.bench.cases import Case

torch = pytest.importorskip("torch")

Captured = pytest.CaptureFixture[str]


def problem(causal: bool = False, heads_kv: int = 0) -> peers.Problem:
    case = Case((2, 4, 24, 16), causal, "float32", heads_kv)
    return peers.Problem(case, *tensors.draw(case, "cpu"))


def several(causal: bool) -> peers.Problem:
    """Sequences of 5, 12 and 7 tokens."""
    lengths = (5, 12, 7)
    case = Case((3, 4, 12, 16), causal, "float32", 2)
    drawn = tensors.draw(replace(case, sizes=(1, 4, 24, 16)), "cpu")
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in drawn)
    starts = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)
    return peers.Problem(case, q, k, v, varlen=peers.Varlen(lengths, starts))


def sdpa(q: Any, k: Any, v: Any, causal: bool) -> Any:
    """Heads in the second place."""
    function = torch.nn.functional.scaled_dot_product_attention
    return function(q, k, v, is_causal=causal, enable_gqa=True)


def rows_first(q: Any, k: Any, v: Any, *, causal: bool) -> Any:
    return sdpa(*(x.transpose(1, 2) for x in (q, k, v)), causal).transpose(1, 2)


def of_several(q: Any, k: Any, v: Any, *, causal: bool, **lengths: Any) -> Any:
    """A pair, as some versions return."""
    starts = lengths["cu_seqlens_q"].tolist()
    assert starts == lengths["cu_seqlens_k"].tolist()
    assert lengths["max_seqlen_q"] == lengths["max_seqlen_k"] == max(np.diff(starts))
    outs = [
        rows_first(q[None, a:b], k[None, a:b], v[None, a:b], causal=causal)[0]
        for a, b in pairwise(starts)
    ]
    return torch.cat(outs), None


FLASH = SimpleNamespace(flash_attn_func=rows_first, flash_attn_varlen_func=of_several)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("module", ["flash_attn_interface", "fa3_fwd_interface"])
def test_flash_3(monkeypatch: pytest.MonkeyPatch, module: str, causal: bool) -> None:
    for name in ("flash_attn_interface", "fa3_fwd_interface"):
        monkeypatch.setitem(sys.modules, name, FLASH if name == module else None)
    asked = problem(causal, 2)
    expected = tensors.Expected(asked.q, asked.k, asked.v, {"causal": causal})
    assert expected.errors(peers.TORCH_PEERS["fa3"](asked).call())[1] <= 1
    varlen = several(causal)
    assert varlen.varlen is not None
    lengths = varlen.varlen.lengths
    exact = tensors.ExpectedVarlen(varlen.q, varlen.k, varlen.v, lengths, {"causal": causal})
    assert exact.errors(peers.TORCH_PEERS["fa3"](varlen).call())[1] <= 1
    with pytest.raises(peers.UnavailableError, match="plain problems only"):
        peers.TORCH_PEERS["fa3"](replace(asked, options={"softcap": 1.0}))


def test_the_whole_flash_3_comes_before_its_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = SimpleNamespace(flash_attn_func=lambda *_, causal: torch.zeros(2, 24, 4, 16))
    monkeypatch.setitem(sys.modules, "flash_attn_interface", whole)
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", FLASH)
    assert not peers.TORCH_PEERS["fa3"](problem()).call().any()
    for name in ("flash_attn_interface", "fa3_fwd_interface"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(peers.UnavailableError, match="fa3-fwd is not installed"):
        peers.TORCH_PEERS["fa3"](problem())


def test_xformers(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(q: Any, k: Any, v: Any, attn_bias: Any) -> Any:
        return rows_first(q, k, v, causal=attn_bias == "lower")

    module = SimpleNamespace(memory_efficient_attention=attend, LowerTriangularMask=lambda: "lower")
    monkeypatch.setitem(sys.modules, "xformers", SimpleNamespace(__path__=[]))
    monkeypatch.setitem(sys.modules, "xformers.ops", module)
    for causal in (False, True):
        asked = problem(causal)
        expected = tensors.Expected(asked.q, asked.k, asked.v, {"causal": causal})
        assert expected.errors(peers.TORCH_PEERS["xformers"](asked).call())[1] <= 1
    with pytest.raises(peers.UnavailableError, match="as many heads of keys only"):
        peers.TORCH_PEERS["xformers"](problem(heads_kv=2))
    monkeypatch.setitem(sys.modules, "xformers.ops", None)
    with pytest.raises(peers.UnavailableError, match="xformers is not installed"):
        peers.TORCH_PEERS["xformers"](problem())


def test_sageattention_leaves_the_inputs_of_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def sageattn(q: Any, k: Any, v: Any, *, tensor_layout: str, is_causal: bool) -> Any:
        assert tensor_layout == "HND"
        k -= k.mean(dim=2, keepdim=True)
        return sdpa(q, k, v, is_causal)

    monkeypatch.setitem(sys.modules, "sageattention", SimpleNamespace(sageattn=sageattn))
    for causal in (False, True):
        asked = problem(causal, 2)
        before = asked.k.clone()
        expected = tensors.Expected(asked.q, asked.k, asked.v, {"causal": causal})
        bound = peers.SAGE.bind(asked)
        for _ in range(2):
            assert expected.errors(bound.call())[1] <= 1
        assert torch.equal(asked.k, before)
    with pytest.raises(peers.UnavailableError, match="plain problems only"):
        peers.SAGE.bind(several(False))


# cuDNN


@pytest.fixture
def cudnn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as an unpacked wheel, with a library that tells a version."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path / "wheel" / "nvidia" / "cudnn" / "lib"
    folder.mkdir(parents=True)
    source = tmp_path / "cudnn.c"
    source.write_text("unsigned long cudnnGetVersion(void) { return 92801; }\n")
    name = cudnn_library.NAME
    command = [compiler, "-shared", "-fPIC", f"-Wl,-soname,{name}", source, "-o", folder / name]
    subprocess.run(command, check=True)
    monkeypatch.setattr(cudnn_library, "_loaded", [])
    monkeypatch.delitem(sys.modules, "torch")
    return tmp_path / "wheel"


def test_a_named_cudnn_is_the_one_of_its_name(cudnn: Path, tmp_path: Path) -> None:
    """In a process of its own, as a library of that name stays loaded."""
    program = (
        "import ctypes, sys; from pathlib import Path; from dlattn.bench import cudnn_library\n"
        "print(cudnn_library.load(Path(sys.argv[1])))\n"
        "again = ctypes.CDLL(cudnn_library.NAME)\n"  # as torch's libraries ask for it
        "print(again.cudnnGetVersion(), again._handle == cudnn_library.handle())\n"
    )
    for folder in (cudnn, cudnn / "nvidia" / "cudnn", cudnn / "nvidia" / "cudnn" / "lib"):
        done = subprocess.run(
            [sys.executable, "-c", program, folder], check=True, capture_output=True, text=True
        )
        assert done.stdout.split() == ["92801", "92801", "True"]


def test_torch_must_use_it(cudnn: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def torch_with(version: int) -> Any:
        found = SimpleNamespace(version=lambda: version)
        return SimpleNamespace(backends=SimpleNamespace(cudnn=found))

    monkeypatch.setattr(tensors, "torch_module", lambda: torch_with(91900))
    message = f"--cudnn {cudnn}: it is cuDNN 92801, but torch uses 91900"
    with pytest.raises(bench.CommandError, match=message):
        cudnn_library.check(cudnn, 92801)
    cudnn_library.check(cudnn, 91900)


def test_the_frontend_gets_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    handles: list[int] = []
    compiled = SimpleNamespace(_set_dlhandle_cudnn=handles.append)
    monkeypatch.setitem(sys.modules, "cudnn", SimpleNamespace(_pybind_module=compiled))
    cudnn_fp8._module()
    assert handles == []
    monkeypatch.setattr(cudnn_library, "_loaded", [ctypes.CDLL(None)])
    cudnn_fp8._module()
    assert handles == [cudnn_library.handle()]


def test_wrong_folders_of_cudnn(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(bench.CommandError, match=r"accepted: a folder with libcudnn\.so\.9"):
        cudnn_library.load(tmp_path)
    (tmp_path / cudnn_library.NAME).write_text("no library")
    with pytest.raises(bench.CommandError, match="torch is loaded already"):
        cudnn_library.load(tmp_path)
    monkeypatch.delitem(sys.modules, "torch")
    with pytest.raises(bench.CommandError, match="cannot be loaded"):
        cudnn_library.load(tmp_path)
    assert run_bench("--cudnn", tmp_path) == 2
    assert f"--cudnn {tmp_path}: accepted on a GPU only" in capsys.readouterr().err
