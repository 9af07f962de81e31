"""Who decodes: this library, and what is installed beside it, over the same caches."""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import dlattn
from dlattn.bench import tensors
from dlattn.bench.decode.caches import Caches
from dlattn.bench.decode.cases import PAGE, DecodeCase, turns
from dlattn.bench.peers import Bound, Contestant, Problem, UnavailableError
from dlattn.console.errors import first_line

_WORKSPACE_BYTES = 128 << 20  # recommended by FlashInfer's documentation
_UNEVEN = ("skewed", "mixes", "traces")  # groups whose sequences have several lengths

Attend = Callable[[Any, Any], Any]  # over one copy of K and V: (batch, queries, num_heads, dim)


@dataclass(frozen=True)
class Peer:
    """Another library's function: where it is, which cases it takes, and how it is called."""

    name: str
    needs: tuple[str, str]  # a module and its function
    takes: Callable[[DecodeCase], bool]
    prepare: Callable[[Any, Caches], Bound]  # gets the function
    packs: bool = False  # reads keys and values without pages, which takes as much memory again

    def missing(self) -> str:
        """Why it cannot take part at all; empty if it can."""
        module, function = self.needs
        try:
            found: Any = importlib.import_module(module)
        except Exception as error:  # a library may fail in its own way where it does not fit
            return f"{module} is not installed: {first_line(error)}"
        return "" if hasattr(found, function) else f"{module} has no {function}"

    def contestant(self) -> Contestant:
        """As the benchmark takes it."""
        module, function = self.needs

        def bind(problem: Problem) -> Bound:
            return self.prepare(getattr(importlib.import_module(module), function), _of(problem))

        return Contestant(self.name, False, bind)


def ours(own: Contestant) -> Contestant:
    """The library with the kernel that one of its contestants has, over a cache."""
    kernel = own.name.removeprefix("dlattn ")

    def bind(problem: Problem) -> Bound:
        caches = _of(problem)
        inputs, case = caches.inputs, caches.inputs.case
        options: dict[str, Any] = {"causal": True, "kernel": kernel}
        function: Any = dlattn.attention
        if case.page_size or case.on_device:
            function = dlattn.attention_with_kvcache
            options["seqused_k"] = inputs.seqused_k
        if case.page_size:
            options["page_table"] = inputs.page_table
        if inputs.scales is not None:
            options["k_descale"], options["v_descale"] = (
                x.repeat(case.num_heads_kv) for x in inputs.scales
            )
        plan = _plan(inputs.q, *caches.pairs[0], options)

        def attend(k: Any, v: Any, **more: Any) -> Any:
            return function(inputs.q, k, v, **options, **more)

        def checked() -> Any:
            out = _nan_like(inputs.q[..., : case.latent or case.head_dim])
            return attend(*caches.pairs[-1], out=out)

        return _in_turn(caches, attend, checked, plan)

    return Contestant(own.name, True, bind)


def _nan_like(like: Any) -> Any:
    """A tensor of NaN, of the size and dtype of `like`."""
    return like.new_full(like.shape, math.nan)


def _plan(q: Any, k: Any, v: Any, options: dict[str, Any]) -> str:
    """The kernel that a call takes. Raises UnavailableError for what the library refuses."""
    try:
        support = dlattn.supported(q, k, v, **options)
        if not support.ok:
            raise UnavailableError(f"refused: {'; '.join(support.reasons)}")
        plan = dlattn.plan(q, k, v, **options)
    except TypeError as error:
        if "k_descale" not in options:
            raise
        # A build without 8-bit caches knows neither the arguments nor such tensors.
        raise UnavailableError(f"refused: {first_line(error)}") from error
    return f"{plan.kernel}:{plan.variant}" if plan.variant else plan.kernel


def _of(problem: Problem) -> Caches:
    if problem.caches is None:
        raise UnavailableError("decodes from caches only")
    return problem.caches


