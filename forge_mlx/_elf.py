"""Editing which symbols a Linux shared library exports, without a tool and without moving a byte of it."""

import struct


def export_only(image: bytearray, renames: dict[str, str]) -> None:
    """Edit a 64-bit little-endian ELF library in place: it exports the renamed symbols and no others.

    A new name must be the end of the old one: its string is then in the file already, and nothing has to
    move. Every other defined symbol is marked hidden, which binds the library's own references to itself.

    Args:
        image: the library's bytes.
        renames: old name -> new name.

    Raises:
        OSError: the file is laid out in another way, or lacks a symbol.
    """
    if image[:6] != b"\x7fELF\x02\x01":
        raise OSError("not a 64-bit little-endian ELF library")
    (table,), (entry_size, count) = struct.unpack_from("<Q", image, 40), struct.unpack_from("<2H", image, 58)
    # type -> (file offset, size, linked section)
    sections: dict[int, tuple[int, int, int]] = {}
    headers = [struct.unpack_from("<2I4Q2I", image, table + index * entry_size) for index in range(count)]
    for _, kind, _, _, offset, size, link, _ in headers:
        sections[kind] = (offset, size, link)
    dynamic, hash_table, symbol_table = (sections.get(kind) for kind in (6, 0x6FFFFFF6, 11))
    if dynamic is None or hash_table is None or symbol_table is None:
        raise OSError("the library has no dynamic symbols with a GNU hash table")
    symbols, symbols_size, link = symbol_table
    strings = headers[link][4]
    exported: dict[int, str] = {}
    for index in range(symbols_size // 24):
        at = symbols + 24 * index
        name_at, _, visibility, section = struct.unpack_from("<IBBH", image, at)
        if section == 0:
            continue
        start = strings + name_at
        name = image[start : image.index(0, start)].decode()
        if name in renames:
            exported[index] = renames[name]
            struct.pack_into("<I", image, at, name_at + len(name) - len(renames[name]))
        else:
            image[at + 5] = visibility & ~3 | 2
    if len(exported) < len(renames):
        raise OSError(f"the library lacks one of {', '.join(renames)}")
    write_gnu_hash(image, hash_table[0], exported)
    set_soname(image, dynamic, struct.unpack_from("<I", image, symbols + 24 * min(exported))[0])


def write_gnu_hash(image: bytearray, start: int, exported: dict[int, str]) -> None:
    """Replace the hash table by one with a single bucket that holds `exported` (symbol index -> name)."""
    _, first_symbol, bloom_size, bloom_shift = struct.unpack_from("<4I", image, start)
    first, last = min(exported), max(exported)
    bloom = [0] * bloom_size
    chain = [0] * (last - first + 1)
    for index, name in exported.items():
        code = 5381
        for byte in name.encode():
            code = (code * 33 + byte) & 0xFFFFFFFF
        bloom[code // 64 % bloom_size] |= 1 << code % 64 | 1 << (code >> bloom_shift) % 64
        chain[index - first] = code & ~1
    chain[-1] |= 1  # The lowest bit ends the chain.
    struct.pack_into("<I", image, start, 1)
    struct.pack_into(f"<{bloom_size}Q", image, start + 16, *bloom)
    bucket = start + 16 + 8 * bloom_size
    struct.pack_into("<I", image, bucket, first)
    struct.pack_into(f"<{len(chain)}I", image, bucket + 4 + 4 * (first - first_symbol), *chain)


def set_soname(image: bytearray, dynamic: tuple[int, int, int], name_at: int) -> None:
    """Set the SONAME, so that a library linked to the original is never given the copy instead."""
    offset, size, _ = dynamic
    for at in range(offset, offset + size, 16):
        if struct.unpack_from("<Q", image, at)[0] == 14:
            struct.pack_into("<Q", image, at + 8, name_at)
