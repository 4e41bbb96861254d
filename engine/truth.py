"""Truth: what really lies in this engine, for tests to compare with.

Door: GET /truth of admin.py, reads only. Open it to show tests another fact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvplane.vocabulary import Room

from .cache import Block, Cache
from .settings import EngineSettings
from .unit import Unit


def truth(
    settings: EngineSettings, units: Sequence[Unit], rooms: Sequence[Room], remembered: int
) -> dict[str, Any]:
    """Resident blocks of each dp rank, the account of pages, its ranks, and the rooms at work.

    A block: hash and parent as events publish them, number within its prefix, page, token ids.
    """
    return {
        "name": settings.known_as,
        "role": settings.role.value,
        "event_form": settings.event_form,
        "block_size": settings.block_size,
        "ranks": [_rank(unit) for unit in units],
        "rooms": {"open": list(rooms), "remembered": remembered},
    }


def _rank(unit: Unit) -> dict[str, Any]:
    cache, pages = unit.cache, unit.cache.pages()
    ranks = unit.team.ranks if unit.team is not None else ()
    return {
        "dp_rank": unit.dp_rank,
        "pages": {
            "free": pages.free,
            "used": pages.used,
            "quarantined": pages.quarantined,
            "all": cache.total,
        },
        "sequences": cache.at_work,
        "next_batch": unit.publisher.sequence,
        "transfer": unit.team.counts() if unit.team is not None else {},
        "shards": [rank.shown() for rank in ranks],
        "blocks": [_block(cache, block) for block in cache.blocks()],
    }


def _block(cache: Cache, block: Block) -> dict[str, Any]:
    return {
        "hash": cache.name(block),
        "parent": None if block.parent is None else cache.name_of(block.parent),
        "position": block.position,
        "page": block.page,
        "refs": block.refs,
        "tokens": list(block.tokens),
        "salt": block.salt,
    }
