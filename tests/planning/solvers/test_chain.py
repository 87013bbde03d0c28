from __future__ import annotations

import random
import warnings
from dataclasses import replace

import checkpoint_schedules
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning.brute_force import brute_force
from planning.problems import budgets_between, random_problem, small_problems, tiny_problems

from recoup.planning import Option, Problem, Unit, minimum_budget, simulate, trace
from recoup.planning.additive_numbers import AdditiveUnit
from recoup.planning.solvers.chain import ChainSolver, solve_chain
from recoup.planning.solvers.chain.costs import ChainCosts
from recoup.planning.solvers.chain.floors import ChainFloors
from recoup.planning.solvers.chain.prepared import PreparedChain
from recoup.planning.solvers.select import SelectSolver


def useful_bytes(prepared: PreparedChain) -> int:
    return prepared.fixed_bytes + prepared.floors.full_bytes


def check_against_brute_force(problem: Problem) -> None:
    prepared = PreparedChain(problem, num_levels=1000)
    low = prepared.smallest_bytes
    assert prepared.best(low - 1) is None
    assert brute_force(problem, low - 1, persistent=True) is None
    for budget_bytes in budgets_between(low, useful_bytes(prepared)):
        candidate = prepared.best(budget_bytes)
        found = brute_force(problem, budget_bytes, persistent=True)
        assert candidate is not None
        assert found is not None
        result = simulate(problem, candidate.schedule)
        assert result.peak_bytes <= budget_bytes
        assert result.seconds == pytest.approx(found[0], rel=1e-12)
        assert candidate.bound is not None
        assert candidate.bound.seconds == pytest.approx(found[0], rel=1e-12)
        # The search has its own bookkeeping; the interpreter must agree with it.
        searched = simulate(problem, found[1])
        assert searched.seconds == pytest.approx(found[0], rel=1e-12)
        assert searched.peak_bytes <= budget_bytes


@settings(max_examples=120, deadline=None, derandomize=True, database=None)
@given(problem=small_problems(max_units=4))
def test_nothing_persistent_is_better(problem: Problem) -> None:
    check_against_brute_force(problem)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(problem=tiny_problems())
def test_nothing_persistent_is_better_where_every_byte_counts(problem: Problem) -> None:
    check_against_brute_force(problem)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(problem=tiny_problems(frees=True))
def test_nothing_persistent_is_better_where_options_free_inputs(problem: Problem) -> None:
    check_against_brute_force(problem)


def test_an_input_that_goes_is_not_charged_beside_what_stays() -> None:
    # Unit a may hold its output, but does not: as unit b's backward ends, 2 bytes of input make room for 2 that stay.
    free = Option("free", forward_s=0, backward_s=0)
    holding = Option("holding", forward_s=0, backward_s=0, extra_s=1, holds_output=True)
    a = Unit("a", [free, holding], output_bytes=2, gradient_bytes=0)
    b = Unit("b", [free], output_bytes=0, parameter_gradient_bytes=2)
    prepared = PreparedChain(Problem([a, b]), num_levels=10)
    assert prepared.smallest_bytes == 2
    check_against_brute_force(Problem([a, b]))


def test_a_sweep_may_run_over_the_last_unit() -> None:
    # In 3 bytes, unit b's output has no room beside what unit a holds, nor unit a's forward beside what unit b leaves.
    keep = Option("keep", forward_s=1, backward_s=1, held_bytes=1, forward_transient_bytes=1)
    direct = Option("direct", forward_s=2, backward_s=1)
    b = Unit("b", [direct], output_bytes=3, gradient_bytes=0, parameter_gradient_bytes=2)
    problem = Problem([Unit("a", [keep], output_bytes=0), b])
    candidate = solve_chain(problem, budget_bytes=3)
    assert candidate is not None
    assert candidate.bound is not None
    assert (trace(candidate.schedule), candidate.bound.seconds) == ("F0 F1 F0:0 B1 B0", 6.0)
    check_against_brute_force(problem)


@pytest.mark.parametrize("seed", range(6))
def test_nothing_persistent_is_better_with_five_units(seed: int) -> None:
    check_against_brute_force(random_problem(seed, num_units=5, num_options=1 + seed % 3))


@pytest.mark.parametrize("seed", range(8))
def test_nothing_persistent_is_better_where_backwards_leave_other_bytes(seed: int) -> None:
    problem = random_problem(seed, num_units=4, leaves=True)
    left = [unit.lasting_bytes - unit.parameter_gradient_bytes for unit in problem.units]
    assert sum(left) == 0
    assert any(left)
    check_against_brute_force(problem)
    # A selection is a persistent schedule.
    selected = SelectSolver().prepare(problem, time_limit_s=1.0)
    budget_bytes = selected.smallest_bytes
    assert budget_bytes is not None
    found = selected.best(budget_bytes)
    assert found is not None
    assert simulate(problem, found.schedule).peak_bytes == budget_bytes


