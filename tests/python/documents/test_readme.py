"""README.md and docs: their examples run, their generated parts are what would be generated."""

from __future__ import annotations

import importlib.util
import math
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from examples import DOCUMENTS, ROOT, example, package_as_installed

import dlattn
from dlattn.cli import _parser
from dlattn.reference import (
    attention_backward_reference,
    attention_reference,
    error_bound,
    max_error,
)

GENERATED = [ROOT / "README.md", ROOT / "docs" / "kernels.md"]
PATH = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])


def test_every_example_is_run() -> None:
    here = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    text = "".join(path.read_text() for path in DOCUMENTS)
    names = re.findall(r"<!-- example: (\w+)", text)
    languages = sum(text.count(f"\n```{language}\n") for language in ("python", "cpp", "c"))
    assert len(names) == languages + 1  # and CMake's
    for name in names:
        assert f'"{name}"' in here, name


def load_generator() -> ModuleType:
    path = ROOT / "benchmarks" / "update_readme.py"
    spec = importlib.util.spec_from_file_location("update_readme", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["torch", "cupy", "jax", "numpy"])
def test_python_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = pytest.importorskip(name)
    if name == "cupy" and not dlattn.info().gpu:
        pytest.skip("CuPy arrays need a GPU")
    code, words = example(name)
    scope: dict[str, object] = {}
    exec(compile(code, f"example {name}", "exec"), scope)
    q, k, v, out = (scope[key] for key in ("q", "k", "v", "out"))
    kinds = {"torch": "Tensor", "jax": "Array"}
    assert isinstance(out, getattr(module, kinds.get(name, "ndarray")))
    expected = attention_reference(q, k, v, causal="causal" in words)
    bound = error_bound(q, k, v, expected=expected, causal="causal" in words)
    assert max_error(out, expected[0]) <= bound.out
    if "lse" in scope:
        assert max_error(scope["lse"], expected[1]) <= bound.lse


def test_backward_example() -> None:
    scope: dict[str, Any] = {}
    exec(compile(example("backward")[0], "example backward", "exec"), scope)
    given = [scope[name] for name in ("dout", "q", "k", "v", "out", "lse")]
    expected = attention_backward_reference(*given, **scope["options"])
    for name in ("dq", "dk", "dv", "dsinks"):
        assert max_error(getattr(scope["gradients"], name), getattr(expected, name)) < 1e-4, name
    assert scope["gradients"].dbias is None and scope["gradients"].dalibi_slopes is None


@pytest.mark.gpu
def test_numba_example() -> None:
    pytest.importorskip("numba.cuda")
    scope: dict[str, Any] = {}
    exec(compile(example("numba")[0], "example numba", "exec"), scope)
    q, k, v, out = (scope[key].copy_to_host() for key in ("q", "k", "v", "out"))
    expected = attention_reference(q, k, v)
    assert max_error(out, expected[0]) <= error_bound(q, k, v, expected=expected).out


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("jax_jit", {"causal": True, "window": (127, None)}),
        ("jax_nn", {"causal": "top_left"}),
    ],
)
def test_jax_example(name: str, options: dict[str, Any]) -> None:
    pytest.importorskip("jax")
    scope: dict[str, Any] = {}
    exec(compile(example(name)[0], f"example {name}", "exec"), scope)
    q, k, v, out = (scope[key] for key in ("q", "k", "v", "out"))
    expected = attention_reference(q, k, v, **options)
    bound = error_bound(q, k, v, expected=expected, **options)
    assert max_error(out, expected[0]) <= bound.out
    assert scope.get("gradient", q).shape == q.shape


