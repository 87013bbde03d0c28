"""``fit`` and ``verify``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from warnings import warn

from torch import Tensor, nn

from recoup.budgets import read_budget
from recoup.devices.meter import device_of, gc_of_new_objects, make_meter
from recoup.engines import ModelPlan, apply, remove
from recoup.engines.by_size import plan_of_call
from recoup.engines.eager import Earlier, planned_model
from recoup.engines.verify import Verification, verify_step
from recoup.errors import (
    RecoupWarning,
    SampleError,
)
from recoup.fitting.by_size import check_sizes
from recoup.fitting.fitted import Fitted
from recoup.fitting.one_fit import Fitting
from recoup.given import check_given
from recoup.model.accumulation import Accumulates
from recoup.model.checks import check_model
from recoup.model.compile_settings import settings_to_take_over
from recoup.model.optimizers import Optimizers
from recoup.model.replace_forward import uninstall_plan
from recoup.model.several_samples import read_samples
from recoup.model.step import TrainingStep
from recoup.model.uncompile import compiled_code, inner_model, is_compiled, is_uncompiled, uncompile
from recoup.model.units import Units
from recoup.model.wrappers import buckets_of, unsynchronized, unwrapped_model
from recoup.plans.by_size.plans import PlansBySize
from recoup.ranks import find_ranks

__all__ = ["engines_for", "fit", "plan_to_fit", "verify"]


def fit(
    model: nn.Module,
    sample: Any = None,
    *,
    budget: int | str,
    loss: Callable[..., Tensor] | None = None,
    optimizer: Optimizers | None = None,
    step: Callable[..., Any] | None = None,
    units: Units | Iterable[Units] | None = None,
    accumulates: Accumulates = False,
    holds_output: bool | None = None,
    samples: Iterable[Any] | None = None,
    sizes: Iterable[int] | None = None,
    verify: bool = True,
    race: bool = True,
    insist: bool = False,
    engine: str = "auto",
    together: Any = True,
    in_flight: int = 1,
) -> Fitted:
    """Makes a model's training step fit a budget, in place, at the least cost in time.

    Args:
        model: what is trained, in the mode (train or eval) in which it will be.
        sample: as large as in training: a tensor for ``model(x)``, a tuple for ``model(*sample)``, a mapping for
            ``model(**sample)``, or ``(inputs, targets)`` as a loader yields them, with a loss of two arguments.
        budget: bytes that the whole step may peak at: ``"8GiB"``, ``"80%"`` of the device, or ``"auto"``, what is free
            less a margin. It covers parameters, gradients, optimizer state, activations and transients.
        loss: from the model's output, and the targets if it takes two arguments, to a scalar; unless given, the
            output's ``loss``, or the output itself.
        optimizer: whose state counts, also before its first step; a trainer's wrapper of one, or several in a list.
        step: a callable that runs a whole training step, for loops that are not ``loss(model(*sample))``. Whatever it
            changes is put back.
        units: the modules to decide about: name patterns (``"blocks.*"``), modules, classes of modules, or a
            predicate of name and module.
        accumulates: gradients are there when a step begins, because several backwards add up in them; with FSDP2,
            ``"unreduced"`` says that they are there in full, since only the last micro-batch reduces them
            (``set_requires_gradient_sync``, ``no_sync`` of Accelerate).
        holds_output: whether the training loop still has the model's output when the backward runs, as with
            ``output = model(x); loss_of(output).backward()``, or not, as with ``model(**batch).loss.backward()``.
            Unless given, plans are made for a loop that has it and, only where that does not fit, for one that has not.
        samples: instead of one, batches of several sizes, such as ``[short, medium, long]``: each is measured, and
            every range of sizes gets a plan of its own, under the same budget. Each call of the model runs under the
            plan for its batch. With ``step``, that is called with one of them.
        sizes: with one sample, the longest: lengths that it is cut to, such as ``[128, 512, 2048]``, instead of
            ``samples``.
        verify: run a real step under the plan and compare it with the prediction, the budget and the plain step.
        race: time the plan against others that fit, such as recomputing every unit, in turn on real steps; keep the
            fastest, and correct the profile's seconds by what was measured. It goes with ``verify``. Ranks that fit
            together race together, and the slowest one's seconds count; a rank that fits alone beside others, and
            several forwards in flight, are not raced.
        insist: let units be replayed that the audit finds unsafe.
        engine: ``"eager"``; ``"captured"``, where large units run as graphs of the same operations, so that the plan
            decides about each of them; ``"compiled"``, where torch's compiler generates code for these graphs;
            ``"best"``, the fastest of the three on real steps; or ``"auto"``, compiled where the model or modules in it
            were compiled, and else eager. Inside captured units, code no longer runs line by line: prints,
            breakpoints and hooks that are added later have no effect there. What cannot be captured runs eagerly.
        together: where `torch.distributed` is initialized, all of its ranks call this function, and get one plan: for
            the largest bytes and the slowest seconds that any of them measured. An error on one rank is raised on all.
            A process group instead of ``True`` does so for its ranks; ``False`` fits on this rank alone.
        in_flight: how many micro-batches wait for their backward at once, as in a stage of a pipeline: what all of
            them hold is part of the peak. Of ranks that fit together, the largest number counts.

    Raises:
        BudgetError: nothing fits; it names the smallest feasible budget, which a real step showed to hold where one
            can be run, and says so.
        SampleError: the model does not take the sample, or has nothing to train.
        LossError: the loss is no scalar.
        UnitError: there are no such units.
        VerificationError: a gradient differs from the plain step's, with captured units by more than rounding; for
            generated code, from those of the same code with everything kept.

    The model is as before if an exception leaves this function.

    >>> import torch
    >>> layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(6)]
    >>> model = torch.nn.Sequential(*layers)
    >>> fitted = fit(model, torch.zeros(512, 64), budget="1.4MB", loss=lambda output: output.mean())
    >>> fitted.verification.peak_bytes <= 1_400_000, fitted.verification.gradients
    (True, 'bit-equal')
    """
    ranks = find_ranks(together)
    with ranks.together():
        engines = engines_for(engine, model)
        earlier, inner = Earlier(model), unwrapped_model(model)
        buckets = buckets_of(model, expected=ranks.size > 1)
        settings = settings_to_take_over(model) if "compiled" in engines else ""
        try:
            if engines != ("eager",):
                uninstall_plan(model)
                uncompile(model)
                inner = inner_model(inner)
            elif is_uncompiled(model):
                remove(model)  # so that what it hides is refused as before: an eager plan would bring it back
            training, *others = [
                TrainingStep(
                    inner, one, loss=loss, step=run, optimizer=optimizer, ranks=ranks, buckets=buckets
                )
                for one, run in _steps(step, sample, samples, sizes)
            ]
            if others:
                check_sizes(training)
            budget_bytes = ranks.smallest(read_budget(budget, inner, training.given))
            if not inner.training:
                warn(_EVAL_MODE, RecoupWarning, stacklevel=2)
            fitting = Fitting(
                training,
                accumulates=accumulates,
                holds_output=holds_output,
                insist=insist,
                races=race and verify,
                settings=settings,
                in_flight=in_flight,
            )
            with (
                gc_of_new_objects(),
                unsynchronized([model, *training.reached.modules]),
                ranks.together(communicates=training.waits_in_units),
            ):
                found = fitting.run_engines(engines, units, budget_bytes, verifies=verify)
                by_size, seen = fitting.run_sizes(found[0], others, verifies=verify) if others else (None, ())
                make_meter(device_of(inner, training.given)).empty_cache()  # NOTE [ Left over ]
            applied = found[0] if by_size is None else by_size
            apply(model, applied)
            ranks.check_same(applied.to_json, "The plan")
        except BaseException:
            earlier.put_back()
            raise
    return Fitted(model, *found, by_size, seen)


def _steps(
    step: Callable[..., Any] | None, sample: Any, samples: Iterable[Any] | None, sizes: Iterable[int] | None
) -> list[tuple[Any, Callable[[], Any] | None]]:
    """The sample, or the callable that runs the whole step, of each size; the largest first."""
    found = read_samples(sample, samples, sizes)
    if step is None or len(found) == 1:
        return [(sample, step)] if len(found) == 1 else [(one, None) for one in found]
    return [(None, partial(step, one)) for one in found]


def verify(
    model: nn.Module,
    plan: ModelPlan | PlansBySize,
    sample: Any = None,
    *,
    loss: Callable[..., Tensor] | None = None,
    optimizer: Optimizers | None = None,
    step: Callable[[], Any] | None = None,
    together: Any = True,
) -> Verification:
    """Runs a real step of a model whose plan is applied: peak against budget, gradients against the plain step.

    Of several ranks, which all call this function, it is the largest peak; ``together`` is as for `fit`. Of plans by
    size it is that of the sample, and of a ``step`` that of the largest batch.

    Raises:
        OverBudgetError: the peak passes the plan's budget.
        VerificationError: a gradient differs from the plain step's.
    """
    check_given(
        plan,
        (ModelPlan, PlansBySize),
        "verify takes a plan, what recoup.plan returns or .applied of what recoup.fit returns",
    )
    ranks = find_ranks(together)
    with ranks.together():
        chosen = plan.plan if isinstance(plan, PlansBySize) else plan
        inner = planned_model(model, chosen.profile)
        training = TrainingStep(inner, sample, loss=loss, step=step, optimizer=optimizer, ranks=ranks)
        if isinstance(plan, PlansBySize):
            chosen = plan_of_call(plan, inner.forward, training.args, training.kwargs)
        with (
            unsynchronized([model, *training.reached.modules]),
            ranks.together(communicates=training.waits_in_units),
        ):
            return verify_step(training, chosen)


def plan_to_fit(
    step: TrainingStep, budget_bytes: int, *, units: Units | Iterable[Units] | None, accumulates: Accumulates
) -> ModelPlan:
    """The plan that `fit` would apply, with what its audit finds unsafe kept.

    Raises:
        BudgetError: nothing fits.
    """
    fitting = Fitting(step, accumulates=accumulates, holds_output=None, insist=False, races=False)
    return fitting.run(units, budget_bytes, verifies=False)[0]


def engines_for(engine: str, model: nn.Module) -> tuple[str, ...]:
    """The engines to try for what a user asked for.

    Raises:
        SampleError: there is no such engine.

    >>> engines_for("best", nn.Linear(2, 2))
    ('eager', 'captured', 'compiled')
    """
    check_model(model)
    if engine in ("eager", "captured", "compiled"):
        return (engine,)
    if engine == "auto":
        return ("compiled",) if is_compiled(model) else ("eager",)
    if engine == "best":
        # A plan for eager code is not in force where the model is compiled.
        return ("captured", "compiled") if compiled_code(model) else ("eager", "captured", "compiled")
    raise SampleError(
        f"engine={engine!r} is not known; it is 'auto', 'eager', 'captured', 'compiled' or 'best'."
    )


_EVAL_MODE = (
    "The model is in eval mode, as from_pretrained() leaves it, and the plan will hold in eval mode only: call"
    " model.train() before fit() if it is trained in train mode."
)
