"""Real models on generated code: the budget holds, and gradients are those of the same code with everything kept."""

from __future__ import annotations

import pytest
import torch
from engines.captured_models import MODELS, SLACK, assert_equal, cuts_in, run
from real_steps import real_peak_bytes
from torch import Tensor

import recoup
from recoup.engines.eager import kept

pytestmark = [
    # The compiler looks at the gradients of what it is given.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf.*:UserWarning"),
    # Its code generator imports what torch itself calls deprecated.
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method.:DeprecationWarning"),
]

AS_KEPT = "bit-equal to the compiled step with everything kept, relative error against eager up to "


@pytest.mark.parametrize(("name", "share"), [("GPT-2", 0.25), ("Llama", 0.25), ("ViT", 0.25), ("U-Net", 0.5)])
def test_a_fit_to_a_budget_that_everything_kept_passes(name: str, share: float) -> None:
    model, sample = MODELS[name]()
    # Without generated code: measuring that would compile every cut of every kind of unit, which takes minutes.
    profile = recoup.measure(model, sample, engine="captured")
    least_bytes = recoup.minimum_budget(profile)
    budget_bytes = least_bytes + int(share * (profile.plain_bytes - least_bytes))
    fitted = recoup.fit(model, sample, budget=budget_bytes, engine="compiled", race=False)
    assert fitted.profile.is_captured
    assert not any(unit.uncaptured for unit in fitted.profile.units)
    assert cuts_in(fitted.plan)
    assert not fitted.plan.keeps_everything  # seconds decide what is recomputed by a cut, and what as a whole
    seen = fitted.verification
    assert seen is not None
    assert seen.gradients.startswith(AS_KEPT)
    assert seen.drifting == ()
    assert seen.peak_bytes <= fitted.plan.predicted_bytes <= budget_bytes < fitted.profile.plain_bytes
    peak_bytes = fitted.profile.problem.resident_bytes + real_peak_bytes(model, sample)
    assert peak_bytes == seen.peak_bytes >= fitted.plan.predicted_bytes - SLACK.get(name, 0)
    ours = run(model, sample)
    with kept(model, fitted.profile, []):
        assert_equal(ours, run(model, sample))
    eager = run(recoup.remove(model), sample)
    error = seen.gradients.removeprefix(AS_KEPT)
    if name == "GPT-2":  # it has dropout
        assert error.endswith(" (it draws other random numbers)")
    else:
        assert error == f"{largest_error(ours, eager):.2g}"


def largest_error(ours: dict[str, Tensor | None], eager: dict[str, Tensor | None]) -> float:
    """Of a parameter's gradient, as a share of its norm; of all gradients where it is zero but for rounding.

    Such are those of biases before a softmax or a normalisation.
    """
    pairs = [(ours[name], value) for name, value in eager.items() if name.startswith("gradient")]
    found = [(one.double(), other.double()) for one, other in pairs if one is not None and other is not None]
    size = float(torch.stack([other.norm() for _, other in found]).norm())
    least = 16 * torch.finfo(torch.float32).eps * size

    def error(one: Tensor, other: Tensor) -> float:
        is_zero = max(one.norm(), other.norm()) <= least
        return float((one - other).norm()) / (size if is_zero else max(float(other.norm()), least))

    return max(error(one, other) for one, other in found)
