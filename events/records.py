"""Records: a change as JSON, for consumers outside.

Pure. Used by api.py. Open it to change the public form of the change stream; the form is part of
the README. Hashes are 16 hex digits, since 64-bit numbers break JavaScript.

    {"cursor": "..", "worker": "p0", "epoch": 1, "sequence": 7, "at": 1.5, "changes": [
       {"kind": "stored", "tier": "gpu", "parent": null, "blocks": ["0f.."], "block_size": 16}]}

What is of a further cache group of a hybrid model says which: "group". Who keeps such blocks apart
from the others, or leaves them out, reads the rest right.
"""

from __future__ import annotations

from typing import Any

from kvplane.index import Entry, to_hex
from kvplane.vocabulary import Change, Cleared, Group, Known, Removed, Stored


def record(change: Change) -> dict[str, Any]:
    """One change; `kind` is stored, removed, cleared or known."""
    whose = {"worker": str(change.worker), "epoch": change.epoch}
    if isinstance(change, Stored):
        parent = None if change.parent is None else to_hex(change.parent)
        blocks = [to_hex(block) for block in change.blocks]
        what: dict[str, Any] = {"kind": "stored", "tier": change.tier.value, "parent": parent}
        group = {} if change.group is None else {"group": group_record(change.group)}
        return {**what, "blocks": blocks, "block_size": change.block_size, **group, **whose}
    if isinstance(change, Removed):
        blocks = [to_hex(block) for block in change.blocks]
        of = {} if change.group is None else {"group": change.group}
        return {"kind": "removed", "tier": change.tier.value, "blocks": blocks, **of, **whose}
    if isinstance(change, Cleared):
        tier = change.tier.value if change.tier else None
        return {"kind": "cleared", "reason": change.reason.value, "tier": tier, **whose}
    assert isinstance(change, Known), f"unknown change {change!r}"
    known = {"kind": "known", "state": change.state.value, "reason": change.reason}
    return {**known, "since": change.since, "by": change.by, **whose}


def group_record(group: Group) -> dict[str, Any]:
    """A further cache group: its number is what a removal names."""
    shown: dict[str, Any] = {"number": group.number, "kind": group.kind.value}
    return {**shown, "tokens": group.tokens, "block_size": group.block_size}


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
