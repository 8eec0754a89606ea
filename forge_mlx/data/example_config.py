"""The `data:` section of a config that names a `format`: examples to fine-tune on, and how they become rows."""

from typing import Annotated, Any, Literal

from forge_mlx._config import Section
from pydantic import BeforeValidator, Field, model_validator

Format = Literal["chat", "prompt_completion", "text", "preference"]
Truncate = Literal["error", "drop", "split"]

# Which formats read a setting; those that are not here hold for all.
_READ_BY: dict[str, tuple[Format, ...]] = {
    "messages_field": ("chat",),
    "prompt_field": ("prompt_completion", "preference"),
    "completion_field": ("prompt_completion",),
    "text_field": ("text",),
    "chosen_field": ("preference",),
    "rejected_field": ("preference",),
    "prompt_as": ("prompt_completion", "preference"),
    "train_on": ("chat", "prompt_completion"),
    "chat_template": ("chat", "prompt_completion", "preference"),
    "packing": ("chat", "prompt_completion", "text"),
}


def _one_path_as_list(value: object) -> object:
    """A single path may be written without the brackets of a list."""
    return [value] if isinstance(value, str) else value


_Name = Annotated[str, Field(min_length=1)]
_Paths = Annotated[list[_Name], Field(min_length=1), BeforeValidator(_one_path_as_list)]


class ExampleConfig(Section):
    """Examples, their split into training and validation, what of them is learnt, and how they fill rows.

    Paths are relative to the current folder; a leading `~` is the home folder. Fields of an example that no setting
    names are not read.
    """

    format: Format = Field(
        description=(
            "What an example is. chat: a conversation, `messages` with `role` and `content`, and the `tools` of one "
            "that has them; ShareGPT's `conversations` with `from` and `value` are read too. prompt_completion: a "
            "`prompt` and its `completion`, texts or lists of messages; Alpaca's `instruction`, `input` and `output` "
            "are read too. text: a `text` whose every token is learnt. preference: a `prompt` with a `chosen` and a "
            "`rejected` answer, or two conversations that differ in their last message."
        ),
    )
    source: _Paths = Field(
        description=(
            "One or a list of .jsonl or .ndjson files (an example a line), .json (a list of examples, or one a line), "
            ".parquet, folders of them and globs, each but .parquet plain or .gz; for format: text also text files, "
            "each of which is one example."
        ),
    )
    valid_paths: _Paths | None = Field(
        None, description="Files, folders and globs to validate on; null: a share of the source is held out."
    )
    valid_fraction: float = Field(
        0.05,
        ge=0,
        lt=1,
        description="Share of the examples that is held out, evenly over their order, at least one. Unused with "
        "valid_paths.",
    )
    max_examples: int | None = Field(
        None, ge=1, description="Read only so many examples of the source, its first ones; null: all of them."
    )
    messages_field: _Name = Field("messages", description="The field with the conversation, of format: chat.")
    prompt_field: _Name = Field(
        "prompt", description="The field with what is given, of prompt_completion and preference."
    )
    completion_field: _Name = Field("completion", description="The field with what is learnt, of prompt_completion.")
    text_field: _Name = Field("text", description="The field with the text, of format: text.")
    chosen_field: _Name = Field("chosen", description="The field with the better answer, of format: preference.")
    rejected_field: _Name = Field("rejected", description="The field with the worse answer, of format: preference.")
    prompt_as: Literal["text", "chat"] = Field(
        "text",
        description=(
            "What prompts and answers that are texts become. text: one text, the answer right behind the prompt, as "
            "base models have it. chat: a user's message and the assistant's, in the model's chat template."
        ),
    )
    train_on: Literal["assistant", "last", "all"] = Field(
        "assistant",
        description=(
            "Which tokens are targets. assistant: what the assistant says and the token that ends its turn, in every "
            "turn; of prompt_completion the completion. last: the same of the last turn alone. all: prompts too."
        ),
    )
    chat_template: _Name | None = Field(
        None,
        description="A file with a Jinja chat template, or `chatml`, which is built in; null: the tokenizer's own.",
    )
    truncate: Truncate = Field(
        "error",
        description=(
            "What happens to examples that are longer than a row. error: the run does not start, and says how many "
            "there are and how long, so that nothing is lost unseen. drop: they are left out before any is held "
            "out, and counted. split: they are cut into pieces of train.seq_len tokens, each a text of its own that "
            "does not see those before it; every target is learnt once. Of preference pairs there is no split."
        ),
    )
    packing: bool = Field(
        True,
        description=(
            "true: several examples fill a row, and none sees another; the work on padding is saved. false: one "
            "example a row, which is as long as the longest one needs."
        ),
    )

    @property
    def asks_in_chat(self) -> bool:
        """Whether prompts stand in the tokenizer's chat template."""
        return self.format == "chat" or self.prompt_as == "chat"

    @property
    def required_fields(self) -> set[str]:
        """The fields that every example has in the config's own spelling, a pair's prompt excepted."""
        names = {
            "chat": ("messages_field",),
            "prompt_completion": ("prompt_field", "completion_field"),
            "text": ("text_field",),
            "preference": ("chosen_field", "rejected_field"),
        }
        return {getattr(self, name) for name in names[self.format]}

    def reads_as(self, example_format: str) -> dict[str, Any]:
        """The settings, changed ones alone, that say how examples of a format become tokens and masks.

        Args:
            example_format: of examples of other files; one that no section can have reads no setting.
        """
        names = [name for name, formats in _READ_BY.items() if example_format in formats and name != "packing"]
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value != type(self).model_fields[name].default}

    @model_validator(mode="after")
    def _check_format(self) -> "ExampleConfig":
        for name, formats in _READ_BY.items():
            value = getattr(self, name)
            # Not whether it was set: a run's own config spells out every default.
            if self.format not in formats and value != type(self).model_fields[name].default:
                raise ValueError(f"{name} holds for format: {' and '.join(formats)} but format is {self.format}")
        if self.format == "preference" and self.truncate == "split":
            raise ValueError("truncate must be error or drop with format: preference but got split")
        return self
