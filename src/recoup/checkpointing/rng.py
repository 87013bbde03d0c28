"""Random number generators: where they stood, and how to put them there again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Generator

__all__ = ["RandomState"]

_Position: TypeAlias = "torch.Tensor | tuple[int, int]"


class _Source(NamedTuple):
    """A generator as two functions."""

    read: Callable[[], _Position]
    write: Callable[[Any], Any]


class RandomState:
    """The generators that a function may draw from, as they stood before it ran.

    All generators of the process's devices are noted, so a function that makes its own tensors on a device is
    covered too. After the forward, `settle` drops those that did not move: a replay then leaves them alone,
    and a function without randomness costs nothing more.
    """

    __slots__ = ("_cpu", "_cuda_was_ready", "_others")

    def __init__(self, generators: list[Generator]) -> None:
        # The CPU's generator is always there and on the path of every call, so it is written out.
        self._cpu: torch.Tensor | None = _read_cpu()
        self._others: list[tuple[_Source, _Position]] = []
        self._cuda_was_ready = torch.cuda.is_initialized()
        if self._cuda_was_ready:
            self._note(map(_source, torch.cuda.default_generators))
        if other := _other_accelerators():
            self._note(other)
        if generators:
            self._note(map(_source, generators))

    def _note(self, sources: Iterable[_Source]) -> None:
        self._others += [(source, source.read()) for source in sources]

    def settle(self) -> bool:
        """Keeps only the generators that the forward moved; returns whether there are any."""
        if self._cpu is not None and _same(self._cpu, _read_cpu()):
            self._cpu = None
        if self._others:
            self._others = [pair for pair in self._others if not _same(pair[0].read(), pair[1])]
        if not self._cuda_was_ready and torch.cuda.is_initialized():
            # CUDA woke up inside the function: its generators began at offset 0 of the seed they have.
            for generator in torch.cuda.default_generators:
                self._others.append((_source(generator), (generator.initial_seed(), 0)))
        return self._cpu is not None or bool(self._others)

    def restore(self) -> Callable[[], None]:
        """Puts the generators where they stood before the forward; call the result to put them back."""
        then = list(self._others)
        if self._cpu is not None:
            then.append((_CPU, self._cpu))
        now = [(source, source.read()) for source, _ in then]
        _write(then)
        return partial(_write, now)

    def __len__(self) -> int:
        return (self._cpu is not None) + len(self._others)


def _write(positions: list[tuple[_Source, _Position]]) -> None:
    for source, position in positions:
        source.write(position)


def _same(left: _Position, right: _Position) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        # States are bytes on the CPU; comparing them as such is twice as fast as torch.equal.
        return left.numpy().tobytes() == right.numpy().tobytes()
    return left == right


def _source(generator: Generator) -> _Source:
    if generator.device.type == "cuda":
        return _Source(partial(_read_cuda, generator), partial(_write_cuda, generator))
    return _Source(generator.get_state, generator.set_state)


def _read_cuda(generator: Generator) -> tuple[int, int]:
    # Seed and offset say everything; the state *tensor* would cost a copy.
    return generator.initial_seed(), generator.get_offset()


def _write_cuda(generator: Generator, position: tuple[int, int]) -> None:
    generator.manual_seed(position[0])
    generator.set_offset(position[1])


@cache
def _other_accelerators() -> tuple[_Source, ...]:
    """The generators of accelerators that only offer whole states (XPU, MPS and others)."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type == "cuda":
        return ()
    module = torch.get_device_module(accelerator.type)
    if not hasattr(module, "get_rng_state"):
        return ()
    if accelerator.type == "mps":
        return (_Source(module.get_rng_state, module.set_rng_state),)
    return tuple(
        _Source(partial(module.get_rng_state, index), partial(module.set_rng_state, device=index))
        for index in range(torch.accelerator.device_count())
    )


_CPU = _source(torch.default_generator)
_read_cpu: Callable[[], torch.Tensor] = torch.default_generator.get_state
