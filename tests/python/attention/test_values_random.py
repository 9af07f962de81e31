"""A part of the random test of values, limited in time, and what that test is worth."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import values  # noqa: E402
from differential import DTYPES, KERNELS, TorchArrays  # noqa: E402
from test_values import LOWEST, padding, qkv  # noqa: E402
from value_bounds import KINDS, Expected  # noqa: E402
from value_problems import draw_values  # noqa: E402

import dlattn  # noqa: E402
from dlattn.reference import attention_reference  # noqa: E402


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Any:
    """The reference's matrices are small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
def test_random_values_on_the_cpu() -> None:
    summary = values.run(TorchArrays("cpu"), KERNELS["cpu"], 0, 400, 6.0)
    assert not summary.failures
    assert summary.kernels["cpu"].runs == summary.problems > 0


@pytest.mark.gpu
@pytest.mark.slow
def test_random_values_on_a_gpu() -> None:
    summary = values.run(TorchArrays(), KERNELS["cuda"], 0, None, 30.0)
    assert not summary.failures
    for kernel in ("scalar", "wmma", "wmma:general"):
        assert summary.kernels[kernel].runs > 0


def test_what_is_drawn() -> None:
    """Every kind of row, and values at both ends of every range."""
    arrays, kinds, found = TorchArrays("cpu"), Counter[str](), Counter[str]()
    for seed in range(150):
        problem = draw_values(seed, DTYPES["cpu"], 1 << 12)
        kinds.update(values.ValuesRun(arrays, problem).kinds)
        scale, softcap = problem.options["softmax_scale"] or 1.0, problem.options["softcap"]
        tensors = {name: np.abs(x).astype(np.float64) for name, (x, _) in problem.tensors.items()}
        of_bias, slopes, sinks = (
            np.max(np.where(np.isfinite(x), x, 0), initial=0.0)
            for x in (tensors.get(name, np.zeros(1)) for name in ("bias", "alibi_slopes", "sinks"))
        )
        found.update(
            name
            for name, is_there in {
                "scale below": scale < 2.0**-60,
                "scale above": scale > 2.0**60,
                "softcap below": 0 < softcap < 2.0**-30,
                "softcap above": softcap > 2.0**30,
                "bias of 1e9": 5e8 < of_bias < 2e9,
                "bias of 1e30": 1e30 <= of_bias < 1e36,
                "lowest bias": of_bias > 3e38,
                "slopes": slopes > 1e15,
                "sinks": sinks > 1e30,
            }.items()
            if is_there
        )
    assert all(kinds[kind] > 0 for kind in KINDS), kinds
    assert len(found) == 9, found
    assert all(count >= 2 for count in found.values()), found


@pytest.mark.parametrize("seed", range(12))
def test_exact_rows_are_those_of_the_reference(seed: int) -> None:
    problem = draw_values(seed, ("float32",), 1 << 11)
    run = values.ValuesRun(TorchArrays("cpu"), problem)
    options = {
        n: x for n, x in problem.options.items() if n not in ("return_lse", "batch_invariant")
    }
    for (_, inputs, special), (_, expected) in zip(run._sequences(), run._parts, strict=True):
        for name in ("bias", "mask"):
            if name in special and special[name].dim() < 4:
                special = {**special, name: special[name][(None,) * (4 - special[name].dim())]}
        out, lse = attention_reference(*inputs, **options, **special)
        out, lse = (torch.from_numpy(np.ascontiguousarray(x)) for x in (out, lse))
        exact = (expected.kind == 0) & ~expected.settled | (expected.kind == KINDS.index("empty"))
        close = torch.isclose(out.transpose(1, 2), expected.out, rtol=1e-9, atol=1e-12)
        assert close[exact].all()
        assert torch.isclose(lse, expected.lse, rtol=1e-9, atol=1e-9)[exact].all()


# --- what fails ----------------------------------------------------------------------------------


