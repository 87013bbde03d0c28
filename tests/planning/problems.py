"""Problems for tests: random ones with unequal costs, and equal ones."""

from __future__ import annotations

import random
from collections.abc import Collection
from itertools import pairwise

from hypothesis import strategies as st

from recoup.planning import Option, Problem, Unit
from recoup.planning.additive_numbers import AdditiveOption, AdditiveUnit
from recoup.planning.lifetimes import Lifetime, Phase, Use


def random_problem(
    seed: int,
    *,
    num_units: int,
    num_options: int = 2,
    scale: int = 1,
    jitter: int = 0,
    odd: bool = False,
    once: Collection[int] = (),
    leaves: bool = False,
    again: bool = False,
    early: bool = False,
) -> Problem:
    """Unequal in everything: seconds, held bytes, transients, outputs, gradients, parameters.

    ``odd`` lets options differ in their forwards too, so that keeping everything need not be fastest; the
    units in ``once`` run once; ``leaves`` lets other bytes come and go with the backwards; ``again`` makes
    options dearer for units that have run before; with ``early`` gradients may go before others are there.
    """
    rng = random.Random(seed)
    waiting = [rng.choice([1, 2, 5]) * scale if leaves else 0 for _ in range(num_units - 1)]
    left = [after - before for after, before in pairwise([0, *waiting, 0])]

    def size(low: int, high: int) -> int:
        return rng.randint(low, high) * scale + (rng.randint(0, jitter) if jitter else 0)

    units = []
    for index in range(num_units):
        forward_s, backward_s, everything = rng.randint(1, 9), rng.randint(1, 9), size(0, 12)
        kind = AdditiveOption if early else Option
        options = [
            kind(
                "keep",
                forward_s=forward_s,
                backward_s=backward_s,
                held_bytes=everything,
                holds_output=rng.random() < 0.3,
                again_s=(everything + index) % 4 if again else 0,
                forward_transient_bytes=size(0, 3),
                backward_transient_bytes=size(0, 3) - early * scale,
            )
        ]
        for k in range(num_options - 1):
            forward_s = rng.randint(1, 9) if odd else forward_s
            options.append(
                Option(
                    f"less{k}",
                    forward_s=forward_s,
                    backward_s=backward_s,
                    extra_s=forward_s * (num_options - k) / num_options,
                    again_s=(everything + k) % 3 if again else 0,
                    held_bytes=everything * k // num_options,
                    forward_transient_bytes=size(0, 3),
                    replay_transient_bytes=everything,
                    backward_transient_bytes=everything,
                )
            )
        unit = Unit(
            f"u{index}",
            options,
            output_bytes=size(1, 6),
            gradient_bytes=size(1, 6),
            parameter_gradient_bytes=rng.choice([0, 0, 1, 3]) * scale,
            runs_once=index in once,
        )
        units.append(AdditiveUnit.of(unit, left=left[index]) if leaves else unit)
    return Problem(
        units,
        input_bytes=size(0, 4),
        resident_bytes=size(0, 9),
        input_gradient_bytes=rng.choice([0, 2]) * scale,
    )


