"""Leg chunks: are these chunks as most engines write them?

Pure. What is nothing else, and comes where one is due, needs no parser: it is handed on as it is,
or what it holds is cut out. Asked by legs_connection.py and legs_answer.py; all else is the
parser's: extensions, trailers, parts of a chunk. Open it to change what counts as plain.

    5 | \\r\\n | hello | \\r\\n              the last one of an answer:     0 | \\r\\n | \\r\\n
"""

from __future__ import annotations

LAST = b"0\r\n\r\n"
FEW_BYTES = 1024  # of several chunks; with more of them the parser is quicker


def whole(data: bytes) -> bool:
    """Is it a chunk, or a few, and nothing else? Never the last of an answer, which is empty."""
    size = len(data) - data.find(b"\r") - 4
    if size > 0 and data.startswith(b"%x\r\n" % size):
        return data.endswith(b"\r\n")  # one, as most
    return _several(data) is not None


def held(data: bytes) -> bytes | None:
    """What a whole chunk holds, or a few; None where it is anything else."""
    at = data.find(b"\r") + 2
    size = len(data) - at - 2
    if size > 0 and data.startswith(b"%x\r\n" % size):
        return data[at:-2] if data.endswith(b"\r\n") else None
    parts = _several(data)
    return None if parts is None else b"".join(parts)


def _several(data: bytes) -> list[bytes] | None:
    """What each of a few holds. With a line break in one of them its size fits no part."""
    if len(data) > FEW_BYTES:
        return None
    words = data.split(b"\r\n")
    sizes, parts = words[:-1:2], words[1::2]
    if not sizes or words[-1] or b"0" in sizes:
        return None
    return parts if sizes == [b"%x" % size for size in map(len, parts)] else None


def closed(data: bytes, last: bytes) -> bool:
    """Does a read surely end behind a chunk? `last` is what the parser took last of it for data.
    Were more of that chunk to come, all bytes to the end would be data, and no line could stand
    behind them but the size of the next one: where that says again what is before it.

        2 | \\r\\n | a2 | \\r\\n | a2 | \\r\\n              162 bytes are to come
    """
    if not data.endswith(b"%x\r\n%b\r\n" % (len(last), last)):
        return False
    return not data.endswith(b"%b\r\n%b\r\n" % (last, last.rpartition(b"\r\n")[2]))
