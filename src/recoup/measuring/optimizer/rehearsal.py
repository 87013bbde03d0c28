"""Two steps of a copy of an optimizer, on tensors that take no memory or little."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from recoup.devices.tracker import MemoryTracker
from recoup.measuring.copying import copy_with_tensors
from recoup.measuring.optimizer.one_of_each_kind import rehearse_few
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
    """The bytes of state that two steps add on these devices, and the scratch of a step.

    With ``on``, all tensors of these devices are taken to be on that one instead.

    Raises:
        Exception: whatever the step raises on tensors without values.
    """
    mode = FakeTensorMode()
    moved = dict.fromkeys(devices if on is not None else (), on)
    devices = devices if on is None else frozenset({on})

    def fake(tensor: Tensor, times: int = 1) -> Tensor:
        plain = _single(tensor)
        shape, stride = plain.shape, plain.stride()
        if times > 1:
            shape, stride = torch.Size((times, *shape)), (plain.numel(), *stride)
        elif plain.device.type == "cpu" and plain.dim() == 0:
            # A counter or a learning rate, whose value the step may read.
            value = plain.item()
            with mode:
                return torch.tensor(value, dtype=plain.dtype)
        with mode:
            device = moved.get(plain.device, plain.device)
            return torch.empty_strided(shape, stride, dtype=plain.dtype, device=device)

    def rehearse_some(parameters: Sequence[Tensor]) -> tuple[dict[Tensor, int], int] | None:
        group = {**optimizer.param_groups[0], "params": parameters}
        memo = {id(parameter): parameter for parameter in parameters}
        copied = _copied(optimizer, fake, memo, param_groups=[group])
        with _foreach_takes_fakes(()), mode:
            scratch_bytes = _two_steps(copied, devices)
        sizes = _state_bytes(copied, {}, devices)
        if not sizes.keys() <= set(parameters):
            return None
        return {parameter: sizes.get(parameter, 0) for parameter in parameters}, scratch_bytes

    few = rehearse_few(optimizer, fake, rehearse_some)
    if few is not None:
        return few
    copied, originals = _copied_whole(optimizer, fake)
    before_bytes = sum(_state_bytes(copied, originals, devices).values())
    with _foreach_takes_fakes(originals.values()), mode:
        scratch_bytes = _two_steps(copied, devices)
    return sum(_state_bytes(copied, originals, devices).values()) - before_bytes, scratch_bytes


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

    copied, originals = _copied_whole(optimizer, sample)
    before_bytes = sum(_state_bytes(copied, originals, devices).values())
    cuda = [device for device in devices if device.type == "cuda"]
    with torch.random.fork_rng(devices=cuda):
        scratch_bytes = _two_steps(copied, devices)
    missing_bytes = sum(_state_bytes(copied, originals, devices).values()) - before_bytes
    return missing_bytes, round(scratch_bytes * _scale(originals))


def _copied_whole(
    optimizer: Optimizer, replace: Callable[[Tensor], Tensor]
) -> tuple[Optimizer, dict[Tensor, Tensor]]:
    """A copy with other tensors and gradients; and its parameters with the originals."""
    memo: dict[int, Any] = {}
    originals: dict[Tensor, Tensor] = {}
    for original in tensors_in([group["params"] for group in optimizer.param_groups]):
        parameter = memo[id(original)] = nn.Parameter(replace(original), original.requires_grad)
        if original.requires_grad:
            parameter.grad = replace(original)
        originals[parameter] = original
    return _copied(optimizer, replace, memo), originals


def _copied(
    optimizer: Optimizer, replace: Callable[[Tensor], Tensor], memo: dict[int, Any], **changed: Any
) -> Optimizer:
    """A copy without the hooks, and without bound methods set on the instance, as learning rate schedulers do.

    Not by way of `Optimizer.__setstate__`, which patches the class itself.
    """
    hooks: dict[str, Any] = {n: OrderedDict() for n in vars(optimizer) if n.startswith("_optimizer_")}
    attributes = {
        name: value
        for name, value in vars(optimizer).items()
        if name not in hooks and not callable(getattr(type(optimizer), name, None))
    }
    made: Optimizer = object.__new__(type(optimizer))
    made.__dict__.update(hooks | copy_with_tensors({**attributes, **changed}, replace, memo))
    made.defaults.setdefault("differentiable", False)
    return made


def _single(tensor: Tensor) -> Tensor:
    """The plain tensor that holds its bytes: of a sharded tensor, the shard."""
    (plain,) = plain_tensors(tensor)
    return plain


@contextmanager
def _foreach_takes_fakes(originals: Iterable[Tensor]) -> Iterator[None]:
    """Lets torch choose the implementation for fakes as for the originals.

    The one over all tensors at once, whose scratch is as large as the model, is chosen only for the types on this list;
    tensor subclasses of torch's own are added to it in the same way.
    """
    supported: list[Any] = foreach_supported_types
    if FakeTensor in supported or not all(type(original) in supported for original in originals):
        yield
        return
    supported.append(FakeTensor)
    try:
        yield
    finally:
        supported.remove(FakeTensor)


class _RehearsalTracker(MemoryTracker):
    """Counts storages on some devices, and makes up the numbers that a step reads from fake tensors.

    A number, such as a norm, scales what follows. A truth value decides what follows, and is not made up.
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


def _two_steps(optimizer: Optimizer, devices: frozenset[torch.device]) -> int:
    """A step that makes the state, and one that uses it; returns the scratch of a step."""
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__  # without the hooks of all optimizers
    scratch_bytes = 0
    with _RehearsalTracker(devices) as memory:
        for _ in range(2):
            memory.reset_peak()
            step(optimizer)
            scratch_bytes = max(scratch_bytes, memory.peak_bytes - memory.current_bytes)
    return scratch_bytes


def _state_bytes(
    optimizer: Optimizer, originals: Mapping[Tensor, Tensor], devices: frozenset[torch.device]
) -> dict[Any, int]:
    """Bytes of the state of each parameter, had it the size of its original."""

    def num_bytes(tensor: Tensor, parameter: Any) -> int:
        if parameter not in originals:
            return tensor.nbytes
        shape = _full_shape(tensor, parameter, _single(originals[parameter]))
        return torch.Size(shape).numel() * tensor.element_size()

    return {
        parameter: sum(num_bytes(t, parameter) for t in tensors_in(entry) if t.device in devices)
        for parameter, entry in optimizer.state.items()
    }


def _full_shape(tensor: Tensor, rehearsed: Tensor, original: Tensor) -> Sequence[int]:
    """The shape of a tensor of the state, had the parameter its original size.

    >>> _full_shape(torch.zeros(4, 1), torch.zeros(4, 4), torch.zeros(300, 7))
    [300, 1]
    """
    if tensor.dim() == rehearsed.dim():
        sizes = zip(tensor.shape, rehearsed.shape, original.shape, strict=True)
        return [full if size == sampled else size for size, sampled, full in sizes]
    return original.shape if tensor.numel() == rehearsed.numel() else tensor.shape


def _scale(originals: Mapping[Tensor, Tensor]) -> float:
    """How much larger the originals are: all together, or the largest, as a step may take all at once or one by one."""
    sizes = [(sampled.nbytes, _single(original).nbytes) for sampled, original in originals.items()]
    sampled, full = zip(*sizes, strict=True)
    return float(max(sum(full) / max(1, sum(sampled)), max(full) / max(1, *sampled)))
