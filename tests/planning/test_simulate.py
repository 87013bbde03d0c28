from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from recoup.errors import ScheduleError
from recoup.planning import (
    Action,
    Backward,
    Drop,
    Fetch,
    Forward,
    Keep,
    Link,
    Option,
    Problem,
    Schedule,
    Send,
    Unit,
    Value,
    Wait,
    simulate,
    trace,
)
from recoup.planning.additive_numbers import AdditiveOption, AdditiveUnit

HELD, OUTPUT = Value.HELD, Value.OUTPUT


def keep(unit: int, option: int = 0) -> Forward:
    return Forward(unit, keep=Keep.OPTION, option=option)


def b(unit: int, option: int = 0) -> Backward:
    return Backward(unit, option=option)


def chain(*, holds_output: bool = False, once: int | None = None) -> Problem:
    """Three units; every number differs, and no two sums of them agree by accident. ``once`` runs once."""
    rows = [(1.0, 10.0, 100, 7, 11), (2.0, 20.0, 200, 13, 17), (4.0, 40.0, 400, 19, 23)]
    units = []
    for index, (forward_s, backward_s, held, output, gradient) in enumerate(rows):
        full = Option(
            "keep",
            forward_s=forward_s,
            backward_s=backward_s,
            held_bytes=held,
            holds_output=holds_output,
            forward_transient_bytes=1,
            backward_transient_bytes=2,
        )
        light = Option(
            "recompute",
            forward_s=forward_s,
            backward_s=backward_s,
            extra_s=forward_s,
            forward_transient_bytes=3,
            replay_transient_bytes=held + output,
            backward_transient_bytes=held,
        )
        units.append(
            Unit(
                f"u{index}",
                [full, light],
                output_bytes=output,
                gradient_bytes=gradient,
                parameter_gradient_bytes=1000 * (index + 1),
                runs_once=index == once,
            )
        )
    return Problem(units, resident_bytes=50_000, input_bytes=500, input_gradient_bytes=29)


def test_keep_everything_exactly() -> None:
    result = simulate(chain(), Schedule([keep(0), keep(1), keep(2), b(2), b(1), b(0)]))
    assert result.seconds == 77.0
    levels = [(moment.phase, moment.unit, moment.num_bytes - 50_500) for moment in result.timeline]
    assert levels == [
        ("after", 0, 0),
        ("forward", 0, 100 + 7 + 1),
        ("after", 0, 107),
        ("forward", 1, 107 + 200 + 13 + 1),
        ("after", 1, 320),
        ("forward", 2, 320 + 400 + 19 + 1),
        ("after", 2, 320 + 400 + 23),  # the last output has become its gradient
        ("backward", 2, 743 + 17 + 2),
        ("after", 2, 743 + 17 - 400 - 23 - 13 + 3000),
        ("backward", 1, 3324 + 11 + 2),
        ("after", 1, 3324 + 11 - 200 - 17 - 7 + 2000),
        ("backward", 0, 5111 + 29 + 2),
        ("after", 0, 6029),
    ]
    assert result.final_bytes == 50_500 + 6029
    assert (result.peak_bytes, result.peak.unit, result.peak.action) == (50_500 + 6029, 0, 5)
    assert result.num_recomputes == (0, 0, 0)
    assert result.wait_s == 0.0


def test_a_forward_under_an_option_costs_more_once_the_unit_has_run() -> None:
    keep_dear = Option("keep", forward_s=1.0, backward_s=10.0, held_bytes=5, again_s=0.25)
    light = Option("recompute", forward_s=2.0, backward_s=20.0, again_s=0.5)
    problem = Problem([Unit("a", [keep_dear, light], output_bytes=3), Unit("b", [keep_dear], output_bytes=1)])
    swept = Forward(0)
    assert simulate(problem, Schedule([keep(0), keep(1), b(1), b(0)])).seconds == 22.0
    # The sweep runs as the lightest option; then the unit has run.
    assert simulate(problem, Schedule([swept, keep(1), b(1), keep(0), b(0)])).seconds == 22.0 + 2.0 + 0.25
    # A second sweep keeps nothing, so there is nothing to set aside.
    twice = Schedule([swept, keep(1), b(1), swept, keep(0, 1), b(0, 1)])
    assert simulate(problem, twice).seconds == 2.0 + 11.0 + 2.0 + 2.5 + 20.0


