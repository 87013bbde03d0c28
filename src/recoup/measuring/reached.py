"""What code can get at besides its arguments: other models, optimizers, counters, lists, iterators.

NOTE [ What a step can reach ]
    1. A function leads to what it closes over, its defaults, and the globals that its code names; a bound method to its
       object; an object to its attributes and, where the user wrote its class, to the methods that such code calls.
       Globals are followed from the user's own functions only: those of libraries lead everywhere.
    2. Python state (variables, attributes, containers, random generators) is put back from shallow copies. Values of
       tensors are found by their writes instead (NOTE [ Copy on write ] in ``writes.py``): most of what is reached,
       data sets and frozen models, never changes.
    3. An iterator cannot be put back. One in the user's own hands would be advanced by every run.
"""

from __future__ import annotations

import dis
import functools
import io
import random
import re
import sys
import sysconfig
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recoup.measuring.compiled import is_compiled_function
from recoup.measuring.notes import is_same

__all__ = ["Reached", "hooks_of"]

_MOST_OBJECTS = 200_000
_LEAVES = (int, float, complex, str, bytes, type(None), type, torch.dtype, torch.device, torch.Size)
_OURS = __name__.partition(".")[0]
# Objects of these packages are machinery: they hold no state of a training loop, and lead far away.
_MACHINERY = re.compile(
    rf"{_OURS}|_io|_thread|asyncio|concurrent|ctypes|inspect|io|logging|multiprocessing|queue|re|selectors|socket|subprocess"
    r"|threading|typing|weakref"
)
_LIBRARIES = tuple({sysconfig.get_path(key) for key in ("stdlib", "platstdlib", "purelib", "platlib")})
_STRUCTURE = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def hooks_of(model: nn.Module) -> list[Any]:
    """What users registered on a model's modules and parameters, to be called in every step."""
    places = (getattr(module, name) for module in model.modules() for name in _HOOKS)
    found = [hook for place in places for hook in place.values()]
    for parameter in model.parameters():
        for hooks in (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None)):
            found += (hooks or {}).values()
    return found


