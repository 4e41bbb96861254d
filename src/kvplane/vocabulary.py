"""Vocabulary: the nouns everybody shares.

Pure: types only; no logic beyond a noun's own invariants and text form, no IO. The ground floor:
it imports nothing of ours and every package may import it. What is made or looked up a thousand
times a second is a msgspec struct, at a tenth of a dataclass's price. Open it to add a word, not a
decision.

    engines TELL changes -> the index REMEMBERS blocks -> a request ASKS for depth -> a room MEETS
"""

from __future__ import annotations

import json
from collections import abc
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType

import msgspec

BlockHash = NewType("BlockHash", int)  # unsigned 64 bit; chained, so it names a whole prefix
Pod = NewType("Pod", str)  # what the scheduler starts and stops, by name; holds no blanks
Epoch = NewType("Epoch", int)  # one life of a worker, numbered by the store; larger is newer
Generation = NewType("Generation", str)  # start of a process as it tells it; equality only
Sequence = NewType("Sequence", int)  # number of an event batch within one life, from 0
Room = NewType("Room", int)  # one meeting of one prefill and one decode; 1 .. 2**63-1
Cursor = NewType("Cursor", str)  # a position in the change stream; opaque to clients

HASH_SCHEME = "kvplane-xxh3-1"  # part of every namespace: a new scheme never meets the old one
MAX_ROOM = 2**63 - 1


class Role(StrEnum):
    """What a pod does with a request."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class Tier(StrEnum):
    """Where a block lies, best first; holding is per worker *and* tier."""

    GPU = "gpu"
    CPU = "cpu"
    DISK = "disk"
    REMOTE = "remote"


class Knowledge(StrEnum):
    """How far the index may be believed about one worker; worst last."""

    EXACT = "exact"  # stream live, no open gap
    PARTIAL = "partial"  # gap open, replaying, or rebuilt from an incomplete replay
    DARK = "dark"  # never heard, silent too long, or a failed precondition
    OFF = "off"  # events not configured


class Stage(StrEnum):
    """The steps of one attempt, in order. Recorded by whoever did them, never inferred.

    The gateway's own leave no gap; the engines', register to consume, lie within first-byte.
    """

    POOL = "worker-pool"  # is there anybody of this role and model?
    AVAILABILITY = "availability"  # and well, with a circuit that is closed?
    POLICY_INPUT = "policy-input"  # tokens of the prompt; who holds them
    PAIR = "pair"  # policies, shapes, rooms
    REGISTER = "register"
    RESOLVE_TOPOLOGY = "resolve-topology"
    RESOLVE_RANK = "resolve-rank"
    CONNECT = "connect"
    VERIFY = "verify"
    CONSUME = "consume"
    FIRST_BYTE = "first-byte"  # both requests left, until the answer begins to leave
    END = "end"  # until its last byte left


MEETING = (  # what two engines do in a room: only they can tell of it
    Stage.REGISTER, Stage.RESOLVE_TOPOLOGY, Stage.RESOLVE_RANK,
    Stage.CONNECT, Stage.VERIFY, Stage.CONSUME,
)  # fmt: skip


class ClearReason(StrEnum):
    """Why everything we knew of a worker became void."""

    GAP = "gap"  # batches lost and not replayed
    RESTART = "restart"  # a new life
    ENGINE = "engine"  # the engine dropped its cache itself
    GONE = "gone"  # the worker left the fleet


class GroupKind(StrEnum):
    """Which blocks before position n a further cache group needs before n tokens are usable."""

    FULL = "full"  # all of them
    WINDOW = "window"  # those of the last `tokens` - 1 tokens
    CHUNK = "chunk"  # those since the last multiple of `tokens`
    STATE = "state"  # the one that ends at n


class Worker(msgspec.Struct, frozen=True, order=True, cache_hash=True):
    """One prefix cache a request can be sent to: a data-parallel rank of a pod.

    Text form: `pod` for rank 0, `pod@rank` otherwise, always with the rank where the name itself
    holds an '@'. Raises ValueError for an empty pod, one with blanks, or a negative rank.
    """

    pod: Pod
    dp_rank: int = 0

    def __post_init__(self) -> None:
        if not self.pod or any(c.isspace() for c in self.pod):
            raise ValueError(f"pod {self.pod!r}: must be a name without blanks")
        if self.dp_rank < 0:
            raise ValueError(f"dp_rank {self.dp_rank}: must be 0 or more")

    def __str__(self) -> str:
        plain = self.dp_rank == 0 and "@" not in self.pod
        return self.pod if plain else f"{self.pod}@{self.dp_rank}"

    @staticmethod
    def parse(text: str) -> Worker:
        """The reverse of str(); raises ValueError where the text is no worker.

        p@3 -> p, rank 3      a@b -> the pod a@b, rank 0      a@b@3 -> a@b, rank 3
        """
        pod, at, rank = text.rpartition("@")
        if at and rank.isascii() and rank.isdecimal():
            return Worker(Pod(pod), int(rank))
        return Worker(Pod(text))


@dataclass(frozen=True, slots=True)
class Namespace:
    """What must be equal before two blocks are the same; folded into the seed of the chain."""

    model: str
    block_size: int  # tokens
    adapter: str = ""
    salt: str = ""
    extra: tuple[str, ...] = ()  # multimodal items and other keys, canonical text, in order

    def text(self) -> str:
        """Canonical JSON text that is hashed; documented in index/hashing.py."""
        fields = [HASH_SCHEME, self.model, self.adapter, self.salt, list(self.extra)]
        return json.dumps([*fields, self.block_size], separators=(",", ":"), ensure_ascii=True)


@dataclass(frozen=True, slots=True)
class PrefixChain:
    """BlockHashes of a prompt, first block first; the last, partial block is not in it."""

    namespace: Namespace
    blocks: tuple[BlockHash, ...]
    tokens: int = 0  # length of the whole prompt, partial block included


class Group(msgspec.Struct, frozen=True, gc=False):
    """A KV cache group of a hybrid model beside the counted one: it caps how much is usable."""

    number: int  # as the engine counts its groups
    kind: GroupKind
    tokens: int = 0  # window or chunk; 0 where the kind has none
    block_size: int = 0  # tokens, a multiple of the counted blocks'; 0 = theirs


class Stored(msgspec.Struct, frozen=True, gc=False):
    """A worker holds these chained blocks in this tier now.

    With a `group` it is that group which holds them, named as the counted group names the same
    prefix; no blocks at all say that the group exists."""

    worker: Worker
    epoch: Epoch
    tier: Tier
    parent: BlockHash | None  # the block before the first; None at the root of a prompt
    blocks: abc.Sequence[BlockHash]
    block_size: int  # tokens
    group: Group | None = None  # None = the group that is counted


class Removed(msgspec.Struct, frozen=True, gc=False):
    """A worker no longer holds any copy of these blocks in this tier."""

    worker: Worker
    epoch: Epoch
    tier: Tier
    blocks: abc.Sequence[BlockHash]
    group: int | None = None  # number; None = the group that is counted


class Cleared(msgspec.Struct, frozen=True, gc=False):
    """All a worker held (in one tier, or in every) is void; `epoch` is the life from now on."""

    worker: Worker
    epoch: Epoch
    reason: ClearReason
    tier: Tier | None = None


class Known(msgspec.Struct, frozen=True, gc=False):
    """How far the index may be believed about a worker from now on, and why in words."""

    worker: Worker
    epoch: Epoch
    state: Knowledge
    reason: str
    since: float  # wall clock, seconds
    by: str = ""  # the ingest that says so; worth nothing when that ingest is dead


Change = Stored | Removed | Cleared | Known  # the only language between events and index


@dataclass(frozen=True, slots=True)
class Shape:
    """Rank grid and page form of one instance; two instances pair when their shapes agree."""

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    page_size: int | None = None  # tokens
    kv_dtype: str | None = None
    kv_layout: str | None = None


class BootstrapTriple(msgspec.Struct, frozen=True):
    """All a decode needs to find its prefill."""

    host: str  # bare literal or name, no brackets
    port: int
    room: Room

    @property
    def address(self) -> str:
        """host:port with an IPv6 literal in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Binding(msgspec.Struct, frozen=True):
    """A room with the pair chosen for it and the epochs it was chosen under; one attempt."""

    room: Room
    prefill: Worker
    decode: Worker
    triple: BootstrapTriple
    prefill_epoch: Epoch | None = None
    decode_epoch: Epoch | None = None


