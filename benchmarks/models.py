"""Whole models with torch's attention and with dlattn's, random weights at real sizes.

    python benchmarks/models.py --json models.json --plot models.png

Prefill of a model of Llama 3's 8B shapes (transformers), one step of a transformer of Flux dev's at
1024 x 1024 pixels (diffusers), and ViT-L with a batch of 32 (transformers). Contestants take turns;
a time is the median of several windows of a few calls. Attention is a part of these, and the rest
is torch's in both: what is told is what a user sees.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

import dlattn
from dlattn.bench import load
from dlattn.bench.environment import describe
from dlattn.console.errors import CommandError
from dlattn.console.writing import check_distinct

Call = Callable[[], Any]


@dataclass
class Case:
    """A call of a model, and what makes the model each contestant's before."""

    name: str
    contestants: list[str]
    choose: Callable[[str], Any]
    call: Call


@dataclass
class Options:
    """The settings that the models are made for."""

    device: str
    dtype: torch.dtype
    tiny: bool  # of a few layers and columns, to see that all runs

    def number(self, real: int, tiny: int) -> int:
        """One of both."""
        return tiny if self.tiny else real

    def draw(self, *sizes: int) -> torch.Tensor:
        """Normal numbers."""
        return torch.randn(*sizes, device=self.device, dtype=self.dtype)


def built(make: Callable[[], torch.nn.Module], options: Options) -> torch.nn.Module:
    """The model on its device, its weights drawn there."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(options.dtype)
    try:
        with torch.device(options.device):
            return make().eval()
    finally:
        torch.set_default_dtype(before)


def llama(options: Options) -> Iterator[Case]:
    """Prefill, without the projection to the vocabulary but for the last token."""
    import transformers

    import_module("dlattn.transformers")
    config = transformers.LlamaConfig(
        hidden_size=options.number(4096, 64),
        intermediate_size=options.number(14336, 96),
        num_hidden_layers=options.number(32, 2),
        num_attention_heads=options.number(32, 4),
        num_key_value_heads=options.number(8, 2),
        vocab_size=options.number(128256, 100),
        max_position_embeddings=32768,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )
    model: Any = built(lambda: transformers.LlamaForCausalLM(config), options)
    for seqlen in (64, 128) if options.tiny else (2048, 8192, 16384, 32768):
        ids = torch.randint(100, (1, seqlen), device=options.device)

        def call(ids: torch.Tensor = ids) -> Any:
            return model(ids, use_cache=False, logits_to_keep=1).logits

        choose = model.set_attn_implementation
        yield Case(f"Llama 3 8B, prefill of {seqlen}", ["sdpa", "dlattn"], choose, call)


def vit(options: Options) -> Iterator[Case]:
    """ViT-L/16, 224 x 224 pixels."""
    import transformers

    import_module("dlattn.transformers")
    config = transformers.ViTConfig(
        hidden_size=options.number(1024, 64),
        intermediate_size=options.number(4096, 96),
        num_hidden_layers=options.number(24, 2),
        num_attention_heads=options.number(16, 4),
        image_size=options.number(224, 32),
    )
    model: Any = built(lambda: transformers.ViTModel(config), options)
    batch = options.number(32, 2)
    pixels = options.draw(batch, 3, config.image_size, config.image_size)

    def call() -> Any:
        return model(pixels)[0]

    yield Case(f"ViT-L, batch {batch}", ["sdpa", "dlattn"], model.set_attn_implementation, call)


def flux(options: Options) -> Iterator[Case]:
    """A step of Flux dev's transformer, with 512 tokens of text."""
    import diffusers

    diffusers.utils.logging.set_verbosity_error()  # it tells each time that backends are new
    import_module("dlattn.diffusers")

    def make() -> torch.nn.Module:
        if not options.tiny:
            return diffusers.FluxTransformer2DModel(guidance_embeds=True)
        return diffusers.FluxTransformer2DModel(
            in_channels=4,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            pooled_projection_dim=32,
            axes_dims_rope=(4, 4, 8),
            guidance_embeds=True,
        )

    model: Any = built(make, options)
    config = model.config
    image, text = options.number(4096, 16), options.number(512, 8)
    inputs = {
        "hidden_states": options.draw(1, image, config.in_channels),
        "encoder_hidden_states": options.draw(1, text, config.joint_attention_dim),
        "pooled_projections": options.draw(1, config.pooled_projection_dim),
        "timestep": torch.full((1,), 0.5, device=options.device, dtype=options.dtype),
        "guidance": torch.full((1,), 3.5, device=options.device, dtype=options.dtype),
        "img_ids": torch.zeros(image, 3, device=options.device, dtype=options.dtype),
        "txt_ids": torch.zeros(text, 3, device=options.device, dtype=options.dtype),
    }

    def call() -> Any:
        return model(**inputs, return_dict=False)[0]

    names = ["native", "dlattn"]
    if options.dtype != torch.float32:
        names += ["dlattn_int8_fp8", "dlattn_fp8"]
    try:
        yield Case("Flux dev, 1024 x 1024, a step", names, model.set_attention_backend, call)
    finally:
        model.set_attention_backend("native")


