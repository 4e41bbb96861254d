"""Refusals: what a connection is told whose request no app will see.

Pure. OpenAI's error shape, as every other door answers. connections.py sends it. Open it to change
what is said of a head that cannot be taken.
"""

from __future__ import annotations

import json

PHRASES = {
    400: "Bad Request",
    408: "Request Timeout",
    414: "URI Too Long",
    431: "Request Header Fields Too Large",
}
MOST_LINES = 1000  # headers of one request: each costs the app some time
CODES = {
    400: "invalid_request",
    408: "request_timeout",
    414: "uri_too_long",
    431: "headers_too_large",
}


def refusal(status: int, message: str) -> bytes:
    """A whole answer, after which the connection is closed."""
    kind = "invalid_request_error"
    error = {"message": message, "type": kind, "code": CODES[status], "param": None}
    body = json.dumps({"error": error}).encode()
    head = (
        f"HTTP/1.1 {status} {PHRASES[status]}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body


def too_long(head_bytes: int, url_bytes: int, lines: int, most_bytes: int) -> tuple[int, str]:
    """Status and words for a head beyond the limits."""
    if url_bytes > most_bytes // 2:
        return 414, f"the URL is longer than {most_bytes // 2} bytes"
    if head_bytes <= most_bytes:
        return 431, f"the head has {lines} lines; at most {MOST_LINES} are taken"
    return 431, f"the head is longer than {most_bytes} bytes (--max-header-size)"
