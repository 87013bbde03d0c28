"""Which code is the user's own, and what it reads by name."""

from __future__ import annotations

import dis
import re
import sys
import sysconfig
from functools import lru_cache
from os import sep
from pathlib import Path
from types import CellType, CodeType, FunctionType, MemberDescriptorType, MethodType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch

__all__ = [
    "UNBOUND",
    "attribute_names",
    "content_of",
    "file_of",
    "global_names",
    "is_compiled_function",
    "is_library",
    "is_machinery",
    "is_own",
    "methods_of_forward",
    "original_of_compiled",
    "package_of",
    "slots_of",
]

_LIBRARIES = (
    *{sysconfig.get_path(key) for key in ("stdlib", "platstdlib", "purelib", "platlib")},
    str(Path(torch.__file__).parent),
    str(Path(__file__).parent.parent),  # ourselves
)
_FOLDERS = tuple(f"{folder.rstrip(sep)}{sep}" for folder in _LIBRARIES)
# Objects of these packages are machinery: they hold no state of a training loop, and lead far away.
_MACHINERY = re.compile(
    rf"{__name__.partition('.')[0]}|_io|_thread|asyncio|concurrent|ctypes|inspect|io|logging|multiprocessing|queue|re"
    r"|selectors|socket|subprocess|threading|typing|unittest|weakref"
)


UNBOUND = object()
"""What `content_of` returns for a variable that is not bound."""


def content_of(cell: CellType) -> Any:
    """What a closure cell holds."""
    try:
        return cell.cell_contents
    except ValueError:
        return UNBOUND


@lru_cache(10_000)
def is_library(file: str | None) -> bool:
    """Whether code is not the user's own: installed, or built in."""
    return file is None or file.startswith(("<frozen", *_FOLDERS))


def file_of(cls: type) -> str | None:
    """The file that a class was written in."""
    if cls.__module__ in ("__main__", "__mp_main__"):
        return "__main__"
    return getattr(sys.modules.get(cls.__module__), "__file__", None)


def package_of(module: str | None) -> str:
    """The package that a module belongs to, by its full name."""
    return str(module or "").partition(".")[0]


def is_machinery(value: Any) -> bool:
    """Whether a value is none of the user's: a lock, a logger, something of ours."""
    module = value.__module__ if isinstance(value, (FunctionType, type)) else type(value).__module__
    is_machinery = _MACHINERY.fullmatch(package_of(module)) is not None
    return is_machinery and not isinstance(value, (torch.nn.Module, torch.Tensor))


_own: WeakKeyDictionary[type, bool] = WeakKeyDictionary()


def is_own(cls: type) -> bool:
    """Whether the user wrote a class, or it has no attributes but those that the user gives it."""
    known = _own.get(cls)
    if known is None:
        is_bare = cls.__name__ in ("SimpleNamespace", "Namespace")
        known = _own[cls] = is_bare or not is_library(file_of(cls))
    return known


@lru_cache(10_000)
def global_names(code: CodeType) -> tuple[str, ...]:
    """The globals that a function's code, and that of functions inside it, reads or binds, sorted."""
    names = {
        instruction.argval
        for instruction in dis.get_instructions(code)
        if instruction.opname in ("LOAD_GLOBAL", "STORE_GLOBAL", "LOAD_NAME", "STORE_NAME")
    }
    inner = (global_names(const) for const in code.co_consts if isinstance(const, CodeType))
    return tuple(sorted(names.union(*inner)))


@lru_cache(10_000)
def attribute_names(code: CodeType) -> frozenset[str]:
    """The attributes that a function's code, and that of functions inside it, reads."""
    inner = (attribute_names(const) for const in code.co_consts if isinstance(const, CodeType))
    return frozenset(code.co_names).union(*inner)


_methods: WeakKeyDictionary[type, tuple[Any, tuple[ref[FunctionType], ...]]] = WeakKeyDictionary()
"""With the forward that they were found from, which may be replaced; weakly, since methods may refer to their class."""


def methods_of_forward(cls: type) -> list[FunctionType]:
    """The methods of the user's own that a class's forward leads to, by the names that it reads."""
    forward = getattr(cls, "forward", None)
    known = _methods.get(cls)
    if known is None or known[0]() is not forward:
        if not isinstance(forward, FunctionType):
            return []
        known = _methods[cls] = ref(forward), tuple(map(ref, _find_methods(cls)))
    return [method for reference in known[1] if (method := reference()) is not None]


def _find_methods(cls: type) -> list[FunctionType]:
    methods = {
        name: item
        for base in reversed(cls.__mro__)
        if is_own(base)
        for name, item in vars(base).items()
        if isinstance(item, FunctionType)
    }
    found: dict[str, FunctionType] = {}
    waiting = ["forward"]
    while waiting:
        name = waiting.pop()
        if name in methods and name not in found:
            found[name] = methods[name]
            waiting += attribute_names(methods[name].__code__)
    return list(found.values())


def slots_of(cls: type) -> tuple[Any, ...]:
    """The descriptors of an object's slots, which know their names as they are."""
    bases = [base for base in cls.__mro__ if "__slots__" in vars(base)]
    return tuple(
        item for base in bases for item in vars(base).values() if isinstance(item, MemberDescriptorType)
    )


def is_compiled_function(function: Any) -> bool:
    """Whether torch.compile made a function. Other objects are not asked: they may answer anything."""
    function = function.__func__ if isinstance(function, MethodType) else function
    # What the compiler is told to leave alone has the first name, too.
    names = {"_torchdynamo_orig_callable", "get_compiler_config"}
    return isinstance(function, FunctionType) and names <= vars(function).keys()


def original_of_compiled(function: Any) -> Any:
    """What torch.compile made a compiled function of; for a method, not bound to its object."""
    return getattr(function, "__func__", function)._torchdynamo_orig_callable
