"""What scripts made for sgl router send, byte for byte, and what they read of the answers.

Bodies as its documents show them and as benchmarks of gateways send them; members and statuses as
0.3.2 has them. Where we do better on purpose, the test says so.
"""

from __future__ import annotations

import http.client
import itertools
import json
import socket
import uuid
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from kit.site import Site
from kit.wait import until

WORDS = "the quick brown fox jumps over it "


@pytest.fixture(autouse=True)
def nothing_stays(place: Site) -> Iterator[None]:
    yield
    place.idle()


class Answer:
    """One answer, read to its end."""

    def __init__(self, found: http.client.HTTPResponse) -> None:
        self.status, self.raw = found.status, found.read()
        self.headers = {name.lower(): value for name, value in found.getheaders()}

    @property
    def json(self) -> Any:
        return json.loads(self.raw)

    @property
    def events(self) -> list[Any]:
        """Of a stream that ended as it should."""
        parts = self.raw.split(b"\n\n")
        assert parts[-2:] == [b"data: [DONE]", b""]
        return [json.loads(part.removeprefix(b"data: ")) for part in parts[:-2]]


def call(at: Site | str, method: str, path: str, body: str | None = None) -> Answer:
    """With the headers of a plain script."""
    url = at if isinstance(at, str) else at.url
    line = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    try:
        line.request(method, path, body, {"Content-Type": "application/json"} if body else {})
        return Answer(line.getresponse())
    finally:
        line.close()


def rooms(answer: Answer) -> int:
    """How many different ones it says it had."""
    return len(set(answer.headers["x-kvplane-room"].split(",")))


