"""Steps on fake tensors: the same bytes as on real ones, and nothing of the model touched."""

from __future__ import annotations

import copy
import resource
import time
from typing import Any

import models
import pytest
import torch
import torch.nn.functional as F
import zoo
from machines import HOST
from slowly import slow_but
from tally import Tally
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import recoup
from recoup.errors import LossError, SampleError
from recoup.measuring import Profile, measure
from recoup.planning import Phase, Use
from recoup.planning.additive_numbers import additive


def sizes(profile: Profile) -> list[Any]:
    """All bytes of a profile, except those of options: which ones are worth having depends on seconds."""
    units = [
        (u.name, u.output_bytes, u.gradient_bytes, u.parameter_gradient_bytes, u.lasting_bytes, u.runs_once)
        for u in additive(profile.problem).units
    ]
    return [*units, profile.problem.resident_bytes, profile.residents]


def options(profile: Profile) -> dict[tuple[str, str], tuple[int, bool, int, int, int]]:
    return {
        (unit.name, option.name): (
            option.held_bytes,
            option.holds_output,
            option.freed_input_bytes,
            option.forward_transient_bytes,
            option.backward_transient_bytes,
        )
        for unit in additive(profile.problem).units
        for option in unit.options
    }


def assert_same_bytes(real: Profile, fake: Profile) -> None:
    assert sizes(fake) == sizes(real)
    measured, estimated = options(real), options(fake)
    for unit in real.problem.units:
        assert (unit.name, "keep") in estimated
    for key in measured.keys() & estimated.keys():
        assert estimated[key] == measured[key], key


KINDS = [models.GPT, models.ResNet, models.UNet, models.EncoderDecoder, models.Recurrent]


@pytest.mark.parametrize(
    "kind", slow_but([models.GPT, models.Recurrent], KINDS), ids=lambda kind: kind.__name__
)
def test_bytes_equal_those_of_the_real_step(kind: Any) -> None:
    model = kind(models.plainly)
    sample = model.sample()
    assert_same_bytes(measure(model, sample), measure(model, sample, hardware=HOST))


@pytest.mark.parametrize(
    "name",
    slow_but(
        ["U-Net, skips", "GPT, dropout, tied"],
        ["GPT", "U-Net, skips", "Llama", "ResNet, BatchNorm", "GPT, dropout, tied"],
    ),
)
def test_bytes_equal_those_of_the_real_step_in_benchmarks(name: str) -> None:
    case = zoo.MODELS[name](False)
    real = measure(case.model, case.sample, loss=case.loss)
    assert_same_bytes(real, measure(case.model, case.sample, loss=case.loss, hardware=HOST))


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
@pytest.mark.parametrize("accumulates", [False, True])
def test_optimizers_and_accumulation_count_alike(kind: str, accumulates: bool) -> None:
    model = models.ResNet(models.plainly)
    make = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[kind]
    given: dict[str, Any] = {"optimizer": make(model.parameters(), lr=0.1), "accumulates": accumulates}
    sample = model.sample()
    assert_same_bytes(measure(model, sample, **given), measure(model, sample, hardware=HOST, **given))


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("units", ["conv", "head"])
def test_gradients_that_are_copied_count_alike(units: str, accumulates: bool) -> None:
    model, sample = models.Patches(), torch.randn(8, 16, 24)
    given: dict[str, Any] = {"loss": lambda out: out.mean(), "accumulates": accumulates, "units": units}
    assert_same_bytes(measure(model, sample, **given), measure(model, sample, hardware=HOST, **given))


def small() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Dropout(0.3), nn.GELU(), nn.Linear(10, 3, bias=False)
    )


def square(output: Tensor) -> Tensor:
    return output.square().sum()


