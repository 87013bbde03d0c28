from __future__ import annotations

import psutil
import pytest
import torch
from torch import nn

from recoup.budgets import read_budget
from recoup.devices.meter import CpuMeter, device_of, make_meter
from recoup.errors import SizeError

MODEL = nn.Linear(6, 10)


@pytest.mark.parametrize(
    ("budget", "expected"), [(4096, 4096), (0, 0), ("8GiB", 8 * 2**30), ("1.5 kB", 1500), ("12B", 12)]
)
def test_sizes(budget: int | str, expected: int) -> None:
    assert read_budget(budget, MODEL) == expected


@pytest.mark.parametrize(("text", "share"), [("80%", 0.8), ("100 %", 1), ("12.5%", 0.125), (" 1% ", 0.01)])
def test_shares_of_the_device(text: str, share: float) -> None:
    assert read_budget(text, MODEL) == int(CpuMeter().total_bytes() * share)


@pytest.mark.parametrize("text", ["0%", "0.0 %", "101%", "1000%"])
def test_shares_that_are_none(text: str) -> None:
    with pytest.raises(SizeError, match=r"lies above 0 % and at most at 100 %; got '"):
        read_budget(text, MODEL)


@pytest.mark.parametrize(
    "budget", ["", "lots", "-5%", "5 apples", "80 percent", "%", "8", -1, 0.5, None, True]
)
def test_nonsense(budget: object) -> None:
    with pytest.raises(SizeError):
        read_budget(budget, MODEL)  # type: ignore[arg-type]


def test_auto_is_what_is_free_less_a_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuMeter, "free_bytes", lambda self: 100_000)
    resident = (6 * 10 + 10) * 4 + 3 * 6 * 4
    for text in ("auto", " AUTO "):
        assert read_budget(text, MODEL, torch.zeros(3, 6)) == resident + 92_000


def test_shares_of_what_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuMeter, "free_bytes", lambda self: 0)
    monkeypatch.setattr(CpuMeter, "total_bytes", lambda self: 0)
    with pytest.raises(
        SizeError, match=r"How much memory is free cannot be read here: give bytes for budget="
    ):
        read_budget("auto", MODEL)
    with pytest.raises(SizeError, match=r"'80%' of what\? The device's memory is not known here"):
        read_budget("80%", MODEL)
    assert read_budget("2KiB", MODEL) == 2048


def test_a_system_that_tells_nothing_gives_no_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise FileNotFoundError("/proc/meminfo")

    monkeypatch.setattr(psutil, "virtual_memory", refuse)
    assert (CpuMeter().total_bytes(), CpuMeter().free_bytes()) == (0, 0)


def test_a_device_has_more_than_it_can_give() -> None:
    meter = make_meter(torch.device("cpu"))
    assert 0 < meter.free_bytes() < meter.total_bytes()


def test_the_device_of_a_step() -> None:
    assert device_of(MODEL) == torch.device("cpu")
    assert device_of(nn.Tanh(), torch.zeros(2, device="meta")) == torch.device("meta")
    mixed = nn.Linear(2, 2)
    mixed.register_buffer("nowhere", torch.zeros(2, device="meta"))
    assert device_of(mixed) == torch.device("cpu")
