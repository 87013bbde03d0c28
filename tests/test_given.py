"""Arguments of another class are refused in words that say what to give instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import recoup
from recoup.errors import FitError, SampleError


@pytest.fixture(scope="module")
def fitted() -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    return recoup.fit(model, torch.randn(2, 4), budget="1MiB", loss=torch.sum, race=False)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda fitted: recoup.autopilot(fitted.model), "autopilot takes what recoup.fit returns; got a Seq"),
        (lambda fitted: recoup.autopilot(fitted.plan), "autopilot takes .*; got a ModelPlan"),
        (
            lambda fitted: recoup.explain(fitted.model, "0"),
            "explain takes what recoup.fit returns; got a Seq",
        ),
        (lambda fitted: recoup.remove(fitted), r"remove takes a model, such as \.model of .*; got a Fitted"),
        (
            lambda fitted: recoup.plan(fitted, "1MiB"),
            r"plan takes a profile, .* or \.profile of .*; got a Fit",
        ),
        (lambda fitted: recoup.frontier(fitted.model), "frontier takes a profile, .*; got a Sequential"),
        (
            lambda fitted: recoup.minimum_budget(fitted.plan),
            "minimum_budget takes a profile, .*; got a Model",
        ),
        (
            lambda fitted: recoup.verify(fitted.model, fitted, torch.randn(2, 4)),
            r"verify takes a plan, .* or \.applied of .*; got a Fitted",
        ),
    ],
)
def test_something_else(fitted: Any, call: Callable[[Any], Any], words: str) -> None:
    with pytest.raises(FitError, match=words):
        call(fitted)


@pytest.mark.parametrize("engine", ["auto", "best", "inductor", None])
def test_engines_that_cannot_be_measured(fitted: Any, engine: Any) -> None:
    """They were taken for captured graphs of an engine of that name."""
    with pytest.raises(
        SampleError, match=r"cannot be measured; it is 'eager', 'captured' or 'compiled'\. 'au"
    ):
        recoup.measure(fitted.model, torch.randn(2, 4), loss=torch.sum, engine=engine)
