"""Plans on captured units: gradients of eager code at every budget, peaks as predicted, copies, units left eager."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from capture.blocks import Block as FeedForward
from engines.captured_models import MODELS, SLACK, assert_equal, budgets, cuts_in, run
from models import MoE, plainly
from real_steps import real_peak_bytes
from slowly import slow_but
from torch import Tensor, nn

import recoup
import recoup.capture.run
from recoup.engines import ModelPlan
from recoup.engines.real_steps import RealSteps
from recoup.model.step import TrainingStep
from recoup.plans.profile import Profile
from recoup.sizes import format_bytes

pytestmark = [
    # The compiler looks at the gradients of what it is given.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf.*:UserWarning"),
    # Its code generator imports what torch itself calls deprecated.
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method.:DeprecationWarning"),
]


QUICK = ("U-Net", "U-Net with BatchNorm", "mixture of experts", "GPT-2", "Llama", "ViT")


@pytest.mark.parametrize("name", slow_but(QUICK, MODELS))
def test_bit_equal_to_eager_and_as_large_as_predicted_at_every_budget(name: str) -> None:
    model, sample = MODELS[name]()
    expected = run(model, sample)
    profile = recoup.measure(model, sample, engine="captured")
    assert profile.is_captured
    assert not any(unit.uncaptured for unit in profile.units)
    used = set()
    for budget_bytes in budgets(profile, 5):
        plan = recoup.plan(profile, budget_bytes)
        used |= cuts_in(plan)
        recoup.apply(model, plan)
        assert_equal(run(model, sample), expected)
        peak_bytes = profile.problem.resident_bytes + real_peak_bytes(model, sample)
        assert plan.predicted_bytes - SLACK.get(name, 0) <= peak_bytes <= plan.predicted_bytes <= budget_bytes
    assert any("keeps" in cut for cut in used)  # operations were chosen, and not whole units
    recoup.remove(model)
    assert_equal(run(model, sample), expected)


class Breaking(FeedForward):
    def forward(self, x: Tensor) -> Tensor:
        y = self.up(self.norm(x))
        torch._dynamo.graph_break()
        return x + self.down(F.gelu(y))


class Choosing(FeedForward):
    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.up(self.norm(x)))
        return x + self.down(y if x.sum() > -1e9 else y * 2)


class Skipping(FeedForward):
    """Leaves out what no row needs."""

    def forward(self, x: Tensor) -> Tensor:
        rows = (x[:, 0] > 0).nonzero()[:, 0]
        return x.index_add(0, rows, super().forward(x[rows])) if len(rows) else x


class Mixed(nn.Module):
    """Units that can be captured beside some that cannot."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([FeedForward(16), kind(16), FeedForward(16), kind(16)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class TestWhatCannotBeCaptured:
    @pytest.mark.parametrize(
        ("kind", "reason"),
        [
            (Breaking, "graph_break"),
            (Skipping, "ata-dependent"),
            pytest.param(Choosing, "ata-dependent", marks=pytest.mark.slow),
        ],
    )
    def test_it_runs_eagerly_and_the_budget_holds(self, kind: Any, reason: str) -> None:
        model, sample = Mixed(kind), (torch.randn(32, 16),)
        expected = run(model, sample)
        profile = recoup.measure(model, sample, engine="captured")
        reasons = {unit.name: unit.uncaptured for unit in profile.units}
        assert reasons["blocks.0"] == reasons["blocks.2"] == ""
        assert reason in reasons["blocks.1"]
        assert reason in reasons["blocks.3"]
        for unit in profile.units:
            is_captured = unit.name in ("blocks.0", "blocks.2")
            assert all((recipe.cut is not None) == is_captured for recipe in unit.recipes)
        for budget_bytes in budgets(profile, 5):
            plan = recoup.plan(profile, budget_bytes)
            recoup.apply(model, plan)
            assert_equal(run(model, sample), expected)
            peak_bytes = profile.problem.resident_bytes + real_peak_bytes(model, sample)
            assert peak_bytes <= plan.predicted_bytes <= budget_bytes

    def test_a_compiled_model_of_which_nothing_can_be_captured(self) -> None:
        class Breaking(FeedForward):
            def forward(self, x: Tensor) -> Tensor:
                torch._dynamo.graph_break()
                return super().forward(x)

        model, x = nn.Sequential(*(Breaking(16) for _ in range(4))), torch.randn(32, 16)
        whole = torch.compile(model)
        fitted = recoup.fit(whole, x, budget="1MiB", loss=lambda y: y.square().mean(), engine="captured")
        assert not fitted.profile.is_captured
        whole(x).sum().backward()
        recoup.remove(whole)

    def test_sizes_that_depend_on_values(self) -> None:
        model, sample = MoE(plainly), MoE.sample()
        profile = recoup.measure(model, sample, engine="captured")
        assert not profile.is_captured
        reasons = {unit.uncaptured for unit in profile.units if not unit.is_code}
        assert len(reasons) == 1
        assert "the size of a result depends on values (nonzero)" in reasons.pop()
        expected = run(model, sample)
        recoup.apply(model, recoup.plan(profile, recoup.minimum_budget(profile)))
        assert_equal(run(model, sample), expected)


