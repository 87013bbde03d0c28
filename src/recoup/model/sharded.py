"""Models whose parameters `fully_shard` (FSDP2) divides over ranks.

NOTE [ Sharded models, unit by unit ]
    1. FSDP2 gathers a module's parameters in a hook before its forward, and again in a hook before its backward. While
       units run one at a time (NOTE [ Streaming ]), there is no backward of the whole step: hooks for it are off.
    2. A unit runs several times with its parameters gathered; they are freed when the next unit's turn comes. Those of
       modules around units stay until the forward ends.
    3. No rank waits for another one there: a gather fills all shards from the rank's own. The values of parameters are
       other ones then; bytes and seconds are the same, but for the communication, which runs beside the computation.
    4. Real steps are steps of all ranks.
    5. A run that did not end leaves gathered parameters and half of a state behind: both are put back.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from recoup.errors import SampleError
from recoup.torch_private import (
    add_unreduced_gradient,
    forget_gradients,
    forget_larger_shards,
    shard_groups,
    unreduced_gradients,
    without_modes,
)

__all__ = [
    "ShardGroup",
    "Shards",
    "adds_in_place",
    "class_before_sharding",
    "gather",
    "is_fsdp1",
    "is_sharding",
    "owners_of",
]


def _sharding_class(name: str = "FSDPModule") -> type | None:
    # Not imported: importing it costs a second, and who shards has done so.
    module = sys.modules.get("torch.distributed.fsdp")
    return getattr(module, name, None)


def class_before_sharding(kind: type[nn.Module]) -> type[nn.Module]:
    """The class that `fully_shard` found; the given one, if that is not of its making."""
    sharding = _sharding_class()
    if sharding is None or kind.__bases__[:1] != (sharding,):
        return kind
    return kind.__bases__[1]


def is_sharding(module: Any) -> bool:
    """Whether `fully_shard` was called on a module."""
    found = _sharding_class()
    return found is not None and isinstance(module, found)


def is_fsdp1(module: Any) -> bool:
    """Whether a module is a `FullyShardedDataParallel`."""
    found = _sharding_class("FullyShardedDataParallel")
    return found is not None and isinstance(module, found)


def owners_of(model: nn.Module) -> dict[nn.Module, Any]:
    """For each module, the one that gathers its own parameters: itself, or the nearest one around it."""
    owners: dict[nn.Module, Any] = {}

    def visit(module: nn.Module, owner: Any) -> None:
        owner = module if is_sharding(module) else owner
        if module not in owners:
            owners[module] = owner
            for child in module.children():
                visit(child, owner)

    visit(model, None)
    return owners


def gather(owners: dict[nn.Module, Any], root: nn.Module | None, module: nn.Module) -> None:
    """Gathers the parameters of a unit that is replayed together with others, before its own backward has begun.

    They stay until its own backward has ended, which does not gather them again.

    Args:
        owners: for each unit, who gathers its parameters; filled when it is first needed, since a model may be sharded
            after its plan is applied.
        root: the model.
        module: the unit.
    """
    if module not in owners:
        parameter = next(module.parameters(), None)
        if root is None or parameter is None or type(parameter).__name__ != "DTensor":
            return
        owners.update(owners_of(root))
    owner = owners.get(module)
    if owner is not None:
        owner.unshard()


@dataclass(frozen=True)
class ShardGroup:
    """Parameters that are gathered at once, in bytes of one rank.

    Attributes:
        modules: on which `fully_shard` was called.
        parameters: their sharded parameters.
        gathered_bytes: of the gathered parameters.
        buffer_bytes: of the buffer that they are gathered in.
        gradient_bytes: of their gradients before these are reduced.
        reduced_bytes: of the buffer in which these are reduced.
        shard_bytes: of the rank's share of the gradients.
        sharing_bytes: of that share while it is made: beside itself in another dtype, if it is reduced in that.
        all_reduced_bytes: of the buffer in which replicas of that share are summed up, until the backward ends; 0 if
            there are no replicas.
        becomes_share: whether that buffer becomes the share, where there are no gradients yet.
        copied_bytes: of shards that are copied to be gathered: to the device, or to another dtype.
        offloads: whether parameters, and the share of the gradients, live in host memory.
        last_bytes: of the last gradient, and the last that was reordered: torch holds on to them while the share is
            made.
        waiting_bytes: of gradients in full that wait to be reduced, where micro-batches before the last do not.
        adds_in_place: whether a backward adds to these by itself: they have the dtype in which it computes.
        stays: whether they stay gathered between forward and backward.
        lasts: whether they stay gathered after the backward (``set_reshard_after_backward(False)``).
        resharded_bytes: of the larger shards that stay between forward and backward, where an integer for
            ``reshard_after_forward`` says so; else 0.
        resharding_bytes: while these are made, the most beside the gathered parameters.
        resharded_copy_bytes: of copies of these that a backward makes to gather them.
        reordered_bytes: of gathered parameters that are copied once more, since another dimension than the first is
            sharded.
        reordered_gradient_bytes: of the last of their gradients, which is there beside its copy while the buffer is
            filled in which they are reduced.
        num_buffers: how many such buffers are held at most (``set_reduce_scatter_max_input_buffers``).
        ahead_in_forward: numbers of the groups that are gathered ahead when the forward of this one begins.
        ahead_in_backward: the same for its backward; ``None`` for the group that was gathered before it.
    """

    modules: tuple[nn.Module, ...]
    parameters: tuple[Tensor, ...] = ()
    gathered_bytes: int = 0
    buffer_bytes: int = 0
    gradient_bytes: int = 0
    reduced_bytes: int = 0
    shard_bytes: int = 0
    sharing_bytes: int = 0
    stays: bool = False
    all_reduced_bytes: int = 0
    copied_bytes: int = 0
    becomes_share: bool = False
    offloads: bool = False
    last_bytes: int = 0
    waiting_bytes: int = 0
    adds_in_place: bool = True
    lasts: bool = False
    resharded_bytes: int = 0
    resharding_bytes: int = 0
    resharded_copy_bytes: int = 0
    reordered_bytes: int = 0
    reordered_gradient_bytes: int = 0
    num_buffers: int = 1
    ahead_in_forward: tuple[int, ...] = ()
    ahead_in_backward: tuple[int, ...] | None = None

    @property
    def gradient_shard_bytes(self) -> int:
        """Of the rank's share of the gradients on the device."""
        return 0 if self.offloads else self.shard_bytes

    @property
    def copied_again_bytes(self) -> int:
        """Of shards that are copied to be gathered for the backward."""
        return self.resharded_copy_bytes if self.resharded_bytes else self.copied_bytes

    def made_bytes(self, *, is_unreduced: bool) -> int:
        """What is there when the share has been made, beside the buffer that it is reduced in."""
        return self.sharing_bytes + self.waiting(self.last_bytes, is_unreduced=is_unreduced)

    def waiting(self, num_bytes: int, *, is_unreduced: bool) -> int:
        """Bytes of some gradients when they are reduced: those that waited may have another dtype."""
        if is_unreduced and self.gradient_bytes:
            return num_bytes * self.waiting_bytes // self.gradient_bytes
        return num_bytes

    def left_bytes(self, *, accumulates: bool) -> int:
        """What its backward leaves on the device; less of it where a share was there before."""
        if accumulates:
            return self.all_reduced_bytes
        return self.gradient_shard_bytes + (0 if self.becomes_share else self.all_reduced_bytes)


