"""A picture's codes as the bytes of one column: `code`, or `code13` with no more bits than a code needs.

Notable:
- `code` is what the paper's data set has: little-endian int16 in raster order, 2048 bytes for 32 x 32 codes;
- `code13` packs each code into ceil(log2(codebook_size)) bits, 13 for the published VQGAN's 8192 codes, hence the name:
  1664 bytes for 32 x 32 of them. A smaller codebook has fewer bits in a column of the same name;
- bit k of code i is bit `bits * i + k` of the string, and bit j of a string is bit j % 8 of its byte j // 8: the
  lowest first everywhere. Bits after the last code are 0;
- eight codes fill whole bytes, so they are unpacked by shifts of whole columns of eight: no loop over rows or codes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

CODE = "code"
PACKED = "code13"
CODE_COLUMNS = (CODE, PACKED)
ID_COLUMNS: dict[str, np.dtype[np.unsignedinteger]] = {  # of a document's tokens, with its end
    "ids16": np.dtype("<u2"),
    "ids32": np.dtype("<u4"),
}
CODE_DTYPE = np.dtype("<i2")
_GROUP = 8  # codes that fill whole bytes, whatever their width


def bits_per_code(codebook_size: int) -> int:
    """Bits that tell so many codes apart: 13 for 8192, at least 1."""
    return max(1, (codebook_size - 1).bit_length())


def column_bytes(column: str, count: int, codebook_size: int) -> int:
    """Bytes that `count` codes take in a row of the column "code" or "code13"."""
    if column == CODE:
        return count * CODE_DTYPE.itemsize
    return -(-count * bits_per_code(codebook_size) // 8)


def to_column(column: str, codes: np.ndarray, codebook_size: int) -> list[bytes]:
    """Codes (b, n) of any integer type → the bytes of each row in this column.

    Raises ValueError for codes out of range.
    """
    if codes.size and (codes.min() < 0 or codes.max() >= codebook_size):
        raise ValueError(f"codes from {codes.min()} to {codes.max()} are not all below {codebook_size}")
    if column == CODE:
        return [row.tobytes() for row in np.ascontiguousarray(codes, dtype=CODE_DTYPE)]
    bits = np.arange(bits_per_code(codebook_size), dtype=np.uint16)
    return [np.packbits(row[:, None] >> bits & 1, bitorder="little").tobytes() for row in codes.astype(np.uint16)]


def from_column(column: str, rows: Sequence[bytes], count: int, codebook_size: int) -> np.ndarray:
    """The bytes of each row in this column → codes (b, count) int16, of which some may be out of range.

    Raises ValueError for a row of another width.
    """
    width = column_bytes(column, count, codebook_size)
    for row in rows:
        if len(row) != width:
            raise ValueError(f"a row has {len(row)} bytes of codes, not {width}")
    stacked = np.frombuffer(b"".join(rows), dtype=np.uint8).reshape(len(rows), width)
    return from_bytes(column, stacked, count, codebook_size)


def from_bytes(column: str, rows: np.ndarray, count: int, codebook_size: int) -> np.ndarray:
    """As `from_column`, of bytes (b, w) uint8; w is what `column_bytes` says. It may be a view of them."""
    if column == CODE:
        return rows.view(CODE_DTYPE).astype(np.int16, copy=False)
    bits, width = bits_per_code(codebook_size), rows.shape[1]
    groups = -(-count // _GROUP)
    if width != groups * bits:
        rows = np.pad(rows, ((0, 0), (0, groups * bits - width)))
    packed = rows.reshape(len(rows), groups, bits)
    codes = np.empty((len(rows), groups, _GROUP), dtype=np.int16)
    for lane in range(_GROUP):
        first, shift = divmod(lane * bits, 8)
        value = packed[:, :, first].astype(np.uint32)
        for byte in range(first + 1, (lane * bits + bits - 1) // 8 + 1):
            value |= packed[:, :, byte].astype(np.uint32) << (8 * (byte - first))
        codes[:, :, lane] = (value >> shift) & ((1 << bits) - 1)
    return codes.reshape(len(rows), groups * _GROUP)[:, :count]
