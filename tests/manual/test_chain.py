"""Chains: the same results under every policy, exact counts, and errors that name the step."""

from __future__ import annotations

import sys
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recoup.errors import ChainError, NotHeldError, PolicyError, PrecisionError, UnitRangeError
from recoup.manual import Chain, Run, Step
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
from recoup.stores import ActivationStore, error_bound

# Unequal widths: an activation taken for another's would not even fit.
WIDTHS = [3, 5, 4, 7, 2, 6, 3, 8]
COSTS = [7.0, 1.0, 4.0, 2.5, 11.0, 0.5, 3.0]
NUM_UNITS = len(WIDTHS) - 1
POLICIES: list[Policy] = [
    KeepAll(),
    KeepNone(),
    EveryN(),
    EveryN(3),
    EveryN(0),
    Selective(3),
    UniformSegments(2),
    BalancedSegments(3),
    Segments([(1, 3), (5, 6)]),
]


def numpy_layers() -> list[np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal((n, m)) for m, n in pairwise(WIDTHS)]


def forward(weight: Any, x: Any) -> Any:
    y = weight @ x
    return torch.tanh(y) if isinstance(y, torch.Tensor) else np.tanh(y)


def backward(weight: Any, x: Any, grad_y: Any) -> tuple[Any, Any]:
    y = forward(weight, x)
    grad = grad_y * (1 - y * y)
    return weight.T @ grad, grad[:, None] * x[None, :]


def setting(kind: str) -> tuple[Chain, Any, Any]:
    rng = np.random.default_rng(1)
    x, grad = rng.standard_normal(WIDTHS[0]), rng.standard_normal(WIDTHS[-1])
    layers: list[Any] = list(numpy_layers())
    if kind == "torch":
        layers, x, grad = (
            [torch.from_numpy(layer) for layer in layers],
            torch.from_numpy(x),
            torch.from_numpy(grad),
        )
    return Chain.from_layers(layers, forward, backward), x, grad


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    return left.dtype == right.dtype and np.array_equal(left, right)


def check_same(run: Run, expected: Any, grad: Any) -> None:
    found = run.backward(grad)
    assert same(found.input, expected.input)
    for unit, (left, right) in enumerate(zip(found.parameters, expected.parameters, strict=True)):
        assert same(left, right), unit


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_every_policy_gives_the_same_bits(kind: str, policy: Policy) -> None:
    chain, x, grad = setting(kind)
    before = x.copy() if kind == "numpy" else x.clone()
    direct = x
    for step in chain.steps:
        direct = step.forward(direct)
    expected = chain.forward(x, policy=KeepAll()).backward(grad)
    run = chain.forward(x, policy=policy, costs=COSTS)
    assert same(run.output, direct)
    check_same(run, expected, grad)
    assert same(x, before)
    assert run.held_units() == tuple(u for u, kept in enumerate(policy.keeps(NUM_UNITS, COSTS)) if kept)


def test_gradients_are_those_of_autograd() -> None:
    chain, x, grad = setting("torch")
    weights = [torch.from_numpy(layer).requires_grad_() for layer in numpy_layers()]
    leaf = x.clone().requires_grad_()
    y = leaf
    for weight in weights:
        y = forward(weight, y)
    y.backward(grad)
    found = chain.forward(x).backward(grad)
    assert torch.allclose(found.input, leaf.grad, rtol=1e-12)
    for left, weight in zip(found.parameters, weights, strict=True):
        assert torch.allclose(left, weight.grad, rtol=1e-12)


