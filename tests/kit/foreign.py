"""Foreign: a rank directory that tells no generation, as SGLang's own server does.

Keep-alive works on it, so who keeps a connection goes on talking to it after it was replaced.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from urllib.parse import parse_qs, urlsplit

from kit.peer import Call, Peer, answer, peer


@dataclass
class Foreign:
    """Its table in the test's hands; rank ports by (tp, pp)."""

    ports: dict[tuple[int, int], int]
    page_size: int = 64
    complete: bool = True
    health: int = 200
    rooms: dict[str, int] = field(default_factory=dict)
    peer: Peer = field(default_factory=Peer)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.peer.port}"

    async def serve(self, call: Call) -> None:
        while request := await call.request():
            head, _, body = request.partition(b"\r\n\r\n")
            await call.send(self.reply(head.decode().split()[1], body))
            if b"connection: close" in head.lower():
                return

    def reply(self, target: str, body: bytes) -> bytes:
        url = urlsplit(target)
        if url.path == "/health":
            return answer(b"OK", self.health)
        if url.path == "/query_dp_ranks":
            asked = [str(room) for room in json.loads(body)["bootstrap_rooms"]]
            known = {room: self.rooms[room] for room in asked if room in self.rooms}
            return answer(json.dumps(known).encode())
        if not self.complete:
            text = b"Prefill server not fully registered yet (1 workers registered)."
            return answer(text, 503)
        asked_for = {name: int(values[0]) for name, values in parse_qs(url.query).items()}
        rank = asked_for["target_tp_rank"], asked_for["target_pp_rank"]
        if rank == (-1, -1):
            return answer(json.dumps(self.topology()).encode())
        if rank not in self.ports:
            return answer(b"Bootstrap info not found", 404)
        return answer(json.dumps({"rank_ip": "10.0.0.9", "rank_port": self.ports[rank]}).encode())

    def topology(self) -> dict[str, object]:
        return {
            "attn_tp_size": 1 + max(tp for tp, _ in self.ports),
            "attn_cp_size": 1,
            "dp_size": 1,
            "pp_size": 1 + max(pp for _, pp in self.ports),
            "page_size": self.page_size,
            "kv_cache_dtype": "auto",
            "follow_bootstrap_room": True,
        }


@contextlib.asynccontextmanager
async def foreign(*ports: int) -> AsyncIterator[Foreign]:
    """One on a free port of loopback, with a rank per port along tp."""
    found = Foreign({(tp, 0): port for tp, port in enumerate(ports)})
    async with peer(found.serve) as found.peer:
        yield found
