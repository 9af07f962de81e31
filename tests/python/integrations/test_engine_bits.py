"""Bits of the calls that serving engines make with batch_invariant=True.

A request's tokens come alone, among others, and in chunks that other requests and cached prefixes
decide about.
"""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import dlattn  # noqa: E402

HEADS, HEADS_KV, PAGE = 8, 2, 16
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": (70, 0)},
    "softcap": {"softcap": 9.0},
    "sinks": {"sinks": [0.5, -1.0, 2.0, 0.0, 1.0, 3.0, -2.0, 0.1]},
    "alibi": {"alibi_slopes": [2.0**-i for i in range(1, 9)], "window": (300, 0)},
}
every_feature = pytest.mark.parametrize("feature", FEATURES)
on_gpus = pytest.mark.parametrize(
    ("device", "dtype", "head_dim"),
    [
        ("cpu", "float16", 16),
        ("cpu", "float32", 16),
        *(
            pytest.param("cuda", dtype, head_dim, marks=pytest.mark.gpu)
            for dtype in ("float16", "bfloat16")
            for head_dim in (64, 128, 256)
        ),
    ],
)


class Requests:
    """Queries and pages of requests that have `lengths` keys."""

    def __init__(self, lengths: list[int], device: str, dtype: str, head_dim: int) -> None:
        generator = torch.Generator().manual_seed(0)

        def drawn(*shape: int) -> Any:
            x = torch.randn(*shape, head_dim, generator=generator) + 0.2
            return x.to(device, getattr(torch, dtype))

        pages = [-(-length // PAGE) for length in lengths]
        order = iter(torch.randperm(sum(pages), generator=generator).tolist())
        self.table = torch.full((len(lengths), max(pages)), -1, dtype=torch.int32)
        for b, count in enumerate(pages):
            for page in range(count):
                self.table[b, page] = next(order)
        self.device, self.lengths = device, lengths
        self.k, self.v = (drawn(sum(pages), PAGE, HEADS_KV) for _ in "kv")
        self.q = [drawn(length, HEADS) for length in lengths]

    def attend(self, requests: list[int], new: list[int], **options: Any) -> list[Any]:
        """Each request's last `new` queries over all of its keys, in one batch."""
        rows = [
            self.q[b][self.lengths[b] - count :] for b, count in zip(requests, new, strict=True)
        ]
        starts = torch.tensor([0, *new]).cumsum(0).to(torch.int32)
        lengths = torch.tensor([self.lengths[b] for b in requests], dtype=torch.int32)
        given = {
            name: torch.tensor(x, device=self.device) if isinstance(x, list) else x
            for name, x in options.items()
        }
        out = dlattn.attention_varlen(
            torch.cat(rows),
            self.k,
            self.v,
            starts.to(self.device),
            None,
            max(new),
            self.table.shape[1] * PAGE,
            seqused_k=lengths.to(self.device),
            page_table=self.table[requests].to(self.device),
            causal=True,
            batch_invariant=True,
            **given,
        )
        return list(out.cpu().split(new))


@every_feature
@on_gpus
def test_single_tokens_beside_prompts(device: str, dtype: str, head_dim: int, feature: str) -> None:
    requests = Requests([701, 40, 333], device, dtype, head_dim)
    options = FEATURES[feature]
    (alone,) = requests.attend([0], [1], **options)
    assert alone.isfinite().all()
    for others, new in (([1, 2], [1, 1]), ([1, 2], [40, 300]), ([2], [70])):
        beside = requests.attend([*others, 0], [*new, 1], **options)
        assert torch.equal(beside[-1], alone), (others, new)


# SGLang, which keeps prefixes in such batches, has no ALiBi: its bits follow a tile's first query.
@pytest.mark.parametrize("feature", [name for name in FEATURES if name != "alibi"])
@on_gpus
def test_prompts_behind_cached_prefixes(
    device: str, dtype: str, head_dim: int, feature: str
) -> None:
    requests = Requests([701], device, dtype, head_dim)
    options = FEATURES[feature]
    (whole,) = requests.attend([0], [701], **options)
    assert whole.isfinite().all()
    for count in (1, 5, 64, 100, 333, 690):
        (rest,) = requests.attend([0], [count], **options)
        assert torch.equal(rest, whole[-count:]), count
