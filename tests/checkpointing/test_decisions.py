"""Decisions are kept and handed to the replay; values are recomputed."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import recoup
from recoup import Checkpoint, checkpoint
from recoup.checkpointing import Group, Span, deciding, decisions
from recoup.checkpointing.by_identity import ByIdentity
from recoup.checkpointing.decisions import ALL, NONE, Operations
from recoup.errors import ReplayMismatchError

aten = torch.ops.aten
NUM_TIES = 100
SEEN: list[list[int]] = []
"""The experts of all rows, of every run. Not an attribute: a replay puts those back."""


@pytest.fixture(autouse=True)
def sites(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deciding, "_sites", ByIdentity(deciding.DecidingSite))
    SEEN.clear()


def near_ties(logits: Tensor) -> Tensor:
    """The first two logits of every row, one unit in the last place apart: in the replay to the other side."""
    found = logits.detach().clone()
    found[:, 2:] = -9
    found[:, 1] = torch.nextafter(found[:, 0], torch.tensor(-9.0 if recoup.is_replaying() else 9.0))
    return found


def by_item(ties: Tensor) -> Tensor:
    return torch.tensor([0 if row[0].item() > row[1].item() else 1 for row in ties])


def by_branch(ties: Tensor) -> Tensor:
    return torch.tensor([0 if row[0] > row[1] else 1 for row in ties])


def by_rows(ties: Tensor) -> Tensor:
    chosen = torch.zeros(len(ties), dtype=torch.int64)
    chosen[(ties[:, 1] > ties[:, 0]).nonzero()[:, 0]] += 1
    return chosen


# All give the expert of each row.
CHOICES: dict[str, Callable[[Tensor], Tensor]] = {
    "topk": lambda ties: ties.topk(2).indices[:, 0],
    "argmax": lambda ties: ties.argmax(-1),
    "max": lambda ties: ties.max(-1).indices,
    "sort": lambda ties: ties.sort(-1, descending=True).indices[:, 0],
    "stable sort": lambda ties: torch.sort(ties, stable=True, dim=1, descending=True).indices[:, 0],
    "argsort": lambda ties: ties.argsort(-1)[:, -1],
    "comparison": lambda ties: (ties[:, 1] > ties[:, 0]).long(),
    "cast": lambda ties: (ties[:, 1] - ties[:, 0]).sign().clamp(min=0).long(),
    "mask of rows": by_rows,
    "one-hot": lambda ties: nn.functional.one_hot(ties.argmax(-1), 4).argmax(-1),
    "item": by_item,
    "branch": by_branch,
    "equal": lambda ties: torch.tensor([int(torch.equal(row[:2], row[:2].sort()[0])) for row in ties]),
    "list": lambda ties: torch.tensor((ties[:, 1] > ties[:, 0]).int().tolist()),
}


class Experts(nn.Module):
    """Each row goes to one of four experts, with a weight from the router."""

    def __init__(self, choose: Callable[[Tensor], Tensor], width: int = 6) -> None:
        super().__init__()
        self.choose = choose
        self.router = nn.Linear(width, 4)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        logits = self.router(x)
        chosen = self.choose(near_ties(logits))
        SEEN.append(chosen.tolist())
        weights = logits.softmax(-1).gather(-1, chosen[:, None])
        y = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero()[:, 0]
            if len(rows):
                y = y.index_add(0, rows, torch.tanh(expert(x[rows])) * weights[rows])
        return y


def gradients(run: Callable[..., Tensor], model: nn.Module, x: Tensor) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    loss = run(leaf).pow(2).sum()
    used = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found = torch.autograd.grad(loss, [leaf, *used], allow_unused=True)
    return [torch.zeros(()) if one is None else one for one in found]


def assert_same(left: list[Tensor], right: list[Tensor]) -> None:
    assert all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


@pytest.mark.parametrize("choice", CHOICES)
def test_near_ties_that_flip(choice: str) -> None:
    torch.manual_seed(0)
    model, x = Experts(CHOICES[choice]), torch.randn(NUM_TIES, 6)
    plain = gradients(model, model, x)
    for _ in range(3):  # the third call is watched for what the first has shown
        assert_same(gradients(lambda x: checkpoint(model, x), model, x), plain)
    assert SEEN == [[1] * NUM_TIES] * 7


@pytest.mark.parametrize("choice", CHOICES)
def test_without_kept_decisions_they_flip(choice: str) -> None:
    torch.manual_seed(0)
    model, x = Experts(CHOICES[choice]), torch.randn(NUM_TIES, 6)
    with pytest.raises(ReplayMismatchError, match="mixture of experts"):
        gradients(lambda x: Checkpoint(keep_decisions=False)(model, x), model, x)
    assert SEEN[:2] == [[1] * NUM_TIES, [0] * NUM_TIES]


# Values beside indices


SELECTIONS: dict[str, Callable[[Tensor], Any]] = {
    "topk": lambda x: x.topk(3),
    "topk, first dimension": lambda x: torch.topk(x, 2, dim=0),
    "topk, smallest": lambda x: x.topk(2, largest=False, sorted=False),
    "sort": lambda x: x.sort(0, descending=True),
    "stable sort": lambda x: torch.sort(x, stable=True, dim=1),
    "max": lambda x: x.max(1),
    "max, keepdim": lambda x: x.max(dim=0, keepdim=True),
    "min": lambda x: x.min(dim=-1),
    "median": lambda x: x.median(1),
    "nanmedian": lambda x: x.nanmedian(0, keepdim=True),
    "mode": lambda x: x.round().mode(1),
    "kthvalue": lambda x: x.kthvalue(2, 0),
    "no dimension": lambda x: x[0, 0].sort(),
}


@pytest.mark.parametrize("selection", SELECTIONS)
def test_values_are_those_at_the_kept_indices(selection: str) -> None:
    torch.manual_seed(1)
    select, seen = SELECTIONS[selection], []

    def fn(x: Tensor, other: Tensor) -> Tensor:
        values, indices = select(other if recoup.is_replaying() else x)
        seen.append((values.detach(), indices))
        weights = torch.arange(1.0, values.numel() + 1).view(values.shape)
        return (values * weights).exp().sum()

    x = (torch.randn(5, 7) / 9).requires_grad_()
    (plain,) = torch.autograd.grad(fn(x, x), x)
    # The same input: the same bits. Another one: its own values, at the places that the forward chose.
    (kept,) = torch.autograd.grad(Checkpoint(check="values")(fn, x, x.detach().clone().requires_grad_()), x)
    assert torch.equal(kept, plain)
    assert torch.equal(seen[1][0], seen[2][0])
    flipped = (-x).detach().requires_grad_()
    Checkpoint(check="metadata", early_stop=False)(fn, x, flipped).backward()
    assert torch.equal(seen[-1][1], seen[0][1])
    assert torch.equal(
        seen[-1][0], seen[0][0] if selection == "mode" and not seen[0][0].any() else -seen[0][0]
    )


def test_a_value_and_its_gradient_agree_with_the_choice() -> None:
    """Logits that differ in the last bit change values in the last bit, and nothing else."""
    torch.manual_seed(2)

    def fn(x: Tensor) -> Tensor:
        ties = x + (near_ties(x) - x).detach()
        weights, chosen = ties.softmax(-1).topk(1)
        return (weights * (chosen + 1)).pow(2).sum()

    x = torch.randn(NUM_TIES, 4, requires_grad=True)
    (plain,) = torch.autograd.grad(fn(x), x)
    (kept,) = torch.autograd.grad(Checkpoint(check="metadata")(fn, x), x)
    assert torch.allclose(kept, plain, rtol=1e-5, atol=1e-7)


# What is kept


def kept_of(fn: Callable[..., Tensor], *args: Tensor) -> str:
    text = recoup.describe(checkpoint(fn, *args))
    return text.partition(", keeps ")[2].rstrip(">")


def test_what_is_kept_and_what_is_not() -> None:
    def fn(x: Tensor, ids: Tensor) -> Tensor:
        x, _ = nn.functional.max_pool1d(x, 2, return_indices=True)
        x = nn.functional.dropout(x, 0.5)
        where = torch.zeros_like(x, dtype=torch.bool) | (ids[:, None] > 1)  # of integers, or of a shape only
        x = x.masked_fill(where, 0.0) * (x.view(torch.int32) > 0)
        positive = x > 0
        return (x * positive).sin() * x.sum().item()

    x = torch.ones(3, 8, requires_grad=True) * 2
    assert kept_of(lambda x: fn(x, torch.arange(3)), x) in (
        "[gt bool[3, 4], item 0.0]",
        *(f"[gt bool[3, 4], item {4.0 * n}]" for n in range(1, 13)),
    )


def test_large_masks_are_computed_anew() -> None:
    """They are masks over values; a choice is small beside what it is made for."""
    small, large = torch.ones(2**16, requires_grad=True) * 1, torch.ones(2**16 + 1, requires_grad=True) * 1
    assert kept_of(lambda x: (x > 0) * x.sin(), small) == "[gt bool[65536]]"
    assert kept_of(lambda x: (x > 0) * x.sin(), large) == "[gt too large]"
    wide = torch.ones(2**16 + 1, 4, requires_grad=True) * 1  # a sixteenth of the argument's bytes
    assert kept_of(lambda x: (x[:, 0] > 0)[:, None] * x.sin(), wide) == "[gt bool[65537]]"
    x = large.detach().requires_grad_()
    checkpoint(lambda x: ((x > 0) * x.sin()).topk(3)[0], x).sum().backward()
    assert x.grad is not None
    assert x.grad.count_nonzero() == 3


def test_kept_bytes_go_with_the_graph() -> None:
    gc.collect()
    x = torch.randn(8, 4, requires_grad=True)
    y = checkpoint(lambda x: x.topk(2)[0].exp(), x)
    held = [one for one in gc.get_objects() if type(one) is decisions.Kept]
    assert [one.num_bytes for one in held] == [8 * 2 * 8]
    del held
    y.sum().backward()
    del y
    assert not [one for one in gc.get_objects() if type(one) is decisions.Kept]


def test_decisions_that_are_changed_in_place() -> None:
    def fn(x: Tensor) -> Tensor:
        counts = x.argmax(-1)
        counts += 1
        mask = x > 0
        mask[0] = False
        return (x * mask).exp() * counts[:, None]

    x = torch.randn(5, 4, requires_grad=True)
    (plain,) = torch.autograd.grad(fn(x).sum(), x)
    loss = checkpoint(fn, x).sum()
    for _ in range(2):
        assert torch.equal(torch.autograd.grad(loss, x, retain_graph=True)[0], plain)


def test_random_numbers_stay_the_same() -> None:
    """A draw that is kept is made again, or what is drawn after it would be another one."""

    def fn(x: Tensor) -> Tensor:
        rows = torch.multinomial(x.softmax(-1), 2)
        return nn.functional.dropout(x.gather(-1, rows).exp(), 0.5)

    x = torch.randn(50, 4, requires_grad=True)
    torch.manual_seed(3)
    (plain,) = torch.autograd.grad(fn(x).sum(), x)
    for _ in range(2):
        torch.manual_seed(3)
        assert torch.equal(torch.autograd.grad(Checkpoint(check="values")(fn, x).sum(), x)[0], plain)


# The replay decides in the same order


def test_a_replay_that_decides_otherwise() -> None:
    def fn(x: Tensor) -> Tensor:
        chosen = x.argmin(-1) if recoup.is_replaying() else x.argmax(-1)
        return x.exp() * chosen[:, None]

    x = torch.randn(5, 4, requires_grad=True)
    with pytest.raises(
        ReplayMismatchError,
        match=r"Decision 1 is argmin of \[5, 4\] in the replay \(at test_decisions.py:\d+\); it was argmax of \[5, 4\]",
    ):
        checkpoint(fn, x).sum().backward()


def test_a_replay_that_decides_more() -> None:
    def fn(x: Tensor) -> Tensor:
        y = x * x.argmax(-1)[:, None]
        return (y * (y > 0) if recoup.is_replaying() else y).exp()

    x = torch.randn(5, 4, requires_grad=True)
    with pytest.raises(
        ReplayMismatchError, match=r"Decision 2 is gt of \[5, 4\].*the forward made none there"
    ):
        checkpoint(fn, x).sum().backward()


# Who is watched


def watched_in(monkeypatch: pytest.MonkeyPatch, fn: Callable[[Tensor], Tensor], num: int) -> list[Operations]:
    """What is watched in each of some calls."""
    found: list[Operations] = []
    real = decisions.run_in

    def noted(region: Any, *args: Any) -> Any:
        if isinstance(region, decisions.Recording):
            found.append(region.watched)
        return real(region, *args)

    monkeypatch.setattr("recoup.checkpointing.frame.run_in", noted)
    for _ in range(num):
        checkpoint(fn, torch.randn(3, 4, requires_grad=True)).sum().backward()
    return found


def test_functions_without_decisions_are_watched_ever_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    found = watched_in(monkeypatch, torch.sin, 40)
    assert [number for number, watched in enumerate(found, 1) if watched is ALL] == [*range(1, 9), 16, 32]
    assert all(watched in (NONE, ALL) for watched in found)


def test_where_decisions_were_found_only_what_made_them_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    inside = frozenset([aten.topk.default, aten.gt.Scalar])
    found = watched_in(monkeypatch, lambda x: x.topk(2)[0].exp() * (x > 0).any(), 17)
    assert found == [ALL] * 8 + [inside] * 7 + [ALL, inside]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")
@pytest.mark.parametrize("how", ["scripted", "by name", "composite"])
def test_operations_are_watched_however_they_are_called(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    largest = {
        "scripted": torch.jit.script(_largest),
        "by name": _largest_by_name,
        "composite": _largest_by_sort,
    }
    operation = aten.sort.stable if how == "composite" else aten.topk.default
    found = watched_in(monkeypatch, lambda x: largest[how](x).exp(), 9)
    assert found == [ALL] * 8 + [frozenset([operation])]


def _largest(x: Tensor) -> Tensor:
    return x.topk(2)[0]


def _largest_by_name(x: Tensor) -> Tensor:
    values: Tensor = aten.topk(x, 2)[0]
    return values


def _largest_by_sort(x: Tensor) -> Tensor:
    return x.gather(1, x.argsort(dim=1, stable=True)[:, -2:])


def test_a_function_that_begins_to_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(4, 4)
    assert watched_in(monkeypatch, layer, 15) == [ALL] * 8 + [NONE] * 7
    layer.forward = lambda x: layer.weight.sum() * x.topk(2)[0].exp()  # type: ignore[method-assign]
    # Its 16th call, and those after it.
    assert watched_in(monkeypatch, layer, 3) == [ALL, *2 * [frozenset([aten.topk.default])]]


def test_contexts_of_others_see_all_operations() -> None:
    """Selective checkpointing of torch's own keeps results by itself, and counts operations."""
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    def contexts() -> Any:
        return create_selective_checkpoint_contexts([torch.ops.aten.topk.default])

    x = torch.randn(5, 4, requires_grad=True)
    (plain,) = torch.autograd.grad(x.topk(2)[0].exp().sum(), x)
    for _ in range(2):
        loss = recoup.torch_checkpoint(lambda x: x.topk(2)[0].exp(), x, context_fn=contexts).sum()
        assert torch.equal(torch.autograd.grad(loss, x)[0], plain)


