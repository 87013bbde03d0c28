"""Every private name of torch that recoup uses, with the reason.

Names are bound when this module is imported, so that using one costs no more than a global. `attributes` lists the
private attributes of torch's objects. ``tests/test_torch_private.py`` tells which names an installed torch lacks;
``tests/test_architecture.py`` refuses private names of torch in any other file.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from traceback import FrameSummary
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch._subclasses.fake_tensor
import torch.fx
import torch.utils._device
import torch.utils._python_dispatch
import torch.utils._pytree
from torch import Tensor
from torch.optim.optimizer import _foreach_supported_types

_Method = TypeVar("_Method", bound=Callable[..., Any])

# Autograd. The context managers torch.autograd.graph.saved_tensors_hooks and torch.set_grad_enabled cost four times as
# much as what they call, in every call of the primitive; nothing public reads the hooks that are in force.
push_saved_tensor_hooks = torch._C._autograd._push_saved_tensors_default_hooks
pop_saved_tensor_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
top_saved_tensor_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks
set_grad_enabled = torch._C._set_grad_enabled
# Which backward runs on this thread (-1: none), whether it was told to retain the graph, which of its nodes runs, and
# what to do when that backward ends.
current_graph_task: Callable[[], int] = torch._C._current_graph_task_id
is_graph_retained: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
current_autograd_node: Callable[[], Any] = torch._C._current_autograd_node
queue_callback: Callable[[Callable[[], None]], None] = (
    torch.autograd.Variable._execution_engine.queue_callback
)

# Who runs the code: tracers and the transforms of torch.func, inside which nothing can be replayed.
is_jit_tracing: Callable[[], bool] = torch._C._is_tracing
# Without this name nothing is taken for traced by torch.fx.
is_fx_tracing: Callable[[], bool] = getattr(torch.fx._symbolic_trace, "is_fx_symbolic_tracing", lambda: False)
current_transform: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
transform_level: Callable[[Tensor], int] = torch._C._functorch.maybe_get_level

# Whether the compiler runs operations on fake tensors: `torch.compiler.is_compiling` does not tell before 2.13.
tracing_context: Callable[[], Any] = torch._guards.TracingContext.try_get

# Modes: their number is read in every call; a mode must not see the tensors that recoup itself copies and compares.
num_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
num_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
WithoutDispatch = torch._C._DisableTorchDispatch
WithoutTransforms = torch._C._DisableFuncTorch
without_modes = torch.utils._python_dispatch._disable_current_modes
TorchDispatchMode = torch.utils._python_dispatch.TorchDispatchMode

# What a mode is shown, unless an operation takes functions.
OpOverload = torch._ops.OpOverload


class WatchingMode(TorchDispatchMode):
    """A mode that only watches operations: compiled code runs as compiled under it, and not eagerly.

    Operations that take functions, such as flex attention, are shown to it too: by default they would fail.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Asked by the compiler."""
        return True


# Operations are intercepted under a dispatch key that no kernel of torch's uses: where the key is on, others pass it by
# at no cost; a function mode would cost two microseconds for each. Registered once, and inert where the key is off.
_KEY = "TESTING_ONLY_GenericMode"
_key: Any = torch._C._dispatch_key_parse(_KEY)
intercepting: Callable[[], Any] = partial(torch._C._IncludeDispatchKeyGuard, _key)
_not_intercepting: Callable[[], Any] = partial(
    torch._C._ExcludeDispatchKeyGuard, torch._C.DispatchKeySet(_key)
)
# Kernels run with autograd's keys excluded.
is_inside_kernel: Callable[[], bool] = partial(
    torch._C._dispatch_tls_is_dispatch_key_excluded, torch._C.DispatchKey.AutogradOther
)
_intercepted: dict[Any, torch.library.Library] = {}
_interception = threading.Lock()


def intercept(operation: Any, run: Callable[..., Any]) -> None:
    """Runs ``run`` instead of an operation where ``intercepting`` is entered; inside it, the operation runs itself."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _not_intercepting():
            return run(*args, **kwargs)

    with _interception:
        if not _intercepted:
            others = torch.library.Library("_", "IMPL")
            others.fallback(torch.library.fallthrough_kernel, _KEY)
            _intercepted[None] = others
        if operation not in _intercepted:
            library = torch.library.Library(operation.namespace, "IMPL")
            library.impl(operation, kernel, _KEY)
            _intercepted[operation] = library


# Whether a mode is in force under which nothing compiled runs, such as torch's counter of FLOPs.
is_compiler_off: Callable[[], bool] = (
    torch.utils._python_dispatch.is_in_any_mode_without_ignore_compile_internals
)

