"""`fit` with batches of several sizes: each call under the plan for its batch, all within one budget."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import recoup
import recoup.capture.run
from recoup.errors import BudgetError, OverBudgetError, RecoupWarning, SampleError
from recoup.fitting import Fitted
from recoup.fitting import by_size as one_size
from recoup.measuring import MemoryTracker
from tests.models import GPT, EncoderDecoder, Patches, ResNet, plainly
from tests.tally import Tally


class Counted(nn.Module):
    """Attention and a feed-forward, whose forwards are counted."""

    def __init__(self, width: int, tally: Tally, name: int) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.tally, self.name = tally, name

    def forward(self, x: Tensor) -> Tensor:
        self.tally.add((self.name, x.shape[1]))
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + torch.softmax(q @ k.transpose(1, 2), dim=-1) @ v
        return x + self.down(F.gelu(self.up(x)))


class Text(nn.Module):
    def __init__(self, num_blocks: int = 4, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.tally = Tally()
        self.embed = nn.Embedding(13, width)
        self.blocks = nn.ModuleList(Counted(width, self.tally, index) for index in range(num_blocks))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def text(length: int, rows: int = 2) -> Tensor:
    return torch.arange(rows * length).reshape(rows, length) % 13


def budget_for(model: nn.Module, sample: Any, share: float = 0.1, **settings: Any) -> int:
    profile = recoup.measure(model, sample, **settings)
    least = recoup.minimum_budget(profile)
    return int(least + share * (profile.plain_bytes - least))


def peak_and_gradients(model: nn.Module, batch: Any) -> tuple[int, list[Tensor]]:
    model.zero_grad()
    torch.manual_seed(5)
    args = batch if isinstance(batch, tuple) else (batch,)
    with MemoryTracker() as memory:
        loss = model(*args)
        loss.backward()
        del loss
    return memory.peak_bytes, [p.grad.clone() for p in model.parameters() if p.grad is not None]


def check_sizes(
    make: Callable[[], nn.Module],
    samples: Sequence[Any],
    others: Sequence[Any],
    *,
    share: float = 0.1,
) -> Fitted:
    """Fits; then batches of measured and of other sizes peak as predicted, and have the plain gradients."""
    plain, model = make(), make()
    budget = budget_for(plain, samples[-1], share)
    fitted = recoup.fit(model, samples=samples, budget=budget)
    by_size = fitted.by_size
    assert by_size is not None
    assert not fitted.plan.keeps_everything
    assert len(fitted.sizes) == len(samples) - 1
    assert all(one.verification.peak_bytes <= budget for one in fitted.sizes)
    assert all(one.verification.gradients == "bit-equal" for one in fitted.sizes)
    resident = fitted.profile.residents.parameter_bytes
    with warnings.catch_warnings():
        warnings.simplefilter("error", RecoupWarning)
        for batch in [*samples, *others]:
            _, expected = peak_and_gradients(plain, batch)
            peak, found = peak_and_gradients(model, batch)
            assert all(map(torch.equal, found, expected))
            assert len(found) == len(expected)
            assert peak + resident <= budget, "the budget holds at every size"
    return fitted


def test_lengths_of_text() -> None:
    fitted = check_sizes(Text, [text(8), text(24), text(48)], [text(n) for n in (3, 17, 30, 41, 47)])
    assert fitted.by_size is not None
    ranges = fitted.by_size.ranges
    assert ranges[0].plan.keeps_everything
    assert ranges[-1].up_to == (48,)
    assert [one.up_to for one in ranges] == sorted(one.up_to for one in ranges)
    assert all(one.plan.predicted_bytes <= fitted.plan.budget_bytes for one in ranges)
    seconds = [one.plan.predicted_s for one in ranges]
    assert all(second > 0 for second in seconds)


def test_bytes_between_and_beyond_measured_sizes_are_exact() -> None:
    """They are sums of products of dimensions: attention scores, masks and activations."""
    model = Text()
    fitted = recoup.fit(model, samples=[text(8), text(24), text(48)], budget=budget_for(model, text(48)))
    assert fitted.by_size is not None
    for length in (11, 31, 60):
        measured = recoup.measure(Text(), text(length))
        worked_out = fitted.by_size.profiles.at((length,))
        assert worked_out.plain_bytes == pytest.approx(measured.plain_bytes, abs=64)
        pairs = zip(worked_out.units, measured.units, strict=True)
        assert all(ours.name == theirs.name for ours, theirs in pairs)


def test_a_model_with_dropout_and_a_mask() -> None:
    samples = [torch.arange(3 * n).reshape(3, n) % 11 for n in (8, 16, 32)]
    others = [torch.arange(3 * n).reshape(3, n) % 11 for n in (5, 20, 29)]
    check_sizes(lambda: _seeded(GPT), samples, others)


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        convolutions = [nn.Conv2d(3 if index == 0 else 4, 4, 3, padding=1) for index in range(8)]
        self.layers = nn.Sequential(*(nn.Sequential(one, nn.GELU(), nn.Tanh()) for one in convolutions))

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.layers(images)
        return found.square().mean()


def test_images_of_several_sizes() -> None:
    images = [torch.randn(2, 3, n, n) for n in (8, 16, 24)]
    fitted = check_sizes(Images, images, [torch.randn(2, 3, 20, 20), torch.randn(2, 3, 11, 11)])
    assert fitted.by_size is not None
    assert len(fitted.by_size.profiles.axes) == 1, "height and width vary together"


def test_batch_norm() -> None:
    check_sizes(
        lambda: _seeded(ResNet), [torch.randn(n, 3, 9, 9) for n in (2, 4, 8)], [torch.randn(6, 3, 9, 9)]
    )


def test_source_and_target_vary_each_by_itself() -> None:
    def batch(source: int, target: int) -> tuple[Tensor, Tensor]:
        return torch.randn(2, source, 8), torch.randn(2, target, 8)

    lengths = [(4, 4), (4, 16), (16, 4), (8, 8), (8, 24), (24, 8), (24, 24)]
    fitted = check_sizes(
        lambda: _seeded(EncoderDecoder),
        [batch(*pair) for pair in lengths],
        [batch(*pair) for pair in ((6, 20), (20, 6), (23, 22), (3, 3))],
        share=0.3,
    )
    assert fitted.by_size is not None
    assert len(fitted.by_size.profiles.axes) == 2
    assert len(fitted.by_size.ranges) > 2


def test_rows_and_lengths_vary() -> None:
    samples = [text(n, rows) for rows, n in ((8, 6), (2, 12), (4, 12), (8, 12), (2, 24), (4, 24))]
    check_sizes(Text, samples, [text(10, 7), text(20, 3), text(24, 3)], share=0.3)


def _seeded(kind: type[Any]) -> Any:
    torch.manual_seed(1)
    return kind(plainly)


def fitted_text(share: float = 0.05) -> tuple[Text, Fitted]:
    model = Text()
    budget = budget_for(model, text(48), share, accumulates=True)
    return model, recoup.fit(model, text(48), sizes=[8, 24, 48], budget=budget, accumulates=True)


def test_sizes_cut_the_sample() -> None:
    _, fitted = fitted_text()
    assert fitted.by_size is not None
    assert fitted.by_size.profiles.sizes == ((8,), (24,), (48,))
    assert [one.size for one in fitted.sizes] == [(24,), (8,)]


def test_a_short_batch_recomputes_nothing_and_a_long_one_what_it_must() -> None:
    model, fitted = fitted_text()
    assert fitted.by_size is not None
    model.tally.take()
    counts = {}
    for length in (8, 30, 48):
        model(text(length)).backward()
        counts[length] = len(model.tally.take()) - len(model.blocks)
    assert counts[8] == 0
    assert 0 < counts[30] < counts[48] or counts[30] == counts[48] == len(model.blocks)
    assert counts[48] > 0


def test_each_backward_runs_under_the_plan_of_its_forward() -> None:
    """Two forwards before a backward, in either order; evaluation in between; several sizes in one accumulation."""
    model, _ = fitted_text()
    plain = Text()
    losses = [model(text(48))]
    with pytest.warns(RecoupWarning, match="while 1 earlier forward waits"):
        losses.append(model(text(8)))
    with torch.no_grad():
        model(text(30))
    losses.append(model(text(40)))
    model.tally.take()
    losses[0].backward()
    long = {length for _, length in model.tally.take()}
    losses[1].backward()
    assert not model.tally.take(), "the short batch keeps everything"
    losses[2].backward()
    assert long == {48}
    assert {length for _, length in model.tally.take()} == {40}
    for length in (48, 8, 40):
        plain(text(length)).backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(ours.grad, theirs.grad) for ours, theirs in pairs)  # type: ignore[arg-type]


def test_larger_than_anything_measured_is_planned_with_one_warning() -> None:
    torch.manual_seed(0)
    model = Text()
    fitted = recoup.fit(model, text(48), sizes=[8, 24, 48], budget=budget_for(model, text(64), 0.2))
    with pytest.warns(RecoupWarning, match=r"larger \(tokens.shape\[1\] = 60\) than all .*\(up to tokens"):
        peak, found = peak_and_gradients(model, text(60))
    assert fitted.by_size is not None
    planned = fitted.by_size.plan_for((60,))
    assert planned.predicted_bytes <= fitted.plan.budget_bytes
    assert peak + fitted.profile.residents.parameter_bytes <= fitted.plan.budget_bytes
    assert all(map(torch.equal, found, peak_and_gradients(Text(), text(60))[1]))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RecoupWarning)
        peak_and_gradients(model, text(62))


def test_a_batch_that_no_plan_fits_says_so_and_runs() -> None:
    model, fitted = fitted_text(0.0)
    with pytest.warns(RecoupWarning, match="No plan is predicted to fit .* the smallest peak is"):
        _, found = peak_and_gradients(model, text(200))
    recoup.remove(model)
    assert all(map(torch.equal, found, peak_and_gradients(model, text(200))[1]))
    assert fitted.plan.predicted_bytes <= fitted.plan.budget_bytes


def test_real_steps_that_pass_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are made again with the bytes that were missed; at last, all sizes run as the largest does."""
    verify, num_over = one_size.verify_step, [0]

    def over(step: Any, plan: Any) -> Any:
        if num_over[0]:
            num_over[0] -= 1
            raise OverBudgetError("over", peak_bytes=plan.predicted_bytes + 4096)
        return verify(step, plan)

    monkeypatch.setattr(one_size, "verify_step", over)
    found = {}
    for times in (0, 1, 3):
        num_over[0] = times
        _, fitted = fitted_text(0.2)
        by_size = fitted.by_size
        assert by_size is not None
        assert [one.size for one in fitted.sizes] == [(24,), (8,)]
        found[times] = by_size
    first = found[0].profiles.largest.problem.resident_bytes
    assert found[1].profiles.largest.problem.resident_bytes == first + 4096
    assert len(found[3].ranges) == 1, "one plan for all sizes"
    assert found[3].ranges[0].plan.items == found[3].plan.items


