"""Inputs, exact results and errors on torch tensors, wherever these are: on a GPU in milliseconds.

The definitions are those of `dlattn.reference`, which a test compares with this.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

from dlattn.bench.cases import FLOAT8, Case
from dlattn.reference import bound_of

OFFSET = 0.25  # a mean that is not zero, so that an indexing error cannot cancel out

# Largest error, relative, of rounding to a dtype.
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}

LARGEST_FLOAT8 = 448.0
_FLOAT8_NAN = 0x7F
RESULT_OF_FLOAT8 = "bfloat16"  # the dtype of the result where nothing else is asked for
DESCALES = ("q_descale", "k_descale", "v_descale")
_BASES = 8  # of q and k, in which plain computations in float8 are made
_WEIGHTS_SCALE = 256.0  # of the weights, at most 1, that are rounded to float8

_SCORES_AT_A_TIME = 1 << 25
_ALL_SCORES = 1 << 27  # problems with more scores than this are checked on a sample of rows
_SAMPLE_ROWS = 256

Tensor = Any
Options = Mapping[str, Any]


def torch_module() -> Any:
    """The module, imported when it is needed."""
    return importlib.import_module("torch")


def draw(case: Case, device: str, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Normal inputs with a mean that is not zero, (batch, num_heads, seqlen, head_dim)."""
    torch = torch_module()
    batch_size, num_heads, seqlen, head_dim = case.sizes
    generator = torch.Generator(device=device).manual_seed(seed)
    tensors = []
    for heads in (num_heads, case.heads_kv, case.heads_kv):
        sizes = (batch_size, heads, seqlen, head_dim)
        x = torch.randn(sizes, device=device, generator=generator) + OFFSET
        tensors.append(x.to(getattr(torch, case.dtype)))
    return tensors[0], tensors[1], tensors[2]


def dtype_of(x: Tensor) -> str:
    """The name of a tensor's dtype."""
    return str(x.dtype).removeprefix("torch.")


def fill_with_nan(x: Tensor) -> Tensor:
    """Fill a tensor of any floating-point dtype, in place."""
    if dtype_of(x) != FLOAT8:
        return x.fill_(math.nan)
    x.view(torch_module().uint8).fill_(_FLOAT8_NAN)
    return x


def _heads(x: Tensor, heads: list[int]) -> Tensor:
    """Those of (total, heads, dim)."""
    if dtype_of(x) != FLOAT8:
        return x[:, heads]
    return x.view(torch_module().uint8)[:, heads].view(x.dtype)


def to_float8(x: Tensor) -> tuple[Tensor, Tensor]:
    """In float8_e4m3fn by one scale, which takes the largest magnitude to 448; its inverse too."""
    torch = torch_module()
    descale = x.abs().amax().float() / LARGEST_FLOAT8
    return (x.float() / descale).to(getattr(torch, FLOAT8)), descale