class Reached:
    """What some roots lead to, by NOTE [ What a step can reach ].

    Args:
        roots: functions and objects, with the names that errors give them.
        known: a model that is taken care of otherwise: only what its attributes lead to counts.

    Attributes:
        modules: other models, and other modules outside any of them.
        optimizers: with the wrappers around them.
        leaves: further tensors that get gradients.
        iterators: with their names.
        compiled: the names of functions that torch.compile made.

    >>> losses = []
    >>> reached = Reached([("log", {"losses": losses})])
    >>> put_back = reached.hold()
    >>> losses.append(2.0)
    >>> put_back()
    >>> losses
    []
    """

    def __init__(self, roots: Iterable[tuple[str, Any]], known: nn.Module | None = None) -> None:
        self.modules: list[nn.Module] = []
        self.optimizers: list[Optimizer] = []
        self.leaves: list[Tensor] = []
        self.iterators: list[tuple[str, Any]] = []
        self.compiled: list[str] = []
        # Names of attributes that the user's code reads, and what waits for them to be read.
        self._names: set[str] = set()
        self._unread: dict[str, list[tuple[str, Any]]] = {}
        self._holders: list[Callable[[], Callable[[], None]]] = []
        self._seen: dict[int, Any] = {}
        self._waiting = deque((name, root, True) for name, root in roots)
        if known is not None:
            self._visit_modules("model", known)
        while self._waiting and len(self._seen) < _MOST_OBJECTS:
            self._visit(*self._waiting.popleft())

    def hold(self) -> Callable[[], None]:
        """Notes the Python state of all that was reached; returns what puts it back."""
        restores = [holder() for holder in self._holders]

        def put_back() -> None:
            for restore in reversed(restores):
                restore()

        return put_back

    def _visit(self, name: str, value: Any, is_own: bool) -> None:
        if isinstance(value, _LEAVES) or id(value) in self._seen or _is_machinery(value):
            return
        self._seen[id(value)] = value
        if is_compiled_function(value):
            self.compiled.append(name)
        match value:
            case FunctionType():
                self._visit_function(value, is_own)
            case MethodType():
                self._queue([(name, value.__func__), (name, value.__self__)], is_own)
            case BuiltinFunctionType() if not isinstance(value.__self__, ModuleType):
                self._queue([(name, value.__self__)], is_own)
            case functools.partial():
                self._queue([(name, value.func), *enumerate_named(name, value.args)], is_own)
                self._queue(value.keywords.items(), is_own)
            case nn.Module():
                self.modules.append(value)
                self._visit_modules(name, value)
            case Optimizer():
                self.optimizers.append(value)
                rest = ((k, item) for k, item in vars(value).items() if k not in ("param_groups", "state"))
                self._queue(rest, False)
            case Tensor():
                if value.requires_grad and value.is_leaf:
                    self.leaves.append(value)
            case torch.Generator():
                self._holders.append(functools.partial(_hold_generator, value))
            case random.Random():
                self._holders.append(functools.partial(_hold_random, value))
            case list() | deque():
                self._holders.append(functools.partial(_hold_list, value))
                self._queue(enumerate_named(name, value), is_own)
            case dict():
                self._holders.append(functools.partial(_hold_dict, value))
                self._queue(((f"{name}[{key!r}]", item) for key, item in value.items()), is_own)
            case set():
                self._holders.append(functools.partial(_hold_set, value))
                self._queue(enumerate_named(name, value), is_own)
            case tuple() | frozenset():
                self._queue(enumerate_named(name, value), is_own)
            case Iterator() if not isinstance(value, io.IOBase):
                if is_own:
                    self.iterators.append((name, value))
            case ModuleType():
                if not _is_library(getattr(value, "__file__", None)):
                    self._holders.append(functools.partial(_hold_dict, vars(value)))
            case _:
                self._visit_object(name, value, is_own)

    def _queue(self, items: Iterable[tuple[Any, Any]], is_own: bool) -> None:
        self._waiting.extend(
            (str(name), value, is_own) for name, value in items if not isinstance(value, _LEAVES)
        )

    def _visit_function(self, fn: FunctionType, is_own: bool) -> None:
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            if (content := _content(cell)) is not _EMPTY:
                self._holders.append(functools.partial(_hold_cell, cell))
                self._queue([(name, content)], is_own)
        self._queue(enumerate_named("default", fn.__defaults__ or ()), is_own)
        self._queue((fn.__kwdefaults__ or {}).items(), is_own)
        if _is_library(fn.__code__.co_filename):
            return
        for name in _attribute_names(fn.__code__) - self._names:
            self._names.add(name)
            self._queue(self._unread.pop(name, ()), True)
        known = fn.__globals__
        for name in sorted(_global_names(fn.__code__)):
            if name in known and not isinstance(known[name], type):
                self._holders.append(functools.partial(_hold_key, known, name))
                self._queue([(name, known[name])], is_own)

    def _visit_modules(self, name: str, root: nn.Module) -> None:
        """A model's modules one by one, whatever order they were reached in."""
        for path, module in root.named_modules():
            self._seen[id(module)] = module
            if not isinstance(module, torch.jit.ScriptModule):  # its dictionaries are not its own
                attributes = ((key, value) for key, value in vars(module).items() if key not in _STRUCTURE)
                self._queue(((f"{name}.{path}.{key}", value) for key, value in attributes), False)

    def _visit_object(self, name: str, value: Any, is_own: bool) -> None:
        if (state := _numpy_state(value)) is not None:
            self._holders.append(state)
            return
        is_own = is_own and not _is_library(_file_of(type(value)))
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            self._holders.append(functools.partial(_hold_dict, attributes))
            self._visit_attributes(name, attributes, is_own)
        if slots := _slots_of(value):
            self._holders.append(functools.partial(_hold_slots, value, slots))
            self._visit_attributes(name, {key: getattr(value, key) for key in slots}, is_own)
        if is_own:
            for key, item in ((k, v) for cls in type(value).__mro__ for k, v in vars(cls).items()):
                if isinstance(item, FunctionType) and not _is_library(item.__code__.co_filename):
                    self._when_read(key, (name, item))

    def _visit_attributes(self, name: str, attributes: dict[str, Any], is_own: bool) -> None:
        for key, item in attributes.items():
            if is_own and isinstance(item, Iterator):
                self._when_read(key, (f"{name}.{key}", item))
            else:
                self._queue([(f"{name}.{key}", item)], is_own)

    def _when_read(self, key: str, item: tuple[str, Any]) -> None:
        """Queues what the user's code reaches only by that name: a method, or an iterator that it may advance."""
        if key in self._names or (
            key.startswith("__") and key not in ("__init__", "__new__", "__post_init__")
        ):
            self._queue([item], True)
        else:
            self._unread.setdefault(key, []).append(item)


_EMPTY = object()


