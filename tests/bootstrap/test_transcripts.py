"""Transcripts: what SGLang's own bootstrap server answered, asked of ours over real sockets.

Every step is equal in status, content type and Allow, and in the bytes of the body, except:
where SGLang answers 500 to bad input ours is 400, and where it counts calls ours counts ranks.
"""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from kit.directory import Reply, Wire, serving
from kit.ports import free_port

from kvplane.children import Child

VECTORS = Path(__file__).parents[1] / "vectors"
LINES = [json.loads(line) for line in (VECTORS / "sglang-bootstrap.jsonl").read_text().splitlines()]
SCENARIOS = {name: list(steps) for name, steps in groupby(LINES, lambda line: line["scenario"])}
CLOSED = "Prefill server not fully registered yet (1 workers registered)."
OURS = {  # tp rank 0 came twice and tp rank 1 never: SGLang's gate is open, ours is not
    ("reregister", 4): CLOSED,
    ("reregister", 5): CLOSED,
    ("reregister", 6): CLOSED,
}
FIELDS = ("body", "attn_", "system_dp", "pp_", "rank_", "page_size", "kv_cache_dtype", "prefill_",
          "target_", "bootstrap_room", "dp_rank")  # fmt: skip


def test_all_recorded_scenarios_are_here() -> None:
    assert len(SCENARIOS) == 21
    assert sum("request" in line for line in LINES) == 318


@pytest.mark.parametrize("name", SCENARIOS)
async def test_the_directory_answers_as_recorded(name: str) -> None:
    async with serving(room_ttl_s=4.0) as seat:  # SGLang's table was swept every 2 s: 2 to 4 s
        for line in SCENARIOS[name]:
            if "sleep_s" in line:
                seat.clock.advance(line["sleep_s"])
            if "request" not in line:
                continue
            asked, recorded = line["request"], line["response"]
            body = json.dumps(asked["json"]) if "json" in asked else asked.get("body", "")
            reply = await seat.wire.call(
                asked["method"], asked["path"], body.encode(), asked.get("headers")
            )
            check(name, line["step"], reply, recorded)


def check(name: str, step: int, reply: Reply, recorded: dict[str, Any]) -> None:
    where = f"{name} step {step}"
    if (name, step) in OURS:
        assert (reply.status, reply.text) == (503, OURS[name, step]), where
    elif recorded["status"] == 500:
        assert reply.status == 400, where
        assert reply.text.startswith(FIELDS), f"{where} names no field: {reply.text}"
        assert ": must be " in reply.text, where
    else:
        assert reply.status == recorded["status"], where
        assert reply.text == recorded["body"], where
        for header in ("content-type", "allow", "content-length"):
            assert reply.headers.get(header) == recorded["headers"].get(header), where
        if recorded["status"] == 200 and "json" in recorded:
            assert list(reply.json().items()) == list(recorded["json"].items()), where


STORIES = [
    json.loads(line) for line in (VECTORS / "sglang-client-requests.jsonl").read_text().splitlines()
][1:]


INSTANCES = [
    ["prefill-attn-dp2-tp2-pp2", "sender", "decode"], ["prefill-plain-dp2"], ["prefill-cp2"],
]  # fmt: skip


@pytest.mark.parametrize("stories", INSTANCES, ids=" ".join)
async def test_what_sglangs_own_clients_send_is_answered(stories: list[str]) -> None:
    async with serving() as seat:
        await replay(seat.wire, stories)
        assert seat.directory.complete(seat.clock.now())
        assert seat.wire.opened == 1, "keep-alive: one connection for all stories"


async def test_the_command_answers_every_story_of_sglangs_clients() -> None:
    """`kvplane bootstrap --host 127.0.0.1 --port N`, a process of its own for each instance."""
    for stories in INSTANCES:
        port = free_port()
        words = ["bootstrap", "--host", "127.0.0.1", "--port", str(port)]
        child, wire = Child("bootstrap", words, f"http://127.0.0.1:{port}/health"), Wire(port)
        await child.start()
        try:
            await replay(wire, stories)
            assert (await wire.call("GET", "/ranks")).json()["complete"]
        finally:
            await wire.close()
            await child.stop()


async def replay(wire: Wire, stories: list[str]) -> None:
    """All requests of these stories in order, each answered as their senders need it."""
    for line in (line for story in stories for line in STORIES if line["story"] == story):
        asked = line["request"]
        body = json.dumps(asked["json"]).encode() if "json" in asked else b""
        headers = {k: v for k, v in asked["headers"].items() if k != "Content-Length"}
        reply = await wire.call(asked["method"], asked["path"], body, headers)
        assert reply.status == 200, (line["story"], line["step"], reply.text)
        if asked["path"] == "/query_dp_ranks":
            assert reply.json() == {"12": 1}
        if asked["method"] == "GET" and "target_tp_rank=1" in asked["path"]:
            assert reply.json() == registered(asked["path"])


def registered(path: str) -> dict[str, Any]:
    """What the prefill of the story said of the rank a decode asks for."""
    wanted = {part.split("=")[0]: int(part.split("=")[1]) for part in path.split("?")[1].split("&")}
    for line in STORIES:
        told = line["request"].get("json", {})
        if line["story"].startswith("prefill-attn") and (
            told["attn_dp_rank"] == wanted["prefill_dp_rank"]
            and told["attn_tp_rank"] == wanted["target_tp_rank"]
            and told["pp_rank"] == wanted["target_pp_rank"]
        ):
            return {"rank_ip": told["rank_ip"], "rank_port": told["rank_port"]}
    raise AssertionError(f"no rank registered for {path}")