@pytest.mark.parametrize(
    "policy", [KeepAll(), KeepNone(), EveryN(), EveryN(3), EveryN(0), Selective(3)], ids=repr
)
def test_exactly_the_units_that_the_policy_says_run_again(policy: Policy) -> None:
    calls: list[int] = []

    def counted(unit: int, x: Any) -> Any:
        calls.append(unit)
        return x + unit

    chain = Chain.from_layers(range(NUM_UNITS), counted, lambda unit, x, grad_y: grad_y)
    run = chain.forward(np.zeros(2), policy=policy, costs=COSTS)
    assert calls == list(range(NUM_UNITS))
    calls.clear()
    run.backward(np.ones(2))
    again = [unit for unit, yes in enumerate(policy.recomputes(NUM_UNITS, COSTS)) if yes]
    assert sorted(calls) == again
    assert run.num_recomputed == len(again)


def test_a_replay_runs_stretches_from_the_back_each_in_order() -> None:
    trace: list[str] = []

    def traced(unit: int, x: Any) -> Any:
        trace.append(f"F{unit}")
        return x + 1

    def traced_back(unit: int, x: Any, grad_y: Any) -> Any:
        assert x == unit
        trace.append(f"B{unit}")
        return grad_y

    run = Chain.from_layers(range(7), traced, traced_back).forward(np.zeros(1), policy=EveryN(3))
    trace.clear()
    run.backward(np.ones(1))
    assert " ".join(trace) == "B6 F3 F4 B5 B4 B3 F0 F1 B2 B1 B0"


def test_a_segment_is_replayed_up_to_its_last_input() -> None:
    run = setting("numpy")[0].forward(np.ones(3), policy=Segments([(1, 3)]))
    run.backward(np.ones(8))
    assert run.num_recomputed == 2, "units 1 and 2; the output of 3 is held as the input of 4"


@pytest.mark.parametrize(("unit", "num"), [(0, 0), (1, 1), (2, 2), (3, 0), (4, 1), (5, 2), (6, 0)])
def test_activations_come_from_the_nearest_held_one(unit: int, num: int) -> None:
    chain, x, _ = setting("numpy")
    expected = chain.forward(x, policy=KeepAll()).activation(unit)
    run = chain.forward(x, policy=EveryN(3))
    assert same(run.activation(unit), expected)
    assert run.num_recomputed == num
    run.activation(unit)[:] = 99
    assert same(run.activation(unit), expected), "what is given is the caller's"


@pytest.mark.parametrize("unit", [-1, 7, "1"])
def test_activations_out_of_range(unit: Any) -> None:
    run = setting("numpy")[0].forward(np.ones(3))
    with pytest.raises(UnitRangeError, match=f"Unit {unit!r} is out of range: the chain has 7 units"):
        run.activation(unit)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("evict", ["oldest", "least_valuable", "refuse"])
@pytest.mark.parametrize("budget", [0, 40, 64, 100, 10_000])
def test_evictions_change_counts_but_no_bits(kind: str, evict: Any, budget: int) -> None:
    chain, x, grad = setting(kind)
    expected = chain.forward(x, policy=KeepAll()).backward(grad)
    store = ActivationStore(budget=budget, evict=evict)
    run = chain.forward(x, policy=KeepAll(), store=store, costs=COSTS)
    assert store.num_bytes <= budget
    held = run.held_units()
    check_same(run, expected, grad)
    # Unit 0 is held besides; every unit whose successor's input is gone runs once more.
    assert run.num_recomputed == sum(unit + 1 not in held for unit in range(NUM_UNITS - 1))
    check_same(run, expected, grad)


def test_eviction_of_several_in_a_row() -> None:
    chain, x, grad = setting("numpy")
    expected = chain.forward(x, policy=KeepAll()).backward(grad)
    store = ActivationStore(budget=8 * 13)
    run = chain.forward(x, policy=KeepAll(), store=store)
    # Inputs of 3, 5, 4, 7, 2, 6, 3 doubles: 7 pushes out 3 and 5 at once, 6 pushes out 4 and 7.
    assert run.held_units() == (4, 5, 6)
    assert store.stats().num_evicted == 4
    check_same(run, expected, grad)
    assert run.num_recomputed == 3


