"""Running a step unit by unit, with the graph cut around each, so that only one unit's memory is needed at a time.

NOTE [ Streaming ]
    1. Code between the units runs as in any step, with a graph. A unit's outputs get a new history, which begins there:
       nothing that a unit saves outlives its call.
    2. The visitor runs each unit's call: it looks, measures or compares. `UnitCall.glance` is the cheapest way: a
       forward that records a graph without any saved tensors.
    3. After the first backward that reaches the model nothing more is visited. A second forward before the gradients
       are dropped means that the step accumulates gradients.
    4. A backward that does not reach the model belongs to another one (a discriminator), and runs. If no output of a
       unit is alive by then, the visitor restarts; later streams do not visit these calls at all.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from recoup.errors import SampleError, UnitError
from recoup.model.accumulation import UNREDUCED, Accumulates
from recoup.model.cut_graph import NestedTensorError, anchored
from recoup.model.replace_forward import intercepted
from recoup.model.slices import sliced, unit_names
from recoup.model.step import TrainingStep
from recoup.model.tracing import is_in_torch_checkpoint, recomputes_itself
from recoup.tensors import graph_nodes, needing_gradient
from recoup.torch_private import pop_saved_tensor_hooks, push_saved_tensor_hooks

__all__ = ["LeakError", "UnitCall", "Visitor", "explaining", "stream"]


@dataclass(frozen=True, eq=False)
class UnitCall:
    """One call of a unit in a streamed step.

    Attributes:
        index: among the step's unit calls.
        name: of the module; with ``#2`` if this is its second call, and so on.
        module: the unit.
        fn: its own forward.
        args: positional arguments, as the code before it passed them; `fresh` cuts their history off.
        kwargs: keyword arguments.
        holds: whether a `glance` must hold saved tensors, because a backward runs inside the forward.
        reset: puts back what an earlier run changed outside of tensors, such as a cache among the arguments.
    """

    index: int
    name: str
    module: nn.Module
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    holds: bool = False
    reset: Callable[[], None] | None = None

    def fresh(self) -> tuple[tuple[Any, ...], dict[str, Any], Tensor]:
        """Arguments with a history of their own, and where that history begins."""
        # Autocast must not reuse the casts of an earlier run.
        torch.clear_autocast_cache()
        if self.reset is not None:
            self.reset()
        (args, kwargs), start = anchored((self.args, self.kwargs))
        return args, kwargs, start

    def again(self) -> UnitCall:
        """The same call with fresh arguments."""
        args, kwargs, _ = self.fresh()
        return replace(self, args=args, kwargs=kwargs)

    def glance(self, note: Callable[[Tensor], None] | None = None) -> Any:
        """Runs the forward and drops what it saves, after ``note`` has seen each saved tensor.

        It runs on the real arguments: a list that the unit fills is filled for the code after it.
        """
        # Without its arguments, which the graph would hold.
        dropped = replace(self, args=(), kwargs={})

        def pack(tensor: Tensor) -> Tensor | UnitCall:
            if note is not None:
                note(tensor)
            return tensor.detach() if self.holds else dropped

        push_saved_tensor_hooks(pack, _unpack)
        try:
            return self.fn(*self.args, **self.kwargs)
        except LeakError:
            if self.holds:
                raise
        finally:
            pop_saved_tensor_hooks()
        return replace(self, holds=True).glance(note)


class LeakError(UnitError):
    """Tensors pass between a unit and the code around it by other ways than its arguments and outputs.

    Attributes:
        module: the unit.
    """

    def __init__(self, name: str, what: str, module: nn.Module) -> None:
        super().__init__(f"Unit {name!r} {what}, or choose other units with units=.")
        self.module = module


_LEAKS = (
    "gives a tensor to code outside by another way than its output: a list, an attribute or a variable of others."
    " Return it from the unit's forward"
)


def _unpack(packed: Tensor | UnitCall) -> Tensor:
    if isinstance(packed, UnitCall):
        raise LeakError(packed.name, _LEAKS, packed.module)
    return packed


class _Mark:
    """Lives as long as the graph that begins at a unit's outputs."""


