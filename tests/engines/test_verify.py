"""``verify``: real steps against the budget and against the plain step."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from tally import Tally
from torch import Tensor, nn

import recoup
from recoup.checkpointing.fingerprints import differing, fingerprint, on_host
from recoup.devices.meter import CpuMeter, Timing
from recoup.engines import Leaf, ModelPlan, apply, compare_by_unit, is_applied, remove
from recoup.engines.compare_by_unit import compare_units
from recoup.engines.drift import AFTER, Drift, beyond_rounding, drift_between, sizes_of, too_far
from recoup.engines.racing import _ENOUGH_S
from recoup.engines.real_steps import RealSteps
from recoup.engines.verify import Verification, _compare_generated
from recoup.errors import BudgetError, OverBudgetError, VerificationError
from recoup.fitting import one_fit
from recoup.measuring import MemoryTracker, Profile
from recoup.measuring.measure import Measured
from recoup.model.recipe import Recipe
from recoup.model.step import TrainingStep
from recoup.model.streaming import UnitCall

TICKS = itertools.count(1)


class Drifting(nn.Module):
    """Each forward scales with a number that nothing but this process knows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * next(TICKS)


class Generated:
    """Steps of generated code by their gradients: under the plan, with everything kept (and other last bits), eager."""

    def __init__(self, draws: bool, **gradients: Tensor) -> None:
        self.draws, self.gradients, self.way = draws, gradients, "planned"
        self.step = TrainingStep(nn.Linear(1, 1), torch.ones(1))

    def results(self, see: Callable[[Tensor], Any]) -> dict[str, Any]:
        return {"weight": see(self.gradients[self.way])}

    def inspect(self, see: Callable[[dict[str, Tensor]], Any]) -> Any:
        return see({"weight": self.gradients[self.way]})

    @contextmanager
    def _as(self, way: str) -> Iterator[None]:
        before, self.way = self.way, way
        yield
        self.way = before

    def plainly(self) -> Any:
        return self._as("kept")

    def eagerly(self) -> Any:
        return self._as("eager")

    def shaken(self) -> Any:
        return self._as("shaken" if "shaken" in self.gradients else "kept")

    def compare(self) -> tuple[Any, str]:
        with self.plainly():
            plain = self.results(fingerprint)
        return _compare_generated(self, self.results(fingerprint), plain)  # type: ignore[arg-type]


class TestGeneratedCode:
    """All cuts draw the same random numbers; eager code draws others, and is no measure of rounding then."""

    def test_code_that_draws_may_differ_by_rounding_only(self) -> None:
        kept, eager = torch.ones(8), torch.arange(8.0)
        wrong = Generated(True, planned=kept * 1.2, kept=kept, eager=eager)
        with pytest.raises(VerificationError, match=r"'weight' \(relative error 0.2, .* everything kept"):
            wrong.compare()
        drifting, words = Generated(True, planned=kept * 1.01, kept=kept, eager=eager).compare()
        assert [drift.name for drift in drifting] == ["weight"]
        assert words.startswith("relative error up to 0.01 to the compiled step with everything kept")
        assert words.endswith("(it draws other random numbers)")

    def test_gradients_that_last_bits_change_may_differ_by_more(self) -> None:
        """Those of a T5's queries in bfloat16 did, by 7 %: the fit was refused."""
        kept, eager = torch.ones(8), torch.arange(8.0)
        ways = {"planned": kept * 1.07, "kept": kept, "eager": eager}
        drifting, words = Generated(True, shaken=kept * 1.04, **ways).compare()
        assert [drift.name for drift in drifting] == ["weight"]
        assert words.startswith("relative error up to 0.07 to the compiled step with everything kept")
        with pytest.raises(VerificationError, match=r"'weight' \(relative error 0.07"):
            Generated(True, shaken=kept * 1.03, **ways).compare()
        with pytest.raises(VerificationError, match=r"'weight' \(relative error 0.07"):
            Generated(True, shaken=kept * torch.inf, **ways).compare()

    def test_gradients_that_are_noise_are_named(self) -> None:
        """A comparison says little of gradients a quarter apart, though last bits move them as far."""
        kept, eager = torch.ones(8), torch.arange(8.0)
        ways = {"planned": kept * 1.4, "kept": kept, "eager": eager}
        _, words = Generated(True, shaken=kept * 1.3, **ways).compare()
        assert words.endswith("too noisy to be compared: 'weight' (relative error 0.4, cosine 1.0000)")

    def test_code_that_does_not_draw_is_measured_by_eager_code(self) -> None:
        kept, eager = torch.ones(8), torch.full((8,), 1.03)
        drifting, _ = Generated(False, planned=kept * 1.2, kept=kept, eager=eager).compare()
        assert len(drifting) == 1
        with pytest.raises(VerificationError, match="everything kept"):
            Generated(False, planned=kept * 1.4, kept=kept, eager=eager).compare()