# Inside each other, in a row


def stack_of(num: int) -> tuple[nn.Sequential, Tensor, list[Tensor]]:
    torch.manual_seed(4)
    model = nn.Sequential(
        *(Experts(CHOICES[choice]) for choice in ("topk", "argmax", "comparison", "sort")[:num])
    )
    x = torch.randn(NUM_TIES, 6)
    return model, x, gradients(model, model, x)


def test_checkpoints_inside_each_other() -> None:
    model, x, plain = stack_of(3)

    def inner(x: Tensor) -> Tensor:
        return checkpoint(model[2], checkpoint(model[1], model[0](x)))

    for _ in range(12):  # from the ninth on, only the operations that decide are watched
        assert_same(gradients(lambda x: checkpoint(inner, x), model, x), plain)


def test_a_replay_inside_adds_nothing_to_what_the_call_around_it_keeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x, plain = stack_of(2)
    late: list[Any] = []
    add = decisions.Recording.add

    def noted(region: Any, kept: decisions.Kept) -> None:
        late.extend([kept] if region.is_settled else [])
        add(region, kept)

    monkeypatch.setattr(decisions.Recording, "add", noted)
    for _ in range(12):  # from the ninth on, only the operations that decide are watched
        run = lambda x: checkpoint(lambda x: checkpoint(model[1], checkpoint(model[0], x)), x)  # noqa: E731
        assert_same(gradients(run, model, x), plain)
    assert late == []


