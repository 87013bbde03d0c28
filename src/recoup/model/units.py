"""Which module calls the plan decides about.

NOTE [ Choosing units ]
    1. A module whose form occurs again (a transformer block, a residual block, a cell called at every step) is a
       unit, at the outermost level where that holds. Modules without parameters may differ: stochastic depth gives each
       block its own rate, and the first an Identity. Single operations (modules without children) repeat everywhere,
       and count only if one and the same layer is called again. A block whose form is its own is known by those called
       beside it, of the same class: the first of a T5 has a table of positions, that of a mixture of experts may have
       none, that of a stage makes images smaller, another may be frozen. With more blocks inside than these it may be a
       stage, longer than those beside it.
    2. A module that contains such blocks is no unit: its calls are looked at one by one.
    3. What remains is a unit if it is small (a quarter of the step's bytes at most) or calls nothing.
    4. A plain Sequential of single operations that is no unit is cut into slices (NOTE [ Slices ]). Each begins at a
       layer with a weight of two dimensions or more, and ends before the next: norms, activations and pooling go with
       the layer before them. Operations before the first such layer go with it, unless they work in place: an
       operation in place is replayed together with the layer whose output it changes.
    5. A layer with parameters or buffers that the step calls more than once is in no slice.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from torch import nn

from recoup.errors import UnitError
from recoup.model.calls import ModuleCall, class_of_module, form_of_module
from recoup.model.slices import (
    Slice,
    first_overlap,
    is_plain_sequential,
    make_slice,
    split_name,
    unit_names,
)

__all__ = ["Units", "children_of", "choose_units", "find_units", "parts_of", "split_units", "without_nested"]

Units = str | nn.Module | type[nn.Module] | Callable[[str, nn.Module], bool]
_LARGEST_SHARE = 4


def choose_units(root: ModuleCall) -> list[nn.Module]:
    """The units of a step by NOTE [ Choosing units ], in order of their first call.

    A model that the step calls several times is looked at call by call: it is no block of itself.
    """
    outer = [call for call in root.inside if call.module is root.module] or [root]
    slicing = _Slicing()
    chosen = [module for call in outer for module in _Choice(call, slicing).units() or [call.module]]
    return without_nested(list(dict.fromkeys(chosen)))


class _Choice:
    """The units below one call."""

    def __init__(self, root: ModuleCall, slicing: _Slicing) -> None:
        self.root, self.slicing = root, slicing
        self.forms = {call.module: form_of_module(call.module) for call in root.walk()}
        self.counts = Counter(self.forms[call.module] for call in root.walk())
        self.num_calls = Counter(call.module for call in root.walk())
        self.like_blocks = {module for call in root.walk() for module in self._like_blocks_in(call)}

    def units(self) -> list[nn.Module]:
        return self._parts(self.root) if self.root.inside else [self.root.module]

    def _below(self, call: ModuleCall) -> list[nn.Module]:
        if self._is_block(call) or not call.inside:
            return [call.module]
        holds_blocks = any(self._is_block(inner) for inner in call.walk() if inner is not call)
        is_large = call.made_bytes * _LARGEST_SHARE > self.root.made_bytes
        return self._parts(call) if holds_blocks or is_large else [call.module]

    def _parts(self, call: ModuleCall) -> list[nn.Module]:
        chosen: list[nn.Module] = []
        for part in self.slicing.parts(call, self.num_calls):
            chosen += self._below(part) if isinstance(part, ModuleCall) else [part]
        return chosen

    def _is_block(self, call: ModuleCall) -> bool:
        return call.module in self.like_blocks or self._occurs_again(call)

    def _occurs_again(self, call: ModuleCall) -> bool:
        """Whether a call's form occurs again. A leaf is one and the same layer with parameters, called at each step."""
        module = call.module
        is_cell = self.num_calls[module] > 1 and any(True for _ in module.parameters(recurse=False))
        return self.counts[self.forms[module]] > 1 and (bool(call.inside) or is_cell)

    def _like_blocks_in(self, call: ModuleCall) -> Iterator[nn.Module]:
        """What is called beside blocks of its class, and has no more blocks inside than they have."""
        calls = [one for one in call.inside if one.inside and not is_plain_sequential(one.module)]
        most: dict[type[nn.Module], int] = {}
        for one in filter(self._occurs_again, calls):
            own = class_of_module(one.module)
            most[own] = max(self._num_blocks_in(one), most.get(own, 0))
        for one in calls:
            if self._num_blocks_in(one) <= most.get(class_of_module(one.module), -1):
                yield one.module

    def _num_blocks_in(self, call: ModuleCall) -> int:
        return sum(self._occurs_again(one) for one in call.walk() if one is not call)


