"""Proxy: engine routes that are no generation go to one worker that serves them.

Edge: picks the least loaded healthy worker, one leg, bytes untouched. api.py calls it. Open it to
add a route that is passed on.
"""

from __future__ import annotations

from kvplane.vocabulary import Role

from .blame import LegFailed
from .dispatch import Attempt, Client, dispatch, honest_end, is_stream
from .errors import GatewayError
from .gateway import Gateway
from .legs_wire import Origin, forwarded
from .target import Target

PROXIED = frozenset(
    {"/v1/embeddings", "/v1/rerank", "/rerank", "/v1/score", "/score", "/v1/classify"}
    | {"/classify", "/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize", "/encode"}
)
WEIGHT_TOKENS = 1  # booked: seen by policies, small beside a generation

HeaderList = list[tuple[bytes, bytes]]


async def proxy(
    gateway: Gateway, path: str, raw: bytes, headers: HeaderList, request_id: str, client: Client
) -> None:
    """One request to one worker. Raises GatewayError and what dispatch raises."""
    target = _pick(gateway)
    sent = [
        (b"content-type", b"application/json"),
        (b"x-request-id", request_id.encode()),
        *forwarded(headers),
    ]
    own = [
        (b"x-request-id", request_id.encode()),
        (b"x-kvplane-decode", str(target.worker).encode("latin-1", "replace")),
    ]
    with gateway.fleet.book(target.worker, WEIGHT_TOKENS):
        leg = gateway.legs.begin(Origin.parse(target.url), path, sent, raw, client.bell)
        try:
            await dispatch(Attempt(leg, str(target.worker)), client, own)
        except LegFailed as failed:
            failed.cause.headers = own
            if not failed.started:
                raise failed.cause from None
            await honest_end(client, failed, is_stream(leg))


def _pick(gateway: Gateway) -> Target:
    """A unified worker where there is one, else a prefill: those answer without a transfer."""
    for role in (Role.BOTH, Role.PREFILL, Role.DECODE):
        if found := gateway.fleet.selectable(role):
            return min(found, key=lambda target: (target.inflight_tokens, target.worker))
    raise gateway.fleet.lack(Role.PREFILL) or GatewayError(
        "no_prefill_available", "no worker can be used"
    )
