from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.errors import ConfigError
from storage.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("10GB", 10_000_000_000),
        ("10GiB", 10_737_418_240),
        ("10G", 10_000_000_000),
        ("10g", 10_000_000_000),
        (" 10 GiB ", 10_737_418_240),
        ("10gib", 10_737_418_240),
        ("10", 10),
        ("10B", 10),
        (10, 10),
        ("1.1TB", 1_100_000_000_000),
        ("1.5KiB", 1536),
        ("0.5K", 500),
        ("2PiB", 2 << 50),
    ],
)
def test_sizes_as_people_write_them(text: object, size_bytes: int) -> None:
    assert parse_size(text, "budget") == size_bytes


@pytest.mark.parametrize(
    "value",
    ["1e3", "10XB", "50%", "abc", "", "GB", "-1", "-1GB", "0", "0GB", "0.0001KB", "1.5", "1.5B",
     "1,5GB", "10 G B", "10GB extra", "\u0661GB", "9" * 5000, "1025PiB", 0, -1, 1.5, True, None,
     b"10GB"],
)  # fmt: skip
def test_what_is_no_size_is_refused_by_name(value: object) -> None:
    with pytest.raises(ConfigError, match=r"tiers\[1\]\.budget: expected .*, got") as caught:
        parse_size(value, "tiers[1].budget")
    assert caught.value.found is value


@given(st.integers(1, 10**18))
def test_a_number_of_bytes_is_itself(size_bytes: int) -> None:
    assert parse_size(size_bytes, "x") == parse_size(str(size_bytes), "x") == size_bytes


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 KB"), (1_234_567, "1.23 MB"), (10**16, "10 PB")],
)
def test_sizes_for_people(size_bytes: int, text: str) -> None:
    assert format_size(size_bytes) == text
