from __future__ import annotations

from collections import OrderedDict, deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from recoup.model.preserve import preserving
from recoup.snapshot.places import Snapshot
from recoup.snapshot.reachable import Reached


def snapshot_of(name: str, value: object) -> Snapshot:
    return Reached([(name, value)], follows_code=False).snapshot()


@pytest.mark.parametrize(
    ("value", "change"),
    [
        ([1, 2], lambda value: value.append(3)),
        ({"a": 1}, lambda value: value.update(b=2)),
        ({1}, lambda value: value.add(2)),
        (deque([1]), lambda value: value.appendleft(0)),
        ({"a": [1]}, lambda value: value["a"].clear()),
        (SimpleNamespace(n=1), lambda value: setattr(value, "n", 2)),
        (SimpleNamespace(n=1), lambda value: delattr(value, "n")),
        ([1, 2], lambda value: value.reverse()),
    ],
)
def test_what_changes_is_noticed_and_put_back(value: object, change: object) -> None:
    text = repr(value)
    notes = snapshot_of("value", value)
    assert notes.changed() == []
    change(value)  # type: ignore[operator]
    assert len(notes.changed()) == 1
    notes.put_back()
    assert repr(value) == text
    assert notes.changed() == []


def test_tensors_are_noticed_by_version() -> None:
    tensor = torch.zeros(2)
    notes = snapshot_of("cache", {"x": tensor})
    tensor += 1
    assert notes.changed() == ["cache['x']"]


def test_generators_draw_again_what_they_drew() -> None:
    generator = torch.Generator().manual_seed(3)
    notes = snapshot_of("generator", generator)
    first = torch.rand(3, generator=generator)
    notes.put_back()
    assert torch.equal(torch.rand(3, generator=generator), first)


def test_objects_that_hold_each_other() -> None:
    first, second = SimpleNamespace(), SimpleNamespace()
    first.other, second.other = second, first
    notes = snapshot_of("first", first)
    second.n = 1
    assert notes.changed() == ["first.other"]


def test_attributes_of_all_modules() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    model[1].history, model[0].count = [], 0
    history = model[1].history
    keys = [list(vars(module)) for module in model.modules()]

    def change() -> None:
        model[1].history.append(1)
        model[0].count += 1
        model[0].new = torch.zeros(2)
        model.training = False
        raise KeyError

    with pytest.raises(KeyError), preserving(model):
        change()
    assert model[1].history is history
    assert (history, model[0].count, model.training) == ([], 0, True)
    assert [list(vars(module)) for module in model.modules()] == keys


def test_a_dictionary_that_makes_what_it_is_asked_for_is_read_as_it_is() -> None:
    class Makes(OrderedDict[str, type]):
        def __getitem__(self, key: str) -> Any:
            raise TypeError("a class that needs arguments")

    table = Makes(relu=nn.ReLU)
    snapshot = Snapshot()
    snapshot.add(table, "table")
    assert snapshot.changed() == []
    dict.__setitem__(table, "relu", nn.GELU)
    assert snapshot.changed() == ["table"]
    snapshot.put_back()
    assert list(table.values()) == [nn.ReLU]
