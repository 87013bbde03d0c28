"""Tensors of a model that were computed before the step, and whose graph a backward would free.

A step that measures must not spend that graph: the user's own next step may need it. While steps are measured, modules
have the same values with a history that nobody may go through: who does could not take a second step either.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from recoup.errors import SampleError
from recoup.model.cut_graph import anchored
from recoup.tensors import graph_nodes

__all__ = ["has_graph_to_free", "hide_graphs"]


def has_graph_to_free(tensor: Tensor) -> bool:
    """Whether a tensor has a history that only one backward can go through: some operation in it has saved tensors.

    >>> weight = torch.ones(2, 3, requires_grad=True)
    >>> has_graph_to_free(weight.t()), has_graph_to_free(weight.exp())
    (False, True)
    """
    # By name: to read them would run hooks of whoever holds them.
    names = (name for node in graph_nodes(tensor) for name in dir(type(node)))
    return any(name.startswith("_raw_saved") for name in names)


def hide_graphs(models: Iterable[nn.Module]) -> None:
    """Puts stand-ins without that history in the place of buffers and attributes; others put the objects back."""
    stand_ins: dict[Tensor, Tensor] = {}
    for model in models:
        for path, module in model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):  # its dictionaries are not its own
                continue
            for what, place in (("Buffer", module._buffers), ("Attribute", vars(module))):
                for key, value in list(place.items()):
                    if type(value) is Tensor and value.layout is torch.strided and has_graph_to_free(value):
                        if value not in stand_ins:
                            name = f"{path}.{key}" if path else key
                            stand_ins[value] = _guarded(value, f"{what} {name!r} of {type(model).__name__}")
                        place[key] = stand_ins[value]


def _guarded(tensor: Tensor, what: str) -> Tensor:
    def refuse(gradients: Any) -> None:
        raise SampleError(
            f"{what} was computed with gradients before this step, so every step but the first finds its graph freed."
            " Compute it in the forward, or give the module its detach()."
        )

    stand_in: Any = anchored(tensor)[0]
    stand_in.grad_fn.register_prehook(refuse)
    return stand_in  # type: ignore[no-any-return]
