from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from recoup.measuring import MemoryTracker, OptimizerCost, optimizer_cost
from recoup.measuring.optimizer.cost import joint_cost
from recoup.model.optimizer_state import state_bytes_of

Make = Callable[[Iterable[Tensor]], Optimizer]


class ByHand(Optimizer):
    """Of ordinary shape: state made at the first step, replaced at each, and a list of its own."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, {"lr": 0.1})
        self.own = [parameter for group in self.param_groups for parameter in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.own:
            if parameter.grad is not None:
                state = self.state[parameter]
                state["mean"] = state.get("mean", torch.zeros_like(parameter)) * 0.9 + parameter.grad
                parameter.sub_(state["mean"] * self.param_groups[0]["lr"])


class Choosy(ByHand):
    """Asks for values, which fakes do not have."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if all(bool(parameter.grad.isfinite().all()) for parameter in self.own if parameter.grad is not None):
            super().step()


class Averaging(optim.AdamW):
    """Holds a moving average of gradients in an attribute, from its first step on."""

    def step(self, closure: Any = None) -> Any:
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        if not hasattr(self, "averages"):
            self.averages = [torch.zeros_like(parameter) for parameter in parameters]
        for average, parameter in zip(self.averages, parameters, strict=True):
            if parameter.grad is not None:
                parameter.grad.add_(average.mul_(0.9).add_(parameter.grad, alpha=0.1))
        return super().step(closure)


class ChoosyAveraging(Averaging):
    def step(self, closure: Any = None) -> Any:
        if bool(self.param_groups[0]["params"][0].grad.isfinite().all()):
            super().step(closure)


