from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import nn

from recoup.devices import tracker
from recoup.measuring import MemoryTracker


def test_views_and_aliases_count_once() -> None:
    before = torch.zeros(100)
    with MemoryTracker() as memory:
        x = before[:50].view(5, 10)
        assert memory.current_bytes == 0
        y = x + 1
        assert memory.current_bytes == 200
        z = y.t().reshape(-1)
        assert memory.current_bytes == 400
        w = y.view(-1)[3:]
        assert memory.current_bytes == 400
        del x, z, y
        assert memory.current_bytes == 200  # w still holds y's storage
        del w
        assert memory.current_bytes == 0
        assert memory.peak_bytes == 400


def test_what_was_made_since_is_counted_apart() -> None:
    with MemoryTracker() as memory:
        first, second = torch.zeros(100), torch.zeros(10)
        memory.begin([second])
        assert (memory.recent_bytes, memory.recent_peak_bytes) == (40, 40)
        third = torch.zeros(20)
        del first
        fourth = torch.zeros(30)
        assert memory.peak_bytes == 440 + 80
        assert (memory.recent_bytes, memory.recent_peak_bytes) == (240, 240)
        del second, third
        assert (memory.recent_bytes, memory.recent_peak_bytes) == (120, 240)
        fourth.resize_(50)
        assert memory.recent_bytes == 200
        memory.begin()
        del fourth
    assert (memory.recent_bytes, memory.recent_peak_bytes, memory.current_bytes) == (0, 0, 0)


def test_in_place_operations_count_nothing() -> None:
    x = torch.zeros(10)
    with MemoryTracker() as memory:
        x.add_(1).mul_(2)
        assert memory.peak_bytes == 0


@pytest.mark.usefixtures("no_gc")
def test_a_training_step_counts_exactly() -> None:
    layer = nn.Sequential(nn.Linear(10, 20, bias=False), nn.Sigmoid(), nn.Linear(20, 5, bias=False))
    x = torch.randn(3, 10)
    with MemoryTracker() as memory:
        loss = layer(x).sum()
        # The sigmoid's result, which two operations save, and the loss.
        assert memory.current_bytes == 3 * 20 * 4 + 4
        loss.backward()
        del loss
        assert memory.current_bytes == (10 * 20 + 20 * 5) * 4


def test_reset_peak() -> None:
    with MemoryTracker() as memory:
        x = torch.zeros(100)
        y = torch.zeros(50)
        del x
        memory.reset_peak()
        assert memory.peak_bytes == 200
        y = y + 1
        assert memory.peak_bytes == 400


def test_what_existed_before_counts_if_asked_for() -> None:
    old = torch.zeros(256)
    with MemoryTracker() as memory:
        memory.count([old.untyped_storage()])
        memory.count([old[:3].untyped_storage()])
        assert memory.current_bytes == 1024
        old = old + 1
        assert (memory.current_bytes, memory.peak_bytes) == (1024, 2048)


def test_made_bytes_counts_everything_ever_made() -> None:
    with MemoryTracker() as memory:
        for _ in range(3):
            torch.zeros(100)
    assert (memory.current_bytes, memory.peak_bytes, memory.made_bytes) == (0, 400, 1200)


def test_tensors_made_from_python_numbers_count_and_numpy_arrays_do_not() -> None:
    array = np.zeros(7)
    with MemoryTracker() as memory:
        x = torch.tensor([1.0, 2.0, 3.0])
        assert memory.current_bytes == 12
        y = torch.from_numpy(array)
        assert memory.current_bytes == 12
        del x, y
        assert memory.current_bytes == 0


def test_growth_counts_of_new_and_of_old_storages() -> None:
    before = torch.zeros(10)
    with MemoryTracker() as memory:
        made = torch.empty(0)
        torch.add(torch.ones(5), 1, out=made)
        assert memory.current_bytes == 20
        made.resize_(50)
        assert memory.current_bytes == 200
        before.resize_(30)
        assert memory.current_bytes == 200 + 80
        before.untyped_storage().resize_(40)
        made.untyped_storage().resize_(0)
        assert memory.current_bytes == 200 + 80  # out of sight so far
        before[:10].add_(1)
        made.detach()
        assert memory.current_bytes == 0
        assert memory.made_bytes == 20 + 20 + 180 + 80
        del before
        assert memory.current_bytes == 0