# The function modes of a forward stand around its replay too; a default device is one of them, and a global beside.
function_modes: Callable[[], list[Any]] = torch.overrides._get_current_function_mode_stack
pop_function_mode: Callable[[], Any] = torch.overrides._pop_mode
push_function_mode: Callable[[Any], None] = torch.overrides._push_mode
default_device = torch.utils._device
DeviceContext = torch.utils._device.DeviceContext

# Steps without memory: tensors that only have a shape, and what refuses to run on them.
FakeTensor = torch._subclasses.fake_tensor.FakeTensor
FakeTensorMode = torch._subclasses.fake_tensor.FakeTensorMode
DataDependentOutputException = torch._subclasses.fake_tensor.DataDependentOutputException
DynamicOutputShapeException = torch._subclasses.fake_tensor.DynamicOutputShapeException
UnsupportedOperatorException = torch._subclasses.fake_tensor.UnsupportedOperatorException
# Types that optimizers handle many at a time: fake tensors have to be among them.
foreach_supported_types = _foreach_supported_types

# Sharded tensors wrap plain ones. Arguments of an operation are nested, as a dispatch mode gets them.
is_traceable_wrapper_subclass = torch.utils._python_dispatch.is_traceable_wrapper_subclass
tree_iter = torch.utils._pytree.tree_iter
tree_map_only = torch.utils._pytree.tree_map_only
# The node of FSDP2's hook before a module's forward, which hands arguments on as views of themselves.
SHARDING_HOOK = "RegisterPostBackwardFunctionBackward"
# All convolutions: on the CPU their kernels allocate workspace that nobody counts.
ConvNd = torch.nn.modules.conv._ConvNd

# Settings that a replay must find as its forward did. Properties of torch.backends cost ten times as much.
get_deterministic: Callable[[], bool] = torch._C._get_deterministic_algorithms
get_deterministic_warn_only: Callable[[], bool] = torch._C._get_deterministic_algorithms_warn_only
get_cudnn_deterministic: Callable[[], bool] = torch._C._get_cudnn_deterministic
set_cudnn_deterministic: Callable[[bool], None] = torch._C._set_cudnn_deterministic
get_cudnn_benchmark: Callable[[], bool] = torch._C._get_cudnn_benchmark
set_cudnn_benchmark: Callable[[bool], None] = torch._C._set_cudnn_benchmark
is_any_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled

# Reference counts tell who still holds a tensor. Without the second, no output counts as held by the caller.
num_storage_owners: Callable[[int], int] = torch._C._storage_Use_Count
num_tensor_owners: Callable[[Tensor], int] | None = getattr(Tensor, "_use_count", None)

# Copies many small tensors in few launches.
foreach_copy: Callable[..., None] = torch._foreach_copy_

# Keeps a CUDA device busy while the host fills its queue, so that kernels are timed without gaps.
keep_device_busy: Callable[[int], None] = torch.cuda._sleep

# Operators that torch chooses on CUDA, for estimates without one; and the one behind `Tensor.item`.
flash_attention: Any = torch.ops.aten._scaled_dot_product_flash_attention
efficient_attention: Any = torch.ops.aten._scaled_dot_product_efficient_attention
math_attention: Any = torch.ops.aten._scaled_dot_product_attention_math
local_scalar: Any = torch.ops.aten._local_scalar_dense.default


# The compiler is imported when a unit is first captured: that takes a second.
def min_cut_partition(*args: Any, **kwargs: Any) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """Cuts a joint graph where operations are marked, which nothing public does.

    Attention counts as random even without dropout, and would run again with the generator's state wound back: recoup
    marks no operation to be run again that draws.
    """
    from torch._functorch import partitioners

    with (
        patch.object(partitioners, "has_recomputable_rng_ops", lambda _: False),
        # Of a cut that it refuses it would leave drawings in the working directory.
        patch.object(partitioners, "_get_unique_path", lambda *_: os.devnull, create=True),
        patch.object(partitioners, "visualize_min_cut_graph", lambda _: (None, None)),
    ):
        return partitioners.min_cut_rematerialization_partition(*args, **kwargs)


def default_partition(*args: Any, **kwargs: Any) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """Cuts a joint graph so that nothing is recomputed."""
    from torch._functorch import partitioners

    return partitioners.default_partition(*args, **kwargs)