def test_an_output_that_its_backward_reads_stays() -> None:
    schedule = Schedule([keep(0), keep(1), keep(2), b(2), b(1), b(0)])
    plain, pinned = simulate(chain(), schedule), simulate(chain(holds_output=True), schedule)
    plain_levels = [m.num_bytes for m in plain.timeline if m.phase == "backward"]
    pinned_levels = [m.num_bytes for m in pinned.timeline if m.phase == "backward"]
    assert [after - before for before, after in zip(plain_levels, pinned_levels, strict=True)] == [19, 13, 7]


def test_the_house_trace_only_the_input_kept() -> None:
    order = [
        Forward(0),
        Forward(1),
        Forward(2),
        Forward(0),
        Forward(1),
        b(2, 1),
        Forward(0),
        b(1, 1),
        b(0, 1),
    ]
    assert trace(order) == "F0 F1 F2 F0 F1 B2 F0 B1 B0"
    result = simulate(chain(), Schedule(order))
    assert result.seconds == (1 + 2 + 4) + (1 + 2 + 4 + 40) + (1 + 2 + 20) + (1 + 10)
    assert result.num_recomputes == (3, 2, 1)
    assert (result.peak.unit, result.peak.phase, result.peak.action) == (0, "after", 8)


def test_replay_and_backward_are_separate_moments() -> None:
    order = [Forward(0), Forward(1, keep=Keep.INPUT), Forward(2, keep=Keep.INPUT), b(2, 1), b(1, 1), b(0, 1)]
    result = simulate(chain(), Schedule(order))
    moments = [(m.phase, m.num_bytes - 50_500) for m in result.timeline if m.action == 3]
    before = 7 + 13 + 23
    assert moments == [
        ("replay", before + 419),
        ("backward", before + 17 + 400),
        ("after", 7 + 17 + 3000),
    ]


def test_a_second_copy_counts_while_it_is_made() -> None:
    order = [Forward(0), Forward(1, keep=Keep.INPUT), Forward(0), Forward(1, keep=Keep.INPUT)]
    order += [Forward(2, keep=Keep.INPUT), b(2, 1), b(1, 1), b(0, 1)]
    result = simulate(chain(), Schedule(order))
    again = next(m for m in result.timeline if m.action == 2 and m.phase == "forward")
    assert again.num_bytes - 50_500 == 7 + 13 + (7 + 3)


def skip_problem() -> Problem:
    def unit(name: str, output: int, **changes: object) -> Unit:
        return Unit(
            name, [Option("keep", forward_s=1, backward_s=1, held_bytes=2)], output_bytes=output, **changes
        )  # type: ignore[arg-type]

    return Problem([unit("a", 10), unit("b", 20), unit("c", 40), unit("d", 80, skips=[0])])


def test_a_skip_keeps_its_source_and_its_gradient_alive() -> None:
    result = simulate(skip_problem(), Schedule([*map(keep, range(4)), *map(b, reversed(range(4)))]))
    after = {m.action: m.num_bytes for m in result.timeline if m.phase == "after"}
    assert after[3] == 10 + 20 + 40 + 4 * 2 + 80
    assert after[4] == 10 + 20 + 3 * 2 + 40 + 10  # the gradient of a is there from d's backward on
    assert after[5] == 10 + 2 * 2 + 20 + 10
    assert after[7] == 0


def test_a_skip_that_was_dropped_is_missing() -> None:
    order = [keep(0), keep(1), keep(2), Drop(0, value=OUTPUT), keep(3)]
    with pytest.raises(
        ScheduleError, match=r"Action 4 \(F3:0\) .* output of unit 0 \('a'\), which was never"
    ):
        simulate(skip_problem(), Schedule(order))


