"""Whether a PNG file is whole: Pillow reads over rows that are missing, and shows them black."""

from __future__ import annotations

import struct
import zlib

SIGNATURE = b"\x89PNG\r\n\x1a\n"
SAMPLES = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # per pixel, by the kind of colour
MAX_RAW_BYTES = 2**28
_PASSES = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))


def png_damage(content: bytes) -> str | None:
    """What is wrong with the bytes of a PNG file; None if every chunk and every row is there."""
    if content[:8] != SIGNATURE:
        return "it is not a PNG file"
    header, data, position, kind = b"", bytearray(), 8, b""
    while kind != b"IEND":
        if len(content) < position + 12:
            return "it is truncated"
        length = int.from_bytes(content[position : position + 4], "big")
        chunk = content[position + 4 : position + 8 + length]
        check = content[position + 8 + length : position + 12 + length]
        if len(check) < 4:
            return "it is truncated"
        if zlib.crc32(chunk) != int.from_bytes(check, "big"):
            return "it is damaged: a part of it does not have its checksum"
        kind, position = chunk[:4], position + 12 + length
        if kind == b"IHDR":
            header = chunk[4:]
        elif kind == b"IDAT":
            data += chunk[4:]
    return _missing_rows(header, bytes(data))


def _missing_rows(header: bytes, data: bytes) -> str | None:
    if len(header) != 13:
        return "it has no header"
    width, height, depth, colour, _, _, interlaced = struct.unpack(">IIBBBBB", header)
    needed = raw_size(width, height, depth * SAMPLES.get(colour, 4), bool(interlaced))
    if needed > MAX_RAW_BYTES:
        return f"it declares {needed} bytes of pixels"
    try:
        found = len(zlib.decompressobj().decompress(data, needed + 1))
    except zlib.error as error:
        return f"its pixels cannot be unpacked: {error}"
    return f"rows are missing: it has {found} of {needed} bytes of pixels" if found < needed else None


def raw_size(width: int, height: int, bits: int, interlaced: bool) -> int:
    """Bytes of the rows of a PNG image with so many bits per pixel, each row with its filter before it."""
    parts = _PASSES if interlaced else ((0, 0, 1, 1),)
    sizes = ((len(range(x, width, dx)), len(range(y, height, dy))) for x, y, dx, dy in parts)
    return sum(rows * (1 + (columns * bits + 7) // 8) for columns, rows in sizes if columns)