class Masked(nn.Module):
    """A layer with dropout, whose replay makes another mask where it is told to."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)
        self.index, self.is_wrong, self.num_calls = index, False, 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        seed = self.index + 1000 * self.is_wrong * (self.num_calls == 2)
        mask = torch.rand(x.shape, generator=torch.Generator().manual_seed(seed)) > 0.05
        return x + self.narrow(self.wide(self.norm(x)).relu()) * mask / 0.95


class Tower(nn.Module):
    """Such layers, each of them under a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(Masked, range(12)))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            layer.num_calls = 0
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False, determinism_check="none")
        return x


class MaskedSteps(RealSteps):
    """Steps of a tower as if its code were generated: as it is, and with the right masks."""

    draws = True  # type: ignore[assignment]

    @contextmanager
    def plainly(self) -> Iterator[None]:
        wrong = [layer for layer in self.step.model.layers if layer.is_wrong]
        for layer in wrong:
            layer.is_wrong = False
        yield
        for layer in wrong:
            layer.is_wrong = True

    eagerly = plainly

    def compare(self) -> tuple[Any, str]:
        with self.plainly():
            plain = self.results(fingerprint)
        return _compare_generated(self, self.results(fingerprint), plain)


def test_another_mask_in_a_replay_is_no_rounding() -> None:
    """In bfloat16 other last bits of all weights move gradients by a few per cent; another mask does by more."""
    torch.manual_seed(0)
    model, x = Tower().bfloat16(), torch.randn(32, 64).bfloat16()
    profile = recoup.measure(nn.Sequential(nn.Linear(64, 1)).bfloat16(), x, loss=torch.sum)
    steps = MaskedSteps(TrainingStep(model, x, loss=lambda y: y.float().square().mean()), profile)
    drifting, words = steps.compare()
    assert drifting == ()
    assert words.startswith("bit-equal to the compiled step with everything kept")
    model.layers[6].is_wrong = True
    with pytest.raises(VerificationError, match="everything kept by more than rounding"):
        steps.compare()


STATE = [1.0]


