"""Policies: which inputs are held, which units run again, and what is refused."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recoup.errors import PolicyError
from recoup.policies import (
    BalancedSegments,
    EveryN,
    KeepAll,
    KeepNone,
    KeepUnits,
    Policy,
    SegmentPolicy,
    Segments,
    Selective,
    UniformSegments,
)

T, F = True, False
COSTS = [7.0, 1.0, 4.0, 2.5, 11.0, 0.0, 3.0]


@pytest.mark.parametrize(
    ("policy", "kept", "run_again"),
    [
        (KeepAll(), (T, T, T, T, T, T, T), (F, F, F, F, F, F, F)),
        (KeepNone(), (F, F, F, F, F, F, F), (T, T, T, T, T, T, F)),
        (EveryN(), (T, F, F, F, T, F, F), (T, T, T, F, T, T, F)),
        (EveryN(3), (T, F, F, T, F, F, T), (T, T, F, T, T, F, F)),
        (EveryN(1), (T, T, T, T, T, T, T), (F, F, F, F, F, F, F)),
        (EveryN(0), (F, F, F, F, F, F, F), (T, T, T, T, T, T, F)),
        (Selective(3), (T, F, T, F, T, F, T), (T, F, T, F, T, F, F)),
        (Selective(), (F, F, F, F, F, F, F), (T, T, T, T, T, T, F)),
        (UniformSegments(2), (T, F, F, T, F, F, F), (T, T, T, T, T, T, T)),
        (UniformSegments(8), (T, T, T, T, T, T, T), (F, F, F, F, F, F, F)),
        # 7+1+4 | 2.5+11+0 | 3 costs at most 13.5; no other three-way cut does better.
        (BalancedSegments(3), (T, F, F, T, F, F, T), (T, T, T, T, T, T, T)),
        (Segments([(1, 3), (5, 6)]), (T, T, F, F, T, T, F), (F, T, T, T, F, T, T)),
        (Segments([]), (T, T, T, T, T, T, T), (F, F, F, F, F, F, F)),
    ],
)
def test_what_is_held_and_what_runs_again(
    policy: Policy, kept: tuple[bool, ...], run_again: tuple[bool, ...]
) -> None:
    assert policy.keeps(7, COSTS) == kept
    assert policy.recomputes(7, COSTS) == run_again


@pytest.mark.parametrize(
    "policy",
    [KeepAll(), KeepNone(), EveryN(), Selective(), UniformSegments(2), BalancedSegments(2), Segments([])],
)
def test_no_units_give_nothing(policy: Policy) -> None:
    assert policy.keeps(0, []) == policy.recomputes(0, []) == ()


@given(num_units=st.integers(0, 40), count=st.integers(0, 45))
def test_uniform_segments_cover_all_units_in_equal_parts(num_units: int, count: int) -> None:
    segments = UniformSegments(count).segments(num_units)
    if not 0 < count <= num_units:
        assert segments == ()
        return
    sizes = [last - first + 1 for first, last in segments]
    assert sizes[:-1] == [num_units // count] * (count - 1)
    assert sizes[-1] == num_units // count + num_units % count
    assert [unit for first, last in segments for unit in range(first, last + 1)] == list(range(num_units))


def costliest(segments: tuple[tuple[int, int], ...], costs: list[float]) -> Fraction:
    return max(sum(map(Fraction, costs[first : last + 1]), Fraction()) for first, last in segments)


@given(costs=st.lists(st.floats(0, 1e12), min_size=1, max_size=8), data=st.data())
def test_balanced_segments_match_brute_force(costs: list[float], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(costs)))
    segments = BalancedSegments(count).segments(len(costs), costs)
    cuts = itertools.combinations(range(1, len(costs)), count - 1)
    every_way = [tuple(zip((0, *cut), (end - 1 for end in (*cut, len(costs))), strict=True)) for cut in cuts]
    assert segments in every_way
    assert costliest(segments, costs) == min(costliest(way, costs) for way in every_way)


def test_balanced_segments_compare_sums_exactly() -> None:
    # In floating point a cut after unit 2 looks as good: 1 + 1e16 + 1 rounds to 1e16.
    costs = [1.0, 1e16, 1.0, 1.0]
    assert BalancedSegments(2).segments(4, costs) == ((0, 1), (2, 3))
    assert costliest(((0, 1), (2, 3)), costs) == 10**16 + 1


def test_balanced_differs_from_uniform_where_costs_do() -> None:
    costs = [9.0, 1.0, 1.0, 1.0]
    assert BalancedSegments(2).segments(4, costs) == ((0, 0), (1, 3))
    assert UniformSegments(2).segments(4) == ((0, 1), (2, 3))


@given(
    costs=st.lists(st.floats(0, 1e3), min_size=1, max_size=20),
    policy=st.one_of(
        st.builds(UniformSegments, st.integers(0, 22)), st.builds(BalancedSegments, st.integers(0, 22))
    ),
)
def test_a_segment_policy_keeps_first_units_and_outsiders(costs: list[float], policy: SegmentPolicy) -> None:
    firsts = {first for first, _ in policy.segments(len(costs), costs)}
    inside = policy.recomputes(len(costs), costs)
    expected = tuple(unit in firsts or not inside[unit] for unit in range(len(costs)))
    assert policy.keeps(len(costs), costs) == expected


@pytest.mark.parametrize(
    ("policy", "segments"),
    [
        (KeepAll(), ()),
        (EveryN(1), ()),
        (KeepNone(), ((0, 6),)),
        (EveryN(0), ((0, 6),)),
        (EveryN(3), ((0, 2), (3, 5))),
        (Selective(4), ((0, 1), (2, 3), (4, 6))),
        (KeepUnits([2, 3]), ((0, 1), (3, 6))),
        (Segments([(1, 1), (3, 4)]), ((1, 1), (3, 4))),
    ],
)
def test_segments_reach_from_one_held_input_to_the_next(policy: Policy, segments: object) -> None:
    assert policy.segments(7, [7.0, 1.0, 4.0, 2.5, 11.0, 0.5, 3.0]) == segments
    assert EveryN(3).segments(0) == KeepNone().segments(1) == ()


@pytest.mark.parametrize(
    "policy",
    [KeepAll(), KeepNone(), EveryN(3), EveryN(0), Selective(4), KeepUnits([2, 5]), Segments([(1, 3)])],
)
def test_one_unit_at_a_time_as_all_at_once(policy: Policy) -> None:
    costs = [7.0, 1.0, 4.0, 2.5, 11.0, 0.5, 3.0]
    assert tuple(policy.keeps_unit(unit, cost=cost) for unit, cost in enumerate(costs)) == policy.keeps(
        7, costs
    )


@pytest.mark.parametrize(
    ("policy", "unit", "cost", "message"),
    [
        (UniformSegments(2), 0, None, r"divides all units at once.*Use keeps\(num_units\)"),
        (BalancedSegments(2), 0, 1.0, "divides all units at once"),
        (Selective(), 3, None, r"decides by cost, and none was given for unit 3\. Pass cost="),
        (Selective(), 3, -1.0, "The cost of unit 3 must be a finite number"),
        (EveryN(2), -1, None, "The unit must be a whole number, 0 or more; got -1"),
        (EveryN(2), "a", None, "goes by numbers; got the name 'a'"),
        (Segments([(0, 1)]), "a", None, "goes by numbers; got the name 'a'"),
        (KeepUnits(["a"]), 0, None, "give numbers for numbers, names for names"),
        (KeepUnits([0]), "a", None, "give numbers for numbers, names for names"),
    ],
)
def test_what_one_unit_alone_does_not_tell(policy: Policy, unit: Any, cost: Any, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        policy.keeps_unit(unit, cost=cost)


def test_units_by_name() -> None:
    policy = KeepUnits(["b", "a", "b"])
    assert policy == KeepUnits(("a", "b")) != KeepUnits("a")
    assert policy.keeps_unit("b")
    assert not policy.keeps_unit("c")
    assert policy.for_names(["a", "c", "b", "a"]) == KeepUnits([3, 0, 2])
    with pytest.raises(PolicyError, match=r"names 'b', and there is no such unit\. The units are: a, x\."):
        policy.for_names(["a", "x"])
    with pytest.raises(PolicyError, match="names for names"):
        policy.keeps(3)
    with pytest.raises(PolicyError, match="unit 3 is out of range for 3 units"):
        KeepUnits([0, 3]).keeps(3)
    with pytest.raises(PolicyError, match=r"KeepUnits: a unit must be a whole number, 0 or more; got 1\.5"):
        KeepUnits([1.5])  # type: ignore[list-item]


def test_policies_are_values() -> None:
    assert EveryN(3) == EveryN(n=3) != EveryN(4)
    assert len({Segments([(0, 1)]), Segments(((0, 1),)), UniformSegments(2), UniformSegments(2)}) == 2
    assert repr(Selective(7.5)) == "Selective(threshold=7.5)"
    with pytest.raises(AttributeError):
        EveryN(3).n = 4  # type: ignore[misc]


def test_numpy_numbers_are_numbers() -> None:
    costs = np.array([1.0, 500.0])
    assert Selective(np.float32(100)).keeps(np.int64(2), costs) == (False, True)


@pytest.mark.parametrize("bad", [-1, 2.5, "3", None, True])
def test_bad_counts_are_refused(bad: object) -> None:
    for make in (EveryN, UniformSegments, BalancedSegments):
        with pytest.raises(PolicyError, match=r"must be a whole number, 0 or more; got"):
            make(bad)  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match="num_units must be a whole number"):
        KeepAll().keeps(bad)  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match="num_units must be a whole number"):
        UniformSegments(2).recomputes(bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf, "dear", None])
def test_bad_thresholds_and_costs_are_refused(bad: object) -> None:
    with pytest.raises(PolicyError, match="threshold must be a finite number, 0 or more"):
        Selective(bad)  # type: ignore[arg-type]
    for policy in (KeepAll(), Selective(), BalancedSegments(2)):
        with pytest.raises(PolicyError, match="The cost of unit 1 must be a finite number, 0 or more; got"):
            policy.keeps(3, [1.0, bad, 2.0])  # type: ignore[list-item]


@pytest.mark.parametrize("policy", [Selective(), BalancedSegments(2)])
def test_missing_costs_are_asked_for(policy: Policy) -> None:
    with pytest.raises(PolicyError, match=r"decides by cost, and no costs were given. Pass one per unit"):
        policy.keeps(3)


@pytest.mark.parametrize("policy", [KeepAll(), EveryN(), Selective(), BalancedSegments(2), Segments([])])
def test_a_wrong_number_of_costs_is_refused(policy: Policy) -> None:
    with pytest.raises(PolicyError, match="2 costs were given for 3 units"):
        policy.keeps(3, [1.0, 2.0])


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ([(3, 1)], r"Segment 3-1 runs backwards. Write it as \(1, 3\)"),
        ([(0, 2), (2, 4)], "Segments 0-2 and 2-4 overlap.*begin the second at 3 or later"),
        ([(5, 9), (0, 6)], "Segments 0-6 and 5-9 overlap"),
        ([(-1, 2)], "first unit must be a whole number, 0 or more; got -1"),
        ([(0, 1.5)], "last unit must be a whole number, 0 or more; got 1.5"),
        ([(0, 1, 2)], r"A segment is a pair \(first, last\); got \(0, 1, 2\)"),
        ([4], "A segment is a pair"),
    ],
)
def test_bad_segments_are_refused(bounds: list[tuple[int, int]], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        Segments(bounds)  # type: ignore[arg-type]


def test_segments_out_of_range_are_refused_when_the_number_is_known() -> None:
    policy = Segments([(0, 1), (3, 5)])
    assert policy.segments(6) == ((0, 1), (3, 5))
    for ask in (policy.keeps, policy.recomputes, policy.segments):
        with pytest.raises(PolicyError, match="Segment 3-5 is out of range for 5 units"):
            ask(5)
