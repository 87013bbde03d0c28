"""Accelerate: a fit behind `prepare`, and batches that shrink only where no plan fits."""

from __future__ import annotations

from typing import Any

from recoup.fitting import Fitted, fit
from recoup.integrations.accumulation import accumulation_of
from recoup.integrations.missing import not_installed
from recoup.integrations.too_large import BatchTooLargeError, as_out_of_memory

try:
    from accelerate import Accelerator
except ImportError:
    raise not_installed("accelerate") from None

__all__ = ["BatchTooLargeError", "fit_prepared"]


def fit_prepared(
    accelerator: Accelerator, model: Any, sample: Any = None, *, budget: int | str = "auto", **options: Any
) -> Fitted:
    """Fits a model that ``accelerator.prepare`` has returned: on its device, in its precision, wrapped or not.

    Inside ``find_executable_batch_size`` the batch is made smaller only where no plan fits.

    Args:
        accelerator: that prepared the model.
        model: as ``prepare`` returned it.
        sample: a batch of the prepared loader.
        budget: as for `recoup.fit`.
        options: further arguments of `recoup.fit`, such as ``loss=``, ``optimizer=`` or ``step=``.

    Raises:
        BatchTooLargeError: no plan fits; it is a `BudgetError`, too.
    """
    options.setdefault("accumulates", accumulation_of(accelerator, accelerator.gradient_accumulation_steps))
    with as_out_of_memory():
        return fit(model, sample, budget=budget, **options)
