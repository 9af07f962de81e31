"""The first page of the documentation's site: its tabs run as they stand."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from examples import ROOT, example, package_as_installed

import dlattn
from dlattn.reference import attention_reference, error_bound, max_error

PAGE = (ROOT / "docs" / "index.md").read_text()


def run(name: str, **replaced: str) -> dict[str, Any]:
    code = example(name)[0]
    for old, new in replaced.items():
        assert code.count(old) == 1
        code = code.replace(old, new)
    scope: dict[str, Any] = {}
    exec(compile(code, f"example {name}", "exec"), scope)
    return scope


@pytest.mark.parametrize("name", ["tab_torch", "tab_jax", "tab_cupy"])
def test_tab_of_a_library_of_arrays(name: str) -> None:
    pytest.importorskip(name.removeprefix("tab_"))
    if name == "tab_cupy" and not dlattn.info().gpu:
        pytest.skip("CuPy arrays need a GPU")
    scope = run(name)
    arrays = [scope[x] for x in ("q", "k", "v")]
    causal = name != "tab_jax"
    expected = attention_reference(*arrays, causal=causal)
    bound = error_bound(*arrays, expected=expected, causal=causal)
    assert max_error(scope["out"], expected[0]) <= bound.out


def test_tab_of_transformers(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 100}
    config = transformers.LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes)
    torch.manual_seed(0)
    plain = transformers.LlamaForCausalLM._from_config(config, attn_implementation="eager").eval()
    plain.save_pretrained(tmp_path)
    model = run("tab_transformers", **{"Qwen/Qwen3-0.6B": str(tmp_path)})["model"]
    assert model.config._attn_implementation == "dlattn"
    ids = torch.arange(10)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, plain(ids).logits, atol=1e-4, rtol=1e-4)


def test_tab_of_diffusers(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a pipeline of a small transformer and of nothing else in place of the download."""
    torch = pytest.importorskip("torch")
    diffusers = pytest.importorskip("diffusers")
    from diffusers.models import attention_dispatch

    torch.manual_seed(0)
    sizes = {"attention_head_dim": 16, "num_attention_heads": 2, "axes_dims_rope": [4, 4, 8]}
    sizes |= {"in_channels": 4, "num_layers": 1, "num_single_layers": 1}
    sizes |= {"joint_attention_dim": 32, "pooled_projection_dim": 32}
    absent = ("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    pipeline = diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        transformer=diffusers.FluxTransformer2DModel(**sizes).to(torch.bfloat16),
        **dict.fromkeys(absent),
    )
    asked: list[Any] = []

    def from_pretrained(name: str, torch_dtype: Any) -> Any:
        asked.append((name, torch_dtype))
        return pipeline

    monkeypatch.setattr(diffusers.DiffusionPipeline, "from_pretrained", from_pretrained)
    try:
        run("tab_diffusers")
        assert asked == [("black-forest-labs/FLUX.1-dev", torch.bfloat16)]
        assert attention_dispatch._AttentionBackendRegistry.get_active_backend()[0] == "dlattn"
        pipeline.set_progress_bar_config(disable=True)
        image = pipeline(
            prompt_embeds=torch.randn(1, 8, 32).bfloat16(),
            pooled_prompt_embeds=torch.randn(1, 32).bfloat16(),
            num_inference_steps=2,
            output_type="latent",
            height=32,
            width=32,
        ).images
        assert image.isfinite().all()
    finally:
        pipeline.transformer.set_attention_backend("native")


MAIN = """
#include <cstdio>
#include <vector>

int main() {
  std::vector<unsigned short> q(1024 * 8 * 64), k(q), v(q), out(q.size(), 0x7e00);  // NaN
  for (auto* x : {&q, &k, &v})
    if (std::fread(x->data(), 2, x->size(), stdin) != x->size()) return 1;
  attend(q.data(), k.data(), v.data(), out.data());
  std::fwrite(out.data(), 2, out.size(), stdout);
}
"""


def test_tab_of_cpp(tmp_path: Path) -> None:
    compiler = shutil.which("c++")
    if not compiler:
        pytest.skip("not found: c++")
    package = package_as_installed(tmp_path / "dlattn")
    (tmp_path / "main.cpp").write_text(example("tab_cpp")[0] + "\n" + MAIN)
    command = [compiler, "-std=c++20", "-Wall", "-Werror", "main.cpp", "-o", "main"]
    command += [f"-I{package}/include", f"-L{package}/lib", f"-Wl,-rpath,{package}/lib", "-ldlattn"]
    subprocess.run(command, cwd=tmp_path, check=True)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 1024, 8, 64)).astype(np.float16) + 1 for _ in range(3))
    given = b"".join(x.tobytes() for x in (q, k, v))
    done = subprocess.run([tmp_path / "main"], input=given, check=True, capture_output=True)
    out = np.frombuffer(done.stdout, np.float16).reshape(q.shape)
    expected = attention_reference(q, k, v)
    assert max_error(out, expected[0]) <= error_bound(q, k, v, expected=expected).out


def test_parts_of_the_page() -> None:
    """A sentence and the command come from README.md by their markers; there is one figure."""
    readme = (ROOT / "README.md").read_text()
    for part in re.findall(r"```\{include\} \.\./README\.md\n(.*?)```", PAGE, re.DOTALL):
        start, end = re.findall(r'"(.*?)"', part)
        text = readme.partition(start)[2].partition(end)[0].strip()
        assert readme.count(end) >= 1 and 0 < len(text) < 300, text
    assert len(re.findall(r"^!\[.+\]\(.+\.png\)$", PAGE, re.MULTILINE)) == 1
    tabs = re.findall(r":::\{tab-item\} (.+)\n<!-- example: (\w+) -->", PAGE)
    names = [name for name, _ in tabs]
    assert names == ["torch", "transformers", "diffusers", "JAX", "CuPy", "C++"]
