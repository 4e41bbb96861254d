"""Request: is this a request we can route, and how many rooms does it need?

Pure: bytes and headers in, an Ask or a GatewayError out. api.py makes Asks, gateway.py follows
them. Only members the gateway itself reads are checked; everything else is the engine's business
and reaches it as it was sent.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any

import msgspec

from .errors import GatewayError, invalid
from .legs_wire import FORWARDED

MOST_SAMPLES = 128  # n; OpenAI's own limit
MOST_PROMPTS = 4096  # prompts in one list
MOST_ROOMS = 4096  # prompts x samples: each takes a room, and its number goes into a header
MOST_NAME = 1024  # characters of a model's name: refusals are remembered with it
LONG_BYTES = 256 * 1024  # a longer body is read in a thread: a million ids are not one step
CHAT = "/v1/chat/completions"
NATIVE = "/generate"  # SGLang's own route
MOST_COUNTED = 2**31
CONTENT = (str, list, type(None))  # of a message; a union made anew would cost as much as the rest
READ = msgspec.json.Decoder().decode
OURS = "kvplane-"  # how the names of requests begin that handoffs/ make
SANE_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")

Body = dict[str, Any]


class Ask(msgspec.Struct, frozen=True, gc=False):
    """One inference request, checked as far as the gateway reads it."""

    path: str
    raw: bytes
    body: Body
    request_id: str
    prompts: int = 1  # how many the body holds
    batched: bool = False  # a list of prompts, also of one
    samples: int = 1  # n
    headers: tuple[tuple[bytes, bytes], ...] = ()  # as they came, where one concerns an engine
    stream: bool = False  # does the client want server-sent events?
    model: str = ""  # as the client named it
    plain: bool = False  # a chat of texts alone, and of members that are USUAL


class _Message(msgspec.Struct, gc=False):
    """What is looked at of one that is text."""

    role: str
    content: str


class _Plain(msgspec.Struct, gc=False):
    """Of a plain chat: no less strict than all that is checked below."""

    messages: Annotated[list[_Message], msgspec.Meta(min_length=1)]
    model: Annotated[str, msgspec.Meta(max_length=MOST_NAME)] = ""
    stream: bool = False
    max_tokens: Annotated[int, msgspec.Meta(ge=0, le=MOST_COUNTED)] = 0
    max_completion_tokens: Annotated[int, msgspec.Meta(ge=0, le=MOST_COUNTED)] = 0


# Members that decide neither which tokens the engine sees, nor how many rooms there are, nor what
# it is sent beside them. With others a request is looked at member by member.
USUAL = frozenset(_Plain.__struct_fields__).union(
    ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos"),
    ("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "min_tokens"),
    ("user", "stream_options", "response_format", "logprobs", "top_logprobs"),
    ("metadata", "store", "service_tier"),
)


def parse(path: str, raw: bytes, request_id: str, headers: tuple[Any, ...] = ()) -> Ask:
    """An Ask of a body. Raises GatewayError (400) naming the member that is wrong."""
    try:
        body = READ(raw)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise _unreadable(error) from None
    if type(body) is not dict:
        raise GatewayError("invalid_request", f"body must be a JSON object, not {_kind(body)}")
    if FORWARDED.isdisjoint(dict(headers)):  # as most
        headers = ()
    if path == CHAT and body.keys() <= USUAL:
        try:
            told = msgspec.convert(body, _Plain)
        except msgspec.ValidationError:
            return _parsed(path, raw, body, request_id, headers)  # which says what is wrong
        return Ask(path, raw, body, request_id, 1, False, 1, headers, told.stream, told.model, True)
    return _parsed(path, raw, body, request_id, headers)


def _parsed(path: str, raw: bytes, body: Body, request_id: str, headers: tuple[Any, ...]) -> Ask:
    model, stream = named(body), body.get("stream")
    if stream is not None and stream is not True and stream is not False:
        raise invalid("stream", f"'stream' must be true or false, not {_kind(stream)}")
    if "max_tokens" in body:
        _counted(body, "max_tokens", 0)
    if "max_completion_tokens" in body:
        _counted(body, "max_completion_tokens", 0)
    prompts, batched = COUNTS[path](body)
    if prompts > MOST_PROMPTS:
        raise invalid("prompt", f"{prompts} prompts in one request; at most {MOST_PROMPTS}")
    if "extra_key" in body and not batched and path != NATIVE:
        _no_list(body)
    if "rid" in body:
        check_name(body)
    samples = _samples(path, body) if "n" in body or path == NATIVE else 1
    if prompts * samples > MOST_ROOMS:
        many = f"{prompts} prompts x n {samples}"
        raise invalid("n", f"{many}: at most {MOST_ROOMS} answers in one request")
    return Ask(
        path, raw, body, request_id, prompts, batched, samples, headers, stream is True, model
    )


def _no_list(body: Body) -> None:
    if isinstance(body["extra_key"], list):
        raise invalid("extra_key", "'extra_key' must be a string beside one prompt, not an array")


def named(body: Body) -> str:
    """The model's name, "" where there is none. Raises GatewayError (400)."""
    name = body.get("model")
    if name is None:
        return ""
    if not isinstance(name, str):
        raise invalid("model", f"'model' must be a string, not {_kind(name)}")
    if len(name) > MOST_NAME:
        raise invalid("model", f"'model' has {len(name)} characters: at most {MOST_NAME}")
    return name


