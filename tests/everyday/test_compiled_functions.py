"""Functions with ``@torch.compile`` that a step calls run as they are, and count; some cannot be measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from everyday.subjects import budget_for
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

import recoup
from recoup.errors import SampleError
from recoup.measuring import MemoryTracker
from recoup.model.checks import check_compiled_functions

# Its code generator imports what torch itself calls deprecated.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    # The compiler looks at the gradients of what it is given.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf.*:UserWarning"),
]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@torch.compile
def gated(x: Tensor) -> Tensor:
    """It saves less than eager code does, and draws random numbers."""
    return F.dropout(F.gelu(x) * torch.sigmoid(x), 0.25)


@torch.compile
def entropy(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.float(), target)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(gated(self.up(self.norm(x))))


def make_model(block: type[nn.Module] = Block) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[block() for _ in range(5)])


def make_batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(256, 32), torch.randint(32, (256,))


def train(model: nn.Module, batch: tuple[Tensor, Tensor]) -> list[float]:
    torch.manual_seed(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def num_graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


@pytest.mark.parametrize("is_compiled_before", [False, True])
def test_they_run_as_they_are(is_compiled_before: bool) -> None:
    batch, model = make_batch(), make_model()
    if is_compiled_before:
        train(make_model(), batch)
    before = num_graphs()
    profile = recoup.measure(model, batch, loss=entropy)
    budget = (recoup.minimum_budget(profile) + profile.plain_bytes) // 2
    fitted = recoup.fit(model, batch, budget=budget, loss=entropy)
    seen = fitted.verification
    assert seen is not None
    assert seen.gradients == "bit-equal"
    assert fitted.plan.predicted_bytes == seen.peak_bytes <= budget < profile.plain_bytes
    # One for the blocks, one for the loss: nothing that is installed for measuring was compiled into them.
    assert num_graphs() == (before if is_compiled_before else before + 2)
    assert train(model, batch) == train(make_model(), batch)
    assert num_graphs() == (before if is_compiled_before else before + 2)
    # They do run: eager functions save more.
    with torch.compiler.set_stance("force_eager"):
        assert recoup.measure(make_model(), batch, loss=entropy).plain_bytes > profile.plain_bytes


@pytest.mark.parametrize("engine", ["captured", "compiled"])
def test_captured_units_take_them_in(engine: str) -> None:
    batch, model = make_batch(), make_model()
    budget = budget_for(model, batch)
    fitted = recoup.fit(model, batch, budget=budget, loss=entropy, engine=engine, race=False)
    assert fitted.profile.is_captured
    assert fitted.verification is not None
    assert fitted.verification.peak_bytes <= budget


def test_in_a_step_of_the_user_s() -> None:
    batch, model = make_batch(), make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()

    profile = recoup.measure(model, step=step)
    fitted = recoup.fit(model, step=step, budget=(recoup.minimum_budget(profile) + profile.plain_bytes) // 2)
    assert fitted.verification is not None
    assert fitted.verification.gradients == "bit-equal"
    with pytest.raises(SampleError, match=r"step= is compiled.*Give the function as it was"):
        recoup.fit(model, step=torch.compile(step), budget="1GiB")


@pytest.mark.parametrize("trains_through_it", [False, True], ids=["teacher", "discriminator"])
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_another_model_that_is_compiled(is_wrapped: bool, trains_through_it: bool) -> None:
    (x, _), model, other = make_batch(), make_model(), make_model().eval()
    if is_wrapped:
        other = torch.compile(other)
    else:
        other.compile()

    def step() -> None:
        model.zero_grad()
        if trains_through_it:
            other(model(x)).square().mean().backward()
            return
        with torch.no_grad():
            target = other(x)
        F.mse_loss(model(x), target).backward()

    profile = recoup.measure(model, step=step)
    budget = (recoup.minimum_budget(profile) + profile.plain_bytes) // 2
    fitted = recoup.fit(model, step=step, budget=budget)
    assert fitted.verification is not None
    assert fitted.verification.gradients == "bit-equal"
    assert fitted.plan.predicted_bytes == fitted.verification.peak_bytes <= budget
    before = num_graphs()
    step()
    assert num_graphs() == before > 0


class Hiding(Block):
    @torch.compile
    def feed(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.feed(self.norm(x))


def test_one_that_calls_modules_is_refused() -> None:
    batch, model, before = make_batch(), make_model(Hiding), num_graphs()
    with pytest.raises(
        SampleError, match=r"function '.*feed' calls the module '0.up'.*Compile the module itself"
    ):
        recoup.fit(model, batch, budget="1GiB", loss=entropy)
    blocks = make_model()
    first = torch.compile(lambda x: blocks[1](blocks[0](x)))

    def step() -> None:
        entropy(blocks[4](blocks[3](blocks[2](first(batch[0])))), batch[1]).backward()

    with pytest.raises(SampleError, match="function 'first' calls the module '0'"):
        recoup.fit(blocks, step=step, budget="1GiB")
    assert num_graphs() == before


def test_one_with_cuda_graphs_is_refused() -> None:
    functions = [("entropy", torch.compile(F.cross_entropy, mode="reduce-overhead"))]
    check_compiled_functions(functions, None, uses_cuda=False)
    with pytest.raises(
        SampleError, match=r"'entropy' is compiled with CUDA graphs.*max-autotune-no-cudagraphs"
    ):
        check_compiled_functions(functions, None, uses_cuda=True)


class Outer(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


@pytest.mark.parametrize("is_inside", [False, True])
def test_a_compiled_model_that_contains_this_one_is_refused(is_inside: bool) -> None:
    batch, model = make_batch(), make_model()
    compiled = torch.compile(Outer(model) if is_inside else model)

    def step() -> None:
        entropy(compiled(batch[0]), batch[1]).backward()

    with pytest.raises(SampleError, match=r"uses a compiled .* that contains modules of the model"):
        recoup.fit(model, step=step, budget="1GiB")


def test_a_copy_of_the_model_may_be_compiled_by_its_forwards() -> None:
    """They have the same code as the model's own."""
    batch, model, teacher = make_batch(), make_model(), make_model()
    for block in teacher:
        block.forward = torch.compile(block.forward)

    def distill() -> None:
        with torch.no_grad():
            target = teacher(batch[0])
        F.mse_loss(model(batch[0]), target).backward()

    assert recoup.fit(model, step=distill, budget="1GiB").verification is not None


