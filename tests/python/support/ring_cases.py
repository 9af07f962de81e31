"""Attention over four processes of gloo against one process in float64: cases, and what runs them.

`python ring_cases.py FOLDER` starts the processes once for all cases and leaves their results in
the folder. They are forked, as each would take seconds to import torch.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

PROCESSES = 4
TIMEOUT = 8.0  # seconds, for the processes that are left when one dies


@dataclass(frozen=True)
class Case:
    """One problem. `lengths`: of packed sequences, or one length of a batch."""

    lengths: tuple[int, ...] = (64,)
    batch: int | None = 2  # None: packed
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (16, 16)
    causal: Any = False
    window: Any = None
    softcap: float = 0.0
    sinks: bool = False
    alibi: str = ""  # "heads" or "batch": slopes' shape
    layout: str = "bshd"
    order: str = "zigzag"
    mode: str = "ring"
    dtype: str = "float64"
    processes: int = PROCESSES
    check: bool = True


# Shapes and features of the tests of TransformerEngine's context parallelism (te_, its lengths over
# 64) and of ring-flash-attention (rfa_, over 8 or so), and this project's own.
CASES = {
    "te_no_mask": Case(heads=(12, 12), dims=(128, 128)),
    "te_causal_grouped": Case(heads=(12, 2), dims=(32, 32), causal=True),
    "te_dims_differ": Case(heads=(6, 6), dims=(32, 16), causal=True),
    "te_window_causal": Case(causal=True, window=(8, 0)),
    "te_window_both": Case(window=(8, 8)),
    "te_sinks": Case(causal=True, sinks=True),
    "te_sinks_window": Case(causal=True, sinks=True, window=(8, 0)),
    "te_packed_causal": Case(lengths=(16, 64, 8, 40), batch=None, causal=True),
    "te_all_to_all": Case(heads=(12, 4), causal=True, window=(8, 0), mode="all_to_all"),
    "te_all_to_all_sinks": Case(heads=(8, 8), causal=True, sinks=True, mode="all_to_all"),
    "te_all_to_all_packed": Case(
        lengths=(16, 64, 9), batch=None, heads=(4, 4), causal=True, mode="all_to_all"
    ),
    "all_to_all_one_batch": Case(lengths=(61,), batch=1, heads=(8, 4), mode="all_to_all"),
    "all_to_all_heads_first": Case(
        lengths=(61,), batch=1, heads=(8, 4), causal=True, layout="bhsd", mode="all_to_all"
    ),
    "all_to_all_no_tokens": Case(
        lengths=(3,), batch=1, heads=(4, 4), dims=(16, 8), causal=True, mode="all_to_all"
    ),
    "rfa_zigzag": Case(lengths=(159 * 2,), batch=1, heads=(5, 5), dims=(128, 128), causal=True),
    "rfa_ring": Case(lengths=(160,), batch=1, heads=(5, 5), causal=True, order="contiguous"),
    "rfa_zigzag_packed": Case(lengths=(15, 141, 373), batch=None, heads=(5, 5), causal=True),
    "rfa_llama3_packed": Case(lengths=(8, 36), batch=None, causal=True, order="contiguous"),
    "rfa_window": Case(lengths=(80,), batch=1, heads=(5, 5), causal=True, window=(20, 0)),
    "uneven": Case(lengths=(61,), causal=True, softcap=3.0),
    "uneven_full": Case(lengths=(61,), layout="bhsd", window=(None, 7)),
    "no_tokens": Case(lengths=(3,), causal=True),
    "no_tokens_packed": Case(lengths=(1, 0, 2), batch=None, causal=True, sinks=True),
    "packed_window": Case(lengths=(33, 70, 5, 33), batch=None, causal=True, window=(13, 0)),
    "packed_window_both": Case(
        lengths=(33, 70, 5), batch=None, window=(9, 20), layout="bhsd", sinks=True
    ),
    "contiguous_window": Case(lengths=(80,), order="contiguous", causal=True, window=(21, 0)),
    # Eight sequences lie on one process each, the first one and the last one are cut.
    "whole": Case(
        lengths=(40, *(9, 10) * 4, 61), batch=None, causal=True, sinks=True, order="whole"
    ),
    "whole_window": Case(
        lengths=(9,) * 8, batch=None, window=(5, 3), alibi="heads", order="whole", check=False
    ),
    "whole_all_to_all": Case(
        lengths=(40, *(9,) * 6, 33), batch=None, heads=(4, 4), order="whole", mode="all_to_all"
    ),
    "alibi": Case(lengths=(61,), alibi="batch", softcap=5.0),
    "alibi_causal_window": Case(causal=True, window=(25, None), alibi="heads", layout="bhsd"),
    "alibi_packed": Case(lengths=(33, 50), batch=None, window=(30, 12), alibi="heads", sinks=True),
    "alibi_all_to_all": Case(heads=(4, 4), causal=True, alibi="batch", mode="all_to_all"),
    "two_processes": Case(causal=True, processes=2),
    "one_process": Case(causal=True, sinks=True, processes=1),
    "float32": Case(lengths=(128,), causal=True, dtype="float32", sinks=True),
    "bfloat16": Case(lengths=(256,), dims=(64, 64), causal=True, dtype="bfloat16"),
    "bfloat16_window": Case(
        lengths=(128,), batch=None, dims=(64, 64), causal=True, window=(40, 0), dtype="bfloat16"
    ),
    "float16_full": Case(lengths=(256,), dims=(64, 64), dtype="float16", check=False),
}


def expected(case: Case, q: Any, k: Any, v: Any, sinks: Any, slopes: Any) -> Any:
    """Attention by its definition, in the dtype of q; q is (batch, rows, heads, dim)."""
    import torch

    if case.batch is None:
        parts, start = [], 0
        one = Case(**{**case.__dict__, "batch": 1})
        for length in case.lengths:
            own = [x[:, start : start + length] for x in (q, k, v)]
            parts.append(expected(one, *own, sinks, slopes))
            start += length
        return torch.cat(parts, 1)
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / q.shape[3] ** 0.5
    if case.softcap:
        scores = case.softcap * (scores / case.softcap).tanh()
    i = torch.arange(q.shape[1])[:, None]
    j = torch.arange(q.shape[1])
    if slopes is not None:
        scores = scores - slopes.to(q.dtype)[..., None, None] * (i - j).abs()
    left, right = case.window or (None, None)
    right = 0 if case.causal else right
    seen = torch.ones(len(j), len(j), dtype=torch.bool)
    seen &= True if left is None else j >= i - left
    seen &= True if right is None else j <= i + right
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        column = sinks.to(q.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], 3)
    weights = scores.softmax(3)[..., : len(j)]
    return torch.einsum("bhij,bjhd->bihd", weights, v)


def tensors(case: Case, seed: int) -> dict[str, Any]:
    """Inputs in the case's dtype, as (batch, rows, heads, dim), and dout."""
    import torch

    torch.manual_seed(seed)
    batch, rows = case.batch or 1, sum(case.lengths)
    heads, (dim, dim_v) = case.heads, case.dims
    dtype = getattr(torch, case.dtype)
    shapes = {
        "q": (batch, rows, heads[0], dim),
        "k": (batch, rows, heads[1], dim),
        "v": (batch, rows, heads[1], dim_v),
        "dout": (batch, rows, heads[0], dim_v),
    }
    found = {name: (torch.randn(shape) + 0.25).to(dtype) for name, shape in shapes.items()}
    slopes = {"": None, "heads": torch.rand(heads[0]), "batch": torch.rand(batch, heads[0])}
    return {
        **found,
        "sinks": torch.randn(heads[0]) + 0.25 if case.sinks else None,
        "alibi_slopes": slopes[case.alibi],
    }


