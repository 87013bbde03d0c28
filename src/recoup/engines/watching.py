"""Training calls of a fitted model, compared with what was measured.

NOTE [ Leaving what was measured ]
    1. The root stand-in calls the model's `Watch` before and after each call with gradients. Each kind of difference
       from the plan's conditions gives one warning, which says what to do. Nothing else changes.
    2. A forward waits for its backward as long as its mark does: NOTE [ Where a step ends ].
    3. Units in the other mode (train or eval) run plainly. That may be evaluation; a backward shows that it is not.
    4. A unit that is called inside torch's checkpoint, or inside a backward, is recomputed by other code. Both of its
       runs must save the same tensors, so both are plain.
    5. When a call ends, references to a tensor of its output are those of the output and others, by which the model or
       the plan holds it, such as an encoder's result that recomputed units have as an argument. The caller holds the
       tensor if there are more than those others when the backward comes.
"""

from __future__ import annotations

import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from recoup.capture.run import is_capturing
from recoup.checkpointing.sampling import is_sampling_as_usual
from recoup.engines.waiting import Mark, outputs_in, waits
from recoup.errors import RecoupWarning
from recoup.model.conditions import Conditions, autocast_of, input_shapes, trained_bytes_of
from recoup.model.tracing import is_recomputed_by_others, recomputes_itself
from recoup.sizes import format_bytes
from recoup.tensors import contents, positional_names
from recoup.torch_private import assume_constant_result, num_tensor_owners

__all__ = ["Watch"]


class _Graph(Mark):
    """The graph of a call of the model."""

    __slots__ = ("_outputs", "_planned_mode", "_watch")

    def __init__(self, watch: Watch, outputs: list[_Output], planned_mode: bool | None) -> None:
        super().__init__()
        self._watch, self._outputs, self._planned_mode = watch, outputs, planned_mode

    def at_backward(self, gradients: Any) -> None:
        """The first of the hooks that runs marks the beginning of the backward."""
        if not self.has_run:
            self.has_run = True
            self._watch.at_backward(self._planned_mode, self._outputs)
            self._outputs = []


_SELDOM = 64
"""All parameters of a model are looked at in its 1st, 2nd, 4th, … call, and later in every so many."""
_NOTED_GROWTH = 1.05
"""A few rows more of an embedding are no reason for a warning."""


class _Here(threading.local):
    """Of the call that this thread runs."""

    planned_mode: bool | None = None
    """The mode that units have their plan for, if some ran plainly because they are in the other mode."""


