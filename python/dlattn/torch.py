"""dlattn for torch: importing this makes operators that torch.compile and torch.export know.

    import dlattn.torch

    compiled = torch.compile(lambda q, k, v: dlattn.torch.attention(q, k, v, causal=True))

`torch.ops.dlattn.attention`, `attention_varlen` and `merge_states` are the operators themselves.
"""

from dlattn.integrations.torch.ops import attention

__all__ = ["attention"]
