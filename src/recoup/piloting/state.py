"""All that a step changes before the optimizer's turn, and how it is put back.

NOTE [ What is put back ]
    1. Gradients: those that a step finds are copied into host memory, others are dropped.
    2. Buffers and tensors that are attributes of modules. Small ones are always copied, on their device: kernels of
       batch normalization change them without a trace in the version counter. Large ones are copied until a step has
       left their version as it was. Should a failed step change one that was not copied, it cannot be repeated.
    3. Attributes of modules, and lists, dictionaries, sets and deques among them.
    4. The random state of Python, NumPy and torch.
    5. Parameters are not copied: the optimizer steps later. A failed step that changed one cannot be repeated.
    6. What the step's own code changes elsewhere (its variables, files, an iterator) is not put back: it is changed
       once for every attempt.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from recoup.errors import RepeatError
from recoup.model.preserve import gradient_owners
from recoup.model.sharded import Shards
from recoup.piloting.copies import Copies
from recoup.piloting.gradients import HeldGradients
from recoup.sizes import format_bytes
from recoup.snapshot.places import look, put
from recoup.snapshot.random_state import held_random_state
from recoup.tensors import plain_tensors, versions_of

__all__ = ["StepState"]

_SMALL_BYTES = 2**20
_MACHINERY = frozenset(vars(nn.Module()))
_CONTAINERS = (dict, OrderedDict, list, set, deque)


class _Place(NamedTuple):
    """Where a module has a tensor."""

    name: str
    holder: dict[str, Any]
    key: str


class StepState:
    """What a step of a model changes, by NOTE [ What is put back ].

    Args:
        model: that the step runs, with its wrapper.
        parameters: further ones that get gradients.
    """

    def __init__(self, model: nn.Module, parameters: Iterable[Tensor] = ()) -> None:
        self._model = model
        self._shards = Shards(model)  # the model has its shards from here on, not what they are gathered into
        self._parameters = list(dict.fromkeys([*gradient_owners(model), *parameters]))
        self._gradients = HeldGradients(self._parameters)
        self._small, self._large = Copies(on_host=False), Copies(on_host=True)
        self._still: dict[_Key, weakref.ref[Tensor]] = {}
        self._watched: list[tuple[_Place, Tensor, int]] = []
        self._held: list[tuple[Any, Any]] = []
        self._versions: list[int] = []
        self._put_back_random_state: Callable[[], None] = _nothing
        self._has_unreduced = False
        self.look_again()

    def look_again(self) -> None:
        """Finds the modules' tensors and containers anew: the first step, or a failed one, may have made some."""
        modules = [
            (name, module)
            for name, module in self._model.named_modules()
            if not isinstance(module, torch.jit.ScriptModule)  # its dictionaries are not its own
        ]
        attributes = [(name, vars(module)) for name, module in modules]
        buffers = [(name, module._buffers) for name, module in modules if module._buffers]
        self._tensors = [
            _Place(f"{name}.{key}" if name else key, holder, key)
            for name, holder in [*buffers, *attributes]
            for key, value in holder.items()
            if isinstance(value, Tensor)
        ]
        found = [
            value
            for _, holder in attributes
            for key, value in holder.items()
            if key not in _MACHINERY and type(value) in _CONTAINERS
        ]
        self._places = [*(holder for _, holder in [*attributes, *buffers]), *found]

    def hold(self) -> None:
        """Keeps everything as it is now."""
        self._put_back_random_state = held_random_state()
        self._held = [(place, place.copy() if type(place) is dict else look(place)) for place in self._places]
        self._versions = versions_of(self._parameters)
        self._has_unreduced = bool(self.unreduced_gradients())
        self._hold_tensors()
        self._gradients.hold()

    def unreduced_gradients(self) -> list[Tensor]:
        """Of FSDP2: those of earlier micro-batches that wait to be reduced."""
        return self._shards.unreduced_gradients()

    def _hold_tensors(self) -> None:
        small: list[Tensor] = []
        large: list[Tensor] = []
        self._watched = []
        for place in self._tensors:
            tensor = place.holder.get(place.key)
            if not isinstance(tensor, Tensor) or tensor.device.type == "meta":
                continue
            if tensor.nbytes <= _SMALL_BYTES:
                small += plain_tensors(tensor)
                continue
            self._watched += [(place, tensor, version) for version in versions_of([tensor])]
            still = self._still.get(_key(place))
            if still is None or still() is not tensor:
                large += plain_tensors(tensor)
        self._small.hold(small)
        self._large.hold(large)

    def free(self) -> None:
        """Frees what a failed step left, before anything is put back."""
        self._gradients.free()
        self._shards.abandon()
        torch.clear_autocast_cache()
        for place, then in self._held:
            put(place, then)

    def put_back(self) -> None:
        """Puts everything back, to be called after `free`.

        Raises:
            RepeatError: the failed step has changed something of which there is no copy.
        """
        self._check()
        self._gradients.put_back()
        self._small.restore()
        self._large.restore()
        self._put_back_random_state()
        self._forget()
        self.look_again()

    def settle(self) -> None:
        """Notes after a step that ended which large tensors it left alone, and forgets the rest."""
        for place, tensor, version in self._watched:
            if versions_of([tensor]) == [version]:
                self._still[_key(place)] = weakref.ref(tensor)
            else:
                self._still.pop(_key(place), None)
        self._gradients.forget()
        self._forget()

    def free_copies(self) -> None:
        """Frees the memory of copies, which is used again from step to step."""
        self._gradients.free_copies()
        self._small.free()
        self._large.free()

    def _forget(self) -> None:
        self._small.drop()
        self._large.drop()
        self._watched, self._held = [], []

    def _check(self) -> None:
        if versions_of(self._parameters) != self._versions:
            raise RepeatError(
                "The step changed parameters before it ran out of memory, and there is no copy of them. Call"
                " optimizer.step() after pilot.step(...), not inside it."
            )
        if self._has_unreduced:
            raise RepeatError(
                "The step ran out of memory while gradients of earlier micro-batches waited to be reduced by FSDP2, and"
                " they are lost. Run all micro-batches in one pilot.step(...)."
            )
        for place, tensor, version in self._watched:
            still = self._still.get(_key(place))
            if still is not None and still() is tensor and versions_of([tensor]) != [version]:
                raise RepeatError(
                    f"The step changed {place.name!r} ({format_bytes(tensor.nbytes)}) for the first time and then ran"
                    " out of memory; of large tensors that earlier steps left alone there is no copy. Start again from"
                    " the last checkpoint, with a new autopilot."
                )


_Key = tuple[int, str]


def _key(place: _Place) -> _Key:
    return id(place.holder), place.key


def _nothing() -> None:
    pass
