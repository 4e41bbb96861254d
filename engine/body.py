"""Body: what does this request want computed?

Door. Foreign JSON becomes Asks, one per prompt and sample; every wrong value is refused by name.
fields.py reads single values. Runs in a thread, since it tokenises. Open it to take another member
of a body, or to change a default. Sources: OpenAI's routes, SGLang's /generate and its triple.

    2 prompts, n 2, bootstrap_room [7, 8, 9, 10]     index 0 1 | 2 3     room 7 8 | 9 10
    2 prompts, n 1, bootstrap_room 7                 index 0   | 1       room 7   | 8
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from kvplane.tokens import Tokenizer, TokensError
from kvplane.vocabulary import MAX_ROOM, Room

from .asks import Ask, Call
from .errors import BadRequest, UnknownModel
from .fields import Fields
from .logprobs import wanted
from .settings import EngineSettings

MOST_RID = 200  # characters
CHARS_PER_TOKEN = 16  # more than the longest special token has; all others are one byte


IGNORED = {  # sampling members of OpenAI and SGLang: least, most
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}


class Reader:
    """Bodies of one engine."""

    def __init__(self, settings: EngineSettings, tokenizer: Tokenizer) -> None:
        self._settings = settings
        self._tokenizer = tokenizer

    def read(self, route: str, body: object, rid: str | None = None) -> Call:
        """Checked and tokenised; raises BadRequest or UnknownModel."""
        fields = Fields(body)
        model = fields.text("model")
        if model and model not in ("default", self._settings.model):
            raise UnknownModel(model, self._settings.model)
        prompts, batched = self._prompts(route, fields)
        sampling = self._sampling(route, fields)
        samples = sampling.whole("n", 1, 1, self._settings.most_samples) or 1
        count = len(prompts) * samples
        if count > self._settings.most_samples:
            most = self._settings.most_samples
            raise BadRequest("n", f"{len(prompts)} prompts x n {samples}: must be {most} or fewer")
        rid = _rid(fields.text("rid") or rid or uuid.uuid4().hex)  # as SGLang: the body names it
        triples = _triples(fields, count, len(prompts))
        asks = tuple(
            self._ask(route, fields, sampling, (index, *divmod(index, samples)), ids, triple)
            for index, triple in enumerate(triples)
            for ids in (prompts[index // samples],)
        )
        options = Fields(fields.table("stream_options"), "stream_options.")
        usage = options.flag("include_usage", False)
        return Call(route, rid, asks, fields.flag("stream", False), batched or samples > 1, usage)

    def ids(self, body: object) -> list[int]:
        """Token ids of POST /tokenize's body: {prompt} or {messages}."""
        fields = Fields(body)
        if "messages" in fields:
            return self._chat(fields)
        prompt = fields.text("prompt")
        if prompt is None:
            raise BadRequest("prompt", "must be a text; or give messages")
        self._short("prompt", prompt)
        try:
            return self._tokenizer.encode(prompt, fields.flag("add_special_tokens", True))
        except TokensError as error:
            raise BadRequest("prompt", str(error)) from error

    def _ask(
        self,
        route: str,
        fields: Fields,
        sampling: Fields,
        place: tuple[int, int, int],
        ids: Sequence[int],
        triple: tuple[Room | None, str | None, int | None],
    ) -> Ask:
        index, prompt, sample = place
        room, host, port = triple
        rank = fields.whole("routed_dp_rank", None, 0)
        return Ask(
            index=index,
            ids=tuple(ids),
            max_new=self._limit(route, sampling, len(ids)),
            prompt=prompt,
            sample=sample,
            stops=sampling.texts("stop"),
            ignore_eos=sampling.flag("ignore_eos", fields.flag("ignore_eos", False)),
            room=room,
            host=host,
            port=port,
            dp_rank=rank if rank is not None else fields.whole("data_parallel_rank", None, 0),
            prefill_dp_rank=fields.whole("disagg_prefill_dp_rank", None, 0),
            salt=fields.text("cache_salt") or "",
            wanted=wanted(route, fields, len(ids)),
        )

    def _sampling(self, route: str, fields: Fields) -> Fields:
        """Where max tokens, n and stops lie: SGLang nests them. What a greedy engine does not use
        must still be what it says it is."""
        found = fields
        if route == "generate":
            found = Fields(fields.table("sampling_params"), "sampling_params.")
        for name, (least, most) in IGNORED.items():
            found.number(name, least, most)
        return found

    def _limit(self, route: str, sampling: Fields, prompt: int) -> int:
        """Answer tokens. Raises BadRequest where prompt and answer are too long, with numbers."""
        names = {
            "generate": ("max_new_tokens",),
            "completions": ("max_tokens",),
            "chat": ("max_completion_tokens", "max_tokens"),
        }[route]
        context = self._settings.context_length
        if prompt >= context:
            raise BadRequest("prompt", f"{prompt} tokens: this model takes {context - 1} at most")
        for name in names:
            limit = sampling.whole(name, None, 1)
            if limit is not None:
                if prompt + limit > context:
                    said = f"{prompt} prompt tokens + {limit}: the context is {context} tokens"
                    raise BadRequest(sampling.path(name), said)
                return limit
        default = 16 if route == "completions" else self._settings.default_new_tokens
        return min(default, context - prompt)

    def _prompts(self, route: str, fields: Fields) -> tuple[list[list[int]], bool]:
        """Token ids of each prompt, and whether the body had a list of them."""
        if route == "chat":
            return [self._chat(fields)], False
        names = ("text", "input_ids") if route == "generate" else ("prompt",)
        given = [name for name in names if fields.get(name) is not None]
        if len(given) != 1:
            want = " or ".join(names)
            raise BadRequest(names[0], f"needs exactly one of {want}; {len(given)} were given")
        name, value = given[0], fields.get(given[0])
        many = isinstance(value, list) and not all(_is_id(item) for item in value)
        items: list[Any] = value if many else [value]
        if len(items) > self._settings.most_samples:
            most = self._settings.most_samples
            raise BadRequest(name, f"{len(items)} prompts: must be {most} or fewer")
        special = route == "generate" or fields.flag("add_special_tokens", True)
        read = [
            self._prompt(f"{name}[{at}]" if many else name, item, special)
            for at, item in enumerate(items)
        ]
        return read, many

    def _prompt(self, name: str, item: object, special: bool) -> list[int]:
        if isinstance(item, str):
            self._short(name, item)
            try:
                ids = self._tokenizer.encode(item, special)
            except TokensError as error:
                raise BadRequest(name, str(error)) from error
        elif isinstance(item, list) and all(_is_id(token) for token in item):
            ids = list(item)
        else:
            raise BadRequest(name, f"{name}: must be a text or a list of token ids")
        vocabulary = self._tokenizer.vocab_size
        for at, token in enumerate(ids):
            if not 0 <= token < vocabulary:
                raise BadRequest(name, f"{name}[{at}] = {token}: ids are 0 to {vocabulary - 1}")
        if not ids:
            raise BadRequest(name, f"{name}: must hold at least one token")
        return ids

    def _short(self, name: str, text: str) -> None:
        """Refuse what cannot fit before it is tokenised: that takes seconds a megabyte."""
        most = self._settings.context_length
        if len(text) > most * CHARS_PER_TOKEN:
            said = f"{len(text)} characters are more than this model takes: {most - 1} tokens"
            raise BadRequest(name, said)

    def _chat(self, fields: Fields) -> list[int]:
        messages = fields.get("messages")
        good = isinstance(messages, list) and all(isinstance(m, dict) for m in messages)
        if not good or not messages:
            raise BadRequest("messages", "messages: must be a list of one or more messages")
        for at, message in enumerate(messages):
            if not isinstance(message.get("role"), str):
                raise BadRequest(f"messages[{at}].role", f"messages[{at}].role: must be a text")
        tools = fields.get("tools")
        if tools is not None and not isinstance(tools, list):
            raise BadRequest("tools", "tools: must be a list")
        extra = fields.table("chat_template_kwargs")
        prompt = fields.flag("add_generation_prompt", True)
        try:
            text = self._tokenizer.render(messages, tools or None, prompt, dict(extra))
            self._short("messages", text)
            return self._tokenizer.encode(text, add_special_tokens=False)
        except TokensError as error:
            raise BadRequest("messages", f"messages: {error}") from error


