"""A node for ComfyUI: a model whose attention dlattn computes.

Put this folder into ComfyUI/custom_nodes and install dlattn into ComfyUI's environment. The node
"Attention by dlattn" takes a model and returns one that differs in nothing but its attention.

What dlattn does not compute, ComfyUI's own attention does, as without this node.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import dlattn

PRECISIONS = {"exact": None, "int8_fp8": "int8_fp8", "int8_fp16": "int8_fp16", "fp8": "fp8"}

# The other arguments of ComfyUI's attention functions: these are read, or say nothing of the
# numbers.
KNOWN = {
    "_inside_attn_wrapper",
    "enable_gqa",
    "low_precision_attention",
    "scale",
    "transformer_options",
}

_log = logging.getLogger(__name__)
_told: set[str] = set()


def attend(
    func: Callable[..., Any],
    q: Any,
    k: Any,
    v: Any,
    heads: int,
    mask: Any = None,
    attn_precision: Any = None,
    skip_reshape: bool = False,
    skip_output_reshape: bool = False,
    *,
    precision: str | None = None,
    **kwargs: Any,
) -> Any:
    """The function that ComfyUI calls instead of `func`, its own attention, with that first.

    Args:
        q, k, v: (batch, rows, heads * head_dim), or with skip_reshape (batch, heads, rows,
            head_dim).
        mask: None, bool (True: attend) or numbers that are added: (rows, keys), (batch, rows, keys)
            or (batch, heads, rows, keys), each dimension but the last two also 1.
        attn_precision: torch.float32 for scores in float32, as they are with precision None.
        precision: As `dlattn.attention` takes it. A model that forbids it, by
            low_precision_attention=False, gets None.
        kwargs: scale, a factor of the scores; enable_gqa, for fewer heads of k and v than of q.
            What else is given, and not KNOWN, is left to `func`.

    Returns:
        (batch, rows, heads * head_dim), or with skip_output_reshape (batch, heads, rows, head_dim).
    """
    options = {"mask": mask, "attn_precision": attn_precision, "skip_reshape": skip_reshape}
    if skip_output_reshape:  # which not all of ComfyUI's functions have
        options["skip_output_reshape"] = True
    if kwargs.get("low_precision_attention") is False or str(attn_precision) == "torch.float32":
        precision = None
    try:
        _refuse_unknown(kwargs)
        layout = "bhsd" if skip_reshape else "bshd"
        out = dlattn.attention(
            *_by_head(q, k, v, heads, skip_reshape, kwargs.get("enable_gqa", False)),
            layout=layout,
            precision=precision,
            softmax_scale=kwargs.get("scale"),
            **_masks(mask, q.shape[0]),
        )
    except (ValueError, TypeError) as error:  # before anything was launched
        _tell(str(error).splitlines()[0])
        return func(q, k, v, heads, **options, **kwargs)
    if skip_output_reshape:
        return out if skip_reshape else out.transpose(1, 2)
    rows_first = out.transpose(1, 2) if skip_reshape else out
    return rows_first.reshape(*rows_first.shape[:2], -1)


def _refuse_unknown(kwargs: dict[str, Any]) -> None:
    unknown = sorted(name for name in kwargs.keys() - KNOWN if kwargs[name] is not None)
    if unknown:
        known = ", ".join(sorted(KNOWN))
        raise ValueError(f"{', '.join(unknown)} is given; accepted: {known}")


def _by_head(q: Any, k: Any, v: Any, heads: int, skip_reshape: bool, gqa: bool) -> list[Any]:
    if skip_reshape:
        if not gqa and k.shape[1] != q.shape[1]:
            raise ValueError(f"k has {k.shape[1]} heads; accepted: {q.shape[1]}, or enable_gqa")
        return [q, k, v]
    heads_kv = k.shape[2] // max(1, q.shape[2] // heads) if gqa else heads
    parts = []
    for name, x, count in (("q", q, heads), ("k", k, heads_kv), ("v", v, heads_kv)):
        if count == 0 or x.shape[2] % count:
            raise ValueError(f"{name} has {x.shape[2]} columns; accepted: a multiple of {count}")
        parts.append(x.unflatten(2, (count, -1)))
    return parts


def _masks(mask: Any, batch: int) -> dict[str, Any]:
    """dlattn's name for it, with four dimensions or two."""
    if mask is None:
        return {}
    if mask.dim() == 3:
        mask = mask[:, None]
    if mask.dim() == 4 and mask.shape[0] not in (1, batch):
        raise ValueError(f"mask is of batch {mask.shape[0]}; accepted: 1, {batch}")
    return {"bias" if mask.is_floating_point() else "mask": mask}


def _tell(reason: str) -> None:
    """Once for each reason."""
    if reason not in _told:
        _told.add(reason)
        _log.info("ComfyUI's own attention is used: %s", reason)


class DlattnAttention:
    """The node."""

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"
    CATEGORY = "model_patches/attention"
    DESCRIPTION = "Computes the model's attention with dlattn."

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """The node that ComfyUI shows."""
        return {"required": {"model": ("MODEL",), "precision": (list(PRECISIONS),)}}

    def patch(self, model: Any, precision: str) -> tuple[Any]:
        """A clone of the model, with another attention."""
        model = model.clone()
        options = dict(model.model_options)
        transformer_options = dict(options.get("transformer_options", {}))
        transformer_options.pop("_inside_attn_wrapper", None)

        def override(func: Callable[..., Any], *arguments: Any, **kwargs: Any) -> Any:
            return attend(func, *arguments, precision=PRECISIONS[precision], **kwargs)

        transformer_options["optimized_attention_override"] = override
        options["transformer_options"] = transformer_options
        model.model_options = options
        return (model,)


NODE_CLASS_MAPPINGS = {"DlattnAttention": DlattnAttention}
NODE_DISPLAY_NAME_MAPPINGS = {"DlattnAttention": "Attention by dlattn"}
