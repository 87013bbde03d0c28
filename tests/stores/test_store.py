"""The store's entries and accounts: exact on every path, unchanged by every failure."""

from __future__ import annotations

import copy
import math
import pickle
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from recoup.errors import (
    NotHeldError,
    PrecisionError,
    SizeError,
    StoreError,
    StoreFullError,
    UnitRangeError,
)
from recoup.stores import ActivationStore, EntryInfo, StoreStats


def floats(num: int, value: float = 1.0) -> np.ndarray[Any, Any]:
    return np.full(num, value, np.float32)


def snapshot(store: ActivationStore) -> object:
    return store.stats(), store.held_units(), [store.info(unit) for unit in store.held_units()]


def test_a_new_store_is_empty() -> None:
    store = ActivationStore(budget="1KiB")
    assert store.stats() == StoreStats(0, 0, 0, 1024, 0.0, 0, 0)
    assert (len(store), store.held_units(), store.num_bytes, store.budget_bytes) == (0, (), 0, 1024)
    assert ActivationStore().stats() == StoreStats(0, 0, 0, None, 0.0, 0, 0)
    assert ActivationStore(budget=0).stats().utilisation == 0.0


def test_a_store_tells_its_settings() -> None:
    store = ActivationStore(max_entries=3, evict="refuse", precision="int8", place="host", num_units=9)
    told = (store.budget_bytes, store.max_entries, store.evict, store.precision, store.place, store.num_units)
    assert told == (None, 3, "refuse", "int8", "host", 9)
    store = ActivationStore()
    told = (store.budget_bytes, store.max_entries, store.evict, store.precision, store.place, store.num_units)
    assert told == (None, None, "oldest", None, "same", None)


class _WithStore(torch.nn.Module):
    def __init__(self, store: ActivationStore) -> None:
        super().__init__()
        self.store = store


@pytest.mark.parametrize("precision", [None, "bfloat16", "int8"])
@pytest.mark.parametrize(
    "copied",
    [
        copy.copy,
        copy.deepcopy,
        lambda store: pickle.loads(pickle.dumps(store)),
        lambda store: copy.deepcopy(_WithStore(store)).store,
        lambda store: pickle.loads(pickle.dumps(_WithStore(store))).store,
    ],
)
def test_copies_hold_the_same_and_share_nothing(copied: Any, precision: Any) -> None:
    store = ActivationStore(budget=2000, precision=precision, num_units=9)
    store.put(2, torch.linspace(-1, 1, 100).reshape(10, 10).T, cost=3.0)
    store.put(4, floats(100, 0.5))
    store.put(5, floats(7))
    store.remove(5)
    store.drop(1, 44)
    other = copied(store)
    assert snapshot(other) == snapshot(store)
    assert (other.budget_bytes, other.precision, other.num_units) == (2000, precision, 9)
    assert torch.equal(other.get(2), store.get(2))
    with pytest.raises(NotHeldError, match="Unit 5 is not held: it was removed"):
        other.get(5)
    before = snapshot(store), store.get(2), store.get(4)
    other.take(2).zero_()
    other.take(4).fill(0)
    assert other.put(7, floats(1)).order == 3
    other.clear()
    assert snapshot(store) == before[0]
    assert torch.equal(store.get(2), before[1])
    assert np.array_equal(store.get(4), before[2])


def test_put_get_take_and_the_figures_between() -> None:
    store = ActivationStore(budget=100)
    assert store.put(3, floats(5), cost=2.5) == EntryInfo(3, 0, 20, 2.5, True)
    assert store.put(1, floats(10), cost=7) == EntryInfo(1, 1, 40, 7.0, True)
    assert store.stats() == StoreStats(2, 2, 60, 100, 0.6, 0, 0)
    assert store.held_units() == (1, 3)
    assert np.array_equal(store.get(3), floats(5))
    assert store.num_bytes == 60
    assert np.array_equal(store.take(3), floats(5))
    assert 3 not in store
    assert 1 in store
    assert store.stats() == StoreStats(2, 1, 40, 100, 0.4, 0, 0)
    assert store.info(3) == EntryInfo(3, 0, 20, 2.5, False)


def test_replacing_frees_the_old_entry_first() -> None:
    store = ActivationStore(budget=100, max_entries=2, evict="refuse")
    store.put(0, floats(15))
    store.put(1, floats(10))
    # 100 bytes only fit because unit 0's 60 go, and a third entry is not created.
    assert store.put(0, floats(15, 2.0)) == EntryInfo(0, 2, 60, 0.0, True)
    assert store.num_bytes == 100
    assert np.array_equal(store.get(0), floats(15, 2.0))
    store.put(0, floats(1))
    assert store.stats() == StoreStats(4, 2, 44, 100, 0.44, 0, 0)


