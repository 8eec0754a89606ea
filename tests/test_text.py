"""Counts and sizes as people read them."""

from forge_mlx._text import count, size
import pytest


@pytest.mark.parametrize(("number", "text"), [(0, "0 files"), (1, "1 file"), (1671, "1,671 files")])
def test_a_noun_agrees_with_its_number(number, text):
    assert count(number, "file") == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (50_300, "50.3 kB"),
        (999_960, "1.0 MB"),
        (31_512_085, "31.5 MB"),
        (2e9, "2.0 GB"),
    ],
)
def test_a_size_has_a_unit_that_fits(num_bytes, text):
    assert size(num_bytes) == text