MODELS = {"llama": llama, "vit": vit, "flux": flux}


def timed(call: Call, device: str, calls: int) -> float:
    """Seconds of a call, in a window of several."""
    wait(device)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    wait(device)
    return (time.perf_counter() - start) / calls


def wait(device: str) -> None:
    """For the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def measure(case: Case, device: str, windows: int, window_seconds: float) -> dict[str, Any]:
    """Times of all contestants, in turn; and how far their results are from the first one's."""
    results: dict[str, Any] = {}
    first: torch.Tensor | None = None
    calls: dict[str, int] = {}
    for name in case.contestants:
        case.choose(name)
        try:
            out = case.call().float()
        except (ValueError, TypeError) as error:  # dlattn refuses the call
            results[name] = {"note": str(error).splitlines()[0]}
            continue
        first = out if first is None else first
        calls[name] = max(1, int(window_seconds / timed(case.call, device, 1)))
        difference = ((out - first).norm() / first.norm()).item()
        results[name] = {"relative_difference": difference, "window_seconds": []}
    for _ in range(windows):
        for name, count in calls.items():
            case.choose(name)
            results[name]["window_seconds"].append(timed(case.call, device, count))
    for name in calls:
        results[name]["seconds"] = statistics.median(results[name]["window_seconds"])
    return {"case": case.name, "results": results}


def text_of(entry: dict[str, Any]) -> str:
    """In one line."""
    parts = []
    stock = next(iter(entry["results"].values()))
    for name, result in entry["results"].items():
        if "seconds" not in result:
            parts.append(f"{name}: {result['note']}")
            continue
        ratio = stock["seconds"] / result["seconds"]
        parts.append(f"{name} {1e3 * result['seconds']:.2f} ms ({ratio:.2f})")
    return f"{entry['case']}: {', '.join(parts)}"


def draw(document: dict[str, Any], path: Path) -> None:
    """Bars of speed over stock's."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names, ratios, colours = [], [], []
    for entry in document["cases"]:
        stock, *others = (
            (name, result) for name, result in entry["results"].items() if "seconds" in result
        )
        for name, result in others:
            names.append(f"{entry['case']}: {name}")
            ratios.append(stock[1]["seconds"] / result["seconds"])
            colours.append("#0b5fa5" if name == "dlattn" else "#9ccaf0")
    figure, axis = pyplot.subplots(figsize=(9, 0.8 + 0.35 * len(names)), layout="constrained")
    bars = axis.barh(names, ratios, color=colours)
    axis.bar_label(bars, [f"{ratio:.2f}" for ratio in ratios], padding=4)
    axis.axvline(1.0, color="#3d3d3d", linewidth=0.8)
    axis.invert_yaxis()
    axis.set_xlabel("speed over torch's own attention, whole model")
    axis.spines[["top", "right"]].set_visible(False)
    machine = document["machine"]
    busy = f", {load.BUSY}" if document["busy"] else ""
    axis.set_title(f"Random weights at real sizes: {machine.get('gpu') or machine['cpu']}{busy}")
    figure.savefig(path, dpi=150)


def main() -> int:
    """Exit code 1 if a contestant could not run anywhere."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--tiny", action="store_true", help="sizes that any machine has time for")
    parser.add_argument("--windows", type=int, default=5)
    parser.add_argument("--window-seconds", type=float, default=0.5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--commit", metavar="SHA", help="to record; default: ask git, here")
    args = parser.parse_args()
    try:
        check_distinct({"--json": args.json, "--plot": args.plot})
    except CommandError as error:
        parser.error(str(error))
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    options = Options(args.device, dtype, args.tiny)
    entries = []
    watch = load.Watch(args.device)
    watch.before()
    with torch.no_grad():
        for name in args.models:
            torch.manual_seed(0)
            for case in MODELS[name](options):
                entries.append(measure(case, args.device, args.windows, args.window_seconds))
                print(text_of(entries[-1]), flush=True)
                watch.during()
    watch.after()
    document = {
        **describe(args.device, args.commit),
        "busy": watch.reasons(),
        "dtype": str(dtype).removeprefix("torch."),
        "windows": args.windows,
        "window_seconds": args.window_seconds,
        "dlattn": dlattn.__version__,
        "cases": entries,
    }
    if document["busy"]:
        print(load.warning(document["busy"]))
    if args.json:
        args.json.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
    if args.plot:
        draw(document, args.plot)
    served = {name for entry in entries for name, r in entry["results"].items() if "seconds" in r}
    return 0 if "dlattn" in served else 1


if __name__ == "__main__":
    raise SystemExit(main())
