"""Draws what FSDP2 gathers when, without a plan and with two: the picture of ``docs/howto/ranks.md``.

Run it with ``python docs/draw_gathers.py``. Events are read from ``gathers.json``, which ``--measure`` records in a
real step of a model with four blocks on two ranks over gloo; ``tests/ranks`` records them again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing
from drawing import DOCS, LEFT, RIGHT, WIDTH, Picture, write
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

import recoup
from recoup.policies import Policy, UniformSegments

EVENTS = DOCS / "gathers.json"
NUM_BLOCKS = 4
ROOT = "root"
ROWS = (ROOT, *(f"block {index}" for index in range(NUM_BLOCKS)))
PLANS: dict[str, Policy | None] = {
    "Without a plan": None,
    "Every block recomputed by itself": UniformSegments(NUM_BLOCKS),
    "Segments of two blocks, recomputed together": UniformSegments(2),
}
COLOURS = {"forward": "blue", "replay": "purple", "backward": "green"}
ROW, HEAD, GAP = 20, 30, 22

Event = tuple[str, str]
_events: list[Event] = []


class Part(nn.Module):
    """A linear layer that notes when it runs."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.linear = name, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """The layer and an activation."""
        _events.append(("replay" if recoup.is_replaying() else "forward", self.name))
        return torch.sin(self.linear(x))


class Net(nn.Module):
    """Blocks between two layers that belong to the root's group."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Part(ROOT), Part(ROOT)
        self.blocks = nn.ModuleList(Part(f"block {index}") for index in range(NUM_BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        """One after the other."""
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x).sum()


@contextmanager
def noted() -> Iterator[None]:
    """Groups of parameters note when they are gathered, freed and reduced."""
    group = _fsdp_param_group.FSDPParamGroup
    unshard, reshard, post_backward = group.unshard, group.reshard, group.post_backward
    gather, num_gathers = _fsdp_param_group.foreach_all_gather, 0

    def name(one: Any) -> str:
        return f"block {one._module_fqn.split('.')[-1]}" if one._module_fqn else ROOT

    def gathering(*args: Any) -> Any:
        nonlocal num_gathers
        num_gathers += 1
        return gather(*args)

    def unsharding(one: Any, *args: Any, **kwargs: Any) -> None:
        before = num_gathers
        unshard(one, *args, **kwargs)
        if num_gathers > before:
            _events.append(("gather", name(one)))

    def resharding(one: Any) -> None:
        was_there = one.is_unsharded
        reshard(one)
        if was_there and one.is_sharded:
            _events.append(("free", name(one)))

    def after(one: Any, *unused: Any) -> None:
        _events.append(("backward", name(one)))
        post_backward(one, *unused)
        _events.append(("reduce", name(one)))

    with (
        patch.multiple(group, unshard=unsharding, reshard=resharding, post_backward=after),
        patch.object(_fsdp_param_group, "foreach_all_gather", gathering),
    ):
        yield


def record(policy: Policy | None) -> list[Event]:
    """The events of a step; torch.distributed is initialised."""
    torch.manual_seed(0)
    model, mesh = Net(), init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if policy is not None:
        recoup.apply(model, policy, units="blocks.*")
    x = torch.randn(4, 8)
    model(x).backward()  # the first step also learns the order of groups
    model.zero_grad()
    with noted():
        _events.clear()
        model(x).backward()
    return list(_events)


def record_all() -> dict[str, list[Event]]:
    """The events of every panel, by its title."""
    return {title: record(policy) for title, policy in PLANS.items()}


def panel(picture: Picture, top: float, title: str, events: list[Event], most_columns: int) -> None:
    """Rows of groups; a column for each forward, replay and backward."""
    width = (WIDTH - LEFT - RIGHT) / most_columns
    num_gathers = sum(kind == "gather" for kind, _ in events)
    picture.text(LEFT, top + 16, title, kind="title")
    picture.text(WIDTH - RIGHT, top + 16, f"{num_gathers} gathers", anchor="end")
    first = top + HEAD

    def y(name: str) -> float:
        return first + ROWS.index(name) * ROW

    for name in ROWS:
        picture.text(LEFT - 9, y(name) + 15, name, anchor="end", kind="soft")
    since: dict[str, int] = {}
    spans: list[tuple[str, int, int]] = []
    computed: list[Event] = []
    reduced: list[tuple[str, int]] = []
    for kind, name in events:
        if kind == "gather":
            since[name] = len(computed)
        elif kind == "free":
            spans.append((name, since.pop(name), len(computed)))
        elif kind == "reduce":
            reduced.append((name, len(computed)))
        else:
            computed.append((kind, name))
    spans += [(name, start, len(computed)) for name, start in since.items()]
    for name, start, end in spans:
        picture.box(LEFT + start * width, y(name), (end - start) * width, ROW - 3, "area")
        picture.box(LEFT + start * width, y(name), 3, ROW - 3, "orange")
    for column, (kind, name) in enumerate(computed):
        picture.box(LEFT + column * width + 4, y(name) + 4, width - 6, ROW - 11, COLOURS[kind])
    for name, column in reduced:
        picture.box(LEFT + column * width - 3, y(name), 3, ROW - 3, "brown")


def pictures() -> dict[str, str]:
    """All pictures by their names."""
    panels = {
        title: [(kind, name) for kind, name in events]
        for title, events in json.loads(EVENTS.read_text(encoding="utf-8")).items()
    }
    most_columns = max(sum(kind in COLOURS for kind, _ in events) for events in panels.values())
    height = HEAD + len(ROWS) * ROW + GAP
    picture = Picture(
        len(panels) * height + 52,
        "What FSDP2 gathers when, without a plan and with two",
        description="Rows are groups of parameters, columns what is computed, in the order of a real step.",
    )
    for index, (title, events) in enumerate(panels.items()):
        panel(picture, 8 + index * height, title, events, most_columns)
    bottom = 8 + len(panels) * height
    picture.legend(
        LEFT, bottom + 10, {"area": "gathered", "orange": "gather begins", "brown": "gradients are reduced"}
    )
    picture.legend(LEFT, bottom + 32, {"blue": "forward", "purple": "replay", "green": "backward"})
    return {"howto/gathers.svg": picture.svg()}


def measure(rank: int, port: int) -> None:
    """Records the events on one of two ranks; the first writes them."""
    store = dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    found = record_all()
    dist.destroy_process_group()
    if rank == 0:
        lines = [f"  {json.dumps(title)}: {json.dumps(events)}" for title, events in found.items()]
        EVENTS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", action="store_true")
    if parser.parse_args().measure:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        torch.multiprocessing.spawn(measure, (server.port,), nprocs=2)
    write(pictures())