def freeing_residents(problem: Problem, *, num_bytes: int) -> Problem:
    """The same where something is there from the start that each backward frees a part of."""
    units = [AdditiveUnit.of(unit, left=-num_bytes * (1 + index)) for index, unit in enumerate(problem.units)]
    return replace(problem, units=units, resident_bytes=problem.resident_bytes - sum(u.left for u in units))


@pytest.mark.parametrize("seed", range(8))
def test_nothing_persistent_is_better_where_backwards_free_residents(seed: int) -> None:
    problem = freeing_residents(random_problem(seed, num_units=4), num_bytes=1 + 2 * seed)
    assert seed < 2 or ChainFloors(ChainCosts(problem)).lowest_bytes < 0
    check_against_brute_force(problem)


def test_nothing_persistent_is_better_with_six_units() -> None:
    check_against_brute_force(random_problem(3, num_units=6, num_options=2))


@pytest.mark.parametrize("once", [(0, 5), (5,), (2, 5), (0, 3), (0, 1, 4, 5)], ids=str)
def test_nothing_persistent_is_better_with_six_units_of_which_some_run_once(once: tuple[int, ...]) -> None:
    problem = random_problem(len(once), num_units=6, num_options=2, odd=once == (2, 5), once=once)
    check_against_brute_force(problem)
    prepared = PreparedChain(problem, num_levels=1000)
    assert prepared.smallest_bytes == minimum_budget(problem)


def test_units_that_run_once_are_never_swept_over() -> None:
    # The five blocks of the golden traces, where a sweep over units 0 and 1 is best in 100 bytes (36 s).
    units = [replace(unit, runs_once=index in (1, 4)) for index, unit in enumerate(golden().units)]
    problem = Problem(units, input_bytes=3)
    candidate = solve_chain(problem, budget_bytes=100)
    assert candidate is not None
    assert simulate(problem, candidate.schedule).seconds == 37.0
    assert trace(candidate.schedule) == "F0:1 F1:0 F2:1 F3:0 F4:0 B4 B3 B2 B1 B0"
    # The backward of unit 2 beside both outputs before it: 3 + 4 + 6, its gradients 2 + 6, its replay 50.
    assert PreparedChain(problem, num_levels=100).smallest_bytes == 71
    assert PreparedChain(golden(), num_levels=100).smallest_bytes == 67


def test_a_last_unit_that_runs_once_holds_its_option() -> None:
    # Its plain forward would be faster than its option's, but leaves nothing for a backward.
    options = [Option("slow", forward_s=5.0, backward_s=1.0), Option("big", forward_s=2.0, backward_s=9.0)]
    often = Problem([Unit("loss", options[::-1], output_bytes=1)])
    once = Problem([Unit("loss", options[::-1], output_bytes=1, runs_once=True)])
    figures = []
    for problem in (often, once):
        candidate = solve_chain(problem, budget_bytes=100)
        assert candidate is not None
        assert candidate.bound is not None
        figures.append((trace(candidate.schedule), candidate.bound.seconds))
    assert figures == [("F0 B0", 3.0), ("F0:1 B0", 6.0)]


def test_gradients_may_take_the_place_of_the_input_that_goes() -> None:
    def unit(name: str, *, output_bytes: int, parameter_gradient_bytes: int) -> Unit:
        keep = Option("keep", forward_s=1, backward_s=1, held_bytes=2)
        return Unit(
            name,
            [keep],
            output_bytes=output_bytes,
            gradient_bytes=1,
            parameter_gradient_bytes=parameter_gradient_bytes,
        )

    problem = Problem(
        [
            unit("a", output_bytes=9, parameter_gradient_bytes=0),
            unit("b", output_bytes=1, parameter_gradient_bytes=10),
        ]
    )
    # 2 and 9 bytes for a; 2 and 1, then 1, for b. After its backward 9 and 2 make room for 10; a's gradient is there.
    assert PreparedChain(problem, num_levels=100).smallest_bytes == 15
    check_against_brute_force(problem)


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(problem=small_problems(max_units=4, max_options=2))
def test_the_unrestricted_optimum_is_never_above(problem: Problem) -> None:
    prepared = PreparedChain(problem, num_levels=1000)
    for budget_bytes in budgets_between(prepared.smallest_bytes, useful_bytes(prepared)):
        candidate = prepared.best(budget_bytes)
        found = brute_force(problem, budget_bytes, persistent=False)
        assert candidate is not None
        assert found is not None
        assert found[0] <= simulate(problem, candidate.schedule).seconds + 1e-9


