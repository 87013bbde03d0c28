"""Seconds of what is not a unit: the code between units, the tail, and the modules inside a unit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.autograd import grad as run_grad

from recoup.devices.meter import Meter
from recoup.measuring.problem.costs import CodeSeconds
from recoup.model.calls import module_names
from recoup.model.replace_forward import intercepted
from recoup.model.step import TrainingStep
from recoup.model.streaming import UnitCall, Visitor, stream
from recoup.tensors import needing_gradient

__all__ = ["time_code", "time_inside"]


class _Timer(Visitor):
    """A visitor that times the code between units; ``at_call`` may do anything with each call."""

    def __init__(self, step: TrainingStep, meter: Meter, at_call: Callable[[UnitCall], None]) -> None:
        self.step, self.meter, self.at_call = step, meter, at_call
        self.tail_backward_s = 0.0
        self.restart()

    def restart(self) -> None:
        self.starts: list[Tensor] = []
        self.spans: list[tuple[Any, Any]] = []
        self._since = self.meter.stamp()

    def enter(self, call: UnitCall) -> None:
        self.spans.append((self._since, self.meter.stamp()))
        self.at_call(call)

    def leave(self, call: UnitCall, output: Any, start: Tensor) -> None:
        self.starts.append(start)
        self._since = self.meter.stamp()

    def end(self, loss: Tensor, output: Any) -> None:
        self.spans.append((self._since, self.meter.stamp()))
        inputs = [*self.starts, *needing_gradient(list(self.step.model.parameters()))]
        (tail,) = self.meter.time(lambda: [lambda: run_grad(loss, inputs, allow_unused=True)])
        self.tail_backward_s = tail.device_s


def time_code(
    step: TrainingStep, units: Sequence[nn.Module], meter: Meter, at_call: Callable[[UnitCall], None]
) -> list[CodeSeconds]:
    """Streams the step and times the code before each unit, and the tail last.

    The tail's backward is timed. The backward of other code is assumed to take as long as its forward.
    """
    timer = _Timer(step, meter, at_call)
    stream(step, units, timer)
    forward_s = [meter.elapsed_s(first, second) for first, second in timer.spans]
    between = [CodeSeconds(seconds, seconds) for seconds in forward_s[:-1]]
    return [*between, CodeSeconds(forward_s[-1], timer.tail_backward_s)]


def time_inside(call: UnitCall, modules: Sequence[nn.Module], meter: Meter) -> dict[str, float]:
    """Forward seconds of modules inside a unit, by their names in the unit."""
    names = module_names(call.module)
    spans: list[tuple[str, Any, Any]] = []

    def stand_in(module: nn.Module) -> Callable[..., Any]:
        original = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            begin = meter.stamp()
            try:
                return original(*args, **kwargs)
            finally:
                spans.append((names[module], begin, meter.stamp()))

        return forward

    inside = [module for module in modules if module in names]
    meter.fill_queue()
    with intercepted({module: stand_in(module) for module in inside}):
        call.again().glance()
    seconds = {names[module]: 0.0 for module in inside}
    for name, begin, finish in spans:
        seconds[name] += meter.elapsed_s(begin, finish)
    return seconds
