"""Models that skip layers at random, such as with LayerDrop: random numbers with which they skip the fewest.

A plan for a step that skips some layers would not hold in one that does not.
"""

from __future__ import annotations

import random
import sys

import torch
from torch import nn

from recoup.model.calls import ModuleCall, class_of_module, watch_calls
from recoup.model.step import TrainingStep
from recoup.snapshot.random_state import held_random_state

__all__ = ["deepest"]

_MOST_TRIES = 32
"""Of 24 layers that are skipped in one of 10 cases, all run in one of them with a probability of 93 %."""
_NUM_FIRST = 4
"""So many runs that call the same modules mean that these are not chosen at random."""
_FIRST_SEED = 1_013_904_223
"""No seed that the numbers before may have begun with."""


def deepest(step: TrainingStep, root: ModuleCall) -> ModuleCall:
    """The calls of a step that skips the fewest layers. Runs of the step begin with its random numbers from now on.

    Args:
        step: to run.
        root: its calls with the random numbers that are drawn next.
    """
    if step.begin is not None or step.waits_in_units:
        return root
    if not step.ranks.largest(_skipped(step.model, root)):
        return root
    # All ranks try the same numbers, and so find the same ones; their own differ.
    best, all_called = root, set[frozenset[nn.Module]]()
    for number in range(_MOST_TRIES):
        _seed(_FIRST_SEED + number)
        begin = held_random_state()
        found = watch_calls(step)
        all_called.add(frozenset(_called(found)))
        if number == 0 or len(_called(found)) > len(_called(best)):
            best, step.begin = found, begin
        is_random = number < _NUM_FIRST or len(all_called) > 1
        if not is_random or not _skipped(step.model, best):
            break
    assert step.begin is not None
    step.begin()
    return best


def _called(root: ModuleCall) -> set[nn.Module]:
    return {call.module for call in root.walk()}


def _skipped(model: nn.Module, root: ModuleCall) -> bool:
    """Whether some layers of a list were not called, and others of their class were."""
    called = _called(root)
    for layers in model.modules():
        if isinstance(layers, (nn.ModuleList, nn.ModuleDict)):
            kinds = {class_of_module(layer) for layer in layers.children() if layer in called}
            if any(layer not in called and class_of_module(layer) in kinds for layer in layers.children()):
                return True
    return False


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy.random")) is not None:
        numpy.seed(seed)
