"""Resolve: from a bootstrap triple to the prefill rank that has our pages.

Edge, decode side. Used by pull.py; asks bootstrap's resolver and records resolve-topology and
resolve-rank. Open it to change which rank is asked, or what is said when there is none.

    dp rank: as the request says; else 0 of 1; else room mod size where the prefill follows rooms;
             else asked by room
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from kvplane.bootstrap import BootstrapError, Targets, Topology, Unreachable, compatible, targets
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


class Resolved(Protocol):
    """A topology and the life of the directory that told it."""

    @property
    def topology(self) -> Topology: ...
    @property
    def generation(self) -> Generation | None: ...


class Resolver(Protocol):
    """What pull.py needs of bootstrap; kvplane.bootstrap.Resolver offers it."""

    async def topology(self, address: str) -> Resolved: ...
    async def endpoint(
        self,
        address: str,
        dp: int,
        cp: int,
        tp: int,
        pp: int,
        expected: Generation | None = None,
    ) -> Endpoint: ...
    async def dp_ranks(self, address: str, rooms: Sequence[Room]) -> Mapping[Room, int]: ...
    def forget(self, address: str) -> None: ...


async def resolve(
    steps: Steps, resolver: Resolver, triple: BootstrapTriple, shape: Shape, dp_rank: int | None
) -> list[Endpoint]:
    """The endpoints of all ranks that send, one today; two stages, each recorded."""
    address = triple.address
    async with steps.stage(Stage.RESOLVE_TOPOLOGY, address, "its topology"):
        try:
            known = await resolver.topology(address)
        except Exception as error:
            raise _unresolved(address, error, Stage.RESOLVE_TOPOLOGY) from error
        topology = known.topology
        reach = _reach(address, topology, shape)
    async with steps.stage(Stage.RESOLVE_RANK, address, "its rank") as step:
        try:
            dp = await _dp_rank(resolver, topology, triple, dp_rank)
            step.waiting_for = f"dp rank {dp}"
            life = known.generation  # a restart between the two questions is said by name
            return [await resolver.endpoint(address, dp, *rank, expected=life) for rank in reach]
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


def _reach(address: str, prefill: Topology, decode: Shape) -> list[tuple[int, int, int]]:
    """(cp, tp, pp) of every prefill rank that sends. Raises LayoutMismatch with every field."""
    fields = compatible(prefill.shape, decode)
    found: Targets | None = None
    if not fields:
        try:
            found = targets(prefill, decode, engine_rank=0)
        except Unreachable as error:
            fields = (str(error),)
    if found is not None:
        ranks = [
            (cp, tp, pp) for cp in found.cp_ranks for tp in found.tp_ranks for pp in found.pp_ranks
        ]
        if len(ranks) == 1 and found.dst_info_num == 1:
            return ranks
        fields = tuple(
            f"{name}: prefill {getattr(prefill.shape, name)}, decode {getattr(decode, name)}, "
            "a room has one shard here"
            for name in ("tp", "cp", "pp")
            if max(getattr(prefill.shape, name), getattr(decode, name)) > 1
        )
    raise LayoutMismatch(f"prefill {address}", fields, Stage.RESOLVE_TOPOLOGY)


def _unresolved(address: str, error: Exception, stage: Stage) -> TransferError:
    """Ours as it is; any other becomes one sentence."""
    if isinstance(error, TransferError):
        return error
    if isinstance(error, BootstrapError):
        return Unresolved(address, str(error), error.stage)  # register, where ranks are missing
    if isinstance(error, TimeoutError):
        return Unresolved(address, "no answer in time", stage)
    return Unresolved(address, str(error) or type(error).__name__, stage)
