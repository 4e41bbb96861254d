"""Plans: what in this body is a prompt, and of which kind?

Pure. One function per route, in a table; prompts.py tokenises what a plan names. Only what decides
the ids is looked at. Open it to teach the gateway another kind of body.

    {"prompt": ["a", "b"]}    -> texts a, b         {"input_ids": [1, 2]} -> ids, nothing to do
    {"messages": [...]}       -> a chat             {"messages": [image]} -> reason multimodal
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from .errors import GatewayError

Body = dict[str, Any]
Reason = Literal[  # a closed set: it labels a metric
    "no_tokenizer", "broken_tokenizer", "multimodal", "embeddings", "template", "unsupported_route",
    "unsupported_member", "too_large", "busy", "slow", "not_unicode", "mixed_engines", "no_route",
    "engine_silent", "engine_refused", "self_check",
]  # fmt: skip
REASONS: dict[str, str] = {  # of a Prompt without tokens, as x-kvplane-reason shows them
    "no_tokenizer": "no tokenizer for this model at the gateway, and no engine to ask",
    "broken_tokenizer": "the gateway cannot load this model's tokenizer, and has no engine to ask",
    "multimodal": "prompt holds more than text",
    "embeddings": "prompt is embeddings",
    "template": "the chat template refused the messages",
    "unsupported_route": "prompts of this route are not tokenised",
    "unsupported_member": "a member changes the prompt in a way only the engine knows",
    "too_large": "prompt too long to be tokenised here",
    "busy": "tokenising is overloaded",
    "slow": "tokenising took too long",
    "not_unicode": "prompt is no valid text",
    "mixed_engines": "engines of two kinds serve this model and make other tokens of such a chat",
    "no_route": "no tokenizer for this model at the gateway, and its engines have no /tokenize",
    "engine_silent": "no tokenizer for this model at the gateway, and no engine answers /tokenize",
    "engine_refused": "the engine that was asked for the tokens refused the prompt",
    "self_check": "the engines make other tokens of such prompts than the gateway",
}
Kind = Literal["text", "chat", "tools", "parts"]
SHOWN = ("documents", "reasoning_effort")  # members that may reach a template
TEXT_PARTS = ("text", "input_text", "output_text")
MEDIA = frozenset(
    {"image_data", "video_data", "audio_data", "multi_modal_data", "mm_processor_kwargs"}
)
UNSEEN = frozenset(
    {"chat_template", "continue_final_message", "input_ids"}
)  # of a chat: only the engine knows
# Whatever else decides the ids of a chat; few bodies have any of it.
SELDOM = UNSEEN.union(
    SHOWN, ("tools", "tool_choice", "chat_template_kwargs", "add_generation_prompt")
)


class Prompt(msgspec.Struct, frozen=True, gc=False):
    """All prompts of one request. `tokens` is None where a reason says why."""

    tokens: tuple[Sequence[int], ...] | None  # packed, where they were tokenised here
    reason: Reason | None = None
    batched: bool = False  # a list of prompts, also of one
    adapter: str = ""  # named beside the model (SGLang's lora_path)
    salt: str = ""  # cache_salt (vLLM) or extra_key (SGLang): keeps equal prompts apart

    @property
    def why(self) -> str:
        """The reason as a sentence; "" where there are tokens."""
        return REASONS[self.reason] if self.reason else ""

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt; 0 where unknown."""
        return max(map(len, self.tokens or ((),)))

    @property
    def total(self) -> int:
        """Tokens of all prompts together; 0 where unknown."""
        tokens = self.tokens or ()
        return len(tokens[0]) if len(tokens) == 1 else sum(map(len, tokens))


class BadPrompt(GatewayError):
    """A member that cannot be a prompt: the caller's mistake."""

    def __init__(self, field: str, value: object, want: str) -> None:
        shown = reprlib.repr(value)  # short, whatever it holds
        super().__init__("invalid_request", f"'{field}' is {shown}: must be {want}", field)


