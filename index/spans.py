"""Spans: the long list of a JSON body, taken out of it before the rest is read.

Pure. Thousands of numbers or names are read many at once where they look as programs write them
(numerals.py, and hexes below); the plain way makes an object of each. Open it to change how such a
list is found.

    {"model": "m", "token_ids": [17, 4]}  ->  {"model": "m", "token_ids": []}  and  17, 4

What is taken out has to be the list that a reader of the whole finds. Where there is no backslash,
quotes begin and end strings in turn: so a name between two of them that a colon follows is a key.
Where it is there once, and a reader of the rest finds an empty list under it, it stood for that.
"""

from __future__ import annotations

import re
import sys
from array import array
from binascii import Error, unhexlify
from typing import cast

import numpy as np

from kvplane.vocabulary import BlockHash

Span = tuple[int, int]  # first and last of a list, between its brackets

FAR_BYTES = 4096  # from the beginning of the body to the beginning of its list, at most

_LIST = re.compile(rb'"(token_ids|block_hashes)"\s*:\s*\[')
_BETWEEN = (b", ", b",")
_NAMES = {  # by what stands between two of them
    between: np.dtype([("digits", "V16"), ("frame", f"V{2 + len(between)}")])
    for between in _BETWEEN
}


def cut(data: bytes) -> tuple[str, bytes, int, int] | None:
    """Name of the list, the body without it, and where it is between its brackets; None where that
    is not sure."""
    found = _LIST.search(data, 0, FAR_BYTES)
    if found is None or (last := data.find(b"]", found.end())) < 0:
        return None
    first = found.end()
    rest = data[:first] + data[last:]
    if b"\\" in rest or rest.count(b'"%b"' % found[1]) != 1:
        return None
    return found[1].decode(), rest, first, last


def hexes(text: bytes) -> tuple[BlockHash, ...] | None:
    """Numbers of 16 hex digits in quotes, as json.dumps or JSON.stringify write them; None where
    it is for the plain way."""
    between = b", " if text[18:20] == b", " else b","
    row, frame = _NAMES[between], b'"%b"' % between
    if text[:1] != b'"' or (len(text) + len(between)) % row.itemsize:
        return None
    rows = np.frombuffer(text[1:] + frame[1:], row)  # each is 16 digits, and what parts two names
    if rows["frame"].tobytes() != frame * len(rows):
        return None
    try:
        return numbers(unhexlify(rows["digits"].tobytes()), "big")
    except Error:  # a letter that is no digit
        return None


def numbers(packed: bytes, order: str) -> tuple[BlockHash, ...]:
    """Of 8 bytes each, which are "big" or "little" end first. A row like the tuple it stands for,
    as far as anybody asks it who does not change it."""
    found = array("Q", packed)
    if order != sys.byteorder:
        found.byteswap()
    return cast("tuple[BlockHash, ...]", found)
