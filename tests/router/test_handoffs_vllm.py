"""vLLM's hand-offs: a body of one token, the transfer object, what is not handed over."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from kvplane.router.handoffs import HANDOFFS, Bodies, Seats
from kvplane.router.handoffs.vllm_nixl import given, ignored
from kvplane.router.request import parse
from kvplane.vocabulary import Binding, BootstrapTriple, Pod, Room, Worker

VECTORS = Path(__file__).parents[1] / "vectors" / "vllm-pd.jsonl"
WAYS = ["vllm", "vllm-mooncake"]
PARTS: dict[str, Any] = {  # FR-RT-20
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_tokens": 900,
    "max_completion_tokens": 800,
    "min_tokens": 5,
    "n": 3,
    "logprobs": 2,
}


def written(way: str, body: dict[str, Any], path: str = "/v1/completions") -> Bodies:
    ask = parse(path, json.dumps(body).encode(), "id")
    room = Room(0x47)
    pair = Worker(Pod("p")), Worker(Pod("d"))
    binding = Binding(room, *pair, BootstrapTriple("fd00::1", 8998, room))
    assert HANDOFFS[way].rooms(ask) == 1
    return HANDOFFS[way].write(ask, [binding], Seats(engine_id="engine-a"))


def sent(raw: bytes | None) -> dict[str, Any]:
    assert raw is not None
    found: dict[str, Any] = json.loads(raw)
    return found


def decodes(bodies: Bodies, answer: dict[str, Any]) -> dict[str, Any]:
    if bodies.then is None:
        return sent(bodies.decode)
    assert bodies.decode is None
    return sent(bodies.then(json.dumps(answer).encode()).body)


SOME = [
    dict(itertools.compress(PARTS.items(), chosen))
    for chosen in itertools.product((0, 1), repeat=len(PARTS))
]
TAKEN = {"answer": {"kv_transfer_params": {"remote_host": "10.0.0.1"}}}


@pytest.mark.parametrize("way", WAYS)
def test_prefill_sees_one_token_and_no_stream_and_decode_what_the_client_asked(way: str) -> None:
    """FR-RT-20: every combination of the members that have a say in it, and none of them."""
    for parts in SOME:
        body = {"prompt": "a", "temperature": 0.5} | parts
        bodies = written(way, body)
        prefill, decode = sent(bodies.prefill), decodes(bodies, TAKEN["answer"])
        assert (prefill["max_tokens"], prefill["min_tokens"]) == (1, 1)
        assert prefill["stream"] is False
        assert prefill.get("max_completion_tokens", 1) == 1
        assert ("max_completion_tokens" in prefill) == ("max_completion_tokens" in parts)
        assert not {"stream_options", "n", "best_of"} & set(prefill)
        assert prefill.get("logprobs") == parts.get("logprobs")
        assert (prefill["prompt"], prefill["temperature"]) == ("a", 0.5)
        assert decode.pop("kv_transfer_params")
        assert decode == body


def test_nixl_says_that_a_remote_decode_comes_and_passes_the_answers_object_on_whole() -> None:
    bodies = written("vllm", {"prompt": "a"})
    assert sent(bodies.prefill)["kv_transfer_params"] == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    assert bodies.then is not None
    params = b'{"new": 1.50, "remote_block_ids": [[1, 2]]}'
    second = bodies.then(b'{"id":"x","kv_transfer_params": %s,"choices":[]}' % params)
    assert params in second.body
    assert second.without == ""


@pytest.mark.parametrize(
    "answer",
    [b'{"kv_transfer_params":null}', b'{"choices":[]}', b'{"kv_transfer_params":{}}', b"no JSON",
     b'{"kv_transfer_params":[1]}', b"[]", b""],
)  # fmt: skip
def test_where_prefill_gave_nothing_decode_is_asked_all_the_same_and_it_is_said(
    answer: bytes,
) -> None:
    """FR-RT-21."""
    bodies = written("vllm", {"prompt": "a"})
    assert bodies.then is not None
    assert bodies.clean_up is not None
    second = bodies.then(answer)
    assert json.loads(second.body) == {"prompt": "a"}
    assert second.without == "prefill gave no transfer parameters"
    assert bodies.clean_up(answer) is None


def test_a_clean_up_fetches_with_one_token_to_answer() -> None:
    bodies = written("vllm", PARTS | {"prompt": "a"})
    assert bodies.clean_up is not None
    body = sent(bodies.clean_up(b'{"kv_transfer_params":{"remote_host":"h"}}'))
    assert body["kv_transfer_params"] == {"remote_host": "h"}
    assert (body["max_tokens"], body["stream"], body.get("n", 1)) == (1, False, 1)


def test_mooncake_brings_both_together_by_one_fresh_name() -> None:
    bodies = written("vllm-mooncake", {"prompt": "a"})
    name = "kvplane-0000000000000047"
    assert sent(bodies.prefill)["kv_transfer_params"] == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "transfer_id": name,
    }
    assert sent(bodies.decode)["kv_transfer_params"] == {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_bootstrap_addr": "http://[fd00::1]:8998",
        "remote_engine_id": "engine-a",
        "transfer_id": name,
    }


def test_what_mooncake_keeps_is_fetched_under_the_same_name() -> None:
    bodies = written("vllm-mooncake", {"prompt": "a", "n": 2})
    assert bodies.clean_up is not None
    body = sent(bodies.clean_up(b"{}"))
    assert body["kv_transfer_params"] == sent(bodies.decode)["kv_transfer_params"]
    assert (body["max_tokens"], body.get("n", 1)) == (1, 1)


@pytest.mark.parametrize(
    ("body", "path", "why"),
    [
        ({"prompt": "a"}, "/v1/completions", ""),
        ({"prompt": ["a"]}, "/v1/completions", ""),
        ({"prompt": ["a", "b"]}, "/v1/completions", "list of prompts"),
        ({"text": "a"}, "/generate", "route"),
        ({"prompt": "a", "use_beam_search": True}, "/v1/completions", "beam search"),
        (
            {"prompt": "a", "prompt_logprobs": 0},
            "/v1/completions",
            "log-probabilities of the prompt",
        ),
        ({"prompt": "a", "echo": True}, "/v1/completions", ""),
        (
            {"prompt": "a", "echo": True, "logprobs": 1},
            "/v1/completions",
            "log-probabilities of the prompt",
        ),
    ],
)
def test_what_one_transfer_object_cannot_carry_is_left_to_decode(
    body: dict[str, Any], path: str, why: str
) -> None:
    ask = parse(path, json.dumps(body).encode(), "id")
    assert HANDOFFS["vllm"].alone(ask) == HANDOFFS["vllm-mooncake"].alone(ask) == why


@pytest.mark.parametrize(
    ("object", "cached", "found"),
    [  # what prefill had cached, what decode tells
        ({"remote_prefill_cached_tokens": 96}, 96, ("", True)),
        ({"remote_prefill_cached_tokens": 96}, 32, ("", False)),
        ({"remote_prefill_cached_tokens": 96}, 0, ("decode computed the prompt itself", False)),
        ({"remote_prefill_cached_tokens": 0}, 0, ("", False)),  # as seen of one that fetched
        ({"remote_prefill_cached_tokens": 0}, 64, ("", False)),
        ({"remote_host": "h"}, 0, ("decode computed the prompt itself", False)),
        ({"remote_host": "h"}, 100, ("", False)),
        ({"remote_host": "h"}, None, ("", False)),
    ],
)
def test_cached_tokens_tell_only_what_they_can(
    object: dict[str, Any], cached: int | None, found: tuple[str, bool]
) -> None:
    answer = json.dumps({"kv_transfer_params": object}).encode()
    assert ignored(answer, cached) == found


def legs() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(prefill, decode) of each recorded exchange."""
    found = [json.loads(line) for line in VECTORS.read_text().splitlines()]
    both = [one for one in found if one["kind"] == "nixl"]
    return list(zip(both[::2], both[1::2], strict=True))


@pytest.mark.parametrize(("prefill", "decode"), legs(), ids=["cold", "warm"])
def test_what_real_engines_were_sent_is_what_we_send(
    prefill: dict[str, Any], decode: dict[str, Any]
) -> None:
    client = {k: v for k, v in decode["sent"].items() if k != "kv_transfer_params"}
    bodies = written("vllm", client)
    assert sent(bodies.prefill) == prefill["sent"] | {"min_tokens": 1, "stream": False}
    answer = json.dumps(prefill["answer"]).encode()
    assert given(answer) is not None
    assert decodes(bodies, prefill["answer"]) == decode["sent"]
    usage = decode["answer"]["usage"]["prompt_tokens_details"] or {}
    assert ignored(answer, usage.get("cached_tokens"))[0] == ""