CHATS = [
    """{"model": "meta-llama/Llama-3.1-8B-Instruct",
        "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8}""",
    """{"model": "meta-llama/Llama-3.1-8B-Instruct", "temperature": 0.7, "top_p": 0.95,
        "frequency_penalty": 0.0, "presence_penalty": 0.0, "stop": ["###"], "seed": 1,
        "messages": [{"role": "system", "content": "Be brief."},
                     {"role": "user", "content": "Write a haiku."}],
        "max_completion_tokens": 8, "skip_special_tokens": true, "separate_reasoning": true,
        "stream_reasoning": true, "return_hidden_states": false, "rid": "r-1"}""",
    """{"model": "meta-llama/Llama-3.1-8B-Instruct", "n": 2, "max_tokens": 4,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "What is this?"}]}],
        "tools": [{"type": "function", "function": {"name": "now", "parameters": {}}}],
        "tool_choice": "auto", "logprobs": true, "top_logprobs": 2}""",
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("body", CHATS, ids=["short", "sampling", "tools"])
def test_chat(place: Site, body: str, stream: bool) -> None:
    samples = json.loads(body).get("n", 1)
    if stream:
        body = body.replace("{", '{"stream": true, ', 1)
    answer = call(place, "POST", "/v1/chat/completions", body)
    assert answer.status == 200, answer.raw
    assert rooms(answer) == samples
    chunks = answer.events if stream else [answer.json]
    seen = {choice["index"] for chunk in chunks for choice in chunk["choices"]}
    assert seen == set(range(samples))


COMPLETIONS = [
    ('{"model": "stub-model", "prompt": "Once upon a time", "max_tokens": 6}', 1),
    ('{"model": "stub-model", "prompt": ["first", "second"], "max_tokens": 3, "echo": false}', 2),
    ('{"model": "stub-model", "prompt": ["only one"], "max_tokens": 3}', 1),
    # sgl router refuses token ids here; the engines take them, and so do we
    ('{"model": "stub-model", "prompt": [[72, 105], [72, 111]], "max_tokens": 3, "n": 2}', 4),
]


@pytest.mark.parametrize(("body", "count"), COMPLETIONS)
def test_completions(place: Site, body: str, count: int) -> None:
    answer = call(place, "POST", "/v1/completions", body)
    assert answer.status == 200, answer.raw
    assert rooms(answer) == len(answer.json["choices"]) == count


PARAMS = '"sampling_params": {"temperature": 0, "max_new_tokens": 6}'
GENERATE = [
    ('{"text": "The capital of France is", %s}', 1),
    ('{"input_ids": [72, 101, 108, 108, 111], %s, "model": "stub-model"}', 1),
    ('{"input_ids": [[72, 105], [72, 111, 119]], %s}', 2),
    # a list of texts, which sgl router refuses
    ('{"text": ["one", "two", "three"], %s}', 3),
]


@pytest.mark.parametrize(("body", "count"), GENERATE)
def test_generate(alone: str, body: str, count: int) -> None:
    answer = call(alone, "POST", "/generate", body % PARAMS)
    assert answer.status == 200, answer.raw
    found = answer.json if isinstance(answer.json, list) else [answer.json]
    assert rooms(answer) == len(found) == count
    assert all(len(one["output_ids"]) == one["meta_info"]["completion_tokens"] for one in found)


@pytest.mark.parametrize("path", ["/tokenize", "/v1/tokenize"])
def test_tokenize(place: Site, path: str) -> None:
    body = '{"model": "meta-llama/Llama-3.1-8B-Instruct", "prompt": "Hello, world!"}'
    told = call(place, "POST", path, body).json
    assert told["tokens"] == [256, *b"Hello, world!"] and told["count"] == 14


def test_a_generate_stream_grows_and_ends_with_done(alone: str) -> None:
    body = GENERATE[0][0].replace("{", '{"stream": true, ', 1) % PARAMS
    texts = [event["text"] for event in call(alone, "POST", "/generate", body).events]
    assert len(texts) > 1
    assert all(longer.startswith(shorter) for shorter, longer in itertools.pairwise(texts))


def test_logprobs_of_the_prompt_come_from_prefill_and_those_of_the_answer_from_decode(
    place: Site,
) -> None:
    """FR-AP-05, with engines that compute them: 6 and 8, in a stream the 6 once."""
    body: dict[str, Any] = {"model": "stub-model", "input_ids": [72, 101, 108, 108, 111, 33]}
    body |= {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    body["sampling_params"] = {"max_new_tokens": 8, "ignore_eos": True}
    whole = call(place, "POST", "/generate", json.dumps(body)).json
    told = whole["meta_info"]
    assert [one[1] for one in told["input_token_logprobs"]] == body["input_ids"]
    assert [one[1] for one in told["output_token_logprobs"]] == whole["output_ids"]
    assert [len(told[f"{side}_top_logprobs"]) for side in ("input", "output")] == [6, 8]
    events = call(place, "POST", "/generate", json.dumps(body | {"stream": True})).events
    parts = [event["meta_info"]["input_token_logprobs"] for event in events]
    assert parts[0] == told["input_token_logprobs"] and not any(parts[1:])
    assert events[-1]["meta_info"]["output_token_logprobs"] == told["output_token_logprobs"]


def chat_request(size: int, stream: bool, port: int) -> bytes:
    """A whole request, as the shared benchmark of gateways writes it on the wire."""
    content = WORDS * (size // len(WORDS) + 1)
    body: dict[str, Any] = {"model": "stub-model", "max_tokens": 16, "stream": stream}
    body["messages"] = [{"role": "user", "content": ""}]
    body["messages"][0]["content"] = content[: max(0, size - len(json.dumps(body)))]
    raw = json.dumps(body).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
    )
    return head.encode() + raw


def read_answer(line: socket.socket) -> bytes:
    """As that benchmark's client does: by content-length, or until the last chunk."""
    found = bytearray()
    while True:
        part = line.recv(65536)
        assert part, "closed in the middle"
        found += part
        head, there, body = bytes(found).partition(b"\r\n\r\n")
        if not there:
            continue
        lengths = [row for row in head.lower().split(b"\r\n") if row.startswith(b"content-length:")]
        if lengths and len(body) >= int(lengths[0].partition(b":")[2]):
            return bytes(found)
        if not lengths and body.endswith(b"0\r\n\r\n"):
            return bytes(found)


def test_a_benchmarks_client_on_one_connection(place: Site) -> None:
    at = urlsplit(place.url)
    assert at.hostname and at.port
    with socket.create_connection((at.hostname, at.port), timeout=60) as line:
        for size, stream in ((200, False), (1000, False), (1000, True), (200, True), (200, False)):
            line.sendall(chat_request(size, stream, at.port))
            answer = read_answer(line)
            assert answer.startswith(b"HTTP/1.1 200 "), answer[:500]
            assert (b"data: [DONE]" in answer) == stream


# Worker management ------------------------------------------------------------------------------


def test_a_script_adds_watches_changes_and_removes_a_worker(place: Site) -> None:
    body = """{"url": "http://127.0.0.1:9", "model_id": "mistral", "priority": 10, "cost": 1.5,
        "worker_type": "regular", "labels": {"tier": "gold"}, "runtime": "sglang", "api_key": "k",
        "reasoning_parser": "qwen3", "tool_parser": "json", "health_check_timeout_secs": 30,
        "health_check_interval_secs": 60, "health_success_threshold": 2,
        "health_failure_threshold": 3, "disable_health_check": false, "dp_aware": false,
        "max_connection_attempts": 20}"""
    made = call(place, "POST", "/workers", body)
    assert made.status == 202, made.raw
    said = made.json
    assert said["status"] == "accepted" and said["message"]
    assert said["url"] == "http://127.0.0.1:9"
    assert made.headers["location"] == said["location"] == f"/workers/{said['worker_id']}"
    assert uuid.UUID(said["worker_id"])
    shown = call(place, "GET", said["location"])
    assert (shown.status, shown.json["id"]) == (200, said["worker_id"])
    assert (shown.json["is_healthy"], shown.json["model_id"]) == (False, "mistral")
    changed = call(place, "PUT", said["location"], '{"priority": 20, "labels": {"tier": "b"}}')
    assert changed.status == 202 and changed.json["worker_id"] == said["worker_id"]
    gone = call(place, "DELETE", said["location"])
    assert (gone.status, gone.json["status"]) == (202, "accepted")
    assert call(place, "GET", said["location"]).status == 404


def test_the_list_of_workers_has_the_members_scripts_read(place: Site) -> None:
    found = call(place, "GET", "/workers").json
    assert found["total"] == len(found["workers"]) == 4
    counts = {"prefill_count": 2, "decode_count": 2, "regular_count": 0}
    assert counts.items() <= found["stats"].items()
    members = {
        "id", "url", "model_id", "priority", "cost", "worker_type", "is_healthy", "load",
        "connection_mode", "metadata", "disable_health_check",
    }  # fmt: skip
    for worker in found["workers"]:
        assert members <= set(worker)
        assert (worker["worker_type"] == "prefill") == isinstance(worker.get("bootstrap_port"), int)


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("GET", f"/workers/{uuid.UUID(int=7)}", None, 404, "WORKER_NOT_FOUND"),
        ("DELETE", f"/workers/{uuid.UUID(int=7)}", None, 404, "WORKER_NOT_FOUND"),
        ("PUT", f"/workers/{uuid.UUID(int=7)}", "{}", 404, "WORKER_NOT_FOUND"),
        ("GET", "/workers/no-uuid", None, 400, "BAD_REQUEST"),
    ],
)
def test_a_worker_nobody_knows(
    place: Site, method: str, path: str, body: str | None, status: int, code: str
) -> None:
    answer = call(place, method, path, body)
    assert (answer.status, answer.json["code"]) == (status, code)
    assert answer.json["error"]


