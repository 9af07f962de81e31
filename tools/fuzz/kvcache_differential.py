"""Every kernel that serves a random problem of KV caches, against float64.

    python tools/fuzz/kvcache_differential.py --seconds 60    # a GPU if there is one, else CPU
    python tools/fuzz/kvcache_differential.py --seconds 600 --workers 16 # on all GPUs in turn
    python tools/fuzz/kvcache_differential.py --seed 1234 --count 1      # one problem again

What `differential.py` does for attention, for `attention_with_kvcache`, with new keys too,
`attention_varlen` with pages, `append_kv` and `page_table_from_csr`. Each sequence is held to a
bound of its own, twice the error of a plain computation in the same dtype, of what the elements
stand for if they are of 8 bits. What `append_kv` stores has to have the bits that NumPy computes,
and all other bytes of a cache's memory those that they had. Problems of seeds that are a multiple
of three are of NumPy arrays where that is possible.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import differential
import numpy as np
from differential import NumPyArrays, TorchArrays, Worst
from kvcache_draws import Limits, draw_kvcache
from kvcache_problems import KVCacheProblem
from random_problems import Placed, contiguous

import dlattn
from dlattn.bench.tensors import torch_module
from dlattn.reference import attention_reference, max_error, same_dtype_reference, to_float64

APPEND = "append_kv"
KERNELS = {
    "cpu": ("cpu", APPEND),
    "cuda": (
        *("auto", "decode", "decode:rows16", "decode:rows32", "sm90_latent", "sm90", "wmma"),
        *("scalar", APPEND),
    ),
}
# Options that say how to compute, and nothing of what.
PLANNED = ("return_lse", "batch_invariant", "num_splits", "split_size")
GUARD = 256  # bytes before a workspace and behind it; workspaces are aligned to as many
LIMITS = {"cpu": Limits(1 << 18, 1 << 21, True), "cuda": Limits(1 << 21, 1 << 23, False)}
WHOLE = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


class NumPyBlocks(NumPyArrays):
    """Flat blocks of memory, and what lies in them, on the CPU."""

    def whole(self, values: Any, dtype: str) -> Any:
        """An array of these numbers."""
        return np.array(values, self._dtype(dtype))

    def view(self, block: Any, place: Placed) -> Any:
        return self._view(block, place)

    def bits(self, x: Any) -> Any:
        """The same memory as integers."""
        return x.view(WHOLE[x.dtype.itemsize])

    def as_dtype(self, x: Any, dtype: str) -> Any:
        """The same memory as elements of a dtype."""
        return x.view(dtype)

    def copy(self, x: Any) -> Any:
        return x.copy()

    def put(self, bits: Any, place: Placed, at: tuple[Any, Any], values: Any) -> None:
        """Write rows of a view of a block."""
        self._view(bits, place)[at] = values

    def equal(self, a: Any, b: Any) -> bool:
        return bool(np.array_equal(a, b))

    @staticmethod
    def _dtype(dtype: str) -> Any:
        if dtype == "float8_e4m3fn":
            import ml_dtypes

            return ml_dtypes.float8_e4m3fn
        return NumPyArrays._dtype(dtype)


class TorchBlocks(TorchArrays):
    """The same in tensors."""

    def whole(self, values: Any, dtype: str) -> Any:
        """A tensor of these numbers."""
        made = self.torch.from_numpy(np.array(values)).to(self.device)
        return made.to(getattr(self.torch, dtype))

    def view(self, block: Any, place: Placed) -> Any:
        return block.as_strided(place.sizes, place.strides, place.offset)

    def bits(self, x: Any) -> Any:
        """The same memory as integers."""
        return x.view(getattr(self.torch, WHOLE[x.element_size()]))

    def as_dtype(self, x: Any, dtype: str) -> Any:
        """The same memory as elements of a dtype."""
        return x.view(getattr(self.torch, dtype))

    def copy(self, x: Any) -> Any:
        return x.clone()

    def put(self, bits: Any, place: Placed, at: tuple[Any, Any], values: Any) -> None:
        """Write rows of a view of a block."""
        indices = tuple(self.torch.from_numpy(x).to(self.device) for x in at)
        self.view(bits, place)[indices] = values

    def equal(self, a: Any, b: Any) -> bool:
        return bool(self.torch.equal(a, b))


class KVCacheRun:
    """One problem on every kernel that serves it."""

    def __init__(self, arrays: Any, problem: KVCacheProblem) -> None:
        self.arrays = arrays
        self.problem = problem
        self.made = self._tensors()
        self.stored = problem.stored() if problem.new else []
        if problem.call != "append":
            self._expect()

    def features(self) -> list[str]:
        """The entries that a summary counts."""
        library = "numpy" if isinstance(self.arrays, NumPyArrays) else "torch"
        return [*self.problem.features(), f"arrays of {library}"]

    def served(self, kernel: str) -> bool:
        """Whether the kernel says that it serves the problem, where out lies included."""
        if (self.problem.call == "append") != (kernel == APPEND):
            return False
        if kernel == APPEND:
            return True
        return bool(dlattn.supported(**self._asked(self._arguments(self._caches()[1], kernel))))

    def _asked(self, given: dict[str, Any]) -> dict[str, Any]:
        """The arguments with which `supported` and `plan` are asked about a call."""
        given = dict(given)
        if self.problem.call == "new keys":
            for name in ("k", "v", "rotary_cos", "rotary_sin", "rotary_interleaved"):
                given.pop(name, None)
            given["seqused_k"] = self.arrays.ints(self.problem.lengths)
        return {name.removesuffix("_cache"): value for name, value in given.items()}

    def _workspace(self, given: dict[str, Any], content: int) -> tuple[Any, Any]:
        """As many bytes as the plan needs, as elements of a dtype, and their block."""
        size = dlattn.plan(**self._asked(given)).workspace_bytes
        size = -(-size // 8) * 8
        block = self.arrays.whole(np.full(size + 2 * GUARD, 255, np.uint8), "uint8")
        block[GUARD : GUARD + size] = content
        return self.arrays.as_dtype(block[GUARD : GUARD + size], self.problem.workspace), block

    def _is_guarded(self, block: Any) -> bool:
        """Whether what lies around a workspace is as it was."""
        guard = self.arrays.whole(np.full(GUARD, 255, np.uint8), "uint8")
        return all(self.arrays.equal(x, guard) for x in (block[:GUARD], block[-GUARD:]))

    def check(self, kernel: str) -> tuple[float, float, str]:
        """Errors of out and lse over their bounds, and what else is wrong."""
        arrays, problem = self.arrays, self.problem
        table = self._wrong_table()
        if table:
            return math.inf, 0.0, table
        results: list[tuple[Any, Any]] = []
        for content in (255, 0):  # contents of a workspace: NaN, and zeros
            blocks, caches = self._caches()
            wanted = self._wanted(blocks)
            given = self._arguments(caches, kernel)
            memory: Any = None
            if problem.workspace:
                given["workspace"], memory = self._workspace(given, content)
            if problem.call != "append" and problem.out is None:
                # memory that a new result may be given
                sizes = (sum(problem.lengths_q), problem.heads, problem.dims[1])
                arrays.poisoned(Placed.of(sizes, contiguous(sizes)), problem.dtype)
            result = self._function()(**given)
            for got, want in zip(blocks, wanted, strict=True):
                if not arrays.equal(arrays.bits(got), want):
                    return math.inf, 0.0, "other bits in the cache"
            if problem.call == "append":
                results.append((result, None))
                continue
            out, lse = result if problem.options["return_lse"] else (result, None)
            if problem.out is not None and not arrays.untouched(self._out_block, problem.out):
                return math.inf, 0.0, "a write beside out"
            if memory is not None and not self._is_guarded(memory):
                return math.inf, 0.0, "a write beside the workspace"
            results.append((self._rows_first(out), lse))
        (out, lse), (again, lse_again) = results
        if problem.call == "append":
            return self._wrong_q(out)
        if not arrays.same(out, again) or (lse is not None and not arrays.same(lse, lse_again)):
            return math.inf, 0.0, "other bits the second time"
        of_no_batch = problem.options["batch_invariant"] or problem.options["split_size"]
        if of_no_batch and problem.call == "attend" and problem.batch > 1:
            alone = self._first_alone(kernel, out)
            if not arrays.same(alone, out[:1]):
                return math.inf, 0.0, "other bits alone than in a batch"
        return *self._errors(out, lse), ""

    def _function(self) -> Any:
        return {
            "append": dlattn.append_kv,
            "varlen": dlattn.attention_varlen,
        }.get(self.problem.call, dlattn.attention_with_kvcache)

    def _tensors(self) -> dict[str, Any]:
        """All inputs but the caches: they are made once."""
        arrays, problem = self.arrays, self.problem
        made: dict[str, Any] = {}
        rows = {"q": problem.q, **dict(zip("kv", problem.new, strict=False))}
        for name, place in problem.inputs.items():
            values = rows[name]
            block = np.full(place.block, np.nan, problem.real)
            view = NumPyArrays._view(block, place)
            if len(place.sizes) == 3:
                before, behind = problem.around
                view[before : place.sizes[0] - behind] = values
            else:
                view[...] = values.reshape(place.sizes)
            made[name] = self._layout(arrays.view(arrays.whole(block, problem.dtype), place))
        for name, (values, place) in problem.tensors.items():
            dtype = "float32"
            if name == "mask":
                dtype = "bool"
            elif name == "bias" and problem.seed % 2 == 0:
                dtype = problem.dtype
            made[name] = arrays.make(values, place, dtype)
        if problem.rotary is not None:
            for name in ("cos", "sin"):
                table = arrays.whole(getattr(problem.rotary, name), problem.rotary.dtype)
                made[f"rotary_{name}"] = table
            made["rotary_interleaved"] = problem.rotary.interleaved
            if problem.call == "append":
                made["q_fixed_position"] = problem.rotary.fixed_q
        for name, scale in zip(("k_descale", "v_descale"), problem.scales, strict=False):
            made[name] = arrays.make(scale.values, scale.place, "float32")
        return {**made, **self._lists(), **problem.options, "layout": problem.layout}

    def _lists(self) -> dict[str, Any]:
        """Lengths, and where keys lie."""
        arrays, problem = self.arrays, self.problem
        made: dict[str, Any] = {}
        if problem.slots is None or (problem.rotary is not None and not problem.slots_of_tokens):
            made["seqused_k"] = arrays.ints(problem.told_lengths)
        if problem.slots is not None:
            before, behind = problem.around
            slots = np.concatenate([np.zeros(before), problem.slots, np.zeros(behind)])
            if not problem.varlen_new:
                slots = slots.reshape(problem.batch, problem.counts[0])
            made["slots"] = arrays.whole(slots.astype(np.int64), problem.slot_dtype)
        elif problem.csr is not None:
            made["page_table"], self.csr_lengths = self._table_of_lists()
        elif problem.page_size:
            columns = problem.told_entries.shape[1]
            table = np.pad(problem.told_entries, ((0, 0), (0, problem.table_gap)))
            made["page_table"] = arrays.ints(table)[:, :columns]
        elif problem.chosen:
            made["cache_batch_idx"] = arrays.ints(problem.told_entries)
        if problem.told_leftpads is not None:
            made["leftpad_k"] = arrays.ints(problem.told_leftpads)
        if problem.call == "varlen":
            starts = np.cumsum([0, *problem.lengths_q])
            made |= {"cu_seqlens_q": arrays.ints(starts), "cu_seqlens_k": None}
            made["max_seqlen_q"] = max(problem.lengths_q)
        elif problem.varlen_new and not problem.slots_of_tokens:
            made["cu_seqlens_q"] = arrays.ints(problem.around[0] + np.cumsum([0, *problem.counts]))
        if problem.call != "append":
            made["max_seqlen_k"] = problem.max_seqlen_k
        return made

    def _table_of_lists(self) -> Any:
        arrays, problem = self.arrays, self.problem
        assert problem.csr is not None
        dtype, *lists = problem.csr
        columns = problem.entries.shape[1]
        longest = int(np.diff(lists[0]).max(initial=0))
        return dlattn.page_table_from_csr(
            *(arrays.whole(x.astype(np.int64), dtype) for x in lists),
            page_size=problem.page_size,
            max_pages=None if longest == columns else columns,
        )

    def _wrong_table(self) -> str:
        """The fault of the table that lists of pages were made into."""
        if self.problem.csr is None:
            return ""
        table, lengths = to_float64(self.made["page_table"]), to_float64(self.csr_lengths)
        if not np.array_equal(table, self.problem.told_entries):
            return "page_table_from_csr makes another table"
        same = np.array_equal(lengths, self.problem.lengths)
        return "" if same else "page_table_from_csr makes other lengths"

    def _caches(self) -> tuple[list[Any], list[Any]]:
        """New blocks of memory, and K and V in them, in the call's layout."""
        arrays, problem = self.arrays, self.problem
        places = problem.places
        apart = problem.memory.startswith("apart")
        sizes = [p.block for p in places] if apart else [max(p.block for p in places)]
        blocks = [np.full(size, np.nan, problem.real) for size in sizes]
        if problem.cache_dtype == "int8":
            blocks = [np.full(size, -77, problem.real) for size in sizes]
        for i, (place, values) in enumerate(zip(places, problem.numbers, strict=True)):
            NumPyArrays._view(blocks[i if apart else 0], place)[...] = values
        made = [arrays.whole(block, problem.cache_dtype) for block in blocks]
        views = [arrays.view(made[i if apart else 0], place) for i, place in enumerate(places)]
        return made, [self._layout(view) for view in views]

    def _wanted(self, blocks: list[Any]) -> list[Any]:
        """Those blocks' bits after the call."""
        arrays, problem = self.arrays, self.problem
        wanted = [arrays.copy(arrays.bits(block)) for block in blocks]
        if not self.stored:
            return wanted
        kept = slice(None) if problem.lost is None else ~problem.lost
        at = tuple(x[kept] for x in problem.where_new())
        for i, (place, rows) in enumerate(zip(problem.places, self.stored, strict=True)):
            bits = arrays.bits(arrays.whole(rows[kept], problem.cache_dtype))
            arrays.put(wanted[i if len(wanted) > 1 else 0], place, at, bits)
        return wanted

    def _arguments(self, caches: list[Any], kernel: str) -> dict[str, Any]:
        problem = self.problem
        names = ("k", "v") if problem.call == "varlen" else ("k_cache", "v_cache")
        given = {**self.made, **dict(zip(names, caches, strict=True))}
        if problem.call == "append":
            return given
        given["kernel"] = kernel
        if problem.out is not None:
            view, self._out_block = self.arrays.poisoned(problem.out, problem.dtype)
            given["out"] = self._layout(view)
        return given

    def _layout(self, x: Any) -> Any:
        return self.arrays.swap_heads(x) if self.problem.layout == "bhsd" else x

    _rows_first = _layout

    def _first_alone(self, kernel: str, out: Any) -> Any:
        """The first sequence without the others.

        Its rows are aligned as they are beside the others, whose result `out` is: kernels may be
        chosen by that.
        """
        problem, beside = self.problem, self.arrays.beside
        given = self._arguments(self._caches()[1], kernel)
        whole = {**given, "out": self._layout(out)}
        for name in ("seqused_k", "page_table", "cache_batch_idx", "leftpad_k"):
            if name in given:
                given[name] = given[name][:1]
        of_batch = ["q", "out"]
        if not problem.page_size and not problem.chosen:
            of_batch += ["k_cache", "v_cache"]
        given |= {name: beside(whole[name][:1], whole[name]) for name in of_batch}
        if "mask" in given and given["mask"].ndim == 4:
            given["mask"] = given["mask"][:1]
        elif "mask" not in given and problem.options["split_size"]:  # at any capacity
            given["max_seqlen_k"] = problem.lengths[0]
        for name in ("alibi_slopes", "k_descale", "v_descale"):
            if name in given and given[name].ndim == 2:
                given[name] = given[name][:1]
        return self._rows_first(dlattn.attention_with_kvcache(**{**given, "return_lse": False}))

    def _expect(self) -> None:
        """Exact results of every sequence, and their bounds."""
        problem = self.problem
        self._parts = []
        q = problem.rotated_q()
        starts = np.cumsum([0, *problem.lengths_q])
        for b, rows in enumerate(problem.lengths_q):
            if not rows:
                continue
            own_q = q[None, starts[b] : starts[b + 1]]
            k, v, options = self._sequence(b, rows)
            exact = attention_reference(own_q, k, v, **options)
            absolute = attention_reference(own_q, k, abs(v), **options)[0]
            plain = same_dtype_reference(own_q, k, v, dtype=problem.dtype, **options)
            worst = Worst()
            worst.take(plain, exact, absolute, np.ones(exact[1].shape, bool))
            worst.scores = score_size(own_q, k, options["softmax_scale"])
            if problem.dtype == "float64":  # plain is exact itself: it tells of no rounding
                slopes = np.abs(options.get("alibi_slopes", np.zeros(1))).max()
                worst.scores += float(slopes) * (k.shape[1] + rows)
            at = slice(int(starts[b]), int(starts[b + 1]))
            self._parts.append((b, at, exact, worst.bounds(problem.dtype)))

    def _sequence(self, b: int, rows: int) -> tuple[Any, Any, dict[str, Any]]:
        """Its keys and values side by side, and its share of the options."""
        problem = self.problem
        length = problem.lengths[b]
        keys = np.arange(length)
        at = problem.where(b, keys)
        elements = [x[at].copy() for x in problem.numbers]
        if self.stored:
            new = problem.owners[0] == b
            for x, stored in zip(elements, self.stored, strict=True):
                x[problem.before[b] :] = stored[new]
        k, v = (problem.stands_for(x, name, b) for name, x in zip("kv", elements, strict=True))
        options = {name: x for name, x in problem.options.items() if name not in PLANNED}
        shape = (problem.batch, problem.heads)
        for name, (values, _) in problem.tensors.items():
            if name in ("bias", "mask"):
                options[name] = of_sequence(values, b, rows, length)
            elif name == "alibi_slopes":
                options[name] = np.broadcast_to(values, shape)[b : b + 1]
            else:
                options[name] = values
        if problem.leftpads is not None:
            hidden = keys < problem.leftpads[b]
            k[hidden] = v[hidden] = 0.0
            options["mask"] = options.get("mask", True) & ~hidden[None, None, None]
        return k[None], v[None], options

    def _errors(self, out: Any, lse: Any) -> tuple[float, float]:
        problem = self.problem
        out = to_float64(out).reshape(-1, problem.heads, problem.dims[1])
        worst_out = worst_lse = 0.0
        for b, rows, exact, bound in self._parts:
            worst_out = max(worst_out, max_error(out[None, rows], exact[0]) / bound.out)
            if lse is not None:
                part = lse[None, :, rows] if problem.call == "varlen" else lse[b : b + 1]
                worst_lse = max(worst_lse, max_error(part, exact[1]) / bound.lse)
        return worst_out, worst_lse

    def _wrong_q(self, q: Any) -> tuple[float, float, str]:
        """The rotated q of `append_kv` has the bits of its numbers."""
        arrays, problem = self.arrays, self.problem
        if problem.q is None:
            return (0.0, 0.0, "") if q is None else (math.inf, 0.0, "a result without q")
        rows = self._rows_first(q)
        before, behind = problem.around
        if len(rows.shape) == 3:
            rows = rows[before : rows.shape[0] - behind]
        want = arrays.whole(problem.rotated_q().reshape(tuple(rows.shape)), problem.dtype)
        return (0.0, 0.0, "") if arrays.same(rows, want) else (math.inf, 0.0, "other bits of q")


