"""Answers: what a directory says to a request, byte for byte as the engines expect it.

Pure. api.py receives and sends, this file words. Open it to change a status, a text or the view of
GET /ranks. Texts, order of checks and member order are those of SGLang 0.5.23; where it answers 500
to bad input we answer 400 and name the field (its clients look at "not 200" only).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import parse_qsl

from .directory import Accepted, Cell, Directory, place_text
from .errors import BadInput
from .fields import MISSING, number
from .registration import Registration, life
from .rooms import RoomTable

GENERATION = "x-kvplane-generation"  # header: the life of the instance, on every answer of ours
TEXT = "text/plain; charset=utf-8"
JSON = "application/json; charset=utf-8"
PARAMETERS = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")
MOST_LISTED = 100  # missing ranks in GET /ranks; their number is always told


@dataclass(frozen=True, slots=True)
class Answer:
    """One response."""

    status: int
    body: bytes
    kind: str = TEXT
    headers: tuple[tuple[str, str], ...] = ()


def said(text: str, status: int = 200, kind: str = TEXT) -> Answer:
    """A text."""
    return Answer(status, text.encode(), kind)


def told(value: Any, status: int = 200) -> Answer:
    """A JSON value, blanks after commas as SGLang writes it."""
    return Answer(status, json.dumps(value).encode(), JSON)


OK = said("OK")
NOT_FOUND = said("404: Not Found", 404)
WRONG_ROUTE_METHOD = said("Method not allowed", 405, JSON)  # SGLang labels this text JSON


def wrong_method(allow: str) -> Answer:
    """405 with the methods that are there."""
    return replace(said("405: Method Not Allowed", 405), headers=(("allow", allow),))


def loads(raw: bytes) -> Any:
    """A JSON body. Raises BadInput with the parser's word for what is wrong."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        why = str(error) if raw else "empty"
        raise BadInput("body", raw[:40], f"JSON ({why[:100]})") from None


def registration(raw: bytes, header: str | None) -> Registration:
    """The body of PUT /route, with the generation that came as a header where it holds none."""
    found = Registration.parse(loads(raw))
    if found.generation is None and header is not None:
        found = replace(found, generation=life(header))
    return found


def lookup(directory: Directory, query: bytes, now: float) -> Answer:
    """GET /route: topology where all four are -1, else one rank.

    Order: presence, numbers up to the first that is not -1, topology or gate, the other numbers.
    """
    first: dict[str, str] = {}
    for name, value in parse_qsl(query.decode("latin-1"), keep_blank_values=True):
        first.setdefault(name, value)
    given = [first.get(name, "") for name in PARAMETERS]
    if not all(given):
        return said("Missing inputs for bootstrap server.", 400)
    for name, value in zip(PARAMETERS, given, strict=True):
        if number(name, value) != -1:
            wanted = False
            break
    else:
        wanted = True
    if not directory.complete(now):
        count = directory.registered(now)
        return said(f"Prefill server not fully registered yet ({count} workers registered).", 503)
    if wanted:
        topology = directory.topology(now)
        assert topology is not None, "complete directory without a topology"
        return told(topology.answer())
    return _rank(directory, given, now)


def _rank(directory: Directory, given: list[str], now: float) -> Answer:
    dp, cp, tp, pp = (number(n, v) for n, v in zip(PARAMETERS, given, strict=True))
    entry = directory.rank(dp, cp, tp, pp, now)
    if entry is None:
        names = ("dp_rank", "cp_rank", "tp_rank", "pp_rank")
        place = " ".join(f"{n}={v}" for n, v in zip(names, given, strict=True))
        return said(f"Bootstrap info not found for {place}", 404)
    return told({"rank_ip": entry.raw_ip, "rank_port": entry.address.port})


def register_room(rooms: RoomTable, raw: bytes, now: float) -> Answer:
    """POST /register_dp_rank."""
    body = _object(raw)
    room = number("bootstrap_room", body.get("bootstrap_room", MISSING))
    rooms.register(room, number("dp_rank", body.get("dp_rank", MISSING)), now)
    return OK


def query_rooms(rooms: RoomTable, raw: bytes, now: float) -> Answer:
    """POST /query_dp_ranks; an object stands for its keys, a text for its characters."""
    asked = _object(raw).get("bootstrap_rooms", MISSING)
    if not isinstance(asked, list | dict | str):
        raise BadInput("bootstrap_rooms", asked, "a list of rooms")
    found = rooms.query([number("bootstrap_rooms", room) for room in asked], now)
    return told({str(room): rank for room, rank in found.items()})


def ranks(directory: Directory, rooms: RoomTable, now: float) -> Answer:
    """GET /ranks: the whole table for people and tests, and what is missing in one sentence."""
    facts, missing = directory.facts, directory.missing(now)
    table = [
        {
            **dict(zip(("dp", "cp", "tp", "pp"), place, strict=True)),
            "ip": entry.raw_ip,
            "port": entry.address.port,
            "state": "registered" if entry.trusted(now) else "in doubt",
        }
        for place, entry in directory.table().items()
    ]
    topology = directory.topology(now)
    return told(
        {
            "generation": directory.generation,
            "complete": topology is not None,
            "registered": directory.registered(now),
            "expected": None if facts is None else facts.ranks,
            "summary": summary(directory, missing, now),
            "ranks": table,
            "missing": [
                dict(zip(("dp", "cp", "tp", "pp"), cell, strict=True))
                for cell in missing[:MOST_LISTED]
            ],
            "missing_count": len(missing),
            "differing": list(directory.differing),
            "topology": None if topology is None else topology.answer(),
            "rooms": len(rooms),
        }
    )


def summary(directory: Directory, missing: list[Cell], now: float) -> str:
    """`register: 3 of 4, missing tp=2`."""
    facts = directory.facts
    if facts is None:
        return "register: no rank yet"
    text = f"register: {facts.ranks - len(missing)} of {facts.ranks}"
    if not missing:
        return text
    shown = ", ".join(place_text(cell, facts) for cell in missing[:5])
    more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
    return f"{text}, missing {shown}{more}"


def accepted_text(new: Registration, done: Accepted, directory: Directory, now: float) -> str:
    """What changed, as key=value for the log."""
    facts = directory.facts
    expected = 0 if facts is None else facts.ranks
    return (
        f"place={place_text(new.place.cell).replace(' ', ',')} address={new.address} "
        f"registered={directory.registered(now)}/{expected} generation={directory.generation} "
        f"new_life={done.new_life} replaced={done.replaced}"
    )


def _object(raw: bytes) -> Mapping[str, Any]:
    body = loads(raw)
    if not isinstance(body, Mapping):
        raise BadInput("body", body, "a JSON object")
    return body
