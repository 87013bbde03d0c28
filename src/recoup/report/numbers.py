"""Numbers as people read them: seconds, shares, rates, and round steps for an axis."""

from __future__ import annotations

import math

from recoup.sizes import format_bytes

__all__ = ["byte_ticks", "format_rate", "format_seconds", "format_share", "second_ticks", "share_ticks"]

_STEPS = (1, 2, 5, 10, 20)


def format_seconds(seconds: float) -> str:
    """Three significant digits with a unit.

    >>> format_seconds(1.234), format_seconds(0.0301), format_seconds(4.2e-5), format_seconds(0)
    ('1.23 s', '30.1 ms', '42.0 µs', '0 s')
    """
    if seconds == 0:
        return "0 s"
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        value = abs(seconds) * factor
        if value >= 0.9995 or unit == "µs":
            digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
            return f"{'-' * (seconds < 0)}{value:.{digits}f} {unit}"
    raise AssertionError("unreachable")


def format_share(share: float) -> str:
    """Per cent, without decimals from ten on.

    >>> format_share(0.1234), format_share(0.0123), format_share(-0.2), format_share(0.0)
    ('12 %', '1.2 %', '-20 %', '0 %')
    """
    percent = share * 100
    return "0 %" if abs(percent) < 0.05 else f"{percent:.{int(abs(percent) < 9.95)}f} %"


def format_rate(num_bytes: int, seconds: float) -> str:
    """Bytes that a millisecond buys.

    >>> format_rate(40 * 2**20, 0.002)
    '20.0 MiB/ms'
    """
    return f"{format_bytes(round(num_bytes / (seconds * 1e3)))}/ms"


def _ticks(low: float, high: float, *, most: int) -> list[float]:
    """Round values between two numbers, in steps of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / most
    if rough <= 0:
        return [low]
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in _STEPS if factor * power >= rough * (1 - 1e-9))
    return [index * step for index in range(math.ceil(low / step), math.floor(high / step + 1e-9) + 1)]


def second_ticks(low_s: float, high_s: float, *, most: int = 6) -> list[tuple[float, str]]:
    """Round seconds between two numbers, with their texts in one unit.

    >>> second_ticks(0, 0.031)
    [(0.0, '0'), (0.01, '10 ms'), (0.02, '20 ms'), (0.03, '30 ms')]
    """
    factor, unit = next(((f, u) for f, u in ((1.0, "s"), (1e3, "ms")) if high_s * f >= 1), (1e6, "µs"))
    return [
        (value / factor, f"{value:.6g} {unit}" if value else "0")
        for value in _ticks(low_s * factor, high_s * factor, most=most)
    ]


def byte_ticks(low: float, high: float, *, most: int = 5) -> list[tuple[float, str]]:
    """Round bytes between two numbers, with their texts in one unit.

    >>> byte_ticks(0, 90 * 2**20)
    [(0.0, '0'), (20971520.0, '20 MiB'), (41943040.0, '40 MiB'), (62914560.0, '60 MiB'), (83886080.0, '80 MiB')]
    """
    units = ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"))
    factor, unit = next(((f, u) for f, u in units if high >= f), (1.0, "B"))
    return [
        (value * factor, f"{value:.6g} {unit}" if value else "0")
        for value in _ticks(low / factor, high / factor, most=most)
    ]


def share_ticks(low: float, high: float, *, most: int = 5) -> list[tuple[float, str]]:
    """Round shares between two numbers, as differences in per cent.

    >>> share_ticks(-0.03, 0.45)
    [(0.0, '0 %'), (0.1, '+10 %'), (0.2, '+20 %'), (0.3, '+30 %'), (0.4, '+40 %')]
    """
    values = _ticks(low * 100, high * 100, most=most)
    return [(value / 100, f"{value:+.6g} %" if value else "0 %") for value in values]
