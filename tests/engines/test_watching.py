"""Training calls that leave what was measured: one warning each, and none where nothing differs."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from handmade import make_plan
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.utils import ModelOutput

import recoup
from recoup.checkpointing.sampling import sampling
from recoup.devices.tracker import MemoryTracker
from recoup.engines import Leaf, ModelPlan, watching
from recoup.errors import RecoupWarning
from recoup.measuring import Profile, Recipe
from recoup.model.conditions import trained_bytes_of
from recoup.model.recipe import KEEP, RECOMPUTE


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """Blocks that may be checkpointed by torch, as models of other libraries can be."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.call: Callable[..., Tensor] | None = None

    def forward(self, inputs: Tensor, more: dict[str, Tensor] | None = None) -> Tensor:
        for block in self.blocks:
            inputs = block(inputs) if self.call is None else self.call(block, inputs)
        return inputs


X = torch.randn(16, 8)


def measured(*, holds_output: bool = True, **conditions: Any) -> tuple[Model, ModelPlan]:
    """A model that is not fitted yet, and a plan of the smallest budget, measured under some conditions."""
    model = Model()
    # With room for gradients: what follows is about other things.
    profile = recoup.measure(model, X, loss=torch.sum, holds_output=holds_output, accumulates=True)
    assert profile.conditions is not None
    profile = replace(profile, conditions=replace(profile.conditions, **conditions))
    return model, recoup.plan(profile, recoup.minimum_budget(profile))


def fitted(**conditions: Any) -> Model:
    model, plan = measured(**conditions)
    recoup.apply(model, plan)
    return model