def _rid(rid: str) -> str:
    """It goes back in a header: nothing else may."""
    if not (rid.isascii() and rid.isprintable() and len(rid) <= MOST_RID):
        raise BadRequest("rid", f"rid: must be printable ASCII, {MOST_RID} characters or fewer")
    return rid


def _triples(
    fields: Fields, count: int, prompts: int
) -> list[tuple[Room | None, str | None, int | None]]:
    """Room, host and port of each sample; a scalar room counts up, the others repeat."""
    rooms = _column(fields, "bootstrap_room", count, prompts, _room)
    if not isinstance(fields.get("bootstrap_room"), list):
        rooms = [None if room is None else _room(room + at) for at, room in enumerate(rooms)]
    if len({room for room in rooms if room is not None}) < len([r for r in rooms if r is not None]):
        raise BadRequest("bootstrap_room", "bootstrap_room: every sample needs a room of its own")
    hosts = _column(fields, "bootstrap_host", count, prompts, _host)
    ports = _column(fields, "bootstrap_port", count, prompts, _port)
    return [
        (None if room is None else Room(room), host, port)
        for room, host, port in zip(rooms, hosts, ports, strict=True)
    ]


def _column(fields: Fields, name: str, count: int, prompts: int, read: Any) -> list[Any]:
    value = fields.get(name)
    if not isinstance(value, list):
        return [None if value is None else read(value)] * count
    if len(value) != count:
        want = f"{count}, one per prompt and sample ({prompts} prompts x n {count // prompts})"
        raise BadRequest(name, f"{name}: {len(value)} values, must be {want}")
    return [None if item is None else read(item) for item in value]


def _room(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_ROOM:
        raise BadRequest("bootstrap_room", f"bootstrap_room = {value!r}: must be 1 to 2**63-1")
    return value


def _host(value: object) -> str:
    if not isinstance(value, str) or not value or value == "2.2.2.2":
        said = f"bootstrap_host = {value!r}: must be a name or address (not SGLang's fake 2.2.2.2)"
        raise BadRequest("bootstrap_host", said)
    return value.strip("[]")


def _port(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 65535:
        raise BadRequest("bootstrap_port", f"bootstrap_port = {value!r}: must be 1 to 65535")
    return value


def _is_id(item: object) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)
