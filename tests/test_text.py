"""Counts and sizes as people read them."""

from forge_mlx._text import count, one_line, short_json, size
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


@pytest.mark.parametrize(
    ("error", "text"),
    [(ValueError("one.\n  two  three.\n"), "one. two three"), (RuntimeError(), "RuntimeError")],
    ids=["lines", "nothing"],
)
def test_an_error_is_one_line(error, text):
    assert one_line(error) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"größe": [1, None]}, '{"größe": [1, null]}'),
        (b"x", "\"b'x'\""),
        ("a" * 78, f'"{"a" * 78}"'),
        ("a" * 79, f'"{"a" * 76}...'),
    ],
    ids=["object", "no JSON", "longest", "longer"],
)
def test_a_value_is_shown_in_80_characters(value, text):
    assert short_json(value) == text
    assert len(text) <= 80
