"""A policy on a model in one call: the units that it finds, exact counts and bytes, the plain step's gradients."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import models
import pytest
import sequentials
import torch
from handmade import Chain, Counting, chain_sample, count_step, keep, make_plan
from torch import Tensor, nn

import recoup
from recoup.engines import is_applied
from recoup.engines.by_policy import registered_calls
from recoup.errors import ApplyError, InputChangedError, PolicyError, RecoupWarning, SampleError, UnitError
from recoup.measuring import MemoryTracker
from recoup.policies import (
    BalancedSegments,
    EveryN,
    KeepAll,
    KeepNone,
    KeepUnits,
    Policy,
    Segments,
    Selective,
    UniformSegments,
)

COSTS = [5.0, 1.0, 1.0, 1.0, 2.0]
POLICIES: list[Policy] = [UniformSegments(2), EveryN(2), KeepNone(), UniformSegments(1)]


def touched(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if "forward" in vars(module)}


def counts(model: nn.Module) -> list[int]:
    seen = count_step(model, chain_sample())
    return [seen[str(unit)] for unit in range(5)]


# Counts and bytes


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (UniformSegments(2), [2, 2, 2, 2, 2]),
        (UniformSegments(5), [2, 2, 2, 2, 2]),
        (EveryN(2), [2, 2, 2, 2, 1]),
        (EveryN(3), [2, 2, 2, 2, 2]),
        (EveryN(0), [2, 2, 2, 2, 2]),
        (KeepNone(), [2, 2, 2, 2, 2]),
        (KeepAll(), [1, 1, 1, 1, 1]),
        (Segments([(1, 3)]), [1, 2, 2, 2, 1]),
        (KeepUnits(["units.0", "units.1", "units.4"]), [1, 2, 2, 2, 1]),
        (KeepUnits([1, 2, 3]), [1, 1, 1, 2, 2]),
        (Selective(2), [2, 2, 2, 2, 1]),
        (BalancedSegments(2), [2, 2, 2, 2, 2]),
    ],
)
def test_units_run_again_as_the_policy_says(policy: Policy, expected: list[int]) -> None:
    model = Chain()
    assert recoup.apply(model, policy, costs=COSTS) is model
    assert counts(model) == expected
    assert touched(model) - {""} == {f"units.{unit}" for unit in range(5) if expected[unit] > 1}
    assert is_applied(model) == (policy != KeepAll())


@pytest.mark.parametrize(
    ("policy", "num_held"), [(KeepAll(), 8), (UniformSegments(4), 4), (EveryN(4), 2), (KeepNone(), 1)]
)
def test_what_is_held_between_forward_and_backward(policy: Policy, num_held: int) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(8)))
    recoup.apply(model, policy)
    x = torch.ones(64, 32)
    with MemoryTracker() as memory:
        output = model(x)
        # Each input of a segment but the model's own, and the output.
        assert memory.current_bytes == num_held * output.nbytes


# Gradients


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("kind", models.ALL)
def test_models_of_every_kind_train_as_before(kind: type[nn.Module], policy: Policy) -> None:
    torch.manual_seed(3)
    model, sample = kind(models.plainly), kind.sample()  # type: ignore[call-arg, operator]
    expected = models.train(model, sample)
    with_policy = copy.deepcopy(model)
    try:
        recoup.apply(with_policy, policy)
    except RecoupWarning:  # the recurrent one has one unit only
        assert kind is models.Recurrent
        recoup.apply(with_policy, UniformSegments(1))
    models.assert_same(models.train(with_policy, sample), expected)
    assert is_applied(with_policy)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("name", sequentials.MODELS)
def test_flat_sequentials_train_as_before(name: str, policy: Policy) -> None:
    model, x = sequentials.make(name)
    model = sequentials.WithLoss(model)
    expected = models.train(model, (x,))
    recoup.apply(model, policy)
    assert is_applied(model)
    models.assert_same(models.train(model, (x,)), expected)


def test_a_decoder_of_transformers() -> None:
    pytest.importorskip("transformers")
    from everyday.subjects import gpt2, tokens

    model, batch = gpt2(4), tokens(2, 8) | {"use_cache": False}
    plain = copy.deepcopy(model)
    recoup.apply(model, EveryN(2), units="transformer.h.*")
    for each in (plain, model):
        torch.manual_seed(1)
        each(**batch).loss.backward()
    for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad), name  # type: ignore[arg-type]
    assert touched(model) - {"", "transformer"} == {f"transformer.h.{index}" for index in range(4)}


def test_checkpoints_inside_units_nest() -> None:
    class Nested(Counting):
        def forward(self, x: Tensor) -> Tensor:
            return recoup.checkpoint(super().forward, x)

    plain, model = Chain(), Chain()
    model.units = nn.ModuleList(Nested(str(unit)) for unit in range(5))
    model.load_state_dict(plain.state_dict())
    recoup.apply(model, UniformSegments(2))
    models.assert_same(models.train(model, chain_sample()), models.train(plain, chain_sample()))
    # The replay of a segment's last unit stops before its checkpoint, whose own replay needs only the input.
    assert counts(model) == [3, 2, 3, 3, 2]


# As for plans


def test_nothing_visible_changes_and_remove_restores() -> None:
    model = Chain()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    shown, keys = repr(model), list(model.state_dict())
    recoup.apply(model, EveryN(2))
    assert (repr(model), list(model.state_dict()), type(model)) == (shown, keys, Chain)
    recoup.apply(model, UniformSegments(1))
    recoup.remove(model)
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before


def test_copies_and_pickles_have_the_policy() -> None:
    model = recoup.apply(Chain(), EveryN(2))
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert counts(copied) == [2, 2, 2, 2, 1]
        recoup.remove(copied)
        assert counts(copied) == [1, 1, 1, 1, 1]
    assert counts(model) == [2, 2, 2, 2, 1]


def test_policies_hold_in_both_modes_and_not_without_gradients() -> None:
    model = recoup.apply(Chain().eval(), KeepNone())
    assert counts(model) == [2, 2, 2, 2, 2]
    assert counts(model.train()) == [2, 2, 2, 2, 2]
    with torch.no_grad(), MemoryTracker() as memory:
        loss = model(*chain_sample())
        assert memory.current_bytes == loss.nbytes


# Finding units


class Reversed(Chain):
    """Calls its units from the last to the first, and one not at all."""

    def __init__(self) -> None:
        super().__init__(5)
        self.unused = Counting("unused")

    def forward(self, x: Tensor) -> Tensor:
        for unit in reversed(self.units):
            x = unit(x)
        return x.square().mean()


def test_a_sample_shows_the_order_of_calls_and_leaves_no_trace() -> None:
    model, sample = Reversed(), chain_sample()
    state, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    recoup.apply(model, KeepUnits([0, 1, 2]), sample=sample)
    models.assert_same(model.state_dict(), state)
    assert torch.equal(torch.get_rng_state(), random)
    assert counts(model) == [2, 2, 2, 1, 1], "called as 4, 3, 2, 1, 0"
    recoup.apply(model, KeepUnits([0, 1, 2]))
    assert counts(model) == [1, 1, 2, 2, 2], "registered as 0, 1, 2, 3, 4"


def test_the_order_of_registration_does_not_matter_to_gradients() -> None:
    model = Reversed()
    model.unused = nn.Identity()
    expected = models.train(model, chain_sample())
    models.assert_same(models.train(recoup.apply(model, EveryN(2)), chain_sample()), expected)


def test_containers_are_not_called_and_operations_in_place_are_no_units() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleDict({"stem": nn.Linear(4, 4), "blocks": nn.ModuleList([Counting("a")])})
            self.act = nn.ReLU(inplace=True)
            self.head = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.act(self.parts["blocks"][0](self.parts["stem"](x)))).sum()

    model = Net()
    assert [call.name for call in registered_calls(model).inside] == [
        "parts.stem",
        "parts.blocks.0",
        "act",
        "head",
    ]
    expected = models.train(model, chain_sample())
    # A block that occurs once and has most of the layers is divided, as `measure` does.
    inside = ", ".join(rf"parts\.blocks\.0\.{name}" for name in ("norm", "linear", "dropout"))
    with pytest.raises(PolicyError, match=rf"The 5 units of Net are parts\.stem, {inside}, head\."):
        recoup.apply(model, Segments([(1, 5)]))
    recoup.apply(model, KeepNone())
    models.assert_same(models.train(model, chain_sample()), expected)


def test_a_unit_that_changes_its_input_in_place_is_named() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x.relu_())

    model = nn.Sequential(nn.Linear(4, 4), InPlace(), InPlace())
    recoup.apply(model, UniformSegments(3))
    with pytest.raises(InputChangedError, match=r"InPlace .*: argument 'x' was changed in place"):
        model(*chain_sample()).sum().backward()
    recoup.apply(model, KeepNone())  # inside a segment it may
    model(*chain_sample()).sum().backward()


def test_nothing_to_recompute_is_said() -> None:
    for policy in (EveryN(1), UniformSegments(6)):
        with pytest.warns(
            RecoupWarning, match=r"recomputes nothing here\. The 5 units of Chain are units\.0, "
        ):
            recoup.apply(Chain(), policy)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"plan": Selective()}, PolicyError, r"costs=\[…\]\. The 5 units of Chain are units\.0, units\.1"),
        ({"plan": BalancedSegments(2), "costs": [1.0]}, PolicyError, "1 costs were given for 5 units"),
        ({"plan": Segments([(3, 5)])}, PolicyError, "Segment 3-5 is out of range for 5 units"),
        ({"plan": KeepUnits(["units.9"])}, PolicyError, r"no such unit\. Did you mean 'units\.\d'"),
        ({"plan": EveryN(2), "units": "units"}, UnitError, "Containers such as ModuleList are not called"),
        ({"plan": EveryN(2), "sample": (3,)}, SampleError, "Chain refuses the sample"),
        ({"plan": "every 2"}, ApplyError, r"a policy such as recoup\.policies\.EveryN\(2\); got a str"),
    ],
)
def test_errors_say_what_to_change(settings: Any, error: type[Exception], message: str) -> None:
    model = recoup.apply(Chain(), EveryN(2))
    with pytest.raises(error, match=message):
        recoup.apply(model, **settings)
    assert counts(model) == [2, 2, 2, 2, 1], "the earlier policy stays"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (nn.DataParallel, r"nn\.DataParallel, whose copies would run the original's parameters"),
        (lambda chain: nn.Sequential(nn.DataParallel(chain)), r"contains, an nn\.DataParallel"),
        (lambda chain: nn.Sequential(chain, nn.LazyLinear(4)), "LazyLinear '1' has not run yet"),
        (lambda chain: chain.forward, r"must be a torch\.nn\.Module; got a method"),
    ],
)
def test_models_that_no_plan_can_be_for(make: Any, message: str) -> None:
    chain = Chain()
    for plan in (EveryN(2), make_plan(chain, chain.names, keep(0, 1, 2, 3, 4))):
        with pytest.raises(ApplyError, match=message):
            recoup.apply(make(chain), plan)
    assert not touched(chain)


def test_forwards_that_are_generators_are_no_units() -> None:
    class Yielding(nn.Sequential):
        def forward(self, x: Tensor) -> Iterator[Tensor]:
            for layer in self:
                yield layer(x)

    class Model(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            for part in self:
                x = sum(part(x), x)
            return x

    model, x = Model(*(Yielding(nn.Linear(3, 3), nn.Linear(3, 3)) for _ in range(2))), torch.randn(5, 3)
    for sample in (None, x):
        with pytest.raises(
            UnitError, match=r"fits '0', '1', which the step never calls.* a generator runs elsewhere"
        ):
            recoup.apply(model, EveryN(2), units="?", sample=sample)
    recoup.apply(model, UniformSegments(4))
    assert touched(model) == {"", "0.0", "0.1", "1.0", "1.1"}


def test_a_plan_takes_nothing_else() -> None:
    model = Chain()
    plan = make_plan(model, model.names, keep(0, 1, 2, 3, 4))
    with pytest.raises(ApplyError, match="units= goes with a policy; a plan has its own"):
        recoup.apply(model, plan, units="units.*")
