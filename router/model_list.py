"""Model list: one list of models out of what many engines say.

Pure: lists in, one list out. engines.py asks, admin.py shows. Open it to change what is said where
engines differ. The rule: one entry per id, every member any of them gives; where they differ

    max_model_len       the smallest, which all of them can serve
    created             the earliest: each counts from its own start
    permission          the first one's: random ids
    any other           the first one's, and all values under kvplane.conflicts

The first is the healthy before the ill, prefills before the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvplane.vocabulary import WorkerUp

Entry = dict[str, Any]
LEAST = frozenset({"max_model_len", "created"})
QUIET = frozenset({"created", "permission"})  # they always differ, and it means nothing
MOST_ENTRIES = 10_000  # of one engine: adapters are many, but not that many


def entries_of(told: object) -> list[Entry]:
    """The entries of one engine's answer; what is none is left out."""
    data = told.get("data") if isinstance(told, Mapping) else None
    listed = data[:MOST_ENTRIES] if isinstance(data, list) else []
    return [one for one in listed if isinstance(one, dict) and isinstance(one.get("id"), str)]


def merged(lists: Iterable[Iterable[Entry]], pods: Iterable[WorkerUp]) -> list[Entry]:
    """All models by id; those that only discovery knows by name at least."""
    found: dict[str, list[Entry]] = {}
    for entries in lists:
        for entry in entries:
            found.setdefault(entry["id"], []).append(entry)
    for up in pods:
        for name in filter(None, (up.model, *up.adapters)):
            if name not in found:
                found[name] = [_named(name, up)]
    return [_one(found[name]) for name in sorted(found)]


def _one(entries: list[Entry]) -> Entry:
    whole: Entry = {}
    conflicts: dict[str, list[Any]] = {}
    for name in dict.fromkeys(name for entry in entries for name in entry):
        values = _distinct(entry[name] for entry in entries if name in entry)
        whole[name] = min(values) if name in LEAST and _numbers(values) else values[0]
        if len(values) > 1 and name not in QUIET:
            conflicts[name] = values
    return whole | {"kvplane": {"conflicts": conflicts}} if conflicts else whole


def _distinct(values: Iterable[Any]) -> list[Any]:
    """Each value once, told ones before null: an engine that says nothing contradicts nobody."""
    found: list[Any] = []
    for value in values:
        if value is not None and value not in found:
            found.append(value)
    return found or [None]


def _numbers(values: Iterable[Any]) -> bool:
    return all(type(value) in (int, float) for value in values)


def _named(name: str, up: WorkerUp) -> Entry:
    base = {"id": name, "object": "model", "created": 0, "owned_by": "kvplane", "root": up.model}
    return base | {"max_model_len": up.max_tokens}
