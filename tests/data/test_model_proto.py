from forge_mlx.data.model_proto import Normalizer, map_pieces, read_normalizer
import pytest


def field(number, content):
    return bytes([number << 3 | 2, len(content)]) + content


def test_unwritten_fields_have_sentencepieces_defaults():
    defaults = Normalizer("", False, True, True, True)
    assert read_normalizer(b"") == defaults
    assert read_normalizer(field(3, b"")) == defaults


def test_written_fields_are_read():
    normalizer = field(1, b"identity") + field(2, b"map") + bytes([3 << 3, 0, 4 << 3, 0, 5 << 3, 0])
    assert read_normalizer(field(3, normalizer)) == Normalizer("identity", True, False, False, False)


def test_pieces_change_and_everything_else_stays():
    score = bytes([2 << 3 | 5]) + b"\0\0\x80\xbf"
    piece = field(1, b"ab") + score + bytes([3 << 3, 0xAC, 0x02])
    rest = field(2, b"trainer") + bytes([9 << 3 | 1]) + b"\xff" * 8
    long = map_pieces(field(1, piece) + rest, lambda text: text * 100)
    inner = bytes([1 << 3 | 2, 200, 1]) + b"ab" * 100 + score + bytes([3 << 3, 0xAC, 0x02])
    size = len(inner)
    assert long == bytes([1 << 3 | 2, size & 0x7F | 0x80, size >> 7]) + inner + rest


@pytest.mark.parametrize("model", [b"\x0a\x05ab", b"\x0a\xff", b"\x0b"], ids=["field", "number", "wire type"])
def test_bytes_that_are_no_model(model):
    with pytest.raises(ValueError, match="SentencePiece model"):
        read_normalizer(model)
