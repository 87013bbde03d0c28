"""Slices of Sequentials: which there are, what they are called, and what they cost."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from typing import Any

import pytest
import sequentials
import torch
from real_steps import predicted_peak_bytes, real_peak_bytes
from torch import Tensor, nn

from recoup.auditing import audit
from recoup.errors import UnitError
from recoup.measuring import measure
from recoup.model.calls import kind_of_module, watch_calls
from recoup.model.replace_forward import install, intercepted
from recoup.model.slices import (
    Slice,
    SlicedForward,
    find_module,
    is_plain_sequential,
    sliced,
    split_name,
    unit_names,
)
from recoup.model.step import TrainingStep
from recoup.model.units import children_of, choose_units, find_units, parts_of


def labels(model: nn.Module, units: list[nn.Module]) -> list[str]:
    names = unit_names(model, units)
    return [names[unit] for unit in units]


def chosen(model: nn.Module, sample: Any) -> list[str]:
    return labels(model, choose_units(watch_calls(TrainingStep(model, sample))))


def found(model: nn.Module, sample: Any, units: Any) -> list[str]:
    return labels(model, find_units(watch_calls(TrainingStep(model, sample)), units))


X = torch.zeros(4, 6)


def linear() -> nn.Linear:
    return nn.Linear(6, 6)


# Which there are


@pytest.mark.parametrize(
    ("name", "units"),
    [
        ("MLP", [f"[{2 * index}:{2 * index + 2}]" for index in range(8)]),
        (
            "VGG",
            [
                *("features[0:3]", "features[3:6]", "features[6:9]", "features[9:13]"),
                *("features[13:16]", "features[16:20]", "features[20:23]", "features[23:27]"),
                "classifier",
            ],
        ),
        ("VGG, the root", ["[0:3]", "[3:6]", "[6:9]", "[9:13]", "[13:16]", "[16:20]", "[20:23]"]),
        ("nested", [*(f"0[{2 * i}:{2 * i + 2}]" for i in range(4)), *(f"1[{2 * i}:{2 * i + 2}]" for i in range(5))]),
        ("blocks and leaves", ["[0:3]", "name", "one", "two", "[6:9]"]),
        ("shared activation", [f"[{2 * index}:{2 * index + 2}]" for index in range(8)]),
    ],
)  # fmt: skip
def test_the_slices_of_models(name: str, units: list[str]) -> None:
    model, sample = sequentials.make(name)
    assert chosen(model, sample) == units


@pytest.mark.parametrize(
    ("layers", "units"),
    [
        # What comes first goes with the first layer.
        ([nn.Dropout(), nn.LayerNorm(6), linear(), nn.Tanh(), linear()], ["[0:4]", "4"]),
        # A slice of one is that one, a slice of all is the Sequential.
        ([linear(), linear(), nn.Tanh()], ["0", "[1:3]"]),
        ([linear(), nn.Tanh()], [""]),
        ([nn.Tanh(), nn.LayerNorm(6), nn.Dropout()], [""]),
        # What changes something made elsewhere spoils no slice.
        ([nn.ReLU(inplace=True), linear(), nn.ReLU(inplace=True), linear()], ["0", "[1:3]", "3"]),
        (
            [sequentials.Block(6), nn.ReLU(True), linear(), nn.Tanh(), sequentials.Block(6)],
            ["0", "1", "[2:4]", "4"],
        ),
        # Without a layer of its own, behind a block.
        ([sequentials.Block(6), nn.Tanh(), nn.Dropout(), sequentials.Block(6)], ["0", "[1:3]", "3"]),
    ],
)
def test_where_slices_begin_and_end(layers: list[nn.Module], units: list[str]) -> None:
    assert chosen(nn.Sequential(*layers), X) == units


def test_a_layer_that_is_called_again_is_in_no_slice() -> None:
    layer, norm = linear(), nn.LayerNorm(6)
    model = nn.Sequential(layer, nn.Tanh(), layer, nn.GELU(), linear(), norm, linear(), norm)
    assert chosen(model, X) == ["0", "1", "[3:5]", "5", "6"]


def test_a_shared_activation_that_is_also_called_elsewhere() -> None:
    class Elsewhere(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.ReLU()
            self.body = nn.Sequential(linear(), self.act, linear(), self.act, linear())

        def forward(self, x: Tensor) -> Tensor:
            return self.body(self.act(x))

    model = Elsewhere()
    assert chosen(model, X) == ["body[0:2]", "body[2:4]", "body.4"]


class Twice(nn.Sequential):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(super().forward(input))


class Backwards(nn.Sequential):
    def __iter__(self) -> Any:
        return iter(list(self._modules.values())[::-1])


def test_only_plain_sequentials() -> None:
    class Named(nn.Sequential):
        pass

    replaced = nn.Sequential(linear(), nn.Tanh())
    replaced.forward = lambda x: x  # type: ignore[method-assign]
    assert is_plain_sequential(Named(linear()))
    assert not any(
        map(is_plain_sequential, [Twice(linear()), Backwards(linear()), replaced, nn.ModuleList()])
    )
    model = Twice(linear(), nn.Tanh(), linear())
    assert chosen(model, X) == ["0", "1", "2"]
    # Our own stand-ins do not count.
    plain = nn.Sequential(linear(), nn.Tanh(), linear())
    with sliced(plain, [find_module(plain, "[0:2]")]):
        assert is_plain_sequential(plain)


def test_slices_alike_are_of_one_kind() -> None:
    model, sample = sequentials.make("MLP")
    one, other = find_module(model, "[0:2]"), find_module(model, "[2:4]")
    assert kind_of_module(one) == kind_of_module(other)
    assert kind_of_module(one) != kind_of_module(find_module(model, "[1:3]"))
    profile = measure(model, sample, loss=sequentials.loss)
    # The first one's input needs no gradient.
    assert [unit.kind for unit in profile.units] == [0, 1, 1, 1, 1, 1, 1, 1, -1]


# Names


def test_names() -> None:
    assert split_name("a.b[2:14]") == ("a.b", 2, 14)
    assert split_name("[0:1]") == ("", 0, 1)
    assert split_name("blocks.[02]") is None
    model = sequentials.VGG()
    part = find_module(model, "features[9:13]")
    assert [name for name, _ in part.named_modules()] == ["", "0", "1", "2", "3"]
    assert list(part.children()) == list(model.features)[9:13]
    assert find_module(model, "features[3:4]") is model.features[3]
    assert find_module(model, "features[0:27]") is model.features
    assert find_module(model, "features.0") is model.features[0]
    for name in ("features[3:28]", "features[4:4]", "features.0[0:1]", "nothing[0:2]", "nothing"):
        with pytest.raises(AttributeError):
            find_module(model, name)


def test_children_may_have_any_name() -> None:
    names = ("first", "last", "name", "path", "sequential", "slices", "place")
    model = nn.Sequential(OrderedDict((name, nn.Tanh()) for name in (*names, "more")))
    part = find_module(model, "[0:7]")
    assert [part.get_submodule(str(index)) for index in range(7)] == list(model)[:7]
    assert torch.equal(part(X), X.tanh())


@pytest.mark.parametrize(
    ("units", "expected"),
    [
        ("features[0:3]", ["features[0:3]"]),
        (["features[7:10]", "features.1", "classifier"], ["features.1", "features[7:10]", "classifier"]),
        ("*[0:4]", ["features[0:4]", "classifier[0:4]"]),
        (["features[0:27]", "classifier[1:2]"], ["features", "classifier.1"]),
        (["features[0:3]", "features[0:3]"], ["features[0:3]"]),
    ],
)
def test_units_by_name(units: Any, expected: list[str]) -> None:
    model, sample = sequentials.make("VGG")
    assert found(model, sample, units) == expected


def test_the_root_in_slices_by_name() -> None:
    model, sample = sequentials.make("MLP")
    assert found(model, sample, ["[0:8]", "[8:16]"]) == ["[0:8]", "[8:16]"]


@pytest.mark.parametrize(
    ("units", "text"),
    [
        ("features[0:50]", r"'features\[0:50\]' fits no nn.Sequential that the step calls.*for example"),
        ("feature[0:3]", r"'feature\[0:3\]' fits no nn.Sequential"),
        (["features[0:3]", "features.1"], r"Unit 'features.1' lies inside another unit"),
        (["features[0:3]", "features"], r"Unit 'features\[0:3\]' lies inside another unit"),
        (["features[0:3]", "features[2:5]"], r"'features\[0:3\]' and 'features\[2:5\]' overlap"),
    ],
)
def test_units_that_do_not_go_together(units: Any, text: str) -> None:
    model, sample = sequentials.make("VGG")
    with pytest.raises(UnitError, match=text):
        found(model, sample, units)


def test_what_is_inside() -> None:
    model, sample = sequentials.make("VGG")
    root = watch_calls(TrainingStep(model, sample))
    part = find_module(model, "features[0:3]")
    assert children_of(root, part) == parts_of(root, part) == list(model.features)[:3]
    assert children_of(root, model.classifier) == list(model.classifier)
    assert labels(model, parts_of(root, model.classifier)) == ["classifier[0:4]", "classifier.4"]
    pair = nn.Sequential(linear(), nn.Tanh())
    assert parts_of(watch_calls(TrainingStep(pair, X)), pair) == list(pair)


# How they run


def slices(model: nn.Module, *names: str) -> list[nn.Module]:
    return [find_module(model, name) for name in names]


def test_the_same_values_and_hooks() -> None:
    model, sample = sequentials.make("blocks and leaves")
    model.eval()
    fired: list[str] = []
    for name, module in model.named_modules():
        module.register_forward_hook(lambda module, args, output, name=name: fired.append(name))
    expected = model(sample)
    before, fired[:] = list(fired), []
    everywhere: list[str] = []
    with (
        sliced(model, slices(model, "[0:3]", "[6:9]")),
        nn.modules.module.register_module_forward_hook(lambda m, *_: everywhere.append(type(m).__name__)),
    ):
        assert torch.equal(model(sample), expected)
        assert torch.equal(model(input=sample), expected)
    assert fired == before * 2
    assert "Slice" not in everywhere
    assert "forward" not in vars(model)


def test_slices_follow_the_sequential() -> None:
    model, calls = sequentials.mlp(), []
    first, second = slices(model, "[0:2]", "[4:6]")

    class Noted(nn.Identity):
        def forward(self, input: Tensor) -> Tensor:
            calls.append(1)
            return input

    with sliced(model, [first, second]):
        model.eval()
        model[1] = Noted()
        model(torch.randn(2, 32))
        assert calls == [1]
        assert first.get_submodule("1") is model[1]
        assert second.get_submodule("1") is model[5]
        assert not first.training
        # What is where is not known any more.
        with intercepted({first: lambda input: pytest.fail("It is run.")}):
            model.append(Noted())
            model(torch.randn(2, 32))
    assert calls == [1, 1, 1]


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_hold_their_own_children(copier: Any) -> None:
    model = sequentials.mlp()
    install(model, SlicedForward(model, slices(model, "[4:6]", "[0:2]")))
    copied = copier(model)
    stand_in = vars(copied)["forward"]
    assert stand_in.module is copied
    assert stand_in.original.__self__ is copied
    first, second = stand_in.slices
    assert list(first.children()) == list(copied)[:2]
    assert list(second.children()) == list(copied)[4:6]
    x = torch.randn(3, 32)
    assert torch.equal(copied(x), model(x))
    assert copied.state_dict().keys() == sequentials.mlp().state_dict().keys()


def test_a_slice_leads_to_its_children_only() -> None:
    part = find_module(sequentials.VGG(), "features[3:7]")
    assert isinstance(part, Slice)
    assert not any(isinstance(value, nn.Module) for value in vars(part).values())


# What they cost


@pytest.mark.parametrize("name", sequentials.MODELS)
def test_the_predicted_peak_is_the_real_one(name: str) -> None:
    model, sample = sequentials.make(name)
    before = {key: dict(vars(module)) for key, module in model.named_modules()}
    state = {key: value.clone() for key, value in model.state_dict().items()}
    profile = measure(model, sample, loss=sequentials.loss)
    assert {key: dict(vars(module)) for key, module in model.named_modules()} == before
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert predicted_peak_bytes(profile) == real_peak_bytes(model, sample, sequentials.loss)


def test_recipes_name_what_is_inside() -> None:
    model = sequentials.mlp(sequentials.Saving, 4)
    profile = measure(model, torch.randn(96, 32), loss=sequentials.loss)
    assert [unit.kind for unit in profile.units] == [0, 1, 1, 1, -1]
    # By positions in the slice, which are the same for all of a kind. Not every one is useful every time.
    inner = {recipe.inner for unit in profile.units for recipe in unit.recipes}
    assert inner <= {(), ("1",)}


@pytest.mark.parametrize("name", ["VGG", "VGG, the root", "blocks and leaves"])
def test_activations_in_place_are_safe_with_what_they_work_on(name: str) -> None:
    model, sample = sequentials.make(name)
    seen = audit(model, sample, loss=sequentials.loss)
    assert seen.unsafe == {}
    assert {str(finding.what) for finding in seen.findings} == {"updates buffers"}
