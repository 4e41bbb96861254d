"""Gallery: a plane of processes in which one thing at a time is broken, and what is said of it.

A prefill, a decode, a gateway over them, and a rank directory of its own that the test fills with
what no engine would say. Everything is mended before the next fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from kit.plane import EngineSeat, Plane, plane
from kit.ports import free_port
from kit.wait import until
from kvplane.children import Child
from kvplane.settings import parser, resolve
from kvplane.wiring import COMMANDS

WATCHED = ["--health-check-interval-secs", "0.5", "--health-check-timeout-secs", "1.5"]
WATCHED += ["--health-failure-threshold", "2", "--health-success-threshold", "1"]
PATIENCE_S = 4.0  # of a request
GATEWAY = [
    *WATCHED, "--retry-max-retries", "1", "--request-timeout-secs", str(PATIENCE_S),
    "--cb-failure-threshold", "4", "--cb-success-threshold", "1", "--cb-timeout-duration-secs", "1",
]  # fmt: skip


@dataclass
class Gallery:
    """The plane, and its rank directory of lies."""

    running: Plane
    lies: int  # port of the directory that the test fills
    chance: random.Random = field(default_factory=lambda: random.Random(7))
    life: int = 0

    @property
    def prefill(self) -> EngineSeat:
        return self.running.engines["p1"]

    @property
    def decode(self) -> EngineSeat:
        return self.running.engines["d1"]

    # -- requests

    async def ask(self, name: str = "", **body: Any) -> tuple[int, dict[str, Any]]:
        """A short answer to tokens nobody had before; `text` instead of them where it is given."""
        tokens = [self.chance.randrange(32, 127) for _ in range(50)]
        sampling = {"max_new_tokens": 2, "ignore_eos": True}
        whole = ({} if "text" in body else {"input_ids": tokens}) | {"sampling_params": sampling}
        headers = {"x-request-id": name} if name else {}
        url = f"{self.running.url}/generate"
        async with self.running.session.post(url, json=whole | body, headers=headers) as answer:
            return answer.status, await answer.json()

    async def failed(self, name: str) -> dict[str, Any]:
        """One request that must fail: all its attempts as they are remembered."""
        status, found = await self.ask(name)
        assert status >= 500, found
        told: dict[str, Any] = await self.running.get(f"/requests/{name}")
        return told

    # -- workers

    async def forget(self) -> None:
        """The gateway has no prefill any more."""
        for pod in (self.prefill.pod, f"localhost:{self.prefill.ports[0]}", self._other):
            url = f"{self.running.url}/workers/{pod}"
            async with self.running.session.delete(url):
                pass  # it may not be there
        await until(lambda: self._workers(1), what="the decode alone is left")

    @property
    def _other(self) -> str:
        return f"localhost:{self.decode.ports[0]}"

    async def _workers(self, count: int) -> bool:
        return int((await self.running.get("/workers"))["total"]) == count

    async def add(self, url: str | None = None, **more: Any) -> None:
        """Name the prefill to the gateway, as it is or otherwise."""
        told = {"url": url or self.prefill.url, "worker_type": "prefill"}
        told |= {"bootstrap_port": self.prefill.ports[3]} | more
        status, found, _ = await self.running.ask("/workers", told)
        assert status == 202, found

    async def own_life(self) -> str:
        """The prefill's: a directory that tells it is taken for its own, at whatever port."""
        async with self.running.session.get(f"{self.prefill.url}/server_info") as answer:
            return str((await answer.json())["kvplane"]["generation"])

    async def register(self, **changes: Any) -> None:
        """One rank of a new life in the directory of lies."""
        self.life += 1
        whole = {
            "attn_tp_size": 1, "attn_tp_rank": 0, "attn_cp_size": 1, "attn_cp_rank": 0,
            "attn_dp_size": 1, "attn_dp_rank": 0, "system_dp_size": 1, "system_dp_rank": 0,
            "pp_size": 1, "pp_rank": 0, "rank_ip": "127.0.0.1", "rank_port": free_port(),
            "page_size": 16, "kv_cache_dtype": "float16", "kv_layout": "kvplane-2",
            "load_balance_method": "follow_bootstrap_room", "decode_allocation_policy": "early",
            "generation": f"lie-{self.life}",
        } | changes  # fmt: skip
        url = f"http://127.0.0.1:{self.lies}/route"
        async with self.running.session.put(url, json=whole) as answer:
            assert answer.status == 200, await answer.text()

    async def mended(self) -> None:
        """As it was at the start: nothing blocks and a request goes well."""
        for seat in (self.prefill, self.decode):
            async with self.running.session.delete(f"{seat.url}/fault"):
                pass
        await until(self._well, timeout_s=40, what="a plane that is well again")

    async def renamed(self) -> None:
        """The prefill under its own name and facts again."""
        await self.forget()
        await self.add()
        await self.mended()

    async def _well(self) -> bool:
        await asyncio.sleep(0.1)
        status, _ = await self.ask()
        return status == 200 and not (await self.running.get("/diagnosis"))["blocked"]

    # -- what is said

    async def says(self, rule: str, stage: str, culprit: str, blocks: bool = True) -> Any:
        """Until /diagnosis names it (first of all, where it blocks) and so does the doctor."""
        last: list[Any] = []

        async def seen() -> Any:
            await asyncio.sleep(0.05)
            last[:] = (await self.running.get("/diagnosis"))["findings"]
            if not blocks and any(one["blocks"] for one in last):
                return None  # a worker that was added just now was not looked at yet
            named = [one for one in (last[:1] if blocks else last) if one["rule"] == rule]
            right = (stage, culprit, blocks)
            met = [one for one in named if (one["stage"], one["culprit"], one["blocks"]) == right]
            return met[0] if met else None

        try:
            found = await until(seen, timeout_s=30)
        except AssertionError as error:
            raise AssertionError(f"{rule} {stage} {culprit} not said, but {last}") from error
        assert found["sentence"] and found["next_step"]
        code, text = await doctor("--url", self.running.url)
        assert code == int(blocks), text
        kind = "BLOCKS" if blocks else "look"
        assert f"{kind:<8} {stage:<17} {culprit}\n" in text, text
        assert f"next: {found['next_step']}\n" in text
        return found


async def doctor(*words: str) -> tuple[int, str]:
    """`kvplane doctor` in this process: its exit status, and what it wrote."""
    told = resolve(vars(parser().parse_args(["doctor", *words])), {}, {})
    with contextlib.redirect_stdout(io.StringIO()) as text:
        code = await COMMANDS["doctor"](told)
    return code, text.getvalue()


@contextlib.asynccontextmanager
async def gallery() -> AsyncIterator[Gallery]:
    """A plane that is well; all of it is gone at the end."""
    seats = [EngineSeat("p1", "prefill"), EngineSeat("d1", "decode")]
    port = free_port()
    words = ["bootstrap", "--port", str(port)]
    liar = Child("liar", words, f"http://127.0.0.1:{port}/health")
    try:
        await liar.start()
        async with plane(seats, GATEWAY) as running:
            yield Gallery(running, port)
    finally:
        await liar.stop()