class TestCopies:
    def make(self) -> tuple[nn.Module, Any]:
        model, sample = Mixed(FeedForward), (torch.randn(32, 16),)
        profile = recoup.measure(model, sample, engine="captured")
        plan = recoup.plan(profile, recoup.minimum_budget(profile))
        assert cuts_in(plan)
        return recoup.apply(model, plan), sample

    @pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
    def test_a_copy_runs_the_plan_on_parameters_of_its_own(self, copied: Any) -> None:
        model, sample = self.make()
        expected, peak_bytes = run(model, sample), real_peak_bytes(model, sample)
        other = copied(model)
        assert_equal(run(other, sample), expected)
        assert real_peak_bytes(other, sample) == peak_bytes
        with torch.no_grad():
            other.blocks[0].up.weight.zero_()
        assert_equal(run(model, sample), expected)
        assert not torch.equal(run(other, sample)["loss"], expected["loss"])

    def test_the_state_dict_is_as_before(self) -> None:
        model, _ = self.make()
        assert model.state_dict().keys() == Mixed(FeedForward).state_dict().keys()

    def test_plans_go_through_json(self) -> None:
        model, sample = Mixed(FeedForward), (torch.randn(32, 16),)
        profile = recoup.measure(model, sample, engine="captured")
        again = Profile.from_json(profile.to_json())
        assert again == profile
        plan = recoup.plan(again, recoup.minimum_budget(again))
        expected = run(model, sample)
        recoup.apply(model, plan)
        assert_equal(run(model, sample), expected)


class TestNested:
    def test_segments_of_captured_units(self) -> None:
        from recoup.planning import Backward, Forward, Keep, Schedule, simulate

        model, sample = Mixed(FeedForward), (torch.randn(32, 16),)
        expected = run(model, sample)
        profile = recoup.measure(model, sample, engine="captured")
        last = len(profile.units) - 1
        assert [unit.name for unit in profile.units[:4]] == [f"blocks.{index}" for index in range(4)]
        actions = [Forward(0, keep=Keep.INPUT), Forward(1), Forward(2), Forward(3)]
        actions += [Forward(index, keep=Keep.OPTION, option=0) for index in range(4, last + 1)]
        actions += [Backward(index, option=0) for index in range(last, 3, -1)]
        # Replayed together, with fewer results kept in some of them.
        options = [0, len(profile.units[1].recipes) - 1, 0, 1]
        actions += [Forward(index, keep=Keep.OPTION, option=option) for index, option in enumerate(options)]
        actions += [Backward(index, option=options[index]) for index in (3, 2, 1, 0)]
        schedule = Schedule(actions)
        predicted = simulate(profile.problem, schedule)
        found = recoup.plan(profile, profile.plain_bytes).schedule
        from dataclasses import replace

        plan = ModelPlan(
            profile, replace(found, schedule=schedule, predicted=predicted), predicted.peak_bytes
        )
        recoup.apply(model, plan)
        assert_equal(run(model, sample), expected)
        peak_bytes = profile.problem.resident_bytes + real_peak_bytes(model, sample)
        assert peak_bytes <= predicted.peak_bytes


class Around(FeedForward):
    """Calls another unit, which the model calls as well."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(16)
        self.others = [inner]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.others[0](x))


class CallsTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = FeedForward(16)
        self.outer = Around(self.inner)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x)).square().mean()


class Reading(nn.Module):
    """Reads the source twice, as the keys and values of a cross-attention do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.key, self.value = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor, source: Tensor) -> Tensor:
        return x + torch.tanh(self.key(source)) * torch.sin(self.value(source))


