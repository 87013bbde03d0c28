"""Communication by hand: seconds of collectives, what computing hides, and what a rank of each kind holds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from machines import HOST
from torch import Tensor, nn

import recoup
from recoup.errors import HardwareError, SampleError
from recoup.measuring import Cluster, Profile, measure
from recoup.measuring.estimate import KNOWN, read_ranks
from recoup.measuring.estimate.communication import Group, with_communication
from recoup.planning import Option, Problem, Unit


class TestCollectives:
    def test_inside_a_node(self) -> None:
        cluster = Cluster(ranks=4, link_bytes_per_s=100.0, network_bytes_per_s=1.0, latency_s=0.25)
        assert cluster.collective_s(800) == 3 / 4 * 800 / 100 + 0.25
        assert cluster.collective_s(0) == 0.0
        assert replace(cluster, ranks=1).collective_s(800) == 0.0

    def test_over_the_network_all_ranks_of_a_node_carry(self) -> None:
        cluster = Cluster(ranks=16, ranks_per_node=4, link_bytes_per_s=100.0, network_bytes_per_s=5.0)
        assert cluster.collective_s(1600) == 12 / 16 * 1600 / (4 * 5)
        assert replace(cluster, network_bytes_per_s=50.0).collective_s(1600) == 15 / 16 * 1600 / 100

    def test_links_are_the_hardwares_unless_given(self) -> None:
        assert read_ranks(16, KNOWN["H200"]).link_bytes_per_s == 450e9
        assert read_ranks(16, KNOWN["L4"]).link_bytes_per_s == KNOWN["L4"].host_link_bytes_per_s == 32e9
        mine = Cluster(ranks=2, link_bytes_per_s=7.0)
        assert read_ranks(mine, KNOWN["H200"]) is mine

    @pytest.mark.parametrize(
        ("change", "error", "match"),
        [
            ({"ranks": 0}, SampleError, "ranks must be a whole number of at least 1; got 0"),
            ({"ranks": True}, SampleError, "ranks must be a whole number"),
            ({"ranks_per_node": 0}, SampleError, "ranks_per_node must be a whole number"),
            ({"kind": "zero"}, SampleError, "kind is 'fsdp2' or 'ddp'; got 'zero'"),
            (
                {"network_bytes_per_s": 0.0},
                HardwareError,
                "network_bytes_per_s must be a finite number above 0",
            ),
            ({"link_bytes_per_s": float("inf")}, HardwareError, "link_bytes_per_s must be a finite number"),
        ],
    )
    def test_figures_that_make_no_sense(self, change: dict[str, Any], error: Any, match: str) -> None:
        with pytest.raises(error, match=match):
            Cluster(**{"ranks": 2, **change})


# Two ranks of a link of 1 byte/s: a collective of n bytes takes n / 2 seconds.
CLUSTER = Cluster(ranks=2, link_bytes_per_s=1.0)


def unit(name: str, forward_s: float, backward_s: float, extra_s: float = 1.0) -> Unit:
    return Unit(
        name,
        options=[
            Option("keep", forward_s=forward_s, backward_s=backward_s, held_bytes=9),
            Option("recompute", forward_s=forward_s, backward_s=backward_s, extra_s=extra_s),
        ],
        output_bytes=3,
    )


PROBLEM = Problem([unit("code", 2, 3), unit("a", 10, 20), unit("b", 30, 50, 4), unit("loss", 5, 6)])
GROUPS = [Group(), Group(40, 36), Group(100, 90), Group()]
ROOT = Group(14, 12)


def seconds(problem: Problem, option: int = 0) -> tuple[list[float], list[float]]:
    options = [unit.options[option] for unit in problem.units]
    return [option.forward_s for option in options], [option.backward_s for option in options]


class TestOverlap:
    def test_what_computing_does_not_hide(self) -> None:
        forwards, backwards = seconds(with_communication(PROBLEM, GROUPS, ROOT, CLUSTER))
        # The root's gather (7), then a's (20) beside code; b's (50) beside a.
        assert forwards == [7 + 20, 50, 30, 5]
        # b is gathered (50) beside the loss, a (20) beside b; b is reduced (45) beside a, a (18) beside code, and the
        # root (6) by itself.
        assert backwards == [18 + 6, 45, 50, 50]

    def test_a_replay_hides_too(self) -> None:
        _, backwards = seconds(with_communication(PROBLEM, GROUPS, ROOT, CLUSTER), option=1)
        assert backwards == [17 + 6, 44, 50, 49]

    def test_a_unit_that_the_step_begins_with_is_waited_for(self) -> None:
        forwards, backwards = seconds(
            with_communication(PROBLEM, [GROUPS[1], GROUPS[2], Group(), Group()], ROOT, CLUSTER)
        )
        assert forwards == [7 + 20 + 50, 10, 30, 5]
        assert backwards == [45 + 6 + 18, 20, 50, 50]

    def test_parameters_that_stay_are_gathered_once(self) -> None:
        stays = replace(CLUSTER, reshard_after_forward=False)
        forwards, backwards = seconds(with_communication(PROBLEM, GROUPS, ROOT, stays))
        assert forwards == [27, 50, 30, 5]
        assert backwards == [24, 45, 50, 6]

    def test_ddp_sums_up_gradients(self) -> None:
        ddp = replace(CLUSTER, kind="ddp")
        forwards, backwards = seconds(with_communication(PROBLEM, GROUPS, ROOT, ddp))
        assert forwards == [2, 10, 30, 5]
        assert backwards == [36 + 12, 90, 50, 6]


class Net(nn.Module):
    """Units of unequal sizes and a parameter outside them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16, bias=False), nn.Linear(16, 4, bias=False)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x * self.scale))


