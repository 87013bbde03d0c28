"""Versioned JSON documents of dataclasses: the one place that writes and reads them.

`encode` and `decode` follow a dataclass's fields and their types: nested dataclasses, tuples (as lists), enums (by
value), numbers, text and `None`. Fields at their defaults are left out. Reading is strict: unknown and missing fields
and values of another type are refused, with the path to them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, fields
from enum import Enum
from functools import cache
from inspect import signature
from types import NoneType
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from recoup.errors import EncodingError, RecoupError

__all__ = ["decode", "encode", "expect_keys", "expect_list", "read_document", "write_document"]

_T = TypeVar("_T")

_EARLIER_FIELDS = ("freed_input_bytes", "left_bytes")
"""Of options and units until version 0.2; values with lifetimes say the same."""


class _DamageError(ValueError):
    """Content that does not fit, and the path to it from the document's body."""

    path = ""


# Documents


def write_document(format_name: str, version: int, kind: str, body: object, *, indent: int | None) -> str:
    """A document: what it is, in which version, and its content under the name of its kind."""
    return json.dumps({"format": format_name, "version": version, "kind": kind, kind: body}, indent=indent)


def read_document(
    text: str, format_name: str, version: int, decoders: Mapping[str, Callable[[Any], _T]]
) -> _T:
    """Reads what `write_document` wrote, with the decoder for its kind.

    Raises:
        EncodingError: the text is not JSON, of another format or version, incomplete, or its content is damaged or was
            written by an earlier version.
    """
    try:
        document = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise EncodingError(f"This is not JSON: {error}.") from None
    _expect_header(document, format_name, version)
    kind = document.get("kind")
    if not isinstance(kind, str) or kind not in decoders:
        raise EncodingError(f"Unknown kind {kind!r}; expected one of {', '.join(decoders)}.")
    try:
        expect_keys("The document", document, {"format", "version", "kind", kind})
        return decoders[kind](document[kind])
    except EncodingError:
        raise
    except (RecoupError, TypeError, ValueError, AttributeError, LookupError) as error:
        if earlier := sorted(set(_earlier_fields(document))):
            raise EncodingError(
                f"The {kind} was written by an earlier version of recoup: it has {', '.join(earlier)}, which this"
                " version cannot read. Measure the step again with this version."
            ) from error
        where = f" at {error.path.lstrip('.')}" if isinstance(error, _DamageError) and error.path else ""
        raise EncodingError(f"The {kind} is damaged{where}: {error}") from error


def _expect_header(document: Any, format_name: str, version: int) -> None:
    found = document.get("format") if isinstance(document, dict) else None
    if found != format_name:
        ours = isinstance(found, str) and found.startswith("recoup.")
        other = f": it is a {document.get('kind')} of {found}" if ours else ""
        what = "another kind of recoup's" if ours else "not recoup's"
        raise EncodingError(f"This JSON is {what}{other}: its 'format' is not {format_name!r}.")
    if document.get("version") != version:
        raise EncodingError(
            f"This is version {document.get('version')!r} of the format; this recoup reads version"
            f" {version}. Write it again with the same version of recoup."
        )


def _earlier_fields(document: Any) -> Iterator[str]:
    """What only earlier versions wrote: fields that are gone, and scratch below 0."""
    waiting = [document]
    while waiting:
        content = waiting.pop()
        if isinstance(content, dict):
            yield from (name for name in _EARLIER_FIELDS if name in content)
            scratch = content.get("backward_transient_bytes")
            if isinstance(scratch, int) and scratch < 0:
                yield "backward_transient_bytes below 0"
            waiting += content.values()
        elif isinstance(content, list):
            waiting += content


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number that a problem may hold")


# Dataclasses


def encode(value: Any) -> Any:
    """A value as what JSON knows; of a dataclass the fields that are not at their defaults.

    >>> from recoup.planning.problem import Link
    >>> encode(Link("host", send_bytes_per_s=2.0, fetch_bytes_per_s=1.0))
    {'name': 'host', 'send_bytes_per_s': 2.0, 'fetch_bytes_per_s': 1.0}
    """
    match value:
        case None | bool() | int() | float() | str():
            return value
        case tuple():
            return [encode(item) for item in value]
        case Enum():
            return value.value
    kind: Any = type(value)
    defaults = _layout(kind).defaults
    items = ((name, getattr(value, name)) for name in defaults)
    return {name: encode(content) for name, content in items if content != defaults[name]}


def decode(kind: type[_T], body: Any) -> _T:
    """A dataclass from what `encode` made of it. The values of a class that checks them itself are left to it.

    Raises:
        ValueError: a field is unknown, missing or of another type.
        RecoupError: the class refuses a value.

    >>> from recoup.planning.problem import Link
    >>> link = Link("host", send_bytes_per_s=2.0, fetch_bytes_per_s=1.0)
    >>> decode(Link, encode(link)) == link
    True
    """
    layout = _layout(kind)  # type: ignore[arg-type]
    required = [name for name, default in layout.defaults.items() if default is MISSING]
    expect_keys(layout.what, body, layout.types, required)
    return kind(**{name: _read(layout, name, layout.types[name], item) for name, item in body.items()})


