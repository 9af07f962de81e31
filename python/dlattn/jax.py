"""Attention for JAX's transformations and its sharded arrays; importing this imports JAX."""

from dlattn.integrations.jax import (
    attention,
    dot_product_attention,
    ring_attention,
    shard_sequence,
    unshard_sequence,
)

__all__ = [
    "attention",
    "dot_product_attention",
    "ring_attention",
    "shard_sequence",
    "unshard_sequence",
]
