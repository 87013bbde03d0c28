"""parity.md, section 4: what yscv-autograd's segments do, row by row, and beyond."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from recoup.manual import Chain
from recoup.policies import BalancedSegments, KeepAll, Segments, UniformSegments

T, F = True, False


@pytest.mark.parametrize(
    ("nodes", "count", "segments"),
    [(10, 2, ((0, 4), (5, 9))), (8, 1, ((0, 7),)), (10, 3, ((0, 2), (3, 5), (6, 9)))],
)
def test_uniform_gives_equal_segments_and_the_remainder_to_the_last(
    nodes: int, count: int, segments: tuple[tuple[int, int], ...]
) -> None:
    assert UniformSegments(count).segments(nodes) == segments


@pytest.mark.parametrize(("nodes", "count"), [(0, 3), (10, 0), (2, 3), (0, 0)])
def test_zero_nodes_zero_segments_or_too_many_give_none(nodes: int, count: int) -> None:
    assert UniformSegments(count).segments(nodes) == ()
    assert BalancedSegments(count).segments(nodes, [1.0] * nodes) == ()
    assert UniformSegments(count).keeps(nodes) == (True,) * nodes


def test_membership_includes_both_ends() -> None:
    segments = Segments([(2, 4), (7, 9)])
    assert [unit for unit in range(11) if segments.contains(unit)] == [2, 3, 4, 7, 8, 9]
    assert [unit for unit in range(11) if not segments.contains(unit)] == [0, 1, 5, 6, 10]


def test_plan_recomputation_gives_a_boolean_per_node() -> None:
    assert Segments([(1, 3)]).recomputes(5) == (F, T, T, T, F)
    assert Segments([]).recomputes(5) == (F, F, F, F, F)


def test_beyond_the_plan_is_executed() -> None:
    run_again: list[int] = []

    def forward(unit: int, x: Any) -> Any:
        run_again.append(unit)
        return np.sin(x) + unit

    def backward(unit: int, x: Any, grad_y: Any) -> Any:
        return np.cos(x) * grad_y

    chain = Chain.from_layers(range(5), forward, backward)
    x, grad = np.array([0.3, 2.0]), np.array([1.0, -3.0])
    expected = chain.forward(x, policy=KeepAll()).backward(grad).input
    run = chain.forward(x, policy=Segments([(1, 3)]))
    assert run.held_units() == (0, 1, 4)
    run_again.clear()
    assert np.array_equal(run.backward(grad).input, expected)
    assert run_again == [1, 2], "3 too would be run only for what it holds inside"
    assert run.num_recomputed == 2


def test_beyond_segments_are_balanced_by_cost() -> None:
    costs = [40.0, 1.0, 2.0, 3.0, 30.0, 5.0]
    balanced, uniform = BalancedSegments(3).segments(6, costs), UniformSegments(3).segments(6)
    assert [sum(costs[a : b + 1]) for a, b in uniform] == [41.0, 5.0, 35.0]
    assert [sum(costs[a : b + 1]) for a, b in balanced] == [40.0, 36.0, 5.0]
