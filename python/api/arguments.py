"""The arguments of `attention` and of the functions that take the same ones, each declared once.

`write.py` makes signatures, docstrings and calls of the native module from this list, in its order.
The native module's own list is `kArguments` in python/bindings/problem.cpp; a test compares them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

ATTENTION = ("attention", "attention_varlen", "supported", "plan")
VARLEN = ("attention_varlen", "supported", "plan")
KVCACHE = ("attention_with_kvcache",)
ALL = (*ATTENTION, *KVCACHE)
BACKWARD = (
    *("attention_backward", "attention_varlen_backward"),
    *("supported_backward", "plan_backward"),
)
TORCH = ("torch_attention", "torch_attention_varlen")
TORCH_KVCACHE = ("torch_attention_with_kvcache",)


@dataclass(frozen=True)
class Argument:
    """An argument. Line breaks in texts do not count: they are wrapped when written."""

    declaration: str
    """As in a signature. Without a default it is required, and may be passed by position."""
    doc: str
    """Its paragraph under Args: meaning, shape, dtype, unit, accepted values. References, as [1],
    are left out in functions other than `attention`."""
    functions: tuple[str, ...] = ALL
    """Which functions take it. `supported` and `plan` run without what `attention` lacks."""
    required_by: tuple[str, ...] = ()
    """Functions in which it has no default nevertheless, and is passed by keyword."""
    values: str = ""
    """Its paragraph under Values: which values are accepted, and what their extremes give."""
    varlen_doc: str = ""
    """The paragraph in `attention_varlen`, where it is another one."""
    kvcache_doc: str = ""
    """The same in `attention_with_kvcache`."""
    native: bool = True
    """Whether the native module takes it. If not, the template's code has done what it asks for."""

    @property
    def name(self) -> str:
        return self.declaration.partition(": ")[0]

    @property
    def type(self) -> str:
        return self.declaration.partition(": ")[2].partition(" = ")[0]

    @property
    def default(self) -> str | None:
        """As Python source; None: it has none."""
        return self.declaration.partition(" = ")[2] or None

    @property
    def is_tensor(self) -> bool:
        return self.type.startswith("Tensor")


def _of_gradients(*declarations: str) -> tuple[Argument, ...]:
    """Arguments of gradients alone, which their template describes and takes itself."""
    return tuple(Argument(one, "", functions=BACKWARD, native=False) for one in declarations)


