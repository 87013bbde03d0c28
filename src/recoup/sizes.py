"""Byte sizes as people write them: ``"8GiB"`` and back."""

from __future__ import annotations

import re

from recoup.errors import SizeError

__all__ = ["format_bytes", "parse_bytes"]

_FACTORS = {
    "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_UNITS = ("KiB", "MiB", "GiB", "TiB")
_MOST_BYTES = 2**63 - 1
_PATTERN = re.compile(r"\s*(\d{1,40}(?:\.\d{1,40})?)\s*([A-Za-z]+)\s*")


def parse_bytes(size: int | str) -> int:
    """Reads a size in bytes, or text such as ``"8GiB"``, ``"1.5 MiB"`` or ``"500MB"``.

    Fractions of a byte are rounded down, so that a limit never grows by being read.

    Raises:
        SizeError: if it is negative, more than 2**63 - 1 bytes, has no unit, or is not a size.

    >>> parse_bytes("8GiB")
    8589934592
    >>> parse_bytes("1.5 kB")
    1500
    >>> parse_bytes(4096)
    4096
    """
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        raise SizeError(f"A size is a number of bytes or text such as '8GiB'; got {size!r}.")
    if isinstance(size, int):
        if size < 0:
            raise SizeError(f"A size cannot be negative; got {size} bytes.")
        return _limited(size)
    match = _PATTERN.fullmatch(size)
    factor = _FACTORS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise SizeError(
            f"Cannot read {size!r} as a size. Write a number and a unit: '512B', '64MiB', '8GiB', '8GB'."
        )
    whole, _, fraction = match[1].partition(".")
    denominator: int = 10 ** len(fraction)
    return _limited(int(whole + fraction) * factor // denominator)


def _limited(size: int) -> int:
    if size > _MOST_BYTES:
        raise SizeError(
            f"A size is at most 2**63 - 1 bytes ({format_bytes(_MOST_BYTES)}); give a smaller one."
        )
    return size


def format_bytes(num_bytes: int) -> str:
    """Writes a size for people, in binary units with three significant digits.

    >>> format_bytes(96), format_bytes(1536), format_bytes(8589934592)
    ('96 B', '1.50 KiB', '8.00 GiB')
    """
    sign, size = ("-", -num_bytes) if num_bytes < 0 else ("", num_bytes)
    if size < 1024:
        return f"{sign}{size} B"
    exponent = 1
    # Three digits: 999.5 KiB would print as four, and belongs to the next unit.
    while size / 1024**exponent >= 999.5 and exponent < len(_UNITS):
        exponent += 1
    value = size / 1024**exponent
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{sign}{value:.{digits}f} {_UNITS[exponent - 1]}"
