"""Running a module at cuts of its captured graph, and what such a run may be compared by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from recoup.capture.cut import Cut
from recoup.capture.graph import UnitGraph
from recoup.capture.run import capture, run_cut
from recoup.measuring import MemoryTracker
from recoup.tensors import tensors_in
from recoup.torch_private import WatchingMode

Args = tuple[tuple[Any, ...], dict[str, Any]]


class Operations(WatchingMode):
    """Counts the operations that run in a ``with`` block, by name, but for views."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.counts[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


def fresh(given: Args) -> Args:
    """Copies of arguments, which are leaves."""

    def copied(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().clone().requires_grad_(value.requires_grad)
        return value

    args, kwargs = given
    return tuple(map(copied, args)), {name: copied(value) for name, value in kwargs.items()}


def captured(module: nn.Module, given: Args, engine: str = "captured") -> UnitGraph:
    args, kwargs = fresh(given)
    with kept_buffers(module):
        return capture(engine, module.forward, args, kwargs)


class kept_buffers:  # noqa: N801
    """Buffers are as before after a ``with`` block."""

    def __init__(self, module: nn.Module) -> None:
        self.buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None:
        for buffer, before in self.buffers:
            buffer.copy_(before)


def at(module: nn.Module, cut: Cut) -> Callable[..., Any]:
    """A module's forward at a cut."""
    return lambda *args, **kwargs: run_cut(cut, module.forward, args, kwargs)


def cuts(graph: UnitGraph, *, each: bool, engine: str = "captured") -> Iterator[Cut]:
    """The engine's own cut, all results, none, every other one; or each result by itself."""
    names = tuple(node.name for node in graph.makers if node.op != "placeholder")
    some = [(name,) for name in names] if each else [names[::2], names[1::2]]
    for saves in (None, names, (), *some):
        yield Cut(engine, graph.digest, saves)


def step(
    module: nn.Module, run: Callable[..., Any], given: Args, *, reads: Callable[[Any], Any] = lambda out: out
) -> dict[str, Any]:
    """Everything that could differ after a forward and a backward: results, gradients, buffers, random numbers."""
    args, kwargs = fresh(given)
    module.zero_grad(set_to_none=True)
    with kept_buffers(module):
        torch.manual_seed(5)
        output = run(*args, **kwargs)
        drawn = torch.get_rng_state()
        sum(one.square().sum() for one in tensors_in(reads(output)) if one.requires_grad).backward()
        assert torch.equal(torch.get_rng_state(), drawn), "the backward drew random numbers"
        seen: dict[str, Any] = {"random numbers": drawn}
        seen |= {f"buffer {name}": buffer.clone() for name, buffer in module.named_buffers()}
    seen |= {f"output {index}": one.detach().clone() for index, one in enumerate(tensors_in(output))}
    seen |= {f"gradient {index}": one.grad for index, one in enumerate(tensors_in((args, kwargs)))}
    return seen | {f"gradient {name}": parameter.grad for name, parameter in module.named_parameters()}


def assert_equal(ours: dict[str, Any], expected: dict[str, Any], cut: Cut) -> None:
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        if value is None:
            assert ours[name] is None, (name, cut)
        else:
            assert ours[name] is not None, (name, cut)
            assert torch.equal(ours[name], value), (name, cut)


def recomputed(run: Callable[..., Any], given: Args, kept: Callable[..., Any]) -> dict[str, int]:
    """The operations that a backward runs beyond those of another one."""
    counts = []
    for forward in (run, kept):
        args, kwargs = fresh(given)
        loss = sum(one.sum() for one in tensors_in(forward(*args, **kwargs)) if one.requires_grad)
        with Operations() as operations:
            loss.backward()
        counts.append(operations.counts)
    return dict(counts[0] - counts[1])


def held_bytes(run: Callable[..., Any], given: Args) -> int:
    """Bytes that a forward holds for its backward, beside arguments, parameters and outputs."""
    args, kwargs = fresh(given)
    before = {one.untyped_storage().data_ptr() for one in tensors_in((args, kwargs))}
    run(*args, **kwargs)  # nothing is compiled while bytes are counted
    with MemoryTracker() as memory:
        output = run(*args, **kwargs)
        sizes = {
            one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors_in(output)
        }
        outside = sum(size for pointer, size in sizes.items() if pointer not in before)
        return memory.current_bytes - outside
