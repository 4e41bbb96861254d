"""Pieces: what has one sample said so far, and is it done?

Pure. sequence.py makes pieces, shapes.py writes them as JSON. Open it to change when an answer
ends or how stop texts are cut off.

    stop "cd"     token "a" -> "a"     "b" -> "b"     "c" -> ""     "d" -> stop, "c" never shown
                                                      "c" -> ""     "x" -> "cx"
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .logprobs import Likely
from .model import END


@dataclass(frozen=True, slots=True)
class Piece:
    """What one more token added to a sample."""

    index: int
    token: int | None  # None: none was made (abort)
    text: str = ""  # what may be shown now
    finish: str | None = None  # stop | length | abort
    matched: int | str | None = None  # what stopped it
    cached_tokens: int = 0  # of the prompt
    likely: Likely | None = None  # where log-probabilities are wanted
    inputs: tuple[Likely, ...] = ()  # of the prompt; with the first piece


class Written:
    """The text of one sample as it grows."""

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stops: Sequence[str],
        most: int,
        ignore_end: bool,
    ) -> None:
        self._decode = decode
        self._stops = stops
        self._most = most
        self._ignore_end = ignore_end
        self._hidden = ""  # could become a stop text
        self.tokens = 0

    def add(self, index: int, token: int, cached_tokens: int = 0) -> Piece:
        """The piece for the next token; its `finish` says whether it is the last."""
        self.tokens += 1
        self._hidden += self._decode([token])  # answers are single-byte characters: see model.py
        if token == END and not self._ignore_end:
            return Piece(index, token, self._show(0), "stop", END, cached_tokens)
        for stop in self._stops:
            at = self._hidden.find(stop)
            if at >= 0:
                return Piece(index, token, self._hidden[:at], "stop", stop, cached_tokens)
        last = self.tokens >= self._most
        shown = self._show(0 if last else self._doubtful())
        return Piece(index, token, shown, "length" if last else None, None, cached_tokens)

    def _show(self, keep: int) -> str:
        cut = len(self._hidden) - keep
        shown, self._hidden = self._hidden[:cut], self._hidden[cut:]
        return shown

    def _doubtful(self) -> int:
        """Characters at the end that may be the start of a stop text."""
        return max(
            (
                size
                for stop in self._stops
                for size in range(1, min(len(stop), len(self._hidden) + 1))
                if self._hidden.endswith(stop[:size])
            ),
            default=0,
        )