class Lookahead(Optimizer):
    """Wraps another optimizer, whose groups it shares, and makes a state of its own in every fifth step."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.param_groups, self.defaults = (
            optimizer,
            optimizer.param_groups,
            optimizer.defaults,
        )
        self.state, self.num_steps = defaultdict(dict), 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.optimizer.step()
        self.num_steps += 1
        if self.num_steps % 5 == 0:
            for parameter in self.param_groups[0]["params"]:
                slow = self.state[parameter].setdefault("slow", parameter.detach().clone())
                parameter.mul_(0.5).add_(slow, alpha=0.5)


OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda params: optim.SGD(params),
    "sgd_momentum": lambda params: optim.SGD(params, momentum=0.9),
    "sgd_foreach": lambda params: optim.SGD(params, momentum=0.9, weight_decay=0.1, foreach=True),
    "sgd_lr_tensor": lambda params: optim.SGD(params, lr=torch.tensor(0.1)),
    "adam": lambda params: optim.Adam(params),
    "adam_amsgrad": lambda params: optim.Adam(params, amsgrad=True),
    "adam_lr_tensor": lambda params: optim.Adam(params, lr=torch.tensor(0.1)),
    "adamw_foreach": lambda params: optim.AdamW(params, foreach=True),
    "adamw_fused": lambda params: optim.AdamW(params, fused=True),
    "adagrad": lambda params: optim.Adagrad(params),
    "rmsprop": lambda params: optim.RMSprop(params, momentum=0.9, centered=True),
    "adafactor": lambda params: optim.Adafactor(params),
    "adafactor_foreach": lambda params: optim.Adafactor(params, foreach=True),
    "nadam": lambda params: optim.NAdam(params),
    "asgd": lambda params: optim.ASGD(params),
    "by_hand": ByHand,
}


def make_model() -> nn.Module:
    model = nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 7), nn.LayerNorm(7))
    model[1].bias.requires_grad_(False)
    return model


def true_state_bytes(optimizer: Optimizer, device: str = "cpu") -> int:
    values = [value for entry in optimizer.state.values() for value in entry.values()]
    return sum(
        value.untyped_storage().nbytes()
        for value in values
        if isinstance(value, Tensor) and value.device.type == device
    )


def give_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn_like(parameter)


def step_truth(model: nn.Module, optimizer: Optimizer) -> tuple[int, int]:
    """The bytes of state after a real step, and what the next one needs."""
    give_gradients(model)
    with MemoryTracker() as memory:
        optimizer.step()
        state_bytes, held_bytes = true_state_bytes(optimizer), memory.current_bytes
        memory.reset_peak()
        optimizer.step()
    return state_bytes, memory.peak_bytes - held_bytes


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_costs_are_those_of_real_steps(name: str) -> None:
    model = make_model()
    optimizer = OPTIMIZERS[name](model.parameters())
    now_bytes = true_state_bytes(optimizer)
    cost = optimizer_cost(optimizer)
    after_bytes, transient_bytes = step_truth(model, optimizer)
    assert cost == OptimizerCost(now_bytes, after_bytes - now_bytes, transient_bytes)
    assert optimizer_cost(optimizer) == OptimizerCost(after_bytes, 0, transient_bytes)


MANY: dict[str, Make] = {
    **OPTIMIZERS,
    "groups": lambda params: optim.AdamW(
        [{"params": (all_of := list(params))[:3]}, {"params": all_of[3:], "weight_decay": 0.0}], foreach=True
    ),
    "mixed": lambda params: optim.Adam(
        [{"params": (all_of := list(params))[:9], "foreach": True}, {"params": all_of[9:], "foreach": False}]
    ),
}


def make_deep_model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(30, 90),
        nn.Linear(90, 20),
        *(nn.Sequential(nn.Linear(20, 20), nn.LayerNorm(20)) for _ in range(12)),
    )


@pytest.mark.parametrize("device_type", [None, "cuda"])
@pytest.mark.parametrize("name", MANY)
def test_a_few_of_many_parameters_tell_as_much_as_all(
    name: str, device_type: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = MANY[name](make_deep_model().parameters())
    few = optimizer_cost(optimizer, device_type=device_type)
    monkeypatch.setattr("recoup.measuring.optimizer.rehearsal.rehearse_few", lambda *_: None)
    assert few == optimizer_cost(optimizer, device_type=device_type)


@pytest.mark.parametrize(
    ("name", "is_few"), [("adamw_foreach", True), ("sgd_foreach", True), ("by_hand", False)]
)
def test_a_few_are_rehearsed_where_that_works(
    name: str, is_few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> Any:
        raise AssertionError

    optimizer = OPTIMIZERS[name](make_deep_model().parameters())
    monkeypatch.setattr("recoup.measuring.optimizer.rehearsal._copied_whole", refuse)
    assert optimizer_cost(optimizer).is_estimate is not is_few


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_nothing_is_touched(name: str) -> None:
    model = make_model()
    optimizer = OPTIMIZERS[name](model.parameters())
    give_gradients(model)
    optimizer.step()
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    random_state = torch.get_rng_state()
    optimizer_cost(optimizer)
    after = model.state_dict(), optimizer.state_dict()
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), random_state)


ELSEWHERE: dict[str, Make] = {
    "attribute": Averaging,
    "wrapper": lambda params: Lookahead(optim.AdamW(params)),
    "list": lambda params: Lookahead(ByHand(params)),
}


@pytest.mark.parametrize("make_it", [make_model, make_deep_model])
@pytest.mark.parametrize("name", ELSEWHERE)
def test_state_outside_of_the_state_dict(name: str, make_it: Callable[[], nn.Module]) -> None:
    model = make_it()
    optimizer = ELSEWHERE[name](model.parameters())
    cost = optimizer_cost(optimizer)
    give_gradients(model)
    with MemoryTracker() as memory:
        for _ in range(10):
            memory.reset_peak()
            optimizer.step()
            transient_bytes = memory.peak_bytes - memory.current_bytes
    assert cost == OptimizerCost(0, memory.current_bytes, transient_bytes)
    assert optimizer_cost(optimizer) == OptimizerCost(memory.current_bytes, 0, transient_bytes)


def test_state_outside_of_the_state_dict_of_an_accelerator() -> None:
    """Counters stay in host memory there."""
    model = make_deep_model()
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    for make in (Averaging, ELSEWHERE["wrapper"]):
        cost = optimizer_cost(make(model.parameters()), device_type="cuda")
        assert (cost.missing_bytes, cost.is_estimate) == (3 * num_bytes, False)


def test_state_outside_of_the_state_dict_scaled_up_from_samples() -> None:
    model = nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 7))
    cost = optimizer_cost(ChoosyAveraging(model.parameters()))
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    assert cost.is_estimate
    assert cost.missing_bytes == 3 * num_bytes + 4 * 4  # and four counters


def test_an_optimizer_inside_another_counts_once() -> None:
    model = make_model()
    outer = Lookahead(optim.AdamW(model.parameters()))
    cost = joint_cost([outer.optimizer, outer])
    assert cost == optimizer_cost(outer)
    assert cost.missing_bytes > optimizer_cost(outer.optimizer).missing_bytes
    give_gradients(model)
    outer.step()
    assert state_bytes_of(outer, outer.optimizer) == state_bytes_of(outer.optimizer) > 0


def test_only_parameters_without_state_are_missing() -> None:
    model = make_model()
    optimizer = optim.Adam(model[0].parameters())
    give_gradients(model)
    optimizer.step()
    optimizer.add_param_group({"params": list(model[1].parameters())})
    cost = optimizer_cost(optimizer)
    assert cost.state_bytes == 2 * (30 * 20 + 20) * 4 + 2 * 4
    assert cost.missing_bytes == 2 * 20 * 7 * 4 + 4  # the bias needs no gradient
    assert not cost.is_estimate


def test_hooks_and_schedulers_are_not_called() -> None:
    model = make_model()
    optimizer = optim.SGD(model.parameters(), momentum=0.9)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("own"))
    handle = register_optimizer_step_pre_hook(lambda *_: calls.append("everyone's"))
    optim.lr_scheduler.StepLR(optimizer, 1)
    weight = model[0].weight.clone()
    give_gradients(model)
    assert optimizer_cost(optimizer).missing_bytes == (30 * 20 + 20 + 20 * 7 + 2 * 7) * 4
    assert optimizer_cost(Lookahead(optimizer)).missing_bytes > 0
    handle.remove()
    assert calls == []
    assert not optimizer.state
    assert torch.equal(model[0].weight, weight)


def test_a_step_that_looks_at_values_is_scaled_up_from_samples() -> None:
    model = make_model()
    optimizer = Choosy(model.parameters())
    cost = optimizer_cost(optimizer)
    after_bytes, transient_bytes = step_truth(model, optimizer)
    assert cost.is_estimate
    assert (cost.state_bytes, cost.missing_bytes) == (0, after_bytes)
    assert transient_bytes <= cost.transient_bytes <= 4 * transient_bytes


class Searching(ByHand):
    """Cannot step without a closure."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        closure()
        super().step()


