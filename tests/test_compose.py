"""compose.yaml: valid by the Compose specification, and its very commands make a working plane.

No container engine runs on every machine. So the test plays the container network: names of
services become 127.0.0.1, wildcard binds become loopback, and each port becomes a free one; every
command runs otherwise as written, as a plain process, beside a real Redis server.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from kit.plane import together
from kit.ports import free_ports
from kit.wait import until

from kvplane.children import Child
from kvplane.options import COMMANDS

ROOT = Path(__file__).parents[1]
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = [name for name, service in SERVICES.items() if name != "redis"]
PORT = re.compile(r"(?<![\d.])(\d{4,5})(?!\d)")


def test_the_file_is_valid_by_the_compose_specification() -> None:
    spec = pytest.importorskip("compose_spec", reason="compose-spec has no wheel for this machine")
    resolved = yaml.safe_dump(COMPOSE)
    assert set(spec.PyCompose.from_yaml(resolved).service_names()) == set(SERVICES)
    with pytest.raises(ValueError, match="prots"):  # and the check can fail
        spec.PyCompose.from_yaml(resolved.replace("ports:", "prots:"))


def test_the_services_are_those_of_the_plan_and_each_has_a_health_check() -> None:
    assert sorted(SERVICES) == sorted(
        ["redis", "ingest", "index", "router", "prefill-1", "prefill-2", "decode-1", "decode-2"]
    )
    assert all("test" in service["healthcheck"] for service in SERVICES.values())


def test_nothing_is_published_off_loopback_and_the_image_runs_as_nobody() -> None:
    published = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert published and all(port.startswith("127.0.0.1:") for port in published)
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text()
    assert re.search(r"^USER 10001", dockerfile, re.M)
    for folder in ("src", "index", "bootstrap", "router", "events", "transfer", "engine"):
        assert f"COPY {folder} " in dockerfile


class Network:
    """Names, wildcards and ports of the compose file as this machine has them."""

    def __init__(self, redis_url: str) -> None:
        self._redis_url = redis_url
        words = [word for name in OURS for word in SERVICES[name]["command"]]
        found = {port for word in words if "redis:" not in word for port in PORT.findall(word)}
        self.ports = dict(zip(sorted(found), free_ports(len(found)), strict=True))

    def local(self, word: str) -> str:
        if word.startswith("redis://redis:"):
            return self._redis_url
        if word in SERVICES and word not in COMMANDS:
            return "127.0.0.1"
        for name in SERVICES:
            word = re.sub(rf"//{name}(?=:)", "//127.0.0.1", word)
        word = re.sub(r"^0\.0\.0\.0$", "127.0.0.1", word)
        return PORT.sub(lambda found: str(self.ports.get(found[1], found[1])), word)

    def child(self, name: str) -> Child:
        service = SERVICES[name]
        *_, url = service["healthcheck"]["test"]
        command = [self.local(word) for word in service["command"]]
        return Child(name, command, self.local(url), deadline_s=60)


async def test_the_commands_of_all_services_carry_a_chat(redis_url: str) -> None:
    network = Network(redis_url)
    gateway = f"http://127.0.0.1:{network.ports['8000']}"
    index = f"http://127.0.0.1:{network.ports['8100']}"
    async with contextlib.AsyncExitStack() as stack:
        # In no order: each waits for what it needs.
        children = [network.child(name) for name in OURS]
        await stack.enter_async_context(together(children))
        session = await stack.enter_async_context(aiohttp.ClientSession())

        async def all_known() -> bool:
            states = []
            for url in (index, f"{gateway}/index"):
                async with session.get(f"{url}/workers") as answer:
                    workers = (await answer.json())["workers"]
                states += [worker["knowledge"] for worker in workers]
            return states == ["exact"] * 8

        await until(all_known, timeout_s=30, what="index and router to know four workers exactly")
        messages = [{"role": "user", "content": "tell me about the sea " * 8}]
        body = {"model": "tiny", "messages": messages, "max_tokens": 8}
        first = await _chat(session, gateway, body)
        assert first["headers"]["x-kvplane-knowledge"] == "exact"

        async def hit() -> bool:
            again = await _chat(session, gateway, body)
            return again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0

        await until(hit, timeout_s=20, what="a hit on the prefill that holds the prompt")


async def _chat(
    session: aiohttp.ClientSession, gateway: str, body: dict[str, Any]
) -> dict[str, Any]:
    async with session.post(f"{gateway}/v1/chat/completions", json=body) as answer:
        found: dict[str, Any] = await answer.json()
        assert answer.status == 200, found
        return {**found, "headers": answer.headers}
