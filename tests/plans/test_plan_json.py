from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from models import GPT, assert_same, plainly, train
from planning.problems import random_problem, small_problems, value_problems
from plans.test_profile_json import profile_of

import recoup
from recoup.engines import ModelPlan
from recoup.errors import EncodingError
from recoup.planning import Problem
from recoup.plans.plan_json import FORMAT_VERSION


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(problem=small_problems(max_units=5, additive=False) | value_problems())
def test_round_trips_are_exact(problem: Problem) -> None:
    profile = profile_of(problem)
    for chosen in recoup.frontier(profile, num_points=3):
        again = ModelPlan.from_json(chosen.to_json())
        assert again == chosen
        assert again.items == chosen.items
        assert str(again) == str(chosen)
        assert again.predicted_bytes == chosen.predicted_bytes


def make() -> tuple[GPT, tuple[torch.Tensor, ...]]:
    torch.manual_seed(3)
    return GPT(plainly, num_blocks=4), GPT.sample()


def tight_plan() -> ModelPlan:
    profile = recoup.measure(*make())
    return recoup.plan(profile, recoup.minimum_budget(profile))


def test_a_saved_plan_is_applied_to_a_new_model_in_another_process(tmp_path: Path) -> None:
    chosen = tight_plan()
    assert not chosen.keeps_everything
    (tmp_path / "plan.json").write_text(chosen.to_json())
    code = (
        "import sys, torch, recoup\n"
        f"sys.path.insert(0, {str(Path(__file__).parent.parent)!r})\n"
        "from models import GPT, plainly, train\n"
        "from recoup.engines import ModelPlan, is_applied\n"
        "torch.manual_seed(3)\n"
        "model = GPT(plainly, num_blocks=4)\n"
        "recoup.apply(model, ModelPlan.from_json(open('plan.json').read()))\n"
        "assert is_applied(model)\n"
        "torch.save(train(model, GPT.sample()), 'seen.pt')\n"
    )
    source = str(Path(recoup.__file__).parent.parent)
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": source, "OMP_NUM_THREADS": str(torch.get_num_threads()), "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert_same(torch.load(tmp_path / "seen.pt"), train(*make()))


def test_a_plan_for_another_model_is_still_refused() -> None:
    again = ModelPlan.from_json(tight_plan().to_json())
    with pytest.raises(
        recoup.errors.ApplyError, match=r"decides about 'blocks\.\d', which this model does not"
    ):
        recoup.apply(GPT(plainly, num_blocks=1), again)


def synthetic() -> ModelPlan:
    profile = profile_of(random_problem(5, num_units=3))
    return recoup.plan(profile, recoup.minimum_budget(profile))


def test_the_header_is_pinned() -> None:
    assert FORMAT_VERSION == 1
    assert (
        synthetic()
        .to_json()
        .startswith(
            '{"format": "recoup.engines", "version": 1, "kind": "plan", "plan": {"profile": {"model": "GPT",'
        )
    )


def test_a_schedule_for_another_problem_is_not_written() -> None:
    chosen = synthetic()
    other = profile_of(random_problem(6, num_units=3))
    with pytest.raises(EncodingError, match="another problem than that of its profile"):
        ModelPlan(other, chosen.schedule, chosen.budget_bytes).to_json()


def test_a_plan_that_a_real_step_showed_to_need_less_can_be_read() -> None:
    chosen = synthetic()
    lower = ModelPlan(chosen.profile, chosen.schedule, chosen.predicted_bytes - 1)
    assert ModelPlan.from_json(lower.to_json()) == lower
    then, now = (f'"budget_bytes": {num_bytes}, "checksum"' for num_bytes in (lower.budget_bytes, 1))
    altered = lower.to_json().replace(then, now)
    assert altered != lower.to_json()
    with pytest.raises(EncodingError, match="its schedule needs"):
        ModelPlan.from_json(altered)


def change(plan: dict[str, Any], path: str, value: Any) -> None:
    *keys, last = path.split("/")
    for key in keys:
        plan = plan[key]
    plan[last] = value


@pytest.mark.parametrize(
    ("path", "value", "match"),
    [
        ("profile", {}, "A profile lacks"),
        ("budget_bytes", -1, "'budget_bytes' should be a number of bytes; got -1"),
        ("budget_bytes", "8GiB", "'budget_bytes' should be a number of bytes; got '8GiB'"),
        ("budget_bytes", 25, "'budget_bytes' is 25; its schedule needs 28 bytes"),
        ("schedule/budget_bytes", "8GiB", "The plan's 'budget_bytes' is '8GiB'; its schedule needs 26 bytes"),
        ("schedule/schedule", [], "The plan is damaged: The schedule ends after"),
        ("schedule/schedule", [{"do": "forward", "unit": 99}], "The plan is damaged"),
        ("schedule/predicted", {"seconds": 0.0, "peak_bytes": 1}, "it has been altered"),
        ("schedule/bound", {"seconds": "1", "schedules": "all"}, "'seconds' should be a float; got '1'"),
        ("schedule/problem", {}, "A plan has unknown problem"),
        ("note", "mine", "A plan has unknown note"),
    ],
)
def test_damaged_plans_are_refused(path: str, value: Any, match: str) -> None:
    document = json.loads(synthetic().to_json())
    change(document["plan"], path, value)
    with pytest.raises(EncodingError, match=match):
        ModelPlan.from_json(json.dumps(document))


def test_a_profile_is_no_plan() -> None:
    with pytest.raises(
        EncodingError, match=r"another kind of recoup's: it is a profile of recoup\.measuring"
    ):
        ModelPlan.from_json(synthetic().profile.to_json())
