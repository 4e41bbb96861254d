"""The index over HTTP, through a real port: answers as in interface.md, errors as OpenAI's."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import struct
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import aiohttp
import msgspec
import pytest
from kit.clock import FakeClock
from kit.wait import until
from prometheus_client import CollectorRegistry, generate_latest

from kvplane.doors import Server
from kvplane.index import (
    Follower,
    IndexClient,
    IndexMetrics,
    IndexRefused,
    IndexSettings,
    MemoryStore,
    StoreDown,
    View,
    answers,
    chain,
    from_hex,
    index_app,
    to_hex,
)
from kvplane.index.chains import Chains
from kvplane.vocabulary import (
    Change,
    Cleared,
    ClearReason,
    Epoch,
    Group,
    GroupKind,
    Knowledge,
    Known,
    Namespace,
    Pod,
    PrefixChain,
    Removed,
    Role,
    Stored,
    Tier,
    Worker,
    WorkerUp,
)

A, B = Worker(Pod("ns/p:0")), Worker(Pod("[fd00::1]:8000"), 1)
SPACE, BIG = Namespace("qwen/3", 16), Namespace("qwen/3", 32)
TOKENS = list(range(100))  # 6 full blocks of 16, 3 of 32
PACKED = "application/vnd.kvplane.hashes"
PACKED_TOKENS = "application/vnd.kvplane.tokens"
CHAIN, BIG_CHAIN = chain(TOKENS, SPACE), chain(TOKENS, BIG)
UPS = [
    WorkerUp(Pod("ns/p:0"), "http://p0:30000", Role.PREFILL, events=("tcp://p0:5557",)),
    WorkerUp(Pod("[fd00::1]:8000"), "http://[fd00::1]:8000", Role.BOTH, dp_size=2),
]


class Index:
    """A served index and somebody who asks it."""

    def __init__(self, view: View, follower: Follower, session: aiohttp.ClientSession, url: str):
        self.view, self.follower, self.session, self.url = view, follower, session, url

    async def get(self, path: str, accept: str = "*/*") -> tuple[int, Any]:
        async with self.session.get(self.url + path, headers={"accept": accept}) as answer:
            return answer.status, json.loads(await answer.read())

    async def raw(self, path: str, accept: str) -> tuple[str, bytes]:
        async with self.session.get(self.url + path, headers={"accept": accept}) as answer:
            return answer.content_type, await answer.read()

    async def rank(self, body: Any) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.post(self.url + "/rank", data=data) as answer:
            return answer.status, await answer.json()

    async def packed(self, data: bytes, query: str, kind: str = PACKED) -> tuple[int, Any]:
        url, headers = self.url + "/rank" + query, {"content-type": kind}
        async with self.session.post(url, data=data, headers=headers) as answer:
            return answer.status, await answer.json()

    def tell(self, *changes: Change) -> None:
        for change in changes:
            self.view.apply(change)


async def tokenize(body: Mapping[str, Any]) -> Sequence[int]:
    if body["prompt"] == "odd":
        raise ValueError("no such text")
    return TOKENS


@pytest.fixture
def ups() -> list[WorkerUp]:
    """Whom discovery sees; a test may change it."""
    return list(UPS)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
async def index(
    clock: FakeClock, ups: list[WorkerUp], registry: CollectorRegistry
) -> AsyncIterator[Index]:
    view, store = View(), MemoryStore(clock)
    metrics = IndexMetrics(registry)
    follower = Follower(store, view, clock, metrics)
    settings = IndexSettings(most_hashes=50, body_bytes=1_000_000, snapshots=2)
    app = index_app(
        view, follower, fleet=lambda: ups, tokenize=tokenize, metrics=metrics, settings=settings,
        clock=clock,
    )  # fmt: skip
    server = Server(app, "127.0.0.1", 0, "index")
    await store.beat("", 3600)  # who tells what is known below
    await follower.start()
    await follower.ready.wait()
    await server.start()
    async with aiohttp.ClientSession() as session:
        yield Index(view, follower, session, f"http://127.0.0.1:{server.port}")
    await server.stop()
    await follower.stop()
    await store.close()


def stored(worker: Worker, blocks: Sequence[int], size: int = 16, tier: Tier = Tier.GPU) -> Stored:
    return Stored(worker, Epoch(2), tier, None, tuple(map(from_hex, map(to_hex, blocks))), size)


async def test_rank_says_who_holds_how_much_deepest_first(index: Index) -> None:
    index.tell(
        stored(A, CHAIN.blocks[:4]),
        stored(A, CHAIN.blocks[4:5], tier=Tier.CPU),
        stored(B, BIG_CHAIN.blocks, 32),
        Known(A, Epoch(2), Knowledge.PARTIAL, "gap 3..4 open", 1.0),
    )
    status, said = await index.rank({"model": "qwen/3", "token_ids": TOKENS, "n": 3})
    assert status == 200
    assert (said["namespace"], said["block_size"], said["blocks"]) == (BIG.text(), 32, 3)
    assert said["cursor"] == index.follower.cursor and said["lag_ms"] == 0
    assert said["workers"][:2] == [
        {
            "worker": "[fd00::1]:8000@1",
            "url": "http://[fd00::1]:8000",
            "dp_rank": 1,
            "epoch": 2,
            "block_size": 32,
            "blocks": 3,
            "depth_blocks": 3,
            "depth_tokens": 96,
            "tiers": {"gpu": 3, "cpu": 0, "disk": 0},
            "knowledge": "off",
            "reason": "events are not configured for this worker",
        },
        {
            "worker": "ns/p:0",
            "url": "http://p0:30000",
            "dp_rank": 0,
            "epoch": 2,
            "block_size": 16,
            "blocks": 6,
            "depth_blocks": 5,
            "depth_tokens": 80,
            "tiers": {"gpu": 4, "cpu": 1, "disk": 0},
            "knowledge": "partial",
            "reason": "gap 3..4 open",
        },
    ]
    silent = said["workers"][2]
    assert (silent["worker"], silent["epoch"], silent["depth_blocks"]) == (
        "[fd00::1]:8000",
        None,
        0,
    )


async def test_rank_takes_hashes_prompts_adapters_and_a_filter(index: Index) -> None:
    index.tell(stored(A, CHAIN.blocks), stored(B, CHAIN.blocks[:2]))
    hashes = [to_hex(block).upper() for block in CHAIN.blocks]
    _, said = await index.rank({"block_hashes": hashes, "workers": ["[fd00::1]:8000@1"]})
    assert [(w["worker"], w["depth_blocks"], w["blocks"]) for w in said["workers"]] == [
        ("[fd00::1]:8000@1", 2, 6)
    ]
    _, said = await index.rank({"model": "qwen/3", "prompt": "anything"})
    assert said["workers"][0]["depth_blocks"] == 6
    _, said = await index.rank({"model": "qwen/3", "token_ids": TOKENS, "adapter": "sql"})
    assert said["workers"][0]["depth_blocks"] == 0
    _, said = await index.rank({"model": "qwen/3", "token_ids": TOKENS, "salt": "tenant"})
    assert said["workers"][0]["depth_blocks"] == 0


async def test_prompts_around_one_block_are_answered(index: Index) -> None:
    index.tell(stored(A, CHAIN.blocks))
    for tokens, depth in ((0, 0), (1, 0), (15, 0), (16, 1), (17, 1)):
        _, said = await index.rank({"model": "qwen/3", "token_ids": TOKENS[:tokens]})
        assert said["workers"][0]["depth_blocks"] == depth and said["blocks"] == depth


async def test_a_large_body_is_read_beside_the_loop_and_answered_alike(index: Index) -> None:
    many = list(range(60_000))
    index.tell(stored(A, chain(many, SPACE).blocks))
    status, said = await index.rank({"model": "qwen/3", "token_ids": many})
    assert status == 200 and said["workers"][0]["depth_blocks"] == 3750


async def test_who_leaves_while_a_large_body_is_read_is_not_known_any_more(
    index: Index, ups: list[WorkerUp], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go, hashed = threading.Event(), threading.Event(), Chains.chain

    def waits(*given: Any) -> PrefixChain:
        begun.set()
        assert go.wait(10)
        return hashed(*given)

    monkeypatch.setattr(Chains, "chain", waits)
    gone, many = Worker(Pod("gone")), list(range(60_000))
    for workers in ([str(gone), str(A)], None):
        index.tell(stored(gone, CHAIN.blocks), stored(A, CHAIN.blocks))
        begun.clear()
        go.clear()
        body = {"model": "qwen/3", "token_ids": many, "workers": workers}
        asked = asyncio.create_task(index.rank(body))
        await asyncio.to_thread(begun.wait, 10)
        index.tell(Cleared(gone, Epoch(2), ClearReason.GONE))
        ups.clear()
        go.set()
        status, said = await asked
        if workers:
            assert (status, said["error"]["param"]) == (404, "workers[0]")
        else:
            assert [one["worker"] for one in said["workers"]] == [str(A)]


GOOD = {"model": "m", "token_ids": [1]}
HASH = "0123456789abcdef"


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        (b"{nope", "body", "JSON"),
        (b"", "body", "JSON"),
        (b"\xff\xfe", "body", "JSON"),
        (b"[1]", "body", "object"),
        ({}, "token_ids", "exactly one of"),
        ({**GOOD, "prompt": "x"}, "token_ids", "token_ids and prompt"),
        ({"token_ids": [1]}, "model", "the model's name"),
        ({"model": 7, "token_ids": [1]}, "model", "7 is wrong, must be str"),
        ({"model": "m", "token_ids": "1"}, "token_ids", "'1' is wrong, must be array"),
        ({"model": "m", "token_ids": [1, "x"]}, "token_ids[1]", "'x' is wrong, must be int"),
        ({"model": "m", "token_ids": [1, 2.5]}, "token_ids[1]", "2.5"),
        ({"model": "m", "token_ids": [1, -1]}, "token_ids[1]", "-1 is wrong"),
        ({"model": "m", "token_ids": [2**32]}, "token_ids[0]", "0 to 4294967295"),
        ({"model": "m", "token_ids": [2**70]}, "token_ids[0]", "0 to 4294967295"),
        ({"model": "m", "token_ids": [True]}, "token_ids[0]", "True is wrong"),
        ({"model": "m", "messages": []}, "messages", "at least one"),
        ({"model": "m", "messages": "hi"}, "messages", "array"),
        ({"block_hashes": ["xyz"]}, "block_hashes[0]", "16 hex digits"),
        ({"block_hashes": [HASH, HASH[:15]]}, "block_hashes[1]", "16 hex digits"),
        ({"block_hashes": [12]}, "block_hashes[0]", "12 is wrong, must be str"),
        ({"block_hashes": [HASH] * 51}, "block_hashes", "at most 50"),
        ({**GOOD, "workers": ["a b"]}, "workers[0]", "pod@rank"),
        ({**GOOD, "workers": "a"}, "workers", "array"),
        ({**GOOD, "adapter": 3}, "adapter", "3 is wrong, must be str"),
        ({"model": "m", "prompt": "odd"}, None, "no such text"),
    ],
)
async def test_a_wrong_question_is_refused_by_name(
    index: Index, body: Any, param: str | None, words: str
) -> None:
    status, said = await index.rank(body)
    assert status == 400, said
    error = said["error"]
    assert set(error) == {"message", "type", "code", "param"}
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_request")
    assert error["param"] == param and words in error["message"]


async def test_unknown_workers_routes_methods_and_sizes_have_their_own_status(
    index: Index,
) -> None:
    status, said = await index.rank({**GOOD, "workers": ["ns/p:0", "nobody"]})
    assert (status, said["error"]["param"]) == (404, "workers[1]")
    for path, expected in (
        ("/workers/nobody", 404),
        ("/workers/a@b", 404),
        ("/workers/a%20b", 400),
        ("/blocks/12", 400),
        ("/nothing", 404),
        ("/rank", 405),
        ("/snapshot?worker=a%20b", 400),
        ("/snapshot?worker=nobody", 404),
    ):
        status, said = await index.get(path)
        assert status == expected and said["error"]["message"], path
    status, said = await index.rank(b" " * 1_000_001)
    assert status == 413
    status, _ = await index.get("/snapshot?worker=ns/p:0", "image/png")
    assert status == 404
    index.tell(stored(A, CHAIN.blocks))
    status, said = await index.get("/snapshot?worker=ns/p:0", "image/png")
    assert status == 406 and "accept 'image/png': must be" in said["error"]["message"]


async def test_workers_show_what_is_known_of_each(index: Index, clock: FakeClock) -> None:
    index.tell(stored(A, CHAIN.blocks), Known(A, Epoch(2), Knowledge.EXACT, "live", 1.0))
    index.view.note(A, Epoch(2), 41, clock.wall() - 2)
    status, said = await index.get("/workers")
    assert status == 200
    assert [one["worker"] for one in said["workers"]] == [
        "[fd00::1]:8000", "[fd00::1]:8000@1", "ns/p:0",
    ]  # fmt: skip
    status, one = await index.get("/workers/ns/p:0")
    assert status == 200 and one == said["workers"][2]
    assert one == {
        "worker": "ns/p:0",
        "url": "http://p0:30000",
        "dp_rank": 0,
        "role": "prefill",
        "epoch": 2,
        "sequence": 41,
        "block_size": 16,
        "blocks": {"gpu": 6, "cpu": 0, "disk": 0},
        "last_event_age_s": 2.0,
        "gaps": 0,
        "knowledge": "exact",
        "reason": "live",
    }


async def test_one_block_names_its_holders_and_hex_goes_both_ways(index: Index) -> None:
    index.tell(stored(A, CHAIN.blocks), stored(A, CHAIN.blocks[:1], tier=Tier.DISK))
    status, said = await index.get(f"/blocks/{to_hex(CHAIN.blocks[0])}")
    assert status == 200 and said["block"] == to_hex(CHAIN.blocks[0])
    assert [(one["worker"], one["tiers"]) for one in said["holders"]] == [
        ("ns/p:0", ["gpu", "disk"])
    ]
    status, said = await index.get("/blocks/0000000000000000")
    assert status == 200 and said == {"block": "0" * 16, "holders": []}


async def test_stats_add_up(index: Index) -> None:
    index.tell(stored(A, CHAIN.blocks), stored(B, CHAIN.blocks, tier=Tier.CPU))
    _, said = await index.get("/stats")
    assert (said["workers"], said["blocks"], said["holdings"]) == (2, 6, 12)
    assert said["tiers"] == {"gpu": 6, "cpu": 6, "disk": 0} and said["bytes"] > 0
    assert said["ready"] is True and said["store_down_s"] == 0


async def test_a_snapshot_rebuilds_the_worker_as_lines_and_as_msgpack(index: Index) -> None:
    index.tell(stored(A, CHAIN.blocks), stored(A, CHAIN.blocks[:2], tier=Tier.CPU))
    kind, data = await index.raw("/snapshot?worker=ns/p:0", "*/*")
    head, *stretches = [json.loads(line) for line in data.splitlines()]
    assert kind == "application/x-ndjson" and head["cursor"] == index.follower.cursor
    assert (head["version"], head["worker"], head["stretches"]) == (1, "ns/p:0", len(stretches))
    assert {one["tier"]: one["blocks"] for one in stretches} == {
        "gpu": [to_hex(block) for block in CHAIN.blocks],
        "cpu": [to_hex(block) for block in CHAIN.blocks[:2]],
    }
    kind, data = await index.raw("/snapshot?worker=ns/p:0", "application/msgpack")
    assert kind == "application/msgpack"
    assert data == b"".join(map(msgspec.msgpack.encode, [head, *map(numbers, stretches)]))


def numbers(stretch: dict[str, Any]) -> dict[str, Any]:
    return {**stretch, "blocks": [int(text, 16) for text in stretch["blocks"]]}


async def test_a_snapshot_of_all_has_every_worker_and_where_to_go_on(index: Index) -> None:
    index.tell(stored(A, CHAIN.blocks), stored(B, CHAIN.blocks[:2], tier=Tier.DISK))
    index.tell(Known(A, Epoch(2), Knowledge.PARTIAL, "gap 3..4 open", 1.0))
    _, data = await index.raw("/snapshot", "*/*")
    *lines, end = [json.loads(line) for line in data.splitlines()]
    held: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        held.setdefault(line.get("worker") or list(held)[-1], []).append(line)
    assert list(held) == ["[fd00::1]:8000@1", "ns/p:0"]
    for head, *stretches in held.values():
        assert head["stretches"] == len(stretches) and head["cursor"] == index.follower.cursor
    assert [line["blocks"] for line in held["ns/p:0"][1:]] == [[*map(to_hex, CHAIN.blocks)]]
    assert held["ns/p:0"][0]["knowledge"] == "partial"
    assert held["ns/p:0"][0]["reason"].startswith("gap 3..4 open")
    assert end == {"end": True, "cursor": index.follower.cursor, "until": index.follower.cursor}
    _, packed = await index.raw("/snapshot", "application/msgpack")
    unpacker = msgpack_lines(packed)
    assert [line.get("worker") or line.get("end") or line["tier"] for line in unpacker] == [
        "[fd00::1]:8000@1", "disk", "ns/p:0", "gpu", True,
    ]  # fmt: skip


async def test_a_snapshot_during_which_the_view_breaks_has_no_last_line_to_go_on_from(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else who reads it takes the rest of the workers for empty, and no change ever tells more."""

    def breaks(*_: object) -> None:
        raise IndexError("a fault of ours")

    for worker in range(40):
        blocks = range(worker << 20, (worker << 20) + 20_000)
        index.tell(stored(Worker(Pod(f"p{worker}")), blocks))
    async with index.session.get(index.url + "/snapshot") as answer:
        first = await answer.content.readline()
        with monkeypatch.context() as patch, pytest.raises(IndexError):
            patch.setattr(View, "take", breaks)
            index.follower._take(None)  # type: ignore[arg-type]  # whatever it is
        lines = [first, *(await answer.read()).splitlines()]
    assert "worker" in json.loads(first) and "end" not in json.loads(lines[-1])


