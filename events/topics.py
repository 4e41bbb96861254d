"""Topics: whose stream is this, as its own topic says?

Pure. Engines name themselves in the topic, if anybody told them to: kv@<pod or ip:port>@<model>.
Who a worker is comes from discovery, never from a topic; a topic is checked against it, so that a
stream of somebody else is told, not silently scored under the wrong name. Used where batches are
taken. Open it to accept another form of topic.

    kv@10.0.0.7:8000@qwen   against http://10.0.0.7:8000   matches
    kv@10.0.0.7:8001@qwen                                  other: two engines on one address
    kv@10.0.0.7@qwen                                       no port: cannot tell which of them it is
    kv-events                                              unnamed: nothing to check

Our topic setting is ZMQ's filter: a *prefix*, compared byte by byte. "kv@" takes all topics that
begin so, "kv-events" takes kv-events-2 too, "" takes everything. What does not begin with it never
reaches us and cannot be counted; what does is indexed, under whatever topic.
"""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_address
from typing import TypeAlias
from urllib.parse import urlsplit

from kvplane.vocabulary import Worker

MOST_CHARS = 200  # of a topic that is kept and shown


@dataclass(frozen=True, slots=True)
class Named:
    """Who publishes, in the words of a topic."""

    host: str  # address or name, without brackets
    port: int | None  # of its HTTP door; None where the topic has none
    model: str

    def __str__(self) -> str:
        bare = f"[{self.host}]" if ":" in self.host else self.host
        return bare if self.port is None else f"{bare}:{self.port}"


@dataclass(frozen=True, slots=True)
class Match:
    """The topic names the worker, or there is nothing in it that could differ."""


@dataclass(frozen=True, slots=True)
class NoPort:
    """The topic's host is right, and cannot tell engines of one address apart."""

    reason: str


@dataclass(frozen=True, slots=True)
class Unsure:
    """An address is told where we know a name, or the other way round."""

    reason: str


@dataclass(frozen=True, slots=True)
class Other:
    """The topic names another worker."""

    reason: str


@dataclass(frozen=True, slots=True)
class Unnamed:
    """A topic without a name in it: nothing to check."""


Judgement: TypeAlias = Match | NoPort | Unsure | Other | Unnamed


def shown(topic: bytes) -> str:
    """A topic as text for people: bad bytes replaced, bounded."""
    return topic[: 4 * MOST_CHARS].decode("utf-8", "replace")[:MOST_CHARS]


def identity(topic: str) -> Named | None:
    """Who a topic names; None where it has not the form kv@<who>@<model>.

    kv@10.0.0.7:8000@qwen -> 10.0.0.7, 8000, qwen     kv@[fd00::7]:8000@qwen     kv@pod-1@org/qwen
    """
    kind, _, rest = topic.partition("@")
    who, at, model = rest.partition("@")
    if kind != "kv" or not at or not who or who != who.strip():
        return None
    host, port = _split(who)
    return Named(host, port, model) if host else None


def _split(who: str) -> tuple[str, int | None]:
    if who.startswith("["):
        host, _, rest = who[1:].partition("]")
        return host, _port(rest[1:]) if rest[:1] == ":" else None
    host, colon, rest = who.rpartition(":")
    if not colon or ":" in host:  # none, or an IPv6 address without brackets
        return who, None
    return host, _port(rest)


def _port(text: str) -> int | None:
    plain = text.isascii() and text.isdecimal() and len(text) <= 5
    return int(text) if plain and 0 < int(text) < 65536 else None


def judge_topic(topic: str, worker: Worker, url: str, dp: int) -> Judgement:
    """Does a topic belong to this worker, whose door is at `url`? `dp`: ranks of its pod.

    A pod is named by its door's host, by host:port, or by the name discovery gave it. Ranks of one
    pod may share its topic, or have doors of their own that are counted up. Only what can be
    compared is called another: an address says nothing about a name.
    """
    named = identity(topic)
    if named is None:
        return Unnamed()
    door = urlsplit(url)
    host, port = (door.hostname or "").lower(), door.port
    whom = f"{worker} at {host}:{port}"
    told, pod = named.host.lower(), _split(worker.pod.lower())
    if (told, named.port) == pod and worker.pod != host:
        return Match()
    if told not in (host, pod[0]):
        mine = (host, pod[0])
        if any(_is_address(told) == _is_address(one) for one in mine):
            return Other(f"topic {topic!r} names {named}; this is {whom}")
        return Unsure(f"topic {topic!r} names {named}: it cannot be compared with {whom}")
    if named.port is None:
        if told == pod[0] and pod[1] is None and not _is_address(told):
            return Match()
        return NoPort(f"topic {topic!r} has no port: it cannot be matched to {whom} for sure")
    mine_too = port is not None and dp > 1 and named.port == port + worker.dp_rank
    if named.port == port or mine_too:
        return Match()
    return Other(f"topic {topic!r} names {named}; this is {whom}")


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
