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
    """A certificate, key or authority that cannot be used; names the keys and the files."""


@dataclass(frozen=True, slots=True)
class Tls:
    """Files, PEM. Without `client_ca` no client certificate is asked for."""

    cert: str
    key: str
    client_ca: str | None = None

    def check(self) -> None:
        """Raises BadTls before anything listens."""
        _readable(tls_cert=self.cert, tls_key=self.key, client_ca=self.client_ca)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.cert, self.key)
        except OSError as error:
            named = f"tls_cert = {self.cert!r}, tls_key = {self.key!r}"
            raise BadTls(f"{named}: must be a PEM certificate and its own key: {error}") from error
        if self.client_ca is None:
            return
        try:
            context.load_verify_locations(self.client_ca)
        except OSError as error:
            named = f"client_ca = {self.client_ca!r}"
            raise BadTls(f"{named}: must be PEM certificates of authorities: {error}") from error

    def options(self) -> dict[str, Any]:
        """What uvicorn is told."""
        found: dict[str, Any] = {"ssl_certfile": self.cert, "ssl_keyfile": self.key}
        if self.client_ca is not None:
            found |= {"ssl_ca_certs": self.client_ca, "ssl_cert_reqs": ssl.CERT_OPTIONAL}
        return found


def _readable(**files: str | None) -> None:
    for key, path in files.items():
        try:
            if path is not None:
                open(path, "rb").close()
        except OSError as error:
            want = f"must be a PEM file that can be read ({error.strerror})"
            raise BadTls(f"{key} = {path!r}: {want}") from error
