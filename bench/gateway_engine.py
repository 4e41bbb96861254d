"""Gateway engine: answers as an engine does and computes nothing, so that a gateway is what costs.

`python -m bench.gateway_engine PORT`. A plain request has its whole answer at once; a stream has
`max_tokens` parts, one every STEP_S. What gateways ask of an engine before they trust it is
answered too: health, model, information.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from typing import Any, cast

import uvloop

MODEL = "bench"
STEP_S = 0.002
# Some gateways write the newer name for the older one.
CHUNKS = re.compile(rb'"max_(?:completion_)?tokens":\s*(\d+)')
STREAM = re.compile(rb'"stream":\s*true')
INFORMATION = {
    "model_path": MODEL, "served_model_name": MODEL, "tokenizer_path": MODEL, "version": "0",
    "is_generation": True, "tp_size": 1, "dp_size": 1, "page_size": 16,
}  # fmt: skip
USAGE = {"prompt_tokens": 8, "completion_tokens": 8, "total_tokens": 16}


def _json(status: bytes, body: Any) -> bytes:
    data = json.dumps(body).encode()
    head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % (status, len(data)) + data


def _chunk(text: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(text), text)


MESSAGE = {"role": "assistant", "content": "eight words of an engine without any sense"}
CHOICE = {"index": 0, "finish_reason": "stop", "message": MESSAGE}
ANSWER = _json(
    b"200 OK",
    {"id": "a", "object": "chat.completion", "created": 1, "model": MODEL, "choices": [CHOICE],
     "usage": {**USAGE, "prompt_tokens_details": {"cached_tokens": 4}}},
)  # fmt: skip
DELTA = {"index": 0, "delta": {"content": "one word "}, "finish_reason": None}
EVENT = {"id": "a", "object": "chat.completion.chunk", "model": MODEL, "choices": [DELTA]}
PART = _chunk(b"data: " + json.dumps(EVENT).encode() + b"\n\n")
DONE = _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
BEGIN = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
KNOWN = {
    path: _json(b"200 OK", body)
    for paths, body in (
        (("/health", "/health_generate", "/flush_cache", "/abort_request"), {}),
        (("/get_server_info", "/server_info", "/get_model_info", "/model_info"), INFORMATION),
        (("/v1/models",), {"object": "list", "data": [{"id": MODEL, "object": "model"}]}),
    )
    for path in paths
}
UNKNOWN = _json(b"404 Not Found", {"detail": "Not Found"})


class Connection(asyncio.Protocol):
    """One keep-alive connection of a gateway."""

    def __init__(self) -> None:
        self._held: list[bytes] = []  # of a request that is not whole
        self._missing = 0
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ready."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Requests come one after the other; a gateway sends none ahead."""
        self._held.append(data)
        if self._missing:
            self._missing -= len(data)
        elif b"\r\n\r\n" in data or len(self._held) > 1:
            self._held = [b"".join(self._held)]
            head, end, body = self._held[0].partition(b"\r\n\r\n")
            found = re.search(rb"\r\ncontent-length: *(\d+)", head, re.IGNORECASE)
            self._missing = (int(found[1]) if found else 0) - len(body) if end else 1
        if self._missing <= 0:
            whole, self._held, self._missing = b"".join(self._held), [], 0
            self._answer(whole)

    def _answer(self, whole: bytes) -> None:
        method, path = whole.split(b" ", 2)[:2]
        if method == b"POST" and path == b"/v1/chat/completions":
            if STREAM.search(whole):
                found = CHUNKS.search(whole)
                self._transport.write(BEGIN)
                self._step(int(found[1]) if found else 1)
            else:
                self._transport.write(ANSWER)
        else:
            self._transport.write(KNOWN.get(path.decode("latin-1").partition("?")[0], UNKNOWN))

    def _step(self, left: int) -> None:
        if self._transport.is_closing():
            return
        if left:
            self._transport.write(PART)
            asyncio.get_running_loop().call_later(STEP_S, self._step, left - 1)
        else:
            self._transport.write(DONE)


async def main(port: int) -> None:
    """Until it is killed."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Connection, "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1])))
