from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import replace

import checkpoint_schedules
import pytest

from recoup.errors import ProblemError, ScheduleError
from recoup.planning import Backward, Forward, OnlineRevolve, Option, Problem, Schedule, Unit, simulate, trace
from recoup.planning.solvers.revolve import RevolveSolver, extra_forwards, num_repetitions, revolve


def steps(num_steps: int, *, records: bool = True) -> Problem:
    """Equal steps: a state of one byte; a record of a thousand, or none."""
    option = Option("step", forward_s=1.0, backward_s=3.0, held_bytes=1000 if records else 0)
    units = [Unit(f"s{i}", [option], output_bytes=1, gradient_bytes=0) for i in range(num_steps)]
    return Problem(units, input_bytes=1)


def num_forwards(schedule: Schedule) -> int:
    return sum(isinstance(action, Forward) for action in schedule)


def test_published_values() -> None:
    cases = {(10, 3): 15, (50, 5): 122, (100, 5): 316, (100, 10): 222, (1000, 10): 3636}
    assert {case: extra_forwards(case[0], num_slots=case[1]) for case in cases} == cases


def test_the_closed_form_is_the_optimum_of_the_recurrence() -> None:
    best: dict[tuple[int, int], int] = {}
    for slots in range(1, 13):
        for length in range(1, 61):
            cuts = [
                cut + best[length - cut, slots - 1] + best[cut, slots]
                for cut in range(1, length)
                if slots > 1
            ]
            best[length, slots] = min(cuts) if cuts else length * (length - 1) // 2
            assert extra_forwards(length, num_slots=slots) == best[length, slots], (length, slots)


@pytest.mark.parametrize("num_slots", range(1, 13))
def test_schedules_meet_the_binomial_formula(num_slots: int) -> None:
    for num_steps in range(1, 61):
        extra = extra_forwards(num_steps, num_slots=num_slots)
        schedule = revolve(num_steps, num_slots=num_slots)
        assert num_forwards(schedule) == num_steps + extra
        result = simulate(steps(num_steps), schedule)
        assert result.seconds == 4 * num_steps + extra
        # The slots, the record, and a state that is read while the next one is made.
        assert result.peak_bytes <= num_slots + 1002
        assert max(result.num_recomputes) <= num_repetitions(num_steps, num_slots=num_slots)
        bare = revolve(num_steps, num_slots=num_slots, records=False)
        assert num_forwards(bare) == 1 + extra
        assert simulate(steps(num_steps, records=False), bare).peak_bytes <= num_slots + 2


def outside_forwards(schedule: checkpoint_schedules.CheckpointSchedule) -> int:
    total = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for action in schedule:
            if isinstance(action, checkpoint_schedules.Forward):
                total += action.n1 - action.n0
    return total


@pytest.mark.parametrize("num_slots", range(1, 13))
def test_totals_of_checkpoint_schedules(num_slots: int) -> None:
    for num_steps in range(1, 61):
        outside = checkpoint_schedules.MultistageCheckpointSchedule(
            num_steps, num_slots, 0, trajectory="maximum"
        )
        assert outside_forwards(outside) == num_steps + extra_forwards(num_steps, num_slots=num_slots)


def test_golden_traces() -> None:
    assert trace(revolve(1, num_slots=1)) == "F0:0 B0"
    assert trace(revolve(3, num_slots=1)) == "F0 F1 F2:0 B2 F0 F1:0 B1 F0:0 B0"
    assert trace(revolve(3, num_slots=1, records=False)) == "F0 F1 F2i B2 F0 B1 B0"
    expected = "F0 F1i F2i F3 F4:0 B4 F2i F3:0 B3 F2:0 B2 F1:0 B1 F0:0 B0"
    assert trace(revolve(5, num_slots=3)) == expected


def test_bad_numbers() -> None:
    with pytest.raises(ProblemError, match="got 0 steps and 3 slots"):
        revolve(0, num_slots=3)
    with pytest.raises(ProblemError, match="at least one step and one slot"):
        extra_forwards(3, num_slots=0)


def test_as_a_solver_the_peak_grows_with_the_slots() -> None:
    problem = steps(30)
    peaks = [simulate(problem, revolve(30, num_slots=slots)).peak_bytes for slots in range(1, 31)]
    assert peaks == sorted(peaks)
    prepared = RevolveSolver().prepare(problem, time_limit_s=1.0)
    assert prepared.smallest_bytes == peaks[0]
    assert prepared.best(peaks[0] - 1) is None
    found = prepared.best(peaks[4])
    assert found is not None
    assert num_forwards(found.schedule) == min(
        30 + extra_forwards(30, num_slots=slots) for slots in range(1, 31) if peaks[slots - 1] <= peaks[4]
    )
    assert not RevolveSolver().applies(Problem([replace(unit, runs_once=True) for unit in problem.units]))
    assert not RevolveSolver().applies(
        Problem([*problem.units, Unit("x", steps(1).units[0].options, output_bytes=2)])
    )


@pytest.mark.parametrize("records", [True, False])
@pytest.mark.parametrize("num_slots", [1, 2, 3, 5, 8])
def test_online_is_legal_and_close_to_the_optimum(num_slots: int, records: bool) -> None:
    for num_steps in range(1, 61):
        online = OnlineRevolve(num_slots=num_slots, records=records)
        forwards = [action for _ in range(num_steps) for action in online.advance()]
        assert len(online.kept_steps) <= num_slots
        schedule = Schedule([*forwards, *online.reverse()])
        result = simulate(steps(num_steps, records=records), schedule)
        assert [a.unit for a in schedule if isinstance(a, Backward)] == list(reversed(range(num_steps)))
        assert result.peak_bytes <= num_slots + (1002 if records else 2)
        # No step runs more often than in the optimum, but for the sweep that could not know the end.
        runs = Counter(action.unit for action in schedule if isinstance(action, Forward))
        limit = num_repetitions(num_steps, num_slots=num_slots) + 1 + records
        assert max(runs.values()) <= limit, (num_steps, runs)


def test_online_golden_trace() -> None:
    online = OnlineRevolve(num_slots=3)
    ahead = trace(action for _ in range(6) for action in online.advance())
    assert ahead == "F0 F1i F2i F3i D1y F4i D0y F5i D3y"
    assert online.kept_steps == (0, 3, 5)
    assert trace(online.reverse()) == "F5:0 B5 F3i F4:0 B4 F3:0 B3 F0 F1i F2:0 B2 F1:0 B1 F0:0 B0"


def test_online_misuse() -> None:
    with pytest.raises(ScheduleError, match="at least one slot"):
        OnlineRevolve(num_slots=0)
    online = OnlineRevolve(num_slots=1)
    with pytest.raises(ScheduleError, match="call advance once for each step first"):
        online.reverse()
    online.advance()
    online.reverse()
    with pytest.raises(ScheduleError, match="has been reversed"):
        online.advance()
