from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from capture.cuts import assert_equal, at, captured, held_bytes, step
from torch import Tensor, nn

from recoup.capture.cut import Cut
from recoup.capture.masks import _PACK, _UNPACK

pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf.*:UserWarning"
)


def test_every_byte_there_and_back() -> None:
    masks = (torch.arange(256)[:, None] >> torch.arange(8)) % 2 == 1
    bits = masks
    for operation, argument in _PACK:
        bits = operation(bits, argument)
    assert bits.dtype == torch.uint8
    assert bits.flatten().tolist() == list(range(256))
    again = bits
    for operation, argument in _UNPACK:
        again = operation(again, argument)
    assert torch.equal(again, masks)


class Dropping(nn.Module):
    def __init__(self, *, across: bool = False) -> None:
        super().__init__()
        self.across = across

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sin(x)
        return torch.cos(F.dropout(x.t() if self.across else x, 0.3))


@pytest.mark.parametrize(
    ("rows", "width", "across", "mask_bytes"),
    [
        (3, 16, False, 3 * 2),
        (3, 12, False, 3 * 12),  # rows that are no whole bytes
        (8, 16, True, 8 * 16),  # rows that do not lie one behind the other
    ],
)
def test_masks_whose_rows_are_whole_bytes_are_kept_as_bits(
    rows: int, width: int, across: bool, mask_bytes: int
) -> None:
    module = Dropping(across=across)
    given = (torch.randn(rows, width, requires_grad=True),), {}
    graph = captured(module, given)
    own, least = Cut("captured", graph.digest), Cut("captured", graph.digest, ())
    assert held_bytes(at(module, least), given) == mask_bytes
    assert_equal(step(module, at(module, least), given), step(module, at(module, own), given), least)


@pytest.mark.parametrize("shape", [(2, 16, 1), (3, 0, 1)])
def test_strides_of_single_elements_are_any(shape: tuple[int, ...]) -> None:
    class Turned(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cos(F.dropout(torch.sin(x).transpose(1, 2), 0.3))

    module, given = Turned(), ((torch.randn(shape, requires_grad=True),), {})
    graph = captured(module, given)
    least = Cut("captured", graph.digest, ())
    assert_equal(step(module, at(module, least), given), step(module, module, given), least)


def test_other_sizes() -> None:
    module = Dropping()
    graph = captured(module, ((torch.randn(32, 5, 16, requires_grad=True),), {}))
    cut = Cut("captured", graph.digest, ())
    for rows in (32, 24, 17):
        given = (torch.randn(rows, 5, 16, requires_grad=True),), {}
        assert held_bytes(at(module, cut), given) == rows * 5 * 2
        assert_equal(step(module, at(module, cut), given), step(module, module, given), cut)
