"""Bits that do not depend on the rest of the batch: batch_invariant=True."""

from __future__ import annotations

import numpy as np
import pytest
from arrays import normal

import dlattn

# Sequences of a varlen batch. On the CPU: fewer rows than a tile has, and many more; keys enough
# to split.
LENGTHS = [(3, 2100), (1, 1), (130, 190), (17, 1300), (70, 40), (5, 700)]
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "top left": {"causal": "top_left"},
    "window": {"window": (150, 3)},
    "causal window": {"causal": True, "window": (37, None)},
    "softcap": {"softcap": 2.0, "window": (100, None)},
    "sinks": {"sinks": normal(4, seed=6)},
    "alibi": {"alibi_slopes": np.abs(normal(4, seed=7)), "window": (400, 50)},
}


def pack(dtype: str, head_dim: int = 16) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """q, k and v of all sequences one after the other, and where each begins."""
    total_q, total_k = (sum(lengths) for lengths in zip(*LENGTHS, strict=True))
    arrays = [
        normal(total_q, 4, head_dim, seed=1, dtype=dtype),
        normal(total_k, 2, head_dim, seed=2, dtype=dtype),
        normal(total_k, 2, head_dim, seed=3, dtype=dtype),
    ]
    offsets = [np.cumsum([0, *lengths], dtype=np.int32) for lengths in zip(*LENGTHS, strict=True)]
    return arrays, offsets


def bits(x: np.ndarray) -> bytes:
    return np.ascontiguousarray(x).tobytes()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_sequence_alone_in_a_batch_and_in_a_pack(name, dtype):
    options = {**OPTIONS[name], "batch_invariant": True, "return_lse": True}
    arrays, (cu_q, cu_k) = pack(dtype)
    longest_q, longest_k = (max(lengths) for lengths in zip(*LENGTHS, strict=True))
    packed, packed_lse = dlattn.attention_varlen(
        *arrays, cu_q, cu_k, longest_q, longest_k, **options
    )
    for b, (seqlen_q, seqlen_k) in enumerate(LENGTHS):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        q, k, v = arrays[0][rows], arrays[1][keys], arrays[2][keys]
        alone, lse = dlattn.attention(q[None], k[None], v[None], **options)
        assert bits(alone[0]) == bits(packed[rows])
        assert bits(lse[0]) == bits(packed_lse[:, rows])
        of_one = np.array([0, seqlen_q], np.int32), np.array([0, seqlen_k], np.int32)
        own, _ = dlattn.attention_varlen(q, k, v, *of_one, seqlen_q, seqlen_k, **options)
        assert bits(own) == bits(packed[rows])
        # Among others in a batch: all of them different.
        others = [np.stack([x[::-1], x, x * x.dtype.type(0.5)]) for x in (q, k, v)]
        batch, _ = dlattn.attention(*others, **options)
        assert bits(batch[1]) == bits(alone[0])
        if name in ("plain", "causal"):  # and without the other heads
            half, _ = dlattn.attention(q[None, :, 2:], k[None, :, 1:], v[None, :, 1:], **options)
            assert bits(half[0]) == bits(alone[0][:, 2:])


def test_what_it_changes_on_the_cpu():
    """Few queries over many keys: split by the shape of the batch, or not at all."""
    q, k, v = normal(1, 1, 2, 16), normal(1, 9000, 2, 16), normal(1, 9000, 2, 16)
    many = [np.broadcast_to(x, (16, *x.shape[1:])) for x in (q, k, v)]
    assert dlattn.plan(q, k, v).num_splits > dlattn.plan(*many).num_splits
    assert dlattn.plan(q, k, v, batch_invariant=True).num_splits == 1
    assert dlattn.plan(*many, batch_invariant=True).num_splits == 1
    cu_q, cu_k = np.array([0, 1], np.int32), np.array([0, 9000], np.int32)
    packed = dlattn.plan(q[0], k[0], v[0], cu_q, cu_k, 1, 9000, batch_invariant=True)
    assert packed.num_splits == 1
    assert dlattn.supported(q, k, v, batch_invariant=True)


def test_the_same_call_gives_the_same_bits():
    q, k, v = normal(1, 3, 2, 16), normal(1, 9000, 2, 16), normal(1, 9000, 2, 16)
    for batch_invariant in (False, True):
        first = dlattn.attention(q, k, v, batch_invariant=batch_invariant)
        for _ in range(5):
            again = dlattn.attention(q, k, v, batch_invariant=batch_invariant)
            assert bits(again) == bits(first)


