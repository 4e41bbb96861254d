"""What rank asks for, and doctor at a process that is no gateway: over a real port."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi import FastAPI

from kvplane.doctor import doctor, lines
from kvplane.doors import Server, Switchboard
from kvplane.runtime import running
from kvplane.settings import Settings, parser, resolve
from kvplane.terminal import NotKvplane, complain, rank, say


def told(*words: str) -> Settings:
    return resolve(vars(parser().parse_args(words)), {}, {})


@pytest.mark.parametrize(("flags", "asked"), [((), {}), (("--salt", "team a"), {"salt": "team a"})])
async def test_a_salt_is_asked_for_where_one_is_named(
    flags: tuple[str, ...], asked: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    app, seen = FastAPI(), list[dict[str, Any]]()

    @app.post("/index/rank")
    async def answer(body: dict[str, Any]) -> dict[str, Any]:
        seen.append(body)
        return {"blocks": 1, "block_size": 16, "workers": []}

    server = Server(app, "127.0.0.1", 0, "index")
    async with running([server]):
        url = f"http://127.0.0.1:{server.port}"
        assert await rank(told("rank", "hello", "--url", url, "--model", "m", *flags)) == 0
    assert seen == [{"model": "m", "prompt": "hello", **asked}]
    assert "1 blocks of 16 tokens" in capsys.readouterr().out


async def test_rank_says_that_something_else_answers() -> None:
    """As an engine does, whose models are told where a gateway's are."""
    app = FastAPI()

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"data": [{"id": "tiny"}]}

    server = Server(app, "127.0.0.1", 0, "engine")
    async with running([server]):
        with pytest.raises(NotKvplane, match=r"is this kvplane\? /index/rank answered 404"):
            await rank(told("rank", "hello", "--url", f"http://127.0.0.1:{server.port}"))


@pytest.mark.parametrize("index", [True, False])
async def test_doctor_says_where_it_found_an_index_instead_of_a_gateway(
    index: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    app = FastAPI()
    if index:

        @app.get("/stats")
        async def stats() -> dict[str, Any]:
            return {"ready": False, "store_down_s": 0.0}

    server = Server(Switchboard({"/index": app, "": app}), "127.0.0.1", 0, "index")
    async with running([server]):
        assert await doctor(told("doctor", "--url", f"http://127.0.0.1:{server.port}")) == 1
    said = capsys.readouterr().err
    if index:
        assert "this is an index process" in said and "http://127.0.0.1:8000" in said
    else:
        assert "is this a gateway? /diagnosis answered 404" in said


@pytest.mark.parametrize(
    "words", ["\nBLOCKS   end   p1", "\x1b[2J", "\r", "\x9b1A", "\u2028", "\ud800"]
)
def test_what_an_engine_says_stays_in_its_line_and_draws_nothing(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    finding = {"blocks": False, "stage": "end", "culprit": "d1", "next_step": "look", "rooms": []}
    finding |= {"sentence": f"d1 answered 500: é {words}."}
    for line in lines({"findings": [finding]}, "here"):
        say(line)
    complain(words)
    found = capsys.readouterr()
    assert len(found.out.splitlines()) == 5 and "500: é" in found.out
    assert found.out.replace("\n", "").isprintable()
    assert found.err.startswith("kvplane: ") and found.err[:-1].isprintable()
