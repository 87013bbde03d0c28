"""A training step on fake tensors: a copy of the model that is taken to run on some hardware."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakTensorKeyDictionary

from recoup.devices.meter import CpuMeter, Meter, Parts, Timing, gc_disabled
from recoup.devices.tracker import MemoryTracker
from recoup.errors import SampleError
from recoup.measuring.copying import copy_with_tensors
from recoup.measuring.estimate.kernels import CudaKernels
from recoup.measuring.estimate.machine import Hardware
from recoup.measuring.estimate.roofline import argument_tensors, is_free, operation_s
from recoup.measuring.estimate.workspaces import workspace_bytes
from recoup.model.caches import without_caches
from recoup.model.calls import module_names
from recoup.model.preserve import preserving
from recoup.model.replace_forward import suspended
from recoup.model.step import TrainingStep
from recoup.model.tracing import compiled_functions_off
from recoup.model.units import Units
from recoup.tensors import map_tensors
from recoup.torch_private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    UnsupportedOperatorException,
    tree_map_only,
)

__all__ = ["faked", "units_in_copy"]

_NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
_CPU = torch.device("cpu")
# Autograd reads a fake's device through the dispatcher, more often than anything else happens.
_DEVICE = torch.ops.prim.device.default


class _HardwareTracker(MemoryTracker):
    """Counts as some hardware's allocator does, with its rounding and the workspaces of its kernels."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Without compiled code, dynamo need not be disabled for each operation, which takes longer than that."""
        return False

    def __init__(self, hardware: Hardware) -> None:
        super().__init__()
        self._rounding_bytes = hardware.rounding_bytes
        self._is_gpu = hardware.device_type == "cuda"

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is _DEVICE:
            return _CPU
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self._is_gpu and (taken_bytes := workspace_bytes(func, args, result)):
            self.peak_bytes = max(self.peak_bytes, self.current_bytes + taken_bytes)
        return result

    def _taken(self, num_bytes: int) -> int:
        return -(-num_bytes // self._rounding_bytes) * self._rounding_bytes


class _Fakes:
    """Makes one fake for each tensor."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode()
        self._made = WeakTensorKeyDictionary()

    def is_ours(self, tensor: Tensor) -> bool:
        return isinstance(tensor, FakeTensor) and tensor.fake_mode is self.mode

    def fake(self, tensor: Tensor) -> Tensor:
        if self.is_ours(tensor):
            return tensor
        found: Tensor | None = self._made.get(tensor)
        if found is None:
            if tensor.layout is not torch.strided or is_lazy(tensor):
                raise SampleError(
                    "Fake tensors stand for strided tensors only; this model or sample holds"
                    f" {'an uninitialised parameter' if is_lazy(tensor) else tensor.layout}. Measure it as it is,"
                    " without hardware=."
                )
            with self.mode, torch.no_grad():
                found = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_CPU)
            if tensor.requires_grad:
                found.requires_grad_()
            self._made[tensor] = found
        return found

    def model(self, model: nn.Module) -> nn.Module:
        """A copy of a model with fake parameters and buffers. The model itself is only read."""
        memo: dict[int, Any] = {}
        with self.mode:
            for parameter in model.parameters():
                memo[id(parameter)] = nn.Parameter(self.fake(parameter).detach(), parameter.requires_grad)
        try:
            return copy_with_tensors(model, self.fake, memo)
        except SampleError:
            raise
        except Exception as error:
            raise SampleError(
                f"{type(model).__name__} cannot be copied for an estimate: {type(error).__name__}: {error}. Make it"
                " so that copy.deepcopy takes it, or measure it as it is, without hardware=."
            ) from error


class _Clock(TorchDispatchMode):
    """Adds up the estimated seconds of all operations, on device and host; replaces tensors from outside by fakes."""

    def __init__(self, fakes: _Fakes, hardware: Hardware) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fakes, self._hardware = fakes, hardware
        self.now = Timing(0.0, 0.0)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is _DEVICE:
            return _CPU
        kwargs = kwargs or {}
        if not all(map(self._fakes.is_ours, argument_tensors(args))):
            args = tree_map_only(Tensor, self._fakes.fake, args)
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": _CPU}
        result = func(*args, **kwargs)
        if not is_free(func):
            device_s, host_s = self.now
            device_s += operation_s(func, args, kwargs, result, self._hardware)
            self.now = Timing(device_s, host_s + self._hardware.host_s)
        return result


class _FakeMeter(CpuMeter):
    """Bytes of fake storages, rounded as the hardware's allocator does; seconds by the roofline."""

    is_estimate = True

    def __init__(self, hardware: Hardware, clock: _Clock) -> None:
        super().__init__()
        self.hardware = hardware
        self.rounding_bytes = hardware.rounding_bytes
        self.workspace_bytes = hardware.workspace_bytes
        self._clock = clock

    @property
    def device_name(self) -> str:
        """The hardware's name in reports."""
        return f"{self.hardware.name} (estimated)"

    def make_tracker(self) -> MemoryTracker:
        """A tracker that counts as the hardware's allocator does."""
        return _HardwareTracker(self.hardware)

    def stamp(self) -> Timing:
        """Seconds of all operations so far."""
        return self._clock.now

    def elapsed_s(self, first: Timing, second: Timing) -> float:
        """Seconds between two stamps; the slower one of device and host sets the pace."""
        return max(second.device_s - first.device_s, second.host_s - first.host_s)

    def time(self, make_run: Callable[[], Parts], *, repeats: int = 1, warm_up: int = 0) -> list[Timing]:
        """One run is enough: the same operations take the same seconds."""
        with gc_disabled():
            pairs = list(pairwise(self._stamped(make_run())))
        return [Timing(end.device_s - start.device_s, end.host_s - start.host_s) for start, end in pairs]

    def time_in_turn(
        self, runs: Sequence[Callable[[], Parts]], *, repeats: int = 1, warm_up: int = 0
    ) -> list[list[Timing]]:
        """One round is enough as well."""
        return [self.time(make_run) for make_run in runs]

    def free_bytes(self) -> int:
        """All of the hardware's memory."""
        return self.hardware.memory_bytes

    def total_bytes(self) -> int:
        """The hardware's memory."""
        return self.hardware.memory_bytes


@contextmanager
def faked(step: TrainingStep, hardware: Hardware) -> Iterator[tuple[TrainingStep, Meter]]:
    """The same step on fake tensors, to be run inside this context only; and its meter.

    Raises:
        SampleError: the step is the user's own callable, the model cannot be copied, or it asks for values.
    """
    if step.step is not None:
        raise SampleError(
            "With hardware= a copy of the model runs on fake tensors, and a step= callable would run the model itself."
            " Give sample and loss= instead."
        )
    fakes = _Fakes()
    model = fakes.model(step.model)
    sample = map_tensors(fakes.fake, step.sample)
    clock = _Clock(fakes, hardware)
    with ExitStack() as stack:
        # For an empty model: the copy may change. What its code shares with the original may not, nor random numbers.
        stack.enter_context(preserving(nn.Module(), reached=step.reached))
        stack.enter_context(compiled_functions_off())
        stack.enter_context(fakes.mode)
        stack.enter_context(clock)
        if hardware.device_type == "cuda":
            stack.enter_context(CudaKernels())
        stack.enter_context(suspended(model))
        stack.enter_context(without_caches(model))
        try:
            fake = TrainingStep(model, sample, loss=step.loss)
            fake.accumulates = step.accumulates
            yield fake, _FakeMeter(hardware, clock)
        except SampleError as error:
            if isinstance(error.__cause__, _NEEDS_VALUES):
                raise _refusal(model, error.__cause__) from error.__cause__
            raise
        except _NEEDS_VALUES as error:
            raise _refusal(model, error) from error


def units_in_copy(
    units: Units | Iterable[Units] | None, model: nn.Module, copied: nn.Module
) -> Units | Iterable[Units] | None:
    """``units=`` for a copy of the model: those that are given as modules become the copy's."""
    if units is None or isinstance(units, str) or (callable(units) and not isinstance(units, nn.Module)):
        return units
    names = module_names(model)
    entries: list[Units] = [units] if isinstance(units, nn.Module) else list(units)
    return [
        copied.get_submodule(names[entry]) if isinstance(entry, nn.Module) and entry in names else entry
        for entry in entries
    ]


def _refusal(model: nn.Module, error: BaseException) -> SampleError:
    """Names the module that reads values, which fake tensors do not have."""
    names = module_names(model)
    inside, trace = model, error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and owner in names:
            inside = owner
        trace = trace.tb_next
    where = f"{names[inside]!r} ({type(inside).__name__})" if names[inside] else type(inside).__name__
    operation = getattr(error, "func", None) or next(iter(error.args), "")
    return SampleError(
        f"{where} needs the values of its data ({operation}), which fake tensors do not have: a step whose shapes or"
        " branches depend on data cannot be estimated. Measure it on the device itself, without hardware=."
    )
