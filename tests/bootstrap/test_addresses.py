"""Addresses: every way people write a host and a port, and what is no address."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane.bootstrap import Address, BadAddress, is_loopback, is_wildcard, local


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


@pytest.mark.parametrize(("host", "shown"), [
    ("::1", "[::1]:9"), ("[::1]", "[::1]:9"), ("10.0.0.7", "10.0.0.7:9"), ("h.svc", "h.svc:9"),
])  # fmt: skip
def test_host_and_port_may_be_told_apart(host: str, shown: str) -> None:
    """FR-BS-04: `::1` with a separate port; the stored host is the bare literal."""
    found = Address.of(host, 9)
    assert (str(found), found.host) == (shown, host.strip("[]"))
    assert Address.parse(str(found)) == found


@pytest.mark.parametrize(("host", "port"), [
    ("::1:::2", 9), ("[::1", 9), ("::1]", 9), ("[10.0.0.7]", 9), ("h:1", 9), ("", 9), ("h", 0),
    ("h", 65_536), ("http://h", 9),
])  # fmt: skip
def test_what_is_no_host_or_no_port_is_refused(host: str, port: int) -> None:
    """FR-BS-04: malformed forms are a clear configuration error."""
    with pytest.raises(BadAddress, match="must be"):
        Address.of(host, port)


def test_a_literal_without_brackets_is_told_how_it_is_written() -> None:
    """FR-BS-04"""
    with pytest.raises(BadAddress, match=r"address '::1:8998': .*brackets as in \[::1\]:8998"):
        Address.parse("::1:8998")


@pytest.mark.parametrize(("bound", "dialled"), [
    ("0.0.0.0", "127.0.0.1"), ("::", "::1"), ("[::]", "::1"), ("", "127.0.0.1"),
    ("10.0.0.7", "10.0.0.7"), ("[fd00::7]", "fd00::7"), ("h.svc", "h.svc"),
])  # fmt: skip
def test_a_server_is_dialled_from_its_own_machine_in_its_own_family(
    bound: str, dialled: str
) -> None:
    """FR-BS-13: local registration uses the loopback of the same family."""
    assert local(bound) == dialled


def test_only_what_stays_on_this_machine_is_loopback() -> None:
    for host in ("127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost", "::ffff:127.0.0.1"):
        assert is_loopback(host), host
    for host in ("10.0.0.7", "fd00::7", "0.0.0.0", "localhost.example", "h", ""):
        assert not is_loopback(host), host
    assert [is_wildcard(h) for h in ("0.0.0.0", "::", "[::]", "", "::1", "h")] == [1, 1, 1, 1, 0, 0]
