"""The names of the flash kind by which transformers finds dlattn: it passes lengths, no masks.

"dlattn_flash" is for models, "dlattn_flash2" for continuous batching (`generate_batch`), which goes
by a name: it hands a cache in pages to what is named as flash-attn 2 or 3 is, and to nothing else.

Source: `modeling_flash_attention_utils.py`, `integrations/flash_attention.py` and
`generation/continuous_batching` of transformers, 5.x.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedModel,
    modeling_flash_attention_utils,
)
from transformers.generation.continuous_batching import ContinuousBatchingManager
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.masking_utils import flash_attention_mask

from dlattn import flash_attn
from dlattn.integrations import transformers_arguments

NAME, FLASH_NAME, PAGED_NAME = "dlattn", "dlattn_flash", "dlattn_flash2"

# transformers inspects these functions' parameters, and passes what it finds.


def _flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor:
    return flash_attn.flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        s_aux=None if s_aux is None else s_aux.float(),
    )


def _flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | torch.Tensor,
    max_seqlen_k: int | torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor:
    return flash_attn.flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q.to(torch.int32),
        cu_seqlens_k.to(torch.int32),
        int(max_seqlen_q),
        int(max_seqlen_k),
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        s_aux=None if s_aux is None else s_aux.float(),
    )


def _flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    cache_seqlens: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor:
    return flash_attn.flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        cache_seqlens=cache_seqlens,
        block_table=block_table,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        s_aux=None if s_aux is None else s_aux.float(),
    )


@wraps(flash_attention_forward)
def _flash_forward(module: torch.nn.Module, *tensors: Any, **options: Any) -> Any:
    transformers_arguments.check(FLASH_NAME, options, flash=True)
    return flash_attention_forward(module, *tensors, **options)


def register() -> None:
    """Teach transformers the names; once is enough, more do no harm."""
    for name in (FLASH_NAME, PAGED_NAME):
        AttentionInterface.register(name, _flash_forward)
        AttentionMaskInterface.register(name, flash_attention_mask)
    _find_functions()
    _check_models()
    _serve_continuous_batching()


def _find_functions() -> None:
    flash = modeling_flash_attention_utils
    before = flash._lazy_imports
    if getattr(before, "of_dlattn", False):
        return

    # A name of the flash kind is looked up among flash-attn's versions and then on the hub: there
    # is no registry of functions.
    @wraps(before)
    def functions(implementation: str | None, *arguments: Any, **options: Any) -> Any:
        if implementation not in (FLASH_NAME, PAGED_NAME):
            return before(implementation, *arguments, **options)
        return (
            _flash_attn_func,
            _flash_attn_varlen_func,
            _flash_attn_with_kvcache,
            flash._pad_input,
            flash._unpad_input,
        )

    functions.of_dlattn = True  # type: ignore[attr-defined]
    flash._lazy_imports = functions


def _serve_continuous_batching() -> None:
    before = getattr(ContinuousBatchingManager, "switch_to_cb_friendly_attn", None)
    if before is None or getattr(before, "of_dlattn", False):
        return

    # transformers would leave dlattn for flash-attn, or refuse its name.
    @wraps(before)
    def switch(self: Any, model: Any, *arguments: Any, **options: Any) -> None:
        given = model.config._attn_implementation
        if given in (NAME, FLASH_NAME):
            model.set_attn_implementation(PAGED_NAME)
            self._original_attn_impl = given  # the model gets it back after the batch
        before(self, model, *arguments, **options)

    switch.of_dlattn = True  # type: ignore[attr-defined]
    setattr(ContinuousBatchingManager, before.__name__, switch)


def _check_models() -> None:
    before = getattr(PreTrainedModel, "_check_and_adjust_attn_implementation", None)
    if before is None or getattr(before, "of_dlattn", False):
        return

    # transformers knows flash-attn's names and those of the hub: it asks no model whether flash
    # attention suits it for another, and takes a kernel of the hub in its place, with a line in the
    # log, where a model lists the flash implementations that have its sinks.
    @wraps(before)
    def check(self: Any, implementation: str | None, *arguments: Any, **options: Any) -> Any:
        if (implementation or "").removeprefix("paged|") in (FLASH_NAME, PAGED_NAME):
            if not self._supports_flash_attn:
                raise ValueError(
                    f'attn_implementation is "{implementation}", and {type(self).__name__} does '
                    'not support flash attention (_supports_flash_attn); accepted: "dlattn", or '
                    "what transformers offers for it"
                )
            _allow(self)
        return before(self, implementation, *arguments, **options)

    check.of_dlattn = True  # type: ignore[attr-defined]
    setattr(PreTrainedModel, before.__name__, check)


def _allow(model: Any) -> None:
    """Add dlattn to the flash implementations of models that list theirs (for sinks: gpt-oss)."""
    for module in model.modules():
        listed = getattr(module, "_compatible_flash_implementations", None)
        if listed is not None:
            more = [name for name in (FLASH_NAME, PAGED_NAME) if name not in listed]
            module._compatible_flash_implementations = [*listed, *more]