def test_decisions_under_vmap_are_measured_and_kept_as_they_are_in_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the ninth call as in the first: a row by itself would be small enough."""
    kept: list[Any] = []
    add = decisions.Recording.add

    def noted(region: Any, one: decisions.Kept) -> None:
        kept.append((one.operation, one.shapes, type(one.value)))
        add(region, one)

    monkeypatch.setattr(decisions.Recording, "add", noted)
    monkeypatch.setattr(decisions, "ALWAYS_KEPT_BYTES", 0)
    x = torch.randn(64, 8, requires_grad=True)
    for _ in range(12):
        checkpoint(lambda x: torch.vmap(lambda row: row * (row > 0))(x) * 2, x).sum().backward()
    assert kept == [("gt", (torch.Size([64, 8]),), type(None))] * 12


@pytest.mark.parametrize("groups", [(), (Group(0, 1), Group(2, 3)), (Group(1, 3, (Group(2, 3),)),)])
def test_spans(groups: tuple[Group, ...]) -> None:
    model, x, plain = stack_of(4)

    def run(x: Tensor) -> Tensor:
        span = Span(Checkpoint(), groups)
        for layer in model:
            x = span.call(layer, (x,), {})
        span.close()
        return x

    for _ in range(2):
        assert_same(gradients(run, model, x), plain)


def test_a_backward_inside() -> None:
    def fn(x: Tensor) -> Tensor:
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            inner = checkpoint(lambda y: near_ties(y).argmax(-1)[:, None] * y.exp(), y)
            (gradient,) = torch.autograd.grad(inner.sum(), y)
        return x.sin() * gradient * (x.topk(1)[1] + 1)

    x = torch.randn(5, 4, requires_grad=True)
    (plain,) = torch.autograd.grad(fn(x).sum(), x)
    for _ in range(2):
        assert torch.equal(torch.autograd.grad(checkpoint(fn, x).sum(), x)[0], plain)


def test_operations_that_take_functions() -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,)).exp()

    x = torch.randn(5, 4, requires_grad=True)
    run = torch.compile(fn, backend="aot_eager")
    (plain,) = torch.autograd.grad(run(x).sum(), x)
    for _ in range(2):
        assert torch.equal(torch.autograd.grad(checkpoint(run, x).sum(), x)[0], plain)


def test_compiled_code_runs_compiled() -> None:
    compiled = torch.compile(lambda x: x.sin().exp() * 2, backend="aot_eager")
    x = torch.randn(5, 4, requires_grad=True)
    torch._dynamo.utils.counters.clear()
    for _ in range(12):
        checkpoint(lambda x: compiled(x) * x.argmax(), x).sum().backward()
    # Dispatch keys are part of what code is compiled for: once where all is watched, once where operations are.
    assert torch._dynamo.utils.counters["frames"] == {"total": 2, "ok": 2}


def test_sites_of_which_only_every_third_call_decides_are_found() -> None:
    """As a function that runs one layer after the other."""
    layers = [lambda x: x.exp(), lambda x: x.sin(), lambda x: x.topk(2)[0].exp()]

    def run(number: int, x: Tensor) -> Tensor:
        return layers[number % 3](x)

    kept = 0
    for number in range(12):
        output = checkpoint(run, number, torch.randn(3, 4, requires_grad=True))
        kept += "topk" in recoup.describe(output)
    assert kept == 4


def test_a_module_that_runs_one_layer_after_the_other() -> None:
    """All calls have one site: the module that the function captures. Every third one decides, and ties flip."""

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for number in range(3):
                x = checkpoint(self.run, number, x)
            return x

        def run(self, number: int, x: Tensor) -> Tensor:
            y = self.layers[number](x)
            if number < 2:
                return y.tanh()
            chosen = (
                (torch.zeros(3, 4) + torch.arange(4) * (-1 if recoup.is_replaying() else 1)).exp().argmax(-1)
            )
            return y.tanh() * (chosen[:, None] + 1.0)

    torch.manual_seed(0)
    model, x = Layers(), torch.randn(3, 4)
    with patch.object(recoup, "is_replaying", lambda: False):
        expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    for _ in range(6):
        found = torch.autograd.grad(model(x).sum(), list(model.parameters()))
        assert all(map(torch.equal, found, expected))


def test_decisions_of_a_cache_that_the_forward_fills_are_passed_over() -> None:
    cache: dict[int, Tensor] = {}

    def run(x: Tensor) -> Tensor:
        if len(x) not in cache:
            cache[len(x)] = torch.ones(len(x), 1) == 0
        return x.masked_fill(cache[len(x)], 0.0).topk(2)[0].exp()

    x = torch.randn(3, 4, requires_grad=True)
    (plain,) = torch.autograd.grad(run(x).sum(), x)
    cache.clear()
    (found,) = torch.autograd.grad(checkpoint(run, x).sum(), x)
    assert torch.equal(found, plain)


LASTING: dict[str, Tensor] = {}
"""A cache that a replay does not put back: no attribute of a module."""


class CachingTopk(nn.Module):
    """Takes a top-k of its own once, in its first forward, and then one of what it is given."""

    def __init__(self, *, lasting: bool) -> None:
        super().__init__()
        self.cache: dict[str, Tensor] = {}
        self.lasting = lasting
        self.scores = nn.Parameter(torch.tensor([[3.0, 2.0, 1.0, 0.0]] * 3))

    def forward(self, x: Tensor) -> Tensor:
        cache = LASTING if self.lasting else self.cache
        if "own" not in cache:
            cache["own"] = self.scores.detach().topk(2).indices
        chosen = x.topk(2).indices
        return (x.gather(-1, chosen) * self.scores.gather(-1, cache["own"])).exp()


@pytest.mark.parametrize("check", ["metadata", "sampled", "values"])
@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("num_calls_before", [0, 9])
@pytest.mark.parametrize("lasting", [False, True])
def test_a_cache_that_is_filled_like_a_later_decision(
    lasting: bool, num_calls_before: int, early_stop: bool, check: Any
) -> None:
    """It cannot be told which of the two the replay makes: never the wrong one without a word."""
    LASTING.clear()
    model = CachingTopk(lasting=lasting)
    options = Checkpoint(check=check, early_stop=early_stop)
    x = torch.tensor([[0.0, 1.0, 2.0, 3.0]] * 3)
    plain = gradients(model, model, x)
    for _ in range(num_calls_before):
        assert_same(gradients(lambda x: options(model, x), model, x), plain)
    LASTING.clear()
    model.cache.clear()
    if not lasting:
        assert_same(gradients(lambda x: options(model, x), model, x), plain)
        return
    with pytest.raises(
        ReplayMismatchError,
        match=r"module CachingTopk .*The forward made 2 decisions topk of \[3, 4\], the replay only 1.*cache",
    ):
        gradients(lambda x: options(model, x), model, x)
    assert_same(gradients(lambda x: options(model, x), model, x), plain)  # the cache is there by now


def test_a_span_whose_call_fills_a_cache_like_a_later_decision() -> None:
    LASTING.clear()
    model = CachingTopk(lasting=True)
    x = torch.tensor([[0.0, 1.0, 2.0, 3.0]] * 3)

    def run(x: Tensor) -> Tensor:
        span = Span(Checkpoint(check="metadata"), (Group(0, 1), Group(2, 3)))
        for layer in (torch.sin, model, torch.sin, torch.sin):
            x = span.call(layer, (x,), {})
        span.close()
        return x

    with pytest.raises(
        ReplayMismatchError, match=r"The forward made 2 decisions topk of \[3, 4\], the replay only 1"
    ):
        gradients(run, model, x)


def test_a_log_that_decides_like_what_follows() -> None:
    def run(x: Tensor) -> Tensor:
        if not recoup.is_replaying():
            SEEN.append((x > 0.5).int().flatten().tolist())
        return (x * (x > 0)).exp()

    x = torch.randn(3, 4, requires_grad=True)
    with pytest.raises(
        ReplayMismatchError, match=r"2 decisions gt of \[3, 4\], the replay only 1.*log outside"
    ):
        Checkpoint(check="metadata")(run, x).sum().backward()


def test_decisions_behind_what_the_replay_stops_at_are_not_missed() -> None:
    def run(x: Tensor) -> Tensor:
        y = (x * (x > 0)).exp()
        return y * 2 + (y > 1).sum()

    x = torch.randn(3, 4, requires_grad=True)
    (plain,) = torch.autograd.grad(run(x).sum(), x)
    for _ in range(3):
        assert torch.equal(torch.autograd.grad(Checkpoint(check="metadata")(run, x).sum(), x)[0], plain)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_code_may_decide(backend: str) -> None:
    compiled = torch.compile(lambda x: x.topk(2)[0].exp(), backend=backend)
    x = torch.randn(5, 4, requires_grad=True)
    (plain,) = torch.autograd.grad(x.topk(2)[0].exp().sum() * 2, x)
    for _ in range(12):
        output = checkpoint(lambda x: compiled(x) * (x.argmax() + 2).clamp(max=2), x)
        assert torch.equal(torch.autograd.grad(output.sum(), x)[0], plain)


def test_sizes_and_layouts_of_nested_tensors_are_no_decisions() -> None:
    layer = nn.Linear(8, 8)
    x = torch.nested.nested_tensor(
        [torch.randn(3, 8), torch.randn(5, 8)], layout=torch.jagged, requires_grad=True
    )

    def weight_gradient(run: Callable[[Tensor], Tensor]) -> Tensor:
        layer.zero_grad()
        x.grad = None  # torch cannot add to it
        run(x).values().sum().backward()
        assert layer.weight.grad is not None
        return layer.weight.grad.clone()

    def function(x: Tensor) -> Tensor:
        return torch.sin(layer(x))

    expected = weight_gradient(function)
    for _ in range(12):
        assert torch.equal(weight_gradient(lambda x: checkpoint(function, x)), expected)


def test_what_kernels_run_inside_is_not_watched() -> None:
    """``torch.normal`` compares its deviations in its kernel, by an operation that decides elsewhere."""
    deviations = torch.full((4,), 0.1)

    def inner(x: Tensor) -> Tensor:
        noise = torch.normal(torch.zeros(4), deviations)
        return x * (x >= 0) * noise

    def outer(x: Tensor) -> Tensor:
        return checkpoint(inner, x).exp()

    def gradient(run: Callable[[Tensor], Tensor]) -> Tensor:
        torch.manual_seed(3)
        x = torch.randn(4, requires_grad=True)
        run(x).sum().backward()
        assert x.grad is not None
        return x.grad

    expected = gradient(lambda x: inner(x).exp())
    for _ in range(20):
        assert torch.equal(gradient(lambda x: checkpoint(outer, x)), expected)
