"""Plans for slices of Sequentials: they fit, they leave no trace, and they go with copies."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import models
import pytest
import sequentials
import torch
from handmade import keep, make_plan, replay, segment
from torch import Tensor, nn

import recoup
from recoup.engines import Leaf, ModelPlan, apply, is_applied, remove
from recoup.engines.compare_by_unit import compare_units
from recoup.errors import ApplyError, BudgetError, RecoupWarning
from recoup.measuring import Recipe
from recoup.model.recipe import KEEP, RECOMPUTE, InnerForward
from recoup.model.slices import SlicedForward
from recoup.model.step import TrainingStep

# Fits


# Of the plain step's peak.
SMALLEST = {"MLP, GELU": 0.6, "blocks and leaves": 0.9}


@pytest.mark.parametrize("share", [0.0, 0.5, 0.8])
@pytest.mark.parametrize("name", sequentials.MODELS)
def test_fits(name: str, share: float) -> None:
    model, sample = sequentials.make(name)
    profile = recoup.measure(model, sample, loss=sequentials.loss)
    low, high = recoup.minimum_budget(profile), profile.plain_bytes
    assert low < SMALLEST.get(name, 0.7) * high
    before = traces(model)
    # A little above: which recipes are measured depends on the time that layers take.
    budget = int(max(1.01 * low, low + share * (high - low)))
    fitted = recoup.fit(model, sample, budget=budget, loss=sequentials.loss, race=share == 0.5)
    seen = fitted.verification
    assert seen is not None
    assert seen.peak_bytes <= budget
    assert seen.gradients == "bit-equal"
    assert seen.drifting == ()
    assert abs(fitted.plan.predicted_bytes / seen.peak_bytes - 1) < 0.01
    assert fitted.audit.unsafe == {}
    assert not fitted.plan.keeps_everything
    plain = remove(copy.deepcopy(model))
    models.assert_same(train(plain, sample), train(model, sample))
    assert traces(remove(model)) == before


def traces(model: nn.Module) -> dict[str, dict[str, Any]]:
    return {name: dict(vars(module)) for name, module in model.named_modules()}


def train(model: nn.Module, sample: Tensor) -> dict[str, Tensor]:
    return models.train(sequentials.WithLoss(model), (sample,))


def test_a_slice_that_does_not_fit_is_split() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), *(nn.GELU() for _ in range(6)), nn.Linear(32, 32))
    sample = torch.randn(96, 32)
    profile = recoup.measure(model, sample, loss=sequentials.loss)
    assert [unit.name for unit in profile.units] == ["[0:7]", "7", "loss"]
    finer = recoup.measure(model, sample, loss=sequentials.loss, units="*")
    budget = recoup.minimum_budget(finer) + 2000
    assert budget < recoup.minimum_budget(profile)
    fitted = recoup.fit(model, sample, budget=budget, loss=sequentials.loss)
    assert [unit.name for unit in fitted.profile.units] == [*"01234567", "loss"]
    assert fitted.verification is not None
    assert fitted.verification.peak_bytes <= budget
    with pytest.raises(BudgetError):
        recoup.fit(model, sample, budget=recoup.minimum_budget(finer) // 2, loss=sequentials.loss)


def test_a_shared_activation_in_a_split_slice() -> None:
    act = nn.GELU()
    model = nn.Sequential(nn.Linear(8, 64), act, act, nn.Linear(64, 8), act, nn.Linear(8, 8))
    sample = torch.randn(256, 8)
    with pytest.raises(BudgetError, match="smallest feasible"):
        recoup.fit(model, sample, budget=100_000, loss=sequentials.loss)


# By hand

NAMES = ["[0:2]", "[2:4]", "[4:6]", "[6:8]"]
RECIPES = (KEEP, RECOMPUTE, Recipe(inner=("1",)))
ITEMS = [segment(segment(keep(0)), keep(1)), Leaf(2, 2), *keep(3)]


def fitted_pair(items: Any = ITEMS) -> tuple[nn.Sequential, nn.Sequential, Tensor]:
    torch.manual_seed(5)
    plain = sequentials.mlp(lambda: nn.Dropout(0.3), num_layers=4)
    fitted = copy.deepcopy(plain)
    apply(fitted, plan_for(fitted, items))
    return plain, fitted, torch.randn(6, 32)


def plan_for(model: nn.Module, items: Any = ITEMS, names: list[str] = NAMES) -> ModelPlan:
    return make_plan(model, names, items, RECIPES)


class Forwards:
    """Counts the forwards of a model's children."""

    def __init__(self, model: nn.Module) -> None:
        self.counts: dict[str, int] = {}
        for name, child in model.named_children():
            child.register_forward_pre_hook(lambda module, args, name=name: self.count(name))

    def count(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1


def test_what_runs_how_often() -> None:
    plain, fitted, x = fitted_pair()
    forwards = Forwards(fitted)
    fitted(x).sum().backward()
    assert [forwards.counts[str(index)] for index in range(8)] == [3, 3, 2, 2, 1, 1, 1, 1]
    models.assert_same(train(plain, x), train(fitted, x))


def test_nothing_visible_changes() -> None:
    plain, fitted, _ = fitted_pair()
    assert is_applied(fitted)
    assert repr(fitted) == repr(plain)
    assert list(fitted.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in fitted.named_modules()] == [name for name, _ in plain.named_modules()]
    assert [name for name, _ in fitted.named_parameters()] == [name for name, _ in plain.named_parameters()]
    touched = [name for name, module in fitted.named_modules() if "forward" in vars(module)]
    # The root, and what a recipe names inside its slice.
    assert touched == ["", "5"]
    assert isinstance(vars(fitted[5])["forward"], InnerForward)
    fitted.load_state_dict(plain.state_dict())


def test_remove_restores_exactly() -> None:
    model = sequentials.mlp(num_layers=4)
    before = traces(model)
    apply(model, plan_for(model))
    model(torch.randn(6, 32)).sum().backward()
    model.zero_grad()
    remove(model)
    after = traces(model)
    assert [list(attributes) for attributes in after.values()] == [list(a) for a in before.values()]
    assert after == before
    assert not is_applied(model)


def test_only_slices_that_are_not_kept_are_run_as_such() -> None:
    model = nn.Sequential(sequentials.mlp(num_layers=2), sequentials.mlp(num_layers=2))
    names = ["0[0:2]", "0[2:4]", "1[0:2]", "1[2:4]"]
    apply(model, plan_for(model, [*keep(0), *replay(1), *keep(2, 3)], names))
    assert "forward" not in vars(model[1])
    stand_in = vars(model[0])["forward"]
    assert isinstance(stand_in, SlicedForward)
    assert [list(part.children()) for part in stand_in.slices] == [list(model[0])[2:4]]
    apply(model, plan_for(model, keep(0, 1, 2, 3), names))
    assert not is_applied(model)


COPIERS = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "pickle of a copy": lambda model: pickle.loads(pickle.dumps(copy.deepcopy(model))),
}


