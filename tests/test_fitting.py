"""``fit``: what it takes, what it refuses, what it counts and what it says."""

from __future__ import annotations

import gc
import re
import weakref
from dataclasses import replace
from typing import Any

import models
import pytest
import torch
from torch import Tensor, nn

import recoup
from recoup.devices.meter import CpuMeter
from recoup.engines import is_applied
from recoup.errors import BudgetError, LossError, SampleError, SizeError, UnitError
from recoup.fitting import one_fit
from recoup.sizes import format_bytes


class Layers(nn.Module):
    """Unequal layers in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16 * n), nn.Tanh(), nn.Linear(16 * n, 16)) for n in (2, 1, 3, 2)
        )

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        for layer in self.layers:
            x = layer(x) * scale
        return x


def mean_square(output: Tensor) -> Tensor:
    return output.square().mean()


UNITS = "layers.*"


def setting() -> tuple[Layers, Tensor]:
    return Layers(), torch.randn(64, 16)


def half_way(model: nn.Module, sample: Any = None, **options: Any) -> int:
    profile = recoup.measure(model, sample, units=UNITS, **options)
    return (recoup.minimum_budget(profile) + profile.plain_bytes) // 2


class WithLoss(Layers):
    """Returns its loss, as a tensor, in a dict or as an attribute."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form

    def forward(self, x: Tensor, scale: float = 1.0) -> Any:
        loss = mean_square(super().forward(x, scale=scale))
        if self.form == "dict":
            return {"loss": loss, "other": x}
        return Output(loss) if self.form == "attribute" else loss


class Output:
    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


# Samples and losses


@pytest.mark.parametrize("form", ["tensor", "dict", "attribute"])
@pytest.mark.parametrize(
    "pack", [lambda x: x, lambda x: (x, 0.5), lambda x: [x], lambda x: {"x": x, "scale": 2.0}]
)
def test_forms_of_samples_and_losses(form: str, pack: Any) -> None:
    model, sample = WithLoss(form), pack(torch.randn(64, 16))
    fitted = recoup.fit(model, sample, budget=half_way(model, sample), units=UNITS, race=False)
    assert is_applied(model)
    assert fitted.verification.gradients == "bit-equal"


def test_a_loss_of_the_output() -> None:
    model, x = setting()
    budget = half_way(model, x, loss=mean_square)
    fitted = recoup.fit(model, x, budget=budget, loss=mean_square, units=UNITS)
    assert fitted.model is model
    assert fitted.profile is fitted.plan.profile
    assert fitted.verification.peak_bytes <= fitted.plan.budget_bytes


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, SampleError, "Give either a sample .* or step="),
        ({"sample": 1, "step": print}, SampleError, "Give either a sample"),
        ({"sample": "half", "loss": 3}, SampleError, "loss= must be callable; got a int"),
        ({"step": 3}, SampleError, "step= must be callable; got a int"),
        ({"step": print, "loss": mean_square}, SampleError, "a step= callable computes its own loss"),
        (
            {"sample": torch.zeros(64, 3)},
            SampleError,
            r"Layers refuses the sample \(float32\[64, 3\]\): RuntimeError",
        ),
        (
            {"sample": (torch.zeros(2, 16), 1, 2)},
            SampleError,
            r"refuses the sample \(\(float32\[2, 16\], int, int\)\)",
        ),
        (
            {"sample": {"y": 1}},
            SampleError,
            r"refuses the sample \(\{y: int\}\).*a dict for model\(\*\*sample\)",
        ),
        (
            {"sample": "half", "loss": None},
            LossError,
            r"must be a scalar; got a tensor of shape \[64, 16\].*loss=lambda",
        ),
        ({"sample": "half", "loss": lambda output: 3.0}, LossError, "must be a scalar; got float"),
        (
            {"sample": "half", "loss": lambda output: output.detach().sum()},
            LossError,
            "does not depend on any parameter",
        ),
        ({"sample": "half", "units": "blocks.*"}, UnitError, r"'blocks\.\*' fits no module"),
        ({"sample": "half", "units": "layers"}, UnitError, "which the step never calls"),
        ({"sample": "half", "units": ["layers.0", "layers.0.1"]}, UnitError, "lies inside another unit"),
        ({"sample": "half", "budget": "8 apples"}, SizeError, "8 apples"),
        ({"sample": "half", "budget": "120%"}, SizeError, "at most at 100 %; got '120%'"),
        ({"sample": "half", "budget": 5}, BudgetError, "Apart from activations, the step needs"),
        (
            {"sample": "half", "budget": 50_000},
            BudgetError,
            r"Layers does not fit 48\.8 KiB.*parameters and buffers.*smaller batch",
        ),
        ({"step": lambda: None}, LossError, r"A step= callable must call loss\.backward"),
    ],
)
def test_what_is_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    model, x = setting()
    options = {"budget": "1GiB", "loss": mean_square, **options}
    if options.get("sample") == "half":
        options["sample"] = x
    if "step" in options and options["loss"] is mean_square and "computes its own" not in message:
        del options["loss"]
    sample = options.pop("sample", None)
    with pytest.raises(error, match=message):
        recoup.fit(model, sample, **options)
    assert not is_applied(model)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_model_without_anything_to_train() -> None:
    model, x = setting()
    with pytest.raises(SampleError, match=r"No parameter of Layers needs a gradient.*requires_grad_\(\)"):
        recoup.fit(model.requires_grad_(False), x, budget="1GiB", loss=mean_square)


