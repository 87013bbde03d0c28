"""What code can reach, and how its Python state is put back."""

from __future__ import annotations

import functools
import itertools
import random
from collections import Counter, OrderedDict, deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from recoup.snapshot.reachable import Reached, hooks_of

STATE = {"count": 0}
NUMBER = 0


def count() -> None:
    global NUMBER
    NUMBER += 1
    STATE["count"] += 1


def call_count() -> None:
    count()


def test_globals_also_of_functions_that_it_calls() -> None:
    put_back = Reached([("step", call_count)]).hold()
    call_count()
    assert (NUMBER, STATE) == (1, {"count": 1})
    put_back()
    assert (NUMBER, STATE) == (0, {"count": 0})


def test_variables_that_are_bound_anew() -> None:
    total = 0

    def step() -> None:
        nonlocal total
        total += 1

    put_back = Reached([("step", step)]).hold()
    step()
    put_back()
    assert total == 0


class Slotted:
    __slots__ = ("number",)

    def __init__(self) -> None:
        self.number = 1


class Holder:
    def __init__(self) -> None:
        self.inner = Slotted()
        self.names = OrderedDict(a=1)


CONTAINERS: dict[str, Any] = {
    "list": lambda: [1, [2]],
    "dict": lambda: {"a": {"b": 1}},
    "set": lambda: {1, 2},
    "deque": lambda: deque([1, 2], maxlen=2),
    "counter": lambda: Counter("ab"),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_containers_are_filled_again_in_place(name: str) -> None:
    value, expected = CONTAINERS[name](), CONTAINERS[name]()
    put_back = Reached([("value", value)]).hold()
    (value.add if isinstance(value, set) else value.update if isinstance(value, dict) else value.append)(
        {"z": 9} if isinstance(value, dict) else 9
    )
    for inner in value.values() if isinstance(value, dict) else value:
        if isinstance(inner, (list, dict)):
            inner.clear()
    put_back()
    assert value == expected
    if isinstance(value, deque):
        assert value.maxlen == 2


def test_objects_with_attributes_and_slots() -> None:
    holder = Holder()
    inner = holder.inner
    put_back = Reached([("step", functools.partial(setattr, holder))]).hold()
    holder.inner.number = 7
    holder.names["b"] = 2
    holder.inner = Slotted()
    put_back()
    assert holder.inner is inner
    assert (inner.number, list(holder.names)) == (1, ["a"])


def test_arrays_are_not_compared() -> None:
    """A list whose items cannot be compared with ``==`` is put back by identity."""
    first = np.zeros(3)
    items: list[Any] = [first, torch.zeros(2)]
    put_back = Reached([("items", items)]).hold()
    items[0] = np.ones(3)
    put_back()
    assert items[0] is first


def test_generators_of_random_numbers() -> None:
    generators = torch.Generator().manual_seed(1), random.Random(2), np.random.default_rng(3)
    ours, plain, host = generators
    put_back = Reached([("generators", generators)]).hold()
    expected = torch.rand(2, generator=ours), plain.random(), host.random()
    put_back()
    found = torch.rand(2, generator=ours), plain.random(), host.random()
    assert torch.equal(expected[0], found[0])
    assert expected[1:] == found[1:]


def test_models_optimizers_and_leaves() -> None:
    model, other = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(other.parameters())
    prompt = torch.zeros(2, requires_grad=True)

    def step() -> None:
        optimizer.step()
        other(model(prompt))

    reached = Reached([("step", step)], known=model)
    assert reached.modules == [other]
    assert reached.optimizers == [optimizer]
    assert any(leaf is prompt for leaf in reached.leaves)


def test_iterators_in_the_user_s_hands() -> None:
    batches, unused = iter([1, 2]), itertools.count()
    loader = [1, 2]

    def step() -> None:
        next(batches)
        for _ in loader:  # starts anew each time
            pass

    reached = Reached([("step", step)])
    assert [name for name, _ in reached.iterators] == ["batches"]
    assert next(unused) == 0


def test_a_file_is_no_iterator(tmp_path: Any) -> None:
    with open(tmp_path / "log", "w") as log:
        assert not Reached([("step", lambda: log.write("x"))]).iterators


def test_hooks_of_modules_and_parameters() -> None:
    model, seen = nn.Linear(2, 2), []
    model.register_forward_hook(lambda *_: seen.append("forward"))
    model.weight.register_hook(lambda grad: None)
    model.bias.register_post_accumulate_grad_hook(lambda parameter: None)
    assert len(hooks_of(model)) == 3
    put_back = Reached([("hook", hook) for hook in hooks_of(model)]).hold()
    model(torch.zeros(1, 2)).sum().backward()
    put_back()
    assert seen == []


def test_names_of_what_modules_hold() -> None:
    """As their user writes them: of the model itself, and of a module in it."""
    model = nn.Sequential(nn.Linear(2, 2))
    for module in (model, model[0]):
        module.training_step = torch.compile(count, backend="eager")
    found = Reached([], known=model).compiled
    assert found == [
        ("model.training_step", model.training_step),
        ("model.0.training_step", model[0].training_step),
    ]