def test_a_call_whose_size_cannot_be_read() -> None:
    class Wrapped(Text):
        def forward(self, tokens: Tensor | None = None, words: list[int] | None = None) -> Tensor:
            return super().forward(torch.tensor(words) if tokens is None else tokens)

    model = Wrapped()
    recoup.fit(model, text(48), sizes=[8, 48], budget=budget_for(model, text(48)))
    with pytest.warns(
        RecoupWarning, match=r"read from tokens.shape\[1\], and a call of the model has no such"
    ):
        model(words=text(8).tolist()).backward()


def test_a_step_of_the_users() -> None:
    model = Text()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: Tensor) -> None:
        optimizer.zero_grad()
        model(batch).backward()
        optimizer.step()

    before = copy.deepcopy(model.state_dict())
    samples = [text(8), text(24), text(48)]
    plain = recoup.measure(model, step=lambda: step(text(48)))
    budget = int(1.1 * recoup.minimum_budget(plain))
    fitted = recoup.fit(model, samples=samples, step=step, budget=budget)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert fitted.by_size is not None
    assert fitted.by_size.ranges[0].plan.keeps_everything
    assert len(fitted.sizes) == 2


def test_targets_of_the_loss_vary_with_the_inputs() -> None:
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4))
    samples = [(torch.randn(n, 8), torch.arange(n) % 4) for n in (16, 64, 128)]
    loss = nn.CrossEntropyLoss()
    profile = recoup.measure(model, samples[-1], loss=loss)
    fitted = recoup.fit(model, samples=samples, loss=loss, budget=recoup.minimum_budget(profile))
    assert fitted.by_size is not None
    assert fitted.by_size.profiles.sizes == ((16,), (64,), (128,))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_pick_as_the_model_does(copied: Callable[[Any], Any]) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(4)))
    samples = [torch.randn(n, 16) for n in (32, 128, 256)]

    def loss(output: Tensor) -> Tensor:
        return output.square().mean()

    profile = recoup.measure(model, samples[-1], loss=loss)
    recoup.fit(model, samples=samples, loss=loss, budget=recoup.minimum_budget(profile))
    peaks = []
    for one in (model, copied(model)):
        for batch in samples:
            one.zero_grad()
            with MemoryTracker() as memory:
                loss(one(batch)).backward()
            peaks.append(memory.peak_bytes)
    assert peaks[:3] == peaks[3:]
    assert peaks[0] < peaks[1] <= peaks[2]