class Stateful(nn.Module):
    """Depends on a number that it changes and that the model sets anew in each step: plain steps agree."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        STATE[0] += 0.5
        return torch.tanh(self.linear(x * STATE[0]))


class Scaling(nn.Module):
    """The same without a parameter."""

    def forward(self, x: Tensor) -> Tensor:
        STATE[0] += 0.5
        return torch.tanh(x * STATE[0])


class Around(nn.Module):
    """Layers, the unit under test, layers."""

    def __init__(self, unit: nn.Module) -> None:
        super().__init__()
        self.first = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2))
        self.unit = unit
        self.last = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        STATE[0] = 1.0
        for layer in [*self.first, self.unit, *self.last]:
            x = layer(x)
        return x.square().mean()


UNITS = ["first.*", "unit", "last.*"]


def middle(model: nn.Module, x: Tensor, share: float = 0.5, **options: Any) -> int:
    """A budget between the smallest and the plain one."""
    profile = recoup.measure(model, x, **options)
    low = recoup.minimum_budget(profile)
    return int(low + share * (profile.plain_bytes - low))


def test_a_real_step_is_measured() -> None:
    model, x = Around(nn.Linear(16, 16)), torch.randn(64, 16)
    fitted = recoup.fit(model, x, budget=middle(model, x))
    seen = recoup.verify(model, fitted.plan, x)
    assert seen.gradients == "bit-equal"
    assert seen.drifting == ()
    assert seen.peak_bytes == fitted.verification.peak_bytes <= fitted.plan.budget_bytes
    assert seen.plain_peak_bytes == pytest.approx(fitted.profile.plain_bytes, abs=8)
    assert seen.seconds > 0
    assert seen.plain_seconds is not None
    assert seen.plain_seconds > 0


@pytest.mark.parametrize(("host_s", "num_rounds"), [(0.5, 2), (0.9, 4)])
def test_a_step_that_the_host_sets_the_pace_of_is_timed_for_longer(
    monkeypatch: pytest.MonkeyPatch, host_s: float, num_rounds: int
) -> None:
    """Hosts vary more than devices."""
    model, x = Around(nn.Linear(16, 16)), torch.randn(64, 16)
    fitted = recoup.fit(model, x, budget=middle(model, x), verify=False)
    timed: list[float] = []

    def time_step(meter: CpuMeter, run: Callable[[], Any]) -> Timing:
        run()
        timed.append(0.07 + 0.005 * len(timed))
        return Timing(timed[-1], host_s * timed[-1])

    monkeypatch.setattr(CpuMeter, "time_step", time_step)
    monkeypatch.setitem(_ENOUGH_S, "cpu", 0.15)
    seen = recoup.verify(model, fitted.plan, x)
    assert seen.seconds == timed[0]
    # Plain steps take turns with these: the second is 0.08 s, 0.15 s in all; the fourth 0.1 s, 0.34 s in all.
    assert seen.plain_seconds == timed[1]
    assert len(timed) == 2 * num_rounds


def test_the_peak_is_that_of_the_step() -> None:
    model, x = Around(nn.Linear(16, 16)), torch.randn(64, 16)
    fitted = recoup.fit(model, x, budget=middle(model, x))
    with MemoryTracker() as memory:
        model(x).backward()
    assert fitted.profile.residents.total_bytes + memory.peak_bytes == fitted.verification.peak_bytes


def test_verifying_leaves_no_trace() -> None:
    model, x = Around(nn.BatchNorm1d(16)), torch.randn(64, 16)
    fitted = recoup.fit(model, x, budget=middle(model, x))
    model(x).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    values = [gradient.clone() for gradient in gradients]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    rng = torch.get_rng_state()
    recoup.verify(model, fitted.plan, x)
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), gradients, strict=True))
    assert all(map(torch.equal, values, gradients))
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(rng, torch.get_rng_state())


# Gradients


def test_unsafe_units_are_kept() -> None:
    model, x = Around(Drifting()), torch.randn(64, 16)
    fitted = recoup.fit(model, x, budget=middle(model, x, 0.0, unsafe={"unit": "drifts"}) + 5000, units=UNITS)
    assert set(fitted.audit.unsafe) == {"unit"}
    assert fitted.audit.unsafe["unit"].startswith("values drift")
    (unit,) = [unit for unit in fitted.profile.units if unit.name == "unit"]
    assert [recipe.name for recipe in unit.recipes] == ["keep"]
    assert unit.unsafe == fitted.audit.unsafe["unit"]
    assert "  kept, because unsafe: unit (values drift" in str(fitted)
    assert fitted.profile.problem.units[fitted.profile.units.index(unit)].runs_once
    kept = [item for item in fitted.plan.items if isinstance(item, Leaf)]
    assert fitted.profile.units.index(unit) in [leaf.unit for leaf in kept]
    assert not fitted.plan.keeps_everything


def test_parameters_that_drift_in_plain_steps_too_are_named() -> None:
    """All of them here: the scale goes into every gradient."""
    model, x = Around(Drifting()), torch.randn(64, 16)
    fitted = recoup.fit(model, x, budget=middle(model, x, 0.0, unsafe={"unit": "drifts"}) + 5000, units=UNITS)
    found = {drift.name: drift for drift in fitted.verification.drifting}
    assert found.keys() == {name for name, _ in model.named_parameters()}
    assert all(drift.relative_error > 0 and -1 <= drift.cosine <= 1 for drift in found.values())
    assert fitted.verification.gradients.startswith(
        "not bit-equal, as in plain steps: 10 with a relative error up to"
    )
    assert "not deterministic in plain steps either: first.0.0.bias (relative error " in str(fitted)


def forced(model: nn.Module, x: Tensor) -> ModelPlan:
    """The plan with the least memory for a model that is taken to be safe."""
    profile = recoup.measure(model, x, units=UNITS)
    return recoup.plan(profile, recoup.minimum_budget(profile))


def test_a_unit_that_does_not_repeat_itself_is_named() -> None:
    model, x = Around(Stateful()), torch.randn(64, 16)
    plan = forced(model, x)
    apply(model, plan)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(
        VerificationError, match=r"(?s)does not repeat the forward.*has other values.*recoup\.audit"
    ):
        recoup.verify(model, plan, x)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert is_applied(model)


def test_insisting_on_a_unit_that_drifts_is_refused_by_the_real_step() -> None:
    model, x = Around(Stateful()), torch.randn(64, 16)
    budget = forced(model, x).budget_bytes
    audit = recoup.audit(model, x, units=UNITS)
    assert set(audit.unsafe) == {"unit"}
    with pytest.raises(
        VerificationError, match=r"(?s)does not repeat the forward.*has other values.*recoup\.audit"
    ):
        recoup.fit(model, x, budget=budget, units=UNITS, insist=True)
    assert not is_applied(model)
    with pytest.raises(BudgetError, match="does not fit"):
        recoup.fit(model, x, budget=budget, units=UNITS)


def without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuMeter, "free_bytes", lambda self: 0)


def test_where_the_plain_step_does_not_fit_units_are_compared_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without_room(monkeypatch)
    model, x = Around(nn.Sequential(nn.BatchNorm1d(16), nn.Dropout(0.5))), torch.randn(64, 16)
    state = copy.deepcopy(model.state_dict())
    fitted = recoup.fit(model, x, budget=middle(model, x, 0.3))
    assert fitted.verification.gradients == "bit-equal, unit by unit"
    assert fitted.verification.plain_peak_bytes is None
    assert fitted.verification.plain_seconds is None
    assert "bit-equal, unit by unit" in str(fitted)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("unit", "what"),
    [
        (Stateful, r"'gradient of linear.bias' \(relative error .*, 'output 0' "),
        (Scaling, r"'output 0' .*\. Run"),
    ],
)
def test_one_by_one_the_unit_that_does_not_repeat_itself_is_named(
    unit: type[nn.Module], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_room(monkeypatch)
    model, x = Around(unit()), torch.randn(64, 16)
    plan = apply_forced(model, x)
    with pytest.raises(VerificationError, match=f"Replayed, unit 'unit' does not give what .* kept: {what}"):
        compare_units(TrainingStep(model, x), plan)


class Starved(nn.Module):
    """Finds no memory while gradients are compared unit by unit: in its third run of a stream."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        if is_starving[0]:
            raise torch.OutOfMemoryError("no memory")
        return torch.tanh(self.linear(x))