def dequantised(x: Tensor, descale: Tensor | None, dtype: Any) -> Tensor:
    """In `dtype`; `descale` is that of each (batch, head), or of each group of heads."""
    if dtype_of(x) == FLOAT8:
        x = x.float()  # which every version of torch has for it
    x = x.to(dtype)
    if descale is None:
        return x
    each = descale.to(dtype).repeat_interleave(x.shape[1] // descale.shape[1], 1)
    return x * each[..., None, None]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    plain: bool = False,
    rows: slice = slice(None),
    causal: Any = False,
    softmax_scale: float | None = None,
    window: tuple[int | None, int | None] = (None, None),
    softcap: float = 0.0,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    terms: list[float] | None = None,
) -> tuple[Tensor, Tensor]:
    """`out` and `lse` of the query rows `rows`; arguments mean what they mean to dlattn.

    q, k and v are (batch, heads, seqlen, dim). In float64; if `plain`, what a plain implementation
    in q's dtype computes: scores and softmax in float32, probabilities and result rounded. In
    float8 it rounds the weights, relative to a row's largest, times 256, and the result to
    bfloat16. `terms` gets the largest magnitude of a probability times an element of v, for each
    block of rows.
    """
    torch = torch_module()
    result_dtype = q.dtype if dtype_of(q) != FLOAT8 else getattr(torch, RESULT_OF_FLOAT8)
    compute = torch.float32 if plain and q.dtype != torch.float64 else torch.float64
    batch_size, num_heads, seqlen_q, head_dim = q.shape
    seqlen_k = k.shape[2]
    first, last, _ = rows.indices(seqlen_q)
    full = (batch_size, num_heads, seqlen_q, seqlen_k)
    scores = {
        "bias": None if bias is None else bias.expand(full),
        "mask": None if mask is None else mask.expand(full),
    }
    shift = 0 if causal == "top_left" else seqlen_k - seqlen_q
    group = num_heads // k.shape[1]
    k, v = (
        dequantised(x, descale, compute).repeat_interleave(group, 1)
        for x, descale in ((k, k_descale), (v, v_descale))
    )
    scale = 1.0 / math.sqrt(head_dim) if softmax_scale is None else softmax_scale
    step = max(1, _SCORES_AT_A_TIME // max(1, batch_size * num_heads * seqlen_k))
    outs, lses = [], []
    for start in range(first, max(last, first + 1), step):
        block = slice(start, min(start + step, last))
        x = (dequantised(q[:, :, block], q_descale, compute) @ k.transpose(2, 3)) * scale
        if softcap > 0.0:
            x = softcap * torch.tanh(x / softcap)
        position = torch.arange(block.start, block.stop, device=q.device)[:, None] + shift
        key = torch.arange(seqlen_k, device=q.device)[None, :]
        if alibi_slopes is not None:
            slopes = alibi_slopes.to(compute).expand(batch_size, num_heads)
            x = x - slopes[..., None, None] * (position - key).abs()
        if scores["bias"] is not None:
            x = x + scores["bias"][:, :, block].to(compute)
        seen = torch.ones_like(x, dtype=torch.bool)
        if causal:
            seen &= key <= position
        if window[0] is not None:
            seen &= key >= position - window[0]
        if window[1] is not None:
            seen &= key <= position + window[1]
        if scores["mask"] is not None:
            seen &= scores["mask"][:, :, block]
        x = torch.where(seen, x, -math.inf)
        probabilities, lse = _softmax(x, sinks)
        if terms is not None and seqlen_k:
            terms.append(largest(probabilities * v.abs().amax(3)[:, :, None, :]))
        if plain:
            out = (_rounded(probabilities, q.dtype) @ v).to(result_dtype).to(compute)
        else:
            out = probabilities @ v
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def _rounded(probabilities: Tensor, dtype: Any) -> Tensor:
    """The probabilities as a kernel in `dtype` multiplies them by v."""
    if str(dtype) != f"torch.{FLOAT8}":
        return probabilities.to(dtype).to(probabilities.dtype)
    # float8 has no room for small numbers, so they are taken relative to the largest of their row.
    largest_of_row = probabilities.amax(3, keepdim=True)
    scale = largest_of_row / _WEIGHTS_SCALE
    scale = scale.where(scale > 0, 1)
    return (probabilities / scale).to(dtype).to(probabilities.dtype) * scale


def _softmax(x: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Softmax of the rows of `x`, and the log of its denominator."""
    torch = torch_module()
    one_each = (*x.shape[:3], 1)
    if sinks is None:
        sink = x.new_full(one_each, -math.inf)
    else:
        sink = sinks.to(x.dtype)[None, :, None, None].expand(one_each)
    top = torch.cat([x, sink], 3).amax(3, keepdim=True)
    top = torch.where(top == -math.inf, 0, top)
    weights = torch.exp(x - top)
    total = weights.sum(3, keepdim=True) + torch.exp(sink - top)
    return weights / torch.where(total == 0, 1, total), (top + torch.log(total))[..., 0]


def samples(batch_size: int, num_heads: int, seqlen_q: int, seqlen_k: int) -> Iterator[Any]:
    """Which (batch entries, heads, query rows) to check: all, or those at the ends of many."""
    whole = slice(None)
    if batch_size * num_heads * seqlen_q * seqlen_k <= _ALL_SCORES:
        yield whole, whole, whole
        return
    count = min(_SAMPLE_ROWS, seqlen_q)
    for b, h in sorted({(0, 0), (batch_size - 1, num_heads - 1)}):
        for rows in (slice(0, count), slice(seqlen_q - count, seqlen_q)):
            yield slice(b, b + 1), slice(h, h + 1), rows


class Expected:
    """The right values of some rows, and how far off a correct result may be there.

    That is twice the error of a plain computation in the same dtype, but no less than what rounding
    once the largest probability times v, and once the result, may amount to: where one key
    outweighs the others a plain computation may be exact by luck. Where a `precision` is asked for
    the plain computation is that on float8 tensors, with a scale for each of q, k and v; and as the
    rounding of one q·k may be most of a row's error, it is the worst of several, of q and k in as
    many bases.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, options: Options) -> None:
        """Compute them; q, k and v are (batch, heads, seqlen, dim)."""
        self._parts = []
        options = dict(options)
        narrow = options.pop("precision", None) is not None
        group = q.shape[1] // k.shape[1]
        dtype = dtype_of(q) if dtype_of(q) != FLOAT8 else RESULT_OF_FLOAT8
        for batch, heads, rows in samples(q.shape[0], q.shape[1], q.shape[2], k.shape[2]):
            heads_kv = heads
            if heads != slice(None):
                heads_kv = slice(heads.start // group, heads.start // group + 1)
            part = (q[batch, heads], k[batch, heads_kv], v[batch, heads_kv])
            chosen = _of_part(options, batch, heads, heads_kv)
            terms: list[float] = []
            exact, _ = attention(*part, rows=rows, terms=terms, **chosen)
            if narrow:
                plains = [_plain_float8(x, rows, chosen) for x in _in_bases(*part)]
            else:
                plains = [attention(*part, rows=rows, plain=True, **chosen)[0]]
            # The probabilities of a plain computation in float8 are never right by luck, but 1.
            largest_term = max(terms, default=0.0) if dtype_of(q) != FLOAT8 else 0.0
            rounding = ROUNDING[dtype] * (largest_term + largest(exact))
            errors = [largest(plain.double() - exact) for plain in plains]
            error = max(*errors, rounding / 2)
            bound = bound_of(dtype, error, largest(exact))
            self._parts.append(((batch, heads, rows), exact, bound))

    def errors(self, out: Tensor) -> tuple[float, float]:
        """Largest error, and the largest error in units of its bound."""
        found = [(largest(out[at].double() - exact), bound) for at, exact, bound in self._parts]
        return max(error for error, _ in found), max(error / bound for error, bound in found)


def _in_bases(q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """As they are, and with q and k rotated alike, which changes what rounds and no q·k."""
    torch = torch_module()
    yield q, k, v
    generator = torch.Generator().manual_seed(0)
    for _ in range(_BASES - 1):
        normal = torch.randn(q.shape[3], q.shape[3], generator=generator, dtype=torch.float64)
        rotation = torch.linalg.qr(normal)[0].to(q.device)
        yield (q.double() @ rotation).float(), (k.double() @ rotation).float(), v


def _plain_float8(inputs: tuple[Tensor, ...], rows: slice, options: Options) -> Tensor:
    q, k, v = (to_float8(x) for x in inputs)
    scales = {
        name: descale.reshape(1, 1) for name, (_, descale) in zip(DESCALES, (q, k, v), strict=True)
    }
    return attention(q[0], k[0], v[0], rows=rows, plain=True, **options, **scales)[0]


class ExpectedVarlen:
    """The same for varlen, (total, heads, dim): the longest, shortest, first and last sequence."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], options: Options
    ) -> None:
        """Compute them for the first and the last head."""
        self._sequences = []
        heads = sorted({0, q.shape[1] - 1})
        group = q.shape[1] // k.shape[1]
        heads_kv = [h // group for h in heads]
        last = len(lengths) - 1
        chosen = {0, last, lengths.index(max(lengths)), lengths.index(min(lengths))}
        for b in sorted(chosen):
            start = sum(lengths[:b])
            rows = slice(start, start + lengths[b])
            part = [
                _heads(x[rows], of).transpose(0, 1)[None]
                for x, of in ((q, heads), (k, heads_kv), (v, heads_kv))
            ]
            chosen_options = {
                name: value[b : b + 1, heads_kv] if name in DESCALES else value
                for name, value in options.items()
            }
            expected = Expected(part[0], part[1], part[2], chosen_options)
            self._sequences.append((rows, heads, expected))

    def errors(self, out: Tensor) -> tuple[float, float]:
        """Largest error, and the largest error in units of its bound."""
        found = [
            expected.errors(out[rows][:, heads].transpose(0, 1)[None])
            for rows, heads, expected in self._sequences
        ]
        return max(error for error, _ in found), max(ratio for _, ratio in found)


def largest(x: Tensor) -> float:
    """The largest magnitude; infinite if there is a NaN."""
    if x.numel() == 0:
        return 0.0
    value = float(x.abs().max())
    return math.inf if math.isnan(value) else value


def _of_part(options: Options, batch: slice, heads: slice, heads_kv: slice) -> dict[str, Any]:
    """The options as they hold for some batch entries and heads; descales are of key heads."""
    chosen = dict(options)
    for name in ("bias", "mask"):
        if chosen.get(name) is not None:
            x = chosen[name]
            x = x[(None,) * (4 - x.dim())]
            x = x[batch] if x.shape[0] > 1 else x
            chosen[name] = x[:, heads] if x.shape[1] > 1 else x
    if chosen.get("alibi_slopes") is not None:
        slopes = chosen["alibi_slopes"]
        chosen["alibi_slopes"] = slopes[heads] if slopes.dim() == 1 else slopes[batch, heads]
    if chosen.get("sinks") is not None:
        chosen["sinks"] = chosen["sinks"][heads]
    for name in DESCALES:
        if chosen.get(name) is not None:
            chosen[name] = chosen[name][batch, heads_kv]
    return chosen
