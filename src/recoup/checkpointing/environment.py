"""What surrounds a call and decides what it computes: RNG, autocast, settings, function modes."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, TypeAlias

import torch

from recoup.snapshot.random_state import RandomState
from recoup.torch_private import (
    DeviceContext,
    default_device,
    function_modes,
    get_cudnn_benchmark,
    get_cudnn_deterministic,
    get_deterministic,
    get_deterministic_warn_only,
    is_any_autocast_enabled,
    num_function_modes,
    pop_function_mode,
    push_function_mode,
    set_cudnn_benchmark,
    set_cudnn_deterministic,
)

__all__ = ["WRITABLE", "Environment", "read_settings", "write_settings"]

Settings: TypeAlias = tuple[bool, bool, bool, bool, torch.dtype, bool, int]

# Places in what `read_settings` gives. (A named tuple would cost more than all the reading.)
WRITABLE, _AUTOCAST, _MODES = slice(0, 5), 5, 6

_get_default_dtype = torch.get_default_dtype


class Environment:
    """The surroundings of a forward, to be entered again by its replay."""

    __slots__ = ("_autocast", "_modes", "_random", "_settings")

    def __init__(self, generators: list[torch.Generator], *, preserve_rng: bool) -> None:
        self._random = RandomState(generators) if preserve_rng else None
        self._settings = settings = read_settings()
        self._autocast = _read_autocast() if settings[_AUTOCAST] else None
        self._modes = function_modes() if settings[_MODES] else []

    def settle(self) -> None:
        """Drops, right after the forward, what the replay will not need."""
        if self._random is not None and not self._random.settle():
            self._random = None

    def differs(self) -> bool:
        """Whether the replay must `enter` these surroundings, or already stands in them."""
        return (
            self._random is not None
            or self._autocast is not None
            or self._settings != read_settings()
            or (bool(self._modes) and self._modes != function_modes())
        )

    def enter(self, stack: ExitStack) -> None:
        """Enters the forward's surroundings; ``stack`` leaves them again, whatever happens."""
        if self._random is not None:
            stack.callback(self._random.restore())
        now = read_settings()
        if self._settings[WRITABLE] != now[WRITABLE]:
            stack.callback(write_settings, now)
            write_settings(self._settings)
        if self._autocast is not None or now[_AUTOCAST]:
            for device, enabled, dtype, cache in self._autocast or _autocast_off():
                stack.enter_context(torch.autocast(device, dtype, enabled, cache))
        modes = function_modes()
        if modes != self._modes:
            stack.callback(_set_modes, modes, default_device.CURRENT_DEVICE)
            devices = [mode.device for mode in self._modes if isinstance(mode, DeviceContext)]
            _set_modes(self._modes, devices[-1] if devices else None)

    def describe(self) -> str:
        """Says whether random state is held."""
        if self._random is None:
            return "no RNG state"
        num_generators = len(self._random)
        return f"RNG state of {num_generators} generator{'s' * (num_generators != 1)}"


def read_settings() -> Settings:
    """All that takes no time to read and is usually the same in the replay.

    Four deterministic settings, the default dtype, whether any autocast is on, and the number of function modes (one
    of them may be a default device). The C functions: the attributes of torch.backends cost ten times as much.
    """
    return (
        get_deterministic(),
        get_deterministic_warn_only(),
        get_cudnn_deterministic(),
        get_cudnn_benchmark(),
        _get_default_dtype(),
        is_any_autocast_enabled(),
        num_function_modes(),
    )


def write_settings(settings: tuple[Any, ...]) -> None:
    """Sets what `read_settings` read, but for autocast and modes, which contexts leave by themselves."""
    deterministic, warn_only, cudnn_deterministic, cudnn_benchmark, dtype, *_ = settings
    torch.set_default_dtype(dtype)
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
    set_cudnn_deterministic(cudnn_deterministic)
    set_cudnn_benchmark(cudnn_benchmark)


def _read_autocast() -> list[tuple[str, bool, torch.dtype, bool]]:
    cache = torch.is_autocast_cache_enabled()
    return [
        (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device), cache)
        for device in _autocast_devices()
    ]


def _autocast_off() -> list[tuple[str, bool, torch.dtype, bool]]:
    return [(device, False, torch.get_autocast_dtype(device), True) for device in _autocast_devices()]


def _autocast_devices() -> list[str]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return ["cpu"] if accelerator is None else ["cpu", accelerator.type]


def _set_modes(modes: list[Any], device: Any) -> None:
    """Replaces all function modes of this thread, and the default device that goes with them."""
    while num_function_modes():
        pop_function_mode()
    for mode in modes:
        push_function_mode(mode)
    default_device.CURRENT_DEVICE = device
