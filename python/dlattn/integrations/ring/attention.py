"""`dlattn.torch.ring_attention`: what it takes, and that all processes of a group agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from dlattn._errors import UnsupportedError
from dlattn._types import Causal, Layout, Window
from dlattn.integrations.ring import heads, shards
from dlattn.integrations.ring.agreement import agreed, description
from dlattn.integrations.ring.arguments import check_tensors, check_words
from dlattn.integrations.ring.calls import Problem
from dlattn.integrations.ring.communication import Group
from dlattn.integrations.ring.passes import RingAttention
from dlattn.integrations.ring.schedule import mask_of
from dlattn.integrations.ring.sharding import check_counts, lengths_of
from dlattn.integrations.torch.autocast import cast

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _not_compiled(function: _Function) -> _Function:
    """torch.compiler.disable, which hides a function's arguments from type checkers."""
    disabled: Any = torch.compiler.disable(function)
    return disabled  # type: ignore[no-any-return]


@_not_compiled
def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    group: Any = None,
    causal: Causal = False,
    softmax_scale: float | None = None,
    window: Window | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    cu_seqlens: Any = None,
    layout: Layout = "bshd",
    order: str = "zigzag",
    mode: str = "ring",
    deterministic: bool = False,
    check: bool = True,
) -> torch.Tensor:
    """Self-attention over sequences whose positions are spread over the processes of a group.

    Every process of the group calls it with its own part of q, k and v, as `shard_sequence` gives
    it, and gets that part of what `dlattn.torch.attention` returns for the whole. It has gradients
    with respect to q, k, v and sinks. Memory grows with the part that a process has.

    Args:
        q: This process's queries, (batch, rows, num_heads, head_dim) in the layout "bshd"; with
            cu_seqlens (rows, num_heads, head_dim). float16, bfloat16, float32 or float64, where
            `dlattn.attention` takes them. Any strides with a contiguous last dimension.
        k, v: Its keys and values, of q's dtype and rows, with num_heads_kv heads.
        group: A process group of n processes, of any backend that sends between two processes
            (NCCL, gloo). None: all processes.
        causal: True, "bottom_right" and "top_left" are the same here: keys j <= i.
        softmax_scale, softcap: As for `dlattn.attention`.
        window: (left, right), as for `dlattn.attention`, in positions of the whole sequence. None:
            no limit.
        sinks: float32, (num_heads,), the same on every process. Its gradient is the share of this
            process; the sum over the group is the gradient of the whole.
        alibi_slopes: float32, (num_heads,), or (batch, num_heads) without cu_seqlens; the same on
            every process. Without a gradient.
        cu_seqlens: Where the sequences begin that lie one after the other in the whole, and the
            last one ends, the same on every process: a list, or a tensor, best on the CPU, as its
            values are read. Each sequence is cut for itself, so that its work is balanced. None:
            each batch has one sequence.
        layout: "bshd", or "bhsd" with heads before rows.
        order: How the sequences were cut: as for `shard_sequence`.
        mode: "ring": keys travel, while those before them are computed. "all_to_all": each process
            computes num_heads / n heads of whole sequences; n divides num_heads and num_heads_kv.
        deterministic: Gradients have the same bits at every call on the same number of processes.
        check: Compare the calls of all processes first, so that calls that do not fit together
            raise on all of them; the host waits for it. With False rows must be those of equal
            parts or of cu_seqlens, and calls that differ may not end. The first call of a group
            compares in any case.

    Returns:
        out, of q's shape with head_dim_v for head_dim.

    Raises:
        UnsupportedError, TypeError: An argument is wrong here, or on another process.
        RuntimeError: By torch: a process of the group does not answer within the group's time-out.

    References:
        [1] Liu, Zaharia, Abbeel. Ring attention with blockwise transformers. arXiv:2310.01889,
            2023.
        [2] Jacobs et al. DeepSpeed Ulysses. arXiv:2309.14509, 2023.
    """
    among = Group(group)
    among.check_device("q", q)
    if torch._C._is_any_autocast_enabled():
        q, k, v = cast(q, k, v)
    packed = cu_seqlens is not None
    refused: Exception | None = None
    lengths: tuple[int, ...] = ()
    settings: dict[str, Any] = {}
    said: list[int] = []
    try:
        if torch._C._are_functorch_transforms_active():
            raise UnsupportedError(
                "ring_attention is called under torch.func (vmap, grad or jvp); accepted: calls "
                "outside of it, which autograd differentiates"
            )
        check_words(layout, order, mode)
        mask = mask_of(causal, window, alibi_slopes is not None)
        check_tensors(q, k, v, sinks, alibi_slopes, packed, layout)
        lengths = lengths_of(cu_seqlens) if packed else ()
        settings = {
            "window with causal": (mask.left, mask.right),
            "softmax_scale": softmax_scale,
            "softcap": softcap,
            "lengths by cu_seqlens": lengths,
            "layout": layout,
            "order": order,
            "mode": mode,
            "deterministic": deterministic,
            "sinks is None": sinks is None,
            "alibi_slopes is None": alibi_slopes is None,
        }
        said = description(q, k, v, sinks, layout, settings)
    except Exception as error:
        refused = error  # the others are waiting to be told
    counts = agreed(among, said, settings, refused, q, check)
    if not packed:
        lengths = (sum(said[0] if c is None else c for c in counts),)
    each = [shards.rows(lengths, among.n, rank, order) for rank in range(among.n)]
    check_counts(counts, each, lengths, order)
    problem = Problem(
        among, lengths, packed, order, mask, softmax_scale, softcap, layout, deterministic
    )
    if mode == "all_to_all":
        return heads.attention(problem, q, k, v, sinks, alibi_slopes)
    result: torch.Tensor = RingAttention.apply(problem, q, k, v, sinks, alibi_slopes)
    return result