def link_problem(*, send: float = 10.0, fetch: float = 10.0, capacity: int | None = None) -> Problem:
    option = Option("keep", forward_s=2.0, backward_s=3.0, held_bytes=40, held_links=("host",))
    units = [Unit(f"u{i}", [option], output_bytes=5, output_links=["host"]) for i in range(3)]
    host = Link("host", send_bytes_per_s=send, fetch_bytes_per_s=fetch, capacity_bytes=capacity)
    return Problem(units, links=[host])


def spill(*, wait: bool = False) -> Schedule:
    sends: list[Action] = [Send(0, value=HELD, link="host")]
    sends += [Wait(0, value=HELD)] if wait else []
    return Schedule([keep(0), *sends, keep(1), keep(2), b(2), Fetch(0, value=HELD, link="host"), b(1), b(0)])


def test_transfers_run_beside_computation() -> None:
    # Out: 40 bytes at 10 bytes/s, from 2 s to 6 s. Back: from 9 s (after B2) to 13 s; B1 ends at 12 s.
    result = simulate(link_problem(), spill())
    assert (result.seconds, result.wait_s) == (16.0, 1.0)
    sent = next(m for m in result.timeline if m.phase == "sent")
    assert (sent.time_s, sent.unit, sent.action) == (6.0, 0, 3)
    fast = simulate(link_problem(fetch=40.0), spill())
    assert (fast.seconds, fast.wait_s) == (15.0, 0.0)


def test_waiting_for_a_move_frees_its_bytes_first() -> None:
    eager, patient = (
        simulate(link_problem(send=8.0), spill()),
        simulate(link_problem(send=8.0), spill(wait=True)),
    )
    assert patient.wait_s == eager.wait_s + 5.0
    level = {
        name: next(m.num_bytes for m in result.timeline if m.phase == "forward" and m.unit == 1)
        for name, result in (("eager", eager), ("patient", patient))
    }
    assert level == {"eager": 90, "patient": 50}


def test_moves_queue_on_one_link() -> None:
    order = [
        keep(0),
        Send(0, value=HELD, link="host"),
        keep(1),
        Send(1, value=HELD, link="host"),
        keep(2),
        b(2),
    ]
    order += [Fetch(1, value=HELD, link="host"), Fetch(0, value=HELD, link="host"), b(1), b(0)]
    result = simulate(link_problem(), Schedule(order))
    # Sends: 2-6 and 6-10. Fetches after B2 at 9 s: unit 1 from 10 to 14, unit 0 from 14 to 18.
    assert result.seconds == 21.0
    assert result.wait_s == 5.0 + 1.0


ALL = [keep(0), keep(1), keep(2), b(2), b(1), b(0)]


@pytest.mark.parametrize(
    ("actions", "match"),
    [
        ([keep(5)], r"Action 0 \(F5:0\) is not legal: there is no unit 5; the problem has units 0 to 2"),
        (
            [Forward(1)],
            r"Action 0 \(F1\) is not legal: it needs the output of unit 0 \('u0'\), which was never",
        ),
        ([Forward(0), Forward(1), Forward(1)], r"Action 2 \(F1\) .* output of unit 0"),
        ([keep(0, 7)], "has options 0 to 1, not 7"),
        ([keep(0), keep(0)], r"unit 0 \('u0'\) already holds"),
        ([keep(0), keep(1), b(1)], "the next one is that of unit 2"),
        (
            [keep(0), Forward(1, keep=Keep.INPUT), b(2, 1)],
            "the forward of the last unit, unit 2 .* has not run",
        ),
        ([*ALL[:4], b(2)], "the next one is that of unit 1"),
        ([*ALL, b(0)], "none, as all have run"),
        ([*ALL[:4], Forward(2)], "the backward of unit 2 .* has already run"),
        (
            [keep(0), keep(1), Forward(2, keep=Keep.INPUT), b(2)],
            "nothing of option 'keep' is held for unit 2",
        ),
        ([*ALL[:3], b(2, 1)], "holds the results of option 'keep', not of 'recompute'"),
        ([keep(0), keep(1), Forward(2), b(2, 1)], r"needs the output of unit 1 \('u1'\)"),
        ([Drop(0, value=OUTPUT)], r"no output of unit 0 \('u0'\) to drop"),
        ([Drop(0, value=HELD)], "no held bytes of unit 0"),
        (ALL[:5], "ends after 5 actions, and the backward of unit 0"),
        ([], "ends after 0 actions"),
        ([keep(0), Send(0, value=HELD, link="host")], "no link 'host'; the problem's links: none"),
    ],
)
def test_illegal_schedules_say_what_is_missing(actions: list[Action], match: str) -> None:
    with pytest.raises(ScheduleError, match=match):
        simulate(chain(), Schedule(actions))