def test_a_worker_we_cannot_reach_by_its_scheme_is_refused_by_name(place: Site) -> None:
    """sgl router speaks gRPC to engines; we do not, and say so at once."""
    body = '{"url": "grpc://127.0.0.1:31000", "worker_type": "regular"}'
    answer = call(place, "POST", "/workers", body)
    assert answer.status == 400
    assert "grpc://127.0.0.1:31000" in answer.json["error"]["message"]


def test_a_pair_that_is_posted_serves(place: Site) -> None:
    made = place.run(place.newcomer("llama3"))
    body = '{"model": "llama3", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}'
    answer = call(place, "POST", "/v1/chat/completions", body)
    assert answer.status == 200, answer.raw
    assert answer.headers["x-kvplane-prefill"] == made[0].pod
    place.run(place.depart(*made))
    place.run(until(lambda: _total(place, 4), what="both are forgotten"))


async def _total(place: Site, count: int) -> bool:
    return bool((await place.house.get("/workers"))["total"] == count)


def test_all_engines_are_asked_for_their_load_and_to_empty_their_caches(place: Site) -> None:
    place.idle()
    loads = call(place, "GET", "/get_loads").json["workers"]
    assert [one["load"] for one in loads] == [0] * 4
    urls = {one.url for pair in place.pairs.values() for one in pair}
    assert {one["worker"] for one in loads} == urls
    answer = call(place, "POST", "/flush_cache")
    assert answer.status == 200, answer.raw
    assert set(answer.json["successful"]) == urls and answer.json["failed"] == []
    caches = [
        unit.cache for pair in place.pairs.values() for one in pair for unit in one.engine.units
    ]
    assert not any(cache.blocks() for cache in caches)


def test_probes(place: Site) -> None:
    for path in ("/liveness", "/health"):
        assert (call(place, "GET", path).status, call(place, "GET", path).raw) == (200, b"OK")
    for path in ("/readiness", "/health_generate"):
        told = call(place, "GET", path).json
        assert (told["status"], told["healthy_workers"], told["total_workers"]) == ("ready", 4, 4)
    assert {one["id"] for one in call(place, "GET", "/v1/models").json["data"]} == set(place.pairs)
    for path in ("/get_model_info", "/get_server_info", "/model_info", "/server_info"):
        assert call(place, "GET", path).json["served_model_name"] in place.pairs