def test_a_step_that_needs_a_closure_is_guessed() -> None:
    model = make_model()
    trained_bytes = (30 * 20 + 20 + 20 * 7 + 2 * 7) * 4
    cost = optimizer_cost(Searching(model.parameters()))
    assert cost == OptimizerCost(0, 2 * trained_bytes, 2 * trained_bytes, is_estimate=True)


@pytest.mark.parametrize(
    "settings",
    [{"max_iter": 1}, {"max_iter": 4}, {"max_iter": 20, "line_search_fn": "strong_wolfe"}],
    ids=str,
)
def test_the_history_of_lbfgs(settings: dict[str, Any]) -> None:
    """Before its first step, while its history grows, and when that is full."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(100, 10)), nn.Parameter(torch.randn(1000))]
    curvature, running_bytes, outer_bytes = torch.rand(2000) + 0.1, 0, 0
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = optim.LBFGS(
        parameters, lr=0.05, history_size=3, tolerance_grad=0, tolerance_change=0, **settings
    )
    costs = [optimizer_cost(optimizer)]
    with MemoryTracker() as memory:

        def closure() -> Tensor:
            nonlocal running_bytes, outer_bytes
            running_bytes = max(running_bytes, memory.current_bytes)
            outer_bytes = max(outer_bytes, memory.peak_bytes)
            with torch.no_grad():
                flat = torch.cat([parameter.view(-1) for parameter in parameters])
                gradient = curvature * flat.tanh()
                parameters[0].grad.copy_(gradient[:1000].view(100, 10))
                parameters[1].grad.copy_(gradient[1000:])
                value = (curvature * flat.cosh().log()).sum()
            del flat, gradient
            memory.reset_peak()
            return value

        for _ in range(8):
            optimizer.step(closure)
            outer_bytes = max(outer_bytes, memory.peak_bytes)
            costs.append(optimizer_cost(optimizer))
    assert len(optimizer.state[parameters[0]]["old_dirs"]) == 3
    assert [cost.state_bytes for cost in (costs[0], costs[-1])] == [0, memory.current_bytes]
    num_numbers = 16
    for cost in costs:
        held_bytes = cost.state_bytes + cost.missing_bytes
        assert held_bytes + cost.closure_bytes == pytest.approx(running_bytes, abs=4 * num_numbers)
        assert held_bytes + cost.transient_bytes == pytest.approx(outer_bytes, abs=4 * num_numbers)
        assert cost.is_estimate


def test_scalar_and_empty_parameters() -> None:
    parameters = [nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.zeros(0)), nn.Parameter(torch.zeros(3))]
    cost = optimizer_cost(optim.Adam(parameters))
    assert (cost.missing_bytes, cost.is_estimate) == (2 * 16 + 3 * 4, False)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"foreach": False}, {"fused": True}, {"capturable": True}])
@pytest.mark.parametrize("make", [optim.Adam, optim.AdamW])
def test_on_an_accelerator(make: type[optim.Adam], options: dict[str, bool]) -> None:
    # Sizes of whole megabytes, so that the allocator's rounding does not show.
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(3))).cuda()
    optimizer = make(model.parameters(), **options)
    held_bytes = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    cost = optimizer_cost(optimizer)
    # Fake tensors wake the device up with a single number.
    assert torch.cuda.max_memory_allocated() - held_bytes <= 512
    give_gradients(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # capturable without capture
        optimizer.step()
        assert cost.missing_bytes == true_state_bytes(optimizer, "cuda")
        torch.cuda.reset_peak_memory_stats()
        held_bytes = torch.cuda.memory_allocated()
        optimizer.step()
    transient_bytes = torch.cuda.max_memory_allocated() - held_bytes
    assert abs(cost.transient_bytes - transient_bytes) < 2**16
    assert not cost.is_estimate
