"""Facts: what a choice looks like in headers, in the ledger, and as load.

Pure. Helpers of gateway.py: each turns an Ask and a Choice into one thing that is shown or booked.
Open it to change a header, a line of the ledger, or how much load a request is.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from kvplane.vocabulary import Binding, Epoch, Knowledge

from .choice import BYTES_PER_TOKEN, Choice
from .errors import GatewayError
from .handoffs import HANDOFFS
from .meeting import Meeting
from .plans import Prompt
from .remembered import Party, Why
from .request import Ask
from .target import Target

BOOTSTRAP_PORT = 8998  # SGLang's default, where neither flags nor the engine tell
ANSWER_TOKENS = 128  # an answer's share of decode load where the client sets no limit
CHARS_PER_TOKEN = 32  # no text worth tokenising has more on average
TELLING = frozenset({"kvplane"})  # engines that have GET /rooms/{room}
TRACEPARENT_BYTES = 256  # of version 00: 55
MOST_SHOWN = 128  # rooms in a header: 2.5 kB, which every client and proxy takes; 4096 are 81 kB

Header = tuple[bytes, bytes]
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
    prompt = choice.prompt_tokens or len(ask.raw) // BYTES_PER_TOKEN
    left = prompt - choice.depth.predicted
    body = ask.body
    wanted = body.get("max_completion_tokens") or body.get("max_tokens") or ANSWER_TOKENS
    kept = prompt if choice.prefill is not None else left if left > 0 else 0
    return kept + int(wanted) * ask.samples, left if left > 0 else 1


def headers(ask: Ask, choice: Choice, bindings: Sequence[Binding]) -> HeaderList:
    """What every inference answer carries."""
    depth = choice.depth
    found = [
        (b"x-request-id", ask.request_id.encode()),
        *_pair(choice.holder.name, choice.decode.name),
        (b"x-kvplane-depth", b"%d/%d" % (depth.blocks, depth.asked)),
        *_known(choice.knowledge, choice.reason),
    ]
    if len(bindings) == 1:
        found.append((b"x-kvplane-room", b"%d" % bindings[0].room))
    elif bindings:
        found += _rooms(bindings)
    if ask.stream:
        found.append((b"x-accel-buffering", b"no"))  # proxies in front must not collect a stream
    return found


@lru_cache(4096)
def _pair(holder: str, decode: str) -> tuple[Header, ...]:
    return (
        (b"x-kvplane-prefill", holder.encode("latin-1", "replace")),
        (b"x-kvplane-decode", decode.encode("latin-1", "replace")),
    )


@lru_cache(1024)
def _known(knowledge: Knowledge, reason: str) -> tuple[Header, ...]:
    state = b"x-kvplane-knowledge", knowledge.encode()
    if knowledge is Knowledge.EXACT:
        return (state,)
    return state, (b"x-kvplane-reason", _one_line(reason).encode("latin-1", "replace"))


def _rooms(bindings: Sequence[Binding]) -> HeaderList:
    """All rooms, or the first of them and how many there are: GET /requests/{id} has them all."""
    shown = ",".join([str(binding.room) for binding in bindings[:MOST_SHOWN]])
    found = [(b"x-kvplane-room", shown.encode())]
    if len(bindings) > MOST_SHOWN:
        found.append((b"x-kvplane-rooms", b"%d" % len(bindings)))
    return found


def meeting(ask: Ask, choice: Choice, bindings: Sequence[Binding], number: int) -> Meeting:
    """The ledger's line of one attempt."""
    decode, prefill, model = choice.decode, choice.prefill, choice.holder.model
    met, directory = None, None
    sides: tuple[Target, ...] = ()
    if ask.model and ask.model != model:
        model = ask.model
    if prefill is not None:
        met = _party(prefill, choice.prefill_epoch)
        if bindings and HANDOFFS[prefill.way].directory:  # else nobody looks there
            directory = bindings[0].triple.host, bindings[0].triple.port
    silent, told = _silent(decode.up.engine, (prefill or decode).up.engine)
    if bindings and told:
        sides = tuple([t for t in (decode, prefill) if t is not None and t.up.engine in TELLING])
    return Meeting(
        ask.request_id,
        number,
        ask.path,
        model,
        (bindings[0].room,) if len(bindings) == 1 else tuple([one.room for one in bindings]),
        met,
        _party(decode, choice.decode_epoch),
        _why(choice),
        choice.depth.predicted if choice.prompt_tokens else None,
        directory=directory,
        sides=sides,
        silent=silent,
        traceparent=_traceparent(ask),
    )


def refused(ask: Ask) -> Meeting:
    """The same of one for which nobody could be chosen."""
    told = _traceparent(ask)
    return Meeting(ask.request_id, 1, ask.path, ask.model, (), None, None, None, traceparent=told)


@lru_cache(256)
def _silent(*makers: str) -> tuple[tuple[str, ...], bool]:
    """Those that tell no stages, each once; and does any tell them?"""
    silent = tuple([one for one in dict.fromkeys(makers) if one not in TELLING])
    return silent, any(one in TELLING for one in makers)


def _party(target: Target, epoch: Epoch | None) -> Party:
    """With its load as it was when it was chosen."""
    return Party(target.name, target.url, epoch, target.inflight_tokens, target.inflight_requests)


def _why(choice: Choice) -> Why:
    depth = choice.depth
    return Why(
        depth.blocks,
        depth.asked,
        depth.tokens,
        choice.prompt_tokens or None,
        choice.prefill_policy,
        choice.decode_policy,
        choice.candidates,
        choice.knowledge,
        choice.reason,
        choice.alone or None,
    )


def _traceparent(ask: Ask) -> str:
    """As the client sent it, where it sent one that could be meant."""
    value = dict(reversed(ask.headers)).get(b"traceparent", b"")  # the first of a name counts
    return value.decode("latin-1") if len(value) <= TRACEPARENT_BYTES else ""


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]
