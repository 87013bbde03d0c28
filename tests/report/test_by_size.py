"""A model that was fitted to several sizes: its table, its picture, and what the page says of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from report_subjects import make_subject
from sized_subjects import make_plans, make_sized_subject
from torch import nn

import recoup
from recoup.engines.racing import Finisher
from recoup.plans.model_plan import minimum_budget
from recoup.report import to_text
from recoup.report.by_size import in_short, real_steps, treatments

TABLE = """
  Figures are those of the largest batch, ids.shape[1] = 1000.

  embed to layers.2: segment of 4, recomputed together
  layers.3-5: segment of 3, recomputed together
  layers.6 to head: keep

  Plans by size, ids.shape[1]; predicted peak, and seconds of a step per 1,000 of it:
         up to        peak   per 1,000  plan
           503    67.3 MiB      137 ms  keep
           545    64.0 MiB      146 ms  2 of 10 units recomputed in segments
           586    65.4 MiB      150 ms  1 of 10 units recomputed, 2 in segments
           628    66.3 MiB      151 ms  3 of 10 units recomputed in segments
           711    67.1 MiB      155 ms  4 of 10 units recomputed in segments
           752    65.2 MiB      161 ms  2 of 10 units recomputed, 3 in segments
           835    66.8 MiB      162 ms  6 of 10 units recomputed in segments
           959    66.7 MiB      167 ms  6 of 10 units recomputed in segments
          1000    66.0 MiB      168 ms  7 of 10 units recomputed in segments
  Real steps:
          size        peak   predicted  gradients
           100    31.7 MiB    32.0 MiB  bit-equal
           400    56.3 MiB    56.9 MiB  bit-equal
          1000    65.3 MiB    66.0 MiB  bit-equal"""


def test_the_table_of_sizes() -> None:
    assert to_text(make_sized_subject()).endswith(TABLE)


def test_one_sample_has_no_such_table() -> None:
    text = to_text(make_subject(8))
    assert "largest batch" not in text
    assert "Plans by size" not in text


def test_without_real_steps() -> None:
    made = make_sized_subject(is_verified=False)
    assert real_steps(made) == []
    text = to_text(made)
    assert "Plans by size, ids.shape[1]; predicted peak" in text
    assert "Real steps" not in text


def test_two_axes_show_the_plans_that_were_used() -> None:
    text = to_text(make_sized_subject((2, 100), (1, 400), (2, 1000)))
    assert "ids.shape[0] by ids.shape[1] = 2 by 1000." in text
    assert "Plans by size that were used so far, ids.shape[0] by ids.shape[1]; predicted peak" in text
    ranges = [
        line.split("  ")[-1] for line in text.splitlines() if "1 by 400  " in line or "2 by 1000  " in line
    ]
    assert ranges == ["keep", "7 of 10 units recomputed in segments", "bit-equal", "bit-equal"]


def test_a_range_that_nothing_fits_says_so() -> None:
    made = make_sized_subject()
    assert made.by_size is not None
    lower = made.by_size.within(minimum_budget(made.plan.profile) - 2**20)
    lines = to_text(replace(made, by_size=lower)).splitlines()
    over = [line for line in lines if line.endswith(", over the budget")]
    assert [line.split()[0] for line in over][-1] == "1000"
    assert len(over) < len(lower.ranges)


def test_the_race_of_the_largest_alone_is_noted() -> None:
    made = make_sized_subject()
    assert "were raced" not in to_text(made)
    assert made.verification is not None
    race = (Finisher("the planner's choice", 0.1, 0.1, 2**20, is_kept=True),)
    raced = replace(made, verification=replace(made.verification, race=race))
    assert "Only plans for the largest batch were raced." in to_text(raced)
    one = make_subject(8)
    assert one.verification is not None
    assert "largest batch" not in to_text(replace(one, verification=replace(one.verification, race=race)))


def test_sizes_without_a_real_step_are_named() -> None:
    made = make_sized_subject()
    assert "No real step" not in to_text(made)
    assert "No real step" not in to_text(make_sized_subject(is_verified=False))
    text = " ".join(to_text(replace(made, sizes=made.sizes[:1])).split())
    assert "No real step was run under the plan for 100: steps passed the budget" in text


@pytest.mark.parametrize("num_blocks", [3, 8])
def test_treatments_are_those_of_the_plan(num_blocks: int) -> None:
    for one in make_plans(num_blocks=num_blocks, share=0.5).ranges:
        found = treatments(one.plan)
        assert len(found) == len(one.plan.profile.units)
        assert (set(found) == {"keep"}) == one.plan.keeps_everything == (in_short(one.plan) == "keep")


class Model(nn.Module):
    """Blocks with parts, so that a plan can recompute them in part."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 64, dropout=0.0, batch_first=True) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def test_a_fitted_model() -> None:
    torch.manual_seed(0)
    model, sample = Model(), torch.randn(2, 48, 16)
    budget = int(1.15 * recoup.minimum_budget(recoup.measure(model, sample)))
    fitted = recoup.fit(model, sample, sizes=[12, 48], budget=budget)
    text = str(fitted)
    assert "Figures are those of the largest batch, x.shape[1] = 48." in text
    assert [step.at for step in real_steps(fitted)] == ["12", "48"]
    assert fitted.by_size is not None
    last = fitted.by_size.ranges[-1]
    assert last.plan == fitted.plan
    assert f"{in_short(last.plan)}\n  Real steps:" in text
    assert repr(fitted.by_size).startswith("PlansBySize(sizes=((12,), (48,)), budget_bytes=")
