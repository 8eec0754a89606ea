"""Tokens to text while they come, as a model writes them."""

import codecs

from forge_mlx.data.text_tokenizer import TextTokenizer


class StreamDecoder:
    """Decode a stream of tokens into text that can be printed at once.

    A character whose bytes come in several tokens is held back until it is complete.

    Args:
        tokenizer: what the tokens are of.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Take one more token; return the text that became certain, which may be empty."""
        return self._decoder.decode(self._tokenizer.token_to_bytes(token))

    def finish(self) -> str:
        """End the stream: U+FFFD when it stops inside a character, else nothing."""
        return self._decoder.decode(b"", final=True)
