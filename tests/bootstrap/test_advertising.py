"""Advertising: what peers are told of a server that listens somewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kvplane.bootstrap import BadAddress, BootstrapError, NotRoutable, advertise
from kvplane.bootstrap.addresses import is_routable
from kvplane.bootstrap.advertising import own_addresses

Own = Callable[[int], Iterator[str]]


def machine(*addresses: str) -> Own:
    """A machine with these addresses, whatever family is asked for, best first."""
    return lambda version: iter(addresses)


DUAL = machine("fd00::7", "10.0.0.7")


def test_what_the_operator_tells_wins() -> None:
    """FR-TR-08: bind 0.0.0.0, advertise 198.51.100.7; NAT is the operator's knowledge."""
    for told in ("198.51.100.7", "gateway.example", "localhost"):
        assert advertise("0.0.0.0", told, DUAL) == told
    assert advertise("0.0.0.0", "[2001:db8::7]", DUAL) == "2001:db8::7"


@pytest.mark.parametrize("told", ["0.0.0.0", "::", "[::]", "a b", "h:1", "http://h", "[h"])
def test_a_told_host_nobody_can_dial_is_refused(told: str) -> None:
    """FR-TR-08, FR-BS-13: a wildcard is never told."""
    with pytest.raises(BadAddress, match="must be a host that others can dial"):
        advertise("10.0.0.7", told, DUAL)


def test_a_concrete_host_is_told_as_it_is() -> None:
    """FR-TR-08: only bind is set."""
    for host in ("10.0.0.7", "127.0.0.1", "node-3"):
        assert advertise(host, None, machine()) == host
    assert advertise("[fd00::7]", "", machine()) == "fd00::7"


def test_a_wildcard_is_told_as_an_address_of_its_own_family() -> None:
    """FR-BS-13: a dual-stack host whose primary address is of the other family."""
    assert advertise("0.0.0.0", None, DUAL) == "10.0.0.7"
    assert advertise("", None, DUAL) == "10.0.0.7"
    assert advertise("::", None, machine("10.0.0.7", "fd00::7")) == "fd00::7"


@pytest.mark.parametrize(("bound", "own", "version"), [
    ("0.0.0.0", machine("fd00::7"), 4),
    ("0.0.0.0", machine("127.0.0.1", "169.254.3.4", "0.0.0.0", "224.0.0.1", "not-one"), 4),
    ("::", machine("10.0.0.7", "::1", "fe80::1", "fe80::1%eth0", "::ffff:127.0.0.1"), 6),
    ("::", machine(), 6),
])  # fmt: skip
def test_a_wildcard_without_a_routable_address_is_a_clear_error(
    bound: str, own: Own, version: int
) -> None:
    """FR-BS-13: the start fails with what to set."""
    want = f"host {bound}: no routable IPv{version} address here; set --advertise-host"
    with pytest.raises(NotRoutable) as caught:
        advertise(bound, None, own)
    assert str(caught.value) == want
    assert isinstance(caught.value, BootstrapError)


@pytest.mark.parametrize(("bound", "version"), [("0.0.0.0", 4), ("::", 6)])
def test_this_machine_tells_something_others_could_dial_or_says_that_it_cannot(
    bound: str, version: int
) -> None:
    """FR-BS-13, with the kernel's own answer."""
    try:
        found = advertise(bound)
    except NotRoutable:
        assert not any(map(is_routable, own_addresses(version)))
    else:
        assert is_routable(found)
        assert (":" in found) == (version == 6)
