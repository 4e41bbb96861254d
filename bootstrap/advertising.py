"""Advertising: under which host do others reach what we bind?

Edge: asks the kernel which address it would send from; nothing is sent. Used by whoever starts a
server: engines and the roof. Open it to find an address in another way.

    told          as told          the operator knows of NAT, containers and names; we do not
    10.0.0.7      itself
    0.0.0.0, ::   a routable address of the same family, or NotRoutable: never the wildcard itself
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator

from .addresses import bare, family, is_host, is_routable, is_wildcard
from .errors import BadAddress, NotRoutable

# Documentation addresses: behind the default route, and nobody's. Connecting UDP sends no packet.
_FAR = {4: (socket.AF_INET, "192.0.2.1"), 6: (socket.AF_INET6, "2001:db8::1")}


def advertise(
    bind_host: str, told: str | None = None, own: Callable[[int], Iterator[str]] | None = None
) -> str:
    """The bare host to tell peers of a server bound to `bind_host`.

    `own` gives this machine's addresses of a family (4 or 6), best first. Raises BadAddress for a
    told host that cannot be meant, NotRoutable where a wildcard has no address to tell.
    """
    if told:
        if not is_host(bare(told)) or is_wildcard(told):
            raise BadAddress(told, "must be a host that others can dial")
        return bare(told)
    if not is_wildcard(bind_host):
        return bare(bind_host)
    version = family(bind_host)
    for found in (own or own_addresses)(version):
        if is_routable(found) and family(found) == version:
            return found
    raise NotRoutable(bind_host or "0.0.0.0", f"no routable IPv{version} address here")


def own_addresses(version: int) -> Iterator[str]:
    """What the kernel would send from, then what this machine's name stands for."""
    kind, far = _FAR[version]
    with contextlib.suppress(OSError), socket.socket(kind, socket.SOCK_DGRAM) as probe:
        probe.connect((far, 9))
        yield str(probe.getsockname()[0])
    with contextlib.suppress(OSError, UnicodeError):
        for entry in socket.getaddrinfo(socket.gethostname(), None, kind, socket.SOCK_DGRAM):
            yield str(entry[4][0])