def backend_of_operations(partition: Callable[..., Any]) -> Callable[..., Any]:
    """A backend of `torch.compile` that runs operations as captured, cut by ``partition``."""
    from torch._dynamo.backends.common import aot_autograd
    from torch.fx.graph import _BoxedCodeGen

    def as_captured(module: torch.fx.GraphModule, _: Any) -> Any:
        # It takes its arguments out of a list, and frees each after its last use, as eager code frees what it saved.
        module.graph.set_codegen(_BoxedCodeGen())
        module.recompile()
        forward = module.forward

        def run(arguments: list[Any]) -> Any:
            return forward(arguments)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    return aot_autograd(fw_compiler=as_captured, bw_compiler=as_captured, partition_fn=partition)


def partitioner_base() -> Any:
    """The class of what cuts joint graphs for generated code; its `uuid` is part of the keys of all caches."""
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    return CustomPartitionerFn


def backend_of_generated_code(partitioner: Any, settings: dict[str, Any]) -> Callable[..., Any]:
    """A backend of `torch.compile` that generates code with these settings, cut by ``partitioner``."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx

    def compile(module: torch.fx.GraphModule, inputs: Any) -> Any:
        # The second for `keep_order`: whatever it sets is put back.
        reorders = config.reorder_for_peak_memory
        with config.patch(custom_partitioner_fn=partitioner, reorder_for_peak_memory=reorders):
            return compile_fx(module, inputs, config_patches=settings)

    return compile


_MOST_VIEWS = 3
"""Of an output that is a view, this many nodes are looked at for that of compiled code."""


def let_run_again(output: Tensor, refuse: Callable[[Any], None]) -> None:
    """Lets the backward of compiled code run with ``retain_graph=True``.

    torch refuses that once a backward was compiled for one run, since generated code writes into saved tensors (donated
    buffers). Here a backward that retains the graph gets copies of them. With ``donated_buffer=False`` for all
    backwards, the one of a gated feed-forward would take more memory.

    Args:
        output: of the code; nothing is done where its backward was let run again before.
        refuse: called before a backward through the gradients (double backward), which torch cannot run.
    """
    function = _compiled_function(output)
    if function is None or hasattr(function, "runs_again_for_recoup"):
        return
    from torch._functorch import config

    once, twice = function._backward_impl, function._double_backward

    def run(ctx: Any, arguments: list[Any]) -> Any:
        if not is_graph_retained():
            return once(ctx, arguments)
        for index in function.metadata.bw_donated_idxs or ():
            arguments[index] = _copied_with_storage(arguments[index])
        with config.patch(donated_buffer=False):
            return once(ctx, arguments)

    def run_with_graph(*args: Any) -> Any:
        gradients = twice(*args)
        made = (one.grad_fn for one in gradients if isinstance(one, Tensor) and one.grad_fn is not None)
        if (above := next(made, None)) is not None:
            above.register_prehook(refuse)
        return gradients

    function._backward_impl, function._double_backward = staticmethod(run), staticmethod(run_with_graph)
    function.runs_again_for_recoup = True


def _compiled_function(output: Tensor) -> Any:
    """The function whose output it is, or a view of it; None if the compiler did not make it."""
    node: Any = output.grad_fn
    for _ in range(_MOST_VIEWS):
        function = getattr(node, "_forward_cls", None)
        if hasattr(function, "_backward_impl") and hasattr(function, "_double_backward"):
            return function
        node = node.next_functions[0][0] if node is not None and node.next_functions else None
    return None


def _copied_with_storage(tensor: Tensor) -> Tensor:
    """A copy with the same strides, also where elements overlap or have gaps: generated code relies on them."""
    copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    storage: Any = tensor.untyped_storage().clone()
    return copy.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


CALLS_OF_MODULES = frozenset({torch.nn.Module.__call__.__code__, torch.nn.Module._call_impl.__code__})
"""What `Module.compile` and `torch.compile` of a module compile."""
CUDA_GRAPHS = "triton.cudagraphs"
"""Among the settings of torch's compiler."""


def all_compiler_settings(compiled: Any) -> dict[str, Any] | None:
    """All settings of what `torch.compile` made; ``None`` for another backend than torch's own."""
    read = getattr(compiled, "get_compiler_config", None)
    given: dict[str, Any] | None = read() if read is not None else None
    if given is not None:
        return given
    # What was compiled with fullgraph=True has forgotten its settings, and its backend knows them.
    backend = next((one.callback for one in _closure(read) if hasattr(one, "callback")), None)
    while backend is not None and not hasattr(backend, "get_compiler_config"):
        backend = getattr(backend, "_torchdynamo_orig_backend", None)
    given = backend.get_compiler_config() if backend is not None else None
    return given