is_starving = [False]


def test_units_that_were_skipped_are_not_called_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    without_room(monkeypatch)
    model, x = Around(Starved()), torch.randn(64, 16)
    plan = apply_forced(model, x)
    real = compare_by_unit._results

    def results(call: UnitCall, recipe: Recipe) -> Any:
        is_starving[0] = isinstance(call.module, Starved)
        try:
            return real(call, recipe)
        finally:
            is_starving[0] = False

    monkeypatch.setattr(compare_by_unit, "_results", results)
    seen = recoup.verify(model, plan, x)
    assert seen.gradients == "bit-equal, unit by unit; not compared for lack of memory: unit"
    monkeypatch.setattr(
        compare_by_unit, "_results", lambda *args: (_ for _ in ()).throw(torch.OutOfMemoryError())
    )
    assert recoup.verify(model, plan, x).gradients == "not compared, for lack of memory"


def test_a_flipped_sign_is_no_rounding() -> None:
    """Its norm is that of the plain gradient."""
    gradient = torch.randn(64)
    noisy = {"w": gradient * (1 + 1e-6)}
    (own,), (flipped,) = (
        drift_between({"w": gradient}, noisy),
        drift_between({"w": gradient}, {"w": -gradient}),
    )
    assert own.relative_error == pytest.approx(1e-6, rel=0.1)
    assert (flipped.relative_error, flipped.cosine) == (pytest.approx(2.0), pytest.approx(-1.0))
    assert too_far([own], [own]) == []
    assert too_far([flipped], [own]) == [flipped]


