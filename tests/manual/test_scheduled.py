from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recoup.errors import BudgetError, ChainError
from recoup.manual import Chain, Step
from recoup.planning import (
    Backward,
    Drop,
    Fetch,
    Forward,
    Keep,
    Link,
    Option,
    Problem,
    Schedule,
    Send,
    Unit,
    Value,
    Wait,
    minimum_budget,
    plan,
    revolve,
    simulate,
)


def make_chain(num_steps: int, *, in_place: bool = False, calls: list[int] | None = None) -> Chain:
    """Steps of different widths, each with a parameter, which may work in place."""

    def forward(unit: int, x: Any) -> Any:
        if calls is not None:
            calls.append(unit)
        y = x * (1.0 + 0.01 * unit)
        if in_place:
            x *= 0
        # Widths go up and down, so that bytes are unequal.
        return np.concatenate([y, y[:1]]) if unit % 3 == 0 else y[:-1] if unit % 3 == 1 else y - 0.1 * y**3

    def backward(unit: int, x: Any, grad_y: Any) -> Any:
        y = x * (1.0 + 0.01 * unit)
        if unit % 3 == 0:
            grad = grad_y[:-1].copy()
            grad[0] += grad_y[-1]
        elif unit % 3 == 1:
            grad = np.concatenate([grad_y, [0.0]])
        else:
            grad = grad_y * (1 - 0.3 * y**2)
        return grad * (1.0 + 0.01 * unit), (grad * x).sum()

    return Chain.from_layers(range(num_steps), forward, backward)


X = np.linspace(0.1, 0.9, 6)


def plainly(chain: Chain) -> Any:
    run = chain.forward(X, policy=None)
    return run.backward(np.cos(run.output))


@pytest.mark.parametrize("in_place", [False, True], ids=["pure", "in place"])
@pytest.mark.parametrize(("num_steps", "num_slots"), [(1, 1), (3, 1), (10, 3), (23, 4)])
@pytest.mark.parametrize("records", [False, True])
def test_revolve_end_to_end(num_steps: int, num_slots: int, records: bool, in_place: bool) -> None:
    chain = make_chain(num_steps, in_place=in_place)
    expected = plainly(make_chain(num_steps))
    schedule = revolve(num_steps, num_slots=num_slots, records=records)
    run = chain.run_schedule(X, schedule, grad_output=np.cos)
    assert np.array_equal(run.gradients.input, expected.input)
    assert run.gradients.parameters == expected.parameters


def test_nested_replay_in_the_order_of_the_schedule() -> None:
    calls: list[int] = []
    make_chain(4, calls=calls).run_schedule(X, revolve(4, num_slots=1), grad_output=np.cos)
    assert calls == [0, 1, 2, 3, 0, 1, 2, 0, 1, 0]


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 1.0])
def test_optimal_adjoint_checkpointing_in_bytes(share: float) -> None:
    chain = make_chain(17)
    costs = [1.0 + unit % 5 for unit in range(17)]
    problem = chain.problem(X, costs=costs)
    lowest = minimum_budget(problem)
    budget = round(lowest + share * (sum(unit.output_bytes for unit in problem.units) - lowest))
    best = plan(problem, max(budget, lowest))
    run = chain.run_schedule(X, best.schedule, grad_output=np.cos)
    expected = plainly(chain)
    assert np.array_equal(run.gradients.input, expected.input)
    assert run.gradients.parameters == expected.parameters
    recomputed = sum(run.num_forwards) - 17
    assert recomputed == sum(best.predicted.num_recomputes)
    assert run.peak_bytes <= best.predicted.peak_bytes <= max(budget, lowest)
    with pytest.raises(BudgetError):
        plan(problem, lowest - 1)


@settings(max_examples=30, deadline=None)
@given(num_steps=st.integers(1, 9), extra=st.integers(0, 400))
def test_any_plan_gives_the_plain_gradients(num_steps: int, extra: int) -> None:
    chain = make_chain(num_steps)
    problem = chain.problem(X, costs=[1.0 + 0.7 * (unit % 4) for unit in range(num_steps)])
    best = plan(problem, minimum_budget(problem) + extra)
    run = chain.run_schedule(X, best.schedule, grad_output=np.cos)
    assert np.array_equal(run.gradients.input, plainly(chain).input)
    assert run.peak_bytes <= best.predicted.peak_bytes


def test_moves_to_another_store_and_back() -> None:
    chain = make_chain(3)
    option = Option("input", forward_s=1, backward_s=1)
    units = [
        Unit(str(i), [option], output_bytes=8 * n, output_links=["host"]) for i, n in enumerate((7, 6, 6))
    ]
    problem = Problem(
        units, input_bytes=48, links=[Link("host", send_bytes_per_s=1e3, fetch_bytes_per_s=1e3)]
    )
    move: dict[str, Any] = {"value": Value.OUTPUT, "link": "host"}
    schedule = Schedule(
        [
            Forward(0), Forward(1, keep=Keep.INPUT), Send(0, **move), Forward(2, keep=Keep.INPUT),
            Backward(2, option=0), Fetch(0, **move), Wait(0, value=Value.OUTPUT), Backward(1, option=0),
            Backward(0, option=0),
        ]
    )  # fmt: skip
    simulate(problem, schedule)
    run = chain.run_schedule(X, schedule, grad_output=np.cos)
    assert np.array_equal(run.gradients.input, plainly(chain).input)
    assert run.num_forwards == (1, 1, 1)


def test_torch_tensors() -> None:
    step = Step(lambda x: x.sin(), lambda x, grad: grad * x.cos())
    x = torch.linspace(0, 1, 5, dtype=torch.float64)
    run = Chain([step] * 9).run_schedule(x, revolve(9, num_slots=2), grad_output=torch.ones_like)
    leaf = x.clone().requires_grad_()
    y = leaf
    for _ in range(9):
        y = y.sin()
    y.sum().backward()
    assert torch.equal(run.gradients.input, leaf.grad)
    assert torch.equal(run.output, y.detach())


F0, F1 = Forward(0), Forward(1, keep=Keep.INPUT)


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ([Forward(5)], r"Action 0 \(F5\): there is no unit 5; the chain has 2 steps"),
        ([Forward(1)], r"Action 0 \(F1\): the output of unit 0 is not there"),
        ([F0, F1, Backward(0, option=0)], r"Action 2 \(B0\): the next backward is that of unit 1"),
        ([F0, Backward(1, option=0)], r"the next backward is that of unit 1, after the last unit's forward"),
        ([F0, F1, Drop(0, value=Value.OUTPUT), Backward(1, option=0)], r"the output of unit 0 is not there"),
        ([F0, F1, Backward(1, option=0)], "ends after 3 actions, and the backward of unit 0 has not run"),
    ],
)
def test_illegal_schedules(actions: Any, message: str) -> None:
    with pytest.raises(ChainError, match=message):
        make_chain(2).run_schedule(X, Schedule(actions), grad_output=np.cos)


def test_bad_gradients_and_costs() -> None:
    chain, schedule = make_chain(2), revolve(2, num_slots=1)
    with pytest.raises(ChainError, match=r"has shape \(3,\); the output has shape \(6,\)"):
        chain.run_schedule(X, schedule, grad_output=np.ones(3))
    with pytest.raises(ChainError, match="gradient of the output must be an array"):
        chain.run_schedule(X, schedule, grad_output=lambda output: None)
    with pytest.raises(ChainError, match="There are 1 costs for 2 steps"):
        chain.problem(X, costs=[1.0])
    with pytest.raises(ChainError, match="chain's input must be an array"):
        chain.run_schedule("x", schedule, grad_output=np.cos)
