"""Processes that train one model under the autopilot: one plan, and a step that failed anywhere is repeated by all."""

from __future__ import annotations

import pytest
from autopilot_checks import (
    accumulated_without_reductions,
    one_rank_fails,
    one_rank_fails_while_sharded,
    other_errors,
    sharded,
    sizes_differ,
    the_least_room_decides,
)
from on_ranks import on_ranks


def test_two_ranks_of_which_one_fails() -> None:
    on_ranks(2, one_rank_fails, the_least_room_decides, accumulated_without_reductions, other_errors)


@pytest.mark.slow
def test_two_ranks_with_sharded_parameters() -> None:
    on_ranks(2, sharded, one_rank_fails_while_sharded)


@pytest.mark.slow
def test_two_ranks_with_batches_of_their_own_sizes() -> None:
    on_ranks(2, sizes_differ)
