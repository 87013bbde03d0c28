"""What one of several ranks holds: shares of parameters, gradients and optimizer state, and full units in passing."""

from __future__ import annotations

from dataclasses import replace

import torch
from machines import HOST
from torch import Tensor, nn

import recoup
from recoup.measuring import Cluster, Profile, measure


class Net(nn.Module):
    """Units of unequal sizes, a parameter outside them, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16, bias=False), nn.Linear(16, 4, bias=False)
        self.second.weight.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(8))
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x * self.scale)) + self.shift


def profiles(ranks: int, *, accumulates: bool = False) -> tuple[Profile, Profile]:
    """Of one rank and of one of several, whose links take no time."""
    model = Net()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    one, one_of = (
        measure(
            model, torch.ones(32, 8), loss=torch.sum, optimizer=optimizer, units=["first", "second"],
            hardware=HOST, ranks=Cluster(ranks=num, link_bytes_per_s=1e30), accumulates=accumulates,
        )
        for num in (1, ranks)
    )  # fmt: skip
    return one, one_of


FIRST, SECOND, SCALE, BUFFER = 8 * 16 * 4, 16 * 4 * 4, 8 * 4, 4 * 4


def test_shares_are_rounded_up_and_the_root_stays_in_full() -> None:
    one, one_of = profiles(3)
    whole, share = one.residents, one_of.residents
    assert whole.parameter_bytes == FIRST + SECOND + SCALE + BUFFER
    assert share.parameter_bytes == -(-(FIRST + SECOND + SCALE) // 3) + BUFFER
    assert whole.gradient_bytes == FIRST + SCALE
    assert share.gradient_bytes == -(-(FIRST + SCALE) // 3)
    assert share.optimizer_bytes == -(-whole.optimizer_bytes // 3)
    assert share.optimizer_transient_bytes == -(-whole.optimizer_transient_bytes // 3)
    assert share.other_bytes == whole.other_bytes + 2 * SCALE
    assert one_of.problem.resident_bytes == share.total_bytes
    assert (one.ranks, one_of.ranks) == (1, 3)
    assert "host (estimated), one of 3 ranks:" in str(one_of)


def test_accumulated_gradients_are_shares_too() -> None:
    _, one_of = profiles(5, accumulates=True)
    assert one_of.problem.resident_bytes == one_of.residents.total_bytes + one_of.residents.gradient_bytes


def test_units_in_passing_are_there_in_full() -> None:
    one, one_of = profiles(7)
    names = [unit.name for unit in one.problem.units]
    assert names == ["before first", "first", "second", "loss"]
    forward = [FIRST, FIRST + SECOND, SECOND, 0]
    backward = [FIRST, FIRST, SECOND + FIRST, SECOND]
    for index, (whole, share) in enumerate(zip(one.problem.units, one_of.problem.units, strict=True)):
        assert share.output_bytes == whole.output_bytes
        assert share.parameter_gradient_bytes == -(-whole.parameter_gradient_bytes // 7)
        for before, after in zip(whole.options, share.options, strict=True):
            changed = replace(
                before,
                forward_transient_bytes=before.forward_transient_bytes + forward[index],
                backward_transient_bytes=before.backward_transient_bytes + backward[index],
            )
            assert after == changed, names[index]


def test_more_ranks_need_less_each() -> None:
    needs = []
    for ranks in (1, 2, 8, 64):
        layers = [nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(6)]
        model = nn.Sequential(*layers)
        optimizer = torch.optim.AdamW(model.parameters())
        profile = measure(
            model, torch.ones(64, 256), loss=torch.sum, optimizer=optimizer, hardware="H200", ranks=ranks
        )
        needs.append(recoup.minimum_budget(profile))
    assert needs == sorted(needs, reverse=True)
    assert len(set(needs)) == 4


def test_slices_of_a_sequential() -> None:
    """They are modules of no model: their parameters are those of the children."""
    model = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(8, 8), nn.Tanh())))
    one, half = (
        measure(model, torch.ones(32, 8), loss=torch.sum, hardware=HOST, ranks=ranks) for ranks in (1, 2)
    )
    slices = ["[0:2]", "[2:4]", "[4:6]"]
    assert [unit.module for unit in half.units][:3] == slices
    own = (8 * 8 + 8) * 4
    assert half.residents.parameter_bytes == 3 * own // 2
    for index, with_next in enumerate((2 * own, 2 * own, own)):
        whole, share = (profile.problem.units[index].options[0] for profile in (one, half))
        assert share.forward_transient_bytes - whole.forward_transient_bytes == with_next, slices[index]
