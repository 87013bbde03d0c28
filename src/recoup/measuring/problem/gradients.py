"""The gradients of what positions made: when they are there, and what backwards need beside them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from recoup.measuring.problem.positions import Position
from recoup.planning.lifetimes import Lifetime, Phase, Use

__all__ = ["Gradients", "PassedGradients"]


@dataclass
class PassedGradients:
    """Bytes of the gradients that one backward reads and makes.

    Attributes:
        passed_bytes: those that it reads and its scratch counts, and those that it makes for the position before.
        waiting_bytes: of what it makes, what its measured scratch counts though it is a value.
        viewed_bytes: of what it reads, what its measured scratch counts though it is a view of a larger value.
        ended_bytes: of what it reads, values that its measured scratch does not count.
        summed_bytes: sums of gradients that it makes and its measured scratch does not count.
        apart_bytes: of these, sums with a view of a larger value, which are not made in place.
        within_bytes: the most beside a view that it reads, where code adds to that itself.
    """

    passed_bytes: int = 0
    waiting_bytes: int = 0
    viewed_bytes: int = 0
    ended_bytes: int = 0
    summed_bytes: int = 0
    apart_bytes: int = 0
    within_bytes: int = 0

    @property
    def counted_bytes(self) -> int:
        """What its measured scratch counts though simulation counts it as a value."""
        return self.waiting_bytes + self.viewed_bytes


class Gradients:
    """The gradients that live between backwards: NOTE [ Values between units ], 4, in ``encode``.

    Attributes:
        values: their lifetimes.
    """

    def __init__(self, positions: Sequence[Position]) -> None:
        self._positions = positions
        self.values: list[Lifetime] = []
        self._passed = [PassedGradients() for _ in positions]
        self._views: dict[tuple[int, int], set[int]] = defaultdict(set)
        self._whole: set[tuple[int, int]] = set()
        for producer, position in enumerate(positions):
            for storage in position.made:
                self._follow(producer, storage)
        for maker, position in enumerate(positions):
            if position.seen is None:
                for call, num_bytes in position.code.gives_code.items():
                    reader = self._code_before(call)
                    self._wait(num_bytes, maker, [reader], in_scratch=False)
                    within_bytes = position.code.sums_in_code.get(call, 0)
                    self._passed[reader].within_bytes = max(self._passed[reader].within_bytes, within_bytes)
        for (maker, storage), readers in self._views.items():
            num_bytes = positions[maker].views.storages[storage]
            self._wait(num_bytes, maker, sorted(readers), in_scratch=(maker, storage) in self._whole)

    def at(self, index: int) -> PassedGradients:
        """Those that the backward of a position reads and makes."""
        return self._passed[index]

    def _code_before(self, call: int) -> int:
        """The position of the code before a call, or of the call before that."""
        index = next((i for i, one in enumerate(self._positions) if one.call == call), len(self._positions))
        return max(0, index - 1)

    def _follow(self, producer: int, storage: int) -> None:
        """The gradient of one storage, from the last backward that gives it to that of its producer."""
        later = reversed(range(producer + 1, len(self._positions)))
        givers = [index for index in later if storage in self._positions[index].given_gradients]
        if not givers:
            return
        full_bytes = self._full_bytes(producer, storage)
        maker, *others = givers
        size, view = self._given(maker, storage, full_bytes)
        for giver in others:
            if self._positions[giver].hands_on(storage):
                self._end(maker, giver, storage, 0 if self._is_copied(view, storage) else size, view)
                maker = giver
                size, view = self._given(giver, storage, full_bytes)
            else:
                self._add(maker, giver, size, view)
                is_measured = self._positions[giver].sums_with_view(storage)
                self._passed[giver].summed_bytes += 0 if is_measured else full_bytes
                self._passed[giver].apart_bytes += 0 if is_measured or view is None else full_bytes
                maker, view, size = giver, None, full_bytes
        if view is None and maker == producer + 1:
            size = full_bytes
        self._end(maker, producer, storage, 0 if self._is_copied(view, storage) else size, view)

    def _is_copied(self, view: tuple[int, int] | None, storage: int) -> bool:
        return view is not None and storage in self._positions[view[0]].views.strided

    def _given(self, giver: int, storage: int, full_bytes: int) -> tuple[int, tuple[int, int] | None]:
        """Bytes of the gradient that a backward gives, and the storage that it is a view of, if it is one."""
        position = self._positions[giver]
        owner = position.views.owner_of(storage, full_bytes)
        return (position.given_gradients[storage], None) if owner is None else (full_bytes, (giver, owner))

    def _add(self, maker: int, giver: int, num_bytes: int, view: tuple[int, int] | None) -> None:
        """A gradient to which another backward adds its own."""
        if view is not None:
            self._views[view].add(giver)
        else:
            self._wait(num_bytes, maker, [giver], in_scratch=False)

    def _end(
        self, maker: int, reader: int, storage: int, num_bytes: int, view: tuple[int, int] | None
    ) -> None:
        if view is not None:
            self._views[view].add(reader)
            if self._positions[reader].reads_whole(storage):
                self._whole.add(view)
            elif not self._positions[reader].begins_with_view(storage):
                self._passed[reader].viewed_bytes += num_bytes
        else:
            self._wait(num_bytes, maker, [reader], in_scratch=True)

    def _wait(self, num_bytes: int, maker: int, readers: Sequence[int], *, in_scratch: bool) -> None:
        read = tuple(Use(Phase.BACKWARD, reader) for reader in readers)
        made = Use(Phase.BACKWARD, maker)
        self.values.append(Lifetime("gradient", num_bytes, made=made, read=read, in_scratch=in_scratch))
        if in_scratch:
            self._passed[readers[0]].passed_bytes += num_bytes
            self._passed[maker].passed_bytes += num_bytes if readers[0] == maker - 1 else 0
        else:
            self._passed[maker].waiting_bytes += num_bytes
            self._passed[readers[0]].ended_bytes += num_bytes

    def _full_bytes(self, index: int, storage: int) -> int:
        """Bytes of a storage's gradient; where code made it, its first reader tells whether it needs one."""
        seen = self._positions[index].seen
        if seen is not None:
            return seen.gradients.get(storage, 0)
        for later in self._positions[index + 1 :]:
            if later.seen is not None and storage in later.seen.argument_gradients:
                return later.seen.argument_gradients[storage]
        return 0
