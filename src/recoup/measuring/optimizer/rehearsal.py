"""A few steps of a copy of an optimizer, on tensors that take no memory or little."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from recoup.devices.tracker import MemoryTracker
from recoup.measuring.copying import copy_with_tensors
from recoup.measuring.optimizer.one_of_each_kind import rehearse_few
from recoup.model.optimizer_state import parameters_of, state_storages, with_optimizers_inside
from recoup.model.tracing import compiled_functions_off
from recoup.tensors import plain_tensors, storages, tensors_in
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
_NUMBER_BYTES = 8
_NUM_STEPS, _NUM_WRAPPER_STEPS = 2, 10
"""The first makes the state, the second uses it; but Lookahead, a wrapper, makes its own in the fifth or sixth."""


def rehearse_on_fakes(
    optimizer: Optimizer, devices: frozenset[torch.device], on: torch.device | None = None
) -> tuple[int, int]:
    """The bytes of state that steps add on these devices, and the scratch of a step.

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
            scratch_bytes, made = _steps(copied, devices)
        sizes = _state_bytes(copied, devices)
        is_all = sum(sizes.values()) == _held_bytes(copied, {}, devices, made)
        if not is_all or not sizes.keys() <= set(parameters):
            return None
        return {parameter: sizes.get(parameter, 0) for parameter in parameters}, scratch_bytes

    few = rehearse_few(optimizer, fake, rehearse_some)
    if few is not None:
        return few
    copied, originals = _copied_whole(optimizer, fake)
    before_bytes = _held_bytes(copied, {}, devices)
    with _foreach_takes_fakes(originals.values()), mode:
        scratch_bytes, made = _steps(copied, devices)
    return _held_bytes(copied, {}, devices, made) - before_bytes, scratch_bytes


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
    before_bytes = _held_bytes(copied, originals, devices)
    cuda = [device for device in devices if device.type == "cuda"]
    with torch.random.fork_rng(devices=cuda):
        scratch_bytes, made = _steps(copied, devices)
    missing_bytes = _held_bytes(copied, originals, devices, made) - before_bytes
    return missing_bytes, round(scratch_bytes * _scale(originals))


def _copied_whole(
    optimizer: Optimizer, replace: Callable[[Tensor], Tensor]
) -> tuple[Optimizer, dict[Tensor, Tensor]]:
    """A copy with other tensors and gradients; and its parameters with the originals."""
    memo: dict[int, Any] = {}
    originals: dict[Tensor, Tensor] = {}
    for original in parameters_of(optimizer):
        parameter = memo[id(original)] = nn.Parameter(replace(original), original.requires_grad)
        if original.requires_grad:
            parameter.grad = replace(original)
        originals[parameter] = original
    return _copied(optimizer, replace, memo), originals


def _copied(
    optimizer: Optimizer, replace: Callable[[Tensor], Tensor], memo: dict[int, Any], **changed: Any
) -> Optimizer:
    """A copy without the hooks, and without bound methods set on the instance, as learning rate schedulers do.

    Optimizers inside it are copied likewise. Not by way of `Optimizer.__setstate__`, which patches the class itself.
    """
    copies: dict[Optimizer, Optimizer] = {}
    for one in with_optimizers_inside(optimizer):
        copies[one] = memo[id(one)] = object.__new__(type(one))
    for one, made in copies.items():
        hooks: dict[str, Any] = {n: OrderedDict() for n in vars(one) if n.startswith("_optimizer_")}
        attributes = {
            name: value
            for name, value in vars(one).items()
            if name not in hooks and not callable(getattr(type(one), name, None))
        }
        more = changed if one is optimizer else {}
        made.__dict__.update(hooks | copy_with_tensors({**attributes, **more}, replace, memo))
        made.defaults.setdefault("differentiable", False)
        if getattr(type(one).step, "hooked", False):
            # Without the hooks of all optimizers.
            made.__dict__["step"] = MethodType(type(one).step.__wrapped__, made)  # type: ignore[attr-defined]
    return copies[optimizer]


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


def _steps(optimizer: Optimizer, devices: frozenset[torch.device]) -> tuple[int, list[torch.UntypedStorage]]:
    """Steps that make the state and use it; returns the scratch of a step, and what they allocated and still hold."""
    scratch_bytes = 0
    is_wrapper = len(with_optimizers_inside(optimizer)) > 1
    with compiled_functions_off(), _RehearsalTracker(devices) as memory:
        for _ in range(_NUM_WRAPPER_STEPS if is_wrapper else _NUM_STEPS):
            memory.reset_peak()
            optimizer.step()
            scratch_bytes = max(scratch_bytes, memory.peak_bytes - memory.current_bytes)
    return scratch_bytes, memory.living()


def _held_bytes(
    optimizer: Optimizer,
    originals: Mapping[Tensor, Tensor],
    devices: frozenset[torch.device],
    made: Iterable[torch.UntypedStorage] = (),
) -> int:
    """Bytes of all of its state, had the parameters the sizes of their originals.

    Args:
        optimizer: a copy, with parameters of any size.
        originals: by parameter; none where sizes are those of the originals.
        devices: that count.
        made: what its steps have allocated, and is still held.
    """
    held = state_storages(optimizer, devices, made)
    if not originals:
        return sum(storage.nbytes() for storage in held.values())
    sampled_bytes = sum(parameter.nbytes for parameter in originals)
    scale = sum(_single(original).nbytes for original in originals.values()) / max(1, sampled_bytes)
    # What belongs to no single parameter is taken to be as large as parameters are; numbers are not.
    sizes = {
        key: storage.nbytes() * (scale if storage.nbytes() > _NUMBER_BYTES else 1.0)
        for key, storage in held.items()
    }
    for one in with_optimizers_inside(optimizer):
        for parameter, entry in one.state.items():
            if parameter in originals:
                for tensor in tensors_in(entry):
                    shape = _full_shape(tensor, parameter, _single(originals[parameter]))
                    full_bytes = torch.Size(shape).numel() * tensor.element_size()
                    sizes |= {id(part): full_bytes for part in storages(tensor) if id(part) in sizes}
    return round(sum(sizes.values()))


def _state_bytes(optimizer: Optimizer, devices: frozenset[torch.device]) -> dict[Any, int]:
    """Bytes of the state of each parameter."""
    return {
        parameter: sum(tensor.nbytes for tensor in tensors_in(entry) if tensor.device in devices)
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
