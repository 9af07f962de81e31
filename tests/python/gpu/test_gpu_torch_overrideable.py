"""Gradients on a GPU by torch's own node: as by the function in Python, and in graphs."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.gpu

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True, "layout": "bhsd"},
    "window": {"window": (20, 0)},
    "mask": {"mask": True},
    "bias": {"bias": True},
    "scale": {"softmax_scale": 0.2, "causal": "top_left"},
}


@pytest.fixture(autouse=True)
def carried() -> Any:
    import dlattn.torch
    from dlattn.integrations.torch import overrideable

    dlattn.torch.attention(*inputs("bshd"))
    if overrideable.why["cuda"]:
        pytest.skip(f"torch {torch.__version__}: {overrideable.why['cuda']}")
    return overrideable


def inputs(layout: str, dtype: Any = torch.bfloat16) -> list[Any]:
    torch.manual_seed(1)
    sizes = [(2, 96, heads, 64) for heads in (8, 2, 2)]
    if layout == "bhsd":
        sizes = [(b, heads, rows, columns) for b, rows, heads, columns in sizes]
    return [torch.randn(size, device="cuda", dtype=dtype).requires_grad_() for size in sizes]


@pytest.mark.parametrize("name", OPTIONS)
def test_bits_are_those_of_the_function(
    name: str, carried: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import dlattn.torch
    from dlattn.integrations.torch.gradients import deterministic_gradients

    options = dict(OPTIONS[name])
    given = inputs(options.get("layout", "bshd"))
    scores = torch.randn(96, 96, device="cuda")
    if "mask" in options:
        options["mask"] = scores > -0.5
    if "bias" in options:
        options["bias"] = scores.requires_grad_()
        given.append(scores)
    results = []
    for kept in (True, False):
        if not kept:
            monkeypatch.setitem(carried.why, "cuda", "it is not to be used")
        with deterministic_gradients(True):
            out = dlattn.torch.attention(*given[:3], **options)
        assert ("Overrideable" in type(out.grad_fn).__name__) == kept
        results.append([out, *torch.autograd.grad(out.float().square().sum(), given)])
    assert all(map(torch.equal, *results))


def test_out_of_memory_is_torchs_error() -> None:
    import dlattn.torch

    tensors = [
        torch.randn(1, 16384, 8, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for _ in range(3)
    ]
    out = dlattn.torch.attention(*tensors)
    assert "Overrideable" in type(out.grad_fn).__name__
    dout = torch.ones_like(out)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-6)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            dlattn.torch.attention(*tensors)
        with pytest.raises(torch.OutOfMemoryError):  # on autograd's thread
            torch.autograd.grad(out, tensors, dout, retain_graph=True)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert all(x.isfinite().all() for x in torch.autograd.grad(out, tensors, dout))


def test_stream_and_graph() -> None:
    """Captured in a graph, forward and backward, and replayed with other values."""
    import dlattn.torch

    given = inputs("bshd")
    dout = torch.randn_like(given[0])

    def both() -> Any:
        out = dlattn.torch.attention(*given, causal=True)
        return out, *torch.autograd.grad(out, given, dout)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            both()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = both()
    with torch.no_grad():
        given[0].mul_(0.5)
    graph.replay()
    for found, want in zip(results, both(), strict=True):
        torch.testing.assert_close(found, want)
