"""How byte-level BPE cuts a text into words first: llama.cpp's name for each way (`tokenizer.ggml.pre`)."""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple


class Splits(NamedTuple):
    """A way to cut.

    Attributes:
        patterns: Regular expressions; each cuts out its matches of what those before it left together.
        ignore_merges: Whether a word that is a token stays whole, whatever its merges say.
        normalizes: Whether the text is brought into Unicode's form C first.
        begins: Whether the text begins with `bos_token` where the file does not say it.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    normalizes: bool = False
    begins: bool = False


_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT: Final = r"\p{N}"
_LLAMA3: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2: Final = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_OF_GPT2: Final = Splits((_GPT2,))
_OF_DIGITS: Final = Splits((_DIGIT, _GPT2))
_OF_LLAMA3: Final = Splits((_LLAMA3,), ignore_merges=True, begins=True)
_OF_QWEN2: Final = Splits((_QWEN2,), normalizes=True)

SPLITS: Final[Mapping[str, Splits]] = {
    "gpt-2": _OF_GPT2,
    "smollm": _OF_DIGITS,
    "llama-bpe": _OF_LLAMA3,
    "qwen2": _OF_QWEN2,
    "tekken": Splits((_TEKKEN,), ignore_merges=True),
    **dict.fromkeys(("mpt", "olmo", "phi-2", "jina-v2-code", "roberta-bpe"), _OF_GPT2),
    **dict.fromkeys(("starcoder", "refact", "command-r", "codeshell"), _OF_DIGITS),
    **dict.fromkeys(("llama3", "llama-v3", "pixtral", "falcon3"), _OF_LLAMA3),
    **dict.fromkeys(("deepseek-r1-qwen", "megrez"), _OF_QWEN2),
    # What llama.cpp does for files from before the key, which it calls wrong for all of them.
    "default": Splits((r"[\p{P}\$\+<=>\^~\|]+", _GPT2.removesuffix(r"|\s+"), r"\p{N}+", "[0-9][0-9][0-9]")),
}
"""The ways that are known, the first of several names of one way the one that is written."""


def pre_tokenizer(splits: Splits) -> dict[str, Any]:
    """The part of a tokenizer.json that cuts so, and spells bytes as characters.

    Args:
        splits: The way.
    """
    cuts = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in splits.patterns
    ]
    spelling = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [*cuts, spelling]}


def name_of(tokenizer: Mapping[str, Any]) -> str | None:
    """llama.cpp's name for how a tokenizer.json cuts; None where it has none.

    Args:
        tokenizer: A tokenizer.json of byte-level BPE.
    """
    patterns = _patterns(tokenizer.get("pre_tokenizer"))
    model = tokenizer.get("model", {})
    normalizer = tokenizer.get("normalizer")
    if patterns is None or (normalizer is not None and normalizer != {"type": "NFC"}):
        return None
    for name, splits in SPLITS.items():
        same = splits.patterns == patterns and splits.ignore_merges == bool(model.get("ignore_merges"))
        if same and splits.normalizes == (normalizer is not None):
            return name
    return None


def _patterns(step: Any) -> tuple[str, ...] | None:
    """The regular expressions of a pre-tokenizer; None if it does something else too."""
    kind = step.get("type") if isinstance(step, Mapping) else None
    if kind == "Sequence":
        found = [_patterns(each) for each in step["pretokenizers"]]
        return None if None in found else tuple(pattern for each in found if each for pattern in each)
    if kind == "ByteLevel" and not step.get("add_prefix_space"):
        return (_GPT2,) if step.get("use_regex", True) else ()
    if kind == "Digits" and step.get("individual_digits"):
        return (_DIGIT,)
    if kind == "Split" and step.get("behavior") == "Isolated" and not step.get("invert"):
        pattern = step.get("pattern", {}).get("Regex")
        return None if pattern is None else (pattern,)
    return None
