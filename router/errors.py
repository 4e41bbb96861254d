"""Errors: what a client is told when its request cannot be answered.

Pure: one exception, one table of codes, OpenAI's error shape. Everything in router/ that must end
a request raises a GatewayError; api.py and admin.py write it out. Open it to add a code.

    {"error": {"message", "type", "code", "param"}}  + "stage" and "room" where a room existed
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvplane.vocabulary import MEETING, Stage

# code -> status, type. Codes of OpenAI keep OpenAI's status.
CODES: dict[str, tuple[int, str]] = {
    "invalid_request": (400, "invalid_request_error"),
    "context_length_exceeded": (400, "invalid_request_error"),
    "invalid_api_key": (401, "invalid_request_error"),
    "forbidden": (403, "permission_error"),
    "not_found": (404, "invalid_request_error"),
    "model_not_found": (404, "invalid_request_error"),
    "request_timeout": (408, "invalid_request_error"),
    "payload_too_large": (413, "invalid_request_error"),
    "overloaded": (429, "rate_limit_error"),
    "rate_limit_exceeded": (429, "rate_limit_error"),
    "internal_error": (500, "server_error"),
    "unsupported_route": (501, "invalid_request_error"),
    "prefill_failed": (502, "server_error"),
    "decode_failed": (502, "server_error"),
    "transfer_failed": (502, "server_error"),
    "no_prefill_available": (503, "server_error"),
    "no_decode_available": (503, "server_error"),
    "no_compatible_pair": (503, "server_error"),
    "deadline_exceeded": (504, "server_error"),
}


@dataclass(eq=False)
class GatewayError(Exception):
    """The request ends with this. `status` overrides the code's usual one."""

    code: str
    message: str
    param: str | None = None
    status: int = 0
    stage: str | None = None
    room: str | None = None  # as text: 64-bit numbers break JavaScript
    request_id: str | None = None  # told in a stream's last event, where no header can follow
    retry_after: str | None = None
    raw: bytes | None = None  # an engine's own answer, passed on as it is
    raw_type: bytes = b"application/json"
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    at: Stage | None = None  # which stage of the gateway's own it ends; for the ledger

    def __post_init__(self) -> None:
        usual, self.type = CODES.get(self.code, (500, "server_error"))
        self.status = self.status or usual

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"

    def shape(self) -> dict[str, Any]:
        """OpenAI's shape, with stage and room where there are any."""
        error: dict[str, Any] = {
            "message": self.message,
            "type": self.type,
            "code": self.code,
            "param": self.param,
        }
        if self.room is not None:
            error |= {"stage": self.stage, "room": self.room}
        elif self.stage is not None:
            error["stage"] = self.stage
        return {"error": error}

    def body(self) -> bytes:
        """What leaves as the answer's body."""
        return self.raw if self.raw is not None else msgspec.json.encode(self.shape())

    def event(self) -> bytes:
        """The same as the last event of a broken stream."""
        shape = self.shape()
        if self.request_id is not None:
            shape["error"]["request_id"] = self.request_id
        return b"data: " + msgspec.json.encode(shape) + b"\n\n"

    def head(self) -> list[tuple[bytes, bytes]]:
        """Headers that go with the body."""
        found = [(b"content-type", self.raw_type if self.raw is not None else b"application/json")]
        if self.retry_after:
            found.append((b"retry-after", self.retry_after.encode("latin-1", "replace")))
        return found + self.headers


def invalid(param: str, message: str) -> GatewayError:
    """The caller's mistake, with the member that is wrong."""
    return GatewayError("invalid_request", message, param)


def let_go(error: BaseException) -> None:
    """It was dealt with. Its traceback, and those of what led to it, hold every frame they came
    through; a frame that holds the error in turn would keep the request's body with it until the
    next look for garbage, after thousands of others."""
    left: BaseException | None = error
    while left is not None:
        left.__traceback__ = None
        left.__context__, left = None, left.__context__


STAGES = frozenset(stage.value for stage in MEETING)  # what an engine can fail in


def engine_said(body: bytes) -> tuple[str, str | None]:
    """Message and stage of an engine's error body: OpenAI's shape, SGLang's, FastAPI's or text."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError):
        return body[:300].decode("utf-8", "replace").strip(), None
    inner = found.get("error", found) if isinstance(found, dict) else found
    if not isinstance(inner, dict):
        return str(inner)[:300], None
    message = inner.get("message") or inner.get("detail") or ""
    stage = inner.get("stage")
    return str(message)[:300], stage if isinstance(stage, str) and stage in STAGES else None
