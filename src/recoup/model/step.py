"""A training step: the model called on a sample, and a loss; or a callable of the user that runs all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from recoup.errors import LossError, SampleError
from recoup.model.accumulation import Accumulates
from recoup.model.caches import without_caches
from recoup.model.checks import (
    check_compiled_functions,
    check_model,
    check_not_compiled,
    check_not_in_compiled,
)
from recoup.model.history import has_graph_to_free
from recoup.model.optimizers import Optimizers, read_optimizers
from recoup.model.preserve import gradient_owners, preserving
from recoup.model.replace_forward import suspended
from recoup.model.samples import Sample, describe_sample, read_sample
from recoup.model.sharded import Shards
from recoup.model.uncompile import compiled_code, inner_model, without_forwards
from recoup.model.wrappers import NO_BUCKETS, Buckets
from recoup.ranks import ALONE, Ranks
from recoup.snapshot.reachable import Reached, hooks_of
from recoup.snapshot.writes import Writes
from recoup.tensors import graph_nodes, is_divided, tensors_in
from recoup.torch_private import load_code_cache, without_modes

__all__ = ["TrainingStep"]


class TrainingStep:
    """One training step of a model, which can be run again and again.

    Args:
        model: what is trained.
        sample: a tensor, a tuple of positional arguments, a mapping of keyword arguments, or, where the loss takes
            two arguments, ``(inputs, targets)``.
        loss: from the model's output, and the targets if it takes two arguments, to a scalar; unless given, the
            output's ``loss``, or the output itself.
        step: a callable that runs a whole step, instead of sample and loss.
        optimizer: that steps the model's parameters; a ``step`` may call it.
        ranks: that run the same step, and decide together.
        buckets: that are there for the whole step, to reduce gradients over ranks.

    Raises:
        SampleError: the step cannot be run, or not without leaving a trace.
    """

    def __init__(
        self,
        model: nn.Module,
        sample: Any = None,
        *,
        loss: Callable[..., Tensor] | None = None,
        step: Callable[[], Any] | None = None,
        optimizer: Optimizers | None = None,
        ranks: Ranks = ALONE,
        buckets: Buckets = NO_BUCKETS,
    ) -> None:
        _check(model, sample, loss, step)
        self.ranks, self.buckets = ranks, buckets
        self.shards = Shards(model)
        self.shards.check_reductions()
        #: Whether its operations wait for other ranks.
        self.communicates = any(map(is_divided, model.parameters()))
        self.model, self.sample, self.loss, self.step = model, sample, loss, step
        given = Sample((), {}) if sample is None else read_sample(sample, loss, model.forward)
        self.args, self.kwargs, self.targets = given.args, given.kwargs, given.targets
        hooks = [("a hook", hook) for hook in hooks_of(model)]
        #: What its code can reach. One walk is enough: whatever a run replaces is put back when the run ends.
        self.reached = Reached([("step", step), ("loss", loss), ("sample", sample), *hooks], known=model)
        # What stands in for gathered parameters is the sharding's own.
        gathered = self.shards.originals()
        self.reached.leaves = [leaf for leaf in self.reached.leaves if id(leaf) not in gathered]
        known = gathered.keys() | {id(parameter.grad) for parameter in model.parameters()}
        self.reached.tensors = [tensor for tensor in self.reached.tensors if id(tensor) not in known]
        gradient_hooks = (getattr(p, "_post_accumulate_grad_hooks", None) for p in model.parameters())
        #: Whether a run may step an optimizer: in a callable of the user's, or in a hook of a parameter.
        self.changes_parameters = step is not None or any(gradient_hooks)
        stepped = self.reached.optimizers if self.changes_parameters else []
        self.optimizers = read_optimizers([*read_optimizers(optimizer), *stepped])
        self.writes = Writes()
        #: Tensors that its code can reach and its operations read, such as the batch of a step of the user's; known
        #: after `watch_calls`.
        self.inputs: list[Tensor] = []
        #: Number of backwards of other models before the model's own, whose forwards of the model are not visited.
        self.num_skipped = 0
        check_not_compiled(model)
        #: Compiled functions that its code can reach, with their names. They run as they are.
        self.compiled = without_forwards(self.reached.compiled, [model, *self.reached.modules])
        used = self.reached.used_modules
        check_not_in_compiled(model, used)
        others = [(type(inner_model(one)).__name__, code) for one in used for code in compiled_code(one)]
        uses_cuda = any(parameter.is_cuda for parameter in model.parameters())
        check_compiled_functions([*self.compiled, *others], step, uses_cuda=uses_cuda)
        if self.compiled or others:
            load_code_cache()
        if self.reached.iterators:
            raise _unrepeatable(*self.reached.iterators[0])
        #: Gives the first of some runs the random numbers that all begin with; by default, those that come next.
        self.begin: Callable[[], None] | None = None
        #: Whether a whole step has run in `finding_writes`, its backward included.
        self.knows_writes = False
        #: Whether gradients are there when it begins: what its user says (`read_accumulation`), or a pass has found.
        self.accumulates: Accumulates = False
        #: Whether a step begins with gradients of the step before.
        self.leaves_gradients = False
        #: Whether a step of the user's has called `torch.autograd.grad`, which stops at the cuts around units.
        self.calls_grad = False

    @property
    def given(self) -> tuple[Any, ...]:
        """All parts of the sample."""
        return (self.args, self.kwargs, self.targets)

    @property
    def waits_in_units(self) -> bool:
        """Whether its operations wait for other ranks even while units run one at a time."""
        return self.communicates and not self.shards

    @contextmanager
    def together(self) -> Iterator[None]:
        """A block that runs real steps, after which all ranks raise the error of the first that failed in it."""
        try:
            with self.ranks.together(communicates=self.communicates):
                yield
        except BaseException:
            if self.shards:
                self.shards.abandon()  # else the next step would add to gradients that this one has not reduced
            raise

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """A block that may run the step, and leaves no trace of it.

        Raises:
            SampleError: a second step goes through the graph of the first, by way of a buffer or an attribute.
        """
        with preserving(
            self.model,
            self.optimizers,
            everything=self.changes_parameters,
            reached=self.reached,
            writes=self.writes,
        ):
            if self.begin is not None:
                self.begin()
            try:
                yield
            finally:
                self.shards.put_back()

    def repeated(self) -> AbstractContextManager[None]:
        """Inside `preserved`, a block that runs the step once of several times: the next begins with the same counters.

        What the step trains goes on, so that nothing as large is copied for every run.
        """
        return preserving(self.model, reached=self.reached)

    @contextmanager
    def plain(self) -> Iterator[None]:
        """As `preserved`, with the model as it runs without a plan, and without key-value caches."""
        with suspended(self.model), without_caches(self.model), self.preserved():
            yield

    def finding_writes(self) -> AbstractContextManager[None]:
        """A block that runs the step for the first time: the tensors that it writes to are put back, then and later."""
        # `preserving` puts parameters back only where the step is known to change them; a forward may, too.
        parameters = self.model.parameters() if self.changes_parameters else ()
        return self.writes.found([*parameters, *self.model.buffers(), *self.shards.gathered()])

    def forward(self) -> tuple[Any, Tensor]:
        """Runs the model and the loss; returns the model's output and the loss."""
        output = self.model(*self.args, **self.kwargs)
        return output, self.loss_of(output)

    def takes_derivatives(self, error: BaseException) -> bool:
        """Whether an error may be due to derivatives that the user's code takes inside the step."""
        return self.calls_grad or _is_of_grad(error) or _is_of_func(error)

    def refusal(self, error: Exception) -> SampleError | LossError:
        """The error for a step that failed: in the model, in the loss, or in a step of the user's."""
        what = f"{type(error).__name__}: {error}"
        is_of_func = _is_of_func(error)
        if self.step is not None:
            why = _GRAD_IN_STEP if self.takes_derivatives(error) else _STEP_IN_PIECES
            return SampleError(f"step= failed: {what.rstrip('.')}. {_FUNC_GRAD if is_of_func else why}")
        if self.takes_derivatives(error):
            why = _FUNC_GRAD if is_of_func else _GRAD_IN_FORWARD
            return SampleError(f"{type(self.model).__name__} failed: {what.rstrip('.')}. {why}")
        if isinstance(error, _LossFailedError):
            cause = error.__cause__
            return LossError(
                f"loss= failed on the model's output ({error}): {type(cause).__name__}: {cause}. It is called as"
                f" loss(output{', targets' if self.targets else ''}): give a function that takes just that and"
                " returns a scalar."
            )
        hint = ""
        if not self.targets and isinstance(self.sample, (tuple, list)) and len(self.sample) == 2:
            hint = (
                " If it is (inputs, targets) from a loader, give a loss of output and targets, such as"
                " loss=nn.CrossEntropyLoss()."
            )
        return SampleError(
            f"{type(self.model).__name__} refuses the sample ({describe_sample(self.sample)}): {what}. Give what the"
            f" model takes: a tensor for model(x), a tuple for model(*sample), a dict for model(**sample).{hint}"
        )

    def loss_of(self, output: Any) -> Tensor:
        """The loss of an output, checked."""
        loss = _default_loss(output) if self.loss is None else self.loss(output, *self.targets)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = (
                f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            )
            raise LossError(
                f"The loss must be a scalar; got {what}. Give loss=, a function from the model's output to a scalar,"
                " such as loss=lambda output: output.mean()."
            )
        if not loss.requires_grad:
            raise LossError(
                "The loss does not depend on any parameter that needs a gradient. Check loss=, requires_grad and"
                " torch.no_grad inside the model."
            )
        return loss

    def run_unchecked(self) -> None:
        """Runs the forward alone, without a check of the loss; a step of the user's with backwards of other models."""
        if self.step is not None:
            trained = self.parameter_ids()
            self.run(lambda loss, output: loss.requires_grad and not _reaches(loss, trained))
            return
        output = self.model(*self.args, **self.kwargs)
        if self.loss is None:
            return
        try:
            self.loss(output, *self.targets)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise _LossFailedError(describe_sample(output)) from error

    def parameter_ids(self) -> set[int]:
        """The identities of the parameters that get gradients, and of what stands in for them while gathered."""
        return {id(p) for p in self.model.parameters() if p.requires_grad} | self.shards.originals().keys()

    def run(self, at_backward: Callable[[Tensor, Any], bool | None]) -> None:
        """Runs the step; ``at_backward(loss, output)`` replaces each backward, unless it returns True.

        After a replaced backward a step of the user's finds gradients of zero, which scalers, clipping and optimizers
        need. When it begins, it finds those of the step before.
        """
        if self.step is None:
            output, loss = self.forward()
            at_backward(loss, output)
            return

        run_backward, run_grad = torch.autograd.backward, torch.autograd.grad

        def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
            if at_backward(_as_loss(tensors, grad_tensors), None):
                run_backward(tensors, grad_tensors, *args, **kwargs)
            else:
                self._give_gradients(trained)

        def grad(*args: Any, **kwargs: Any) -> Any:
            self.calls_grad = True
            return run_grad(*args, **kwargs)

        trained = self._trained()
        with without_modes():
            # Each run starts from the same counters.
            put_back = self.reached.hold()
            if self.leaves_gradients:
                self._give_gradients(self.model.parameters())
        try:
            with _autograd_replaced(backward=backward, grad=grad):
                self.step()
            self.leaves_gradients = any(p.grad is not None for p in self.model.parameters())
        finally:
            with without_modes():
                put_back()
            for parameter in trained:
                parameter.grad = None

    def _give_gradients(self, parameters: Iterable[Tensor]) -> None:
        sparse = {
            id(module.weight)
            for module in self.model.modules()
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
        }
        for parameter in parameters:
            if parameter.requires_grad and parameter.grad is None:
                layout = torch.sparse_coo if id(parameter) in sparse else None
                parameter.grad = torch.zeros_like(parameter, layout=layout)

    def _trained(self) -> list[Tensor]:
        owned = [p for one in (self.model, *self.reached.modules) for p in gradient_owners(one)]
        return [tensor for tensor in (*owned, *self.reached.leaves) if tensor.requires_grad]


