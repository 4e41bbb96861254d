"""Answering: an answer in one step, and a part of a stream in one, where nothing is waited for.

Edge. Used by connections.py, which offers both to the app. uvicorn's own way, an awaited message
for the head and one for each part, looks at every header twice; it is what remains where these say
no: the client does not drain, left, sent requests ahead, or asked for what is not plain. Open it to
change how an answer is framed.

    head + length     content-length: 9 | its 9 bytes
    head alone        transfer-encoding: chunked | 5 hello 0
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

Headers = Sequence[tuple[bytes, bytes]]
BARE = (204, 304)  # statuses without a body, nor any framing
THEIRS = (b"connection", b"transfer-encoding")  # headers uvicorn has rules for


def answer(one: HttpToolsProtocol, status: int, headers: Headers, data: bytes, more: bool) -> bool:
    """The head and what there is of the body; with `more` the rest follows. False where nothing
    was done."""
    cycle = one.cycle
    # Requests sent ahead: `cycle` is the newest of them, not the one whose turn it is.
    if one.pipeline or cycle.response_started or cycle.scope["method"] == "HEAD":
        return False
    if cycle.disconnected or one.flow.write_paused or one.transport.is_closing() or status in BARE:
        return False
    head, length = _head(status, [*cycle.default_headers, *headers], cycle.keep_alive)
    if not head or (length is not None and (len(data) > length if more else len(data) != length)):
        return False
    cycle.response_started, cycle.waiting_for_100_continue = True, False
    cycle.chunked_encoding = length is None
    if length is None:
        one.transport.write(head + _chunk(data) + (b"" if more else b"0\r\n\r\n"))
    else:
        cycle.expected_content_length = length - len(data)
        one.transport.write(head + data if len(data) < 65536 else head)
        if len(data) >= 65536:
            one.transport.write(data)
    if not more:
        cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            one.transport.close()
        cycle.on_response()
    return True


def put(one: HttpToolsProtocol, write: Callable[[bytes], None], data: bytes) -> bool:
    """A part of a chunked answer that began. False where nothing was done."""
    cycle = one.cycle
    if one.flow.write_paused or cycle.disconnected or not cycle.chunked_encoding:
        return False
    if not cycle.response_started or cycle.response_complete:
        return False
    write(_chunk(data))
    return True


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data) if data else b""


def _head(status: int, headers: Headers, keep: bool) -> tuple[bytes, int | None]:
    """The head and the length it tells; b"" where it is not plain, or could split the answer."""
    parts, length = [STATUS_LINE[status]], None
    for name, value in headers:
        if name == b"content-length" and value.isdigit():
            length = int(value)
        elif name in THEIRS:
            return b"", None
        parts.append(b"%b: %b\r\n" % (name, value))
    if length is None:
        parts.append(b"transfer-encoding: chunked\r\n")
    if not keep:
        parts.append(b"connection: close\r\n")
    head = b"".join(parts)
    if head.count(b"\n") != len(parts) or head.count(b"\r") != len(parts) or b"\0" in head:
        return b"", None
    return head + b"\r\n", length
