"""A SentencePiece tokenizer that gives every string back unchanged.

SentencePiece on its own does not: its trainer refuses tabs, drops newlines at the end of a line and skips
whole lines with U+2585; its models show a space as U+2581 and so cannot tell the two apart. Here the trainer
sees stand-ins for the whitespace it cannot take, which are then replaced in the model; U+2581 is written in
byte pieces; decoding joins bytes from a table. What is saved is a plain SentencePiece model.
"""

from collections.abc import Iterable, Iterator, Sequence
import hashlib
import io
import os
from pathlib import Path
import re
from typing import Literal

from forge_mlx.data.lines import last_line_start
from forge_mlx.data.model_proto import map_pieces, read_normalizer
from forge_mlx.data.text_tokenizer import require_encodable
import numpy as np
from numpy.typing import NDArray
import sentencepiece

_UNKNOWN, _END = 0, 1
_SPACE = "\u2581"
# Private-use characters of plane 16 stand for whitespace that the trainer would refuse or strip. Where the
# text has these characters itself, the trainer does not see them and they are encoded in bytes.
_STAND_INS = {"\n": "\U0010fff0", "\r": "\U0010fff1", "\t": "\U0010fff2"}
_NOT_TRAINED = re.compile("[\0" + _SPACE + "\u2585" + "".join(_STAND_INS.values()) + "]")
_IN_BYTES = re.compile(f"({_SPACE})")
_LINE = re.compile(r"[^\n]*\n+|[^\n]+")
_TRAIN_LINE = 4096
_BLOCK = 1 << 15
_MAX_PIECE = 16
# Fixed, because the sums of unigram training depend on how the work is divided.
_TRAIN_THREADS = 4


