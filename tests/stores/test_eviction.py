"""Who leaves: in which order, how many, and never needlessly."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recoup.stores import ActivationStore
from recoup.stores.eviction import Candidate as Entry
from recoup.stores.eviction import choose_victims, value_density


def store_of(sizes: list[int], **settings: object) -> ActivationStore:
    store = ActivationStore(**settings)  # type: ignore[arg-type]
    for unit, num in enumerate(sizes):
        store.put(unit, np.zeros(num, np.uint8))
    return store


def test_oldest_leaves_first_however_often_it_is_read() -> None:
    store = store_of([10, 20, 30], budget=60)
    store.get(0)
    store.put(3, np.zeros(5, np.uint8))
    assert store.held_units() == (1, 2, 3)


def test_several_leave_in_a_row_until_there_is_room() -> None:
    store = store_of([10, 20, 30, 40], budget=100)
    store.put(4, np.zeros(55, np.uint8))
    assert store.held_units() == (3, 4)
    assert store.stats().num_evicted == 3
    assert store.num_bytes == 95


def test_no_more_leave_than_must() -> None:
    store = store_of([10, 20, 30, 40], budget=100)
    store.put(4, np.zeros(30, np.uint8))
    assert store.held_units() == (2, 3, 4)
    assert store.num_bytes == 100


def test_a_replaced_unit_is_young_again() -> None:
    store = store_of([10, 20, 30], budget=60)
    store.put(0, np.zeros(10, np.uint8))
    store.put(3, np.zeros(1, np.uint8))
    assert store.held_units() == (0, 2, 3)


def test_replacing_evicts_only_for_what_is_more() -> None:
    store = store_of([10, 20, 30], budget=60)
    store.put(2, np.zeros(35, np.uint8))
    assert store.held_units() == (1, 2)
    assert store.stats().num_evicted == 1


def test_the_entry_limit_evicts_too() -> None:
    store = store_of([10, 20, 30, 40], max_entries=2)
    assert store.held_units() == (2, 3)
    assert store.num_bytes == 70


@pytest.mark.parametrize(
    ("entries", "leaves"),
    [
        # cost / (bytes * staleness) at time 10: 0.1 and 0.2.
        ([Entry(0, 10, 5.0, 5), Entry(1, 10, 10.0, 5)], 0),
        # Larger: 0.05 against 0.1.
        ([Entry(0, 10, 5.0, 5), Entry(1, 20, 5.0, 5)], 1),
        # Staler: 0.1 against 0.0625.
        ([Entry(0, 10, 5.0, 5), Entry(1, 10, 5.0, 2)], 1),
        # Equal: the older.
        ([Entry(3, 10, 4.0, 5), Entry(4, 20, 8.0, 5)], 3),
        # Without bytes nothing is freed.
        ([Entry(0, 0, 0.0, 1), Entry(1, 10, 99.0, 9)], 1),
    ],
)
def test_the_least_valuable_leaves(entries: list[Entry], leaves: int) -> None:
    victims = choose_victims("least_valuable", entries, excess_bytes=1, excess_entries=0, now=10)
    assert victims is not None
    assert [victim.order for victim in victims] == [leaves]


def test_reading_makes_an_entry_worth_more() -> None:
    store = ActivationStore(budget=30, evict="least_valuable")
    for unit in range(3):
        store.put(unit, np.zeros(10, np.uint8), cost=1.0)
    store.get(0)
    store.put(3, np.zeros(10, np.uint8), cost=1.0)
    assert store.held_units() == (0, 2, 3)


def test_value_is_cost_over_bytes_and_staleness() -> None:
    assert value_density(Entry(0, 8, 6.0, 7), now=10) == 6.0 / (8 * 3)


def test_refusing_frees_nothing() -> None:
    entries = [Entry(0, 10, 1.0, 1)]
    assert choose_victims("refuse", entries, excess_bytes=1, excess_entries=0, now=2) is None
    assert choose_victims("refuse", entries, excess_bytes=0, excess_entries=0, now=2) == []


@given(
    sizes=st.lists(st.integers(0, 20), max_size=12),
    excess=st.integers(0, 300),
    places=st.integers(0, 14),
    evict=st.sampled_from(["oldest", "least_valuable"]),
)
def test_victims_free_enough_and_not_one_too_many(
    sizes: list[int], excess: int, places: int, evict: str
) -> None:
    entries = [Entry(order, size, float(order * 3 % 7), order) for order, size in enumerate(sizes)]
    victims = choose_victims(evict, entries, excess_bytes=excess, excess_entries=places, now=len(sizes))  # type: ignore[type-var]
    if victims is None:
        assert excess > sum(sizes) or places > len(sizes)
        return
    assert sum(victim.num_bytes for victim in victims) >= excess
    assert len(victims) >= places
    if victims:
        without_last = victims[:-1]
        assert sum(victim.num_bytes for victim in without_last) < excess or len(without_last) < places
