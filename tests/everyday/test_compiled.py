"""Models compiled with torch's own backend are planned; other compiled code is refused before anything runs."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from everyday.subjects import Classifier, budget_for, examples, loss_of_examples
from torch import Tensor, nn
from torch.nn import functional as F

import recoup
from recoup.engines import is_applied
from recoup.errors import BudgetError, RecoupWarning, SampleError
from recoup.fitting import engines_for
from recoup.model.compile_settings import settings_to_take_over

# The compiler looks at the gradients of what it is given.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf.*:UserWarning"
)


class Graphs:
    """A backend that counts what it compiles and how often that runs."""

    def __init__(self) -> None:
        self.num_compiled = self.num_runs = 0

    def __call__(self, module: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self.num_compiled += 1

        def run(*args: Any) -> Any:
            self.num_runs += 1
            return module.forward(*args)

        return run


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def whole(model: Classifier, graphs: Graphs) -> nn.Module:
    return torch.compile(model, backend=graphs)


def in_place(model: Classifier, graphs: Graphs) -> nn.Module:
    model.compile(backend=graphs)
    return model


def blocks(model: Classifier, graphs: Graphs) -> nn.Module:
    for block in model.blocks:
        block.compile(backend=graphs)
    return model


def wrapped_blocks(model: Classifier, graphs: Graphs) -> nn.Module:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend=graphs)
    return model


def forwards(model: Classifier, graphs: Graphs) -> nn.Module:
    """``block.forward = torch.compile(block.forward)``, as many scripts do."""
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend=graphs)
    return model


KINDS = [whole, in_place, blocks, wrapped_blocks, forwards]


@pytest.mark.parametrize(
    ("kind", "entry"), [*((kind, "fit") for kind in KINDS), (blocks, "measure"), (blocks, "audit")]
)
def test_refused_and_still_compiled(kind: Callable[..., nn.Module], entry: str) -> None:
    graphs, batch = Graphs(), examples()
    model = kind(Classifier(num_blocks=3), graphs)
    loss_of_examples(model, batch).backward()
    before = (graphs.num_compiled, graphs.num_runs)
    assert before[0] > 0
    seen: list[int] = []
    handle = model.register_forward_pre_hook(lambda module, args: seen.append(1))
    options: dict[str, Any] = {"loss": nn.CrossEntropyLoss()} | ({"budget": "1GiB"} if entry == "fit" else {})
    with pytest.raises(SampleError, match=r"compiled.*before torch\.compile"):
        getattr(recoup, entry)(model, batch, **options)
    handle.remove()
    assert seen == []
    assert (graphs.num_compiled, graphs.num_runs) == before
    # As before: no new graphs, and the old ones run.
    loss_of_examples(model, batch).backward()
    assert graphs.num_compiled == before[0]
    assert graphs.num_runs == 2 * before[1]


def test_verify_refuses_too() -> None:
    graphs, batch = Graphs(), examples()
    model = Classifier(num_blocks=3)
    plan = recoup.plan(recoup.measure(model, batch, loss=nn.CrossEntropyLoss()), "1GiB")
    blocks(model, graphs)
    with pytest.raises(SampleError, match="compiled"):
        recoup.verify(model, plan, batch, loss=nn.CrossEntropyLoss())
    assert graphs.num_compiled == 0


def test_never_run_yet() -> None:
    """Compiled, but not called before: nothing is compiled by the refusal."""
    graphs = Graphs()
    model = whole(Classifier(), graphs)
    with pytest.raises(SampleError, match="compiled"):
        recoup.fit(model, examples(), budget="1GiB", loss=nn.CrossEntropyLoss())
    assert graphs.num_compiled == 0


def test_the_module_inside_may_be_fitted() -> None:
    """The other half of the advice: what torch.compile was given is not compiled itself."""
    graphs, batch = Graphs(), examples()
    model = Classifier()
    compiled = torch.compile(model, backend=graphs)
    budget = budget_for(model, batch)
    recoup.fit(model, batch, budget=budget, loss=nn.CrossEntropyLoss())
    assert is_applied(model)
    assert compiled._orig_mod is model
    assert graphs.num_compiled == 0


def test_other_compiled_code_in_the_process_is_left_alone() -> None:
    """A model that has nothing to do with the one that is fitted keeps its graphs and runs them."""
    graphs, batch = Graphs(), examples()
    other = torch.compile(Classifier(), backend=graphs)
    loss_of_examples(other, batch).backward()
    before = (graphs.num_compiled, graphs.num_runs)
    model = Classifier()
    budget = budget_for(model, batch)
    recoup.fit(model, batch, budget=budget, loss=nn.CrossEntropyLoss())
    loss_of_examples(model, batch).backward()
    loss_of_examples(other, batch).backward()
    assert (graphs.num_compiled, graphs.num_runs) == (before[0], 2 * before[1])


@pytest.mark.parametrize("kind", [whole, in_place])
def test_compiled_after_fit(kind: Callable[..., nn.Module]) -> None:
    """The gradients are those of the plain model; one warning says that the plan is not in force."""
    torch.manual_seed(0)
    model, batch = Classifier(), examples()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    plain = copy.deepcopy(model)
    loss_of_examples(plain, batch).backward()
    budget = budget_for(model, batch)
    recoup.fit(model, batch, budget=budget, loss=nn.CrossEntropyLoss())
    graphs = Graphs()
    compiled = kind(model, graphs)
    with pytest.warns(RecoupWarning, match="compiled") as caught:
        loss_of_examples(compiled, batch).backward()
    assert len([one for one in caught if issubclass(one.category, RecoupWarning)]) == 1
    # Once: another warning would be an error.
    compiled.zero_grad()
    loss_of_examples(compiled, batch).backward()
    assert graphs.num_compiled > 0
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad), name


def test_compiled_optimizers_are_no_obstacle() -> None:
    """``torch.compile(optimizer.step)`` is not the model's; it is neither run nor disturbed by a sample's fit."""
    graphs, batch = Graphs(), examples()
    model = Classifier(num_blocks=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step = torch.compile(optimizer.step, backend=graphs)
    recoup.fit(model, batch, budget="1GiB", loss=nn.CrossEntropyLoss(), optimizer=optimizer)
    assert graphs.num_compiled == 0


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(x)))


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"
)  # the code generator imports what torch calls deprecated
def test_compiled_with_torchs_own_backend() -> None:
    """``model.compile()``, then ``fit``: planned unit by unit, and compiled again when the plan is removed."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Residual() for _ in range(4))), torch.randn(64, 16)
    eager = copy.deepcopy(model)
    eager(x).square().mean().backward()
    model.compile()
    before, names = model._compiled_call_impl, list(model.state_dict())
    fitted = recoup.fit(model, x, budget="105KiB", loss=lambda y: y.square().mean())
    assert fitted.profile.is_captured
    assert fitted.verification is not None
    assert fitted.verification.peak_bytes == fitted.plan.predicted_bytes <= 105 * 1024
    assert "generated code (engine='compiled')" in str(fitted)
    model(x).square().mean().backward()
    for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    recoup.remove(model)
    assert model._compiled_call_impl is before
    assert list(model.state_dict()) == names


