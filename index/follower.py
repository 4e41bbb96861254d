"""Follower: a fresh view of the store, kept fresh.

Edge: snapshot, then the stream's tail, into the view that router and api ask. Open it to change
what happens when the store is away or the stream has moved on.

    snapshot -> a draft, in slices -> tail up to the snapshot's end -> adopted in one step
    StoreDown     the view stays and ages; go on from the same cursor when the store is back
    CursorGone    a stream moved on without us: snapshot of its shards again, while the others go
                  on; until the draft is exact the view answers for them as it was
    our own fault a view that broke over a change is emptied: a snapshot of all of it again, and
                  nothing is answered until then
    living        asked every second: the word of a dead ingest is worth nothing
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvplane.runtime import Clock, backoff, cancel, supervise
from kvplane.vocabulary import Cursor, Known

from .errors import CursorGone, IndexFault, StoreDown
from .forest import Forest
from .loading import SLICE_ROWS, Sheet, parts, used_up
from .view import View

if TYPE_CHECKING:
    from .metrics import IndexMetrics
    from .stores.base import Entry, Snapshot, Store

log = logging.getLogger(__name__)

IDLE_S = 0.1  # a read that takes longer than this waits for news: we are at the end
LIVING_S = 1.0  # how often we ask which ingests live
PATIENCE_S = 1.0  # a store that lets that question wait for longer is away
SWEEP_S = 1.0  # how often void bits are looked for beside what apply wipes itself
BREATH = 64  # entries applied before other tasks get their turn
BREATH_BLOCKS = 8_192  # or so many blocks
NOWHERE = Cursor("")


@dataclass(frozen=True, slots=True)
class _Draft:
    """Some shards drawn anew, not yet exact."""

    view: View
    shards: frozenset[int]
    goal: Cursor  # exact from here on


class Follower:
    """Keeps one view; a Part. `ready` is set once the view equals the store, and stays set as long
    as it is one that can be asked: an emptied one is no answer, nor a snapshot to go on from."""

    def __init__(
        self, store: Store, view: View, clock: Clock, metrics: IndexMetrics | None = None
    ) -> None:
        self.ready = asyncio.Event()
        self.cursor = NOWHERE  # what the view is true at
        self.emptied = 0  # how often the view broke: who reads it meanwhile has seen half of it
        self._store, self._view, self._clock, self._metrics = store, view, clock, metrics
        self._at = NOWHERE  # where to tail from: ahead of `cursor` while there is a draft
        self._lost: frozenset[int] | None = None  # shards to draw anew; None = all
        self._draft: _Draft | None = None
        self._waits = backoff(0.05, most_s=2.0)
        self._lost_since: float | None = None  # monotonic, and so are the following
        self._down_since: float | None = None
        self._deaf_since: float | None = None  # nobody tells us who lives
        self._asking: float | None = None  # when the question that waits for an answer was asked
        self._in_touch = float("-inf")  # when the last one that was answered was asked
        self._asked = 0.0  # when the read we wait for began
        self._late_ms = 0.0  # age of the last entry when it was applied
        self._away_since: dict[int, float] = {}  # by shard
        self._strangers: set[str] = set()  # ingests we asked for since the last turn
        self._tasks: list[asyncio.Task[None]] = []
        if metrics:
            metrics.watch(view, self.lag_ms, self.down_s)

    async def start(self) -> None:
        """Begin to follow; wait for `ready` to have a view."""
        works = (("follow", self._follow), ("living", self._watch), ("sweep", self._sweep))
        for name, work in works:
            task = asyncio.create_task(supervise(f"index {name}", work, self._clock))
            self._tasks.append(task)

    async def stop(self) -> None:
        """The view stays as it is."""
        await cancel(*self._tasks)
        self._tasks.clear()

    def lag_ms(self) -> float:
        """How old the view's knowledge of the store is."""
        now, down, lost = self._clock.now(), self._down_since, self._lost_since
        if down is None and lost is None:
            return 0.0 if now - self._asked > IDLE_S else self._late_ms
        return self._late_ms + (now - min(at for at in (down, lost) if at is not None)) * 1000

    def down_s(self) -> float:
        """How long the store has been away; 0 while it answers."""
        if self._asking is None and self._down_since is None and self._deaf_since is None:
            return 0.0
        now = self._clock.now()
        since = [at for at in (self._down_since, self._deaf_since) if at is not None]
        if self._asking is not None and now - self._asking > PATIENCE_S:
            since.append(self._asking)
        return now - min(since) if since else 0.0

    def in_touch_at(self) -> float:
        """The store could be heard after this: when the last question it answered was asked; while
        something is drawn anew not after that was lost."""
        lost = self._lost_since
        return self._in_touch if lost is None else min(self._in_touch, lost)

    async def _follow(self) -> None:
        while True:
            try:
                await self._read()
            except CursorGone as error:
                self._lose(error)
            except IndexFault as error:
                self._away(error)
            await self._clock.sleep(next(self._waits))

    async def _read(self) -> None:
        """Follow until something goes wrong."""
        await self._ask()
        if self._lost is None or self._lost:
            await self._draw()
        self._back()
        self._settle()
        self._asked, work = self._clock.now(), 0
        async with aclosing(self._store.tail(self._at)) as entries:
            async for entry in entries:
                work += self._take(entry)
                if self._strange(entry):
                    await self._ask()
                if work >= BREATH_BLOCKS:
                    work = 0
                    await asyncio.sleep(0)
        raise StoreDown("stream", "the tail ended")

    def _take(self, entry: Entry) -> int:
        """Apply one entry; returns how much work that was, in blocks."""
        draft = self._draft
        drafted = draft and self._store.shard_of(entry.worker) in draft.shards
        view = draft.view if draft and drafted else self._view
        try:
            view.take(entry)
        except Exception:  # half of it may be told now, and the same would happen again and again
            self._count("broken")
            self.ready.clear()
            self.emptied += 1
            self._draft, self._lost = None, None
            self._view.drop(Forest())
            self._lost_since = self._lost_since or self._clock.now()
            raise
        self._at, self._asked = entry.cursor, self._clock.now()
        self._late_ms = max(0.0, (self._clock.wall() - entry.at) * 1000)
        if self._metrics:
            self._metrics.entries.inc()
        if draft is None:
            self.cursor = entry.cursor
            self._waits = backoff(0.05, most_s=2.0)  # beyond what cannot be read, if there was any
        elif self.ready.is_set() and not drafted:
            self.cursor = self._store.splice(entry.cursor, self.cursor, draft.shards)
        self._settle()
        blocks = sum(len(getattr(change, "blocks", ())) for change in entry.changes)
        return blocks + BREATH_BLOCKS // BREATH

    # -- drawing anew ------------------------------------------------------------------------

    async def _draw(self) -> None:
        """A draft of what was lost, from a snapshot; the tail makes it exact."""
        every = self._lost is None
        shards = frozenset(range(await self._store.shards())) if self._lost is None else self._lost
        snapshot = await self._store.snapshot(None if every else shards)
        at, goal = snapshot.cursor, snapshot.until
        if not every:
            at = self._store.splice(self._at, at, shards)
            goal = self._store.splice(self._at, goal, shards)
        fresh = self._view.draft()
        try:
            await self._fill(fresh, snapshot)
        except BaseException:
            fresh.drop()
            raise
        self._draft, self._at, self._lost = _Draft(fresh, shards, goal), at, frozenset()

    async def _fill(self, fresh: View, snapshot: Snapshot) -> None:
        """Load a snapshot, which is used up; nothing else waits for long meanwhile."""
        for state in snapshot.workers:
            sheet = Sheet()
            for keys, values in parts(state.table):
                sheet.add(keys, values)
                await asyncio.sleep(0)
            few = sheet.rows <= SLICE_ROWS
            chains = sheet.plan() if few else await asyncio.to_thread(sheet.plan)
            for _ in fresh.build(state, sheet, chains):
                await asyncio.sleep(0)
            for _ in used_up(state.table):
                await asyncio.sleep(0)
            if sheet.unread:
                self._count("row", sheet.unread)
                log.warning("rows not read worker=%s count=%d", state.worker, sheet.unread)

    def _settle(self) -> None:
        """Adopt the draft if it is exact."""
        draft = self._draft
        if draft is None or not self._store.reached(self._at, draft.goal):
            return
        view, shard_of = self._view, self._store.shard_of
        view.adopt(draft.view, [one for one in view.workers() if shard_of(one) in draft.shards])
        self._draft, self._lost_since, self.cursor = None, None, self._at
        self.ready.set()
        if self._metrics:
            self._metrics.snapshots.inc()
        log.info("snapshot loaded workers=%d shards=%d", len(view.workers()), len(draft.shards))

    def _lose(self, error: CursorGone) -> None:
        self._count("cursor_gone")
        log.warning("stream moved on why=%s action=snapshot", error)
        if self._lost_since is None:
            self._lost_since = self._clock.now()
        lost = error.shards
        if self._draft is not None:
            lost |= self._draft.shards
            self._draft.view.drop()
            self._draft = None
        self._lost = None if self._lost is None or not error.shards else self._lost | lost

    # -- the store ---------------------------------------------------------------------------

    def _away(self, error: IndexFault) -> None:
        self._count("down")
        if self._down_since is None:
            self._down_since, self._waits = self._clock.now(), backoff(0.05, most_s=2.0)
            log.warning("store down why=%s action=keep the view and retry", error)

    def _back(self) -> None:
        if self._down_since is not None:
            log.info("store is back after_s=%.1f", self.down_s())
        self._down_since = None

    def _count(self, kind: str, many: int = 1) -> None:
        if self._metrics:
            self._metrics.store_errors.labels(kind).inc(many)

    async def _ask(self) -> None:
        """Which ingests live? While nobody can say, the last answer stays and the store is away."""
        asked = self._clock.now()
        self._asking = self._asking or asked
        try:
            self._view.living = await self._store.living()
        except IndexFault:
            self._deaf_since = self._deaf_since or asked
            raise
        finally:
            self._asking = None
        self._deaf_since, self._in_touch = None, max(self._in_touch, asked)

    def _strange(self, entry: Entry) -> bool:
        """Whether somebody speaks who was not there when we asked; once for each, per turn."""
        told = {change.by for change in entry.changes if isinstance(change, Known)}
        new = told - self._strangers - (self._view.living or frozenset())
        self._strangers |= new
        return bool(new)

    async def _watch(self) -> None:
        while True:
            self._strangers.clear()
            with suppress(IndexFault):  # it is seen in down_s, and _follow says it
                await self._ask()
                self._cut_off()
            await self._clock.sleep(LIVING_S)

    def _cut_off(self) -> None:
        """Say of whom we hear nothing while other parts of the store answer."""
        now, away = self._clock.now(), self._store.away()
        self._away_since = {shard: self._away_since.get(shard, now) for shard in away}
        late = {at for at, since in self._away_since.items() if now - since >= PATIENCE_S}
        far = (one for one in self._view.workers() if late and self._store.shard_of(one) in late)
        self._view.cut_off = frozenset(far)

    async def _sweep(self) -> None:
        while True:
            await self._clock.sleep(SWEEP_S)
            while self._view.sweep():  # noqa: ASYNC110 - a pause, not a wait
                await asyncio.sleep(0)