class Readers(nn.Module):
    """Captured, each reader adds up its two gradients of the source first: another order of sums than in eager code."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.readers = FeedForward(16), nn.ModuleList(Reading(16) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        source = self.encoder(x)
        for reader in self.readers:
            x = reader(x, source)
        return x.square().mean()


@pytest.mark.slow
def test_gradients_that_are_added_up_in_another_order_differ_by_rounding() -> None:
    torch.manual_seed(0)
    fitted = recoup.fit(Readers(), torch.randn(64, 16), budget="90KiB", engine="captured")
    seen = fitted.verification
    assert seen.gradients.startswith("captured units add in another order: relative error up to ")
    assert {drift.name.partition(".")[0] for drift in seen.drifting} == {"encoder"}
    assert 0 < max(drift.relative_error for drift in seen.drifting) < 1e-6
    assert "  not bit-equal: encoder." in str(fitted)


class Dropping(nn.Module):
    """Skips layers at random, but for the first."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(FeedForward(16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        for block in self.blocks[1:]:
            if torch.rand(()).item() > 0.5:
                x = block(x)
        return x.square().mean()


def test_layers_that_are_skipped_at_random_are_all_measured() -> None:
    torch.manual_seed(1)
    model, x = Dropping(), torch.randn(64, 16)
    torch.manual_seed(1)  # one of three layers runs, and two in a step that begins where this one ends
    fitted = recoup.fit(model, x, budget="1MiB", engine="captured", race=False)
    assert fitted.verification.peak_bytes == fitted.plan.predicted_bytes
    assert sum(not unit.is_code for unit in fitted.profile.units) == 4


class Scaled(FeedForward):
    """The first of many blocks, with a layer of its own."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.scale = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.scale(x))


def test_a_block_that_is_the_only_one_of_its_kind_is_captured_as_the_others_are() -> None:
    model = nn.Sequential(Scaled(8), *(FeedForward(8) for _ in range(30)), nn.Linear(8, 4))
    profile = recoup.measure(model, torch.randn(16, 8), loss=torch.sum, engine="captured")
    units = [unit for unit in profile.units if not unit.is_code]
    captured = [unit.name for unit in units if any(recipe.cut for recipe in unit.recipes)]
    assert captured == [str(index) for index in range(31)]


def test_a_unit_inside_a_captured_unit_is_no_compiled_model() -> None:
    """Without the warning that a plan is not in force inside compiled code: warnings are errors."""
    model, sample = CallsTwice(), (torch.randn(32, 16),)
    expected = run(model, sample)
    profile = recoup.measure(model, sample, engine="captured", units=[model.inner, model.outer])
    names = [unit.name for unit in profile.units if unit.recipes[0].cut is not None]
    assert names == ["inner", "outer"]
    recoup.capture.run._functions.clear()  # captured again, with the plan on the model
    recoup.apply(model, recoup.plan(profile, recoup.minimum_budget(profile)))
    assert_equal(run(model, sample), expected)


class TestRandom:
    @pytest.mark.parametrize("p", [0.0, 0.3])
    def test_a_loaded_profile_knows_what_draws(self, p: float, monkeypatch: pytest.MonkeyPatch) -> None:
        model, x = Mixed(FeedForward), torch.randn(32, 16)
        for block in model.blocks:
            block.dropout.p = p
        profile = recoup.measure(model, x, engine="captured")
        monkeypatch.setattr(recoup.capture.run, "_graphs", {})  # as in another process
        again = Profile.from_json(profile.to_json())
        assert RealSteps(TrainingStep(model, x), again).draws == (p > 0)

    def test_a_dropout_in_16_bits_is_as_in_eager_code(self) -> None:
        """Eager code scales by a factor that is rounded to 16 bits, torch's captured backward by one of 32 bits."""
        torch.manual_seed(0)
        model, x = nn.Sequential(*[FeedForward(16) for _ in range(3)]), torch.randn(64, 16)

        def step() -> None:
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(x).float().square().mean()
            loss.backward()

        profile = recoup.measure(model, step=step, engine="captured", units="?")
        fitted = recoup.fit(
            model, step=step, budget=recoup.minimum_budget(profile), engine="captured", units="?"
        )
        assert cuts_in(fitted.plan)
        assert fitted.verification.gradients == "bit-equal"

    def test_rounding_under_autocast_is_judged_as_that_of_16_bits(self) -> None:
        """Attention with dropout rounds otherwise; its parameters' gradients have 32 bits."""

        class Attention(FeedForward):
            def forward(self, x: Tensor) -> Tensor:
                heads = self.norm(x).to(torch.bfloat16)[None, None]
                attended = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1)
                return super().forward(x + attended[0, 0])

        torch.manual_seed(0)
        model, x = nn.Sequential(*[Attention(16) for _ in range(3)]), torch.randn(64, 16)

        def step() -> None:
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(x).float().square().mean()
            loss.backward()

        seen = recoup.fit(model, step=step, budget="1MiB", engine="captured", units="?").verification
        assert seen.gradients.startswith("captured units add in another order: relative error up to ")
        assert 1e-3 < max(drift.relative_error for drift in seen.drifting) < 0.05