class _Slicing:
    """Cuts calls of Sequentials into slices; those of a Sequential that is called again are the same."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, int, int], nn.Module] = {}

    def parts(self, call: ModuleCall, num_calls: Mapping[nn.Module, int]) -> list[ModuleCall | nn.Module]:
        """The parts of a call, in order: slices, and calls that are in none."""
        if not is_plain_sequential(call.module) or _called(call) != list(call.module):
            return list(call.inside)
        parts: list[ModuleCall | nn.Module] = []
        for first, last in _slice_ranges(call.inside, num_calls):
            key = (call.name, first, last)
            if last > first + 1 and key not in self._made:
                self._made[key] = make_slice(call.module, *key)
            parts.append(self._made.get(key, call.inside[first]))
        return parts


def _slice_ranges(calls: Sequence[ModuleCall], num_calls: Mapping[nn.Module, int]) -> list[tuple[int, int]]:
    """NOTE [ Choosing units ], 4 and 5, for calls in a row: from which to before which."""
    ranges: list[tuple[int, int]] = []
    is_open = has_weight = False
    for index, call in enumerate(calls):
        joins = not call.inside and not (num_calls[call.module] > 1 and _has_state(call.module))
        is_weight = any(parameter.dim() > 1 for parameter in call.module.parameters())
        if is_open and joins and not (is_weight and has_weight):
            ranges[-1] = (ranges[-1][0], index + 1)
            has_weight |= is_weight
        else:
            ranges.append((index, index + 1))
            is_open = joins and (is_weight or not getattr(call.module, "inplace", False))
            has_weight = is_weight
    return ranges


def _has_state(module: nn.Module) -> bool:
    return any(True for _ in module.parameters()) or any(True for _ in module.buffers())


def _called(call: ModuleCall) -> list[nn.Module]:
    return [inner.module for inner in call.inside]


def without_nested(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules that are not inside another one of them; overlapping slices stay."""
    inside = {child for module in modules for child in module.modules() if child is not module}
    whole = [set(module.modules()) for module in modules if not isinstance(module, Slice)]

    def is_nested(module: nn.Module) -> bool:
        if isinstance(module, Slice):
            return any(children.issuperset(module.children()) for children in whole)
        return module in inside

    return [module for module in modules if not is_nested(module)]


def children_of(root: ModuleCall, module: nn.Module) -> list[nn.Module]:
    """The modules that a unit calls directly."""
    if isinstance(module, Slice):
        return list(module.children())
    call = _first_call(root, module)
    return [] if call is None else list(dict.fromkeys(_called(call)))


def parts_of(root: ModuleCall, module: nn.Module) -> list[nn.Module]:
    """The units that a unit can be split into: slices of a Sequential, or else the modules that it calls."""
    call = None if isinstance(module, Slice) else _first_call(root, module)
    if call is not None:
        num_calls = Counter(inner.module for inner in root.walk())
        parts = [
            part.module if isinstance(part, ModuleCall) else part
            for part in _Slicing().parts(call, num_calls)
        ]
        if parts != [module]:
            return list(dict.fromkeys(parts))
    return children_of(root, module)


