"""GANs: the discriminator and its optimizer are not the generator's, and count what they take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from everyday.subjects import Classifier, assert_same, peak_bytes, state_of
from torch import Tensor, nn
from torch.nn import functional as F

import recoup
from recoup.engines import is_applied


class Gan:
    """The loop of torch's DCGAN tutorial, smaller: D on real, D on fake, then G."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.generator = Classifier(num_blocks=5)
        self.discriminator = nn.Sequential(
            nn.Linear(10, 64),
            nn.BatchNorm1d(64),
            nn.LeakyReLU(0.2),
            nn.Linear(64, 64),
            nn.Dropout(0.1),
            nn.Linear(64, 1),
        )
        self.criterion = nn.BCEWithLogitsLoss()
        self.optimizer_g = torch.optim.Adam(self.generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
        self.optimizer_d = torch.optim.Adam(self.discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
        self.noise, self.real = torch.randn(128, 32), torch.randn(128, 10)
        self.losses: list[float] = []

    def step(self) -> None:
        ones, zeros = torch.ones(128, 1), torch.zeros(128, 1)
        self.discriminator.zero_grad()
        loss_real = self.criterion(self.discriminator(self.real), ones)
        loss_real.backward()
        fake = self.generator(self.noise)
        loss_fake = self.criterion(self.discriminator(fake.detach()), zeros)
        loss_fake.backward()
        self.optimizer_d.step()
        self.generator.zero_grad()
        loss = self.criterion(self.discriminator(fake), ones)
        loss.backward()
        self.optimizer_g.step()
        self.losses += [loss_real.item(), loss_fake.item(), loss.item()]

    def state(self) -> list[Any]:
        return [
            *state_of(self.generator, self.discriminator, self.optimizer_g, self.optimizer_d),
            list(self.losses),
        ]

    def living(self) -> list[Any]:
        return [self.generator, self.discriminator, self.optimizer_g, self.optimizer_d, self.noise, self.real]

    def run(self, num_steps: int = 3) -> list[Any]:
        torch.manual_seed(1)
        for _ in range(num_steps):
            self.step()
        return self.state()


def plain_peak() -> int:
    """Of a step that finds the optimizers' state there."""
    return two_steps(Gan())


def two_steps(gan: Gan) -> int:
    """The peak of two steps: the second finds the optimizers' state and the gradients of the first."""
    return peak_bytes(lambda: (gan.step(), gan.step()), *gan.living())


@pytest.mark.parametrize("optimizer", ["own", "both", "none"])
def test_the_discriminator_is_not_trained_by_fit(optimizer: str) -> None:
    gan = Gan()
    given = {"own": gan.optimizer_g, "both": [gan.optimizer_g, gan.optimizer_d], "none": None}[optimizer]
    before = gan.state()
    recoup.fit(gan.generator, step=gan.step, budget=int(0.9 * plain_peak()), optimizer=given)
    assert is_applied(gan.generator)
    assert_same(gan.state(), before)
    assert_same(gan.run(), Gan().run())


def test_the_plain_step_is_predicted_as_measured() -> None:
    """The discriminator's activations are the step's own: neither forgotten nor counted with the generator's."""
    gan = Gan()
    profile = recoup.measure(gan.generator, step=gan.step, optimizer=[gan.optimizer_g, gan.optimizer_d])
    assert profile.plain_bytes == pytest.approx(plain_peak(), rel=0.05)


def test_the_smallest_budget_is_the_smallest() -> None:
    """What is refused could not be kept by much: at the smallest budget, the measured peak is close to it."""
    gan = Gan()
    options: dict[str, Any] = {"step": gan.step, "optimizer": [gan.optimizer_g, gan.optimizer_d]}
    smallest = recoup.minimum_budget(recoup.measure(gan.generator, **options))
    fitted = recoup.fit(gan.generator, budget=smallest, **options)
    assert fitted.verification.peak_bytes <= smallest
    assert fitted.verification.peak_bytes >= 0.9 * smallest
    # Data that a step= fetches for itself is not given as a sample: on a CPU nobody knows of it.
    real = two_steps(gan) - gan.noise.nbytes - gan.real.nbytes
    # A loop holds a few scalars more than a step.
    assert 0.9 * smallest <= real <= 1.005 * smallest


def test_both_models_are_fitted() -> None:
    """One after the other, each by the same step."""
    gan = Gan()
    peak = plain_peak()
    recoup.fit(gan.generator, step=gan.step, budget=int(0.9 * peak))
    recoup.fit(gan.discriminator, step=gan.step, budget=int(0.9 * peak))
    assert is_applied(gan.generator)
    assert_same(gan.run(), Gan().run())


def test_generator_by_its_sample_and_a_loss_through_the_discriminator() -> None:
    gan = Gan()
    before = gan.state()

    def loss(fake: Tensor) -> Tensor:
        return F.softplus(-gan.discriminator(fake)).mean()

    budget = int(0.85 * recoup.measure(gan.generator, gan.noise, loss=loss).plain_bytes)
    recoup.fit(gan.generator, gan.noise, budget=budget, loss=loss)
    assert is_applied(gan.generator)
    # Batch norm's statistics and gradients in the discriminator too.
    assert_same(gan.state(), before)


def wgan_penalty(gan: Gan) -> Callable[[], None]:
    """A critic's step with the gradient penalty of WGAN-GP."""
    optimizer = torch.optim.Adam(gan.generator.parameters())
    critic = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer_c = torch.optim.Adam(critic.parameters())

    def step() -> None:
        fake = gan.generator(gan.noise)
        mixed = (0.5 * gan.real + 0.5 * fake.detach()).requires_grad_()
        (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        optimizer_c.zero_grad()
        (critic(fake.detach()).mean() - critic(gan.real).mean() + 10 * penalty).backward()
        optimizer_c.step()
        optimizer.zero_grad()
        (-critic(fake)).mean().backward()
        optimizer.step()

    return step


def test_a_gradient_penalty_of_another_model() -> None:
    """`autograd.grad` on the critic alone is none of the generator's business."""
    gan = Gan()
    step = wgan_penalty(gan)
    before = gan.state()
    profile = recoup.measure(gan.generator, step=step)
    recoup.fit(gan.generator, step=step, budget=int(0.9 * profile.plain_bytes))
    assert is_applied(gan.generator)
    assert_same(gan.state(), before)
