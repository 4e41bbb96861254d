"""Recall: which token ids had the beginning of this text, when it was last asked?

Edge of the ground floor: a bounded memory with a lock; several threads use it at once. A text is
cut at its seams (seams.py); tokens of a part are remembered under the part itself, so that of a
conversation's next turn only the end is tokenised, and conversations share what they begin with.
Open it to change what is remembered or when it is checked.

    text -> parts of 1024 characters and more | the rest
               known: their ids                 tokenised, with parts that are new   -> u32, joined

What is looked up is the text, not a digest of it. Whether parts really make the whole is proven for
each tokenizer by its seams; still the first text of each, and then some, are tokenised whole and
compared: a tokenizer that fails is never cut again.
"""

from __future__ import annotations

import logging
import sys
import threading
from array import array
from collections import Counter, OrderedDict
from collections.abc import Hashable, Sequence
from typing import Generic, Protocol, TypeVar

from kvplane.seams import GUARD, Seams

log = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

LEAST_CHARS = 1024  # of a part: half of it is tokenised again each turn, on average
CHECK_EVERY = 1024  # texts of a tokenizer, from one that is compared with the whole to the next
ENTRY_BYTES = 400  # of dictionary, key and headers


class Shelf(Generic[K, V]):
    """Values by key, so many bytes of them; what was not asked for longest goes first."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes, self.bytes = most_bytes, 0
        self._held: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, keys: Sequence[K]) -> list[V | None]:
        """What is held under these keys."""
        found: list[V | None] = []
        with self._lock:
            for key in keys:
                held = self._held.get(key)
                if held is not None:
                    self._held.move_to_end(key)
                found.append(held[0] if held else None)
        return found

    def one(self, key: K) -> V | None:
        """What is held under this key."""
        with self._lock:
            held = self._held.get(key)
            if held is None:
                return None
            self._held.move_to_end(key)
            return held[0]

    def put(self, key: K, value: V, size: int) -> None:
        """Hold it, unless it is larger than all that may be held."""
        size += ENTRY_BYTES
        if size > self.most_bytes:
            return
        with self._lock:
            before = self._held.pop(key, None)
            self._held[key] = value, size
            self.bytes += size - (before[1] if before else 0)
            while self.bytes > self.most_bytes:
                self.bytes -= self._held.popitem(last=False)[1][1]

    def __len__(self) -> int:
        return len(self._held)


class Encodes(Protocol):
    """What is needed of a tokenizer; tokens.Tokenizer is one."""

    @property
    def seams(self) -> Seams: ...

    def encode_many(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]: ...


class Recall:
    """Tokenises texts, remembering their parts. Safe to use from several threads."""

    def __init__(
        self, most_bytes: int, check_every: int = CHECK_EVERY, least_chars: int = LEAST_CHARS
    ) -> None:
        self._shelf: Shelf[tuple[int, bool, str], bytes] = Shelf(most_bytes)
        self._check_every, self._least = check_every, least_chars  # 0 = never
        self._known: dict[Encodes, _Known] = {}
        self._lock = threading.Lock()
        self.prompts: Counter[str] = Counter()  # same | hit | miss | short | unsafe
        self.tokens: Counter[str] = Counter()  # reused | tokenised
        self.wrong = 0  # tokenizers whose parts did not make the whole; must stay 0

    @property
    def held_bytes(self) -> int:
        """Of the parts that are remembered now."""
        return self._shelf.bytes

    def encode_many(
        self, tokenizer: Encodes, texts: Sequence[str], special: bool
    ) -> list[array[int]]:
        """Ids of several texts, just as tokenizer.encode_many() would tell them."""
        found: dict[int, array[int]] = {}
        for at, text in enumerate(texts):
            if self._shelf.most_bytes and self._cut(tokenizer, text, special):
                found[at] = self._recalled(tokenizer, text, special)
        rest = [at for at in range(len(texts)) if at not in found]
        if rest:
            made = tokenizer.encode_many([texts[at] for at in rest], special)
            found.update(zip(rest, (array("I", ids) for ids in made), strict=True))
        return [found[at] for at in range(len(texts))]

    def _cut(self, tokenizer: Encodes, text: str, special: bool) -> bool:
        if len(text) < 2 * self._least:
            return self._count(prompt="short")
        seams = tokenizer.seams
        if seams.reason or (special and seams.frame is None) or self._of(tokenizer).distrusted:
            return self._count(prompt="unsafe")
        return True

    def _recalled(self, tokenizer: Encodes, text: str, special: bool) -> array[int]:
        known, parts = self._of(tokenizer), tokenizer.seams.pieces(text, self._least)
        keys = [(known.number, at == 0, part) for at, part in enumerate(parts)]
        held = self._shelf.get(keys[:-1])
        held.append(None)  # the last part grows with the next turn
        new = [at for at, ids in enumerate(held) if ids is None]
        reused = sum(len(ids) for ids in held if ids is not None) // 4
        for at, ids in zip(new, self._made(tokenizer, known, parts, new), strict=True):
            held[at] = ids
            if at < len(parts) - 1:
                self._shelf.put(keys[at], ids, sys.getsizeof(parts[at]) + len(ids))
        before, after = (tokenizer.seams.frame if special else None) or ((), ())
        found = array("I", before)
        found.frombytes(b"".join(ids for ids in held if ids is not None))
        self._count("hit" if reused else "miss", reused, len(found) - len(before) - reused)
        found.extend(after)
        return self._checked(tokenizer, known, text, special, found)

    def _made(
        self, tokenizer: Encodes, known: _Known, parts: list[str], new: list[int]
    ) -> list[bytes]:
        """Tokenise the parts that are not known, each as it stands in its text."""
        guarded = [at > 0 and tokenizer.seams.guarded(parts[at]) for at in new]
        texts = [GUARD * guard + parts[at] for at, guard in zip(new, guarded, strict=True)]
        made = tokenizer.encode_many(texts, False)
        return [
            array("I", ids[len(known.guard) :] if guard else ids).tobytes()
            for ids, guard in zip(made, guarded, strict=True)
        ]

    def _checked(
        self, tokenizer: Encodes, known: _Known, text: str, special: bool, found: array[int]
    ) -> array[int]:
        """The same, or what is right: now and then a text is tokenised whole."""
        known.asked += 1
        if not self._check_every or (known.asked - 1) % self._check_every:
            return found
        whole = array("I", tokenizer.encode_many([text], special)[0])
        if whole != found:
            known.distrusted = True
            self.wrong += 1
            log.error("parts of a text are not its whole %r action=cut none", tokenizer.seams)
        return whole

    def _of(self, tokenizer: Encodes) -> _Known:
        with self._lock:
            found = self._known.get(tokenizer)
        if found is None:
            guard = tuple(tokenizer.encode_many([GUARD], False)[0])
            with self._lock:
                found = self._known.setdefault(tokenizer, _Known(len(self._known), guard))
        return found

    def _count(self, prompt: str, reused: int = 0, tokenised: int = 0) -> bool:
        with self._lock:
            self.prompts[prompt] += 1
            self.tokens["reused"] += reused
            self.tokens["tokenised"] += tokenised
        return False


class _Known:
    """What is remembered of a tokenizer."""

    def __init__(self, number: int, guard: tuple[int, ...]) -> None:
        self.number, self.guard = number, guard
        self.asked, self.distrusted = 0, False