def check_name(body: Body) -> None:
    """Raises GatewayError (400) for a name of the client's that is the beginning of ours, or begins
    as they do: SGLang ends all requests whose names begin with the one that is aborted, and does so
    whenever a client leaves, so that a `rid` of "" or "k" would end everybody's."""
    given = body.get("rid")
    for one in given if isinstance(given, list) else (given,):
        if isinstance(one, str) and (one.startswith(OURS) or OURS.startswith(one)):
            raise invalid("rid", f"'rid' must not be empty, begin with {OURS!r} or be part of it")


def routing_key(ask: Ask) -> str:
    """What consistent_hash sticks to: a routing key, else the user."""
    for name, value in ask.headers:
        if name == b"x-smg-routing-key":
            return value.decode("latin-1")
    user = ask.body.get("user")
    return user if isinstance(user, str) else ""


def sane_id(given: bytes | None, make: Callable[[], str]) -> str:
    """The client's request id where it is harmless in a header and a log, else a new one."""
    if given is None:
        return make()
    text = given.decode("latin-1")
    return text if SANE_ID.fullmatch(text) else make()


def _unreadable(error: Exception) -> GatewayError:
    if isinstance(error, RecursionError):
        return GatewayError("invalid_request", "body is nested too deeply")
    return GatewayError("invalid_request", f"body is no valid JSON: {error}")


def _kind(value: object) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean"}
    return names.get(type(value), "null" if value is None else "a number")


def _no(place: str, want: str, value: object) -> GatewayError:
    return invalid(place, f"'{place}' {want}, not {_kind(value)}")


def _counted(body: Body, name: str, least: int, most: int = MOST_COUNTED) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if type(value) is not int:  # true is none either
        raise invalid(name, f"'{name}' must be an integer, not {_kind(value)}")
    if not least <= value <= most:
        raise invalid(name, f"'{name}' is {value}: must be from {least} to {most}")
    return value


def _samples(path: str, body: Body) -> int:
    if path != NATIVE:
        return _counted(body, "n", 1, MOST_SAMPLES) or 1
    params = body.get("sampling_params")
    if params is None:
        return 1
    if isinstance(params, list):  # one per prompt; SGLang wants the same n in each
        params = params[0] if params else {}
    if not isinstance(params, dict):
        raise invalid(
            "sampling_params", f"'sampling_params' must be an object, not {_kind(params)}"
        )
    return _counted(params, "n", 1, MOST_SAMPLES) or 1


def _chat(body: Body) -> tuple[int, bool]:
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise invalid("messages", f"'messages' must be an array, not {_kind(messages)}")
    if not messages:
        raise invalid("messages", "'messages' is empty: at least one message is needed")
    for at, message in enumerate(messages):
        if not isinstance(message, dict):
            raise _no(f"messages[{at}]", "must be an object", message)
        if not isinstance(role := message.get("role"), str):
            raise _no(f"messages[{at}].role", "must be a string", role)
        if not isinstance(content := message.get("content"), CONTENT):
            raise _no(f"messages[{at}].content", "must be a string or an array of parts", content)
    return 1, False


def _completion(body: Body) -> tuple[int, bool]:
    return _texts(body.get("prompt"), "prompt")


def _generate(body: Body) -> tuple[int, bool]:
    given = [n for n in ("text", "input_ids", "input_embeds") if body.get(n) is not None]
    if len(given) != 1:
        raise invalid(
            given[1] if given else "text", "exactly one of 'text' and 'input_ids' is needed"
        )
    name = given[0]
    if name == "input_embeds":
        return 1, False
    value = body[name]
    if name == "text" and not isinstance(value, str) and _of(value, int):
        raise invalid("text", "'text' must be a string or an array of strings")
    if name == "input_ids" and (isinstance(value, str) or _of(value, str)):
        raise invalid("input_ids", "'input_ids' must be an array of token ids, or of such arrays")
    return _texts(value, name)


def _texts(value: object, name: str) -> tuple[int, bool]:
    """Text, token ids, or a list of either: how many prompts, and is it a list?"""
    if isinstance(value, str):
        return 1, False
    if not isinstance(value, list):
        raise invalid(name, f"'{name}' must be a string or an array, not {_kind(value)}")
    if not value:
        raise invalid(name, f"'{name}' is empty")
    if _of(value, int):
        _ids(value, name)
        return 1, False
    if _of(value, str):
        return len(value), True
    if _of(value, list):
        for at, ids in enumerate(value):
            if not ids or not _of(ids, int):
                raise invalid(
                    f"{name}[{at}]", f"'{name}[{at}]' must be an array of token ids, not empty"
                )
            _ids(ids, f"{name}[{at}]")
        return len(value), True
    raise invalid(name, f"'{name}' mixes kinds: all strings, all token ids, or all arrays of ids")


def _of(value: object, kind: type) -> bool:
    """A non-empty list of nothing but `kind`; true and false are no numbers."""
    return isinstance(value, list) and bool(value) and {type(item) for item in value} == {kind}


def _ids(ids: list[int], name: str) -> None:
    least, most = min(ids), max(ids)
    if least < 0 or most >= 2**32:
        wrong = least if least < 0 else most
        raise invalid(name, f"'{name}' has token id {wrong}: must be from 0 to 4294967295")


COUNTS: dict[str, Callable[[Body], tuple[int, bool]]] = {
    CHAT: _chat,
    "/v1/completions": _completion,
    NATIVE: _generate,
}