@pytest.mark.parametrize("function", ["attention", "supported", "plan"])
def test_batch_invariant_of_another_type(function):
    q, k, v = normal(1, 3, 2, 16), normal(1, 4, 2, 16), normal(1, 4, 2, 16)
    with pytest.raises(TypeError, match="batch_invariant is of type int; accepted: a bool"):
        getattr(dlattn, function)(q, k, v, batch_invariant=1)


KERNELS = [
    *("auto", "scalar", "wmma_qk", "wmma_smem"),
    *("wmma", "wmma:wide", "wmma:narrow", "wmma:split", "wmma:pipelined"),
    *("wmma:general", "decode", "sm90"),
]
GPU_LENGTHS = [(1, 300), (17, 17), (300, 511), (511, 300), (64, 1024), (1, 1), (130, 129)]
GPU_OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": (100, None)},
    "softcap": {"causal": True, "softcap": 5.0},
}
GPU_CASES = [
    (kernel, name)
    for kernel in KERNELS
    for name in GPU_OPTIONS
    if name != "softcap" or kernel in ("auto", "scalar", "wmma", "wmma:general")
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("kernel", "name"), GPU_CASES)
def test_on_a_gpu(kernel, name, head_dim, dtype):
    """A sequence alone, in batches that fill the GPU, and in a varlen batch."""
    torch = pytest.importorskip("torch")
    generator = torch.Generator(device="cuda").manual_seed(5)

    def random(*shape):
        x = torch.randn(*shape, device="cuda", generator=generator) + 0.25
        return x.to(getattr(torch, dtype))

    options = {
        **GPU_OPTIONS[name],
        "kernel": kernel,
        "batch_invariant": True,
        "return_lse": True,
    }
    lengths_q, lengths_k = zip(*GPU_LENGTHS, strict=True)
    q = random(sum(lengths_q), 8, head_dim)
    k, v = random(sum(lengths_k), 2, head_dim), random(sum(lengths_k), 2, head_dim)
    if not dlattn.supported(q[None], k[None], v[None], kernel=kernel):
        pytest.skip(f"{kernel} is not for head_dim {head_dim}, or not for this GPU")
    starts_q, starts_k = (np.cumsum([0, *x]) for x in (lengths_q, lengths_k))
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in (starts_q, starts_k))
    packed, packed_lse = dlattn.attention_varlen(
        q, k, v, cu_q, cu_k, max(lengths_q), max(lengths_k), **options
    )
    again, _ = dlattn.attention_varlen(
        q, k, v, cu_q, cu_k, max(lengths_q), max(lengths_k), **options
    )
    assert torch.equal(again, packed)
    for b in range(len(GPU_LENGTHS)):
        rows = slice(starts_q[b], starts_q[b + 1])
        keys = slice(starts_k[b], starts_k[b + 1])
        own = [x[part][None] for x, part in ((q, rows), (k, keys), (v, keys))]
        alone, lse = dlattn.attention(*own, **options)
        assert torch.equal(alone[0], packed[rows])
        assert torch.equal(lse[0], packed_lse[:, rows])
        batch, _ = dlattn.attention(
            *(torch.cat([random(40, *x.shape[1:]), x, random(40, *x.shape[1:])]) for x in own),
            **options,
        )
        assert torch.equal(batch[40], alone[0])
        if name == "plain":
            half = (own[0][:, :, 4:], own[1][:, :, 1:], own[2][:, :, 1:])
            fewer, _ = dlattn.attention(*half, **options)
            assert torch.equal(fewer[0], alone[0][:, 4:])


FEATURES = {
    "softcap": ("softcap",),
    "alibi": ("alibi_slopes",),
    "sinks": ("sinks",),
    "bias": ("bias",),
    "mask": ("mask",),
    "all": ("softcap", "alibi_slopes", "sinks", "bias", "mask"),
}
GPU_FORMS = {
    "full": {},
    "causal": {"causal": True},
    "top left": {"causal": "top_left"},
    "window": {"window": (150, 30)},
}


