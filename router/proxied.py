"""Proxied: which engine routes are passed on to one worker, and to which kind?

Pure: a table, and a body read as far as routing needs it. proxy.py carries them. What is in no row
is 404; what generates needs a worker that both prefills and decodes, since one engine of a pair
would answer with half of it. Open it to add a route that is passed on.

    /v1/embeddings ...     any worker of that model, unified ones first
    /v1/responses ...      a unified worker; 501 where prefill and decode are apart
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from kvplane.vocabulary import Role

from .choice import BYTES_PER_TOKEN
from .errors import GatewayError
from .facts import ANSWER_TOKENS
from .handoffs import reserved
from .request import check_name, named
from .splice import splice
from .tenants import apart

HeaderList = list[tuple[bytes, bytes]]

ANY = (Role.BOTH, Role.PREFILL, Role.DECODE)  # these answer without a transfer
UNIFIED = (Role.BOTH,)

PROXIED: dict[str, tuple[Role, ...]] = dict.fromkeys(
    (
        "/v1/embeddings", "/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score",
        "/v1/classify", "/classify", "/pooling", "/encode",
        "/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize",
        "/v1/messages/count_tokens", "/parse_function_call", "/separate_reasoning",
    ),
    ANY,
) | dict.fromkeys(
    (
        "/v1/responses", "/v1/messages", "/inference/v1/generate",
        "/v1/audio/transcriptions", "/v1/audio/translations",
    ),
    UNIFIED,
)  # fmt: skip
LIMITS = ("max_output_tokens", "max_completion_tokens", "max_tokens")  # of an answer
JSON = b"application/json"
FORM = b"--"  # how a multipart body begins, and nothing that an engine could read as JSON


@dataclass(frozen=True, slots=True)
class Call:
    """One request that is passed on."""

    path: str
    raw: bytes
    request_id: str
    headers: HeaderList
    kind: bytes  # content-type
    model: str
    tokens: int  # of load

    @property
    def roles(self) -> tuple[Role, ...]:
        """Who may serve it, the best first."""
        return PROXIED[self.path]


def read_call(path: str, raw: bytes, request_id: str, headers: HeaderList, salt: str = "") -> Call:
    """A Call of a body. What steers engines is taken out of a JSON body as on inference routes; a
    form goes as it is, unless its key is a tenant's. Engines read as JSON what we do not (NaN, half
    a surrogate), some whatever its kind: so nothing else passes. Raises GatewayError."""
    kind = next((value for name, value in headers if name == b"content-type"), JSON)
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        if salt or kind.startswith(JSON) or not raw.startswith(FORM):
            raise GatewayError("invalid_request", f"body is no valid JSON: {error}") from None
        return Call(path, raw, request_id, headers, kind, "", 1 + len(raw) // BYTES_PER_TOKEN)
    if not isinstance(body, dict):
        raise GatewayError("invalid_request", "body must be a JSON object")
    check_name(body)
    raw = splice(raw, body, reserved)
    body = {name: value for name, value in body.items() if not reserved(name)}
    raw, body = apart(path, raw, body, salt)
    tokens = 1 + len(raw) // BYTES_PER_TOKEN + _wanted(path, body)
    return Call(path, raw, request_id, headers, JSON, named(body), tokens)


def _wanted(path: str, body: dict[str, Any]) -> int:
    """Tokens of an answer that is generated."""
    if PROXIED[path] is not UNIFIED:
        return 0
    told = (body.get(name) for name in LIMITS)
    return next((one for one in told if type(one) is int and 0 < one < 2**31), ANSWER_TOKENS)