def test_jax_ring_example() -> None:
    pytest.importorskip("jax")
    scope: dict[str, Any] = {}
    exec(compile(example("jax_ring")[0], "example jax_ring", "exec"), scope)
    expected = attention_reference(*scope["whole"], causal=True)
    bound = error_bound(*scope["whole"], expected=expected, causal=True)
    assert max_error(scope["result"], expected[0]) <= bound.out
    assert scope["gradient"].shape == scope["q"].shape


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("switch_flash_attn", {"causal": True, "window": (128, None)}),
        ("switch_torch", {"causal": "top_left", "layout": "bhsd"}),
    ],
)
def test_switching_example(name: str, options: dict[str, Any]) -> None:
    pytest.importorskip("torch")
    scope: dict[str, Any] = {}
    exec(compile(example(name)[0], f"example {name}", "exec"), scope)
    q, k, v, out = (scope[key] for key in ("q", "k", "v", "out"))
    expected = attention_reference(q, k, v, **options)
    bound = error_bound(q, k, v, expected=expected, **options)
    assert max_error(out, expected[0]) <= bound.out


def test_replacing_flash_attn_example() -> None:
    pytest.importorskip("torch")
    more = """
from flash_attn import __version__, flash_attn_func
from flash_attn.flash_attn_interface import _flash_attn_varlen_backward, flash_attn_func as same

assert flash_attn_func is same is dlattn.flash_attn.flash_attn_func
assert _flash_attn_backward.__module__.startswith("dlattn.")
assert "2.7" < __version__ < "2.9"
"""
    code = example("replace_flash_attn")[0] + more
    subprocess.run([sys.executable, "-c", code], check=True)


def test_float8_example() -> None:
    pytest.importorskip("torch")
    scope: dict[str, Any] = {}
    exec(compile(example("float8")[0], "example float8", "exec"), scope)
    q, k, v, out = (scope[key] for key in ("q", "k", "v", "out"))
    descales = {name: scope[name] for name in ("q_descale", "k_descale", "v_descale")}
    expected = attention_reference(q, k, v, **descales)
    bound = error_bound(q, k, v, dtype="bfloat16", expected=expected, **descales)
    assert max_error(out, expected[0]) <= bound.out


def test_kvcache_examples() -> None:
    """Each sequence of docs/kvcache.md against its keys, gathered here by hand."""
    pytest.importorskip("torch")
    scope: dict[str, Any] = {}

    def run(name: str) -> None:
        scope.clear()
        exec(compile(example(name)[0], f"example {name}", "exec"), scope)

    def check(out: Any, q: Any, *kv: Any, dtype: str = "float32", **options: Any) -> None:
        expected = attention_reference(q, *kv, **options)
        bound = error_bound(q, *kv, dtype=dtype, expected=expected, **options)
        assert max_error(out, expected[0]) <= bound.out

    run("kvcache_pages")
    for b, (pages, length) in enumerate((([7, 31], 20), ([2], 3))):
        caches = (scope[name][pages].flatten(0, 1) for name in ("k_cache", "v_cache"))
        own = (x[None, :length] for x in caches)
        check(scope["out"][b : b + 1], scope["q"][b : b + 1], *own, dtype="bfloat16")

    run("kvcache_drafts")
    own = (scope[name][:, :36] for name in ("k_cache", "v_cache"))
    tree = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]], bool)
    np.testing.assert_array_equal(scope["mask"][0, 0, :, 32:], tree)
    check(scope["out"], scope["q"], *own, mask=scope["mask"])

    run("kvcache_latents")
    for b, (pages, length) in enumerate((([4, 1], 70), ([2], 5))):
        keys = scope["latents"][pages].flatten(0, 1)[None, :length]
        asked = {"dtype": "bfloat16", "softmax_scale": (128 + 64) ** -0.5}
        check(scope["out"][b : b + 1], scope["q"][b : b + 1], keys, keys[..., :512], **asked)

    run("kvcache_varlen")
    for rows, pages, length in ((slice(20), [4, 1, 6], 41), (slice(20, 21), [2], 5)):
        caches = (scope[x][pages].reshape(-1, 2, 64) for x in ("k_cache", "v_cache"))
        own = (x[None, :length] for x in caches)
        check(scope["out"][None, rows], scope["q"][None, rows], *own, causal=True)

    run("kvcache_8_bit")
    for b, pages in enumerate(([4], [2])):
        for x, new in (("k_cache", "k"), ("v_cache", "v")):
            stored = scope[x][pages].reshape(-1, 2, 64)[:12] * np.float32(4 / 127)
            assert np.abs(stored - np.clip(scope[new][b].astype(np.float32), -4.1, 4)).max() < 0.02
    assert scope["out"].shape == (2, 1, 8, 64) and np.isfinite(scope["out"]).all()

    run("kvcache_append")
    for b, (pages, length) in enumerate((([4, 1, 6], 42), ([2], 6))):
        caches = (scope[x][pages].reshape(-1, 2, 64) for x in ("k_cache", "v_cache"))
        own = [x[None, :length] for x in caches]
        for x, new in zip(own, (scope["k"], scope["v"]), strict=True):
            np.testing.assert_array_equal(x[0, -1], new[b, 0])
        check(scope["out"][b : b + 1], scope["q"][b : b + 1], *own)


