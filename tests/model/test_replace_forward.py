from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recoup
from recoup.model.recipe import InnerForward, MarkedCall, Recipe, run_recipe
from recoup.model.replace_forward import (
    StandIn,
    install,
    installed,
    intercepted,
    suspended,
    uninstall,
    uninstall_plan,
)
from recoup.policies import KeepNone


class Doubled(StandIn):
    def run(self, *args: Any, **kwargs: Any) -> Any:
        return 2 * self.original(*args, **kwargs)


X = torch.ones(2, 3)


def own(x: Tensor) -> Tensor:
    return x + 5


@pytest.mark.parametrize("has_own", [False, True])
def test_forwards_come_back_as_they_were(has_own: bool) -> None:
    layer = nn.Identity()
    if has_own:
        layer.forward = own  # type: ignore[method-assign]
    expected = layer(X)
    with intercepted({layer: lambda x: x * 7}):
        assert torch.equal(layer(X), X * 7)
    assert ("forward" in vars(layer)) == has_own
    assert torch.equal(layer(X), expected)


def test_also_after_an_exception() -> None:
    layer = nn.Identity()
    with pytest.raises(KeyError), intercepted({layer: own}):
        raise KeyError
    assert "forward" not in vars(layer)


def test_hooks_of_others_run_around_it() -> None:
    layer = nn.Identity()
    layer.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    layer.register_forward_hook(lambda module, args, output: output * 10)
    with intercepted({layer: lambda x: x * 7}):
        assert torch.equal(layer(X), (X + 1) * 7 * 10)


def test_stand_ins_on_top_of_each_other() -> None:
    model = nn.Sequential(nn.Identity())
    first = Doubled(model[0])
    install(model[0], first)
    second = Doubled(model[0])
    install(model[0], second)
    assert torch.equal(model(X), 4 * X)
    assert installed(model) == [second, first]
    with suspended(model):
        assert torch.equal(model(X), X)
        assert vars(model[0]).get("forward") is None
    assert torch.equal(model(X), 4 * X)
    uninstall(model[0], second.original)
    assert installed(model) == [first]
    uninstall(model[0], first.original)
    assert "forward" not in vars(model[0])


def test_they_go_with_copies() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    install(model[0], Doubled(model[0]))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        (stand_in,) = installed(other)
        assert stand_in.module is other[0]
        assert stand_in.original.__self__ is other[0]
        assert torch.equal(other(X), model(X))


class TestRecipes:
    def run(self, recipe: Recipe) -> tuple[int, int, list[Tensor]]:
        """Calls of the first and the second layer in a step, and the gradients."""
        torch.manual_seed(1)
        unit = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        calls = [0, 0]

        def counting(index: int) -> Any:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                calls[index] += 1

            return hook

        x = torch.randn(5, 3, requires_grad=True)
        # Inside the forward, where a replay passes.
        for index, layer in enumerate((unit[0], unit[2])):
            layer.register_forward_hook(counting(index))
        with intercepted({layer: InnerForward(layer) for layer in unit}):
            run_recipe(recipe, unit, unit.forward, (x,), {}).sum().backward()
        return calls[0], calls[1], [x.grad, *(p.grad for p in unit.parameters())]

    @pytest.mark.parametrize(
        ("recipe", "calls"),
        [
            (Recipe(), (1, 1)),
            # The replay ends inside the last layer, before its hook.
            (Recipe(whole=True), (2, 1)),
            # A module's own hooks run outside its checkpoint.
            (Recipe(inner=("0",)), (1, 1)),
        ],
    )
    def test_gradients_are_the_same(self, recipe: Recipe, calls: tuple[int, int]) -> None:
        *counted, gradients = self.run(recipe)
        *_, expected = self.run(Recipe())
        assert tuple(counted) == calls
        assert all(map(torch.equal, gradients, expected))

    def test_marks_end_with_the_call(self) -> None:
        unit = nn.Sequential(nn.Linear(3, 4))
        marked = MarkedCall(unit, unit.forward, frozenset(unit))
        assert marked.__self__ is unit
        inner = InnerForward(unit[0])
        with intercepted({unit[0]: inner}):
            marked(torch.randn(5, 3)).sum().backward()
            with pytest.raises(RuntimeError):
                marked(torch.randn(5, 4))
        assert inner.module not in MarkedCall.__call__.__globals__["_marked"].modules

    def test_names(self) -> None:
        assert Recipe().name == "keep"
        assert Recipe(whole=True).name == "recompute"
        unit = nn.Sequential(nn.Sequential(nn.Tanh()), nn.Tanh())
        assert Recipe(inner=("0.0", "1")).modules(unit) == {unit[0][0], unit[1]}


def test_a_class_whose_forward_was_replaced_meanwhile() -> None:
    """As libraries do that patch whole classes: nothing of the old one stays on an instance."""

    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1

    layer = Layer()
    install(layer, Doubled(layer))
    Layer.forward = lambda self, x: x + 3  # type: ignore[method-assign]
    uninstall_plan(layer)
    assert vars(layer).keys() == vars(Layer()).keys()
    assert torch.equal(layer(X), X + 3)


def test_stand_ins_of_older_versions_are_uninstalled() -> None:
    layer = nn.Linear(3, 3)
    stand_in = Doubled(layer)
    del stand_in.__dict__["was_own"]  # as in a model that an older version has pickled
    install(layer, stand_in)
    uninstall_plan(pickle.loads(pickle.dumps(layer)))
    uninstall_plan(layer)
    assert "forward" not in vars(layer)


def test_who_replaces_a_stand_in_keeps_the_forward_and_nothing_else() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(3)))
    recoup.apply(model, KeepNone())
    wrapped = model[0].forward
    model[0].forward = lambda x: wrapped(x) * 2
    recoup.remove(model)
    assert set(vars(model[0])) - set(vars(model[1])) == {"forward"}
