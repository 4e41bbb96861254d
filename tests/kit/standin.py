"""Stand-in: a scripted HTTP engine that keeps to the letter of a P/D worker and computes nothing.

It answers as SGLang's or vLLM's worker does at the door: refuses what they refuse, brings two legs
together by room or by transfer object, and keeps books of what is kept, fetched and computed twice.
Sources: sglang.md section 8, vllm.md sections 4 and 5.
"""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kit.peer import Call, answer

SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
MEET_S = 5.0  # a decode waits so long for its prefill


class Refused(Exception):
    """The engine says no, with this status."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status


@dataclass
class Between:
    """What two engines share: the network between their caches."""

    kept: dict[str, int] = field(default_factory=dict)  # name of a transfer -> tokens at prefill
    rooms: dict[Any, asyncio.Event] = field(default_factory=dict)  # room -> its prefill was there

    def room(self, room: Any) -> asyncio.Event:
        return self.rooms.setdefault(room, asyncio.Event())


@dataclass
class Standin(ABC):
    """One engine: give `script` to a peer."""

    between: Between
    bodies: list[dict[str, Any]] = field(default_factory=list)
    heads: list[dict[str, str]] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    answers: Callable[[dict[str, Any]], Any] | None = None  # takes the place of `reply`

    async def script(self, call: Call) -> None:
        """Every request of one connection."""
        while await self.one(call):
            pass

    async def one(self, call: Call) -> bool:
        """The next request of a connection; False where the client closed it instead."""
        if not (request := await call.request()):
            return False
        head, _, body = request.partition(b"\r\n\r\n")
        route, *lines = head.decode("latin-1").split("\r\n")
        method, path, _ = route.split(" ")
        headers = dict(line.lower().split(": ", 1) for line in lines)
        if path == "/abort_request":
            self.aborted.append(json.loads(body)["rid"])
            await call.send(answer(b""))
        elif method == "GET":
            await call.send(self.told(path))
        else:
            await self._serve(call, path, headers, json.loads(body))
        return True

    async def _serve(
        self, call: Call, path: str, headers: dict[str, str], body: dict[str, Any]
    ) -> None:
        self.heads.append(headers)
        self.bodies.append(body)
        try:
            told = await self.reply(path, headers, body)
        except Refused as no:
            text = json.dumps({"error": {"message": str(no)}}).encode()
            await call.send(answer(text, no.status))
            return
        if not body.get("stream"):
            await call.send(answer(json.dumps(told).encode()))
            return
        await call.send(SSE)
        for data in (json.dumps(told).encode(), b"[DONE]"):
            event = b"data: %s\n\n" % data
            await call.send(b"%x\r\n%s\r\n" % (len(event), event))
        await call.send(b"0\r\n\r\n")

    def told(self, path: str) -> bytes:
        """Of a GET."""
        return answer(b"{}", 404)

    @abstractmethod
    async def reply(self, path: str, headers: dict[str, str], body: dict[str, Any]) -> Any:
        """The answer's JSON; raises Refused."""


@dataclass
class SglangStandin(Standin):
    """A prefill or decode of SGLang. `scalar`: its routes take no lists of rooms."""

    prefill: bool = False
    scalar: bool = False
    headers: bool = False  # SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES
    used: list[int] = field(default_factory=list)

    async def reply(self, path: str, headers: dict[str, str], body: dict[str, Any]) -> Any:
        if self.headers and "x-override-bootstrap-room" in headers:
            body = body | {
                "bootstrap_host": headers["x-override-bootstrap-host"],
                "bootstrap_port": int(headers["x-override-bootstrap-port"]),
                "bootstrap_room": int(headers["x-override-bootstrap-room"]),
            }
        samples = self._samples(path, body)
        rooms = self._rooms(body, samples)
        if len(set(rooms)) < len(rooms) or set(rooms) & set(self.used):
            raise Refused(f"rooms {rooms} were used before", 500)  # SGLang's schedulers crash
        self.used += rooms
        for room in rooms:
            met = self.between.room(room)
            if self.prefill:
                met.set()
            else:
                async with asyncio.timeout(MEET_S):
                    await met.wait()
        if self.answers is not None:
            return self.answers(body)
        return self._shaped(path, samples, isinstance(body["bootstrap_room"], list))

    def _samples(self, path: str, body: dict[str, Any]) -> int:
        if path == "/v1/chat/completions":
            return int(body.get("n") or 1)
        n = body.get("n") or (body.get("sampling_params") or {}).get("n") or 1
        prompt = body.get("prompt") or body.get("text") or body.get("input_ids")
        many = isinstance(prompt, list) and not isinstance(prompt[0], int)
        return int(n) * (len(prompt) if many else 1)

    def _rooms(self, body: dict[str, Any], samples: int) -> list[int]:
        triple = [body.get(f"bootstrap_{name}") for name in ("host", "port", "room")]
        if any(isinstance(one, list) for one in triple):
            if self.scalar:
                raise Refused("Input should be a valid string: bootstrap_host")
            if [len(one) for one in triple] != [samples] * 3:
                raise Refused(f"{samples} samples, triple {triple}")
            return list(triple[2])
        if triple[2] is None:
            raise Refused("Disaggregated request received without bootstrap room id")
        assert type(triple[0]) is str, triple
        assert type(triple[1]) is int, triple
        return [triple[2] + at for at in range(samples)]

    def _shaped(self, path: str, samples: int, batched: bool) -> Any:
        if path == "/generate":
            each = [{"text": f"t{at}", "meta_info": {"id": f"{at}"}} for at in range(samples)]
            return each if batched else each[0]
        choices = [{"index": at, "text": f"t{at}"} for at in range(samples)]
        return {"choices": choices, "usage": {"prompt_tokens_details": {"cached_tokens": 3}}}