class _Layout(NamedTuple):
    """What a dataclass consists of."""

    what: str
    checks_itself: bool
    types: dict[str, Any]
    defaults: dict[str, Any]
    """By field; of a field without one, `MISSING`."""


@cache
def _layout(kind: Any) -> _Layout:
    noun = re.findall("[A-Z][a-z]*", kind.__name__)[-1].lower()
    article = "The" if noun.endswith("s") else "An" if noun[0] in "aeio" else "A"
    hints, defaults = get_type_hints(kind), {item.name: item.default for item in fields(kind)}
    types, has_own_init = {name: hints[name] for name in defaults}, not kind.__dataclass_params__.init
    if has_own_init:
        # What it takes besides its fields may be read, and is not written.
        parameters = list(signature(kind).parameters.values())
        types = {
            name: hint for name, hint in get_type_hints(kind.__init__).items() if name != "return"
        } | types
        found = {item.name: MISSING if item.default is item.empty else item.default for item in parameters}
        defaults = {name: found[name] for name in defaults}
    return _Layout(
        what=f"{article} {noun}",
        checks_itself=hasattr(kind, "__post_init__") or has_own_init,
        types=types,
        defaults=defaults,
    )


def _read(owner: _Layout, name: str, kind: Any, item: Any) -> Any:
    """A value of a field, or of a row in a field."""
    if kind in _LEAVES:
        if not owner.checks_itself:
            _expect_leaf(owner.what, name, kind, item)
        return _as_tuple(item)
    if get_origin(kind) is tuple:
        rows, [row_kind, _] = expect_list(name, item), get_args(kind)
        return tuple(_read(owner, f"{name}[{index}]", row_kind, row) for index, row in enumerate(rows))
    if NoneType in get_args(kind):
        return None if item is None else _read(owner, name, get_args(kind)[0], item)
    if issubclass(kind, Enum):
        return kind(item)
    if issubclass(kind, tuple):
        return kind(*expect_list(name, item))
    try:
        return decode(kind, item)
    except _DamageError as error:
        error.path = f".{name}{error.path}"
        raise


def _as_tuple(item: Any) -> Any:
    return tuple(map(_as_tuple, item)) if isinstance(item, list) else item


def _is_whole(item: Any) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


def _is_row_of_names(item: Any) -> bool:
    return isinstance(item, list) and all(isinstance(name, str) for name in item)


def _is_shape(item: Any) -> bool:
    match item:
        case [str(), [*sizes]]:
            return all(_is_whole(size) and size >= 0 for size in sizes)
    return False


_LEAVES: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    bool: ("a bool", lambda item: isinstance(item, bool)),
    bool | Literal["unreduced"]: (
        'a bool or "unreduced"',
        lambda item: isinstance(item, bool) or item == "unreduced",
    ),
    int: ("a int", _is_whole),
    float: ("a float", lambda item: isinstance(item, float) or _is_whole(item)),
    str: ("a str", lambda item: isinstance(item, str)),
    int | None: ("a int | None", lambda item: item is None or _is_whole(item)),
    str | None: ("a str | None", lambda item: isinstance(item, str | None)),
    tuple[str, ...]: ("a list of names", _is_row_of_names),
    tuple[str, tuple[int, ...]]: ("a name and a list of sizes", _is_shape),
}
"""Types that are read as they are, what to call each, and which values have it."""


def _expect_leaf(what: str, name: str, kind: Any, item: Any) -> None:
    wanted, fits = _LEAVES[kind]
    is_size = name.endswith("_bytes")
    if not fits(item) or (is_size and (item or 0) < 0):
        raise _DamageError(f"{what}'s {name!r} should be {wanted}{' of at least 0' * is_size}; got {item!r}.")


def expect_keys(
    what: str, body: Any, allowed: Collection[str], required: Collection[str] | None = None
) -> None:
    """An object with the allowed keys, all of which are required unless ``required`` says which are."""
    if not isinstance(body, dict):
        raise _DamageError(f"{what} should be an object; got {type(body).__name__}.")
    missing = [name for name in (allowed if required is None else required) if name not in body]
    unknown = [name for name in body if name not in allowed]
    if missing or unknown:
        parts = [f"lacks {', '.join(sorted(missing))}"] if missing else []
        parts += [f"has unknown {', '.join(sorted(unknown))}"] if unknown else []
        raise _DamageError(f"{what} {' and '.join(parts)}.")


def expect_list(what: str, body: Any) -> list[Any]:
    """A list."""
    if not isinstance(body, list):
        raise _DamageError(f"{what} should be a list; got {type(body).__name__}.")
    return body