class Plan(msgspec.Struct, frozen=True, gc=False):
    """What is to be tokenised: exactly one of ids, texts, messages or a reason."""

    ids: tuple[list[int], ...] | None = None
    texts: tuple[str, ...] = ()
    messages: list[Body] | None = None
    reason: Reason | None = None
    batched: bool = False
    special: bool = True  # add special tokens to texts
    tools: list[Body] | None = None
    open_turn: bool = True  # add_generation_prompt
    extra: Body | None = None
    choice: Any = None  # tool_choice: some engines show tools by it
    more: Body | None = None  # members of the body that some engines show their template

    @property
    def kind(self) -> Kind:
        """What is special about it: engines differ in how they render tools and parts."""
        if self.messages is None:
            return "text"
        if self.tools:
            return "tools"
        return "parts" if any(map(_is_joined, self.messages)) else "chat"

    @property
    def size(self) -> int:
        """Characters to be tokenised."""
        chars = _chars(self.messages) if self.messages is not None else 0
        for text in self.texts:
            chars += len(text)
        return chars


def plan(path: str, body: Body) -> Plan:
    """What a body of this route asks to be tokenised. Raises BadPrompt."""
    made = PLANS.get(path)
    if made is None:
        return Plan(reason="unsupported_route")
    if not MEDIA.isdisjoint(body) and any(body.get(name) for name in MEDIA):
        return Plan(reason="multimodal")
    return made(body)


def _chat(body: Body) -> Plan:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadPrompt("messages", messages, "a list of at least one message")
    media = False
    for message in messages:
        if not isinstance(message, dict):
            raise BadPrompt("messages", messages, "a list of objects")
        if type(content := message.get("content")) is not str:
            media = media or _has_media(content)
    if SELDOM.isdisjoint(body):
        return Plan(reason="multimodal") if media else Plan(messages=messages)
    if any(body.get(name) for name in UNSEEN):
        return Plan(reason="unsupported_member")
    if media:
        return Plan(reason="multimodal")
    tools, extra = body.get("tools"), body.get("chat_template_kwargs")
    if tools is not None and not isinstance(tools, list):
        raise BadPrompt("tools", tools, "a list of tools")
    if extra is not None and not isinstance(extra, dict):
        raise BadPrompt("chat_template_kwargs", extra, "an object")
    return Plan(
        messages=messages,
        tools=tools or None,
        open_turn=body.get("add_generation_prompt") is not False,
        extra=extra,
        choice=body.get("tool_choice"),
        more={name: body[name] for name in SHOWN if body.get(name) is not None} or None,
    )


def _completion(body: Body) -> Plan:
    if body.get("prompt_embeds") is not None:
        return Plan(reason="embeddings")
    if body.get("suffix"):
        return Plan(reason="unsupported_member")
    return _listed("prompt", body.get("prompt"), body.get("add_special_tokens") is not False)


def _generate(body: Body) -> Plan:
    if body.get("input_embeds") is not None:
        return Plan(reason="embeddings")
    name = "input_ids" if body.get("input_ids") is not None else "text"
    return _listed(name, body.get(name))


PLANS: dict[str, Callable[[Body], Plan]] = {
    "/v1/chat/completions": _chat,
    "/v1/completions": _completion,
    "/generate": _generate,
}


def _listed(name: str, value: object, special: bool = True) -> Plan:
    """Text, ids, or a list of either."""
    if isinstance(value, str):
        return Plan(texts=(value,), special=special)
    if isinstance(value, list) and value:
        kinds = {type(item) for item in value}
        if kinds == {str}:
            return Plan(texts=tuple(value), batched=True, special=special)
        if kinds == {int}:
            return Plan(ids=(_ids(name, value),))
        if kinds == {list}:
            return Plan(ids=tuple(_ids(name, item) for item in value), batched=True)
    raise BadPrompt(name, value, "text, token ids, or a list of either, not empty")


def _ids(name: str, ids: list[Any]) -> list[int]:
    if not ids or {type(one) for one in ids} != {int}:
        raise BadPrompt(name, ids, "a list of at least one token id")
    if min(ids) < 0 or max(ids) >= 2**32:
        raise BadPrompt(name, ids, "token ids from 0 to 4294967295")
    return ids


def _has_media(content: object) -> bool:
    return isinstance(content, list) and any(
        isinstance(part, dict) and part.get("type", "text") not in TEXT_PARTS for part in content
    )


def _is_joined(message: Body) -> bool:
    content = message.get("content")
    return isinstance(content, list) and len(content) > 1


def _chars(messages: list[Body]) -> int:
    found = 0
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            found += len(content)
            continue
        parts = content if isinstance(content, list) else [content]
        texts = (part.get("text") if isinstance(part, dict) else part for part in parts)
        found += sum(len(text) for text in texts if isinstance(text, str))
    return found
