"""Units and their options, and the links to other stores: what a problem is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from recoup.errors import ProblemError
from recoup.planning.checks import check_bytes, check_name, check_seconds

__all__ = ["Link", "Option", "Scratch", "Unit"]


@dataclass(frozen=True, slots=True)
class Link:
    """A way to another store (host, disk), with its own queue in each direction.

    Args:
        name: the store's name, such as ``"host"``.
        send_bytes_per_s: bandwidth from the device to the store.
        fetch_bytes_per_s: bandwidth back to the device.
        capacity_bytes: what the store can take; ``None`` for no limit.

    >>> Link("host", send_bytes_per_s=55e9, fetch_bytes_per_s=50e9).name
    'host'
    """

    name: str
    send_bytes_per_s: float = field(kw_only=True)
    fetch_bytes_per_s: float = field(kw_only=True)
    capacity_bytes: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_name("A link", self.name)
        owner = f"Link {self.name!r}"
        check_seconds(owner, unit="bytes/s", send_bytes_per_s=self.send_bytes_per_s)
        check_seconds(owner, unit="bytes/s", fetch_bytes_per_s=self.fetch_bytes_per_s)
        if not (self.send_bytes_per_s > 0 and self.fetch_bytes_per_s > 0):
            raise ProblemError(f"{owner}: bandwidths must be above 0. Leave out a link that cannot move.")
        if self.capacity_bytes is not None:
            check_bytes(owner, capacity_bytes=self.capacity_bytes)


class Scratch(NamedTuple):
    """Bytes that only one phase needs, while it runs."""

    forward: int = 0
    replay: int = 0
    backward: int = 0


_NO_SCRATCH = Scratch()


@dataclass(frozen=True, slots=True, init=False)
class Option:
    """One way to run a unit: what it holds between forward and backward, and what that costs.

    By convention ``"keep"`` holds everything its backward reads, and ``"recompute"`` holds nothing and
    replays in the backward. An option that holds no bytes and not its output needs only its input: its
    backward can run without a forward of its own.

    Args:
        name: unique within the unit.
        forward_s: seconds of the forward.
        backward_s: seconds of the backward, without the replay.
        extra_s: further seconds at the start of the backward (replay, decompression).
        again_s: overhead of the forward inside a replay, which has to store what autograd saves.
        held_bytes: on the device from forward to backward, beyond the unit's input and output.
        holds_output: whether the backward reads the unit's own output, which then stays until it has run.
        forward_transient_bytes: scratch of the forward, beyond held bytes and output.
        replay_transient_bytes: scratch during ``extra_s``, beyond held bytes.
        backward_transient_bytes: scratch of the backward, beyond held bytes and the gradients of output and inputs; it
            includes what the replay left for it.
        held_links: names of the links over which the held bytes may leave.
        scratch: the three kinds of scratch together.

    >>> Option("keep", forward_s=1.0, backward_s=2.0, held_bytes=64).total_s
    3.0
    """

    name: str
    forward_s: float
    backward_s: float
    extra_s: float
    again_s: float
    held_bytes: int
    holds_output: bool
    scratch: Scratch
    held_links: tuple[str, ...]

    def __init__(
        self,
        name: str,
        *,
        forward_s: float,
        backward_s: float,
        extra_s: float = 0.0,
        again_s: float = 0.0,
        held_bytes: int = 0,
        holds_output: bool = False,
        forward_transient_bytes: int | None = None,
        replay_transient_bytes: int | None = None,
        backward_transient_bytes: int | None = None,
        held_links: Sequence[str] = (),
        scratch: Scratch = _NO_SCRATCH,
    ) -> None:
        given = (forward_transient_bytes, replay_transient_bytes, backward_transient_bytes)
        sizes = (other if size is None else size for size, other in zip(given, scratch, strict=True))
        set_field = object.__setattr__
        set_field(self, "name", name)
        set_field(self, "forward_s", forward_s)
        set_field(self, "backward_s", backward_s)
        set_field(self, "extra_s", extra_s)
        set_field(self, "again_s", again_s)
        set_field(self, "held_bytes", held_bytes)
        set_field(self, "holds_output", holds_output)
        set_field(self, "scratch", Scratch(*sizes))
        set_field(self, "held_links", tuple(held_links))
        self._validate()

    def _validate(self) -> None:
        check_name("An option", self.name)
        owner = f"Option {self.name!r}"
        check_seconds(
            owner,
            forward_s=self.forward_s,
            backward_s=self.backward_s,
            extra_s=self.extra_s,
            again_s=self.again_s,
        )
        check_bytes(
            owner,
            held_bytes=self.held_bytes,
            forward_transient_bytes=self.scratch.forward,
            replay_transient_bytes=self.scratch.replay,
            backward_transient_bytes=self.scratch.backward,
        )

    @property
    def forward_transient_bytes(self) -> int:
        """Scratch of the forward."""
        return self.scratch.forward

    @property
    def replay_transient_bytes(self) -> int:
        """Scratch of the replay in the backward."""
        return self.scratch.replay

    @property
    def backward_transient_bytes(self) -> int:
        """Scratch of the backward."""
        return self.scratch.backward

    @property
    def total_s(self) -> float:
        """Seconds of forward and backward together, with the extra seconds."""
        return self.forward_s + self.extra_s + self.backward_s

    @property
    def freed_input_bytes(self) -> int:
        """Of the unit's input, what nobody needs once this option's forward has run."""
        return 0

    @property
    def needs_forward(self) -> bool:
        """Whether its backward reads something that only its own forward can leave (held bytes or output)."""
        return self.held_bytes > 0 or self.holds_output


@dataclass(frozen=True, slots=True, init=False)
class Unit:
    """A module call (or a time step) that the plan decides about as a whole.

    A forward that keeps nothing runs as the unit's lightest option: the first with the fewest held bytes.

    Args:
        name: unique within the problem.
        options: at least one way to run it.
        output_bytes: of its output.
        gradient_bytes: of its output's gradient; as many as the output unless given.
        parameter_gradient_bytes: that appear when its backward has run, and stay.
        skips: indices of earlier units, other than its neighbour, whose outputs it also reads.
        output_links: names of the links over which its output may leave.
        runs_once: whether its forward cannot be run again by an action. It then runs exactly once, under one
            of its options (``Keep.OPTION``), and is never part of a sweep that keeps nothing. What an option
            replays in the backward by itself (``extra_s``) is its own affair.

    >>> keep = Option("keep", forward_s=1, backward_s=1, holds_output=True)
    >>> Unit("relu", [keep], output_bytes=8).gradient_bytes
    8
    """

    name: str
    options: tuple[Option, ...]
    output_bytes: int = field(kw_only=True)
    gradient_bytes: int = field(default=-1, kw_only=True)
    parameter_gradient_bytes: int = field(default=0, kw_only=True)
    skips: tuple[int, ...] = field(default=(), kw_only=True)
    output_links: tuple[str, ...] = field(default=(), kw_only=True)
    runs_once: bool = field(default=False, kw_only=True)

    def __init__(
        self,
        name: str,
        options: Sequence[Option],
        *,
        output_bytes: int,
        gradient_bytes: int | None = None,
        parameter_gradient_bytes: int = 0,
        skips: Sequence[int] = (),
        output_links: Sequence[str] = (),
        runs_once: bool = False,
    ) -> None:
        set_field = object.__setattr__
        set_field(self, "name", name)
        set_field(self, "options", tuple(options))
        set_field(self, "output_bytes", output_bytes)
        set_field(self, "gradient_bytes", output_bytes if gradient_bytes is None else gradient_bytes)
        set_field(self, "parameter_gradient_bytes", parameter_gradient_bytes)
        set_field(self, "skips", tuple(skips))
        set_field(self, "output_links", tuple(output_links))
        set_field(self, "runs_once", runs_once)
        self._validate()

    def _validate(self) -> None:
        check_name("A unit", self.name)
        owner = f"Unit {self.name!r}"
        check_bytes(
            owner,
            output_bytes=self.output_bytes,
            gradient_bytes=self.gradient_bytes,
            parameter_gradient_bytes=self.parameter_gradient_bytes,
        )
        if not isinstance(self.runs_once, bool):
            raise ProblemError(f"{owner}: runs_once must be True or False; got {self.runs_once!r}.")
        if not self.options:
            raise ProblemError(f"{owner} has no options. Give at least one, such as Option('keep', …).")
        names = [option.name for option in self.options]
        if len(set(names)) < len(names):
            raise ProblemError(f"{owner}: option names must differ; got {', '.join(names)}.")

    @classmethod
    def keep_or_recompute(
        cls,
        name: str,
        *,
        forward_s: float,
        backward_s: float,
        held_bytes: int,
        output_bytes: int,
        holds_output: bool = False,
        forward_transient_bytes: int = 0,
        backward_transient_bytes: int = 0,
        parameter_gradient_bytes: int = 0,
        runs_once: bool = False,
    ) -> Unit:
        """Makes a unit with the two usual options, ``"keep"`` and ``"recompute"``.

        The replay materialises the whole unit (held bytes and output) and costs one more forward.

        >>> unit = Unit.keep_or_recompute("block", forward_s=1, backward_s=2, held_bytes=100, output_bytes=10)
        >>> [(option.name, option.held_bytes, option.extra_s) for option in unit.options]
        [('keep', 100, 0.0), ('recompute', 0, 1)]
        """
        keep = Option(
            "keep",
            forward_s=forward_s,
            backward_s=backward_s,
            held_bytes=held_bytes,
            holds_output=holds_output,
            forward_transient_bytes=forward_transient_bytes,
            backward_transient_bytes=backward_transient_bytes,
        )
        recompute = Option(
            "recompute",
            forward_s=forward_s,
            backward_s=backward_s,
            extra_s=forward_s,
            forward_transient_bytes=forward_transient_bytes,
            replay_transient_bytes=held_bytes + output_bytes + forward_transient_bytes,
            backward_transient_bytes=held_bytes + backward_transient_bytes + holds_output * output_bytes,
        )
        return cls(
            name,
            (keep, recompute),
            output_bytes=output_bytes,
            parameter_gradient_bytes=parameter_gradient_bytes,
            runs_once=runs_once,
        )

    @property
    def lasting_bytes(self) -> int:
        """By how much more is there once its backward has run, its own gradient and held bytes apart."""
        return self.parameter_gradient_bytes

    @property
    def lightest(self) -> Option:
        """The option of a forward that keeps nothing: the first with the fewest held bytes."""
        return min(self.options, key=lambda option: option.held_bytes)

    @property
    def plain_transient_bytes(self) -> int:
        """Transient bytes of a forward that keeps nothing; what its option would hold counts as transient."""
        return self.lightest.held_bytes + self.lightest.forward_transient_bytes