class Tokenizer:
    """Text to token ids and back, without loss for any string that UTF-8 can hold.

    Args:
        model: a serialised SentencePiece model with byte fallback, an end piece and no normalisation.
        name: how messages call the model.

    Attributes:
        vocab_size: number of pieces.
        end_id: the token that ends a document; it decodes to nothing.
        stop_ids: `end_id` alone.
        token_bytes: int32 `[vocab_size]`, the UTF-8 bytes that each token stands for (0 for `end_id`).
        fingerprint: hash of the model.
        model: the serialised model.

    Raises:
        ValueError: the model cannot give every text back, or is none.
    """

    def __init__(self, model: bytes, name: str = "the model") -> None:
        self.model = model
        self.fingerprint = hashlib.sha256(model).hexdigest()[:32]
        self._processor = _load_processor(model, name)
        self.vocab_size = int(self._processor.vocab_size())
        self.end_id = int(self._processor.eos_id())
        self.stop_ids = frozenset({self.end_id})
        self._table, byte_ids = _piece_table(self._processor)
        space = self._table[self._processor.piece_to_id(_SPACE)]
        _require_lossless(model, self.end_id, byte_ids, space, name)
        self._byte_ids = [byte_ids[value] for value in range(256)]
        self.token_bytes: NDArray[np.int32] = np.array([len(piece) for piece in self._table], np.int32)
        self._threads = min(os.cpu_count() or 1, 16)

    @classmethod
    def train(cls, texts: Iterable[str], *, kind: Literal["bpe", "unigram"], vocab_size: int) -> "Tokenizer":
        """Train on `texts`; the same texts give the same model.

        A line with the newlines behind it is what pieces are cut from: they may hold spaces, indentation,
        punctuation and words together, and may end in newlines.

        Args:
            texts: the sample, all of which is held in memory.
            kind: bpe, or unigram, which takes about 10 s a megabyte.
            vocab_size: pieces, bytes and specials included.

        Raises:
            ValueError: the sample is empty, or cannot fill the vocabulary, or its characters do not fit.
        """
        lines = [line for text in texts for line in _training_lines(text)]
        if not lines:
            raise ValueError("[tokenizer] the text to train on must not be empty. Check the data source.")
        out = io.BytesIO()
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(lines),
                model_writer=out,
                model_type=kind,
                vocab_size=vocab_size,
                byte_fallback=True,
                normalization_rule_name="identity",
                add_dummy_prefix=False,
                remove_extra_whitespaces=False,
                allow_whitespace_only_pieces=True,
                # Where no piece is a space alone, SentencePiece writes one in the bytes of U+2581.
                required_chars=_SPACE,
                split_by_whitespace=False,
                split_by_unicode_script=False,
                split_by_number=False,
                max_sentencepiece_length=_MAX_PIECE,
                max_sentence_length=8 * _TRAIN_LINE,
                # Unigram starts from this many pieces; many more cost time and gave a worse vocabulary.
                seed_sentencepiece_size=15 * vocab_size,
                unk_id=_UNKNOWN,
                eos_id=_END,
                bos_id=-1,
                pad_id=-1,
                num_threads=_TRAIN_THREADS,
                minloglevel=2,
            )
        except RuntimeError as error:
            raise _explained(error, vocab_size) from error
        real = {stand_in.encode(): char.encode() for char, stand_in in _STAND_INS.items()}
        return cls(map_pieces(out.getvalue(), lambda piece: _replace_all(piece, real)))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Tokenizer":
        """Read a SentencePiece model.

        Raises:
            ValueError: there is no such file, or the model does not keep text unchanged.
        """
        try:
            model = Path(path).expanduser().read_bytes()
        except OSError as error:
            raise ValueError(
                f"[tokenizer] path must be a readable SentencePiece model but got {os.fspath(path)!r}: "
                f"{error.strerror}."
            ) from error
        return cls(model, os.fspath(path))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model as one file that `load` and SentencePiece read."""
        Path(path).write_bytes(self.model)

    def encode(self, text: str) -> list[int]:
        """Token ids of one text, without an end token.

        Raises:
            ValueError: the text holds a lone surrogate.
        """
        ids: list[int] = self.encode_batch([text])[0].tolist()
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Token ids of each text as int32 `[num_tokens]`; the work is spread over the CPU's cores.

        Raises:
            ValueError: a text holds a lone surrogate.
        """
        plain: list[str] = []
        plans: list[list[int | str]] = []
        for text in texts:
            require_encodable(text)
            plan: list[int | str] = []
            for part in _parts(text):
                if _IN_BYTES.fullmatch(part):
                    plan.append(part)
                else:
                    plan.append(len(plain))
                    plain.append(part)
            plans.append(plan)
        encoded = self._processor.encode(plain, out_type=int, num_threads=self._threads) if plain else []
        return [self._join(plan, encoded) for plan in plans]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the tokens; bytes that are no UTF-8 become U+FFFD and the end token nothing.

        Raises:
            ValueError: an id is outside the vocabulary.
        """
        return b"".join(self.token_to_bytes(token) for token in ids).decode("utf-8", errors="replace")

    def token_to_bytes(self, token: int) -> bytes:
        """The UTF-8 bytes that one token stands for, possibly a part of a character.

        Raises:
            ValueError: the id is outside the vocabulary.
        """
        if not 0 <= token < self.vocab_size:
            raise ValueError(f"[tokenizer] a token id must be in 0 ... {self.vocab_size - 1} but got {token}.")
        return self._table[token]

    def _join(self, plan: list[int | str], encoded: list[list[int]]) -> NDArray[np.int32]:
        ids: list[int] = []
        for step in plan:
            if isinstance(step, int):
                ids += encoded[step]
            else:
                ids += [self._byte_ids[byte] for byte in step.encode()]
        return np.array(ids, np.int32)


def _training_lines(text: str) -> Iterator[str]:
    require_encodable(text)
    for line in _LINE.findall(text):
        for part in _NOT_TRAINED.split(line):
            for char, stand_in in _STAND_INS.items():
                part = part.replace(char, stand_in)
            for start in range(0, len(part), _TRAIN_LINE):
                yield part[start : start + _TRAIN_LINE]


def _parts(text: str) -> Iterator[str]:
    """Cut into blocks at ends of lines, and at U+2581, which is written in bytes; none is empty."""
    start = 0
    while start < len(text):
        block = text[start : start + _BLOCK]
        if start + _BLOCK < len(text):
            block = block[: last_line_start(block) or _BLOCK]
        start += len(block)
        yield from filter(None, _IN_BYTES.split(block))


def _load_processor(model: bytes, name: str) -> sentencepiece.SentencePieceProcessor:
    try:
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    except RuntimeError as error:
        raise ValueError(f"[tokenizer] {name} must be a SentencePiece model but is not one.") from error
    if not model or not processor.vocab_size():
        raise ValueError(f"[tokenizer] {name} must be a SentencePiece model but is empty.")
    return processor


def _piece_table(
    processor: sentencepiece.SentencePieceProcessor,
) -> tuple[list[bytes], dict[int, int]]:
    """The bytes of every id, and the id of every byte piece."""
    table: list[bytes] = []
    byte_ids: dict[int, int] = {}
    for token in range(processor.vocab_size()):
        piece = processor.id_to_piece(token)
        if processor.is_byte(token):
            value = int(piece[1:-1], 16)
            byte_ids[value] = token
            table.append(bytes([value]))
        elif processor.is_control(token) or processor.is_unknown(token) or processor.is_unused(token):
            table.append(b"")
        else:
            table.append(piece.replace(_SPACE, " ").encode())
    return table, byte_ids


def _require_lossless(model: bytes, end_id: int, byte_ids: dict[int, int], space: bytes, name: str) -> None:
    normalizer = read_normalizer(model)
    faults = {
        f"its normaliser {normalizer.rule!r} changes characters": normalizer.has_charsmap,
        "it puts a space before the text (add_dummy_prefix)": normalizer.add_dummy_prefix,
        "it removes spaces (remove_extra_whitespaces)": normalizer.remove_extra_whitespaces,
        "it does not escape spaces (escape_whitespaces)": not normalizer.escape_whitespaces,
        "it has no piece for each byte (byte_fallback)": len(byte_ids) < 256,
        "it has no piece for a space": space != b" ",
        "it has no end piece (eos_id)": end_id < 0,
    }
    found = [fault for fault, present in faults.items() if present]
    if found:
        raise ValueError(
            f"[tokenizer] a tokenizer must give every text back unchanged but with {name} "
            f"{'; '.join(found)}. Train one (leave tokenizer.path out) or use a model without this."
        )


def _explained(error: RuntimeError, vocab_size: int) -> ValueError:
    """SentencePiece's complaint about the vocabulary's size, with the size that works."""
    message = str(error)
    if found := re.search(r"size too high .*<= (\d+)", message):
        return ValueError(
            f"[tokenizer] vocab_size must be at most {found[1]} for this text but got {vocab_size}. "
            "Lower data.tokenizer.vocab_size, or give more text (or a larger sample_bytes)."
        )
    if found := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        return ValueError(
            f"[tokenizer] vocab_size must be at least {found[1]} to hold this text's characters "
            f"but got {vocab_size}. Raise data.tokenizer.vocab_size."
        )
    return ValueError(f"[tokenizer] SentencePiece could not train on this text: {message}")


def _replace_all(piece: bytes, replacements: dict[bytes, bytes]) -> bytes:
    for old, new in replacements.items():
        piece = piece.replace(old, new)
    return piece