def relative_error(out: Any, expected: Any) -> float:
    difference = np.asarray(out, np.float64) - expected
    return float(np.linalg.norm(difference) / np.linalg.norm(expected))


# docs/precision.md has 0.036 of noise, and rows of few keys have more.
MOST_OF_8_BITS = 0.06


def test_precision_example() -> None:
    scope: dict[str, Any] = {}
    exec(compile(example("precision")[0], "example precision", "exec"), scope)
    expected = attention_reference(scope["q"], scope["k"], scope["v"])[0]
    assert 0.01 < relative_error(scope["out"], expected) < MOST_OF_8_BITS
    assert 0.01 < scope["error"] < MOST_OF_8_BITS


def test_quantize_kv_example() -> None:
    code = example("quantize_kv")[0]
    scope: dict[str, Any] = {}
    exec(compile(code.replace("del k, v\n", ""), "example quantize_kv", "exec"), scope)
    q, k, v, kv = (scope[name] for name in ("q", "k", "v", "kv"))
    expected = attention_reference(q, k, v)[0]
    assert 0.01 < relative_error(scope["out"], expected) < MOST_OF_8_BITS
    assert 0.5 < kv.nbytes / (k.nbytes + v.nbytes) < 0.51
    with pytest.raises(NameError, match="'k' is not defined"):
        exec(compile(code + "\nk", "example quantize_kv", "exec"), {})


@pytest.mark.parametrize("precision", ["int8_fp8", "int8_fp16", "fp8"])
@pytest.mark.parametrize("head_dim", [40, 64, 128])
def test_formula_of_memory(precision: str, head_dim: int) -> None:
    """docs/precision.md's."""
    text = (ROOT / "docs" / "precision.md").read_text()
    formula = re.findall(r"^    k and v    (.*)$", text, re.MULTILINE)[0]
    k = np.zeros((2, 1000, 3, head_dim), np.float16)
    columns = 64 if head_dim <= 64 else 128
    keys = 64 if precision != "fp8" else {64: 96, 128: 128}[columns]
    sizes = {"batch": 2, "num_heads_kv": 3, "seqlen_k": 1000, "C": columns, "N": keys}
    sizes["W"] = 2 if precision == "int8_fp16" else 1
    least = eval(formula, {"ceil": math.ceil, **sizes})
    assert least <= dlattn.quantize_kv(k, k, precision=precision).nbytes < least + 5 * 256


def test_sageattention_example() -> None:
    scope: dict[str, Any] = {}
    code = example("switch_sageattention")[0]
    exec(compile(code, "example switch_sageattention", "exec"), scope)
    arrays = (scope[name] for name in ("q", "k", "v"))
    expected, lse = attention_reference(*arrays, causal="top_left", layout="bhsd")
    assert 0.01 < relative_error(scope["out"], expected) < MOST_OF_8_BITS
    assert np.abs(scope["lse"] - lse).max() < 0.1


