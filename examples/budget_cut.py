"""A training run that survives a budget cut in the middle.

After a few steps another process takes part of the memory: here the limit of a tracker stands for the device's. The
step that no longer fits is repeated under a smaller plan. When the room comes back, so does the faster plan. Losses and
parameters are those of a run with all the memory, bit for bit.
"""

from __future__ import annotations

import logging
import sys
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor, nn

import recoup
from recoup.measuring import MemoryTracker

NUM_STEPS, CUT_AT, BACK_AT = 18, 4, 9


def make_model() -> nn.Sequential:
    """Six blocks with dropout, the same ones every time."""
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64))
        for _ in range(6)
    ]
    return nn.Sequential(*blocks)


def mean_square(output: Tensor) -> Tensor:
    """The loss."""
    return output.square().mean()


def fit_model(model: nn.Sequential, optimizer: torch.optim.Optimizer, batch: Tensor) -> recoup.fitting.Fitted:
    """Fits to half of the activation memory."""
    profile = recoup.measure(model, batch, loss=mean_square, optimizer=optimizer)
    budget = profile.plain_bytes - profile.activation_bytes // 2
    return recoup.fit(model, batch, budget=budget, loss=mean_square, optimizer=optimizer)


def train(*, is_cut: bool) -> tuple[list[float], list[Tensor], str]:
    """The losses, the parameters at the end, and the autopilot's summary."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    batches = torch.randn(NUM_STEPS, 256, 64, generator=torch.Generator().manual_seed(1))
    fitted = fit_model(model, optimizer, batches[0])
    tracker = MemoryTracker()
    torch.manual_seed(2)
    losses = []

    def step(batch: Tensor) -> float:
        with tracker if is_cut else nullcontext():
            loss = mean_square(model(batch))
            loss.backward()
            return float(loss.detach())

    with recoup.autopilot(fitted, optimizer=optimizer, tracker=tracker, patience=3) as pilot:
        for number, batch in enumerate(batches):
            tracker.limit_bytes = None
            if CUT_AT <= number < BACK_AT:
                # What the plan takes beside parameters, optimizer and batch, less a quarter.
                taken_bytes = fitted.plan.predicted_bytes - fitted.profile.residents.total_bytes
                tracker.limit_bytes = 3 * taken_bytes // 4
            tracker.reset_peak()
            optimizer.zero_grad()
            losses.append(pilot.step(partial(step, batch)))
            optimizer.step()
    return losses, [parameter.detach() for parameter in model.parameters()], pilot.summary()


def main() -> int:
    """Trains twice, with all the memory and with a cut, and compares."""
    logger = logging.getLogger("recoup.autopilot")
    handler = logging.StreamHandler(sys.stdout)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        print("With all the memory:")
        expected, parameters, _ = train(is_cut=False)
        print(f"With a quarter less from step {CUT_AT + 1} to step {BACK_AT}:")
        losses, found, _ = train(is_cut=True)
    finally:
        logger.removeHandler(handler)
    assert losses == expected
    assert all(map(torch.equal, found, parameters))
    print("The same losses and the same parameters, bit for bit.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