@pytest.mark.parametrize("copier", COPIERS.values(), ids=COPIERS)
def test_copies_carry_the_plan_and_are_independent(copier: Any) -> None:
    plain, fitted, x = fitted_pair()
    copied = copier(fitted)
    with torch.no_grad():
        for parameter in fitted.parameters():
            parameter.zero_()
    remove(fitted)
    assert is_applied(copied)
    models.assert_same(train(plain, x), train(copied, x))
    forwards = Forwards(copied)
    copied(x).sum().backward()
    assert [forwards.counts[str(index)] for index in range(8)] == [3, 3, 2, 2, 1, 1, 1, 1]
    remove(copied)
    assert not any("forward" in vars(module) for module in copied.modules())


@pytest.mark.parametrize("plainly", ["eval", "no_grad"])
def test_other_calls_run_plainly(plainly: str) -> None:
    plain, fitted, x = fitted_pair()
    plain.train(plainly != "eval")
    fitted.train(plainly != "eval")
    forwards = Forwards(fitted)
    with torch.set_grad_enabled(plainly != "no_grad"):
        torch.manual_seed(1)
        expected = plain(x)
        torch.manual_seed(1)
        assert torch.equal(fitted(x), expected)
    if plainly == "eval":
        with pytest.warns(RecoupWarning, match="not in force in this step, whose forward ran in eval mode"):
            fitted(x).sum().backward()
    assert set(forwards.counts.values()) == {2 if plainly == "eval" else 1}
    fitted.train()
    forwards.counts.clear()
    fitted(x).sum().backward()
    assert forwards.counts["0"] == 3


