"""Which batches of a loader are looked at: whole ones of its sampler's, the longest where lengths are known."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset
from transformers.trainer_pt_utils import LengthGroupedSampler

from recoup.integrations.batches import batches_of, largest_batch_of

INTERLEAVED = [16, 32, 64, 200] * 16


class Loaded(Dataset[Tensor]):
    """Rows whose length nobody knows before they are read."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths_of_rows = lengths
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.lengths_of_rows)

    def __getitem__(self, index: int) -> Tensor:
        self.read.append(index)
        return torch.full((self.lengths_of_rows[index],), index)


def padded(rows: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def loader_of(data: Any, **options: Any) -> Any:
    return DataLoader(data, collate_fn=padded, **options)


def grouped(lengths: list[int]) -> Any:
    return LengthGroupedSampler(4, lengths=lengths)


@pytest.mark.parametrize("shuffle", [False, True])
def test_rows_of_all_lengths_are_looked_at_where_these_alternate(shuffle: bool) -> None:
    """Every fourth row, of 16 at a stride, would be of one length."""
    data = Loaded(INTERLEAVED)
    states = random.getstate(), torch.get_rng_state()
    batch = largest_batch_of(loader_of(data, batch_size=4, shuffle=shuffle), num_batches=4)
    assert batch.shape == (4, 200)
    assert len(data.read) == len({*data.read}) == 16
    assert {INTERLEAVED[index] for index in data.read} == {16, 32, 64, 200}
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("as_data", [list, tuple, lambda rows: Subset(rows, range(500, 3000))])
def test_of_rows_in_a_list_the_longest_is_found(as_data: Any, shuffle: bool) -> None:
    rows = [torch.ones(5 + index % 7) for index in range(3000)]
    rows[1234] = torch.ones(99)
    loader = loader_of(as_data(rows), batch_size=4, shuffle=shuffle)
    assert largest_batch_of(loader, num_batches=1).shape == (4, 99)
    shortest, *_, longest = batches_of(loader, num_batches=4)
    assert longest.shape == (4, 99)
    assert shortest.shape[1] < 11


@pytest.mark.parametrize("keeps_lengths", [True, False])
def test_batches_of_a_sampler_by_length_stay_whole(keeps_lengths: bool) -> None:
    data, sampler = Loaded(INTERLEAVED), grouped(INTERLEAVED)
    if not keeps_lengths:
        torch.manual_seed(3)
        sampler = list(sampler)
    found = batches_of(loader_of(data, batch_size=4, sampler=sampler), num_batches=4)
    widths = [batch.shape[1] for batch in found]
    assert widths[-1] == 200
    assert len({*widths}) > 2
    if not keeps_lengths:
        first, *_ = read = [data.read[number : number + 4] for number in range(0, 16, 4)]
        assert first == sampler[:4]
        assert all(sampler.index(batch[0]) % 4 == 0 for batch in read)
        assert all(sampler[sampler.index(batch[0]) :][:4] == batch for batch in read)


def test_batches_do_not_depend_on_a_seed() -> None:
    read = []
    for seed in (5, 6):
        torch.manual_seed(seed)
        data = Loaded(INTERLEAVED)
        batches_of(loader_of(data, batch_size=4, sampler=grouped(INTERLEAVED)), num_batches=4)
        read.append(data.read)
    assert read[0] == read[1]


def test_batches_of_a_sampler_of_batches_stay_whole() -> None:
    class Packed:
        batch_size = 2

        def __iter__(self) -> Iterator[list[int]]:
            yield from ([3], [0, 1, 4], [2])

    found = batches_of(loader_of(Loaded(INTERLEAVED), batch_sampler=Packed()), num_batches=4)
    assert [batch[:, 0].tolist() for batch in found] == [[2], [0, 1, 4], [3]]


def test_a_batch_that_is_not_full_is_looked_at_only_where_there_is_no_other() -> None:
    data = Loaded([9, 8, 7, 6, 5])
    assert [tuple(batch.shape) for batch in batches_of(loader_of(data, batch_size=4), num_batches=4)] == [
        (4, 9)
    ]
    assert [tuple(batch.shape) for batch in batches_of(loader_of(data, batch_size=8), num_batches=4)] == [
        (5, 9)
    ]