def rounded(expected: Expected, dtype: Any) -> tuple[Any, Any]:
    """The right result as a kernel returns it."""
    return expected.out.transpose(1, 2).to(dtype), expected.lse.float()


def test_right_results_pass() -> None:
    for seed in range(40):
        problem = draw_values(seed, ("float16", "bfloat16", "float32"), 1 << 12)
        for _, expected in values.ValuesRun(TorchArrays("cpu"), problem)._parts:
            dtype = getattr(torch, problem.dtype)
            of_out, of_lse, text = expected.worst(*rounded(expected, dtype))
            assert of_out <= 1, text
            assert of_lse <= 1, text


def test_products_of_subnormal_numbers_are_aligned_as_stored() -> None:
    """Sums of 16 products on tensor cores keep 25 bits below the largest that could be stored."""
    generator = torch.Generator().manual_seed(7)
    sizes = torch.exp2(-16 * torch.rand(1, 64, 1, 128, generator=generator))
    q = (sizes * torch.randn(1, 64, 1, 128, generator=generator)).half()
    k = torch.randint(-4, 5, (1, 48, 1, 128), generator=generator).mul(2.0**-24).half()
    v = torch.rand(1, 48, 1, 8, generator=generator).half()
    expected = Expected(q, k, v, {"softmax_scale": 2.0**40})
    exact = torch.einsum("bihd,bjhd->bhijd", q.double(), k.double())
    exponents = (x.double().abs().clamp_min(2.0**-14).log2().floor() for x in (q, k))
    q_exponent, k_exponent = exponents
    stored = q_exponent.transpose(1, 2)[:, :, :, None] + k_exponent.transpose(1, 2)[:, :, None]
    sums = torch.zeros(1, 1, 64, 48, dtype=torch.float64)
    for at in range(0, 128, 16):
        top = stored[..., at : at + 16].amax(-1)
        top = torch.maximum(top, torch.where(sums == 0, -99.0, sums.abs().log2().floor()))
        unit = torch.exp2(top - 25)
        parts = torch.trunc(exact[..., at : at + 16] / unit[..., None]).sum(-1)
        sums = ((parts + torch.trunc(sums / unit)) * unit).float().double()
    scores = sums * 2.0**40
    assert (scores - expected.scores).abs().max() > 2.0**-21 * expected.scores.abs().max()
    out = (scores.softmax(3) @ v.transpose(1, 2).double()).transpose(1, 2)
    assert max(expected.worst(out.half(), scores.logsumexp(3).float())[:2]) <= 1
    twice = 32 * scores - 31 * expected.scores
    assert expected.worst(out.half(), twice.logsumexp(3).float())[1] > 1


def test_terms_may_be_added_in_any_order() -> None:
    """Two keys that a bias of -1e10 makes equal, or not, as ALiBi joins before or after it."""
    q, v = torch.ones(1, 1, 1, 1).half(), torch.tensor([1.0, 2.0]).reshape(1, 2, 1, 1).half()
    k = torch.tensor([-5420.0, 4912.0]).reshape(1, 2, 1, 1).half()
    terms = {"alibi_slopes": torch.tensor([[-10000.0]]), "bias": torch.full((1, 1, 1, 2), -1e10)}
    expected = Expected(q, k, v, {"softmax_scale": 1.0, **terms})
    scores = k.float().flatten() + terms["bias"].flatten() + torch.tensor([10000.0, 0.0])
    assert expected.kinds()["lifted"] == 1
    assert expected.out.item() == 2.0
    assert scores[0] == scores[1]
    assert expected.worst(torch.full((1, 1, 1, 1), 1.5).half(), None)[0] <= 1
    assert expected.worst(torch.full((1, 1, 1, 1), 0.99).half(), None)[0] > 1


