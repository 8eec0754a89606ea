"""Token files for tests, without a tokenizer."""

from forge_mlx.data import TokenFile
from forge_mlx.data.cache import TokenWriter
import numpy as np

FINGERPRINT = "0123456789abcdef0123"
END = 1


def token_file(folder, num_tokens, fingerprint=FINGERPRINT):
    """One text: every token is its own position."""
    path = folder / f"{num_tokens}.{fingerprint}.bin"
    writer = TokenWriter(path, vocab_size=50_000, tokenizer="t", fingerprint=fingerprint)
    writer.add(np.arange(num_tokens, dtype=np.int32), num_tokens)
    writer.close()
    return TokenFile(path)


def document_file(folder, lengths, fingerprint=FINGERPRINT):
    """Documents of these lengths, the end token 1 included; every other token is 2 + its own position."""
    path = folder / f"documents.{abs(hash(tuple(lengths)))}.{fingerprint}.bin"
    writer = TokenWriter(path, vocab_size=1 << 20, tokenizer="t", fingerprint=fingerprint)
    for length in lengths:
        writer.add(2 + writer.num_tokens + np.arange(length - 1, dtype=np.int32), length - 1)
        writer.end_document(END)
    writer.close()
    return TokenFile(path)
