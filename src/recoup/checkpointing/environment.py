"""What surrounds a call and decides what it computes: RNG, autocast, deterministic settings, default device."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from recoup.checkpointing.rng import RandomState

__all__ = ["Environment"]


class Environment:
    """The surroundings of a forward, to be entered again by its replay."""

    __slots__ = ("_autocast", "_default_device", "_random", "_settings")

    def __init__(self, generators: list[torch.Generator], *, preserve_rng: bool) -> None:
        self._random = RandomState(generators) if preserve_rng else None
        self._settings = settings = _read_settings()
        self._autocast = _read_autocast() if settings[4] else None
        self._default_device = _read_default_device() if settings[5] else None

    def settle(self) -> None:
        """Drops, right after the forward, what the replay will not need."""
        if self._random is not None and not self._random.settle():
            self._random = None

    def differs(self) -> bool:
        """Whether the replay must `enter` these surroundings, or already stands in them."""
        return (
            self._random is not None
            or self._autocast is not None
            or self._default_device is not None
            or self._settings != _read_settings()
        )

    def enter(self, stack: ExitStack) -> None:
        """Enters the forward's surroundings; ``stack`` leaves them again, whatever happens."""
        if self._random is not None:
            stack.callback(self._random.restore())
        now = _read_settings()
        if self._settings[:4] != now[:4]:
            stack.callback(_set_determinism, *now[:4])
            _set_determinism(*self._settings[:4])
        if self._autocast is not None or now[4]:
            for device, enabled, dtype, cache in self._autocast or _autocast_off():
                stack.enter_context(torch.autocast(device, dtype, enabled, cache))
        if self._default_device is not None:
            stack.enter_context(DeviceContext(self._default_device))

    def describe(self) -> str:
        """Says whether random state is held."""
        return "no RNG state" if self._random is None else f"RNG state of {len(self._random)} generators"


def _read_settings() -> tuple[bool, bool, bool, bool, bool, int]:
    """All that takes no time to read and is usually the same in the replay.

    Four deterministic settings, whether any autocast is on, and the number of function modes (one of them may
    be a default device). The C functions: the attributes of torch.backends cost ten times as much.
    """
    return (
        torch._C._get_deterministic_algorithms(),
        torch._C._get_deterministic_algorithms_warn_only(),
        torch._C._get_cudnn_deterministic(),
        torch._C._get_cudnn_benchmark(),
        torch._C._is_any_autocast_enabled(),
        torch._C._len_torch_function_stack(),
    )


def _set_determinism(deterministic: bool, warn_only: bool, cudnn_deterministic: bool, cudnn_benchmark: bool) -> None:
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
    torch._C._set_cudnn_deterministic(cudnn_deterministic)
    torch._C._set_cudnn_benchmark(cudnn_benchmark)


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


def _read_default_device() -> torch.device | None:
    modes = [mode for mode in _get_current_function_mode_stack() if isinstance(mode, DeviceContext)]
    return modes[-1].device if modes else None
