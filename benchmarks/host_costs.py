"""What the primitive costs on the host: noting a module, replaying it, and watching for decisions.

Run: ``python benchmarks/host_costs.py`` (``--write`` keeps ``benchmarks/results/host_costs_HARDWARE_YYYYMM.md``). It
checks gradients before it trusts a time. Contenders are interleaved; the table has medians over rounds, and quartiles.

The modules are layers of transformers' ViT and Mixtral, so small that the host sets the pace.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_own

import recoup
from recoup.checkpointing import state
from recoup.checkpointing.decisions import ALL, NONE, Operations, Recording, intercept_all, run_in
from recoup.checkpointing.module_tree import note_tree
from recoup.checkpointing.reach import Reach

RESULTS = Path(__file__).parent / "results"
NUM_OPERATIONS = 20
NUM_UNTIMED = 40
"""Steps before any is timed: of a call site's first, all operations are watched, and replays are compared."""
Calls = dict[str, Callable[[], Any]]


def microseconds(calls: Calls, num_rounds: int, num_calls: int = 10) -> dict[str, list[float]]:
    """Microseconds of each call, round by round."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(num_rounds):
        for name, call in calls.items():
            call()
            start = time.perf_counter()
            for _ in range(num_calls):
                call()
            times[name].append((time.perf_counter() - start) / num_calls * 1e6)
    return times


def row(what: str, values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"| {what} | {middle:.1f} | {low:.1f} to {high:.1f} |"


def layer_of_vit() -> nn.Module:
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(num_hidden_layers=1, hidden_size=16, num_attention_heads=2, intermediate_size=32)
    model = ViTModel(config)
    return next(module for module in model.modules() if type(module).__name__ == "ViTLayer").train()


def noting(num_rounds: int) -> list[str]:
    """What a call notes of its module, and what its replay looks at: at once, and attribute by attribute."""
    layer = layer_of_vit()

    def note() -> state.FunctionState:
        return state.FunctionState(Reach(layer, []), preserve_buffers=True)

    def note_one_by_one() -> state.FunctionState:
        vars(state)["note_tree"] = lambda root: None
        try:
            return note()
        finally:
            vars(state)["note_tree"] = note_tree

    def look_again(noted: state.FunctionState) -> None:
        with ExitStack() as stack:
            noted.enter(stack)

    at_once, apart = note(), note_one_by_one()
    assert [len(each._trees) for each in (at_once, apart)] == [1, 0]
    assert {*map(id, at_once._tensors)} == {*map(id, apart._tensors)} == {*map(id, layer.parameters())}
    calls: Calls = {
        "noting a layer of ViT in a call": note,
        "the same, attribute by attribute": note_one_by_one,
        "putting its state back for a replay, and back again": lambda: look_again(at_once),
        "the same, noted attribute by attribute": lambda: look_again(apart),
    }
    return [row(what, times) for what, times in microseconds(calls, num_rounds).items()]


def layer_of_mixtral() -> nn.Module:
    """A layer with experts, of which only the hidden states vary."""
    from transformers import MixtralConfig, MixtralModel

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = MixtralConfig(
                vocab_size=8, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                num_key_value_heads=2, head_dim=8,
            )  # fmt: skip
            self.layer = MixtralModel(config).layers[0]

        def forward(self, x: Tensor) -> Any:
            angles = torch.ones(1, x.shape[1], 8)
            return self.layer(x, position_embeddings=(angles.cos(), angles.sin()))

    return Layer().train()


def replaying(name: str, layer: nn.Module, options: dict[str, Any], num_rounds: int) -> list[str]:
    """What a checkpointed call takes above two forwards and a backward."""
    x, checkpoint = torch.randn(1, 4, 16, requires_grad=True), recoup.Checkpoint(**options)
    given = ", ".join(f"{key}={value!r}" for key, value in options.items())

    def output(y: Any) -> Tensor:
        return y if isinstance(y, Tensor) else y[0]

    def step(call: Callable[[Tensor], Any]) -> tuple[Tensor | None, ...]:
        loss = output(call(x * 1)).sum()
        return torch.autograd.grad(loss, [x, *layer.parameters()], allow_unused=True)

    calls: Calls = {
        "plain": lambda: step(layer),
        "forward": lambda: layer(x * 1),
        "recoup": lambda: step(lambda y: checkpoint(layer, y)),
        "torch": lambda: step(lambda y: torch_own(layer, y, use_reentrant=False)),
    }
    for contender in ("recoup", "torch"):
        for _ in range(NUM_UNTIMED):
            for one, other in zip(calls[contender](), calls["plain"](), strict=True):
                assert (one is None) is (other is None), contender
                assert one is None or torch.equal(one, other), contender
    times = microseconds(calls, num_rounds)

    def above(contender: str) -> list[float]:
        plain, forward = times["plain"], times["forward"]
        return [own - once - again for own, once, again in zip(times[contender], plain, forward, strict=True)]

    return [
        row(f"forward and backward of a layer of {name}", times["plain"]),
        row("its forward", times["forward"]),
        row(f"checkpointing it, above both: `recoup.Checkpoint({given})`", above("recoup")),
        row("the same, `torch.utils.checkpoint.checkpoint(use_reentrant=False)`", above("torch")),
    ]


def watching(num_rounds: int) -> list[str]:
    """What an operation takes longer while a call site is watched."""
    x = torch.randn(8)

    def sines() -> Tensor:
        y = x
        for _ in range(NUM_OPERATIONS):
            y = y.sin()
        return y

    def run(watched: Operations) -> Any:
        region = Recording(1 << 16, watched)
        found = run_in(region, sines, (), {})
        assert not region.kept
        return found

    topk = frozenset([torch.ops.aten.topk.default])
    intercept_all(topk)
    ways = {"none": NONE, "all": ALL, "inside": topk}
    calls: Calls = {name: partial(run, watched) for name, watched in ways.items()}
    assert all(torch.equal(call(), sines()) for call in calls.values())
    above = microseconds_above(calls, num_rounds)
    return [
        row("an operation that is not watched", above["none"]),
        row(
            "above that, where all is watched: until it is known which operations decide, and now and then",
            above["all"],
        ),
        row("above that, where other operations decide", above["inside"]),
        *(
            row(f"what {name} takes longer where it decides", deciding(run, num_rounds))
            for name, run in DECIDING.items()
        ),
    ]


def microseconds_above(calls: Calls, num_rounds: int) -> dict[str, list[float]]:
    """Microseconds of an operation in the first call, and by how much one takes longer in each of the others."""
    times = {
        name: [each / NUM_OPERATIONS for each in found]
        for name, found in microseconds(calls, num_rounds).items()
    }
    first, *others = times
    above = {
        name: [own - plain for own, plain in zip(times[name], times[first], strict=True)] for name in others
    }
    return {first: times[first]} | above


DECIDING: dict[str, Callable[[Tensor], Any]] = {
    "a comparison": lambda x: x > 0,
    "a top-k": lambda x: x.topk(2),
}


def deciding(run: Callable[[Tensor], Any], num_rounds: int) -> list[float]:
    """What a forward does more for an operation whose result it keeps."""
    x = torch.randn(8)
    operations = frozenset([torch.ops.aten.gt.Scalar, torch.ops.aten.topk.default])
    intercept_all(operations)

    def repeated(watched: Operations) -> int:
        region = Recording(1 << 16, watched)

        def runs() -> None:
            for _ in range(NUM_OPERATIONS):
                run(x)

        run_in(region, runs, (), {})
        return len(region.kept)

    calls: Calls = {"none": partial(repeated, NONE), "kept": partial(repeated, operations)}
    assert [call() for call in calls.values()] == [0, NUM_OPERATIONS]
    return microseconds_above(calls, num_rounds)["kept"]


def report(rows: list[str], num_rounds: int) -> str:
    today = datetime.date.today().isoformat()
    versions = f"torch {torch.__version__}, Python {platform.python_version()}, recoup {recoup.__version__}"
    return "\n".join(
        [
            f"# What the primitive costs on the host, {hardware()}, {today}",
            "",
            f"`python benchmarks/host_costs.py --rounds {num_rounds}`, one CPU thread of {os.cpu_count()} cores,"
            f" load {os.getloadavg()[0]:.1f} at the end. {versions}.",
            "",
            "| what | µs, median | quartiles |",
            "|---|---|---|",
            *rows,
            "",
        ]
    )


def hardware() -> str:
    return f"cpu-{platform.machine().lower()}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=300, help="rounds of 10 calls for each contender")
    parser.add_argument("--write", action="store_true", help="keep the result under benchmarks/results")
    options: Any = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    by_kind = {"check": "metadata", "keep_decisions": False}
    rows = [
        *noting(options.rounds),
        *replaying("ViT", layer_of_vit(), by_kind, options.rounds),
        *replaying("Mixtral", layer_of_mixtral(), {}, options.rounds),
        *watching(options.rounds),
    ]
    text = report(rows, options.rounds)
    print(text)
    if options.write:
        path = RESULTS / f"host_costs_{hardware()}_{datetime.date.today():%Y%m}.md"
        path.write_text(text)
        print(f"Written to {path}")


if __name__ == "__main__":
    main()
