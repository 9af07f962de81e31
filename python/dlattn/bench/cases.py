"""The problems that are timed."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dlattn.console.errors import CommandError

Sizes = tuple[int, int, int, int]  # batch_size, num_heads, seqlen, head_dim

BASIC: tuple[Sizes, ...] = ((1, 8, 512, 64), (2, 8, 2048, 64), (2, 8, 2048, 128))

FLOAT8 = "float8_e4m3fn"

FORWARD, BACKWARD, BOTH = "forward", "backward", "forward+backward"
# The backward pass has five products where the forward pass has two.
_FLOPS_OF_FORWARD = {FORWARD: 1.0, BACKWARD: 2.5, BOTH: 3.5}

_TOO_MANY_ELEMENTS = 1 << 48  # for any memory


@dataclass(frozen=True)
class Case:
    """One problem."""

    sizes: Sizes
    causal: bool
    dtype: str
    num_heads_kv: int = 0  # 0: num_heads
    variant: str = ""  # further demands, in words
    passes: str = FORWARD  # that a call makes

    @property
    def heads_kv(self) -> int:
        """Heads of keys and values."""
        return self.num_heads_kv or self.sizes[1]

    @property
    def label(self) -> str:
        """The sizes as people write them, (4,32/8,4096,128) for grouped heads."""
        batch_size, num_heads, seqlen, head_dim = self.sizes
        heads = f"{num_heads}/{self.num_heads_kv}" if self.num_heads_kv else num_heads
        return f"({batch_size},{heads},{seqlen},{head_dim})"

    @property
    def mask(self) -> str:
        """In words."""
        return "causal" if self.causal else "full"

    @property
    def kind(self) -> str:
        """The mask in words, and the passes if they are not the forward pass alone."""
        return self.mask if self.passes == FORWARD else f"{self.mask} {self.passes}"

    @property
    def flops(self) -> float:
        """All products; half of them when causal, as the field counts."""
        batch_size, num_heads, seqlen, head_dim = self.sizes
        return self.flops_of(batch_size * seqlen**2, num_heads, head_dim)

    def flops_of(self, pairs: float, num_heads: int, head_dim: int) -> float:
        """The same of so many pairs of a query and a key, masked ones included, in each head."""
        forward = 4.0 * pairs * num_heads * head_dim * (0.5 if self.causal else 1.0)
        return forward * _FLOPS_OF_FORWARD[self.passes]


def sweep(device: str) -> tuple[Sizes, ...]:
    """Growing sequences at constant work per token: 16384 tokens and 2048 channels on a GPU."""
    if device == "cpu":
        return tuple((1, 8, seqlen, dim) for dim in (64, 128) for seqlen in (128, 512, 2048, 4096))
    return tuple(
        (16384 // seqlen, 2048 // dim, seqlen, dim)
        for dim in (64, 128, 256)
        for seqlen in (512, 1024, 2048, 4096, 8192, 16384)
    )


def small(device: str) -> tuple[Sizes, ...]:
    """Few heads, short sequences: grids that leave streaming multiprocessors idle."""
    heads = ((1, 64),) if device == "cpu" else ((8, 64), (8, 128), (32, 128))
    lengths = (128, 256, 512) if device == "cpu" else (128, 256, 512, 1024, 2048, 4096)
    return tuple((1, num_heads, seqlen, dim) for num_heads, dim in heads for seqlen in lengths)


def parse_shapes(text: str, device: str) -> tuple[Sizes, ...]:
    """The shapes that `basic`, `sweep`, `small` or `B,H,S,D` stand for."""
    named = {"basic": BASIC, "sweep": sweep(device), "small": small(device)}
    if text in named:
        return named[text]
    parts = text.split(",")
    if len(parts) == 4 and all(part.strip().isdecimal() and len(part) < 20 for part in parts):
        sizes = (int(parts[0]), int(parts[1]), int(parts[2]), int(parts[3]))
        if 0 < math.prod(sizes) < _TOO_MANY_ELEMENTS:
            return (sizes,)
    raise CommandError(
        f"--shape is {text!r}; accepted: basic, sweep, small, features, scores, eight_bit, decode, "
        "backward, or B,H,S,D such as 2,8,2048,64"
    )