def told(run: Callable[[], Any]) -> list[str]:
    """The warnings of a run."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    assert all(issubclass(entry.category, RecoupWarning) for entry in caught)
    return [str(entry.message) for entry in caught]


def step(model: nn.Module, x: Tensor = X, **kwargs: Any) -> None:
    model(x, **kwargs).sum().backward()


def gradients(model: nn.Module) -> list[Tensor]:
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return found


# Gradients


def test_gradients_that_are_there_when_a_forward_begins() -> None:
    model = Model()
    profile = recoup.measure(model, X, loss=torch.sum)
    recoup.apply(model, recoup.plan(profile, recoup.minimum_budget(profile)))
    for _ in range(2):
        model.zero_grad()
        assert told(lambda: step(model)) == []
    (message,) = told(lambda: step(model))
    assert message.startswith("Gradients of an earlier backward are there when the forward begins")
    assert message.endswith("optimizer.zero_grad(), or fit with accumulates=True.")
    assert told(lambda: step(model)) == []
    assert told(lambda: [step(other) for other in [fitted()] * 2]) == []


# Shapes


def test_a_larger_input_is_told_once() -> None:
    model = fitted()
    step(model)
    step(model, X[:3])
    with pytest.warns(
        RecoupWarning,
        match=r"inputs is \[17, 8\] \(136 elements\), larger than the \[16, 8\] \(128\) .*: fit the model again",
    ):
        step(model, torch.randn(17, 8))
    step(model, torch.randn(32, 8))


def test_a_larger_input_by_keyword_and_inside_a_container() -> None:
    model = Model()
    batch = {"inputs": X, "more": {"mask": X[0]}}
    profile = recoup.measure(model, batch, loss=torch.sum, accumulates=True)
    assert profile.conditions is not None
    assert profile.conditions.shapes == (("inputs", (16, 8)), ("more['mask']", (8,)))
    recoup.apply(model, recoup.plan(profile, recoup.minimum_budget(profile)))
    step(model, more={"mask": X[0], "of no interest": torch.zeros(1000)})
    with pytest.warns(
        RecoupWarning, match=r"more\['mask'\] is \[9\] \(9 elements\), larger than the \[8\] \(8\)"
    ):
        step(model, more={"mask": torch.zeros(9)})


def test_a_forward_without_gradients_may_be_larger() -> None:
    model = fitted()
    with torch.no_grad():
        model(torch.randn(64, 8))
    model.eval()
    model(torch.randn(64, 8))


# Forwards and backwards


@pytest.mark.parametrize(
    "order", ["FBFB", "FXFB", "FNBFB", "FEBFB", "FBEFB", "FGFG", "FRBFB"], ids=lambda order: str(order)
)
def test_one_forward_at_a_time(order: str, no_gc: None) -> None:
    """Forward, Backward, X: the graph is dropped, No gradients, Eval mode, autograd.Grad, backward that Retains."""
    assert told(lambda: _play(fitted(), order)) == []


@pytest.mark.parametrize("order", ["FF", "FFBP", "FBFFB"])
def test_two_forwards_before_a_backward(order: str) -> None:
    (message,) = told(lambda: _play(fitted(), order))
    assert message.startswith(
        "The model is called while 1 earlier forward waits for a backward, and the measured step calls it once, so"
    )
    assert "run each backward before the next forward, or fit with in_flight=" in message


def _play(model: Model, order: str) -> None:
    losses: list[Tensor] = []
    waiting: list[Tensor] = []
    for what in order:
        if what == "F":
            waiting.append(model(X).sum())
            losses.append(waiting[-1])  # held after the backward, as a loop's variable is
        elif what == "B":
            waiting.pop().backward()
        elif what == "P":
            waiting.pop(0).backward()
        elif what == "R":
            waiting[-1].backward(retain_graph=True)
        elif what == "G":
            torch.autograd.grad(waiting.pop(), list(model.parameters()))
        elif what == "X":
            waiting.clear()
            losses.clear()
        elif what == "N":
            with torch.no_grad():
                model(X)
        else:
            assert what == "E"
            model.eval()
            waiting_too = model(X)
            model.train()
            del waiting_too


def test_a_step_that_was_measured_with_two_forwards() -> None:
    model = Model()

    def both() -> None:
        (model(X) + model(-X)).sum().backward()

    profile = recoup.measure(model, step=both)
    assert profile.conditions is not None
    assert profile.conditions.forwards == 2
    recoup.apply(model, recoup.plan(profile, recoup.minimum_budget(profile)))
    both()
    both()
    with pytest.warns(
        RecoupWarning, match="while 2 earlier forwards wait for a backward, and the measured step calls"
    ):
        (model(X) + model(-X) + model(X)).sum().backward()


# Autocast


def test_another_autocast() -> None:
    model = fitted()
    with torch.autocast("cpu", enabled=False):
        step(model)
    with (
        pytest.warns(
            RecoupWarning, match=r"under autocast to bfloat16, and the plan was measured without autocast"
        ),
        torch.autocast("cpu", torch.bfloat16),
    ):
        step(model)


def test_the_measured_autocast() -> None:
    model = Model()
    with torch.autocast("cpu", torch.bfloat16):
        profile = recoup.measure(model, X, loss=lambda output: output.float().sum(), accumulates=True)
        assert profile.conditions is not None
        assert profile.conditions.autocast == "bfloat16"
        recoup.apply(model, recoup.plan(profile, recoup.minimum_budget(profile)))
        step(model)
    with (
        pytest.warns(
            RecoupWarning, match="under autocast to float16, and .* measured under autocast to bfloat16"
        ),
        torch.autocast("cpu", torch.float16),
    ):
        model(X)


# Modes


def test_the_other_mode_is_told_at_the_backward() -> None:
    model = fitted()
    model.eval()
    output = model(X)
    with pytest.warns(
        RecoupWarning, match=r"for a model in train mode .* ran in eval mode: call model\.train\(\)"
    ):
        output.sum().backward()
    step(model)


def test_a_unit_in_the_other_mode_is_told() -> None:
    model = fitted()
    model.blocks[0].eval()
    with pytest.warns(RecoupWarning, match="made for a model in train mode"):
        step(model)


def test_a_plan_of_training_mode_on_a_model_in_eval_mode() -> None:
    """As from_pretrained delivers it: the plan is for training, and does not turn into one for evaluation."""
    model, plan = measured()
    model.eval()
    recoup.apply(model, plan)
    model.train()
    assert told(lambda: step(model)) == []
    counts = 0

    def count(*_: Any) -> None:
        nonlocal counts
        counts += 1

    model.blocks[0].up.register_forward_hook(count)
    step(model)
    assert counts > 1


# Checkpoints of the model's own


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_around_units(use_reentrant: bool) -> None:
    model = fitted()
    x = X.clone().requires_grad_()
    step(model, x)
    expected = gradients(model)
    model.call = lambda block, x: checkpoint(block, x, use_reentrant=use_reentrant)
    with pytest.warns(
        RecoupWarning, match=r"inside checkpoints of the model's own.*activation_checkpointing_disable\(\)"
    ):
        step(model, x)
    assert all(map(torch.equal, gradients(model), expected))
    step(model, x)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_inside_units(use_reentrant: bool) -> None:
    """Layers of units that the plan recomputes are checkpointed by torch: neither mixes up the other's replay."""

    class Wrapped(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(checkpoint(lambda y: torch.tanh(self.up(y)), x, use_reentrant=use_reentrant))

    for recipe in (RECOMPUTE, Recipe(inner=("up",)), Recipe(whole=True, inner=("up",))):
        model = Model()
        expected_of = copy.deepcopy(model)
        units = [f"blocks.{index}" for index in range(4)]
        recoup.apply(model, make_plan(model, units, [Leaf(index, 1) for index in range(4)], (KEEP, recipe)))
        for block in model.blocks:
            block.__class__ = Wrapped
            vars(block)["forward"].original = Wrapped.forward.__get__(block)
        x = X.clone().requires_grad_()
        step(model, x)
        step(expected_of, x)
        assert all(map(torch.equal, gradients(model), gradients(expected_of))), recipe


def test_checkpoints_of_recoup_around_units() -> None:
    model = fitted()
    step(model)
    expected = gradients(model)
    model.call = recoup.checkpoint
    step(model)
    assert all(map(torch.equal, gradients(model), expected))


# The output


LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "saves nothing": torch.sum,
    "saves the output": lambda output: (output * output).sum(),
    "saves the output and more": lambda output: nn.functional.mse_loss(output, X),
    "saves what it makes": lambda output: output.exp().sum(),
    "saves a view": lambda output: output.view(-1).pow(2).sum(),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_an_output_that_is_still_held(loss: Callable[[Tensor], Tensor]) -> None:
    def let_go(model: Model) -> None:
        loss(model(X)).backward()

    def hold(model: Model) -> None:
        output = model(X)
        loss(output).backward()

    model = fitted(holds_output=False)
    assert told(lambda: let_go(model)) == []
    (message,) = told(lambda: hold(model))
    assert message.startswith(
        "The plan counts on the model's output being let go before the backward, and the output"
    )
    assert message.endswith("del the output before the backward, or fit with holds_output=True.")
    assert told(lambda: hold(model)) == []
    assert told(lambda: hold(fitted())) == []


def test_a_loss_that_the_model_returns_may_be_held() -> None:
    class WithLoss(Model):
        def forward(self, inputs: Tensor, more: Any = None) -> dict[str, Tensor]:
            output = super().forward(inputs)
            return {"loss": output.mean(), "output": output}

    model = WithLoss()
    profile = recoup.measure(model, X, holds_output=False, accumulates=True)
    recoup.apply(model, recoup.plan(profile, recoup.minimum_budget(profile)))
    loss = model(X)["loss"]
    loss.backward()
    output = model(X)
    with pytest.warns(RecoupWarning, match="the output is still held"):
        output["loss"].backward()


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor, encoded: Tensor) -> Tensor:
        found: Tensor = self.down(nn.functional.gelu(self.up(x * encoded)))
        return found


