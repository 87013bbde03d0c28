"""Nested values and the tensors in them, tensors and the storages behind them: the one implementation of each."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from inspect import Parameter, signature
from operator import is_not
from typing import Any

import torch
from torch import Tensor, nn

from recoup.errors import CheckpointError
from recoup.torch_private import is_traceable_wrapper_subclass, num_storage_owners

__all__ = [
    "PLAIN",
    "argument_paths",
    "contents",
    "each_tensor",
    "graph_nodes",
    "is_divided",
    "local_part",
    "make_tuple",
    "map_tensors",
    "named_outputs",
    "needing_gradient",
    "num_bytes_of",
    "num_owners",
    "operand_storages",
    "plain_tensors",
    "positional_names",
    "put_together",
    "rebuilt",
    "span_of",
    "storage_of",
    "storages",
    "storages_of",
    "take_apart",
    "tensors_in",
    "version_of",
    "versions_of",
    "without_history",
]

PLAIN = frozenset({int, float, bool, str, type(None), complex, bytes, torch.dtype, torch.device, torch.Size})
"""Types of values that are held as they are: nothing in them can change."""
_BARE = frozenset({list, tuple, dict})
_PLAIN_TENSORS = frozenset({Tensor, nn.Parameter})
_DEEPEST = 16
"""A container may contain itself."""
_MOST_ITEMS = 1000
_BY_ROW = ("crow_indices", "col_indices", "values")
_BY_COLUMN = ("ccol_indices", "row_indices", "values")
_SPARSE_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: _BY_ROW,
    torch.sparse_bsr: _BY_ROW,
    torch.sparse_csc: _BY_COLUMN,
    torch.sparse_bsc: _BY_COLUMN,
}


class _Slot:
    """Stands for the tensor with this index."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class _Container:
    """Stands for a container. It never refers to the original, which would keep its tensors alive."""

    __slots__ = ("children", "keys", "kind", "pattern")

    def __init__(self, original: Any, keys: tuple[Any, ...], children: list[Any]) -> None:
        self.kind = type(original)
        self.keys = keys
        self.children = children
        self.pattern: Any = None
        """An emptied copy, for containers that carry more than their items."""
        if self.kind in _BARE:
            return
        if isinstance(original, tuple):
            self.pattern = getattr(original, "__dict__", None) or None
        else:
            self.pattern = copy.copy(original)
            self.fill(self.pattern, [None] * len(keys))

    def fill(self, container: Any, values: list[Any]) -> None:
        if isinstance(container, list):
            container[:] = values
        elif isinstance(container, deque):
            container.clear()
            container.extend(values)
        elif isinstance(container, (dict, UserDict)):
            for key, value in zip(self.keys, values, strict=True):
                container[key] = value
        else:
            for key, value in zip(self.keys, values, strict=True):
                object.__setattr__(container, key, value)  # frozen dataclasses too


def make_tuple(kind: type, items: list[Any], attributes: dict[str, Any] | None) -> Any:
    """A tuple of a class, with these items and further attributes."""
    if hasattr(kind, "n_sequence_fields"):  # what torch.topk and others return
        return kind(items)
    # Not by the class's own __new__: a named tuple takes fields, a packed sequence computes some.
    made: Any = tuple.__new__(kind, items)
    if attributes:
        made.__dict__.update(attributes)
    return made


def take_apart(value: Any, tensors: list[Tensor], others: list[Any]) -> Any:
    """Replaces the tensors in nested containers by slots, and takes containers apart, so that nothing holds a tensor.

    Args:
        value: the containers.
        tensors: gets the tensors, in the order of their slots.
        others: gets what is neither a tensor, plain data nor a container.

    Raises:
        CheckpointError: there is an iterator, which can be read once only.
    """
    if isinstance(value, Tensor):
        tensors.append(value)
        return _Slot(len(tensors) - 1)
    if type(value) in PLAIN:
        return value
    if isinstance(value, Iterator):
        raise CheckpointError(
            f"An argument is an iterator ({type(value).__name__}), which the replay would find used up. Pass a list."
        )
    found = contents(value)
    if found is not None:
        mark = len(tensors)
        try:
            return _Container(value, found[0], [take_apart(item, tensors, others) for item in found[1]])
        except CheckpointError:
            raise
        except Exception:  # a container that cannot be copied or filled: held as it is
            del tensors[mark:]
    others.append(value)
    return value


def contents(value: Any) -> tuple[tuple[Any, ...], list[Any]] | None:
    """The keys and items of a container, or None if it is no container that can be taken apart."""
    if isinstance(value, (list, tuple, deque)):
        return tuple(range(len(value))), list(value)
    if isinstance(value, (dict, UserDict)):
        return tuple(value), list(value.values())
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, torch.nn.Module)):
        keys = tuple(field.name for field in dataclasses.fields(value) if hasattr(value, field.name))
        return keys, [getattr(value, key) for key in keys]
    return None


