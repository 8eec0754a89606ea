from forge_mlx.data import DataConfig, TokenizerConfig
from pydantic import ValidationError
import pytest


@pytest.mark.parametrize(
    ("written", "parsed"),
    [
        ("stdlib", "stdlib"),
        ("a.txt", ["a.txt"]),
        (["a.txt", "b/*.gz"], ["a.txt", "b/*.gz"]),
        (["stdlib"], ["stdlib"]),
    ],
    ids=["stdlib", "one path", "list", "a folder called stdlib"],
)
def test_source_takes_stdlib_or_paths(written, parsed):
    config = DataConfig(source=written)
    assert config.source == parsed
    assert DataConfig(**config.model_dump()) == config


@pytest.mark.parametrize("source", [[], "", [""], 3, None], ids=repr)
def test_source_without_a_path_is_an_error(source):
    with pytest.raises(ValidationError, match="source"):
        DataConfig(source=source)


def test_valid_paths_takes_one_path():
    assert DataConfig(source="stdlib", valid_paths="v.txt").valid_paths == ["v.txt"]


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [
        (DataConfig, "valid_fraction", 0.0),
        (DataConfig, "valid_fraction", 1.0),
        (DataConfig, "text_field", ""),
        (DataConfig, "packing", "isolate"),
        (DataConfig, "unknown", 1),
        (TokenizerConfig, "vocab_size", 257),
        (TokenizerConfig, "kind", "wordpiece"),
        (TokenizerConfig, "sample_bytes", 0),
    ],
)
def test_values_out_of_range_are_errors(section, field, value):
    required = {"source": "stdlib"} if section is DataConfig else {}
    with pytest.raises(ValidationError, match=field):
        section(**required, **{field: value})


def test_every_field_is_described():
    for section in (DataConfig, TokenizerConfig):
        assert all(field.description for field in section.model_fields.values())