async def test_a_snapshot_names_the_cache_group_of_what_is_not_counted(index: Index) -> None:
    group, empty = Group(1, GroupKind.WINDOW, 128, 32), Group(2, GroupKind.STATE)
    two = msgspec.structs.replace(stored(A, CHAIN.blocks[2:4], tier=Tier.CPU), group=group)
    index.tell(stored(A, CHAIN.blocks), two, msgspec.structs.replace(two, blocks=(), group=empty))
    _, data = await index.raw("/snapshot?worker=ns/p:0", "*/*")
    head, counted, *further = [json.loads(line) for line in data.splitlines()]
    assert head["stretches"] == 3 and "group" not in counted
    shown = {"number": 1, "kind": "window", "tokens": 128, "block_size": 32}
    blocks = sorted(map(to_hex, CHAIN.blocks[2:4]))
    none = {"number": 2, "kind": "state", "tokens": 0, "block_size": 0}
    assert further == [
        {"tier": "cpu", "parent": None, "blocks": blocks, "group": shown},
        {"tier": "gpu", "parent": None, "blocks": [], "group": none},
    ]


def msgpack_lines(data: bytes) -> list[dict[str, Any]]:
    """Objects one after the other."""
    found = []
    while data:
        for end in range(1, len(data) + 1):
            with contextlib.suppress(msgspec.DecodeError):
                found.append(msgspec.msgpack.decode(data[:end]))
                break
        data = data[end:]
    return found


