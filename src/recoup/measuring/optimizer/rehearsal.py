"""Steps of a copy of an optimizer, on tensors that take no memory or little."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from torch.overrides import TorchFunctionMode

from recoup.devices.tracker import MemoryTracker
from recoup.measuring.optimizer.one_of_each_kind import copy_with, own_attributes, rehearse_few
from recoup.tensors import plain_tensors, tensors_in
from recoup.torch_private import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
    foreach_supported_types,
    local_scalar,
)

__all__ = ["rehearse_on_fakes", "rehearse_on_samples"]

# Enough for two different sizes not to be confused, and few enough to cost nothing.
_SAMPLE_SIZE = 4


def rehearse_on_fakes(
    optimizer: Optimizer, devices: frozenset[torch.device], on: torch.device | None = None
) -> tuple[int, int]:
    """The bytes of state that two steps add on these devices, and the bytes that a step needs while it runs.

    With ``on``, all tensors of these devices are taken to be on that one instead.

    Raises:
        Exception: whatever the step raises on tensors without values.
    """
    fakes = FakeTensorMode()
    moved = dict.fromkeys(devices if on is not None else (), on)

    def fake(tensor: Tensor) -> Tensor:
        plain = _single(tensor)
        if plain.device.type == "cpu" and plain.dim() == 0:
            # A counter or a learning rate, whose value the step may ask for.
            value = plain.item()
            with fakes:
                return torch.tensor(value, dtype=plain.dtype)
        with fakes:
            device = moved.get(plain.device, plain.device)
            return torch.empty_strided(plain.shape, plain.stride(), dtype=plain.dtype, device=device)

    def make(tensor: Tensor, times: int) -> Tensor:
        shape, stride = tensor.shape, tensor.stride()
        if times > 1:
            shape, stride = torch.Size((times, *shape)), (tensor.numel(), *stride)
        with fakes:
            device = moved.get(tensor.device, tensor.device)
            return torch.empty_strided(shape, stride, dtype=tensor.dtype, device=device)

    def rehearse(few: Optimizer) -> tuple[dict[Tensor, int], int] | None:
        parameters = tensors_in([group["params"] for group in few.param_groups])
        pairs: dict[Tensor, Tensor] = dict.fromkeys(parameters, nn.Parameter(torch.empty(0)))
        with _foreach_takes_fakes(pairs), fakes:
            transient_bytes = _two_steps(few, devices)
        if not few.state.keys() <= pairs.keys():
            return None
        state = {parameter: _num_bytes(few.state.get(parameter), devices) for parameter in pairs}
        return state, transient_bytes

    devices = devices if on is None else frozenset({on})
    few = rehearse_few(optimizer, make, rehearse)
    if few is not None:
        return few
    rehearsed, pairs = _copied(optimizer, fake)
    before_bytes = sum(_state_sizes(rehearsed, pairs, devices))
    with _foreach_takes_fakes(pairs), fakes:
        transient_bytes = _two_steps(rehearsed, devices)
    return sum(_state_sizes(rehearsed, pairs, devices)) - before_bytes, transient_bytes


def rehearse_on_samples(optimizer: Optimizer, devices: frozenset[torch.device]) -> tuple[int, int]:
    """As `rehearse_on_fakes`, estimated from a few elements of each tensor, which are real.

    Raises:
        RuntimeError: if processes work together, since a real step of one alone could wait for the others.
        Exception: whatever the step raises.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise RuntimeError("A real step of one process could wait for the others.")

    def sample(tensor: Tensor) -> Tensor:
        plain = _single(tensor).detach()
        return plain[tuple(slice(_SAMPLE_SIZE) for _ in plain.shape)].clone()

    rehearsed, pairs = _copied(optimizer, sample)
    before_bytes = sum(_state_sizes(rehearsed, pairs, devices))
    cuda = [device for device in devices if device.type == "cuda"]
    with torch.random.fork_rng(devices=cuda):
        transient_bytes = _two_steps(rehearsed, devices)
    missing_bytes = sum(_state_sizes(rehearsed, pairs, devices)) - before_bytes
    return missing_bytes, round(transient_bytes * _scale(pairs))


class _RehearsalTracker(MemoryTracker):
    """Counts what is made on some devices, and makes up the numbers that a step reads from fake tensors.

    A number, such as a norm, scales what follows; a truth value decides what follows, and is not made up.
    """

    def __init__(self, devices: frozenset[torch.device]) -> None:
        super().__init__()
        self._devices = devices

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        except DataDependentOutputException:
            if func is local_scalar and args[0].is_floating_point():
                return 1.0
            raise

    def _counts(self, tensor: Tensor) -> bool:
        return tensor.device in self._devices


