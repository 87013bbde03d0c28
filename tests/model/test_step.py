from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from tally import Tally
from torch import Tensor, nn

import recoup
from recoup.errors import LossError, SampleError, UnitError
from recoup.measuring import MemoryTracker, measure
from recoup.model.calls import watch_calls
from recoup.model.samples import describe_sample
from recoup.model.step import TrainingStep
from recoup.planning import Phase, Use


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 3))


def total(output: Tensor) -> Tensor:
    return output.sum()


X = torch.randn(4, 6)


class Returns(nn.Module):
    """A layer whose forward hands its result to a function."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.layer, self.make = nn.Linear(6, 3), make

    def forward(self, x: Tensor, scale: Any = 1.0) -> Any:
        return self.make(self.layer(x) * scale)


@dataclass
class Output:
    logits: Tensor
    loss: Tensor | None = None


class TestSamples:
    @pytest.mark.parametrize(
        "sample", [X, (X,), [X], {"x": X}, (X, 2.0), {"x": X, "scale": torch.ones(3)}], ids=describe_sample
    )
    def test_forms(self, sample: Any) -> None:
        profile = measure(Returns(total), sample)
        assert [unit.name for unit in profile.units][-2:] == ["layer", "loss"]

    @pytest.mark.parametrize(
        ("sample", "text"),
        [
            (
                torch.randn(4, 5),
                r"Sequential refuses the sample \(float32\[4, 5\]\): RuntimeError: .* a tuple for",
            ),
            ((X, X), r"refuses the sample \(\(float32\[4, 6\], float32\[4, 6\]\)\): TypeError"),
            ({"y": X}, r"refuses the sample \(\{y: float32\[4, 6\]\}\): TypeError"),
            (
                "text",
                r"refuses the sample \(str\): TypeError.*Give what the model takes: a tensor for model\(x\)",
            ),
        ],
    )
    def test_what_the_model_refuses(self, sample: Any, text: str) -> None:
        with pytest.raises(SampleError, match=text):
            measure(mlp(), sample, loss=total)

    def test_too_little_memory_is_no_refusal(self) -> None:
        def fail(output: Tensor) -> Tensor:
            raise torch.OutOfMemoryError("full")

        with pytest.raises(torch.OutOfMemoryError, match="full"):
            measure(Returns(fail), X)

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({}, r"Give either a sample .* or step=, a callable that runs a whole training step"),
            ({"sample": X, "step": print}, r"Give either a sample"),
            ({"step": print, "loss": total}, r"loss= goes with a sample; a step= callable computes its own"),
            ({"step": 3}, r"step= must be callable; got a int"),
            ({"sample": X, "loss": 3}, r"loss= must be callable; got a int"),
        ],
    )
    def test_what_does_not_go_together(self, options: dict[str, Any], text: str) -> None:
        with pytest.raises(SampleError, match=text):
            measure(mlp(), **options)

    def test_no_module(self) -> None:
        with pytest.raises(SampleError, match=r"must be a torch.nn.Module; got a function"):
            measure(total, X)  # type: ignore[arg-type]

    @pytest.mark.parametrize("model", [nn.Tanh(), mlp().requires_grad_(False)])
    def test_nothing_to_train(self, model: nn.Module) -> None:
        with pytest.raises(SampleError, match=r"No parameter of .* needs a gradient.*requires_grad_\(\)"):
            measure(model, X, loss=total)

    def test_a_device_that_cannot_be_measured(self) -> None:
        with pytest.raises(SampleError, match=r"on the meta device.*hardware='H200'"):
            measure(mlp().to("meta"), X.to("meta"), loss=total)


class TestLosses:
    @pytest.mark.parametrize(
        "make",
        [
            total,
            lambda x: x.sum().reshape(1),
            lambda x: {"loss": x.sum(), "logits": x},
            lambda x: Output(x, x.sum()),
            lambda x: type("Bag", (), {"loss": x.sum()})(),
        ],
        ids=["scalar", "one element", "dict", "dataclass", "object"],
    )
    def test_found_in_the_output(self, make: Any) -> None:
        profile = measure(Returns(make), X)
        last = len(profile.units) - 1
        made, read = Use(Phase.BACKWARD, last), Use(Phase.BACKWARD, last - 1)
        assert any(value.made == made and read in value.read for value in profile.problem.values)

    def test_a_function_goes_before_the_outputs_own(self) -> None:
        step = TrainingStep(Returns(lambda x: Output(x, x.sum())), X, loss=lambda output: output.logits.max())
        output, loss = step.forward()
        assert loss == output.logits.max()

    @pytest.mark.parametrize(
        ("make", "text"),
        [
            (
                lambda x: x,
                r"The loss must be a scalar; got a tensor of shape \[4, 3\]. Give loss=, a function",
            ),
            (lambda x: {"loss": [x.sum()]}, r"must be a scalar; got list"),
            (
                lambda x: Output(x),
                r"The model returns a Output without a loss. Give loss=, .* a sample with labels",
            ),
            (lambda x: {"logits": x}, r"returns a dict without a loss"),
            (lambda x: (x.sum(), x), r"returns a tuple without a loss"),
            (
                lambda x: x.sum().detach(),
                r"does not depend on any parameter that needs a gradient. Check loss=",
            ),
        ],
    )
    def test_what_is_none(self, make: Any, text: str) -> None:
        with pytest.raises(LossError, match=text):
            measure(Returns(make), X)


class TestStepCallables:
    def test_the_same_numbers_as_with_a_sample(self) -> None:
        model = nn.Sequential(mlp())

        def step() -> None:
            model.zero_grad()
            model(X).sum().backward()

        known = measure(model, X, loss=total, units="0")
        profile = measure(model, step=step, units="0")
        assert [unit.name for unit in profile.units] == [unit.name for unit in known.units]
        for unit, other in zip(profile.problem.units, known.problem.units, strict=True):
            assert unit.parameter_gradient_bytes == other.parameter_gradient_bytes
            assert unit.gradient_bytes == other.gradient_bytes
            assert [option.held_bytes for option in unit.options] == [
                option.held_bytes for option in other.options
            ]
        # What the user's variables hold in the backward is not known; what the step reads counts as a sample does.
        assert profile.residents.other_bytes == known.residents.other_bytes == X.nbytes

    def test_one_that_steps_an_optimizer(self) -> None:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        calls = Tally()

        def step() -> None:
            optimizer.zero_grad()
            (model(X).sum() * 2).backward()
            optimizer.step()
            calls.add()

        profile = measure(model, step=step, optimizer=optimizer)
        assert calls.take()
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name]), name
        assert not optimizer.state
        assert not profile.accumulates
        # Momentum, before it is there.
        assert profile.residents.optimizer_bytes == profile.residents.parameter_bytes

    @pytest.mark.parametrize("how", ["method", "function", "list"])
    def test_ways_to_call_backward(self, how: str) -> None:
        model = mlp()

        def step() -> None:
            loss = model(X).sum()
            if how == "method":
                loss.backward()
            else:
                torch.autograd.backward([loss] if how == "list" else loss)

        assert [unit.name for unit in measure(model, step=step).units] == ["[0:2]", "2", "loss"]
        assert torch.autograd.backward.__module__ == "torch.autograd"

    @pytest.mark.parametrize("num_outputs", [1, 2])
    def test_backwards_from_outputs_with_given_gradients(self, num_outputs: int) -> None:
        """As a stage of a pipeline has them. They count as made by the backward, whoever made them, with a scalar."""
        model, x = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32)), torch.randn(128, 64)
        gradients = [torch.randn(128, 32) for _ in range(num_outputs)]

        def step() -> None:
            model.zero_grad()
            outputs = [model(x) for _ in gradients]
            if num_outputs == 1:
                outputs[0].backward(gradients[0])
            else:
                torch.autograd.backward(outputs, gradients)

        fitted = recoup.fit(model, step=step, budget="1GiB", race=False)
        assert fitted.verification is not None
        assert fitted.verification.gradients == "bit-equal"
        over_bytes = fitted.plan.predicted_bytes - fitted.verification.peak_bytes
        assert over_bytes == sum(gradient.nbytes for gradient in gradients) + 8

    def test_a_backward_that_stops_before_the_model_runs(self) -> None:
        """GradCache: gradients of outputs first, which the backwards through the model then begin with."""
        model, x = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 8)), torch.randn(32, 16)

        def step() -> None:
            model.zero_grad()
            with torch.no_grad():
                outputs = torch.cat([model(rows) for rows in x.chunk(4)])
            outputs.requires_grad_()
            (outputs @ outputs.T).square().mean().backward()
            assert outputs.grad is not None
            for rows, gradient in zip(x.chunk(4), outputs.grad.chunk(4), strict=True):
                model(rows).backward(gradient)

        fitted = recoup.fit(model, step=step, budget="1GiB", race=False)
        assert fitted.verification is not None
        assert fitted.verification.gradients == "bit-equal"
        assert fitted.profile.accumulates
        assert [unit.name for unit in fitted.profile.units] == ["before [0:2]", "[0:2]", "2", "loss"]

    def test_two_rounds_accumulate(self) -> None:
        model = mlp()

        def step() -> None:
            for rows in X.split(2):
                model(rows).sum().backward()

        profile = measure(model, step=step)
        assert profile.accumulates
        assert [unit.name for unit in profile.units] == ["[0:2]", "2", "loss"]

    def test_no_backward(self) -> None:
        model = mlp()
        with pytest.raises(LossError, match=r"ran no backward. A step= callable must call loss.backward\(\)"):
            measure(model, step=lambda: model(X).sum())

    def test_no_model(self) -> None:
        weight = torch.randn(3, requires_grad=True)
        with pytest.raises(
            UnitError, match=r"The step runs no module of the model with gradients.*Check step="
        ):
            measure(mlp(), step=lambda: weight.sum().backward())

    def test_a_model_that_is_called_twice(self) -> None:
        model = nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 6))

        def step() -> None:
            model.zero_grad()
            model(model(X)).sum().backward()

        profile = measure(model, step=step)
        # Not the model as one unit.
        assert [unit.name for unit in profile.units] == ["[0:2]", "2", "[0:2]#2", "2#2", "loss"]
        assert [(unit.module, unit.call) for unit in profile.units[:3]] == [
            ("[0:2]", 0),
            ("2", 0),
            ("[0:2]", 1),
        ]
        # The second call's backward comes first, and makes the gradients.
        gradients = [unit.parameter_gradient_bytes for unit in profile.problem.units]
        assert gradients == [0, 0, 70 * 4, 66 * 4, 0]

    def test_one_that_fails(self) -> None:
        def step() -> None:
            raise KeyError("batch")

        with pytest.raises(
            SampleError,
            match=r"step= failed: KeyError: 'batch'. While it is measured, units run one at a time",
        ):
            measure(mlp(), step=step)
        assert torch.autograd.backward.__module__ == "torch.autograd"


class Forces(nn.Module):
    """A force field: the gradient of an energy by positions, inside the forward."""

    def __init__(self, derive: Any) -> None:
        super().__init__()
        self.layers, self.derive = nn.Sequential(nn.Linear(3, 16), nn.SiLU(), nn.Linear(16, 1)), derive

    def forward(self, positions: Tensor) -> Tensor:
        positions = positions.detach().requires_grad_()
        with torch.enable_grad():
            (forces,) = self.derive(self.layers(positions).sum(), positions, create_graph=True)
        return forces.square().mean()


class TestDerivativesInsideTheStep:
    X = torch.randn(8, 3)

    # By its name in torch, and by a name of the user's.
    @pytest.mark.parametrize("derive", [lambda *a, **k: torch.autograd.grad(*a, **k), torch.autograd.grad])
    def test_in_the_models_forward(self, derive: Any) -> None:
        says = r"Forces failed: RuntimeError.*calls torch.autograd.grad.*name units= that contain the whole module"
        for run in (measure, recoup.audit, partial(recoup.fit, budget="1GiB")):
            with pytest.raises(SampleError, match=says):
                run(Forces(derive), self.X)
        model = nn.Sequential(Forces(derive))
        fitted = recoup.fit(model, self.X, budget="1GiB", units=["0"], race=False)
        assert fitted.verification is not None
        assert fitted.verification.gradients == "bit-equal"

    def test_of_torch_func(self) -> None:
        """Per-sample gradients, as for DP-SGD."""
        model = mlp()

        def loss_of(parameters: Any, row: Tensor) -> Tensor:
            return torch.func.functional_call(model, parameters, (row,)).sum()

        def step() -> None:
            parameters = {name: value.detach() for name, value in model.named_parameters()}
            gradients = torch.func.vmap(torch.func.grad(loss_of), (None, 0))(parameters, X)
            for name, parameter in model.named_parameters():
                parameter.grad = gradients[name].mean(0)

        says = r"step= failed: RuntimeError.*no hooks on saved tensors, by which recoup measures. Leave what uses it"
        for run in (measure, recoup.audit):
            with pytest.raises(SampleError, match=says):
                run(model, step=step)


def test_calls_of_a_step_stand_under_one_root() -> None:
    model = mlp()
    root = watch_calls(TrainingStep(model, step=lambda: (model(X) + model(X)).sum().backward()))
    assert [call.name for call in root.walk()] == ["", "", "0", "1", "2", "", "0", "1", "2"]


class Keeping(torch.autograd.Function):
    """Holds a tensor by itself: no hook sees it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.kept = x.tanh()
        return ctx.kept * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient * (1 - ctx.kept.square())


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return Keeping.apply(self.layer(x))


