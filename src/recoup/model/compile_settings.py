"""What a user gave to torch.compile beside the model: taken over for generated units, or left out with a warning."""

from __future__ import annotations

import json
from typing import Any
from warnings import warn

from torch import nn

from recoup.errors import RecoupWarning
from recoup.model.uncompile import compiled_code
from recoup.torch_private import CUDA_GRAPHS, compiler_settings

__all__ = ["settings_to_take_over"]

_DYNAMIC = "dynamic"


def settings_to_take_over(model: nn.Module) -> str:
    """The settings with which all that is compiled in a model was compiled, as JSON; empty for the defaults.

    A warning says what is not taken over: CUDA graphs, whose memory lies outside of the budget; ``dynamic=True``, since
    bytes are planned for the sample's sizes; settings that are no plain values, or differ between modules; other
    backends.
    """
    found: list[dict[str, Any]] = []
    left: list[str] = []
    for compiled in compiled_code(model):
        settings = compiler_settings(compiled)
        if settings is None:
            left.append("the backend of the user's, instead of which torch's own (inductor) generates code")
            continue
        if settings.pop(CUDA_GRAPHS, False):
            left.append(f"CUDA graphs ({CUDA_GRAPHS}), whose memory lies outside of the budget")
        if settings.get(_DYNAMIC):
            left.append("dynamic=True: units are compiled for the sample's sizes, and again for others")
            del settings[_DYNAMIC]
        for name in [name for name, value in settings.items() if not _is_plain(value)]:
            left.append(f"{name}, which is no plain value")
            del settings[name]
        found.append(settings)
    if any(settings != found[0] for settings in found):
        left.append("settings that differ between modules: all units are compiled with the defaults")
        found = []
    if left:
        reasons = "; ".join(dict.fromkeys(left))
        warn(f"Of what torch.compile was given, units do without: {reasons}.", RecoupWarning, stacklevel=3)
    return json.dumps(found[0], sort_keys=True) if found and found[0] else ""


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)
