"""``dag`` on the shared instances, against the proven optima."""

from __future__ import annotations

import pytest
from graph_cases import budget_of, instance
from slowly import slow_but

from recoup.planning.graphs.dag import solve_dag

# Long enough for the search to end by itself, which takes seconds, and always does the same.
ENOUGH_S = 3600.0

OPTIMA = {
    ("vgg16_train", 0.9): 15_805,
    ("vgg_unet_train", 0.9): 31_355,
    ("vgg_unet_train", 0.8): 31_620,
    ("vgg_unet_train", 0.6): 32_385,
    ("vgg_unet_train", 0.42): 34_495,
    ("layered_100", 0.9): 48_146,
    ("layered_100", 0.8): 48_866,
}


@pytest.mark.parametrize(
    ("name", "share", "points"),
    [
        ("vgg16_train", 0.9, 0.0),
        ("vgg_unet_train", 0.9, 0.1),
        ("vgg_unet_train", 0.8, 0.1),
        ("vgg_unet_train", 0.6, 0.1),
        ("vgg_unet_train", 0.42, 1.0),
    ],
)
def test_training_graphs_by_search(name, share, points):
    graph = instance(name)
    plan = solve_dag(graph, budget_bytes=budget_of(graph, share), effort="search", time_limit_s=ENOUGH_S)
    assert plan.peak_bytes <= budget_of(graph, share)
    assert OPTIMA[name, share] <= plan.compute_s <= OPTIMA[name, share] + points / 100 * graph.plain_s


@pytest.mark.parametrize("share", slow_but([0.9], [0.9, 0.8]))
def test_search_finds_a_schedule_of_the_wide_graph(share):
    graph = instance("layered_100")
    plan = solve_dag(graph, budget_bytes=budget_of(graph, share), effort="search", time_limit_s=ENOUGH_S)
    assert plan.peak_bytes <= budget_of(graph, share)


def test_two_optima_are_proven_for_all_schedules():
    for name, share in (("vgg16_train", 0.9), ("vgg_unet_train", 0.8)):
        graph = instance(name)
        plan = solve_dag(graph, budget_bytes=budget_of(graph, share), time_limit_s=ENOUGH_S)
        assert (plan.compute_s, plan.claim) == (OPTIMA[name, share], "optimal among all schedules")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "share"), OPTIMA)
def test_every_optimum_is_found_and_proven(name, share):
    graph = instance(name)
    plan = solve_dag(graph, budget_bytes=budget_of(graph, share), time_limit_s=ENOUGH_S)
    assert plan.compute_s == OPTIMA[name, share]
    assert plan.claim in ("optimal among all schedules", "optimal among staged schedules")