def put_together(node: Any, tensors: list[Tensor]) -> Any:
    """Undoes `take_apart`, with these tensors in the slots."""
    if type(node) is _Slot:
        return tensors[node.index]
    if type(node) is not _Container:
        return node
    children = [put_together(child, tensors) for child in node.children]
    if node.kind is list:
        return children
    if node.kind is tuple:
        return tuple(children)
    if node.kind is dict:
        return dict(zip(node.keys, children, strict=True))
    if issubclass(node.kind, tuple):
        return make_tuple(node.kind, children, node.pattern)
    container = copy.copy(node.pattern)
    node.fill(container, children)
    return container


def positional_names(fn: Callable[..., Any]) -> tuple[str, ...]:
    """The names of a callable's positional parameters, as far as they can be known; of a module, those of its forward.

    >>> positional_names(torch.nn.Bilinear(1, 1, 1))
    ('input1', 'input2')
    """
    try:
        parameters = signature(fn.forward if isinstance(fn, nn.Module) else fn).parameters.values()
    except (TypeError, ValueError):
        return ()
    named = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(parameter.name for parameter in parameters if parameter.kind in named)


def argument_paths(node: Any, names: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Names the slots of arguments, ``take_apart((args, kwargs), …)``, as the caller wrote them.

    Args:
        node: what `take_apart` returned.
        names: of the positional parameters, as far as they are known.
    """
    args, kwargs = node.children
    for position, child in enumerate(args.children):
        yield from _paths(child, repr(names[position]) if position < len(names) else f"argument {position}")
    for key, child in zip(kwargs.keys, kwargs.children, strict=True):
        yield from _paths(child, repr(key))


def _paths(node: Any, name: str) -> Iterator[tuple[int, str]]:
    if type(node) is _Slot:
        yield node.index, name
    elif type(node) is _Container:
        attributes = not issubclass(node.kind, (list, tuple, deque, dict, UserDict))
        for key, child in zip(node.keys, node.children, strict=True):
            yield from _paths(child, f"{name}.{key}" if attributes else f"{name}[{key!r}]")


def each_tensor(value: Any, depth: int = _DEEPEST) -> Iterator[Tensor]:
    """The tensors in nested containers, in an order that depends on nothing but their structure.

    >>> a, b = torch.ones(1), torch.ones(2)
    >>> [tensor.shape[0] for tensor in each_tensor({"x": [b, 3], "y": (a, b)})]
    [2, 1, 2]
    """
    if isinstance(value, Tensor):
        yield value
    elif depth and type(value) not in PLAIN and (found := contents(value)) is not None:
        for item in found[1]:
            yield from each_tensor(item, depth - 1)


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors in nested containers, each object once.

    Raises:
        CheckpointError: there is an iterator, in which tensors cannot be found without reading it.

    >>> import torch
    >>> x = torch.zeros(2)
    >>> len(tensors_in({"a": [x, (x, torch.ones(3))]}))
    2
    """
    found: list[Tensor] = []
    take_apart(tree, found, [])
    return list({id(tensor): tensor for tensor in found}.values())


def map_tensors(change: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """The same nested containers with other tensors; one that occurs twice is changed once."""
    found: list[Tensor] = []
    node = take_apart(tree, found, [])
    changed = {key: change(tensor) for key, tensor in {id(tensor): tensor for tensor in found}.items()}
    return put_together(node, [changed[id(tensor)] for tensor in found])


def without_history(value: Any, deepest: int = 4) -> Any:
    """A value to be held for long, without the graphs of its tensors, which would lead to all that came before.

    A tensor keeps its memory, its version counter and its need of a gradient. Containers that have nothing to lose stay
    themselves.
    """
    if isinstance(value, Tensor):
        return value if value.grad_fn is None else value.detach().requires_grad_(value.requires_grad)
    is_small = type(value) in (list, dict) and len(value) <= _MOST_ITEMS
    if not deepest or not (is_small or isinstance(value, tuple)):
        return value
    items = list(value.values()) if isinstance(value, dict) else value
    bare = [without_history(item, deepest - 1) for item in items]
    if not any(map(is_not, bare, items)):
        return value
    if isinstance(value, dict):
        return dict(zip(value, bare, strict=True))
    return (
        bare if isinstance(value, list) else make_tuple(type(value), bare, getattr(value, "__dict__", None))
    )


def needing_gradient(tree: Any) -> list[Tensor]:
    """The tensors in nested containers that need a gradient."""
    return [tensor for tensor in tensors_in(tree) if tensor.requires_grad]


def named_outputs(output: Any) -> list[tuple[str, Tensor]]:
    """The tensors of a model's output with the names that its user knows them by.

    >>> import torch
    >>> [name for name, _ in named_outputs({"logits": torch.zeros(1), "states": [torch.zeros(1), torch.zeros(1)]})]
    ['logits', 'states', 'states']
    >>> [name for name, _ in named_outputs(torch.zeros(1))]
    ['the output']
    """
    if isinstance(output, Mapping):
        parts = [(str(key), value) for key, value in output.items()]
    elif isinstance(output, (tuple, list)):
        parts = [(f"output {index}", value) for index, value in enumerate(output)]
    else:
        parts = [("the output", output)]
    return [(name, tensor) for name, value in parts for tensor in tensors_in(value)]


def graph_nodes(tensor: Tensor) -> Iterator[Any]:
    """The nodes of the graph behind a tensor."""
    waiting, seen = [tensor.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting += [below for below, _ in node.next_functions]


def span_of(tensor: Tensor) -> int:
    """How many elements of its storage lie from a tensor's first one to its last.

    >>> span_of(torch.zeros(2, 3)), span_of(torch.zeros(2, 3)[:, :2])
    (6, 5)
    """
    return 1 + sum(
        (int(size) - 1) * int(step) for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    )


def storages_of(tree: Any) -> dict[int, int]:
    """Bytes by storage: views and aliases count once."""
    found = (storage for tensor in tensors_in(tree) for storage in storages(tensor))
    return {storage._cdata: storage.nbytes() for storage in found}


def versions_of(tensors: list[Tensor]) -> list[int]:
    """Their version counters."""
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:
        return [version_of(tensor) for tensor in tensors]


def version_of(tensor: Tensor) -> int:
    """Its version counter; inference tensors have none."""
    return -1 if tensor.is_inference() else tensor._version


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor itself, or what holds its bytes: parts of a wrapper subclass (a sharded tensor), or of a sparse one.

    >>> [part.dtype for part in plain_tensors(torch.eye(3).to_sparse())]
    [torch.int64, torch.float32]
    """
    wrapper: Any = tensor
    if is_traceable_wrapper_subclass(wrapper):
        names, _ = wrapper.__tensor_flatten__()
        for name in names:
            if isinstance(part := getattr(wrapper, name), Tensor):  # a DTensor names its mesh, too
                yield from plain_tensors(part)
    elif tensor.layout in _SPARSE_PARTS:
        yield from (getattr(tensor, name)() for name in _SPARSE_PARTS[tensor.layout])
    else:
        yield tensor


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that is divided over ranks; any other tensor itself."""
    return next(plain_tensors(tensor)) if is_divided(tensor) else tensor


def rebuilt(tensor: Any, make: Callable[[Tensor], Tensor]) -> Tensor:
    """A wrapper subclass like the given one, with other parts."""
    names, context = tensor.__tensor_flatten__()
    parts = {name: getattr(tensor, name) for name in names}
    made = {name: make(part) if isinstance(part, Tensor) else part for name, part in parts.items()}
    found: Tensor = type(tensor).__tensor_unflatten__(made, context, tensor.size(), tensor.stride())
    return found


def is_divided(tensor: Tensor) -> bool:
    """Whether a tensor is divided over ranks, or on its way to others."""
    # By name: importing torch.distributed.tensor costs a second that most users never need.
    return type(tensor).__name__ in ("DTensor", "AsyncCollectiveTensor")


def working_device(tensor: Tensor) -> torch.device:
    """The device that computes with a tensor: its own or, of a shard that FSDP2 keeps in host memory, its mesh's.

    >>> working_device(torch.zeros(1))
    device(type='cpu')
    """
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is None or mesh.device_type == tensor.device.type:
        return tensor.device
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


def on_device(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Those that are not kept in host memory for a device that computes with them."""
    return [tensor for tensor in tensors if working_device(tensor) == tensor.device]


def num_bytes_of(tensor: Tensor) -> int:
    """Bytes of its elements; of a tensor that is divided over ranks, this rank's."""
    part = local_part(tensor)
    return part.numel() * part.element_size()


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    """Its storage; of a tensor that is divided over ranks, this rank's."""
    return local_part(tensor).untyped_storage()


def storages(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """The storages that hold its bytes.

    >>> [storage.nbytes() for storage in storages(torch.zeros(10)[:3])]
    [40]
    """
    for plain in plain_tensors(tensor):
        if plain.layout is torch.strided:
            yield plain.untyped_storage()


def operand_storages(values: Iterable[Any]) -> list[torch.UntypedStorage]:
    """The storages behind arguments or results of an operation, as a dispatch mode gets them.

    A storage that lives has one Python object: these can be compared by identity.

    >>> x = torch.zeros(10)
    >>> operand_storages((x, [x[:3]], 2)) == [x.untyped_storage()] * 2
    True
    """
    found: list[torch.UntypedStorage] = []
    for value in values:
        if isinstance(value, Tensor):
            # `storages` finds those of all tensors, but takes longer.
            if type(value) in _PLAIN_TENSORS and value.layout is torch.strided:
                found.append(value.untyped_storage())
            else:
                found += storages(value)
        elif isinstance(value, (list, tuple)):
            found += operand_storages(value)
        elif isinstance(value, dict):
            found += operand_storages(value.values())
    return found


def num_owners(storage: torch.UntypedStorage) -> int:
    """How many refer to a storage: tensors, graphs and the Python object itself.

    >>> tensor = torch.zeros(10)
    >>> alias = tensor[:3]
    >>> num_owners(tensor.untyped_storage())
    3
    """
    return num_storage_owners(storage._cdata)
