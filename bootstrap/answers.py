"""Answers: what a directory says of rooms and, to people, of itself.

Pure. api.py receives and sends, this file words; GET /route is worded in lookups.py. Open it to
change a room's answer or the view of GET /ranks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .directory import Accepted, Cell, Directory, place_text
from .errors import BadInput
from .fields import MISSING, number
from .lookups import named
from .registration import Registration, life
from .replies import Answer, Headers, told
from .rooms import RoomTable

MOST_LISTED = 100  # missing ranks in GET /ranks; their number is always told
MOST_TABLE = 4096  # ranks in GET /ranks
MOST_ASKED = 65_536  # rooms of one question
NAMES = ("dp", "cp", "tp", "pp")


def loads(raw: bytes) -> Any:
    """A JSON body. Raises BadInput with the parser's word for what is wrong."""
    try:
        return json.loads(raw, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        why = str(error) if raw else "empty"
        raise BadInput("body", raw[:40], f"JSON ({why[:100]})") from None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def registration(raw: bytes, header: str | None) -> Registration:
    """The body of PUT /route, with the generation that came as a header where it holds none."""
    found = Registration.parse(loads(raw))
    if found.generation is None and header is not None:
        found = replace(found, generation=life(header))
    return found


def register_room(rooms: RoomTable, raw: bytes, now: float) -> int:
    """POST /register_dp_rank; the room that is known from now on."""
    body = _object(raw)
    room = _room("bootstrap_room", body.get("bootstrap_room", MISSING))
    rank = number("dp_rank", body.get("dp_rank", MISSING))
    if not -(2**31) <= rank < 2**31:
        raise BadInput("dp_rank", rank, "an integer of 32 bits")
    rooms.register(room, rank, now)
    return room


def asked_rooms(raw: bytes) -> list[int]:
    """Which rooms a body names; an object stands for its keys, a text for its characters."""
    asked = _object(raw).get("bootstrap_rooms", MISSING)
    if not isinstance(asked, list | dict | str):
        raise BadInput("bootstrap_rooms", asked, "a list of rooms")
    if len(asked) > MOST_ASKED:
        raise BadInput("bootstrap_rooms", f"({len(asked)} rooms)", f"at most {MOST_ASKED} rooms")
    return [_room("bootstrap_rooms", room) for room in asked]


def known_rooms(rooms: RoomTable, asked: list[int], now: float, headers: Headers = ()) -> Answer:
    """POST /query_dp_ranks: those known, in the order asked."""
    found = rooms.query(asked, now)
    return told({str(room): rank for room, rank in found.items()}, headers=headers)


def forgotten_rooms(rooms: RoomTable, asked: list[int]) -> Answer:
    """POST /forget_rooms: their meetings are over."""
    return told({"forgotten": sum(rooms.forget(room) for room in asked)})


def preferred_wait(headers: list[str], most_s: float) -> float:
    """Seconds of `Prefer: wait=10` (RFC 7240), 0 where it is not asked for or is no number."""
    for part in ",".join(headers).split(","):
        name, _, value = part.split(";")[0].partition("=")
        if name.strip().lower() == "wait":
            digits = value.strip().strip('"')
            plain = digits.isascii() and digits.isdecimal()
            return min(float(digits[:10]), most_s) if plain else 0.0
    return 0.0


def ranks(directory: Directory, rooms: RoomTable, now: float, wall: float) -> dict[str, Any]:
    """GET /ranks: the whole table for people and tests, and what is missing in one sentence."""
    facts, missing = directory.facts, directory.missing(now)
    topology = directory.topology(now)
    return {
        "generation": directory.generation,
        "complete": topology is not None,
        "registered": directory.registered(now),
        "expected": None if facts is None else facts.ranks,
        "summary": summary(directory, missing, now),
        "ranks": _table(directory, now),
        "missing": [dict(zip(NAMES, cell, strict=True)) for cell in missing[:MOST_LISTED]],
        "missing_count": len(missing),
        "differing": list(directory.differing),
        "takeovers": _takeovers(directory, now, wall),
        "topology": None if topology is None else topology.answer(),
        "rooms": len(rooms),
    }


def _table(directory: Directory, now: float) -> list[dict[str, Any]]:
    return [
        {
            **dict(zip(NAMES, entry.place, strict=True)),
            "ip": entry.raw_ip,
            "port": entry.address.port,
            "state": "registered" if entry.trusted(now) else "in doubt",
        }
        for entry in list(directory.table().values())[:MOST_TABLE]
    ]


def _takeovers(directory: Directory, now: float, wall: float) -> list[dict[str, Any]]:
    """Oldest first; `at` in seconds since 1970."""
    return [
        {
            "place": place_text(event.cell, directory.facts),
            "old": str(event.old),
            "new": str(event.new),
            "generation": event.generation,
            "at": round(wall - (now - event.at), 3),
        }
        for event in directory.takeovers
    ]


def summary(directory: Directory, missing: list[Cell], now: float) -> str:
    """`register: 3 of 4, missing tp=2`."""
    facts = directory.facts
    if facts is None:
        return "register: no rank yet"
    text = f"register: {directory.registered(now)} of {facts.ranks}"
    return f"{text}, missing {named(missing, facts)}" if missing else text


def accepted_text(new: Registration, done: Accepted, directory: Directory, now: float) -> str:
    """What changed, as key=value for the log."""
    facts = directory.facts
    expected = 0 if facts is None else facts.ranks
    return (
        f"place={place_text(new.place.cell).replace(' ', ',')} address={new.address} "
        f"registered={directory.registered(now)}/{expected} generation={directory.generation} "
        f"new_life={done.new_life} replaced={done.replaced}"
    )


def _room(name: str, value: Any) -> int:
    """Not range-checked as rooms go (negatives pass), but no number of a thousand digits."""
    room = number(name, value)
    if not -(2**63) <= room < 2**64:
        raise BadInput(name, value, "an integer of 64 bits")
    return room


def _object(raw: bytes) -> Mapping[str, Any]:
    body = loads(raw)
    if not isinstance(body, Mapping):
        raise BadInput("body", body, "a JSON object")
    return body
