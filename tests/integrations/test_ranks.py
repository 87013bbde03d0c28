"""Trainers on two ranks: the same weights as without a plan, and one plan on both."""

from __future__ import annotations

import pytest
from on_ranks import on_ranks
from trainer_checks import lightning_on_two_ranks, trainer_on_two_ranks, trainer_with_a_sharded_model


@pytest.mark.filterwarnings("ignore")
def test_trainers_on_two_ranks() -> None:
    on_ranks(2, trainer_on_two_ranks, trainer_with_a_sharded_model)


@pytest.mark.slow
def test_lightning_on_two_ranks() -> None:
    on_ranks(2, lightning_on_two_ranks)
