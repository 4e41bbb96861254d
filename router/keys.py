"""Keys: who is asking, and what may they?

Pure. Keys are compared by their SHA-256, so that how long it takes tells nothing of them, and the
keys of a file are kept nowhere. api.py asks once per request. Open it to change where a key is
looked for, or what engines see of it.

    no key is configured       anybody; the client's own Authorization goes on to the engines
    --api-key K                K; the engines get K, as sgl router has it
    [[keys]]                   each of them; engines never see one, they get --api-key or nothing
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from .errors import GatewayError
from .legs_wire import beyond_us
from .rates import Bucket
from .settings import AdmissionSettings, KeySettings
from .tenants import tenant_salt

HeaderList = list[tuple[bytes, bytes]]
BEARER = b"bearer "
CREDENTIALS = (b"authorization", b"x-api-key")


class Key:
    """One key and what runs under it."""

    __slots__ = ("bounded", "bucket", "most", "name", "running", "salt")

    def __init__(self, settings: KeySettings, secret: str = "") -> None:
        self.name, self.most = settings.name, settings.most_requests
        self.running = 0  # requests of this key under way or waiting
        self.bucket = Bucket(settings.requests_per_minute / 60, settings.burst)
        self.bounded = self.bucket.limited or self.most >= 0
        self.salt = tenant_salt(settings.tenant, secret) if settings.tenant else ""

    def __repr__(self) -> str:
        return f"<key {self.name} {self.running} running>"


class Keys:
    """All keys by their digest."""

    def __init__(self, settings: AdmissionSettings) -> None:
        told = list(settings.keys)
        self._upstream: HeaderList = []
        if settings.api_key:
            told.append(KeySettings("default", digest_of(settings.api_key)))
            self._upstream = [(b"authorization", b"Bearer " + settings.api_key.encode())]
        self._all = {bytes.fromhex(one.digest): Key(one, settings.tenant_secret) for one in told}
        self.guarded = bool(self._all)
        # Whose every request is, where no key is needed.
        self.anybody = None if self.guarded else Key(KeySettings("anybody", ""))

    def __iter__(self) -> Iterator[Key]:
        return iter((self.anybody,) if self.anybody is not None else self._all.values())

    def of(self, headers: HeaderList) -> Key:
        """Whose request this is. Raises GatewayError 401 where it needs a key and has none."""
        if self.anybody is not None:
            return self.anybody
        given = _given(headers)
        if len(given) > 1:
            raise GatewayError(
                "invalid_api_key",
                f"{len(given)} API keys that differ came (Authorization, x-api-key): send one",
            )
        if not given or given == {b""}:
            raise GatewayError(
                "invalid_api_key", "an API key is needed: send it as Authorization: Bearer KEY"
            )
        found = self._all.get(hashlib.sha256(given.pop()).digest())
        if found is None:
            raise GatewayError("invalid_api_key", "this API key is not known here")
        return found

    def onward(self, headers: HeaderList) -> HeaderList:
        """The headers as engines may see them: no key that is ours alone."""
        headers = beyond_us(headers)
        if not self.guarded:
            return headers
        return [pair for pair in headers if pair[0] not in CREDENTIALS] + self._upstream


def digest_of(key: str) -> str:
    """As KeySettings wants it."""
    return hashlib.sha256(key.encode()).hexdigest()


def _given(headers: HeaderList) -> set[bytes]:
    """All keys of a request. Where two differ none counts: a proxy may have checked the other."""
    return {_bare(value) for name, value in headers if name in CREDENTIALS}


def _bare(value: bytes) -> bytes:
    value = value.strip()
    return value[len(BEARER) :].strip() if value[: len(BEARER)].lower() == BEARER else value
