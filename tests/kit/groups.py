"""What hybrid groups need, block by block: slow and plain, to compare the product with."""

from __future__ import annotations

from kvplane.vocabulary import Group, GroupKind

SIZE = 16  # tokens of a counted block


def needed(group: Group, n: int) -> list[int] | None:
    """Counted blocks that a group needs before n of them are usable; None where n cannot be."""
    size = group.block_size or SIZE
    step = size // SIZE
    if n % step:
        return None
    count, tokens = n // step, group.tokens
    match group.kind:
        case GroupKind.FULL:
            own = list(range(count))
        case GroupKind.WINDOW:
            wanted = 0
            while wanted * size < tokens - 1:
                wanted += 1
            own = list(range(max(0, count - wanted), count))
        case GroupKind.CHUNK:
            begin = count * size // tokens * tokens
            own = [at for at in range(count) if (at + 1) * size > begin]
        case GroupKind.STATE:
            own = [count - 1] if count else []
    return [(at + 1) * step - 1 for at in own]


def naive_usable(depth: int, groups: list[tuple[Group, set[int]]]) -> int:
    def accepts(group: Group, held: set[int], n: int) -> bool:
        blocks = needed(group, n)
        return blocks is not None and all(at in held for at in blocks)

    for n in range(depth, 0, -1):
        if all(accepts(group, held, n) for group, held in groups):
            return n
    return 0