def test_entries_that_vanish_between_forward_and_backward_are_recomputed() -> None:
    chain, x, grad = setting("numpy")
    expected = chain.forward(x, policy=KeepAll()).backward(grad)
    store = ActivationStore()
    run = chain.forward(x, policy=KeepAll(), store=store)
    for unit in (1, 2, 3, 6):
        store.remove(unit)
    assert run.held_units() == (0, 4, 5)
    check_same(run, expected, grad)
    assert run.num_recomputed == 4
    store.clear()
    check_same(run, expected, grad)
    assert run.num_recomputed == 4 + 6


@given(
    kept=st.lists(st.booleans(), min_size=NUM_UNITS, max_size=NUM_UNITS),
    gone=st.sets(st.integers(0, NUM_UNITS - 1)),
)
@settings(max_examples=60)
def test_any_set_of_held_inputs_gives_the_same_bits(kept: list[bool], gone: set[int]) -> None:
    chain, x, grad = setting("numpy")
    store = ActivationStore()
    run = chain.forward(x, policy=Selective(1), store=store, costs=[float(keep) for keep in kept])
    for unit in gone:
        store.remove(unit)
    check_same(run, chain.forward(x, policy=KeepAll()).backward(grad), grad)


def test_runs_that_share_a_store_never_mix() -> None:
    chain, x, grad = setting("numpy")
    store = ActivationStore(num_units=NUM_UNITS)
    first = chain.forward(x, policy=EveryN(3), store=store)
    second = chain.forward(x + 1, policy=EveryN(2), store=store)
    assert first.held_units() == ()
    assert second.held_units() == (0, 2, 4, 6)
    check_same(first, chain.forward(x, policy=KeepAll()).backward(grad), grad)
    check_same(second, chain.forward(x + 1, policy=KeepAll()).backward(grad), grad)
    store.clear()
    third = chain.forward(x + 2, policy=EveryN(2), store=store)
    check_same(second, chain.forward(x + 1, policy=KeepAll()).backward(grad), grad)
    check_same(third, chain.forward(x + 2, policy=KeepAll()).backward(grad), grad)


def test_the_off_switch_keeps_everything_and_leaves_the_store_alone() -> None:
    chain, x, grad = setting("numpy")
    expected = chain.forward(x, policy=KeepAll()).backward(grad)
    store = ActivationStore(max_entries=1)
    run = Chain(chain.steps, enabled=False).forward(x, policy=KeepNone(), store=store)
    assert run.held_units() == tuple(range(NUM_UNITS))
    check_same(run, expected, grad)
    assert run.num_recomputed == 0
    assert store.stats().num_created == 0


def test_the_off_switch_has_no_limit_of_64() -> None:
    add = Step(lambda x: x + 1, lambda x, grad_y: grad_y)
    assert len(Chain([add] * 70, enabled=False).forward(np.zeros(1)).held_units()) == 70
    run = Chain([add] * 70).forward(np.zeros(1), policy=KeepAll())
    assert run.held_units() == tuple(range(64))
    run.backward(np.ones(1))
    assert run.num_recomputed == 6, "units 63 to 68, for the inputs of 64 to 69"


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_steps_may_work_in_place(kind: str) -> None:
    def doubled(x: Any) -> Any:
        x *= 2
        x += 1
        return x

    def doubled_back(x: Any, grad_y: Any) -> Any:
        grad_y *= 2
        x[:] = 0
        return grad_y

    def squared(x: Any) -> Any:
        x *= x
        return x

    def squared_back(x: Any, grad_y: Any) -> Any:
        grad_y *= x
        grad_y *= 2
        return grad_y

    steps = [Step(doubled, doubled_back), Step(squared, squared_back)] * 3
    x, grad = np.array([0.25, -0.5]), np.array([1.0, 3.0])
    if kind == "torch":
        x, grad = torch.from_numpy(x), torch.from_numpy(grad)  # type: ignore[assignment]
    for policy in (KeepAll(), KeepNone(), EveryN(4), Segments([(1, 2), (3, 5)])):
        run = Chain(steps).forward(x, policy=policy)
        for _ in range(2):
            found = run.backward(grad).input
            # y = (2 (2 (2x+1)^2 + 1)^2 + 1)^2 by the chain rule, in exact binary fractions.
            a = 2 * x + 1
            b = 2 * a**2 + 1
            c = 2 * b**2 + 1
            assert same(found, grad * 2 * c * 2 * 2 * b * 2 * 2 * a * 2)
        assert same(run.output, c**2)
    assert x.tolist() == [0.25, -0.5]
    assert grad.tolist() == [1.0, 3.0]


