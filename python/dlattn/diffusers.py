"""Attention of Hugging Face diffusers by dlattn: importing this registers its names.

    import dlattn.diffusers

    pipeline.transformer.set_attention_backend("dlattn")  # or "dlattn_int8_fp8", "dlattn_fp8"

What they take: `dlattn.integrations.diffusers`.
"""

from dlattn.integrations.diffusers import BACKENDS

__all__ = ["BACKENDS"]