@pytest.mark.parametrize(
    ("left", "right", "error", "cosine"),
    [
        ({"w": torch.ones(4)}, {}, math.inf, 0.0),
        ({"w": torch.zeros(4)}, {"w": torch.ones(4)}, math.inf, 0.0),
        ({"w": torch.tensor([3.0, 4.0])}, {"w": torch.tensor([3.0, 4.5])}, 0.1, 0.9978),
        ({"w": torch.tensor([math.nan, 4.0])}, {"w": torch.tensor([math.nan, 5.0])}, 0.25, 1.0),
        ({"w": torch.tensor([math.nan, 4.0])}, {"w": torch.tensor([3.0, 4.0])}, math.inf, 0.0),
        ({"w": torch.tensor([3.0, 4.0])}, {"w": torch.tensor([math.nan, 4.0])}, math.inf, 0.0),
        ({"w": torch.ones(2)}, {"w": torch.ones(3)}, math.inf, 0.0),
        ({"w": torch.ones(1, dtype=torch.complex64)}, {"w": torch.ones(1)}, math.inf, 0.0),
        ({"w": torch.tensor([3 + 4j])}, {"w": torch.tensor([3 + 4j]).conj()}, 1.6, -0.28),
        (
            {"w": torch.ones(2**22)},
            {"w": torch.ones(2**22).index_fill(0, torch.arange(2**21), -1)},
            2**0.5,
            0.0,
        ),
        ({"w": torch.tensor([3 + 4j])}, {"w": torch.tensor([3 - 4j])}, 1.6, -0.28),
    ],
)
def test_how_far_results_are_apart(left: Any, right: Any, error: float, cosine: float) -> None:
    (found,) = drift_between(left, right)
    assert found == ("w", pytest.approx(error), pytest.approx(cosine, abs=1e-3))


