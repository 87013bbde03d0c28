"""Random problems for ``select`` and ``spill``, and brute force over all that they may choose."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from hypothesis import strategies as st

from recoup.planning import Action, Backward, Forward, Keep, Link, Option, Problem, Schedule, Unit, simulate
from recoup.planning.additive_numbers import AdditiveOption
from recoup.planning.program import Program
from recoup.planning.solvers.select.levels import Levels

seeds = st.integers(min_value=0, max_value=2**32 - 1)


def random_option(rng: random.Random, name: str, *, links: tuple[str, ...] = ()) -> Option:
    option = Option(
        name,
        forward_s=rng.randint(1, 9),
        backward_s=rng.randint(1, 9) / 2,
        extra_s=rng.choice([0, 0, rng.randint(1, 5) / 4]),
        held_bytes=rng.choice([0, rng.randint(0, 20), rng.randint(20, 50)]),
        holds_output=rng.random() < 0.3,
        forward_transient_bytes=rng.choice([0, rng.randint(0, 20)]),
        replay_transient_bytes=rng.choice([0, rng.randint(0, 30)]),
        backward_transient_bytes=rng.choice([0, rng.randint(0, 30)]),
        held_links=links,
    )
    return replace(option, again_s=option.held_bytes % 5 / 2)


def random_problem(
    rng: random.Random,
    *,
    num_units: int,
    max_options: int = 3,
    links: tuple[Link, ...] = (),
    share_once: float = 0.0,
) -> Problem:
    """Unequal everything, skips included; about ``share_once`` of the units run once."""
    names = tuple(link.name for link in links)
    units = []
    for index in range(num_units):
        options = [random_option(rng, f"o{k}", links=names) for k in range(rng.randint(1, max_options))]
        output_bytes, gradient_bytes = rng.randint(0, 15), rng.randint(0, 15)
        if index % 2:
            # Its gradient goes early, but for what the option needs beside it.
            options = [
                AdditiveOption.of(
                    option, backward_transient_bytes=option.backward_transient_bytes - gradient_bytes
                )
                for option in options
            ]
        units.append(
            Unit(
                f"u{index}",
                options,
                output_bytes=output_bytes,
                gradient_bytes=gradient_bytes,
                parameter_gradient_bytes=rng.choice([0, rng.randint(0, 40)]),
                skips=[source for source in range(index - 1) if rng.random() < 0.3],
                output_links=names if rng.random() < 0.5 else (),
                runs_once=share_once > 0 and rng.random() < share_once,
            )
        )
    return Problem(
        units,
        resident_bytes=rng.randint(0, 9),
        input_bytes=rng.randint(0, 9),
        input_gradient_bytes=rng.choice([0, rng.randint(0, 60)]),
        links=links,
    )


def repeated_problem(rng: random.Random, *, num_units: int) -> Problem:
    """Runs of equal units."""
    kinds = random_problem(rng, num_units=3).units
    units: list[Unit] = []
    while len(units) < num_units:
        kind = rng.choice(kinds)
        for _ in range(min(rng.randint(1, 4), num_units - len(units))):
            units.append(
                Unit(
                    f"u{len(units)}",
                    kind.options,
                    output_bytes=kind.output_bytes,
                    gradient_bytes=kind.gradient_bytes,
                    parameter_gradient_bytes=kind.parameter_gradient_bytes,
                )
            )
    return Problem(units, resident_bytes=rng.randint(0, 9), input_gradient_bytes=rng.randint(0, 9))


def one_option_schedules(problem: Problem) -> Iterator[Schedule]:
    """Every way to give each unit one option: kept, needing its input only, or replayed by itself."""
    ways: list[list[tuple[Action, list[Action]]]] = []
    for index, unit in enumerate(problem.units):
        plain = Forward(index, keep=Keep.INPUT)
        own: list[tuple[Action, list[Action]]] = []
        for position, option in enumerate(unit.options):
            kept, backward = (
                Forward(index, keep=Keep.OPTION, option=position),
                Backward(index, option=position),
            )
            own.append((kept, [backward]))
            if unit.runs_once:
                continue
            own.append((plain, [kept, backward]))
            if not option.needs_forward:
                own.append((plain, [backward]))
        ways.append(own)
    for chosen in product(*ways):
        backwards = [action for _, actions in reversed(chosen) for action in actions]
        yield Schedule([*(forward for forward, _ in chosen), *backwards])


def brute_force(problem: Problem) -> list[tuple[int, float]]:
    """Peak and seconds of every schedule with one option per unit."""
    results = (simulate(problem, schedule) for schedule in one_option_schedules(problem))
    return [(result.peak_bytes, result.seconds) for result in results]


def least_seconds(figures: list[tuple[int, float]], budget_bytes: int) -> float:
    return min(seconds for peak_bytes, seconds in figures if peak_bytes <= budget_bytes)


def integer_program_s(levels: Levels, budget_bytes: int) -> float:
    """The best selection's seconds by branch and bound: a binary for every choice, a peak row for every unit."""
    program, held = Program(), list[tuple[int, float]]()
    for choices in levels.choices:
        own = [program.column(cost=choice.seconds) for choice in choices]
        program.row([(column, 1.0) for column in own], lower=1.0, upper=1.0)
        needs = [(k, c.need_bytes / budget_bytes) for k, c in zip(own, choices, strict=True)]
        program.row([*held, *needs], upper=1.0)
        held += [(k, c.held_bytes / budget_bytes) for k, c in zip(own, choices, strict=True)]
    solution = program.solve(time_limit_s=10.0)
    assert solution.values is not None
    return sum(
        choice.seconds
        for choice, value in zip((one for own in levels.choices for one in own), solution.values, strict=True)
        if value > 0.5
    )


def large_problem(num_units: int, *, num_options: int, seed: int, num_skips: float = 0.2) -> Problem:
    """Bytes and seconds as a training step has them."""
    rng, mebi = random.Random(seed), 2**20
    units = []
    for index in range(num_units):
        forward_s, full = rng.uniform(0.001, 0.011), rng.randint(100 * mebi, 800 * mebi)
        output = rng.randint(10 * mebi, 60 * mebi)
        shares = sorted([0.0, 1.0, *(rng.random() for _ in range(num_options - 2))], reverse=True)
        power = rng.uniform(0.5, 2)
        options = [
            Option(
                f"o{k}",
                forward_s=forward_s,
                backward_s=2 * forward_s,
                extra_s=forward_s * (1 - share) ** power * rng.uniform(1, 1.1) if k else 0.0,
                held_bytes=int(share * full),
                forward_transient_bytes=output,
                replay_transient_bytes=int((1 - share) * full) + output,
                backward_transient_bytes=int((1 - share) * full) + 2 * output,
            )
            for k, share in enumerate(shares)
        ]
        skips = [rng.randrange(index - 1)] if index > 2 and rng.random() < num_skips else []
        units.append(
            Unit(
                f"u{index}",
                options,
                output_bytes=output,
                parameter_gradient_bytes=rng.randint(0, 15 * mebi),
                skips=skips,
            )
        )
    return Problem(units, resident_bytes=500 * mebi)
