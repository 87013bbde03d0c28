"""Random number generators: where they stood, and how to put them there again."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cache, partial
from typing import Any, TypeAlias

import torch
from torch import Generator, Tensor

from recoup.snapshot.places import Accessor, Snapshot
from recoup.torch_private import WithoutDispatch, WithoutTransforms, current_transform, num_dispatch_modes

__all__ = ["RandomState", "held_random_state"]

_Position: TypeAlias = "bytes | tuple[int, int]"
"""A state as bytes, which compare fast and which no mode can take hold of; or a CUDA generator's seed and offset."""


class RandomState:
    """The generators that a function may draw from, as they stood before it ran.

    All generators of the process's devices are noted, so a function that makes its own tensors on a device is
    covered too. After the forward, `settle` drops those that did not move: a replay then leaves them alone,
    and a function without randomness costs nothing more.
    """

    __slots__ = ("_cuda_was_ready", "_positions")

    def __init__(self, generators: list[Generator]) -> None:
        self._positions: list[tuple[Accessor, _Position]] = [(_CPU, _CPU.read())]
        self._cuda_was_ready = torch.cuda.is_initialized()
        if self._cuda_was_ready:
            self._note(map(_source, torch.cuda.default_generators))
        if others := _other_accelerators():
            self._note(others)
        if generators:
            self._note(map(_source, generators))

    def _note(self, sources: Iterable[Accessor]) -> None:
        self._positions += [(source, source.read()) for source in sources]

    def settle(self) -> bool:
        """Keeps only the generators that the forward moved; returns whether there are any."""
        self._positions = [(source, then) for source, then in self._positions if source.read() != then]
        if not self._cuda_was_ready and torch.cuda.is_initialized():
            # CUDA woke up inside the function: its generators began at offset 0 of the seed they have.
            for generator in torch.cuda.default_generators:
                self._positions.append((_source(generator), (generator.initial_seed(), 0)))
        return bool(self._positions)

    def restore(self) -> Callable[[], None]:
        """Puts the generators where they stood before the forward; call the result to put them back."""
        now = [(source, source.read()) for source, _ in self._positions]
        _write_all(self._positions)
        return partial(_write_all, now)

    def __len__(self) -> int:
        return len(self._positions)


def _write_all(positions: list[tuple[Accessor, _Position]]) -> None:
    for source, position in positions:
        source.write(position)


def _source(generator: Generator) -> Accessor:
    if generator.device.type == "cuda":
        # Seed and offset say everything; the state *tensor* would cost a copy.
        return Accessor(partial(_read_cuda, generator), partial(_write_cuda, generator))
    return Accessor(partial(_read_state, generator.get_state), partial(_write_state, generator.set_state))


def _read_cuda(generator: Generator) -> tuple[int, int]:
    return generator.initial_seed(), generator.get_offset()


def _write_cuda(generator: Generator, position: tuple[int, int]) -> None:
    generator.manual_seed(position[0])
    generator.set_offset(position[1])


def _read_state(get_state: Callable[[], Tensor]) -> bytes:
    with _without_modes():
        return get_state().numpy().tobytes()


def _write_state(set_state: Callable[[Tensor], Any], state: bytes) -> None:
    with _without_modes():
        set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _without_modes() -> AbstractContextManager[Any]:
    """Fake tensors, trackers and function transforms have no business with a generator's state."""
    if not num_dispatch_modes() and current_transform() is None:
        return nullcontext()
    stack = ExitStack()
    stack.enter_context(WithoutDispatch())
    stack.enter_context(WithoutTransforms())
    return stack


def _set_state(module: Any, place: tuple[Any, ...], state: Tensor) -> None:
    module.set_rng_state(state, *place)


@cache
def _other_accelerators() -> tuple[Accessor, ...]:
    """The generators of accelerators that only offer whole states (XPU, MPS and others)."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type == "cuda":
        return ()
    module = torch.get_device_module(accelerator.type)
    if not hasattr(module, "get_rng_state"):
        return ()
    places: list[tuple[Any, ...]] = [(index,) for index in range(torch.accelerator.device_count())]
    if accelerator.type == "mps":
        places = [()]
    return tuple(
        Accessor(
            partial(_read_state, partial(module.get_rng_state, *place)),
            partial(_write_state, partial(_set_state, module, place)),
        )
        for place in places
    )


_get_cpu_state = torch.default_generator.get_state


def _read_cpu() -> bytes:
    # On the path of every call, so it is written out.
    if num_dispatch_modes() or current_transform() is not None:
        return _read_state(_get_cpu_state)
    return _get_cpu_state().numpy().tobytes()


_CPU = Accessor(_read_cpu, partial(_write_state, torch.default_generator.set_state))


def held_random_state() -> Callable[[], None]:
    """Puts the random state of Python, NumPy and torch back to what it is now, as often as it is called."""
    snapshot = Snapshot()
    snapshot.add(Accessor(random.getstate, random.setstate))
    if (numpy := sys.modules.get("numpy.random")) is not None:
        snapshot.add(Accessor(numpy.get_state, numpy.set_state))
    # A CUDA device that was not used yet has drawn nothing.
    cuda = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    for source in (_CPU, *map(_source, cuda), *_other_accelerators()):
        snapshot.add(source)
    return snapshot.put_back
