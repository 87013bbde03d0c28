"""One replay of a unit's call, and what differs between it and its forward."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from recoup.checkpointing import Checkpoint, is_replaying
from recoup.checkpointing.fingerprints import Fingerprint, differing, fingerprint
from recoup.devices.meter import device_of
from recoup.errors import NothingToCheckpointError, ReplayMismatchError
from recoup.model.cut_graph import gradients_from, seeded
from recoup.model.named_arguments import named_objects, named_tensors
from recoup.model.streaming import UnitCall
from recoup.snapshot.places import Snapshot
from recoup.snapshot.reachable import Reached
from recoup.tensors import tensors_in, version_of
from recoup.torch_private import current_autograd_node

__all__ = ["Trial", "try_replay"]

_CHECKPOINT = Checkpoint(check="values")


@dataclass
class Trial:
    """What a checkpointed forward and its replay did.

    Attributes:
        error: what the checkpointed forward or its backward raised.
        draws: generators that the forward drew from and that a checkpoint does not restore.
        objects: objects among the arguments that the forward changed, by name.
        inputs: names of arguments that it changed in place.
        buffers: names of buffers that it changed.
        readers: names of autograd nodes that read their saved tensors a second time.
        drifts: whether the replay's output has other values.
    """

    error: Exception | None = None
    draws: list[str] = field(default_factory=list)
    objects: list[str] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    buffers: list[str] = field(default_factory=list)
    readers: list[str] = field(default_factory=list)
    drifts: bool = False

    @property
    def is_mismatch(self) -> bool:
        """Whether two runs gave different results."""
        return self.drifts or isinstance(self.error, ReplayMismatchError)


class _Watched:
    """A unit's forward that compares its replay with its first run.

    A checkpoint of it restores the unit's own state, but not what the forward's code captures. That is as much as is
    restored for a unit within a segment, and less than for a unit by itself.
    """

    def __init__(self, call: UnitCall, trial: Trial) -> None:
        self.module, self._runs = call.module, _Runs(trial, device_of(call.module, (call.args, call.kwargs)))
        # For error texts, this is the unit's own method.
        self.__wrapped__ = call.fn
        self.__qualname__ = getattr(call.fn, "__qualname__", f"{type(call.module).__name__}.forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        runs = self._runs
        if is_replaying():
            runs.begin_replay()
            output = self.__wrapped__(*args, **kwargs)
            runs.compare(output)
        else:
            before = _foreign_states()
            output = self.__wrapped__(*args, **kwargs)
            runs.note(output, before)
        # Saved last, and always needed by the backward: no replay stops before the unit's own last operation.
        witness = runs.start * 1
        return output, witness * witness

    @property
    def start(self) -> Tensor:
        """A leaf behind the second output."""
        return self._runs.start


class _Runs:
    """Fingerprints of the forward's outputs, to compare a replay with."""

    def __init__(self, trial: Trial, device: torch.device) -> None:
        self._trial = trial
        self._outputs: dict[str, Fingerprint] | None = None
        self._num_replays = 0
        self.start = torch.ones((), device=device, requires_grad=True)

    def note(self, output: Any, before: dict[str, Any]) -> None:
        now = _foreign_states()
        self._trial.draws = [name for name, state in now.items() if name in before and state != before[name]]
        self._outputs = _outputs(output)

    def begin_replay(self) -> None:
        # A replay before the forward has ended belongs to a backward inside it.
        if self._outputs is not None:
            self._num_replays += 1
            if self._num_replays > 1:
                self._trial.readers.append(current_autograd_node().name())

    def compare(self, output: Any) -> None:
        if self._outputs is not None and differing(self._outputs, _outputs(output)):
            self._trial.drifts = True


def try_replay(call: UnitCall) -> Trial:
    """Runs a call checkpointed, forward and backward, and compares its replay with its forward.

    Tensors, module and objects are left as the call changes them. Of all errors, only OutOfMemoryError is raised.
    """
    trial = Trial()
    try:
        _try_replay(call, trial)
    except torch.OutOfMemoryError:
        raise
    except NothingToCheckpointError:
        pass
    except Exception as error:
        # The frames of the traceback hold the unit's tensors.
        trial.error = error.with_traceback(None)
    return trial


def _try_replay(call: UnitCall, trial: Trial) -> None:
    args, kwargs, start = call.fresh()
    objects = named_objects(call)
    before = _noted(objects)
    versions = [(name, tensor, version_of(tensor)) for name, tensor in named_tensors(call, args, kwargs)]
    buffers = _buffers(call)
    watched = _Watched(call, trial)
    try:
        output, witness = _CHECKPOINT(watched, *args, **kwargs) if args or kwargs else _CHECKPOINT(watched)()
        trial.inputs = [name for name, tensor, version in versions if version_of(tensor) != version]
        trial.buffers = differing(buffers, _buffers(call))
        between = _noted(objects)
        del args, kwargs, versions
        seed = seeded((output, witness))
        del output, witness
        if seed is not None:
            parameters = [parameter for parameter in call.module.parameters() if parameter.requires_grad]
            gradients_from([seed], [start, watched.start, *parameters])
        # A change in the forward alone may be a cache, which is filled once.
        trial.objects = between.changed()
    except ReplayMismatchError:
        trial.objects = before.changed()
        raise


def _noted(objects: list[tuple[str, Any]]) -> Snapshot:
    named = [(f"{name} ({type(value).__name__})", value) for name, value in objects]
    return Reached(named, follows_code=False, deepest=4).snapshot()


def _foreign_states() -> dict[str, Any]:
    """The state of the generators that a checkpoint does not restore."""
    states: dict[str, Any] = {"Python's random": random.getstate()}
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        kind, keys, *rest = numpy.get_state()
        states["numpy.random"] = (kind, keys.tobytes(), *rest)
    return states


def _outputs(tree: Any) -> dict[str, Fingerprint]:
    return {str(index): fingerprint(tensor) for index, tensor in enumerate(tensors_in(tree))}


def _buffers(call: UnitCall) -> dict[str, Fingerprint]:
    return {name: fingerprint(buffer) for name, buffer in call.module.named_buffers()}
