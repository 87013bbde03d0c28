"""parity.md, section 5: what scirs2-neural's checkpoint manager and stores do, row by row, and beyond."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from recoup.errors import NotHeldError, StoreFullError
from recoup.manual import Chain
from recoup.policies import EveryN, KeepAll, KeepNone, Selective
from recoup.stores import ActivationStore, EntryInfo, StoreStats


def zeros(num_bytes: int) -> np.ndarray[Any, Any]:
    return np.zeros(num_bytes, np.uint8)


def test_policies_keep_all_keep_none_selective_every_n() -> None:
    costs = [99.0, 100.0, 3.0, 250.0]
    assert KeepAll().keeps(4, costs) == (True, True, True, True)
    assert KeepNone().keeps(4, costs) == (False, False, False, False)
    assert Selective() == Selective(threshold=100)
    assert Selective().keeps(4, costs) == (False, True, False, True)
    assert Selective(3).keeps(4, costs) == (True, True, True, True)
    assert EveryN(2).keeps(4, costs) == (True, False, True, False)


def test_a_policy_decides_as_activations_come() -> None:
    store = ActivationStore()
    for unit, cost in enumerate([99.0, 100.0, 3.0, 250.0]):
        if Selective().keeps_unit(unit, cost=cost):
            store.put(unit, zeros(8), cost=cost)
    assert store.held_units() == (1, 3)
    assert [EveryN(2).keeps_unit(unit) for unit in range(4)] == [True, False, True, False]


def test_manager_evicts_the_oldest_to_stay_in_its_byte_budget() -> None:
    store = ActivationStore(budget=100)
    for unit, num_bytes in enumerate((50, 30, 40)):
        store.put(unit, zeros(num_bytes))
    assert store.held_units() == (1, 2)
    assert store.num_bytes == 70


def test_manager_is_thread_safe() -> None:
    store = ActivationStore(budget=1000)
    start = threading.Barrier(4)

    def work(first: int) -> None:
        start.wait()
        for unit in range(first, first + 200):
            store.put(unit, zeros(1 + unit % 90))
            assert store.num_bytes <= 1000

    threads = [threading.Thread(target=work, args=(1000 * index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stats = store.stats()
    assert stats.num_created == 800 == stats.num_in_memory + stats.num_evicted
    assert stats.num_bytes == sum(store.info(unit).num_bytes for unit in store.held_units())


def test_metadata_survives_eviction() -> None:
    store = ActivationStore(budget=100)
    store.put(7, zeros(60), cost=12.5)
    assert store.info(7) == EntryInfo(unit=7, order=0, num_bytes=60, cost=12.5, in_memory=True)
    store.put(2, zeros(50), cost=3.0)
    assert store.info(7) == EntryInfo(unit=7, order=0, num_bytes=60, cost=12.5, in_memory=False)
    assert store.info(2) == EntryInfo(unit=2, order=1, num_bytes=50, cost=3.0, in_memory=True)


def test_taking_removes_and_has_remove_clear_count_usage_budget_work() -> None:
    store = ActivationStore(budget="1KiB")
    for unit, num_bytes in enumerate((10, 20, 30)):
        store.put(unit, zeros(num_bytes))
    assert store.take(1).nbytes == 20
    assert (1 in store, 2 in store, len(store), store.num_bytes) == (False, True, 2, 40)
    with pytest.raises(NotHeldError, match="it was taken"):
        store.take(1)
    assert store.remove(2)
    assert (len(store), store.num_bytes, store.budget_bytes) == (1, 10, 1024)
    store.clear()
    assert (len(store), store.num_bytes, store.budget_bytes) == (0, 0, 1024)


def test_statistics_created_in_memory_bytes_budget_utilisation() -> None:
    store = ActivationStore(budget=200)
    for unit, num_bytes in enumerate((70, 80, 50)):
        store.put(unit, zeros(num_bytes))
    store.take(0)
    assert store.stats() == StoreStats(
        num_created=3,
        num_in_memory=2,
        num_bytes=130,
        budget_bytes=200,
        utilisation=0.65,
        saved_bytes=0,
        num_evicted=0,
    )


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("enabled", [True, False])
def test_forward_keeps_inputs_backward_uses_or_recomputes_with_an_off_switch(
    kind: str, enabled: bool
) -> None:
    weights = [0.5, -2.0, 3.0, 1.5, 0.25]
    chain = Chain.from_layers(
        weights,
        lambda w, x: w * x * x,
        lambda w, x, grad_y: (2 * w * x * grad_y, (x * x * grad_y).sum()),
        enabled=enabled,
    )
    x: Any = np.array([0.7, -1.1])
    x = torch.from_numpy(x) if kind == "torch" else x
    store = ActivationStore(budget=2 * 16, evict="oldest")
    run = chain.forward(x, policy=KeepAll(), store=store)
    assert run.held_units() == ((3, 4) if enabled else (0, 1, 2, 3, 4))
    found = run.backward(x + 1)
    assert run.num_recomputed == (2 if enabled else 0)
    plain = chain.forward(x, policy=KeepAll(), store=ActivationStore()).backward(x + 1)
    assert found.input.tolist() == plain.input.tolist()
    assert [float(g) for g in found.parameters] == [float(g) for g in plain.parameters]


def test_cpu_store_of_zeros_2_3_4_float32_is_96_bytes() -> None:
    store = ActivationStore(place="host")
    store.put(0, np.zeros((2, 3, 4), np.float32))
    assert store.num_bytes == 96
    assert np.array_equal(store.get(0), np.zeros((2, 3, 4), np.float32))
    store.put(1, torch.zeros(2, 3, 4))
    assert store.num_bytes == 192
    assert torch.equal(store.get(1), torch.zeros(2, 3, 4))
    assert store.remove(0)
    assert store.num_bytes == 96
    store.clear()
    assert store.num_bytes == 0


def test_beyond_eviction_goes_on_until_the_new_entry_fits() -> None:
    store = ActivationStore(budget=100)
    for unit, num_bytes in enumerate((10, 20, 30, 40)):
        store.put(unit, zeros(num_bytes))
    store.put(4, zeros(55))
    assert (store.held_units(), store.num_bytes) == ((3, 4), 95)


def test_beyond_an_entry_larger_than_the_budget_is_refused_before_any_eviction() -> None:
    store = ActivationStore(budget=100)
    store.put(0, zeros(90))
    with pytest.raises(StoreFullError, match="Unit 1 needs 101 B, more than the whole budget of 100 B"):
        store.put(1, zeros(101))
    assert (store.held_units(), store.num_bytes) == ((0,), 90)


def test_beyond_usage_falls_when_an_entry_is_taken() -> None:
    store = ActivationStore(budget=100)
    store.put(0, zeros(90))
    store.take(0)
    assert (store.num_bytes, store.stats().utilisation) == (0, 0.0)
    store.put(1, zeros(100))
    assert store.stats().num_evicted == 0


def test_beyond_the_checkpoint_holds_the_data() -> None:
    array = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    store = ActivationStore()
    store.put(0, array)
    assert np.array_equal(store.get(0), array)


def test_beyond_recomputation_really_runs_from_the_nearest_held_ancestor() -> None:
    run_again: list[int] = []

    def forward(unit: int, x: Any) -> Any:
        run_again.append(unit)
        return x * (unit + 2)

    run = Chain.from_layers(range(6), forward).forward(np.array([1.0]), policy=EveryN(3))
    run_again.clear()
    assert run.activation(5) == [1.0 * 2 * 3 * 4 * 5 * 6]
    assert run_again == [3, 4]
