"""Capturing a unit's forward, and running it under a cut.

NOTE [ One function for each cut ]
    torch's compiler keeps what it compiled with the code of the function that it compiled. Units of one kind share one
    function for each cut, and so one compilation; two cuts have functions of their own, with code of their own, or they
    would take turns in recompiling each other.

    So do units whose parts have other classes: the compiler compiles a function anew for each class. Parametrizations
    (`torch.nn.utils.parametrize`) make a class for every module that they are registered on. Their units are each
    compiled by themselves; with one function for all, the compiler would warn of too many compilations.
"""

from __future__ import annotations

import json
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.fx import GraphModule

from recoup.capture.cut import Cut
from recoup.capture.graph import UnitGraph, sized_by_values
from recoup.capture.partition import dropouts_as_eager, partition
from recoup.errors import CaptureError, RecoupError, RecoupWarning
from recoup.tensors import each_tensor
from recoup.torch_private import (
    backend_of_generated_code,
    backend_of_operations,
    compiler_errors,
    graphs_uncached,
    is_compiler_off,
    let_run_again,
    many_compilations,
    too_many_compilations,
    traced_frames,
)

__all__ = ["capture", "graph_of", "is_capturing", "refusing", "run_cut"]

_numbers = count()
_functions: dict[tuple[Any, Any, Cut], Callable[..., Any]] = {}
"""By a unit's forward, the classes of its parts, and the cut."""
_classes: WeakKeyDictionary[nn.Module, tuple[type, ...]] = WeakKeyDictionary()
_graphs: dict[tuple[str, str], UnitGraph] = {}
"""By engine and digest."""

_NOT_THE_USERS = tuple(
    f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1])
)
_MOST_COMPILATIONS = 3
"""A second one is for what the first call left behind, such as a table that is filled once or a number that varies."""
_COMPILER_IS_OFF = (
    "torch's compiler is off here (TORCHDYNAMO_DISABLE, torch.compiler.set_stance or torch.compiler.disable)"
)
_COMPILED_IN_EVERY_CALL = (
    "it would be compiled anew in every call, because its code changes what it depends on: where it counts in an"
    " attribute, count in a buffer instead"
)


class _Running(threading.local):
    """Whether this thread runs a captured unit, and so may capture it."""

    is_inside = False


_running = _Running()


def is_capturing() -> bool:
    """Whether code that the compiler traces now belongs to a unit that recoup captures."""
    return _running.is_inside


def _template(forward: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
    # The compiler takes this branch out; without it, everything that the backward reads would be kept in silence.
    if not torch.compiler.is_dynamo_compiling():
        raise CaptureError(_COMPILER_IS_OFF)
    return forward(module, *args, **kwargs)


def capture(
    engine: str,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    settings: str = "",
    *,
    again: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]] | None = None,
) -> UnitGraph:
    """The joint graph of a unit's forward and backward for some arguments.

    The forward runs, under the engine's own cut, until a call needs no compilation. ``again`` gives the arguments of
    further calls, where a call changes its own: it may fill a cache.

    Raises:
        CaptureError: the compiler cannot capture the forward in one graph, would do so anew in every call, or is off;
            or the graph does not run.
    """
    found: list[UnitGraph] = []
    num_compilations = 0
    cut = Cut(engine, "", settings=settings)

    def see(joint: GraphModule, inputs: Any, *, num_fwd_outputs: int, **given: Any) -> Any:
        nonlocal num_compilations
        num_compilations += 1
        own = partial(partition, cut, joint, inputs, num_fwd_outputs=num_fwd_outputs, **given)
        if found:  # compiled again, for another shape or number
            return own()
        if (node := sized_by_values(joint.graph)) is not None:
            raise CaptureError(f"the size of a result depends on values ({node.name})")
        dropouts_as_eager(joint)
        graph = UnitGraph.of(joint.graph, num_fwd_outputs)
        found.append(graph)
        parts = own()
        graph.own_saves = graph.saved_by(parts[0], num_fwd_outputs)
        return parts

    run = _compiled(cut, see)
    function, module = _unbound(forward)
    with refusing(), graphs_uncached(), warnings.catch_warnings():
        # Where a backward cannot be captured, autograd prints a traceback beside the compiler's error.
        warnings.filterwarnings("ignore", message="Error detected in .*")
        for num_calls in range(_MOST_COMPILATIONS):
            if num_compilations < num_calls:
                break
            if num_calls and again is not None:
                args, kwargs = again()
            _call(run, function, module, args, kwargs)
    if not found:
        raise CaptureError("nothing in it needs a gradient")
    if num_compilations == _MOST_COMPILATIONS:
        raise CaptureError(_COMPILED_IN_EVERY_CALL)
    graph = _graphs[engine, found[0].digest] = found[0]
    _functions.setdefault((function, _classes_in(module), replace(cut, graph=graph.digest)), run)
    return graph


