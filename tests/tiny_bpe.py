"""A SentencePiece tokenizer of 300 pieces, as forge-mlx trains them, for tests."""

from functools import cache

from forge_mlx.data.tokenizer import Tokenizer


@cache
def tiny_bpe() -> Tokenizer:
    """The tokenizer; it is trained once."""
    text = "".join(f"def f_{i}(x):\n    return x + {i}\n" for i in range(200))
    return Tokenizer.train([text], kind="bpe", vocab_size=300)
