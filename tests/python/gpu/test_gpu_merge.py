"""Merged states on a GPU, wherever their rows begin: four columns are read at once if aligned."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import dlattn  # noqa: E402

pytestmark = pytest.mark.gpu

BATCH, ROWS, HEADS = 2, 37, 3
TOLERANCE = {"bfloat16": 8e-3, "float16": 1e-3, "float32": 2e-6}


def check(device: str, dtype: str, head_dim: int, count: int, gap: int, first: int) -> None:
    """`gap` columns more in memory than a row has, which begins at column `first` of them."""
    torch.manual_seed(count)
    outs, lses = [], []
    for n in range(count):
        memory = torch.randn(BATCH, ROWS, HEADS, head_dim + gap, device=device) + 0.25
        lse = torch.randn(BATCH, HEADS, ROWS, device=device) * 3 + 5
        empty = (torch.arange(ROWS, device=device) + n) % 5 == 4
        empty |= torch.arange(ROWS, device=device) == 7  # in all states
        lse[:, :, empty] = -torch.inf
        memory[:, empty] = torch.nan
        outs.append(memory.to(getattr(torch, dtype))[..., first : first + head_dim])
        lses.append(lse)
    out, lse = dlattn.merge_states(outs, lses)
    weights = torch.stack(lses).double().softmax(0).nan_to_num()
    values = torch.stack(outs).double().nan_to_num()
    want = (weights.transpose(2, 3)[..., None] * values).sum(0)
    error = float((out.double() - want).abs().max())
    assert error <= TOLERANCE[dtype] * float(want.abs().max()), error
    total = torch.stack(lses).double().logsumexp(0)
    torch.testing.assert_close(lse.double(), total, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("head_dim", "count"), [(128, 4), (64, 2), (260, 5), (33, 3), (8, 32)])
def test_rows_that_begin_anywhere(dtype: str, head_dim: int, count: int) -> None:
    for gap, first in ((0, 0), (4, 0), (4, 4), (4, 2), (4, 1), (1, 0), (2, 0)):
        check("cuda", dtype, head_dim, count, gap, first)
