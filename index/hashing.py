"""Hashing: which name does a block of tokens have?

Pure. The only place that knows the hash; events/ uses it on what engines stored, router/ on what a
prompt asks, and anybody outside may compute the same numbers. Open it to change the scheme (and
then vocabulary.HASH_SCHEME, so that old and new names never meet).

    root seed   = xxh3_64(canonical namespace text, UTF-8)                          seed(namespace)
    block hash  = xxh3_64(token ids as little-endian u32, seed = parent's hash)     extend(...)
    canonical   = ["kvplane-xxh3-1","MODEL","ADAPTER","SALT",["EXTRA",...],BLOCK_SIZE] as JSON,
                  no blanks, all but ASCII escaped as JSON does          vocabulary.Namespace.text

    seed -> H(seed, tokens 0..15) -> H(that, tokens 16..31) -> ...  a hash names its whole prefix

Images share a placeholder token, so a block that an image reaches into has extra keys, one text for
each: ID@OFFSET, its first token counted from the block's (-3: it began three tokens before). Such a
block is hashed with another seed; those after it chain on, so they differ too:

    seed of that block = xxh3_64(["ID@OFFSET",...] as JSON like above, seed = parent's hash)

Only full blocks have a name. In JSON a hash is always 16 hex digits.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from struct import iter_unpack
from typing import TypeAlias, cast

from xxhash import xxh3_64_intdigest

from kvplane.vocabulary import BlockHash, Namespace, PrefixChain

from .errors import BadValue
from .numerals import Numerals

Tokens: TypeAlias = "Sequence[int] | bytes | bytearray | memoryview | array[int] | Numerals"
Extra: TypeAlias = Sequence[Sequence[str]]  # texts of each block; blocks beyond it have none

MAX_TOKEN = 2**32 - 1
MAX_HASH = 2**64 - 1
_HEX = frozenset("0123456789abcdefABCDEF")


@lru_cache(maxsize=1024)  # of a fleet's models and adapters; salts of tenants may be more
def seed(namespace: Namespace) -> int:
    """The parent of every first block of this namespace."""
    return int(xxh3_64_intdigest(namespace.text().encode()))


def chain(
    tokens: Tokens, namespace: Namespace, extra: Mapping[int, Sequence[str]] | None = None
) -> PrefixChain:
    """Names of the full blocks of one prompt, first block first.

    `tokens` is a sequence of ints, or memory that already holds little-endian u32: bytes,
    array('I'), a numpy array of uint32. Raises BadValue for anything that is no token id.
    `extra`: texts of the blocks that have some, by position; those of no full block are passed by.
    """
    packed = pack(tokens)
    keys = [extra.get(at, ()) for at in range(max(extra) + 1)] if extra else ()
    blocks = _extend(seed(namespace), packed, namespace.block_size, keys)
    return PrefixChain(namespace, tuple(blocks), len(packed) // 4)


def extend(parent: int, tokens: Tokens, block_size: int, extra: Extra = ()) -> list[BlockHash]:
    """Names of the full blocks that follow the block named `parent` (or a seed)."""
    if not 0 <= parent <= MAX_HASH:  # xxhash would wrap it silently
        raise BadValue("parent", parent, "an unsigned 64-bit number")
    return _extend(parent, pack(tokens), block_size, extra)


def _extend(parent: int, packed: memoryview, block_size: int, extra: Extra) -> list[BlockHash]:
    if block_size < 1:
        raise BadValue("block_size", block_size, "1 token or more")
    step, digest = block_size * 4, xxh3_64_intdigest
    found: list[BlockHash] = []
    last = len(packed) - step + 1
    for start, texts in zip(range(0, last, step), extra, strict=False):  # no round without extra
        within = digest(_canonical(texts), parent) if texts else parent
        parent = digest(packed[start : start + step], within)
        found.append(BlockHash(parent))
    rest = packed[len(found) * step : len(packed) // step * step]
    return found + chained(parent, rest, block_size)


def chained(parent: int, packed: bytes | memoryview, block_size: int) -> list[BlockHash]:
    """As extend(), of what is whole blocks already."""
    digest = xxh3_64_intdigest
    # Cut up in one go: a slice for each block would cost as much as its hash.
    pieces = iter_unpack(f"{4 * block_size}s", packed)
    found = [parent := digest(piece, parent) for (piece,) in pieces]
    return cast("list[BlockHash]", found)


def _canonical(texts: Sequence[str]) -> bytes:
    return json.dumps(list(texts), separators=(",", ":"), ensure_ascii=True).encode()


def pack(tokens: Tokens) -> memoryview:
    """Token ids as the bytes that are hashed; nothing is copied where they already are."""
    try:
        memory = memoryview(tokens)  # type: ignore[arg-type]
    except TypeError:
        return _pack_numbers(tokens)
    native = memory.format in ("I", "L") and memory.itemsize == 4 and sys.byteorder == "little"
    if native and memory.ndim == 1 and memory.contiguous:
        return memory.cast("B")
    if not isinstance(tokens, bytes | bytearray):
        as_list = getattr(tokens, "tolist", None)  # numpy and array: plain ints are faster
        return _pack_numbers(as_list() if as_list else tokens)
    if len(memory) % 4:
        raise BadValue("tokens", f"{len(memory)} bytes", "packed u32, so a multiple of 4 bytes")
    return memory


def _pack_numbers(tokens: Iterable[int] | Numerals) -> memoryview:
    if isinstance(tokens, Numerals):
        return memoryview(tokens.packed(0, len(tokens)))
    try:
        packed = array("I", tokens)
    except (OverflowError, TypeError):
        raise _culprit(tokens) from None
    if packed.itemsize != 4:  # a platform where unsigned int is not 32 bits
        raise BadValue("tokens", packed.itemsize, "a platform with 4-byte unsigned ints")
    if sys.byteorder == "big":
        packed.byteswap()
    return memoryview(packed).cast("B")


def _culprit(tokens: object) -> BadValue:
    """The first token that cannot be hashed, by position."""
    want = f"a whole number, 0 to {MAX_TOKEN}"
    if isinstance(tokens, str) or not isinstance(tokens, Iterable):
        return BadValue("tokens", tokens, "a list of token ids")
    for at, token in enumerate(tokens):
        if not isinstance(token, int) or not 0 <= token <= MAX_TOKEN:
            return BadValue(f"tokens[{at}]", token, want)
    return BadValue("tokens", type(tokens).__name__, want)


def to_hex(block: int) -> str:
    """16 hex digits, lower case; 64-bit numbers break JavaScript."""
    return f"{block:016x}"


def from_hex(text: object) -> BlockHash:
    """The reverse of to_hex; raises BadValue for anything but 16 hex digits."""
    if not isinstance(text, str) or len(text) != 16 or not _HEX.issuperset(text):
        raise BadValue("hash", text, "16 hex digits")
    return BlockHash(int(text, 16))
