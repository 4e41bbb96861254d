"""House: engines and a gateway in the test's own process, each made as its command makes it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from kit.engine import FakeEngine
from kit.ports import free_port
from kit.wait import until
from kvplane.bootstrap import Address, DirectorySettings
from kvplane.doors import Server
from kvplane.engine import Engine, EngineSettings
from kvplane.engines import Directory
from kvplane.plane import GatewayPlane
from kvplane.runtime import Part, SystemClock
from kvplane.settings import parser, resolve
from kvplane.vocabulary import Role


@dataclass(frozen=True)
class Resident:
    """One engine of the house."""

    engine: Engine
    door: Server

    @property
    def url(self) -> str:
        return Address(self.engine.settings.host, self.engine.settings.port).url

    @property
    def pod(self) -> str:
        return self.url.removeprefix("http://")

    @property
    def bootstrap_port(self) -> int:
        return self.engine.settings.bootstrap_port

    @property
    def words(self) -> list[str]:
        """How a gateway is told of it."""
        prefill = self.engine.settings.role is Role.PREFILL
        return (
            ["--prefill", self.url, str(self.bootstrap_port)] if prefill else ["--decode", self.url]
        )


@dataclass(frozen=True)
class Reply:
    """One answer through the gateway."""

    status: int
    body: Any
    headers: Mapping[str, str]
    took_s: float

    @property
    def error(self) -> dict[str, Any]:
        """The error's members; fails where it is an answer."""
        found: dict[str, Any] = self.body["error"]
        return found

    @property
    def prefill(self) -> str:
        return self.headers["x-kvplane-prefill"]


@dataclass
class House:
    """Everything that is up; `close` takes what does not need each other down at once."""

    session: aiohttp.ClientSession
    url: str = ""
    _floors: tuple[list[Part], ...] = field(default_factory=lambda: ([], [], [], []))

    async def engine(
        self, role: Role, *, directory: bool = True, host: str = "127.0.0.1", **settings: Any
    ) -> Resident:
        """An engine behind its door; a prefill with its own rank directory, unless told not to."""
        ports = {"port": free_port(host), "bootstrap_port": free_port(host)}
        told = ports | {"events_port": 0, "replay_port": 0, "blocks": 128, "host": host} | settings
        engine = Engine(EngineSettings(role=role, **told), SystemClock())
        door = Server(engine.app, host, engine.settings.port, role.value)
        resident = Resident(engine, door)
        if role is Role.PREFILL and directory:
            await self.directory(resident.bootstrap_port, host)
        await self._begin(1, door)  # first: the engine's own sockets take any free port
        await self._begin(2, engine)
        if directory:
            await until(lambda: engine.not_ready() is None)
        return resident

    async def directory(self, port: int, host: str = "127.0.0.1") -> Part:
        """An empty rank directory."""
        part = Directory(host, port, DirectorySettings())
        await self._begin(3, part)
        return part

    async def end(self, part: Part) -> None:
        """Stop one part before the others."""
        for floor in self._floors:
            floor[:] = [one for one in floor if one is not part]
        await part.stop()

    async def leave(self, resident: Resident) -> None:
        """Stop an engine and its door; its directory stays."""
        await self.end(resident.door)
        await self.end(resident.engine)

    async def pair(self, **settings: Any) -> tuple[Resident, Resident]:
        """A prefill and a decode of the same settings."""
        prefill = await self.engine(Role.PREFILL, **settings)
        return prefill, await self.engine(Role.DECODE, **settings)

    async def gateway(
        self,
        *words: str,
        tables: Sequence[Mapping[str, Any]] = (),
        keys: Sequence[Mapping[str, Any]] = (),
        ready: bool = True,
        port: int | None = None,
    ) -> Part:
        """`kvplane all` over workers named by words or as [[workers]] tables; [[keys]] too."""
        port = port or free_port()
        line = ["all", "--port", str(port), "--tokenizer", "builtin", *words]
        file = {"keys": list(keys)} | ({"workers": list(tables)} if tables else {})
        told = resolve(vars(parser().parse_args(line)), {}, file)
        made = GatewayPlane(told, told.workers, port)
        await self._begin(0, made)
        self.url = f"http://127.0.0.1:{port}"
        if ready:
            await until(self._ready, what="a gateway that is ready")
        return made

    async def post(self, path: str, body: Any, at: str | None = None, **headers: str) -> Reply:
        """One POST to the gateway, or to an engine's URL."""
        began = time.monotonic()
        async with self.session.post((at or self.url) + path, json=body, headers=headers) as got:
            found = {name.lower(): value for name, value in got.headers.items()}
            return Reply(got.status, await got.json(), found, time.monotonic() - began)

    async def generate(self, tokens: Sequence[int], **more: Any) -> Reply:
        """A short answer to these tokens."""
        sampling = {"max_new_tokens": 4, "ignore_eos": True}
        body = {"input_ids": list(tokens), "sampling_params": sampling}
        return await self.post("/generate", body, **more)

    async def get(self, path: str, at: str | None = None) -> Any:
        """JSON of a GET that must go well."""
        async with self.session.get((at or self.url) + path) as got:
            assert got.status == 200, await got.text()
            return await got.json()

    async def worker(self, pod: str) -> dict[str, Any]:
        """What the gateway shows of one worker; nothing where it has none of this name."""
        found = (await self.get("/workers"))["workers"]
        return next((one for one in found if one["pod"] == pod), {})

    async def fault(self, engine: Resident, **fault: Any) -> None:
        """Break something in an engine on purpose."""
        assert (await self.post("/fault", fault, at=engine.url)).status == 200

    async def unbroken(self, engine: Resident) -> None:
        """Nothing of what was to break is left."""
        async with self.session.delete(f"{engine.url}/fault") as got:
            assert got.status == 200

    async def well(self, pod: str) -> bool:
        """Whether the gateway sends requests there."""
        return bool((await self.worker(pod)).get("is_healthy"))

    async def all_well(self, *pods: str) -> bool:
        """Whether it sends requests to all of them."""
        return all([await self.well(pod) for pod in pods])

    async def add(self, engine: Resident) -> None:
        """Tell the running gateway of one more engine."""
        role = engine.engine.settings.role.value
        new = {"url": engine.url, "worker_type": role}
        if role == "prefill":
            new["bootstrap_port"] = engine.bootstrap_port
        status = (await self.post("/workers", new)).status
        assert status == 202, status

    async def _ready(self) -> bool:
        async with self.session.get(f"{self.url}/readiness") as got:
            return got.status == 200

    async def _begin(self, floor: int, part: Part) -> None:
        await part.start()
        self._floors[floor].append(part)

    async def close(self) -> None:
        """Gateway, doors, engines, directories."""
        for floor in self._floors:
            await asyncio.gather(*(part.stop() for part in floor))


def prefill_facts(bootstrap_port: int, **changes: Any) -> dict[str, Any]:
    """What a scripted prefill says of itself; give them to kit.engine.fake_engine."""
    info = {
        "disaggregation_mode": "prefill",
        "disaggregation_bootstrap_port": bootstrap_port,
        "served_model_name": "tiny",
        "tp_size": 1,
        "kvplane": {"generation": "scripted"},
    } | changes
    return {"server_info": info, "v1__models": {"data": [{"id": "tiny"}]}}


def served(engine: FakeEngine) -> int:
    """How many requests for an answer reached a scripted engine."""
    return engine.asked.count("/generate")


@contextlib.asynccontextmanager
async def house() -> AsyncIterator[House]:
    """An empty house; all that moves in is gone at the end."""
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        built = House(session)
        try:
            yield built
        finally:
            await built.close()
