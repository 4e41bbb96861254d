"""Publishers: where does an engine publish its KV events, by its own account?

Pure. Part of facts.py: three ways of telling, the first that says something counts, and what a
person declared wins over all. Every member is checked. Open it when an engine tells it elsewhere.

    declared          events = "tcp://*:5557", or a list with one endpoint per dp rank
    /server_info      kv_events {endpoint_host, endpoint_port_base, ...}       SGLang, our engine
                      kv_events_config, the text that SGLang was started with
    /kv_event_sources {"<dp rank>": {endpoint, replay_endpoint, topic, ...}}   vLLM

    {"endpoint_host": "*", "endpoint_port_base": 5557}, two ranks, http://10.0.0.7
        -> events ("tcp://10.0.0.7:5557", "tcp://10.0.0.7:5558")
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgspec

from kvplane.vocabulary import WorkerUp

Facts = Mapping[str, Any]
WILDCARDS = ("", "*", "0.0.0.0", "::", "[::]")
_MOST_CHARS = 200  # of an endpoint or a topic


@dataclass(frozen=True, slots=True)
class Published:
    """Endpoints per dp rank; a single one is counted up from. Empty = no events."""

    events: tuple[str, ...] = ()
    replay: tuple[str, ...] = ()
    topic: str = ""


def published(declared: WorkerUp, info: Facts, sources: Facts, dp_size: int) -> Published:
    """Event and replay endpoints and the topic; declared ones win."""
    if declared.events:
        return Published(declared.events, declared.replay, declared.topic)
    host = urlsplit(declared.url).hostname or ""
    if told := _object(info.get("kv_events")):
        return _resolved(told, host, dp_size)
    if (text := info.get("kv_events_config")) is not None:
        return _configured(_config(text), host, dp_size)
    return _sources([_object(sources.get(str(rank))) for rank in range(dp_size)], host)


def _resolved(told: Facts, host: str, dp_size: int) -> Published:
    """SGLang's own summary: a host and the first rank's ports."""
    if told.get("publisher") == "null":
        return Published()
    at = _text(told, "endpoint_host") or "*"
    bases = (_port(told, name) for name in ("endpoint_port_base", "replay_endpoint_port_base"))
    events, replay = (
        counted(f"tcp://{at}:{base}", dp_size, host) if base else () for base in bases
    )
    return Published(events, replay, _text(told, "topic"))


def _configured(told: Facts, host: str, dp_size: int) -> Published:
    """What the engine was started with: endpoints as it binds them, counted up by rank."""
    if told.get("publisher") != "zmq":
        return Published()
    events = _text(told, "endpoint") or "tcp://*:5557"
    replay = _text(told, "replay_endpoint")
    return Published(
        counted(events, dp_size, host),
        counted(replay, dp_size, host) if replay else (),
        _text(told, "topic"),
    )


def _sources(ranks: Sequence[Facts], host: str) -> Published:
    """vLLM's list of ranks; ports are resolved already."""
    if not all(_on(rank) for rank in ranks):
        return Published()
    events = tuple(dial(_text(rank, "endpoint"), host) for rank in ranks)
    replay = tuple(dial(text, host) for rank in ranks if (text := _text(rank, "replay_endpoint")))
    topic = _text(ranks[0], "topic") if ranks else ""
    return Published(events, replay if len(replay) == len(events) else (), topic)


def _on(rank: Facts) -> bool:
    off = rank.get("publisher", "zmq") != "zmq"
    return bool(rank.get("enable_kv_cache_events")) and bool(_text(rank, "endpoint")) and not off


def counted(base: str, dp_size: int, host: str) -> tuple[str, ...]:
    """One endpoint per rank, ports counted up; what cannot be counted is left as the one base.

    tcp://*:5557, 2 ranks, 10.0.0.7 -> tcp://10.0.0.7:5557, tcp://10.0.0.7:5558
    """
    head, _, port = dial(base, host).rpartition(":")
    if not base.startswith("tcp://") or not port.isdecimal() or port == "0":
        return (dial(base, host),)
    return tuple(f"{head}:{int(port) + rank}" for rank in range(dp_size))


def dial(endpoint: str, host: str) -> str:
    """An endpoint others can reach: a wildcard becomes the worker's host, IPv6 gets brackets.

    tcp://*:5557, 10.0.0.7 -> tcp://10.0.0.7:5557
    """
    scheme, _, rest = endpoint.partition("://")
    if scheme != "tcp":
        return endpoint
    name, _, port = rest.rpartition(":")
    bare = host if name in WILDCARDS else name.strip("[]")
    return f"tcp://[{bare}]:{port}" if ":" in bare else f"tcp://{bare}:{port}"


def _config(text: object) -> Facts:
    """SGLang passes its option on as the JSON text it got, or as the object."""
    if not isinstance(text, str):
        return _object(text)
    try:
        return _object(msgspec.json.decode(text))
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return {}


def _object(value: object) -> Facts:
    return value if isinstance(value, Mapping) else {}


def _text(facts: Facts, name: str) -> str:
    value = facts.get(name)
    return value if isinstance(value, str) and len(value) <= _MOST_CHARS else ""


def _port(facts: Facts, name: str) -> int | None:
    value = facts.get(name)
    return value if type(value) is int and 0 < value < 65536 else None