def graph_of(cut: Cut) -> UnitGraph | None:
    """The graph that a cut is of, if it was captured in this process."""
    return _graphs.get((cut.engine, cut.graph))


def run_cut(
    cut: Cut,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    eager: Callable[..., Any] | None = None,
) -> Any:
    """Runs a unit's forward under a cut.

    Where the compiler cannot capture the call, as in a shape that it has not seen, or where the graph fails, the call
    runs eagerly, with a warning. Under a mode that watches operations, such as torch's counter of FLOPs, it runs
    eagerly as well.

    Args:
        cut: of its graph.
        forward: the unit's own.
        args: of the call.
        kwargs: of the call.
        eager: what runs instead of the graph; by default the forward.
    """
    eager = eager or forward
    if is_compiler_off():
        return eager(*args, **kwargs)
    function, module = _unbound(forward)
    key = (function, _classes_in(module), cut)
    known = _functions.get(key)
    if known is None:
        known = _functions[key] = _compiled(cut, partial(partition, cut))
    try:
        with refusing():
            output = _call(known, function, module, args, kwargs)
    except CaptureError as error:
        reason = str(error)
    else:
        for tensor in each_tensor(output):
            let_run_again(tensor, refuse=_refuse_double_backward)
        return output
    owner = getattr(forward, "__self__", forward)
    warnings.warn(
        f"A unit of class {type(owner).__name__} runs eagerly in this call, and may take more memory than planned:"
        f" {reason}.",
        RecoupWarning,
        stacklevel=2,
    )
    # Not while the error is handled: the user's own code may fail as well, and its error is raised as it is.
    return eager(*args, **kwargs)


def _refuse_double_backward(_: Any) -> None:
    raise CaptureError(
        "A backward runs through gradients of units that run as captured graphs (create_graph=True, as for a gradient"
        " penalty), which torch's compiler cannot do: fit the model with engine='eager'."
    )


@contextmanager
def refusing() -> Iterator[None]:
    """Turns what a graph raises, while it is compiled or when it runs, into a `CaptureError`.

    A graph may fail where eager code runs: where a kernel returns other strides than torch's fake tensors foresee, a
    view of its result is refused. Memory that runs out is raised as it is.
    """
    try:
        yield
    except (RecoupError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        cause = _innermost(error)
        if isinstance(cause, torch.OutOfMemoryError):
            raise cause from None
        what = (
            "torch's compiler cannot capture it"
            if isinstance(error, compiler_errors())
            else "its graph does not run"
        )
        raise CaptureError(f"{what} ({_reason(cause)})") from error


def _call(run: Callable[..., Any], *args: Any) -> Any:
    before, _running.is_inside = _running.is_inside, True
    try:
        return run(*args)
    except too_many_compilations():
        with many_compilations():
            return run(*args)
    finally:
        _running.is_inside = before


def _compiled(cut: Cut, partition: Callable[..., Any]) -> Callable[..., Any]:
    # By its name the compiler knows in which shapes a function was called before, to make those that vary symbolic.
    code = _template.__code__.replace(co_name=f"unit_{next(_numbers)}")
    function = FunctionType(code, _template.__globals__, code.co_name)
    settings = json.loads(cut.settings or "{}")
    dynamic = settings.pop("dynamic", None)
    if cut.engine == "compiled":
        from recoup.capture.partitioner import Partitioner

        backend = backend_of_generated_code(Partitioner(partition, cut.saves), settings)
    else:
        backend = backend_of_operations(partition)
    return torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)


def _unbound(forward: Any) -> tuple[Callable[..., Any], Any]:
    """A method's function and its module; units of one class share the function."""
    function = getattr(forward, "__func__", None)
    return (function, forward.__self__) if function is not None else (_call_alone, forward)


def _classes_in(module: Any) -> tuple[type, ...]:
    """The classes of a module's parts; looked up once, since every call asks."""
    if not isinstance(module, nn.Module):
        return ()
    found = _classes.get(module)
    if found is None:
        found = _classes[module] = tuple(map(type, module.modules()))
    return found


def _call_alone(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs)


def _innermost(error: BaseException) -> BaseException:
    """The first of all causes."""
    while (cause := getattr(error, "inner_exception", None) or error.__cause__) is not None:
        error = cause
    return error


def _reason(error: BaseException) -> str:
    """The first line of an error, and the line of the user's code at which the compiler gave up."""
    text = str(error).strip()
    reason = text.splitlines()[0].rstrip(".") if text else type(error).__name__
    own = [frame for frame in traced_frames(error) if not frame.filename.startswith(_NOT_THE_USERS)]
    return f"{reason}, {Path(own[-1].filename).name}:{own[-1].lineno}" if own else reason