def test_a_model_that_is_none() -> None:
    with pytest.raises(SampleError, match=r"must be a torch\.nn\.Module; got a function"):
        recoup.fit(mean_square, torch.zeros(3), budget="1GiB")  # type: ignore[arg-type]


def test_a_model_that_returns_no_loss() -> None:
    class Silent(Layers):
        def forward(self, x: Tensor) -> Any:
            return {"logits": super().forward(x)}

    with pytest.raises(LossError, match=r"returns a dict without a loss.*or a sample with labels"):
        recoup.fit(Silent(), torch.zeros(4, 16), budget="1GiB")


def test_a_model_of_one_layer() -> None:
    model, x = nn.Linear(4, 4), torch.randn(8, 4)
    fitted = recoup.fit(model, x, budget="1MiB", loss=mean_square)
    assert fitted.plan.keeps_everything
    assert not is_applied(model)


# Budgets


def test_budgets_as_people_write_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuMeter, "total_bytes", lambda self: 1_000_000)
    monkeypatch.setattr(CpuMeter, "free_bytes", lambda self: 500_000)
    model, x = setting()
    residents = sum(p.numel() * 4 for p in model.parameters()) + x.numel() * 4

    def budget_of(budget: int | str) -> int:
        return recoup.fit(model, x, budget=budget, loss=mean_square, verify=False).plan.budget_bytes

    assert budget_of(700_000) == 700_000
    assert budget_of("512KiB") == 512 * 1024
    assert budget_of("50%") == 500_000
    assert budget_of("auto") == residents + int(500_000 * 0.92)


def test_the_error_names_a_budget_that_works() -> None:
    model, x = setting()
    with pytest.raises(BudgetError, match="The smallest feasible budget") as caught:
        recoup.fit(model, x, budget=40_000, loss=mean_square)
    assert caught.value.budget_bytes == 40_000
    fitted = recoup.fit(model, x, budget=caught.value.smallest_bytes, loss=mean_square)
    assert fitted.verification.peak_bytes <= caught.value.smallest_bytes


@pytest.mark.parametrize("budget", [100_000, 30_000])
def test_a_model_goes_when_nobody_holds_it(budget: int) -> None:
    """Not only when Python next looks for cycles: until then its memory would count."""

    def fit() -> weakref.ref[nn.Module]:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(6)))
        try:
            recoup.fit(model, torch.randn(64, 32), budget=budget, loss=mean_square)
        except BudgetError:
            assert budget == 30_000
        return weakref.ref(recoup.remove(model))

    fit()  # what is imported on the way keeps frames
    gc.collect()
    gc.disable()
    try:
        assert fit()() is None
    finally:
        gc.enable()


def test_units_that_stand_in_the_way_are_split() -> None:
    """The whole as one unit cannot be told apart; what it calls can."""

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(*(self.part() for _ in range(2)))

        def part(self) -> nn.Module:
            return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(6)))

        def forward(self, x: Tensor) -> Tensor:
            return mean_square(self.body(x))

    model, x = Whole(), torch.randn(64, 16)
    profile = recoup.measure(model, x)
    assert [unit.name for unit in profile.units] == ["body.0", "body.1", "loss"]
    smallest = recoup.minimum_budget(profile)
    with pytest.raises(BudgetError, match="does not fit") as caught:
        recoup.fit(model, x, budget=profile.residents.optimizer_peak_bytes + 1)
    assert caught.value.smallest_bytes < smallest
    fitted = recoup.fit(model, x, budget=caught.value.smallest_bytes)
    assert fitted.profile.units[0].name == "body.0.0"
    # Named by the user, units stay as they are.
    with pytest.raises(BudgetError, match="does not fit") as caught:
        recoup.fit(model, x, budget=smallest - 1, units="body.*")
    assert caught.value.smallest_bytes == smallest