FIRST, SECOND, SCALE = 8 * 16 * 4, 16 * 4 * 4, 8 * 4


def profile(ranks: int | Cluster) -> Profile:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    return measure(
        model, torch.ones(32, 8), loss=torch.sum, optimizer=optimizer, units=["first", "second"],
        hardware=HOST, ranks=ranks,
    )  # fmt: skip


class TestRanks:
    def test_a_number_is_fsdp2_over_the_hardwares_link(self) -> None:
        assert profile(4) == profile(Cluster(ranks=4, link_bytes_per_s=HOST.host_link_bytes_per_s))

    def test_seconds_include_what_is_not_hidden(self) -> None:
        alone = profile(1)
        slow = profile(Cluster(ranks=2, link_bytes_per_s=1.0))
        # Units are gathered twice and reduced, the root is gathered once and reduced; computing hides next to nothing.
        assert slow.plain.seconds == pytest.approx(3 * (FIRST + SECOND) / 2 + 2 * SCALE / 2, rel=1e-6)
        fast = profile(Cluster(ranks=2, link_bytes_per_s=1e30))
        assert fast.plain.seconds == pytest.approx(alone.plain.seconds, rel=1e-12)

    def test_ddp_holds_everything_and_buckets(self) -> None:
        alone, ddp = profile(1), profile(Cluster(ranks=4, kind="ddp"))
        gradients = FIRST + SECOND + SCALE
        assert ddp.residents == replace(alone.residents, other_bytes=alone.residents.other_bytes + gradients)
        assert ddp.plain.peak_bytes == alone.plain.peak_bytes + gradients
        assert ddp.ranks == 4

    def test_parameters_that_stay_take_memory(self) -> None:
        again, stays = (profile(Cluster(ranks=4, reshard_after_forward=flag)) for flag in (True, False))
        # While the second runs backward, both are there either way; while the loss runs, only those that stay.
        loss = [one.problem.units[-1].options[0].backward_transient_bytes for one in (again, stays)]
        assert loss[0] - loss[1] == SECOND
        names = [
            (value.num_bytes, value.made, value.read)
            for value in stays.problem.values
            if "gathered" in value.name
        ]
        assert [size for size, *_ in names] == [FIRST, SECOND]
        assert recoup.minimum_budget(stays) >= recoup.minimum_budget(again)

    def test_largest_batch_takes_a_cluster(self) -> None:
        def make(size: int) -> Any:
            return Net(), torch.ones(size, 8), torch.sum

        cluster = Cluster(ranks=2, link_bytes_per_s=1.0)
        choice = recoup.largest_batch(make, budget="1MiB", hardware=HOST, ranks=cluster, most=2)
        assert choice.batch_size == 2
        with pytest.raises(SampleError, match="goes with hardware="):
            recoup.largest_batch(make, budget="1MiB", ranks=cluster)