_ARGUMENTS = (
    *_of_gradients("dout: Tensor | None"),
    Argument(
        "q: Tensor",
        """Queries, (batch, seqlen_q, num_heads, head_dim) in the layout "bshd". float16,
            bfloat16 or float8_e4m3fn [7]; float32 on the CPU and in the kernel "scalar"; float64 on
            the CPU. Any strides of at least 0 with a contiguous last dimension; rows aligned to 16
            bytes are fastest. The result is of q's framework and on q's device.""",
        kvcache_doc="""Queries, (batch, seqlen_q, num_heads, head_dim) in the layout "bshd": float16
            or bfloat16; float32 on the CPU and in the kernel "scalar"; float64 on the CPU. Strides
            and alignment are those of `attention`.""",
        varlen_doc="""Queries, (total_q, num_heads, head_dim) in the layout "bshd". Dtypes, strides
            and alignment are those of `attention`.""",
    ),
    Argument(
        "k: Tensor | QuantizedKV",
        """Keys, (batch, seqlen_k, num_heads_kv, head_dim), of q's dtype. num_heads_kv divides
            num_heads: query head h reads key head h // (num_heads // num_heads_kv) (GQA, MQA
            [4]). Or what `quantize_kv` returned of keys and values, with None for v.""",
        varlen_doc="""Keys, (total_k, num_heads_kv, head_dim), of q's dtype. num_heads_kv divides
            num_heads. Or what `quantize_kv` returned for the same cu_seqlens_k and seqused_k, with
            None for v: another number of sequences or a larger max_seqlen_k is refused, and on the
            CPU other offsets and more keys too. With page_table: a cache in pages, (num_pages,
            page_size, num_heads_kv, head_dim), as for `attention_with_kvcache`, also of int8 or
            float8_e4m3fn.""",
        functions=ATTENTION,
    ),
    Argument(
        "v: Tensor | None",
        "Values, (batch, seqlen_k, num_heads_kv, head_dim_v), of q's dtype.",
        varlen_doc="""Values, (total_k, num_heads_kv, head_dim_v), of q's dtype. With page_table:
            (num_pages, page_size, num_heads_kv, head_dim_v).""",
        functions=ATTENTION,
    ),
    Argument(
        "k_cache: Tensor",
        """Keys, of q's dtype, or of int8 or float8_e4m3fn with q of float16 or bfloat16 and
            k_descale: (batch, seqlen_k, num_heads_kv, head_dim), or with page_table
            (num_pages, page_size, num_heads_kv, head_dim), with any page_size from 1 on. All
            strides but the last are free, so pages of other layouts are views: (num_pages, 2,
            page_size, ...) is `cache[:, 0]` and `cache[:, 1]`.""",
        functions=KVCACHE,
    ),
    Argument(
        "v_cache: Tensor",
        "Values, of k_cache's shape with head_dim_v for head_dim, and of its dtype.",
        functions=KVCACHE,
    ),
    *_of_gradients("out: Tensor", "lse: Tensor"),
    Argument(
        "cu_seqlens_q: Tensor",
        """int32, (batch + 1,), contiguous: the row of q at which each sequence begins, and
            the one at which the last sequence ends. Not decreasing, within 0 to total_q. The first
            may be more than 0 and the last less than total_q, as in a slice of a larger batch: rows
            of out and lse that belong to no sequence are not written. On the CPU other values are
            refused.""",
        functions=VARLEN,
    ),
    Argument(
        "cu_seqlens_k: Tensor | None",
        """The same for the rows of k and v, within 0 to total_k. None with page_table.""",
        functions=VARLEN,
    ),
    Argument(
        "max_seqlen_q: int",
        """At least the number of queries of the longest sequence, 0 to 2^31 - 1. Further
            queries of a longer one are not computed on a GPU; the CPU refuses it.""",
        functions=VARLEN,
    ),
    Argument("max_seqlen_k: int", "The same for keys.", functions=VARLEN),
    *_of_gradients("dlse: Tensor | None = None"),
    Argument(
        "seqused_k: Tensor | None = None",
        """int32, (batch,), contiguous: how many of each sequence's keys to use, from its first;
            0 to its length. None: all. The causal shift counts the keys in use. With page_table it
            is required, and tells how many keys each sequence has.""",
        functions=(*VARLEN, *KVCACHE),
        required_by=KVCACHE,
        kvcache_doc="""int32, (batch,), contiguous, on q's device: how many keys each sequence has
            in the cache, those of this step's tokens among them; 0 to max_seqlen_k. Under
            causality the last query sees the last of them. With k, how many it has before the call,
            as flash-attn's cache_seqlens: the rows of k are counted in addition.""",
    ),
    Argument(
        "page_table: Tensor | None = None",
        """int32, (batch, max_pages), rows contiguous, on q's device: key j of sequence b is row
            j % page_size of page page_table[b, j // page_size]. Entries behind a sequence's last
            page, and those of pages before a window, whose keys no query sees, are not read and may
            be anything, as -1. None: k and v are not in pages.""",
        functions=(*VARLEN, *KVCACHE),
    ),
    Argument(
        "cache_batch_idx: Tensor | None = None",
        """int32, (batch,), contiguous: the entry of k_cache and v_cache that each sequence's
            keys are in; they may then have more entries than there are sequences. None: sequence b
            is entry b. Not with page_table.""",
        functions=("supported", "plan", *KVCACHE),
    ),
    Argument(
        "leftpad_k: Tensor | None = None",
        """int32, (batch,), contiguous: the number of hidden keys at the start of each sequence,
            0 to seqused_k. Positions still count them. None: 0.""",
        functions=("supported", "plan", *KVCACHE),
    ),
    Argument(
        "max_seqlen_k: int | None = None",
        """At least the number of keys of the longest sequence. A bound for the plan, which
            does not know seqused_k: a tight one may be faster. None: the capacity of the cache or
            the page table.""",
        functions=KVCACHE,
    ),
    Argument(
        "k: Tensor | None = None",
        """New keys, (batch, seqlen_new, num_heads_kv, head_dim), of q's dtype: `append_kv`
            writes them to k_cache, behind the keys that seqused_k counts, and they are attended to.
            A call that is refused writes nothing. Not with stream: lengths are added on the
            current stream of their library. None: the caches are only read.""",
        functions=KVCACHE,
        native=False,
    ),
    Argument(
        "v: Tensor | None = None",
        "New values, of k's shape with head_dim_v for head_dim. With k alone.",
        functions=KVCACHE,
        native=False,
    ),
    Argument(
        "rotary_cos: Tensor | None = None",
        """Cosines, (positions, rotary_dim / 2), of q's dtype or float32, with k alone: k, and q
            with as many rows, are rotated by their positions as by `append_kv`, counted from
            leftpad_k. Without causal and window all rows of q have the position of the
            sequence's first new key, as in flash-attn.""",
        functions=KVCACHE,
        native=False,
    ),
    Argument(
        "rotary_sin: Tensor | None = None",
        "Sines, the same.",
        functions=KVCACHE,
        native=False,
    ),
    Argument(
        "rotary_interleaved: bool = False",
        """Whether pairs are columns 2j and 2j + 1 (GPT-J); else they are j and
            j + rotary_dim / 2 (GPT-NeoX, Llama).""",
        functions=KVCACHE,
        native=False,
    ),
    Argument(
        "causal: Causal = False",
        """Which keys a query may attend to. Query i stands at key position p = i + shift.
            True or "bottom_right": keys j <= p with shift = seqlen_k - seqlen_q, so that the last
            query sees the last key. "top_left": keys j <= p with shift = 0. False: all keys
            (shift = seqlen_k - seqlen_q, for `window` and `alibi_slopes`).""",
        varlen_doc="""As for `attention`, with the lengths of each sequence: False, True,
            "bottom_right" or "top_left".""",
        kvcache_doc="""As for `attention`, with seqused_k for seqlen_k: False, True, "bottom_right"
            or "top_left". seqlen_q new tokens see those before them and each other with True.""",
    ),
    Argument(
        "softmax_scale: float | None = None",
        "Factor of q·k, from 2^-126 to 2^126. None: 1 / sqrt(head_dim).",
        values="2^-126 (1.18e-38) to 2^126 (8.5e37).",
    ),
    Argument(
        "window: Window = (None, None)",
        """(left, right), the number of keys that a query sees to either side of its position:
            p - left <= j <= p + right. None on a side: no limit.""",
    ),
    Argument(
        "softcap: float = 0.0",
        """If not 0, scores become softcap * tanh(score / softcap), before bias and ALiBi.
            From 2^-100 to 2^100.""",
        values="0 for none, or 2^-100 (7.9e-31) to 2^100 (1.27e30).",
    ),
    Argument(
        "bias: Tensor | None = None",
        """Added to the scores. Broadcastable to (batch, num_heads, seqlen_q, seqlen_k); q's
            dtype or float32, with q of float8_e4m3fn float16, bfloat16 or float32. -inf hides the
            key.""",
        functions=ATTENTION,
        varlen_doc="""Added to the scores. Broadcastable to (batch, num_heads, max_seqlen_q,
            max_seqlen_k); q's dtype or float32, with q of float8_e4m3fn as for `attention`. -inf
            hides the key.""",
        values="""-inf hides the key, as `mask` does. Every finite number, down to the least of its
            dtype, is a number like any other: a row all of whose keys have a large negative bias
            is not hidden. If they share one of magnitude 1e9 or more, beside which scores vanish,
            out is the mean of v over those keys. Below that it is a weighted mean of v's rows, with
            at most twice the error of a plain computation in fp32, in natural scores or times
            log2(e). NaN or +inf: the row is NaN.""",
    ),
    Argument(
        "mask: Tensor | None = None",
        "bool, True where a query may attend to a key; broadcastable as `bias`.",
        kvcache_doc="""bool, True where a query may attend to a key; broadcastable to (batch,
            num_heads, seqlen_q, max_seqlen_k). Its last dimension counts a sequence's keys from its
            first. A tree of drafts is such a mask.""",
    ),
    Argument(
        "alibi_slopes: Tensor | None = None",
        """float32, (num_heads,) or (batch, num_heads): slope * |p - j| is subtracted from the
            scores [5].""",
        values="""Any. Beyond 2^64 (1.8e19), ±inf too, it counts as 2^64 with its sign. NaN: the
            head's rows are NaN.""",
    ),
    Argument(
        "sinks: Tensor | None = None",
        """float32, (num_heads,): a logit per head that joins the softmax's denominator, and
            has no value [6].""",
        values="Any. -inf: no sink. +inf: out = 0 and lse = +inf. NaN: NaN.",
    ),
    Argument(
        "q_descale: Tensor | None = None",
        """With q of float8_e4m3fn alone: the factor of its elements, one for each head.
            float32 on q's device, which the host does not read; broadcastable to (batch,
            num_heads_kv), as FlashAttention-3 takes it, or to (batch, num_heads). None: 1.""",
        functions=ATTENTION,
        values="""Positive and finite, or 0, and so must be its product with k_descale. That times
            softmax_scale is 0 or from 2^-126 to 2^126; below, it may count as 0. Negative or NaN:
            the head's rows are NaN; inf: NaN or infinite. Only rows that see no key may be 0 then,
            as always.""",
    ),
    Argument(
        "k_descale: Tensor | None = None",
        "The same for k, broadcastable to (batch, num_heads_kv).",
        varlen_doc="""The same for k, broadcastable to (batch, num_heads_kv). With page_table and k
            of int8 or float8_e4m3fn, beside q of float16 or bfloat16: the factor of its elements
            with which `append_kv` wrote them, required then.""",
        kvcache_doc="""The factor of the elements of k_cache of int8 or float8_e4m3fn, with which
            `append_kv` wrote them: float32 on q's device, which the host does not read,
            broadcastable to (batch, num_heads_kv). Required then, and not with other dtypes.""",
        values="As for q_descale.",
    ),
    Argument(
        "v_descale: Tensor | None = None",
        "The same for v, broadcastable to (batch, num_heads_kv).",
        varlen_doc="The same for v.",
        kvcache_doc="The same for v_cache.",
        values="Any: a factor of out.",
    ),
    Argument(
        "precision: Precision | None = None",
        """The numbers that are multiplied, with q of float16 or bfloat16 and head dims up to
            256. None: the inputs as they are. "int8_fp8": 8-bit integers for q·k, and
            float8_e4m3fn for probabilities times v [8]. "int8_fp16": 8-bit integers for q·k, and
            float16 for probabilities times v [9]. "fp8": float8_e4m3fn for both. q, k and v
            are quantised on the way, k and v into a workspace of the framework's memory (see
            `quantize_kv`, also for numbers that are not finite). Each row of q has a scale, with
            "fp8" each 64 rows. Not with softcap or alibi_slopes. "auto" never chooses it.""",
        functions=ATTENTION,
        varlen_doc="""The numbers that are multiplied, as for `attention`: None for the inputs,
            "int8_fp8", "int8_fp16" or "fp8".""",
    ),
    Argument(
        'layout: Layout = "bshd"',
        """Dimensions of q, k, v and out: "bshd", or "bhsd" for (batch, num_heads, seqlen,
            head_dim).""",
        varlen_doc="""Dimensions of q, k, v and out: "bshd" for (total, num_heads, head_dim), "bhsd"
            for (num_heads, total, head_dim).""",
        kvcache_doc="""Dimensions of q, the caches and out: "bshd" (NHD), or "bhsd" (HND) for
            (batch, num_heads, seqlen, head_dim) and pages of (num_heads_kv, page_size,
            head_dim).""",
    ),
    Argument(
        "out: Tensor | None = None",
        """Where to write the result: of its shape and dtype, on q's device, writable. It shares
            no element with an input; interleaved slices of one buffer are fine if their strides
            show that they are apart. torch counts it as modified in place. None: a new
            tensor, of a library that dlattn can allocate for. Not for JAX, whose arrays are
            immutable.""",
        varlen_doc="Where to write the result, as for `attention`. None: a new tensor.",
    ),
    Argument(
        "out_dtype: OutDType | None = None",
        """Dtype of the result for q of float8_e4m3fn: "bfloat16", "float16" or "float32". None:
            that of `out` if it is given, else "bfloat16". For other dtypes of q it is q's.""",
        functions=ATTENTION,
        varlen_doc="Dtype of the result for q of float8_e4m3fn, as for `attention`.",
    ),
    Argument("return_lse: bool = False", "Also return the log of the softmax's denominator."),
    Argument(
        "stream: Any = None",
        """The CUDA stream to enqueue on: a handle, or a torch, CuPy or CUDA Python stream.
            None: the current stream of q's framework, or the stream that its
            `__cuda_array_interface__` names, by default the legacy default stream. Order other
            streams against it as you would for any kernel; those that such interfaces name are
            waited for, on the GPU. Not for JAX, which orders its work itself.""",
        varlen_doc="The CUDA stream to enqueue on, as for `attention`.",
    ),
    Argument(
        'kernel: Kernel = "auto"',
        """The one kernel to use, of those in `info().kernels`, or "auto" for the one predicted
            to be the fastest. One of a kernel's variants may follow: "wmma:narrow" names a tile
            shape (see `Plan.variant`), "wmma:packed" and "wmma:narrow+unpacked" also say whether
            query heads are packed (see `Plan.packed_heads`).""",
        varlen_doc="""The one kernel to use, or "auto", as for `attention`.""",
    ),
    Argument(
        "batch_invariant: bool = False",
        """Give a sequence the same bits alone, in any batch and in any batch of
            `attention_varlen`, on the same device, as long as its rows are aligned alike. Without
            it the same call gives the same bits each time, but some choices of the plan follow
            batch size, numbers of heads and lengths: on a GPU the kernel, its tile shape, whether
            it packs heads and whether it splits the keys, on the CPU into how many parts the keys
            of few queries are split. With it these choices are those for a large batch of long
            sequences, which is slower for a small one, most of all with few queries: they depend on
            dtype, head dims, num_heads / num_heads_kv, features, alignment and device alone. A call
            beyond the limits of the chosen kernel is refused, on GPUs mostly one of more than
            131,072 keys; "wmma:general" takes any number of them.""",
        varlen_doc="""Give a sequence the same bits alone and in any batch, as for
            `attention`.""",
        kvcache_doc="""Give a sequence the same bits alone and in any batch, as for `attention`.
            Keys are split all the same, at positions that no other sequence changes: see
            split_size, which is 1024 then if it is not given.""",
    ),
    Argument(
        "num_splits: int | None = None",
        """The number of parts that the keys of a row are split into. Different thread blocks
            compute them, and they are added up in order. A sequence's own length decides where they
            begin. None: the plan decides. For keys in a cache, and the kernel "decode"; on the CPU
            at most a part for each tile of keys. Not more than 1 with batch_invariant.""",
        functions=(*VARLEN, *KVCACHE),
    ),
    Argument(
        "split_size: int | None = None",
        """The number of keys in a part, a multiple of 128: parts begin at its multiples,
            counted from a sequence's first key, and are added up in order. So a sequence has the
            same bits in any batch and at any capacity of the cache, in CUDA graphs too. The
            workspace grows with that capacity. None: the plan decides. For keys in a cache, and the
            kernel "decode"; the CPU does not split the keys then. Not with num_splits.""",
        functions=(*VARLEN, *KVCACHE),
    ),
    Argument(
        "workspace: Tensor | None = None",
        """Memory on q's device that the plan needs beside the tensors: contiguous, of any
            dtype, at least `Plan.workspace_bytes` bytes, aligned to 256 bytes, apart from the
            tensors. It needs no initialisation. A call must be done with it before another uses it.
            None: q's framework allocates it. Not for JAX. The CPU, `supported` and `plan` need
            none.""",
        functions=(*VARLEN, *KVCACHE),
    ),
    *_of_gradients(
        *(f"{name}: Tensor | None = None" for name in ("dq", "dk", "dv")),
        "needs: Sequence[Gradient] | None = None",
        "deterministic: bool = False",
        "workspace: Tensor | None = None",
    ),
)