class Watch:
    """Warns where the calls of a fitted model differ from what its plan was measured with.

    Args:
        conditions: what was measured; ``None`` if not known: then only what needs no comparison gives a warning.
        holds_output: whether the plan leaves room for the model's output during the backward.
        gradients_fit: whether it leaves room for gradients of an earlier backward: in the forward, in the backward.
    """

    def __init__(
        self, conditions: Conditions | None, *, holds_output: bool, gradients_fit: tuple[bool, bool]
    ) -> None:
        self.conditions, self.holds_output, self.gradients_fit = conditions, holds_output, gradients_fit
        self._warned: set[str] = set()  # kinds of warnings
        self._begin()

    def _begin(self) -> None:
        self._largest = {} if self.conditions is None else self.conditions.largest
        self._names: tuple[str, ...] | None = None
        self._graphs: list[weakref.ref[_Graph]] = []
        self._here = _Here()
        self.thread: int | None = None
        """The thread that runs the model now."""
        self._parameter: Callable[[], Tensor | None] = _nothing
        self._trained: list[weakref.ref[nn.Parameter]] | None = None
        self._num_calls = 0

    def __getstate__(self) -> dict[str, Any]:
        names = ("conditions", "holds_output", "gradients_fit")
        return {name: getattr(self, name) for name in names} | {"_warned": self._warned.copy()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def _warn(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(message, RecoupWarning, stacklevel=2)

    # Calls of the model

    def before(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """A call with gradients begins."""
        self._here.planned_mode = None
        measured = self.conditions
        if measured is None or module.training != measured.training:
            return
        self._compare_shapes(forward, args, kwargs)
        autocast = autocast_of(self._first_parameter(module))
        if autocast != measured.autocast:
            self._warn("autocast", _other_autocast(autocast, measured.autocast))
        self._graphs = [graph for graph in self._graphs if waits(graph)]
        if len(self._graphs) >= measured.forwards:
            self._warn("forwards", _more_forwards(len(self._graphs) + 1, measured.forwards))
        # Not in the steps that verify a plan, which are timed: they are the measured one.
        if measured.trained_bytes and is_sampling_as_usual():
            self._num_calls += 1
            if self._num_calls.bit_count() == 1 or self._num_calls % _SELDOM == 0:
                trained_bytes = trained_bytes_of(module)
                if trained_bytes > _NOTED_GROWTH * measured.trained_bytes:
                    self._warn("trained", _more_trained(trained_bytes, measured.trained_bytes))
        if self._trained is None and not all(self.gradients_fit):
            self._trained = [weakref.ref(p) for p in module.parameters() if p.requires_grad]
        if not self.gradients_fit[0] and self._has_gradients():
            self._warn("gradients", _GRADIENTS_THERE.format("the forward"))

    def _has_gradients(self) -> bool:
        found = (reference() for reference in self._trained or ())
        return any(parameter is not None and parameter.grad is not None for parameter in found)

    def _first_parameter(self, module: nn.Module) -> Tensor | None:
        """Its device is the model's, also after a move. Cached: the search takes longer than all else here."""
        found = self._parameter()
        if found is None:
            found = next(module.parameters(), None)
            self._parameter = _nothing if found is None else weakref.ref(found)
        return found

    def _compare_shapes(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if "shapes" in self._warned or not self._largest:
            return
        if self._names is None:
            self._names = positional_names(forward)
        for name, shape in input_shapes(self._names, args, kwargs):
            if name in self._largest and shape.numel() > self._largest[name]:
                assert self.conditions is not None
                self._warn("shapes", _larger(name, tuple(shape), dict(self.conditions.shapes)[name]))
                return

    def after(self, output: Any) -> None:
        """A call with gradients has ended: waits for its backward."""
        measured = self.conditions
        if measured is None and self._here.planned_mode is None:
            return
        outputs = list(outputs_in(output))
        if not outputs:
            return
        references = [weakref.ref(tensor) for tensor in outputs if tensor.numel() > 1]
        del outputs  # it refers to them
        watched = [] if self.holds_output else [_Output(one, output) for one in references]
        graph = _Graph(self, watched, self._here.planned_mode)
        graph.put_on(output)
        if self._here.planned_mode is None:
            self._graphs.append(weakref.ref(graph))

    def at_backward(self, planned_mode: bool | None, outputs: list[_Output]) -> None:
        """A backward has come to a forward's outputs.

        Args:
            planned_mode: that the units which ran plainly have their plan for; ``None`` if all ran as planned.
            outputs: that the plan counts on being freed by now.
        """
        if planned_mode is not None:
            self._warn("mode", _other_mode(planned_mode))
            return
        is_first = self.conditions is not None and self.conditions.forwards == 1
        if is_first and not self.gradients_fit[1] and self._has_gradients():
            self._warn("gradients", _GRADIENTS_THERE.format("the backward"))
        if "output" not in self._warned and any(output.is_held for output in outputs):
            self._warn("output", _OUTPUT_HELD)

    # Calls of units

    def is_recomputed_by_others(self, unit: nn.Module) -> bool:
        """Whether a planned unit that is called with gradients is in a checkpoint of the model's own."""
        found = is_recomputed_by_others() or recomputes_itself(unit)
        if found:
            self._warn("checkpoint", _CHECKPOINTED)
        return found

    def is_in_force(self, unit: nn.Module) -> bool:
        """Whether a unit is in the mode of the measured step."""
        return self.conditions is not None and unit.training == self.conditions.training

    def at_more_calls(self, unit: nn.Module, measured: int) -> None:
        """A unit is called more often in a step than it was measured."""
        if self.is_in_force(unit):
            self._warn("calls", _more_calls(type(unit).__name__, measured))

    def at_unseen(self, module: nn.Module) -> None:
        """A module is called that the measured step did not call, beside others of its class that it did."""
        self._warn("unseen", _UNSEEN.format(type(module).__name__))

    def at_unit_in_other_mode(self, planned: bool) -> None:
        """A unit is called with gradients and runs plainly; its plan is for training mode, or not."""
        self._here.planned_mode = planned

    @assume_constant_result
    def at_compiling(self) -> int:
        """Runs while the compiler traces the model, which takes it for a constant."""
        if not is_capturing():  # else a unit that a captured one calls, and as part of which it was planned
            self._warn("compiled", _COMPILED)
        return 0


def _nothing() -> None:
    """Stands for a weak reference whose object is gone."""


class _Output:
    """A tensor of a call's output."""

    __slots__ = ("_num_others", "_reference")

    def __init__(self, reference: weakref.ref[Tensor], output: Any) -> None:
        self._reference, self._num_others = reference, 0
        if not isinstance(output, Tensor):  # else the variables of callers refer to it
            self._num_others = _num_references(reference) - _num_inside(output, reference, set())

    @property
    def is_held(self) -> bool:
        """Whether Python code refers to the tensor, other than the model and the plan."""
        return _num_references(self._reference) > self._num_others


def _num_inside(value: Any, reference: weakref.ref[Tensor], seen: set[int]) -> int:
    """How many references to a tensor a value has, apart from containers that were ``seen``."""
    if isinstance(value, Tensor):
        return int(value is reference())
    if id(value) in seen:
        return 0
    seen.add(id(value))
    found = contents(value)
    items = [] if found is None else found[1]
    if isinstance(value, dict):  # whose attributes may be its items once more
        items += getattr(value, "__dict__", {}).values()
    return sum(_num_inside(item, reference, seen) for item in items)


def _num_references(reference: weakref.ref[Tensor]) -> int:
    """How many references of Python code a tensor has."""
    tensor = reference()
    if tensor is None or num_tensor_owners is None:
        return 0
    # Owners that are not Python code hold one together.
    return sys.getrefcount(tensor) - (num_tensor_owners(tensor) > 1) - _NUM_OWN


def _num_own_references() -> int:
    """How many references `_num_references` counts that are its own, which depends on the Python version."""
    tensor = torch.empty(0)
    return _num_references(weakref.ref(tensor)) - 1


_NUM_OWN = 0
_NUM_OWN = _num_own_references()


# Sentences


def _larger(name: str, shape: tuple[int, ...], measured: tuple[int, ...]) -> str:
    return (
        f"{name} is {list(shape)} ({prod(shape)} elements), larger than the {list(measured)} ({prod(measured)}) that"
        " the plan was measured with, so the step may pass the budget: fit the model again with the largest batch that"
        " it is trained on."
    )


def _other_autocast(now: str, measured: str) -> str:
    return (
        f"The model runs {_under(now)}, and the plan was measured {_under(measured)}, so bytes and seconds are others:"
        " fit it as it is trained, inside the same torch.autocast or with step= a callable that enters it."
    )


def _under(autocast: str) -> str:
    return f"under autocast to {autocast}" if autocast else "without autocast"


def _more_forwards(now: int, measured: int) -> str:
    return (
        f"The model is called while {now - 1} earlier {'forward waits' if now == 2 else 'forwards wait'} for a"
        f" backward, and the measured step calls it {'once' if measured == 1 else f'{measured} times'}, so the step may"
        " pass the budget: run each backward before the next forward, or fit with in_flight= the forwards that wait at"
        " once, as in a stage of a pipeline, or with step= a callable that runs the whole step."
    )


def _more_trained(now_bytes: int, measured_bytes: int) -> str:
    return (
        f"The parameters that are trained have {format_bytes(now_bytes)}, and had {format_bytes(measured_bytes)} when"
        " the plan was measured: some need gradients now that did not, or have another dtype. The step may pass the"
        " budget: fit the model again."
    )


def _more_calls(name: str, measured: int) -> str:
    return (
        f"A {name} is called more often than in the measured step ({'once' if measured == 1 else f'{measured} times'}),"
        " so the step may pass the budget: fit the model with a sample with which it does the most."
    )


def _other_mode(training: bool) -> str:
    measured, now = ("train", "eval") if training else ("eval", "train")
    return (
        f"The plan was made for a model in {measured} mode and is not in force in this step, whose forward ran in {now}"
        " mode: call model.train() before fit and before training, or fit the model in the mode that it is trained in."
    )


_UNSEEN = (
    "A {} is called that the measured step skipped, so the step may pass the budget; it is recomputed where that is"
    " safe. Fit the model with a sample, or in a state, with which it skips the fewest of its layers."
)
_CHECKPOINTED = (
    "Units of the plan run inside checkpoints of the model's own, where the plan is not in force: switch those off (for"
    " models of transformers, model.activation_checkpointing_disable(); for trainers, activation_checkpointing=False;"
    " before transformers 5.23, gradient_checkpointing in both names), or take the plan off with recoup.remove(model)."
)
_OUTPUT_HELD = (
    "The plan counts on the model's output being let go before the backward, and the output is still held: write loss ="
    " model(**batch).loss, or del the output before the backward, or fit with holds_output=True."
)
_GRADIENTS_THERE = (
    "Gradients of an earlier backward are there when {} begins, and the plan leaves no room for them: clear them before"
    " the forward with optimizer.zero_grad(), or fit with accumulates=True."
)
_COMPILED = (
    "The model is compiled with a plan on it, and the plan is not in force inside compiled code: take the plan off with"
    " recoup.remove(model) before compiling, or do not compile the model."
)