def enumerate_named(name: str, items: Iterable[Any]) -> list[tuple[str, Any]]:
    """Items with the names that errors give them."""
    return [(f"{name}[{index}]", item) for index, item in enumerate(items)]


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that is not bound yet
        return _EMPTY


@functools.cache
def _global_names(code: CodeType) -> frozenset[str]:
    """The globals that a function's code, and that of functions inside it, reads or binds."""
    names = {
        instruction.argval
        for instruction in dis.get_instructions(code)
        if instruction.opname in ("LOAD_GLOBAL", "STORE_GLOBAL", "LOAD_NAME", "STORE_NAME")
    }
    inner = (_global_names(const) for const in code.co_consts if isinstance(const, CodeType))
    return frozenset(names).union(*inner)


@functools.cache
def _attribute_names(code: CodeType) -> frozenset[str]:
    """The attributes that a function's code, and that of functions inside it, reads."""
    inner = (_attribute_names(const) for const in code.co_consts if isinstance(const, CodeType))
    return frozenset(code.co_names).union(*inner)


def _is_library(file: str | None) -> bool:
    """Whether code is not the user's own: installed, built in, or ours."""
    if file is None or file.startswith("<frozen"):
        return True
    return file.startswith(_LIBRARIES)


def _file_of(cls: type) -> str | None:
    module = sys.modules.get(cls.__module__)
    if cls.__module__ in ("__main__", "__mp_main__"):
        return "__main__"
    return getattr(module, "__file__", None)


def _is_machinery(value: Any) -> bool:
    package = value.__module__ if isinstance(value, FunctionType) else type(value).__module__
    is_machinery = _MACHINERY.fullmatch(str(package).partition(".")[0]) is not None
    return is_machinery and not isinstance(value, (nn.Module, Tensor))


def _slots_of(value: Any) -> list[str]:
    names = [name for cls in type(value).__mro__ for name in _as_names(vars(cls).get("__slots__", ()))]
    return [name for name in names if not name.startswith("__") and hasattr(value, name)]


def _as_names(slots: Any) -> Iterable[str]:
    return (slots,) if isinstance(slots, str) else slots


def _numpy_state(value: Any) -> Callable[[], Callable[[], None]] | None:
    """How to hold a NumPy generator, without importing NumPy."""
    numpy = sys.modules.get("numpy.random")
    if numpy is None or not isinstance(value, (numpy.Generator, numpy.RandomState)):
        return None
    bits = value.bit_generator if isinstance(value, numpy.Generator) else value._bit_generator

    def hold() -> Callable[[], None]:
        state = bits.state
        return lambda: setattr(bits, "state", state)

    return hold


def _hold_generator(generator: torch.Generator) -> Callable[[], None]:
    state = generator.get_state()

    def restore() -> None:
        generator.set_state(state)

    return restore


def _hold_random(generator: random.Random) -> Callable[[], None]:
    state = generator.getstate()
    return lambda: generator.setstate(state)


# Containers are filled again in place, and only where they changed: others refer to them.
# The built-in class's own methods: a subclass may refuse to be changed.


def _hold_list(place: list[Any] | deque[Any]) -> Callable[[], None]:
    then = list(place)

    def restore() -> None:
        if not is_same(place, then):
            place.clear()
            place.extend(then)

    return restore


def _hold_dict(place: dict[Any, Any]) -> Callable[[], None]:
    then = dict(place)

    def restore() -> None:
        if not is_same(place, then):
            built_in = OrderedDict if isinstance(place, OrderedDict) else dict
            built_in.clear(place)
            for key, value in then.items():
                built_in.__setitem__(place, key, value)

    return restore


def _hold_set(place: set[Any]) -> Callable[[], None]:
    then = set(place)

    def restore() -> None:
        if place != then:
            place.clear()
            place.update(then)

    return restore


def _hold_cell(cell: CellType) -> Callable[[], None]:
    then = _content(cell)

    def restore() -> None:
        if _content(cell) is not then:
            cell.cell_contents = then

    return restore


def _hold_key(place: dict[str, Any], key: str) -> Callable[[], None]:
    then = place[key]

    def restore() -> None:
        if place.get(key) is not then:
            place[key] = then

    return restore


def _hold_slots(owner: Any, names: list[str]) -> Callable[[], None]:
    then = {name: getattr(owner, name) for name in names if hasattr(owner, name)}

    def restore() -> None:
        for name, value in then.items():
            if getattr(owner, name, _EMPTY) is not value:
                object.__setattr__(owner, name, value)

    return restore
