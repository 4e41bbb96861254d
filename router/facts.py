"""Facts: what a choice looks like in headers, in the ledger, and as load.

Pure. Helpers of gateway.py: each turns an Ask and a Choice into one thing that is shown or booked.
Open it to change a header, a line of the ledger, or how much load a request is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvplane.vocabulary import Binding, Epoch, Knowledge

from .blame import Side
from .choice import BYTES_PER_TOKEN, Choice
from .errors import GatewayError
from .handoffs import HANDOFFS, way
from .meeting import Meeting
from .plans import Prompt
from .request import Ask
from .target import Target

BOOTSTRAP_PORT = 8998  # SGLang's default, where neither flags nor the engine tell
ANSWER_TOKENS = 128  # an answer's share of decode load where the client sets no limit
CHARS_PER_TOKEN = 32  # no text worth tokenising has more on average
TELLING = frozenset({"kvplane"})  # engines that have GET /rooms/{room}
TRACEPARENT_BYTES = 256  # of version 00: 55
MOST_SHOWN = 128  # rooms in a header: 2.5 kB, which every client and proxy takes; 4096 are 81 kB

HeaderList = list[tuple[bytes, bytes]]


def pair_tokens(choice: Choice) -> int:
    """The context of a pair: the shorter of both; 0 where neither says."""
    targets = [target for target in (choice.prefill, choice.decode) if target is not None]
    return min((t.up.max_tokens for t in targets if t.up.max_tokens), default=0)


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


def load_tokens(ask: Ask, choice: Choice, side: Side) -> int:
    """Prefill: what it has to compute. Decode: all it has to keep. A unified worker: what it has
    to compute, for what it holds already costs it nothing."""
    prompt = choice.prompt_tokens or len(ask.raw) // BYTES_PER_TOKEN
    if side is Side.PREFILL:
        return max(1, prompt - choice.depth.predicted)
    wanted = ask.body.get("max_completion_tokens") or ask.body.get("max_tokens") or ANSWER_TOKENS
    computed = prompt if choice.prefill is not None else max(0, prompt - choice.depth.predicted)
    return computed + int(wanted) * ask.samples


def headers(ask: Ask, choice: Choice, bindings: Sequence[Binding]) -> HeaderList:
    """What every inference answer carries."""
    depth, holder, decode = choice.depth, choice.holder.name, choice.decode.name
    found = [
        (b"x-request-id", ask.request_id.encode()),
        (b"x-kvplane-prefill", holder.encode("latin-1", "replace")),
        (b"x-kvplane-decode", decode.encode("latin-1", "replace")),
        (b"x-kvplane-depth", b"%d/%d" % (depth.blocks, depth.asked)),
        (b"x-kvplane-knowledge", choice.knowledge.encode()),
    ]
    if bindings:
        found += _rooms(bindings)
    if choice.knowledge is not Knowledge.EXACT:
        found.append((b"x-kvplane-reason", _one_line(choice.reason).encode("latin-1", "replace")))
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


def meeting(ask: Ask, choice: Choice, bindings: Sequence[Binding], number: int) -> Meeting:
    """The ledger's line of one attempt."""
    triple, prefill = None, None
    both: tuple[Target, ...] = (choice.decode,)
    if choice.prefill is not None:
        prefill, both = _side(choice.prefill, choice.prefill_epoch), (choice.decode, choice.prefill)
        if bindings and HANDOFFS[way(choice.prefill.up)].directory:  # else nobody looks there
            triple = bindings[0].triple
    return Meeting(
        request_id=ask.request_id,
        attempt=number,
        path=ask.path,
        model=ask.model or choice.holder.model,
        rooms=tuple(binding.room for binding in bindings),
        prefill=prefill,
        decode=_side(choice.decode, choice.decode_epoch),
        why=_why(choice),
        predicted_tokens=choice.depth.predicted if choice.prompt_tokens else None,
        triple={"host": triple.host, "port": triple.port} if triple else None,
        sides=tuple([one for one in both if one.up.engine in TELLING]) if bindings else (),
        silent=tuple({one.up.engine for one in both if one.up.engine not in TELLING}),
        traceparent=_traceparent(ask),
    )


def refused(ask: Ask) -> Meeting:
    """The same of one for which nobody could be chosen."""
    told = _traceparent(ask)
    return Meeting(ask.request_id, 1, ask.path, ask.model, (), None, None, {}, traceparent=told)


def _side(target: Target, epoch: Epoch | None) -> dict[str, Any]:
    return {
        "worker": str(target.worker),
        "url": target.url,
        "epoch": epoch,
        "inflight_tokens": target.inflight_tokens,  # when it was chosen
        "inflight_requests": target.inflight_requests,
    }


def _why(choice: Choice) -> dict[str, Any]:
    return {
        "depth_blocks": choice.depth.blocks,
        "asked_blocks": choice.depth.asked,
        "depth_tokens": choice.depth.tokens,
        "prompt_tokens": choice.prompt_tokens or None,
        "prefill_policy": choice.prefill_policy,
        "decode_policy": choice.decode_policy,
        "candidates": choice.candidates,
        "knowledge": str(choice.knowledge),
        "reason": choice.reason,
        "without_transfer": choice.alone or None,  # why no prefill took part, or none was of use
    }


def _traceparent(ask: Ask) -> str:
    """As the client sent it, where it sent one that could be meant."""
    for name, value in ask.headers:
        if name == b"traceparent" and len(value) <= TRACEPARENT_BYTES:
            return value.decode("latin-1")
    return ""


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]