class EncoderDecoder(nn.Module):
    """Its output has the encoder's result, which is an argument of all blocks of the decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Wide() for _ in range(6))

    def forward(self, inputs: Tensor) -> ModelOutput:
        encoded = self.encoder(inputs)
        x = inputs
        for block in self.blocks:
            x = block(x, encoded=encoded)
        return ModelOutput(loss=x.exp().mean(), logits=x, encoded=encoded)


@pytest.mark.parametrize("name", ["logits", "encoded"])
def test_an_output_that_the_plan_holds_itself(name: str) -> None:
    model = EncoderDecoder()
    profile = recoup.measure(model, X, holds_output=False, accumulates=True)
    plan = recoup.plan(profile, recoup.minimum_budget(profile))
    assert not plan.keeps_everything
    recoup.apply(model, plan)
    assert told(lambda: model(X).loss.backward()) == []

    def hold() -> None:
        output = model(X)
        held = output[name]
        loss = output.loss
        del output
        loss.backward()
        assert held is not None

    (message,) = told(hold)
    assert "the output is still held" in message


# Copies, files, other plans


def test_a_plan_from_a_file_tells_too() -> None:
    model, plan = measured()
    recoup.apply(model, ModelPlan.from_json(plan.to_json()))
    with pytest.warns(RecoupWarning, match="larger than"):
        step(model, torch.randn(17, 8))


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_tell_for_themselves(copier: Callable[[Model], Model]) -> None:
    model = fitted()
    model(X)
    other = copier(model)
    with pytest.warns(RecoupWarning, match="larger than"):
        step(model, torch.randn(17, 8))
    with pytest.warns(RecoupWarning, match="larger than"):
        step(other, torch.randn(17, 8))


def test_a_plan_without_conditions_tells_nothing() -> None:
    model, plan = measured()
    recoup.apply(model, replace(plan, profile=replace(plan.profile, conditions=None)))
    with torch.autocast("cpu", torch.bfloat16):
        outputs = [model(torch.randn(32, 8)) for _ in range(2)]
    assert len(outputs) == 2


def test_removing_ends_it() -> None:
    model = recoup.remove(fitted())
    outputs = [model(torch.randn(32, 8)) for _ in range(2)]
    assert len(outputs) == 2


def test_a_step_of_parts_has_no_conditions() -> None:
    model = Model()

    def parts() -> None:
        x = X
        for block in model.blocks:
            x = block(x)
        x.sum().backward()

    assert recoup.measure(model, step=parts).conditions is None


def test_graphs_are_not_held(no_gc: None) -> None:
    """The hooks that wait for a backward keep nothing alive."""
    with recoup.measuring.MemoryTracker() as memory:
        model = fitted(holds_output=False)
        before = memory.current_bytes
        for _ in range(3):
            model(X)
        assert memory.current_bytes == before


def test_old_profiles_are_read() -> None:
    _, plan = measured()
    old = replace(plan.profile, conditions=None)
    assert '"conditions"' not in old.to_json()
    assert Profile.from_json(old.to_json()) == old


# Layers and calls that were not measured


class Stack(nn.Module):
    """Some of its layers, each several times."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.skipped, self.num_rounds = {0, 1}, 2

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.num_rounds):
            for index, block in enumerate(self.blocks):
                if index not in self.skipped:
                    x = block(x)
        return x


