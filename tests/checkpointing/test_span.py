"""A span: several calls, forgotten and replayed together."""

from __future__ import annotations

import contextlib
import random
import re
import weakref
from collections import Counter, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import models
import pytest
import torch
import torch.nn.functional as F
from spans import caller, nested
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as non_reentrant

import recoup
from recoup import Checkpoint, checkpoint
from recoup.checkpointing import Group, Span, segment
from recoup.errors import CheckpointError, InputChangedError, ReplayMismatchError
from recoup.measuring import MemoryTracker

KIB = 1024
OPTIONS = [Checkpoint(), Checkpoint(early_stop=False), Checkpoint(check="values"), Checkpoint(check="none")]
IDS = ["default", "no early stop", "values", "no check"]


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape or (256,), requires_grad=True)  # 1 KiB


class Counted:
    """Functions that count how often they run; the last operation of each saves its result."""

    def __init__(self, num_functions: int) -> None:
        self.calls: Counter[int] = Counter()
        self.order: list[int] = []
        self.fns = [self._make(index) for index in range(num_functions)]

    def _make(self, index: int) -> Callable[[Tensor], Tensor]:
        def fn(x: Tensor) -> Tensor:
            self.calls[index] += 1
            self.order.append(index)
            return (x * (0.5 + index)).sin().tanh()

        return fn

    def counts(self) -> list[int]:
        return [self.calls[index] for index in range(len(self.fns))]


def gradients(fns: list[Any], x: Tensor, call: Callable[..., Any]) -> Tensor:
    y = x
    for fn in fns:
        y = call(fn, y)
    (grad,) = torch.autograd.grad(y.square().sum(), x)
    return grad


@pytest.mark.parametrize("options", OPTIONS, ids=IDS)
@pytest.mark.parametrize("num_calls", [1, 2, 3, 5])
def test_chains_are_bit_equal_and_run_twice(num_calls: int, options: Checkpoint) -> None:
    counted, x = Counted(num_calls), leaf()
    expected = gradients(counted.fns, x, models.plainly)
    counted.calls.clear()
    counted.order.clear()
    assert torch.equal(gradients(counted.fns, x, caller(Span(options))), expected)
    assert counted.order == [*range(num_calls), *range(num_calls)]


class PerForward(nn.Module):
    """Gives a model a new span in every forward."""

    def __init__(self, model: nn.Module, options: Checkpoint, groups: Any = ()) -> None:
        super().__init__()
        self.model = model
        self.options = options
        self.groups = groups

    def forward(self, *args: Tensor) -> Tensor:
        span = Span(self.options, self.groups)
        self.model.call = caller(span)
        return self.model(*args)


def assert_trains_alike(kind: type[nn.Module], options: Checkpoint, groups: Any = ()) -> None:
    plain, other = models.make_pair(kind, None)
    sample = kind.sample()
    trained = models.train(PerForward(other, options, groups), sample)
    trained = {name.replace("model.", ""): value for name, value in trained.items()}
    models.assert_same(models.train(plain, sample), trained)


@pytest.mark.parametrize("options", OPTIONS, ids=IDS)
@pytest.mark.parametrize("kind", models.ALL, ids=lambda kind: kind.__name__)
def test_training_is_bit_equal(kind: type[nn.Module], options: Checkpoint) -> None:
    assert_trains_alike(kind, options)


@pytest.mark.parametrize("levels", [[1], [2], [2, 1], [3, 2, 1]], ids=str)
@pytest.mark.parametrize("kind", models.ALL, ids=lambda kind: kind.__name__)
def test_nested_training_is_bit_equal(kind: type[nn.Module], levels: list[int]) -> None:
    assert_trains_alike(kind, Checkpoint(), nested(levels))


@pytest.mark.parametrize(
    ("levels", "counts"),
    [
        ([], [2, 2, 2, 2]),
        # The outer replay stops where the second inner span begins; then each inner span replays.
        ([2], [3, 3, 2, 2]),
        ([2, 1], [4, 3, 3, 2]),
        ([4, 2], [3, 3, 2, 2]),
        # Eight, in halves three times: what binomial checkpointing by halves costs.
        ([4, 2], [4, 4, 3, 3, 3, 3, 2, 2]),
        ([4, 2, 1], [5, 4, 4, 3, 4, 3, 3, 2]),
    ],
    ids=str,
)
def test_nested_spans_run_each_function_as_often_as_they_must(levels: list[int], counts: list[int]) -> None:
    counted, x = Counted(len(counts)), leaf()
    expected = gradients(counted.fns, x, models.plainly)
    counted.calls.clear()
    span = Span(Checkpoint(), nested(levels))
    assert torch.equal(gradients(counted.fns, x, caller(span)), expected)
    assert counted.counts() == counts


def test_ten_deep() -> None:
    counted, x = Counted(6), leaf()
    expected = gradients(counted.fns, x, models.plainly)
    counted.calls.clear()
    span = Span(Checkpoint(), nested([6, 6, 6, 3, 3, 3, 3, 1, 1]))
    assert torch.equal(gradients(counted.fns, x * 1, caller(span)), expected)
    assert counted.counts() == [4, 4, 3, 3, 3, 2]  # spans of equal length in each other cost nothing


