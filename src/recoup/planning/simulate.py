"""The reference interpreter: is a schedule legal, and what does it cost exactly?

Every solver's output passes through ``simulate``; a plan's predicted figures are its simulation. The rules
for bytes are NOTE [ The memory model ] in ``recoup.planning.problem``, those for seconds NOTE [ Time ] in
``recoup.planning.ledger``. Legality never depends on timing: a value that is sent cannot be read from that
action on, however fast or slow the link, until it is fetched.
"""

from __future__ import annotations

from recoup.errors import ScheduleError
from recoup.planning.actions import Action, Backward, Drop, Fetch, Forward, Keep, Send, Value, Wait
from recoup.planning.ledger import Ledger
from recoup.planning.lifetimes import Instances
from recoup.planning.problem import Option, Problem
from recoup.planning.schedule import Schedule
from recoup.planning.simulation_result import Simulation

__all__ = ["simulate"]

_DEVICE = ""


def simulate(problem: Problem, schedule: Schedule) -> Simulation:
    """Runs a schedule on a problem's numbers.

    Raises:
        ScheduleError: if it is not legal; the text names the action, its index and what is missing.

    >>> from recoup.planning.problem import Unit
    >>> step = Option("keep", forward_s=1.0, backward_s=2.0, held_bytes=5)
    >>> units = [Unit("a", [step], output_bytes=3), Unit("b", [step], output_bytes=1)]
    >>> problem = Problem(units, input_bytes=2)
    >>> keep = [Forward(index, keep=Keep.OPTION, option=0) for index in (0, 1)]
    >>> result = simulate(problem, Schedule([*keep, Backward(1, option=0), Backward(0, option=0)]))
    >>> result.seconds, result.peak_bytes, result.peak.phase, result.peak.unit
    (6.0, 19, 'backward', 1)
    """
    machine = _Machine(problem, schedule)
    for index, action in enumerate(schedule):
        machine.run(index, action)
    return machine.finish(len(schedule))


