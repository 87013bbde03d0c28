"""Other code around a fitted model: signatures, export, jit, functorch, parametrizations, hooks, pickles."""

from __future__ import annotations

import copy
import inspect
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from everyday.subjects import (
    Block,
    Classifier,
    assert_same,
    budget_for,
    examples,
    loss_of_examples,
    state_of,
    train,
)
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, jvp, stack_module_state, vmap
from torch.nn.utils import parametrizations, prune

import recoup
from recoup.engines import is_applied
from recoup.errors import ApplyError, SampleError

pytestmark = [
    # torch.jit is on its way out, and says so at each use.
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning"),
]


class Documented(Classifier):
    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        """Logits of ten classes."""
        return super().forward(x) * scale


def fitted(model: nn.Module, budget: int | None = None) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        batch = examples()
    budget = budget_for(model, batch) if budget is None else budget
    recoup.fit(model, batch, budget=budget, loss=nn.CrossEntropyLoss(), verify=False)
    assert is_applied(model)
    return model


# Introspection


def test_forward_looks_as_before() -> None:
    names = ("__doc__", "__name__", "__qualname__", "__module__", "__annotations__")
    model = Documented()
    expected = [[getattr(module.forward, name) for name in names] for module in model.modules()]
    fitted(model)
    assert [[getattr(module.forward, name) for name in names] for module in model.modules()] == expected


def test_signatures_of_every_module() -> None:
    model = Documented()
    expected = [inspect.signature(module.forward) for module in model.modules()]
    full = inspect.getfullargspec(model.forward)
    fitted(model)
    assert [inspect.signature(module.forward) for module in model.modules()] == expected
    assert inspect.getfullargspec(model.forward).kwonlyargs == full.kwonlyargs == ["scale"]
    assert "scale" in inspect.signature(model).parameters or inspect.signature(model) == inspect.signature(
        Documented()
    )


def test_the_code_that_others_read() -> None:
    """Trainers ask for argument names by ``__code__``, others for the source."""
    model = Documented()
    code, source = model.forward.__code__, inspect.getsource(model.forward)
    fitted(model)
    assert model.forward.__code__ is code
    assert model.forward.__code__.co_varnames[: model.forward.__code__.co_argcount] == ("self", "x")
    assert inspect.unwrap(model.forward).__func__ is Documented.forward
    assert inspect.getsource(inspect.unwrap(model.forward)) == source
    assert inspect.ismethod(model.forward) or callable(model.forward)


def test_class_and_names_are_as_before() -> None:
    model = Documented()
    names, text = [name for name, _ in model.named_modules()], repr(model)
    fitted(model)
    assert type(model) is Documented
    assert ([name for name, _ in model.named_modules()], repr(model)) == (names, text)
    assert list(model.state_dict()) == list(Documented().state_dict())


def test_a_forward_replaced_after_fit() -> None:
    """As libraries patch it: ``old = model.forward; model.forward = wrapper``."""

    def run(is_fitted: bool) -> list[Any]:
        torch.manual_seed(0)
        model, batch = Documented(), examples()
        if is_fitted:
            fitted(model)
        old, calls = model.forward, []

        def forward(*args: Any, **kwargs: Any) -> Tensor:
            calls.append(len(args))
            return old(*args, **kwargs)

        model.forward = forward
        return [train(model, torch.optim.AdamW(model.parameters()), [batch] * 2, loss_of_examples), calls]

    assert run(is_fitted=True) == run(is_fitted=False)


# Export, jit, functorch


def test_export() -> None:
    """The plan steps aside: the exported program is the plain model's."""
    x, _ = examples()
    model = Documented()
    plain = torch.export.export(model, (x,)).graph_module.code
    fitted(model)
    program = torch.export.export(model, (x,))
    assert program.graph_module.code == plain
    assert is_applied(model)


def test_export_in_eval_mode_with_dynamic_shapes() -> None:
    x, _ = examples()
    model = fitted(Documented()).eval()
    program = torch.export.export(model, (x,), dynamic_shapes={"x": {0: torch.export.Dim("batch")}})
    assert torch.equal(program.module()(x[:7]), model(x[:7]))


def test_fx_tracing() -> None:
    x, _ = examples()
    model = fitted(Classifier()).eval()
    assert torch.equal(torch.fx.symbolic_trace(model)(x), model(x))


def test_jit_tracing() -> None:
    x, _ = examples()
    model = fitted(Documented()).eval()
    traced = torch.jit.trace(model, (x,))
    assert torch.equal(traced(x), model(x))
    model.train()
    torch.jit.trace(model, (x,), check_trace=False)


