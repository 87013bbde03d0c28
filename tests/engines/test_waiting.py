"""Steps that call a model, or parts of it, several times before a backward: each call as the plan says."""

from __future__ import annotations

import pytest
import torch
from tally import Tally
from torch import Tensor, nn

import recoup
from recoup.engines.waiting import Waiting
from recoup.plans.tree import leaves_of

REPLAYS = Tally()
"""Numbers of blocks that were replayed, and numbers of rows."""


class Block(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        if recoup.is_replaying():
            REPLAYS.add((self.number, len(x)))
        return x + self.down(torch.tanh(self.up(x)))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(map(Block, range(4)))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


QUERIES, DOCUMENTS = torch.randn(16, 16), torch.randn(128, 16)


def recomputed(fitted: recoup.Fitted) -> list[tuple[int, int]]:
    """What the plan recomputes of two forwards, in the order of a backward."""
    plan, found = fitted.plan, []
    for leaf in leaves_of(plan.items):
        unit = plan.profile.units[leaf.unit]
        if unit.module is not None and plan.recipe(leaf).name == "recompute":
            found.append((int(unit.module.split(".")[1]), len(DOCUMENTS if unit.call else QUERIES)))
    return found[::-1]


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_calls_of_unequal_batches_have_plans_of_their_own(share: float) -> None:
    model = Encoder()

    def step() -> None:
        model.zero_grad()
        queries, documents = model(QUERIES), model(DOCUMENTS)
        (queries @ documents.T).logsumexp(1).sum().backward()

    step()
    expected = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    profile = recoup.measure(model, step=step)
    low, high = recoup.minimum_budget(profile), profile.plain_bytes
    fitted = recoup.fit(model, step=step, budget=int(low + share * (high - low)), race=False)
    assert fitted.verification is not None
    assert fitted.plan.predicted_bytes == fitted.verification.peak_bytes
    for _ in range(2):
        REPLAYS.take()
        step()
        assert sorted(REPLAYS.take()) == sorted(recomputed(fitted))
        found = [parameter.grad for parameter in model.parameters()]
        assert all(map(torch.equal, found, expected))


def test_a_forward_that_gets_no_backward_is_no_part_of_the_next_step() -> None:
    model = Encoder()

    def step() -> None:
        model.zero_grad()
        (model(QUERIES).sum() + model(DOCUMENTS).sum()).backward()

    profile = recoup.measure(model, step=step)
    low, high = recoup.minimum_budget(profile), profile.plain_bytes
    fitted = recoup.fit(model, step=step, budget=int(low + 0.2 * (high - low)), race=False)
    for num_others in (0, 1):
        for _ in range(num_others):
            model(QUERIES)
        REPLAYS.take()
        step()
        assert sorted(REPLAYS.take()) == sorted(recomputed(fitted)) != []


class Pair(nn.Module):
    """A generator and a critic, whose own forward nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = Encoder(), Encoder()

    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError


def test_parts_that_are_called_a_number_of_times_that_no_plan_knows() -> None:
    """Three calls of the critic follow on its two backwards: two before the first, one before the second."""
    model = Pair()

    def step() -> None:
        model.zero_grad()
        with torch.no_grad():
            made = model.generator(QUERIES)
        (model.critic(DOCUMENTS).sum() - model.critic(made).sum()).backward()
        model.critic(model.generator(QUERIES)).sum().backward()

    profile = recoup.measure(model, step=step)
    low, high = recoup.minimum_budget(profile), profile.plain_bytes
    recoup.fit(model, step=step, budget=int(low + 0.6 * (high - low)), race=False)
    replays = []
    for _ in range(4):
        REPLAYS.take()
        step()
        replays.append(REPLAYS.take())
    assert replays[0]
    assert replays == replays[:1] * 4


class Parts(nn.Module):
    """Of which a step calls the encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()

    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError


@pytest.mark.parametrize("first", [True, False])
def test_a_part_whose_graph_is_held_and_gets_no_backward(first: bool) -> None:
    """A target that is detached, in variables that live on: every step begins with the first call again."""
    model, held = Parts(), {}

    def step() -> None:
        model.zero_grad()
        if first:
            held["target"] = model.encoder(QUERIES)
        held["found"] = model.encoder(DOCUMENTS)
        if not first:
            held["target"] = model.encoder(QUERIES)
        (held["found"].square().mean() - held["target"].detach().mean()).backward()

    profile = recoup.measure(model, step=step)
    low, high = recoup.minimum_budget(profile), profile.plain_bytes
    recoup.fit(model, step=step, budget=int(low + 0.5 * (high - low)), race=False)
    replays = []
    for _ in range(4):
        REPLAYS.take()
        step()
        replays.append(REPLAYS.take())
    assert replays == replays[:1] * 4


def test_a_call_waits_until_its_backward_begins_or_its_graph_is_gone() -> None:
    waiting, x = Waiting(), torch.ones(2, requires_grad=True)
    assert not waiting
    waiting.add(x.detach())
    assert not waiting
    output = {"loss": (x * 2).sum(), "more": [x + 1]}
    waiting.add(output)
    assert waiting
    output["loss"].backward()  # type: ignore[attr-defined]
    assert not waiting
    waiting.add(other := x * 3)
    assert waiting
    del other
    assert not waiting