@pytest.mark.parametrize("value", [-1e9, -1e10, LOWEST])
def test_a_row_that_is_taken_for_masked_fails(value: float) -> None:
    q, k, v = qkv("cpu", "float16", 70)
    bias = torch.full((1, 1, 70, 320), value)
    expected = Expected(q, k, v, {"bias": bias})
    assert set(expected.kinds()) - {"absorbed"} == {k for k, n in expected.kinds().items() if not n}
    out, lse = rounded(expected, q.dtype)
    assert max(expected.worst(out, lse)[:2]) <= 1
    for wrong in (torch.zeros_like(out), torch.full_like(out, math.nan), v[:, :70]):
        assert expected.worst(wrong, lse)[0] > 1
    assert expected.worst(out, torch.full_like(lse, -math.inf))[1] > 1


@pytest.mark.parametrize("value", [-1e4, -1e9, LOWEST])
def test_a_bias_of_others_excuses_nothing(value: float) -> None:
    """The bound of rows in which some keys have no bias is that without the biased keys."""
    q, k, v = qkv("cpu", "float16", 70)
    bias = padding("cpu", 320, 136, value, "right")
    expected = Expected(q, k, v, {"bias": bias})
    alone = Expected(q, k[:, :184], v[:, :184], {})
    torch.testing.assert_close(expected.out, alone.out)
    assert float(expected.plain_out.max()) <= 2 * float(alone.plain_out.max())
    assert float(expected.of_scores.max()) <= 2 * float(alone.of_scores.max())
    out, lse = rounded(expected, q.dtype)
    out[0, 3, 1] *= 1.02
    assert expected.worst(out, lse)[0] > 1


@pytest.mark.parametrize("softcap", [1e5, 1e7])
def test_a_large_softcap_excuses_nothing(softcap: float) -> None:
    """A tanh whose error is relative to the cap, as 1 - 2 / (1 + exp(2x)) has it."""
    q, k, v = qkv("cpu", "float16", 70)
    expected = Expected(q, k, v, {"softcap": softcap})
    scores = (q.transpose(1, 2).float() @ k.transpose(1, 2).float().transpose(2, 3)) / 8
    capped = softcap - 2 * softcap / (1 + torch.exp(2 * scores / softcap))
    out = (torch.softmax(capped, 3) @ v.transpose(1, 2).float()).transpose(1, 2).half()
    assert expected.worst(out, torch.logsumexp(capped, 3))[1] > 1


def test_one_of_equal_keys_fails() -> None:
    q, k, v = qkv("cpu", "float16", 70)
    expected = Expected(torch.full_like(q, 30000.0), torch.full_like(k, 30000.0), v, {})
    _, lse = rounded(expected, q.dtype)
    assert expected.worst(v[:, 319:].expand(1, 70, 2, 64), lse)[0] > 1


def test_a_result_outside_of_v_fails() -> None:
    """Where the order of additions decides, out is at least between the values of V."""
    q, k, v = qkv("cpu", "bfloat16", 70)
    q, k = q * 1e4, (k[:, :1] + k * 1e-2) * 1e4
    expected = Expected(q, k, v, {})
    assert expected.kinds()["coarse"] > 0
    out, lse = rounded(expected, q.dtype)
    assert expected.worst(out, lse)[0] <= 1
    assert expected.worst(out + 10, lse)[0] > 1
    assert expected.worst(torch.full_like(out, math.nan), lse)[0] > 1


def test_a_plain_computation_that_is_not_finite_is_a_broken_test() -> None:
    q, k, v = qkv("cpu", "float32")
    assert Expected(q * 1e20, k * 1e20, v, {}).broken


def test_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "values.json"
    words = ["values.py", "--device", "cpu", "--seed", "5", "--count", "3", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", words)
    attention = dlattn.attention
    monkeypatch.setattr(dlattn, "attention", lambda *a, **o: attention(*a, **o) and None)
    assert values.main() == 1
    document = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert document["failures"]
    assert (document["problems"], document["seeds"]) == (3, [5, 8])
