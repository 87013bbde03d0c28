"""Trees of modules: read at once, put back like everything else, and nothing kept alive."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import recoup
from recoup.checkpointing.module_tree import note_tree


def block() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Sequential(nn.Conv1d(6, 3, 1), nn.Tanh()))
    model[2][0].sizes = [3, 5]
    model[2][0].mark, model[2][0].flags = torch.ones(1), {"a": 1, "b": 2}
    return model


def test_a_tree_has_all_tensors_and_nothing_else() -> None:
    model = block()
    state = note_tree(model)
    assert state is not None
    tensors = [*model.parameters(), model[2][0].mark]
    assert {id(tensor) for tensor in state.tensors()} == {id(tensor) for tensor in tensors}
    assert state.buffers() == []
    held = {id(place): then for place, then in state.places()}
    for module in model.modules():
        assert held[id(module.__dict__)] == module.__dict__
        assert held[id(module._parameters)] == module._parameters
        assert held[id(module._forward_hooks)] == {}


def test_buffers_are_grouped_by_module() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False))
    state = note_tree(model)
    assert state is not None
    groups = [[id(buffer) for buffer in group] for group in state.buffers()]
    wanted = [[id(buffer) for buffer in model[index].buffers()] for index in (0, 2)]
    assert sorted(groups) == sorted(wanted)


CHANGES: dict[str, Callable[[nn.Sequential], Any]] = {
    "a flag": lambda model: setattr(model[2][0], "training", False),
    "a number": lambda model: setattr(model[1], "eps", 0.5),
    "a plain tuple": lambda model: setattr(model[1], "normalized_shape", (3, 2)),
    "an item of a list": lambda model: model[2][0].sizes.__setitem__(0, 1),
    "a longer list": lambda model: model[2][0].sizes.append(0),
    "a new attribute": lambda model: setattr(model[0], "scale", 2.0),
    "an attribute that went": lambda model: delattr(model[0], "in_features"),
    "another parameter": lambda model: setattr(model[0], "weight", nn.Parameter(torch.ones(6, 4))),
    "no parameter": lambda model: setattr(model[0], "bias", None),
    "another module": lambda model: setattr(model, "1", nn.LayerNorm(6)),
    "a hook": lambda model: model[0].register_forward_hook(lambda *_: None),
    "a buffer": lambda model: model[0].register_buffer("mask", torch.ones(1)),
    "an equal tensor": lambda model: setattr(model[2][0], "mark", torch.ones(1)),
    "another name of a tensor": lambda model: setattr(model[2][0], "other", model[2][0].__dict__.pop("mark")),
    "equal modules in another order": lambda model: model[2]._modules.update(
        {"0": model[2]._modules.pop("0")}
    ),
    "an equal number of another type": lambda model: setattr(model[2][0], "training", 1),
    "an equal dictionary in another order": lambda model: setattr(model[2][0], "flags", {"b": 2, "a": 1}),
    "equal modules in an equal dictionary": lambda model: setattr(
        model[2], "_modules", dict(reversed(model[2]._modules.items()))
    ),
    "an equal list": lambda model: setattr(model[2][0], "sizes", [3, 5]),
    "a tensor that equals a number": lambda model: setattr(model[1], "eps", torch.tensor(model[1].eps)),
    "another type": lambda model: setattr(model[1], "eps", [0.1]),
}


class NoOperations(TorchDispatchMode):
    """Refuses all."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} ran")


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_every_change_is_seen_and_can_be_put_back(change: Callable[[nn.Sequential], Any]) -> None:
    model = block()
    state = note_tree(model)
    assert state is not None
    assert state.is_unchanged()
    change(model)
    with NoOperations():  # nor are tensors compared by value
        assert not state.is_unchanged()


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_replay_sees_the_modules_as_they_were(change: Callable[[nn.Sequential], Any]) -> None:
    x = torch.randn(3, 6, 4, requires_grad=True)

    def gradients(act: Callable[[nn.Sequential], Any]) -> list[Tensor]:
        model = block()
        weights = list(model.parameters())
        output = recoup.checkpoint(model, x)
        act(model)
        found = torch.autograd.grad(output.square().sum(), [x, *weights])
        assert len(found) == 1 + len(weights)
        return list(found)

    for plain, changed in zip(gradients(lambda model: None), gradients(change), strict=True):
        assert torch.equal(plain, changed)


