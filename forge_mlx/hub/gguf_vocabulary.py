"""A tokenizer as the metadata of a GGUF file: what `gguf_tokenizer` reads."""

from collections.abc import Mapping, Sequence
import json
import re
from typing import Any, Final

from forge_mlx.data.hub_tokenizer import HubTokenizer
from forge_mlx.data.model_proto import ROLES, read_algorithm, read_pieces
from forge_mlx.data.text_tokenizer import TextTokenizer
from forge_mlx.data.tokenizer import Tokenizer
from forge_mlx.hub.errors import HubError
from forge_mlx.hub.gguf_splits import name_of
from forge_mlx.hub.gguf_tokenizer import BYTE, CONTROL, NORMAL, SPACE, UNKNOWN, UNUSED, USER_DEFINED

_BYTE_NAME: Final = re.compile("<0x[0-9A-F]{2}>")
_KINDS: Final = {role: number for number, role in ROLES.items()}
# Below the score of every piece that merges make: a piece of one character is never looked up by it.
_NO_MERGE: Final = -1e6
_OF_TOKENS: Final = (".tokens", ".token_type", ".scores")
_WAY_OUT: Final = "Export a Hugging Face folder."


def tokenizer_keys(tokenizer: TextTokenizer, vocab_size: int, *, texts_begin_with_end: bool = False) -> dict[str, Any]:
    """The metadata that says how a tokenizer cuts, and its chat template.

    A `U+2581` of the text is a space to llama.cpp, which SentencePiece's own models share.

    Args:
        tokenizer: A `HubTokenizer`, or one of BPE that forge_mlx trained.
        vocab_size: The model's; ids that the tokenizer has not become tokens that no text has.
        texts_begin_with_end: Whether the end token stood before every text that the model was trained on; of a
            `HubTokenizer`, its files say it.

    Raises:
        HubError: llama.cpp would cut texts otherwise, or cannot open such a tokenizer.
    """
    needed = tokenizer.plain_vocab_size if isinstance(tokenizer, HubTokenizer) else tokenizer.vocab_size
    if needed > vocab_size:
        raise HubError(
            f"[write_gguf] the tokenizer must be the model's, of at most {vocab_size} tokens, but has "
            f"{needed}. Give the one that the model was trained with."
        )
    if isinstance(tokenizer, HubTokenizer):
        keys = _of_hub(tokenizer)
    elif isinstance(tokenizer, Tokenizer):
        keys = _of_pieces(tokenizer, texts_begin_with_end)
    else:
        raise HubError(
            f"[write_gguf] the tokenizer must be one that can be written but is a {type(tokenizer).__name__}."
        )
    keys = _without_rowless(keys, vocab_size)
    missing = range(len(keys["tokenizer.ggml.tokens"]), vocab_size)
    keys["tokenizer.ggml.tokens"] += [f"[PAD{number}]" for number in missing]
    keys["tokenizer.ggml.token_type"] += [UNUSED] * len(missing)
    if "tokenizer.ggml.scores" in keys:
        keys["tokenizer.ggml.scores"] += [_NO_MERGE] * len(missing)
    return keys


def _without_rowless(keys: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """The keys without special tokens that have no row of the table, such as a padding that was named later."""
    for role in ("bos", "eos"):
        number = keys.get(f"tokenizer.ggml.{role}_token_id", 0)
        if number >= vocab_size:
            raise HubError(
                f"[write_gguf] {role}_token must have an embedding but its id is {number}, and the model has "
                f"{vocab_size}. {_WAY_OUT}"
            )
    cut = {key: value[:vocab_size] if key.endswith(_OF_TOKENS) else value for key, value in keys.items()}
    return {key: value for key, value in cut.items() if not key.endswith("_token_id") or value < vocab_size}


def _of_pieces(tokenizer: Tokenizer, texts_begin_with_end: bool) -> dict[str, Any]:
    algorithm = read_algorithm(tokenizer.model)
    if algorithm != "bpe":
        raise HubError(f"[write_gguf] the tokenizer must be a bpe model but got {algorithm}. {_WAY_OUT}")
    pieces = read_pieces(tokenizer.model)
    begins = {"tokenizer.ggml.bos_token_id": tokenizer.end_id} if texts_begin_with_end else {}
    unknown = next((token for token, piece in enumerate(pieces) if piece.role == "unknown"), None)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [piece.text for piece in pieces],
        "tokenizer.ggml.scores": [float(piece.score) for piece in pieces],
        "tokenizer.ggml.token_type": [_KINDS[piece.role] for piece in pieces],
        "tokenizer.ggml.eos_token_id": tokenizer.end_id,
        **begins,
        **({} if unknown is None else {"tokenizer.ggml.unknown_token_id": unknown}),
        "tokenizer.ggml.add_bos_token": texts_begin_with_end,
        "tokenizer.ggml.add_eos_token": False,
        "tokenizer.ggml.add_space_prefix": False,
    }


def _of_hub(tokenizer: HubTokenizer) -> dict[str, Any]:
    content = json.loads(tokenizer.files["tokenizer.json"])
    model = content.get("model", {})
    if model.get("type", "BPE") != "BPE":
        raise HubError(f"[write_gguf] the tokenizer must be BPE but {tokenizer.name} is {model['type']}. {_WAY_OUT}")
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    tokens, kinds = _tokens(tokenizer, content)
    if model.get("byte_fallback"):
        keys = _sentencepiece(tokenizer, content, tokens, kinds, merges)
    else:
        keys = _byte_level(tokenizer, content, merges)
    return {
        **keys,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        **_roles(tokenizer),
        **({} if tokenizer.chat_template is None else {"tokenizer.chat_template": tokenizer.chat_template}),
    }


