"""Attention of Hugging Face transformers by dlattn: importing this registers the names.

    import dlattn.transformers

    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="dlattn")

"dlattn" serves models of any kind, static caches and `generate_batch` among them; "dlattn_flash"
those that pass the lengths of packed sequences (vision towers, batches without padding). What each
takes: `dlattn.integrations.transformers` and `transformers_flash`.
"""

from dlattn.integrations.transformers import attention_forward, attention_mask

__all__ = ["attention_forward", "attention_mask"]
