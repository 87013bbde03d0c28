"""A fitted model is what other code expects: signatures, tracing, export, transforms, parts of other kinds."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from collections.abc import Callable
from dataclasses import replace
from types import MethodType
from typing import Any

import pytest
import torch
from handmade import RECIPES, Chain, make_plan, replay
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vmap
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm

import recoup
from recoup.engines import Leaf, is_applied
from recoup.errors import RecoupWarning
from recoup.measuring import Recipe
from recoup.model.caches import without_caches
from recoup.model.recipe import KEEP, RECOMPUTE


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(width, 3 * width), nn.Tanh(), nn.Linear(3 * width, width)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        """What a block does."""
        return x + scale * self.down(self.act(self.up(x)))


class Model(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.tail = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())

    def forward(self, inputs: Tensor, scale: float = 1.0) -> Tensor:
        """What the model does."""
        for block in self.blocks:
            inputs = block(inputs, scale=scale)
        return self.tail(inputs)


X = torch.randn(16, 8)
FUNCTION_NAMES = (
    "__annotations__",
    "__code__",
    "__defaults__",
    "__doc__",
    "__globals__",
    "__kwdefaults__",
    "__module__",
    "__name__",
    "__qualname__",
)


def pair() -> tuple[Model, Model]:
    """A plain model and its fitted copy: with units, a slice and layers inside units that are recomputed."""
    plain = Model()
    model = copy.deepcopy(plain)
    units = [*(f"blocks.{index}" for index in range(4)), "tail[0:2]"]
    recipes = (KEEP, RECOMPUTE, Recipe(inner=("up",)))
    plan = make_plan(model, units, [*replay(0, 1), Leaf(2, 2), *replay(3, 4)], recipes)
    # The slice has no layer of that name inside.
    profiled = tuple(
        replace(unit, recipes=RECIPES) if unit.name == "tail[0:2]" else unit for unit in plan.profile.units
    )
    recoup.apply(model, replace(plan, profile=replace(plan.profile, units=profiled)))
    return plain, model


def assert_trains_alike(plain: nn.Module, model: nn.Module, x: Tensor = X) -> None:
    for each in (plain, model):
        each.zero_grad()
        torch.manual_seed(3)
        each(x).sum().backward()
    for (name, expected), found in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert expected.grad is not None
        assert found.grad is not None
        assert torch.equal(found.grad, expected.grad), name


# What others ask of a forward


def test_every_stand_in_looks_like_the_forward() -> None:
    plain, model = pair()
    touched = {name for name, module in model.named_modules() if "forward" in vars(module)}
    assert touched == {"", "blocks.0", "blocks.1", "blocks.2", "blocks.2.up", "blocks.3", "tail"}
    for name in touched:
        expected, found = plain.get_submodule(name).forward, model.get_submodule(name).forward
        assert inspect.signature(found) == inspect.signature(expected), name
        assert inspect.signature(found, follow_wrapped=False) == inspect.signature(expected), name
        for attribute in FUNCTION_NAMES:
            assert getattr(found, attribute) == getattr(expected, attribute), (name, attribute)
        assert found.__self__ is model.get_submodule(name)
        assert inspect.unwrap(found) == MethodType(type(model.get_submodule(name)).forward, found.__self__)
        assert inspect.getdoc(found) == inspect.getdoc(expected)


def test_a_forward_that_takes_use_cache_keeps_its_signature() -> None:
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = type("Config", (), {"use_cache": True})()

        def forward(self, x: Tensor, use_cache: bool | None = None) -> Tensor:
            return x

    model = Decoder()
    expected = inspect.signature(model.forward)
    with without_caches(model):
        assert "forward" in vars(model)
        assert inspect.signature(model.forward) == expected


def test_what_a_forward_does_not_have_a_stand_in_has_not() -> None:
    class Passing:
        def __call__(self, x: Tensor) -> Tensor:
            return x

    model = Chain()
    model.units[0].forward = Passing()
    recoup.apply(model, make_plan(model, model.names, replay(0, 1, 2, 3, 4)))
    for name in ("__name__", "__code__", "__func__", "__self__", "anything"):
        assert not hasattr(model.units[0].forward, name), name
    assert list(inspect.signature(model.units[0].forward).parameters) == ["x"]


def test_a_forward_bound_again_keeps_the_plan() -> None:
    """As accelerate does for mixed precision: it wraps the function of the method, and binds that to the model."""
    plain, model = pair()
    function = model.forward.__func__
    model.forward = MethodType(lambda module, *args, **kwargs: function(module, *args, **kwargs), model)
    counts = _up_calls(model)
    assert counts["blocks.0"] == 2
    assert_trains_alike(plain, model)
    other = copy.deepcopy(model)
    assert _up_calls(other) == counts
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert_trains_alike(plain, other)


def _up_calls(model: Model) -> dict[str, int]:
    counts: dict[str, int] = {}

    def counting(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            counts[name] = counts.get(name, 0) + 1

        return hook

    handles = [
        block.act.register_forward_hook(counting(f"blocks.{index}"))
        for index, block in enumerate(model.blocks)
    ]
    model(X).sum().backward()
    for handle in handles:
        handle.remove()
    return counts


def test_copies_and_removal_are_as_before() -> None:
    plain, model = pair()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert inspect.signature(other.forward) == inspect.signature(plain.forward)
        assert other.forward.__doc__ == "What the model does."
        assert_trains_alike(plain, other)
        recoup.remove(other)
        assert not any("forward" in vars(module) for module in other.modules())
    recoup.remove(model)
    assert not any("forward" in vars(module) for module in model.modules())


# Tracing and transforms


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_export(strict: bool) -> None:
    plain, model = pair()
    found = torch.export.export(model, (X,), strict=strict)
    expected = torch.export.export(plain, (X,), strict=strict)
    assert [node.target for node in found.graph.nodes] == [node.target for node in expected.graph.nodes]
    assert found.graph_signature == expected.graph_signature
    assert torch.equal(found.module()(X), plain(X))
    assert is_applied(model)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_jit_trace() -> None:
    plain, model = pair()
    traced = torch.jit.trace(model, (X,))
    assert torch.equal(traced(X), plain(X))
    kinds = [node.kind() for node in traced.inlined_graph.nodes()]
    assert kinds == [node.kind() for node in torch.jit.trace(plain, (X,)).inlined_graph.nodes()]


def test_fx() -> None:
    plain, model = pair()
    assert torch.equal(torch.fx.symbolic_trace(model)(X), plain(X))


TRANSFORMS: dict[str, Callable[..., Any]] = {
    "grad": lambda loss: grad(loss),
    "per sample": lambda loss: vmap(grad(loss), in_dims=(None, 0)),
    "jacrev": lambda loss: jacrev(loss),
    "grad of grad": lambda loss: grad(lambda p, x: sum(g.sum() for g in grad(loss)(p, x).values())),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms(transform: Callable[..., Any]) -> None:
    plain, model = pair()
    found, expected = (
        transform(lambda parameters, x, each=each: functional_call(each, parameters, (x,)).sum())(
            dict(each.named_parameters()), X
        )
        for each in (model, plain)
    )
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert_trains_alike(plain, model)


def test_models_in_an_ensemble() -> None:
    plain, model = pair()
    stacked, buffers = torch.func.stack_module_state([plain, copy.deepcopy(plain)])
    base = copy.deepcopy(model).to("meta")
    outputs = vmap(lambda p, b: functional_call(base, (p, b), (X,)))(stacked, buffers)
    assert torch.equal(outputs[0], outputs[1])
    torch.testing.assert_close(outputs[0], plain(X))


def test_other_parameters_without_a_transform() -> None:
    plain, model = pair()
    grads = []
    for each in (plain, model):
        given = {name: (value.detach() + 1).requires_grad_() for name, value in each.named_parameters()}
        functional_call(each, given, (X,)).sum().backward()
        grads.append([value.grad for value in given.values()])
    assert all(map(torch.equal, *grads))


# Compiled after fit


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "what", ["a wrapper", "the model", "all blocks", "one block", "a function around it"]
)
def test_compiled_after_the_plan(what: str) -> None:
    torch._dynamo.reset()
    plain, model = pair()
    options: dict[str, Any] = {"backend": "aot_eager", "fullgraph": True}
    run: Callable[[Tensor], Tensor] = model
    if what == "a wrapper":
        run = torch.compile(model, **options)
    elif what == "the model":
        model.compile(**options)
    elif what == "a function around it":
        run = torch.compile(lambda x: model(x) * 1, **options)
    else:
        for block in model.blocks if what == "all blocks" else model.blocks[1:2]:
            block.compile(**options)
    with pytest.warns(
        RecoupWarning, match=r"not in force inside compiled code: .*recoup\.remove\(model\)"
    ) as caught:
        run(X).sum().backward()
    assert sum(entry.category is RecoupWarning for entry in caught) == 1
    run(X).sum().backward()
    for _ in range(2):
        plain(X).sum().backward()
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)


# Parts of other kinds


def _pruned(layer: nn.Linear) -> nn.Linear:
    return prune.l1_unstructured(layer, "weight", 0.3)


def _scripted(module: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit.script is deprecated
        return torch.jit.script(module)


def _changed_layers(change: Callable[[nn.Module], nn.Module]) -> Model:
    model = Model(32)
    for block in model.blocks:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # weight_norm by hooks is deprecated
            block.up, block.down = change(block.up), change(block.down)
    return model


LAYERS: dict[str, Callable[[Any], nn.Module]] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "weight_norm by hooks": weight_norm,
    "spectral_norm by hooks": spectral_norm,
    "pruned": _pruned,
    "scripted": _scripted,
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_blocks_of_such_layers_are_repeats(layer: Callable[[Any], nn.Module]) -> None:
    model, x = _changed_layers(layer), torch.randn(512, 32)
    profile = recoup.measure(model, x, loss=torch.sum)
    assert [unit.name for unit in profile.units][:4] == [f"blocks.{index}" for index in range(4)]
    by_hand = recoup.measure(model, x, loss=torch.sum, units=["blocks.*", "tail[0:2]", "tail[2:4]"])
    # Which recipes are worth offering depends on measured seconds, and the minimum on the recipes.
    smallest = recoup.minimum_budget(profile)
    assert smallest == pytest.approx(recoup.minimum_budget(by_hand), rel=0.05)
    assert smallest < 0.9 * profile.plain_bytes
    fitted = recoup.fit(model, x, loss=torch.sum, budget=smallest * 6 // 5)
    assert fitted.verification is not None
    assert fitted.verification.gradients == "bit-equal"
    assert fitted.verification.drifting == ()
    model(x).sum().backward()
    recoup.remove(model)
    assert not is_applied(model)


def test_parametrized_blocks_themselves_are_repeats() -> None:
    """A parameter of the block's own is parametrized: the block, too, gets a class of its own."""

    class Positive(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.nn.functional.softplus(x)

    class Scaled(Block):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.randn(8))
            parametrize.register_parametrization(self, "gain", Positive())

        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return super().forward(x * self.gain, scale=scale)

    model = Model()
    model.blocks = nn.ModuleList(Scaled() for _ in range(4))
    assert len({type(block) for block in model.blocks}) == 4
    profile = recoup.measure(model, X, loss=torch.sum)
    assert [unit.name for unit in profile.units][:4] == [f"blocks.{index}" for index in range(4)]
    assert len({unit.kind for unit in profile.units[1:4]}) == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_units() -> None:
    model, x = Model(32), torch.randn(512, 32)
    for index in range(4):
        model.blocks[index] = _scripted(model.blocks[index])
    before = [dict(vars(block)) for block in model.blocks]
    profile = recoup.measure(model, x, loss=torch.sum)
    fitted = recoup.fit(model, x, loss=torch.sum, budget=recoup.minimum_budget(profile))
    assert not fitted.plan.keeps_everything
    for _ in range(4):  # torch specialises scripted code in its first runs
        model.zero_grad()
        model(x).sum().backward()
    recoup.remove(model)
    assert all(
        vars(block)[name] is value
        for block, each in zip(model.blocks, before, strict=True)
        for name, value in each.items()
    )
    assert [vars(block).keys() for block in model.blocks] == [each.keys() for each in before]


def test_lazy_modules_are_refused_and_stay_usable() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.LazyLinear(4), nn.Tanh()))
    with pytest.raises(
        recoup.errors.SampleError, match=r"LazyLinear '1\.0' has not run yet.*Run the model once on a"
    ):
        recoup.fit(model, X, loss=torch.sum, budget="1MB")
    model(X)
    recoup.fit(model, X, loss=torch.sum, budget="1MB")
    assert type(model[1][0]) is nn.Linear
