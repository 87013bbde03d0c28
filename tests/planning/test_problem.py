from __future__ import annotations

import math

import pytest

from recoup.errors import ProblemError
from recoup.planning import Link, Option, Problem, Unit
from recoup.planning.lifetimes import Lifetime, Phase, Use

KEEP = Option("keep", forward_s=1.0, backward_s=2.0, held_bytes=7, forward_transient_bytes=2)
LIGHT = Option("recompute", forward_s=1.5, backward_s=2.0, extra_s=1.5, forward_transient_bytes=3)
HOST = Link("host", send_bytes_per_s=10.0, fetch_bytes_per_s=5.0)


def unit(name: str = "a", **changes: object) -> Unit:
    return Unit(name, [KEEP, LIGHT], **{"output_bytes": 4, **changes})  # type: ignore[arg-type]


def value(num_bytes: int, made: int, *read: int) -> Lifetime:
    uses = [Use(Phase.BACKWARD, unit) for unit in read]
    return Lifetime("mask", num_bytes, made=Use(Phase.FORWARD, made), read=uses)


def test_values_compare_hash_and_take_sequences() -> None:
    assert Problem([unit()]) == Problem((unit(),))
    assert hash(Problem([unit()])) == hash(Problem([unit()]))
    assert unit() != unit(gradient_bytes=5)
    assert "held_bytes=7" in repr(unit())


def test_defaults_and_derived_figures() -> None:
    assert unit().gradient_bytes == 4
    assert unit(gradient_bytes=0).gradient_bytes == 0
    assert unit().lightest is LIGHT
    assert unit().plain_transient_bytes == 3
    assert Unit("b", [KEEP], output_bytes=4).plain_transient_bytes == 9
    assert (KEEP.needs_forward, LIGHT.needs_forward) == (True, False)
    assert LIGHT.total_s == 5.0
    assert (unit().runs_once, unit(runs_once=True).runs_once) == (False, True)
    assert unit() != unit(runs_once=True)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Option("", forward_s=1, backward_s=1), "An option needs a name"),
        (lambda: Option("x", forward_s=-1, backward_s=1), "forward_s must be a finite number of seconds"),
        (lambda: Option("x", forward_s=math.nan, backward_s=1), "forward_s must be a finite"),
        (lambda: Option("x", forward_s=1, backward_s="2"), "backward_s must be a finite"),
        (lambda: Option("x", forward_s=1, backward_s=1, again_s=-0.5), "again_s must be a finite"),
        (lambda: Option("x", forward_s=1, backward_s=1, held_bytes=1.5), "held_bytes must be a whole number"),
        (lambda: Option("x", forward_s=1, backward_s=1, held_bytes=-1), "at least 0; got -1"),
        (
            lambda: Option("x", forward_s=5e-324, backward_s=1),
            r"forward_s must be 0 or from 1e-100 to 1e\+100 seconds",
        ),
        (lambda: Option("x", forward_s=1, backward_s=1e308), "backward_s must be 0 or from .* got 1e\\+308"),
        (lambda: Option("x", forward_s=10**400, backward_s=1), "forward_s must be 0 or from"),
        (
            lambda: Problem([unit(output_bytes=2**62)]),
            r"Problem: its sizes add up to \d+ bytes, .* up to 2\*\*53",
        ),
        (lambda: Problem([unit()], resident_bytes=2**53), "Problem: its sizes add up to"),
        (lambda: Link("host", send_bytes_per_s=math.inf, fetch_bytes_per_s=1), "a finite number of bytes/s"),
        (lambda: Unit("a", [], output_bytes=1), "Unit 'a' has no options"),
        (lambda: Unit("a", [KEEP, KEEP], output_bytes=1), "option names must differ; got keep, keep"),
        (lambda: unit(runs_once=1), "Unit 'a': runs_once must be True or False; got 1"),
        (lambda: unit(output_bytes=True), "output_bytes must be a whole number"),
        (lambda: Problem([]), "at least one unit"),
        (lambda: Problem([unit(), unit()]), "Two units are called 'a'"),
        (lambda: Problem([unit()], links=[HOST, HOST]), "Two links are called 'host'"),
        (lambda: Problem([unit("a"), unit("b", skips=[0])]), r"'b' \(index 1\) skips from unit 0"),
        (lambda: Problem([unit("a"), unit("b"), unit("c", skips=[0, 0])]), "names a skip twice"),
        (
            lambda: Option("x", forward_s=1, backward_s=1, backward_transient_bytes=-6),
            "backward_transient_bytes must be a whole number of bytes, at least 0; got -6",
        ),
        (lambda: value(-1, 0), "Value 'mask': num_bytes must be a whole number of bytes, at least 0; got -1"),
        (lambda: Lifetime("", 1, made=None), "A value needs a name"),
        (
            lambda: Problem([unit()], values=[value(1, 0, 3)]),
            "Value 'mask': there is no unit 3; the problem has units 0 to 0",
        ),
        (lambda: Problem([unit(output_links=["disk"])]), "may move over disk, which is not among"),
        (lambda: Link("host", send_bytes_per_s=0, fetch_bytes_per_s=1), "bandwidths must be above 0"),
        (lambda: Problem([unit()]).link("disk"), "no link 'disk'; the problem's links: none"),
        (lambda: Problem([unit()], resident_bytes=-5), "Problem: resident_bytes must be"),
    ],
)
def test_bad_input_is_refused(make: object, match: str) -> None:
    with pytest.raises(ProblemError, match=match):
        make()  # type: ignore[operator]