def test_gradients_that_are_one_array_are_kept_apart() -> None:
    # Adding a bias: both gradients are grad_y itself, which the step before then changes in place.
    def halved_back(x: Any, grad_y: Any) -> Any:
        grad_y /= 2
        return grad_y

    halve = Step(lambda x: x / 2, halved_back)
    bias = Step(lambda x: x + 3, lambda x, grad_y: (grad_y, grad_y))
    found = Chain([halve, bias]).forward(np.zeros(2)).backward(np.array([4.0, 6.0]))
    assert found.input.tolist() == [2.0, 3.0]
    assert found.parameters[0] is None
    assert found.parameters[1].tolist() == [4.0, 6.0]


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_steps_see_the_same_memory_layout_under_every_policy(kind: str) -> None:
    # How an array lies in memory can decide the last bit of a sum: a replay has to see what the forward saw.
    seen: set[tuple[int, tuple[int, ...]]] = set()

    def note(unit: int, x: Any) -> None:
        seen.add((unit, x.strides if kind == "numpy" else x.stride()))

    def every_other_column(unit: int, x: Any) -> Any:
        note(unit, x)
        wide = np.concatenate([x, x], axis=1) if kind == "numpy" else torch.cat([x, x], dim=1)
        return wide.T[::2].T if unit % 2 else wide[:, ::2]

    def backward(unit: int, x: Any, grad_y: Any) -> Any:
        note(unit, x)
        return grad_y

    chain = Chain.from_layers(range(6), every_other_column, backward)
    x: Any = np.random.default_rng(3).standard_normal((3, 4))
    x = torch.from_numpy(x) if kind == "torch" else x
    for policy in (KeepAll(), KeepNone(), EveryN(2), EveryN(4)):
        chain.forward(x, policy=policy).backward(x)
    assert len(seen) == 6, "one layout for each unit"


def test_torch_steps_record_no_graph_and_may_open_one() -> None:
    layer = torch.nn.Linear(3, 3)

    def by_autograd(x: torch.Tensor, grad_y: torch.Tensor) -> Any:
        with torch.enable_grad():
            x.requires_grad_()
            y = torch.tanh(layer(x))
        grad_x, *of_parameters = torch.autograd.grad(y, [x, *layer.parameters()], grad_y)
        return grad_x, of_parameters

    chain = Chain([Step(lambda x: torch.tanh(layer(x)), by_autograd)] * 4)
    x = torch.randn(2, 3, requires_grad=True)
    run = chain.forward(x, policy=EveryN(2))
    assert not run.output.requires_grad
    found = run.backward(torch.ones(2, 3))
    y = x
    for _ in range(4):
        y = torch.tanh(layer(y))
    y.sum().backward()
    assert torch.equal(found.input, x.grad)
    total = sum(grads[0] for grads in found.parameters)
    assert torch.allclose(total, layer.weight.grad)


def test_scalars_pass_through() -> None:
    steps = [Step(np.sum, lambda x, g: np.full(x.shape, g)), Step(lambda s: s * s, lambda s, g: 2 * s * g)]
    for policy in (KeepAll(), KeepNone()):
        run = Chain(steps).forward(np.array([1.0, 2.0]), policy=policy)
        assert run.output == 9.0
        assert run.backward(np.array(1.0)).input.tolist() == [6.0, 6.0]