def test_remove_and_clear() -> None:
    store = ActivationStore(budget=100)
    store.put(0, floats(2))
    store.put(1, floats(3))
    store.drop(2, 50)
    assert store.remove(0) is True
    assert store.remove(0) is False
    assert store.num_bytes == 12
    store.clear()
    assert store.stats() == StoreStats(0, 0, 0, 100, 0.0, 0, 0)
    with pytest.raises(NotHeldError, match="Unit 1 is not held: the store was cleared"):
        store.info(1)
    assert store.put(1, floats(3)).order == 2, "an order is never used twice"


def test_drop_counts_each_unit_once_until_it_is_stored() -> None:
    store = ActivationStore()
    store.drop(0, 12)
    store.drop(1, 30)
    store.drop(0, 12)
    assert store.stats().saved_bytes == 42
    store.put(0, floats(3))
    assert store.stats() == StoreStats(1, 1, 12, None, 0.0, 30, 0)
    store.drop(0, 13)
    assert store.stats() == StoreStats(1, 0, 0, None, 0.0, 43, 0)
    with pytest.raises(NotHeldError, match="Unit 0 is not held: it was dropped"):
        store.get(0)


@pytest.mark.parametrize("make", [lambda: floats(4), lambda: torch.ones(4)], ids=["numpy", "torch"])
def test_what_is_stored_and_what_is_given_belong_to_no_one_else(make: Any) -> None:
    store = ActivationStore()
    array = make()
    store.put(0, array)
    array[:] = 5
    first = store.get(0)
    first[:] = 7
    assert (store.get(0) == 1).all()
    assert (store.take(0) == 1).all()


def test_get_can_insist_on_one_entry() -> None:
    store = ActivationStore()
    first = store.put(0, floats(1, 3.0))
    assert store.get(0, order=first.order) == [3.0]
    second = store.put(0, floats(1, 4.0))
    with pytest.raises(NotHeldError, match="not the entry of order 0: it was replaced by 1"):
        store.get(0, order=first.order)
    assert store.get(0, order=second.order) == [4.0]


def test_why_a_unit_is_not_held() -> None:
    store = ActivationStore(budget=40, max_entries=3, num_units=6)
    for unit, num in enumerate((1, 2, 3)):
        store.put(unit, floats(num))
    store.take(0)
    store.remove(1)
    store.put(3, floats(8))
    for unit, why in {
        0: r"it was taken. Use get\(\)",
        1: "it was removed. Put it again",
        2: "it was evicted to make room for unit 3. Recompute it, or raise the budget of 40 B or max_entries=3",
        4: "it was never stored. Put it first",
    }.items():
        for ask in (store.get, store.take):
            with pytest.raises(NotHeldError, match=f"Unit {unit} is not held: {why}"):
                ask(unit)
    assert store.info(2) == EntryInfo(2, 2, 12, 0.0, False)
    with pytest.raises(NotHeldError, match="never stored"):
        store.info(4)
    store.put(2, floats(1))
    assert store.info(2).in_memory


@pytest.mark.parametrize("unit", [6, 100])
def test_units_out_of_range(unit: int) -> None:
    store = ActivationStore(num_units=6)
    calls = (store.get, store.take, store.remove, store.info, lambda u: store.put(u, floats(1)))
    for call in (*calls, lambda u: store.drop(u, 4)):
        with pytest.raises(UnitRangeError, match=f"Unit {unit} is out of range: .* 6 units, counted from 0"):
            call(unit)
    assert unit not in store


@pytest.mark.parametrize("unit", [-1, 1.0, "0", None, True])
def test_what_is_no_unit(unit: Any) -> None:
    store = ActivationStore()
    for call in (store.get, store.take, store.remove, store.info, lambda u: store.put(u, floats(1))):
        with pytest.raises(UnitRangeError, match="A unit is a whole number, 0 or more; got"):
            call(unit)


def test_numpy_integers_are_units() -> None:
    store = ActivationStore()
    store.put(np.int64(2), floats(1))  # type: ignore[arg-type]
    assert store.held_units() == (2,)
    assert 2 in store


