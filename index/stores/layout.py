"""Layout: which key holds what, and was this store made as this program makes one?

Edge: asks for the format and the number of shards, and fixes them at first use; the rest is names
of keys, drawn at the top of redis.py. Open it to change either (and then FORMAT).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from redis.exceptions import ResponseError
from xxhash import xxh3_64_intdigest

from kvplane.vocabulary import Epoch, Worker

from ..errors import ShardsFixed, StoreDown, StoreUnfit, StoreUnused
from .line import Line

FORMAT = 2
_COUNT = re.compile(rb"[1-9][0-9]{0,4}")


class Layout:
    """Keys of one store, for who has waited for ready()."""

    def __init__(self, line: Line, shown: str, prefix: str, asked: int | None, fixes: bool) -> None:
        self.shards = 0  # not known yet
        self.tags: Sequence[str] = ()
        self._line, self._shown, self._prefix = line, shown, prefix
        self._asked, self._fixes = asked, fixes
        self._sure = False

    def doubt(self) -> None:
        """The store may have been emptied: look again."""
        self._sure = False

    async def ready(self) -> None:
        """Learn how many shards there are, or fix it where this process writes.

        Raises StoreUnfit, ShardsFixed, StoreUnused where nobody has written yet.
        """
        if self._sure:
            return
        kept, form = await self._kept()
        if self._fixes and None in (kept, form):
            key = f"{self._prefix}:shards"
            wanted = (("format", FORMAT), ("shards", self._asked or self.shards or 1))
            for field, value in wanted:  # in this order: a number without a format is another's
                await self._line.call(key, "HSETNX", key, field, value)
            kept, form = await self._kept()
        if form not in (None, b"%d" % FORMAT):
            raise StoreUnfit(self._shown, _other(form.decode(errors="replace")))
        if kept is not None and not _COUNT.fullmatch(kept):
            raise StoreUnfit(self._shown, _other(f"{FORMAT}, and {kept!r} for its shards"))
        if kept is None and not self._asked:
            raise StoreUnused(self._shown, "no ingest has used this store yet")
        found = int(kept) if kept is not None else self._asked or 1
        if self._asked not in (None, found):
            raise ShardsFixed(self._asked or 1, found)
        if self.shards not in (0, found):  # cursors and connections are of the number before
            raise ShardsFixed(self.shards, found)
        self.shards, self._sure = found, kept is not None
        self.tags = [f"{{{self._prefix}:{shard}}}" for shard in range(found)]

    async def _kept(self) -> tuple[bytes | None, bytes | None]:
        key = f"{self._prefix}:shards"
        try:
            shards, form = await self._line.call(key, "HMGET", key, "shards", "format")
        except StoreDown as error:
            cause = error.__cause__
            if isinstance(cause, ResponseError) and "WRONGTYPE" in str(cause):
                raise StoreUnfit(self._shown, _other("1")) from None
            raise
        return shards, form

    def shard(self, worker: Worker) -> int:
        """Whose stream tells of this worker."""
        return xxh3_64_intdigest(str(worker).encode()) % self.shards

    def tag(self, worker: Worker) -> str:
        """The start of every key of its shard."""
        return self.tags[self.shard(worker)]

    def meta(self, worker: Worker) -> str:
        """Its HASH of position and trust."""
        return f"{self.tag(worker)}:m:{worker}"

    def table(self, worker: Worker, epoch: Epoch) -> str:
        """Its HASH of blocks in one life."""
        return f"{self.tag(worker)}:t:{epoch}:{worker}"


def _other(form: str) -> str:
    return (
        f"its layout has format {form}, this program writes format {FORMAT}: "
        "use another --redis-prefix, or delete the keys of this one"
    )
