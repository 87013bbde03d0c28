"""Nothing is silent: one warning for each way to leave what was measured, once, and none for usual loops."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from everyday.subjects import (
    Classifier,
    budget_for,
    examples,
    gpt2,
    loss_of_examples,
    loss_of_tokens,
    tokens,
    train,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import recoup
from recoup.engines import is_applied
from recoup.errors import RecoupWarning


def fitted(model: nn.Module | None = None, **options: Any) -> nn.Module:
    """Fitted for 128 examples, in 0.8 of what the plain step takes."""
    model = Classifier() if model is None else model
    batch = examples()
    options.setdefault("loss", nn.CrossEntropyLoss())
    share = 0.9 if options.get("accumulates") else 0.8
    recoup.fit(model, batch, budget=budget_for(model, batch, share=share), verify=False, **options)
    assert is_applied(model)
    return model


class Heard:
    """The warnings of recoup in a block; all others are errors."""

    def __enter__(self) -> Heard:
        self._catching = warnings.catch_warnings(record=True)
        self._caught = self._catching.__enter__()
        warnings.simplefilter("error")
        warnings.simplefilter("always", RecoupWarning)
        return self

    def __exit__(self, *error: Any) -> None:
        self._catching.__exit__(*error)

    @property
    def messages(self) -> list[str]:
        return [str(one.message) for one in self._caught]


def steps(model: nn.Module, *batches: tuple[Tensor, Tensor]) -> None:
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), batches, loss_of_examples)


def assert_one_sentence(message: str) -> None:
    """It ends with a full stop, and has no other."""
    assert message.endswith(".")
    assert ". " not in message


# Eval mode


def test_eval_mode_at_fit() -> None:
    model, batch = Classifier().eval(), examples()
    with Heard() as heard:
        recoup.fit(model, batch, budget="1GiB", loss=nn.CrossEntropyLoss())
    assert len(heard.messages) == 1
    assert "eval mode" in heard.messages[0]
    assert "model.train()" in heard.messages[0]
    assert_one_sentence(heard.messages[0])


def test_the_warning_names_the_line_of_the_user() -> None:
    model, batch = Classifier().eval(), examples()
    with pytest.warns(RecoupWarning, match="eval") as caught:
        recoup.fit(model, batch, budget="1GiB", loss=nn.CrossEntropyLoss())
    assert caught[0].filename == __file__


def test_frozen_parts_in_eval_mode_are_no_reason_to_warn() -> None:
    """A frozen backbone's batch norm is put into eval mode on purpose: the model itself is in train mode."""
    model = Classifier()
    model.blocks[0].eval()
    with Heard() as heard:
        fitted(model)
    assert heard.messages == []


def test_training_in_the_mode_that_was_not_measured() -> None:
    with Heard() as heard:
        model = Classifier().eval()
        fitted(model)
        model.train()
        steps(model, *[examples()] * 3)
    assert len(heard.messages) == 2
    assert "eval mode" in heard.messages[0]
    assert "train mode" in heard.messages[1]


def test_a_backward_in_eval_mode() -> None:
    """Saliency and attacks on inputs: the plan is for train mode, so the plain step's memory is needed."""
    model, (x, _) = fitted(), examples()
    model.eval()
    with Heard() as heard:
        for _ in range(2):
            inputs = x.clone().requires_grad_()
            torch.autograd.grad(model(inputs).sum(), inputs)
    assert len(heard.messages) == 1
    assert "eval mode" in heard.messages[0]
    assert_one_sentence(heard.messages[0])


# Larger inputs


def test_larger_inputs() -> None:
    model = fitted()
    with Heard() as heard:
        steps(model, examples(64), examples(128), examples(129), examples(256), examples(512))
    assert len(heard.messages) == 1
    assert "[129, 32]" in heard.messages[0]
    assert "[128, 32]" in heard.messages[0]
    assert "largest" in heard.messages[0]
    assert_one_sentence(heard.messages[0])


