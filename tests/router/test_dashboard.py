"""The page's door: what is open, what wants a key, what is told, and that nothing secret is."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import pytest
from kit.clock import FakeClock
from kit.gatehouse import Gatehouse, gatehouse
from kit.peer import answer, replies

from kvplane.doors import Server, Switchboard
from kvplane.router.dashboard import dashboard_app
from kvplane.router.dashboard.door import FILES, MOST_BYTES
from kvplane.router.dashboard.live import BEAT_S, MOST_PAGES, Board, Live
from kvplane.router.dashboard.picture import picture, quantile, shares
from kvplane.router.dashboard.weighing import weighed
from kvplane.router.errors import GatewayError
from kvplane.router.fleet import Fleet
from kvplane.router.meeting import Meeting
from kvplane.router.policies import Candidate
from kvplane.router.remembered import Party, Why
from kvplane.router.settings import RouterSettings
from kvplane.runtime import running
from kvplane.vocabulary import Pod, Role, Worker, WorkerUp

USAGE = {"usage": {"prompt_tokens": 64, "prompt_tokens_details": {"cached_tokens": 32}}}
GOOD = replies(answer(json.dumps(USAGE).encode()))
ENGINES = {"p1": GOOD, "p2": GOOD, "d1": GOOD}
KEY = "the-admins-own-key"
FAR = {"x-forwarded-for": "192.0.2.7"}
ASKED = {"path": "/v1/completions", "body": {"model": "tiny", "prompt": "who would take this?"}}


@dataclass
class Door:
    """The page of a running gateway."""

    house: Gatehouse
    url: str
    board: Board

    async def get(self, path: str = "", **headers: str) -> tuple[int, str, Any]:
        async with self.house.session.get(self.url + path, headers=headers) as got:
            return got.status, await got.text(), got.headers

    async def weigh(self, asked: Any = ASKED, **headers: str) -> tuple[int, Any]:
        sent = asked if isinstance(asked, bytes) else json.dumps(asked).encode()
        url = f"{self.url}/weigh"
        async with self.house.session.post(url, data=BytesIO(sent), headers=headers) as got:
            return got.status, await got.json()


@contextlib.asynccontextmanager
async def door(key: str = "", **facts: Any) -> AsyncIterator[Door]:
    settings = RouterSettings(tokenizer="builtin", admin_key=key)
    async with gatehouse(ENGINES, settings, **facts) as house:
        app = dashboard_app(house.gateway, queued=lambda: 3)
        server = Server(Switchboard({"/dashboard": app}), "127.0.0.1", 0, "page")
        async with running([server]):
            yield Door(house, f"http://127.0.0.1:{server.port}/dashboard", app.board)


def test_every_colour_is_told_once_and_no_style_names_one_that_is_not_told() -> None:
    tokens = FILES["tokens.css"].decode()
    told = re.findall(r"^\s*(--[a-z-]+):", tokens, re.M)
    assert len(set(told)) == len(told) > 15
    styles = "".join(FILES[name].decode() for name in FILES if name.endswith((".css", ".js")))
    used, scripted = set(re.findall(r"var\((--[a-z-]+)", styles)), {"--from", "--share", "--wide"}
    assert used - set(told) == scripted


async def test_the_page_is_open_and_every_file_it_names_is_there() -> None:
    async with door() as page:
        status, text, headers = await page.get(**FAR)
        assert status == 200 and headers["content-type"].startswith("text/html")
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        named = set(re.findall(r'(?:href|src)="dashboard/(static/[^"]+)"', text))
        assert len(named) >= 4
        for name in named:
            status, _, headers = await page.get(f"/{name}")
            assert status == 200 and headers["x-content-type-options"] == "nosniff", name
        assert (await page.get("/"))[1] == text  # led to where it belongs
        for path in ("/static/nothing.js", "/static/..%2fdoor.py", "/static/%2e%2e/door.py", "/x"):
            status, text, _ = await page.get(path)
            assert status == 404 and json.loads(text)["error"]["code"] == "not_found", path


def test_the_page_asks_nobody_else_and_runs_nothing_it_was_not_given() -> None:
    for name, data in FILES.items():
        text = data.decode()
        assert not re.search(r"(https?:)?//(?!www\.w3\.org/)[a-z0-9-]+\.[a-z]", text), name
        assert not re.search(r"\beval\(|new Function|innerHTML\s*=(?!=)|document\.write", text), (
            name
        )
        assert not re.search(r"<script(?![^>]*\bsrc=)|\son[a-z]+=\"|<style|\sstyle=\"", text), name
    for name, data in FILES.items():
        for other in re.findall(r'from "\./([^"]+)"', data.decode()):
            assert other in FILES, f"{name} imports {other}"


OURS, OTHERS = {"origin": "HOME"}, {"origin": "https://elsewhere.example"}
REBOUND = {"host": "rebound.example"}  # a name that leads to loopback is somebody else's page
RIGHT, WRONG = ({"authorization": f"Bearer {word}"} for word in (KEY, "wrong"))


@pytest.mark.parametrize(
    ("key", "allowed", "refused", "status"),
    [
        ("", [{}, OURS], [OTHERS, {"origin": "null"}, REBOUND, {**REBOUND, **OURS}, FAR], 403),
        (KEY, [{}, OURS, {**FAR, **RIGHT}, {**OTHERS, **RIGHT}], [FAR, {**FAR, **WRONG}], 401),
    ],
)
async def test_who_may_look(
    key: str, allowed: list[dict[str, str]], refused: list[dict[str, str]], status: int
) -> None:
    async with door(key) as page:
        for headers in [*allowed, *refused]:
            want = 200 if headers in allowed else status
            home = page.url.removesuffix("/dashboard")
            told = {name: home if value == "HOME" else value for name, value in headers.items()}
            assert (await page.weigh(**told))[0] == want, headers
            async with page.house.session.get(f"{page.url}/live", headers=told) as got:
                assert got.status == want, headers
                if want == 200:
                    assert await got.content.readline() == b"event: picture\n"


WRONG_QUESTIONS: list[tuple[Any, int, str]] = [
    (b"{", 400, "body"),
    ([], 400, "body"),
    ({"path": "/v1/embeddings", "body": {}}, 400, "path '/v1/embeddings'"),
    ({"path": "/v1/completions"}, 400, "body"),
    ({"path": "/v1/completions", "body": {"prompt": []}}, 400, "prompt"),
    ({"path": "/v1/completions", "body": {"prompt": "x", "model": "no"}}, 404, "no model 'no'"),
    (b" " * (MOST_BYTES + 1), 413, str(MOST_BYTES)),
]


async def test_a_question_that_cannot_be_is_told_what_is_wrong() -> None:
    async with door() as page:
        for asked, status, words in WRONG_QUESTIONS:
            got, said = await page.weigh(asked)
            assert got == status and words in said["error"]["message"], words


async def test_a_question_takes_nobodys_turn_and_sends_nothing() -> None:
    async with door() as page:
        first = (await page.weigh())[1]
        assert [await page.weigh() for _ in range(3)] == [(200, first)] * 3
        assert [one["worker"] for one in first["prefill"]["order"]] == ["p1", "p2"]
        assert (
            first["chosen"] == ["p1", "d1"] and "equals take turns" in first["prefill"]["sentence"]
        )
        assert page.house.idle and not page.house.ledger.meetings()
        status, _, headers = await page.house.post("/v1/completions", ASKED["body"])
        assert (status, headers["x-kvplane-prefill"]) == (200, "p1")
        assert (await page.weigh())[1]["chosen"] == ["p2", "d1"]  # as it would be now


async def test_a_picture_shows_what_happened_and_nothing_that_is_secret() -> None:
    async with door(KEY) as page:
        gateway = page.house.gateway
        body = {"model": "tiny", "prompt": "the-prompts-own-words", "cache_salt": "salted-words"}
        assert (await page.house.post("/v1/completions", body))[0] == 200
        shown = picture(gateway, (), 3.21, gateway.clock.now(), gateway.clock.wall())
        assert shown["totals"]["ok"] == 1 and shown["lag_ms"] == 3.2
        assert [(one["worker"], one["role"]) for one in shown["workers"]] == [
            ("p1", "prefill"), ("p2", "prefill"), ("d1", "decode"),
        ]  # fmt: skip
        (request,) = shown["requests"]
        assert (request["prefill"], request["outcome"]) == ("p1", "ok")
        assert request["rooms"] and all(isinstance(room, str) for room in request["rooms"])
        text = json.dumps(shown)
        assert not [word for word in ("own-words", "salted", KEY) if word in text]
        gateway.fleet.down(Pod("d1"))
        assert (await page.house.post("/v1/completions", body))[0] == 503
        shown = picture(gateway, (), 0.0, gateway.clock.now(), gateway.clock.wall())
        assert shown["state"]["ready"] is False and "no healthy decode" in shown["state"]["reason"]
        assert shown["requests"][0]["code"] == "no_decode_available"
        assert shown["totals"]["failed"] == 1
        told = await page.weigh()
        assert told[0] == 200 and told[1]["chosen"] is None  # no fault of the question
        assert "no decode worker" in told[1]["why_none"]


def test_many_pages_share_one_picture_a_beat() -> None:
    made, clock = [], FakeClock()

    def make() -> dict[str, int]:
        made.append(1)
        return {"number": len(made)}

    board = Board(make, clock)
    assert {board.shown() for _ in range(100)} == {b'event: picture\ndata: {"number":1}\n\n'}
    clock.advance(BEAT_S)
    assert b'"number":2' in board.shown() and len(made) == 2


async def test_pages_are_let_go_when_the_gateway_ends() -> None:
    async with door() as page, page.house.session.get(f"{page.url}/live") as got:
        assert (await got.content.readline()) == b"event: picture\n"
        told = json.loads((await got.content.readline()).removeprefix(b"data: "))
        assert told["queued"] == 3 and told["state"]["ready"]
        await page.board.stop()
        assert b"event: picture" not in await got.content.read()  # and it ends


async def test_more_pages_than_there_are_places_are_told_to_wait() -> None:
    board = Board(dict, FakeClock())
    pages = [Live(board) for _ in range(MOST_PAGES)]
    with pytest.raises(GatewayError, match="overloaded"):
        Live(board)

    async def gone() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def nowhere(message: Any) -> None:
        return None

    for page in pages:
        await page({"type": "http", "asgi": {"spec_version": "2.0"}}, gone, nowhere)
    assert board.pages == 0


def test_a_quantile_is_one_of_the_values() -> None:
    assert quantile([], 0.5) is None
    assert [quantile([1, 2, 3, 4], share) for share in (0.01, 0.25, 0.5, 0.95, 1)] == [
        1,
        1,
        2,
        4,
        4,
    ]
    assert quantile([7], 0.95) == 7


def test_shares_are_taken_of_those_that_told_both() -> None:
    def met(prompt: int | None, predicted: int | None, actual: int | None) -> Meeting:
        why = Why(prompt_tokens=prompt)
        return Meeting("r", 1, "/", "m", (), None, Party("d"), why, predicted, actual)

    found = shares([met(100, 60, 50), met(100, 0, None), met(None, None, 9), met(50, 30, 40)])
    assert (found["hit_share"], found["predicted_tokens"], found["actual_tokens"]) == (0.6, 90, 90)
    assert shares([])["hit_share"] is None


def candidates(*facts: tuple[str, int, int]) -> list[Candidate]:
    fleet, found = Fleet(), []
    for name, depth, tokens in facts:
        fleet.up(WorkerUp(Pod(name), f"http://{name}", Role.PREFILL))
        fleet.book(Worker(Pod(name)), tokens)
        target = fleet.target(Worker(Pod(name)))
        assert target is not None
        found.append(Candidate(target, depth // 16, depth))
    return found


def test_an_order_is_explained_by_what_stands_behind_it() -> None:
    told = weighed("prefix", candidates(("p1", 1008, 900), ("p2", 0, 0)), 1200)
    assert [one["cost"] for one in told["order"]] == [1092, 1200]
    assert "192 tokens of it and 900 that are in flight there; p2 counts 1200" in told["sentence"]
    assert "there is no other" in weighed("cache_aware", candidates(("p1", 0, 0)), 9)["sentence"]
    chance = weighed("random", candidates(("p1", 0, 0), ("p2", 0, 0)), 9)
    assert chance["by_chance"] and "cost" not in chance["order"][0]