def compiler_settings(compiled: Any) -> dict[str, Any] | None:
    """Settings of what `torch.compile` made, where they are not the defaults; ``None`` for another backend.

    Under ``"dynamic"`` is what it was given by that name, which only the context in its functions knows.
    """
    from torch._inductor import config

    given = all_compiler_settings(compiled)
    if given is None:
        return None
    usual = config.get_config_copy()
    found = {name: value for name, value in given.items() if name in usual and usual[name] != value}
    contexts = _closure(compiled.get_compiler_config)
    dynamic = next((one._dynamic for one in contexts if hasattr(one, "_dynamic")), None)
    return found if dynamic is None else {**found, "dynamic": dynamic}


def _closure(function: Any) -> list[Any]:
    return [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]


def keep_order() -> None:
    """Keeps the graph that is being compiled in its order.

    Reordered by memory, two cuts of one graph would draw their random numbers in different orders.
    """
    from torch._inductor import config

    config.reorder_for_peak_memory = False


def awaits_static_graph(wrapper: Any) -> bool:
    """Whether a `DistributedDataParallel` takes the next backward, whosever it is, for its first one.

    From that one it learns its static graph. Another one in its place, such as a step that nothing reduces, leaves it
    without reductions in all steps after it, without an error.
    """
    return bool(wrapper.static_graph) and not wrapper._static_graph_delay_allreduce_enqueued


def begin_forward(wrapper: Any) -> None:
    """What a `DistributedDataParallel` does before a forward, so that the forward has nothing of it to do.

    It arranges its buckets anew, once, which nothing can repeat if it fails half-way, and makes buffers the same on all
    ranks, for which these wait for each other.
    """
    if wrapper.reducer._rebuild_buckets():
        wrapper._has_rebuilt_buckets = True
    if wrapper._check_sync_bufs_pre_fwd():
        wrapper._sync_buffers()
    wrapper.require_forward_param_sync = False