async def test_snapshots_on_their_way_are_few_and_one_that_is_dropped_makes_room(
    index: Index,
) -> None:
    for worker in range(40):
        blocks = range(worker << 20, (worker << 20) + 20_000)
        index.tell(stored(Worker(Pod(f"p{worker}")), blocks))
    reading = [await index.session.get(index.url + "/snapshot") for _ in range(2)]
    status, said = await index.get("/snapshot")
    assert (status, said["error"]["code"]) == (429, "overloaded")
    for answer in reading:
        answer.close()

    async def free() -> bool:
        async with index.session.get(index.url + "/snapshot?worker=p0") as answer:
            return answer.status == 200 and len((await answer.read()).splitlines()) > 1

    await until(free, what="the place of one that left")


@pytest.mark.parametrize(
    ("asked", "status", "depth"),
    [
        ({"model": "qwen/3"}, 200, 6),
        ({"model": "sql"}, 200, 4),  # an adapter named as the model, as at the gateway
        ({"model": "sql", "adapter": "sql"}, 200, 4),
        ({"model": "qwen/3", "adapter": "sql"}, 200, 4),
        ({"model": "qwen/3", "adapter": "nobody's"}, 200, 0),
        ({"model": "qwen"}, 404, None),
        ({"model": "QWEN/3"}, 404, None),
    ],
)
async def test_a_model_that_nobody_serves_is_refused_with_the_names_that_are_served(
    index: Index, ups: list[WorkerUp], asked: dict[str, str], status: int, depth: int | None
) -> None:
    ups[:] = [replace(up, model="qwen/3", adapters=("sql",)) for up in UPS]
    tuned = chain(TOKENS, Namespace("qwen/3", 16, "sql"))
    index.tell(stored(A, CHAIN.blocks), stored(A, tuned.blocks[:4]))
    found, said = await index.rank({**asked, "token_ids": TOKENS})
    assert found == status, said
    if status == 200:
        assert said["workers"][0]["depth_blocks"] == depth
        return
    assert (said["error"]["code"], said["error"]["param"]) == ("model_not_found", "model")
    assert (
        f"{asked['model']!r} is not served here; served are qwen/3, sql" in said["error"]["message"]
    )


