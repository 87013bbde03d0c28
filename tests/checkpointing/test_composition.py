"""Hooks on leaves, other saved-tensor hooks, threads, torch.compile, and libraries that take a checkpoint function."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import models
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as torch_own

import recoup
from recoup import Checkpoint, checkpoint, torch_checkpoint
from recoup.checkpointing import Span


def expected_gradient(x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    (grad,) = torch.autograd.grad(deep(x).sum(), x)
    return grad


def deep(x: Tensor) -> Tensor:
    return (x.sin().exp() * x).cos()


def test_leaf_hooks_fire_once() -> None:
    x, weight = torch.randn(3, requires_grad=True), nn.Parameter(torch.randn(3))
    fired = []
    x.register_hook(lambda grad: fired.append("x"))
    weight.register_hook(lambda grad: fired.append("weight"))
    x.register_post_accumulate_grad_hook(lambda leaf: fired.append("x accumulated"))
    weight.register_post_accumulate_grad_hook(lambda leaf: fired.append("weight accumulated"))
    checkpoint(lambda x: deep(x * weight).sin(), x).sum().backward()
    assert sorted(fired) == ["weight", "weight accumulated", "x", "x accumulated"]


def test_module_backward_hooks_fire_once() -> None:
    layer, fired = nn.Linear(3, 3), []
    layer.register_full_backward_hook(lambda *_: fired.append(1))
    x = torch.randn(2, 3, requires_grad=True)
    checkpoint(nn.Sequential(layer, nn.Tanh()), x).sum().backward()
    assert fired == [1]


@pytest.mark.parametrize("place", ["around", "inside", "both"])
def test_save_on_cpu(place: str) -> None:
    def inner(x: Tensor) -> Tensor:
        x = x.sin()
        with save_on_cpu():
            x = deep(x)
        return deep(x)

    fn = deep if place == "around" else inner
    x = torch.randn(5, requires_grad=True)
    (expected,) = torch.autograd.grad(fn(x).sum(), x)
    if place == "inside":
        loss = checkpoint(fn, x * 1).sum()
    else:
        with save_on_cpu():
            loss = checkpoint(fn, x * 1).sum()
    (actual,) = torch.autograd.grad(loss, x)
    assert torch.equal(actual, expected)


def test_hooks_around_see_the_input_and_nothing_else() -> None:
    packed = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tuple(tensor.shape))
        return tensor.detach()

    x = torch.randn(5, requires_grad=True)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        y = checkpoint(deep, x)
    assert packed == [(5,)]
    y.sum().backward()
    assert torch.equal(x.grad, expected_gradient(x))


@pytest.mark.parametrize("outer", ["ours", "torch"])
@pytest.mark.parametrize("inner", ["ours", "torch"])
def test_mixed_nesting(outer: str, inner: str) -> None:
    calls: dict[str, Any] = {"ours": checkpoint, "torch": partial(torch_own, use_reentrant=False)}

    def block(x: Tensor) -> Tensor:
        return calls[inner](deep, x.tanh()).exp()

    x = torch.randn(5, requires_grad=True)
    (expected,) = torch.autograd.grad(deep(x.tanh()).exp().sum(), x)
    (actual,) = torch.autograd.grad(calls[outer](block, x * 1).sum(), x)
    assert torch.equal(actual, expected)


def test_backward_on_another_thread() -> None:
    x = torch.randn(50, requires_grad=True)
    torch.manual_seed(0)
    loss = checkpoint(lambda x: nn.functional.dropout(deep(x), 0.5).exp(), x).sum()
    (expected,) = torch.autograd.grad(loss, x, retain_graph=True)
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert torch.equal(x.grad, expected)


def run_in_threads(work: Any, num_threads: int = 6) -> None:
    errors: list[BaseException] = []
    start = threading.Barrier(num_threads)

    def run(index: int) -> None:
        try:
            start.wait()
            for _ in range(20):
                work(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_several_threads_at_once() -> None:
    def work(index: int) -> None:
        x = torch.full((7,), 0.1 * index, requires_grad=True)
        checkpoint(lambda x: checkpoint(deep, deep(x)), x).sum().backward()
        reference = x.detach().requires_grad_()
        deep(deep(reference)).sum().backward()
        assert torch.equal(x.grad, reference.grad)
        assert not recoup.is_replaying()

    run_in_threads(work)


def test_several_threads_over_one_graph() -> None:
    x = torch.randn(40, requires_grad=True)
    loss = checkpoint(lambda x: checkpoint(deep, deep(x)), x * 1).sum()
    (expected,) = torch.autograd.grad(loss, x, retain_graph=True)

    def work(index: int) -> None:
        (grad,) = torch.autograd.grad(loss, x, retain_graph=True)
        assert torch.equal(grad, expected)

    run_in_threads(work)


def test_grad_mode_of_another_thread_does_not_matter() -> None:
    x = torch.randn(5, requires_grad=True)
    loss = checkpoint(deep, x * 1).sum()

    def backward() -> None:
        with torch.no_grad():
            loss.backward()

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    assert torch.equal(x.grad, expected_gradient(x))


@pytest.mark.parametrize(
    "transform", [torch.func.vmap, torch.func.jacrev, lambda fn: torch.func.vmap(torch.func.jacrev(fn))]
)
@pytest.mark.parametrize("kind", ["checkpoint", "span"])
def test_inside_a_transform_it_is_a_plain_call(transform: Any, kind: str) -> None:
    """A replay would run outside of the transform."""
    layer = nn.Linear(4, 4)

    def plain(x: Tensor) -> Tensor:
        return deep(layer(x))

    def checkpointed(x: Tensor) -> Tensor:
        return checkpoint(plain, x) if kind == "checkpoint" else Span(Checkpoint()).call(plain, (x,), {})

    found = []
    for fn in (plain, checkpointed):
        x = torch.linspace(-1, 1, 24).reshape(2, 3, 4).requires_grad_()
        found.append(torch.autograd.grad(transform(fn)(x).square().sum(), [x, *layer.parameters()]))
    assert all(map(torch.equal, *found))


class Compiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def block(self, x: Tensor, layer: nn.Module, *, scale: Tensor, preserve_rng_state: float) -> Tensor:
        return (layer(x) * scale).tanh() * preserve_rng_state

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        for layer in self.layers:
            # A keyword that torch's checkpoint would take for its own option.
            x = checkpoint(self.block, x, layer, scale=scale, preserve_rng_state=0.5)
        return Checkpoint(early_stop=False)(torch.sin, x)


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_compiled_without_a_graph_break() -> None:
    torch._dynamo.reset()
    model = Compiled()
    x, scale = torch.randn(3, 6, requires_grad=True), torch.randn(6, requires_grad=True)
    inputs = [x, scale, *model.parameters()]
    expected = torch.autograd.grad(model(x, scale).sum(), inputs)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    actual = torch.autograd.grad(compiled(x, scale).sum(), inputs)
    for left, right in zip(expected, actual, strict=True):
        torch.testing.assert_close(left, right)


@pytest.mark.filterwarnings("ignore")
def test_traced_it_is_torchs_own_checkpoint() -> None:
    torch._dynamo.reset()
    operators = []

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        operators.extend(str(node.target) for node in module.graph.nodes if node.op == "call_function")
        return module.forward

    x = torch.randn(3, requires_grad=True)
    torch.compile(lambda x: checkpoint(deep, x), backend=backend, fullgraph=True)(x)
    assert any("tag_activation_checkpoint" in operator for operator in operators), operators
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore")
def test_around_a_compiled_function() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(deep, backend="aot_eager")
    x = torch.randn(5, requires_grad=True)
    checkpoint(compiled, x * 1).sum().backward()
    assert torch.equal(x.grad, expected_gradient(x))
    torch._dynamo.reset()


def test_torch_signature() -> None:
    x = torch.randn(3, requires_grad=True)
    for options in (
        {},
        {"use_reentrant": True},
        {"use_reentrant": False, "preserve_rng_state": False, "determinism_check": "none", "debug": True},
        {"early_stop": False},
    ):
        x.grad = None
        torch_checkpoint(deep, x, **options).sum().backward()
        assert torch.equal(x.grad, expected_gradient(x))
    torch_checkpoint(lambda x, *, k: x * k, x, use_reentrant=False, k=2.0)
    with pytest.raises(ValueError, match="determinism_check is 'default' or 'none'; got 'all'"):
        torch_checkpoint(deep, x, determinism_check="all")


def test_torch_context_fn_with_selective_checkpointing() -> None:
    computed = []

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return (
            CheckpointPolicy.MUST_SAVE
            if operator is torch.ops.aten.mm.default
            else CheckpointPolicy.PREFER_RECOMPUTE
        )

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            computed.append(func)
            return func(*args, **(kwargs or {}))

    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)

    def fn(x: Tensor) -> Tensor:
        return torch.mm(x.sin(), w).sin().exp()

    (expected,) = torch.autograd.grad(fn(x).sum(), x)
    with Count():
        loss = torch_checkpoint(
            fn, x * 1, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, policy)
        ).sum()
        num_before = computed.count(torch.ops.aten.sin.default)
        (actual,) = torch.autograd.grad(loss, x)
    assert torch.equal(actual, expected)
    assert num_before == 2
    assert computed.count(torch.ops.aten.sin.default) == 4


def test_a_library_that_takes_a_checkpoint_function() -> None:
    plain, other = models.make_pair(models.GPT, partial(torch_checkpoint, use_reentrant=True))
    sample = models.GPT.sample()
    models.assert_same(models.train(plain, sample), models.train(other, sample))