def test_reduced_precision_is_off_by_its_bound_and_no_more() -> None:
    x = np.linspace(1, 2, 100, dtype=np.float32)
    chain = Chain([Step(lambda x: x * 3, lambda x, g: 3 * x * g)] * 2)
    store = ActivationStore(precision="bfloat16")
    run = chain.forward(x, policy=KeepAll(), store=store)
    assert store.num_bytes == 400
    error = np.abs(run.activation(1) - 3 * x)
    assert (error <= error_bound("bfloat16", 3 * x)).all()
    assert error.any()
    assert same(run.activation(0), x), "the chain's input is held exactly"
    with pytest.raises(PrecisionError, match="Unit 1: 1 of 2 values are beyond"):
        chain.forward(np.array([1.0, 3e4]), policy=KeepAll(), store=ActivationStore(precision="float16"))


def test_without_the_input_a_backward_needs_something_held_before() -> None:
    chain, x, grad = setting("numpy")
    run = chain.forward(x, policy=EveryN(3), keep_input=False)
    check_same(run, chain.forward(x, policy=KeepAll()).backward(grad), grad)
    run = chain.forward(x, policy=Segments([(1, 3)]), store=(store := ActivationStore()), keep_input=False)
    store.remove(0)
    assert run.activation(3).shape == (7,)
    with pytest.raises(NotHeldError, match=r"The input of unit 0 is not held.* keep_input=True, keep more"):
        run.backward(grad)
    run = chain.forward(x, policy=KeepNone(), keep_input=False)
    for ask in (lambda: run.activation(4), lambda: run.activation(0)):
        with pytest.raises(NotHeldError, match="nor that of any unit before it"):
            ask()


def test_a_second_backward_recomputes_again() -> None:
    chain, x, grad = setting("numpy")
    run = chain.forward(x, policy=EveryN(3))
    first, second = run.backward(grad), run.backward(2 * grad)
    assert same(second.input, 2 * first.input)
    assert run.num_recomputed == 8


def test_a_failed_backward_leaves_the_run_usable() -> None:
    chain, x, grad = setting("numpy")
    fail = [True]

    def failing(weight: Any, x: Any, grad_y: Any) -> Any:
        if fail and x.shape == (7,):
            raise ZeroDivisionError("once")
        return backward(weight, x, grad_y)

    chain = Chain.from_layers(numpy_layers(), forward, failing)
    run = chain.forward(x)
    with pytest.raises(ZeroDivisionError, match="once"):
        run.backward(grad)
    fail.clear()
    check_same(run, setting("numpy")[0].forward(x, policy=KeepAll()).backward(grad), grad)


def test_errors_in_steps_pass_and_name_the_step() -> None:
    def dividing(x: Any) -> Any:
        return np.array(1 // int(x[0]))

    chain = Chain([Step(lambda x: x * 0), Step(dividing)])
    with pytest.raises(ZeroDivisionError) as caught:
        chain.forward(np.array([4.0]))
    if sys.version_info >= (3, 11):
        assert caught.value.__notes__ == ["Raised in the forward of step 1 (dividing)."]

    chain = Chain([Step(lambda x: x, lambda x, g: {}["no"], name="lookup")])
    with pytest.raises(KeyError) as caught_back:
        chain.forward(np.array([4.0])).backward(np.array([1.0]))
    if sys.version_info >= (3, 11):
        assert caught_back.value.__notes__ == ["Raised in the backward of step 0 (lookup)."]


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (
            Step(lambda x: x, name="plain"),
            r"There is no backward for step 1 \(plain\). Give one: Step\(forward",
        ),
        (Step(lambda x: x, lambda x, g: (g, 1, 2), "trio"), r"step 1 \(trio\) returned 3 values"),
        (Step(lambda x: x, lambda x, g: None, "none"), r"step 1 \(none\) must give .*: got NoneType"),
        (
            Step(lambda x: x, lambda x, g: g[:1], "cut"),
            r"step 1 \(cut\) gave a gradient of shape \(1,\) for an inp",
        ),
    ],
)
def test_bad_backwards_are_named(step: Step, message: str) -> None:
    good = Step(lambda x: x + 1, lambda x, g: g)
    run = Chain([good, step, good]).forward(np.zeros(2))
    with pytest.raises(ChainError, match=message):
        run.backward(np.ones(2))


