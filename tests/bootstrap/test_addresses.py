"""Addresses: every way people write a host and a port, and what is no address."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane.bootstrap import Address, BadAddress


@pytest.mark.parametrize(("text", "host", "port", "shown"), [
    ("10.0.0.7:8998", "10.0.0.7", 8998, "10.0.0.7:8998"),
    ("10.0.0.7", "10.0.0.7", 8998, "10.0.0.7:8998"),
    ("[::1]:9000", "::1", 9000, "[::1]:9000"),
    ("http://[::1]:9000", "::1", 9000, "[::1]:9000"),
    ("http://[2001:db8::7]/", "2001:db8::7", 8998, "[2001:db8::7]:8998"),
    ("prefill-0.prefill.svc:8998", "prefill-0.prefill.svc", 8998, "prefill-0.prefill.svc:8998"),
    ("http://prefill_1:1", "prefill_1", 1, "prefill_1:1"),
])  # fmt: skip
def test_an_address_is_a_bare_host_and_a_port(text: str, host: str, port: int, shown: str) -> None:
    found = Address.parse(text)
    assert (found.host, found.port, str(found)) == (host, port, shown)
    assert found.url == f"http://{shown}"


@pytest.mark.parametrize("text", [
    "", ":8998", "a:b:c:1", "::1", "::1:8998", "[::1:8998", "::1]:8998", "[10.0.0.7]:1", "[name]:1",
    "host:0", "host:65536", "host:", "host:x", "host:-1", "host:٣", "a b:1", "http://h:1/path",
    "https://h:1", "h:1?x", "user@h:1", "h\n:1", "[::1]8998", "h:123456",
])  # fmt: skip
def test_what_is_no_address_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(BadAddress, match="address "):
        Address.parse(text)


@given(st.ip_addresses(), st.integers(1, 65_535))
def test_every_ip_address_survives_the_way_there_and_back(ip: object, port: int) -> None:
    address = Address(str(ip), port)
    assert Address.parse(str(address)) == Address.parse(address.url) == address


@given(st.text(max_size=40))
def test_any_text_is_an_address_or_a_clear_no(text: str) -> None:
    try:
        assert Address.parse(text).port in range(1, 65_536)
    except BadAddress as error:
        assert "must be" in str(error)
