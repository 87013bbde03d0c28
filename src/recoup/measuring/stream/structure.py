"""First look at a step: which storages pass between the units, who saves them, and what else is alive meanwhile."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from recoup.devices.meter import Meter
from recoup.devices.tracker import MemoryTracker
from recoup.errors import CheckpointError, LossError
from recoup.measuring.stream.given_gradients import noting_gradients
from recoup.measuring.stream.sections import Sections
from recoup.measuring.stream.seen import Code, SeenCall, Storages, Structure, Tail
from recoup.model.calls import kind_of_module
from recoup.model.replace_forward import intercepted
from recoup.model.step import TrainingStep
from recoup.model.streaming import LeakError, UnitCall, Visitor, explaining, stream
from recoup.tensors import (
    named_outputs,
    needing_gradient,
    num_bytes_of,
    storage_of,
    take_apart,
    tensors_in,
)
from recoup.torch_private import pop_saved_tensor_hooks, push_saved_tensor_hooks, without_modes

__all__ = ["look"]

_LOSS_GRADIENT = -1


class _Numbers:
    """A number for every storage that lives; what is resident, or lived before the step, has none.

    A view of what is resident (a parameter, expanded) gets one where a unit hands it on: by itself it has no bytes, but
    its gradient has.
    """

    def __init__(
        self,
        resident: Iterable[Tensor],
        gathered: Iterable[torch.UntypedStorage],
        tracker: MemoryTracker,
        meter: Meter,
    ) -> None:
        self._tracker, self._meter = tracker, meter
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._resident = weakref.WeakSet([*(storage_of(tensor) for tensor in resident), *gathered])
        self._views = WeakTensorKeyDictionary()
        self._next = 0

    def number(self, storage: Any) -> int | None:
        if storage in self._resident or self._tracker.lived_before(storage):
            return None
        if storage not in self._numbers:
            self._numbers[storage] = self._new()
        return self._numbers[storage]

    def _new(self) -> int:
        self._next += 1
        return self._next - 1

    def number_views(self, tensors: Iterable[Tensor]) -> None:
        """Gives a number to those that need a gradient and have none."""
        for tensor in _strided(tensors):
            if tensor.requires_grad and self.of_tensor(tensor) is None:
                self._views[tensor] = self._new()

    def hand_on(self, numbers: Sequence[int | None], tensors: Sequence[Tensor]) -> None:
        """Lets other tensors stand for those that have these numbers."""
        for number, tensor in zip(numbers, tensors, strict=True):
            if number is not None and self.of_tensor(tensor) is None:
                self._views[tensor] = number

    def storages(self, storages: Iterable[Any]) -> Storages:
        numbered = ((self.number(storage), self._meter.rounded(storage.nbytes())) for storage in storages)
        return {number: num_bytes for number, num_bytes in numbered if number is not None}

    def of(self, tree: Any) -> Storages:
        tensors = _strided(tensors_in(tree))
        numbers = map(self.of_tensor, tensors)
        views = {number: 0 for number in numbers if number is not None}
        return views | self.storages(map(storage_of, tensors))

    def of_tensor(self, tensor: Tensor) -> int | None:
        if tensor.layout is not torch.strided:
            return None
        number = self.number(storage_of(tensor))
        if number is None and self._views:
            number = self._views.get(tensor)
            if number is None and tensor._base is not None:
                number = self._views.get(tensor._base)
        return number

    def gradients(self, tree: Any) -> Storages:
        """Bytes of the gradients of what needs one, by storage."""
        found: Storages = {}
        for tensor in _strided(needing_gradient(tree)):
            number = self.of_tensor(tensor)
            if number is not None:
                found[number] = found.get(number, 0) + num_bytes_of(tensor)
        return found


def _strided(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor.layout is torch.strided]


class _Looker(Visitor):
    """The visitor of `look`."""

    def __init__(
        self,
        step: TrainingStep,
        meter: Meter,
        tracker: MemoryTracker,
        inside: dict[nn.Module, list[nn.Module]],
        frees: bool,
    ) -> None:
        self.step, self.meter, self.tracker, self.inside = step, meter, tracker, inside
        self.frees = frees
        model = step.model
        resident = [*model.parameters(), *model.buffers(), *tensors_in(step.given)]
        self.numbers = _Numbers(_strided(resident), step.shards.storages(), tracker, meter)
        self.sections = Sections()
        # What stands in for a gathered parameter is known as that parameter.
        trained = [p for p in model.parameters() if p.requires_grad]
        gathered = {key: p for key, p in step.shards.originals().items() if p.requires_grad}
        self.trained: dict[int, Tensor] = {id(p): p for p in trained} | gathered
        self._in_graphs: set[int] = set()
        self._calls_of: dict[int, int] = {}
        self.calls: list[SeenCall] = []
        self.tail: Tail | None = None
        # By identity, as a span knows what its calls hand on.
        self._handed = WeakTensorKeyDictionary()
        self._outputs: list[tuple[str, weakref.ref[Tensor]]] = []
        self.copies = False
        self._begin_code()

    def _begin_code(self, call: UnitCall | None = None, output: Any = None) -> None:
        self._saved: Storages = {}
        self._held: list[Tensor] = []
        # What graphs of units hold, too: in a real step the backward of the code does not free it.
        self._kept: list[Tensor] = []
        if call is not None:
            # In a real step the unit's graph holds them.
            saved, given = self.calls[-1].saved_arguments, _strided(tensors_in((call.args, call.kwargs)))
            self._held = [t.detach() for t in given if self.numbers.number(storage_of(t)) in saved]
        self._alive: Storages = {}
        # Not now: the caller's frames still hold what they gave the unit.
        self.tracker.begin(_strided(tensors_in(output)), at_next=self._note_alive)
        self._recent_bytes = self.tracker.recent_bytes
        self._live_bytes = self.meter.begin()
        self._beyond_bytes = 0

    def _note_alive(self) -> None:
        self._alive = self.numbers.storages(self.tracker.living())

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """A block that gathers parameters of a sharded model: what that takes is not the code's."""
        self._beyond_bytes = max(self._beyond_bytes, self.meter.peak_bytes() - self._live_bytes)
        live_bytes = self.meter.live_bytes()
        with without_modes():
            yield
        self._live_bytes += self.meter.begin() - live_bytes

    def _end_code(self, handed_on: Any) -> Code:
        # Beyond what lived before where kernels need memory of their own; but some of that may have gone meanwhile.
        beyond_bytes = max(self._beyond_bytes, self.meter.peak_bytes() - self._live_bytes)
        transient_bytes = max(beyond_bytes, self.tracker.recent_peak_bytes - self._recent_bytes)
        self._held = []
        # What a backward inside the code has freed is not there any more.
        living = self.numbers.storages(self.tracker.living())
        self._saved = {number: size for number, size in self._saved.items() if number in living}
        section = self.sections.next(needing_gradient(handed_on))
        self._calls_of[self.sections.number] = len(self.calls)
        self._note(section.heads)
        parameters = {
            id(self.trained[id(p)]): num_bytes_of(self.trained[id(p)])
            for p in section.parameters
            if id(p) in self.trained
        }
        adds = bool(self.step.accumulates) or self.step.leaves_gradients
        backward_bytes = section.backward_bytes(self.meter, frees=self.frees, adds=adds)
        self.copies |= section.copies
        given = dict.fromkeys((number for number in section.numbers if number is not None), 0)
        self._kept = []
        return Code(
            self._saved,
            transient_bytes,
            backward_bytes,
            given | section.gradients,
            section.views,
            {self._calls_of[origin]: size for origin, size in section.to_code.items()},
            parameters,
            self._alive,
            {self._calls_of[origin]: size for origin, size in section.sums.items()},
        )

    def _note(self, tensors: Sequence[Tensor]) -> None:
        self.sections.note((t, self.numbers.of_tensor(t)) for t in _strided(tensors))

    def pack(self, tensor: Tensor) -> Tensor:
        """Notes what the code between units saves."""
        if tensor.layout is torch.strided:
            saved = self.numbers.storages([storage_of(tensor)])
            self._saved |= saved
            if saved.keys() & self._in_graphs:
                self._kept.append(tensor.detach())
        return tensor.detach()

    def enter(self, call: UnitCall) -> None:
        given = (call.args, call.kwargs)
        try:
            take_apart(
                given, [], []
            )  # refuses iterators, which the unit would find used up when it runs again
        except CheckpointError as error:
            what = f"cannot be run by itself. {str(error).rstrip('.')}"
            raise LeakError(call.name, what, call.module) from error
        self._code = self._end_code(given)
        self._note_alive()

    def visit(self, call: UnitCall) -> Any:
        given = (call.args, call.kwargs)
        arguments = self.numbers.of(given)
        numbers = tuple(map(self.numbers.of_tensor, tensors_in(given)))
        # Before it runs: it may add to a list that it is given.
        remade = self._remade(tensors_in(given), numbers)
        self._saved_arguments: set[int] = set()
        saved: Storages = {}
        inside: dict[nn.Module, Storages] = {}
        current: list[nn.Module] = []
        in_place: set[nn.Module] = set()
        num_saved = Counter[nn.Module]()

        def note(tensor: Tensor) -> None:
            num_saved.update([call.module, *current[:1]])
            if tensor.layout is not torch.strided:
                return
            storage = storage_of(tensor)
            number = self.numbers.number(storage)
            if number in arguments:
                self._saved_arguments.add(number)
            elif number is not None:
                saved[number] = self.meter.rounded(storage.nbytes())
                if current:
                    inside.setdefault(current[0], {})[number] = saved[number]

        self.tracker.begin()
        made_bytes = self.tracker.made_bytes
        names = {module: name for name, module in call.module.named_modules()}
        called = [module for module in self.inside.get(call.module, []) if module in names]
        with _noting_inside(called, current, in_place):
            output = call.glance(note)
        self.numbers.number_views(tensors_in(output))
        self._in_graphs |= self._saved_arguments | (saved.keys() & self.numbers.of(output).keys())
        made_bytes = self.tracker.made_bytes - made_bytes
        taken = (sum(saved.values()), made_bytes, self.tracker.recent_peak_bytes)
        saved_inside = {
            names[module]: sum(saved.values()) for module, saved in inside.items() if module not in in_place
        }
        alike = _kind_of_call(call)
        self.calls.append(
            SeenCall(
                call.name,
                call.module,
                (*alike, *_flags(call), *saved_inside),
                (*alike, *saved_inside.items(), taken, tuple(n in self._saved_arguments for n in numbers)),
                arguments,
                numbers,
                remade,
                self.numbers.of(output),
                tuple(map(self.numbers.of_tensor, tensors_in(output))),
                tuple(tensor.shape for tensor in tensors_in(output)),
                frozenset(self._saved_arguments),
                sum(saved.values()),
                saved_inside,
                {"": num_saved[call.module], **{names[module]: num_saved[module] for module in called}},
                self.numbers.gradients(output),
                self.numbers.gradients(given),
                {
                    id(self.trained[id(tensor)]): num_bytes_of(self.trained[id(tensor)])
                    for tensor in tensors_in(given)
                    if id(tensor) in self.trained
                },
                self._alive,
                self._code,
            )
        )
        return output

    def _remade(self, tensors: Sequence[Tensor], numbers: Sequence[int | None]) -> frozenset[int]:
        pairs = zip(tensors, numbers, strict=True)
        return frozenset(n for tensor, n in pairs if n is not None and tensor not in self._handed)

    def leave(self, call: UnitCall, output: Any, start: Tensor) -> None:
        self.numbers.hand_on(self.calls[-1].output_numbers, tensors_in(output))
        for tensor in tensors_in(output):
            self._handed[tensor] = True
        self._note(needing_gradient(output))
        self._begin_code(call, output)

    def restart(self) -> None:
        self.calls.clear()
        self._outputs.clear()
        self._begin_code()

    def end(self, loss: Tensor, output: Any) -> None:
        code = self._end_code(loss)
        # The loss has a gradient too, which a backward holds until it ends.
        self._loss = self.numbers.of(loss)
        at_loss = self._loss | {_LOSS_GRADIENT: num_bytes_of(loss)}
        # So have other models, whose backwards came before. What the step reaches may be parts of this one.
        own = set(map(id, self.step.model.parameters()))
        others = [p for one in self.step.reached.modules for p in one.parameters() if id(p) not in own]
        at_loss |= self.numbers.of([parameter.grad for parameter in others])
        parts = named_outputs(output) if self.step.step is None else self._held_outputs()
        if self.step.step is not None and self.frees:
            # What outlives the backward of the code that saved it is a variable of the step's.
            outputs = self.numbers.of([tensor for _, tensor in parts])
            living = self.numbers.storages(self.tracker.living())
            at_loss |= {number: size for number, size in living.items() if number not in outputs}
        held: Storages = {}
        names: dict[int, str] = {}
        for name, tensor in parts:
            for number, size in self.numbers.of(tensor).items():
                if number not in at_loss:
                    held[number] = size
                    names.setdefault(number, name)
        self.tail = Tail(code, at_loss, held, names)

    def note_again(self, module: nn.Module, args: Any) -> None:
        """A hook before the model's forward: what a pass has left beside its gradients lives in a pass after it."""
        has_gradients = any(parameter.grad is not None for parameter in self.step.model.parameters())
        if self.tail is None or has_gradients or not self.frees:
            return
        # Other models' gradients and optimizer state are counted already; an output may go when there is another.
        others = [parameter.grad for one in self.step.reached.modules for parameter in one.parameters()]
        counted = self.numbers.of([others, [optimizer.state for optimizer in self.step.optimizers]])
        counted |= self.tail.output
        living = self.numbers.storages(self.tracker.living())
        # The next pass has a loss of its own.
        left = {-2 - n if n in self._loss else n: size for n, size in living.items() if n not in counted}
        self.tail = replace(self.tail, loss=self.tail.loss | left)

    def note_output(self, module: nn.Module, args: Any, output: Any) -> None:
        """A hook after the model's forward: what it returns may or may not be held until the backward."""
        self._outputs += [(name, weakref.ref(tensor)) for name, tensor in named_outputs(output)]

    def _held_outputs(self) -> list[tuple[str, Tensor]]:
        found = ((name, reference()) for name, reference in self._outputs)
        return [(name, tensor) for name, tensor in found if tensor is not None]