@pytest.mark.parametrize(
    ("actions", "match"),
    [
        (
            [keep(0), Forward(1)],
            r"Action 1 \(F1\) is not legal: unit 1 \('u1'\) runs once, .* \(Keep.OPTION\)",
        ),
        ([keep(0), Forward(1, keep=Keep.INPUT)], r"\(F1i\) is not legal: unit 1 \('u1'\) runs once, so its"),
        (
            [keep(0), keep(1), keep(2), Drop(1, value=HELD), keep(1)],
            r"Action 4 .*unit 1 \('u1'\) runs once, and its forward has already run",
        ),
        ([keep(0), keep(1, 1), Forward(1)], r"unit 1 \('u1'\) runs once, and its forward has already run"),
        # Option 1 holds no bytes, but what ran under option 0 cannot end under another.
        (
            [keep(0), keep(1), keep(2), Drop(1, value=HELD), b(2), b(1, 1)],
            r"nothing of option 'recompute' is held for unit 1 \('u1'\)",
        ),
    ],
)
def test_a_unit_that_runs_once_runs_once_and_under_an_option(actions: list[Action], match: str) -> None:
    with pytest.raises(ScheduleError, match=match):
        simulate(chain(once=1), Schedule(actions))


@pytest.mark.parametrize("option", [0, 1])
def test_a_unit_that_runs_once_may_choose_among_its_options(option: int) -> None:
    # The others may run again around it; its own replay is its option's affair.
    around = [Forward(0), keep(1, option), keep(2), b(2), b(1, option), keep(0), b(0)]
    once, often = simulate(chain(once=1), Schedule(around)), simulate(chain(), Schedule(around))
    assert once == often
    assert once.num_recomputes == (1, option, 0)


def test_other_bytes_that_come_and_go_with_backwards() -> None:
    lefts = zip(chain().units, (-31, -37, 68), strict=True)
    units = [AdditiveUnit.of(unit, left=left) for unit, left in lefts]
    assert units[2].lasting_bytes == 3000 + 68
    problem = replace(chain(), units=tuple(units))
    actions = [Forward(0), keep(1), keep(2), b(2), b(1), keep(0), b(0)]
    plain, waiting = simulate(chain(), Schedule(actions)), simulate(problem, Schedule(actions))
    pairs = zip(waiting.timeline, plain.timeline, strict=True)
    more = {(one.action, one.phase): one.num_bytes - other.num_bytes for one, other in pairs}
    # 68 bytes while unit 1's backward runs, 31 while unit 0 is replayed and in its backward.
    assert {key: num_bytes for key, num_bytes in more.items() if num_bytes} == {
        (3, "after"): 68,
        (4, "backward"): 68,
        (4, "after"): 31,
        (5, "forward"): 31,
        (5, "after"): 31,
        (6, "backward"): 31,
    }


