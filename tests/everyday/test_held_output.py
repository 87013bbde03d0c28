"""What the caller holds: the output through the backward, or not, as loops are written."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from everyday.subjects import gpt2, peak_bytes, tokens
from slowly import slow_but
from torch import Tensor, nn

import recoup
from recoup.errors import BudgetError, RecoupWarning

LARGE = 1024
"""Words: the logits are the largest tensor of the step, as in real models."""
LOGITS_BYTES = 8 * 32 * LARGE * 4


def subject() -> tuple[nn.Module, dict[str, Tensor], torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = gpt2(num_layers=2, vocab_size=LARGE)
    return model, tokens(), torch.optim.SGD(model.parameters(), lr=0.1)


def holding(model: nn.Module, batch: dict[str, Tensor], optimizer: torch.optim.Optimizer) -> list[float]:
    """As tutorials write it."""
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        outputs = model(**batch)
        loss = outputs.loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        del outputs
    return losses


def dropping(model: nn.Module, batch: dict[str, Tensor], optimizer: torch.optim.Optimizer) -> list[float]:
    """As transformers' Trainer does."""
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def run(
    loop: Any, budget: int | None = None, **options: Any
) -> tuple[list[float], int, recoup.Fitted | None]:
    model, batch, optimizer = subject()
    fitted = None
    if budget is not None:
        fitted = recoup.fit(model, batch, budget=budget, optimizer=optimizer, **options)
    losses: list[float] = []
    torch.manual_seed(1)
    peak = peak_bytes(lambda: losses.extend(loop(model, batch, optimizer)), model, batch)
    return losses, peak, fitted


@functools.cache
def smallest(holds_output: bool) -> int:
    model, batch, optimizer = subject()
    profile = recoup.measure(model, batch, optimizer=optimizer, holds_output=holds_output)
    return recoup.minimum_budget(profile)


@pytest.mark.parametrize(("loop", "holds"), [(holding, True), (dropping, False)])
def test_the_plain_step_is_predicted_for_both_loops(loop: Any, holds: bool) -> None:
    model, batch, optimizer = subject()
    profile = recoup.measure(model, batch, optimizer=optimizer, holds_output=holds)
    _, peak, _ = run(loop)
    assert profile.plain_bytes == pytest.approx(peak, rel=0.01)


def test_the_loops_differ_by_the_logits() -> None:
    """Otherwise the tests here would test nothing."""
    _, held, _ = run(holding)
    _, dropped, _ = run(dropping)
    assert held - dropped >= 0.9 * LOGITS_BYTES
    assert smallest(holds_output=True) - smallest(holds_output=False) >= 0.9 * LOGITS_BYTES


def test_by_default_a_loop_that_holds_the_output_stays_under_the_budget() -> None:
    losses, plain_bytes, _ = run(holding)
    budget = (smallest(holds_output=True) + plain_bytes) // 2
    for loop in (holding, dropping):
        fitted_losses, peak, fitted = run(loop, budget)
        assert fitted is not None
        assert fitted_losses == losses
        assert peak <= budget


def test_a_budget_below_that_is_planned_for_letting_the_output_go() -> None:
    """The report says so, with the bytes; the loop that lets go stays under the budget, without a warning."""
    losses, _, _ = run(dropping)
    budget = (smallest(holds_output=True) + smallest(holds_output=False)) // 2
    fitted_losses, peak, fitted = run(dropping, budget)
    assert fitted is not None
    assert fitted_losses == losses
    assert peak <= budget
    text = str(fitted)
    assert "output" in text
    assert "1.00 MiB" in text
    assert ".loss" in text or "holds_output" in text


def test_a_loop_that_holds_it_is_told_then() -> None:
    losses, _, _ = run(holding)
    budget = (smallest(holds_output=True) + smallest(holds_output=False)) // 2
    with pytest.warns(RecoupWarning, match=r"output.*held") as caught:
        fitted_losses, peak, _ = run(holding, budget)
    assert len(caught) == 1
    assert fitted_losses == losses
    assert budget < peak