def test_a_gradient_that_overflows_is_no_measure_for_the_others() -> None:
    infinite = {"a": torch.tensor([math.inf])}
    found = drift_between(
        infinite | {"w": torch.tensor([1.0, 4.0])}, infinite | {"w": torch.tensor([5.0, 4.0])}
    )
    assert [drift.name for drift in too_far(found)] == ["w"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_are_no_measure_for_gradients(dtype: torch.dtype) -> None:
    """Where a step trains, both are compared: parameters are much larger."""
    parameter = {f"w{AFTER}": torch.full((10_000,), 1e3, dtype=dtype)}
    gradients = {name: torch.full((4,), 1e-3, dtype=dtype) for name in "ab"}
    opposite = {name: -gradient for name, gradient in gradients.items()}
    found = drift_between(parameter | gradients, parameter | opposite)
    assert [drift.name for drift in too_far(found)] == ["a", "b"]
    found = drift_between(gradients, opposite, sizes=sizes_of(parameter | gradients))
    assert [drift.name for drift in beyond_rounding(found, gradients)] == ["a", "b"]


def test_equal_results_do_not_drift() -> None:
    sparse = torch.eye(3).to_sparse()
    assert drift_between({"w": on_host(sparse)}, {"w": on_host(sparse.clone())}) == []
    assert differing({"w": fingerprint(sparse)}, {"w": fingerprint(sparse * 2)}) == ["w"]


@pytest.mark.parametrize(("dtype", "noise"), [(torch.float32, 5e-6), (torch.bfloat16, 1e-4)])
def test_gradients_that_are_zero_but_for_rounding_are_not_too_far(dtype: torch.dtype, noise: float) -> None:
    """As that of a bias before a normalisation: its sign may be another each time."""
    weight = torch.ones(100, dtype=dtype)
    first, second = torch.full((4,), noise, dtype=dtype), torch.full((4,), -noise, dtype=dtype)
    found = drift_between({"w": weight, "b": first}, {"w": weight, "b": second})
    assert too_far(found) == beyond_rounding(found, {"b": first}) == []
    assert too_far(drift_between({"b": first}, {"b": second}))
    # Also where they alone differ, and are compared.
    sizes = sizes_of({"w": weight, "b": first, f"w{AFTER}": 3 * weight})
    assert sizes == (pytest.approx(10, rel=1e-3), pytest.approx(30))
    found = drift_between({"b": first}, {"b": second}, sizes=sizes)
    assert too_far(found) == beyond_rounding(found, {"b": first}) == []
    assert too_far(drift_between({"b": 10 * first}, {"b": 10 * second}, sizes=sizes))
    wrong = drift_between({"w": weight, "b": weight[:4]}, {"w": weight, "b": -weight[:4]})
    assert [drift.name for drift in too_far(wrong)] == ["b"]


def test_rounding_is_that_of_the_dtype_that_is_computed_with() -> None:
    """Gradients of parameters in 32 bits are computed in 16 under autocast."""
    results, rounded, wrong = {"w": torch.ones(4)}, Drift("w", 0.01, 1.0), Drift("w", 0.1, 1.0)
    assert beyond_rounding([rounded], results) == [rounded]
    assert beyond_rounding([rounded, wrong], results, "bfloat16") == [wrong]


def apply_forced(model: nn.Module, x: Tensor) -> ModelPlan:
    plan = forced(model, x)
    apply(model, plan)
    return plan


# Peaks


class Surprised(Measured):
    """A measurement that misses bytes which are always there."""

    bytes_more = 0

    def profile(self, holds_output: bool) -> Profile:
        profile = super().profile(holds_output)
        problem = profile.problem
        return replace(profile, problem=problem.with_resident(problem.resident_bytes - self.bytes_more))


def surprised(bytes_more: int) -> Callable[..., Measured]:
    def measure_step(*args: Any, **kwargs: Any) -> Measured:
        found = Surprised(**vars(MEASURE(*args, **kwargs)))
        object.__setattr__(found, "bytes_more", bytes_more)
        return found

    return measure_step


MEASURE = one_fit.measure_step


def chain() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(6))), torch.randn(
        64, 16
    )


def count_rounds(monkeypatch: pytest.MonkeyPatch) -> list[Verification | OverBudgetError]:
    rounds: list[Verification | OverBudgetError] = []

    def verify_step(*args: Any) -> Verification:
        try:
            rounds.append(VERIFY(*args))
        except OverBudgetError as error:
            rounds.append(error)
            raise
        return rounds[-1]

    monkeypatch.setattr(one_fit, "verify_step", verify_step)
    return rounds


VERIFY = one_fit.verify_step


def test_a_peak_above_the_budget_is_planned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = chain()
    budget = middle(model, x, loss=torch.sum)
    rounds = count_rounds(monkeypatch)
    # So much that keeping everything seems to fit, whatever the seconds say.
    monkeypatch.setattr(one_fit, "measure_step", surprised(10_000))
    fitted = recoup.fit(model, x, budget=budget, loss=torch.sum)
    assert 2 <= len(rounds) <= 3
    assert rounds[0].peak_bytes > budget
    assert fitted.verification is rounds[-1]
    assert fitted.verification.peak_bytes <= budget
    # What it learned is in its prediction.
    assert abs(fitted.plan.predicted_bytes - fitted.verification.peak_bytes) < 100