class _Machine:
    """What is where while a schedule runs. The ledger counts; this class says what is legal."""

    def __init__(self, problem: Problem, schedule: Schedule) -> None:
        self.problem = problem
        self.units = problem.units
        self.last = len(self.units) - 1
        self.lightest = [unit.lightest for unit in self.units]
        self.instances = Instances(problem.other_values, schedule)
        initial_bytes = problem.resident_bytes + problem.input_bytes + self.instances.initial_bytes
        self.ledger = Ledger(initial_bytes, links=problem.links)
        self.action: Action | None = None
        # Where a value is: on the device, or the name of the link that it was sent over.
        self.outputs: dict[int, str] = {}
        self.held: dict[int, str] = {}
        self.held_option: dict[int, int] = {}
        # Bytes of an output that went before the rest of it.
        self.freed: dict[int, int] = {}
        # Units whose input is held because their forward will run again from it.
        self.kept_inputs: set[int] = set()
        self.last_forwards = {
            action.unit: index for index, action in enumerate(schedule) if isinstance(action, Forward)
        }
        self.skipped_from = {source for unit in self.units for source in unit.skips}
        self.moved_s: dict[tuple[int, Value], float] = {}
        self.gradients: set[int] = set()
        self.next_backward = self.last
        self.num_forwards = [0] * len(self.units)
        self.num_replays = [0] * len(self.units)

    def run(self, index: int, action: Action) -> None:
        """Runs one action."""
        self.ledger.action, self.action = index, action
        if not 0 <= action.unit <= self.last:
            raise self.error(f"there is no unit {action.unit}; the problem has units 0 to {self.last}")
        match action:
            case Forward():
                self.forward(action)
            case Backward():
                self.backward(action)
            case Drop():
                self.drop(action)
            case Send():
                self.send(action)
            case Fetch():
                self.fetch(action)
            case Wait():
                self.ledger.wait_until(self.moved_s.get((action.unit, action.value), 0.0))

    def finish(self, num_actions: int) -> Simulation:
        """Checks that nothing is left to do or to free."""
        end = f"The schedule ends after {num_actions} actions"
        if self.next_backward >= 0:
            raise ScheduleError(f"{end}, and the backward of {self.name(self.next_backward)} has not run.")
        # Nothing can be left: a backward frees all that only it could read, and every backward has run.
        pairs = zip(self.num_forwards, self.num_replays, strict=True)
        return Simulation(
            seconds=self.ledger.seconds,
            peak=self.ledger.peak,
            wait_s=self.ledger.wait_s,
            num_recomputes=tuple(max(forwards - 1, 0) + replays for forwards, replays in pairs),
            final_bytes=self.ledger.live_bytes,
            timeline=tuple(self.ledger.timeline),
        )

    def error(self, missing: str) -> ScheduleError:
        """An error at the current action."""
        index = self.ledger.action
        return ScheduleError(f"Action {index} ({self.action}) is not legal: {missing}.", index=index)

    def name(self, unit: int) -> str:
        """A unit for error texts."""
        return f"unit {unit} ({self.units[unit].name!r})"

    # Computation

    def forward(self, action: Forward) -> None:
        """Runs a forward and settles what stays."""
        index, unit = action.unit, self.units[action.unit]
        if index > self.next_backward:
            raise self.error(
                f"the backward of {self.name(index)} has already run, so nothing reads this forward"
            )
        if unit.runs_once:
            self.check_once(action)
        if action.option is not None and index in self.held_option:
            raise self.error(f"{self.name(index)} already holds the results of a forward; drop them first")
        if self.outputs.get(index, _DEVICE) != _DEVICE:
            raise self.error(
                f"the output of {self.name(index)} is in {self.outputs[index]!r}; fetch or drop it first"
            )
        option = self.lightest[index] if action.option is None else self.option(index, action.option)
        self.read_inputs(index)
        needed_bytes = unit.output_bytes + option.held_bytes + option.forward_transient_bytes
        needed_bytes += self.begin()
        forward_s = option.forward_s
        if action.option is not None and self.num_forwards[index]:
            forward_s += option.again_s
        self.ledger.compute(forward_s, extra_bytes=needed_bytes, unit=index, phase="forward")
        self.num_forwards[index] += 1
        if index not in self.outputs:
            self.place(index, Value.OUTPUT)
        if action.option is not None:
            self.held_option[index] = action.option
            self.place(index, Value.HELD)
            self.free_input(index, option)
        elif action.keep is Keep.NOTHING and index > 0 and not self.is_pinned(index - 1):
            self.free_output(index - 1)
        if action.keep is Keep.INPUT:
            self.kept_inputs.add(index)
        if index == self.last and index not in self.gradients:
            self.add_gradient(index)
        self.free_unread(index)
        self.end()
        self.ledger.note(index, "after")

    def begin(self) -> int:
        """Frees the values that the action's scratch counts; returns the bytes of those that it makes."""
        action = self.ledger.action
        self.ledger.add(-self.instances.taken_bytes[action])
        return self.instances.made_bytes[action]

    def end(self) -> None:
        """Allocates the values that outlive the action, and frees those that it read last."""
        action = self.ledger.action
        self.ledger.add(self.instances.kept_bytes[action] - self.instances.freed_bytes[action])

    def check_once(self, action: Forward) -> None:
        """Checks a forward of a unit that runs once."""
        name = self.name(action.unit)
        if self.num_forwards[action.unit]:
            raise self.error(f"{name} runs once, and its forward has already run")
        if action.option is None:
            raise self.error(
                f"{name} runs once, so its forward has to hold what one of its options holds (Keep.OPTION)"
            )

    def backward(self, action: Backward) -> None:
        """Runs a backward, with its option's replay, and frees what only it needed."""
        index, unit = action.unit, self.units[action.unit]
        if index != self.next_backward:
            due = self.name(self.next_backward) if self.next_backward >= 0 else "none, as all have run"
            raise self.error(f"backwards run once and in order, and the next one is that of {due}")
        if self.last not in self.gradients and index == self.last:
            raise self.error(f"the forward of the last unit, {self.name(self.last)}, has not run")
        option = self.option(index, action.option)
        self.read_inputs(index)
        self.read_held(index, action.option)
        if option.extra_s > 0 or option.replay_transient_bytes > 0:
            self.num_replays[index] += option.extra_s > 0
            extra_bytes = option.replay_transient_bytes
            self.ledger.compute(option.extra_s, extra_bytes=extra_bytes, unit=index, phase="replay")
        for source in (index - 1, *unit.skips):
            if source not in self.gradients:
                self.add_gradient(source)
        extra_bytes = option.backward_transient_bytes + self.begin()
        self.ledger.compute(option.backward_s, extra_bytes=extra_bytes, unit=index, phase="backward")
        if index in self.held_option:
            self.free_held(index)
        self.gradients.remove(index)
        self.ledger.add(unit.lasting_bytes - unit.gradient_bytes)
        self.next_backward -= 1
        self.free_unread(index)
        self.free_unread(index - 1)
        self.end()
        self.ledger.note(index, "after")

    def option(self, unit: int, index: int) -> Option:
        """An option by its index."""
        options = self.units[unit].options
        if not 0 <= index < len(options):
            raise self.error(f"{self.name(unit)} has options 0 to {len(options) - 1}, not {index}")
        return options[index]

    # What is read

    def read_inputs(self, unit: int) -> None:
        """Checks that a unit's inputs are on the device, and waits for those on their way."""
        for source in (unit - 1, *self.units[unit].skips):
            if source >= 0:
                self.read(source, Value.OUTPUT)

    def read_held(self, unit: int, index: int) -> None:
        """Checks that what a backward's option needs from its forward is there."""
        option, kept = self.units[unit].options[index], self.held_option.get(unit)
        # A unit that runs once runs under one option: its backward is that of its forward.
        if kept is None and (option.needs_forward or self.units[unit].runs_once):
            raise self.error(f"nothing of option {option.name!r} is held for {self.name(unit)}")
        if kept is not None and kept != index:
            name = self.units[unit].options[kept].name
            raise self.error(
                f"{self.name(unit)} holds the results of option {name!r}, not of {option.name!r}"
            )
        if kept is not None:
            self.read(unit, Value.HELD)
            if option.holds_output:
                self.read(unit, Value.OUTPUT)

    def read(self, unit: int, value: Value) -> None:
        """Checks that one value is on the device, and waits for it if it is on its way."""
        place = self.places(value).get(unit)
        if place != _DEVICE:
            where = (
                "was never made or has been dropped" if place is None else f"is in {place!r}; fetch it first"
            )
            raise self.error(f"it needs the {self.describe(unit, value)}, which {where}")
        if self.moved_s:
            self.ledger.wait_until(self.moved_s.get((unit, value), 0.0))

    def describe(self, unit: int, value: Value) -> str:
        """A value for error texts."""
        return f"{'output' if value is Value.OUTPUT else 'held bytes'} of {self.name(unit)}"

    def places(self, value: Value) -> dict[int, str]:
        """Where values of that kind are."""
        return self.outputs if value is Value.OUTPUT else self.held

    # What is taken and freed

    def value_bytes(self, unit: int, value: Value) -> int:
        """Bytes of a value that is somewhere."""
        if value is Value.OUTPUT:
            return self.units[unit].output_bytes - self.freed.get(unit, 0)
        return self.units[unit].options[self.held_option[unit]].held_bytes

    def place(self, unit: int, value: Value) -> None:
        """Puts a fresh value on the device."""
        self.places(value)[unit] = _DEVICE
        self.moved_s.pop((unit, value), None)
        self.ledger.add(self.value_bytes(unit, value))

    def add_gradient(self, source: int) -> None:
        """Puts the gradient of an output, or of the problem's input, on the device."""
        self.gradients.add(source)
        self.ledger.add(
            self.units[source].gradient_bytes if source >= 0 else self.problem.input_gradient_bytes
        )

    def is_pinned(self, unit: int) -> bool:
        """Whether a unit's held option reads the unit's own output."""
        option = self.held_option.get(unit)
        return option is not None and self.units[unit].options[option].holds_output

    def free_unread(self, unit: int) -> None:
        """Frees an output that no action to come can read."""
        is_read_later = unit < self.last and self.next_backward > unit
        if unit in self.outputs and not is_read_later and not self.is_pinned(unit):
            self.free_output(unit)

    def free_input(self, unit: int, option: Option) -> None:
        """Frees what an option does without, unless someone else holds it or an action to come reads it."""
        source = unit - 1
        is_read = self.ledger.action != self.last_forwards[unit] or source in self.skipped_from
        is_held = unit in self.kept_inputs or self.is_pinned(source)
        if option.freed_input_bytes and not is_read and not is_held:
            self.freed[source] = option.freed_input_bytes
            self.release(self.outputs[source], option.freed_input_bytes)

    def free_output(self, unit: int) -> None:
        """Frees an output wherever it is."""
        num_bytes = self.value_bytes(unit, Value.OUTPUT)
        self.freed.pop(unit, None)
        self.release(self.outputs.pop(unit), num_bytes)

    def free_held(self, unit: int) -> None:
        """Frees a unit's held bytes wherever they are."""
        num_bytes = self.value_bytes(unit, Value.HELD)
        del self.held_option[unit]
        self.release(self.held.pop(unit), num_bytes)

    def release(self, place: str, num_bytes: int) -> None:
        """Gives back bytes on the device or in a store."""
        if place == _DEVICE:
            self.ledger.add(-num_bytes)
        else:
            self.ledger.stored_bytes[place] -= num_bytes

    def drop(self, action: Drop) -> None:
        """Frees a value on request."""
        unit = action.unit
        if unit not in self.places(action.value):
            raise self.error(f"there are no {self.describe(unit, action.value)} to drop")
        # A move back must end before its bytes can serve another value.
        if self.places(action.value)[unit] == _DEVICE:
            self.ledger.wait_until(self.moved_s.get((unit, action.value), 0.0))
        if action.value is Value.HELD:
            self.free_held(unit)
            self.free_unread(unit)
        elif self.is_pinned(unit):
            raise self.error(
                f"the option held for {self.name(unit)} reads the unit's output; drop its held bytes first"
            )
        else:
            self.free_output(unit)
        self.ledger.note(unit, "after")

    # Links

    def send(self, action: Send) -> None:
        """Queues a move to another store."""
        what = self.describe(action.unit, action.value)
        num_bytes = self.check_move(action, expected=_DEVICE)
        unit = self.units[action.unit]
        if action.value is Value.OUTPUT:
            allowed = unit.output_links
        else:
            allowed = unit.options[self.held_option[action.unit]].held_links
        if action.link not in allowed:
            raise self.error(
                f"the {what} may leave over {', '.join(allowed) or 'no link'}, not {action.link!r}"
            )
        capacity = self.problem.link(action.link).capacity_bytes
        total = self.ledger.stored_bytes[action.link] + num_bytes
        if capacity is not None and total > capacity:
            raise self.error(f"{action.link!r} takes {capacity} bytes, and with this it would hold {total}")
        self.places(action.value)[action.unit] = action.link
        key = (action.unit, action.value)
        ready_s = self.moved_s.get(key, 0.0)
        self.moved_s[key] = self.ledger.send(action.link, num_bytes, ready_s=ready_s, unit=action.unit)

    def fetch(self, action: Fetch) -> None:
        """Queues a move back to the device."""
        num_bytes = self.check_move(action, expected=action.link)
        self.places(action.value)[action.unit] = _DEVICE
        key = (action.unit, action.value)
        self.moved_s[key] = self.ledger.fetch(
            action.link, num_bytes, ready_s=self.moved_s[key], unit=action.unit
        )

    def check_move(self, action: Send | Fetch, *, expected: str) -> int:
        """Checks that a value is where a move starts; returns its bytes."""
        what = self.describe(action.unit, action.value)
        if action.link not in self.ledger.stored_bytes:
            known = ", ".join(self.ledger.stored_bytes) or "none"
            raise self.error(f"there is no link {action.link!r}; the problem's links: {known}")
        place = self.places(action.value).get(action.unit)
        if place != expected:
            where = "nowhere" if place is None else f"in {place!r}" if place else "on the device"
            raise self.error(
                f"the {what} would have to be {f'in {expected!r}' if expected else 'on the device'}, and"
                f" they are {where}"
            )
        return self.value_bytes(action.unit, action.value)
