"""Windows: how much of what the counted group holds do the other cache groups let be used?

Pure: blocks of a prompt and who holds them in, a depth out; view.py asks it for workers of hybrid
models, whose engines keep only the last blocks of some groups. Open it to add a kind of group.

    counted      b0 b1 b2 b3 b4 b5     depth 6
    window 2     .  b1 b2 .  .  b5     6 needs b4 b5, 5 needs b3 b4, 4 b2 b3, 3 needs b1 b2: 3

A group of k times the counted blocks' size sees every k-th: b(k-1), b(2k-1), ...; only a multiple
of k is usable. Source: how vLLM's hybrid cache looks up a prefix; seen in protocols/vllm.md, 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvplane.vocabulary import Group, GroupKind

Held = Sequence[set[int]]  # what a group holds, tier by tier


def usable(
    asked: Sequence[int], depth: int, block_size: int, groups: Sequence[tuple[Group, Held]]
) -> int:
    """The greatest n <= depth at which every group has all the blocks before n that it needs.

    A group whose block size is no multiple of `block_size` cannot be judged and caps nothing.
    """
    known = [
        (group, group.block_size or block_size, held)
        for group, held in groups
        if not group.block_size % block_size
    ]
    before = depth + 1
    while 0 < depth < before:
        before = depth
        for group, size, held in known:
            step = size // block_size
            mine = asked[step - 1 : depth : step]
            depth = _CAPS[group.kind](mine, group.tokens, size, held) * step
    return depth


def _every(held: Held, blocks: Sequence[int]) -> bool:
    """Most often all is there, and one question to a set is quicker than one for each block."""
    if len(held) == 1:
        return held[0].issuperset(blocks)
    return all(_there(held, block) for block in blocks)


def _there(held: Held, block: int) -> bool:
    return any(block in tier for tier in held)


def _full(mine: Sequence[int], tokens: int, size: int, held: Held) -> int:
    if _every(held, mine):
        return len(mine)
    return next(at for at, block in enumerate(mine) if not _there(held, block))


def _window(mine: Sequence[int], tokens: int, size: int, held: Held) -> int:
    """From the right, the first unbroken row that is long enough, or begins at the first block."""
    if tokens < 2:  # of one token: itself; none told: any block may be needed
        return len(mine) if tokens == 1 else _full(mine, tokens, size, held)
    wanted, row = -(-(tokens - 1) // size), 0
    if _every(held, mine[-wanted:]):
        return len(mine)
    for at in range(len(mine) - 1, -1, -1):
        row = row + 1 if _there(held, mine[at]) else 0
        if row == wanted:
            return at + row
    return row


def _chunk(mine: Sequence[int], tokens: int, size: int, held: Held) -> int:
    """A missing block spoils every end behind it in its own chunk: go on right before it."""
    if tokens < 1:
        return _full(mine, tokens, size, held)
    end = at = len(mine)
    if _every(held, mine[end * size // tokens * tokens // size :]):
        return end
    while at > end * size // tokens * tokens // size:
        at -= 1
        if not _there(held, mine[at]):
            end = at
    return end


def _state(mine: Sequence[int], tokens: int, size: int, held: Held) -> int:
    return next((at + 1 for at in range(len(mine) - 1, -1, -1) if _there(held, mine[at])), 0)


_CAPS: dict[GroupKind, Callable[[Sequence[int], int, int, Held], int]] = {
    GroupKind.FULL: _full,
    GroupKind.WINDOW: _window,
    GroupKind.CHUNK: _chunk,
    GroupKind.STATE: _state,
}