class TestCompiled:
    """Generated code takes seconds to compile: one small model."""

    def test_peaks_as_predicted_and_gradients_as_with_everything_kept(self) -> None:
        from recoup.engines.eager import kept

        model, sample = Mixed(FeedForward), (torch.randn(32, 16),)
        profile = recoup.measure(model, sample, engine="compiled")
        assert {recipe.cut.engine for recipe in profile.units[0].recipes if recipe.cut} == {"compiled"}
        for budget_bytes in budgets(profile, 3):
            plan = recoup.plan(profile, budget_bytes)
            recoup.apply(model, plan)
            ours = run(model, sample)
            with kept(model, profile, []):
                assert_equal(ours, run(model, sample))
            peak_bytes = profile.problem.resident_bytes + real_peak_bytes(model, sample)
            assert peak_bytes == plan.predicted_bytes <= budget_bytes


def test_plain_steps_of_captured_units_keep_their_stand_ins() -> None:
    """A race times them in turn with plans, whose stand-ins stay the same, too."""
    from recoup.engines.real_steps import RealSteps
    from recoup.model.replace_forward import installed
    from recoup.model.step import TrainingStep

    model, sample = Mixed(FeedForward), (torch.randn(32, 16),)
    profile = recoup.measure(model, sample, engine="captured")
    recoup.apply(model, recoup.plan(profile, profile.plain_bytes))
    steps = RealSteps(TrainingStep(model, sample), profile)
    before, seen = installed(model), []
    for _ in range(2):
        with steps.keeping():
            seen.append(installed(model))
        assert installed(model) == before
    assert seen[0] == seen[1] != before
    assert len(seen[0]) > 0


class WithUnusedOutput(nn.Module):
    """Its second output, and the layer behind it, get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.extra = nn.Linear(16, 64), nn.Linear(64, 16), nn.Linear(64, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.up(x).tanh()
        return x + self.down(hidden), self.extra(hidden)


class OfUnusedOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(WithUnusedOutput() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x, _ = block(x)
        return x.square().mean()


def test_parameters_without_a_gradient_keep_none() -> None:
    """A captured graph would give them zeros, and an optimizer with weight decay would change them."""
    torch.manual_seed(0)
    model, x = OfUnusedOutputs(), torch.randn(32, 16)
    profile = recoup.measure(model, x, engine="captured")
    blocks = [unit for unit in profile.units if unit.name.startswith("blocks.")]
    assert all("extra.bias gets no gradient" in unit.uncaptured for unit in blocks)
    recoup.apply(model, recoup.plan(profile, recoup.minimum_budget(profile)))
    model(x).backward()
    without = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    assert without == {f"blocks.{number}.extra.{kind}" for number in range(3) for kind in ("weight", "bias")}


class ChannelsLast(nn.Module):
    """Blocks that normalize images whose channels lie one behind the other."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 8, 1)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(memory_format=torch.channels_last)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def test_captured_code_is_tried_with_gradients_of_its_inputs() -> None:
    """Without them, torch's GroupNorm on the CPU ends the process."""
    model, x = ChannelsLast(), torch.randn(2, 8, 6, 6, requires_grad=True)
    fitted = recoup.fit(model, x, budget="1GiB", engine="captured", units=nn.Sequential, race=False)
    assert not any(unit.uncaptured for unit in fitted.profile.units)
    # Captured code gets gradients of images as contiguous tensors: sums of them, for biases, are in another order.
    assert fitted.verification is not None
    assert all(one.name.endswith("bias") for one in fitted.verification.drifting)


