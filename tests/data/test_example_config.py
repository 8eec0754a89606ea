"""The `data:` section with a format: what it takes, and what does not go together."""

from forge_mlx.data.example_config import ExampleConfig
from pydantic import ValidationError
import pytest


def config(**values):
    return ExampleConfig.model_validate({"format": "chat", "source": "a.jsonl", **values})


def test_the_shortest_section():
    short = config()
    assert (short.source, short.truncate, short.packing, short.train_on) == (["a.jsonl"], "error", True, "assistant")
    # What a run writes, every default spelt out, is the same section for every format.
    for each in ("chat", "prompt_completion", "text", "preference"):
        whole = config(format=each)
        assert ExampleConfig.model_validate(whole.model_dump()) == whole


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"format": "chats"}, "Input should be 'chat', 'prompt_completion', 'text' or 'preference'"),
        ({"source": []}, "at least 1 item"),
        ({"source": ""}, "at least 1 character"),
        ({"truncat": "drop"}, "Extra inputs are not permitted"),
        ({"max_examples": 0}, "greater than or equal to 1"),
        ({"valid_fraction": 1.0}, "less than 1"),
        ({"packing": "documents"}, "valid boolean"),
        (
            {"prompt_field": "question"},
            "prompt_field holds for format: prompt_completion and preference but format is chat",
        ),
        (
            {"format": "text", "train_on": "all"},
            "train_on holds for format: chat and prompt_completion but format is text",
        ),
        (
            {"format": "preference", "packing": False},
            "packing holds for format: chat and prompt_completion and text but",
        ),
        ({"format": "preference", "truncate": "split"}, "truncate must be error or drop with format: preference"),
    ],
)
def test_what_does_not_go(values, message):
    with pytest.raises(ValidationError, match=message):
        config(**values)


def test_every_setting_has_a_help_text():
    assert all(len(field.description or "") > 20 for field in ExampleConfig.model_fields.values())
