from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recoup.errors import SizeError
from recoup.sizes import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0B", 0), ("512B", 512), ("1kB", 1000), ("1KB", 1000), ("1KiB", 1024), ("1.5 KiB", 1536), (" 2 MiB ", 2097152),
        ("8GiB", 8589934592), ("8gib", 8589934592), ("8GB", 8000000000), ("0.5TiB", 549755813888), ("1.9999B", 1),
    ],
)  # fmt: skip
def test_reads_what_people_write(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("bad", ["", "8", "GiB", "8 apples", "-1GiB", "1e3B", "8GiB8", "nan B"])
def test_refuses_what_is_no_size(bad: str) -> None:
    with pytest.raises(SizeError, match="Write a number and a unit: '512B'"):
        parse_bytes(bad)


@pytest.mark.parametrize("bad", [1.5, None, True, [1]])
def test_refuses_other_types(bad: object) -> None:
    with pytest.raises(SizeError, match="number of bytes or text such as '8GiB'"):
        parse_bytes(bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [2**63, 10**400, "9" * 30 + "GiB", "8388608TiB"])
def test_refuses_more_than_any_machine_has(bad: int | str) -> None:
    with pytest.raises(SizeError, match=r"A size is at most 2\*\*63 - 1 bytes \(8388608 TiB\)"):
        parse_bytes(bad)
    assert parse_bytes(2**63 - 1) == 2**63 - 1


def test_refuses_numbers_of_more_digits_than_python_reads() -> None:
    with pytest.raises(SizeError, match="Write a number and a unit"):
        parse_bytes("9" * 5000 + "B")
    with pytest.raises(SizeError, match="A size is at most"):
        parse_bytes(10**5000)


def test_refuses_negative_numbers() -> None:
    with pytest.raises(SizeError, match="cannot be negative; got -3 bytes"):
        parse_bytes(-3)


@given(st.integers(min_value=0, max_value=2**60))
def test_numbers_pass_through(num_bytes: int) -> None:
    assert parse_bytes(num_bytes) == num_bytes
    assert parse_bytes(f"{num_bytes}B") == num_bytes


@given(st.integers(min_value=0, max_value=2**49))
def test_written_sizes_read_back_to_three_digits(num_bytes: int) -> None:
    assert abs(parse_bytes(format_bytes(num_bytes)) - num_bytes) <= 0.006 * num_bytes


def test_writes_for_people() -> None:
    sizes = [0, 1023, 1024, 10240, 1023 * 1024, 1 << 20, 15461882265, -2048]
    assert [format_bytes(size) for size in sizes] == [
        "0 B", "1023 B", "1.00 KiB", "10.0 KiB", "1.00 MiB", "1.00 MiB", "14.4 GiB", "-2.00 KiB",
    ]  # fmt: skip