@contextmanager
def _noting_inside(
    modules: Sequence[nn.Module], current: list[nn.Module], in_place: set[nn.Module]
) -> Iterator[None]:
    """Lets ``current`` name the module inside a unit that runs now, and collects those that change their arguments."""

    def stand_in(module: nn.Module) -> Callable[..., Any]:
        original = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            current.append(module)
            given = tensors_in((args, kwargs))
            versions = [tensor._version for tensor in given]
            try:
                return original(*args, **kwargs)
            finally:
                current.pop()
                if versions != [tensor._version for tensor in given]:
                    in_place.add(module)

        return forward

    with intercepted({module: stand_in(module) for module in modules}):
        yield


def _kind_of_call(call: UnitCall) -> tuple[Any, ...]:
    given = tuple((t.shape, t.dtype, t.requires_grad) for t in tensors_in((call.args, call.kwargs)))
    return (kind_of_module(call.module), call.module.training, given)


def _flags(call: UnitCall) -> tuple[Any, ...]:
    """What may switch parts of a unit on and off: truth values and names among its arguments, and in its modules."""
    arguments = [*enumerate(call.args), *call.kwargs.items()]
    given = tuple((key, value) for key, value in arguments if value is None or isinstance(value, (bool, str)))
    switches = tuple(
        (name, key, value)
        for name, module in call.module.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, bool)
    )
    return (given, switches)


