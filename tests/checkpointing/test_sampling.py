"""Sampled comparison: whatever drifts is found on the 1st, 2nd, 4th, … call of a call site."""

from __future__ import annotations

import itertools
import warnings
from collections import deque, namedtuple
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from recoup import Checkpoint, checkpoint
from recoup.checkpointing import Span, sampling
from recoup.checkpointing.by_identity import ByIdentity
from recoup.errors import InputChangedError, RecoupWarning, ReplayMismatchError

FOUND = (ReplayMismatchError, InputChangedError)


def make() -> Tensor:
    return torch.randn(4, requires_grad=True) * 1


@pytest.fixture(autouse=True)
def _anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test counts the calls of its call sites from the first."""
    monkeypatch.setattr(sampling, "_sites", ByIdentity(sampling._Site))


# What the replay depends on changes between forward and backward

FACTOR = 2.0
SCALE = torch.tensor([2.0])
GENERATOR = torch.Generator().manual_seed(3)
Pair = namedtuple("Pair", "scale")


def scaled_by_global(x: Tensor) -> Tensor:
    return (x * FACTOR).sin()


def noisy(x: Tensor) -> Tensor:
    return (x * torch.rand(4, generator=GENERATOR)).sin()


class Slotted:
    __slots__ = ("scale",)


def times(find: Callable[[], Any]) -> Callable[[Tensor], Tensor]:
    return lambda x: (x * find()).sin()


def helper_global() -> tuple[Any, Any]:
    def change() -> None:
        globals()["FACTOR"] = 3.0

    return lambda x: scaled_by_global(x).exp(), change


def nested_lambda_global() -> tuple[Any, Any]:
    def change() -> None:
        globals()["FACTOR"] = 5.0

    return lambda x: (lambda y: (y * FACTOR).sin())(x), change


def captured_list() -> tuple[Any, Any]:
    held = [2.0]
    return times(lambda: held[0]), lambda: held.__setitem__(0, 3.0)


def captured_dict() -> tuple[Any, Any]:
    held = {"scale": torch.ones(4)}
    return times(lambda: held["scale"]), lambda: held.update(scale=torch.zeros(4))


def plain_object() -> tuple[Any, Any]:
    held = SimpleNamespace(scale=2.0)
    return times(lambda: held.scale), lambda: setattr(held, "scale", 3.0)


def object_in_object() -> tuple[Any, Any]:
    held = SimpleNamespace(inner=SimpleNamespace(scale=torch.ones(4)))
    return times(lambda: held.inner.scale), lambda: held.inner.scale.add_(1)


def tensor_in_deque() -> tuple[Any, Any]:
    held = deque([torch.ones(4)])
    return times(lambda: held[0]), lambda: held[0].add_(1)


def tensor_in_set() -> tuple[Any, Any]:
    held = {torch.ones(4)}
    return times(lambda: next(iter(held))), lambda: next(iter(held)).add_(1)


def tensor_in_named_tuple() -> tuple[Any, Any]:
    held = Pair(torch.ones(4))
    return times(lambda: held.scale), lambda: held.scale.add_(1)


def tensor_in_slots() -> tuple[Any, Any]:
    held = Slotted()
    held.scale = torch.ones(4)
    return times(lambda: held.scale), lambda: held.scale.add_(1)


def data_that_moves_without_a_version() -> tuple[Any, Any]:
    held = torch.ones(4)
    return times(lambda: held), lambda: held.data.add_(1)


CHANGES = [
    helper_global, nested_lambda_global, captured_list, captured_dict, plain_object, object_in_object, tensor_in_deque,
    tensor_in_set, tensor_in_named_tuple, tensor_in_slots, data_that_moves_without_a_version,
]  # fmt: skip


@pytest.mark.parametrize("make_case", CHANGES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("wrap", ["function", "module", "span"])
def test_what_changes_meanwhile_is_found(make_case: Any, wrap: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "FACTOR", 2.0)
    fn, change = make_case()
    if wrap == "module":
        fn = Calling(fn)
    call = Span(Checkpoint()).call if wrap == "span" else lambda fn, args, kwargs: checkpoint(fn, *args)
    x = make()
    loss = call(fn, (x,), {}).sum()
    change()
    (wanted,) = torch.autograd.grad(loss_of_plain(make_case, x), x)
    try:
        (found,) = torch.autograd.grad(loss, x)
    except FOUND:
        return
    assert torch.equal(found, wanted)


def loss_of_plain(make_case: Any, x: Tensor) -> Tensor:
    """The plain call, before anything changed."""
    then, globals()["FACTOR"] = FACTOR, 2.0
    fn, _ = make_case()
    loss = fn(x).sum()
    globals()["FACTOR"] = then
    return loss


class Calling(nn.Module):
    def __init__(self, fn: Any) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(x)


@pytest.mark.parametrize(
    "make_case", [tensor_in_deque, tensor_in_set, tensor_in_named_tuple, tensor_in_slots, object_in_object]
)
def test_tensors_changed_in_place_are_found_on_every_call(make_case: Any) -> None:
    """Also on the third, which is not compared by content."""
    fn, change = make_case()
    for _ in range(2):
        checkpoint(fn, make()).sum().backward()
    loss = checkpoint(fn, make()).sum()
    change()
    with pytest.raises(InputChangedError, match=r"captured tensor '.*held"):
        loss.backward()


def test_a_generator_that_a_helper_uses_is_put_back() -> None:
    x = make()
    state = GENERATOR.get_state()
    (expected,) = torch.autograd.grad(noisy(x).sum(), x)
    GENERATOR.set_state(state)
    loss = checkpoint(lambda x: noisy(x), x).sum()
    after = GENERATOR.get_state()
    (found,) = torch.autograd.grad(loss, x)
    assert torch.equal(found, expected)
    assert torch.equal(GENERATOR.get_state(), after)


# How often


def test_a_counter_that_takes_effect_after_a_hundred_calls() -> None:
    held = SimpleNamespace(num_calls=0)

    def fn(x: Tensor) -> Tensor:
        held.num_calls += 1
        return (x * max(1, held.num_calls - 100)).sin()

    def train() -> None:
        for _ in range(64):  # from the 51st on they drift; the 64th is compared
            checkpoint(fn, make()).sum().backward()

    with pytest.raises(ReplayMismatchError, match=r"(?s)fn \(test_sampling.py:\d+\).*has other values"):
        train()
    assert held.num_calls >= 128


@pytest.mark.parametrize("site", ["function", "module", "method", "lambda"])
def test_which_calls_are_compared(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    is_due: list[bool] = []
    real = sampling.is_due

    def noted(fn: Any) -> bool:
        is_due.append(real(fn))
        return is_due[-1]

    monkeypatch.setattr("recoup.checkpointing.frame.is_due", noted)
    layer = nn.Linear(4, 4)
    for _ in range(40):
        fns = {"function": noisy, "module": layer, "method": layer.forward, "lambda": lambda x: x.sin()}
        checkpoint(fns[site], make()).sum().backward()
    assert [step for step, due in enumerate(is_due, 1) if due] == [1, 2, 4, 8, 13, 16, 32, 35]


def test_each_module_is_a_site_of_its_own() -> None:
    layers = [nn.Linear(4, 4) for _ in range(3)]
    assert [[sampling.is_due(layer) for layer in layers] for _ in range(3)] == [
        [True] * 3,
        [True] * 3,
        [False] * 3,
    ]
    assert len(sampling._sites) == 3
    del layers
    assert not sampling._sites  # known weakly


def test_sampling_can_be_held_on_or_off() -> None:
    layer = nn.Linear(4, 4)
    with sampling.sampling("always"):
        assert all(sampling.is_due(layer) for _ in range(5))
    with sampling.sampling("never"):
        assert not any(sampling.is_due(layer) for _ in range(5))
    assert sampling.is_due(layer)  # its first call that counts


# Rounding is no drift


def rounded(x: Tensor) -> Tensor:
    """Like a sum whose order the device does not fix: the last bits differ from run to run."""
    return (x * (1 + next(TICKS) * 1e-7)).sin()


TICKS = itertools.count()


def test_replays_that_round_differently_get_one_warning() -> None:
    x = torch.full((4,), 3.0, requires_grad=True)
    with pytest.warns(
        RecoupWarning, match=r"rounded \(test_sampling.py:\d+\): its replay rounds differently"
    ):
        checkpoint(rounded, x).sum().backward()
    assert torch.allclose(x.grad, torch.full((4,), 3.0).cos(), rtol=1e-4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            checkpoint(rounded, x).sum().backward()


def test_a_replay_far_from_the_forward_is_no_rounding() -> None:
    ticks = itertools.count(1)
    loss = checkpoint(lambda x: (x * next(ticks)).sin(), make()).sum()
    with pytest.raises(ReplayMismatchError, match="has other values"):
        loss.backward()


def test_nothing_is_compared_that_no_backward_needs() -> None:
    """The first of two outputs drifts, and only the second is used."""
    ticks = itertools.count(1)
    second = checkpoint(lambda x: ((x * next(ticks)).sin(), x.exp()), make())[1]
    second.sum().backward()


# Steps of several calls


class Wanderer:
    """Counts its calls, and drifts after two hundred."""

    num_calls = 0

    def scale(self) -> float:
        self.num_calls += 1
        return 1.0 if self.num_calls <= 200 else 1.0 + self.num_calls % 2


def first_error(step: Callable[[], Tensor]) -> bool:
    for _ in range(1500):
        try:
            step().sum().backward()
        except ReplayMismatchError:
            return True
    return False


def test_the_first_of_several_closures_is_compared_too() -> None:
    """They have one code, and a step has as many calls as there are blocks."""
    blocks, wanderer = [nn.Linear(4, 4) for _ in range(8)], Wanderer()

    def run(block: nn.Module) -> Callable[[Tensor], Tensor]:
        return lambda x: torch.tanh(block(x) * (wanderer.scale() if block is blocks[0] else 1.0))

    def step() -> Tensor:
        x = make()
        for block in blocks:
            x = checkpoint(run(block), x)
        return x

    assert first_error(step)


def test_the_first_of_two_calls_of_a_module_is_compared_too() -> None:
    layer, wanderer, turn = nn.Linear(4, 4), Wanderer(), itertools.cycle([True, False])

    def fn(x: Tensor, wanders: bool) -> Tensor:
        return torch.tanh(layer(x) * (wanderer.scale() if wanders else 1.0))

    def step() -> Tensor:
        return checkpoint(fn, checkpoint(fn, make(), next(turn)), next(turn))

    assert first_error(step)


def test_a_call_inside_another_is_compared_too() -> None:
    layer, wanderer = nn.Linear(4, 4), Wanderer()

    def inner(x: Tensor) -> Tensor:
        return torch.tanh(layer(x) * wanderer.scale())

    assert first_error(lambda: checkpoint(lambda x: torch.tanh(checkpoint(inner, x)).exp(), make()))


# Memory that nobody fills


def pollute(value: float) -> None:
    """Leaves a value where the next allocations of this size will find it."""
    held = [torch.full((2, 4, 8), value) for _ in range(20)]
    del held


def test_memory_that_nobody_fills_is_no_drift() -> None:
    """RReLU saves noise that it draws for negative inputs only."""
    layer = nn.RReLU()
    for step in range(4):
        x = torch.randn(2, 4, 8, requires_grad=True)
        pollute(step + 3.0)
        y = checkpoint(layer, x * 1)
        pollute(step * 7 + 101.0)
        y.sum().backward()


def test_a_last_bit_in_the_forward_alone_is_rounding() -> None:
    runs = itertools.count()

    def fn(x: Tensor) -> Tensor:
        return (x * (1 + 2**-23 if next(runs) == 0 else 1.0)).exp()

    with pytest.warns(RecoupWarning, match="rounds differently"):
        checkpoint(fn, make()).sum().backward()


def test_arguments_that_a_function_uses_up() -> None:
    runs = itertools.count()

    def fn(xs: list[Tensor]) -> Tensor:
        return (xs.pop() * (1 + 1e-6 * next(runs))).exp().exp()

    with pytest.warns(RecoupWarning, match="rounds differently"):
        checkpoint(fn, [make()]).sum().backward()


def test_hooks_that_store_in_fewer_bits_are_not_held_against_the_function() -> None:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.half(), lambda t: t.float()):
        loss = checkpoint(lambda x: x.sin().exp(), make()).sum()
    loss.backward()


def test_a_call_that_falls_into_a_capture_is_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may wait for the device while a CUDA graph is captured."""
    layer, captures = nn.Linear(4, 4), iter([True, True])
    monkeypatch.setattr(sampling, "_is_capturing", lambda: next(captures, False))
    assert [sampling.is_due(layer) for _ in range(6)] == [False, False, True, True, True, False]


