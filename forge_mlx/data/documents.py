"""`packing: documents`: whole documents in rows, so that no document sees another."""

from forge_mlx.data.cache import TokenFile
from forge_mlx.data.piece_rows import Ints, PieceRows, Pieces, cut
import numpy as np

_BLOCK = 1 << 24


class DocumentRows(PieceRows):
    """The rows of one epoch: every token is the target of one row, and every document a segment of one row.

    A document of n tokens, its end token included, becomes the inputs [end, t1, ..., t(n-1)] and the targets
    [t1, ..., tn]. One that is longer than a row is cut into pieces of `seq_len` targets, each a segment of its own
    that begins with the token before it. Rows are filled by best fit, the longest pieces first, which follows from the
    lengths alone; which of the pieces of one length takes which place, the epoch decides. What is left of a row is
    padding: token 0, weight 0, segment -1, position 0.

    Args:
        tokens: the corpus; its last token is the end token.
        seq_len: inputs a row.

    Attributes:
        num_rows: rows an epoch.
        num_targets: targets an epoch: all tokens.
        cut_documents: documents that are longer than a row.
        cut_pieces: how many pieces these became.

    Raises:
        ValueError: there are more or fewer end tokens than documents.
    """

    packing = "documents"

    def __init__(self, tokens: TokenFile, seq_len: int) -> None:
        self.tokens = tokens
        self.num_targets = tokens.num_tokens
        borders = document_borders(tokens)
        lengths = np.diff(borders)
        pieces = -(-lengths // seq_len)
        self.cut_documents = int((pieces > 1).sum())
        self.cut_pieces = int(pieces[pieces > 1].sum())
        super().__init__(Pieces(tokens.tokens, *cut(borders[:-1], lengths, seq_len)), seq_len)


def document_borders(tokens: TokenFile) -> Ints:
    """Where documents start, and behind them where the last one ends, `[num_documents + 1]`.

    Raises:
        ValueError: there are more or fewer end tokens than documents.
    """
    values = tokens.tokens
    ends = [
        np.flatnonzero(values[start : start + _BLOCK] == values[-1]) + start
        for start in range(0, tokens.num_tokens, _BLOCK)
    ]
    borders = np.concatenate([[0], *(each + 1 for each in ends)])
    if len(borders) - 1 != tokens.num_documents:
        raise ValueError(
            f"[packing] each document must have one end token, but {tokens.path} has {len(borders) - 1} of them for "
            f"{tokens.num_documents} documents. Set data.packing: concat, or use a tokenizer that puts its end token "
            "into no text."
        )
    return borders