# Optimizers and steps


def test_an_optimizer_counts_before_its_first_step() -> None:
    model, x = setting()
    parameter_bytes = sum(p.numel() * 4 for p in model.parameters())
    plain = recoup.fit(model, x, budget="1MiB", loss=mean_square)
    assert plain.profile.residents.optimizer_bytes == 0
    optimizer = torch.optim.AdamW(model.parameters())
    fitted = recoup.fit(model, x, budget="1MiB", loss=mean_square, optimizer=optimizer)
    num_counters = len(list(model.parameters()))
    assert fitted.profile.residents.optimizer_bytes == 2 * parameter_bytes + 4 * num_counters
    assert not optimizer.state
    assert fitted.profile.plain_bytes >= plain.profile.plain_bytes + 2 * parameter_bytes
    mean_square(model(x)).backward()
    optimizer.step()
    later = recoup.fit(model, x, budget="1MiB", loss=mean_square, optimizer=optimizer)
    assert later.profile.residents == fitted.profile.residents


def test_an_optimizer_whose_step_alone_is_too_much() -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256))
    x = torch.randn(2, 256)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    profile = recoup.measure(model, x, loss=mean_square, optimizer=optimizer)
    floor = profile.residents.optimizer_peak_bytes
    assert floor > profile.residents.total_bytes + profile.residents.gradient_bytes
    with pytest.raises(BudgetError, match=rf"The optimizer's own step needs .* \({floor} bytes") as caught:
        recoup.fit(model, x, budget=floor - 1, loss=mean_square, optimizer=optimizer)
    assert caught.value.smallest_bytes == floor
    fitted = recoup.fit(model, x, budget=floor, loss=mean_square, optimizer=optimizer)
    assert fitted.verification.peak_bytes == floor
    assert fitted.plan.keeps_everything


