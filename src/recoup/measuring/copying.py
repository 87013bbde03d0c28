"""Deep copies with other tensors in the place of each tensor: fakes, or small samples."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["copy_with_tensors"]

_T = TypeVar("_T")


def copy_with_tensors(value: _T, replace: Callable[[Tensor], Tensor], memo: dict[int, Any]) -> _T:
    """`copy.deepcopy` with ``replace(tensor)`` instead of each tensor.

    Args:
        value: to copy.
        replace: gives the tensor for the copy.
        memo: copies that are made already, by the id of the original.
    """
    with _Replacing(replace):
        return copy.deepcopy(value, memo)


class _Replacing(TorchFunctionMode):
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