# The arguments that functions made after others lack. Those of gradients lack 8 bits, how keys are
# split, and the results, which they take as inputs; those of torch's operators lack float8, caches
# in pages, the stream, which is torch's, and the kernel, and that over a cache how keys are split
# and new keys.
_SPLITS = ("num_splits", "split_size", "workspace")
_FLOAT8 = ("q_descale", "k_descale", "v_descale", "out_dtype")
_OF_TORCH = ("out", "stream", "kernel")
_NEW_KEYS = tuple(argument.name for argument in _ARGUMENTS if not argument.native)
_RESULTS = ("out", "return_lse")
_LACKING = {
    (ATTENTION, BACKWARD): (
        *("precision", "batch_invariant", "page_table", "cache_batch_idx", "leftpad_k"),
        *(*_RESULTS, *_FLOAT8, *_SPLITS),
    ),
    (ATTENTION, TORCH): ("page_table", *_OF_TORCH, *_FLOAT8, *_SPLITS),
    (KVCACHE, TORCH_KVCACHE): (*_NEW_KEYS, *_OF_TORCH, *_SPLITS),
}


def _with_others(argument: Argument) -> Argument:
    """The argument, taken by the functions of gradients and of torch too where they know it."""
    functions, required_by = argument.functions, argument.required_by
    for (first, others), lacking in _LACKING.items():
        if argument.name not in lacking:
            pairs = tuple(zip(first, others, strict=False))
            functions += tuple(other for own, other in pairs if own in argument.functions)
            required_by += tuple(other for own, other in pairs if own in argument.required_by)
    return replace(argument, functions=functions, required_by=required_by)


ARGUMENTS = tuple(map(_with_others, _ARGUMENTS))