def whole_gradients(case: Case, given: dict[str, Any], dtype: Any, function: Any) -> list[Any]:
    """out, dq, dk, dv and dsinks of the whole, in one process."""
    import torch

    of_sinks = dtype if dtype == torch.float64 else torch.float32
    dtypes = {"q": dtype, "k": dtype, "v": dtype, "sinks": of_sinks}
    own = [None if given[name] is None else given[name].to(x) for name, x in dtypes.items()]
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in own]
    out = function(case, *leaves, given["alibi_slopes"])
    wanted = [x for x in leaves if x is not None]
    return [out.detach(), *torch.autograd.grad(out, wanted, given["dout"].to(dtype))]


def imprecise(case: Case, given: dict[str, Any], found: list[Any]) -> list[str]:
    """The whole results of GPUs that are farther from float64 than the case's dtype allows."""
    import torch

    on_host = {name: None if x is None else x.cpu() for name, x in given.items()}
    want = whole_gradients(case, on_host, torch.float64, expected)
    plain = None
    if case.batch is not None:
        plain = whole_gradients(case, given, getattr(torch, case.dtype), by_one_process)
    assert len(found) == len(want)
    wrong = []
    for i, (x, y) in enumerate(zip(found, want, strict=True)):
        assert x.shape == y.shape
        error = float((x.double().cpu() - y).norm())
        share = {"bfloat16": 1.5e-2, "float16": 2e-3, "float32": 2e-5}[case.dtype]
        own = 0.0 if plain is None else float((plain[i].double().cpu() - y).norm())
        bound = max(1.5 * own, share * float(y.norm()))
        if not error <= bound:
            wrong.append(f"result {i}: error {error:.3g}, bound {bound:.3g}, one GPU's {own:.3g}")
    return wrong


def by_one_process(case: Case, q: Any, k: Any, v: Any, sinks: Any, slopes: Any) -> Any:
    import dlattn.torch

    return dlattn.torch.attention(
        q,
        k,
        v,
        causal=case.causal,
        window=case.window or (None, None),
        softcap=case.softcap,
        sinks=sinks,
        alibi_slopes=slopes,
    )


