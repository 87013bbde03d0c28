"""The kernels that torch chooses on a CUDA device, where it would choose others on the host.

NOTE [ Fakes stand in host memory ]
    1. Fake tensors are on the CPU, whatever the hardware: a build of torch without CUDA cannot record gradients of
       others. An estimate is thus the same on a laptop and on the GPU's own machine.
    2. Where torch chooses by device, and the choice decides what is saved, this mode chooses as for CUDA: attention,
       dropout, RMS normalisation, and the operations that autocast runs in float32.
    3. Where code names a device, the tensors stay where they are.
    4. Backwards run inside the mode too: replays are a part of them, and must choose as their forwards did.
    5. Workspaces inside a kernel are not seen, except for convolutions (workspaces.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from recoup.torch_private import efficient_attention, flash_attention, math_attention

__all__ = ["CudaKernels"]

_HOST = torch.device("cpu")
_HALF = (torch.bfloat16, torch.float16)
# The fast kernels need a last dimension that is a multiple of this.
_FLASH_MULTIPLE, _FLASH_LARGEST, _MASK_MULTIPLE = 8, 256, 8


class CudaKernels(TorchFunctionMode):
    """NOTE [ Fakes stand in host memory ], 2."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Runs a function, or its replacement for CUDA."""
        kwargs = kwargs or {}
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": _HOST}
        run = partial(self._run, func, kwargs)
        if torch.is_autocast_enabled("cuda"):
            with torch.autocast("cpu", torch.get_autocast_dtype("cuda")):
                return run(_in_float32(func, args))
        if torch.is_autocast_enabled("cpu"):
            return run(_in_float32(func, args))
        return run(args)

    def _run(self, func: Callable[..., Any], kwargs: Any, args: tuple[Any, ...]) -> Any:
        if func in _SEEN_INSIDE:
            # Torch leaves the mode while it calls this method.
            with self:
                return _without_dispatch(func)(*args, **kwargs)
        return _STAND_INS.get(func, func)(*args, **kwargs)


def _in_float32(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments in float32 for functions that autocast runs in float32 on CUDA, but not on the host."""
    return tuple(map(_float32, args)) if func in _IN_FLOAT32 else args


def _float32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in _HALF else value


@cache
def _without_dispatch(func: FunctionType) -> FunctionType:
    """A function of torch that runs its body without dispatching itself, so that a mode sees the calls inside."""
    names = [name for name in func.__globals__ if name.startswith("has_torch_function")]
    overrides = dict.fromkeys(names, lambda *_: False)
    copied = FunctionType(
        func.__code__, {**func.__globals__, **overrides}, func.__name__, func.__defaults__, func.__closure__
    )
    copied.__kwdefaults__ = func.__kwdefaults__
    return copied


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention by the kernel that torch chooses on CUDA: flash, memory-efficient, or plain products."""
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
        attn_mask = (
            attn_mask.to(dtype) if attn_mask is not None and attn_mask.is_floating_point() else attn_mask
        )
    is_dense = query.dim() == key.dim() == value.dim() == 4
    size = query.shape[-1]
    if is_dense and attn_mask is None and query.dtype in _HALF and size <= _FLASH_LARGEST:
        scale = size**-0.5 if scale is None else scale
        query, key, value = (_padded(tensor, _FLASH_MULTIPLE) for tensor in (query, key, value))
        output: Tensor = flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
        return output[..., :size] if output.shape[-1] > size else output
    if is_dense and query.shape[-3] == key.shape[-3]:
        bias = None if attn_mask is None else _bias(attn_mask, query, key)
        output = efficient_attention(query, key, value, bias, True, dropout_p, is_causal, scale=scale)[0]
        return output
    output = math_attention(
        query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )[0]
    return output


def _to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`Tensor.to` without the move: NOTE [ Fakes stand in host memory ], 3."""
    first, *others = args or (None,)
    is_device = isinstance(first, (str, torch.device, int)) and not isinstance(first, bool)
    return tensor.to(_HOST if is_device else first, *others, **kwargs) if args else tensor.to(**kwargs)


def _stay(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return tensor


def _padded(tensor: Tensor, multiple: int) -> Tensor:
    missing = -tensor.shape[-1] % multiple
    return F.pad(tensor, (0, missing)) if missing else tensor


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    length = mask.shape[-1]
    mask = _padded(mask, _MASK_MULTIPLE)[..., :length]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if training and 0 < p < 1 and not inplace:
        return torch.native_dropout(input, p, True)[0]
    return F.dropout(input, p, training, inplace)


def _rms_norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """The fused kernel saves its input and a number for each row; so does this, but for a second number."""
    return torch.native_layer_norm(input, normalized_shape, weight, None, eps or 1e-6)[0]


_SEEN_INSIDE = frozenset({F.multi_head_attention_forward, torch.autograd.grad, Tensor.backward})
_STAND_INS: dict[Any, Callable[..., Any]] = {
    F.scaled_dot_product_attention: _attention,
    Tensor.cuda: _stay,
    Tensor.to: _to,
    F.dropout: _dropout,
    torch.dropout: _dropout,
    F.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,
}
_IN_FLOAT32 = frozenset(
    {
        F.cross_entropy, F.layer_norm, F.log_softmax, F.mse_loss, F.nll_loss, F.softmax, Tensor.log_softmax,
        Tensor.softmax, Tensor.pow, Tensor.sum, torch.layer_norm, torch.log_softmax, torch.pow, torch.softmax,
        torch.sum,
    }
)  # fmt: skip
