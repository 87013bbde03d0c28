from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning.brute_force import brute_force
from planning.problems import equal_problem, random_problem, tiny_problems, value_problems
from planning.solvers.test_baselines import skips

from recoup.errors import BudgetError, ProblemError, SizeError
from recoup.planning import Problem, Unit, frontier, minimum_budget, plan, simulate
from recoup.planning.plan import Session
from recoup.planning.solvers import SOLVERS
from recoup.planning.solvers.base import Candidate, Prepared, Solver
from recoup.planning.solvers.bounds import relaxed_bound
from recoup.planning.solvers.chain import ChainSolver
from recoup.planning.solvers.chain.table import ChainTable, Rounding
from recoup.planning.solvers.select import solve_select


def blocks(num_units: int = 6) -> Problem:
    units = [
        Unit.keep_or_recompute(
            f"block{i}", forward_s=1 + i % 3, backward_s=2, held_bytes=600 - 50 * i, output_bytes=100
        )
        for i in range(num_units)
    ]
    return Problem(units, resident_bytes=5000, input_bytes=64)


def test_a_plan_says_all_that_matters() -> None:
    found = plan(blocks(), "7kB")
    assert found.budget_bytes == 7000
    assert found.predicted == simulate(blocks(), found.schedule)
    assert found.predicted.peak_bytes <= 7000
    assert (found.solver, found.bound.schedules, found.gap) == ("chain", "persistent schedules", 0.0)
    assert found.is_optimal
    assert len(found.options) == 6
    assert set(found.options) <= {"keep", "recompute"}
    assert "by chain: optimal among persistent schedules." in str(found)


def test_below_the_minimum() -> None:
    smallest = minimum_budget(blocks())
    assert plan(blocks(), smallest).predicted.peak_bytes == smallest
    match = (
        rf"No schedule fits .* The smallest feasible budget is .*\({smallest} bytes\), set by the .* 'block"
    )
    with pytest.raises(BudgetError, match=match) as caught:
        plan(blocks(), smallest - 1)
    assert caught.value.smallest_bytes == smallest
    assert caught.value.budget_bytes == smallest - 1
    tight = plan(blocks(), smallest).predicted.peak
    assert caught.value.unit == f"block{tight.unit}"


@dataclass
class Faulty(Solver, Prepared):
    """Claims a smallest budget of 5,500 bytes, and answers for it with too many bytes, or not at all."""

    candidate: Candidate | None
    name = "faulty"
    smallest_bytes = 5500

    def applies(self, problem: Problem) -> bool:
        return True

    def prepare(self, problem: Problem, *, time_limit_s: float) -> Prepared:
        return self

    def best(self, budget_bytes: int) -> Candidate | None:
        return self.candidate if budget_bytes >= self.smallest_bytes else None


@pytest.mark.parametrize("budget_bytes", [5499, 5500, 6000])
def test_a_faulty_solver_is_named(budget_bytes: int) -> None:
    passing = plan(blocks(), 7000)
    peak_bytes = passing.predicted.peak_bytes
    assert peak_bytes > 6000
    seen = max(budget_bytes, 5500)
    with pytest.raises(AssertionError, match=f"faulty passed the budget: {peak_bytes} > {seen} bytes"):
        plan(blocks(), budget_bytes, solvers=[Faulty(Candidate(passing.schedule))])
    with pytest.raises(AssertionError, match=f"faulty: no answer for {seen} bytes; the smallest is 5500"):
        plan(blocks(), budget_bytes, solvers=[Faulty(None)])


def test_bad_arguments() -> None:
    with pytest.raises(SizeError, match="Cannot read '8 apples'"):
        plan(blocks(), "8 apples")
    with pytest.raises(ProblemError, match="at least one point"):
        frontier(blocks(), num_points=0)
    with pytest.raises(ProblemError, match="at least one point; got num_points=None"):
        frontier(blocks(), num_points=None)  # type: ignore[arg-type]
    with pytest.raises(ProblemError, match=r"None of the solvers \(chain\) applies"):
        plan(skips(), 10_000, solvers=[ChainSolver()])


