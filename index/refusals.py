"""Refusals: what does an answer look like that is an error?

Door: what is raised on the way becomes a status and an OpenAI-shaped body, the same for the routes
of api.py and for POST /rank of desk.py. Open it to change how an error looks.

A salt may be a secret: the value of a member that may hold one is not shown.
"""

from __future__ import annotations

from typing import Any

import msgspec

from .errors import BadValue

JSON = "application/json"
HIDDEN = ("body", "salt")  # what was wrong there is not shown: it may hold a salt


class Refusal(Exception):
    """An answer that is an error: status, code and the member it is about."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


def refused(error: Refusal | BadValue) -> tuple[int, bytes]:
    """Status and body of what was raised."""
    if isinstance(error, Refusal):
        return error.status, body(error.status, error.code, str(error), error.param)
    hidden = error.field.partition("[")[0].partition(".")[0] in HIDDEN
    said = f"{error.field}: must be {error.want}" if hidden else str(error)
    return 400, body(400, "invalid_request", said, error.field)


def body(status: int, code: str, message: str, param: str | None) -> bytes:
    """The error as JSON."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    said: dict[str, Any] = {"message": message, "type": kind, "code": code, "param": param}
    return msgspec.json.encode({"error": said})


def headers(status: int) -> dict[str, str]:
    """Beside the kind and length of the body: when to come again."""
    return {"retry-after": "1"} if status in (429, 503) else {}
