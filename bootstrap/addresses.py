"""Addresses: host and port out of a text, and back, IPv6 included.

Pure. Used by client.py, resolver.py and registration.py; advertising.py asks the machine. Open it
to accept another way of writing an address. Addresses are compared as whole text, never by their
beginning.

    "10.0.0.7:8998"  "[::1]:8998"  "prefill-0:8998"  "http://[::1]:8998"   ->  Address(host, port)
    bind 0.0.0.0   dial it here: 127.0.0.1   tell others: what advertising.py finds, never 0.0.0.0
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from .errors import BadAddress

DEFAULT_PORT = 8998  # of a bootstrap server, where the text has none
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,252})")  # '_' is common in container names
_WANT = "must be host:port, with an IPv6 literal in brackets as in [::1]:8998"
_LOOPBACK = {4: "127.0.0.1", 6: "::1"}


@dataclass(frozen=True, slots=True)
class Address:
    """Where something listens. `host` is a bare literal or a name, without brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """For an HTTP client, no slash at the end."""
        return f"http://{self}"

    @staticmethod
    def of(host: str, port: int) -> Address:
        """Host and port that were told apart; a literal may wear its brackets or not."""
        literal = bare(host)
        if not is_host(literal) or (literal != host and is_ip(literal) != 6):
            raise BadAddress(host, "must be a name or a literal, its port apart")
        if not 1 <= port <= 65_535:
            raise BadAddress(str(port), "port must be 1 to 65535")
        return Address(literal, port)

    @staticmethod
    def parse(text: str) -> Address:
        """Raises BadAddress for anything that names no host, or no port that can be."""
        rest = text.removeprefix("http://").removesuffix("/")
        if rest.startswith("["):
            host, bracket, tail = rest[1:].partition("]")
            if not bracket or is_ip(host) != 6:
                raise BadAddress(text, _WANT)
        else:
            host, colon, tail = rest.partition(":")
            tail = colon + tail
        if not is_host(host):
            raise BadAddress(text, _WANT)
        return Address(host, _port(text, tail))


def is_ip(host: str) -> int | None:
    """4 or 6 for a literal of that version (a zone as in fe80::1%eth0 included), else None."""
    try:
        return ipaddress.ip_address(host).version
    except ValueError:
        return None


def is_host(host: str) -> bool:
    """True for a bare literal or something that can be a name."""
    return is_ip(host) is not None or _NAME.fullmatch(host) is not None


def bare(host: str) -> str:
    """A host without the brackets some senders put around an IPv6 literal."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def is_wildcard(host: str) -> bool:
    """True for an address that means "all of mine" and that nobody else can reach."""
    literal = bare(host)
    return not literal or (
        is_ip(literal) is not None and ipaddress.ip_address(literal).is_unspecified
    )


def is_loopback(host: str) -> bool:
    """True for an address that only this machine can reach."""
    literal = bare(host)
    if is_ip(literal) is None:
        return literal == "localhost" or literal.endswith(".localhost")
    found = ipaddress.ip_address(literal)
    inner = getattr(found, "ipv4_mapped", None)  # ::ffff:127.0.0.1
    return found.is_loopback or bool(inner is not None and inner.is_loopback)


def is_routable(host: str) -> bool:
    """True for a literal that another machine can dial as it stands, without naming a link."""
    literal = bare(host)
    if is_ip(literal) is None or is_wildcard(literal) or is_loopback(literal):
        return False
    found = ipaddress.ip_address(literal)
    return not (found.is_link_local or found.is_multicast)


def family(host: str) -> int:
    """4 or 6: which sockets a host that is bound opens; "" and names count as IPv4."""
    return is_ip(bare(host)) or 4


def local(bind_host: str) -> str:
    """Where a server bound to `bind_host` is dialled from this machine; the same family."""
    return _LOOPBACK[family(bind_host)] if is_wildcard(bind_host) else bare(bind_host)


def _port(text: str, tail: str) -> int:
    if not tail:
        return DEFAULT_PORT
    digits = tail[1:]
    if tail[0] != ":" or not (digits.isascii() and digits.isdecimal()) or len(digits) > 5:
        raise BadAddress(text, _WANT)
    if not 1 <= int(digits) <= 65_535:
        raise BadAddress(text, "port must be 1 to 65535")
    return int(digits)
