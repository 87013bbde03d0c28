"""``audit``: a step streamed unit by unit, each of which is examined on its way."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from recoup.auditing.examine import examine
from recoup.auditing.findings import Audit, Finding
from recoup.model.calls import watch_calls
from recoup.model.step import TrainingStep
from recoup.model.streaming import UnitCall, Visitor, explaining, stream
from recoup.model.units import Units, choose_units, find_units
from recoup.model.wrappers import unsynchronized, unwrapped_model

__all__ = ["audit", "audit_step"]


def audit(
    model: nn.Module,
    sample: Any = None,
    *,
    loss: Callable[..., Tensor] | None = None,
    step: Callable[[], Any] | None = None,
    units: Units | Iterable[Units] | None = None,
) -> Audit:
    """Looks in a model's training step for what makes a replay unsafe, or worth knowing about.

    Every unit is run a few times, one after the other, so the plain step need not fit; the model is left as it was.
    An audit sees one sample: code that behaves only sometimes is found only if it does so here.

    Args:
        model: what is trained, in the mode (train or eval) in which it will be.
        sample: a tensor, a tuple of positional arguments or a dict of keyword arguments.
        loss: from the model's output to a scalar; unless given, the output's ``loss``, or the output itself.
        step: a callable that runs a whole training step, instead of sample and loss.
        units: the modules to decide about: name patterns (``"blocks.*"``), modules, classes of modules, or a
            predicate of name and module.

    Raises:
        SampleError: the model does not take the sample, or has nothing to train.
        LossError: the loss is no scalar.
        UnitError: there are no such units.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(inplace=True), torch.nn.Linear(4, 1))
    >>> audit(model, torch.randn(2, 4), loss=torch.sum).unsafe
    {}
    >>> audit(model, torch.randn(2, 4), loss=torch.sum, units=["0", "1", "2"]).unsafe
    {'1': "changes its input in place: argument 'input'"}
    """
    training = TrainingStep(unwrapped_model(model), sample, loss=loss, step=step)
    with unsynchronized([model, *training.reached.modules]):
        with training.plain():
            root = watch_calls(training)
        chosen = choose_units(root) if units is None else find_units(root, units)
        return audit_step(training, chosen)


def audit_step(
    step: TrainingStep, units: Sequence[nn.Module], *, only: Collection[int] | None = None
) -> Audit:
    """`audit` for a step that is already put together.

    Args:
        step: to audit.
        units: whose calls are examined.
        only: the indices of the calls to examine among all of them; unless given, every call.
    """
    visitor = _Visitor(only)
    with step.plain(), explaining(step):
        stream(step, units, visitor)
    return Audit(tuple(visitor.findings))


class _Visitor(Visitor):
    """Examines the calls of a streamed step."""

    def __init__(self, only: Collection[int] | None) -> None:
        self._only = only
        self.findings: list[Finding] = []

    def visit(self, call: UnitCall) -> Any:
        if self._only is not None and call.index not in self._only:
            return super().visit(call)
        output, findings = examine(call)
        self.findings += findings
        return output

    def restart(self) -> None:
        self.findings.clear()
