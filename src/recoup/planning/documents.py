"""Versioned JSON documents of dataclasses: one header for all, and a clear refusal of whatever is not ours."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields
from typing import Any, TypeVar

from recoup.errors import EncodingError, RecoupError

__all__ = [
    "build",
    "build_typed",
    "expect_fields",
    "expect_keys",
    "expect_list",
    "plain",
    "read_document",
    "write_document",
]

_SCALARS: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "float": (int, float),
    "int": (int,),
    "str": (str,),
    "str | None": (str, type(None)),
}

_T = TypeVar("_T")


def write_document(format_name: str, version: int, kind: str, body: object, *, indent: int | None) -> str:
    """A document: what it is, in which version, and its content under the name of its kind."""
    return json.dumps({"format": format_name, "version": version, "kind": kind, kind: body}, indent=indent)


def read_document(
    text: str, format_name: str, version: int, decoders: Mapping[str, Callable[[Any], _T]]
) -> _T:
    """Reads what `write_document` wrote, with the decoder for its kind.

    Raises:
        EncodingError: the text is not JSON, of another format or version, incomplete, or its content is damaged.
    """
    try:
        document = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise EncodingError(f"This is not JSON: {error}.") from None
    _expect_header(document, format_name, version)
    kind = document.get("kind")
    if not isinstance(kind, str) or kind not in decoders:
        raise EncodingError(f"Unknown kind {kind!r}; expected one of {', '.join(decoders)}.")
    expect_keys("The document", document, {"format", "version", "kind", kind})
    try:
        return decoders[kind](document[kind])
    except EncodingError:
        raise
    except (RecoupError, TypeError, ValueError, AttributeError, LookupError) as error:
        raise EncodingError(f"The {kind} is damaged: {error}") from error


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


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number that a problem may hold")


def plain(value: Any) -> dict[str, Any]:
    """A dataclass's fields, without those that are at their defaults."""
    items = ((item, getattr(value, item.name)) for item in fields(value))
    return {item.name: content for item, content in items if content != item.default}


def expect_keys(
    what: str, body: Any, allowed: set[str], required: set[str] | None = None
) -> Mapping[str, Any]:
    """An object with the allowed keys, all of which are required unless ``required`` says which are."""
    if not isinstance(body, dict):
        raise EncodingError(f"{what} should be an object; got {type(body).__name__}.")
    missing, unknown = (allowed if required is None else required) - set(body), set(body) - allowed
    if missing or unknown:
        parts = [f"lacks {', '.join(sorted(missing))}"] if missing else []
        parts += [f"has unknown {', '.join(sorted(unknown))}"] if unknown else []
        raise EncodingError(f"{what} {' and '.join(parts)}.")
    return body


def expect_list(what: str, body: Any) -> list[Any]:
    """A list."""
    if not isinstance(body, list):
        raise EncodingError(f"{what} should be a list; got {type(body).__name__}.")
    return body


def build(kind: type[_T], body: Any, **nested: Any) -> _T:
    """Makes a dataclass from its fields; lists become tuples, missing fields their defaults."""
    names = {item.name for item in fields(kind)}  # type: ignore[arg-type]
    expect_keys(f"A {kind.__name__.lower()}", body, names, set())
    content = {name: tuple(item) if isinstance(item, list) else item for name, item in body.items()}
    return kind(**{**content, **nested})


def expect_fields(what: str, kind: type[Any], body: Any) -> None:
    """An object with a dataclass's fields, of which those with defaults may be left out."""
    names = {item.name for item in fields(kind)}
    expect_keys(what, body, names, {item.name for item in fields(kind) if _is_required(item)})


def _is_required(item: Field[Any]) -> bool:
    return item.default is MISSING and item.default_factory is MISSING


def build_typed(what: str, kind: type[_T], body: Any, **nested: Any) -> _T:
    """Makes a dataclass from its fields, of which the plain ones must be of the type that they are declared with."""
    expect_fields(what, kind, body)
    for item in fields(kind):  # type: ignore[arg-type]
        expected = _SCALARS.get(str(item.type))
        if expected is None or item.name not in body or item.name in nested:
            continue
        value = body[item.name]
        fits = isinstance(value, expected) and isinstance(value, bool) == (expected == (bool,))
        if not fits or (item.name.endswith("_bytes") and value < 0):
            least = " of at least 0" if item.name.endswith("_bytes") else ""
            raise EncodingError(f"{what}'s {item.name!r} should be a {item.type}{least}; got {value!r}.")
    return build(kind, body, **nested)
