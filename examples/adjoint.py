"""The adjoint of a time-stepping equation, with a hand-written backward and a sixteenth of the states held.

Viscous Burgers, ``u_t + u u_x = viscosity u_xx`` on a ring, in explicit steps. The loss is the squared
distance of the final state from a target; its gradient with respect to the initial state comes from one
backward through all steps. Only every sixteenth state is held, in a store with a byte budget; the others are
recomputed.

Run it: ``python examples/adjoint.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from recoup.manual import Chain, Run
from recoup.policies import EveryN, KeepAll
from recoup.sizes import format_bytes
from recoup.stores import ActivationStore

State = npt.NDArray[np.float64]

NUM_POINTS = 256
NUM_STEPS = 400


@dataclass(frozen=True)
class TimeStep:
    """One explicit Euler step with central differences; stable for the figures used here."""

    dt_s: float = 0.5e-3
    dx_m: float = 1 / NUM_POINTS
    viscosity_m2_per_s: float = 5e-3

    def forward(self, u: State) -> State:
        """Advances the state by one step."""
        right, left = np.roll(u, -1), np.roll(u, 1)
        advection = u * (right - left) / (2 * self.dx_m)
        diffusion = self.viscosity_m2_per_s * (right - 2 * u + left) / self.dx_m**2
        return u + self.dt_s * (diffusion - advection)

    def backward(self, u: State, grad: State) -> State:
        """Applies the transposed derivative of `forward` at ``u``."""
        slope = (np.roll(u, -1) - np.roll(u, 1)) / (2 * self.dx_m)
        # Transposing a shift to the right is a shift to the left: each roll below mirrors one above.
        carried = u * grad / (2 * self.dx_m)
        advection = slope * grad + np.roll(carried, 1) - np.roll(carried, -1)
        diffusion = np.roll(grad, 1) - 2 * grad + np.roll(grad, -1)
        return grad + self.dt_s * (self.viscosity_m2_per_s * diffusion / self.dx_m**2 - advection)


def loss(final: State, target: State) -> float:
    """Gives half the squared distance from the target."""
    return 0.5 * float(np.sum((final - target) ** 2))


def central_difference(chain: Chain, start: State, target: State, direction: State) -> float:
    """Measures the loss's slope along a direction from two more forwards."""
    step = 1e-5
    ahead = chain.forward(start + step * direction).output
    behind = chain.forward(start - step * direction).output
    return (loss(ahead, target) - loss(behind, target)) / (2 * step)


def gradient(run: Run, target: State) -> State:
    """Gives the gradient of the loss with respect to the initial state."""
    result: Any = run.backward(run.output - target).input
    return np.asarray(result, dtype=np.float64)


def main() -> None:
    """Compares the gradient with everything held, with little held, and with finite differences."""
    x_m = np.arange(NUM_POINTS) / NUM_POINTS
    start: State = 0.5 + np.sin(2 * np.pi * x_m)
    target: State = 0.5 + 0.3 * np.cos(4 * np.pi * x_m)
    step = TimeStep()
    chain = Chain.from_layers([step] * NUM_STEPS, TimeStep.forward, TimeStep.backward)

    everything = ActivationStore()
    plain = chain.forward(start, policy=KeepAll(), store=everything)
    expected = gradient(plain, target)

    store = ActivationStore(budget="64KiB")
    run = chain.forward(start, policy=EveryN(16), store=store)
    found = gradient(run, target)
    assert np.array_equal(found, expected), "recomputing changed the gradient"

    direction = np.random.default_rng(0).standard_normal(NUM_POINTS)
    measured = central_difference(chain, start, target, direction)
    slope = float(found @ direction)
    assert abs(slope - measured) <= 1e-6 * abs(measured), (slope, measured)

    print(f"{NUM_STEPS} steps of viscous Burgers on {NUM_POINTS} points, loss {loss(run.output, target):.4f}")
    print(f"held with everything kept: {format_bytes(everything.num_bytes)}")
    print(f"held with every 16th kept: {format_bytes(store.num_bytes)} ({len(run.held_units())} states)")
    print(f"steps recomputed in the backward: {run.num_recomputed} of {NUM_STEPS}")
    print(f"slope along a random direction: {slope:.9f}, by central differences {measured:.9f}")


if __name__ == "__main__":
    main()