def of_sequence(values: np.ndarray, b: int, rows: int, keys: int) -> np.ndarray:
    """The part for one of the batch of a tensor that broadcasts to (batch, heads, queries,
    keys)."""
    full = values[(None,) * (4 - values.ndim)]
    full = full[b : b + 1] if full.shape[0] > 1 else full
    full = full[:, :, :rows] if full.shape[2] > 1 else full
    return full[..., :keys] if full.shape[3] > 1 else full


def score_size(q: np.ndarray, k: np.ndarray, scale: float | None) -> float:
    """At least the magnitude of the largest product of q and k, scaled: float32 rounds it."""
    lengths = (np.linalg.norm(to_float64(x), axis=-1) for x in (q, k))
    product = math.prod(float(np.max(x, initial=0.0)) for x in lengths)
    return (scale or q.shape[-1] ** -0.5) * product


def attempt(arrays: Any, problem: Any) -> Any:
    """A run on a device; on the CPU every third problem is one of NumPy arrays."""
    if arrays.device == "cpu" and problem.seed % 3 == 0:
        arrays = NumPyBlocks()
    return KVCacheRun(arrays, problem)


def run(
    arrays: Any,
    kernels: tuple[str, ...],
    seed: int,
    count: int | None = None,
    seconds: float | None = None,
    dtypes: tuple[str, ...] = (),
    step: int = 1,
) -> differential.Summary:
    """Problems of every `step`th seed from `seed` on, as many as asked for or as time allows."""
    if kernels == differential.KERNELS[arrays.device]:
        kernels = KERNELS[arrays.device]

    def draw(seed: int, dtypes: tuple[str, ...], most_scores: int) -> Any:
        del most_scores
        return draw_kvcache(seed, dtypes, LIMITS[arrays.device])

    return differential.run(arrays, kernels, seed, count, seconds, dtypes, draw, step, attempt)


def main() -> int:
    """Exit code 1 if a kernel failed, 2 if none served anything."""
    torch_module().set_num_threads(1)
    return differential.main(__doc__, TorchBlocks, run)


if __name__ == "__main__":
    sys.exit(main())