@dataclass(frozen=True, slots=True)
class StageRecord:
    """What one party saw of one stage of one room. `outcome` is "ok" or "failed"."""

    room: Room
    stage: Stage
    outcome: str
    duration_s: float
    detail: str = ""  # a sentence; names the culprit when outcome is failed
    by: str = ""  # who recorded it: gateway, or the engine's name
    at: float = 0.0  # wall clock of the end, seconds


@dataclass(frozen=True, slots=True)
class WorkerUp:
    """Discovery says: this pod serves. One per pod; its dp ranks are separate Workers."""

    pod: Pod
    url: str  # http://host:port, no trailing slash
    role: Role
    engine: str = "kvplane"  # kvplane | sglang | vllm
    model: str = ""  # "" = ask the engine
    bootstrap_host: str | None = None  # None = host of url
    bootstrap_port: int | None = None
    events: tuple[str, ...] = ()  # ZMQ endpoint per dp rank; empty = no events
    replay: tuple[str, ...] = ()  # same order; empty = no replay
    block_size: int | None = None  # tokens; None = learn from the engine or its events
    dp_size: int = 1
    max_tokens: int | None = None  # longest prompt + answer
    tokenizer: str = ""  # folder; "" = the gateway's own
    generation: Generation | None = None
    event_form: str = ""  # dialect of its events; "" = that of `engine`
    adapters: tuple[str, ...] = ()  # further model names it answers to
    topic: str = ""  # prefix of its event messages; "" = as the settings say
    draining: bool = False  # named so: it takes no requests until somebody takes it in
    asleep: bool = False  # it dropped its cache to sleep; its events say so only when it wakes
    shape: Shape = Shape()
    handoff: str = ""  # how a transfer begins, a row of router's HANDOFFS; "" = as `engine` does
    api_key: str = field(default="", repr=False)  # its own; "" = the gateway's, or the client's
    own_bootstrap_port: int | None = None  # as the engine itself tells it, whatever was declared


@dataclass(frozen=True, slots=True)
class WorkerDown:
    """Discovery says: this pod is gone."""

    pod: Pod
