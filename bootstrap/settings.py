"""Bootstrap settings: how long we wait for a directory, what it remembers, what it accepts.

Pure. Filled by wiring.py from flags and environment. Open it to change a default or its reason.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class DirectorySettings:
    """The server's side."""

    doubt_s: float = 60.0  # addresses beside a re-registered one are withheld this long: an
    # instance that came back has registered all its ranks by then (SGLang tries for 40 s at most)
    room_ttl_s: float = 240.0  # as long as SGLang keeps a room at most (two sweeps of 120 s)
    most_rooms: int = 300_000  # then the oldest goes: 240 s of 1250 rooms per second, some 50 MB
    most_body_bytes: int = 1024 * 1024  # of one request, as SGLang's framework has it
    most_bodies_bytes: int = 64 * 1024 * 1024  # of all requests that are arriving
    body_s: float = 10.0  # for the whole body to arrive; ranks send half a kilobyte
    write_key: str = field(default="", repr=False)  # who writes must show it; never logged
    open_writes: bool = False  # without a key, other machines may write too: anybody can then
    # lead decodes to another place
    most_poll_s: float = 30.0  # a question for rooms waits this long at most; proxies cut at 60
    most_polls: int = 1024  # questions that wait at the same time; more are answered at once
    most_engine_info_bytes: int = 8 * 1024 * 1024  # of one rank; 1000 weights are some 100 KB
    most_engine_infos_bytes: int = 256 * 1024 * 1024  # of all ranks together


@dataclass(frozen=True, slots=True)
class ResolverSettings:
    """The asking side."""

    topology_s: float = 3.0  # one GET of the topology; a living directory needs milliseconds
    rank_s: float = 3.0  # one GET of a rank or one question about rooms
    fresh_s: float = 0.5  # answers are reused this long; an engine needs longer to come back
    first_wait_s: float = 0.25  # an address that failed is not asked again before this
    most_wait_s: float = 5.0  # the wait doubles up to this where an address swallows calls
    most_wait_told_s: float = 1.0  # and up to this where it says no at once: asking is cheap, and
    # a prefill that has just come back is not refused from memory for long
    most_addresses: int = 4096  # remembered; the least recently used is forgotten
    rooms_gap_s: float = 0.02  # two questions about rooms to one address are this far apart
    rooms_first_s: float = 0.05  # a room that is not known is asked for again after this
    rooms_most_s: float = 1.0  # the wait doubles up to this; a long prefill queue takes seconds
    most_poll_s: float = 30.0  # a question waits this long in the directory, then is asked again
    most_polls: int = 16  # that wait in one directory; rooms beyond are asked for now and then
    poll_again_s: float = 30.0  # a directory that did not keep a question is not asked to before
    beat_s: float = 2.0  # between two heartbeats of one address; SGLang beats every 5 s
    beat_wait_s: float = 1.5  # for the answer to one; SGLang gives 5 s
    most_misses: int = 2  # in a row, then the life behind the address is taken for gone
    idle_s: float = 60.0  # an address nobody has wanted to know for this long is not beaten
    most_beats: int = 256  # out at once; those that find no place wait for the next round
    most_ranks_beaten: int = 64  # asked again per beat where the server tells no generation


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """One call to a directory, and a rank that registers."""

    call_s: float = 5.0  # where the caller gives no deadline, as SGLang waits
    most_answer_bytes: int = 1024 * 1024  # of one answer
    first_wait_s: float = 0.2  # before a second try to register: the directory may be starting
    most_wait_s: float = 5.0  # the wait doubles up to this
    tls: bool = False  # https; whom to trust is the session's affair
    register_s: float = 120.0  # all tries together; a node may come up much later than its ranks


@dataclass(frozen=True, slots=True)
class RendezvousSettings:
    """The nodes of one instance that meet at node 0."""

    beat_s: float = 1.0  # between two signs of life on a link
    silent_s: float = 5.0  # a link without any sign for this long is over
    hello_s: float = 5.0  # from a connection to its welcome
    first_wait_s: float = 0.1  # before node 0 is dialled again
    most_wait_s: float = 2.0  # the wait doubles up to this
    ask_s: float = 60.0  # for an answer, where the caller gives no deadline
    most_asks: int = 1024  # unanswered per node
    most_bytes: int = 16 * 1024 * 1024  # of one question or answer
    most_strangers: int = 64  # connections that have not joined yet
    open_joins: bool = False  # without a secret, nodes of other machines may join too
