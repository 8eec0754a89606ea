"""Multiple choice: the answer is the choice that the model finds likeliest behind the question."""

from collections.abc import Callable, Iterable
import math
from typing import Any, Final, NamedTuple

from forge_mlx.data.example_files import Record, field_names, read_records, with_others
from forge_mlx.data.files import SourceFile
from forge_mlx.data.text_tokenizer import TextTokenizer
from forge_mlx.evaluation.rows import Row
from forge_mlx.evaluation.scoring import score
from forge_mlx.models.gpt import GPT
import numpy as np
from numpy.typing import NDArray

_PROMPTS: Final = ("question", "prompt")


class Question(NamedTuple):
    """One question.

    Attributes:
        where: `file:line`, for messages.
        prompt: what stands before a choice.
        choices: at least two.
        answer: which of them is right, from 0.
    """

    where: str
    prompt: str
    choices: list[str]
    answer: int


class EncodedChoices(NamedTuple):
    """The choices of one question as rows.

    Attributes:
        rows: one a choice, whose tokens alone are counted.
        cut: whether the beginning of the prompt was cut off, so that the longest choice fits.
    """

    rows: list[Row]
    cut: bool


class ChoiceScores(NamedTuple):
    """How often the likeliest choice is the right one.

    Attributes:
        correct: bool `[num_questions]` by measure. acc: the choice with the largest ln p; acc_norm: the largest ln p a
            character, and acc_bytes a UTF-8 byte, as lm-evaluation-harness has them; acc_tokens: a token.
        chance: what guessing gives.
    """

    correct: dict[str, NDArray[np.bool_]]
    chance: float

    def accuracy(self, measure: str) -> tuple[float, float | None]:
        """The share of right answers and its standard error, sqrt(p (1 - p) / (n - 1)); None for one question."""
        correct = self.correct[measure]
        share = float(correct.mean())
        return share, math.sqrt(share * (1 - share) / (len(correct) - 1)) if len(correct) > 1 else None

    def as_dict(self) -> dict[str, Any]:
        """The measures by their names, for JSON."""
        found: dict[str, Any] = {"questions": len(self.correct["acc"]), "chance": self.chance}
        for measure in self.correct:
            found[measure], found[f"{measure}_stderr"] = self.accuracy(measure)
        return found


def read_questions(files: Iterable[SourceFile]) -> list[Question]:
    """The questions of files of JSON lines or Parquet: `question` or `prompt`, `choices` and `answer`.

    The answer is the number of the choice from 0, its letter from A, or its text; what is both the text of a choice and
    a letter is the text.

    Args:
        files: what to read.

    Raises:
        ValueError: a file cannot be read, or questions are malformed: the first is described, the others are counted.
    """
    questions, problems = [], list[tuple[str, ValueError]]()
    for file in files:
        for record in read_records(file, "chat", "text"):
            try:
                questions.append(_question(record))
            except ValueError as error:
                problems.append((record.where, error))
    if problems:
        raise ValueError(with_others(str(problems[0][1]), [where for where, _ in problems[1:]]))
    if not questions:
        raise ValueError("[evaluate] the data must hold a question but holds none.")
    return questions


