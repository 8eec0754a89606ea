"""Editing the exports of a shared library. `test_blas.py` shows that the dynamic linker takes the result."""

import struct

from forge_mlx import _elf
import pytest


def test_hash_chain_ends_at_the_last_name():
    first_symbol, bloom_size = 2, 1
    image = bytearray(struct.pack("<4I", 3, first_symbol, bloom_size, 6)) + bytes(8 + 4 * 3 + 4 * 6)
    _elf.write_gnu_hash(image, 0, {3: "a", 6: "b"})
    buckets, *_ = struct.unpack_from("<4I", image)
    (bucket,) = struct.unpack_from("<I", image, 24)
    chain = struct.unpack_from("<6I", image, 28)
    code_a, code_b = (5381 * 33 + ord(name) for name in "ab")
    assert (buckets, bucket) == (1, 3)
    assert chain == (0, code_a & ~1, 0, 0, code_b | 1, 0)


@pytest.mark.parametrize(
    "start",
    [b"\xcf\xfa\xed\xfe", b"\x7fELF\x01\x01", b"\x7fELF\x02\x02"],
    ids=["Mach-O", "32-bit", "big-endian"],
)
def test_other_formats_are_refused(start):
    image = bytearray(start.ljust(64, b"\0"))
    with pytest.raises(OSError, match="not a 64-bit little-endian ELF library"):
        _elf.export_only(image, {"long_name": "name"})
    assert image == start.ljust(64, b"\0")
