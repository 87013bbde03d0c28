"""Hashes of contents: whatever differs in a bit or a place differs, on the host and by words."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from recoup.checkpointing import digest as digests
from recoup.checkpointing.digest import are_same, digest, fetched, is_same

WAYS = [digest, digests._of_words]
both = pytest.mark.parametrize("way", WAYS, ids=["host", "words"])


@both
def test_changes_at_the_corners_of_a_rectangle_do_not_cancel(way: object) -> None:
    """They did in a sum weighted by rows and columns."""
    table = torch.arange(4096, dtype=torch.int32).view(4, 1024)
    other = table.clone()
    for row, column, change in ((0, 3, 5), (0, 700, -5), (2, 3, -5), (2, 700, 5)):
        other[row, column] += change
    assert not is_same(way(table), way(other))
    assert is_same(way(table), way(table.clone()))


@both
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.int64]
)
@pytest.mark.parametrize("num_elements", [1, 7, 1025])
def test_every_bit_and_place_counts(way: object, dtype: torch.dtype, num_elements: int) -> None:
    tensor = torch.zeros(num_elements, dtype=dtype)
    seen = [way(tensor)]
    for place in {0, num_elements // 2, num_elements - 1}:
        changed = tensor.clone()
        changed[place] = 1
        seen.append(way(changed))
    assert not any(is_same(one, other) for i, one in enumerate(seen) for other in seen[:i])


@both
def test_signs_count_in_both_halves_of_a_word(way: object) -> None:
    """A flipped sign is the top bit of a word, which a plain product would lose in pairs."""
    tensor = torch.randn(64)
    flips = [tensor.clone() for _ in range(3)]
    flips[0][1] *= -1
    flips[1][[1, 3]] *= -1
    flips[2] *= -1
    seen = [way(t) for t in (tensor, *flips)]
    assert not any(is_same(one, other) for i, one in enumerate(seen) for other in seen[:i])


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
def test_all_signs_of_a_few_elements_differ(way: object, dtype: torch.dtype) -> None:
    """Those of both floats of a word met: a third of such pairs were the same."""
    torch.manual_seed(0)
    for num_elements in (2, 3, 8):
        tensor = torch.randint(1, 100, (num_elements,)).to(dtype)
        signs = torch.tensor(list(itertools.product((1, -1), repeat=num_elements)), dtype=dtype)
        assert len({_number(way(row)) for row in tensor * signs}) == 2**num_elements


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_small_numbers_in_a_few_places_differ(way: object, dtype: torch.dtype) -> None:
    rows = torch.tensor(list(itertools.product((-2, -1, 0, 1, 2), repeat=5)), dtype=dtype)
    assert len({_number(way(row)) for row in rows}) == len(rows)


def _number(found: object) -> object:
    return int(found) if isinstance(found, Tensor) else found


def test_the_order_is_that_of_the_elements_whatever_the_layout() -> None:
    tensor = torch.randn(6, 4, 5)
    for way in WAYS:
        assert is_same(way(tensor.transpose(0, 2)), way(tensor.transpose(0, 2).contiguous()))
        assert not is_same(way(tensor.transpose(0, 2)), way(tensor))
    large = torch.randn(700, 900)
    assert is_same(digest(large.t()), digest(large.t().contiguous()))
    assert is_same(digests._of_words(large.view(-1)[1:]), digests._of_words(large.view(-1)[1:].clone()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize(
    "shape", [(4, 301, 640), (640, 301, 3), (2, 3, 700, 300), (1, 9, 301, 400), (3, 200_001), (5, 7)]
)
def test_layouts_are_hashed_in_pieces(
    shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of a whole tensor could be the peak of a step: on a GPU that was 24 MiB for a Whisper."""
    monkeypatch.setattr(digests, "_PIECE_BYTES", 1 << 16)
    tensor = torch.randint(-100, 100, shape).to(dtype)
    for dim in range(1, tensor.dim()):
        turned = tensor.transpose(0, dim)
        pieces = list(digests._pieces(turned.squeeze()))
        own = tensor.untyped_storage().data_ptr()
        copied = [piece.nbytes for piece in pieces if piece.untyped_storage().data_ptr() != own]
        assert max(copied, default=0) < 2 << 16  # eight rows, where one is no whole word
        assert all(piece.nbytes % 8 == 0 for piece in pieces[:-1])
        assert is_same(digests._of_words(turned), digests._of_words(turned.contiguous()))
        changed = tensor.clone().transpose(0, dim)
        changed[(-1,) * tensor.dim()] += 1
        assert not is_same(digests._of_words(turned), digests._of_words(changed))


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=40), st.data())
def test_random_changes(values: list[int], data: st.DataObject) -> None:
    other = data.draw(st.permutations(values))
    left, right = (torch.tensor(v, dtype=torch.float32) for v in (values, other))
    for way in WAYS:
        assert is_same(way(left), way(right)) == (values == other)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.tensor(1.5),
        lambda: torch.empty(0),
        lambda: torch.ones(3, 0),
        lambda: torch.ones(3, dtype=torch.complex64).conj(),
        lambda: torch.ones(1, 5).expand(1_000_000, 5),
        lambda: torch.ones(3, dtype=torch.float8_e4m3fn),
        lambda: torch.ones(4, dtype=torch.complex64).imag,
        lambda: torch._neg_view(torch.ones(4)),
    ],
)
def test_tensors_of_every_kind_have_one(make: object) -> None:
    assert is_same(digest(make()), digest(make()))
    assert digest(make()) is not None


@both
def test_single_elements_of_any_stride(way: object) -> None:
    expanded = torch.ones(1).expand(64).narrow(0, 0, 1)
    assert expanded.stride() == (0,)
    assert is_same(way(expanded), way(torch.ones(1)))


class Tagged(Tensor):
    pass


def test_subclasses_are_hashed_and_sparse_ones_are_not() -> None:
    plain = torch.randn(3)
    assert is_same(digest(plain.as_subclass(Tagged)), digest(plain))
    assert digest(torch.eye(3).to_sparse()) is None
    assert is_same(None, digest(plain))


def test_fetched_ones_are_numbers_and_compare_as_before() -> None:
    left, right = (digests._of_words(torch.arange(start, start + 9)) for start in (0, 1))
    host = digest(torch.ones(2))
    nested = (left, (host, right), None)
    found = fetched([left, nested, host, None, right])
    assert found == [int(left), (int(left), (host, int(right)), None), host, None, int(right)]
    assert is_same(found[0], left)
    assert not is_same(found[0], right)
    assert is_same(found[1], nested)
    assert not is_same(found[1], (left, (host, left), None))
    assert not is_same(found[1], nested[:2])
    assert are_same([(left, found[0]), (found[4], right), (None, host)])
    assert not are_same([(left, found[0]), (found[4], left)])
    assert fetched([]) == []
