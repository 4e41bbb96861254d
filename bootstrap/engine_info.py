"""Engine info: where the weights of each rank lie, for peers that fetch them over RDMA.

Pure. api.py receives and sends; neighbour of the rank table, with which it shares nothing. Open it
to change what a rank may tell. SGLang serves it with FastAPI: errors are FastAPI's JSON.

    PUT {"tp_rank": 3, "transfer_engine_info": {"session_id": "10.0.0.3:17", "weights_info_dict":
         {"model.norm": [140213, 8192, 2]}}}     ->   OK
    GET ?rank=3   ->   {"rank":3,"remote_instance_transfer_engine_info":["10.0.0.3:17",{...}]}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl

from pydantic import TypeAdapter, ValidationError

from .errors import BadInput
from .fields import MISSING, number
from .replies import OK, Answer, with_headers

JSON = "application/json"
MOST_RANKS = 4096  # of one instance, whatever they hold
MOST_ECHOED = 200  # characters of a bad value that are repeated
INTEGER = TypeAdapter(int)  # what FastAPI takes for one, and its words where it does not


def fault(status: int, detail: Any) -> Answer:
    """An error in FastAPI's shape."""
    return Answer(status, _compact({"detail": detail}), JSON)


def wrong_method(allow: str) -> Answer:
    """405 with the methods that are there."""
    return with_headers(fault(405, "Method Not Allowed"), (("allow", allow),))


class EngineInfos:
    """The answers for every rank, encoded; bounded in number and bytes."""

    def __init__(self, most_bytes: int, most_ranks: int = MOST_RANKS) -> None:
        self._most_bytes, self._most_ranks = most_bytes, most_ranks
        self._answers: dict[int, Answer] = {}
        self._sessions: dict[int, str] = {}
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._answers)

    def session(self, rank: int) -> str | None:
        """Who a rank said it is; for logs."""
        return self._sessions.get(rank)

    def register(self, raw: bytes) -> tuple[Answer, int | None]:
        """PUT: the answer, and the rank that is in now."""
        try:
            body = json.loads(raw, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            return _not_json(raw, error), None
        if not isinstance(body, Mapping):
            said = "Input should be a valid dictionary"
            return fault(422, [_detail("dict_type", ["body"], said, _shown(raw, body))]), None
        try:
            rank, session, weights = _parse(body)
            told = [session, weights]
            encoded = _compact({"rank": rank, "remote_instance_transfer_engine_info": told})
        except BadInput as error:
            return fault(400, str(error)), None
        except (ValueError, RecursionError):
            want = "text and finite numbers, not too deep"
            return fault(400, str(BadInput("weights_info_dict", "(...)", want))), None
        return self._keep(rank, session, encoded)

    def _keep(self, rank: int, session: str, encoded: bytes) -> tuple[Answer, int | None]:
        known = self._answers.get(rank)
        after = self.bytes + len(encoded) - (len(known.body) if known else 0)
        if after > self._most_bytes or (known is None and len(self) >= self._most_ranks):
            most = f"{self._most_ranks} ranks and {self._most_bytes} bytes"
            return fault(507, f"transfer_engine_info: at most {most} are kept"), None
        self.bytes = after
        self._answers[rank], self._sessions[rank] = Answer(200, encoded, JSON), session
        return OK, rank

    def lookup(self, query: bytes) -> Answer:
        """GET: as FastAPI reads the one parameter; of repeated ones the last counts."""
        try:
            given = dict(parse_qsl(query.decode("latin-1"), True, max_num_fields=64)).get("rank")
        except ValueError:
            return fault(400, "query: must be at most 64 parameters")
        if given is None:
            said = "Field required"
            return fault(422, [_detail("missing", ["query", "rank"], said, None)])
        try:
            rank = INTEGER.validate_python(given)
        except ValidationError as error:
            wrong = error.errors()[0]
            found = _detail(wrong["type"], ["query", "rank"], wrong["msg"], given[:MOST_ECHOED])
            return fault(422, [found])
        if rank < 0:
            return fault(400, "Invalid rank parameter")
        missing = f"No transfer engine info for rank {str(rank)[:MOST_ECHOED]}"
        return self._answers.get(rank) or fault(404, missing)


def _parse(body: Mapping[str, Any]) -> tuple[int, str, Mapping[str, Any]]:
    name = "rank" if "rank" in body else "tp_rank"  # newer releases send the first
    given = body.get(name, MISSING)
    want = "an integer from 0"
    if isinstance(given, str | float) or not 0 <= number(name, given, want) < 2**31:
        raise BadInput(name, given, want)
    info = body.get("transfer_engine_info", MISSING)
    if not isinstance(info, Mapping):
        raise BadInput("transfer_engine_info", info, "an object")
    session = info.get("session_id", MISSING)
    if not isinstance(session, str):
        raise BadInput("session_id", session, "a text")
    weights = info.get("weights_info_dict", MISSING)
    if not isinstance(weights, Mapping):
        raise BadInput("weights_info_dict", weights, "an object")
    return int(given), session, weights


def _not_json(raw: bytes, error: Exception) -> Answer:
    """No body at all and a broken one are told apart, as FastAPI does."""
    if not raw:
        return fault(422, [_detail("missing", ["body"], "Field required", None)])
    place = error.pos if isinstance(error, json.JSONDecodeError) else 0
    why = error.msg if isinstance(error, json.JSONDecodeError) else str(error)[:MOST_ECHOED]
    found = _detail("json_invalid", ["body", place], "JSON decode error", {})
    return fault(422, [{**found, "ctx": {"error": why}}])


def _detail(kind: str, where: list[Any], said: str, value: Any) -> dict[str, Any]:
    return {"type": kind, "loc": where, "msg": said, "input": value}


def _shown(raw: bytes, value: Any) -> Any:
    """A bad body is repeated, where it is short and can be written again."""
    if len(raw) > MOST_ECHOED:
        return "(long)"
    try:
        _compact(value)
    except ValueError:
        return "(cannot be shown)"
    return value


def _compact(value: Any) -> bytes:
    """As FastAPI writes JSON."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode()


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
