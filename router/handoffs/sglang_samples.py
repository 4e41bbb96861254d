"""SGLang's samples: n > 1 as a list of equal prompts, which SGLang gives a room each.

Pure. Used by sglang.py. With prefill and decode apart SGLang clones one room into all samples of
a prompt, whatever it is sent, and they hang (sglang#30723, and its newest source that was read). A
list with one sample each has no such flaw, and its answers are the same, index by index. Open it
when a release of SGLang gives its samples rooms of their own.

    {"prompt": "a", "n": 3}           ->  {"prompt": ["a", "a", "a"]}
    {"text": ["a", "b"], n 2}         ->  {"text": ["a", "a", "b", "b"]}
    a chat                            ->  400: there is no list of chats
"""

from __future__ import annotations

import msgspec

from ..errors import GatewayError, invalid
from ..request import Ask

PROMPTS = ("prompt", "text", "input_ids")
EACH = (  # one for each prompt where they are lists: these would have to be told apart
    "image_data", "video_data", "audio_data", "modalities", "lora_path", "rid",
    "custom_logit_processor", "extra_key", "session_params",
)  # fmt: skip
WHY = (
    "SGLang gives all samples of one prompt one room, and they would hang with prefill and decode "
    "apart; send a request for each"
)

MOST_BYTES = 64 * 1024 * 1024  # of a body whose prompts are repeated

Raw = msgspec.Raw
Members = list[tuple[str, bytes]]
_TABLE = msgspec.json.Decoder(dict[str, Raw])
_LIST = msgspec.json.Decoder(list[Raw])


def refusal(ask: Ask) -> GatewayError | None:
    """Why these samples cannot be asked for."""
    if ask.samples == 1:
        return None
    if not any(name in ask.body for name in PROMPTS):
        return invalid("n", f"'n' is {ask.samples}: {WHY}")
    if len(ask.raw) * ask.samples > MOST_BYTES:
        text = f"{ask.samples} times a body of {len(ask.raw)} bytes is more than {MOST_BYTES} bytes"
        return invalid("n", f"'n': {text}; ask for fewer at a time")
    for name in EACH:
        if isinstance(ask.body.get(name), list):
            return invalid("n", f"'n' is {ask.samples} beside a list of '{name}': {WHY}")
    return None


def unrolled(ask: Ask) -> Members:
    """Members that take the place of the client's; none where there is one sample."""
    if ask.samples == 1:
        return []
    name = next((one for one in PROMPTS if ask.body.get(one) is not None), "")
    if not name:
        return []
    table = _TABLE.decode(ask.raw)
    prompts = _LIST.decode(table[name]) if ask.batched else [table[name]]
    members = [(name, _repeated(prompts, ask.samples))]
    if ask.path == "/generate":
        members.append(("sampling_params", _sampling(table["sampling_params"], ask.samples)))
    return members


def replaced(members: Members) -> tuple[str, ...]:
    """The client's members that go: n with its prompts."""
    names = tuple(name for name, _ in members)
    return (*names, "n") if set(names) & set(PROMPTS) else names


def _repeated(values: list[Raw], times: int) -> bytes:
    return msgspec.json.encode([value for value in values for _ in range(times)])


def _sampling(params: Raw, times: int) -> bytes:
    """Without n; where each prompt has its own, each of its samples has them too."""
    if bytes(params)[:1] == b"[":
        each = [Raw(_without_n(one)) for one in _LIST.decode(params)]
        return _repeated(each, times)
    return _without_n(params)


def _without_n(params: Raw) -> bytes:
    table = _TABLE.decode(params)
    table.pop("n", None)
    return msgspec.json.encode(table)
