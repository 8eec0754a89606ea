"""The tokenizer in a GGUF file's metadata, as the files of a Hugging Face folder."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
import json
from typing import Any, Final, NamedTuple

from forge_mlx.data.hub_tokenizer import HubTokenizer
from forge_mlx.hub.errors import HubError
from forge_mlx.hub.gguf_file import GGUFFile
from forge_mlx.hub.gguf_metadata import Metadata
from forge_mlx.hub.gguf_splits import SPLITS, pre_tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""What a token is, as `tokenizer.ggml.token_type` has it."""

SPACE: Final = "\u2581"
_ROLES: Final = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
# Tokens that end a turn or a message, which stop a generation as the end token does.
_ENDS: Final = ("eos", "eot", "eom")


class _Vocabulary(NamedTuple):
    """What the metadata lists.

    Attributes:
        tokens: Names by id.
        kinds: NORMAL ... BYTE by id.
        roles: bos_token ... -> its id.
        begins: Whether a text begins with bos_token.
        ends: Whether a text ends with eos_token.
    """

    tokens: list[str]
    kinds: list[int]
    roles: dict[str, int]
    begins: bool
    ends: bool


def read_tokenizer(file: GGUFFile) -> HubTokenizer:
    """The tokenizer that a file's metadata describes.

    Args:
        file: The header.

    Raises:
        HubError: There is none, or of a kind that is not known.
    """
    try:
        return HubTokenizer(tokenizer_files(file), str(file.path))
    except HubError:
        raise
    except ValueError as error:
        raise HubError(f"{file.path}: {str(error).rstrip('.')}.") from error


def tokenizer_files(file: GGUFFile) -> dict[str, bytes]:
    """`tokenizer.json`, `tokenizer_config.json` and `generation_config.json` of a file's metadata.

    Ids are those of llama.cpp, where each score of a SentencePiece model is there once; Qwen's text is brought into
    Unicode's form C, as in its Hugging Face folder, which llama.cpp leaves out.

    Args:
        file: The header.

    Raises:
        HubError: There is no tokenizer, or one of a kind that is not known.
    """
    metadata = Metadata(file)
    model = metadata.text("tokenizer.ggml.model")
    if model not in ("gpt2", "llama"):
        raise HubError(f"{file.path}: tokenizer.ggml.model must be gpt2 or llama but got {model!r}.")
    if model == "gpt2":
        vocabulary, content = _byte_level(file, metadata)
    else:
        vocabulary, content = _sentencepiece(file, metadata)
    content = {"version": "1.0", "truncation": None, "padding": None, **content}
    content["added_tokens"] = _added(vocabulary)
    content["post_processor"] = _around(vocabulary)
    return {
        "tokenizer.json": _json(content),
        "tokenizer_config.json": _json(_settings(metadata, vocabulary)),
        "generation_config.json": _json(_generation(metadata, vocabulary)),
    }


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()


def _read_vocabulary(file: GGUFFile, metadata: Metadata, *, begins: bool) -> _Vocabulary:
    tokens = metadata.texts("tokenizer.ggml.tokens")
    if not tokens:
        raise HubError(f"{file.path}: tokenizer.ggml.tokens must be there but is not: the file has no tokenizer.")
    numbers = metadata.numbers("tokenizer.ggml.token_type")
    kinds = [NORMAL] * len(tokens) if numbers is None else [int(kind) for kind in numbers]
    if len(kinds) != len(tokens):
        raise HubError(
            f"{file.path}: tokenizer.ggml.token_type must have {len(tokens)} values, one a token, but has {len(kinds)}."
        )
    roles = {}
    for role, name in _ROLES.items():
        key = f"tokenizer.ggml.{name}_token_id"
        if metadata.has(key):
            roles[role] = metadata.integer(key)
            if not 0 <= roles[role] < len(tokens):
                raise HubError(f"{file.path}: {key} must be in 0 ... {len(tokens) - 1} but got {roles[role]}.")
    _require_distinct(file, tokens)
    return _Vocabulary(
        tokens,
        kinds,
        roles,
        metadata.flag("tokenizer.ggml.add_bos_token", begins) and "bos_token" in roles,
        metadata.flag("tokenizer.ggml.add_eos_token", False) and "eos_token" in roles,
    )


def _require_distinct(file: GGUFFile, tokens: Sequence[str]) -> None:
    if len(set(tokens)) < len(tokens):
        first = next(token for token, count in Counter(tokens).items() if count > 1)
        raise HubError(f"{file.path}: tokenizer.ggml.tokens must be distinct but {first!r} is there twice.")