def adds_in_place(groups: Iterable[ShardGroup]) -> bool:
    """Whether backwards add to gradients in full that wait to be reduced."""
    return all(group.adds_in_place for group in groups)


class Shards:
    """The sharding of a model; nothing, if it is not sharded."""

    def __init__(self, model: nn.Module) -> None:
        self._modules: dict[Any, nn.Module] = {}
        """By FSDP2's state, the first module that has it."""
        # No mode of a measurement sees the memory of gathered parameters: it is none of a unit's.
        self._context: Callable[[], AbstractContextManager[Any]] = without_modes
        if _sharding_class() is not None:
            sharding: list[Any] = [module for module in model.modules() if is_sharding(module)]
            for module in sharding:
                self._modules.setdefault(module._get_fsdp_state(), module)
            for state in self._modules:
                # The first is the outermost; else the first forward would do it, and be put back.
                if state._is_root is None:
                    state._lazy_init()
        self._states = list(self._modules)
        self._groups = [group for state in self._states for group in shard_groups(state)]
        self._lasting: set[int] = set()
        self.put_back()
        with self.alone():
            for group in self._groups:
                # What the first gather makes would be put back, too.
                if not all(hasattr(one, "_unsharded_param") for one in group.fsdp_params):
                    group.unshard()
                    group.wait_for_unshard()
                    group._to_sharded()

    def __bool__(self) -> bool:
        return bool(self._groups)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """A block in which this rank gathers parameters from itself; NOTE [ Sharded models, unit by unit ], 3."""
        comms = [group._all_gather_comm for group in self._groups]
        for group in self._groups:
            group._all_gather_comm = _Alone()
        try:
            yield
        finally:
            for group, comm in zip(self._groups, comms, strict=True):
                group._all_gather_comm = comm
            self.put_back()

    @contextmanager
    def unit_by_unit(self) -> Iterator[None]:
        """A block in which units run one at a time, by NOTE [ Sharded models, unit by unit ]."""
        replaced = [
            *((state, "_register_pre_backward_hook", _same_output) for state in self._states),
            *((group, "_register_post_backward_hook", _same_arguments) for group in self._groups),
            *((group, "_record_post_forward", _nothing) for group in self._groups),
            *((group, "reshard", _nothing) for group in self._groups),
            *((group, "unshard", self._quietly(group.unshard)) for group in self._groups),
            *((group, "wait_for_unshard", self._quietly(group.wait_for_unshard)) for group in self._groups),
        ]
        for owner, name, function in replaced:
            vars(owner)[name] = function
        try:
            with self.alone():
                yield
        finally:
            for owner, name, _ in replaced:
                del vars(owner)[name]

    @contextmanager
    def gathering_in(self, context: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
        """A block in which parameters are gathered in a context, while units run one at a time."""
        before, self._context = self._context, context
        try:
            yield
        finally:
            self._context = before

    def _quietly(self, gather: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with self._context():
                return gather(*args, **kwargs)

        return run

    def gather(self, unit: nn.Module) -> None:
        """Gathers the parameters of what is inside a unit: each of its runs would do so, and be put back by halves."""
        for group in self._inside(unit):
            group.unshard()
            group.wait_for_unshard()

    def free(self, unit: nn.Module) -> None:
        """Frees the gathered parameters of a unit, and of what is inside it."""
        for group in self._inside(unit):
            group._to_sharded()

    def _inside(self, unit: nn.Module) -> list[Any]:
        inside = set(unit.modules()) if self._groups else set()
        return [group for group in self._groups if inside.issuperset(group.modules)]

    def put_back(self) -> None:
        """Frees all gathered parameters and forgets a run that did not end."""
        for state in self._states:
            state._state_ctx.iter_forward_root = None
            state._modules_to_run_forward.clear()
            state._comm_ctx.all_gather_state = None
            state._comm_ctx.post_forward_order.clear()
            state._training_state = type(state._training_state).IDLE
        for group in self._groups:
            group._all_gather_result = None
            group._post_forward_indices.clear()
            group._training_state = type(group._training_state).IDLE
            group._to_sharded()
            forget_larger_shards(group)

    def abandon(self) -> None:
        """Frees what a step that did not end has gathered and computed, gradients that were not reduced included."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # collectives on streams of their own
        forget_gradients(self._groups, self._states)
        self.put_back()

    def check_reductions(self) -> None:
        """Steps of a fit are put back, but for gradients that wait to be reduced.

        Raises:
            SampleError: gradients are not reduced, over all ranks or over replicas, or those of earlier micro-batches
                wait for that.
        """
        if not self.reduces:
            raise SampleError(
                "The model does not reduce gradients (set_requires_gradient_sync(False)): switch that on while it is"
                ' fitted, and say accumulates="unreduced", which leaves room for gradients in full.'
            )
        replicated = [group for group in self._groups if _has_replicas(group)]
        if not all(group.all_reduce_grads for group in replicated):
            raise SampleError(
                "The model does not sum gradients over replicas (set_requires_all_reduce(False)): switch that on while"
                " it is fitted, and say accumulates=True, which leaves room for shares that wait for it."
            )
        if self.unreduced_gradients():
            raise SampleError(
                "Gradients of earlier micro-batches wait to be reduced, and a step of a fit would take them: fit the"
                " model before its first step, or after a backward that reduces them."
            )

    @property
    def reduces(self) -> bool:
        """Whether a backward reduces gradients."""
        return all(group.reduce_grads for group in self._groups)

    @property
    def lasts(self) -> bool:
        """Whether a backward leaves parameters gathered (``set_reshard_after_backward(False)``)."""
        return any(not group.reshard_after_backward for group in self._groups)

    def gather_lasting(self) -> None:
        """Gathers what a backward before has left gathered."""
        for group in self._groups:
            if not group.reshard_after_backward:
                group.unshard()
                group.wait_for_unshard()

    def see_backward(self) -> None:
        """To be called where a backward is about to run: a step of the user's may change settings before and after."""
        self._lasting.update(id(group) for group in self._groups if not group.reshard_after_backward)

    @contextmanager
    def not_reducing(self) -> Iterator[None]:
        """A block whose backwards leave gradients in full, for a later one to reduce."""
        for group in self._groups:
            group.reduce_grads = False
        try:
            yield
        finally:
            for group in self._groups:
                group.reduce_grads = True

    def unreduced_gradients(self) -> list[Tensor]:
        """Those of earlier micro-batches that wait to be reduced."""
        return unreduced_gradients(self._groups)

    def make_unreduced_gradients(self) -> set[nn.Parameter]:
        """Makes gradients in full, as micro-batches leave them that do not reduce, all zero; returns whose."""
        forget_gradients(self._groups, self._states)
        trained = [one for one in self._parameters() if one.sharded_param.requires_grad]
        for one in trained:
            add_unreduced_gradient(one)
        return {one.sharded_param for one in trained}

    def originals(self) -> dict[int, Tensor]:
        """The parameters of the model, by the identity of what stands in for them while they are gathered."""
        pairs = ((getattr(one, "_unsharded_param", None), one.sharded_param) for one in self._parameters())
        return {id(gathered): parameter for gathered, parameter in pairs if gathered is not None}

    def gathered(self) -> list[Tensor]:
        """What parameters are gathered into. While they are not, its storages have no bytes."""
        parts = ((*one.all_gather_outputs, *one._unsharded_inner_tensors) for one in self._parameters())
        return [tensor for tensors in parts for tensor in tensors]

    def storages(self) -> list[torch.UntypedStorage]:
        """The memory of gathered parameters."""
        return [tensor.untyped_storage() for tensor in self.gathered()]

    def groups(self) -> list[ShardGroup]:
        """The groups, in the order in which they are gathered."""
        numbers = {id(group): number for number, group in enumerate(self._groups)}

        def ahead(states: Sequence[Any]) -> tuple[int, ...]:
            return tuple(numbers[id(group)] for state in states for group in shard_groups(state))

        # A root may have no parameters of its own, and gather others ahead.
        without = [state for state in self._states if not shard_groups(state)]
        found = [
            (state, replace(_group(group), lasts=id(group) in self._lasting))
            for state in self._states
            for group in shard_groups(state)
        ]
        found += [(state, ShardGroup((self._modules[state],))) for state in without]
        return [
            replace(
                group,
                ahead_in_forward=ahead(state._states_to_forward_prefetch),
                # Without parameters there is no place among the groups, and so none before it.
                ahead_in_backward=ahead(state._states_to_backward_prefetch)
                or (None if group.parameters else ()),
            )
            for state, group in found
        ]

    def _parameters(self) -> list[Any]:
        return [one for group in self._groups for one in group.fsdp_params]


def _group(group: Any) -> ShardGroup:
    num_ranks = group._all_gather_process_group.size()
    # On a mesh of hosts there is nothing to offload to.
    offloads = group.device.type != "cpu" and any(one.offload_to_cpu for one in group.fsdp_params)
    has_replicas = _has_replicas(group)
    gathered = gradients = reduced = shards = sharing = all_reduced = waiting = last = 0
    reordered = reordered_gradient = most_reordered = 0
    copies, becomes_share, adds_in_place = [], not offloads, True
    for one in group.fsdp_params:
        shard_size = one.padded_sharded_param_size.numel()
        computed = one.param_dtype or one.orig_dtype
        gathered += num_ranks * shard_size * computed.itemsize
        is_reordered = num_ranks > 1 and one.fsdp_placement.dim > 0
        reordered += is_reordered * num_ranks * shard_size * computed.itemsize
        if offloads:
            copies.append(shard_size * one.orig_dtype.itemsize)
        elif one.param_dtype is not None:
            copies.append(shard_size * computed.itemsize)
        if one.sharded_param.requires_grad:
            reduce_dtype = one.reduce_dtype or computed
            gradients += one._orig_size.numel() * computed.itemsize
            reduced += num_ranks * shard_size * reduce_dtype.itemsize
            shards += shard_size * one.orig_dtype.itemsize
            sharing += shard_size * reduce_dtype.itemsize
            if reduce_dtype != one.orig_dtype:
                sharing += shard_size * one.orig_dtype.itemsize
            if has_replicas:
                all_reduced += shard_size * reduce_dtype.itemsize
            becomes_share &= reduce_dtype == one.orig_dtype
            waiting += one._orig_size.numel() * reduce_dtype.itemsize
            adds_in_place &= reduce_dtype == computed
            last = one._orig_size.numel() * computed.itemsize if num_ranks > 1 else 0
            if is_reordered:
                reordered_gradient, last = last, 0
                most_reordered = max(most_reordered, reordered_gradient)
    # One rank alone copies one parameter after the other.
    copied = sum(copies) if num_ranks > 1 else max(copies, default=0)
    resharded, resharding, resharded_copies = _resharded(group, num_ranks)
    return ShardGroup(
        tuple(group.modules),
        tuple(one.sharded_param for one in group.fsdp_params),
        gathered,
        gathered if num_ranks > 1 else 0,
        gradients,
        reduced,
        shards,
        sharing,
        not group._reshard_after_forward,
        all_reduced,
        copied,
        becomes_share,
        offloads,
        last + reordered_gradient,
        waiting,
        adds_in_place,
        reordered_bytes=reordered,
        reordered_gradient_bytes=max(reordered_gradient, most_reordered - reduced),
        num_buffers=getattr(group.comm_ctx, "reduce_scatter_max_input_buffers", 1),  # since torch 2.13
        resharded_bytes=resharded,
        resharding_bytes=resharding,
        resharded_copy_bytes=resharded_copies,
    )


def _has_replicas(group: Any) -> bool:
    return group.mesh_info.replicate_mesh_dim is not None


def _resharded(group: Any, num_ranks: int) -> tuple[int, int, int]:
    """Bytes of the larger shards of an integer for ``reshard_after_forward``; while they are made; of their copies."""
    if not group._use_post_forward_mesh:
        return 0, 0, 0
    num_sharing = group.post_forward_mesh_info.shard_mesh_size
    made = freed = most = copied = 0
    for one in group.fsdp_params:
        itemsize = (one.param_dtype or one.orig_dtype).itemsize
        whole_bytes = num_ranks * one.padded_sharded_param_size.numel() * itemsize
        # One parameter after the other: its shard is made, then what was gathered is freed.
        made += whole_bytes // num_sharing
        most = max(most, made - freed)
        freed += whole_bytes
        copied += (one.param_dtype is not None and not one.offload_to_cpu) * whole_bytes // num_sharing
    return made, most, copied


class _Alone:
    """Gathers from this rank alone."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> None:
        shards = output_tensor.view(group.size(), -1)
        for rank, shard in enumerate(shards):
            if rank != group.rank():
                shard.copy_(input_tensor)


def _same_output(output: Any) -> Any:
    return output


def _same_arguments(args: Any, kwargs: Any) -> Any:
    return args, kwargs


def _nothing() -> None:
    pass
