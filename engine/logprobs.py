"""Logprobs: how likely was each token, and which others were as likely?

Pure. body.py reads what a request wants, sequence.py asks the model and fills in, shapes.py writes
it. Open it to change a form. Sources: OpenAI's chat and completions, SGLang's /generate.

    chat         {"content": [{"token", "logprob", "bytes", "top_logprobs": [...]}]}
    completions  {"tokens", "token_logprobs", "top_logprobs": [{text: logprob}], "text_offset"}
    generate     "output_token_logprobs": [[logprob, id, null]], "output_top_logprobs": [[...]], and
                 the same of the prompt as "input_..."; the first token of all has null
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import BadRequest
from .fields import Fields

MOST_TOPS = 20  # alternatives; OpenAI's own limit


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a request wants to be told."""

    tops: int = 0  # alternatives of each token
    start: int | None = None  # prompt tokens from here on too; None = none of them


@dataclass(frozen=True, slots=True)
class Likely:
    """One token; None before the first of all, which follows nothing."""

    token: int
    text: str
    logprob: float | None
    tops: tuple[tuple[float, int, str], ...] = ()  # logprob, token, text; the likeliest first


def wanted(route: str, fields: Fields, prompt: int) -> Wanted | None:
    """Of a body; None where it wants nothing. Raises BadRequest."""
    if route == "chat":
        tops = fields.whole("top_logprobs", None, 0, MOST_TOPS)
        asked = fields.flag("logprobs", False)
        if tops and not asked:
            raise BadRequest("top_logprobs", "top_logprobs: only where logprobs is true")
        return Wanted(tops or 0) if asked else None
    if route == "completions":
        tops = fields.whole("logprobs", None, 0, MOST_TOPS)
        return None if tops is None else Wanted(tops)
    if not fields.flag("return_logprob", False):
        return None
    start = fields.whole("logprob_start_len", -1, -1, prompt)
    tops = fields.whole("top_logprobs_num", 0, 0, MOST_TOPS)
    return Wanted(tops or 0, None if start == -1 else start)


def likely(
    weights: npt.NDArray[np.float64] | None,
    token: int,
    tops: int,
    text: Callable[[Sequence[int]], str],
) -> Likely:
    """Of the log-probabilities of all tokens, by id; None = nothing came before this token."""
    if weights is None:
        return Likely(token, text([token]), None)
    best = np.argsort(-weights, kind="stable")[:tops]
    others = tuple((float(weights[one]), int(one), text([int(one)])) for one in best)
    return Likely(token, text([token]), float(weights[token]), others)


def for_chat(tokens: Sequence[Likely]) -> dict[str, Any]:
    """OpenAI's chat."""

    def entry(text: str, logprob: float | None) -> dict[str, Any]:
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    content = [
        entry(one.text, one.logprob)
        | {"top_logprobs": [entry(text, logprob) for logprob, _, text in one.tops]}
        for one in tokens
    ]
    return {"content": content, "refusal": None}


def for_completions(tokens: Sequence[Likely], offset: int) -> dict[str, Any]:
    """OpenAI's completions; `offset`: characters of the answer that came before these."""
    offsets = []
    for one in tokens:
        offsets.append(offset)
        offset += len(one.text)
    return {
        "tokens": [one.text for one in tokens],
        "token_logprobs": [one.logprob for one in tokens],
        "top_logprobs": [{text: logprob for logprob, _, text in one.tops} for one in tokens],
        "text_offset": offsets,
    }


def for_generate(
    inputs: Sequence[Likely], outputs: Sequence[Likely], wants: Wanted
) -> dict[str, Any]:
    """SGLang's members of meta_info."""
    found: dict[str, Any] = {}
    for name, tokens in (("input", inputs), ("output", outputs)):
        found[f"{name}_token_logprobs"] = [[one.logprob, one.token, None] for one in tokens]
        if wants.tops:
            found[f"{name}_top_logprobs"] = [
                [[logprob, token, None] for logprob, token, _ in one.tops] or None for one in tokens
            ]
    return found