def test_bad_forwards_are_named() -> None:
    with pytest.raises(ChainError, match=r"forward of step 0 \(list\) must return an array: got list"):
        Chain([Step(list)]).forward(np.zeros(2))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Chain([]), "A chain needs at least one step"),
        (lambda: Chain([abs]), "Step 0 is a builtin_function_or_method. Wrap it: Step"),  # type: ignore[list-item]
        (lambda: Step("x"), "A step's forward must be a function; got str"),  # type: ignore[arg-type]
        (lambda: Step(abs, 3), "A step's backward must be a function; got int"),  # type: ignore[arg-type]
        (lambda: Chain([Step(abs)]).forward([1.0]), "The chain's input must be an array: got list"),
        (lambda: Chain([Step(abs)]).forward(np.ones(1), policy="all"), "'all' is no policy"),  # type: ignore[arg-type]
        (
            lambda: Chain([Step(abs)]).forward(np.ones(2)).backward(1.0),
            "gradient of the output must be an array",
        ),
        (
            lambda: Chain([Step(abs)]).forward(np.ones(2)).backward(np.ones(3)),
            r"gradient of the output has shape \(3,\); the output has shape \(2,\)",
        ),
    ],
)
def test_misuse_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ChainError, match=message):
        make()


def test_policies_and_stores_that_do_not_suit_the_chain() -> None:
    chain, x, _ = setting("numpy")
    with pytest.raises(PolicyError, match="decides by cost"):
        chain.forward(x, policy=Selective())
    with pytest.raises(PolicyError, match="2 costs were given for 7 units"):
        chain.forward(x, costs=[1.0, 2.0])
    with pytest.raises(UnitRangeError, match="made for 5 units"):
        chain.forward(x, store=ActivationStore(num_units=5))


def test_costs_reach_the_store() -> None:
    chain, x, _ = setting("numpy")
    store = ActivationStore()
    chain.forward(x, policy=EveryN(2), store=store, costs=COSTS)
    assert [store.info(unit).cost for unit in store.held_units()] == [7.0, 4.0, 11.0, 3.0]


def test_a_second_forward_into_a_store_counts_nothing_twice() -> None:
    chain, x, _ = setting("numpy")
    store = ActivationStore()
    for _ in range(2):
        chain.forward(x, policy=EveryN(3), store=store)
        # Inputs of 3, 5, 4, 7, 2, 6, 3 doubles; held are those of units 0, 3 and 6.
        assert (store.num_bytes, store.stats().saved_bytes) == (8 * 13, 8 * 17)


# Parts of a chain over one store


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize(
    "policy", [EveryN(2), EveryN(3), Selective(3), KeepNone(), Segments([(1, 3), (5, 6)])]
)
def test_a_forward_in_parts_holds_what_one_forward_holds(kind: str, policy: Policy) -> None:
    chain, x, grad = setting(kind)
    stores = ActivationStore(num_units=NUM_UNITS), ActivationStore(num_units=NUM_UNITS)
    whole = chain.forward(x, policy=policy, store=stores[0], costs=COSTS)
    runs, start = [], 0
    for end in (3, 4, NUM_UNITS):
        given = {"policy": policy, "store": stores[1], "costs": COSTS[start:end], "first_unit": start}
        runs.append(Chain(chain.steps[start:end]).forward(runs[-1].output if runs else x, **given))
        start = end
    assert stores[1].stats() == stores[0].stats()
    assert sum((run.held_units() for run in runs), ()) == whole.held_units() == stores[1].held_units()
    assert (runs[1].activation(3) == whole.activation(3)).all()
    expected, parameters = whole.backward(grad), ()
    for run in reversed(runs):
        gradients = run.backward(grad)
        grad, parameters = gradients.input, (*gradients.parameters, *parameters)
    assert (grad == expected.input).all()
    assert all((one == other).all() for one, other in zip(parameters, expected.parameters, strict=True))