FIXED: dict[str, Any] = {"loss": torch.sum, "units": "*", "holds_output": True}
"""One way to measure only: neither finer units, nor an output that is let go of."""


def test_where_plans_miss_the_budget_the_one_with_the_least_memory_is_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x = chain()
    smallest = recoup.minimum_budget(recoup.measure(model, x, **FIXED))
    rounds = count_rounds(monkeypatch)
    monkeypatch.setattr(one_fit, "measure_step", surprised(2000))
    # Nothing is learned from a round: each plans the same again.
    monkeypatch.setattr(one_fit, "_with_surprise", lambda chosen, peak_bytes: chosen.profile)
    fitted = recoup.fit(model, x, budget=smallest, **FIXED)
    assert len(rounds) == 4
    assert fitted.verification.peak_bytes == fitted.plan.budget_bytes == smallest
    assert fitted.plan.predicted_bytes == smallest - 2000


def test_a_peak_above_the_budget_that_no_plan_can_avoid(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = chain()
    smallest = recoup.minimum_budget(recoup.measure(model, x, **FIXED))
    monkeypatch.setattr(one_fit, "measure_step", surprised(2000))
    named = rf"does not fit .*smallest feasible budget is .* \({smallest} bytes, verified on a real step\)"
    with pytest.raises(BudgetError, match=named) as caught:
        recoup.fit(model, x, budget=smallest - 1000, **FIXED)
    assert caught.value.smallest_bytes == smallest
    assert not is_applied(model)


def test_a_refusal_without_a_real_step_is_a_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where that is not asked for, would not fit, runs out of memory, or takes too long."""
    model, x = chain()
    smallest = recoup.minimum_budget(recoup.measure(model, x, **FIXED))
    named = rf"smallest feasible budget is .* \({smallest} bytes, predicted\)"

    def refused(**options: Any) -> None:
        with pytest.raises(BudgetError, match=named):
            recoup.fit(model, x, budget=smallest - 1, **FIXED, **options)
        assert not is_applied(model)

    refused(verify=False)
    with monkeypatch.context() as patched:
        patched.setattr(CpuMeter, "free_bytes", lambda self: 1000)
        refused()
    with monkeypatch.context() as patched:
        patched.setattr(one_fit, "_MOST_TRIAL_S", 0.0)
        refused()

    def run_out(*args: Any) -> Verification:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(one_fit, "verify_step", run_out)
    refused()


def test_verify_alone_refuses_a_peak_above_the_budget() -> None:
    model, x = chain()
    fitted = recoup.fit(model, x, budget=middle(model, x, loss=torch.sum), loss=torch.sum)
    small = replace(fitted.plan, budget_bytes=fitted.verification.peak_bytes - 1)
    steps = Tally()
    handle = model.register_forward_hook(lambda *_: steps.add())
    with pytest.raises(OverBudgetError, match=r"A real step peaks at .*above the budget") as caught:
        recoup.verify(model, small, x, loss=torch.sum)
    handle.remove()
    assert caught.value.peak_bytes == fitted.verification.peak_bytes
    assert len(steps.take()) == 1  # neither timed nor compared
    remove(model)
    with pytest.raises(VerificationError, match="above the budget"):
        recoup.verify(model, fitted.plan, x, loss=torch.sum)


def test_without_verification() -> None:
    model, x = chain()
    fitted = recoup.fit(model, x, budget=middle(model, x, loss=torch.sum), loss=torch.sum, verify=False)
    assert fitted.verification is None
    assert is_applied(model)
    assert str(fitted).startswith("Sequential on cpu. Predicted to fit: ")
    assert "bit-equal" not in str(fitted)
