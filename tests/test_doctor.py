"""Doctor: it says first what it is about to do, since one of the two costs engines requests."""

from __future__ import annotations

import pytest
from aiohttp import web
from kit.ports import free_port

from kvplane import doctor as module
from kvplane import doctor_visit
from kvplane.doctor import doctor, which
from kvplane.settings import Settings, parser, resolve


def told(*words: str, file: dict[str, object] | None = None) -> Settings:
    return resolve(vars(parser().parse_args(["doctor", *words])), {}, file or {})


NAMED: dict[str, object] = {"workers": [{"url": "http://p:1", "role": "prefill"}]}
VISIT = "with real requests; to ask a gateway that runs: kvplane doctor --url URL"
ASK = "to visit engines with real requests: kvplane doctor --prefill URL [PORT] --decode URL"


@pytest.mark.parametrize(
    ("words", "file", "said"),
    [
        ([], {}, f"asking the gateway at http://127.0.0.1:8000; {ASK}"),
        (["--url", "http://g:1"], NAMED, f"asking the gateway at http://g:1; {ASK}"),
        ([], NAMED, f"asking the gateway at http://127.0.0.1:8000; {ASK}"),
        (["--prefill", "http://p:1"], NAMED, f"visiting the one worker that flags name, {VISIT}"),
        (
            ["--prefill", "http://p:1", "--decode", "http://d:1"],
            {},
            f"visiting the 2 workers that flags name, {VISIT}",
        ),
    ],
)
def test_it_says_which_of_the_two_it_does(
    words: list[str], file: dict[str, object], said: str
) -> None:
    assert which(told(*words, file=file)) == said


async def test_it_is_said_before_any_engine_is_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before: list[str] = []

    async def visit(settings: Settings) -> int:
        before.append(capsys.readouterr().out)
        return 0

    monkeypatch.setattr(doctor_visit, "visit", visit)
    settings = told("--prefill", "http://p:1")
    assert await doctor(settings) == 0 and before == [which(settings) + "\n"]


async def test_beside_a_file_that_names_workers_a_gateway_is_asked_and_they_are_visited_without_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    visited: list[Settings] = []

    async def visit(settings: Settings) -> int:
        visited.append(settings)
        return 7

    asked: list[str] = []

    async def examine(url: str, headers: object) -> int:
        asked.append(url)
        return 0

    monkeypatch.setattr(doctor_visit, "visit", visit)
    monkeypatch.setattr(module, "USUAL_URL", f"http://127.0.0.1:{free_port()}")
    settings = told(file=NAMED)
    assert await doctor(settings) == 7 and visited == [settings]
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("asking the gateway at http://127.0.0.1:")
    assert (
        second == f"nobody answers there: visiting the one worker that kvplane.toml names, {VISIT}"
    )
    monkeypatch.setattr(module, "examine", examine)
    assert await doctor(settings) == 0 and asked == [module.USUAL_URL] and visited == [settings]


async def test_it_is_said_first_where_no_gateway_answers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = told("--url", f"http://localhost:{free_port()}")
    assert await doctor(settings) == 1
    out, complaint = capsys.readouterr()
    first, second, *_ = out.splitlines()
    assert first == which(settings) and second.startswith("BLOCKS")
    assert f"{settings['url']} cannot be reached: Connection refused; is a gateway" in complaint


def test_each_data_parallel_rank_is_met_once() -> None:
    def named(kind: str, dp_size: int) -> dict[str, object]:
        return {"worker_type": kind, "dp_size": dp_size}

    assert (
        doctor_visit.requests([named("prefill", 2), named("prefill", 1), named("decode", 2)]) == 3
    )
    assert doctor_visit.requests([named("regular", 1)]) == 1
    assert doctor_visit.requests([named("decode", 99)]) == doctor_visit.MOST_REQUESTS
    assert doctor_visit.requests([]) == 0


def test_a_request_of_the_doctors_own_that_failed_blocks_though_no_rule_tells_why() -> None:
    assert list(doctor_visit.unexplained([(200, ""), (200, "")])) == []
    _, first, second, third = doctor_visit.unexplained([(200, ""), (400, "bad: no idea")])
    assert first == "BLOCKS   first-byte        not known"
    assert "request 2 answered 400: bad: no idea" in second and "logs of both" in third


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/index/stats", {"store_down_s": 0}, "this is an index process"),
        ("/v1/models", {"object": "list", "data": []}, "this is an engine"),
        ("/ranks", {"summary": "register: 1 of 1"}, "this is a prefill's rank directory"),
        ("/nothing", {}, "is this a gateway? /diagnosis answered 404"),
    ],
)
async def test_what_else_answers_there_is_told(
    path: str, body: dict[str, object], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response(body)

    app, port = web.Application(), free_port()
    app.router.add_get(path, answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        assert await doctor(told("--url", f"http://127.0.0.1:{port}")) == 1
    finally:
        await runner.cleanup()
    assert said in capsys.readouterr().err
