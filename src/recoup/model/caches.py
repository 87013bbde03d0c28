"""Decoders that fill a key-value cache even while they train: a replay would fill it twice.

Models of the transformers library do so by default, and switch it off where they checkpoint themselves. We do the
same: while such a model trains, ``use_cache`` is off unless the caller says otherwise. Keys and values have another
memory layout then, and products may round differently on some processors: whoever compares says what was off.
"""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from recoup.model.replace_forward import StandIn, intercepted

__all__ = ["CachelessForward", "cached_models", "without_caches"]


def cached_models(model: nn.Module) -> list[nn.Module]:
    """The modules that would fill a cache by default; not layers, whose default is False: their model passes it."""
    return [
        module
        for module in model.modules()
        if getattr(getattr(module, "config", None), "use_cache", False)
        and (parameter := inspect.signature(module.forward).parameters.get("use_cache")) is not None
        and parameter.default is not False
    ]


class CachelessForward(StandIn):
    """Stands in for a forward that takes ``use_cache``; knows whether it has switched it off."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.has_switched = False
        self.position = list(inspect.signature(self.original).parameters).index("use_cache")

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Switches the cache off where the caller left it to the model."""
        is_given = len(args) > self.position or kwargs.get("use_cache") is not None
        if torch.is_grad_enabled() and not is_given:
            kwargs["use_cache"], self.has_switched = False, not self._is_encoder()
        return self.original(*args, **kwargs)

    def _is_encoder(self) -> bool:
        """Whether the forward itself asks whether it is a decoder, as BERT's does, and is none: it fills no cache."""
        code = getattr(inspect.unwrap(self.original), "__code__", None)
        asks = code is not None and "is_decoder" in code.co_names
        return asks and not getattr(self.module.config, "is_decoder", True)


def without_caches(model: nn.Module) -> AbstractContextManager[None]:
    """Switches caches off inside a ``with`` block."""
    return intercepted({module: CachelessForward(module) for module in cached_models(model)})
