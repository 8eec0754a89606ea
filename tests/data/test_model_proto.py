import struct

from forge_mlx.data.model_proto import Normalizer, Piece, map_pieces, read_algorithm, read_normalizer, read_pieces
import pytest
import sentencepiece


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


def test_unwritten_parts_of_a_piece_have_sentencepieces_defaults():
    assert read_algorithm(b"") == read_algorithm(field(2, b"")) == "unigram"
    assert read_pieces(field(1, b"") + field(1, field(1, b"a"))) == [
        Piece("", 0.0, "normal"),
        Piece("a", 0.0, "normal"),
    ]


def test_written_parts_of_a_piece_are_read():
    score = bytes([2 << 3 | 5]) + struct.pack("<f", -1.5)
    model = field(1, field(1, "é".encode()) + score + bytes([3 << 3, 5])) + field(2, bytes([3 << 3, 2]))
    assert read_algorithm(model) == "bpe"
    assert read_pieces(model) == [Piece("é", -1.5, "unused")]


@pytest.mark.parametrize(
    ("read", "model", "message"),
    [
        (read_algorithm, field(2, bytes([3 << 3, 9])), "no algorithm 9"),
        (read_pieces, field(1, bytes([3 << 3, 7])), "no role of a piece 7"),
    ],
)
def test_a_number_without_a_meaning(read, model, message):
    with pytest.raises(ValueError, match=message):
        read(model)


def test_pieces_are_those_that_sentencepiece_reads(tmp_path):
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the cat sat on the mat"] * 9),
        model_prefix=str(tmp_path / "m"),
        model_type="bpe",
        vocab_size=290,
        byte_fallback=True,
        user_defined_symbols=["<x>"],
        minloglevel=2,
    )
    model = (tmp_path / "m.model").read_bytes()
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    pieces = read_pieces(model)
    ids = range(processor.vocab_size())
    assert [piece.text for piece in pieces] == [processor.id_to_piece(each) for each in ids]
    assert [piece.score for piece in pieces] == [processor.get_score(each) for each in ids]
    assert [piece.role == "byte" for piece in pieces] == [processor.is_byte(each) for each in ids]
    assert [piece.role == "control" for piece in pieces] == [processor.is_control(each) for each in ids]
    assert [piece.text for piece in pieces if piece.role == "user-defined"] == ["<x>"]
    assert read_algorithm(model) == "bpe"


@pytest.mark.parametrize("model", [b"\x0a\x05ab", b"\x0a\xff", b"\x0b"], ids=["field", "number", "wire type"])
def test_bytes_that_are_no_model(model):
    with pytest.raises(ValueError, match="SentencePiece model"):
        read_normalizer(model)