def test_a_scripted_part() -> None:
    """A block that is TorchScript runs inside a fitted model."""

    def run(is_fitted: bool) -> list[Any]:
        torch.manual_seed(0)
        model, batch = Classifier(), examples()
        budget = budget_for(model, batch)
        model.blocks[1] = torch.jit.script(nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)))
        if is_fitted:
            fitted(model, budget)
        optimizer = torch.optim.AdamW(model.parameters())
        return [train(model, optimizer, [batch] * 2, loss_of_examples), *state_of(model)]

    assert_same(run(is_fitted=True), run(is_fitted=False))


@pytest.mark.parametrize("name", ["grad", "vmap of grad", "jacrev", "jvp", "vmap"])
def test_functorch_transforms(name: str) -> None:
    torch.manual_seed(0)
    model = Classifier()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    x, y = examples(8)
    parameters = dict(model.named_parameters())

    def loss(parameters: Any, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(functional_call(model, parameters, (x,)), y)

    def one(parameters: Any, x: Tensor, y: Tensor) -> Tensor:
        return loss(parameters, x[None], y[None])

    transforms: dict[str, Callable[[], Any]] = {
        "grad": lambda: grad(loss)(parameters, x, y),
        "vmap of grad": lambda: vmap(grad(one), in_dims=(None, 0, 0))(parameters, x, y),
        "jacrev": lambda: jacrev(lambda x: functional_call(model, parameters, (x,)))(x[:2]),
        "jvp": lambda: list(
            jvp(lambda x: functional_call(model, parameters, (x,)), (x,), (torch.ones_like(x),))
        ),
        "vmap": lambda: vmap(lambda x: functional_call(model, parameters, (x[None],)))(x),
    }
    expected = transforms[name]()
    fitted(model)
    assert_same(transforms[name](), expected)
    assert is_applied(model)


def test_an_ensemble_of_copies() -> None:
    torch.manual_seed(0)
    x, _ = examples(8)
    models = [Classifier(num_blocks=3).eval() for _ in range(2)]
    parameters, buffers = stack_module_state(models)
    base = copy.deepcopy(models[0])
    expected = vmap(lambda p, b: functional_call(base, (p, b), (x,)))(parameters, buffers)
    fitted(base.train())
    base.eval()
    found = vmap(lambda p, b: functional_call(base, (p, b), (x,)))(parameters, buffers)
    assert torch.equal(found, expected)


def test_functional_call_with_a_backward() -> None:
    """Meta-learning runs the model at weights that are not its own: their gradients are right."""
    torch.manual_seed(0)
    model, (x, y) = Classifier(), examples()

    def run() -> list[Tensor]:
        weights = {name: (value.detach() * 1.5).requires_grad_() for name, value in model.named_parameters()}
        torch.manual_seed(3)
        loss = nn.functional.cross_entropy(functional_call(model, weights, (x,)), y)
        return list(torch.autograd.grad(loss, list(weights.values())))

    expected = run()
    fitted(model)
    assert_same(run(), expected)


def test_second_derivatives() -> None:
    torch.manual_seed(0)
    model, (x, _y) = Classifier(num_blocks=3), examples(32)

    def run() -> Tensor:
        torch.manual_seed(3)
        inputs = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), next(model.parameters()))[0]

    expected = run()
    fitted(model)
    assert torch.equal(run(), expected)


# Parametrizations


def spectral(block: Block) -> Block:
    parametrizations.spectral_norm(block.up)
    return block


def weighted(block: Block) -> Block:
    parametrizations.weight_norm(block.up)
    parametrizations.weight_norm(block.down)
    return block


def orthogonal(block: Block) -> Block:
    parametrizations.orthogonal(block.up)
    return block


def pruned(block: Block) -> Block:
    prune.random_unstructured(block.up, "weight", amount=0.3)
    return block


def whole(block: Block) -> Block:
    """The block itself gets a class of its own."""
    block.scale = nn.Parameter(torch.ones(()))
    nn.utils.parametrize.register_parametrization(block, "scale", nn.Softplus(), unsafe=True)
    return block


@pytest.mark.parametrize("change", [spectral, weighted, orthogonal, pruned, whole])
def test_parametrized_blocks_are_repeats(change: Callable[[Block], Block]) -> None:
    """They are the units that they would be without, and the smallest budget is about that of units by hand."""

    def make() -> Classifier:
        torch.manual_seed(0)
        model = Classifier(num_blocks=4)
        model.blocks = nn.ModuleList(change(block) for block in model.blocks)
        return model

    batch = examples(256)
    options: dict[str, Any] = {"loss": nn.CrossEntropyLoss()}
    profile = recoup.measure(make(), batch, **options)
    names = {unit.module for unit in profile.units if unit.module is not None}
    assert {f"blocks.{index}" for index in range(4)} <= names
    by_hand = recoup.measure(make(), batch, units="blocks.*", **options)
    assert recoup.minimum_budget(profile) <= 1.1 * recoup.minimum_budget(by_hand)

    def run(is_fitted: bool) -> list[Any]:
        model = make()
        if is_fitted:
            budget = (profile.plain_bytes + recoup.minimum_budget(profile)) // 2
            recoup.fit(model, batch, budget=budget, **options)
            assert is_applied(model)
        optimizer = torch.optim.AdamW(model.parameters())
        return [train(model, optimizer, [batch] * 2, loss_of_examples), *state_of(model)]

    assert_same(run(is_fitted=True), run(is_fitted=False))


