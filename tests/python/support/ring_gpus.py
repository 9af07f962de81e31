"""Attention over the GPUs of one host, a process each, by NCCL: the cases of ring_cases.py.

`python ring_gpus.py FOLDER NUMBER` starts the processes and leaves results0.json and so on in the
folder: of each subject a list of failures.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from ring_cases import CASES, Case, Problem, imprecise

TIMEOUT = 60.0  # seconds, of a group, for processes that others leave alone
SAME_BITS = ("rfa_zigzag", "packed_window", "te_sinks", "te_all_to_all", "te_packed_causal")
# The first ones have processes without rows, and so without messages, at a group's first call.
SUBJECTS = sorted(CASES, key=lambda name: not name.startswith("no_tokens"))


def on_gpus(case: Case, dtype: str, n: int) -> Case:
    """The case for n GPUs, whose kernels have no float64."""
    return replace(case, dtype=dtype, dims=(64, 64), processes=min(n, case.processes))


def precise(name: str, dtype: str, groups: dict[int, Any], device: Any) -> list[str]:
    import torch.distributed as dist

    case = on_gpus(CASES[name], dtype, dist.get_world_size())
    if dist.get_rank() >= case.processes:
        return []
    problem = Problem(case, groups[case.processes], sorted(CASES).index(name), device)
    found = problem.results()
    return imprecise(case, problem.given, [*map(problem.whole, found[:4]), *found[4:]])


def same_bits(name: str, groups: dict[int, Any], device: Any) -> list[str]:
    import torch
    import torch.distributed as dist

    n = dist.get_world_size()
    case = replace(on_gpus(CASES[name], "bfloat16", n), processes=n)
    first, second = (
        Problem(case, groups[n], 7, device).results(deterministic=True) for _ in range(2)
    )
    pairs = zip(first, second, strict=True)
    return [] if all(torch.equal(x, y) for x, y in pairs) else [f"{name}: bits differ"]


def before_attention(groups: dict[int, Any], device: Any) -> list[str]:
    """A group whose messages go before attention, as docs/parallel.md makes it."""
    import torch.distributed as dist

    options = None
    if device != "cpu":
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    n = dist.get_world_size()
    own = {**groups, n: dist.new_group(pg_options=options)}
    names = ("te_causal_grouped", "rfa_zigzag_packed", "contiguous_window")
    return [wrong for name in names for wrong in precise(name, "bfloat16", own, device)]


def callers_in_turns(groups: dict[int, Any], device: Any) -> list[str]:
    """Callers on two streams, nobody waiting: a call's memory is not another's too early."""
    import torch
    import torch.distributed as dist

    from dlattn.torch import ring_attention

    options = {"group": groups[dist.get_world_size()], "causal": True, "deterministic": True}
    x = torch.randn(2, 3, 1, 2048, 8, 64, device=device, dtype=torch.bfloat16) + 0.25
    callers: list[Any] = [None, None]
    if device != "cpu":
        callers = [torch.cuda.Stream(device) for _ in range(2)]
        torch.cuda.synchronize(device)
    found: list[list[tuple[Any, ...]]] = [[], []]
    for _ in range(8 if device != "cpu" else 2):
        for own, stream, results in zip(x, callers, found, strict=True):
            with torch.cuda.stream(stream):
                leaves = [part.detach().requires_grad_() for part in own]
                out = ring_attention(*leaves, **options)
                results.append((out.detach(), *torch.autograd.grad(out, leaves, own[0])))
                poison = torch.full((1 << 22,), torch.nan, device=device)
                del poison, out
    if device != "cpu":
        torch.cuda.synchronize(device)
    same = all(
        torch.equal(a, b)
        for results in found
        for again in results
        for a, b in zip(results[0], again, strict=True)
    )
    return [] if same else ["callers in turns: bits differ"]


def _process(rank: int, n: int, folder: Path, device: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if device == "cuda":
        device = f"cuda:{rank}"
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=n,
        timeout=timedelta(seconds=TIMEOUT),
    )
    groups: dict[int, Any] = {m: dist.new_group(list(range(m))) for m in sorted({1, 2, n})}
    results: dict[str, list[str]] = {}

    def record(subject: str, function: Any, *arguments: Any) -> None:
        try:
            results[subject] = function(*arguments, groups, device)
        except Exception:
            results[subject] = [traceback.format_exc()]
        (folder / f"results{rank}.json").write_text(json.dumps(results))

    for dtype in ("bfloat16", "float32"):
        for name in SUBJECTS:
            record(f"{name}-{dtype}", precise, name, dtype)
    for name in SAME_BITS:
        record(f"{name}-same-bits", same_bits, name)
    record("before-attention", before_attention)
    record("callers-in-turns", callers_in_turns)


def _last(rank: int, n: int, folder: Path) -> None:
    """The last process ends, while the others wait for its keys; they raise or are ended."""
    # NCCL's watchdog ends a process after the group's time-out, and by default writes down what it
    # knows before that, which may take longer than a minute.
    os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "0"
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    store = f"file://{folder}/last"
    seconds = timedelta(seconds=8)
    dist.init_process_group("nccl", init_method=store, rank=rank, world_size=n, timeout=seconds)
    case = on_gpus(CASES["te_causal_grouped"], "bfloat16", n)
    problem = Problem(case, dist.group.WORLD, 1, f"cuda:{rank}")
    problem.results()
    torch.cuda.synchronize()
    if rank == n - 1:
        os._exit(0)
    problem.results(check=False)
    torch.cuda.synchronize()
    (folder / f"survived{rank}").touch()


def start(kind: str, n: int, folder: Path, seconds: float, device: str = "cuda") -> list[int]:
    """The processes' exit codes; those that have not ended in time are killed, with code -9."""
    command = [sys.executable, __file__, str(folder), str(n), device, kind]
    children = [subprocess.Popen([*command, str(rank)]) for rank in range(n)]
    until = time.monotonic() + seconds
    for child in children:
        try:
            child.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
    return [child.returncode for child in children]


def main() -> None:
    folder, n, device = Path(sys.argv[1]), int(sys.argv[2]), (*sys.argv, "cuda")[3]
    if len(sys.argv) > 5:
        kind, rank = sys.argv[4], int(sys.argv[5])
        if kind == "last":
            _last(rank, n, folder)
        else:
            _process(rank, n, folder, device)
        sys.stdout.flush()
        os._exit(0)  # groups are not taken down: one may wait for a process that has ended
    codes = start("cases", n, folder, 240, device)
    for rank in range(n):
        found = json.loads((folder / f"results{rank}.json").read_text())
        for name, wrong in found.items():
            if wrong:
                print(rank, name, *wrong)
        print(f"process {rank}: {len(found)} subjects, code {codes[rank]}")


if __name__ == "__main__":
    main()
