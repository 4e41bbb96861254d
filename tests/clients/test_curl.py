"""curl against the gateway: streams as they are made, and the habits curl has of its own."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kit.site import Site

CURL = shutil.which("curl")
pytestmark = pytest.mark.skipif(CURL is None, reason="no curl here")
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(autouse=True)
def nothing_stays(place: Site) -> Iterator[None]:
    yield
    place.idle()


def curl(*words: str, data: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    """Run to its end; the body on stdout."""
    return subprocess.run(
        [str(CURL), "-sS", "--max-time", "60", *words], input=data, capture_output=True, check=False
    )


def begun(url: str, body: dict[str, Any]) -> subprocess.Popen[bytes]:
    """`curl -N`, still running."""
    words = [str(CURL), "-sS", "-N", url, "-H", "Content-Type: application/json"]
    return subprocess.Popen([*words, "-d", json.dumps(body)], stdout=subprocess.PIPE)


def event(line: bytes) -> Any:
    assert line.startswith(b"data: "), line
    return json.loads(line.removeprefix(b"data: "))


PATHS = {
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 1500},
    "/v1/completions": {"prompt": "Hello", "max_tokens": 1500},
    "/generate": {
        "text": "Hello",
        "sampling_params": {"max_new_tokens": 1500, "ignore_eos": True},
    },
}


@pytest.mark.parametrize("path", PATHS)
def test_tokens_come_while_the_engine_still_works_and_a_kill_stops_it(
    place: Site, llama: str, path: str
) -> None:
    body = PATHS[path] | {"model": llama, "stream": True, "ignore_eos": True}
    with begun(place.url + path, body) as running:
        try:
            assert running.stdout is not None
            assert event(running.stdout.readline())
            assert running.stdout.readline() == b"\n"
            assert event(running.stdout.readline())
            assert place.at_work() > 0, "the first tokens came before the last was made"
        finally:
            running.kill()


def test_a_whole_stream_ends_with_done_and_has_the_headers_of_one(place: Site, llama: str) -> None:
    body = json.dumps({"model": llama, "messages": HELLO, "max_tokens": 5, "stream": True})
    url = f"{place.url}/v1/chat/completions"
    head, _, text = curl("-N", "-i", url, "-d", body).stdout.partition(b"\r\n\r\n")
    lines = {line.lower() for line in head.splitlines()[1:]}
    assert head.startswith(b"HTTP/1.1 200 ")
    assert {b"transfer-encoding: chunked", b"x-accel-buffering: no"} <= lines
    assert any(line.startswith(b"content-type: text/event-stream") for line in lines)
    events = text.split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    assert len([event(one) for one in events[:-2]]) >= 5


def test_http_1_0_gets_the_same_and_the_end_of_the_connection(place: Site, llama: str) -> None:
    body = json.dumps({"model": llama, "prompt": "Hello", "max_tokens": 5, "stream": True})
    url = f"{place.url}/v1/completions"
    newer, older = (curl("-N", version, url, "-d", body) for version in ("--http1.1", "--http1.0"))
    assert older.returncode == newer.returncode == 0, older.stderr
    texts = [
        [event(one)["choices"][0]["text"] for one in run.stdout.split(b"\n\n")[:-2]]
        for run in (older, newer)
    ]
    assert texts[0] == texts[1] and len(texts[0]) >= 1
    assert older.stdout.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(
    "words",
    [
        ("-H", "Content-Type: application/json"),
        (),  # curl says it is a form
        ("-H", "Content-Type:"),
        ("-H", "Transfer-Encoding: chunked"),
        ("-H", "Expect: 100-continue"),
        ("--http2",),  # asks for an upgrade, which need not be granted
        ("--compressed",),
        ("-H", "Connection: close"),
    ],
    ids=lambda words: " ".join(words) or "form",
)
def test_a_body_is_read_however_curl_sends_it(
    place: Site, llama: str, words: tuple[str, ...]
) -> None:
    body = json.dumps({"model": llama, "prompt": "Hello", "max_tokens": 3}).encode()
    url = f"{place.url}/v1/completions"
    done = curl(url, *words, "--data-binary", "@-", data=body)
    if done.returncode == 2:
        pytest.skip(f"this curl knows no {words[0]}")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["usage"]["prompt_tokens"] == 6, done.stdout


def test_a_long_body_is_asked_for_before_it_is_sent(
    place: Site, llama: str, tmp_path: Path
) -> None:
    told = tmp_path / "body.json"
    told.write_text(json.dumps({"model": llama, "prompt": "x" * 1_500_000}))
    done = curl("-v", f"{place.url}/v1/completions", "-H", "Expect: 100-continue", "-d", f"@{told}")
    assert b"HTTP/1.1 100 Continue" in done.stderr
    error = json.loads(done.stdout)["error"]
    assert error["type"] == "invalid_request_error" and "1500000 characters" in error["message"]


def test_a_refusal_is_a_status_and_openais_shape(place: Site) -> None:
    done = curl("-w", "\n%{http_code}", f"{place.url}/v1/chat/completions", "-d", "{'not': json}")
    body, _, status = done.stdout.rpartition(b"\n")
    assert status == b"400"
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "code", "param"}
    assert "no valid JSON" in error["message"]
    failed = curl("-f", f"{place.url}/v1/completions", "-d", "[]")
    assert failed.returncode == 22


def test_several_requests_of_one_call_share_a_connection(place: Site, llama: str) -> None:
    body = json.dumps({"model": llama, "prompt": "Hello", "max_tokens": 2})
    url = f"{place.url}/v1/completions"
    done = curl("-w", "\n%{num_connects}\n", url, url, url, "-d", body)
    assert done.stdout.split(b"\n")[1::2] == [b"1", b"0", b"0"]