def stack_with_plan(share: float) -> tuple[Stack, ModelPlan]:
    model = Stack()
    profile = recoup.measure(model, X, loss=torch.sum, accumulates=True)
    low, high = recoup.minimum_budget(profile), profile.plain_bytes
    plan = recoup.plan(profile, int(low + share * (high - low)))
    recoup.apply(model, plan)
    return model, plan


def test_a_layer_that_was_skipped_and_has_room_is_left_alone() -> None:
    model = Stack()
    profile = recoup.measure(model, X, loss=torch.sum, accumulates=True)
    recoup.apply(model, recoup.plan(profile, 2 * profile.plain_bytes))
    model.skipped = {1}
    assert told(lambda: step(model)) == []


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_layer_that_was_skipped_is_recomputed(share: float) -> None:
    model, plan = stack_with_plan(share)
    assert plan.keeps_everything == (share == 1.0)
    assert told(lambda: step(model)) == []
    model.zero_grad()
    model.skipped = {1}
    with pytest.warns(RecoupWarning, match="A Block is called that the measured step skipped"):
        step(model)
    with MemoryTracker() as memory:
        output = model.blocks[0](X)
    assert memory.current_bytes == output.nbytes
    found = [parameter.grad for parameter in model.parameters()]
    recoup.remove(model).zero_grad()
    step(model)
    expected = [parameter.grad for parameter in model.parameters()]
    assert all(a is b if a is None else torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_layer_that_is_called_more_often() -> None:
    model, _ = stack_with_plan(0.0)
    model.num_rounds = 1
    assert told(lambda: step(model)) == []
    model.num_rounds = 3
    with pytest.warns(RecoupWarning, match=r"A Block is called more often than .* \(2 times\)"):
        step(model)
    assert told(lambda: step(model)) == []


@pytest.mark.parametrize("change", ["unfrozen", "dtype"])
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_more_parameters_are_trained(change: str, share: float) -> None:
    model = Model()
    model.blocks[0].requires_grad_(change != "unfrozen")
    profile = recoup.measure(model, X, loss=torch.sum, accumulates=True)
    budget = recoup.minimum_budget(profile) if share == 0.0 else profile.plain_bytes
    recoup.apply(model, recoup.plan(profile, budget))
    assert told(lambda: step(model)) == []
    if change == "dtype":
        model.double()
    model.requires_grad_()
    # Not in every call, later on.
    with pytest.warns(RecoupWarning, match=r"parameters that are trained have (6.50|13.0) KiB, and had"):
        step(model, X.to(next(model.parameters()).dtype))


def test_parameters_are_looked_at_ever_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = stack_with_plan(1.0)
    looked: list[int] = []
    current = [0]

    def count(given: nn.Module) -> int:
        looked.append(current[0])
        return trained_bytes_of(given)

    monkeypatch.setattr(watching, "trained_bytes_of", count)
    with sampling("never"):  # as in steps that are timed
        step(model)
    assert looked == []
    for current[0] in range(1, 200):
        step(model)
    assert looked == [1, 2, 4, 8, 16, 32, 64, 128, 192]


def test_a_plan_that_keeps_everything_tells_too() -> None:
    model = Model()
    profile = recoup.measure(model, X, loss=torch.sum, accumulates=True)
    plan = recoup.plan(profile, profile.plain_bytes)
    assert plan.keeps_everything
    recoup.apply(model, plan)
    assert told(lambda: step(model)) == []
    with pytest.warns(RecoupWarning, match="larger than the"):
        step(model, torch.cat([X, X]))
    assert told(lambda: torch.compile(model, backend="eager")(X)) == []
