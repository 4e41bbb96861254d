"""Engine info: the same answers as SGLang's server, which is made with FastAPI; bounded."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi import FastAPI, HTTPException
from fastapi.responses import PlainTextResponse
from hypothesis import given
from hypothesis import strategies as st
from kit.directory import Seat, serving

from kvplane.bootstrap.engine_info import EngineInfos

PUT, GET = "/register_transfer_engine_info", "/get_transfer_engine_info"
WEIGHTS = {"model.norm": [140213000, 8192, 2], "größe": [1, 2, 4]}


def body(rank: object = 3, **changes: Any) -> bytes:
    info = {"session_id": "10.0.0.3:17001", "weights_info_dict": WEIGHTS} | changes
    told = {"tp_rank": rank, "transfer_engine_info": without(info)}
    return json.dumps(without(told)).encode()


def without(members: dict[str, Any]) -> dict[str, Any]:
    """A member given as ... is left out."""
    return {name: value for name, value in members.items() if value is not ...}


def infos(most: int = 1_000_000, ranks: int = 16) -> EngineInfos:
    return EngineInfos(most, ranks)


def witness() -> FastAPI:
    """The protocol, made with the framework SGLang takes."""
    app = FastAPI()
    told: dict[int, Any] = {}

    @app.put(PUT)
    def put(data: dict[str, Any]) -> PlainTextResponse:
        try:
            info = data["transfer_engine_info"]
            told[data["tp_rank"]] = [info["session_id"], info["weights_info_dict"]]
        except (KeyError, TypeError) as error:
            raise HTTPException(400, str(error)) from None
        return PlainTextResponse("OK")

    @app.get(GET)
    def get(rank: int) -> dict[str, Any]:
        if rank < 0:
            raise HTTPException(400, "Invalid rank parameter")
        if rank not in told:
            raise HTTPException(404, f"No transfer engine info for rank {rank}")
        return {"rank": rank, "remote_instance_transfer_engine_info": told[rank]}

    return app


async def asked(app: Any, method: str, path: str, raw: bytes = b"") -> tuple[int, str, bytes]:
    """Status, content type, body; straight through ASGI."""
    path, _, query = path.partition("?")
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": raw, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    kind = [(b"content-type", b"application/json")]
    await app({"type": "http", "http_version": "1.1", "method": method, "path": path,
               "raw_path": path.encode(), "query_string": query.encode(), "headers": kind,
               "client": ("127.0.0.1", 5), "server": ("127.0.0.1", 1), "scheme": "http",
               "root_path": ""}, receive, send)  # fmt: skip
    headers = dict(sent[0]["headers"])
    found = b"".join(message.get("body", b"") for message in sent[1:])
    return sent[0]["status"], headers[b"content-type"].decode(), found


@pytest.mark.parametrize("call", [
    ("PUT", PUT, body()), ("GET", f"{GET}?rank=3"), ("GET", f"{GET}?rank=4"),
    ("GET", f"{GET}?rank=-1"), ("GET", f"{GET}?rank=x"), ("GET", f"{GET}?rank="), ("GET", GET),
    ("GET", f"{GET}?rank=1.5"), ("GET", f"{GET}?rank=+3"), ("GET", f"{GET}?rank=%203%20"),
    ("GET", f"{GET}?rank=3.0"), ("GET", f"{GET}?rank=0x3"), ("GET", f"{GET}?rank=9&rank=3"),
    ("GET", f"{GET}?rank=true"), ("GET", f"{GET}?rank={'9' * 30}"), ("GET", f"{GET}?rank=3&a=b"),
    ("PUT", PUT, b"[1]"), ("PUT", PUT, b"null"), ("PUT", PUT, b'"x"'), ("PUT", PUT, b"7"),
    ("PUT", PUT, b"{"), ("PUT", PUT, b"x"), ("PUT", PUT, b""),
    ("POST", PUT), ("DELETE", GET), ("HEAD", GET),
])  # fmt: skip
async def test_answers_are_those_of_the_framework_byte_for_byte(call: Any) -> None:
    theirs = witness()
    assert (await asked(theirs, "PUT", PUT, body()))[0] == 200
    async with serving() as seat:
        assert (await asked(seat.app, "PUT", PUT, body()))[0] == 200
        ours = await asked(seat.app, *call)
    expected = await asked(theirs, *call)
    compared = 2 if call[0] == "HEAD" else 3
    assert ours[:compared] == expected[:compared]


@pytest.mark.parametrize(("raw", "field"), [
    (body(...), "tp_rank"), (body("3"), "tp_rank"), (body(-1), "tp_rank"), (body(True), "tp_rank"),
    (body(1.0), "tp_rank"), (body(2**31), "tp_rank"), (body(None), "tp_rank"),
    (b'{"tp_rank": 3}', "transfer_engine_info"),
    (b'{"tp_rank": 3, "transfer_engine_info": 7}', "transfer_engine_info"),
    (body(session_id=...), "session_id"), (body(session_id=7), "session_id"),
    (body(weights_info_dict=[1]), "weights_info_dict"),
    (body(weights_info_dict={"a": "\ud800"}), "weights_info_dict"),
    (body(weights_info_dict={"a": 1}).replace(b"1}", b"1e999}"), "weights_info_dict"),
])  # fmt: skip
def test_a_wrong_member_is_a_400_that_names_it(raw: bytes, field: str) -> None:
    table = infos()
    answer, rank = table.register(raw)
    assert (answer.status, answer.kind, rank) == (400, "application/json", None)
    assert json.loads(answer.body)["detail"].startswith(f"{field} ")
    assert len(table) == 0


def test_a_newer_release_may_call_it_rank() -> None:
    table = infos()
    assert table.register(body().replace(b'"tp_rank": 3', b'"rank": 0, "tp_rank": 9'))[1] == 0


def test_who_registers_again_is_told_from_then() -> None:
    table = infos()
    table.register(body())
    before = table.bytes
    table.register(body(session_id="other", weights_info_dict={}))
    assert (len(table), table.session(3)) == (1, "other")
    assert table.bytes < before
    assert json.loads(table.lookup(b"rank=3").body) == {
        "rank": 3, "remote_instance_transfer_engine_info": ["other", {}],
    }  # fmt: skip


def test_the_table_is_bounded_in_ranks_and_in_bytes() -> None:
    table = infos(ranks=2)
    assert [table.register(body(rank))[0].status for rank in (0, 1, 2, 1)] == [200, 200, 507, 200]
    small = infos(most=300)
    assert small.register(body(0))[0].status == 200
    assert small.register(body(1, weights_info_dict={"a": "x" * 300}))[0].status == 507
    assert small.register(body(0, weights_info_dict={"a": "x" * 300}))[0].status == 507
    assert (len(small), small.lookup(b"rank=0").status) == (1, 200)


@pytest.mark.parametrize("raw", [
    b"\xff\xfe", b"[" * 100_000, b'{"a":' * 50_000, b"NaN", b'{"tp_rank": NaN}', b"\x00",
    b'{"tp_rank":' + b"9" * 5000 + b"}", b'["' + b"x" * 9000 + b'"]',
])  # fmt: skip
def test_garbage_is_refused_in_few_words(raw: bytes) -> None:
    table = infos()
    answer, rank = table.register(raw)
    assert (answer.status in (400, 422), rank, len(table)) == (True, None, 0)
    assert len(answer.body) < 600
    assert "detail" in json.loads(answer.body)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


@given(st.sampled_from(["tp_rank", "transfer_engine_info", "rank", "x"]), json_values)
def test_whatever_is_sent_is_taken_or_refused(member: str, value: Any) -> None:
    table = infos()
    answer, rank = table.register(json.dumps(json.loads(body()) | {member: value}).encode())
    assert answer.status in (200, 400, 422)
    assert (answer.status == 200) == (rank is not None)


async def test_a_rank_with_many_weights_is_taken_and_one_with_too_many_is_not(seat: Seat) -> None:
    many = {f"model.layers.{i}.weight": [i << 40, 8192, 2] for i in range(30_000)}
    raw = body(0, weights_info_dict=many)
    assert len(raw) > 1024 * 1024
    assert (await seat.wire.call("PUT", PUT, raw)).status == 200
    reply = await seat.wire.call("GET", f"{GET}?rank=0")
    assert reply.json()["remote_instance_transfer_engine_info"][1] == many
    assert (await seat.wire.call("PUT", PUT, b"x" * 9_000_000)).status == 413
    assert (await seat.wire.call("GET", f"{GET}?rank=0")).status == 200