def test_longer_sequences_as_keyword_arguments() -> None:
    model, batch = gpt2(), tokens(4, 16)
    recoup.fit(model, batch, budget=budget_for(model, batch))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Heard() as heard:
        train(model, optimizer, [tokens(4, 16), tokens(8, 8), tokens(2, 32)], loss_of_tokens)
        assert heard.messages == []
        train(model, optimizer, [tokens(4, 24)] * 2, loss_of_tokens)
    assert len(heard.messages) == 1
    assert "input_ids" in heard.messages[0]


def test_larger_inputs_under_a_step() -> None:
    """What the step called the model with is what was measured."""
    model, batch = Classifier(), examples()
    step = lambda: loss_of_examples(model, batch).backward()  # noqa: E731
    recoup.fit(model, step=step, budget=int(0.8 * recoup.measure(model, step=step).plain_bytes))
    with Heard() as heard:
        steps(model, batch)
        assert heard.messages == []
        steps(model, examples(300))
    assert len(heard.messages) == 1
    assert "[300, 32]" in heard.messages[0]


def test_evaluation_of_larger_batches_is_silent() -> None:
    model = fitted()
    with Heard() as heard:
        model.eval()
        with torch.no_grad():
            model(examples(1000)[0])
        model(examples(1000)[0])
        model.train()
        with torch.no_grad():
            model(examples(1000)[0])
        steps(model, examples(128))
    assert heard.messages == []


# Two forwards before a backward


def test_two_forwards_before_a_backward() -> None:
    model, (x, y) = fitted(), examples()
    with Heard() as heard:
        for _ in range(3):
            model.zero_grad()
            (F.cross_entropy(model(x), y) + F.cross_entropy(model(x), y)).backward()
    assert len(heard.messages) == 1
    assert "step=" in heard.messages[0]
    assert_one_sentence(heard.messages[0])


def test_two_forwards_that_were_measured() -> None:
    """Contrastive losses: measured by step=, they are what the plan is for."""
    model, (x, y) = Classifier(), examples()

    def step() -> None:
        (F.cross_entropy(model(x), y) + F.cross_entropy(model(x + 1), y)).backward()

    with Heard() as heard:
        recoup.fit(model, step=step, budget=int(0.8 * recoup.measure(model, step=step).plain_bytes))
        for _ in range(3):
            model.zero_grad()
            step()
    assert heard.messages == []


