"""Which private names of torch the installed version lacks."""

from __future__ import annotations

import ast
import importlib
from functools import reduce
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from recoup import torch_private
from recoup.torch_private.attributes import ATTRIBUTES


def required_names() -> set[str]:
    """Every name of torch, dotted, that ``torch_private`` imports or reads."""
    found = set()
    for node in ast.walk(ast.parse(Path(torch_private.__file__).read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and (name := ast.unparse(node)).startswith("torch."):
            found.add(name)
    return found


def exists(name: str) -> bool:
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:length]))
            reduce(getattr, parts[length:], module)
        except (ImportError, AttributeError):
            continue
        return True
    return False


def _sharded() -> dict[str, Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model: Any = fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,)))
        model(torch.zeros(1, 2))
        state = model._get_fsdp_state()
        (group,) = torch_private.shard_groups(state)
        return {
            "FSDPModule": model,
            "FSDPState": state,
            "FSDPParamGroup": group,
            "FSDPParam": group.fsdp_params[0],
        }
    finally:
        dist.destroy_process_group()


def samples() -> dict[str, Any]:
    weight = torch.ones(2, requires_grad=True)
    return {
        "Tensor": weight,
        "UntypedStorage": weight.untyped_storage(),
        "Module": nn.Module(),
        "Node": weight.exp().grad_fn,
        "OpOverload": torch.ops.aten.add.Tensor,
        "function": torch.compile(torch.compiler.assume_constant_result(lambda: 0)),
        "Optimizer": torch.optim.SGD([weight], lr=0.1),
        "TorchDispatchMode": TorchDispatchMode,
        **_sharded(),
    }


def test_this_torch_has_every_private_name() -> None:
    names = required_names()
    assert "torch._C._set_grad_enabled" in names
    assert "torch.utils._pytree.tree_iter" in names
    missing = [name for name in sorted(names) if not exists(name)]
    assert not missing, f"torch {torch.__version__} lacks {missing}"


def test_this_torch_has_every_private_attribute() -> None:
    found = samples()
    missing = [
        f"{kind}.{name}"
        for kind, names in ATTRIBUTES.items()
        for name in names
        if not hasattr(type(found[kind]), name) and not hasattr(found[kind], name)
    ]
    assert not missing, f"torch {torch.__version__} lacks {missing}"


def test_a_name_that_is_gone_is_told() -> None:
    assert not exists("torch._C._no_such_name")
    assert not exists("torch.no_such_module.name")
