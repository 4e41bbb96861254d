"""Terms: may this decode bind a room here at all?

Pure. Used by offer.py before anything is kept. Open it to change what two engines must have in
common; every field that differs is named at once.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from kvplane.vocabulary import Generation

from .backends.base import Offer
from .frames import MOST_REASON, BindFrame, RefusedFrame, bind_faults
from .metadata import Layout, record_bytes
from .settings import TransferSettings

MOST_FIELD = 200  # characters shown of one thing that differs


@dataclass(frozen=True, slots=True)
class Terms:
    """What this prefill is."""

    offer: Offer
    layout: Layout
    generation: Generation
    settings: TransferSettings

    def refusal(self, bind: BindFrame, host: str) -> RefusedFrame | None:
        """The answer to a bind from `host` that cannot be; None = fine."""
        fault = bind_faults(bind, self.settings.most_pages) or undiallable(bind.offer)
        fault = fault or unreachable(bind.offer.host, host)
        if fault is None and bind.aux_bytes < record_bytes(len(bind.pages)):
            fault = f"aux_bytes {bind.aux_bytes}: must be {record_bytes(len(bind.pages))} or more"
        if fault is not None:
            return RefusedFrame(kind="refused", reason=fault)
        fields = self.layout.differences(bind.layout, self.settings.tolerated)
        fields += self.offer.differences(bind.offer, bind.regions)
        if bind.sums != self.settings.checksums:
            fields += (f"checksums {self.settings.checksums} here, {bind.sums} there",)
        if fields:
            shown = tuple(field[:MOST_FIELD] for field in fields)
            reason = f"layouts differ: {'; '.join(shown)}"[:MOST_REASON]
            return RefusedFrame(kind="layout", reason=reason, fields=shown)
        if bind.expected is not None and bind.expected != self.generation:
            asked = bind.expected[:MOST_FIELD]
            reason = f"this is generation {self.generation}, {asked} was asked for"
            return RefusedFrame(kind="generation", reason=reason)
        return None


def undiallable(offer: Offer) -> str | None:
    """A host or port that no socket takes, whatever the network is."""
    if not 0 <= offer.port <= 65535:  # 0: backends that are reached by their blob
        return f"offer port {offer.port}: must be 0 to 65535"
    try:
        offer.host.encode("idna")
    except UnicodeError:
        return f"offer host {offer.host[:MOST_FIELD]!r}: must be an address or a name"
    return None


def unreachable(told: str, seen: str) -> str | None:
    """An address that a peer at `seen` cannot mean for us: a wildcard, or its own loopback."""
    try:
        address, peer = ipaddress.ip_address(told), ipaddress.ip_address(seen)
    except ValueError:
        return None if told else "offer host: must not be empty"  # a name: the dial will tell
    if address.is_unspecified:
        return f"offer host {told}: a wildcard cannot be dialled, advertise an address"
    if address.is_loopback and not peer.is_loopback:
        return f"offer host {told}: is loopback, but the decode comes from {seen}"
    return None
