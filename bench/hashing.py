"""Hashing: tokens to the public chained block hash."""

from __future__ import annotations

import array
import random
from collections.abc import Iterator
from functools import partial

from bench.timing import Row, rate
from kvplane.index import chain
from kvplane.vocabulary import Namespace

TOKENS = 65_536


def rows() -> Iterator[Row]:
    """Blocks per second from a list of ints and from packed ids."""
    chance = random.Random(1)
    namespace = Namespace("bench", 16)
    listed = [chance.randrange(150_000) for _ in range(TOKENS)]
    packed = array.array("I", listed)
    blocks = TOKENS // 16
    for name, tokens in (("list of ids", listed), ("packed ids", packed)):
        work = partial(chain, tokens, namespace)
        yield rate(f"hashing, {name}, 64 k tokens", "blocks", blocks, work)