class Problem:
    """A case on this process of a group: its shards, and what `ring_attention` makes of them."""

    def __init__(self, case: Case, group: Any, seed: int, device: Any = "cpu") -> None:
        import torch

        import dlattn.torch

        self.case, self.group = case, group
        made = tensors(case, seed)
        self.given = {name: None if x is None else x.to(device) for name, x in made.items()}
        cu_seqlens = None
        if case.batch is None:
            cu_seqlens = [sum(case.lengths[:i]) for i in range(len(case.lengths) + 1)]
            cu_seqlens = torch.tensor(cu_seqlens, dtype=torch.int32)
        self.sharded = {"group": group, "order": case.order, "cu_seqlens": cu_seqlens}
        self.dim = int(case.batch is not None)
        self.options = {
            "causal": case.causal,
            "window": case.window,
            "softcap": case.softcap,
            "alibi_slopes": self.given["alibi_slopes"],
            "layout": case.layout,
            "mode": case.mode,
            "check": case.check,
            **self.sharded,
        }
        self.leaves = [self.shard(self.given[name]).requires_grad_() for name in "qkv"]
        sinks = self.given["sinks"]
        self.sinks = None if sinks is None else sinks.clone().requires_grad_()
        self.attention = dlattn.torch.ring_attention

    def shard(self, x: Any) -> Any:
        import dlattn.torch

        x = x[0] if self.case.batch is None else x
        return dlattn.torch.shard_sequence(x, dim=self.dim, **self.sharded)

    def as_given(self, x: Any) -> Any:
        return x.transpose(-3, -2) if self.case.layout == "bhsd" else x

    def out(self, **options: Any) -> Any:
        own = [self.as_given(x) for x in self.leaves]
        out = self.attention(*own, sinks=self.sinks, **{**self.options, **options})
        return self.as_given(out)

    def results(self, **options: Any) -> list[Any]:
        """This process's out, dq, dk and dv, and the whole dsinks."""
        import torch
        import torch.distributed as dist

        out = self.out(**options)
        wanted = [*self.leaves, *([] if self.sinks is None else [self.sinks])]
        found = list(torch.autograd.grad(out, wanted, self.shard(self.given["dout"])))
        if self.sinks is not None:
            dist.all_reduce(found[3], group=self.group)
        return [out.detach(), *found]

    def whole(self, x: Any) -> Any:
        """All processes' parts of a result, as `tensors` has it."""
        from dlattn.torch import unshard_sequence

        x = unshard_sequence(x, dim=self.dim, **self.sharded)
        return x[None] if self.case.batch is None else x

    def errors(self) -> list[str]:
        """Those results that are not as precise as they must be."""
        import torch

        want = whole_gradients(self.case, self.given, torch.float64, expected)
        found = self.results()
        wrong = []
        plain = None
        if "16" in self.case.dtype:  # one process's own error, of one sequence
            dtype = getattr(torch, self.case.dtype)
            plain = whole_gradients(self.case, self.given, dtype, by_one_process)
        for i, name in enumerate(("out", "dq", "dk", "dv", "dsinks")[: len(found)]):
            own = self.whole(found[i]) if i < 4 else found[i]
            largest = max(1.0, float(want[i].abs().max()))
            bound = {"float64": 3e-6, "float32": 6e-6}.get(self.case.dtype, 0.0) * largest
            if plain is not None:
                bound = 1.5 * float((plain[i].double() - want[i]).norm())
                error = float((own.double() - want[i]).norm())
            else:
                error = float((own.double() - want[i]).abs().max())
            if not error <= bound:
                wrong.append(f"{name}: error {error:.3g}, bound {bound:.3g}")
        return wrong


def run(name: str, group: Any) -> list[str]:
    case = CASES[name]
    return Problem(case, group, seed=sorted(CASES).index(name)).errors()


def _process(rank: int, folder: Path) -> None:
    import ring_faults
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=PROCESSES,
        timeout=timedelta(seconds=TIMEOUT),
    )
    groups: dict[int, Any] = {n: dist.new_group(list(range(n))) for n in (1, 2, PROCESSES)}
    results: dict[str, list[str]] = {}
    subjects = {name: (run, CASES[name].processes) for name in CASES}
    subjects |= dict.fromkeys(ring_faults.FAULTS, (ring_faults.run, PROCESSES))
    for name, (function, processes) in subjects.items():
        if rank < processes:
            try:
                results[name] = function(name, groups[processes])
            except Exception:
                results[name] = [traceback.format_exc()]
                if len(sys.argv) > 2:
                    print(rank, name, results[name], flush=True)
        (folder / f"results{rank}.json").write_text(json.dumps(results))


def main() -> None:
    import dlattn.torch  # noqa: F401  before the fork

    folder = Path(sys.argv[1])
    children = []
    for rank in range(PROCESSES):
        child = os.fork()
        if child == 0:
            try:
                _process(rank, folder)
            finally:
                sys.stdout.flush()
                os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