def test_c_example(tmp_path: Path) -> None:
    """Compiled and run by the lines that docs/c.md has, as they stand."""
    if not shutil.which("cc"):
        pytest.skip("not found: cc")
    text = (ROOT / "docs" / "c.md").read_text()
    _, _, behind = text.partition("From an installed Python package:\n\n```\n")
    lines, _, _ = behind.partition("```\n")
    assert "cc -std=c99 main.c " in lines
    package = package_as_installed(tmp_path / "site packages" / "dlattn")
    python = tmp_path / "bin" / "python"  # the program that the lines call
    python.parent.mkdir()
    answer = f'"{sys.executable}" "$@"'
    if package.is_relative_to(tmp_path):
        answer = f'[ "$*" = "-m dlattn --include-dir" ] && echo "{package}/include"'
    python.write_text(f"#!/bin/sh\n{answer}\n")
    python.chmod(0o755)
    (tmp_path / "main.c").write_text(example("c")[0] + "\n")
    result = subprocess.run(
        ["sh", "-e", "-c", lines if "./a.out" in lines else f"{lines}./a.out"],
        cwd=tmp_path,
        env={
            **{name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"},
            "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    output = result.stdout
    first, last = map(float, output.splitlines()[0].split())
    q = np.sin(np.float32(0.37) * np.arange(128 * 4 * 64, dtype=np.float32))
    q = q.reshape(1, 128, 4, 64)
    expected = attention_reference(q, q, q, causal=True)[0].ravel()
    np.testing.assert_allclose([first, last], expected[[0, -1]], rtol=1e-5, atol=1e-5)
    assert output.splitlines()[1] == "refused: softcap is -1; accepted: " + (
        "7.9e-31 to 1.27e30 (2^-100 to 2^100), or 0 for none"
    )


@pytest.mark.slow
def test_activate_example(capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    if not hasattr(torch.library, "get_kernel"):
        pytest.skip("torch is older than 2.9")
    code = example("activate")[0]
    exec(compile(code, "example activate", "exec"), {})
    printed = capsys.readouterr().out
    assert "Stats(served={'_scaled_dot_product_flash_attention" in printed
    import dlattn.torch

    assert not dlattn.torch.is_active()


def test_compile_example() -> None:
    pytest.importorskip("torch")
    scope: dict[str, Any] = {"__name__": "example"}
    exec(compile(example("compile")[0], "example compile", "exec"), scope)
    assert scope["out"].shape == (1, 300, 4, 64) and scope["out"].isfinite().all()


def test_gradients_example() -> None:
    pytest.importorskip("torch")
    scope: dict[str, Any] = {}
    exec(compile(example("gradients")[0], "example gradients", "exec"), scope)
    assert all(scope[name].grad.isfinite().all() for name in ("q", "k", "v", "sinks"))
    assert scope["sinks"].grad.abs().max() > 0


_TWO_PROCESSES = """
import os, sys
import torch
code = compile(sys.argv[1], "example ring", "exec")
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[2], "WORLD_SIZE": "2"}
child = os.fork()
os.environ |= {"RANK": str(int(child == 0)), "LOCAL_RANK": str(int(child == 0))}
scope = {}
exec(code, scope)
want = torch.nn.functional.scaled_dot_product_attention(
    *scope["whole"].transpose(2, 3), is_causal=True
)
assert torch.allclose(scope["result"], want.transpose(1, 2), atol=1e-5)
if child == 0:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print("passed")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
def test_ring_example() -> None:
    torch = pytest.importorskip("torch")
    if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
        pytest.skip("torch has no gloo")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    done = subprocess.run(
        [sys.executable, "-c", _TWO_PROCESSES, example("ring")[0], str(port)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.endswith("passed\n"), done.stderr


def test_transformers_example() -> None:
    pytest.importorskip("transformers")
    scope: dict[str, Any] = {}
    exec(compile(example("transformers")[0], "example transformers", "exec"), scope)
    assert scope["model"].config._attn_implementation == "dlattn"
    assert scope["logits"].shape == (1, 10, 100) and scope["logits"].isfinite().all()


def test_static_cache_example() -> None:
    pytest.importorskip("transformers")
    scope: dict[str, Any] = {}
    source = example("transformers_static")[0]
    exec(compile(source, "example transformers_static", "exec"), scope)
    assert scope["out"].shape == (1, 12)


def test_continuous_batching_example() -> None:
    pytest.importorskip("transformers", minversion="5.23")
    scope: dict[str, Any] = {}
    source = example("transformers_batch")[0]
    exec(compile(source, "example transformers_batch", "exec"), scope)
    assert [out.error for out in scope["outputs"].values()] == [None] * 3


def test_diffusers_example() -> None:
    pytest.importorskip("diffusers")
    from diffusers.models import attention_dispatch

    scope: dict[str, Any] = {}
    try:
        exec(compile(example("diffusers")[0], "example diffusers", "exec"), scope)
        assert attention_dispatch._AttentionBackendRegistry.get_active_backend()[0] == "dlattn"
    finally:
        scope["model"].set_attention_backend("native")
    assert scope["image"].shape == (1, 16, 4) and scope["image"].isfinite().all()


def test_cpp_example(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dlattn", "--cmake-dir"]
    package = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    if not (Path(package) / "dlattnConfig.cmake").is_file():
        pytest.skip("dlattn is imported from a build folder, which has no CMake package")
    missing = [tool for tool in ("cmake", "ninja", "c++") if not shutil.which(tool, path=PATH)]
    if missing:
        pytest.skip(f"not found: {', '.join(missing)}")
    (tmp_path / "main.cpp").write_text(example("cpp")[0] + "\n")
    (tmp_path / "CMakeLists.txt").write_text(example("cmake")[0] + "\n")
    build = tmp_path / "build"
    for step in (
        ["cmake", "-S", tmp_path, "-B", build, "-G", "Ninja", f"-Ddlattn_DIR={package}"],
        ["cmake", "--build", build],
    ):
        done = subprocess.run(
            step, env={**os.environ, "PATH": PATH}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
    run = subprocess.run([build / "demo"], check=True, capture_output=True, text=True)
    first, last = map(float, run.stdout.split())

    q = np.sin(np.float32(0.37) * np.arange(128 * 4 * 64, dtype=np.float32))
    q = q.reshape(1, 128, 4, 64)
    expected = attention_reference(q, q, q, causal=True)[0].ravel()
    # printf shows six digits.
    np.testing.assert_allclose([first, last], expected[[0, -1]], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("path", GENERATED, ids=lambda path: path.name)
def test_generated_part_is_current(path: Path) -> None:
    text = path.read_text()
    assert load_generator().fill(path, text) == text, "run: python benchmarks/update_readme.py"


def test_results_are_current() -> None:
    text = (ROOT / "benchmarks" / "RESULTS.md").read_text()
    assert text == load_generator().results(), "run: python benchmarks/update_readme.py"
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (ROOT / "benchmarks" / target).exists(), target


def test_generator_fills_what_is_stale() -> None:
    path = ROOT / "docs" / "kernels.md"
    text = path.read_text()
    stale = text.replace("| `cpu` | CPU |", "| `cpu` | nowhere |")
    assert stale != text
    assert load_generator().fill(path, stale) == text


def test_generator_misses_no_marker() -> None:
    path = ROOT / "README.md"
    with pytest.raises(SystemExit, match="0 places for the generated part 'figures'"):
        load_generator().fill(path, path.read_text().replace("<!-- generated: figures -->", ""))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text()):
        if "://" not in target:
            assert (path.parent / target).exists(), target


def test_readme_can_be_finished() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 160


@pytest.mark.parametrize(
    "name", ["README.md", "docs/usage.md", "benchmarks/README.md", "CONTRIBUTING.md"]
)
def test_commands_that_are_shown_exist(name: str) -> None:
    text = (ROOT / name).read_text()
    lines = re.findall(r"^(?:.*&& )?python -m dlattn (.*)$", text, flags=re.MULTILINE)
    assert lines or name == "CONTRIBUTING.md"
    for line in lines:
        _parser().parse_args(shlex.split(line, comments=True))  # exits if an option is unknown