def shard_groups(state: Any) -> list[Any]:
    """The groups of parameters that a module of FSDP2 gathers; until torch 2.12 there was one."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return list(groups)


def forget_gradients(groups: Sequence[Any], states: Sequence[Any]) -> None:
    """Drops what a backward of FSDP2 that did not end has computed; torch 2.13 has `reset_iter_state` for it."""
    for state in states:
        state._state_ctx.post_backward_final_callback_queued = False
        if hasattr(state._comm_ctx, "reduce_scatter_states"):
            state._comm_ctx.reduce_scatter_states.clear()
            state._comm_ctx._last_post_reduce_events.clear()
        else:
            state._comm_ctx.reduce_scatter_state = None
    for group in groups:
        group._post_reduce_event = group._all_reduce_state = group._partial_reduce_output = None
        for one in group.fsdp_params:
            one.unsharded_accumulated_grad = None
            if hasattr(one, "_unsharded_param"):
                one._unsharded_param.grad = None


def forget_larger_shards(group: Any) -> None:
    """Drops the shards of FSDP2 that wait for a backward, where an integer for ``reshard_after_forward`` made them."""
    group._reshard_after_forward_event = None
    for one in group.fsdp_params:
        one._sharded_post_forward_param = one._sharded_post_forward_param_data = None


def add_unreduced_gradient(one: Any) -> None:
    """Gives a parameter of FSDP2 a gradient in full that waits to be reduced, as a backward before it leaves one."""
    parameter = one._unsharded_param
    if one.reduce_dtype in (None, parameter.dtype):
        parameter.grad = torch.zeros_like(parameter)
    else:
        one.unsharded_accumulated_grad = torch.zeros_like(parameter, dtype=one.reduce_dtype)


def unreduced_gradients(groups: Sequence[Any]) -> list[Tensor]:
    """Gradients of earlier micro-batches that FSDP2 holds, to be reduced later."""
    found = [one for group in groups for one in group.fsdp_params if hasattr(one, "_unsharded_param")]
    gradients = [
        gradient for one in found for gradient in (one._unsharded_param.grad, one.unsharded_accumulated_grad)
    ]
    gradients += [group._partial_reduce_output for group in groups]  # summed up over replicas later
    return [gradient for gradient in gradients if gradient is not None]


def own_store(prefix: str) -> Any:
    """The store of the default process group in a connection of its own, with a prefix for keys; MPI has none.

    Over a connection that others use, a read could wait until their own, which may be blocked, has ended.
    """
    store: Any = torch.distributed.distributed_c10d._get_default_store()
    return None if store is None else torch.distributed.distributed_c10d.PrefixStore(prefix, store.clone())


def abort_groups(members: Sequence[int]) -> None:
    """Ends what waits in process groups among some ranks, with an error; the groups cannot be used any more.

    The public `destroy_process_group` waits for it instead, and torch's own `_abort_process_group` also forgets the
    groups, so that not even the rank can be asked for.
    """
    found = [group for group in torch.distributed.distributed_c10d._world.pg_map if _is_among(group, members)]
    for group in found:
        # gloo has no abort, but closes all connections of a group when one receive times out.
        with suppress(RuntimeError, ValueError):
            other = 1 - min(group.rank(), 1)
            waiting: Any = torch.distributed.irecv(torch.empty(1), group_src=other, group=group)
            waiting.wait(timedelta(milliseconds=1))
    backends = [_nccl_backend(group) for group in found]
    nccl = next((backend for backend in backends if backend is not None), None)
    if nccl is not None:
        nccl._group_start()  # else one communicator's abort could wait for another one's
    for group in found:
        group.abort()
    if nccl is not None:
        nccl._group_end()


def _is_among(group: Any, members: Sequence[int]) -> bool:
    return group.size() > 1 and set(torch.distributed.get_process_group_ranks(group)) <= set(members)


def _nccl_backend(group: Any) -> Any:
    try:
        backend = group._get_backend(torch.device("cuda"))
    except RuntimeError:
        return None
    return backend if hasattr(backend, "_group_start") else None


_ALLOCATORS = ("empty_strided_cpu", "empty_strided_cuda")


@contextmanager
def allocations_seen(see: Callable[[Tensor], None]) -> Iterator[None]:
    """Shows what generated code allocates, which it does without an operation."""
    originals: dict[tuple[Any, str], Any] = {}

    def shown(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def allocate(*args: Any) -> Tensor:
            made = original(*args)
            try:
                see(made)
            except BaseException:
                del made  # the traceback must not hold what did not fit
                raise
            return made

        return allocate

    def show(module: Any) -> Any:
        for name in _ALLOCATORS:
            if hasattr(module, name) and (module, name) not in originals:
                originals[module, name] = getattr(module, name)
                setattr(module, name, shown(originals[module, name]))
        return module

    cache = getattr(sys.modules.get("torch._inductor.codecache"), "PyCodeCache", None)
    if cache is not None:
        for module in cache.modules:
            show(module)
        # A function of the user's may be compiled in the block.
        load, own_load = cache.load_by_key_path, vars(cache)["load_by_key_path"]
        cache.load_by_key_path = lambda *args, **kwargs: show(load(*args, **kwargs))
    try:
        yield
    finally:
        if cache is not None:
            cache.load_by_key_path = own_load
        for (module, name), original in originals.items():
            setattr(module, name, original)


def load_code_cache() -> None:
    """Imports what loads generated code, so that `allocations_seen` shows what is compiled in its block, too."""
    import torch._inductor.codecache  # noqa: F401


def graphs_uncached() -> Any:
    """A context in which joint graphs are made anew, so that partitioners see them; generated code is still cached."""
    from torch._functorch import config

    return config.patch(enable_autograd_cache=False)


def compiler_errors() -> tuple[type[Exception], ...]:
    """What the compiler raises where it cannot capture code; the last two are of branches on sizes not yet known."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
    from torch.fx.experimental.symbolic_shapes import (
        GuardOnDataDependentSymNode,
        PendingUnbackedSymbolNotFound,
    )

    return (
        TorchDynamoException,
        FailOnRecompileLimitHit,
        GuardOnDataDependentSymNode,
        PendingUnbackedSymbolNotFound,
    )


def traced_frames(error: BaseException) -> list[FrameSummary]:
    """The lines of code that the compiler was tracing when it raised an error, the innermost last; most errors know."""
    return list(getattr(error, "real_stack", None) or ())


def too_many_compilations() -> type[Exception]:
    """What the compiler raises when it has compiled a function as often as its settings allow."""
    from torch._dynamo.exc import FailOnRecompileLimitHit

    return FailOnRecompileLimitHit


def many_compilations() -> Any:
    """A context in which one function may be compiled for many layers that differ in a number, such as their index."""
    from torch._dynamo import config

    return config.patch(recompile_limit=1024, accumulated_recompile_limit=4096)


def is_exporting() -> bool:
    """Whether torch.export runs this code: `torch.compiler.is_exporting` is true in all that torch 2.11 compiles."""
    return bool(torch.compiler._is_exporting_flag)


def assume_constant_result(method: _Method) -> _Method:
    """Does what `torch.compiler.assume_constant_result` does, without importing the compiler: that takes a second."""
    method._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return method
