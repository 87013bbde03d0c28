"""Values that belong to objects, and go with them."""

from __future__ import annotations

import gc
import subprocess
import sys
from typing import Any

from recoup.checkpointing.by_identity import ByIdentity


class Equal:
    """All of these are equal, and have no hash."""

    partner: Any = None

    def __eq__(self, other: object) -> bool:
        return True


def test_every_object_has_a_value_of_its_own() -> None:
    known: ByIdentity[list[int]] = ByIdentity(list)
    one, other = Equal(), Equal()
    known.of(one).append(1)
    known.of(other).append(2)
    assert (known.of(one), known.of(other), len(known)) == ([1], [2], 2)


def test_values_go_with_their_objects() -> None:
    known: ByIdentity[list[int]] = ByIdentity(list)
    one, other = Equal(), Equal()
    one.partner, other.partner = other, one
    known.of(one)
    known.of(other)
    third = Equal()
    known.of(third).append(3)
    del one, other
    gc.collect()
    assert (len(known), known.of(third)) == (1, [3])


def test_a_new_object_in_the_place_of_an_old_one() -> None:
    known: ByIdentity[list[int]] = ByIdentity(list)
    places = set()
    for number in range(50):
        owner = Equal()
        places.add(id(owner))
        assert known.of(owner) == []
        known.of(owner).append(number)
        del owner
    assert len(places) < 50


def test_objects_that_outlive_the_interpreter_s_names() -> None:
    """Python clears modules when it ends, and objects in them may go last."""
    code = (
        "import builtins; from recoup.checkpointing.by_identity import ByIdentity\n"
        "class Owner: pass\n"
        "builtins.owner = Owner(); builtins.known = ByIdentity(list); known.of(owner)\n"
        "sites = ByIdentity(list); builtins.other = Owner(); sites.of(builtins.other)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
