"""``apply`` and ``remove`` leave no visible trace: names, copies, pickles, hooks, modes."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import models
import pytest
import torch
from handmade import COUNTS, Chain, chain_sample, count_step, keep, make_plan, replay, segment
from torch import Tensor, nn

import recoup
from recoup.checkpointing import segment as segments
from recoup.checkpointing.frame import Frame
from recoup.engines import Leaf, ModelPlan, apply, is_applied, remove, running
from recoup.errors import ApplyError, BudgetError, RecoupWarning
from recoup.measuring import Recipe
from recoup.model.recipe import KEEP, RECOMPUTE
from recoup.plans.tree import Item

RECIPES = (KEEP, RECOMPUTE, Recipe(inner=("linear",)))
ITEMS: list[Item] = [segment(segment(keep(0)), keep(1)), *replay(2), Leaf(3, 2), *keep(4)]
"""Of five units: a nested segment, one recomputed, one in part, one kept."""


def plan_for(model: Chain, items: list[Item] = ITEMS) -> ModelPlan:
    return make_plan(model, model.names, items, RECIPES)


def traces(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Everything that a module's attributes say, by module."""
    return {name: dict(vars(module)) for name, module in model.named_modules()}


@contextmanager
def counting_frames(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Counts the frames and spans that are made inside."""
    made: Counter[str] = Counter()

    def frame(*args: Any, **kwargs: Any) -> Frame:
        made["frames"] += 1
        return Frame(*args, **kwargs)

    def span(*args: Any, **kwargs: Any) -> Any:
        made["spans"] += 1
        return SPAN(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(segments, "Frame", frame)
        patch.setattr(running, "Span", span)
        yield made


SPAN = running.Span


# What others can see


def test_nothing_visible_changes() -> None:
    model = Chain()
    state, parameters = model.state_dict(), dict(model.named_parameters())
    modules, shown, kind = dict(model.named_modules()), repr(model), type(model)
    assert apply(model, plan_for(model)) is model
    assert is_applied(model)
    assert type(model) is kind
    assert repr(model) == shown
    assert dict(model.named_modules()) == modules
    assert list(model.state_dict()) == list(state)
    assert all(model.state_dict()[name].data_ptr() == value.data_ptr() for name, value in state.items())
    assert list(dict(model.named_parameters())) == list(parameters)
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert all(isinstance(unit, type(model.units[0])) for unit in model.units)


def test_remove_restores_exactly() -> None:
    model = Chain()
    before = traces(model)
    apply(model, plan_for(model))
    model(*chain_sample()).backward()
    model.zero_grad()
    assert remove(model) is model
    after = traces(model)
    assert after.keys() == before.keys()
    for name, attributes in after.items():
        assert list(attributes) == list(before[name]), name
        for key, value in attributes.items():
            assert value is before[name][key], (name, key)
    assert not is_applied(model)


def test_remove_leaves_a_model_without_a_plan_alone() -> None:
    model = Chain()
    before = traces(model)
    remove(model)
    assert traces(model) == before


def test_where_everything_is_kept_nothing_is_touched() -> None:
    model = Chain()
    before = traces(model)
    plan = plan_for(model, keep(0, 1, 2, 3, 4))
    assert plan.keeps_everything
    apply(model, plan)
    assert traces(model) == before
    assert not is_applied(model)


def test_only_what_is_planned_is_touched() -> None:
    model = Chain()
    apply(model, plan_for(model))
    touched = {name for name, module in model.named_modules() if "forward" in vars(module)}
    assert touched == {"", "units.0", "units.1", "units.2", "units.3", "units.3.linear"}


def test_applying_again_replaces() -> None:
    model, sample = Chain(), chain_sample()
    apply(model, plan_for(model))
    apply(model, plan_for(model, [*replay(0), *keep(1, 2, 3, 4)]))
    assert [count_step(model, sample)[str(unit)] for unit in range(5)] == [2, 1, 1, 1, 1]
    before = {name for name, module in model.named_modules() if "forward" in vars(module)}
    assert before == {"", "units.0"}
    apply(model, plan_for(model, keep(0, 1, 2, 3, 4)))
    assert not is_applied(model)


def test_a_plan_for_another_class() -> None:
    class Other(Chain):
        pass

    model = Other()
    with pytest.raises(ApplyError, match=r"made for a Chain, and this model is a Other\. Measure and plan"):
        apply(model, plan_for(Chain()))
    assert not is_applied(model)


def test_a_plan_for_other_modules_leaves_the_earlier_plan() -> None:
    model = Chain(4)
    apply(model, plan_for(model, [*replay(0), *keep(1, 2, 3)]))
    with pytest.raises(ApplyError, match=r"decides about 'units\.4', which this model does not have"):
        apply(model, plan_for(Chain(5)))
    assert count_step(model, chain_sample())["0"] == 2


def test_a_plan_for_other_modules_inside_leaves_the_earlier_plan() -> None:
    model = Chain(4)
    apply(model, plan_for(model, [*replay(0), *keep(1, 2, 3)]))
    recipes = (KEEP, RECOMPUTE, Recipe(inner=("attention",)))
    other = make_plan(model, model.names, [*keep(0, 1, 2), Leaf(3, 2)], recipes)
    with pytest.raises(ApplyError, match=r"'attention' inside 'units\.0', which this model does not have"):
        apply(model, other)
    assert count_step(model, chain_sample())["0"] == 2


# Hooks of others


def test_hooks_fire_once_a_step() -> None:
    plain, sample = Chain(), (chain_sample()[0].requires_grad_(),)
    seen: dict[str, Counter[str]] = {}
    for name, model in (("plain", plain), ("fitted", copy.deepcopy(plain))):
        fired = seen[name] = Counter()
        for label, module in model.named_modules():

            def note(kind: str, label: str = label, fired: Counter[str] = fired) -> Any:
                return lambda *_: fired.update([f"{kind} {label}"])

            if name == "fitted" and label.endswith("0"):  # some before the plan, some after it
                apply(model, plan_for(model))
            if label.startswith("units.") and not label.endswith(("norm", "linear", "dropout")):
                module.register_forward_pre_hook(note("before"))
                module.register_forward_hook(note("after"))
                module.register_full_backward_pre_hook(note("gradient of output"))
                module.register_full_backward_hook(note("gradients"))
        for _ in range(2):
            model(*sample).backward()
    assert seen["fitted"] == seen["plain"]
    assert set(seen["fitted"].values()) == {2}
    assert len(seen["fitted"]) == 20


def test_hooks_that_change_values_work_as_before() -> None:
    plain, sample = Chain(), chain_sample()
    plain.units[1].register_forward_hook(lambda module, args, output: output * 2)
    plain.units[2].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    fitted = copy.deepcopy(plain)
    apply(fitted, plan_for(fitted))
    models.assert_same(models.train(plain, sample), models.train(fitted, sample))


# Copies


def fitted_pair() -> tuple[Chain, Chain]:
    plain = Chain()
    fitted = copy.deepcopy(plain)
    return plain, apply(fitted, plan_for(fitted))


COPIERS = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "copy of a copy": lambda model: copy.deepcopy(copy.deepcopy(model)),
    "pickle of a copy": lambda model: pickle.loads(pickle.dumps(copy.deepcopy(model))),
}


@pytest.mark.parametrize("copier", COPIERS.values(), ids=COPIERS)
def test_copies_carry_the_plan_and_are_independent(copier: Any) -> None:
    plain, fitted = fitted_pair()
    sample = chain_sample()
    copied = copier(fitted)
    own = {id(module) for module in copied.modules()}
    for module in copied.modules():
        if "forward" in vars(module):
            assert vars(module)["forward"].module is module
            assert id(vars(module)["forward"].module) in own
    models.assert_same(models.train(plain, sample), models.train(copied, sample))
    # The copy's weights are its own.
    with torch.no_grad():
        for parameter in fitted.parameters():
            parameter.zero_()
    models.assert_same(models.train(plain, sample), models.train(copied, sample))
    remove(fitted)
    assert is_applied(copied)
    counts = count_step(copied, sample)
    assert [counts[str(unit)] for unit in range(5)] == [3, 2, 2, 1, 1]


@pytest.mark.parametrize("copier", COPIERS.values(), ids=COPIERS)
def test_remove_from_a_copy(copier: Any) -> None:
    plain, fitted = fitted_pair()
    sample = chain_sample()
    copied = remove(copier(fitted))
    assert not any("forward" in vars(module) for module in copied.modules())
    assert is_applied(fitted)
    models.assert_same(models.train(plain, sample), models.train(copied, sample))
    assert set(count_step(copied, sample).values()) == {1}
    assert count_step(fitted, sample)["0"] == 3


def test_a_copy_made_in_the_middle_of_a_step() -> None:
    plain, fitted = fitted_pair()
    sample = chain_sample()
    copies: list[Chain] = []
    handle = fitted.units[1].register_forward_hook(lambda *_: copies.append(copy.deepcopy(fitted)))
    fitted(*sample).backward()
    handle.remove()
    for model in (copies[0], fitted, plain):
        model.zero_grad()
    copies[0].units[1]._forward_hooks.clear()
    counts = count_step(copies[0], sample)
    assert [counts[str(unit)] for unit in range(5)] == [3, 2, 2, 1, 1]


def test_state_dict_round_trip() -> None:
    plain, fitted = fitted_pair()
    other = Chain()
    other.load_state_dict(fitted.state_dict())
    fitted.load_state_dict(plain.state_dict())
    models.assert_same(models.train(other, chain_sample()), models.train(fitted, chain_sample()))


# A forward that someone else has set


def test_a_replaced_forward_is_used_and_put_back() -> None:
    plain, sample = Chain(), chain_sample()
    seen = []

    class Louder:
        def __init__(self, module: nn.Module) -> None:
            self.module, self.original = module, module.forward

        def __call__(self, x: Tensor) -> Tensor:
            seen.append(recoup.is_replaying())
            return self.original(x) * 3

    plain.units[2].forward = Louder(plain.units[2])
    fitted = copy.deepcopy(plain)
    theirs = vars(fitted.units[2])["forward"]
    apply(fitted, plan_for(fitted))
    models.assert_same(models.train(plain, sample, 1), models.train(fitted, sample, 1))
    assert seen == [False, False, True]
    remove(fitted)
    assert vars(fitted.units[2])["forward"] is theirs


def test_a_forward_replaced_after_the_plan_survives_its_removal() -> None:
    """As hooking libraries do: what they put around ours is theirs to take off."""
    model, sample = Chain(), chain_sample()
    apply(model, plan_for(model))
    ours = model.units[2].forward
    model.units[2].forward = lambda x: ours(x) * 3
    theirs = model.units[2].forward
    model(*sample).backward()
    remove(model)
    assert vars(model.units[2])["forward"] is theirs
    model(*sample).backward()


# Modes


@pytest.mark.parametrize("mode", ["no_grad", "inference", "eval", "eval and no_grad"])
def test_calls_that_need_no_plan_are_plain(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, fitted = fitted_pair()
    (x,) = chain_sample()

    def run(model: nn.Module) -> Tensor:
        torch.manual_seed(4)
        if "eval" in mode:
            model.eval()
        context = {"no_grad": torch.no_grad, "inference": torch.inference_mode}.get(mode.split()[-1])
        with context() if context else torch.enable_grad():
            return model(x)

    COUNTS.clear()
    with counting_frames(monkeypatch) as made:
        found = run(fitted)
    assert not made
    assert set(COUNTS.values()) == {1}
    assert torch.equal(found, run(plain))
    fitted.train()
    with counting_frames(monkeypatch) as made:
        fitted(x).backward()
    # In the forward: a segment of two calls, with another inside it, a unit, and a layer. Replays make none.
    assert made["spans"] == 1
    assert made["frames"] == 2 + 1 + 1


def test_a_plan_measured_in_eval_mode_holds_there() -> None:
    model = Chain().eval()
    apply(model, plan_for(model))
    assert count_step(model, chain_sample())["2"] == 2
    model.train()
    with pytest.warns(
        RecoupWarning, match=r"made for a model in eval mode.*ran in train mode: call model\.train\(\)"
    ):
        assert count_step(model, chain_sample())["2"] == 1
    assert count_step(model, chain_sample())["2"] == 1  # told once


def test_frozen_modules_in_eval_mode_inside_a_trained_model() -> None:
    plain = Chain()
    plain.units[2].eval()
    fitted = copy.deepcopy(plain)
    apply(fitted, plan_for(fitted))
    models.assert_same(models.train(plain, chain_sample()), models.train(fitted, chain_sample()))
    assert count_step(fitted, chain_sample())["2"] == 2


def test_the_model_as_part_of_a_larger_one() -> None:
    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.scale = inner, nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) * self.scale

    plain, fitted = fitted_pair()
    sample = chain_sample()
    models.assert_same(models.train(Outer(plain), sample), models.train(Outer(fitted), sample))
    assert is_applied(Outer(fitted))


# Failing fits


def layered() -> tuple[nn.Module, Tensor]:
    layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*layers), torch.randn(32, 16)


def test_a_failing_fit_leaves_the_earlier_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = layered()
    profile = recoup.measure(model, x, loss=torch.sum)
    middle = (recoup.minimum_budget(profile) + profile.plain_bytes) // 2
    fitted = recoup.fit(model, x, loss=torch.sum, budget=middle)
    before = traces(model)
    assert is_applied(model)
    with pytest.raises(BudgetError, match="does not fit"):
        recoup.fit(model, x, loss=torch.sum, budget=fitted.profile.residents.optimizer_peak_bytes + 1)
    assert traces(model) == before
    with pytest.raises(BudgetError, match="Apart from activations, the step needs"):
        recoup.fit(model, x, loss=torch.sum, budget=1)
    assert traces(model) == before
    with pytest.raises(recoup.errors.LossError):
        recoup.fit(model, x, budget=middle)
    assert traces(model) == before

    def broken(*args: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(recoup.fitting.one_fit, "verify_step", broken)
    with pytest.raises(KeyboardInterrupt):
        recoup.fit(model, x, loss=torch.sum, budget=middle + 100)
    assert traces(model) == before


def test_fitting_again_replaces_the_plan() -> None:
    model, x = layered()
    profile = recoup.measure(model, x, loss=torch.sum)
    tight = recoup.fit(model, x, loss=torch.sum, budget=recoup.minimum_budget(profile) + 200)
    assert not tight.plan.keeps_everything
    loose = recoup.fit(model, x, loss=torch.sum, budget=profile.plain_bytes + 1000)
    assert loose.plan.keeps_everything
    assert loose.profile.plain_bytes == tight.profile.plain_bytes
    # Only the model's own calls are watched.
    assert [name for name, module in model.named_modules() if "forward" in vars(module)] == [""]
