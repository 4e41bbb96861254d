"""Keys: who asks is known by his key alone, and no key of ours reaches an engine or a log."""

from __future__ import annotations

import pytest

from kvplane.router.errors import GatewayError
from kvplane.router.keys import HeaderList, Keys, digest_of
from kvplane.router.settings import AdmissionSettings, KeySettings, RouterSettings

TEAM = KeySettings("team", digest_of("sk-team-key"), "acme")
BOTH = AdmissionSettings(api_key="sk-default", keys=(TEAM,), tenant_secret="hidden")


def bearer(key: str) -> HeaderList:
    return [(b"authorization", f"Bearer {key}".encode())]


def test_each_key_has_its_name_and_its_tenant() -> None:
    keys = Keys(BOTH)
    assert keys.of(bearer("sk-default")).name == "default"
    assert keys.of(bearer("sk-default")).salt == ""
    team = keys.of(bearer("sk-team-key"))
    assert team.name == "team" and team.salt.startswith("kvplane:")
    assert {key.name for key in keys} == {"default", "team"}


@pytest.mark.parametrize(
    "headers",
    [
        [(b"authorization", b"Bearer sk-team-key")],
        [(b"authorization", b"bearer   sk-team-key ")],
        [(b"authorization", b"sk-team-key")],
        [(b"x-api-key", b"sk-team-key")],
        [(b"x-api-key", b"sk-team-key"), (b"authorization", b"Bearer sk-team-key")],
    ],
)
def test_a_key_is_found_where_clients_send_it(headers: HeaderList) -> None:
    assert Keys(BOTH).of(headers).name == "team"


@pytest.mark.parametrize(
    "headers",
    [
        [],
        bearer(""),
        bearer("sk-team-ke"),
        bearer("sk-team-keys"),
        [(b"authorization", b"Basic sk-team-key")],
        [(b"authorization", "Bearer sk-team-kéy".encode("latin-1"))],
        [*bearer("sk-team-key"), *bearer("sk-default")],
        [*bearer("sk-team-key"), (b"x-api-key", b"sk-default")],
    ],
)
def test_anything_else_is_nobody(headers: HeaderList) -> None:
    with pytest.raises(GatewayError) as refused:
        Keys(BOTH).of(headers)
    assert (refused.value.status, refused.value.code) == (401, "invalid_api_key")
    assert "sk-" not in str(refused.value)


@pytest.mark.parametrize("other", [(b"x-api-key", b"sk-default"), (b"authorization", b"Basic x")])
def test_two_keys_that_differ_are_told_so(other: tuple[bytes, bytes]) -> None:
    with pytest.raises(GatewayError, match="2 API keys that differ came") as refused:
        Keys(BOTH).of([*bearer("sk-team-key"), other])
    assert refused.value.status == 401 and "sk-" not in str(refused.value)


def test_what_connection_names_is_for_us_alone_but_our_own_key_goes_on() -> None:
    trace, hop = (b"traceparent", b"00-1-2-01"), (b"connection", b"keep-alive, TraceParent")
    nobodys = Keys(AdmissionSettings())
    assert nobodys.onward([trace, hop, *bearer("a")]) == [hop, *bearer("a")]
    assert nobodys.onward([(b"connection", b"Authorization"), *bearer("a")])[1:] == []
    kept = [(b"connection", b"keep-alive"), trace]
    assert nobodys.onward(kept) is kept
    own = (b"connection", b"authorization")
    assert Keys(BOTH).onward([own, *bearer("sk-team-key")]) == [own, *bearer("sk-default")]


def test_without_keys_everybody_is_let_in_and_his_own_key_goes_on_to_the_engine() -> None:
    keys = Keys(AdmissionSettings())
    headers = [*bearer("of-the-engine"), (b"x-api-key", b"too"), (b"traceparent", b"t")]
    assert keys.of(headers).name == "anybody"
    assert keys.onward(headers) == headers
    assert not keys.guarded


def test_with_keys_engines_get_the_gateways_own_or_none() -> None:
    headers = [*bearer("sk-team-key"), (b"x-api-key", b"sk-team-key"), (b"traceparent", b"t")]
    assert Keys(BOTH).onward(headers) == [(b"traceparent", b"t"), *bearer("sk-default")]
    assert Keys(AdmissionSettings(keys=(TEAM,))).onward(headers) == [(b"traceparent", b"t")]


def test_settings_show_no_secret() -> None:
    shown = repr(RouterSettings(admission=BOTH, admin_key="root-secret"))
    for secret in ("sk-default", "sk-team-key", "hidden", "root-secret"):
        assert secret not in shown
    assert "hidden" not in repr(list(Keys(BOTH)))