def test_nesting_costs_nothing_but_the_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the floor of a long chain groups lie in each other as deep as it is long."""
    num_calls, made = 40, []
    counted, x = Counted(num_calls), leaf()
    expected = gradients(counted.fns, x, models.plainly)
    counted.calls.clear()
    original = segment.Frame.__init__
    monkeypatch.setattr(
        segment.Frame, "__init__", lambda self, *args: (made.append(1), original(self, *args))[1]
    )
    groups: tuple[Group, ...] = ()
    for last in range(num_calls - 1):
        groups = (Group(0, last, groups),)
    assert torch.equal(gradients(counted.fns, x, caller(Span(Checkpoint(), groups))), expected)
    assert counted.counts() == [num_calls + 1 - index for index in range(num_calls)]
    assert len(made) == num_calls


@pytest.mark.usefixtures("no_gc")
def test_a_replay_holds_where_groups_start() -> None:
    x, seen, memory = leaf(), [], MemoryTracker()

    def fn(x: Tensor) -> Tensor:
        if recoup.is_replaying():
            seen.append(memory.current_bytes // KIB)
        return x.neg().sin().neg()

    with memory:
        span, y = Span(Checkpoint(), nested([2])), x * 1
        for _ in range(6):
            y = span.call(fn, (y,), {})
        loss = y.sum()
        del y, span
        loss.backward()
    # The input and the gradient on its way; the output of each call; what starts the second group, and the third.
    sweeps = [2, 2 + 1, 2 + 1, 2 + 1 + 1]
    # In its replay each group is given its start, and holds what the first call's sine saved beside its output.
    third, second, first = [2 + 2, 2 + 1 + 2], [2 + 1, 2 + 2], [2, 2 + 2]
    assert seen == sweeps + third + second + first


@pytest.mark.parametrize(
    ("groups", "match"),
    [
        ([(0, 2), (2, 3)], r"Groups follow each other; got calls 0 to 2, then 2 to 3\."),
        ([(3, 2)], r"from first to last, numbered from 0; got 3 to 2\."),
        ([(-1, 2)], r"got -1 to 2\."),
    ],
)
def test_groups_that_are_none(groups: list[tuple[int, int]], match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        Span(Checkpoint(), [Group(*group) for group in groups])


def test_a_group_with_calls_outside_of_the_one_around_it() -> None:
    with pytest.raises(CheckpointError, match=r"Groups inside calls 1 to 3 have calls outside of these\."):
        Group(1, 3, (Group(0, 2),))


# What is fed and what is held


Pair = namedtuple("Pair", "left right")


@dataclass
class State:
    hidden: Tensor
    history: list[Tensor]


def in_pair(x: Any) -> Pair:
    return Pair(x.sin(), x.cos().exp())


def swap(pair: Pair) -> dict[str, Any]:
    return {"right": pair.left.exp(), "rest": [pair.right.sin(), pair.left * pair.right], "tag": "t"}


def to_state(table: dict[str, Any], *, scale: float) -> State:
    return State(table["right"] * scale, [*table["rest"], table["right"].tanh()])


def join(state: State, right: Tensor) -> Tensor:
    return (state.hidden * state.history[0]).sin() + state.history[2].exp() * right


def run_containers(x: Tensor, call: Callable[..., Any]) -> Tensor:
    pair = call(in_pair, x)
    state = call(to_state, call(swap, pair), scale=0.7)
    return call(join, state, pair.right)  # past two calls


@pytest.mark.parametrize("levels", [[], [2], [1], [2, 1]], ids=str)
def test_containers_flow_from_call_to_call(levels: list[int]) -> None:
    x = leaf()
    (expected,) = torch.autograd.grad(run_containers(x, models.plainly).sum(), x)
    with MemoryTracker() as memory:
        span = Span(Checkpoint(), nested(levels))
        y = run_containers(x, caller(span))
        assert memory.current_bytes == 1 * KIB  # y
        (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad, expected)


def gate(x: Tensor, memory: Tensor, *, mask: Tensor | None = None) -> Tensor:
    x = (x * memory.sin()).tanh()
    return x if mask is None else x.masked_fill(mask, 0.5)


@pytest.mark.parametrize("levels", [[], [1], [2], [2, 1]], ids=str)
def test_tensors_from_outside_on_later_calls(levels: list[int]) -> None:
    mask = torch.arange(256) % 3 == 0
    x, memory = leaf(), leaf()

    def run(call: Callable[..., Any]) -> tuple[Tensor, ...]:
        source = memory.exp()
        y = call(gate, x * 1, source)
        y = call(gate, y * 2, memory=source, mask=mask)  # y * 2 is made outside
        y = call(gate, y, x, mask=mask)
        return torch.autograd.grad(y.sum(), (x, memory))

    expected = run(models.plainly)
    found = run(caller(Span(Checkpoint(), nested(levels))))
    assert all(map(torch.equal, found, expected))


def test_an_output_changed_in_between_is_held_as_it_was() -> None:
    x = leaf()

    def run(call: Callable[..., Any]) -> Tensor:
        y = call(lambda x: x.sin() * 2, x)
        y.mul_(3)
        y = call(torch.tanh, y)
        (grad,) = torch.autograd.grad(y.sum(), x)
        return grad

    assert torch.equal(run(caller(Span(Checkpoint()))), run(models.plainly))


def test_an_output_that_is_made_to_need_a_gradient_in_between() -> None:
    def run(call: Callable[..., Any]) -> Tensor:
        y = call(torch.cos, torch.arange(4.0)).requires_grad_()
        call(torch.exp, call(torch.sin, y)).sum().backward()
        assert y.grad is not None
        return y.grad

    assert torch.equal(run(caller(Span(Checkpoint()))), run(models.plainly))


@pytest.mark.parametrize("levels", [[], [3], [3, 2], [1], [4, 1]], ids=str)
def test_calls_that_change_what_they_are_fed(levels: list[int]) -> None:
    """Convolution, then ReLU in place: for a checkpoint of the ReLU alone an error, for a span everyday life.

    Also where a group starts with it: what it was given is lost, so the replay goes back to the first call.
    """
    layers = [nn.Conv2d(2, 2, 3), nn.ReLU(inplace=True), nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3)]
    layers += [nn.ReLU(inplace=True), nn.Flatten()]
    x = leaf(2, 2, 6, 6)
    expected = gradients(layers, x, models.plainly)
    span = Span(Checkpoint(), nested(levels))
    assert torch.equal(gradients(layers, x, caller(span)), expected)


def test_a_call_that_returns_what_it_was_given() -> None:
    x = leaf()

    def run(call: Callable[..., Any]) -> Tensor:
        y, mask = call(lambda x, mask: (x.sin(), mask), x.exp(), torch.ones(256))
        y, mask = call(lambda x, mask: (x * mask, mask), y, mask)
        (grad,) = torch.autograd.grad(call(torch.exp, y).sum(), x)
        return grad

    assert torch.equal(run(caller(Span(Checkpoint()))), run(models.plainly))


# What groups start from


def test_a_dropped_call_at_the_end_of_a_group() -> None:
    x = leaf()
    call = caller(Span(Checkpoint(), (Group(1, 2),)))
    a, b = call(lambda x: (x.sin(), x.cos()), x)
    c = call(torch.exp, a)
    call(torch.mul, c, b)
    c.sum().backward()
    assert torch.equal(x.grad, x.sin().exp() * x.cos())


@pytest.mark.parametrize("check", ["metadata", "values"])
@pytest.mark.parametrize(
    "groups", [(Group(1, 2),), (Group(1, 1), Group(2, 2)), (Group(0, 2, (Group(1, 2),)),)]
)
def test_statistics_that_change_without_a_version(groups: tuple[Group, ...], check: Any) -> None:
    x = leaf(4, 3)

    def run(call: Callable[..., Any]) -> Tensor:
        h, mean, variance = call(lambda x: (x * 2, torch.zeros(3), torch.ones(3)), x)
        h, mean = call(lambda h, m, v: (F.batch_norm(h, m, v, training=True), m), h, mean, variance)
        h = call(lambda h, m: (h * m.sum()).sin(), h, mean)
        (grad,) = torch.autograd.grad(call(torch.exp, h).sum(), x)
        return grad

    assert torch.equal(run(caller(Span(Checkpoint(check=check), groups))), run(models.plainly))


@pytest.mark.usefixtures("no_gc")
def test_a_group_that_nobody_wants_holds_nothing() -> None:
    memory, seen, x = MemoryTracker(), [], leaf()

    def frozen(x: Tensor) -> Tensor:
        return torch.ones(20, 256)

    def less(x: Tensor) -> Tensor:
        return x[0] * 2

    def trained(y: Tensor, w: Tensor) -> Tensor:
        if recoup.is_replaying():
            seen.append(memory.current_bytes // KIB)
        return (y * w).sin()

    with memory:
        call = caller(Span(Checkpoint(), (Group(1, 1),)))
        y = call(less, call(frozen, torch.ones(1)))
        for _ in range(2):
            y = call(trained, y, x)
        loss = y.sum()
        del y, call
        loss.backward()
    assert max(seen) < 20


def test_a_start_changed_in_place_behind_hooks_that_give_once() -> None:
    x = leaf()

    def run(call: Callable[..., Any]) -> Tensor:
        y = call(lambda a: a * 2, x)
        y = call(lambda a: a.mul_(3).sin(), y)
        y = call(lambda a, b: (a * b).exp(), y, x * 1)
        return call(torch.sin, y)

    (expected,) = torch.autograd.grad(run(models.plainly).sum(), x)
    for groups in ((Group(1, 2),), (Group(1, 3, (Group(2, 3),)),)):
        for outer in (checkpoint, partial(non_reentrant, use_reentrant=False)):
            y = outer(lambda x, groups=groups: run(caller(Span(Checkpoint(), groups))), x)
            (grad,) = torch.autograd.grad(y.sum(), x)
            assert torch.equal(grad, expected)


def test_a_start_that_only_the_replay_changes() -> None:
    """The forward could not tell, so the replay goes back to the first call."""

    def clears(a: Tensor) -> Tensor:
        doubled = a * 2
        if recoup.is_replaying():
            a.zero_()
        return doubled

    x = leaf()
    call = caller(Span(Checkpoint(), (Group(1, 2),)))
    y = call(torch.tanh, call(torch.sin, call(clears, call(lambda x: x + 1, x))))
    (grad,) = torch.autograd.grad(y.sum(), x)
    (expected,) = torch.autograd.grad(((x + 1) * 2).sin().tanh().sum(), x)
    assert torch.equal(grad, expected)


@pytest.mark.usefixtures("no_gc")
def test_a_replay_that_raises_leaves_no_starts() -> None:
    def fn(x: Tensor, is_last: bool) -> Tensor:
        if is_last and recoup.is_replaying():
            raise ValueError("in the replay")
        return x.cos()

    with MemoryTracker() as memory:
        call, y = caller(Span(Checkpoint(), nested([2]))), leaf() * 1
        for index in range(6):
            y = call(fn, y, index == 5)
        loss = y.sum()
        del y
        before = memory.current_bytes
        with contextlib.suppress(ValueError):
            loss.backward(retain_graph=True)
        assert memory.current_bytes == before


def test_a_parameter_that_a_call_returns_stays_one() -> None:
    weight, x = nn.Parameter(torch.randn(256)), leaf()

    def use(x: Tensor, w: Tensor) -> Tensor:
        return (x * w).sin() if isinstance(w, nn.Parameter) else x.exp()

    def run(call: Callable[..., Any]) -> tuple[Tensor, ...]:
        w = call(lambda x: weight, x)
        y = call(use, call(use, x, w), w)
        return torch.autograd.grad(call(torch.exp, y).sum(), (x, weight))

    found = run(caller(Span(Checkpoint(), (Group(1, 2),))))
    assert all(map(torch.equal, found, run(models.plainly)))


# Random numbers, buffers, surroundings


def test_dropout_is_bit_equal_and_the_generator_does_not_notice() -> None:
    layers = [nn.Dropout(0.4), nn.Linear(256, 256), nn.Dropout(0.2), nn.Tanh(), nn.Dropout(0.3)]
    x, states, found = leaf(), [], []
    for call in (models.plainly, caller(Span(Checkpoint())), caller(Span(Checkpoint(), nested([3, 1])))):
        torch.manual_seed(1)
        found.append(gradients(layers, x, call))
        states.append(torch.get_rng_state())
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert torch.equal(states[0], states[1])
    assert torch.equal(states[0], states[2])


def test_batch_norm_counts_once_though_it_is_called_twice() -> None:
    norm, x = nn.BatchNorm1d(5), leaf(7, 5)
    found = []
    for call in (models.plainly, caller(Span(Checkpoint())), caller(Span(Checkpoint(), nested([2, 1])))):
        norm.reset_running_stats()
        fns = [norm, torch.sin, norm, torch.exp]
        found.append((gradients(fns, x, call), norm.running_mean.clone(), norm.num_batches_tracked.clone()))
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))
    assert int(norm.num_batches_tracked) == 2


def test_each_call_has_its_own_surroundings() -> None:
    """Autocast around one call only, a loop variable in closures, a module that is put in eval mode in between."""
    x, dropout = leaf(4, 4), nn.Dropout(0.5)
    weights = [leaf(4, 4) for _ in range(3)]

    def run(call: Callable[..., Any]) -> Tensor:
        torch.manual_seed(2)
        dropout.train()
        y = x
        for weight in weights:
            with torch.autocast("cpu", enabled=weight is weights[1]):
                y = call(lambda y: dropout(torch.tanh(y @ weight).float()), y)
            dropout.eval()
        (grad,) = torch.autograd.grad(y.sum(), x)
        return grad

    assert torch.equal(run(caller(Span(Checkpoint()))), run(models.plainly))


# Memory


@pytest.mark.parametrize("num_calls", [1, 3, 6])
@pytest.mark.parametrize("levels", [[], [2], [2, 1]], ids=str)
@pytest.mark.usefixtures("no_gc")
def test_the_first_input_and_the_last_output_are_held(num_calls: int, levels: list[int]) -> None:
    x, fns = leaf(), Counted(num_calls).fns
    with MemoryTracker() as memory:
        span = Span(Checkpoint(), nested(levels))
        y = x * 1
        for fn in fns:
            y = span.call(fn, (y,), {})
        assert memory.current_bytes == 2 * KIB
        span.close()
        y.sum().backward()
        del y
        assert memory.current_bytes == 1 * KIB  # x.grad


@pytest.mark.usefixtures("no_gc")
def test_the_replay_holds_what_is_wanted_and_no_more() -> None:
    """Each call saves one tensor; what the replay returns is dropped once it is read."""
    x, seen = leaf(), []
    memory = MemoryTracker()

    def fn(x: Tensor) -> Tensor:
        if recoup.is_replaying():
            seen.append(memory.current_bytes // KIB)
        return x.neg().neg().sin().neg()

    with memory:
        span, y = Span(Checkpoint()), x * 1
        for _ in range(4):
            y = span.call(fn, (y,), {})
        loss = y.sum()
        del y, span
        memory_before = memory.current_bytes
        loss.backward()
        assert memory_before == 1 * KIB + 4  # the first input and the loss
    # The input and the gradient on its way; for each call before what its sine saved; and what the latest returned.
    assert seen == [2, 2 + 1 + 1, 2 + 2 + 1, 2 + 3 + 1]


@pytest.mark.parametrize("options", OPTIONS, ids=IDS)
@pytest.mark.parametrize("levels", [[], [2], [3, 2, 1]], ids=str)
@pytest.mark.usefixtures("no_gc")
def test_nothing_leaks(levels: list[int], options: Checkpoint) -> None:
    fns = Counted(5).fns
    with MemoryTracker() as memory:
        for backward in ("none", "one", "retained", "partial"):
            x = leaf()
            span, y = Span(options, nested(levels)), x * 1
            for fn in fns:
                y = span.call(fn, (y,), {})
                y = y * 1  # from outside, with a history that contains the span
                if fn is fns[2]:
                    middle = y
            if backward == "partial":
                torch.autograd.grad(middle.sum(), x)
            elif backward != "none":
                y.sum().backward(retain_graph=backward == "retained")
            del x, y, span, middle
            assert memory.current_bytes == 0, backward


@pytest.mark.usefixtures("no_gc")
def test_values_go_when_the_backward_ends() -> None:
    x, fns = leaf(), Counted(3).fns
    with MemoryTracker() as memory:
        call, y = caller(Span(Checkpoint())), x * 1
        outputs = [y := call(fn, y) for fn in fns]
        held = memory.current_bytes
        assert held == 4 * KIB
        for _ in range(2):
            (grad,) = torch.autograd.grad(outputs[1].sum(), x, retain_graph=True)
            del grad
            assert memory.current_bytes == held


@pytest.mark.usefixtures("no_gc")
def test_outputs_are_not_kept_alive() -> None:
    span, x = Span(Checkpoint()), leaf()
    y = span.call(torch.sin, (x,), {})
    reference = weakref.ref(y)
    z = span.call(lambda y: y * 2, (y,), {})
    del y
    assert reference() is None
    del z


@pytest.mark.usefixtures("no_gc")
def test_a_closed_span_leaves_everything_to_the_graph() -> None:
    with MemoryTracker() as memory:
        span = Span(Checkpoint())
        y = span.call(torch.sin, (leaf() * 1,), {})
        del y
        assert memory.current_bytes == 1 * KIB  # a later call might be fed with y
        span.close()
        assert memory.current_bytes == 0
    with pytest.raises(CheckpointError, match=r"closed before this call of gate .*Make a new one"):
        span.call(gate, (leaf(), leaf()), {})


# Several backwards


def test_a_graph_that_is_retained() -> None:
    counted, x = Counted(3), leaf()
    expected = gradients(counted.fns, x, models.plainly)
    counted.calls.clear()
    call, y = caller(Span(Checkpoint())), x * 1
    for fn in counted.fns:
        y = call(fn, y)
    loss = y.square().sum()
    for num_backwards in (1, 2, 3):
        (grad,) = torch.autograd.grad(loss, x, retain_graph=num_backwards < 3)
        assert torch.equal(grad, expected)
        assert counted.counts() == [1 + num_backwards] * 3


def test_only_what_is_wanted_is_replayed() -> None:
    counted, x = Counted(4), leaf()
    call, y = caller(Span(Checkpoint())), x * 1
    outputs = [y := call(fn, y) for fn in counted.fns]
    (expected,) = torch.autograd.grad(counted.fns[1](counted.fns[0](x * 1)).sum(), x)
    loss = outputs[1].sum()
    del outputs, y  # nobody can ask for the later calls' gradients any more
    counted.calls.clear()
    (grad,) = torch.autograd.grad(loss, x)
    assert torch.equal(grad, expected)
    assert counted.counts() == [1, 1, 0, 0]


def test_the_replay_stops_when_the_last_needed_tensor_exists() -> None:
    order: list[str] = []

    def fn(name: str, x: Tensor) -> Tensor:
        order.append(name)
        x = x.sin()
        order.append(f"end of {name}")
        return x

    for early_stop in (True, False):
        order.clear()
        call, y = caller(Span(Checkpoint(early_stop=early_stop))), leaf() * 1
        for name in "ab":
            y = call(fn, name, y)
        order.clear()
        y.sum().backward()
        assert order == ["a", "end of a", "b", "end of b"][: 3 if early_stop else 4]


def test_second_order() -> None:
    fns, x = Counted(3).fns, leaf(5)

    def run(call: Callable[..., Any]) -> Tensor:
        y = x * 1
        for fn in fns:
            y = call(fn, y)
        (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.exp().sum(), x)
        return second

    expected = run(models.plainly)
    assert torch.equal(run(caller(Span(Checkpoint()))), expected)
    assert torch.equal(run(caller(Span(Checkpoint(), nested([2, 1])))), expected)


def test_a_backward_while_the_span_goes_on() -> None:
    call, x = caller(Span(Checkpoint())), leaf()
    y = call(torch.sin, x * 1)
    (first,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    z = call(torch.exp, y)
    (second,) = torch.autograd.grad(z.sum(), x)
    assert torch.equal(first, x.cos())
    assert torch.equal(second, x.sin().exp() * x.cos())


def test_a_gradient_inside_a_call() -> None:
    def penalty(y: Tensor) -> Tensor:
        y = y * 1
        (grad,) = torch.autograd.grad(y.sin().exp().sum(), y, create_graph=True)
        return grad

    x = leaf()

    def run(call: Callable[..., Any]) -> Tensor:
        y = call(penalty, call(penalty, call(torch.cos, x * 1)))
        (grad,) = torch.autograd.grad(call(torch.exp, y).sum(), x)
        return grad

    for levels in ([], [1], [2], [3, 2, 1]):
        assert torch.equal(run(caller(Span(Checkpoint(), nested(levels)))), run(models.plainly))


def test_a_gradient_inside_a_call_in_the_replay_only() -> None:
    def fn(x: Tensor) -> Tensor:
        x = x.sin()
        if recoup.is_replaying():
            torch.autograd.grad(x.exp().sum(), x)
        return x

    call = caller(Span(Checkpoint(), (Group(0, 0),)))
    y = call(torch.exp, call(fn, leaf() * 1))
    with pytest.raises(
        ReplayMismatchError, match=r"fn .*It runs a backward inside, and the forward ran none"
    ):
        y.sum().backward()


# In other surroundings


@pytest.mark.parametrize("levels", [[], [2], [2, 1]], ids=str)
def test_without_grad_mode_it_is_a_plain_call(levels: list[int]) -> None:
    """It counts for nothing: the replay does not make it, so inner spans must not see it in the forward, either."""
    counted, x = Counted(4), leaf()

    def run(call: Callable[..., Any]) -> Tensor:
        y = x * 1
        for fn in counted.fns:
            with torch.no_grad():
                z = call(torch.sin, y)
            assert not z.requires_grad
            y = call(fn, y) * z  # from outside
        (grad,) = torch.autograd.grad(y.sum(), x)
        return grad

    expected = run(models.plainly)
    assert torch.equal(run(caller(Span(Checkpoint(), nested(levels)))), expected)


@pytest.mark.parametrize("outer", [checkpoint, Checkpoint(check="values")], ids=["default", "values"])
def test_a_span_inside_a_checkpoint(outer: Any) -> None:
    fns, x = Counted(3).fns, leaf()

    def run(x: Tensor) -> Tensor:
        call = caller(Span(Checkpoint()))
        for fn in fns:
            x = call(fn, x)
        return x.square()

    with MemoryTracker() as memory:
        y = outer(run, x)
        assert memory.current_bytes // KIB == 1  # y
        (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad, gradients(fns, x, models.plainly))


def test_hooks_around_a_span_are_asked_once_for_each_argument() -> None:
    """A checkpoint around it would replay for every further time."""
    fns, x, mask = Counted(4).fns, leaf(), torch.ones(256)
    packed, asked = [], Counter()

    def pack(tensor: Tensor) -> int:
        packed.append(tensor)
        return len(packed) - 1

    def unpack(number: int) -> Tensor:
        asked[number] += 1
        return packed[number].detach()

    def run(call: Callable[..., Any]) -> Tensor:
        y = x * 1
        for fn in fns:
            y = call(lambda y, mask, fn=fn: fn(y) * mask, y, mask)
        (grad,) = torch.autograd.grad(y.sum(), x)
        return grad

    expected = run(models.plainly)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        assert torch.equal(run(caller(Span(Checkpoint(), nested([2, 1])))), expected)
    assert set(asked.values()) == {1}
    assert len(asked) == 1 + len(fns)


def test_checkpoints_inside_a_span() -> None:
    fns, x = Counted(3).fns, leaf()
    call = caller(Span(Checkpoint()))
    found = gradients([lambda x, fn=fn: checkpoint(fn, checkpoint(torch.sin, x)) for fn in fns], x, call)
    assert torch.equal(found, gradients([lambda x, fn=fn: fn(x.sin()) for fn in fns], x, models.plainly))


def test_under_other_hooks() -> None:
    fns, x = Counted(3).fns, leaf()
    with torch.autograd.graph.save_on_cpu():
        found = gradients(fns, x, caller(Span(Checkpoint())))
    assert torch.equal(found, gradients(fns, x, models.plainly))


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_compiled_without_a_graph_break() -> None:
    torch._dynamo.reset()

    def run(x: Tensor) -> Tensor:
        call = Span(Checkpoint()).call
        for fn in (torch.sin, torch.exp, torch.tanh):
            x = call(fn, (x,), {})
        return x.sum()

    x = leaf(5)
    (grad,) = torch.autograd.grad(torch.compile(run, backend="aot_eager", fullgraph=True)(x), x)
    (expected,) = torch.autograd.grad(x.sin().exp().tanh().sum(), x)
    torch.testing.assert_close(grad, expected)
    torch._dynamo.reset()


def test_describe_shows_the_calls() -> None:
    call = caller(Span(Checkpoint()))
    y = call(F.relu, call(F.gelu, torch.ones(2, 3, requires_grad=True) * 2))
    assert re.sub(r":\d+\)", ":LINE)", recoup.describe(y)) == (
        "<span of 2 calls:\n"
        "  <checkpoint of gelu: holds [float32[2, 3]], gives [float32[2, 3]], 1 saved tensor to replay, no RNG state>\n"
        "  <checkpoint of relu (functional.py:LINE): holds [], gives [float32[2, 3]], 1 saved tensor to replay, no RNG"
        " state>>"
    )


# Errors


def changed(x: Tensor) -> None:
    with torch.no_grad():
        x.add_(1)


def test_an_argument_from_outside_changed_in_place() -> None:
    call, mask = caller(Span(Checkpoint())), torch.ones(256)
    y = call(gate, call(gate, leaf() * 1, leaf()), memory={"deep": mask}["deep"])
    changed(mask)
    with pytest.raises(InputChangedError, match=r"gate .*: argument 'memory' was changed in place between"):
        y.sum().backward()


def test_the_first_argument_changed_in_place() -> None:
    call, x = caller(Span(Checkpoint())), leaf() * 1
    y = call(torch.tanh, call(in_pair, x).right)
    changed(x)
    with pytest.raises(InputChangedError, match=r"in_pair .*: argument 'x' was changed in place between"):
        y.sum().backward()


def test_a_later_call_that_changes_an_argument_from_outside() -> None:
    def in_place(x: Tensor, total: Tensor) -> Tensor:
        return x * total.add_(1)

    call = caller(Span(Checkpoint()))
    y = call(in_place, call(torch.sin, leaf() * 1), torch.ones(256))
    with pytest.raises(
        InputChangedError, match=r"in_place .*'total' was changed in place by the function itself"
    ):
        y.sum().backward()


def test_an_argument_changed_after_calls_that_are_not_wanted_does_not_matter() -> None:
    call, x, mask = caller(Span(Checkpoint())), leaf(), torch.ones(256)
    y = call(torch.sin, x * 1)
    call(torch.mul, y, mask)
    changed(mask)
    y.sum().backward()
    assert torch.equal(x.grad, x.cos())


def test_a_saved_tensor_changed_by_the_next_call() -> None:
    """As in the plain run, and it names the call that saved it."""

    def saves_its_result(x: Tensor) -> Tensor:
        return x.exp()

    call = caller(Span(Checkpoint()))
    y = call(torch.relu_, call(saves_its_result, leaf() * 1))
    with pytest.raises(InputChangedError, match=r"saves_its_result .*saved tensor 1 of 1 is needed"):
        y.sum().backward()


def test_a_parameter_stepped_in_between() -> None:
    layers = [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()]
    call, y = caller(Span(Checkpoint())), leaf(2, 4)
    for layer in layers:
        y = call(layer, y)
    changed(layers[0].bias)
    with pytest.raises(InputChangedError, match=r"module Linear.*parameter 'bias' of Linear was changed"):
        y.sum().backward()


@pytest.mark.parametrize("levels", [[], [2, 1]], ids=str)
def test_values_that_drift(levels: list[int]) -> None:
    def drifts(x: Tensor) -> Tensor:
        return x + random.random()

    options = Checkpoint(check="values")
    span = Span(options, nested(levels))
    y = leaf() * 1
    for fn in (torch.sin, drifts, torch.exp, torch.tanh):
        y = span.call(fn, (y,), {})
    with pytest.raises(ReplayMismatchError, match=r"has other values than in the forward") as caught:
        y.sum().backward()
    if not levels:
        assert "drifts" in str(caught.value)


@pytest.mark.parametrize("check", ["metadata", "values"])
def test_a_call_that_saves_other_shapes(check: Any) -> None:
    def grows(x: Tensor) -> Tensor:
        ones = torch.ones(3 if recoup.is_replaying() else 2, 1)
        return (ones * x.sin()).exp()[0]

    call = caller(Span(Checkpoint(check=check)))
    y = call(torch.exp, call(grows, call(torch.sin, leaf() * 1)))
    match = (
        r"grows \(test_span.py:\d+\).*tensor 2 of 3 was float32\[2, 1\].* is float32\[3, 1\].*test_span.py"
    )
    with pytest.raises(ReplayMismatchError, match=match):
        y.sum().backward()


def test_a_call_that_returns_other_shapes() -> None:
    def shrinks(x: Tensor) -> list[Tensor]:
        return [x, x[: 3 if recoup.is_replaying() else 4]]

    call = caller(Span(Checkpoint()))
    y = call(torch.exp, call(shrinks, call(torch.sin, leaf() * 1))[1])
    match = r"shrinks .*Returned tensor 2, which a later call of the span reads, was float32\[4\].*is float32\[3\]"
    with pytest.raises(ReplayMismatchError, match=match):
        y.sum().backward()


@pytest.mark.parametrize("check", ["metadata", "none"])
def test_a_call_that_returns_too_little(check: Any) -> None:
    def forgets(x: Tensor) -> list[Tensor]:
        return [x] if recoup.is_replaying() else [x, x * 2]

    call = caller(Span(Checkpoint(check=check)))
    y = call(torch.exp, call(forgets, call(torch.sin, leaf() * 1))[1])
    with pytest.raises(ReplayMismatchError, match=r"forgets .*Returned tensor 2.* is missing in the replay"):
        y.sum().backward()


def test_a_call_that_saves_less_in_the_replay_does_not_shift_the_others() -> None:
    """What it leaves out was wanted by nobody; a checkpoint of that call alone takes it, too."""
    seen, x = [], leaf()

    def logs(x: Tensor) -> Tensor:
        x = x.sin()
        if not recoup.is_replaying():
            seen.append(x.exp().norm().item())
        return x

    found = gradients([logs, torch.exp, logs, torch.tanh], x, caller(Span(Checkpoint())))
    assert len(seen) == 2
    assert torch.equal(found, gradients([torch.sin, torch.exp, torch.sin, torch.tanh], x, models.plainly))


# Exceptions


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("levels", [[], [2], [2, 1]], ids=str)
def test_a_call_that_raises_leaves_the_others_right(levels: list[int]) -> None:
    counted, x = Counted(4), leaf()
    expected = gradients(counted.fns, x, models.plainly)

    def fails(x: Tensor) -> Tensor:
        x.sin().exp()
        raise ValueError("out of luck")

    with MemoryTracker() as memory:
        span, y = Span(Checkpoint(), nested(levels)), x * 1
        for index, fn in enumerate(counted.fns):
            if index in (1, 3):
                with contextlib.suppress(ValueError):
                    span.call(fails, (y,), {})
            y = span.call(fn, (y,), {})
        (grad,) = torch.autograd.grad(y.square().sum(), x)
        assert torch.equal(grad, expected)
        del grad, y, span
        assert memory.current_bytes == 0


@pytest.mark.usefixtures("no_gc")
def test_a_replay_that_raises_leaves_no_cycle() -> None:
    def fn(x: Tensor) -> Tensor:
        if recoup.is_replaying():
            raise ValueError("in the replay")
        return x.cos()

    with MemoryTracker() as memory:
        x = leaf()
        call = caller(Span(Checkpoint()))
        loss = call(torch.exp, call(fn, call(torch.sin, x * 1))).sum()
        with contextlib.suppress(ValueError):
            loss.backward()
        del loss, x, call
        assert memory.current_bytes == 0


def test_what_a_failed_call_left_in_the_graph() -> None:
    left, x = [], leaf()

    def fails(x: Tensor) -> Tensor:
        left.append(x.exp())
        raise ValueError

    call = caller(Span(Checkpoint()))
    y = call(torch.sin, x * 1)
    with contextlib.suppress(ValueError):
        call(fails, y)
    (grad,) = torch.autograd.grad(left.pop().sum(), x)
    assert torch.equal(grad, x.sin().exp() * x.cos())


def test_a_call_inside_a_call_of_the_same_span() -> None:
    call = caller(Span(Checkpoint()))
    with pytest.raises(CheckpointError, match=r"sin was called inside another call of the same span"):
        call(lambda x: call(torch.sin, x), leaf())


def test_a_span_from_outside_the_replay() -> None:
    inner = caller(Span(Checkpoint()))
    y = caller(Span(Checkpoint()))(lambda x: inner(torch.sin, x), leaf() * 1)
    with pytest.raises(
        CheckpointError, match=r"A replay calls .*sin in a span from outside.*in the checkpointed"
    ):
        y.sum().backward()


def test_no_function() -> None:
    with pytest.raises(TypeError, match="Got a Tensor as function"):
        Span(Checkpoint()).call(leaf(), (), {})


def test_one_tensor_given_twice_stays_one() -> None:
    attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    x, memory = torch.randn(2, 3, 8, requires_grad=True), torch.randn(2, 4, 8, requires_grad=True)

    def attend(x: Tensor, key: Tensor, value: Tensor) -> Tensor:
        # Which products are saved depends on whether key and value are one object.
        return attention(x, key * 2, key * 2, need_weights=False)[0] if key is value else x * value.sum()

    def nested(x: Tensor, memory: Tensor) -> Tensor:
        return recoup.checkpoint(attend, x, memory, memory)

    def hooked(x: Tensor, memory: Tensor) -> Tensor:
        memory = memory * 1.0
        memory.register_hook(lambda gradient: None)
        span = Span(Checkpoint())
        return span.call(attend, (span.call(attend, (x, memory, memory), {}), memory, memory), {})

    for fn, plain in (
        (nested, lambda: attend(x, memory, memory)),
        (hooked, lambda: _twice(attend, x, memory)),
    ):
        expected = torch.autograd.grad(plain().sum(), [x, memory])
        found = torch.autograd.grad(recoup.checkpoint(fn, x, memory).sum(), [x, memory])
        assert all(map(torch.equal, expected, found))


def _twice(attend: Any, x: Tensor, memory: Tensor) -> Tensor:
    return attend(attend(x, memory, memory), memory, memory)
