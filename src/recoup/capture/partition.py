"""Cutting a unit's joint graph into forward and backward where a plan says."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from recoup.capture.cut import Cut
from recoup.capture.graph import DROPOUT, UnitGraph, changed_inputs, is_random, is_view, masked_result
from recoup.capture.masks import is_packed, pack
from recoup.torch_private import default_partition, keep_order, min_cut_partition

__all__ = ["dropouts_as_eager", "partition"]

Parts = tuple[GraphModule, GraphModule]
"""A forward and a backward."""
_TIMES, _ZEROS = torch.ops.aten.mul.Tensor, torch.ops.aten.zeros_like.default
_CONTIGUOUS: dict[str, Any] = {"memory_format": torch.contiguous_format}
_REPEATED_DROPOUT = torch.ops.aten.native_dropout_backward.default


def partition(
    cut: Cut, joint: GraphModule, inputs: Sequence[Any], *, num_fwd_outputs: int, **given: Any
) -> Parts:
    """The forward and the backward of a joint graph.

    Every decision is forced on torch's partitioner, which prices pointwise work and random numbers wrongly: with its
    own memory budget it draws random numbers a second time, and gradients are wrong.
    """
    split = _keep_all if cut.engine == "captured" else min_cut_partition
    dropouts_as_eager(joint)
    graph = UnitGraph.of(joint.graph, num_fwd_outputs)
    if cut.engine == "compiled" and graph.draws:
        keep_order()
    if cut.saves is None:
        _keep_what_runs_once(graph)
        return split(joint, inputs, num_fwd_outputs=num_fwd_outputs, **given)
    _forget_checkpoints(joint)
    kept, again = graph.recomputed(cut.saves)
    dropped = {node for node in again if _is_of_dropout(node)}
    again = again - dropped | {_made_again(joint, node) for node in dropped}
    for mask in [node for node in kept if is_packed(node) and node.users]:
        bits, unpacked = pack(joint, mask)
        kept, again = kept - {mask} | {bits}, again | unpacked
    kept |= {_copied(joint, node) for node in changed_inputs(joint.graph) if _is_read_by(node, again)}
    _mark(kept, CheckpointPolicy.MUST_SAVE)
    _mark(again, CheckpointPolicy.MUST_RECOMPUTE)
    return min_cut_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **given)


def dropouts_as_eager(joint: GraphModule) -> None:
    """Lets dropouts do what they do in eager code, to the last bit.

    Dropouts of everything are replaced: eager code draws no random numbers for them, the captured operation would. The
    backward of the others multiplies by the same number as their forward. Its gradient is made contiguous where torch's
    fake tensors foresee other strides of the result than those of the gradient, which the kernel keeps.
    """
    for node in joint.graph.find_nodes(op="call_function", target=_REPEATED_DROPOUT):
        gradient, mask, scale = node.args
        if gradient.meta["val"].stride() != node.meta["val"].stride():
            with joint.graph.inserting_before(node):
                copy = joint.graph.call_function(torch.ops.aten.clone.default, (gradient,), _CONTIGUOUS)
            copy.meta = {**gradient.meta, "val": gradient.meta["val"].clone(**_CONTIGUOUS)}
            gradient = copy
        node.args = (gradient, mask, _scale(gradient, scale))
    for node in joint.graph.find_nodes(op="call_function", target=DROPOUT):
        x, p, train = node.args
        if p != 1.0 or train is False:
            continue
        for part in list(node.users):
            made = (_TIMES, (x, 0.0), {}) if part.args[1] == 0 else (_ZEROS, (x,), {"dtype": torch.bool})
            with joint.graph.inserting_before(part):
                nothing = joint.graph.call_function(*made)
            nothing.meta = dict(part.meta)
            part.replace_all_uses_with(nothing)
            joint.graph.erase_node(part)
        joint.graph.erase_node(node)


def _forget_checkpoints(joint: GraphModule) -> None:
    """Removes what checkpoints in the unit's own code have marked: a dropout in one would be drawn a second time."""
    for node in joint.graph.nodes:
        node.meta.pop("recompute", None)


def _is_of_dropout(node: Node) -> bool:
    """Whether a node is a dropout's result."""
    return node.target is operator.getitem and masked_result(node.all_input_nodes[0]) is node


def _made_again(joint: GraphModule, result: Node) -> Node:
    """What makes a dropout's result from its input and its mask, instead of the dropout itself.

    It has the same bits: the mask is 0 or 1, and the product is scaled once.
    """
    dropout: Node = result.args[0]  # type: ignore[assignment]
    x, p, _ = cast("tuple[Node, float, bool]", dropout.args)
    mask = next(user for user in dropout.users if user.args[1] == 1)
    later = max(result, mask)
    with joint.graph.inserting_after(later):
        again = joint.graph.call_function(_REPEATED_DROPOUT, (x, mask, _scale(x, 1.0 / (1.0 - p))))
    again.meta = dict(result.meta)
    result.replace_all_uses_with(again)
    joint.graph.erase_node(result)
    return again


def _scale(x: Any, scale: Any) -> Any:
    """What a dropout multiplies by: on a CPU it is rounded to the tensor's dtype, which matters in 16 bits."""
    tensor = x.meta["val"]
    if tensor.device.type != "cpu":
        return scale
    last_digit = torch.finfo(tensor.dtype).eps * 2.0 ** (math.frexp(scale)[1] - 1)
    return round(scale / last_digit) * last_digit


def _is_read_by(node: Node, again: set[Node]) -> bool:
    """Whether nodes read a node's result, or a view of it."""
    return any(user in again or (is_view(user) and _is_read_by(user, again)) for user in node.users)


def _copied(joint: GraphModule, changed: Node) -> Node:
    """A copy of an input from before the forward changes it in place, which all operations read instead."""
    first = next(node for node in joint.graph.nodes if node.op != "placeholder")
    with joint.graph.inserting_before(first):
        copy = joint.graph.call_function(torch.ops.aten.clone.default, (changed,))
    copy.meta = {"val": changed.meta["val"].clone()}
    changed.replace_all_uses_with(copy, lambda user: user is not copy and user.op != "output")
    return copy


def _keep_all(joint: GraphModule, inputs: Sequence[Any], **given: Any) -> Parts:
    given.pop("compiler", None)
    return default_partition(joint, inputs, **given)


def _keep_what_runs_once(graph: UnitGraph) -> None:
    kept, _ = graph.recomputed(graph.names(graph.needed))
    once = {value for op in graph.operations if not op.is_replayable for value in op.outputs}
    made_once = {graph.makers[value] for value in once}
    _mark(made_once | {node for node in kept if _is_drawn(node)}, CheckpointPolicy.MUST_SAVE)


def _is_drawn(node: Node) -> bool:
    return is_random(node) or (node.target is operator.getitem and is_random(node.args[0]))  # type: ignore[arg-type]


def _mark(nodes: set[Node], policy: CheckpointPolicy) -> None:
    for node in nodes:
        node.meta["recompute"] = policy
        node.meta["ac_graph_id"] = 0
