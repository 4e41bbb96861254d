"""Redaction: whatever an engine says of itself, its secrets stay with it."""

from __future__ import annotations

import json

from kit.gatehouse import gatehouse
from kit.peer import answer, replies

from kvplane.router.redaction import without_secrets

TOLD = {
    "model_path": "/models/tiny",
    "api_key": "sk-engine",
    "admin_api_key": "sk-admin",
    "ssl_keyfile_password": "pw",
    "tokenizer_path": "/t",
    "eos_token": "</s>",
    "max_total_tokens": 5,
    "internal_states": [{"api_key": "sk-engine", "last_gen_throughput": 1.5}],
    "nested": {"hf_token": "hf-x", "key": "value"},
}


def test_each_secret_is_hidden_and_everything_else_stays() -> None:
    shown = without_secrets(json.dumps(TOLD).encode())
    for secret in (b"sk-engine", b"sk-admin", b"pw", b"hf-x"):
        assert b'"%s"' % secret not in shown
    found = json.loads(shown)
    assert found["api_key"] == found["internal_states"][0]["api_key"] == "***"
    kept = ("model_path", "tokenizer_path", "eos_token", "max_total_tokens")
    assert all(found[name] == TOLD[name] for name in kept)
    assert found["nested"]["key"] == "value"


def test_a_secret_that_is_not_set_is_seen_not_to_be() -> None:
    assert json.loads(without_secrets(b'{"api_key":null}')) == {"api_key": None}


def test_what_is_no_json_or_too_deep_is_not_shown() -> None:
    assert without_secrets(b"api_key=sk-engine") == b"{}"
    deep = b'{"a":' * 100 + b'{"api_key":"sk-engine"}' + b"}" * 100
    assert b"sk-engine" not in without_secrets(deep)


async def test_the_gateway_passes_no_engines_key_on() -> None:
    engine = replies(answer(json.dumps(TOLD).encode()))
    async with gatehouse({"p1": engine, "d1": engine}) as house:
        for path in ("/server_info", "/get_server_info", "/model_info"):
            status, found = await house.get(path)
            assert (status, found["api_key"]) == (200, "***")
            assert "sk-engine" not in json.dumps(found)
