"""TLS: a door's own certificate, and whose client certificates it believes.

Door. Used by doors.py. A client need not show a certificate; who shows one that our authority
signed is named in the request's scope (connections.py), where access rules look. Open it to change
what is asked for.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import Any


class BadTls(OSError):
    """A certificate, key or authority that cannot be used; names the file."""


@dataclass(frozen=True, slots=True)
class Tls:
    """Files, PEM. Without `client_ca` no client certificate is asked for."""

    cert: str
    key: str
    client_ca: str | None = None

    def check(self) -> None:
        """Raises BadTls before anything listens."""
        for path, what in (
            (self.cert, "certificate and key"),
            (self.client_ca, "client authority"),
        ):
            if path is None:
                continue
            try:
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                if path == self.cert:
                    context.load_cert_chain(path, self.key)
                else:
                    context.load_verify_locations(path)
            except (OSError, ssl.SSLError) as error:
                raise BadTls(f"TLS {what} {path!r}: {error}") from error

    def options(self) -> dict[str, Any]:
        """What uvicorn is told."""
        found: dict[str, Any] = {"ssl_certfile": self.cert, "ssl_keyfile": self.key}
        if self.client_ca is not None:
            found |= {"ssl_ca_certs": self.client_ca, "ssl_cert_reqs": ssl.CERT_OPTIONAL}
        return found
