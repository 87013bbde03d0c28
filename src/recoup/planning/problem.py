"""What the planner is told: units in execution order, their options, and the links to other stores.

NOTE [ The memory model ]
    1. The output of unit *i* is one value; its input is the output of unit *i - 1* (the problem's input for
       unit 0, which stays for the whole step). Skips are further inputs.
    2. An option's held bytes are disjoint from the unit's input and from its output: a boundary between two
       units is counted once. An option whose backward reads the unit's own output says ``holds_output``.
    3. A forward needs room for all that it makes (its output, its held bytes, other values) and its scratch, all at
       once. A backward needs room for the gradients of its inputs, other values that it makes, and its scratch beside
       everything that it reads.
    4. The gradient of the last output replaces that output as the last unit's first forward ends. If the
       loss itself needs memory, make it the last unit.
    5. Parameter gradients appear when a unit's backward has run, and stay. What they need while it runs
       belongs to the backward's scratch.
    6. Everything else that outlives a phase is a value with a lifetime: see ``recoup.planning.lifetimes``.
    7. A unit that ``runs_once`` is code that only the model itself can run, or has an output that code
       outside the units reads too. What its one forward leaves (output, held bytes) cannot be made again.

``simulate`` is the reference for all of it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from recoup.errors import ProblemError
from recoup.planning.checks import check_bytes, check_total
from recoup.planning.lifetimes import Lifetime, Phase, Use
from recoup.planning.units import Link, Option, Scratch, Unit

__all__ = ["Link", "Option", "Problem", "Scratch", "Unit", "with_numbered_options", "with_options"]

_RESIDENT, _INPUT, _INPUT_GRADIENT = "resident", "input", "gradient of the input"


@dataclass(frozen=True, init=False)
class Problem:
    """A training step in numbers: all that the planner knows.

    Args:
        units: in execution order. The last one is usually the loss.
        resident_bytes: there for the whole step (parameters, optimizer state).
        input_bytes: of the first unit's input, which also stays for the whole step.
        input_gradient_bytes: of the gradient of that input; 0 when nothing asks for it.
        links: ways to other stores.
        values: what else outlives a phase.

    Raises:
        ProblemError: if numbers, names, skips, values or links make no sense; the text says which.

    >>> block = Unit.keep_or_recompute("block", forward_s=1, backward_s=2, held_bytes=100, output_bytes=10)
    >>> Problem([block], resident_bytes=1000).has_skips
    False
    """

    units: tuple[Unit, ...]
    values: tuple[Lifetime, ...]
    links: tuple[Link, ...]

    def __init__(
        self,
        units: Sequence[Unit],
        *,
        resident_bytes: int | None = None,
        input_bytes: int | None = None,
        input_gradient_bytes: int | None = None,
        links: Sequence[Link] = (),
        values: Sequence[Lifetime] = (),
    ) -> None:
        check_bytes(
            "Problem",
            resident_bytes=resident_bytes or 0,
            input_bytes=input_bytes or 0,
            input_gradient_bytes=input_gradient_bytes or 0,
        )
        given = zip(_OWN_VALUES, (resident_bytes, input_bytes, input_gradient_bytes), strict=True)
        found = {name: size for name, size in given if size is not None}
        own = [_own_value(name, size) for name, size in found.items() if size]
        others = (value for value in values if value.name not in found)
        set_field = object.__setattr__
        set_field(self, "units", tuple(units))
        set_field(self, "values", (*own, *others))
        set_field(self, "links", tuple(links))
        _validate_problem(self)

    @property
    def resident_bytes(self) -> int:
        """What is there for the whole step."""
        return self._bytes_of(_RESIDENT)

    @property
    def input_bytes(self) -> int:
        """Of the first unit's input."""
        return self._bytes_of(_INPUT)

    @property
    def input_gradient_bytes(self) -> int:
        """Of the gradient of the first unit's input."""
        return self._bytes_of(_INPUT_GRADIENT)

    def with_resident(self, resident_bytes: int) -> Problem:
        """The same with other bytes that are there for the whole step."""
        return Problem(self.units, resident_bytes=resident_bytes, links=self.links, values=self.values)

    def _bytes_of(self, name: str) -> int:
        return sum(value.num_bytes for value in self.values if value.name == name)

    @property
    def other_values(self) -> tuple[Lifetime, ...]:
        """The values that are not the problem's own numbers."""
        return tuple(value for value in self.values if value.name not in _OWN_VALUES)

    @property
    def num_units(self) -> int:
        """How many units there are."""
        return len(self.units)

    @property
    def has_skips(self) -> bool:
        """Whether any unit reads an output other than its neighbour's."""
        return any(unit.skips for unit in self.units)

    def link(self, name: str) -> Link:
        """The link of that name."""
        for link in self.links:
            if link.name == name:
                return link
        known = ", ".join(link.name for link in self.links) or "none"
        raise ProblemError(f"There is no link {name!r}; the problem's links: {known}.")


