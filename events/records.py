"""Records: a change as JSON, for consumers outside.

Pure. Used by api.py. Open it to change the public form of the change stream; the form is part of
the README. Hashes are 16 hex digits, since 64-bit numbers break JavaScript.

    {"cursor": "..", "worker": "p0", "epoch": 1, "sequence": 7, "at": 1.5, "changes": [
       {"kind": "stored", "tier": "gpu", "parent": null, "blocks": ["0f.."], "block_size": 16}]}
"""

from __future__ import annotations

from typing import Any

from kvplane.index import Entry, to_hex
from kvplane.vocabulary import Change, Cleared, Known, Removed, Stored


def record(change: Change) -> dict[str, Any]:
    """One change; `kind` is stored, removed, cleared or known."""
    whose = {"worker": str(change.worker), "epoch": change.epoch}
    if isinstance(change, Stored):
        parent = None if change.parent is None else to_hex(change.parent)
        blocks = [to_hex(block) for block in change.blocks]
        what: dict[str, Any] = {"kind": "stored", "tier": change.tier.value, "parent": parent}
        return {**what, "blocks": blocks, "block_size": change.block_size, **whose}
    if isinstance(change, Removed):
        blocks = [to_hex(block) for block in change.blocks]
        return {"kind": "removed", "tier": change.tier.value, "blocks": blocks, **whose}
    if isinstance(change, Cleared):
        tier = change.tier.value if change.tier else None
        return {"kind": "cleared", "reason": change.reason.value, "tier": tier, **whose}
    assert isinstance(change, Known), f"unknown change {change!r}"
    known = {"kind": "known", "state": change.state.value, "reason": change.reason}
    return {**known, "since": change.since, **whose}


def entry_record(entry: Entry) -> dict[str, Any]:
    """One step of the stream; `sequence` is the engine batch it ends with, or null."""
    return {
        "cursor": entry.cursor,
        "worker": str(entry.worker),
        "epoch": entry.epoch,
        "sequence": entry.last,
        "at": entry.at,
        "changes": [record(change) for change in entry.changes],
    }