def test_a_step_of_the_users_own() -> None:
    model, x = setting()
    model.layers.append(nn.BatchNorm1d(16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []

    def step() -> None:
        optimizer.zero_grad()
        loss = mean_square(model(x)) + 0.1 * mean_square(model(x, scale=0.5))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()

    step()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    moments = {
        p: {key: value.clone() for key, value in entry.items()} for p, entry in optimizer.state.items()
    }
    gradients = [p.grad.clone() for p in model.parameters()]
    budget = half_way(model, step=step, optimizer=optimizer)
    fitted = recoup.fit(model, step=step, budget=budget, optimizer=optimizer, units=UNITS)
    assert fitted.verification.gradients == "bit-equal"
    assert fitted.verification.peak_bytes <= budget
    called = [unit.name for unit in fitted.profile.units if unit.name.startswith("layers.0")]
    assert called == ["layers.0", "layers.0#2"]
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    for parameter, entry in optimizer.state.items():
        assert all(torch.equal(value, moments[parameter][key]) for key, value in entry.items())
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
    step()
    planned = losses[-1], [p.detach().clone() for p in model.parameters()]
    # The same step once more from the same state, plainly.
    recoup.remove(model)
    model.load_state_dict(state)
    for parameter, entry in moments.items():
        optimizer.state[parameter] = entry
    step()
    assert losses[-1] == planned[0]
    assert all(map(torch.equal, planned[1], model.parameters()))


def test_the_state_of_an_optimizer_inside_the_step_counts_once() -> None:
    model, x = setting()
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        mean_square(model(x)).backward()
        optimizer.step()

    def peak_bytes() -> int:
        fitted = recoup.fit(model, step=step, budget="1MiB", optimizer=optimizer, units=UNITS)
        return fitted.verification.peak_bytes

    first = peak_bytes()
    assert not optimizer.state
    outside = recoup.fit(model, x, loss=mean_square, budget="1MiB", optimizer=optimizer, units=UNITS)
    # Outside, the sample is a resident, and fit holds on to the model's output.
    assert outside.verification.peak_bytes - 2 * x.nbytes <= first <= outside.verification.peak_bytes
    step()
    assert peak_bytes() == first


def test_steps_that_add_up_gradients() -> None:
    model, x = setting()
    once = recoup.measure(model, x, loss=mean_square)
    adding = recoup.measure(model, x, loss=mean_square, accumulates=True)
    gradient_bytes = adding.residents.gradient_bytes
    assert adding.problem.resident_bytes == once.problem.resident_bytes + gradient_bytes
    assert recoup.minimum_budget(adding) > recoup.minimum_budget(once)
    budget = half_way(model, x, loss=mean_square, accumulates=True)
    mean_square(model(x)).backward()
    before = [p.grad.clone() for p in model.parameters()]
    fitted = recoup.fit(model, x, budget=budget, loss=mean_square, accumulates=True, units=UNITS)
    assert fitted.verification.gradients == "bit-equal"
    assert fitted.verification.peak_bytes <= budget
    assert abs(fitted.plan.predicted_bytes / fitted.verification.peak_bytes - 1) < 0.01
    assert all(map(torch.equal, before, (p.grad for p in model.parameters())))


def test_a_step_that_accumulates_is_recognised() -> None:
    model, x = setting()

    def step() -> None:
        model.zero_grad()
        for part in x.chunk(2):
            mean_square(model(part)).backward()

    profile = recoup.measure(model, step=step, units=UNITS)
    assert profile.accumulates
    assert profile.problem.resident_bytes >= profile.residents.gradient_bytes + profile.residents.total_bytes
    budget = (recoup.minimum_budget(profile) + profile.plain_bytes) // 2
    fitted = recoup.fit(model, step=step, budget=budget, units=UNITS)
    assert fitted.verification.peak_bytes <= budget
    assert fitted.verification.gradients == "bit-equal"


def test_a_plan_without_rivals_is_predicted_by_its_own_steps() -> None:
    """It keeps everything, as the plain step does: its prediction lies between what the two took."""
    model, x = setting()
    fitted = recoup.fit(model, x, budget="1GiB", loss=mean_square, units=UNITS)
    seen = fitted.verification
    assert seen is not None
    assert seen.plain_seconds is not None
    assert fitted.plan.keeps_everything
    assert not seen.race
    low, high = sorted([seen.seconds, seen.plain_seconds])
    assert low * (1 - 1e-6) <= fitted.plan.predicted_s <= high * (1 + 1e-6)


def test_fit_leaves_a_training_run_as_it_is() -> None:
    model = models.ResNet(models.plainly)
    (x,) = models.ResNet.sample()
    before = models.train(model, (x,), 2)
    model(x).backward()
    gradients = [p.grad for p in model.parameters()]
    values = [g.clone() for g in gradients]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    rng = torch.get_rng_state()
    profile = recoup.measure(model, x)
    recoup.fit(model, x, budget=(recoup.minimum_budget(profile) + profile.plain_bytes) // 2)
    assert torch.equal(rng, torch.get_rng_state())
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert all(map(torch.equal, values, gradients))
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert model.training
    assert before.keys() == models.train(model, (x,), 2).keys()


# What it says


def test_a_fit_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(6)))
    x = torch.randn(256, 32)

    def verify_step(*args: Any) -> Any:
        return replace(VERIFY(*args), seconds=0.00246, plain_seconds=0.00123)

    monkeypatch.setattr(one_fit, "verify_step", verify_step)
    fitted = recoup.fit(model, x, budget="300KiB", loss=mean_square, units="*")
    # Which plan it is depends on the seconds of the day.
    predicted, measured = (
        format_bytes(fitted.plan.predicted_bytes),
        format_bytes(fitted.verification.peak_bytes),
    )
    lines = re.sub(r"((?:step, \S+|overhead) ) *[\d.]+ (?:s|ms|µs|%)", r"\1<time>", str(fitted)).splitlines()
    assert lines[:10] == [
        f"Sequential on cpu. Fits: {measured} of 300 KiB, 100 % slower than plain.",
        "                 predicted    measured",
        "  peak, plain      569 KiB     569 KiB",
        f"  peak, fitted  {predicted:>10}  {measured:>10}",
        "  budget           300 KiB",
        "  step, plain <time>     1.23 ms",
        "  step, fitted <time>     2.46 ms",
        "  overhead <time>       100 %",
        "  gradients                  bit-equal",
        "",
    ]
    assert lines[10].startswith(
        "  The training loop is taken to hold the model's output (the output, 32.0 KiB)"
    )
    assert any(line.startswith("  0") for line in lines[11:])
    assert repr(fitted).startswith("Fitted(plan=ModelPlan(")


VERIFY = one_fit.verify_step
