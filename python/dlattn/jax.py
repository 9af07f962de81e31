"""`attention` and `dot_product_attention` for JAX's transformations; importing this imports JAX."""

from dlattn.integrations.jax import attention, dot_product_attention

__all__ = ["attention", "dot_product_attention"]