def test_results_that_share_the_storage_of_an_argument_count_nothing() -> None:
    x, out = torch.zeros(4, 6), torch.zeros(4, 6)
    with MemoryTracker() as memory:
        results = [
            torch.ops.aten._unsafe_view(x, [24]),
            torch.add(x, 1, out=out),
            *torch.unbind(x),
            x.detach(),
            torch._foreach_add_([x, out], 1),
        ]
        assert len(results) == 8
        assert memory.made_bytes == 0


def test_lists_of_results_count_each() -> None:
    with MemoryTracker() as memory:
        results = torch._foreach_add([torch.zeros(3), torch.zeros(5)], 1)
        assert memory.current_bytes == 32
        del results
        assert memory.current_bytes == 0


def test_sparse_results_count_by_their_parts() -> None:
    with MemoryTracker() as memory:
        x = torch.eye(3).to_sparse()
        assert x.is_sparse
    assert memory.current_bytes == 2 * 3 * 8 + 3 * 4  # indices and values
    del x
    assert memory.current_bytes == 0


class TestLimit:
    def test_refuses_what_passes_it_and_then_forgets_it(self) -> None:
        with MemoryTracker(limit_bytes=2048) as memory:
            x = torch.zeros(256)
            text = r"aten.cat.default needs 2.00 KiB beside 1.00 KiB in use; the limit is 2.00 KiB"
            with pytest.raises(torch.OutOfMemoryError, match=text):
                torch.cat([x, x])
            assert memory.current_bytes == memory.peak_bytes == 1024
            y = x + 1  # exactly full
            assert memory.current_bytes == memory.peak_bytes == 2048
            with pytest.raises(torch.OutOfMemoryError, match=r"needs 4 B beside 2.00 KiB"):
                y.sum()
            del x
            y.sum()

    def test_holds_nothing_while_the_error_lives(self) -> None:
        with MemoryTracker(limit_bytes=1000) as memory:
            try:
                torch.zeros(1000)
            except torch.OutOfMemoryError:
                assert memory.current_bytes == 0

    @pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the code generator's imports
    def test_generated_code_that_does_not_fit(self) -> None:
        run, x = torch.compile(lambda x: torch.sin(x) + 1), torch.randn(256)
        expected = run(x)
        with MemoryTracker(limit_bytes=1000) as memory:
            text = "generated code needs 1.00 KiB beside 0 B in use; the limit is 1000 B"
            with pytest.raises(torch.OutOfMemoryError, match=text) as error:
                run(x)
            assert error.tb is not None  # it lives, and holds nothing
            assert memory.current_bytes == memory.peak_bytes == 0
        assert torch.equal(run(x), expected)

    @pytest.mark.parametrize("limit_outside", [True, False])
    def test_nested_trackers_both_count(self, limit_outside: bool) -> None:
        limits = (1000, None) if limit_outside else (None, 1000)
        with MemoryTracker(limits[0]) as outer:
            x = torch.zeros(100)
            with MemoryTracker(limits[1]) as inner:
                y = x + 1
                assert (outer.current_bytes, inner.current_bytes) == (800, 400)
                with pytest.raises(torch.OutOfMemoryError):
                    y.repeat(3)
                assert (outer.current_bytes, inner.current_bytes) == (800, 400)
            del x, y
        assert (outer.current_bytes, inner.current_bytes) == (0, 0)

    def test_a_backward_that_does_not_fit(self) -> None:
        layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Sigmoid()) for _ in range(3)))
        x = torch.randn(8, 16)
        with MemoryTracker() as memory:
            layers(x).sum().backward()
        layers.zero_grad()
        with MemoryTracker(limit_bytes=memory.peak_bytes) as exact:
            layers(x).sum().backward()
        assert exact.peak_bytes == memory.peak_bytes
        layers.zero_grad()
        with MemoryTracker(limit_bytes=memory.peak_bytes - 1), pytest.raises(torch.OutOfMemoryError):
            layers(x).sum().backward()


def test_a_count_that_cannot_begin_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    @contextmanager
    def allocations_seen(see: object) -> Iterator[None]:
        seen.append("entered")
        try:
            yield
        finally:
            seen.append("left")

    def fail(mode: object) -> None:
        raise RuntimeError("no modes here")

    monkeypatch.setattr(tracker, "allocations_seen", allocations_seen)
    monkeypatch.setattr(tracker.WatchingMode, "__enter__", fail)
    with pytest.raises(RuntimeError, match="no modes here"), MemoryTracker():
        pass
    assert seen == ["entered", "left"]
