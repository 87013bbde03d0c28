"""Which module calls the plan decides about.

NOTE [ Choosing units ]
    1. A module whose kind occurs again (a transformer block, a residual block, a cell called at every step) is a
       unit, at the outermost level where that holds. Single operations (modules without children) repeat
       everywhere and count only where nothing around them does.
    2. A module that contains such blocks is no unit: what it calls is looked at one by one.
    3. What remains is a unit if it is small (a quarter of the step's bytes at most) or has nothing inside.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from torch import nn

from recoup.errors import UnitError
from recoup.measuring.calls import ModuleCall, kind_of_module

__all__ = ["Units", "children_of", "choose_units", "find_units"]

Units = str | nn.Module | Callable[[str, nn.Module], bool]
_LARGEST_SHARE = 4


def choose_units(root: ModuleCall) -> list[nn.Module]:
    """The units of a step by NOTE [ Choosing units ], in order of their first call.

    A model that the step calls several times is looked at call by call: it is no block of itself.
    """
    outer = [call for call in root.inside if call.module is root.module]
    if outer:
        return _without_nested(list(dict.fromkeys(module for call in outer for module in choose_units(call))))
    kinds = {call.module: kind_of_module(call.module) for call in root.walk()}
    counts = Counter(kinds[call.module] for call in root.walk())

    def is_block(call: ModuleCall) -> bool:
        is_again = counts[kinds[call.module]] > 1
        is_leaf = not call.inside
        return call is not root and is_again and (not is_leaf or _is_cell(call, root))

    def holds_blocks(call: ModuleCall) -> bool:
        return any(is_block(inner) for inner in call.walk() if inner is not call)

    def choose(call: ModuleCall) -> list[nn.Module]:
        if is_block(call) or not call.inside:
            return [call.module] if call is not root or not call.inside else []
        if call is root or holds_blocks(call) or call.made_bytes * _LARGEST_SHARE > root.made_bytes:
            return [module for inner in call.inside for module in choose(inner)]
        return [call.module]

    chosen = list(dict.fromkeys(choose(root)))
    return _without_nested(chosen) or [root.module]


def _is_cell(call: ModuleCall, root: ModuleCall) -> bool:
    """Whether one and the same leaf with parameters is called at several steps."""
    num_calls = sum(other.module is call.module for other in root.walk())
    return num_calls > 1 and any(True for _ in call.module.parameters(recurse=False))


def _without_nested(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Drops modules that lie inside another one of them."""
    inside = {child for module in modules for child in module.modules() if child is not module}
    return [module for module in modules if module not in inside]


def children_of(root: ModuleCall, module: nn.Module) -> list[nn.Module]:
    """What a unit calls directly: the units that it can be split into."""
    for call in root.walk():
        if call.module is module:
            return list(dict.fromkeys(inner.module for inner in call.inside))
    return []


def find_units(root: ModuleCall, wanted: Units | Iterable[Units]) -> list[nn.Module]:
    """The units that the user names: patterns of module names, modules, or a predicate.

    Raises:
        UnitError: nothing in the model is called so, the step never calls it, or one lies inside another.
    """
    names = {name: module for name, module in root.module.named_modules() if name}
    called = {call.module for call in root.walk()}
    entries = [wanted] if isinstance(wanted, (str, nn.Module)) or callable(wanted) else list(wanted)
    if not entries:
        raise UnitError("units= names nothing. Leave it out to let recoup choose.")
    found: dict[nn.Module, None] = {}
    for entry in entries:
        found |= dict.fromkeys([entry] if entry is root.module else _matching(entry, names, called))
    modules = [call.module for call in root.walk() if call.module in found]
    modules = list(dict.fromkeys(modules))
    outer = _without_nested(modules)
    if len(outer) < len(modules):
        nested = next(module for module in modules if module not in outer)
        name = next(name for name, module in names.items() if module is nested)
        raise UnitError(f"Unit {name!r} lies inside another unit. Name either the outer or the inner one.")
    return modules


def _matching(entry: Units, names: dict[str, nn.Module], called: set[nn.Module]) -> list[nn.Module]:
    if isinstance(entry, nn.Module):
        matches = {name: module for name, module in names.items() if module is entry}
        what = f"The module {type(entry).__name__}(…)"
    elif isinstance(entry, str):
        matches = {name: module for name, module in names.items() if _fits(name, entry)}
        what = f"The unit pattern {entry!r}"
    else:
        matches = {name: module for name, module in names.items() if entry(name, module)}
        what = "The predicate for units"
    if not matches:
        close = difflib.get_close_matches(str(entry), names, n=3) if isinstance(entry, str) else []
        hint = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
        known = ", ".join(sorted(names)[:8])
        raise UnitError(f"{what} fits no module of the model.{hint} The first names are: {known}.")
    used = [module for module in matches.values() if module in called]
    if not used:
        raise UnitError(
            f"{what} fits {', '.join(map(repr, list(matches)[:3]))}, which the step never calls. Containers such as"
            " ModuleList are not called: name what is in them, for example 'blocks.*'."
        )
    return used


def _fits(name: str, pattern: str) -> bool:
    """Whether a module name fits a pattern, part by part: ``*`` never crosses a dot."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))
