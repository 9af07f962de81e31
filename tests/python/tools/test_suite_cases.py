"""The cases of tests that are run without pytest's collection."""

from __future__ import annotations

from typing import Any

import pytest
from suite_adapters.cases import Cases, chosen


@pytest.mark.parametrize("a", [1, (2, 3)])
@pytest.mark.parametrize("b, c", [(4, "x"), pytest.param(5, None), (6, 7.5)])
def parametrized(a: Any, b: Any, c: Any) -> None: ...


def test_cases_are_all_combinations() -> None:
    cases = Cases(parametrized, {"a": (8, 9, 10)})
    found = [tuple(cases.arguments(number).values()) for number in range(len(cases))]
    assert len(cases) == 9 and len(set(found)) == 9
    assert {(b, c) for b, c, _ in found} == {(4, "x"), (5, None), (6, 7.5)}
    assert {a for *_, a in found} == {8, 9, 10}
    assert cases.title(0) == "parametrized[a=8,b=4,c=x]"
    assert len(Cases(parametrized)) == 6
    with pytest.raises(ValueError, match=r"\['a', 'b', 'c'\]"):
        Cases(lambda a, b, c: None)


def test_every_function_has_its_turn() -> None:
    @pytest.mark.parametrize("n", range(50))
    def test_a(n: int) -> None: ...

    @pytest.mark.parametrize("n", range(10))
    def test_b(n: int) -> None: ...

    both = [Cases(test_a), Cases(test_b)]
    order = [(group.name, number) for group, number in chosen(both, "", 0)]
    assert sorted(order) == [("test_a", n) for n in range(50)] + [("test_b", n) for n in range(10)]
    names = [name for name, _ in order]
    assert names == ["test_a"] * 20 + ["test_b"] * 10 + ["test_a"] * 30
    some = [(group.name, number) for group, number in chosen(both, "n=1", 5)]
    ones = [pair for pair in order if str(pair[1]).startswith("1")]
    ones.remove(("test_b", 1))
    assert some == [*ones[:5], ("test_b", 1)]


def test_long_values_are_cut_in_names() -> None:
    @pytest.mark.parametrize("lengths", [[1] * 100, [1] * 99 + [2]])
    def test_a(lengths: list[int]) -> None: ...

    one, other = (Cases(test_a).title(number) for number in range(2))
    assert one != other and len(one) == len(other) < 100