def check_features(device: str, kernel: str, dtype: str, feature: str, form: str) -> bool:
    """The same in a varlen batch, alone and in a batch; False if the kernel serves none of it."""
    torch = pytest.importorskip("torch")
    generator = torch.Generator().manual_seed(5)
    lengths_q, lengths_k = zip(*GPU_LENGTHS, strict=True)
    heads, columns = 4, 1024

    def random(*shape, kind=dtype):
        x = torch.randn(*shape, generator=generator) + 0.25
        return x.to(device).to(getattr(torch, kind))

    q, k, v = random(sum(lengths_q), heads, 64), *(random(sum(lengths_k), 2, 64) for _ in "kv")
    full = (len(lengths_q), heads, max(lengths_q), columns)
    made = {
        "softcap": 5.0,
        "alibi_slopes": random(full[0], heads, kind="float32"),
        "sinks": random(heads, kind="float32") * 3,
        "bias": random(*full),
        "mask": random(*full, kind="float32") > -0.5,
    }
    # Padding and rows of finite minus infinity too.
    made["bias"][:, :, :, 40:110], made["bias"][:, 1, 3:9] = -6e4, -6e4
    special = {name: made[name] for name in FEATURES[feature]}
    options = {**GPU_FORMS[form], "kernel": kernel, "batch_invariant": True, "return_lse": True}

    def of_sequence(b):
        own = dict(special)
        for name in {"bias", "mask"} & set(own):
            own[name] = own[name][b : b + 1, :, : lengths_q[b], : lengths_k[b]]
        if "alibi_slopes" in own:
            own["alibi_slopes"] = own["alibi_slopes"][b : b + 1]
        return own

    def among_others(own, b):
        """As the second of four batch entries, the others of which are different."""
        size = (4, heads, lengths_q[b], columns)
        shared = dict(own)
        for name in {"bias", "mask"} & set(own):
            batch = random(*size).to(own[name].dtype)[..., : lengths_k[b]]
            batch[1] = own[name][0]
            shared[name] = batch
        if "alibi_slopes" in own:
            slopes = random(4, heads, kind="float32")
            slopes[1] = own["alibi_slopes"][0]
            shared["alibi_slopes"] = slopes
        return shared

    starts_q, starts_k = (np.cumsum([0, *x]) for x in (lengths_q, lengths_k))
    cu = [torch.tensor(x, dtype=torch.int32, device=device) for x in (starts_q, starts_k)]
    arguments = (q, k, v, *cu, max(lengths_q), max(lengths_k))
    of_pack = dict(special)
    for name in {"bias", "mask"} & set(of_pack):
        of_pack[name] = of_pack[name][..., : max(lengths_k)]
    packed = None
    if dlattn.supported(*arguments, **{**options, "return_lse": False}, **of_pack):
        packed, packed_lse = dlattn.attention_varlen(*arguments, **options, **of_pack)
        again, _ = dlattn.attention_varlen(*arguments, **options, **of_pack)
        assert torch.equal(again, packed)
    served = packed is not None
    for b in range(len(GPU_LENGTHS)):
        rows, keys = slice(*starts_q[b : b + 2]), slice(*starts_k[b : b + 2])
        part, own = [q[None, rows], k[None, keys], v[None, keys]], of_sequence(b)
        if not dlattn.supported(*part, **{**options, "return_lse": False}, **own):
            continue
        served = True
        alone, lse = dlattn.attention(*part, **options, **own)
        assert not alone.isnan().any()
        if packed is not None:
            assert torch.equal(alone[0], packed[rows])
            assert torch.equal(lse[0], packed_lse[:, rows])
        others = [torch.cat([x * 0.5, x, x + 1, x.flip(1)]) for x in part]
        batch, batch_lse = dlattn.attention(*others, **options, **among_others(own, b))
        assert torch.equal(batch[1], alone[0])
        assert torch.equal(batch_lse[1], lse[0])
    return served


# A feature has every other form here, and "all" has each; the nightly run has the rest.
@pytest.mark.parametrize(
    ("feature", "form"),
    [
        pytest.param(
            feature, form, marks=[pytest.mark.nightly] if (i + j) % 2 and feature != "all" else []
        )
        for i, feature in enumerate(FEATURES)
        for j, form in enumerate(GPU_FORMS)
    ],
)
def test_every_feature_on_the_cpu(feature, form):
    pytest.importorskip("torch")
    assert check_features("cpu", "cpu", "float16", feature, form)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("form", GPU_FORMS)
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_feature_on_a_gpu(kernel, feature, form, dtype):
    if not check_features("cuda", kernel, dtype, feature, form):
        pytest.skip(f"{kernel} has no {feature}, or is not for this GPU")
