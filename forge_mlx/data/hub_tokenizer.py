"""Tokenizers of Hugging Face folders, with the same ids as transformers gives."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
import hashlib
import json
import os
from pathlib import Path

from forge_mlx.data.chat_template import BUILT_IN_TEMPLATES, end_of_turn
from forge_mlx.data.text_tokenizer import require_encodable
from forge_mlx.data.token_bytes import token_table
from forge_mlx.data.tokenizer_settings import (
    DEFAULT_TEMPLATE,
    TEMPLATE_FILE,
    TIKTOKEN,
    begin_ids,
    end_ids,
    find_templates,
    generation_of,
    json_file,
    load_backend,
    mark_special,
    special_names,
)
import numpy as np
from numpy.typing import ArrayLike, NDArray
from tokenizers import Encoding, Tokenizer

# The files of a folder that belong to the tokenizer. The last ones are for readers of older layouts.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    TEMPLATE_FILE,
    "chat_template.json",
    "generation_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
_MODEL_CONFIG = "config.json"


class HubTokenizer:
    """A tokenizer from the files of a Hugging Face folder.

    Texts are neither truncated nor padded, whatever `tokenizer.json` has set.

    Args:
        files: a file's name -> its bytes: `tokenizer.json`, and where there are any `tokenizer_config.json`,
            `special_tokens_map.json`, `chat_template.jinja`, `generation_config.json` ...
        name: how messages call the tokenizer, such as its folder.

    Attributes:
        files: what was given, to be written back unchanged.
        name: as given.
        vocab_size: the largest id + 1. A model's table may have more rows than that.
        plain_vocab_size: the same without special tokens: a model's table needs that many rows, and those of special
            tokens that no text of it has may be missing, as that of Gemma 3's images is.
        end_id: the token that ends a document: `eos_token` of the tokenizer's settings, else the first end token of
            `generation_config.json`.
        bos_id: the token named `bos_token`, if there is one.
        begin_ids: what the tokenizer itself puts before a text, such as Llama's `bos_token`.
        added_ids: the tokens that are found in a text before it is cut.
        special_ids: the special tokens among them, which decode to nothing.
        token_bytes: int32 `[vocab_size]`, the UTF-8 bytes that each token stands for; 0 for special tokens. Where the
            tokenizer puts a space before a text, the first token counts one more than the text has.
        chat_template: the Jinja source of the chat template, if there is one.
        template_names: what the chat templates are called; a single one is the default.
        special_names: `bos_token` ... -> its text, as chat templates see them.
        fingerprint: hash of all that decides which ids a text or a conversation gets.

    Raises:
        ValueError: a file is missing or broken, its tokens contradict each other, or no end token is known.
    """

    def __init__(self, files: Mapping[str, bytes], name: str) -> None:
        self.files = dict(files)
        self.name = name
        config = json_file(files, "tokenizer_config.json", name)
        special = json_file(files, "special_tokens_map.json", name)
        generation = json_file(files, "generation_config.json", name)
        self._backend = load_backend(files, config, special, name)
        self.special_names = special_names(config, special)
        mark_special(self._backend, self.special_names.values())
        self._end_ids = end_ids(self._backend, self.special_names.get("eos_token"), generation, name)
        self.end_id = self._end_ids[0]
        self.bos_id: int | None = self._backend.token_to_id(self.special_names.get("bos_token", ""))
        self.begin_ids = begin_ids(self._backend)
        # Without it, offsets are those of the text: a byte-level one leaves spaces out of them.
        self._backend.post_processor = None
        added = self._backend.get_added_tokens_decoder()
        self.added_ids = frozenset(added)
        self.special_ids = frozenset(token for token, entry in added.items() if entry.special)
        self._table, self._drops_space = token_table(self._backend, name)
        self.vocab_size = len(self._table)
        ids = set(self._backend.get_vocab().values())
        self.plain_vocab_size = 1 + max(ids - self.special_ids, default=-1)
        self.token_bytes: NDArray[np.int32] = np.array([len(piece) for piece in self._table], np.int32)
        templates = find_templates(files, config, name)
        self.chat_template = templates.get(DEFAULT_TEMPLATE)
        self.template_names = tuple(templates)
        self.fingerprint = self._hash()

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> "HubTokenizer":
        """Read the tokenizer's files in a folder; without `generation_config.json` the end tokens of `config.json`.

        Raises:
            ValueError: as for the class.
        """
        path, name = Path(folder).expanduser(), os.fspath(folder)
        # What there is instead is read for the error alone, and never written again.
        instead = () if (path / "tokenizer.json").is_file() else (TIKTOKEN,)
        wanted = (*TOKENIZER_FILES, *instead, _MODEL_CONFIG)
        try:
            files = {file: (path / file).read_bytes() for file in wanted if (path / file).is_file()}
        except OSError as error:
            raise ValueError(f"[hub_tokenizer] {error.filename} must be readable but got: {error.strerror}.") from error
        config = files.pop(_MODEL_CONFIG, None)
        if config is not None and "generation_config.json" not in files:
            ids = generation_of(json_file({_MODEL_CONFIG: config}, _MODEL_CONFIG, name))
            if ids.get("eos_token_id") is not None:
                files["generation_config.json"] = json.dumps(ids).encode()
        return cls(files, name)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the files into a folder, which `load` and transformers read."""
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        for file, content in self.files.items():
            (folder / file).write_bytes(content)

    def with_chat_template(self, template: str) -> "HubTokenizer":
        """The same tokenizer with another chat template, which is saved along with it.

        Args:
            template: Jinja source, or `chatml`.

        Raises:
            ValueError: `chatml` is asked for but the tokenizer lacks its tokens.
        """
        if built_in := BUILT_IN_TEMPLATES.get(template):
            missing = [token for token in built_in.tokens if self._backend.token_to_id(token) is None]
            if missing:
                raise ValueError(
                    f"[hub_tokenizer] chat_template must be one whose tokens the tokenizer has but {self.name} lacks "
                    f"{' and '.join(missing)} of {template}. Write a template that ends an assistant's turn with "
                    f"{self.special_names.get('eos_token', 'its end token')}."
                )
            template = built_in.source
        return HubTokenizer({**self.files, TEMPLATE_FILE: template.encode()}, self.name)

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """The tokens at which generation stops.

        Those are the end tokens of `generation_config.json`, `end_id`, and the token with which the chat template ends
        an assistant's turn.
        """
        tail = end_of_turn(self.chat_template, self.special_names) if self.chat_template is not None else ""
        names = self._backend.get_added_tokens_decoder()
        ends = (token for token in self.encode(tail, specials=True) if token in names and names[token].content.strip())
        return frozenset([*self._end_ids, *([first] if (first := next(ends, None)) is not None else [])])

    def encode(self, text: str, *, specials: bool = False) -> list[int]:
        """Token ids of one text; nothing is put before or behind it.

        Args:
            text: any text.
            specials: whether a special token's name in the text becomes that token; by default it is text.

        Raises:
            ValueError: the text holds a lone surrogate.
        """
        return list(self.encode_with_offsets(text, specials=specials).ids)

    def encode_with_offsets(self, text: str, *, specials: bool = False) -> Encoding:
        """As `encode`, with `.ids` and `.offsets`: of each token the first character and the one behind the last.

        A character whose bytes are in several tokens is in the offsets of each of them.

        Raises:
            ValueError: the text holds a lone surrogate.
        """
        require_encodable(text)
        backend = self._parsing_backend if specials else self._plain_backend
        return backend.encode(text, add_special_tokens=False)

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Token ids of each text as int32 `[num_tokens]`; the work is spread over the CPU's cores.

        Raises:
            ValueError: a text holds a lone surrogate.
        """
        for text in texts:
            require_encodable(text)
        encoded = self._plain_backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(each.ids, np.int32) for each in encoded]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the tokens; special tokens stand for nothing, bytes that are no UTF-8 become U+FFFD.

        A space that the tokenizer puts before a text is taken away again.

        Raises:
            ValueError: an id is outside the vocabulary.
        """
        text = b"".join(self.token_to_bytes(token) for token in ids).decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self._drops_space else text

    def token_to_bytes(self, token: int) -> bytes:
        """The UTF-8 bytes that one token stands for, possibly a part of a character.

        Raises:
            ValueError: the id is outside the vocabulary.
        """
        if not 0 <= token < self.vocab_size:
            raise ValueError(f"[hub_tokenizer] a token id must be in 0 ... {self.vocab_size - 1} but got {token}.")
        return self._table[token]

    def token_name(self, token: int) -> str:
        """What the vocabulary calls a token, such as `<|im_end|>`; empty for an id without one."""
        return self._backend.id_to_token(token) or ""

    def require_embeddings(self, tokens: ArrayLike, vocab_size: int, what: str) -> None:
        """Raise for a special token of texts, or of the chat template, that a model has no row for.

        Args:
            tokens: ids of this tokenizer.
            vocab_size: how many rows the model's embedding has.
            what: whose tokens they are, in the plural.

        Raises:
            ValueError: as said.
        """
        largest = int(np.max(tokens, initial=0))
        if largest >= vocab_size:
            raise ValueError(
                f"{what} must have tokens of the model alone, which has {vocab_size}, but one is "
                f"{self.token_name(largest)}, token {largest}. Take it out of them and of the chat template."
            )

    def token_id(self, text: str) -> int | None:
        """The id of the token of this name, if there is one."""
        return self._backend.token_to_id(text)

    @property
    def _parsing_backend(self) -> Tokenizer:
        return self._backend

    @cached_property
    def _plain_backend(self) -> Tokenizer:
        backend = Tokenizer.from_str(self._backend.to_str())
        backend.encode_special_tokens = True
        return backend

    def _hash(self) -> str:
        added = {str(token): repr(entry) for token, entry in self._backend.get_added_tokens_decoder().items()}
        rest = [added, self.begin_ids, self.end_id, self.chat_template, self.special_names]
        digest = hashlib.sha256(self.files["tokenizer.json"])
        digest.update(json.dumps(rest, sort_keys=True).encode())
        return digest.hexdigest()[:32]