@pytest.mark.parametrize("engine", ["captured", pytest.param("compiled", marks=pytest.mark.slow)])
def test_captured_units(engine: str) -> None:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.GELU()) for _ in range(3))
    model = nn.Sequential(*blocks)
    plain = copy.deepcopy(model)
    samples = [torch.randn(n, 16) for n in (64, 256, 512)]

    def loss(output: Tensor) -> Tensor:
        return output.square().mean()

    units = ["0", "1", "2"]
    profile = recoup.measure(model, samples[-1], loss=loss, engine=engine, units=units)
    least = recoup.minimum_budget(profile)
    budget = int(least + 0.3 * (profile.plain_bytes - least))
    fitted = recoup.fit(model, samples=samples, loss=loss, engine=engine, units=units, budget=budget)
    assert fitted.by_size is not None
    assert any(unit.recipes[0].cut is not None for unit in fitted.profile.units)
    resident = fitted.profile.residents.parameter_bytes
    for batch in [*samples, torch.randn(400, 16), torch.randn(100, 16)]:
        for one in (model, plain):
            one.zero_grad()
        with MemoryTracker() as memory:
            loss(model(batch)).backward()
        assert memory.peak_bytes + resident <= budget
        loss(plain(batch)).backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)


def test_other_sizes_and_plans_capture_nothing_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each cut is captured for the largest size and, with a symbolic one, for all others: when it is measured."""
    counts: Counter[Any] = Counter()
    partition = recoup.capture.run.partition

    def counted(cut: Any, *args: Any, **kwargs: Any) -> Any:
        counts[cut] += 1
        return partition(cut, *args, **kwargs)

    monkeypatch.setattr(recoup.capture.run, "partition", counted)
    torch.manual_seed(0)
    width = 24  # of no other test: what is captured is shared
    blocks = (
        nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(4)
    )
    model = nn.Sequential(*blocks)
    samples = [torch.randn(n, width) for n in (64, 256, 512)]

    def loss(output: Tensor) -> Tensor:
        return output.square().mean()

    units = ["0", "1", "2", "3"]
    profile = recoup.measure(model, samples[-1], loss=loss, engine="captured", units=units)
    least = recoup.minimum_budget(profile)
    budget = int(least + 0.3 * (profile.plain_bytes - least))
    fitted = recoup.fit(model, samples=samples, loss=loss, engine="captured", units=units, budget=budget)
    by_size, measured = fitted.by_size, counts.copy()
    assert by_size is not None
    assert measured, "nothing was captured"
    assert len({by_size.plan_for((rows,)).items for rows in (60, 200, 300, 400, 512)}) > 1
    for rows in (60, 200, 300, 400, 512, 450, 64):
        loss(model(torch.randn(rows, width))).backward()
    assert counts == measured


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sample": text(8), "samples": [text(8), text(16)]}, "goes alone"),
        ({"samples": [text(8)]}, r"samples= takes \[short"),
        ({"samples": text(8)}, r"samples= takes \[short"),
        ({"samples": [text(8), text(8)]}, "same size"),
        ({"sizes": [8, 16]}, "goes with a sample"),
        ({"sample": text(16), "sizes": [16]}, r"sizes= takes \[128"),
        ({"sample": text(16), "sizes": [8, 32]}, "No tensor of the sample has a dimension of 32"),
        ({"sample": text(16), "sizes": [8, 0]}, "at least 1"),
        ({"sample": text(16), "sizes": [8, True]}, "at least 1"),
        ({"sample": text(16, 16), "sizes": [8, 16]}, "cannot be told"),
        ({"samples": [text(4, 2), text(8, 4), text(9, 3), text(5, 5)][:1]}, r"samples= takes"),
    ],
)
def test_samples_that_are_none(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SampleError, match=message):
        recoup.fit(Text(1), budget="1GiB", **given)


def test_samples_that_run_other_code() -> None:
    class Two(Text):
        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            for block in self.blocks[: 2 if tokens.shape[1] < 20 else None]:
                x = block(x)
            return x.square().mean()

    model = Two()
    budget = budget_for(model, text(48))
    with pytest.raises(SampleError, match=r"does not call all units of the largest one .*'blocks.2'"):
        recoup.fit(model, samples=[text(8), text(48)], budget=budget)
    assert not any("forward" in vars(module) for module in model.modules()), "the model is as before"


def test_a_dimension_that_plans_are_not_picked_by_grows() -> None:
    model, fitted = fitted_text()
    assert fitted.by_size is not None
    largest = fitted.by_size.plan.items
    with pytest.warns(
        RecoupWarning, match=r"tokens is \[6, 8\], larger than the \[2, 48\] .* other than tokens.shape\[1\]"
    ):
        model(text(8, rows=6)).backward()
    model.tally.take()
    model(text(8, rows=6)).backward()
    assert len(model.tally.take()) > len(model.blocks), "it recomputes as the largest batch does"
    with warnings.catch_warnings():
        warnings.simplefilter("error", RecoupWarning)
        model(text(8, rows=1)).backward()
    assert fitted.by_size.plan.items == largest


def test_few_samples_of_two_axes_bound_what_they_dominate() -> None:
    """Three samples do not tell how bytes grow: no size is planned by more than what one of them took."""
    model, plain = Text(), Text()
    samples = [text(12, 32), text(24, 8), text(60, 2)]
    budget = max(budget_for(plain, sample, 0.3) for sample in samples)
    fitted = recoup.fit(model, samples=samples, budget=budget, accumulates=False)
    by_size = fitted.by_size
    assert by_size is not None
    assert by_size.profiles.bound_of((8, 20)) == (8, 24)
    assert by_size.profiles.bound_of((8, 50)) is None
    resident = fitted.profile.residents.parameter_bytes
    with warnings.catch_warnings():
        warnings.simplefilter("error", RecoupWarning)
        for batch in (text(10, 30), text(20, 7), text(50, 2), text(3, 1)):
            peak, found = peak_and_gradients(model, batch)
            assert peak + resident <= budget
            assert all(map(torch.equal, found, peak_and_gradients(plain, batch)[1]))
    smallest = min(one.plan.predicted_bytes for one in by_size.ranges)
    assert smallest <= budget
    with pytest.warns(RecoupWarning, match="larger|No plan"):
        model(text(50, 8)).backward()


def test_a_step_that_calls_the_model_twice_is_refused() -> None:
    model = Text()

    def step(batch: Tensor) -> None:
        (model(batch[:, :8]) + model(batch)).backward()

    with pytest.raises(SampleError, match="calls the model 2 times"):
        recoup.fit(model, samples=[text(16), text(48)], step=step, budget="1GiB")


def test_a_step_that_never_calls_the_model_is_refused() -> None:
    model = Text()

    def step(batch: Tensor) -> None:
        x = model.embed(batch)
        for block in model.blocks:
            x = block(x)
        x.square().mean().backward()

    with pytest.raises(SampleError, match="never calls the model itself"):
        recoup.fit(model, samples=[text(16), text(48)], step=step, budget="1GiB")


def test_a_sample_that_does_not_fit_is_refused_by_name() -> None:
    """It has fewer elements than the largest, and needs more: scores grow as the square of the length."""
    model = Text()
    wide, long = text(8, 84), text(160, 4)
    budget = budget_for(model, wide, 0.3)
    assert recoup.minimum_budget(recoup.measure(model, long)) > budget
    with pytest.raises(
        BudgetError, match=r"With the sample of tokens.shape\[0\] = 4, tokens.shape\[1\] = 160: "
    ) as caught:
        recoup.fit(model, samples=[wide, long], budget=budget)
    assert caught.value.smallest_bytes > budget
    assert not any("forward" in vars(module) for module in model.modules())


def test_parts_of_the_model_run_under_the_plan_for_the_largest_batch() -> None:
    model, _ = fitted_text()
    model.tally.take()

    def parts() -> int:
        x = model.embed(text(48))
        for block in model.blocks:
            x = block(x)
        x.square().mean().backward()
        return len(model.tally.take())

    before = parts()
    model(text(8)).backward()
    model.tally.take()
    assert parts() == before > len(model.blocks)


def test_lengths_that_are_equal_in_one_sample() -> None:
    """Calls that cost the same there, and nowhere else."""
    model = _seeded(EncoderDecoder)
    pairs = [(24, 20), (12, 12), (6, 8)]
    samples = [(torch.randn(2, source, 8), torch.randn(2, target, 8)) for source, target in pairs]
    fitted = recoup.fit(model, samples=samples, budget=budget_for(model, samples[0], 0.3))
    assert fitted.by_size is not None
    kinds = [
        [unit.kind for unit in profile.units]
        for profile in (fitted.profile, fitted.by_size.profiles.at((9, 9)))
    ]
    assert kinds[0] == kinds[1]


def test_an_input_that_is_empty_in_one_sample() -> None:
    class Boxed(Text):
        def forward(self, tokens: Tensor, boxes: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(tokens) + boxes.sum()

    samples = [(text(48), torch.zeros(0, 4)), (text(24), torch.zeros(3, 4)), (text(8), torch.zeros(1, 4))]
    fitted = recoup.fit(Boxed(), samples=samples, budget="1GiB")
    assert fitted.by_size is not None
    assert len(fitted.by_size.profiles.axes) == 2


def test_verify_takes_plans_by_size() -> None:
    model = Text()
    fitted = recoup.fit(model, text(48), sizes=[8, 24, 48], budget=budget_for(model, text(48)))
    assert fitted.by_size is not None
    for length in (8, 30, 48):
        seen = recoup.verify(model, fitted.by_size, text(length))
        assert seen.peak_bytes == pytest.approx(fitted.by_size.plan_at((length,)).predicted_bytes, abs=64)
        assert seen.gradients == "bit-equal"


def test_a_step_that_leaves_no_gradients_says_that_none_were_compared() -> None:
    model = Text()

    def step() -> None:
        model(text(48)).backward()
        model.zero_grad()

    fitted = recoup.fit(model, step=step, budget="1GiB")
    assert fitted.verification is not None
    assert fitted.verification.gradients == "not compared: the step leaves no gradients"


def test_smaller_sizes_add_to_gradients_as_well() -> None:
    """That gradient is copied where none is there before: by 0.8 MB of 2.6."""
    model, samples = Patches(512), [torch.randn(rows, 16, 24) for rows in (14, 16)]
    options = {"loss": lambda y: y.square().mean(), "units": "embed", "accumulates": True}
    budget = recoup.measure(model, samples[1], **options).plain_bytes
    fitted = recoup.fit(model, samples=samples, budget=budget, **options)
    assert [seen.verification.peak_bytes <= budget for seen in fitted.sizes] == [True]