class Decorated(Block):
    @torch.compile
    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def test_a_class_whose_forward_is_compiled() -> None:
    batch, model = make_batch(), make_model(Decorated)
    budget = budget_for(make_model(), batch)
    fitted = recoup.fit(model, batch, budget=budget, loss=entropy, race=False)
    assert fitted.profile.engine == "compiled"
    assert fitted.profile.is_captured
    before = num_graphs()
    recoup.remove(model)
    entropy(model(batch[0]), batch[1]).backward()
    assert num_graphs() > before  # compiled again, as its class says


@torch.compile
def orthogonal(gradient: Tensor) -> Tensor:
    return gradient / (gradient.norm() + 1e-7)


class Muon(torch.optim.Optimizer):
    """As in speed runs: its iteration is compiled."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    buffer = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                    parameter.sub_(orthogonal(buffer.lerp_(parameter.grad, 0.1)), alpha=0.01)


@pytest.mark.parametrize("has_stepped", [False, True])
def test_an_optimizer_that_calls_them(has_stepped: bool) -> None:
    """It is rehearsed on tensors without memory, where generated code would end the process."""
    batch, model = make_batch(), make_model()
    optimizer = Muon(model.parameters())
    if has_stepped:
        entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    fitted = recoup.fit(model, batch, budget="1GiB", loss=entropy, optimizer=optimizer)
    assert fitted.profile.residents.optimizer_bytes == sum(p.nbytes for p in model.parameters())


def test_estimated_as_eager_code() -> None:
    batch, model = make_batch(), make_model()
    assert recoup.measure(model, batch, loss=entropy, hardware="H200").seconds_are_estimates


def test_compiled_while_memory_is_tracked() -> None:
    """What code allocates that is generated, and loaded, under the tracker counts as well."""
    torch.compile(lambda x: x.cos())(torch.randn(8))
    peaks = []
    for _ in range(2):
        x = torch.randn(256, 64, requires_grad=True)
        with MemoryTracker() as memory:
            gated(x).sum().backward()
        peaks.append(memory.peak_bytes)
    assert peaks[0] == peaks[1] > 0