class TestWhereTheModelLives:
    def test_the_real_model_is_neither_run_nor_touched(self) -> None:
        model, sample = small(), torch.randn(5, 6)
        model.register_forward_pre_hook(lambda module, args: calls.add(type(args[0]).__name__))
        calls = Tally()
        before = copy.deepcopy(model.state_dict())
        objects = {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
        state = torch.get_rng_state()
        measure(model, sample, loss=square, hardware=HOST)
        assert set(calls.take()) == {"FakeTensor"}
        assert torch.equal(torch.get_rng_state(), state)
        assert {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()} == objects
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name]), name
        assert all(parameter.grad is None for parameter in model.parameters())

    def test_on_meta_and_under_fake_tensors(self) -> None:
        real = measure(small(), torch.randn(5, 6), loss=square, hardware=HOST)
        with torch.device("meta"):
            assert measure(small(), torch.empty(5, 6), loss=square, hardware=HOST) == real
        with FakeTensorMode():
            model, sample = small(), torch.empty(5, 6)
        assert measure(model, sample, loss=square, hardware=HOST) == real

    def test_a_loss_may_hold_real_tensors(self) -> None:
        target = torch.randint(3, (5,))
        for device in ("cpu", "meta"):
            model = small().to(device)
            loss = lambda output: F.cross_entropy(output, target)  # noqa: E731
            assert measure(model, torch.empty(5, 6), loss=loss, hardware=HOST).plain_bytes > 0

    def test_units_may_be_modules_patterns_or_predicates(self) -> None:
        model, sample = small(), torch.randn(5, 6)
        for units in (model[0], [model[0], "4"], "0", lambda name, module: name in "04"):
            names = [u.module for u in measure(model, sample, loss=square, units=units, hardware=HOST).units]
            assert "0" in names

    def test_a_fitted_model_is_measured_as_it_was(self) -> None:
        layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)]
        model, sample = nn.Sequential(*layers), torch.randn(64, 16)
        plain = measure(model, sample, loss=square, hardware=HOST)
        smallest = recoup.minimum_budget(plain)
        recoup.apply(model, recoup.plan(plain, smallest))
        assert measure(model, sample, loss=square, hardware=HOST) == plain


class Branching(nn.Module):
    def __init__(self, asks: Any) -> None:
        super().__init__()
        self.inner, self.asks = nn.Linear(4, 4), asks

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        return x[: 2 if self.asks(x) else 3]


class TestWhatCannotBeFaked:
    @pytest.mark.parametrize("asks", [lambda x: bool(x.sum() > 0), lambda x: x.nonzero().shape[0] > 1])
    def test_data_that_decides(self, asks: Any) -> None:
        model = nn.Sequential(nn.Linear(4, 4), Branching(asks))
        with pytest.raises(
            SampleError, match=r"'1' \(Branching\) needs the values of its data \(aten.*without hard"
        ):
            measure(model, torch.randn(5, 4), loss=square, hardware=HOST)

    def test_a_mixture_of_experts(self) -> None:
        model = models.MoE(models.plainly)
        with pytest.raises(
            SampleError, match=r"'layers.0' \(Experts\) needs the values of its data \(aten.nonzero"
        ):
            measure(model, model.sample(), hardware=HOST)

    def test_a_step_of_the_users_own(self) -> None:
        model = small()
        with pytest.raises(SampleError, match="step= callable would run the model itself"):
            measure(model, step=lambda: square(model(torch.randn(5, 6))).backward(), hardware=HOST)

    def test_a_sample_that_does_not_fit_the_model(self) -> None:
        with pytest.raises(SampleError, match="refuses the sample"):
            measure(small(), torch.randn(5, 7), loss=square, hardware=HOST)
        with pytest.raises(LossError, match="must be a scalar"):
            measure(small(), torch.randn(5, 6), hardware=HOST)


class TestWhatIsSaid:
    def test_seconds_are_estimates(self) -> None:
        model, sample = small(), torch.randn(5, 6)
        estimated = measure(model, sample, loss=square, hardware=HOST)
        measured = measure(model, sample, loss=square)
        assert (estimated.seconds_are_estimates, measured.seconds_are_estimates) == (True, False)
        assert str(estimated).endswith("Seconds are estimates.")
        assert "on host (estimated):" in str(estimated)
        assert "estimate" not in str(measured)
        assert "seconds are estimates)" in str(recoup.plan(estimated, "1MiB")).splitlines()[0]
        assert "estimate" not in str(recoup.plan(measured, "1MiB"))

    def test_shares_are_of_the_hardware(self) -> None:
        profile = measure(small(), torch.randn(5, 6), loss=square, hardware=HOST)
        assert recoup.plan(profile, "50%").budget_bytes == 2**33