def test_hooks_that_change_values_work_as_before() -> None:
    plain, _, x = fitted_pair()
    plain[1].register_forward_hook(lambda module, args, output: output * 2)
    plain[2].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    plain[4].register_full_backward_hook(lambda module, given, made: (given[0] * 3,))
    plain.register_forward_hook(lambda module, args, output: output + 1)
    fitted = apply(copy.deepcopy(plain), plan_for(plain))
    models.assert_same(train(plain, x), train(fitted, x))


def test_a_child_that_is_replaced_afterwards() -> None:
    plain, fitted, x = fitted_pair()
    layer = nn.Linear(32, 32)
    plain[2], fitted[2] = layer, copy.deepcopy(layer)
    models.assert_same(train(plain, x), train(fitted, x))
    plain.append(nn.Tanh())
    fitted.append(nn.Tanh())
    models.assert_same(train(plain, x), train(fitted, x))


def test_fitting_again_and_failing() -> None:
    model, x = sequentials.make("MLP, GELU")
    before = traces(model)
    low = recoup.minimum_budget(recoup.measure(model, x, loss=sequentials.loss))
    recoup.fit(model, x, budget=int(1.05 * low), loss=sequentials.loss)
    # Both see the model without the plan that is on it.
    assert recoup.measure(model, x, loss=sequentials.loss).units[0].name == "[0:2]"
    assert recoup.audit(model, x, loss=sequentials.loss).unsafe == {}
    applied = traces(model)
    with pytest.raises(BudgetError):
        recoup.fit(model, x, budget=low // 2, loss=sequentials.loss)
    assert traces(model) == applied
    recoup.fit(model, x, budget=int(1.2 * low), loss=sequentials.loss)
    assert traces(remove(model)) == before


def test_another_model() -> None:
    model = sequentials.mlp(num_layers=3)
    with pytest.raises(ApplyError, match=r"decides about '\[6:8\]', which this model does not have"):
        apply(model, plan_for(model))
    model = sequentials.mlp(num_layers=4)
    deep = make_plan(model, NAMES, ITEMS, (KEEP, RECOMPUTE, Recipe(inner=("7",))))
    with pytest.raises(ApplyError, match=r"'7' inside '\[0:2\]'"):
        apply(model, deep)


@pytest.mark.parametrize("name", ["MLP", "VGG", "shared activation"])
def test_units_are_compared_where_the_plain_step_does_not_fit(name: str) -> None:
    model, x = sequentials.make(name)
    low = recoup.minimum_budget(recoup.measure(model, x, loss=sequentials.loss))
    fitted = recoup.fit(model, x, budget=int(1.05 * low), loss=sequentials.loss)
    before = traces(model)
    compare_units(TrainingStep(model, x, loss=sequentials.loss), fitted.plan)
    assert traces(model) == before


def test_a_model_that_a_step_calls_twice() -> None:
    model, x = sequentials.make("MLP, GELU")

    def step() -> None:
        sequentials.loss(model(model(x))).backward()

    profile = recoup.measure(model, step=step)
    assert [unit.name for unit in profile.units][7:9] == ["[14:16]", "[0:2]#2"]
    low, high = recoup.minimum_budget(profile), profile.plain_bytes
    fitted = recoup.fit(model, step=step, budget=(low + high) // 2)
    assert fitted.verification is not None
    assert fitted.verification.gradients == "bit-equal"
