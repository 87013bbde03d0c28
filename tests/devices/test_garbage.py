"""Collections of garbage inside a block that leaves older objects alone."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import recoup
from recoup.devices.meter import gc_of_new_objects
from recoup.errors import BudgetError


@pytest.fixture(autouse=True)
def none_frozen() -> Iterator[None]:
    """The other tests run with all modules frozen."""
    gc.unfreeze()
    yield
    gc.freeze()


class Cycle:
    def __init__(self) -> None:
        self.own = self


def test_old_objects_are_left_alone_inside_and_collected_before_and_after() -> None:
    before = weakref.ref(Cycle())
    kept = Cycle()
    reference = weakref.ref(kept)
    with gc_of_new_objects():
        assert before() is None
        assert gc.get_freeze_count() > 0
        inside = weakref.ref(Cycle())
        del kept
        gc.collect()
        assert inside() is None
        assert reference() is not None
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert reference() is None


def test_what_others_have_frozen_stays_frozen() -> None:
    gc.freeze()
    with gc_of_new_objects():
        pass
    assert gc.get_freeze_count() > 0


def test_the_few_objects_that_python_3_12_freezes_itself_do_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each collection in a fit took 0.2 s there, beside torch and transformers."""
    kept = Cycle()
    reference = weakref.ref(kept)
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 375)
    with gc_of_new_objects():
        del kept
        gc.collect()
        assert reference() is not None
    gc.collect()
    assert reference() is None


def test_a_fit_leaves_nothing_frozen_also_where_it_fails() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)), torch.randn(4, 8)
    recoup.fit(model, x, budget="1GB", loss=torch.sum)
    assert gc.get_freeze_count() == 0
    with pytest.raises(BudgetError):
        recoup.fit(model, x, budget=10, loss=torch.sum)
    assert gc.get_freeze_count() == 0
