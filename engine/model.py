"""Model: what follows these tokens, given the KV that lies in these pages?

Pure: numpy in, numpy out; the weights come from a seed. cache.py decides which pages, sequence.py
calls this from the compute thread. Open it to change the arithmetic; raise REVISION when you do.

It is small, but a sharp witness of right KV in the right place:
  * K lies in the page unrotated, its position is applied when the page is read: order matters.
  * the answer is the argmax of sin(GAIN * logit): one wrong bit turns it.
Every token, of a prompt or an answer, is computed in its own row of a tile of 16 rows (= a page)
against keys up to the end of that tile. So its KV depends on the tokens before it and on nothing
else, bit by bit: computed whole, from a reused prefix, one by one, or fetched, it is the same.

    memory of one layer: [K/V, KV head, page, token, dim] float16; a page in it = 2048 bytes. What
    one head has of K or V is one piece: ranks share heads and layers out without copying (ranks.py)
    tile 2 = rows 32..47     keys 0 ............ 31 | 32 . 47     rows that are not live: zeros
                             read from pages        | own tile, causal
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
Pool = tuple[npt.NDArray[np.float16], ...]  # one array [K/V, KV head, page, token, dim] per layer

PAGE_TOKENS = 16  # = rows of a tile; reuse is exact at its borders only because they are equal
GAIN = 100_000.0  # measured: notices even the lowest bit of one value; 10 000 misses one in nine
REVISION = 2  # of the arithmetic; peers that compute differently must not pair
END = 262  # <|end|>: the only special token an answer may hold
ANSWER_IDS = np.array([*range(32, 127), END])  # printable, so that people can read a demo
SHARP = 8.0  # of the probabilities that are told
NEVER = 3.0  # so much less than its score weighs a token that no answer holds
ROPE_BASE = 10_000.0


@dataclass(frozen=True, slots=True)
class Size:
    """Dimensions. The default computes about 20 000 prompt tokens a second on one core."""

    width: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 8
    ffn: int = 128
    vocab: int = 264  # bytes and 8 specials

    @property
    def page_bytes(self) -> int:
        """Of one page in one layer."""
        return 2 * self.kv_heads * PAGE_TOKENS * self.head_dim * 2


@dataclass(frozen=True, slots=True)
class _Layer:
    qkv: F32
    out: F32
    gate_up: F32
    down: F32


@dataclass(slots=True)
class Context:
    """One sequence at work: its pages, and their KV as attention reads it (float32, K rotated)."""

    pool: Pool
    pages: list[int]
    keys: list[F32]  # per layer [KV head, position, dim]
    values: list[F32]
    length: int = 0  # tokens whose KV is complete
    last: F32 = field(default_factory=lambda: np.zeros(0, np.float32))  # state of the last token


class Model:
    """Weights of one name; safe to use from one thread at a time."""

    def __init__(self, name: str, size: Size | None = None, positions: int = 4096) -> None:
        self.name = name
        self.size = s = size or Size()
        rng = np.random.default_rng(zlib.crc32(name.encode()))

        def weights(rows: int, columns: int, scale: float = 1.0) -> F32:
            drawn: F32 = rng.standard_normal((rows, columns)).astype(np.float32)
            return drawn * np.float32(scale / np.sqrt(rows))

        attention, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
        self._embed = weights(s.vocab, s.width, np.sqrt(s.vocab))
        self._layers = [
            _Layer(
                qkv=weights(s.width, attention + 2 * kv),
                out=weights(attention, s.width),
                gate_up=weights(s.width, 2 * s.ffn),
                down=weights(s.ffn, s.width),
            )
            for _ in range(s.layers)
        ]
        read_out = weights(s.width, s.vocab)
        self._read_out = np.ascontiguousarray(read_out[:, ANSWER_IDS])
        self._rest_ids = np.setdiff1d(np.arange(s.vocab), ANSWER_IDS)
        self._read_rest = np.ascontiguousarray(read_out[:, self._rest_ids])
        self._cos, self._sin = _rope_table(positions + PAGE_TOKENS, s.head_dim)
        # row r of a tile sees keys 0..r of that tile; once per query head that shares a KV head
        after = np.triu(np.full((PAGE_TOKENS, PAGE_TOKENS), -np.inf, np.float32), 1)
        self._causal = np.tile(after, (s.heads // s.kv_heads, 1))

    def pool(self, pages: int) -> Pool:
        """Memory for so many pages, zeroed; one array a layer."""
        s = self.size
        shape = (2, s.kv_heads, pages, PAGE_TOKENS, s.head_dim)
        return tuple(np.zeros(shape, np.float16) for _ in range(s.layers))

    def open(self, pool: Pool, pages: Sequence[int], held: int = 0) -> Context:
        """A sequence in these pages, whose first `held` tokens are in them already."""
        assert held <= len(pages) * PAGE_TOKENS, f"{held} tokens held in {len(pages)} pages"
        s = self.size
        shape = (s.kv_heads, len(pages) * PAGE_TOKENS, s.head_dim)
        ctx = Context(
            pool,
            list(pages),
            [np.zeros(shape, np.float32) for _ in range(s.layers)],
            [np.zeros(shape, np.float32) for _ in range(s.layers)],
            held,
        )
        full = list(pages[: -(-held // PAGE_TOKENS)])
        for layer, memory in enumerate(pool if full else ()):
            # [K/V, head, page, token, dim] -> [K/V, head, position, dim]
            kv = memory[:, :, full].reshape(2, s.kv_heads, -1, s.head_dim)
            kv = kv[:, :, :held].astype(np.float32)
            ctx.keys[layer][:, :held] = self._rotate(kv[0], 0)
            ctx.values[layer][:, :held] = kv[1]
        return ctx

    def feed(self, ctx: Context, ids: Sequence[int]) -> None:
        """Compute the KV of `ids` behind what is there and write it into the pages."""
        assert ctx.length + len(ids) <= len(ctx.pages) * PAGE_TOKENS, "no page for these tokens"
        done = 0
        while done < len(ids):
            row = ctx.length % PAGE_TOKENS
            live = min(PAGE_TOKENS - row, len(ids) - done)
            self._tile(ctx, ids[done : done + live], row)
            ctx.length += live
            done += live

    def answer(self, ctx: Context) -> int:
        """The token that follows the last one fed."""
        return int(ANSWER_IDS[np.argmax(self._scores(ctx, self._read_out))])

    def weigh(self, ctx: Context) -> npt.NDArray[np.float64]:
        """Log-probability of every token behind what was fed, by id; the answer's is highest."""
        found = np.empty(self.size.vocab)
        found[ANSWER_IDS] = self._scores(ctx, self._read_out)
        found[self._rest_ids] = self._scores(ctx, self._read_rest) - NEVER
        told: npt.NDArray[np.float64] = SHARP * (found - found.max())
        told -= np.log(np.exp(told).sum())
        return told

    def _scores(self, ctx: Context, read_out: F32) -> npt.NDArray[np.float64]:
        logits = (_normed(ctx.last[None, :]) @ read_out)[0].astype(np.float64)
        scores: npt.NDArray[np.float64] = np.sin(GAIN * logits)
        return scores

    def _tile(self, ctx: Context, ids: Sequence[int], row: int) -> None:
        start = ctx.length - row
        rows = slice(row, row + len(ids))
        x = np.zeros((PAGE_TOKENS, self.size.width), np.float32)
        x[rows] = self._embed[np.asarray(ids)]
        for number, layer in enumerate(self._layers):
            x = x + self._attend(ctx, number, layer, x, start, rows) @ layer.out
            gate, up = np.split(_normed(x) @ layer.gate_up, 2, axis=1)
            x = x + (gate / (1.0 + np.exp(-gate)) * up) @ layer.down
        ctx.last = x[rows.stop - 1].copy()

    def _attend(
        self, ctx: Context, number: int, layer: _Layer, x: F32, start: int, rows: slice
    ) -> F32:
        s, end = self.size, start + PAGE_TOKENS
        q, k, v = np.split(
            _normed(x) @ layer.qkv, (s.heads * s.head_dim, (s.heads + s.kv_heads) * s.head_dim), 1
        )
        self._keep(ctx, number, k, v, start, rows)
        q = self._rotate(_by_head(q, s.heads), start)
        q = q.reshape(s.kv_heads, -1, s.head_dim)  # query heads of one KV head lie together
        keys, values = ctx.keys[number][:, :end], ctx.values[number][:, :end]
        scores = q @ keys.transpose(0, 2, 1) * np.float32(s.head_dim**-0.5)
        scores[:, :, start:] += self._causal
        weight = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = (weight @ values) / weight.sum(-1, keepdims=True)
        mixed = mixed.reshape(s.heads, PAGE_TOKENS, s.head_dim)
        return np.ascontiguousarray(mixed.transpose(1, 0, 2)).reshape(PAGE_TOKENS, -1)

    def _keep(self, ctx: Context, number: int, k: F32, v: F32, start: int, rows: slice) -> None:
        """Round to float16, write the page, and use what a reader of the page would get."""
        kv = np.stack([_by_head(part, self.size.kv_heads)[:, rows] for part in (k, v)])
        rounded = kv.astype(np.float16)
        page = ctx.pool[number][:, :, ctx.pages[start // PAGE_TOKENS]]
        page[:, :, rows] = rounded
        page[:, :, rows.stop :] = 0  # nothing of an earlier owner stays behind
        read = rounded.astype(np.float32)
        at = slice(start + rows.start, start + rows.stop)
        ctx.keys[number][:, at] = self._rotate(read[0], at.start)
        ctx.values[number][:, at] = read[1]

    def _rotate(self, x: F32, first: int) -> F32:
        """Apply the positions first, first+1, ... to [head, position, dim]."""
        half = self.size.head_dim // 2
        cos, sin = (t[first : first + x.shape[1]] for t in (self._cos, self._sin))
        a, b = x[..., :half], x[..., half:]
        return np.concatenate((a * cos - b * sin, b * cos + a * sin), -1)


def _by_head(x: F32, heads: int) -> F32:
    """[token, head * dim] -> [head, token, dim], contiguous."""
    return np.ascontiguousarray(x.reshape(x.shape[0], heads, -1).transpose(1, 0, 2))


def _normed(x: F32) -> F32:
    """RMSNorm without a learnt scale; a zero row stays zero."""
    mean: F32 = np.mean(x * x, -1, keepdims=True)
    normed: F32 = x / np.sqrt(mean + np.float32(1e-5))
    return normed


def _rope_table(positions: int, head_dim: int) -> tuple[F32, F32]:
    steps = ROPE_BASE ** (-np.arange(head_dim // 2) * 2.0 / head_dim)
    angles = np.outer(np.arange(positions), steps)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
