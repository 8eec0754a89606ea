"""Tokens that a tokenizer's settings name and its `tokenizer.json` lacks, with the ids that transformers gives them."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer

ROLES: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Keys of a tokenizer's settings that name its special tokens, in the order in which new ones get their ids."""
_END: Final = "eos_token"
_LISTS: Final = ("extra_special_tokens", "additional_special_tokens")


def tokens_with_ids(config: Mapping[str, Any], name: str) -> dict[int, AddedToken]:
    """`added_tokens_decoder` of `tokenizer_config.json`: id -> token, in the order of the ids.

    Raises:
        ValueError: it is something else.
    """
    try:
        listed = {int(token): dict(entry) for token, entry in (config.get("added_tokens_decoder") or {}).items()}
        return {
            token: AddedToken(**{key: value for key, value in listed[token].items() if not key.startswith("_")})
            for token in sorted(listed)
        }
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"[hub_tokenizer] added_tokens_decoder in tokenizer_config.json of {name} must map ids to tokens but got: "
            f"{error}."
        ) from error


def add_listed(backend: Tokenizer, listed: Mapping[str, Any], specials: Collection[str], name: str) -> dict[int, str]:
    """Add the tokens of an `added_tokens.json`, which older folders have.

    Args:
        backend: changed in place.
        listed: text -> id.
        specials: texts of special tokens.
        name: how messages call the tokenizer.

    Returns:
        Id -> text of those that are new. Of others the vocabulary's id holds, as in transformers.

    Raises:
        ValueError: an id is no integer, or a text is none.
    """
    known = {entry.content for entry in backend.get_added_tokens_decoder().values()}
    for text, token in listed.items():
        if type(token) is not int:
            raise ValueError(
                f"[hub_tokenizer] added_tokens.json of {name} must map tokens to ids but {text!r} has {token!r}."
            )
    new = {}
    for text, token in sorted(listed.items(), key=lambda item: int(item[1])):
        if text in known:
            continue
        is_special = text in specials
        entry = _token({"content": text, "normalized": not is_special}, "added_tokens.json", name, special=is_special)
        if backend.token_to_id(text) is None:
            new[token] = text
        backend.add_tokens([entry])
    return new


def add_named(backend: Tokenizer, config: Mapping[str, Any], special: Mapping[str, Any], name: str) -> None:
    """Add the special tokens that are named without an id: each gets the next one.

    An end token that is none of the vocabulary is never added: no model was trained to say it.

    Args:
        backend: changed in place.
        config: `tokenizer_config.json`.
        special: `special_tokens_map.json`, empty where transformers does not read it.
        name: how messages call the tokenizer.

    Raises:
        ValueError: a name is none, or an id depends on that of an end token that does not exist.
    """
    known = {entry.content for entry in backend.get_added_tokens_decoder().values()}
    lacks_end = False
    for key, entry in _named(config, special, name):
        if entry.content in known:
            continue
        if key == _END and backend.token_to_id(entry.content) is None:
            lacks_end = True
            continue
        if lacks_end and backend.token_to_id(entry.content) is None:
            raise ValueError(
                f"[hub_tokenizer] eos_token of {name} must be a token, as {entry.content!r} gets the id behind it, but "
                "is none. Set eos_token in tokenizer_config.json."
            )
        backend.add_tokens([entry])
        known.add(entry.content)


def named_specials(config: Mapping[str, Any], special: Mapping[str, Any], name: str) -> set[str]:
    """The texts of all special tokens that the settings name.

    Args:
        config: `tokenizer_config.json`.
        special: `special_tokens_map.json`, empty where transformers does not read it.
        name: how messages call the tokenizer.

    Raises:
        ValueError: a name is none.
    """
    return {entry.content for _, entry in _named(config, special, name)}


def _named(config: Mapping[str, Any], special: Mapping[str, Any], name: str) -> Iterator[tuple[str, AddedToken]]:
    """Key and token, in transformers' order: the roles, the model's own roles, the lists."""
    for role in ROLES:
        value = config.get(role) or special.get(role)
        if _is_token(value):
            yield role, _token(value, role, name)
    for settings in (config, special):
        for key, value in settings.items():
            if key.endswith("_token") and key not in ROLES and _is_token(value):
                yield key, _token(value, key, name)
    extra, other = _extra(config), _extra(special)
    # The newer key adds to what the settings have, the older one stands in where they have nothing.
    adds = not extra or any(key == _LISTS[0] for key, _ in other)
    for list_key, values in [*extra, *other] if adds else extra:
        if not isinstance(values, (list, dict)):
            raise ValueError(
                f"[hub_tokenizer] {list_key} of {name} must be a list of tokens, or an object of them, but got "
                f"{type(values).__name__}."
            )
        for value in values.values() if isinstance(values, dict) else values:
            yield list_key, _token(value, list_key, name)


def _extra(settings: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The key that counts, with its value; an object under the newer one leaves the older one's list in force."""
    found = [(key, settings[key]) for key in _LISTS if settings.get(key)]
    return found if found and isinstance(found[0][1], dict) else found[:1]


def _is_token(value: object) -> bool:
    return isinstance(value.get("content") if isinstance(value, dict) else value, str)


def _token(value: Any, key: str, name: str, *, special: bool = True) -> AddedToken:
    """A token of its text, or of an object that also says how it is found in texts."""
    fields = value if isinstance(value, dict) else {"content": value}
    flags = {flag: fields[flag] for flag in ("lstrip", "rstrip", "normalized", "single_word") if flag in fields}
    try:
        fields["content"].encode()
        return AddedToken(fields["content"], special=special, **flags)
    except (AttributeError, KeyError, TypeError, UnicodeEncodeError) as error:
        raise ValueError(
            f"[hub_tokenizer] {key} of {name} must name tokens by their texts but got {str(value)[:80]!r}."
        ) from error
