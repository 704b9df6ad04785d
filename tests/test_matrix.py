"""Cases in pairs: few, and none is missed."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.matrix import pairwise

SIZES = [(2, 2), (4, 5, 4), (3, 3, 3, 3), (6, 4, 3, 2, 2), (5, 1, 2)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_any_two_values_come_together(sizes: tuple[int, ...]) -> None:
    """Of any two parameters, and the cases are the same each time; far fewer than all of them."""
    parameters = {f"p{i}": [f"{i}{value}" for value in range(size)] for i, size in enumerate(sizes)}
    cases = pairwise(**parameters)
    assert cases == pairwise(**parameters)
    for (i, one), (j, other) in combinations(enumerate(parameters.values()), 2):
        assert {(case[i], case[j]) for case in cases} == {*product(one, other)}
    widest, second = sorted(sizes)[:-3:-1]
    assert widest * second <= len(cases) <= 1.5 * widest * second
