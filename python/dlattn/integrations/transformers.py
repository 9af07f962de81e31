"""dlattn under the name by which transformers finds attention: "dlattn".

The names of the flash kind are in `transformers_flash`.

Source: transformers' documentation of the attention interface and of `AttentionMaskInterface`;
what a model passes on is told by its attention module and by `integrations/sdpa_attention.py` and
`integrations/flash_attention.py` of the package, 5.x.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import dlattn
import dlattn.integrations.torch.backward  # registers operators
from dlattn import _views
from dlattn.integrations import transformers_arguments as arguments
from dlattn.integrations import transformers_flash
from dlattn.integrations import transformers_ranges as ranges
from dlattn.integrations.torch import _functions, autocast
from dlattn.integrations.transformers_flash import NAME


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as a model of transformers calls it.

    Sliding windows and chunks are in `attention_mask`, which `attention_mask()` makes. Keys and
    values of shared heads are taken as they are, without repeating them, with any mask.

    Under torch.autocast query, key and value are cast to its dtype first, unless they are float64.

    Where gradients are asked for, or dropout, torch's scaled_dot_product_attention does it, as
    attn_implementation="sdpa" would. It has no softcap and no sinks: with them both passes are
    dlattn's, and there is no dropout.

    Args:
        module: The model's attention layer; its `is_causal` counts where `is_causal` is None.
        query: (batch, num_heads, seqlen_q, head_dim) of float16, bfloat16 or float32, any strides
            with a contiguous last dimension.
        key, value: (batch, num_heads_kv, seqlen_k, head_dim), (…, head_dim_v).
        attention_mask: None, or bool (True: attend) or additive in query's dtype or float32,
            broadcastable to (batch, num_heads, seqlen_q, seqlen_k). None with more than one query
            of a causal layer is a causal mask by which query i sees keys 0 to i: that is also what
            an empty static cache needs, whose keys are more than the queries. Or what
            `attention_mask()` made of a step of decoding: the range of keys that each sequence's
            query sees, by which the cache is read no further than there are keys.
        dropout: Probability; above 0 see above.
        scaling: Factor of q·k; None: 1 / sqrt(head_dim).
        softcap: None, or the scores become softcap * tanh(score / softcap).
        s_aux: (num_heads,) the learned sinks of gpt-oss, natural logits.
        position_bias: (1 or batch, num_heads, seqlen_q, seqlen_k), added to the scores (T5).
        indices: (batch, seqlen_q, count) keys that an indexer chose (DeepSeek V3.2); the mask then
            hides all others.
        options: Whatever else a model passes; see `transformers_arguments`.

    Returns:
        out of (batch, seqlen_q, num_heads, head_dim_v), contiguous, in query's dtype, and None:
        there are no attention weights.

    Raises:
        ValueError: Dropout with softcap or sinks, or an option that is not computed.
        UnsupportedError, TypeError, DeviceError: As `dlattn.attention`.
    """
    softcap = softcap or None
    if options:
        arguments.check(NAME, options)
    if indices is not None:
        attention_mask = arguments.chosen(attention_mask, indices, key)
    if torch._C._is_any_autocast_enabled():
        # Rotary tables and norms of float32 leave q and k in it, beside v.
        query, key, value, attention_mask, position_bias = autocast.cast(
            query, key, value, attention_mask, position_bias
        )
    wants_gradients = _wants_gradients((query, key, value, attention_mask, s_aux, position_bias))
    if attention_mask is not None and ranges.are_ranges(attention_mask, query):
        plain = dropout == 0.0 and position_bias is None and not wants_gradients
        if plain and ranges.reads_caches(query, key, value):
            query, scaling = _views.with_any_scale(query, scaling)
            return _attend_to_cache(
                query, key, value, attention_mask, scaling, softcap or 0.0, s_aux
            ), None
        attention_mask = ranges.mask_of(attention_mask, key.shape[2])
    if dropout > 0.0:
        for name, given in (("softcap", softcap), ("s_aux", s_aux)):
            if given is not None:
                raise ValueError(
                    f"dropout is {dropout}, with {name}, for which neither dlattn nor "
                    "scaled_dot_product_attention has dropout; accepted: 0.0 "
                    '(attention_dropout=0.0 in the model\'s config, or attn_implementation="eager")'
                )
    if dropout > 0.0 or (wants_gradients and softcap is None and s_aux is None):
        return sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            is_causal=is_causal,
            position_bias=position_bias,
        )
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    query, scaling = _views.with_any_scale(query, scaling)
    mask, bias = attention_mask, position_bias
    if mask is not None and mask.dtype != torch.bool:
        bias = mask if bias is None else bias + mask
        mask = None
    out = _attend(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        causal=attention_mask is None and is_causal and query.shape[2] > 1,
        softmax_scale=scaling,
        softcap=softcap or 0.0,
        bias=bias,
        mask=mask,
        sinks=None if s_aux is None else s_aux.float(),
        is_operator=wants_gradients
        or torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active(),
    )
    return out.contiguous(), None


def attention_mask(
    batch_size: int, q_length: int, *given: Any, **options: Any
) -> torch.Tensor | None:
    """The function that transformers calls to make the mask of a batch: a bool mask, or None where
    `attention_forward` needs none, as `transformers.masking_utils.sdpa_mask`. Of a step of decoding
    with a static cache it is ranges of keys (`dlattn.integrations.transformers_ranges`), unless
    torch is tracing or there is none."""
    if q_length != 1 and arguments.drops_queries(options.get("config")):
        options["allow_is_causal_skip"] = False
    decoding = ranges.is_decoding_step(q_length, options)
    function = ranges.decoding_mask if decoding else sdpa_mask
    return function(batch_size, q_length, *given, **options)


def _wants_gradients(tensors: tuple[Any, ...]) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    softmax_scale: float | None,
    softcap: float,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    is_operator: bool,
) -> torch.Tensor:
    # Traced or differentiated, it must be an operator; else that is only a way about.
    function: Any = _functions.attention if is_operator else dlattn.attention
    return function(
        q,
        k,
        v,
        # The first key is the first query's: an empty static cache has keys beyond the last query.
        causal="top_left" if causal else False,
        softmax_scale=softmax_scale,
        softcap=softcap,
        bias=bias,
        mask=mask,
        sinks=sinks,
    )


def _attend_to_cache(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_ranges: torch.Tensor,
    softmax_scale: float | None,
    softcap: float,
    s_aux: torch.Tensor | None,
) -> torch.Tensor:
    compiling = torch.compiler.is_compiling()
    function = _functions.attention_with_kvcache if compiling else dlattn.attention_with_kvcache
    out: torch.Tensor = function(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        seqused_k=key_ranges[1, :, 0, 0],
        leftpad_k=key_ranges[0, :, 0, 0],
        softmax_scale=softmax_scale,
        softcap=softcap,
        sinks=None if s_aux is None else s_aux.float(),
    )
    return out.contiguous()


AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, attention_mask)
transformers_flash.register()
