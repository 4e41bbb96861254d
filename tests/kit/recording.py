"""Recordings: what an engine published and what it answered, as the vector files hold it.

A file of the form of vllm-kv-events.jsonl: engine, frames and request lines in runs; any other is
taken with KVPLANE_RECORDING=/path/to/file.jsonl.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvplane.index import View, chain, rank
from kvplane.vocabulary import Namespace, Worker

DEFAULT = Path(__file__).parents[1] / "vectors" / "vllm-kv-events.jsonl"
AT_ONCE, STALE = "at once", "stale"  # why a request is left out


@dataclass(frozen=True)
class Request:
    """One request and what the engine says it had of it."""

    n: int
    desc: str
    prompt: Sequence[int]
    salt: str
    after: int  # the batches up to this one were made before it was sent; -1: none
    cached: int  # tokens
    left_out: str  # why it cannot be compared exactly, or ""

    def found(self, view: View, worker: Worker, size: int) -> int:
        """Tokens the view says are usable. The last token is computed in any case."""
        space = Namespace("m", size, salt=self.salt)
        (held,) = rank(view, chain(self.prompt[:-1], space), [worker])
        return held.depth_tokens


@dataclass(frozen=True)
class Run:
    """One engine's life: its batches by number, its requests in order."""

    name: str
    block_size: int  # tokens
    frames: Mapping[int, Sequence[bytes]]
    requests: Sequence[Request]

    @property
    def topic(self) -> bytes:
        return self.frames[0][0]

    def between(self, first: int, last: int) -> Iterator[Request]:
        """Requests to compare that were sent after batch `first`..`last`."""
        return (one for one in self.requests if not one.left_out and first <= one.after <= last)

    def counts(self) -> tuple[int, int, int]:
        """(compared, side by side, stale)."""
        why = [one.left_out for one in self.requests]
        return why.count(""), why.count(AT_ONCE), why.count(STALE)


def recording() -> tuple[Path, list[Run]]:
    """The file that is tested with and its runs, in order."""
    path = Path(os.environ.get("KVPLANE_RECORDING") or DEFAULT)
    told: dict[str, list[dict[str, Any]]] = {}
    for line in path.read_text().splitlines():
        if line.strip():
            one = json.loads(line)
            told.setdefault(one["run"], []).append(one)
    return path, [_run(name, lines) for name, lines in told.items()]


def _run(name: str, lines: list[dict[str, Any]]) -> Run:
    engine = next(line for line in lines if line["kind"] == "engine")
    frames = {
        line["seq"]: tuple(bytes.fromhex(frame) for frame in line["frames"])
        for line in lines
        if line["kind"] == "frames"
    }
    requests = sorted(_requests(lines), key=lambda one: one.after)  # stable: as they were sent
    return Run(name, engine["block_size"], frames, requests)


def _requests(lines: list[dict[str, Any]]) -> Iterator[Request]:
    at_once = False
    for told in lines:
        if told["kind"] == "note" and told["desc"].startswith("end of"):
            at_once = False
        elif told["kind"] == "note" and "run at once" in told["desc"]:
            at_once = True
        elif told["kind"] == "request":
            why = AT_ONCE if at_once else STALE if told.get("stale_events") else ""
            yield Request(
                told["n"],
                told.get("desc", ""),
                told["prompt_token_ids"],
                told.get("cache_salt") or "",
                told["after_seq"],
                told["cached_tokens"],
                why,
            )
