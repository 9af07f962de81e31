"""`quantize_kv`: keys and values in 8 bits."""

from __future__ import annotations

from typing import Any

from dlattn import _core
from dlattn._types import Layout, Precision, QuantizedKV, Tensor


def quantize_kv(
    k: Tensor,
    v: Tensor,
    *,
    precision: Precision = "int8_fp8",
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_k: int | None = None,
    seqused_k: Tensor | None = None,
    layout: Layout = "bshd",
    stream: Any = None,
) -> QuantizedKV:
    """Store keys and values in 8 bits, to be attended to any number of times.

    This does once what `attention(..., precision=...)` does with k and v in each call: for
    cross-attention, or wherever k and v outlive a call. k and v themselves are needed no longer.
    Pass the result as k, and None for v.

    For each head and sequence, the mean of 64 keys is subtracted from k, which the softmax does not
    see, and k is rotated by a Hadamard transform with fixed signs [1], which spreads each column
    over all of them; v is stored as it is. Blocks of keys, counted from a sequence's first, have 64
    keys ("int8_fp8" [2], "int8_fp16") or 128 ("fp8"; 96 with head dims up to 64). A block of k has
    a scale: its largest magnitude over 127 for 8-bit integers, a power of two for float8_e4m3fn. A
    block of v has a power of two, and is float8_e4m3fn, or float16 ("int8_fp16"). Both head dims
    are stored as 64 columns, or 128 if one is beyond 64, or 256 if one is beyond 128.

    Args:
        k: Keys, (batch, seqlen_k, num_heads_kv, head_dim) in the layout "bshd", or with
            cu_seqlens_k (total_k, num_heads_kv, head_dim). float16 or bfloat16; head_dim up to 256.
            Any strides of at least 0 with a contiguous last dimension.
        v: Values, of k's shape but for head_dim, which is up to 256 too, and of k's dtype.
        precision: "int8_fp8", "int8_fp16" or "fp8", see `attention`.
        cu_seqlens_k: int32, (batch + 1,), as for `attention_varlen`. None: fixed length.
        max_seqlen_k: At least the number of keys of the longest sequence; with cu_seqlens_k alone.
        seqused_k: int32, (batch,), as for `attention_varlen`: other keys are not read.
        layout: Dimensions of k and v, as for `attention`.
        stream: As for `attention`.

    Values: finite. Another number in k makes all keys of its block NaN, or with "fp8" its key; in v
    it makes itself NaN.

    Returns:
        A `QuantizedKV`, whose buffer is a new tensor of k's framework and device.

    Raises:
        UnsupportedError, TypeError, DeviceError: As `attention`.

    References:
        [1] Shah et al. FlashAttention-3. arXiv:2407.08608, 2024 ("incoherent processing").
        [2] Zhang et al. SageAttention2. arXiv:2411.10958, 2024.
    """
    fields = _core.quantize_kv(
        k, v, precision, layout, stream, cu_seqlens_k, max_seqlen_k, seqused_k
    )
    return QuantizedKV(fields[0], precision, *fields[1:])
