"""Numbers as people read them: seconds, shares, rates, and round values for an axis."""

from __future__ import annotations

from recoup.report.chart import round_values
from recoup.sizes import format_bytes

__all__ = ["byte_ticks", "format_rate", "format_seconds", "format_share", "second_ticks", "share_ticks"]

_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_BYTES = ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B"))


def format_seconds(seconds: float) -> str:
    """Three significant digits with a unit.

    >>> format_seconds(1.234), format_seconds(0.0301), format_seconds(4.2e-5), format_seconds(0)
    ('1.23 s', '30.1 ms', '42.0 µs', '0 s')
    """
    if seconds == 0:
        return "0 s"
    size, unit = next((one for one in _SECONDS if abs(seconds) >= 0.9995 * one[0]), _SECONDS[-1])
    value = seconds / size
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f} {unit}"


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


def _ticks(
    units: tuple[tuple[float, str], ...], low: float, high: float, most: int
) -> list[tuple[float, str]]:
    size, unit = next((one for one in units if high >= one[0]), units[-1])
    values = round_values(low / size, high / size, most=most)
    return [(value * size, f"{value:.6g} {unit}" if value else "0") for value in values]


def second_ticks(low_s: float, high_s: float, *, most: int = 6) -> list[tuple[float, str]]:
    """Round seconds between two numbers, with their texts in one unit.

    >>> second_ticks(0, 0.031)
    [(0.0, '0'), (0.01, '10 ms'), (0.02, '20 ms'), (0.03, '30 ms')]
    """
    return _ticks(_SECONDS, low_s, high_s, most)


def byte_ticks(low: float, high: float, *, most: int = 5) -> list[tuple[float, str]]:
    """Round bytes between two numbers, with their texts in one unit.

    >>> byte_ticks(0, 90 * 2**20)
    [(0.0, '0'), (20971520.0, '20 MiB'), (41943040.0, '40 MiB'), (62914560.0, '60 MiB'), (83886080.0, '80 MiB')]
    """
    return _ticks(_BYTES, low, high, most)


def share_ticks(low: float, high: float, *, most: int = 5) -> list[tuple[float, str]]:
    """Round shares between two numbers, as differences in per cent.

    >>> share_ticks(-0.03, 0.45)
    [(0.0, '0 %'), (0.1, '+10 %'), (0.2, '+20 %'), (0.3, '+30 %'), (0.4, '+40 %')]
    """
    values = round_values(low * 100, high * 100, most=most)
    return [(value / 100, f"{value:+.6g} %" if value else "0 %") for value in values]