@pytest.mark.parametrize(
    ("setting", "error", "message"),
    [
        ({"budget": "8 apples"}, SizeError, "Cannot read '8 apples'"),
        ({"budget": -1}, SizeError, "cannot be negative"),
        ({"max_entries": -1}, StoreError, "max_entries must be a whole number, 0 or more; got -1"),
        ({"max_entries": 2.0}, StoreError, "max_entries must be a whole number"),
        ({"num_units": "5"}, StoreError, "num_units must be a whole number"),
        (
            {"evict": "newest"},
            StoreError,
            "no evict='newest'. Use one of 'oldest', 'least_valuable', 'refuse'",
        ),
        ({"place": "mars"}, StoreError, "no place='mars'. Use one of 'same', 'host'"),
        (
            {"precision": "int4"},
            PrecisionError,
            "no precision 'int4'. Use 'bfloat16', 'float16', 'int8', or None",
        ),
    ],
)
def test_bad_settings(setting: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ActivationStore(**setting)


@pytest.mark.parametrize("cost", [-1.0, math.nan, math.inf, "dear"])
def test_bad_costs_change_nothing(cost: Any) -> None:
    store = ActivationStore()
    store.put(0, floats(3))
    before = snapshot(store)
    with pytest.raises(StoreError, match="The cost of unit 0 must be a finite number, 0 or more"):
        store.put(0, floats(3), cost=cost)
    assert snapshot(store) == before


@pytest.mark.parametrize("num_bytes", [-1, 1.5, None])
def test_bad_drops_change_nothing(num_bytes: Any) -> None:
    store = ActivationStore()
    store.put(0, floats(3))
    before = snapshot(store)
    with pytest.raises(StoreError, match="num_bytes must be a whole number, 0 or more"):
        store.drop(0, num_bytes)
    assert snapshot(store) == before


@pytest.mark.parametrize("evict", ["oldest", "least_valuable", "refuse"])
def test_larger_than_the_budget_is_refused_before_anything_is_evicted(evict: Any) -> None:
    store = ActivationStore(budget=40, evict=evict)
    store.put(0, floats(4))
    store.put(1, floats(6))
    before = snapshot(store)
    for unit in (0, 2):
        with pytest.raises(
            StoreFullError, match=f"Unit {unit} needs 44 B, more than the whole budget of 40 B"
        ):
            store.put(unit, floats(11))
    assert snapshot(store) == before


def test_a_failed_put_changes_nothing() -> None:
    store = ActivationStore(budget=10, precision="float16")
    store.put(0, floats(2))
    store.put(1, floats(3))
    before = snapshot(store)
    with pytest.raises(PrecisionError, match="Unit 2: 1 of 4 values"):
        store.put(2, np.array([1, 2, 3, 1e6], np.float32))
    assert snapshot(store) == before
    assert store.held_units() == (0, 1)


@pytest.mark.parametrize("max_entries", [0, 2])
def test_refuse_names_the_limit_and_the_unit(max_entries: int) -> None:
    store = ActivationStore(max_entries=max_entries, evict="refuse")
    for unit in range(max_entries):
        store.put(unit, floats(unit + 1))
    with pytest.raises(
        StoreFullError, match=rf"unit 9: the store is limited to {max_entries} entries \(max_en"
    ):
        store.put(9, floats(1))
    assert store.held_units() == tuple(range(max_entries))


def test_refuse_names_the_bytes_that_are_free() -> None:
    store = ActivationStore(budget=50, evict="refuse")
    store.put(0, floats(8))
    message = "unit 1: it needs 20 B and 18 B of the budget of 50 B are free. Raise .* or use evict='oldest'"
    with pytest.raises(StoreFullError, match=message):
        store.put(1, floats(5))


def test_a_store_of_no_entries_refuses_whatever_it_may_evict() -> None:
    with pytest.raises(StoreFullError, match=r"limited to 0 entries \(max_entries\). Raise that limit.$"):
        ActivationStore(max_entries=0).put(0, floats(1))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1.0], "got list; pass a torch tensor or a NumPy array"),
        (3.0, "got float"),
        (np.ma.masked_array([1.0], [True]), "got MaskedArray, which a copy would not preserve"),
        (np.array([None]), "got an array of Python objects"),
        (torch.ones(2, 2).to_sparse(), "got a tensor with layout torch.sparse_coo"),
    ],
)
def test_what_is_no_array_is_refused(value: Any, message: str) -> None:
    with pytest.raises(StoreError, match=f"Unit 4 cannot be stored: {message}"):
        ActivationStore().put(4, value)


def test_it_prints_what_it_holds() -> None:
    store = ActivationStore(budget="1KiB")
    store.put(0, floats(3))
    assert repr(store) == "<ActivationStore: 1 entries, 12 B, of 1.00 KiB>"