def test_parametrizations_removed_and_added_after_fit() -> None:
    def run(is_fitted: bool) -> list[Any]:
        torch.manual_seed(0)
        model, batch = Classifier(), examples()
        model.blocks = nn.ModuleList(weighted(block) for block in model.blocks)
        if is_fitted:
            fitted(model)
        for block in model.blocks:
            nn.utils.parametrize.remove_parametrizations(block.up, "weight")
        parametrizations.weight_norm(model.head)
        optimizer = torch.optim.AdamW(model.parameters())
        return [train(model, optimizer, [batch] * 2, loss_of_examples), *state_of(model)]

    assert_same(run(is_fitted=True), run(is_fitted=False))


# Hooks, copies, pickles


def test_hooks_added_after_fit() -> None:
    def run(is_fitted: bool) -> list[Any]:
        torch.manual_seed(0)
        model, batch = Classifier(), examples()
        if is_fitted:
            fitted(model)
        seen: list[Any] = []
        model.register_forward_pre_hook(lambda module, args: seen.append("before"))
        model.blocks[1].register_forward_hook(lambda module, args, output: seen.append(output.norm().item()))
        model.blocks[2].register_full_backward_hook(
            lambda module, given, taken: seen.append(taken[0].norm().item())
        )
        model.head.weight.register_hook(lambda gradient: seen.append(gradient.norm().item()))
        return [train(model, torch.optim.AdamW(model.parameters()), [batch] * 2, loss_of_examples), seen]

    assert_same(run(is_fitted=True), run(is_fitted=False))


def test_saved_and_loaded_whole() -> None:
    """``torch.save(model)`` and a pickle of it train on, with their plan."""
    torch.manual_seed(0)
    model, batch = Classifier(), examples()
    expected = train(copy.deepcopy(model), torch.optim.SGD([torch.zeros(1)]), [batch], loss_of_examples)
    fitted(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert is_applied(loaded)
    assert train(loaded, torch.optim.SGD([torch.zeros(1)]), [batch], loss_of_examples) == expected


def test_threads_that_run_a_fitted_model() -> None:
    """An evaluation thread beside training reads the same model."""
    from concurrent.futures import ThreadPoolExecutor

    torch.manual_seed(0)
    model, (x, _) = Classifier(), examples()
    with torch.no_grad():
        expected = copy.deepcopy(model).eval()(x)
    fitted(model).eval()

    def evaluate(_: int) -> Tensor:
        with torch.no_grad():
            return model(x)

    with ThreadPoolExecutor(3) as pool:
        assert all(torch.equal(found, expected) for found in pool.map(evaluate, range(6)))


def test_data_parallel_wrapper_on_a_cpu() -> None:
    """`DataParallel` without devices calls the module straight, and makes no copies."""
    torch.manual_seed(0)
    model, batch = Classifier(), examples()
    expected = train(copy.deepcopy(model), torch.optim.SGD([torch.zeros(1)]), [batch], loss_of_examples)
    fitted(model)
    assert (
        train(nn.DataParallel(model), torch.optim.SGD([torch.zeros(1)]), [batch], loss_of_examples)
        == expected
    )


def test_data_parallel_is_refused_before_and_after() -> None:
    model, (x, y) = Classifier(), examples()
    for inside in (nn.DataParallel(model), nn.Sequential(nn.DataParallel(model))):
        with pytest.raises(
            SampleError, match=r"nn\.DataParallel, whose copies would run the original's parameters"
        ):
            recoup.fit(inside, (x, y), budget="1GiB", loss=nn.CrossEntropyLoss())
    fitted(model)
    for one in (model, copy.deepcopy(model)):
        with pytest.raises(
            ApplyError, match=r"nn\.DataParallel copies a model that has a plan.*recoup\.remove"
        ):
            # What `nn.parallel.replicate` calls for each module and device.
            [module._replicate_for_data_parallel() for module in one.modules()]
        replica = recoup.remove(one)._replicate_for_data_parallel()
        assert replica._is_replica
        assert not any("_replicate_for_data_parallel" in vars(module) for module in one.modules())
