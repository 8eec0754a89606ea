"""Where text may be cut without changing its tokens: behind a run of newlines."""


def last_line_start(text: str) -> int:
    r"""The start of the last line of `text`, whose own trailing `"\n"` run belongs to it.

    No piece of a tokenizer that this package trains reaches past a run of newlines, so the parts on both
    sides of the returned index encode to the same tokens apart as together (with unigram: unless two ways to
    cut the text score the same).

    Returns:
        An index in characters, 0 when the text is one line.
    """
    return text.rstrip("\n").rfind("\n") + 1