class Accounts(RuleBasedStateMachine):
    """Any sequence of calls, against a plain dictionary with oldest-first eviction."""

    def __init__(self) -> None:
        super().__init__()
        self.store = ActivationStore(budget=64, max_entries=4)
        self.model: dict[int, int] = {}
        self.saved: dict[int, int] = {}

    @rule(unit=st.integers(0, 6), num=st.integers(0, 18))
    def put(self, unit: int, num: int) -> None:
        if 4 * num > 64:
            with pytest.raises(StoreFullError):
                self.store.put(unit, floats(num))
            return
        self.store.put(unit, floats(num, unit))
        self.model.pop(unit, None)
        self.saved.pop(unit, None)
        while sum(self.model.values()) + 4 * num > 64 or len(self.model) + 1 > 4:
            del self.model[next(iter(self.model))]
        self.model[unit] = 4 * num

    @rule(unit=st.integers(0, 6))
    def take(self, unit: int) -> None:
        if unit not in self.model:
            with pytest.raises(NotHeldError):
                self.store.take(unit)
        else:
            assert self.store.take(unit).nbytes == self.model.pop(unit)

    @rule(unit=st.integers(0, 6))
    def remove(self, unit: int) -> None:
        assert self.store.remove(unit) is (self.model.pop(unit, None) is not None)

    @rule(unit=st.integers(0, 6), num_bytes=st.integers(0, 99))
    def drop(self, unit: int, num_bytes: int) -> None:
        self.store.drop(unit, num_bytes)
        self.model.pop(unit, None)
        self.saved[unit] = num_bytes

    @rule()
    def clear(self) -> None:
        self.store.clear()
        self.model.clear()
        self.saved.clear()

    @invariant()
    def agrees(self) -> None:
        stats = self.store.stats()
        assert self.store.held_units() == tuple(sorted(self.model))
        assert stats.num_bytes == sum(self.model.values()) <= 64
        assert stats.saved_bytes == sum(self.saved.values())
        for unit, num_bytes in self.model.items():
            assert self.store.info(unit).num_bytes == num_bytes
            assert (self.store.get(unit) == unit).all()


TestAccounts = Accounts.TestCase
TestAccounts.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@given(nums=st.lists(st.integers(0, 10), max_size=30), evict=st.sampled_from(["oldest", "least_valuable"]))
def test_an_evicting_store_takes_all_that_fits_alone(nums: list[int], evict: Any) -> None:
    store = ActivationStore(budget=40, evict=evict)
    for unit, num in enumerate(nums):
        store.put(unit, floats(num), cost=(7 * unit) % 5)
        assert unit in store
        assert store.num_bytes <= 40
    stats = store.stats()
    assert stats.num_created == len(nums) == stats.num_in_memory + stats.num_evicted


@pytest.fixture
def _eager_switching() -> Iterator[None]:
    """Threads change places after almost every call, or a missing lock would rarely show."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval_s)


@pytest.mark.usefixtures("_eager_switching")
@pytest.mark.parametrize("evict", ["oldest", "least_valuable", "refuse"])
def test_threads_never_break_the_accounts(evict: Any) -> None:
    budget = 4000
    store = ActivationStore(budget=budget, max_entries=20, evict=evict)
    failures: list[BaseException] = []
    start = threading.Barrier(7)
    done = threading.Event()

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        start.wait()
        for _ in range(300):
            unit, num = int(rng.integers(30)), int(rng.integers(1, 200))
            try:
                match int(rng.integers(5)):
                    case 0 | 1:
                        store.put(unit, floats(num, unit), cost=float(num))
                    case 2:
                        assert (store.get(unit) == unit).all()
                    case 3:
                        assert (store.take(unit) == unit).all()
                    case 4:
                        store.remove(unit)
            except (StoreFullError, NotHeldError):
                pass

    def watch() -> None:
        start.wait()
        while not done.is_set():
            stats = store.stats()
            assert 0 <= stats.num_bytes <= budget
            assert 0 <= store.num_bytes <= budget
            assert stats.num_in_memory <= 20
            assert (stats.num_in_memory == 0) == (stats.num_bytes == 0)

    def guarded(function: Any, *args: Any) -> None:
        try:
            function(*args)
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=guarded, args=(work, seed)) for seed in range(6)]
    watcher = threading.Thread(target=guarded, args=(watch,))
    for thread in (*workers, watcher):
        thread.start()
    for thread in workers:
        thread.join()
    done.set()
    watcher.join()
    assert failures == []
    assert store.stats().num_created > 100
    assert store.num_bytes == sum(store.get(unit).nbytes for unit in store.held_units())
    for unit in store.held_units():
        store.remove(unit)
    assert store.num_bytes == len(store) == 0