class TestMemoryWhileCallsAreWatched:
    """The plain step need not fit; a few activations of 128 kB do."""

    x, limit_bytes = torch.randn(2048, 16), 6 * 2**17

    def tower(self, kind: Any) -> nn.Sequential:
        return nn.Sequential(*(kind() for _ in range(12)))

    def watched_bytes(self, model: nn.Module, **subject: Any) -> int:
        training = TrainingStep(model, **subject)
        with MemoryTracker(limit_bytes=self.limit_bytes) as memory:
            root = watch_calls(training)
        assert sum(call.module in list(model) for call in root.walk()) >= 12
        return memory.peak_bytes

    def block(self) -> nn.Sequential:
        return nn.Sequential(nn.Linear(16, 16), nn.Tanh())

    def test_of_a_plain_model(self) -> None:
        assert self.watched_bytes(self.tower(self.block), sample=self.x, loss=total) <= 4 * self.x.nbytes

    def test_of_functions_that_hold_tensors_themselves(self) -> None:
        self.watched_bytes(self.tower(Keeps), sample=self.x, loss=total)

    def test_of_a_step_with_a_backward_of_another_model(self) -> None:
        model, other = self.tower(self.block), self.tower(self.block)

        def step() -> None:
            with torch.no_grad():
                fake = model(self.x)
            other(fake).sum().backward()
            other(model(self.x)).sum().backward()

        self.watched_bytes(model, step=step)

    def test_of_a_forward_that_takes_a_derivative(self) -> None:
        class Energy(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x + torch.func.grad(lambda z: z.tanh().sum())(x)

        model = self.tower(self.block).append(Energy())
        self.watched_bytes(model, sample=self.x, loss=total)