async def test_without_a_fleet_that_names_its_models_any_model_may_be_asked(
    index: Index, ups: list[WorkerUp]
) -> None:
    ups[:] = [replace(UPS[0], model="qwen/3"), UPS[1]]  # one of them does not say
    assert (await index.rank({**GOOD, "model": "x"}))[0] == 200
    ups.clear()
    assert (await index.rank({**GOOD, "model": "x"}))[0] == 200
    ups[:] = [replace(up, model="qwen/3") for up in UPS]
    assert (await index.rank({**GOOD, "model": "x"}))[0] == 404
    assert (await index.rank({"block_hashes": [HASH]}))[0] == 200
    assert (await index.rank({"block_hashes": [HASH], "model": "x"}))[0] == 200


SECRET = "tenant-17-secret"


async def test_a_salt_keeps_tenants_apart_and_is_shown_nowhere(
    index: Index, registry: CollectorRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    """FR-EV-14: equal tokens, another salt, other blocks; and no answer, log or metric shows it."""
    caplog.set_level(logging.DEBUG)
    salted = chain(TOKENS, replace(SPACE, salt=SECRET))
    index.tell(stored(A, salted.blocks), stored(B, CHAIN.blocks))
    heard = []

    async def ask(**more: Any) -> Any:
        _, said = await index.rank({"model": "qwen/3", "token_ids": TOKENS, **more})
        heard.append(json.dumps(said))
        return said

    def holders(said: Any) -> list[str]:
        return [one["worker"] for one in said["workers"] if one["depth_blocks"]]

    mine = await ask(salt=SECRET)
    assert holders(mine) == ["ns/p:0"]
    assert holders(await ask(salt="another")) == []
    assert holders(await ask()) == ["[fd00::1]:8000@1"]
    assert re.search(r'"salt:[0-9a-f]{8}"', mine["namespace"])
    assert mine["namespace"] == (await ask(salt=SECRET))["namespace"]
    assert mine["namespace"] != (await ask(salt="another"))["namespace"]
    for wrong in (
        {"salt": [SECRET]}, {"salt": {"a": SECRET}}, {"model": "nobody", "salt": SECRET},
        {"salt": SECRET, "token_ids": "x"}, {"salt": SECRET, "workers": ["nobody"]},
    ):  # fmt: skip
        await ask(**wrong)
    broken = json.dumps({"salt": SECRET, "model": "m"}).encode()[:-1]
    heard.append(json.dumps((await index.rank(broken))[1]))
    for path in ("/workers", "/stats", "/snapshot", f"/blocks/{to_hex(salted.blocks[0])}"):
        heard.append((await index.raw(path, "*/*"))[1].decode())
    heard += [generate_latest(registry).decode(), caplog.text]
    assert not [text for text in heard if SECRET in text]


async def test_an_index_that_is_not_loaded_says_so_instead_of_nothing(clock: FakeClock) -> None:
    follower = Follower(MemoryStore(clock), View(), clock)  # never started
    server = Server(index_app(View(), follower), "127.0.0.1", 0, "index")
    await server.start()
    async with aiohttp.ClientSession() as session:
        async with session.post(f"http://127.0.0.1:{server.port}/rank", json=GOOD) as answer:
            assert answer.status == 503 and answer.headers["retry-after"] == "1"
            assert (await answer.json())["error"]["code"] == "index_loading"
        client = IndexClient(session, f"http://127.0.0.1:{server.port}/")
        with pytest.raises(IndexRefused, match=r"503.*not loaded"):
            await client.rank(GOOD)
    await server.stop()


async def test_without_a_tokenizer_a_text_is_refused_with_what_to_do(clock: FakeClock) -> None:
    follower = Follower(MemoryStore(clock), View(), clock)
    follower.ready.set()
    server = Server(index_app(View(), follower), "127.0.0.1", 0, "index")
    await server.start()
    async with aiohttp.ClientSession() as session:
        client = IndexClient(session, f"http://127.0.0.1:{server.port}")
        with pytest.raises(IndexRefused, match="--tokenizer"):
            await client.rank({"model": "m", "prompt": "x"})
        assert (await client.rank(GOOD))["workers"] == []
        assert await client.workers() == []
    await server.stop()


async def test_the_client_says_when_nobody_answers() -> None:
    async with aiohttp.ClientSession() as session:
        with pytest.raises(StoreDown):
            await IndexClient(session, "http://127.0.0.1:9").rank(GOOD)


@pytest.mark.parametrize("where", [b'{"model":"m","messages":[{"a":%s}]}', b'{"x":%s}', b"%s"])
async def test_a_body_nested_too_deep_is_refused(index: Index, where: bytes) -> None:
    status, found = await index.rank(where % (b"[" * 9000 + b"]" * 9000))
    assert status == 400 and found["error"]["param"] == "body"


@pytest.mark.parametrize("way", [b'"prompt":"hi"', b'"messages":[{"role":"user"}]'])
async def test_a_text_beside_what_is_no_text_is_refused(index: Index, way: bytes) -> None:
    """Members that only a tokenizer looks at are read as well."""
    for body in (b'{"model":"m",%s,"x":"\xff\xfe"}', b'{"model":"m","\xff":1,%s}'):
        status, found = await index.rank(body % way)
        assert (status, found["error"]["param"]) == (400, "body")


@pytest.mark.parametrize("broken", [b"[1", b'{"model":1', b'{"token_ids":["a",'])
async def test_a_body_that_is_wrong_before_it_is_broken_is_refused(
    index: Index, broken: bytes
) -> None:
    assert (await index.rank(broken))[0] == 400


async def test_a_snapshot_is_of_one_moment_whenever_it_is_read(index: Index) -> None:
    index.tell(stored(A, CHAIN.blocks))
    lines = answers.snapshot(index.view, A, "cursor", True)
    index.tell(Removed(A, Epoch(2), Tier.GPU, CHAIN.blocks))
    assert [len(line["blocks"]) for line in list(lines)[1:]] == [6]


async def test_a_worker_that_said_nothing_yet_is_judged_by_the_size_discovery_tells(
    index: Index, ups: list[WorkerUp]
) -> None:
    ups[:] = [replace(UPS[0], block_size=32)]
    _, said = await index.rank({"model": "qwen/3", "token_ids": TOKENS})
    (held,) = said["workers"]
    assert (held["block_size"], held["blocks"], held["depth_blocks"]) == (32, 3, 0)


async def test_packed_hashes_are_answered_like_hashes_in_json(index: Index) -> None:
    index.tell(stored(A, CHAIN.blocks), stored(B, CHAIN.blocks[:2]))
    data = struct.pack("<6Q", *CHAIN.blocks)
    for kind in (PACKED, PACKED.upper() + "; v=1"):
        for query, more in (
            ("", {}),
            ("?model=qwen%2F3&adapter=sql", {"model": "qwen/3", "adapter": "sql"}),
            (
                "?workers=%5Bfd00::1%5D:8000@1&workers=ns/p:0",
                {"workers": ["[fd00::1]:8000@1", "ns/p:0"]},
            ),
        ):
            status, said = await index.packed(data, query, kind)
            hashes = [to_hex(block) for block in CHAIN.blocks]
            assert (status, said) == await index.rank({"block_hashes": hashes, **more})
            assert [one["depth_blocks"] for one in said["workers"][:2]] == [6, 2]
    assert (await index.packed(b"", ""))[1]["blocks"] == 0


@pytest.mark.parametrize(
    ("data", "query", "status", "param", "words"),
    [
        (b"1234567", "", 400, "block_hashes", "multiple of 8"),
        (b"12345678" * 51, "", 400, "block_hashes", "at most 50"),
        (b"12345678", "?workers=ns/p:0&workers=a%20b", 400, "workers[1]", "pod@rank"),
        (b"12345678", "?workers=nobody", 404, "workers[0]", "not known"),
        (b"1" * 1_000_008, "", 413, None, "at most 1000000 bytes"),
    ],
)
async def test_wrong_packed_hashes_are_refused_by_name(
    index: Index, data: bytes, query: str, status: int, param: str | None, words: str
) -> None:
    found, said = await index.packed(data, query)
    assert (found, said["error"]["param"]) == (status, param) and words in said["error"]["message"]


async def test_packed_tokens_are_answered_like_tokens_in_json(
    index: Index, ups: list[WorkerUp]
) -> None:
    ups[:] = [replace(up, model="qwen/3", adapters=("sql",)) for up in UPS]
    tuned = chain(TOKENS, Namespace("qwen/3", 16, "sql"))
    index.tell(stored(A, CHAIN.blocks), stored(B, CHAIN.blocks[:2]), stored(A, tuned.blocks[:4]))
    for tokens in (TOKENS, TOKENS[:15], list(range(2**32 - 40, 2**32)), TOKENS * 800):
        data = struct.pack(f"<{len(tokens)}I", *tokens)
        for query, more in (
            ("?model=qwen%2F3", {"model": "qwen/3"}),
            ("?model=qwen%2F3&adapter=sql", {"model": "qwen/3", "adapter": "sql"}),
            ("?model=sql&workers=ns/p:0", {"model": "sql", "workers": ["ns/p:0"]}),
        ):
            status, said = await index.packed(data, query, PACKED_TOKENS + " ; v=1")
            assert (status, said) == await index.rank({"token_ids": tokens, **more})
            assert status == 200 and said["blocks"] == len(tokens) // 16
    assert (await index.packed(b"", "?model=qwen/3", PACKED_TOKENS))[1]["blocks"] == 0


@pytest.mark.parametrize(
    ("data", "query", "status", "param", "words"),
    [
        (b"1234567", "?model=m", 400, "token_ids", "multiple of 4"),
        (b"1234", "", 400, "model", "in the query string"),
        (b"1234", "?model=m&salt=tenant-17", 400, "salt", "sent in JSON"),
        (b"1234", "?model=m&items=", 400, "items", "sent in JSON"),
        (b"1234", "?model=m&workers=nobody", 404, "workers[0]", "not known"),
        (b"1" * 1_000_004, "?model=m", 413, None, "at most 1000000 bytes"),
    ],
)
async def test_wrong_packed_tokens_are_refused_by_name(
    index: Index, data: bytes, query: str, status: int, param: str | None, words: str
) -> None:
    found, said = await index.packed(data, query, PACKED_TOKENS)
    assert (found, said["error"]["param"]) == (status, param) and words in said["error"]["message"]
    assert "tenant-17" not in json.dumps(said)


async def test_bytes_without_a_kind_are_json_as_clients_send_it(index: Index) -> None:
    for kind in ("application/octet-stream", "text/plain", "application/x-www-form-urlencoded"):
        status, _ = await index.packed(json.dumps({"block_hashes": [HASH]}).encode(), "", kind)
        assert status == 200


async def test_a_body_in_pieces_is_read_whole_and_one_that_breaks_off_harms_nobody(
    index: Index,
) -> None:
    index.tell(stored(A, CHAIN.blocks))
    body = json.dumps({"model": "qwen/3", "token_ids": TOKENS}).encode()

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(body), 50):
            yield body[at : at + 50]
            await asyncio.sleep(0)

    async with index.session.post(index.url + "/rank", data=pieces()) as answer:
        assert (await answer.json())["workers"][0]["depth_blocks"] == 6
        assert answer.headers["content-type"] == "application/json"
    _, writer = await asyncio.open_connection("127.0.0.1", int(index.url.rpartition(":")[2]))
    writer.write(b"POST /rank HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\n{")
    await writer.drain()
    writer.close()
    assert (await index.rank({"model": "qwen/3", "token_ids": TOKENS}))[0] == 200


async def test_the_schema_names_the_route_that_stands_before_it(index: Index) -> None:
    _, schema = await index.get("/openapi.json")
    assert "post" in schema["paths"]["/rank"]
