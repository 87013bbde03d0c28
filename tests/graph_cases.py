"""Graphs for the planning tests and benchmarks: the shared instances and seeded random ones."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

from recoup.planning.graphs import Operation, OpGraph, OrderedGraph

INSTANCES = Path(__file__).parent / "planning" / "instances"


def instance(name: str) -> OrderedGraph:
    """One of the shared graphs, its published plain figures checked."""
    data = json.loads((INSTANCES / f"{name}.json").read_text())
    graph = OrderedGraph.from_edges(
        [node["bytes"] for node in data["nodes"]],
        [node["cost"] for node in data["nodes"]],
        edges=[(a, b) for a, b in data["edges"]],
    )
    assert graph.plain_peak_bytes == data["plain_peak"]
    assert graph.plain_s == data["plain_cost"]
    return graph


def budget_of(graph: OrderedGraph, share: float) -> int:
    return math.ceil(share * graph.plain_peak_bytes)


def random_ordered(rng: random.Random, num_ops: int) -> OrderedGraph:
    inputs = []
    for op in range(num_ops):
        num_inputs = min(op, rng.randint(0 if op == 0 else 1, 3))
        inputs.append(tuple(sorted(rng.sample(range(op), num_inputs))))
    sizes = tuple(rng.randint(0, 9) for _ in range(num_ops))
    return OrderedGraph(sizes, tuple(float(rng.randint(0, 9)) for _ in range(num_ops)), tuple(inputs))


def training_graph(num_ops: int, *, seed: int) -> OrderedGraph:
    """A forward chain with skips, then its backward, which reads what the forward made; unequal costs."""
    rng = random.Random(seed)
    half = num_ops // 2
    inputs: list[tuple[int, ...]] = []
    for op in range(half):
        read = {op - 1} if op else set()
        if op > 2 and rng.random() < 0.3:
            read.add(op - 1 - rng.randrange(1, min(op, 8)))
        inputs.append(tuple(sorted(read)))
    sizes = [rng.randint(1, 100) * 4096 for _ in range(half)]
    seconds = [float(rng.randint(1, 100)) for _ in range(half)]
    for index in range(num_ops - half):
        forward = max(half - 1 - index, 0)
        read = {len(inputs) - 1, *inputs[forward]} | ({forward} if rng.random() < 0.6 else set())
        inputs.append(tuple(sorted(read)))
        sizes.append(sizes[forward])
        seconds.append(2 * seconds[forward])
    return OrderedGraph(tuple(sizes), tuple(seconds), tuple(inputs))


def wide_graph(num_ops: int, *, seed: int) -> OrderedGraph:
    """Random layers of 4 to 12 operations, each reading up to four values of the last four layers."""
    rng = random.Random(seed)
    inputs: list[tuple[int, ...]] = [()]
    layers = [[0]]
    while len(inputs) < num_ops:
        layer = []
        near = [value for earlier in layers[-4:] for value in earlier]
        for _ in range(min(rng.randint(4, 12), num_ops - len(inputs))):
            layer.append(len(inputs))
            inputs.append(tuple(sorted(rng.sample(near, min(len(near), rng.randint(1, 4))))))
        layers.append(layer)
    sizes = tuple(rng.randint(1, 100) * 64 for _ in inputs)
    return OrderedGraph(sizes, tuple(float(rng.randint(1, 1000)) for _ in inputs), tuple(inputs))


def random_ops(rng: random.Random, num_ops: int) -> OpGraph:
    """A small forward pass with all the difficulties: several outputs, free and irreplaceable values."""
    num_inputs = rng.randint(1, 2)
    values = list(range(num_inputs))
    operations = []
    for _ in range(num_ops):
        read = tuple(sorted(rng.sample(values, min(len(values), rng.randint(1, 3)))))
        made = tuple(range(len(values), len(values) + rng.choice((1, 1, 2))))
        values.extend(made)
        operations.append(Operation(rng.randint(0, 9) * 1e-3, read, made, is_replayable=rng.random() < 0.9))
    resident = tuple(value for value in values if rng.random() < (0.5 if value < num_inputs else 0.15))
    needed = tuple(sorted(rng.sample(values, rng.randint(1, len(values)))))
    return OpGraph(tuple(rng.randint(0, 20) for _ in values), tuple(operations), needed, resident)


def long_ops(num_ops: int, *, seed: int, needed_share: float = 0.7) -> OpGraph:
    """A long forward pass in which all operations differ."""
    rng = random.Random(seed)
    operations, sizes = [], [1000]
    for op in range(num_ops):
        read = {op} | ({max(0, op - rng.randrange(1, 8))} if rng.random() < 0.4 else set())
        operations.append(Operation(rng.randint(1, 1000) * 1e-6, tuple(sorted(read)), (op + 1,)))
        sizes.append(rng.randint(1, 1000) * 1024)
    needed = tuple(value for value in range(1, num_ops + 1) if rng.random() < needed_share)
    return OpGraph(tuple(sizes), tuple(operations), needed, resident=(0,))
