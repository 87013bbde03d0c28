"""Ranks that fit one model together: real processes over gloo."""

from __future__ import annotations

import threading
from unittest.mock import patch

import pytest
import torch
from on_ranks import on_ranks
from pipeline_checks import a_sharded_stage, stages_fitted_together, stages_of_a_pipeline
from rank_checks import (
    a_rival_fails,
    a_sharded_step_of_the_users,
    a_step_of_the_users,
    batches_of_several_sizes,
    compiled_and_sharded,
    data_parallel_settings,
    does_not_fit_the_device,
    exchanges,
    fails_in_a_real_step,
    gathered_as_drawn,
    layers_skipped_at_random,
    runs_out_of_memory_while_calls_are_watched,
    sharded_after_planning,
    sharded_along_the_second_dimension,
    sharded_and_accumulating,
    sharded_and_captured,
    sharded_and_captured_in_every_setting,
    sharded_before_planning,
    sharded_in_groups,
    sharded_in_segments,
    sharded_inside_units,
    sharded_over_replicas,
    sharded_to_larger_shards,
    sharded_with_a_root_that_is_freed,
    sharded_with_lasting_parameters,
    sharded_with_more_buffers,
    sharded_with_small_batches,
    tensor_parallel,
    unequal_ranks,
    wrapped_after_fitting,
    wrapped_before_fitting,
    wrapped_while_measured,
)
from torch import nn

import recoup
from recoup.errors import FitError
from recoup.ranks import meetings


def test_two_ranks_with_data_parallelism() -> None:
    on_ranks(
        2,
        exchanges,
        wrapped_after_fitting,
        wrapped_before_fitting,
        a_rival_fails,
        wrapped_while_measured,
        data_parallel_settings,
        batches_of_several_sizes,
        layers_skipped_at_random,
        a_step_of_the_users,
        unequal_ranks,
        runs_out_of_memory_while_calls_are_watched,
    )


def test_two_ranks_with_sharded_parameters() -> None:
    on_ranks(
        2,
        tensor_parallel,
        sharded_in_segments,
        sharded_before_planning,
        sharded_with_small_batches,
        sharded_inside_units,
        sharded_in_groups,
        sharded_and_accumulating,
        does_not_fit_the_device,
        sharded_after_planning,
        a_sharded_step_of_the_users,
        fails_in_a_real_step,
    )


def test_two_ranks_with_other_settings_of_fsdp2() -> None:
    on_ranks(
        2,
        gathered_as_drawn,
        sharded_and_captured,
        sharded_with_a_root_that_is_freed,
        sharded_with_lasting_parameters,
    )


@pytest.mark.slow
def test_two_ranks_with_rare_settings_of_fsdp2() -> None:
    on_ranks(2, sharded_along_the_second_dimension, sharded_with_more_buffers)


@pytest.mark.slow
def test_two_ranks_with_all_combinations_of_settings() -> None:
    checks = (
        sharded_with_small_batches,
        sharded_in_groups,
        sharded_and_accumulating,
        sharded_with_a_root_that_is_freed,
        sharded_with_lasting_parameters,
    )
    on_ranks(2, *checks, is_thorough=True)


@pytest.mark.slow
def test_two_ranks_that_capture_and_compile_in_every_setting() -> None:
    on_ranks(2, compiled_and_sharded, sharded_and_captured_in_every_setting)


def test_two_stages_of_a_pipeline() -> None:
    on_ranks(2, stages_of_a_pipeline, stages_fitted_together, a_sharded_stage)


def test_together_that_is_none() -> None:
    """Neither all ranks nor this one alone: nobody can tell which is meant."""
    model, x = nn.Linear(2, 2), torch.ones(2, 2)
    fitted = recoup.fit(model, x, budget="1GiB", loss=torch.sum)
    says = r"True for all ranks of torch.distributed, False for this rank alone, or a process group; got None"
    for call in (
        lambda: recoup.fit(nn.Linear(2, 2), x, budget="1GiB", loss=torch.sum, together=None),
        lambda: recoup.verify(model, fitted.plan, x, loss=torch.sum, together=None),
        lambda: recoup.autopilot(fitted, optimizer=torch.optim.SGD(model.parameters()), together=None),
    ):
        with pytest.raises(FitError, match=says):
            call()


def test_nobody_looks_for_failures_after_the_last_step() -> None:
    with patch.object(meetings, "_POLL_S", 0.01):
        last = meetings.Meetings(torch.distributed.HashStore(), [0])
        with last.watched(), last.watched():
            watching = [thread for thread in threading.enumerate() if thread.name == "recoup: other ranks"]
        assert len(watching) == 1
        del last
        watching[0].join(timeout=60)
    assert not watching[0].is_alive()


def test_four_ranks() -> None:
    on_ranks(4, exchanges, wrapped_after_fitting, sharded_over_replicas)


@pytest.mark.slow
def test_four_ranks_with_all_combinations_of_settings() -> None:
    on_ranks(4, sharded_over_replicas, sharded_to_larger_shards, is_thorough=True)