@pytest.mark.parametrize("name", ["GPT-2", "mixture of experts"])
def test_the_plain_step_is_measured_as_it_is_predicted(name: str) -> None:
    """Not the eager step, which may take more or less: that is named beside it."""
    torch.manual_seed(0)
    model, sample = MODELS[name]()
    eager = recoup.measure(model, sample).plain_bytes
    fitted = recoup.fit(
        model, sample, budget=recoup.minimum_budget(recoup.measure(model, sample)), engine="captured"
    )
    seen = fitted.verification
    assert seen.plain_peak_bytes == fitted.profile.plain_bytes < eager
    assert seen.gradients == "bit-equal"
    text = " ".join(str(fitted).split())
    assert "The plain step is that of the same graphs of operations, with everything kept." in text
    assert f"those under the plan are compared, peaks at {format_bytes(eager)}." in text


class FillsCache(nn.Module):
    """Adds what it computed to a list that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = FeedForward()

    def forward(self, x: Tensor, cache: list[Tensor]) -> Tensor:
        cache.append(x.detach())
        return self.inner(x) * len(cache)


class Caching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(FillsCache() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, [])
        return x.square().mean()


def test_units_that_fill_a_list_they_are_given_are_captured() -> None:
    """Each call that captures finds the list as it was: of another length, it would be compiled anew."""
    profile = recoup.measure(Caching(), torch.randn(32, 8), engine="captured", units=FillsCache)
    assert not any(unit.uncaptured for unit in profile.units)


class Counts(FeedForward):
    """Counts its calls in an attribute, on which its output depends."""

    num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return super().forward(x) * self.num_calls


class Collects(FeedForward):
    """Collects what it computed in a list of its own, by a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        self.register_forward_hook(self.collect)

    def collect(self, module: nn.Module, given: object, output: Tensor) -> None:
        self.seen.append(output.detach().mean())


@pytest.mark.parametrize("unit", [Counts, Collects])
def test_units_whose_attributes_every_step_changes_run_eagerly(unit: type[FeedForward]) -> None:
    """Captured, they would be compiled anew in every step."""
    model = nn.Sequential(*[nn.Sequential(unit()) for _ in range(3)])
    profile = recoup.measure(model, torch.randn(32, 8), engine="captured", units="?", loss=Tensor.sum)
    assert all("compiled anew in every call" in seen.uncaptured for seen in profile.units[:3])


class Permuted(nn.Module):
    """Like an encoder of audio: a convolution's output is permuted before the first dropout."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)
            self.dropout = nn.Dropout(0.1)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))

    def __init__(self) -> None:
        super().__init__()
        self.first, self.dropout = nn.Conv1d(8, 32, 3, padding=1), nn.Dropout(0.1)
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(self.first(x).permute(0, 2, 1))
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def test_dropouts_whose_gradients_are_permuted_are_captured() -> None:
    """torch's fake tensors foresee other strides than the kernel's result has: the graph did not run."""
    torch.manual_seed(0)
    model, x = Permuted(), torch.randn(4, 8, 64)
    profile = recoup.measure(model, x, engine="captured")
    assert not any(unit.uncaptured for unit in profile.units if unit.name.startswith("blocks"))
    budget = (recoup.minimum_budget(profile) + profile.plain_bytes) // 2
    fitted = recoup.fit(model, x, budget=budget, engine="captured", race=False)
    assert fitted.verification is not None
    assert fitted.verification.gradients == "bit-equal"
    assert cuts_in(fitted.plan)


class LastChannels(nn.Module):
    """Convolutions with dropout on images whose channels come last in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(8, 8, 3, padding=1), nn.SiLU(), nn.Dropout(0.1), nn.Conv2d(8, 8, 3, padding=1)
            )
            for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def test_gradients_of_dropouts_keep_the_layout_that_eager_code_has() -> None:
    torch.manual_seed(0)
    model = LastChannels().to(memory_format=torch.channels_last)
    x = torch.randn(2, 8, 16, 16).to(memory_format=torch.channels_last)
    fitted = recoup.fit(model, x, budget="1GiB", engine="captured", race=False)
    assert fitted.profile.is_captured
    assert fitted.verification is not None
    assert fitted.verification.gradients == "bit-equal"