def test_a_part_counts_from_its_first_unit() -> None:
    chain, x, _ = setting("numpy")
    run = chain.forward(x, policy=EveryN(4), first_unit=3)
    assert run.held_units() == (4, 8)
    assert run.store.num_units == 10
    assert chain.forward(x, policy=EveryN(4), first_unit=np.int64(3)).held_units() == (4, 8)
    with pytest.raises(UnitRangeError, match="Unit 2 is out of range: the chain has 7 units, counted from 3"):
        run.activation(2)
    with pytest.raises(PolicyError, match="cannot decide about one as it comes"):
        chain.forward(x, policy=UniformSegments(2), first_unit=3)
    with pytest.raises(ChainError, match="There are 2 costs for 7 steps"):
        chain.forward(x, policy=Selective(), costs=[1, 2], first_unit=3)
    for bad in (-1, 1.5, True, "3"):
        with pytest.raises(ChainError, match="first_unit must be a whole number, 0 or more"):
            chain.forward(x, first_unit=bad)
    with pytest.raises(ChainError, match=r"step 4 \("):
        Chain([Step(lambda x: x), Step(lambda x: None)]).forward(x, first_unit=3)


def test_a_run_whose_entries_were_replaced_says_so() -> None:
    chain, x, grad = setting("numpy")
    store = ActivationStore()
    first = chain.forward(x, policy=EveryN(3), store=store, keep_input=False)
    second = chain.forward(x, policy=EveryN(3), store=store, keep_input=False)
    assert (first.held_units(), second.held_units()) == ((), (0, 3, 6))
    with pytest.raises(
        NotHeldError, match=r"it was replaced by 3\..*share it, number their units .*\(first_unit=…\)"
    ):
        first.backward(grad)
    third = chain.forward(x, policy=EveryN(3), store=store, keep_input=False, first_unit=9)
    second.backward(grad)
    third.backward(grad)


def test_steps_are_named_by_a_policy() -> None:
    steps = [Step(lambda x: x + 1, lambda x, grad: grad, name) for name in ("a", "b", "a", "c")]
    assert Chain(steps).forward(np.zeros(2), policy=KeepUnits(["a"])).held_units() == (0, 2)
    assert Chain([*steps, Step(abs)]).forward(np.zeros(2), policy=KeepUnits("abs")).held_units() == (4,)


@pytest.mark.parametrize("units", [["s1", "s4"], [1, 4], [1, "s4"]])
def test_a_policy_names_steps_of_several_parts(units: list[int | str]) -> None:
    chain = Chain([Step(lambda x: x + 1, lambda x, grad: grad, f"s{unit}") for unit in range(6)])
    store, x = ActivationStore(), np.zeros(2)
    for start in (0, 3):
        part = Chain(chain.steps[start : start + 3])
        x = part.forward(x, policy=KeepUnits(units), store=store, first_unit=start).output
    assert store.held_units() == chain.forward(np.zeros(2), policy=KeepUnits(units)).held_units() == (1, 4)


def test_runs_and_chains_print_well() -> None:
    chain = Chain([Step(abs), Step(abs, name="b")] * 3)
    run = chain.forward(np.ones((2, 3)), policy=EveryN(4), first_unit=1)
    assert repr(chain) == "<Chain of 6: step 0 (abs), step 1 (b), …, step 5 (b)>"
    assert repr(Chain([Step(abs)], enabled=False)) == "<Chain of 1: step 0 (abs), not enabled>"
    run.activation(3)
    assert repr(run) == "<Run of 6 units, counted from 1: output of shape [2, 3], holds (4,), 2 run again>"