def mixed(num_steps: int, num_units_of_storage: int) -> int:
    """Forward steps of the outside package's schedule that mixes states and records."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        schedule = checkpoint_schedules.MixedCheckpointSchedule(
            num_steps, num_units_of_storage, storage=checkpoint_schedules.StorageType.RAM
        )
        forwards = [action for action in schedule if isinstance(action, checkpoint_schedules.Forward)]
    return sum(action.n1 - action.n0 for action in forwards)


@pytest.mark.parametrize("num_steps", [*range(1, 41), 50])
def test_equals_the_outside_mixed_schedules(num_steps: int) -> None:
    # a = ā = 1, δ = 0, no transients, m = s + 1: a record is as large as a state and contains it.
    option = Option("record", forward_s=1.0, backward_s=0.0, holds_output=True)
    units = [Unit(f"s{i}", [option], output_bytes=1, gradient_bytes=0) for i in range(num_steps)]
    prepared = PreparedChain(Problem(units), num_levels=50)
    for slots in range(1, 12):
        candidate = prepared.best(slots + 1)
        assert candidate is not None
        assert simulate(Problem(units), candidate.schedule).seconds == mixed(num_steps, slots), slots


def test_mixed_published_values() -> None:
    assert (mixed(10, 3), mixed(50, 5)) == (19, 138)


def golden() -> Problem:
    sizes = [(1, 30, 4), (2, 10, 6), (3, 50, 2), (4, 20, 5), (1, 5, 1)]
    return Problem(
        [
            Unit.keep_or_recompute(f"u{i}", forward_s=f, backward_s=2 * f, held_bytes=held, output_bytes=out)
            for i, (f, held, out) in enumerate(sizes)
        ],
        input_bytes=3,
    )


@pytest.mark.parametrize(
    ("budget_bytes", "seconds", "expected"),
    [
        (70, 39.0, "F0 F1 F2:1 F3:0 F4:0 B4 B3 B2 F0:0 F1:0 B1 B0"),
        (100, 36.0, "F0 F1 F2:0 F3:0 F4:0 B4 B3 B2 F0:0 F1:0 B1 B0"),
        (125, 34.0, "F0:1 F1:0 F2:0 F3:0 F4:0 B4 B3 B2 B1 B0"),
        (141, 33.0, "F0:0 F1:0 F2:0 F3:0 F4:0 B4 B3 B2 B1 B0"),
    ],
)
def test_golden_traces(budget_bytes: int, seconds: float, expected: str) -> None:
    candidate = solve_chain(golden(), budget_bytes=budget_bytes)
    assert candidate is not None
    assert (simulate(golden(), candidate.schedule).seconds, trace(candidate.schedule)) == (seconds, expected)


@settings(max_examples=15, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 10**6), num_levels=st.sampled_from([30, 60, 120]))
def test_rounding_never_passes_the_budget_nor_the_bound(seed: int, num_levels: int) -> None:
    once = {0: (), 1: (0, 13), 2: (0, 6, 13)}[seed % 3]
    problem = random_problem(seed, num_units=14, num_options=3, scale=10_007, jitter=5_000, once=once)
    problem = freeing_residents(problem, num_bytes=10_007 * (seed % 2))
    prepared = PreparedChain(problem, num_levels=num_levels)
    assert not prepared.is_exact
    fine = PreparedChain(problem, num_levels=3000)
    low, high = prepared.smallest_bytes, useful_bytes(prepared)
    previous = float("inf")
    for step in range(33):
        budget_bytes = low + (high - low) * step // 32
        candidate, better = prepared.best(budget_bytes), fine.best(budget_bytes)
        assert candidate is not None
        assert candidate.bound is not None
        assert better is not None
        result = simulate(problem, candidate.schedule)
        assert result.peak_bytes <= budget_bytes
        assert result.seconds <= previous * (1 + 1e-12)
        assert candidate.bound.seconds <= simulate(problem, better.schedule).seconds * (1 + 1e-12)
        previous = result.seconds
    assert prepared.best(low - 1) is None


def test_the_smallest_budget_is_feasible_to_the_byte() -> None:
    for seed in range(20):
        once = random.Random(seed).sample(range(12), seed % 4)
        problem = random_problem(seed, num_units=12, num_options=2, scale=1009, jitter=997, once=once)
        prepared = PreparedChain(problem, num_levels=40)
        candidate = prepared.best(prepared.smallest_bytes)
        assert candidate is not None
        assert simulate(problem, candidate.schedule).peak_bytes <= prepared.smallest_bytes


def test_bytes_may_all_be_zero() -> None:
    option = Option("free", forward_s=1.0, backward_s=1.0)
    units = [Unit(f"u{i}", [option], output_bytes=0) for i in range(3)]
    candidate = solve_chain(Problem(units), budget_bytes=0)
    assert candidate is not None
    assert simulate(Problem(units), candidate.schedule).seconds == 6.0


def test_same_input_same_plan() -> None:
    problem = random_problem(5, num_units=20, num_options=3, scale=1009, jitter=500)
    budget_bytes = PreparedChain(problem, num_levels=100).smallest_bytes * 2
    first = ChainSolver().prepare(problem, time_limit_s=1.0).best(budget_bytes)
    assert first == ChainSolver().prepare(problem, time_limit_s=1.0).best(budget_bytes)