def _in_turn(
    caches: Caches,
    attend: Attend,
    checked: Callable[[], Any] | None = None,
    plan: str = "",
    note: str = "",
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Bound:
    """The last copy for what is called once, and all of them in turn for what is timed."""
    calls = [partial(attend, k, v) for k, v in caches.pairs]
    return Bound(
        calls[-1],
        checked=checked,
        plan=plan,
        note=note,
        turn=tuple(calls * turns(len(calls))),
        context=context,
    )


# Peers


def _torch_sdpa(backend: str) -> Callable[[Any, Caches], Bound]:
    """scaled_dot_product_attention; its causal masks begin at the first key, so drafts differ."""

    def prepare(sdpa: Any, caches: Caches) -> Bound:
        torch = tensors.torch_module()
        case, q = caches.inputs.case, caches.inputs.q.transpose(1, 2)
        context: Callable[[], AbstractContextManager[Any]] = nullcontext
        asked: dict[str, Any] = {"enable_gqa": case.num_heads_kv != case.num_heads}
        notes = _of_the_host(case)
        if case.queries > 1:
            notes.append("mask as a bias that was made once")
            hidden = torch.ones(case.queries, case.lengths[0], dtype=torch.bool, device=q.device)
            hidden = hidden.triu(case.lengths[0] - case.queries + 1)
            asked["attn_mask"] = q.new_zeros(hidden.shape).masked_fill_(hidden, -math.inf)
        if backend:
            attention: Any = importlib.import_module("torch.nn.attention")
            pinned = getattr(attention.SDPBackend, backend)
            context = partial(attention.sdpa_kernel, pinned)

        def attend(k: Any, v: Any) -> Any:
            return sdpa(q, k.transpose(1, 2), v.transpose(1, 2), **asked).transpose(1, 2)

        return _in_turn(caches, attend, note="; ".join(notes), context=context)

    return prepare


def _torch_flash(sdpa: Any, caches: Caches) -> Bound:
    """FlashAttention-2 as torch has it; drafts by its operator, whose mask ends at the last key."""
    if caches.inputs.case.queries == 1:
        return _torch_sdpa("FLASH_ATTENTION")(sdpa, caches)
    forward = tensors.torch_module().ops.aten._scaled_dot_product_flash_attention
    q = caches.inputs.q.transpose(1, 2)

    def attend(k: Any, v: Any) -> Any:
        return forward(q, k.transpose(1, 2), v.transpose(1, 2), 0.0, True)[0].transpose(1, 2)

    return _in_turn(caches, attend)


def _torch_flash_varlen(_: Any, caches: Caches) -> Bound:
    """The same for sequences of several lengths, which it reads without pages."""
    torch, inputs = tensors.torch_module(), caches.inputs
    forward = torch.ops.aten._flash_attention_forward
    starts_q = torch.arange(len(inputs.case.lengths) + 1, dtype=torch.int32, device=inputs.q.device)
    starts = torch.nn.functional.pad(inputs.seqused_k.cumsum(0, dtype=torch.int32), (1, 0))
    q, longest = inputs.q[:, 0], max(inputs.case.lengths)

    def attend(k: Any, v: Any) -> Any:
        return forward(q, k, v, starts_q, starts, 1, longest, 0.0, False, False)[0][:, None]

    calls = [partial(attend, k, v) for k, v in caches.packed]
    return Bound(calls[-1], turn=tuple(calls * turns(len(calls))), note="keys without pages")


def _in_pages(caches: Caches) -> tuple[Any, Callable[[Any], Any]]:
    """A page table, and what makes pages of K or V: without any, in order and of `PAGE` keys."""
    inputs, case = caches.inputs, caches.inputs.case
    if inputs.page_table is not None:
        return inputs.page_table, lambda x: x
    torch, batch_size, length = tensors.torch_module(), len(case.lengths), case.lengths[0]
    if length % PAGE:
        raise UnavailableError(f"keys are {length}; accepted without pages: multiples of {PAGE}")
    count = length // PAGE
    table = torch.arange(batch_size * count, dtype=torch.int32, device=inputs.q.device)
    return table.reshape(batch_size, count), lambda x: x.reshape(-1, PAGE, *x.shape[2:])


def _flashinfer(wrapper: Any, caches: Caches) -> Bound:
    """FlashInfer's kernels for pages; what its host plans before is not timed."""
    torch, inputs, case = tensors.torch_module(), caches.inputs, caches.inputs.case
    table, paged = _in_pages(caches)
    page_size = case.page_size or PAGE
    counts = [-(-length // page_size) for length in case.lengths]
    device = inputs.q.device
    starts = torch.tensor([0, *counts], dtype=torch.int32, device=device).cumsum(0)
    indices = torch.cat([table[b, :count] for b, count in enumerate(counts)])
    used = inputs.seqused_k - page_size * (torch.tensor(counts, device=device) - 1)
    workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    grouped = case.num_heads != case.num_heads_kv
    decode = wrapper(workspace, "NHD", use_tensor_cores=grouped)
    decode.plan(
        starts.int(),
        indices.int(),
        used.int(),
        case.num_heads,
        case.num_heads_kv,
        case.head_dim,
        page_size,
        q_data_type=inputs.q.dtype,
        kv_data_type=inputs.pairs[0][0].dtype,
    )
    scales: dict[str, float] = {}
    if inputs.scales is not None:
        scales = {"k_scale": float(inputs.scales[0]), "v_scale": float(inputs.scales[1])}
    q = inputs.q[:, 0]

    def attend(k: Any, v: Any) -> Any:
        return decode.run(q, (paged(k), paged(v)), **scales)[:, None]

    return _in_turn(caches, attend, note="planned before")


def _flashinfer_trtllm(function: Any, caches: Caches) -> Bound:
    """TensorRT-LLM's kernels as FlashInfer has them (XQA on Hopper), which need no plan."""
    torch, inputs, case = tensors.torch_module(), caches.inputs, caches.inputs.case
    table, paged = _in_pages(caches)
    workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=inputs.q.device)
    k_scale, v_scale = (1.0, 1.0) if inputs.scales is None else map(float, inputs.scales)
    q, longest = inputs.q[:, 0], max(case.lengths)
    table = table.clamp(min=0)  # it may load entries behind a sequence's last page
    scale = k_scale / math.sqrt(case.head_dim)

    def attend(k: Any, v: Any) -> Any:
        return function(
            q,
            (paged(k), paged(v)),
            workspace,
            table,
            inputs.seqused_k,
            longest,
            bmm1_scale=scale,
            bmm2_scale=v_scale,
            kv_layout="NHD",
        )[:, None]

    return _in_turn(caches, attend)


def _flash_attn(function: Any, caches: Caches) -> Bound:
    """The package flash-attn: FlashAttention-2's function for caches."""
    inputs = caches.inputs
    asked = {"cache_seqlens": inputs.seqused_k, "causal": True}
    if inputs.page_table is not None:
        asked["block_table"] = inputs.page_table
    return _in_turn(caches, lambda k, v: function(inputs.q, k, v, **asked))


def _flash_3(function: Any, caches: Caches) -> Bound:
    """FlashAttention-3's function for caches, which is built without pages."""
    inputs = caches.inputs
    asked = {"cache_seqlens": inputs.seqused_k, "causal": True}
    return _in_turn(caches, lambda k, v: function(inputs.q, k, v, **asked))


def _flash_4(function: Any, caches: Caches) -> Bound:
    """FlashAttention-4, which compiles its kernel for a problem in the first call."""
    q = caches.inputs.q

    def attend(k: Any, v: Any) -> Any:
        result = function(q, k, v, causal=True)
        return result[0] if isinstance(result, tuple) else result

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its compiler warns about the package's own code
        attend(*caches.pairs[0])
    return _in_turn(caches, attend, note="; ".join(_of_the_host(caches.inputs.case)))


def _of_the_host(case: DecodeCase) -> list[str]:
    """Notes on a function that reads no lengths from the device."""
    return ["the host knows the lengths"] if case.on_device else []


def _plain(case: DecodeCase) -> bool:
    return not case.page_size and not case.cache_dtype


def _one_query(case: DecodeCase) -> bool:
    return case.queries == 1 and case.cache_dtype != "int8"


_SDPA = ("torch.nn.functional", "scaled_dot_product_attention")
PEERS = {
    "cuda": (
        Peer("torch-cudnn", _SDPA, _plain, _torch_sdpa("CUDNN_ATTENTION")),
        Peer("torch-flash", _SDPA, _plain, _torch_flash),
        Peer(
            "torch-flash varlen",
            _SDPA,
            lambda case: case.group in _UNEVEN,
            _torch_flash_varlen,
            packs=True,
        ),
        Peer(
            "flashinfer",
            ("flashinfer", "BatchDecodeWithPagedKVCacheWrapper"),
            _one_query,
            _flashinfer,
        ),
        Peer(
            "flashinfer-trtllm",
            ("flashinfer.decode", "trtllm_batch_decode_with_kv_cache"),
            lambda case: _one_query(case) and case.page_size in (0, 16, 32, 64),
            _flashinfer_trtllm,
        ),
        Peer(
            "flash-attn",
            ("flash_attn", "flash_attn_with_kvcache"),
            lambda case: not case.cache_dtype and case.page_size % 256 == 0,
            _flash_attn,
        ),
        Peer("fa3", ("fa3_fwd_interface", "flash_attn_with_kvcache"), _plain, _flash_3),
        Peer("fa4", ("flash_attn.cute", "flash_attn_func"), _plain, _flash_4),
    ),
    "cpu": (Peer("torch", _SDPA, _plain, _torch_sdpa("")),),
}


def names(device: str) -> Sequence[str]:
    """The names of all peers."""
    return [peer.name for peer in PEERS[device]]
