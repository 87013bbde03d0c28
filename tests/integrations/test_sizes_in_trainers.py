"""Which batches ``sizes=True`` measures."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from integrations.test_autopilot_in_trainers import lines_of
from integrations.test_transformers import Rows, budget_for, padded, trainer_for
from torch.utils.data import DataLoader

from recoup.errors import SampleError
from recoup.integrations.callback import FittingCallback
from recoup.integrations.transformers import RecoupCallback


def lengths(callback: FittingCallback, data: Any = None) -> list[int]:
    loader: Any = DataLoader(data or Rows(), batch_size=2, collate_fn=padded)
    return [batch["input_ids"].shape[1] for batch in callback.batches_to_plan_for(loader)]


def test_the_shortest_the_middle_and_the_longest() -> None:
    """Rows are 6 + 17 n modulo 26 long: of 12 pairs the first and three others are looked at."""
    looked_at = sorted(max(6 + 17 * n % 26, 6 + 17 * (n + 1) % 26) for n in (0, 2, 14, 22))
    assert looked_at == [16, 23, 27, 31]
    assert lengths(FittingCallback(sizes=True)) == [16, 27, 31]
    assert lengths(FittingCallback()) == [31]
    assert len(lengths(FittingCallback(sizes=True, num_batches=2))) == 2


def test_batches_of_one_size_are_one() -> None:
    rows: Any = [{"input_ids": torch.zeros(7, dtype=torch.long)}] * 16
    assert lengths(FittingCallback(sizes=True), rows) == [7]


def test_samples_of_the_users_own() -> None:
    batches = [padded([{"input_ids": torch.zeros(size, dtype=torch.long)}]) for size in (4, 9)]
    assert lengths(FittingCallback(sizes=True, sample=batches)) == [4, 9]
    assert lengths(FittingCallback(sample=batches[0])) == [4]
    with pytest.raises(SampleError, match=r"sample= takes a list of batches, such as \[short, .* got a dict"):
        lengths(FittingCallback(sizes=True, sample=batches[0]))


def test_what_recoup_fit_takes_and_a_callback_does_not() -> None:
    with pytest.raises(
        SampleError, match=r"is True or False; got \[32, 64\]\. With sizes=True, .* sample=\[short, "
    ):
        RecoupCallback(sizes=[32, 64])  # type: ignore[arg-type]
    with pytest.raises(
        SampleError, match=r"no samples=: give sample=\[short, medium, long\] with sizes=True"
    ):
        RecoupCallback(samples=[torch.zeros(2), torch.zeros(3)])


def test_one_size_is_said(tmp_path: Path) -> None:
    callback = RecoupCallback(budget_for(share=2.0), sizes=True, num_batches=1, race=False)
    with lines_of("transformers.recoup", logging.WARNING) as lines:
        trainer_for(tmp_path, callback, max_steps=1).train()
    assert lines == [
        "All batches that were looked at are of one size: there is one plan for it. If training has others, give"
        " sample=[short, medium, long], or a larger num_batches=."
    ]
    assert callback.fitted is not None
    assert callback.fitted.by_size is None
