"""A SentencePiece BPE tokenizer as the files that transformers and mlx-lm read, with the same ids for every string."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Final

from forge_mlx.data.model_proto import Piece, read_algorithm, read_pieces
from forge_mlx.data.tokenizer import Tokenizer

_SPACE: Final = "\u2581"
_WRITABLE_ROLES: Final = {"normal", "unknown", "control", "byte"}


def tokenizer_files(
    tokenizer: Tokenizer, *, max_seq_len: int, texts_begin_with_end: bool = False
) -> dict[str, dict[str, Any]]:
    """The contents of `tokenizer.json` and `tokenizer_config.json`.

    Spaces stand in the vocabulary as themselves. SentencePiece's U+2581 would need a replacement there and back, which
    cannot tell a space from a U+2581 of the text; here that one goes into byte tokens, as `Tokenizer` has it. A text
    that spells the end token's name is text.

    The ids are those of `Tokenizer.encode`, which cuts a line of over 32,768 characters into blocks first: such a line
    may differ at the cuts. Decoding with `skip_special_tokens` gives `Tokenizer.decode`'s text for ids that stand for
    text; for bytes that are no UTF-8 the number of U+FFFD differs.

    Args:
        tokenizer: a BPE model.
        max_seq_len: the longest text that the model is for, in tokens.
        texts_begin_with_end: whether the end token is to stand before every text, as it did in training. With
            `add_special_tokens`, the default, it does then.

    Returns:
        a name of a file -> its JSON.

    Raises:
        ValueError: the model is not BPE, or has something that a `tokenizer.json` cannot say.
    """
    pieces = read_pieces(tokenizer.model)
    _require_writable(read_algorithm(tokenizer.model), pieces)
    end = pieces[tokenizer.end_id].text
    unknown = next((piece.text for piece in pieces if piece.role == "unknown"), None)
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": token, "content": piece.text, **flags}
            for token, piece in enumerate(pieces)
            if piece.role in ("control", "unknown")
        ],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": _beginning(end, tokenizer.end_id) if texts_begin_with_end else None,
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": _bpe(pieces, unknown),
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end if texts_begin_with_end else None,
        "eos_token": end,
        "unk_token": unknown,
        "model_max_length": max_seq_len,
        "clean_up_tokenization_spaces": False,
        # Without it, a text that spells a special token's name becomes that token.
        "split_special_tokens": True,
    }
    return {"tokenizer.json": content, "tokenizer_config.json": config}


def _beginning(end: str, end_id: int) -> dict[str, Any]:
    """The end token before each text, and before both texts of a pair."""
    token = {"SpecialToken": {"id": end, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "type": "TemplateProcessing",
        "single": [token, first],
        "pair": [token, first, token, second],
        "special_tokens": {end: {"id": end, "ids": [end_id], "tokens": [end]}},
    }


def _bpe(pieces: list[Piece], unknown: str | None) -> dict[str, Any]:
    # No other piece is part of a merge, whatever its name spells.
    ranked = sorted((piece for piece in pieces if piece.role == "normal"), key=lambda piece: -piece.score)
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": True,
        "ignore_merges": False,
        "vocab": {_name(piece): token for token, piece in enumerate(pieces)},
        "merges": [list(pair) for pair in _merges([_name(piece) for piece in ranked])],
    }


def _name(piece: Piece) -> str:
    return piece.text.replace(_SPACE, " ") if piece.role == "normal" else piece.text


def _require_writable(algorithm: str, pieces: list[Piece]) -> None:
    """Raise unless merges of one rank each say what SentencePiece does with these pieces."""
    if algorithm != "bpe":
        raise ValueError(
            f"[tokenizer_files] the tokenizer must be a bpe model, whose merges a tokenizer.json can say, but got "
            f"{algorithm}. Train with data.tokenizer.kind: bpe."
        )
    normal = [piece for piece in pieces if piece.role == "normal"]
    texts = {piece.text for piece in normal}
    merged = [piece.score for piece in normal if len(piece.text) > 1]
    faults = {f"pieces that are {role}": True for role in sorted({piece.role for piece in pieces} - _WRITABLE_ROLES)}
    faults |= {
        "spaces beside U+2581": any(" " in text for text in texts),
        "characters that only longer pieces have": not {char for text in texts for char in text} <= texts,
        "two pieces of one score": len(set(merged)) < len(merged),
        "two pieces of one text": len({_name(piece) for piece in pieces}) < len(pieces),
    }
    found = [fault for fault, present in faults.items() if present]
    if found:
        raise ValueError(
            f"[tokenizer_files] a tokenizer.json must give every text the ids that the tokenizer gives it but the "
            f"model has {' and '.join(found)}. Use a tokenizer that forge_mlx trained."
        )


def _merges(ranked: list[str]) -> Iterator[tuple[str, str]]:
    """The two parts that each piece is made of, in order of rank.

    SentencePiece merges any two neighbours whose concatenation is a piece, the piece of the highest score first; a
    merge list names pairs. Of all pairs that spell a piece only one ever comes up. Where two neighbours make a piece,
    nothing beside them took part in making them, so that the piece's text on its own goes through the same steps; and
    there each step is determined, the last one too.

    Args:
        ranked: the pieces, the first to be merged first.
    """
    rank = {piece: place for place, piece in enumerate(ranked)}
    for piece in ranked:
        pair = _last_pair(piece, rank)
        if pair is not None:
            yield pair


def _last_pair(piece: str, rank: dict[str, int]) -> tuple[str, str] | None:
    """What is merged last when a piece's text stands alone; None for one character, or if other merges prevent it."""
    splits = [(piece[:at], piece[at:]) for at in range(1, len(piece))]
    splits = [pair for pair in splits if pair[0] in rank and pair[1] in rank]
    if len(splits) < 2:
        return splits[0] if splits else None
    parts = list(piece)
    while len(parts) > 2:
        joined = [left + right for left, right in pairwise(parts)]
        known = [(rank[text], at) for at, text in enumerate(joined) if text in rank]
        if not known:
            return None
        _, at = min(known)
        parts[at : at + 2] = [joined[at]]
    return parts[0], parts[1]