def test_usual_loops_are_silent() -> None:
    """Accumulation, a forward whose loss is dropped, an output that is kept for logging after its backward."""
    model, batches = fitted(accumulates=True), [examples() for _ in range(3)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outputs, losses = [], []
    with Heard() as heard:
        for x, y in batches:
            output = model(x)
            loss = F.cross_entropy(output, y)
            loss.backward()
            outputs.append(output.detach())
            losses.append(loss)
        optimizer.step()
        model(batches[0][0])
        model(batches[0][0]).sum()
        steps(model, *batches)
        with pytest.raises(RuntimeError, match="interrupted"):
            interrupted(model, batches[0])
        steps(model, *batches)
    assert heard.messages == []


def interrupted(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    """An error between forward and backward, as a loss that is not finite gives."""
    loss = loss_of_examples(model, batch)
    raise RuntimeError(f"interrupted at {loss.item()}")


# Another autocast


def test_autocast_after_a_fit_in_float32() -> None:
    model, batch = fitted(), examples()
    with Heard() as heard:
        for _ in range(2):
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of_examples(model, batch)
            loss.backward()
    assert len(heard.messages) == 1
    assert "bfloat16" in heard.messages[0]
    assert "autocast" in heard.messages[0]
    assert_one_sentence(heard.messages[0])


def test_float32_after_a_fit_under_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        model = fitted()
    with Heard() as heard:
        steps(model, *[examples()] * 2)
    assert len(heard.messages) == 1
    assert "bfloat16" in heard.messages[0]


def test_the_measured_autocast_is_silent() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        model = fitted()
    with Heard() as heard, torch.autocast("cpu", torch.bfloat16):
        loss_of_examples(model, examples()).backward()
    assert heard.messages == []


# Checkpoints of the model's own


class Own(Classifier):
    """With a switch for checkpoints, as models have it."""

    checkpoints = False

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return self.head(x)


def test_checkpoints_switched_on_after_fit() -> None:
    torch.manual_seed(0)
    model, batch = Own(), examples()
    expected = copy.deepcopy(model)
    fitted(model)
    with Heard() as heard:
        for one in (expected, model):
            one.checkpoints = True
            torch.manual_seed(1)
            loss_of_examples(one, batch).backward()
            one.zero_grad()
            loss_of_examples(one, batch).backward()
    assert len(heard.messages) == 1
    assert "checkpoint" in heard.messages[0]
    assert_one_sentence(heard.messages[0])
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


def test_checkpoints_before_fit_are_refused_with_a_remedy_of_their_own() -> None:
    """Not every model that checkpoints is transformers': the message names no method that this one lacks."""
    model = Own()
    model.checkpoints = True
    with pytest.raises(recoup.errors.FitError, match="checkpoint") as caught:
        recoup.fit(model, examples(), budget="1GiB", loss=nn.CrossEntropyLoss())
    assert "checkpointing_disable" not in str(caught.value)


def test_checkpoints_by_timm_s_method_are_named_by_it() -> None:
    """timm's models switch them by ``set_grad_checkpointing``."""

    class Timm(Own):
        def set_grad_checkpointing(self, enable: bool = True) -> None:
            self.checkpoints = enable

    model = Timm()
    model.set_grad_checkpointing()
    with pytest.raises(recoup.errors.FitError, match=r"set_grad_checkpointing\(False\)"):
        recoup.fit(model, examples(), budget="1GiB", loss=nn.CrossEntropyLoss())


# Gradients of the step before


def test_gradients_that_are_there_when_the_forward_begins() -> None:
    """The plan leaves no room for them: accumulation that was not announced, or cleared too late."""
    model, batch = fitted(), examples()
    with Heard() as heard:
        for _ in range(3):
            loss_of_examples(model, batch).backward()
    assert len(heard.messages) == 1
    assert "zero_grad()" in heard.messages[0]
    assert "accumulates=True" in heard.messages[0]
    assert_one_sentence(heard.messages[0])


# Once each


def test_each_kind_is_told_once_and_by_each_model() -> None:
    first, second = fitted(), fitted()
    with Heard() as heard:
        for _ in range(2):
            steps(first, examples(256))
            steps(second, examples(256))
            first.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of_examples(first, examples())
            loss.backward()
    kinds = ["autocast" if "autocast" in message else "larger" for message in heard.messages]
    assert sorted(kinds) == ["autocast", "larger", "larger"]


def test_told_anew_after_another_fit() -> None:
    model = fitted()
    with Heard() as heard:
        steps(model, examples(256))
        fitted(model)
        steps(model, examples(256))
    assert len(heard.messages) == 2


def test_silent_after_the_plan_is_taken_off() -> None:
    model = fitted()
    recoup.remove(model)
    with Heard() as heard, torch.autocast("cpu", torch.bfloat16):
        loss_of_examples(model, examples(500)).backward()
    assert heard.messages == []


def test_a_plan_that_keeps_everything_needs_no_warning_about_memory() -> None:
    """Nothing was touched then; a larger batch still leaves what was measured, and may be told, but only once."""
    model = Classifier()
    recoup.fit(model, examples(), budget="1GiB", loss=nn.CrossEntropyLoss())
    with Heard() as heard:
        steps(model, *[examples(500)] * 3)
    assert len(heard.messages) <= 1


# What is said elsewhere


def test_the_report_says_what_was_switched_off_for_the_comparison() -> None:
    """transformers' caches of keys and values, which training would fill for nothing."""
    model, batch = gpt2(use_cache=True), tokens()
    fitted = recoup.fit(model, batch, budget=budget_for(model, batch))
    assert "cache" in str(fitted)
    plain = Classifier()
    batch = examples()
    other = recoup.fit(plain, batch, budget="1GiB", loss=nn.CrossEntropyLoss())
    assert "cache" not in str(other)


def test_scratch_of_convolutions_on_a_cpu_is_counted_or_said() -> None:
    model = nn.Sequential(
        *(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()) for _ in range(4)), nn.Flatten()
    )
    fitted = recoup.fit(model, torch.randn(4, 8, 16, 16), budget="1GiB", loss=lambda output: output.mean())
    assert "convolution" in str(fitted)
