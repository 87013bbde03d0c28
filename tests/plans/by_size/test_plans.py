from __future__ import annotations

from dataclasses import replace

from sized_subjects import sized_profile

from recoup.model.conditions import Conditions
from recoup.plans.by_size.plans import plans_by_size
from recoup.plans.by_size.profiles import sized_profiles
from recoup.plans.model_plan import plan


def test_a_chosen_plan_is_that_of_its_own_size() -> None:
    """The sample with the most elements need not have the largest product of its numbers along two axes."""
    image = replace(
        sized_profile(1000), conditions=Conditions((("ids", (1, 10)), ("image", (1, 3, 100, 100))))
    )
    text = replace(sized_profile(400), conditions=Conditions((("ids", (1, 1000)), ("image", (1, 3, 10, 10)))))
    chosen = plan(image, image.plain_bytes)
    plans = plans_by_size(sized_profiles([image, text]), chosen)
    assert plans.profiles.sizes == ((10, 100), (1000, 10))
    assert plans.plan_for((10, 100)) == chosen
    assert plans.plan.profile == text