class Visitor:
    """Is called along a streamed step; by itself it runs each unit once, and notes nothing."""

    def enter(self, call: UnitCall) -> None:
        """The code before a unit has run; ``call`` is about to."""

    def visit(self, call: UnitCall) -> Any:
        """Runs the unit, at least once; returns its output."""
        return call.glance()

    def leave(self, call: UnitCall, output: Any, start: Tensor) -> None:
        """The unit has returned ``output``, whose history begins at ``start``."""

    def restart(self) -> None:
        """All calls so far belong to another backward: the step begins now."""

    def end(self, loss: Tensor, output: Any) -> None:
        """The forward has ended; ``output`` is the model's, None if a step of the user's ran it."""


class _Stream:
    """The state of one streamed step."""

    def __init__(self, step: TrainingStep, units: Sequence[nn.Module], visitor: Visitor) -> None:
        self.step, self.units, self.visitor = step, units, visitor
        self.num_calls = 0
        self.num_foreign = 0
        self.calls_of: dict[nn.Module, int] = {}
        self.trained = step.parameter_ids()
        self.handed: list[weakref.ref[_Mark]] = []
        self.is_inside = False
        self.has_ended = False
        self.accumulates: Accumulates = False
        self.has_stale = False

    def run(self) -> None:
        model = self.step.model
        names = unit_names(model, self.units)
        stand_ins = {unit: self._stand_in(unit, names[unit] or "model") for unit in self.units}
        with self.step.shards.unit_by_unit(), intercepted(stand_ins), sliced(model, self.units):
            self.step.run(self._backward)

    def _stand_in(self, unit: nn.Module, name: str) -> Callable[..., Any]:
        fn = unit.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self.is_inside or not torch.is_grad_enabled():
                return fn(*args, **kwargs)
            if self.num_foreign < self.step.num_skipped:
                with self._inside():
                    return anchored(UnitCall(0, name, unit, fn, args, kwargs).glance())[0]
            number = self.calls_of[unit] = self.calls_of.get(unit, 0) + 1
            label = name if number == 1 else f"{name}#{number}"
            with self._inside():
                if not self.has_ended and self.num_calls == 0:
                    self.has_stale = self._has_gradients()
                if self.has_ended:
                    self.accumulates = self.accumulates or self._has_gradients()
                    with torch.no_grad():
                        return fn(*args, **kwargs)
                if is_in_torch_checkpoint() or recomputes_itself(unit):
                    what = f"Unit {label!r} runs inside a checkpoint of the model's own."
                    raise _checkpointed_already(what, self.step.model)
                try:
                    return self._visit(label, unit, fn, args, kwargs)
                except NestedTensorError as error:
                    raise SampleError(
                        f"Unit {label!r} is given or returns a nested tensor, and recoup measures units with plain"
                        " tensors only. Pad the sequences, pass values and offsets as tensors of their own, or"
                        " checkpoint such modules by hand: recoup.checkpoint takes nested tensors."
                    ) from error

        return forward

    def _visit(self, label: str, unit: nn.Module, fn: Any, args: Any, kwargs: Any) -> Any:
        call = UnitCall(self.num_calls, label, unit, fn, args, kwargs)
        self.num_calls += 1
        self.step.shards.gather(unit)
        self.visitor.enter(call)
        output = self.visitor.visit(call)
        torch.clear_autocast_cache()
        handed, start = anchored(output)
        self._mark(handed)
        del output
        self.step.shards.free(unit)
        self.visitor.leave(call, handed, start)
        return handed

    @contextmanager
    def _inside(self) -> Iterator[None]:
        self.is_inside = True
        try:
            yield
        finally:
            self.is_inside = False

    def _mark(self, handed: Any) -> None:
        mark = _Mark()
        self.handed.append(weakref.ref(mark))
        for tensor in needing_gradient(handed):
            tensor.grad_fn.metadata[_Mark] = mark  # type: ignore[union-attr, index]

    def _backward(self, loss: Tensor, output: Any) -> bool:
        """Whether a backward belongs to another model, and runs."""
        if self.has_ended:
            return False
        if self.step.step is None or self._reaches_model(loss):
            self.has_ended = True
            # FSDP2: the step turns reductions on for its last micro-batch.
            self.accumulates = self._has_gradients() if self.step.shards.reduces else UNREDUCED
            self.step.shards.see_backward()
            self.has_stale &= not self.accumulates
            self.visitor.end(loss, output)
            return False
        self.num_foreign += 1
        is_new = self.num_foreign > self.step.num_skipped
        if is_new and not any(mark() is not None for mark in self.handed):
            self.step.num_skipped = self.num_foreign
        if self.num_foreign == self.step.num_skipped:
            self.num_calls, self.calls_of, self.handed = 0, {}, []
            self.visitor.restart()
        return loss.requires_grad

    def _has_gradients(self) -> bool:
        """Whether parameters have gradients of the step before."""
        return any(parameter.grad is not None for parameter in self.step.model.parameters())

    def _reaches_model(self, loss: Tensor) -> bool:
        """Whether a loss depends on a unit's output, or on a parameter of the model."""
        nodes = graph_nodes(loss)
        return any(_Mark in n.metadata or id(getattr(n, "variable", None)) in self.trained for n in nodes)


