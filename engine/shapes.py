"""Shapes: pieces of samples as the JSON that clients of engines know.

Pure. serving.py feeds it and sends what it returns. Open it to change a member of an answer.
Sources: OpenAI's completions and chat completions, SGLang's /generate, whole and streamed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .asks import Call
from .errors import EngineError, NotReady, RoomFailed
from .logprobs import Likely, for_chat, for_completions, for_generate
from .pieces import Piece

DONE = b"data: [DONE]\n\n"
MOST_SAID = 4000  # characters of an error: it may show what a client sent, and that be megabytes


@dataclass(slots=True)
class _Sample:
    prompt_tokens: int
    text: str = ""
    ids: list[int] = field(default_factory=list)
    finish: str | None = None
    matched: int | str | None = None
    cached_tokens: int = 0
    inputs: tuple[Likely, ...] = ()
    likely: list[Likely] = field(default_factory=list)
    told: int = 0  # of them were sent in chunks


class Shape:
    """The answer to one call; `add` every piece, then ask for `whole` or use `chunks`."""

    def __init__(self, call: Call, model: str, created: int) -> None:
        self._call, self._model, self._created = call, model, created
        self._samples = [_Sample(len(ask.ids)) for ask in call.asks]
        self._begun: set[int] = set()

    def add(self, piece: Piece) -> None:
        """Take note of one piece."""
        sample = self._samples[piece.index]
        sample.text += piece.text
        if piece.token is not None:
            sample.ids.append(piece.token)
        sample.finish, sample.matched = piece.finish, piece.matched
        sample.cached_tokens = max(sample.cached_tokens, piece.cached_tokens)
        sample.inputs = piece.inputs or sample.inputs
        if piece.likely is not None:
            sample.likely.append(piece.likely)

    def whole(self) -> Any:
        """The answer when every sample ended."""
        if self._call.route == "generate":
            each = [self._generated(at) for at in range(len(self._samples))]
            return each if self._call.batched else each[0]
        choices = [self._choice(at) for at in range(len(self._samples))]
        return {**self._head(""), "choices": choices, "usage": self._usage()}

    def chunks(self, piece: Piece) -> list[Any]:
        """What a stream sends for a piece that was added just now."""
        at = piece.index
        if self._call.route == "generate":
            numbered = {"index": at} if self._call.batched else {}
            return [self._generated(at) | numbered]
        if self._call.route == "completions":
            told = self._untold(at)
            choice = {"index": at, "logprobs": told, "finish_reason": piece.finish}
            return [self._chunk({**choice, "text": piece.text})]
        deltas: list[tuple[dict[str, str], dict[str, Any] | None, str | None]] = []
        if at not in self._begun:
            self._begun.add(at)
            deltas.append(({"role": "assistant", "content": ""}, None, None))
        if piece.text:
            deltas.append(({"content": piece.text}, self._untold(at), None))
        if piece.finish:
            deltas.append(({}, None if piece.text else self._untold(at), piece.finish))
        return [
            self._chunk({"index": at, "delta": delta, "logprobs": told, "finish_reason": finish})
            for delta, told, finish in deltas
        ]

    def tail(self) -> list[Any]:
        """What a stream sends after the last piece, before DONE."""
        if self._call.route == "generate" or not self._call.usage_at_end:
            return []
        return [{**self._head(".chunk"), "choices": [], "usage": self._usage()}]

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = {**self._head(".chunk"), "choices": [choice]}
        return chunk | {"usage": None} if self._call.usage_at_end else chunk

    def _head(self, kind: str) -> dict[str, Any]:
        chat = self._call.route == "chat"
        return {
            "id": ("chatcmpl-" if chat else "cmpl-") + self._call.rid,
            "object": f"chat.completion{kind}" if chat else "text_completion",
            "created": self._created,
            "model": self._model,
        }

    def _choice(self, at: int) -> dict[str, Any]:
        sample = self._samples[at]
        shared = {"index": at, "logprobs": self._untold(at), "finish_reason": sample.finish}
        if self._call.route == "completions":
            return {**shared, "text": sample.text, "matched_stop": sample.matched}
        message = {"role": "assistant", "content": sample.text}
        return {**shared, "message": message, "matched_stop": sample.matched}

    def _generated(self, at: int) -> dict[str, Any]:
        sample = self._samples[at]
        many = len(self._samples) > 1
        return {
            "text": sample.text,
            "output_ids": list(sample.ids),
            "meta_info": {
                "id": f"{self._call.rid}_{at}" if many else self._call.rid,
                "finish_reason": _reason(sample),
                "prompt_tokens": sample.prompt_tokens,
                "completion_tokens": len(sample.ids),
                "cached_tokens": sample.cached_tokens,
                **self._generated_logprobs(at),
            },
        }

    def _untold(self, at: int) -> dict[str, Any] | None:
        """Log-probabilities of the tokens that were not told of yet, in the route's form."""
        sample = self._samples[at]
        if self._call.asks[at].wanted is None:
            return None
        begun, sample.told = sample.told, len(sample.likely)
        if self._call.route == "chat":
            return for_chat(sample.likely[begun:])
        offset = sum(len(one.text) for one in sample.likely[:begun])
        return for_completions(sample.likely[begun:], offset)

    def _generated_logprobs(self, at: int) -> dict[str, Any]:
        sample, wants = self._samples[at], self._call.asks[at].wanted
        return {} if wants is None else for_generate(sample.inputs, sample.likely, wants)

    def _usage(self) -> dict[str, Any]:
        """A prompt counts once, however many samples were made of it (OpenAI counts so)."""
        prompts = {self._call.asks[at].prompt: s for at, s in enumerate(self._samples)}
        made = sum(len(sample.ids) for sample in self._samples)
        asked = sum(sample.prompt_tokens for sample in prompts.values())
        first = [s for at, s in enumerate(self._samples) if self._call.asks[at].sample == 0]
        return {
            "prompt_tokens": asked,
            "completion_tokens": made,
            "total_tokens": asked + made,
            "prompt_tokens_details": {"cached_tokens": sum(s.cached_tokens for s in first)},
        }


def error_body(error: EngineError) -> dict[str, Any]:
    """OpenAI's shape, with stage and room where a room existed."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    said = str(error) or type(error).__name__
    facts: dict[str, Any] = {
        "message": said if len(said) <= MOST_SAID else f"{said[:MOST_SAID]}...",
        "type": kind,
        "code": error.code,
        "param": getattr(error, "field", None),
    }
    if isinstance(error, RoomFailed):
        facts |= {"stage": error.stage.value, "room": error.room}
    if isinstance(error, NotReady) and error.stage is not None:
        facts["stage"] = error.stage.value
    return {"error": facts}


def _reason(sample: _Sample) -> dict[str, Any] | None:
    if sample.finish is None:
        return None
    if sample.finish == "length":
        return {"type": "length", "length": len(sample.ids)}
    if sample.finish == "abort":
        return {"type": "abort", "message": "Aborted by request"}
    return {"type": "stop", "matched": sample.matched}
