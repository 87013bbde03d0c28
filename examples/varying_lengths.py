"""Batches of varying lengths, a plan for each range of lengths, and a budget that is cut in the middle of training.

Short batches keep everything, long ones recompute. After a few steps another process takes part of the memory: here the
limit of a tracker stands for the device's. The first batch that no longer fits lowers the budget of all lengths, and is
repeated. When the room comes back, so do the faster plans. Losses and parameters are those of a run with all the
memory, bit for bit.
"""

from __future__ import annotations

import logging
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

import recoup
from recoup.fitting import Fitted
from recoup.measuring import MemoryTracker

NUM_STEPS, CUT_AT, BACK_AT = 20, 4, 12
LENGTHS = (32, 96, 48, 128, 80)
ROWS, WIDTH, NUM_WORDS = 4, 32, 50


class Model(nn.Module):
    """A small language model with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(NUM_WORDS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, activation="gelu", batch_first=True)
            for _ in range(5)
        )
        self.head = nn.Linear(WIDTH, NUM_WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss of the next token."""
        x = self.embed(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        for block in self.blocks:
            x = block(x, src_mask=mask)
        return nn.functional.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def make_batches() -> list[Tensor]:
    """One for each step; none is longer than the longest of the first few."""
    generator = torch.Generator().manual_seed(1)
    lengths = [LENGTHS[number % len(LENGTHS)] for number in range(NUM_STEPS)]
    return [torch.randint(NUM_WORDS, (ROWS, length), generator=generator) for length in lengths]


def make_model() -> tuple[Model, torch.optim.Optimizer]:
    """The same ones every time."""
    torch.manual_seed(0)
    model = Model()
    return model, torch.optim.AdamW(model.parameters())


def fit_model() -> Fitted:
    """Fits to half of the activation memory of the longest batch; three lengths are measured."""
    model, optimizer = make_model()
    short, _, medium, long = make_batches()[:4]
    profile = recoup.measure(model, long, optimizer=optimizer)
    budget = profile.plain_bytes - profile.activation_bytes // 2
    samples = [short, medium, long]
    return recoup.fit(model, samples=samples, budget=budget, optimizer=optimizer, race=False)


def train(fitted: Fitted, *, is_cut: bool) -> tuple[list[float], list[Tensor]]:
    """The losses, and the parameters at the end, of a new model under the plans of a fit."""
    model, optimizer = make_model()
    recoup.apply(model, fitted.applied)
    tracker = MemoryTracker()
    torch.manual_seed(2)
    losses = []

    def step(batch: Tensor) -> float:
        with tracker if is_cut else nullcontext():
            loss = model(batch)
            loss.backward()
            return float(loss.detach())

    with recoup.autopilot(
        replace(fitted, model=model), optimizer=optimizer, tracker=tracker, patience=3
    ) as pilot:
        for number, batch in enumerate(make_batches()):
            tracker.limit_bytes = None
            if CUT_AT <= number < BACK_AT:
                # What the plan for the longest takes beside parameters, optimizer and batch, less a quarter.
                taken_bytes = fitted.plan.predicted_bytes - fitted.profile.residents.total_bytes
                tracker.limit_bytes = 3 * taken_bytes // 4
            tracker.reset_peak()
            optimizer.zero_grad()
            losses.append(pilot.step(partial(step, batch)))
            optimizer.step()
    return losses, [parameter.detach() for parameter in model.parameters()]


def main() -> int:
    """Trains twice, with all the memory and with a cut, and compares."""
    fitted = fit_model()
    assert fitted.by_size is not None
    print("Lengths with a plan each: up to", ", ".join(str(one.up_to[0]) for one in fitted.by_size.ranges))
    logger = logging.getLogger("recoup.autopilot")
    handler = logging.StreamHandler(sys.stdout)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        print("With all the memory:")
        expected, parameters = train(fitted, is_cut=False)
        print(f"With a quarter less from step {CUT_AT + 1} to step {BACK_AT}:")
        losses, found = train(fitted, is_cut=True)
    finally:
        logger.removeHandler(handler)
    assert losses == expected
    assert all(map(torch.equal, found, parameters))
    print("The same losses and the same parameters, bit for bit.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
