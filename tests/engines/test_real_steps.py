from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recoup
from recoup.engines.real_steps import RealSteps
from recoup.measuring import MemoryTracker, measure
from recoup.model.step import TrainingStep


class Replacing(torch.optim.Optimizer):
    """Makes new tensors for its state in every step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["mean"] = state.get("mean", torch.zeros_like(parameter)) * 0.9
            parameter.sub_(state["mean"].add_(parameter.grad))


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))


class TestOptimizerState:
    X = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))

    def real_peak_bytes(self, model: nn.Module, step: Any) -> int:
        """When state has grown to its full size, in which no step adds to it."""
        held = sum(parameter.nbytes for parameter in model.parameters()) + self.X.nbytes
        with MemoryTracker() as memory:
            for _ in range(6):
                memory.reset_peak()
                step()
        return memory.peak_bytes + held

    def test_a_history_that_grows(self) -> None:
        """Of LBFGS, whether it is fitted by a step or by a sample, and whether or not its history has grown."""
        model = make_model()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=3, history_size=4)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model(self.X).square().mean()
            loss.backward()
            return loss

        def step() -> None:
            optimizer.step(closure)

        def verified_bytes(**subject: Any) -> int:
            fitted = recoup.fit(model, budget="1GiB", optimizer=optimizer, race=False, **subject)
            recoup.remove(model)
            assert fitted.verification is not None
            return fitted.verification.peak_bytes

        sample = {"sample": self.X, "loss": lambda output: output.square().mean()}
        found = [verified_bytes(step=step), verified_bytes(**sample)]
        peak_bytes = self.real_peak_bytes(model, step)
        assert len(optimizer.state[model[0][0].weight]["old_dirs"]) == 4
        found += [verified_bytes(step=step), verified_bytes(**sample)]
        assert found == pytest.approx([peak_bytes] * 4, rel=0.01)

    def test_tensors_that_are_replaced(self) -> None:
        model = make_model()
        optimizer = Replacing(model.parameters())

        def step() -> None:
            optimizer.zero_grad()
            model(self.X).square().mean().backward()
            optimizer.step()

        fitted = recoup.fit(model, step=step, budget="1GiB", optimizer=optimizer, race=False)
        recoup.remove(model)
        assert fitted.verification is not None
        assert fitted.verification.peak_bytes == pytest.approx(self.real_peak_bytes(model, step), rel=0.01)


def test_what_a_step_writes_to_is_found_once() -> None:
    """Whatever runs it; but of generated code it is not seen."""
    model, x = make_model(), torch.randn(32, 64)
    step = TrainingStep(model, x, loss=lambda output: output.square().mean())
    finding, found = step.finding_writes, []

    def counted() -> Any:
        found.append(True)
        return finding()

    profile = measure(model, x, loss=step.loss)
    step.finding_writes = counted
    for _ in range(2):
        steps = RealSteps(step, profile)
        steps.record()
        steps.record()
    assert len(found) == 1


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float32, torch.float64], ids=["bfloat16", "float32", "float64"]
)
def test_shaken_steps_differ_by_rounding_and_leave_no_trace(dtype: torch.dtype) -> None:
    model, x = make_model().to(dtype), torch.randn(32, 64, dtype=dtype)
    model[0][0].requires_grad_(False)
    step = TrainingStep(model, x, loss=lambda output: output.square().mean())
    steps = RealSteps(step, measure(model, x, loss=step.loss))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plain = steps.results(torch.clone)
    with steps.shaken():
        for name, value in model.named_parameters():
            changed = (value - before[name]).abs()
            assert bool((changed > 0).all()) == value.requires_grad
            assert (changed <= torch.finfo(dtype).eps * before[name].abs()).all()
        shaken = steps.results(torch.clone)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for name, gradient in plain.items():
        apart = float((shaken[name] - gradient).norm() / gradient.norm())
        assert 0 < apart < 10 * torch.finfo(dtype).eps


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_under_autocast_the_last_bits_of_its_dtype_are_shaken(autocast: torch.dtype) -> None:
    """Those of 32 bits are mostly cut off there."""
    model, x = make_model(), torch.randn(32, 64)

    def loss(output: Tensor) -> Tensor:
        return output.float().square().mean()

    with torch.autocast("cpu", autocast):
        steps = RealSteps(TrainingStep(model, x, loss=loss), measure(model, x, loss=loss))
        plain = steps.results(torch.clone)
        cast = {name: value.to(autocast) for name, value in model.named_parameters()}
        with steps.shaken():
            for name, value in model.named_parameters():
                changed = (value.to(autocast).float() - cast[name].float()).abs()
                normal = cast[name].abs() > 2 * torch.finfo(autocast).smallest_normal
                assert (changed[normal] > 0).all()
                assert (changed <= 2 * torch.finfo(autocast).eps * cast[name].abs().float())[normal].all()
            shaken = steps.results(torch.clone)
    for name, gradient in plain.items():
        apart = float((shaken[name] - gradient).norm() / gradient.norm())
        assert 0.1 * torch.finfo(autocast).eps < apart < 10 * torch.finfo(autocast).eps


def test_weights_are_as_they_were_where_two_parameters_share_them_or_one_cannot_be_shaken() -> None:
    model = make_model()
    model[1][0].weight = nn.Parameter(model[0][0].weight.data)
    step = TrainingStep(model, torch.randn(32, 64), loss=lambda output: output.square().mean())
    steps = RealSteps(step, measure(model, step.sample, loss=step.loss))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with steps.shaken():
        assert not any(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    flat = torch.randn(2, 64, 64)
    model[0][0].weight, model[1][0].weight = map(nn.Parameter, flat)  # which share no element
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with steps.shaken():
        assert not any(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    # One of which is the other, transposed.
    model[1][0].weight = nn.Parameter(model[0][0].weight.data.t())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with steps.shaken():
        assert not any(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    # Elements of one parameter that share memory.
    model.insert(0, nn.Linear(64, 64, bias=False))
    model[0].weight = nn.Parameter(torch.zeros(1, 64).expand(64, 64))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with steps.shaken():
        assert [torch.equal(value, before[name]) for name, value in model.state_dict().items()] == [
            name == "0.weight" for name in before
        ]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_graphs_of_before_can_be_run_after_shaken_steps() -> None:
    model, x = make_model(), torch.randn(32, 64)
    step = TrainingStep(model, x, loss=lambda output: output.square().mean())
    steps = RealSteps(step, measure(model, x, loss=step.loss))
    held = model(x).sum()
    with steps.shaken():
        steps.results(torch.clone)
    held.backward()
    assert all(p.grad is not None for p in model.parameters())
