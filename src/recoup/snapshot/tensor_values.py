"""Values of tensors, kept in host memory while a block of code changes them, and put back into the same tensors.

Tensors and storages are held weakly: if the block drops or replaces one, its device memory is free for the block,
and a new one with the old values takes its place.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from recoup.snapshot.places import put
from recoup.tensors import num_owners, plain_tensors
from recoup.torch_private import without_modes

__all__ = ["HeldStorage", "HeldValues", "held_gradient"]

# The tensor itself, and the Python object of its storage.
_NUM_OWNERS_OF_OWN_STORAGE = 2


class HeldValues:
    """Host copies of tensors, each storage once.

    >>> tensor = torch.zeros(2)
    >>> values = HeldValues()
    >>> restore = values.hold(tensor)
    >>> tensor = tensor.add_(1)
    >>> restore() is tensor, tensor
    (True, tensor([0., 0.]))
    """

    def __init__(self) -> None:
        self._storages: dict[int, HeldStorage] = {}
        self._restores: dict[int, Callable[[], Any]] = {}

    def hold(self, value: Any) -> Callable[[], Any]:
        """Keeps the tensors in nested containers and optimizers, and returns what puts them back.

        Containers are put back in place, with the entries they have now. Other objects are kept as they are.
        """
        # By id: an object may be reached twice, or reach itself.
        if id(value) not in self._restores:
            self._restores[id(value)] = lambda: value
            self._restores[id(value)] = self._restore_of(value)
        return self._restores[id(value)]

    def _restore_of(self, value: Any) -> Callable[[], Any]:
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, Optimizer):
            parts: Any = [vars(value)]
        elif isinstance(value, (dict, list, tuple)):
            parts = value.values() if isinstance(value, dict) else value
        else:
            parts = ()
        keys = list(value) if isinstance(value, dict) else []
        restores = [self.hold(part) for part in parts]

        def restore() -> Any:
            restored = [part() for part in restores]
            if isinstance(value, (dict, list)):
                put(value, dict(zip(keys, restored, strict=True)) if isinstance(value, dict) else restored)
            return value

        return restore

    def _tensor(self, tensor: Tensor) -> Callable[[], Any]:
        parts = [] if is_lazy(tensor) else list(plain_tensors(tensor))
        if parts and parts[0] is not tensor:
            return self._compound(tensor, parts)
        if not parts or tensor.layout is not torch.strided:
            return lambda: tensor
        storage = tensor.untyped_storage()
        if storage.device.type == "meta":
            return lambda: tensor
        if id(storage) not in self._storages:
            self._storages[id(storage)] = HeldStorage(storage)
        return _HeldTensor(tensor, self._storages[id(storage)]).restore

    def _compound(self, tensor: Tensor, parts: list[Tensor]) -> Callable[[], Any]:
        """A wrapper subclass, or a sparse tensor, which may get other parts when it is written to."""
        restore_parts = self.hold(parts)
        then = None if tensor.layout is torch.strided else tensor.detach()

        def restore() -> Tensor:
            restore_parts()
            now = [part.data_ptr() for part in plain_tensors(tensor)]
            if then is not None and now != [part.data_ptr() for part in parts]:
                tensor.data = then
            return tensor

        return restore


class HeldStorage:
    """A host copy of a storage, and the way back into it, or into a new one if it is gone."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage = weakref.ref(storage)
        self._device = storage.device
        self._host = _host_copy(storage)
        self._restored: torch.UntypedStorage | None = None

    def restore(self) -> torch.UntypedStorage:
        """Puts the values back, once."""
        if self._restored is None:
            storage = self._storage()
            if storage is None:
                storage = torch.UntypedStorage(0, device=self._device)
            _fill(storage, self._host)
            self._restored = storage
        return self._restored


class _HeldTensor:
    def __init__(self, tensor: Tensor, storage: HeldStorage) -> None:
        self._tensor = weakref.ref(tensor)
        self._storage = storage
        self._dtype = tensor.dtype
        self._layout = _layout(tensor)
        self._requires_grad = tensor.requires_grad
        self._restored: Tensor | None = None

    def restore(self) -> Tensor:
        if self._restored is None:
            storage = self._storage.restore()
            tensor = self._tensor()
            if tensor is None:
                tensor = self._over(storage).requires_grad_(self._requires_grad)
            elif not self._is_over(tensor, storage):
                tensor.data = self._over(storage)
            self._restored = tensor
        return self._restored

    def _over(self, storage: torch.UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=self._dtype, device=storage.device).set_(storage, *self._layout)

    def _is_over(self, tensor: Tensor, storage: torch.UntypedStorage) -> bool:
        now = tensor.untyped_storage(), tensor.dtype, _layout(tensor)
        return now[0] is storage and now[1:] == (self._dtype, self._layout)


def held_gradient(parameter: Tensor) -> Callable[[], None]:
    """Takes `.grad` away from a parameter and returns what gives the same tensor back.

    On an accelerator its values wait in host memory, if nothing else shares its storage.
    """
    gradient = parameter.grad
    if gradient is None or not _may_leave_device(gradient):
        parameter.grad = None
        return lambda: setattr(parameter, "grad", gradient)
    storage = gradient.untyped_storage()
    host = _host_copy(storage)
    # Nothing is taken away before the copy exists.
    parameter.grad = None
    storage.resize_(0)

    def restore() -> None:
        try:
            _fill(storage, host)
        except torch.OutOfMemoryError:
            gc.collect()  # what the block left in cycles
            _fill(storage, host)
        parameter.grad = gradient

    return restore


def _may_leave_device(gradient: Tensor) -> bool:
    if type(gradient) is not Tensor or gradient.device.type != "cuda" or gradient.layout is not torch.strided:
        return False
    storage = gradient.untyped_storage()
    # A bucket of gradients, or a view in anyone's hands, must not lose its memory.
    is_own = num_owners(storage) == _NUM_OWNERS_OF_OWN_STORAGE
    return storage.resizable() and gradient.grad_fn is None and is_own


def _layout(tensor: Tensor) -> tuple[int, torch.Size, tuple[int, ...]]:
    return int(tensor.storage_offset()), tensor.size(), tensor.stride()


def _host_copy(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    # Out of sight of trackers: on a machine without a device, host memory stands in for the device's.
    with without_modes():
        return torch.UntypedStorage(storage.nbytes(), device="cpu").copy_(storage)


def _fill(storage: torch.UntypedStorage, host: torch.UntypedStorage) -> None:
    # Through the storage, not the tensor: old graphs that saved it find the version and the values they saw.
    if storage.nbytes() != host.nbytes():
        storage.resize_(host.nbytes())
    with without_modes():
        storage.copy_(host)