@dataclass
class VllmStandin(Standin):
    """A prefill or decode of vLLM, with a connector unless `connected` is False."""

    prefill: bool = False
    connected: bool = True
    mooncake: bool = False
    tells_prefills: bool = True  # its object says what the prefill found in its cache
    cached: int = 0  # tokens its cache holds of any prompt
    engine_id: str = "engine-a"
    fetched: int = 0
    computed: int = 0
    queries: int = 0
    tokens: int = 100  # of any prompt

    def told(self, path: str) -> bytes:
        if path == "/query":
            self.queries += 1
            table = {"0": {"engine_id": self.engine_id, "worker_addr": {"0": {"0": "tcp://x:1"}}}}
            return answer(json.dumps(table).encode())
        if path == "/metrics":
            name = 'vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source='
            page = f'{name}"local_compute"}} {self.computed}.0\n'
            page += f'{name}"external_kv_transfer"}} {self.fetched}.0\n'
            return answer(page.encode())
        return answer(b"{}", 404)

    async def reply(self, path: str, headers: dict[str, str], body: dict[str, Any]) -> Any:
        self._check(path, body)
        params = body.get("kv_transfer_params")
        told: dict[str, Any] = {"choices": self._choices(body)}
        cached = self.cached
        if params and params.get("do_remote_decode") and self.connected:
            self.computed += self.tokens
            given = self._keep(params)
            if given:
                told["kv_transfer_params"] = given
        elif params and params.get("do_remote_prefill") and self.connected:
            cached = await self._fetch(params)
        else:
            self.computed += self.tokens
        details = {"prompt_tokens_details": {"cached_tokens": cached}}
        return told | {"usage": {"prompt_tokens": self.tokens, **details}}

    def _check(self, path: str, body: dict[str, Any]) -> None:
        if not path.startswith("/v1/"):
            raise Refused("Not Found", 404)
        if body.get("stream_options") and not body.get("stream"):
            raise Refused("Stream options can only be defined when `stream=True`.")
        limit = body.get("max_completion_tokens") or body.get("max_tokens") or 16
        if (body.get("min_tokens") or 0) > limit:
            raise Refused(f"min_tokens must be less than or equal to max_tokens={limit}")
        params = body.get("kv_transfer_params") or {}
        if params.get("do_remote_decode"):
            if body.get("bad"):
                raise Refused("bad is not known")
            assert (limit, body.get("n") or 1, body.get("stream")) == (1, 1, False), body

    def _choices(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"index": at, "text": f"t{at}"} for at in range(body.get("n") or 1)]

    def _keep(self, params: dict[str, Any]) -> dict[str, Any] | None:
        if self.mooncake:
            if "transfer_id" in params:
                self.between.kept[params["transfer_id"]] = self.tokens
                self.between.room(params["transfer_id"]).set()
            return None
        name = f"cmpl-{len(self.bodies)}"
        self.between.kept[name] = self.tokens
        given = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[1, 2, 3, 4]],
            "remote_engine_id": self.engine_id,
            "remote_request_id": name,
            "remote_num_tokens": self.tokens,
            "unknown_to_gateways": 1.50,
        }
        own = {"remote_prefill_cached_tokens": self.cached} if self.tells_prefills else {}
        return given | own

    async def _fetch(self, params: dict[str, Any]) -> int:
        """Cached tokens as a decode tells them: its prefill's, or all it fetched."""
        name = params.get("remote_request_id")
        if self.mooncake:
            name = params["transfer_id"]
            assert params["remote_engine_id"], params
            async with asyncio.timeout(MEET_S):
                await self.between.room(name).wait()
        tokens = self.between.kept.pop(name, 0)
        if not tokens:
            self.computed += self.tokens
            return self.cached
        self.fetched += tokens
        theirs: int | None = params.get("remote_prefill_cached_tokens")
        return tokens if theirs is None else theirs
