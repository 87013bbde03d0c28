"""Chains of steps, run forward under a policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from recoup.errors import ChainError
from recoup.manual.memory import Memory
from recoup.manual.run import Run
from recoup.manual.scheduled import ScheduledRun, run_schedule
from recoup.manual.steps import Step, call_forward
from recoup.numbers import whole_number
from recoup.planning import Option, Problem, Schedule, Unit
from recoup.policies import EveryN, KeepAll, Policy
from recoup.stores import ActivationStore
from recoup.stores.arrays import copy_array, expect_array

__all__ = ["Chain"]

DEFAULT_MAX_ENTRIES = 64


class Chain:
    """Steps that run one after another, each on the result of the one before.

    Args:
        steps: at least one.
        enabled: with False every run keeps everything, whatever policy and store it is given.

    Raises:
        ChainError: if there are no steps, or one of them is no `recoup.manual.Step`.

    >>> import numpy as np
    >>> square = Step(lambda x: x * x, lambda x, grad_y: 2 * x * grad_y)
    >>> run = Chain([square] * 3).forward(np.array([2.0]))
    >>> run.output, run.backward(np.array([1.0])).input, run.num_recomputed
    (array([256.]), array([1024.]), 2)
    """

    def __init__(self, steps: Iterable[Step], *, enabled: bool = True) -> None:
        self.steps = tuple(steps)
        self.enabled = enabled
        if not self.steps:
            raise ChainError("A chain needs at least one step; got none.")
        for unit, step in enumerate(self.steps):
            if not isinstance(step, Step):
                raise ChainError(f"Step {unit} is a {type(step).__name__}. Wrap it: Step(forward, backward).")

    @classmethod
    def from_layers(
        cls,
        layers: Iterable[Any],
        forward: Callable[[Any, Any], Any],
        backward: Callable[[Any, Any, Any], Any] | None = None,
        *,
        enabled: bool = True,
    ) -> Chain:
        """Makes a chain of layers that share one forward and one backward.

        Args:
            layers: anything; one step each.
            forward: gives ``y`` for a layer and ``x``.
            backward: as in `recoup.manual.Step`, with the layer before the other arguments.
            enabled: as for `Chain`.

        >>> import numpy as np
        >>> def backward(w, x, grad_y):
        ...     return w * grad_y, x * grad_y
        >>> chain = Chain.from_layers([2.0, 5.0], lambda w, x: w * x, backward)
        >>> chain.forward(np.array([3.0])).backward(np.array([1.0]))
        Gradients(input=array([10.]), parameters=(array([15.]), array([6.])))
        """
        name = getattr(forward, "__name__", type(forward).__name__)
        return cls(
            (Step(partial(forward, layer), backward and partial(backward, layer), name) for layer in layers),
            enabled=enabled,
        )

    def __len__(self) -> int:
        return len(self.steps)

    def __repr__(self) -> str:
        names = [step.label(unit) for unit, step in enumerate(self.steps)]
        shown = ", ".join(names if len(names) <= 4 else [*names[:2], "…", names[-1]])
        return f"<Chain of {len(self)}: {shown}{'' if self.enabled else ', not enabled'}>"

    def forward(
        self,
        x: Any,
        *,
        policy: Policy | None = None,
        store: ActivationStore | None = None,
        keep_input: bool = True,
        costs: Sequence[float] | None = None,
        first_unit: int | None = None,
    ) -> Run:
        """Runs all steps, holding the inputs that the policy keeps.

        An input for which the store has no room is dropped and counted as saved. In a store with reduced
        precision, what is recomputed starts from rounded values, and gradients differ accordingly.

        Args:
            x: the input of the first step, a torch tensor or NumPy array; it is not changed.
            policy: which steps' inputs to hold; by default every fourth.
            store: where to hold them; by default a new one of at most 64 entries. Runs may share a store: an
                entry that a later run replaced is recomputed, never mistaken.
            keep_input: also hold a copy of ``x`` that the store does not count: a backward always works.
            costs: what each step costs to recompute, for policies and stores that ask.
            first_unit: for a chain that is a part of a longer one, run over one store: the number of its first step
                there, so that each part has entries of its own. The policy then decides unit by unit.

        Raises:
            ChainError: if ``x`` or what a step returns is no array, or the policy is none.
            PolicyError: if the policy does not suit this chain or these costs.
            PrecisionError: if the store's precision cannot hold an activation.

        >>> import numpy as np
        >>> steps = [Step(lambda x: x * x, lambda x, grad_y: 2 * x * grad_y)] * 6
        >>> store = ActivationStore()
        >>> one = Chain(steps[:3]).forward(np.ones(3), policy=EveryN(3), store=store, first_unit=0)
        >>> Chain(steps[3:]).forward(one.output, policy=EveryN(3), store=store, first_unit=3)
        <Run of 3 units, counted from 3: output of shape [3], holds (3,), 0 run again>
        >>> store.held_units()
        (0, 3)
        """
        array = _checked_input(x)
        if first_unit is not None:
            first_unit = whole_number("first_unit must be", first_unit, ChainError)
        start = first_unit or 0
        policy, store = self._arrangement(policy, store, start)
        kept = self._kept(policy, costs, first_unit)
        memory = Memory(store, copy_array(array) if keep_input else None, start)
        for index, step in enumerate(self.steps):
            unit = start + index
            if kept[index]:
                memory.keep(unit, array, cost=costs[index] if costs is not None else 0.0)
            else:
                memory.drop(unit, array)
            array = call_forward(step, unit, array)
        return Run(self.steps, memory, array)

    def problem(self, x: Any, *, costs: Sequence[float] | None = None) -> Problem:
        """Describes the chain for the planner: runs it once, holding nothing, and notes the bytes.

        Every step counts as one option that needs only the step's input for its backward. Gradients count as
        many bytes as what they are the gradient of.

        Args:
            x: an input, as for `forward`.
            costs: seconds of each step's forward, of which its backward takes as many; by default 1 each.

        >>> import numpy as np
        >>> from recoup.planning import plan
        >>> square = Step(lambda x: x * x, lambda x, grad_y: 2 * x * grad_y)
        >>> chain = Chain([square] * 6)
        >>> best = plan(chain.problem(np.ones(10)), "400B")
        >>> best.solver, sum(best.predicted.num_recomputes)
        ('chain', 3)
        """
        array = _checked_input(x)
        input_bytes = array.nbytes
        seconds = _checked_costs(costs, len(self.steps))
        units = []
        for unit, step in enumerate(self.steps):
            array = call_forward(step, unit, array)
            option = Option("input", forward_s=seconds[unit], backward_s=seconds[unit])
            units.append(Unit(step.label(unit), [option], output_bytes=array.nbytes))
        return Problem(units, input_bytes=input_bytes, input_gradient_bytes=input_bytes)

    def run_schedule(
        self, x: Any, schedule: Schedule, *, grad_output: Any | Callable[[Any], Any]
    ) -> ScheduledRun:
        """Runs forward and backward as a planner's schedule says, nested replays and moves included.

        Args:
            x: the input of the first step; it is not changed.
            schedule: for as many units as the chain has, such as a plan's.
            grad_output: the gradient of the output, or a function that gives it for the output.

        Raises:
            ChainError: if the schedule is not legal for this chain; ``recoup.planning.simulate`` says more.

        >>> import numpy as np
        >>> from recoup.planning import revolve
        >>> square = Step(lambda x: x * x, lambda x, grad_y: 2 * x * grad_y)
        >>> run = Chain([square] * 3).run_schedule(
        ...     np.array([2.0]), revolve(3, num_slots=1), grad_output=np.array([1.0])
        ... )
        >>> run.gradients.input, run.num_forwards
        (array([1024.]), (3, 2, 1))
        """
        return run_schedule(self.steps, schedule, array=_checked_input(x), grad_output=grad_output)

    def _kept(self, policy: Policy, costs: Sequence[float] | None, first_unit: int | None) -> Sequence[bool]:
        names = [step.called for step in self.steps]
        if first_unit is None:
            return policy.for_names(names).keeps(len(self.steps), costs)
        policy = policy.for_names(names, first_unit=first_unit)
        given = [None] * len(self.steps) if costs is None else _checked_costs(costs, len(self.steps))
        return [policy.keeps_unit(unit, cost=cost) for unit, cost in enumerate(given, first_unit)]

    def _arrangement(
        self, policy: Policy | None, store: ActivationStore | None, first_unit: int
    ) -> tuple[Policy, ActivationStore]:
        if not self.enabled:
            return KeepAll(), ActivationStore()
        if store is None:
            num_units = first_unit + len(self.steps)
            store = ActivationStore(max_entries=DEFAULT_MAX_ENTRIES, evict="refuse", num_units=num_units)
        policy = EveryN() if policy is None else policy
        if not isinstance(policy, Policy):
            raise ChainError(f"{policy!r} is no policy. Use one of recoup.policies, such as EveryN(4).")
        return policy, store


def _checked_input(x: Any) -> Any:
    """A copy of a chain's input, which the steps may change."""
    expect_array("The chain's input must be an array", x, ChainError)
    return copy_array(x)


def _checked_costs(costs: Sequence[float] | None, num_steps: int) -> Sequence[float]:
    if costs is None:
        return [1.0] * num_steps
    if len(costs) != num_steps:
        raise ChainError(f"There are {len(costs)} costs for {num_steps} steps. Give one for each step.")
    return costs