def test_a_budget_in_which_the_plain_step_fits_is_not_refused() -> None:
    """With the output let go, nothing need be recomputed."""
    losses, plain_bytes, _ = run(dropping)
    fitted_losses, peak, fitted = run(dropping, plain_bytes + 4096, holds_output=False)
    assert fitted is not None
    assert fitted.plan.keeps_everything
    assert fitted_losses == losses
    assert peak <= plain_bytes + 4096
    # By default the plan may be careful, but not refuse.
    run(dropping, plain_bytes + 4096)


def test_said_that_it_is_held_such_a_budget_is_refused() -> None:
    """The message names what is held, its bytes, and how to let it go."""
    budget = (smallest(holds_output=True) + smallest(holds_output=False)) // 2
    with pytest.raises(BudgetError, match=r"(?s)output.*MiB.*holds_output=False"):
        run(dropping, budget, holds_output=True)


def test_said_that_it_is_let_go_the_report_is_not_about_it() -> None:
    budget = (smallest(holds_output=True) + smallest(holds_output=False)) // 2
    _, peak, fitted = run(dropping, budget, holds_output=False)
    assert fitted is not None
    assert peak <= budget


def test_a_refused_budget_names_what_sets_the_floor() -> None:
    """The values that set it, with their bytes, and what would lower it."""
    low = smallest(holds_output=False)
    with pytest.raises(BudgetError, match=r"smallest feasible budget is") as caught:
        run(dropping, int(0.9 * low))
    text = str(caught.value)
    assert "parameters" in text or "logits" in text or "output" in text
    assert "batch" in text


def by_name(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    output = model(**batch)
    logits = output.logits
    output.loss.backward()
    return logits


def as_tuple(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    loss, *others = model(**batch, return_dict=False)
    loss.backward()
    return others


def in_a_list(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    kept = [model(**batch)]
    kept[-1].loss.backward()
    return kept


@pytest.mark.parametrize("hold", slow_but([by_name], [by_name, as_tuple, in_a_list]))
def test_every_way_of_holding_is_seen(hold: Any) -> None:
    """A name for the logits, a tuple, a list for later: each holds the tensor."""
    model, batch, optimizer = subject()
    budget = (smallest(holds_output=True) + smallest(holds_output=False)) // 2
    recoup.fit(model, batch, budget=budget, optimizer=optimizer)
    with pytest.warns(RecoupWarning, match=r"output.*held"):
        hold(model, batch)


def test_a_tuple_in_the_output_is_let_go_or_held() -> None:
    """Hidden states, and the logits of routers: items of transformers' outputs are their attributes, too."""
    model, batch, optimizer = subject()
    sample = {**batch, "output_hidden_states": True}
    profile = recoup.measure(model, sample, optimizer=optimizer, holds_output=False)
    recoup.fit(
        model,
        sample,
        budget=recoup.minimum_budget(profile),
        optimizer=optimizer,
        holds_output=False,
        race=False,
    )
    model(**sample).loss.backward()
    optimizer.zero_grad()
    output = model(**sample)
    states, loss = output.hidden_states, output.loss
    del output
    with pytest.warns(RecoupWarning, match=r"output.*held"):
        loss.backward()
    assert len(states) == 3


@pytest.mark.parametrize("name", ["loss", "detached copy"])
def test_what_does_not_hold_it_is_silent(name: str) -> None:
    """Losses and predictions kept for logging are small, or copies."""
    model, batch, optimizer = subject()
    budget = (smallest(holds_output=True) + smallest(holds_output=False)) // 2
    recoup.fit(model, batch, budget=budget, optimizer=optimizer)
    kept: list[Any] = []
    for _ in range(2):
        optimizer.zero_grad()
        output = model(**batch)
        loss = output.loss
        if name == "detached copy":
            kept += [output.logits[:, -1].detach().clone(), output.logits.argmax(-1)]
        del output
        loss.backward()
        kept.append(loss if name == "loss" else loss.item())


@pytest.mark.parametrize("holds", [True, False])
def test_step_callables_hold_what_they_hold(holds: bool) -> None:
    """A step= is measured as it is: both forms are predicted without being told which."""
    model, batch, optimizer = subject()

    def step() -> None:
        optimizer.zero_grad()
        if holds:
            output = model(**batch)
            loss = output.loss
        else:
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()

    predicted = recoup.measure(model, step=step, optimizer=optimizer).plain_bytes
    assert predicted == pytest.approx(peak_bytes(step, model, batch), rel=0.02)