class TestCudaKernels:
    """What CUDA saves where the host would save something else."""

    def test_sizes_are_rounded(self) -> None:
        profile = measure(nn.Sequential(nn.Linear(3, 3)), torch.ones(2, 3), loss=square, hardware="H200")
        # Weight, bias and sample take 512 bytes each, beside the libraries' workspace.
        residents = profile.residents
        assert residents.parameter_bytes == 48
        assert residents.total_bytes == 3 * 512 + 32 * 2**20

    def test_dropout_saves_a_byte_for_each_element(self) -> None:
        sample = torch.ones(64, 256)
        linear = nn.Linear(256, 256, bias=False)
        model = nn.Sequential(linear, nn.Sequential(copy.deepcopy(linear), nn.Dropout(0.5)))
        kept = [
            measure(model, sample, loss=square, hardware=hardware, units=["1"]).problem.units[-2].options[0]
            for hardware in ("H200", HOST)
        ]
        assert [option.held_bytes for option in kept] == [64 * 256, 64 * 256 * 4]

    @pytest.mark.parametrize("through", ["function", "module"])
    def test_attention_with_dropout_saves_no_scores(self, through: str) -> None:
        length, width = 256, 64

        class Attends(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = nn.MultiheadAttention(width, 4, dropout=0.1, batch_first=True)

            def forward(self, x: Tensor) -> Tensor:
                if through == "module":
                    return self.inner(x, x, x, need_weights=False)[0]
                q, k, v = (
                    F.linear(x, self.inner.in_proj_weight).view(2, length, 12, 16).transpose(1, 2).chunk(3, 1)
                )
                return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1).transpose(1, 2).flatten(2)

        model, sample = nn.Sequential(Attends(), nn.Linear(width, width)), torch.ones(2, length, width)
        scores_bytes = 2 * 4 * length * length * 4
        on_cuda = measure(model, sample, loss=square, hardware="H200", units=["0"])
        on_host = measure(model, sample, loss=square, hardware=HOST, units=["0"])
        assert on_cuda.problem.units[0].options[0].held_bytes < scores_bytes
        assert on_host.problem.units[0].options[0].held_bytes > scores_bytes

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("masked", [False, True])
    @pytest.mark.parametrize("num_shared", [4, 2])
    def test_every_kind_of_attention_runs(self, dtype: torch.dtype, masked: bool, num_shared: int) -> None:
        class Attends(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.qkv = nn.Linear(48, 12 * (4 + 2 * num_shared), bias=False)

            def forward(self, x: Tensor) -> Tensor:
                q, k, v = (
                    self.qkv(x).unflatten(-1, (-1, 12)).transpose(1, 2).split([4, num_shared, num_shared], 1)
                )
                mask = torch.ones(7, 7, dtype=torch.bool).tril() if masked else None
                out = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=num_shared < 4)
                assert out.shape == (2, 4, 7, 12)
                return out

        model = nn.Sequential(Attends(), nn.Identity()).to(dtype)
        assert measure(model, torch.ones(2, 7, 48, dtype=dtype), loss=square, hardware="H200").plain_bytes > 0

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_replays_choose_the_same_kernels(self, dtype: torch.dtype) -> None:
        class Block(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.norm, self.qkv, self.drop = nn.RMSNorm(48), nn.Linear(48, 96), nn.Dropout(0.1)

            def forward(self, x: Tensor) -> Tensor:
                q, k, v = self.qkv(self.norm(x)).unflatten(-1, (-1, 12)).transpose(1, 2).split([4, 2, 2], 1)
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
                return x + self.drop(out.transpose(1, 2).flatten(2))

        model = nn.Sequential(Block(), Block(), nn.Linear(48, 8)).to(dtype)
        profile = measure(model, torch.ones(2, 7, 48, dtype=dtype), loss=square, hardware="H200")
        block = next(unit for unit in profile.problem.units if unit.name == "1")
        assert "recompute" in [option.name for option in block.options]
        assert not block.runs_once

    def test_code_may_name_the_device(self) -> None:
        class Moves(nn.Module):
            def __init__(self, move: Any) -> None:
                super().__init__()
                self.inner, self.move = nn.Linear(64, 64), move

            def forward(self, x: Tensor) -> Tensor:
                return self.inner(self.move(x))

        def as_named(x: Tensor) -> Tensor:
            x = (
                x.cuda()
                .to("cuda")
                .to(torch.device("cuda", 0), torch.float32)
                .to(device="cuda")
                .to(torch.float32)
            )
            return x.to(x) + torch.zeros(64, device="cuda") + torch.arange(64, device="cuda")

        def as_given(x: Tensor) -> Tensor:
            return x + torch.zeros(64, device=x.device) + torch.arange(64, device=x.device)

        sample = torch.ones(32, 64)
        named, given = (
            measure(nn.Sequential(Moves(move), nn.Identity()), sample, loss=square, hardware="H200")
            for move in (as_named, as_given)
        )
        assert named == given

    def test_autocast_takes_softmax_in_float32(self) -> None:
        class Weighs(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner, self.last = nn.Linear(64, 64), nn.Sequential(nn.Linear(64, 512), nn.Softmax(-1))

            def forward(self, x: Tensor) -> Tensor:
                with torch.autocast(x.device.type, torch.bfloat16):
                    return self.last(self.inner(x))

        for hardware, itemsize in (("H200", 4), (HOST, 2)):
            units = measure(
                Weighs(), torch.ones(32, 64), loss=square, hardware=hardware, units=["inner", "last"]
            )
            made = Use(Phase.FORWARD, [unit.name for unit in units.units].index("last"))
            [output] = [value for value in units.problem.values if value.made == made]
            assert output.num_bytes == 32 * 512 * itemsize

    def test_rms_norm_is_one_kernel(self) -> None:
        model = nn.Sequential(nn.RMSNorm(512), nn.Linear(512, 8))
        profile = measure(model, torch.ones(128, 512), loss=square, hardware=HOST, units=["0"])
        fused = measure(model, torch.ones(128, 512), loss=square, hardware="H200", units=["0"])
        kept = [entry.problem.units[0].options[0].held_bytes for entry in (profile, fused)]
        # The input lives anyway; two numbers a row are saved.
        assert kept[1] == 2 * 128 * 4 < kept[0]


def llama_70b() -> tuple[nn.Module, Tensor]:
    with torch.device("meta"):
        model = zoo.Llama(8192, 80, 64, 8, 28672, 128256).to(torch.bfloat16)
        return model, torch.empty(1, 8192, dtype=torch.long)


# benchmarks/startup.py takes the medians of several processes.
@pytest.mark.slow
def test_seventy_billion_parameters_on_a_laptop(capsys: pytest.CaptureFixture[str]) -> None:
    start = time.perf_counter()
    model, tokens = llama_70b()
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    assert 70e9 < num_parameters < 71e9
    optimizer = torch.optim.AdamW(model.parameters())
    profile = measure(model, tokens, optimizer=optimizer, hardware="H200", ranks=64)
    measured_s = time.perf_counter() - start
    plans = [recoup.plan(profile, budget) for budget in ("18GiB", "40GiB", "80%")]
    total_s = time.perf_counter() - start
    host_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    with capsys.disabled():
        print(
            f"\n70 B: measured in {measured_s:.1f} s, with 3 plans {total_s:.1f} s, {host_bytes / 2**30:.2f} GiB"
        )
        print(profile)
        print(*(str(plan).splitlines()[0] for plan in plans), sep="\n")
    assert profile.residents.parameter_bytes == -(-num_parameters * 2 // 64)
    assert [plan.predicted_bytes <= plan.budget_bytes for plan in plans] == [True] * 3
    assert plans[0].predicted_s > plans[1].predicted_s > plans[2].predicted_s
    assert host_bytes < 4 * 2**30
