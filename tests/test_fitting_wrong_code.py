"""Where torch's compiler generates wrong code for a cut, or such that cannot be measured, the plan does without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from engines.captured_models import assert_equal, cuts_in, run
from torch import Tensor, nn
from torch._functorch import config as caches
from torch._inductor import config

import recoup
from recoup.capture import run as capture_run
from recoup.capture.cut import Cut
from recoup.engines import is_applied
from recoup.engines.eager import kept
from recoup.errors import VerificationError
from recoup.fitting.wrong_code import without, wrong_cut
from recoup.planning import Backward, Forward, Keep, Schedule
from recoup.plans.by_hand import plan_by_hand

pytestmark = [
    # The compiler looks at the gradients of what it is given.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf.*:UserWarning"),
    # Its code generator imports what torch itself calls deprecated.
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method.:DeprecationWarning"),
]


class Block(nn.Module):
    """Whose products take so much longer than the rest that cuts which keep one of them are always worth it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(128), nn.Linear(128, 512), nn.Linear(512, 128)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def make_model() -> tuple[nn.Module, tuple[Tensor]]:
    torch.manual_seed(0)
    return Model(), (torch.randn(512, 128),)


def fit_compiled(model: nn.Module, sample: Any, budget: int | str) -> recoup.Fitted:
    return recoup.fit(model, sample, budget=budget, engine="compiled", race=False)


@pytest.fixture
def break_code(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[Cut], bool]], None]]:
    """Lets the backwards of some cuts double the first gradient that they return."""
    torch.compiler.reset()
    monkeypatch.setattr(capture_run, "_functions", {})
    compile_one = capture_run._compiled

    def break_where(is_wrong: Callable[[Cut], bool]) -> None:
        def compiled(cut: Cut, partition: Any) -> Any:
            def broken(joint: Any, inputs: Any, **given: Any) -> Any:
                forward, backward = partition(joint, inputs, **given)
                if is_wrong(cut):
                    (end,) = backward.graph.find_nodes(op="output")
                    first = next(node for node in end.args[0] if node is not None)
                    with backward.graph.inserting_before(end):
                        doubled = backward.graph.call_function(torch.ops.aten.mul.Tensor, (first, 2.0))
                    doubled.meta = dict(first.meta)
                    end.args = (tuple(doubled if node is first else node for node in end.args[0]),)
                    backward.recompile()
                return forward, backward

            return compile_one(cut, broken)

        monkeypatch.setattr(capture_run, "_compiled", compiled)

    # What is generated here must not be found by others.
    with config.patch(fx_graph_cache=False), caches.patch(enable_autograd_cache=False):
        yield break_where
    torch.compiler.reset()


def test_the_plan_does_without_cuts_whose_code_is_wrong(break_code: Callable[..., None]) -> None:
    model, sample = make_model()
    break_code(lambda cut: cut.saves is not None)
    plain_bytes = fit_compiled(model, sample, "1GB").profile.plain_bytes
    fitted = fit_compiled(model, sample, int(0.95 * plain_bytes))
    seen = fitted.verification
    assert seen is not None
    assert seen.peak_bytes <= fitted.plan.budget_bytes < plain_bytes
    assert seen.gradients.startswith("bit-equal to the compiled step with everything kept")
    wrong = [
        note for note in seen.notes if note.startswith("torch's compiler generated wrong code for 'blocks.")
    ]
    assert wrong
    assert all(note in " ".join(str(fitted).split()) for note in wrong)
    assert cuts_in(fitted.plan) <= {"compiled", "recompute, compiled"}
    ours = run(model, sample)
    with kept(model, fitted.profile, []):
        assert_equal(ours, run(model, sample))


def test_it_is_an_error_where_there_are_too_many(
    break_code: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recoup.fitting.one_fit._MOST_WRONG", 0)
    model, sample = make_model()
    break_code(lambda cut: cut.saves is not None)
    plain_bytes = fit_compiled(model, sample, "1GB").profile.plain_bytes
    recoup.remove(model)
    with pytest.raises(VerificationError, match="everything kept by more than rounding") as caught:
        fit_compiled(model, sample, int(0.95 * plain_bytes))
    assert caught.value.gradients
    assert not is_applied(model)


def test_which_cut_may_be_wrong_and_the_profile_without_it() -> None:
    model, sample = make_model()
    profile = recoup.measure(model, sample, engine="captured")
    index, recipe = next(
        (index, one)
        for index, one in enumerate(profile.units[1].recipes)
        if one.cut and one.cut.saves is not None
    )
    options = [0, index, index, 0, 0]
    forwards = [Forward(unit, keep=Keep.OPTION, option=option) for unit, option in enumerate(options)]
    backwards = [Backward(unit, option=option) for unit, option in enumerate(options)]
    plan = plan_by_hand(profile, Schedule([*forwards, *reversed(backwards)]), 2**40)
    # The last unit with a wrong gradient, or the next one that runs under a cut.
    assert wrong_cut(model, plan, ["blocks.0.up.weight", "blocks.1.norm.bias"]) == (recipe, "blocks.1")
    assert wrong_cut(model, plan, ["blocks.0.up.weight"]) == (recipe, "blocks.1")
    assert wrong_cut(model, plan, ["blocks.2.up.bias", "blocks.0.up.bias"]) == (recipe, "blocks.2")
    assert wrong_cut(model, plan, ["blocks.3.up.weight"]) is None
    # A parameter of two units counts only where no other one is wrong.
    model.blocks[3].up.weight = model.blocks[0].up.weight
    assert wrong_cut(model, plan, ["blocks.2.norm.bias", "blocks.3.up.weight"]) == (recipe, "blocks.2")
    assert wrong_cut(model, plan, ["blocks.3.up.weight"]) == (recipe, "blocks.1")
    less = without(profile, recipe)
    for unit, before in zip(less.units, profile.units, strict=True):
        assert unit.recipes == tuple(one for one in before.recipes if one != recipe)
        assert len(unit.num_stored) == len(unit.recipes) * bool(before.num_stored)
    assert [len(unit.options) for unit in less.problem.units] == [len(unit.recipes) for unit in less.units]
    assert less.plain_bytes == profile.plain_bytes


def test_code_whose_allocations_cannot_be_counted_is_not_used() -> None:
    model, sample = make_model()
    torch.compiler.reset()
    with config.patch(cpp_wrapper=True):
        fitted = fit_compiled(model, sample, "1GB")
    torch.compiler.reset()
    assert not fitted.profile.is_captured
    assert "TORCHINDUCTOR_CPP_WRAPPER" in " ".join(str(fitted).split())