def look(
    step: TrainingStep,
    units: Sequence[nn.Module],
    meter: Meter,
    inside: dict[nn.Module, list[nn.Module]],
) -> Structure:
    """Streams the step once and notes its structure.

    Args:
        step: to look at.
        units: whose calls the plan will decide about.
        meter: of the step's device.
        inside: for each unit, the modules that it calls directly.
    """
    try:
        return _look(step, units, meter, inside, frees=True)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, LeakError) as error:
        if isinstance(error, LeakError) and not step.calls_grad:
            raise
    with explaining(step):
        # A backward inside the forward may go through code whose graph was freed.
        return _look(step, units, meter, inside, frees=False)


def _look(
    step: TrainingStep,
    units: Sequence[nn.Module],
    meter: Meter,
    inside: dict[nn.Module, list[nn.Module]],
    *,
    frees: bool,
) -> Structure:
    with ExitStack() as stack:
        stack.enter_context(meter.watching())
        meter.ignore(step.shards.storages())
        tracker = getattr(meter, "tracker", None) or stack.enter_context(MemoryTracker())
        looker = _Looker(step, meter, tracker, inside, frees)
        push_saved_tensor_hooks(looker.pack, _given_back)
        stack.callback(pop_saved_tensor_hooks)
        stack.callback(step.model.register_forward_pre_hook(looker.note_again).remove)
        stack.callback(step.model.register_forward_hook(looker.note_output).remove)
        # A pass that fails leaves lists of the model half filled, and the next one would go on from there.
        stack.callback(step.reached.hold())
        stack.enter_context(step.shards.gathering_in(looker.gathering))
        streamed = stream(step, units, looker)
        if looker.tail is None:
            raise LossError("The step ran no backward. A step= callable must call loss.backward().")
        calls = noting_gradients(looker.calls, looker.tail)
        return Structure(calls, looker.tail, streamed.accumulates, streamed.has_stale, looker.copies)


def _given_back(tensor: Tensor) -> Tensor:
    return tensor