def equal_problem(
    num_units: int,
    *,
    scale: int = 1,
    parameter_gradient_bytes: int = 0,
    once: Collection[int] = (),
    again_s: float = 0.0,
) -> Problem:
    """A head, equal blocks with three options, and a loss; the units in ``once`` run once.

    What holds something costs ``again_s`` more in a unit that has run before.
    """

    def block(index: int, forward_s: float, held: int, output: int) -> Unit:
        def option(kind: str, held_bytes: int, extra_s: float) -> Option:
            return Option(
                kind,
                forward_s=forward_s,
                backward_s=2 * forward_s,
                extra_s=extra_s,
                again_s=again_s if held_bytes else 0.0,
                held_bytes=held_bytes * scale,
                forward_transient_bytes=scale,
                backward_transient_bytes=(2 + held - held_bytes) * scale,
            )

        options = [option("keep", held, 0.0), option("half", held // 2, 0.4 * forward_s)]
        options.append(option("recompute", 0, forward_s))
        return Unit(
            f"u{index}",
            options,
            output_bytes=output * scale,
            parameter_gradient_bytes=parameter_gradient_bytes * scale,
            runs_once=index in once,
        )

    blocks = [block(index, 3.0, 14, 2) for index in range(1, num_units - 1)]
    loss = block(num_units - 1, 2.0, 5, 1)
    return Problem([block(0, 1.0, 3, 2), *blocks, loss], input_bytes=3 * scale)


@st.composite
def small_problems(
    draw: st.DrawFn, *, max_units: int, max_options: int = 3, additive: bool = True
) -> Problem:
    """Random chains small enough for the brute force; any of their units may run once."""
    num_units = draw(st.integers(1, max_units))
    return random_problem(
        draw(st.integers(0, 10**6)),
        num_units=num_units,
        once=draw(st.sets(st.integers(0, num_units - 1))),
        num_options=draw(st.integers(1, max_options)),
        odd=draw(st.booleans()),
        again=draw(st.booleans()),
        early=additive and draw(st.booleans()),
    )


@st.composite
def tiny_problems(draw: st.DrawFn, *, skips: bool = False, frees: bool = False) -> Problem:
    """Up to four units of a few bytes, so that lasting bytes meet inputs; all skips and freed inputs that one likes."""
    rng = random.Random(draw(st.integers(0, 10**6)))
    units: list[Unit] = []
    for index in range(rng.randint(1, 4)):
        input_bytes = units[-1].output_bytes if units else 0
        options = [
            AdditiveOption(
                f"o{k}",
                forward_s=rng.randint(0, 3),
                backward_s=rng.randint(0, 2),
                extra_s=rng.choice([0, 1]),
                again_s=rng.choice([0, 0, 0.5]),
                held_bytes=rng.choice([0, 1, 3]),
                holds_output=rng.random() < 0.3,
                freed=rng.choice([0, input_bytes, rng.randint(0, input_bytes)]) if frees else 0,
                forward_transient_bytes=rng.choice([0, 1]),
                replay_transient_bytes=rng.choice([0, 2]),
            )
            for k in range(rng.randint(1, 2))
        ]
        units.append(
            AdditiveUnit(
                f"u{index}",
                options,
                output_bytes=rng.randint(0, 4),
                gradient_bytes=rng.randint(0, 3),
                parameter_gradient_bytes=rng.choice([0, 0, 2, 5]),
                left=rng.choice([0, 0, 2, -1]),
                skips=[source for source in range(index - 1) if skips and rng.random() < 0.4],
                runs_once=rng.random() < 0.1,
            )
        )
    return Problem(units, input_bytes=rng.randint(0, 2), input_gradient_bytes=rng.randint(0, 2))


@st.composite
def value_problems(draw: st.DrawFn, *, max_units: int = 5, stays_share: float = 0.1) -> Problem:
    """Steps as they are measured: outputs and gradients are values, read by some options, and skips among them."""
    rng = random.Random(draw(st.integers(0, 10**6)))
    num_units = rng.randint(2, max_units)
    values, once = [], {num_units - 1}
    for index in range(num_units - 1):
        readers = sorted({index + 1, *(k for k in range(index + 2, num_units) if rng.random() < 0.3)})
        once |= {index} if len(readers) > 1 else set()
        held = [Use(Phase.BACKWARD, index, (0,))] if rng.random() < 0.4 else []
        for reader in readers:
            options = rng.choice([(), (0,), (1,)])
            held += [Use(Phase.FORWARD, reader), Use(Phase.BACKWARD, reader, options)]
        made = Use(Phase.FORWARD, index)
        values.append(
            Lifetime(f"y{index}", rng.randint(1, 9), made=made, read=held, stays=rng.random() < stays_share)
        )
        made, read = Use(Phase.BACKWARD, readers[-1]), (Use(Phase.BACKWARD, index),)
        values.append(Lifetime(f"g{index}", rng.randint(1, 5), made=made, read=read, in_scratch=True))
    units = []
    for index in range(num_units):
        options = [
            Option(
                name,
                forward_s=rng.randint(1, 4),
                backward_s=rng.randint(1, 4) + (4 if name == "recompute" else 0),
                held_bytes=rng.randint(1, 9) if name == "keep" else 0,
                forward_transient_bytes=rng.randint(0, 3),
                backward_transient_bytes=rng.randint(9, 15),
            )
            for name in ("keep", "recompute")
        ]
        units.append(
            Unit(f"u{index}", options, output_bytes=0, parameter_gradient_bytes=2, runs_once=index in once)
        )
    return Problem(units, resident_bytes=7, values=values)


def budgets_between(low: int, high: int) -> list[int]:
    """A few budgets from the smallest to the largest useful one."""
    return sorted({low, low + (high - low) // 7, low + (high - low) // 3, (low + 2 * high) // 3, high})