class Scaled(nn.Module):
    """One of its parameters may be replaced by an equal one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), nn.Parameter(torch.full((), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


def test_gradients_reach_the_parameter_of_the_forward_and_no_equal_one() -> None:
    model, x = Scaled(), torch.randn(3, 4)
    state = note_tree(model)
    assert state is not None
    output, first = recoup.checkpoint(model, x), model.scale
    model.scale = nn.Parameter(torch.full((), 2.0))
    assert not state.is_unchanged()
    output.sum().backward()
    assert first.grad is not None
    assert model.scale.grad is None


def test_after_the_replay_changes_stand_as_before_it() -> None:
    model = block()
    x = torch.randn(3, 6, 4, requires_grad=True)
    output = recoup.checkpoint(model, x)
    other = nn.LayerNorm(6)
    model[1] = other
    model[0].scale = 2.0
    output.sum().backward()
    assert model[1] is other
    assert model[0].scale == 2.0


def test_a_tree_keeps_no_tensor_alive() -> None:
    model = block()
    assert note_tree(model) is not None
    gone = weakref.ref(model[0].weight)
    gone_module = weakref.ref(model[1])
    model[0].weight = nn.Parameter(torch.ones(6, 4))
    model[1] = nn.LayerNorm(6)
    gc.collect()
    assert gone() is None
    assert gone_module() is None
    state = note_tree(model)
    assert state is not None
    assert any(tensor is model[0].weight for tensor in state.tensors())


def test_what_has_no_tree() -> None:
    hooked, lazy, objects, history, keys = block(), nn.Sequential(nn.LazyLinear(3)), block(), block(), block()
    hooked[0].register_forward_hook(lambda *_: None)
    objects[0].config = Settings()
    history[0].last = history[0].weight * 2
    keys[0].names = {keys[0].weight: "w"}  # which cannot be compared
    for model in (hooked, lazy, objects, history, keys):
        assert note_tree(model) is None


def test_callables_that_lead_nowhere_and_those_that_lead_to_a_tensor() -> None:
    """Trees tell them apart, though their types are the same, and though a partial's keywords may change."""
    tensor, softmax = torch.ones(2), partial(nn.functional.softmax, dim=-1)
    logger = logging.getLogger("recoup.tests")
    for plain, leading in (
        (softmax, partial(torch.mul, tensor)),
        (logger.debug, MethodType(nn.functional.gelu, tensor)),
        (torch.relu, tensor.mul),
        (nn.functional.gelu, [tensor].append),
    ):
        model = block()
        model[0].act = plain
        assert note_tree(model) is not None
        model[0].act = leading
        assert note_tree(model) is None
    model = block()
    model[0].act = softmax
    assert note_tree(model) is not None
    softmax.keywords["input"] = tensor
    assert note_tree(model) is None


def test_methods_do_not_keep_what_they_are_bound_to() -> None:
    model, owner = block(), logging.Formatter()
    model[0].format = owner.format
    gone = weakref.ref(owner)
    assert note_tree(model) is not None
    del model[0].format, owner
    assert gone() is None


class Settings:
    """An object of the user's, which is followed."""

    scale = 2.0


def test_a_module_that_changes_all_the_time_has_none_in_the_end() -> None:
    model = block()
    values = [1, 1.0, "1", None, True, 1, 1.0]
    found = []
    for value in values:
        model[0].changing = value
        found.append(note_tree(model) is not None)
    assert found == [True] * 4 + [False] * 3


def test_a_hook_for_a_while_does_not_leave_a_module_without_one() -> None:
    model = block()
    assert note_tree(model) is not None
    hook = model[0].register_forward_hook(lambda *_: None)
    found = [note_tree(model) is not None for _ in range(10)]
    hook.remove()
    found += [note_tree(model) is not None for _ in range(10)]
    # One is made in the first four calls without one, then in the 8th and the 16th.
    assert found == [False] * 14 + [True] * 6


def test_a_module_that_changes_now_and_then_keeps_one() -> None:
    """As the first layer of a kind does, on which one fit after the other tries its options."""
    model = block()
    for value in [1, 1.0, "1", None, True, 1, 1.0]:
        model[0].changing = value
        assert all(note_tree(model) is not None for _ in range(10))


def test_functions_of_libraries_do_not_keep_what_they_lead_to() -> None:
    model, other = block(), block()
    model[0].forward = _library_closure(other)
    gone = weakref.ref(other)
    assert note_tree(model) is not None
    del other
    model[0].__dict__.pop("forward")
    gc.collect()
    assert gone() is None


def _library_closure(module: nn.Module) -> Any:
    """A function whose code is in a library's file, and that leads to a module."""
    code = compile(
        "def make(module):\n    def forward(x):\n        return module(x)\n    return forward",
        torch.__file__,
        "exec",
    )
    found: dict[str, Any] = {}
    exec(code, found)
    return found["make"](module)


@pytest.mark.parametrize("verifies", [True, False])
def test_a_fitted_model_can_be_freed(verifies: bool) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)))
    recoup.fit(model, torch.randn(64, 16), budget="1MiB", loss=torch.Tensor.mean, verify=verifies)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
