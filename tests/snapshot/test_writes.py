"""Values of tensors that a block writes to."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from recoup.snapshot import writes as writes_module
from recoup.snapshot.writes import Writes


def test_what_is_found_inside_an_open_hold_is_put_back_by_it() -> None:
    average, scale = torch.zeros(2), torch.ones(1)
    writes = Writes()
    put_back = writes.hold()
    with writes.found():
        average.add_(1)
    assert average.tolist() == [0, 0]
    average.add_(5)  # a later run, without the mode
    put_back()
    assert average.tolist() == [0, 0]
    scale.mul_(2)
    assert scale.item() == 2  # never found, never touched


def test_views_lists_and_results_that_are_given() -> None:
    base, others, out = torch.zeros(4), [torch.zeros(1), torch.zeros(2)], torch.zeros(2)
    writes = Writes()
    with writes.found():
        base[1:3].fill_(7)
        torch._foreach_add_(others, 1)
        torch.add(base[:2], 1, out=out)
    assert base.tolist() == [0, 0, 0, 0]
    assert [other.tolist() for other in others] == [[0], [0, 0]]
    assert out.tolist() == [0, 0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the code generator's imports
def test_buffers_of_generated_code_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """It allocates without an operation, and lets matrix products write there."""
    copied: list[int] = []

    class Counted(writes_module.HeldStorage):
        def __init__(self, storage: torch.UntypedStorage) -> None:
            copied.append(storage.nbytes())
            super().__init__(storage)

    monkeypatch.setattr(writes_module, "HeldStorage", Counted)
    run, x = torch.compile(lambda x: torch.mm(x, x).sin()), torch.randn(64, 64)
    expected = run(x)
    with Writes().found():
        assert torch.equal(run(x), expected)
        x.add_(1)
    assert copied == [x.nbytes]
    assert torch.equal(run(x), expected)


def test_what_others_put_back_is_left_to_them() -> None:
    weight = torch.zeros(2)
    with Writes().found([weight]):
        weight.add_(1)
    assert weight.tolist() == [1, 1]


def test_what_was_made_inside_is_neither_copied_nor_held() -> None:
    writes = Writes()
    with writes.found():
        made = torch.zeros(3)
        made.add_(1)
        dead = weakref.ref(made.untyped_storage())
        del made
        gc.collect()
        assert dead() is None


def test_put_back_also_after_an_error() -> None:
    value, writes = torch.zeros(1), Writes()
    try:
        with writes.found():
            value.add_(1)
            raise ValueError
    except ValueError:
        pass
    assert value.item() == 0