class Streamed(NamedTuple):
    """Gradients in a streamed step.

    Attributes:
        accumulates: whether gradients were there when the backward began, or a second backward added to them.
        has_stale: whether those of the step before were there in the forward, and gone when the backward began.
    """

    accumulates: Accumulates
    has_stale: bool


def stream(step: TrainingStep, units: Sequence[nn.Module], visitor: Visitor) -> Streamed:
    """Runs a step by NOTE [ Streaming ].

    Raises:
        LeakError: a gradient would reach the inside of a unit by another way than through its outputs.
        UnitError: the model checkpoints units by itself.
    """
    running = _Stream(step, units, visitor)
    try:
        running.run()
    except RuntimeError as error:
        if _REENTRANT not in str(error):
            raise
        raise _checkpointed_already("The model has reentrant checkpoints of its own.", step.model) from error
    if running.num_foreign and not running.has_ended:
        raise UnitError(
            "The step runs no module of the model with gradients, so there is nothing to decide about: no backward"
            " reaches it. Check step= and torch.no_grad around the model."
        )
    return Streamed(running.accumulates, running.has_stale)


@contextmanager
def explaining(step: TrainingStep) -> Iterator[None]:
    """A block that streams a step.

    Raises:
        SampleError: the user's code takes derivatives that cannot be taken there; it says why.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, LeakError) as error:
        # Units that leak may be split.
        if not step.calls_grad and (isinstance(error, LeakError) or not step.takes_derivatives(error)):
            raise
        raise step.refusal(error) from error


_REENTRANT = "use_reentrant=True"
"""In torch's error for a backward with inputs=, which every measurement runs."""


def _checkpointed_already(what: str, model: nn.Module) -> UnitError:
    remedies = {
        "activation_checkpointing_disable": "()",
        "gradient_checkpointing_disable": "()",
        "set_grad_checkpointing": "(False)",
    }
    # Of the outermost module that has one: a library's model may be an attribute of the user's own.
    known = [
        f" with {'.'.join(filter(None, ['model', path, name]))}{arguments}"
        for name, arguments in remedies.items()
        for path, module in model.named_modules()
        if hasattr(module, name)
    ]
    return UnitError(
        f"{what} recoup decides what to recompute: switch the model's checkpoints off{known[0] if known else ''}, or"
        " choose units that contain them with units=."
    )
