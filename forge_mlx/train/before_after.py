"""What a fine-tuned model answered before training and after, side by side, for the report."""

from typing import Any, NamedTuple

from forge_mlx._text import count
from forge_mlx.train.run_log import Run


class Answers(NamedTuple):
    """The answers to one prompt.

    Attributes:
        prompt: what was asked.
        expected: what the data have there; empty: nothing in particular.
        before: at step 0.
        after: at the last step that has samples.
        step: this last step.
    """

    prompt: str
    expected: str
    before: str
    after: str
    step: int


def before_and_after(run: Run) -> list[Answers]:
    """For each prompt that was asked at step 0 and later too, both answers.

    Args:
        run: of any kind; one that began with a new model has no sample at step 0.
    """
    samples = run.of("sample")
    first = {_text(record, "prompt"): record for record in samples if record["step"] == 0}
    later = [record["step"] for record in samples if record["step"] > 0]
    if not (first and later):
        return []
    found, last = [], max(later)
    for record in samples:
        prompt = _text(record, "prompt")
        if record["step"] == last and prompt in first:
            before = _text(first[prompt], "text")
            found.append(Answers(prompt, _text(record, "expected"), before, _text(record, "text"), last))
    return found


def shown_answer(text: str) -> str:
    """An answer as a reader sees it: one without a visible character in words."""
    if text.strip():
        return text.strip("\n")
    return f"({count(len(text), 'blank character')})" if text else "(nothing)"


def _text(record: dict[str, Any], name: str) -> str:
    return str(record.get(name) or "")