def encode_choices(question: Question, tokenizer: TextTokenizer, begin_ids: list[int], seq_len: int) -> EncodedChoices:
    """One row a choice: what begins a text, the prompt, a space where neither side has one, and the choice.

    As in lm-evaluation-harness, prompt and choice are tokenised together, the tokens beyond the number that the prompt
    has alone are those of the choice, and spaces at the end of the prompt belong to the choice.

    Args:
        question: what to encode.
        tokenizer: the model's.
        begin_ids: tokens that stand before every text. Where there are none and no prompt, it is the end token.
        seq_len: the most inputs of a row.

    Raises:
        ValueError: a choice alone is longer than a row.
    """
    prompt = question.prompt.rstrip()
    begin = begin_ids if begin_ids or prompt else [tokenizer.end_id]
    length = len(tokenizer.encode(prompt))
    rows, cut = [], False
    for number, choice in enumerate(question.choices):
        space = question.prompt[len(prompt) :]
        if prompt and not space and not choice[0].isspace():
            space = " "
        ids = np.array([*begin, *tokenizer.encode(prompt + space + choice)], np.int32)
        first = len(begin) + length
        if not 0 < len(ids) - first <= seq_len:
            raise ValueError(
                f"[evaluate] {question.where}: a choice must have 1 to {seq_len} tokens, which is --seq-len, but "
                f"choice {number} has {len(ids) - first}."
            )
        start = max(0, len(ids) - 1 - seq_len)
        cut = cut or start > 0
        rows.append(Row(ids[start:-1], ids[start + 1 :], np.arange(start + 1, len(ids)) >= first))
    return EncodedChoices(rows, cut)


def score_choices(
    model: GPT,
    questions: list[Question],
    encoded: list[EncodedChoices],
    batch_size: int,
    progress: Callable[[list[Row]], Callable[[int], None]] = lambda _: lambda _: None,
) -> ChoiceScores:
    """Which choice the model finds likeliest, by each measure; of equal ones the first.

    Args:
        model: in evaluation mode.
        questions: at least one.
        encoded: the rows of each.
        batch_size: rows in a forward pass.
        progress: given the rows, it returns what is told how many of them each pass has scored.

    Raises:
        ValueError: as `score`.
    """
    rows = [row for each in encoded for row in each.rows]
    found = score(model, rows, batch_size, progress(rows))
    lengths = {
        "acc": [1.0] * len(rows),
        "acc_norm": [float(len(choice)) for question in questions for choice in question.choices],
        "acc_bytes": [float(len(choice.encode())) for question in questions for choice in question.choices],
        "acc_tokens": [float(row.counted.sum()) for row in rows],
    }
    ends = np.cumsum([len(each.rows) for each in encoded])[:-1]
    answers = [question.answer for question in questions]
    correct = {
        measure: np.array([part.argmax() for part in np.split(found / np.array(length), ends)]) == answers
        for measure, length in lengths.items()
    }
    return ChoiceScores(correct, float(np.mean([1 / len(question.choices) for question in questions])))


def _question(record: Record) -> Question:
    where, content = record.where, record.fields()
    start = f"[evaluate] {where}:"
    prompts = [name for name in _PROMPTS if name in content]
    missing = [name for name in ("choices", "answer") if name not in content]
    if len(prompts) != 1 or missing:
        raise ValueError(
            f"{start} a question must have 'question' or 'prompt', 'choices' and 'answer' but has "
            f"{field_names(content)}."
        )
    prompt, choices = content[prompts[0]], content["choices"]
    if not isinstance(prompt, str):
        raise ValueError(f"{start} {prompts[0]!r} must be text but is {prompt!r}.")
    if not isinstance(choices, list) or len(choices) < 2:
        raise ValueError(f"{start} 'choices' must be a list of two or more texts but is {choices!r}.")
    for number, choice in enumerate(choices):
        if not isinstance(choice, str) or not choice.strip():
            raise ValueError(f"{start} choice {number} must be a text that is not empty but is {choice!r}.")
        if choice in choices[:number]:
            raise ValueError(f"{start} choices must differ but {choices.index(choice)} and {number} are {choice!r}.")
    return Question(where, prompt, choices, _answer(content["answer"], choices, start))


def _answer(value: object, choices: list[str], start: str) -> int:
    """The number of the choice that an answer means."""
    count = len(choices)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < count:
        return value
    if isinstance(value, str):
        if value in choices:
            return choices.index(value)
        if len(value) == 1 and 0 <= ord(value.upper()) - ord("A") < count:
            return ord(value.upper()) - ord("A")
    raise ValueError(
        f"{start} 'answer' must be a number 0 ... {count - 1}, a letter A ... {chr(ord('A') + count - 1)} or the text "
        f"of a choice but is {value!r}."
    )