class TestFreedInputs:
    """Unit 1's option does without 10 of the 13 bytes of unit 0's output."""

    def problem(self, *, holds_output: bool = False, skips: tuple[int, ...] = ()) -> Problem:
        def unit(name: str, held: int, output: int, **options: Any) -> Unit:
            own = {name: options.pop(name) for name in ("holds_output", "freed") if name in options}
            option = AdditiveOption("keep", forward_s=1, backward_s=2, held_bytes=held, **own)
            return Unit(name, [option], output_bytes=output, gradient_bytes=0, **options)

        return Problem(
            [
                unit("a", 100, 13, holds_output=holds_output),
                unit("b", 200, 17, freed=10),
                unit("c", 400, 19, skips=skips),
            ]
        )

    def after(self, problem: Problem, *actions: Action) -> list[int]:
        moments = simulate(problem, Schedule(actions)).timeline
        return [moment.num_bytes for moment in moments[1:] if moment.phase == "after"]

    plain = (keep(0), keep(1), keep(2), b(2), b(1), b(0))

    def test_it_goes_when_the_forward_has_run(self) -> None:
        assert self.after(self.problem(), *self.plain) == [113, 320, 720, 303, 100, 0]

    @pytest.mark.parametrize("how", [{"holds_output": True}, {"skips": (0,)}])
    def test_it_stays_where_another_unit_needs_it(self, how: Any) -> None:
        assert self.after(self.problem(**how), *self.plain)[:3] == [113, 330, 730]

    def test_it_stays_where_the_unit_is_replayed_from_it(self) -> None:
        again = (keep(0), Forward(1, keep=Keep.INPUT), keep(2), b(2), keep(1), b(1), b(0))
        assert self.after(self.problem(), *again) == [113, 130, 530, 113, 313, 100, 0]

    def test_it_goes_in_a_replay_that_starts_before_it(self) -> None:
        again = (Forward(0), Forward(1), keep(2), b(2), keep(0), keep(1), b(1), b(0))
        assert self.after(self.problem(), *again)[4:] == [113, 303, 100, 0]


def test_the_error_carries_the_index() -> None:
    with pytest.raises(ScheduleError) as caught:
        simulate(chain(), Schedule([keep(0), keep(0)]))
    assert caught.value.index == 1


def test_a_pinned_output_cannot_be_dropped() -> None:
    with pytest.raises(ScheduleError, match="reads the unit's output; drop its held bytes first"):
        simulate(chain(holds_output=True), Schedule([keep(0), keep(1), Drop(0, value=OUTPUT)]))


@pytest.mark.parametrize(
    ("actions", "match"),
    [
        ([keep(0), Send(0, value=HELD, link="disk")], "no link 'disk'; the problem's links: host"),
        ([Send(0, value=HELD, link="host")], "would have to be on the device, and they are nowhere"),
        (
            [keep(0), Fetch(0, value=HELD, link="host")],
            "would have to be in 'host', and they are on the device",
        ),
        ([keep(0), Send(0, value=OUTPUT, link="host"), keep(1)], "is in 'host'; fetch it first"),
        ([keep(0), Send(0, value=OUTPUT, link="host"), Forward(0)], "is in 'host'; fetch or drop it first"),
        (
            [keep(0), Send(0, value=HELD, link="host"), keep(1), Send(1, value=HELD, link="host")],
            "'host' takes 60 bytes, and with this it would hold 80",
        ),
        ([*spill().actions[:-3], b(1), b(0)], r"held bytes of unit 0 \('u0'\), which is in 'host'"),
    ],
)
def test_illegal_moves(actions: list[Action], match: str) -> None:
    with pytest.raises(ScheduleError, match=match):
        simulate(link_problem(capacity=60), Schedule(actions))


def test_only_allowed_values_move() -> None:
    problem = chain()
    linked = Problem(problem.units, links=[Link("host", send_bytes_per_s=1, fetch_bytes_per_s=1)])
    with pytest.raises(ScheduleError, match="may leave over no link, not 'host'"):
        simulate(linked, Schedule([keep(0), Send(0, value=HELD, link="host")]))


def test_forward_and_option_go_together() -> None:
    with pytest.raises(ScheduleError, match="comes with an option's index"):
        Forward(3, keep=Keep.OPTION)
    with pytest.raises(ScheduleError, match="comes with an option's index"):
        Forward(3, option=1)
    assert Forward(3, keep=Keep.OPTION, option=1) == keep(3, 1) != keep(3, 0)
