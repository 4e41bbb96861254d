"""Resolve: from a bootstrap triple to the prefill rank that has our pages.

Edge, decode side. Used by pull.py; asks bootstrap's resolver and records resolve-topology and
resolve-rank. Open it to change which rank is asked, or what is said when there is none.

    dp rank: as the request says; else 0 of 1; else room mod size where the prefill follows rooms;
             else asked by room
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from kvplane.vocabulary import BootstrapTriple, Generation, Room, Shape, Stage

from .errors import LayoutMismatch, TransferError, Unresolved
from .waiting import Steps


class Endpoint(Protocol):
    """Where one rank listens; kvplane.bootstrap.Endpoint is one."""

    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def generation(self) -> Generation | None: ...


class Topology(Protocol):
    """What a prefill instance says of itself."""

    @property
    def shape(self) -> Shape: ...
    @property
    def follow_bootstrap_room(self) -> bool: ...


class Resolved(Protocol):
    """A topology and the life of the directory that told it."""

    @property
    def topology(self) -> Topology: ...
    @property
    def generation(self) -> Generation | None: ...


class Resolver(Protocol):
    """What pull.py needs of bootstrap; kvplane.bootstrap.Resolver offers it."""

    async def topology(self, address: str) -> Resolved: ...
    async def endpoint(self, address: str, dp: int, cp: int, tp: int, pp: int) -> Endpoint: ...
    async def dp_ranks(self, address: str, rooms: Sequence[Room]) -> Mapping[Room, int]: ...


async def resolve(
    steps: Steps, resolver: Resolver, triple: BootstrapTriple, shape: Shape, dp_rank: int | None
) -> Endpoint:
    """The endpoint of the one rank that sends; two stages, each recorded."""
    address = triple.address
    async with steps.stage(Stage.RESOLVE_TOPOLOGY, address, "its topology"):
        try:
            topology = (await resolver.topology(address)).topology
        except Exception as error:
            raise _unresolved(address, error, Stage.RESOLVE_TOPOLOGY) from error
        _check(address, topology.shape, shape)
    async with steps.stage(Stage.RESOLVE_RANK, address, "its rank") as step:
        try:
            dp = await _dp_rank(resolver, topology, triple, dp_rank)
            step.waiting_for = f"dp rank {dp}"
            return await resolver.endpoint(address, dp, 0, 0, 0)
        except Exception as error:
            raise _unresolved(address, error, Stage.RESOLVE_RANK) from error


async def _dp_rank(
    resolver: Resolver, topology: Topology, triple: BootstrapTriple, given: int | None
) -> int:
    size = topology.shape.dp
    if given is not None:
        if not 0 <= given < size:
            reason = f"dp rank {given}: the prefill has 0 to {size - 1}"
            raise Unresolved(triple.address, reason, Stage.RESOLVE_RANK)
        return given
    if size == 1:
        return 0
    if topology.follow_bootstrap_room:
        return triple.room % size
    known = await resolver.dp_ranks(triple.address, [triple.room])
    if triple.room not in known:
        reason = f"dp rank of room {triple.room} is not known"
        raise Unresolved(triple.address, reason, Stage.RESOLVE_RANK)
    return known[triple.room]


def _check(address: str, prefill: Shape, decode: Shape) -> None:
    """One shard for now: every size but dp is 1 on both sides, and page forms are equal."""
    fields = []
    for name in ("tp", "cp", "pp"):
        here, there = getattr(decode, name), getattr(prefill, name)
        if here != 1 or there != 1:
            fields.append(f"{name} {here} here, {there} there, 1 is what this backend moves")
    for name in ("page_size", "kv_dtype", "kv_layout"):
        here, there = getattr(decode, name), getattr(prefill, name)
        if None not in (here, there) and here != there:
            fields.append(f"{name} {here} here, {there} there")
    if fields:
        raise LayoutMismatch(f"prefill {address}", tuple(fields), Stage.RESOLVE_TOPOLOGY)


def _unresolved(address: str, error: Exception, stage: Stage) -> TransferError:
    """Ours as it is; any other becomes one sentence."""
    if isinstance(error, TransferError):
        return error
    if isinstance(error, TimeoutError):
        return Unresolved(address, "no answer in time", stage)
    return Unresolved(address, str(error) or type(error).__name__, stage)
