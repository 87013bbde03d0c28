from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import torch

from recoup.model.cut_graph import anchored, gradients_from, seeded
from recoup.tensors import map_tensors, needing_gradient, storages_of, tensors_in, version_of

Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Bag:
    values: Any
    note: str = ""


def test_tensors_in_nested_containers_each_once() -> None:
    a, b, c = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    tree = {"a": [a, (b, Pair(a, c))], "b": Bag(OrderedDict(c=c), "text"), "n": 3}
    assert [len(tensor) for tensor in tensors_in(tree)] == [1, 2, 3]


def test_mapping_keeps_containers_and_identities() -> None:
    a, b = torch.ones(1), torch.ones(2)
    tree = Bag([Pair(a, b), a], "text")
    mapped = map_tensors(lambda tensor: tensor * 2, tree)
    assert type(mapped) is Bag
    assert type(mapped.values[0]) is Pair
    assert mapped.values[1] is mapped.values[0].first
    assert mapped.note == "text"
    assert torch.equal(tree.values[1], torch.ones(1))
    assert torch.equal(mapped.values[0].second, 2 * torch.ones(2))


def test_storages_count_once() -> None:
    a = torch.zeros(10)
    assert list(storages_of([a, a[:3], a.view(2, 5), torch.zeros(7)[2:]]).values()) == [40, 28]


def test_what_needs_a_gradient() -> None:
    a = torch.zeros(1, requires_grad=True)
    assert needing_gradient({"a": a, "b": torch.zeros(1)}) == [a]


def test_versions() -> None:
    a = torch.zeros(1)
    a += 1
    assert version_of(a) == 1
    with torch.inference_mode():
        assert version_of(torch.zeros(1)) == -1


class TestAnchors:
    def test_a_history_of_their_own_on_the_same_storage(self) -> None:
        x = torch.randn(4, 6, requires_grad=True)
        y = x * 2
        z = torch.randn(3)
        (tree, other, again), start = anchored(([y.t()], z, y))
        assert tree[0].shape == (6, 4)
        assert tree[0].stride() == y.t().stride()
        assert tree[0].untyped_storage().data_ptr() == again.untyped_storage().data_ptr() == y.data_ptr()
        assert (tree[0].requires_grad, again.requires_grad, other.requires_grad) == (True, True, False)
        (tree[0].sum() + again.sum()).backward()
        assert x.grad is None
        assert start.grad is not None

    def test_code_after_may_change_them_in_place(self) -> None:
        x = torch.randn(4, requires_grad=True)
        fresh, _ = anchored(x * 2)
        assert fresh.relu_().requires_grad

    def test_identical_tensors_stay_identical(self) -> None:
        y = torch.randn(4, requires_grad=True) * 2
        (a, b), _ = anchored((y, y))
        assert a is b

    def test_a_backward_from_everything(self) -> None:
        a, b = torch.zeros(3, requires_grad=True), torch.zeros(2, requires_grad=True)
        seed = seeded({"a": a * 2, "b": (b * 3, torch.zeros(5))})
        assert seed is not None
        assert seed.numel() == 0
        gradients = gradients_from([seed], [a, b])
        # Each output gets a gradient of 1e-3 in every element.
        expected = (torch.full([3], 1e-3) * 2, torch.full([2], 1e-3) * 3)
        assert all(map(torch.equal, gradients, expected))

    def test_nothing_to_start_from(self) -> None:
        assert seeded([torch.zeros(2)]) is None
