"""Places: where and how is each rank of a pod heard?

Pure. Used by subscriptions.py; endpoints.py does the port arithmetic, dialects/ knows the engines.
Open it when following a worker needs one more fact of discovery.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvplane.vocabulary import WorkerUp

from .dialects import dialect_of
from .dialects.base import Dialect
from .endpoints import ranks

MATTERS = (  # facts of a pod that change how it is heard, or say that it is another process
    *("url", "engine", "event_form", "model", "events", "replay", "topic", "dp_size"),
    "generation",
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where one worker publishes, and how."""

    events: str  # endpoint
    replay: str | None
    model: str
    dialect: Dialect
    topic: str = ""  # prefix of its messages; "" = as the settings say
    ranks: int = 1  # streams of its pod
    url: str = ""  # of its HTTP door, which topics name


def places_of(up: WorkerUp) -> tuple[Place, ...]:
    """One of each rank, in order; raises ValueError for what cannot be followed."""
    dialect, found = dialect_of(up.event_form or up.engine), ranks(up)
    return tuple(
        Place(events, replay, up.model, dialect, up.topic, len(found), up.url)
        for events, replay in found
    )


def alike(old: WorkerUp, new: WorkerUp) -> bool:
    """Nothing changed that matters for events."""
    return all(getattr(old, name) == getattr(new, name) for name in MATTERS)


def another_life(old: WorkerUp, new: WorkerUp) -> bool:
    """Another process than before. A generation that is told for the first time is news of the life
    that we follow, and one that is not told any more is no news."""
    return None not in (old.generation, new.generation) and old.generation != new.generation