def with_options(problem: Problem, names: Sequence[Collection[str]]) -> Problem:
    """The problem with some of each unit's options, by name."""
    return with_numbered_options(
        problem,
        [
            [index for index, option in enumerate(unit.options) if option.name in wanted]
            for unit, wanted in zip(problem.units, names, strict=True)
        ],
    )


def with_numbered_options(problem: Problem, kept: Sequence[Sequence[int]]) -> Problem:
    """The problem with some of each unit's options, by number and in this order."""
    units = [
        replace(unit, options=tuple(unit.options[index] for index in indices))
        for unit, indices in zip(problem.units, kept, strict=True)
    ]
    values = (value.with_options(kept) for value in problem.values)
    return replace(problem, units=tuple(units), values=tuple(value for value in values if value is not None))


_OWN_VALUES = (_RESIDENT, _INPUT, _INPUT_GRADIENT)


def _own_value(name: str, num_bytes: int) -> Lifetime:
    made = Use(Phase.BACKWARD, 0) if name == _INPUT_GRADIENT else None
    return Lifetime(name, num_bytes, made=made, stays=True)


def _validate_problem(problem: Problem) -> None:
    if not problem.units:
        raise ProblemError("A problem needs at least one unit.")
    for what, names in (("unit", [u.name for u in problem.units]), ("link", [k.name for k in problem.links])):
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ProblemError(f"Two {what}s are called {twice!r}. Give each {what} its own name.")
    check_total("Problem", _total_bytes(problem))
    for value in problem.values:
        value.check(len(problem.units))
    known = {link.name for link in problem.links}
    for index in range(len(problem.units)):
        _validate_references(problem.units, index=index, known=known)


def _total_bytes(problem: Problem) -> int:
    """All sizes together."""
    units, options = problem.units, [option for unit in problem.units for option in unit.options]
    return (
        sum(value.num_bytes for value in problem.values)
        + sum(unit.output_bytes + unit.gradient_bytes + unit.parameter_gradient_bytes for unit in units)
        + sum(option.held_bytes + sum(option.scratch) for option in options)
    )


def _validate_references(units: Sequence[Unit], *, index: int, known: set[str]) -> None:
    unit = units[index]
    for source in unit.skips:
        if not 0 <= source < index - 1:
            raise ProblemError(
                f"Unit {unit.name!r} (index {index}) skips from unit {source}; a skip comes from a unit"
                f" between 0 and {index - 2} (its neighbour {index - 1} is its input anyway)."
            )
    if len(set(unit.skips)) < len(unit.skips):
        raise ProblemError(f"Unit {unit.name!r} names a skip twice: {unit.skips}.")
    wanted = {*unit.output_links, *(name for option in unit.options for name in option.held_links)}
    if wanted - known:
        raise ProblemError(
            f"Unit {unit.name!r} may move over {', '.join(sorted(wanted - known))}, which is not among the"
            " problem's links. Add it there."
        )