def _byte_level(file: GGUFFile, metadata: Metadata) -> tuple[_Vocabulary, dict[str, Any]]:
    name = metadata.text("tokenizer.ggml.pre", "default")
    if name not in SPLITS:
        raise HubError(
            f"{file.path}: tokenizer.ggml.pre must be one of {', '.join(SPLITS)} but got {name!r}. Open the model's "
            "Hugging Face folder."
        )
    splits = SPLITS[name]
    vocabulary = _read_vocabulary(file, metadata, begins=splits.begins)
    ids = {token: number for number, token in enumerate(vocabulary.tokens)}
    merges = []
    for merge in metadata.texts("tokenizer.ggml.merges"):
        left, space, right = merge.partition(" ")
        if not space or not {left, right, left + right} <= ids.keys():
            raise HubError(f"{file.path}: tokenizer.ggml.merges must join two tokens to a third but got {merge!r}.")
        merges.append([left, right])
    content = {
        "normalizer": {"type": "NFC"} if splits.normalizes else None,
        "pre_tokenizer": pre_tokenizer(splits),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _bpe(ids, merges, ignore_merges=splits.ignore_merges),
    }
    return vocabulary, content


def _sentencepiece(file: GGUFFile, metadata: Metadata) -> tuple[_Vocabulary, dict[str, Any]]:
    vocabulary = _read_vocabulary(file, metadata, begins=True)
    scores = metadata.numbers("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(vocabulary.tokens):
        raise HubError(
            f"{file.path}: tokenizer.ggml.scores must have {len(vocabulary.tokens)} values, one a token, but has "
            f"{0 if scores is None else len(scores)}."
        )
    ids = {token: number for number, token in enumerate(vocabulary.tokens)}
    normal = {token: number for token, number in ids.items() if vocabulary.kinds[number] == NORMAL}
    ranked = sorted(normal, key=lambda token: (-scores[normal[token]], normal[token]))
    prefix = metadata.flag("tokenizer.ggml.add_space_prefix", True)
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    steps: list[dict[str, Any]] = [back, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = vocabulary.roles.get("unk_token")
    content = {
        "normalizer": {"type": "Sequence", "normalizers": [*_prefix(prefix), replace]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": steps},
        "model": _bpe(
            ids,
            list(_merges(ranked, normal)),
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=BYTE in vocabulary.kinds,
        ),
    }
    return vocabulary, content


def _prefix(asked: bool) -> list[dict[str, Any]]:
    return [{"type": "Prepend", "prepend": SPACE}] if asked else []


def _merges(ranked: Sequence[str], ids: Mapping[str, int]) -> Iterator[list[str]]:
    """Every pair of tokens that spells a token, in the order in which SentencePiece would join them."""
    for token in ranked:
        splits = ((token[:at], token[at:]) for at in range(1, len(token)))
        yield from sorted(([left, right] for left, right in splits if left in ids and right in ids), key=_first(ids))


def _first(ids: Mapping[str, int]) -> Any:
    return lambda pair: (ids[pair[0]], ids[pair[1]])


def _bpe(ids: Mapping[str, int], merges: list[list[str]], **options: Any) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        **options,
        "vocab": dict(ids),
        "merges": merges,
    }


def _added(vocabulary: _Vocabulary) -> list[dict[str, Any]]:
    """Tokens that are found in a text before anything else: control tokens, and words that users defined."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    special = set(vocabulary.roles.values())
    return [
        {"id": number, "content": token, **flags, "special": kind != USER_DEFINED or number in special}
        for number, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True))
        if kind in (UNKNOWN, CONTROL, USER_DEFINED) or number in special
    ]


def _around(vocabulary: _Vocabulary) -> dict[str, Any] | None:
    """What puts bos_token before a text and eos_token behind it."""
    before = ["bos_token"] if vocabulary.begins else []
    behind = ["eos_token"] if vocabulary.ends else []
    if not before and not behind:
        return None
    names = {role: vocabulary.tokens[vocabulary.roles[role]] for role in before + behind}
    token = {role: {"SpecialToken": {"id": name, "type_id": 0}} for role, name in names.items()}

    def text(name: str) -> list[dict[str, Any]]:
        inner = {"Sequence": {"id": name, "type_id": 0}}
        return [*(token[role] for role in before), inner, *(token[role] for role in behind)]

    return {
        "type": "TemplateProcessing",
        "single": text("A"),
        "pair": text("A") + text("B"),
        "special_tokens": {
            name: {"id": name, "ids": [vocabulary.roles[role]], "tokens": [name]} for role, name in names.items()
        },
    }


def _settings(metadata: Metadata, vocabulary: _Vocabulary) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": vocabulary.begins,
        "add_eos_token": vocabulary.ends,
        **{role: vocabulary.tokens[number] for role, number in vocabulary.roles.items()},
    }
    if metadata.has("tokenizer.chat_template"):
        settings["chat_template"] = metadata.text("tokenizer.chat_template")
    return settings


def _generation(metadata: Metadata, vocabulary: _Vocabulary) -> dict[str, Any]:
    ends = [f"tokenizer.ggml.{name}_token_id" for name in _ENDS]
    found = [metadata.integer(key) for key in ends if metadata.has(key)]
    known = [number for number in dict.fromkeys(found) if 0 <= number < len(vocabulary.tokens)]
    generation: dict[str, Any] = {"eos_token_id": known[0] if len(known) == 1 else known}
    for role, name in (("bos_token", "bos_token_id"), ("pad_token", "pad_token_id")):
        if role in vocabulary.roles:
            generation[name] = vocabulary.roles[role]
    return generation