def _tokens(tokenizer: HubTokenizer, content: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    """Names and kinds by id."""
    model = content["model"]
    unknown = model.get("unk_token")
    tokens, kinds = [], []
    for number in range(tokenizer.vocab_size):
        name = tokenizer.token_name(number)
        if not name:
            name, kind = f"[PAD{number}]", UNUSED
        elif name == unknown and model.get("byte_fallback"):
            kind = UNKNOWN
        elif number in tokenizer.special_ids:
            kind = CONTROL
        elif number in tokenizer.added_ids:
            kind = USER_DEFINED
        else:
            kind = BYTE if model.get("byte_fallback") and _BYTE_NAME.fullmatch(name) else NORMAL
        tokens.append(name)
        kinds.append(kind)
    return tokens, kinds


def _roles(tokenizer: HubTokenizer) -> dict[str, Any]:
    if tokenizer.begin_ids not in ([], [tokenizer.bos_id]):
        raise HubError(
            f"[write_gguf] a text must begin with bos_token or with nothing but {tokenizer.name} puts the tokens "
            f"{tokenizer.begin_ids} before it. {_WAY_OUT}"
        )
    keys: dict[str, Any] = {"tokenizer.ggml.eos_token_id": tokenizer.end_id}
    for role, name in (("bos_token", "bos"), ("unk_token", "unknown"), ("pad_token", "padding")):
        number = tokenizer.token_id(tokenizer.special_names.get(role, ""))
        if number is not None:
            keys[f"tokenizer.ggml.{name}_token_id"] = number
    others = sorted(tokenizer.stop_ids - {tokenizer.end_id})
    if others:
        keys["tokenizer.ggml.eot_token_id"] = others[-1]
    return {
        **keys,
        "tokenizer.ggml.add_bos_token": bool(tokenizer.begin_ids),
        "tokenizer.ggml.add_eos_token": False,
    }


def _byte_level(tokenizer: HubTokenizer, content: Mapping[str, Any], merges: list[list[str]]) -> dict[str, Any]:
    name = name_of(content)
    if name is None:
        raise HubError(
            f"[write_gguf] the tokenizer must cut texts in a way that llama.cpp has a name for but {tokenizer.name} "
            f"has another: pre_tokenizer {json.dumps(content.get('pre_tokenizer'))[:200]}. {_WAY_OUT}"
        )
    if not merges:
        raise HubError(
            f"[write_gguf] the tokenizer must have merges, without which llama.cpp opens no byte-level one, but "
            f"{tokenizer.name} has none. {_WAY_OUT}"
        )
    written = [" ".join(pair) for pair in merges]
    return {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": name, "tokenizer.ggml.merges": written}


def _sentencepiece(
    tokenizer: HubTokenizer,
    content: Mapping[str, Any],
    tokens: list[str],
    kinds: Sequence[int],
    merges: list[list[str]],
) -> dict[str, Any]:
    prefix = _space_prefix(content)
    if prefix is None:
        raise HubError(
            f"[write_gguf] the tokenizer must write spaces as SentencePiece does but {tokenizer.name} has the "
            f"normalizer {json.dumps(content.get('normalizer'))[:200]}. {_WAY_OUT}"
        )
    places: dict[str, int] = {}
    for place, (left, right) in enumerate(merges):
        token = left + right
        # SentencePiece joins by what comes out: all pairs that spell one token have one place.
        if token in places and places[token] != place - 1:
            raise HubError(
                f"[write_gguf] merges must be in the order of the tokens that they make but those of {token!r} in "
                f"{tokenizer.name} are not beside each other. {_WAY_OUT}"
            )
        places[token] = place
    scores = [-float(places[token]) if token in places else _NO_MERGE for token in tokens]
    if _spells_spaces(content):
        for number, kind in enumerate(kinds):
            if kind == NORMAL:
                tokens[number] = tokens[number].replace(" ", SPACE)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.add_space_prefix": prefix,
    }


def _spells_spaces(content: Mapping[str, Any]) -> bool:
    """Whether spaces stand in the vocabulary as themselves, as forge_mlx exports its own tokenizers."""
    return content.get("normalizer") is None and content.get("pre_tokenizer") is None


def _space_prefix(content: Mapping[str, Any]) -> bool | None:
    """Whether a text gets a space before it; None for one that is changed in another way."""
    if _spells_spaces(content):
        return False
    normalizer, cut = content.get("normalizer"), content.get("pre_tokenizer")
    steps = normalizer.get("normalizers", [normalizer]) if normalizer else []
    kinds = [step["type"] for step in steps]
    if cut is not None and cut["type"] == "Metaspace" and not kinds and not cut.get("split", True):
        return bool(cut.get("prepend_scheme", "always") != "never")
    replaces = bool(steps) and steps[-1].get("pattern") == {"String": " "} and steps[-1].get("content") == SPACE
    # After the spaces are replaced, a cut at spaces finds none.
    harmless = cut is None or (cut["type"] == "Split" and cut.get("pattern") == {"String": " "})
    if not replaces or not harmless:
        return None
    if kinds == ["Prepend", "Replace"] and steps[0].get("prepend") == SPACE:
        return True
    return False if kinds == ["Replace"] else None
