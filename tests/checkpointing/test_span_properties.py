"""Random programs of calls: in spans, however nested, and plain they must agree bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import models
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from spans import caller, nested
from torch import Tensor

from recoup import Checkpoint
from recoup.checkpointing import Span

STEPS = st.tuples(
    st.sampled_from(["plain", "dropout", "tuple", "first", "view"]),
    st.lists(st.integers(0, 4), min_size=1, max_size=3),  # what it reads, counted from the latest value
    st.sampled_from(["fed", "copied", "changed", "detached", "transposed"]),
)


def step(index: int, *values: Tensor, kind: str) -> Any:
    total = sum((value * (1 + place)).sin() for place, value in enumerate(values))
    match kind:
        case "dropout":
            return F.dropout(total, 0.3)
        case "tuple":
            return total.exp(), {"more": total * values[0]}
        case "first":
            return values[0]
        case "view":
            return total.exp().t()
    return (total * (index + 0.5)).tanh() * 2


def between(kind: str, how: str, output: Tensor) -> Tensor:
    match how:
        case "copied":
            return output * 1
        case "changed" if kind == "plain":  # the only kind whose output no operation saves
            return output.mul_(3)
        case "detached":
            return output.detach()
        case "transposed":
            return output.t()
    return output


def run(
    program: Any, leaves: list[Tensor], num_kept: int, num_losses: int, call: Callable[..., Any]
) -> list[Tensor]:
    torch.manual_seed(3)
    values, outputs = [leaf * 1 for leaf in leaves], []
    for index, (kind, reads, how) in enumerate(program):
        inputs = [values[-1 - read % len(values)] for read in reads]
        output = call(step, index, *inputs, kind=kind)
        first, more = (output[0], [output[1]["more"]]) if kind == "tuple" else (output, [])
        outputs.append(between(kind, how, first))
        values += [outputs[-1], *more]
    found: list[Tensor] = []
    del values, inputs, output, first, more
    outputs = outputs[:num_kept]
    for number in range(num_losses):
        loss = torch.stack([(output * (1 + number)).sum() for output in [*leaves, *outputs[number:]]]).sum()
        found += torch.autograd.grad(loss, leaves, retain_graph=number < num_losses - 1)
    return found


@given(
    program=st.lists(STEPS, min_size=1, max_size=7),
    levels=st.lists(st.integers(1, 4), max_size=3),
    num_kept=st.integers(1, 7),  # of the outputs; later ones are dropped
    num_losses=st.integers(1, 3),
    early_stop=st.booleans(),
    check=st.sampled_from(["metadata", "values", "none"]),
)
@settings(deadline=None, max_examples=150, derandomize=True)
def test_any_program(
    program: Any, levels: list[int], num_kept: int, num_losses: int, early_stop: bool, check: Any
) -> None:
    """Calls that read any earlier values, changed or not in between, and several backwards through one graph."""
    options = Checkpoint(early_stop=early_stop, check=check)
    leaves = [torch.randn(2, 2, requires_grad=True) for _ in range(2)]
    expected = run(program, leaves, num_kept, num_losses, models.plainly)
    found = run(program, leaves, num_kept, num_losses, caller(Span(options, nested(levels))))
    for left, right in zip(found, expected, strict=True):
        assert torch.equal(left, right)
