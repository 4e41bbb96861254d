"""Keyring: what a person writes about a key is understood or refused by place, never by value."""

from __future__ import annotations

from typing import Any

import pytest

from kvplane.keyring import ApiKey, keys_from_tables
from kvplane.parts import router_settings
from kvplane.router.keys import Keys, digest_of
from kvplane.settings import BadSetting, Settings, parser, resolve

SECRET = "sk-0123456789"
PARSER = parser()


def told(*argv: str, file: dict[str, Any] | None = None, **environ: str) -> Settings:
    return resolve(vars(PARSER.parse_args(["router", *argv])), environ, file or {})


def test_a_key_is_kept_by_its_digest_alone() -> None:
    table = {"name": "a", "key": SECRET, "tenant": "acme", "requests_per_minute": 60, "burst": 5}
    (key,) = keys_from_tables([table | {"max_concurrent_requests": 2}])
    assert key == ApiKey("a", digest_of(SECRET), "acme", 60.0, 5, 2)
    assert keys_from_tables([{"name": "a", "key_sha256": digest_of(SECRET).upper()}]) == (
        ApiKey("a", digest_of(SECRET)),
    )
    assert SECRET not in repr(told(file={"keys": [table]}))


def test_keys_of_the_file_reach_the_gateway_beside_the_flag() -> None:
    found = told("--api-key", "sk-of-the-flag", file={"keys": [{"name": "a", "key": SECRET}]})
    keys = Keys(router_settings(found).admission)
    for key, name in ((SECRET, "a"), ("sk-of-the-flag", "default")):
        assert keys.of([(b"authorization", f"Bearer {key}".encode())]).name == name


@pytest.mark.parametrize(
    ("tables", "named"),
    [
        ({}, "must be [[keys]] tables"),
        ([5], "must be [[keys]] tables"),
        ([{"key": SECRET}], "keys[0]: name is missing"),
        ([{"name": "a b", "key": SECRET}], "keys[0]: name 'a b': must be 1 to 64 letters"),
        ([{"name": "a"}], "keys[0]: exactly one of key and key_sha256 is needed"),
        ([{"name": "a", "key": SECRET, "key_sha256": "0" * 64}], "exactly one of key and"),
        ([{"name": "a", "key": "short"}], "keys[0]: key: must be 8 to 512 printable ASCII"),
        ([{"name": "a", "key": "sk with a blank"}], "keys[0]: key: must be 8 to 512"),
        ([{"name": "a", "key": 123456789}], "keys[0]: key: must be 8 to 512"),
        ([{"name": "a", "key_sha256": "xyz"}], "key_sha256: must be 64 hex digits"),
        ([{"name": "a", "key": SECRET, "tenant": "a/b"}], "keys[0]: tenant 'a/b': must be"),
        ([{"name": "a", "key": SECRET, "burst": 0.5}], "keys[0]: burst 0.5: must be a whole"),
        ([{"name": "a", "key": SECRET, "burst": -1}], "burst -1: must be a whole number of 1"),
        ([{"name": "a", "key": SECRET, "requests_per_minute": "x"}], "requests_per_minute 'x'"),
        ([{"name": "a", "key": SECRET, "requests_per_minute": -1}], "requests_per_minute -1"),
        ([{"name": "a", "key": SECRET, "requests_per_minute": float("nan")}], "minute nan: must"),
        ([{"name": "a", "key": SECRET, "max_concurrent_requests": 0}], "requests 0: must be"),
        ([{"name": "a", "key": SECRET, "rate": 5}], "keys[0]: 'rate' is no member; known: name"),
        ([{"name": "a", "key": SECRET}, {"name": "a", "key": SECRET + "x"}], "keys[1]: name: is"),
        ([{"name": "a", "key": SECRET}, {"name": "b", "key": SECRET}], "keys[1]: key: is that of"),
    ],
)
def test_a_wrong_key_is_named_by_its_place_and_never_shown(tables: Any, named: str) -> None:
    with pytest.raises(BadSetting) as refused:
        told(file={"keys": tables})
    assert named in str(refused.value)
    assert SECRET not in str(refused.value) and "short" not in str(refused.value)


@pytest.mark.parametrize(
    ("file", "named"),
    [
        ({"api_kye": SECRET}, "api_kye = *** (file): no such key, did you mean api_key?"),
        ({"router": {"admin_kye": SECRET}}, "admin_kye = *** (file): no key of this command"),
        ({"tenant_secrets": SECRET}, "tenant_secrets = *** (file): no such key"),
        ({"api_key": SECRET + " x"}, "api_key = *** (file): must be printable ASCII"),
    ],
)
def test_a_secret_is_not_shown_where_its_name_or_its_value_is_wrong(
    file: dict[str, Any], named: str
) -> None:
    with pytest.raises(BadSetting) as refused:
        told(file=file)
    assert str(refused.value).startswith(named) and SECRET not in str(refused.value)


def test_a_workers_own_key_is_shown_nowhere() -> None:
    table = {"url": "http://10.0.0.7:30000", "api_key": SECRET}
    found = told(file={"workers": [table]})
    assert found.workers[0].api_key == SECRET and SECRET not in repr(found)
    for wrong in ({"role": "x"}, {"api_key": SECRET + " x"}, {"api_key": 5}, {"rule": 1}):
        with pytest.raises(BadSetting) as refused:
            told(file={"workers": [table | wrong]})
        assert SECRET not in str(refused.value)