def split_units(root: ModuleCall, units: Sequence[nn.Module], some: Collection[nn.Module]) -> list[nn.Module]:
    """The units, some of them split into parts; those that call nothing are dropped."""
    parts = [part for unit in units for part in (parts_of(root, unit) if unit in some else [unit])]
    # An activation that units share may be inside one that is not split.
    return without_nested(list(dict.fromkeys(parts)))


def _first_call(root: ModuleCall, module: nn.Module) -> ModuleCall | None:
    return next((call for call in root.walk() if call.module is module), None)


def find_units(root: ModuleCall, wanted: Units | Iterable[Units]) -> list[nn.Module]:
    """The units that the user names: patterns of module names, modules, classes of modules, or a predicate.

    Raises:
        UnitError: nothing in the model is called so, the step never calls it, or one lies inside another.
    """
    names = {name: module for name, module in root.module.named_modules() if name}
    called = {call.module for call in root.walk()}
    entries = [wanted] if isinstance(wanted, (str, nn.Module)) or callable(wanted) else list(wanted)
    if not entries:
        raise UnitError("units= names nothing. Leave it out to let recoup choose.")
    matching = [module for entry in entries for module in _matching(entry, root.module, names, called)]
    labels = unit_names(root.module, matching)
    # By name: the same slice may be named twice.
    modules = _in_order(root, list({labels[module]: module for module in matching}.values()))
    outer = without_nested(modules)
    if len(outer) < len(modules):
        name = labels[next(module for module in modules if module not in outer)]
        raise UnitError(f"Unit {name!r} lies inside another unit. Name either the outer or the inner one.")
    if overlap := first_overlap(root.module, modules):
        one, other = map(labels.__getitem__, overlap)
        raise UnitError(f"The units {one!r} and {other!r} overlap. Name slices that do not.")
    return modules


def _in_order(root: ModuleCall, modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Modules in the order of their first calls."""
    positions: dict[nn.Module, int] = {}
    for position, call in enumerate(root.walk()):
        positions.setdefault(call.module, position)

    def position_of(module: nn.Module) -> int:
        return positions[next(module.children()) if isinstance(module, Slice) else module]

    return sorted(modules, key=position_of)


def _matching(
    entry: Units, model: nn.Module, names: dict[str, nn.Module], called: set[nn.Module]
) -> list[nn.Module]:
    if isinstance(entry, Slice) or entry is model:
        return [entry]
    if isinstance(entry, str) and (parts := split_name(entry)):
        return _matching_slices(*parts, names={"": model} | names, called=called)
    if isinstance(entry, nn.Module):
        matches = {name: module for name, module in names.items() if module is entry}
        what = f"The module {type(entry).__name__}(…)"
    elif isinstance(entry, str):
        matches = {name: module for name, module in names.items() if _fits(name, entry)}
        what = f"The unit pattern {entry!r}"
    elif isinstance(entry, type):
        matches = {name: module for name, module in names.items() if isinstance(module, entry)}
        what = f"The class {entry.__name__}"
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
            " ModuleList are not called, and a forward that is a generator runs elsewhere: name what is in them, for"
            " example 'blocks.*'."
        )
    return used


def _matching_slices(
    pattern: str, first: int, last: int, *, names: dict[str, nn.Module], called: set[nn.Module]
) -> list[nn.Module]:
    found = [
        make_slice(module, name, first, last)
        for name, module in names.items()
        if _fits(name, pattern)
        and module in called
        and is_plain_sequential(module)
        and first < last <= len(module)
    ]
    if not found:
        raise UnitError(
            f"The unit pattern '{pattern}[{first}:{last}]' fits no nn.Sequential that the step calls and that has at"
            " least as many children. A slice is made of consecutive children of one, for example 'features[0:3]'."
        )
    return found


def _fits(name: str, pattern: str) -> bool:
    """Whether a module name fits a pattern, part by part: ``*`` never crosses a dot."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))
