"""parity.md, section 2: what kizzasi-model's `ActivationCheckpointer` does, row by row, and beyond."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch

from recoup.errors import NotHeldError, StoreFullError, UnitRangeError
from recoup.manual import Chain, Run, Step
from recoup.policies import EveryN, KeepAll
from recoup.stores import ActivationStore, StoreStats

LAYERS = [0.5, 3.0, -1.25, 2.0, 0.75, 7.0]
X = np.array([1.0, -2.0, 0.3], np.float32)


def layer_forward(weight: float, x: Any) -> Any:
    return np.float32(weight) * x + x * x


def run_six(*, store: ActivationStore | None = None, **settings: Any) -> Run:
    return Chain.from_layers(LAYERS, layer_forward).forward(X, store=store, **settings)


def test_configuration_defaults_every_4_at_most_64_full_precision() -> None:
    assert EveryN() == EveryN(4)
    run = Chain([Step(lambda x: x + 1)] * 300).forward(np.zeros(3, np.float32))
    assert run.held_units() == tuple(range(0, 256, 4)), "64 of the 75 boundaries"
    assert inspect.signature(ActivationStore).parameters["precision"].default is None


def test_configuration_n_zero_has_no_boundary() -> None:
    store = ActivationStore()
    run = run_six(store=store, policy=EveryN(0))
    assert run.held_units() == ()
    assert store.stats().saved_bytes == 72


def test_checkpointed_forward_equals_running_the_layers_directly() -> None:
    direct = X
    for weight in LAYERS:
        direct = layer_forward(weight, direct)
    for policy in (EveryN(0), EveryN(1), EveryN(3), EveryN(), KeepAll()):
        output = run_six(policy=policy).output
        assert output.dtype == np.float32
        assert np.array_equal(output, direct)


def test_boundaries_are_layers_divisible_by_n() -> None:
    assert run_six(policy=EveryN(3)).held_units() == (0, 3)
    assert [unit for unit, held in enumerate(EveryN(3).keeps(6)) if held] == [0, 3]


def test_accounting_stored_24_saved_48_count_2() -> None:
    store = ActivationStore(max_entries=64, evict="refuse")
    run_six(store=store, policy=EveryN(3))
    assert (store.num_bytes, store.stats().saved_bytes, len(store)) == (24, 48, 2)


def test_a_forward_in_several_calls_counts_as_one() -> None:
    store = ActivationStore(max_entries=64, evict="refuse")
    x = X
    for first in (0, 3):
        chain = Chain.from_layers(LAYERS[first : first + 3], layer_forward)
        x = chain.forward(x, store=store, policy=EveryN(3), first_unit=first).output
    assert (store.num_bytes, store.stats().saved_bytes, len(store)) == (24, 48, 2)
    assert np.array_equal(x, run_six().output)


def test_save_past_the_limit_names_the_limit_and_the_layer() -> None:
    store = ActivationStore(max_entries=2, evict="refuse")
    store.put(0, X)
    store.put(3, X[:2])
    with pytest.raises(StoreFullError, match=r"No room for unit 6: the store is limited to 2 entries"):
        store.put(6, X)
    assert (store.num_bytes, store.held_units()) == (20, (0, 3))


def test_replacing_an_existing_layer_at_the_limit_is_no_error() -> None:
    store = ActivationStore(max_entries=2, evict="refuse")
    store.put(0, X)
    store.put(3, X)
    store.put(3, X * 2)
    assert np.array_equal(store.get(3), X * 2)


def test_in_a_forward_the_limit_drops_and_counts_as_saved() -> None:
    store = ActivationStore(max_entries=1, evict="refuse")
    run = run_six(store=store, policy=EveryN(2))
    assert run.held_units() == (0,)
    assert (store.num_bytes, store.stats().saved_bytes, len(store)) == (12, 60, 1)


def test_get_tells_out_of_range_from_not_stored() -> None:
    store = ActivationStore(num_units=6)
    run_six(store=store, policy=EveryN(3))
    with pytest.raises(UnitRangeError, match="Unit 6 is out of range: the store was made for 6 units"):
        store.get(6)
    with pytest.raises(NotHeldError, match="Unit 4 is not held: it was dropped"):
        store.get(4)
    assert not issubclass(UnitRangeError, NotHeldError)
    assert not issubclass(NotHeldError, UnitRangeError)


@pytest.mark.parametrize(("target", "num_recomputed"), [(0, 0), (2, 2), (3, 0), (5, 2)])
def test_recompute_from_checkpoint_replays_from_the_nearest_boundary(
    target: int, num_recomputed: int
) -> None:
    run = run_six(policy=EveryN(3), keep_input=False)
    expected = X
    for weight in LAYERS[:target]:
        expected = layer_forward(weight, expected)
    assert np.array_equal(run.activation(target), expected)
    assert run.num_recomputed == num_recomputed


def test_recompute_from_checkpoint_without_a_boundary_is_an_error() -> None:
    run = run_six(policy=EveryN(0), keep_input=False)
    with pytest.raises(NotHeldError, match="The input of unit 2 is not held, nor that of any unit before it"):
        run.activation(2)


def test_clear_resets_entries_and_accounting() -> None:
    store = ActivationStore()
    run_six(store=store, policy=EveryN(3))
    store.clear()
    assert store.stats() == StoreStats(0, 0, 0, None, 0.0, 0, 0)
    assert len(store) == 0


@pytest.mark.parametrize(
    ("precision", "num_bytes"), [(None, 400), ("bfloat16", 200), ("float16", 200), ("int8", 108)]
)
def test_beyond_reduced_precision_really_takes_fewer_bytes(precision: Any, num_bytes: int) -> None:
    for array in (np.linspace(-1, 1, 100, dtype=np.float32), torch.linspace(-1, 1, 100)):
        store = ActivationStore(precision=precision)
        store.put(0, array)
        assert store.num_bytes == store.info(0).num_bytes == num_bytes
        assert abs(store.get(0) - array).max() < 0.005


def test_beyond_saving_a_layer_twice_counts_once() -> None:
    store = ActivationStore()
    store.put(0, X)
    store.put(0, X)
    assert (store.num_bytes, len(store)) == (12, 1)
    for _ in range(2):
        run_six(store=store, policy=EveryN(3))
        assert (store.num_bytes, store.stats().saved_bytes, len(store)) == (24, 48, 2)
