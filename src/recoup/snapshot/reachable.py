"""What code can get at besides its arguments: other models, optimizers, counters, lists, iterators.

NOTE [ What a step can reach ]
    1. A function leads to what it closes over, its defaults, its attributes, and the globals that its code names; a
       bound method to its object; an object to its attributes; a class, or a Python module, that the user wrote to
       what the user's code reads of it by name: methods, and state that all its objects share. Globals are followed
       from the user's own functions only: those of libraries lead everywhere.
    2. Python state (variables, attributes, containers, random generators) is put back from shallow copies. Values of
       tensors are found by their writes instead (NOTE [ Copy on write ] in ``writes.py``): most of what is reached,
       data sets and frozen models, never changes.
    3. An iterator cannot be put back. One that the user's code reads would be advanced by every run.
    4. Attributes that no code reads by name are visited last: their state is held, too, but what they are does not
       matter.
    5. Containers with very many items are held, and not looked into.
    6. Without following code, only objects, containers and the known model's modules are looked into.
"""

from __future__ import annotations

import functools
import io
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from sys import maxsize
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recoup.snapshot.accessors import (
    class_attributes,
    random_generator,
    setting,
    slot_values,
    small_array,
    tensor_data,
)
from recoup.snapshot.own_code import (
    UNBOUND,
    attribute_names,
    content_of,
    file_of,
    global_names,
    is_compiled_function,
    is_library,
    is_machinery,
    package_of,
)
from recoup.snapshot.places import GlobalName, Snapshot

__all__ = ["Reached", "hooks_of"]

