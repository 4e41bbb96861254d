"""Tenants: the salt is ours, the bytes around it are the client's, and nobody takes another's."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvplane.router.errors import GatewayError
from kvplane.router.tenants import apart, tenant_salt

CHAT, NATIVE = "/v1/chat/completions", "/generate"
ACME = tenant_salt("acme", "s")


def salted(path: str, body: dict[str, Any], salt: str = ACME) -> dict[str, Any]:
    """The members that leave, which must be those the gateway goes on with."""
    raw, members = apart(path, json.dumps(body).encode(), body, salt)
    sent: dict[str, Any] = json.loads(raw)
    assert sent == members
    return sent


def test_a_tenants_salt_is_the_same_everywhere_and_nobody_elses() -> None:
    assert tenant_salt("acme", "s") == ACME
    others = {tenant_salt("acme", ""), tenant_salt("acme", "t"), tenant_salt("acm", "es"), ACME}
    assert len(others) == 4
    assert all(len(one) <= 64 and one.startswith("kvplane:") for one in others)  # vLLM: 1024


def test_the_salt_goes_where_engines_look_and_everything_else_stays() -> None:
    raw = b'{"z": 1e2, "prompt" : "x",  "custom":[1.0]}'
    sent, _ = apart(CHAT, raw, json.loads(raw), ACME)
    assert sent == raw[:-1] + b',"cache_salt":"%s"}' % ACME.encode()
    assert salted(NATIVE, {"text": "x"}) == {"text": "x", "cache_salt": ACME, "extra_key": ACME}
    assert salted(CHAT, {}) == {"cache_salt": ACME}


def test_a_tenants_own_salt_divides_its_blocks_further_and_stays_inside() -> None:
    one, two = salted(CHAT, {"cache_salt": "a"}), salted(CHAT, {"cache_salt": "b"})
    assert one != two and one["cache_salt"].startswith(ACME + ":")
    assert len(one["cache_salt"]) < 100
    assert salted(CHAT, {"extra_key": "a"}) not in (one, two)
    assert salted(CHAT, {"cache_salt": None}) == {"cache_salt": ACME}
    other = salted(CHAT, {"cache_salt": "a"}, tenant_salt("umbrella", "s"))
    assert other["cache_salt"] != one["cache_salt"]


def test_a_tenant_cannot_choose_anothers_salt() -> None:
    other = tenant_salt("umbrella", "s")
    for stolen in (other, other + ":x", ACME):
        for name in ("cache_salt", "extra_key"):
            sent = salted(NATIVE, {"text": "x", name: stolen})
            assert sent["cache_salt"].startswith(ACME + ":")
            assert sent["extra_key"] == sent["cache_salt"]


def test_doubles_of_a_member_and_escapes_in_its_name_hide_nothing() -> None:
    raw = b'{"cache_salt":"a","cache_s\\u0061lt":"b","x":1}'
    sent, _ = apart(CHAT, raw, json.loads(raw), ACME)
    pairs = json.loads(sent, object_pairs_hook=list)
    assert [name for name, _ in pairs] == ["x", "cache_salt"]


@pytest.mark.parametrize("value", [["a"], 5, {"a": 1}, True])
def test_a_tenants_salt_must_be_text(value: Any) -> None:
    with pytest.raises(GatewayError) as refused:
        apart(CHAT, b"{}", {"cache_salt": value}, ACME)
    assert (refused.value.status, refused.value.param) == (400, "cache_salt")


@pytest.mark.parametrize("value", [ACME, ACME + ":x", "kvplane:", ["a", ACME]])
@pytest.mark.parametrize("name", ["cache_salt", "extra_key"])
def test_who_is_no_tenant_cannot_take_a_tenants_salt(name: str, value: Any) -> None:
    with pytest.raises(GatewayError) as refused:
        apart(CHAT, b"{}", {name: value}, "")
    assert (refused.value.status, refused.value.param) == (400, name)


@pytest.mark.parametrize("cut", range(len(ACME) + 1))
def test_who_is_no_tenant_cannot_take_a_tenants_salt_in_two_parts(cut: int) -> None:
    """SGLang's extra key of a request is cache_salt and extra_key, joined."""
    for rest in (ACME[cut:], ["a", ACME[cut:]]):
        with pytest.raises(GatewayError) as refused:
            apart(NATIVE, b"{}", {"extra_key": rest, "cache_salt": ACME[:cut]}, "")
        assert refused.value.status == 400
    apart(NATIVE, b"{}", {"cache_salt": "kv", "extra_key": ["x", "plane"]}, "")


def test_of_nobody_elses_body_a_byte_is_changed() -> None:
    raw = b'{"cache_salt": "mine", "extra_key": ["a", "b"]}'
    sent, members = apart(NATIVE, raw, json.loads(raw), "")
    assert sent is raw and members["cache_salt"] == "mine"
