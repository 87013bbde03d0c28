"""``fit`` at the smallest budget of models drawn at random: what a refusal names works."""

from __future__ import annotations

import pytest
from random_models import random_step
from slowly import slow_but
from torch import nn

import recoup
from recoup.errors import BudgetError

# All but the first were refused again at the budget that their refusal had named, or passed their prediction under
# some plan: units of one class that differ, outputs in a list, buffers in segments, gradients in another layout.
SEEDS = [9, 3, 7, 25, 33, 53, 78, 114, 124, 140]


def refused(model: nn.Module, budget: int, options: dict[str, object]) -> int:
    """The budget that a refusal names, verified."""
    with pytest.raises(BudgetError, match=r"bytes, verified on a real step\)") as caught:
        recoup.fit(model, budget=budget, race=False, **options)
    return caught.value.smallest_bytes


def check(model: nn.Module, budget: int, options: dict[str, object]) -> None:
    fitted = recoup.fit(model, budget=budget, race=False, **options)
    assert fitted.verification.peak_bytes <= budget
    assert (fitted.verification.gradients, fitted.verification.drifting) == ("bit-equal", ())


@pytest.mark.parametrize("seed", slow_but(SEEDS[::3], SEEDS))
def test_the_budget_that_a_refusal_names_works(seed: int) -> None:
    model, options = random_step(seed)
    check(model, refused(model, 1, options), options)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_predicted_minimum_works_or_is_refused_with_one_that_does(seed: int) -> None:
    model, options = random_step(seed)
    budget = recoup.minimum_budget(recoup.measure(model, **options))
    try:
        check(model, budget, options)
    except BudgetError:
        check(model, refused(model, budget, options), options)