def test_skips_are_planned_and_bounded() -> None:
    smallest = minimum_budget(skips())
    previous = float("inf")
    for budget_bytes in range(smallest, 400, 10):
        found = plan(skips(), budget_bytes)
        assert found.predicted.peak_bytes <= budget_bytes
        assert found.bound.seconds <= found.predicted.seconds <= previous
        previous = found.predicted.seconds
    assert found.is_optimal
    assert found.bound.schedules == "all schedules"


@settings(max_examples=10, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 10**6))
def test_more_bytes_never_cost_more_seconds(seed: int) -> None:
    problem = random_problem(seed, num_units=9, num_options=3, scale=1009, jitter=600)
    low = minimum_budget(problem)
    previous = float("inf")
    for step in range(12):
        found = plan(problem, low + step * low // 6)
        assert found.predicted.peak_bytes <= found.budget_bytes
        assert found.bound.seconds <= found.predicted.seconds * (1 + 1e-12)
        assert found.predicted.seconds <= previous * (1 + 1e-9)
        previous = found.predicted.seconds


def test_every_solver_lets_units_run_once() -> None:
    chain = random_problem(7, num_units=9, num_options=3, once=(0, 4, 8))
    for problem in (chain, skips(0, 3, 6)):
        applying = [solver for solver in SOLVERS if solver.applies(problem)]
        smallest = minimum_budget(problem)
        for solver in applying:
            own = minimum_budget(problem, solvers=[solver])
            found = plan(problem, own, solvers=[solver])
            assert own >= smallest
            assert found.predicted.peak_bytes <= own
        assert plan(problem, smallest).predicted.peak_bytes <= smallest
        with pytest.raises(BudgetError, match=f"The smallest feasible budget is .*{smallest} bytes"):
            plan(problem, smallest - 1)


def test_the_frontier_is_what_plan_says() -> None:
    points = frontier(blocks())
    assert points[0].budget_bytes == minimum_budget(blocks())
    assert [p.predicted.peak_bytes for p in points] == [p.budget_bytes for p in points]
    assert sorted(points, key=lambda p: p.budget_bytes) == list(points)
    seconds = [p.predicted.seconds for p in points]
    assert sorted(set(seconds), reverse=True) == seconds
    for point in points:
        assert plan(blocks(), point.budget_bytes).predicted.seconds == point.predicted.seconds
    assert points[-1].predicted.num_recomputes == (0,) * 6


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(
    problem=st.one_of(
        tiny_problems(skips=True), tiny_problems(frees=True), tiny_problems(skips=True, frees=True)
    )
)
def test_plan_minimum_and_frontier_agree_with_each_other_and_with_all_schedules(problem: Problem) -> None:
    smallest, points = minimum_budget(problem), frontier(problem)
    assert points[0].budget_bytes == smallest
    for point in points:
        assert plan(problem, point.budget_bytes) == point
    previous_s = float("inf")
    for budget_bytes in range(smallest, points[-1].budget_bytes + 2, 2):
        found = plan(problem, budget_bytes)
        on_frontier_s = min(p.predicted.seconds for p in points if p.budget_bytes <= budget_bytes)
        assert found.predicted.seconds <= min(on_frontier_s, previous_s) * (1 + 1e-9)
        previous_s = found.predicted.seconds
        best = brute_force(problem, budget_bytes, persistent=False)
        assert best is not None
        assert relaxed_bound(problem, budget_bytes).seconds <= best[0] * (1 + 1e-12)
        if found.bound.schedules == "all schedules":
            assert found.bound.seconds <= best[0] * (1 + 1e-12)
        if found.bound.schedules == "persistent schedules":
            persistent = brute_force(problem, budget_bytes, persistent=True)
            assert persistent is not None
            assert found.bound.seconds <= persistent[0] * (1 + 1e-12)
        assert best[0] <= found.predicted.seconds * (1 + 1e-12)


@pytest.mark.parametrize("time_limit_s", [math.nan, math.inf, None, -1.0, "1 s"])
def test_time_limits_that_are_none(time_limit_s: object) -> None:
    limit = {"time_limit_s": time_limit_s}
    for ask in (
        lambda: plan(blocks(), 7000, **limit),  # type: ignore[arg-type]
        lambda: minimum_budget(blocks(), **limit),  # type: ignore[arg-type]
        lambda: frontier(blocks(), **limit),  # type: ignore[arg-type]
        lambda: solve_select(blocks(), budget_bytes=7000, **limit),  # type: ignore[arg-type]
    ):
        with pytest.raises(
            ProblemError, match="time_limit_s must be a finite number of seconds, at least 0; got"
        ):
            ask()


def test_a_frontier_at_chosen_budgets() -> None:
    smallest = minimum_budget(blocks())
    points = frontier(blocks(), budgets=["1kB", smallest, 6500, 20_000, "1MB"])
    assert len(points) == 3
    assert len(frontier(blocks(12), num_points=4)) <= 4


def test_equal_units_need_no_more_than_the_chain_solver() -> None:
    problem = equal_problem(20)
    found = plan(problem, 120)
    assert (found.solver, found.gap) == ("chain", 0.0)


def test_the_solvers_that_are_tried() -> None:
    names = [solver.name for solver in SOLVERS]
    assert names[0] == "chain"
    assert len(set(names)) == len(names)


@settings(max_examples=12, deadline=None, derandomize=True, database=None)
@given(problem=value_problems(max_units=5), seed=st.integers(0, 10**6))
def test_without_proofs_plans_are_as_fast(problem: Problem, seed: int) -> None:
    """Bounds only say how good a plan is; sizes that are no whole levels, and values that live longer than a unit."""
    for one in (problem, random_problem(seed, num_units=8, num_options=3, scale=100_003, jitter=60_000)):
        proven, unproven = (Session(one, time_limit_s=1.0, proves=proves) for proves in (True, False))
        low = proven.smallest_bytes
        assert unproven.smallest_bytes == low
        assert unproven.find(low - 1) is None
        for step in range(6):
            expected, found = (session.plan(low + step * low // 6) for session in (proven, unproven))
            assert found.predicted.seconds == expected.predicted.seconds
            assert found.bound.seconds <= expected.predicted.seconds * (1 + 1e-12)


def test_a_plan_fills_only_the_tables_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Far above the smallest budget: one table for schedules, and one coarse or fine one that spares the others."""
    problem = random_problem(3, num_units=12, num_options=3, scale=100_003, jitter=60_000)
    filled: list[tuple[Rounding, int]] = []
    fill = ChainTable.__init__

    def count(self: ChainTable, *args: Any, **kwargs: Any) -> None:
        filled.append((kwargs["rounding"], kwargs["num_levels"]))
        fill(self, *args, **kwargs)

    monkeypatch.setattr(ChainTable, "__init__", count)
    sessions = [Session(problem, solvers=[ChainSolver()], proves=proves) for proves in (True, False)]
    budget_bytes = (minimum_budget(problem, solvers=[ChainSolver()]) + plain_bytes(problem)) // 2
    for session in sessions:
        filled.clear()
        session.plan(budget_bytes)
        session.plan(budget_bytes - 1)
        assert [rounding for rounding, _ in filled] == [Rounding.NEAREST, Rounding.DOWN]
        fine, bounding = (num_levels for _, num_levels in filled)
        assert (bounding > fine // 2) is (session is sessions[0])


def plain_bytes(problem: Problem) -> int:
    return plan(problem, 10**15).predicted.peak_bytes
