"""Facts: what one request makes of its choice: headers, the ledger's line, and load.

Pure. Helpers of gateway.py and journey.py: each turns an Ask and a Choice into one thing that is
shown or booked; what follows from the choice alone is looks.py's. Open it to change a header, a
line of the ledger, or how much load a request is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvplane.vocabulary import Binding

from .choice import BYTES_PER_TOKEN, Choice
from .errors import GatewayError
from .looks import BOOTSTRAP_PORT, Header, Look
from .meeting import Meeting
from .plans import Prompt
from .request import MOST_COUNTED, Ask, Body

__all__ = [
    "ANSWER_TOKENS",
    "BOOTSTRAP_PORT",
    "CHARS_PER_TOKEN",
    "HeaderList",
    "check_length",
    "headers",
    "loads",
    "meeting",
    "pair_tokens",
    "refused",
]

ANSWER_TOKENS = 128  # an answer's share of decode load where the client sets no limit
CHARS_PER_TOKEN = 32  # no text worth tokenising has more on average
TRACEPARENT_BYTES = 256  # of version 00: 55
MOST_SHOWN = 128  # rooms in a header: 2.5 kB, which every client and proxy takes; 4096 are 81 kB

HeaderList = list[Header]


def pair_tokens(choice: Choice) -> int:
    """The context of a pair: the shorter of both; 0 where neither says."""
    most = choice.decode.up.max_tokens or 0
    other = (choice.prefill or choice.decode).up.max_tokens
    return other if other and (other < most or not most) else most


def check_length(ask: Ask, prompt: Prompt, most: int) -> None:
    """Raises GatewayError for a prompt that leaves no room for an answer; `most` 0 = no limit."""
    if most and prompt.longest >= most:
        raise GatewayError(
            "context_length_exceeded",
            f"This model's maximum context length is {most} tokens, prompt and answer "
            f"together. However, your prompt has {prompt.longest} tokens.",
            next(
                (name for name in ("messages", "prompt", "text") if name in ask.body), "input_ids"
            ),
        )


def loads(ask: Ask, choice: Choice) -> tuple[int, int]:
    """Tokens of decode: all it has to keep; and of prefill: what it has to compute. A unified
    worker is the decode, and what it holds already costs it nothing."""
    kept, body = choice.prompt_tokens or len(ask.raw) // BYTES_PER_TOKEN, ask.body
    left = kept - choice.depth.predicted
    wanted = body.get("max_completion_tokens") or body.get("max_tokens")
    if not wanted:
        wanted = ANSWER_TOKENS if ask.plain else _native(body)
    if choice.prefill is None:
        kept = left if left > 0 else 0
    return kept + wanted * ask.prompts * ask.samples, left if left > 0 else 1


def _native(body: Body) -> int:
    """The limit of an answer as SGLang's own route has it, or what is taken for one. A list has
    one for each prompt; the first speaks for all."""
    params = body.get("sampling_params")
    first = params[0] if isinstance(params, list) and params else params
    most = first.get("max_new_tokens") if isinstance(first, dict) else None
    return most if type(most) is int and 0 < most <= MOST_COUNTED else ANSWER_TOKENS


def headers(ask: Ask, look: Look, bindings: Sequence[Binding]) -> HeaderList:
    """What every inference answer carries."""
    found = [(b"x-request-id", ask.request_id.encode()), *look.headers]
    if len(bindings) == 1:
        found.append((b"x-kvplane-room", b"%d" % bindings[0].room))
    elif bindings:
        found += _rooms(bindings)
    if ask.stream:
        found.append((b"x-accel-buffering", b"no"))  # proxies in front must not collect a stream
    return found


def _rooms(bindings: Sequence[Binding]) -> HeaderList:
    """All rooms, or the first of them and how many there are: GET /requests/{id} has them all."""
    shown = ",".join([str(binding.room) for binding in bindings[:MOST_SHOWN]])
    found = [(b"x-kvplane-room", shown.encode())]
    if len(bindings) > MOST_SHOWN:
        found.append((b"x-kvplane-rooms", b"%d" % len(bindings)))
    return found


def meeting(
    ask: Ask,
    choice: Choice,
    look: Look,
    bindings: Sequence[Binding],
    number: int,
    steps: Sequence[Any],
    opened_at: float,
) -> Meeting:
    """The ledger's line of one attempt. Loads are as they are now, when it was chosen."""
    decode, model = choice.decode, look.model
    prefill = choice.prefill or decode  # of whom it says nothing where there is none
    if ask.model and ask.model != model:
        model = ask.model
    return Meeting(
        ask.request_id,
        number,
        ask.path,
        model,
        (bindings[0].room,) if len(bindings) == 1 else tuple([one.room for one in bindings]),
        look.prefill,
        look.decode,
        look.why,
        look.predicted_tokens,
        None,
        look.directory,
        look.sides if bindings else (),
        look.silent,
        _traceparent(ask) if ask.headers else "",
        steps,
        steps[1],
        opened_at,
        decode.inflight_tokens,
        decode.inflight_requests,
        prefill.inflight_tokens,
        prefill.inflight_requests,
    )


def refused(ask: Ask) -> Meeting:
    """The same of one for which nobody could be chosen."""
    told = _traceparent(ask)
    return Meeting(ask.request_id, 1, ask.path, ask.model, (), None, None, None, traceparent=told)


def _traceparent(ask: Ask) -> str:
    """As the client sent it, where it sent one that could be meant."""
    value = dict(reversed(ask.headers)).get(b"traceparent", b"")  # the first of a name counts
    return value.decode("latin-1") if len(value) <= TRACEPARENT_BYTES else ""