_MOST_OBJECTS = 200_000
_MOST_ITEMS = 10_000
_LEAVES = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_FRAMEWORKS = re.compile(
    r"builtins|functools|torch\w*|transformers|accelerate|\w*lightning\w*|peft|trl|timm|deepspeed"
)
# What leads on to code, and with it anywhere.
_CODE = (FunctionType, MethodType, BuiltinFunctionType, type, ModuleType, nn.Module)
_STRUCTURE = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_BEFORE = ("__init__", "__new__", "__post_init__")


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
        known: a model that counts as reached, and not among the other models.
        follows_code: whether functions, classes and Python modules lead on.
        deepest: how many steps to go from a root, or from an attribute of the known model.

    Attributes:
        modules: other models, and other modules outside any of them.
        used_modules: those of them that code reads.
        optimizers: with the wrappers around them.
        tensors: outside of models and of optimizers' own state.
        leaves: those of them that get gradients.
        iterators: with their names.
        compiled: functions that torch.compile made, with their names.

    >>> losses = []
    >>> reached = Reached([("log", {"losses": losses})])
    >>> put_back = reached.hold()
    >>> losses.append(2.0)
    >>> put_back()
    >>> losses
    []
    """

    def __init__(
        self,
        roots: Iterable[tuple[str, Any]],
        known: nn.Module | None = None,
        *,
        follows_code: bool = True,
        deepest: int = maxsize,
    ) -> None:
        self.modules: list[nn.Module] = []
        self.optimizers: list[Optimizer] = []
        self.tensors: list[Tensor] = []
        self.leaves: list[Tensor] = []
        self.iterators: list[tuple[str, Any]] = []
        self.compiled: list[tuple[str, Any]] = []
        # Names that the user's code reads, and what waits for them to be read.
        self._names = {"forward"}
        self._unread: dict[str, list[tuple[str, Any, bool, int]]] = {}
        self._places: list[tuple[str, Any]] = []
        self._with_hooks: list[Tensor] = []
        self._seen: dict[int, Any] = {}
        self._follows_code, self._deepest, self._depth = follows_code, deepest, 0
        roots = list(roots)
        self._waiting: deque[tuple[str, Any, bool, int]] = deque()
        self._queue(roots, follows_code)
        self._own_packages = {_root_package(root) for _, root in roots} - {""}
        self._is_rest = False
        if known is not None:
            self._visit_modules("model", known.named_modules())
        self._visit_waiting()
        self.used_modules = tuple(self.modules)
        self._is_rest = True
        self._waiting.extend(
            (name, item, False, at) for items in self._unread.values() for name, item, _, at in items
        )
        self._visit_waiting()

    def hold(self) -> Callable[[], None]:
        """Notes the Python state of all that was reached; returns what puts it back."""
        return self.snapshot().put_back

    def snapshot(self) -> Snapshot:
        """The Python state of all that was reached, as it is now."""
        snapshot = Snapshot()
        snapshot.add_all([place for _, place in self._places], [name for name, _ in self._places])
        snapshot.add_hooks(self._with_hooks)
        return snapshot

    def _visit_waiting(self) -> None:
        while self._waiting and len(self._seen) < _MOST_OBJECTS:
            name, value, is_own, self._depth = self._waiting.popleft()
            # Proxies and the like may raise whatever they want when they are looked at.
            with suppress(Exception):
                if self._depth <= self._deepest:
                    self._visit(name, value, is_own)

    def _visit(self, name: str, value: Any, is_own: bool) -> None:
        if id(value) in self._seen or is_machinery(value):
            return
        if not self._follows_code and isinstance(value, _CODE):
            return
        self._seen[id(value)] = value
        if is_compiled_function(value) and not self._is_rest:
            self.compiled.append((name, value))
        match value:
            case FunctionType():
                self._visit_function(value, is_own)
            case MethodType():
                self._queue([(name, value.__func__), (name, value.__self__)], is_own)
            case BuiltinFunctionType() if not isinstance(value.__self__, ModuleType):
                self._queue([(name, value.__self__)], is_own)
            case functools.partial():
                self._queue([(name, value.func)], is_own)
                self._visit_items(name, value.args, is_own)
                self._queue(value.keywords.items(), is_own)
            case type():
                self._visit_class(name, value, is_own)
            case nn.Module():
                self.modules.append(value)
                self._visit_modules(
                    name, value.named_modules() if self._deepest == maxsize else [("", value)]
                )
            case Optimizer():
                self.optimizers.append(value)
                rest = ((k, item) for k, item in vars(value).items() if k not in ("param_groups", "state"))
                self._queue(rest, False)
            case Tensor():
                self.tensors.append(value)
                self._places.append((name, tensor_data(value)))
                self._with_hooks.append(value)
                if value.requires_grad and value.is_leaf:
                    self.leaves.append(value)
            case list() | deque() | set():
                self._places.append((name, value))
                self._visit_items(name, value, is_own)
            case dict():
                self._places.append((name, value))
                if len(value) <= _MOST_ITEMS:
                    pairs = ((f"{name}[{k!r}]", v) for k, v in value.items() if not isinstance(v, _LEAVES))
                    self._queue(pairs, is_own)
            case tuple() | frozenset():
                self._visit_items(name, value, is_own)
            case Iterator() if not isinstance(value, io.IOBase):
                if is_own:
                    self.iterators.append((name, value))
            case ModuleType():
                if not is_library(getattr(value, "__file__", None)):
                    self._places.append((name, vars(value)))
                    self._visit_attributes(name, vars(value), is_own)
            case _:
                self._visit_object(name, value, is_own)

    def _queue(self, items: Iterable[tuple[Any, Any]], is_own: bool) -> None:
        self._waiting.extend((str(name), value, is_own, self._depth + 1) for name, value in items)

    def _visit_items(self, name: str, items: Any, is_own: bool) -> None:
        if len(items) <= _MOST_ITEMS:
            numbered = ((i, item) for i, item in enumerate(items) if not isinstance(item, _LEAVES))
            self._queue(((f"{name}[{i}]", item) for i, item in numbered), is_own)

    def _visit_function(self, fn: FunctionType, is_own: bool) -> None:
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            self._places.append((name, cell))
            if (content := content_of(cell)) is not UNBOUND:
                self._queue([(name, content)], is_own)
        self._visit_items("default", fn.__defaults__ or (), is_own)
        self._queue((fn.__kwdefaults__ or {}).items(), is_own)
        if self._is_library_code(fn):
            return
        self._queue([(fn.__name__, fn.__dict__)], is_own)
        for name in attribute_names(fn.__code__) - self._names:
            self._names.add(name)
            self._waiting.extend(self._unread.pop(name, ()))
        known = fn.__globals__
        for name in global_names(fn.__code__):
            self._places.append((name, GlobalName(known, name)))
            if name in known:
                self._queue([(name, known[name])], is_own)

    def _is_library_code(self, fn: FunctionType) -> bool:
        # A training script may be installed as a package of its own.
        return is_library(fn.__code__.co_filename) and package_of(fn.__module__) not in self._own_packages

    def _visit_modules(self, name: str, modules: Iterable[tuple[str, nn.Module]]) -> None:
        """A model's modules one by one, whatever order they were reached in."""
        for path, module in modules:
            self._seen[id(module)] = module
            if isinstance(module, torch.jit.ScriptModule):  # its dictionaries are not its own
                mode = partial(getattr, module, "training", None), partial(setattr, module, "training")
                self._places.append((name, setting(*mode)))
            else:
                self._visit_module(f"{name}.{path}" if path else name, vars(module))
            # What a unit's own code does with an iterator is for the audit to say.
            self._queue(((name, cls) for cls in type(module).__mro__), False)

    def _visit_module(self, name: str, attributes: dict[str, Any]) -> None:
        structure = [attributes[key] for key in _STRUCTURE if key in attributes]
        self._places += [(name, place) for place in (attributes, *structure)]
        own = (attributes.get(key, {}).values() for key in ("_parameters", "_buffers"))
        self._with_hooks += [tensor for tensors in own for tensor in tensors if tensor is not None]
        self._queue(
            ((f"{name}.{key}", value) for key, value in attributes.items() if key not in _STRUCTURE), False
        )

    def _visit_object(self, name: str, value: Any, is_own: bool) -> None:
        if (place := random_generator(value) or small_array(value)) is not None:
            self._places.append((name, place))
            return
        is_own = is_own and not is_library(file_of(type(value)))
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            self._places.append((name, attributes))
            self._visit_attributes(name, attributes, is_own)
        if (place := slot_values(value)) is not None:
            self._places.append((name, place))
            slots = {slot.__name__: item for slot, item in place.read().items()}
            self._visit_attributes(name, slots, is_own)
        self._queue(((name, cls) for cls in type(value).__mro__), is_own)

    def _visit_class(self, name: str, cls: type, is_own: bool) -> None:
        """What all objects of a class of the user's share: its methods, and its state."""
        if is_library(file_of(cls)) and package_of(cls.__module__) not in self._own_packages:
            return
        self._places.append((name, class_attributes(cls)))
        for key, item in list(vars(cls).items()):
            item = getattr(item, "__func__", getattr(item, "fget", getattr(item, "func", item)))
            self._when_read(key, (f"{name}.{key}", item, is_own, self._depth + 1))

    def _visit_attributes(self, name: str, attributes: dict[str, Any], is_own: bool) -> None:
        for key, item in list(attributes.items()):
            if isinstance(item, _LEAVES):
                continue
            if is_own:
                self._when_read(key, (f"{name}.{key}", item, True, self._depth + 1))
            else:
                self._queue([(f"{name}.{key}", item)], False)

    def _when_read(self, key: str, item: tuple[str, Any, bool, int]) -> None:
        """Queues what the user's code reaches only by that name, once it reads it."""
        if key in self._names or (key.startswith("__") and key not in _BEFORE):
            self._waiting.append(item)
        else:
            self._unread.setdefault(key, []).append(item)


def _root_package(root: Any) -> str:
    """The package of a function of the user's; empty for one of a framework's."""
    while isinstance(root, functools.partial):
        root = root.func
    package = package_of(getattr(root, "__module__", None)) if callable(root) else ""
    return "" if _FRAMEWORKS.fullmatch(package) else package