_STEP_IN_PIECES = (
    "While it is measured, units run one at a time and every gradient is 0: leave out of it what depends on the values"
    " of gradients, or give a sample and loss= instead."
)
_GRAD_IN_STEP = (
    "It calls torch.autograd.grad, which cannot reach through units while they are measured one at a time, cut off from"
    " each other: leave that term (a gradient penalty, say) out of step= and leave room for it in the budget, or name"
    " units= that contain all that it goes through. The fitted model then runs your whole step."
)
_GRAD_IN_FORWARD = (
    "Its forward calls torch.autograd.grad, which cannot reach through units while they are measured one at a time, cut"
    " off from each other: name units= that contain the whole module that calls it. If the model itself does, name"
    " units that leave a way around them, such as blocks of a residual stream: what their second derivatives take is"
    " then known from real steps only."
)
_FUNC_GRAD = (
    "While torch.func.grad (vjp, jacrev, hessian) runs, torch allows no hooks on saved tensors, by which recoup"
    " measures. Leave what uses it out of step=, and leave room for it in the budget: it runs without the plan."
)


def _is_of_grad(error: BaseException) -> bool:
    """Whether torch.autograd.grad raised an error, called by other code than recoup's."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    return any(
        called.f_code is torch.autograd.grad.__code__
        and not caller.f_globals.get("__name__", "").startswith("recoup.")
        for caller, called in pairwise(frames)
    )


def _is_of_func(error: BaseException) -> bool:
    """Whether an error was raised under `torch.func.grad` and its like, which are in one file."""
    file = torch.func.vjp.__code__.co_filename
    return any(frame.f_code.co_filename == file for frame, _ in walk_tb(error.__traceback__))


class _GivenGradients(torch.autograd.Function):
    """A scalar whose backward hands on gradients that are there already."""

    @staticmethod
    def forward(ctx: Any, gradients: Sequence[Tensor], *outputs: Tensor) -> Tensor:
        ctx.gradients = gradients
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return (None, *ctx.gradients)


def _as_loss(tensors: Any, gradients: Any) -> Tensor:
    """What a backward begins at, as one scalar: a loss, or several; or outputs with their gradients."""
    roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    first: Tensor = roots[0]
    if len(roots) == 1 and first.numel() == 1:
        return first
    given = [gradients] if gradients is None or isinstance(gradients, Tensor) else list(gradients)
    given += [None] * (len(roots) - len(given))
    known = [
        torch.ones_like(root) if gradient is None else gradient.detach()
        for root, gradient in zip(roots, given, strict=True)
    ]
    found: Tensor = _GivenGradients.apply(known, *roots)  # type: ignore[no-untyped-call]
    return found


def _reaches(loss: Tensor, parameters: set[int]) -> bool:
    """Whether a loss depends on one of these parameters."""
    return any(id(getattr(node, "variable", None)) in parameters for node in graph_nodes(loss))


class _LossFailedError(Exception):
    """The user's loss raised, for an output that the text describes."""