def test_values_are_compared_where_a_call_changes_what_it_is_fed() -> None:
    ticks = itertools.count(1)
    span = Span(Checkpoint(check="values"))
    y = span.call(torch.exp, (make(),), {})
    loss = span.call(lambda y: (y.mul_(2) * next(ticks)).sin(), (y,), {}).sum()
    with pytest.raises(ReplayMismatchError, match="has other values"):
        loss.backward()


# Tensors without memory of their own


class Opaque(Tensor):
    """A wrapper that does not tell what it wraps."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(cls.unwrapped, (args, kwargs or {}))
        return tree_map(
            lambda value: cls(value) if isinstance(value, Tensor) else value, func(*args, **kwargs)
        )

    @classmethod
    def unwrapped(cls, value: Any) -> Any:
        return value.inner if isinstance(value, cls) else value


class Open(Opaque):
    """A wrapper that does, as those of quantised weights."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, Tensor], *_: Any) -> Any:
        return cls(parts["inner"])


@pytest.mark.parametrize("kind", [Opaque, Open])
def test_wrappers_of_tensors_are_replayed(kind: type[Opaque]) -> None:
    values = torch.randn(5, 4)
    (expected,) = torch.autograd.grad((values.requires_grad_() * 2).sin().sum(), values)
    for _ in range(12):
        x = kind(values.detach()).requires_grad_()
        checkpoint(lambda x: (x * 2).sin(), x).sum().backward()
        assert isinstance(x.grad, kind)
        assert torch.equal(x.grad.inner, expected)


def test_what_drifts_inside_a_wrapper_is_found() -> None:
    scale = [2.0]
    x = Open(torch.randn(5, 4)).requires_grad_()
    output = checkpoint(lambda x: (x * scale[0]).sin(), x)
    scale[0] = 3.0
    with pytest.raises(FOUND):
        output.sum().backward()