def test_what_a_plan_hides_is_compiled_still() -> None:
    """A captured plan lets a compiled model run eagerly; a fit with ``engine="eager"`` refuses it all the same."""
    model, x = nn.Sequential(*(Residual() for _ in range(2))), torch.randn(64, 16)
    model.compile()
    recoup.fit(model, x, budget="1MiB", loss=torch.sum, engine="captured", race=False)
    planned = model[0].forward
    with pytest.raises(SampleError, match="'Sequential' is compiled"):
        recoup.fit(model, x, budget="1MiB", loss=torch.sum, engine="eager")
    assert model[0].forward is planned
    assert model._compiled_call_impl is None
    recoup.remove(model)
    assert model._compiled_call_impl is not None


class TestSettings:
    """Of torch.compile: taken over, or left out with a warning."""

    def make(self, **settings: Any) -> tuple[nn.Module, Tensor]:
        torch.manual_seed(0)
        model, x = nn.Sequential(*(Residual() for _ in range(4))), torch.randn(64, 16)
        model.compile(**settings)
        return model, x

    @pytest.mark.filterwarnings("ignore::DeprecationWarning")
    def test_taken_over_and_stored_with_the_plan(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[bool] = []
        from torch._inductor.graph import GraphLowering

        original = GraphLowering.run

        def run(*args: Any) -> Any:
            seen.append(torch._inductor.config.epilogue_fusion)
            return original(*args)

        monkeypatch.setattr(GraphLowering, "run", run)
        model, x = self.make(options={"epilogue_fusion": False, "fx_graph_cache": False}, dynamic=False)
        profile = recoup.measure(model, x, loss=lambda y: y.square().mean(), engine="compiled")
        assert len(seen) >= 4
        assert not any(seen)
        cuts = {recipe.cut for unit in profile.units for recipe in unit.recipes if recipe.cut is not None}
        assert {json.loads(cut.settings)["epilogue_fusion"] for cut in cuts} == {False}
        assert {json.loads(cut.settings)["dynamic"] for cut in cuts} == {False}
        again = recoup.measuring.Profile.from_json(profile.to_json())
        assert again == profile

    @pytest.mark.parametrize(
        ("settings", "reason"),
        [
            ({"mode": "reduce-overhead"}, r"CUDA graphs \(triton.cudagraphs\)"),
            ({"dynamic": True}, "dynamic=True"),
            ({"backend": "aot_eager"}, "the backend of the user's"),
            ({"options": {"joint_custom_pre_pass": len}}, "joint_custom_pre_pass, which is no plain value"),
        ],
    )
    def test_left_out_with_a_warning(self, settings: dict[str, Any], reason: str) -> None:
        model, _ = self.make(**settings)
        with pytest.warns(RecoupWarning, match=f"torch.compile was given, units do without: {reason}"):
            assert settings_to_take_over(model) == ""

    @pytest.mark.parametrize("way", ["in place", "whole", "a forward"])
    def test_of_one_graph_for_all(self, way: str) -> None:
        """torch does not give the settings of what was compiled with ``fullgraph=True``."""
        model, settings = Residual(), {"fullgraph": True, "options": {"epilogue_fusion": False}}
        if way == "in place":
            model.compile(**settings)
        elif way == "whole":
            model = torch.compile(model, **settings)
        else:
            model.forward = torch.compile(model.forward, **settings)
        assert engines_for("auto", model) == ("compiled",)
        assert json.loads(settings_to_take_over(model)) == {"epilogue_fusion": False}
        model = Residual()
        model.compile(fullgraph=True, backend="aot_eager")
        assert engines_for("auto", model) == ("eager",)

    def test_of_modules_that_differ(self) -> None:
        model = nn.Sequential(*(Residual() for _ in range(4)))
        for number, block in enumerate(model):
            block.compile(options={"epilogue_fusion": number == 2})
        with pytest.warns(RecoupWarning, match="differ between modules"):
            assert settings_to_take_over(model) == ""

    def test_defaults_and_what_is_not_compiled(self) -> None:
        model, _ = self.make()
        assert settings_to_take_over(model) == settings_to_take_over(nn.Sequential(nn.Linear(2, 2))) == ""
        model, _ = self.make(mode="max-autotune-no-cudagraphs")
        assert json.loads(settings_to_take_over(model))["max_autotune"] is True


def test_the_best_engine_of_a_model_compiled_otherwise() -> None:
    model = in_place(Classifier(num_blocks=2), Graphs())
    assert engines_for("best", model) == ("captured", "compiled")
    assert engines_for("auto", model) == ("eager",)
    with pytest.raises(SampleError, match="engine='jit' is not known"):
        engines_for("jit", model)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_best_engine_is_raced() -> None:
    """All three are fitted and raced; the fastest stays. Where none fits, the smallest budget of all is named."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Residual() for _ in range(4))), torch.randn(64, 16)

    def fit(budget: str) -> Any:
        return recoup.fit(model, x, budget=budget, loss=lambda y: y.square().mean(), engine="best")

    fitted = fit("125KiB")
    assert fitted.verification.peak_bytes <= 125 * 1024
    names = {one.name for one in fitted.verification.race}
    assert {"engine='eager'", "engine='captured'", "engine='compiled'"} <= names
    kept = next(one.name for one in fitted.verification.race if one.is_kept)
    assert kept == f"engine={fitted.profile.engine!r}"
    assert [one.engine for one in fitted.engines] == ["eager", "captured", "compiled"]
    raced = {one.name: one.seconds for one in fitted.verification.race if one.name in names}
    for one in fitted.engines:
        assert one.seconds == raced[f"engine={one.engine!r}"]
        assert one.is_kept == (one.engine == fitted.profile.engine)
        assert one.failure == ""
    recoup.remove(model)

    fitted = fit("105KiB")  # of generated code only
    assert [bool(one.failure) for one in fitted.engines] == [True, True, False]
    assert fitted.engines[2].seconds == fitted.verification.seconds
    text = " ".join(str(fitted).split())
    for engine in ("eager", "captured"):
        assert f"engine='{engine}' was tried, and has no plan: Sequential does not fit 105 KiB" in text
    recoup.remove(model)
    with pytest.raises(BudgetError) as caught:
        fit("90KiB")
    assert 90 * 1024 < caught.value.smallest_bytes < 105 * 1024  # that of generated code; others need 114 KiB
    assert not is_applied(model)


def test_the_best_engine_where_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that nobody knows takes an engine out of the race; alone, or in eager code, it is raised as it is."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Residual() for _ in range(4))), torch.randn(64, 16)

    def fail(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("in the compiler\nand more")

    monkeypatch.setattr("recoup.measuring.unit.captured.cuts_of", fail)

    def fit(engine: str) -> Any:
        return recoup.fit(model, x, budget="125KiB", loss=lambda y: y.square().mean(), engine=engine)

    fitted = fit("best")
    assert fitted.profile.engine == "eager"
    failures = [one.failure for one in fitted.engines]
    assert failures == ["", *["ZeroDivisionError: in the compiler"] * 2]
    assert "engine='captured' was tried, and has no plan: ZeroDivisionError" in " ".join(str(fitted).split())
    recoup.remove(model)
    with pytest.raises(ZeroDivisionError, match="and more"):
        fit("captured")
    monkeypatch.setattr("recoup.fitting.one_fit.audit_step", fail)
    with pytest.raises(ZeroDivisionError, match="and more"):
        fit("best")