def _check(model: Any, sample: Any, loss: Any, step: Any) -> None:
    """Refuses arguments that make no step.

    Raises:
        SampleError: it says why.
    """
    check_model(model)
    if (sample is None) == (step is None):
        raise SampleError(
            "Give either a sample (a tensor, a tuple of arguments, a dict of keyword arguments, or (inputs, targets)"
            " with a loss of two arguments) or step=, a callable that runs a whole training step."
        )
    if isinstance(sample, (DataLoader, Dataset, Iterator)):
        raise SampleError(
            f"The sample is a {type(sample).__name__}, and one batch is wanted: give batch = next(iter(loader)), as"
            " large as any in training."
        )
    if any(map(has_graph_to_free, tensors_in(sample))):
        raise SampleError(
            "A tensor of the sample was computed with gradients, so every step but the first finds its graph freed:"
            " give its detach()."
        )
    if step is not None and loss is not None:
        raise SampleError("loss= goes with a sample; a step= callable computes its own loss.")
    if step is not None and not callable(step):
        raise SampleError(f"step= must be callable; got a {type(step).__name__}.")
    if isinstance(loss, type) and issubclass(loss, nn.Module):
        raise SampleError(f"loss= is the class {loss.__name__}: give an object of it, {loss.__name__}().")
    if loss is not None and not callable(loss):
        raise SampleError(f"loss= must be callable; got a {type(loss).__name__}.")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise SampleError(
            f"No parameter of {type(model).__name__} needs a gradient, so there is no backward to make room"
            " for. Call requires_grad_() on what should be trained."
        )


def _unrepeatable(name: str, iterator: Any) -> SampleError:
    return SampleError(
        f"The step uses {name!r}, a {type(iterator).__name__}: fitting runs the step many times, each run would take"
        " the next of its items, and they could not be put back. Take what is needed before, as in batch = next(…), and"
        " let the step use that."
    )


@contextmanager
def _autograd_replaced(**functions: Callable[..., Any]) -> Iterator[None]:
    """Replaces functions of `torch.autograd`, which ``loss.backward()`` calls by these names."""
    originals = {name: getattr(torch.autograd, name) for name in functions}
    vars(torch.autograd).update(functions)
    try:
        yield
    finally:
        vars(torch.autograd).update(originals)


def _default_loss(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping) and output.get("loss") is not None:
        return output["loss"]
    loss = getattr(output, "loss", None)
    if loss is None:
        raise LossError(
            f"The model returns a {type(output).__name__} without a loss. Give loss=, a function from that output to a"
            " scalar, or a sample with labels."
        )
    return loss