class _Replacing(TorchFunctionMode):
    """Lets `copy.deepcopy` put another tensor in the place of each."""

    def __init__(self, replace: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._replace = replace

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.__deepcopy__:
            tensor, memo = args
            return memo.setdefault(id(tensor), self._replace(tensor))
        if func is Tensor.clone:  # how a Parameter copies itself
            return self._replace(args[0])
        return func(*args, **(kwargs or {}))


def _copied(
    optimizer: Optimizer, replace: Callable[[Tensor], Tensor]
) -> tuple[Optimizer, dict[Tensor, Tensor]]:
    """A copy without the hooks, with other tensors and gradients; and its parameters with the originals."""
    attributes = own_attributes(optimizer)
    memo: dict[int, Any] = {}
    pairs: dict[Tensor, Tensor] = {}
    for parameter in tensors_in([group["params"] for group in optimizer.param_groups]):
        if id(parameter) not in memo:
            memo[id(parameter)] = copied = _parameter(parameter, replace)
            pairs[copied] = parameter
    with _Replacing(replace):
        attributes = copy.deepcopy(attributes, memo)
    return copy_with(optimizer, attributes), pairs


def _parameter(parameter: Tensor, replace: Callable[[Tensor], Tensor]) -> Tensor:
    copied = nn.Parameter(replace(parameter), parameter.requires_grad)
    if parameter.requires_grad:
        copied.grad = replace(parameter)
    return copied


def _single(tensor: Tensor) -> Tensor:
    """The plain tensor that holds its bytes: of a sharded tensor, the shard."""
    (plain,) = plain_tensors(tensor)
    return plain


@contextmanager
def _foreach_takes_fakes(pairs: dict[Tensor, Tensor]) -> Iterator[None]:
    """Lets torch choose the implementation for fakes as it does for the originals.

    Torch takes the one over all tensors at once, whose temporaries are as large as the model, only for types on
    this list; tensor subclasses of torch's own enter it in the same way.
    """
    supported: list[Any] = foreach_supported_types
    if FakeTensor in supported or not all(type(original) in supported for original in pairs.values()):
        yield
        return
    supported.append(FakeTensor)
    try:
        yield
    finally:
        supported.remove(FakeTensor)


def _two_steps(rehearsed: Optimizer, devices: frozenset[torch.device]) -> int:
    """Makes the state, then uses it; returns the most that a step needed beyond what it left."""
    step: Any = type(rehearsed).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__  # the hooks of all optimizers are not for this one
    transient_bytes = 0
    with _RehearsalTracker(devices) as memory:
        for _ in range(2):
            memory.reset_peak()
            step(rehearsed)
            transient_bytes = max(transient_bytes, memory.peak_bytes - memory.current_bytes)
    return transient_bytes


def _num_bytes(entry: Any, devices: frozenset[torch.device]) -> int:
    return sum(
        tensor.numel() * tensor.element_size() for tensor in tensors_in(entry) if tensor.device in devices
    )


def _state_sizes(
    rehearsed: Optimizer, pairs: dict[Tensor, Tensor], devices: frozenset[torch.device]
) -> Iterator[int]:
    """The bytes of each tensor of the state at the original's size."""
    for parameter, entry in rehearsed.state.items():
        for tensor in tensors_in(entry):
            if tensor.device in devices:
                original = pairs.get(parameter)
                shape = (
                    tensor.shape if original is None else _full_shape(tensor, parameter, _single(original))
                )
                yield torch.Size(shape).numel() * tensor.element_size()


def _full_shape(tensor: Tensor, rehearsed: Tensor, original: Tensor) -> Sequence[int]:
    """The shape of a tensor of the state, had the parameter its original size.

    >>> _full_shape(torch.zeros(4, 1), torch.zeros(4, 4), torch.zeros(300, 7))
    [300, 1]
    """
    if tensor.dim() == rehearsed.dim():
        sizes = zip(tensor.shape, rehearsed.shape, original.shape, strict=True)
        return [full if size == sampled else size for size, sampled, full in sizes]
    return original.shape if tensor.numel() == rehearsed.numel() else tensor.shape


def _scale(pairs: dict[Tensor, Tensor]) -> float:
    """How much larger the originals are: all together, or the largest, as a step may work on all or on one."""
    sizes = [(rehearsed.nbytes, _single(original).nbytes) for rehearsed, original in pairs.items()]
    sampled, full = zip(*sizes, strict=True)
    return float(max(sum(full) / max(1, sum(sampled)), max(full) / max(1, *sampled)))
