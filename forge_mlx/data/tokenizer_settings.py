"""What the files of a Hugging Face tokenizer say: tokens added late, those that begin and end a text, the template."""

from collections.abc import Iterable, Mapping
import json
from typing import Any, Final

from forge_mlx.data.late_tokens import ROLES, add_listed, add_named, named_specials, tokens_with_ids
from tokenizers import Tokenizer

TIKTOKEN: Final = "tiktoken.model"
"""A vocabulary that code of the model's own reads; no `tokenizer.json` can be made of it without that code."""
TEMPLATE_FILE: Final = "chat_template.jinja"
DEFAULT_TEMPLATE: Final = "default"
_ID_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")


def json_file(files: Mapping[str, bytes], file: str, name: str) -> dict[str, Any]:
    """The JSON object in a file; an empty one without the file.

    Raises:
        ValueError: the file holds something else.
    """
    try:
        content = json.loads(files.get(file, b"{}"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"[hub_tokenizer] {file} of {name} must be JSON but got: {error}.") from error
    if not isinstance(content, dict):
        raise ValueError(f"[hub_tokenizer] {file} of {name} must be a JSON object but got {type(content).__name__}.")
    return content


def generation_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a `generation_config.json` would say of tokens, by a model's `config.json`; empty where that names none.

    Older folders have only the latter, and transformers and mlx-lm take its end tokens there.
    """
    return {key: config[key] for key in _ID_KEYS if key in config and _are_ids(config[key])}


def _are_ids(value: object) -> bool:
    return all(type(each) is int for each in (value if isinstance(value, list) else [value]))


def load_backend(
    files: Mapping[str, bytes], config: Mapping[str, Any], special: Mapping[str, Any], name: str
) -> Tokenizer:
    """The tokenizer of `tokenizer.json` with the tokens that the other files add to it.

    Raises:
        ValueError: there is no such file, it is broken, or a token's id is not the one that the files say.
    """
    if "tokenizer.json" not in files:
        raise ValueError(f"[hub_tokenizer] {name} must have a tokenizer.json but has {_instead(files)}.")
    declared = json_file(files, "tokenizer.json", name)
    try:
        backend = Tokenizer.from_buffer(files["tokenizer.json"])
    except ValueError as error:
        raise ValueError(f"[hub_tokenizer] tokenizer.json of {name} must be a tokenizer but got: {error}.") from error
    backend.no_truncation()
    backend.no_padding()
    expected = {entry["id"]: entry["content"] for entry in declared.get("added_tokens") or []}
    for token, entry in tokens_with_ids(config, name).items():
        if token not in expected:
            backend.add_tokens([entry])
            expected[token] = entry.content
    is_older = "added_tokens_decoder" not in config
    # Where the settings list tokens with their ids, transformers reads neither of the older files.
    older = special if is_older else {}
    if is_older:
        listed = json_file(files, "added_tokens.json", name)
        expected |= add_listed(backend, listed, named_specials(config, older, name), name)
    # The library numbers added tokens anew where their ids leave a gap behind the vocabulary.
    for token, text in expected.items():
        if (found := backend.token_to_id(text)) != token:
            raise ValueError(
                f"[hub_tokenizer] the added token {text!r} of {name} must get the id {token} that its files say but "
                f"gets {found}. Repair the files: ids of added tokens must follow on the vocabulary without a gap."
            )
    add_named(backend, config, older, name)
    return backend


def _instead(files: Mapping[str, bytes]) -> str:
    """What a folder has instead of a tokenizer.json, and the way out."""
    if TIKTOKEN in files:
        return (
            f"only {TIKTOKEN}, which code of the model's own reads, and transformers writes none of it. Take the "
            "tokenizer.json that others made of it, such as that of a conversion of the model on the hub"
        )
    others = [file for file in ("tokenizer.model", "vocab.json") if file in files]
    return (
        f"{f'only {others[0]}' if others else 'none'}. Write one with transformers: "
        "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
    )


def special_names(config: Mapping[str, Any], special: Mapping[str, Any]) -> dict[str, str]:
    """`eos_token` and the like -> the token's text, by the tokenizer's settings, else by `special_tokens_map.json`."""
    names: dict[str, str] = {}
    for role in ROLES:
        for source in (config, special):
            value = source.get(role)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                names.setdefault(role, text)
    return names


def mark_special(backend: Tokenizer, names: Iterable[str]) -> None:
    """A token of the vocabulary that the settings name is special, though `tokenizer.json` does not say so."""
    known = {entry.content for entry in backend.get_added_tokens_decoder().values() if entry.special}
    backend.add_special_tokens([text for text in names if text not in known and backend.token_to_id(text) is not None])


def end_ids(backend: Tokenizer, eos: str | None, generation: Mapping[str, Any], name: str) -> list[int]:
    """The end tokens: the one that is named `eos_token`, then those of `generation_config.json`.

    Raises:
        ValueError: there are none, or the first is no token.
    """
    listed = generation.get("eos_token_id")
    ids = [token for token in (listed if isinstance(listed, list) else [listed]) if isinstance(token, int)]
    if eos is not None and (token := backend.token_to_id(eos)) is not None:
        ids.insert(0, token)
    if not ids or backend.id_to_token(ids[0]) is None:
        named = f"eos_token {eos!r}, which is no token" if eos is not None else "no eos_token"
        listed_ids = f" and eos_token_id {listed}, which is none" if ids else ""
        raise ValueError(
            f"[hub_tokenizer] {name} must name its end token but got {named}{listed_ids}. "
            "Set eos_token in tokenizer_config.json."
        )
    return ids


def begin_ids(backend: Tokenizer) -> list[int]:
    """What `tokenizer.json` puts before a text. Beside one, `add_bos_token` has no say in transformers either."""
    encoded = backend.encode("a", add_special_tokens=True)
    count = next((at for at, special in enumerate(encoded.special_tokens_mask) if not special), 0)
    return list(encoded.ids[:count])


def find_templates(files: Mapping[str, bytes], config: Mapping[str, Any], name: str) -> dict[str, str]:
    """Name -> chat template, in transformers' order: a file of its own, the settings, the processor's file.

    Raises:
        ValueError: the first is not UTF-8, or the last is no JSON object.
    """
    if TEMPLATE_FILE in files:
        try:
            return {DEFAULT_TEMPLATE: files[TEMPLATE_FILE].decode()}
        except UnicodeDecodeError as error:
            raise ValueError(f"[hub_tokenizer] {TEMPLATE_FILE} of {name} must be UTF-8 but is not.") from error
    of_processor = json_file(files, "chat_template.json", name).get("chat_template")
    said = config.get("chat_template")
    return _by_name(of_processor if said is None else said)


def _by_name(said: object) -> dict[str, str]:
    if isinstance(said, str):
        return {DEFAULT_TEMPLATE: said}
    if isinstance(said, list):
        said = {each.get("name"): each.get("template") for each in said if isinstance(each, dict)}
    named = said.items() if isinstance(said, dict) else ()
    return {key: source for key, source in named if isinstance(key, str) and isinstance(source, str)}
