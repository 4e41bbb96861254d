"""Tokens: which token ids does a model see for this text or these messages?

Edge of the ground floor: reads a HuggingFace folder once; after that only computes. Router and
engine share it, so both see the same ids. Stands on seams.py alone. Open it to follow a change in
how engines turn messages into text; which prompts a body holds is router/prompts.py.

    folder: tokenizer.json  tokenizer_config.json  [chat_template.jinja]  [generation_config.json]
    messages --(sandboxed template)--> text --(tokenizers, outside the interpreter lock)--> ids
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as Encoder

from kvplane.seams import Seams, seams_of

# The library's own pool costs a single text a quarter more, and takes every core for a long one;
# how many threads tokenise is for those to say who call us.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

BUILTIN = Path(__file__).parent / "engine" / "tokenizer"  # the tiny engine's; id of a byte = byte
SPECIALS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token")


class TokensError(ValueError):
    """A folder, text or conversation that cannot become token ids; says which and why."""


class EncoderFailed(TokensError):
    """The tokenizer itself broke on a text: it lacks a token for what it does not know, or so."""


class Tokenizer:
    """Text and messages to ids and back, for one model. Safe to use from several threads."""

    def __init__(
        self, encoder: Encoder, config: Mapping[str, Any], now: Callable[[], datetime]
    ) -> None:
        encoder.no_truncation()  # some folders carry limits of their training
        encoder.no_padding()
        self._encoder = encoder
        self._specials = {name: _content(config.get(name)) for name in SPECIALS}
        self._templates = _templates(config.get("chat_template"), now)
        # Does a chat become the same text at any time?
        self.timeless = "strftime_now" not in json.dumps(config.get("chat_template"))
        self.vocab_size: int = encoder.get_vocab_size(with_added_tokens=True)
        self.eos_ids: frozenset[int] = frozenset(self._eos(config))

    @staticmethod
    def load(folder: str | Path, now: Callable[[], datetime] = datetime.now) -> Tokenizer:
        """The tokenizer of a folder, or of "builtin". Raises TokensError naming what is wrong."""
        root = BUILTIN if str(folder) == "builtin" else Path(folder)
        try:
            encoder = Encoder.from_file(str(_file(root, "tokenizer.json")))
        except TokensError:
            raise
        except Exception as error:  # the library raises bare Exception
            raise TokensError(f"{root / 'tokenizer.json'}: {error}") from error
        return Tokenizer(encoder, _config(root), now)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text; raises TokensError for text that is no Unicode (lone surrogates)."""
        return self.encode_many([text], add_special_tokens)[0]

    def encode_many(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Ids of several texts. The batch call is the one that lets other threads run. Raises as
        `encode` does, EncoderFailed where that is no fault of the texts."""
        try:
            found = self._encoder.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        except (UnicodeEncodeError, TypeError) as error:
            raise TokensError(f"text cannot be encoded: {error}") from error
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # bare Exception, or none where the library panics
            what = str(error) if isinstance(error, Exception) else "it panicked"  # shows no text
            raise EncoderFailed(f"tokenizer failed: {what}") from error
        return [encoding.ids for encoding in found]

    @cached_property
    def seams(self) -> Seams:
        """Where texts may be cut (recall.py). Worked out when first asked: half a second for a
        large vocabulary."""
        return seams_of(json.loads(self._encoder.to_str()))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids without special tokens; bytes that are no UTF-8 show as U+FFFD."""
        try:
            return str(self._encoder.decode(list(ids), skip_special_tokens=True))
        except (OverflowError, TypeError) as error:
            raise TokensError(f"token ids must be whole numbers of 0 or more: {error}") from error

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        extra: dict[str, Any] | None = None,
        joiner: str = "\n",
    ) -> str:
        """The text a chat becomes. `extra` = further variables of the template; `joiner` stands
        between the text parts of one message (vLLM: line break, SGLang: blank)."""
        named = self._templates.get("tool_use") if tools else None
        template, takes_parts = named or self._templates.get("default") or _missing()
        given = [_message(message, None if takes_parts else joiner) for message in messages]
        variables = {**self._specials, "tools": tools, "documents": None, **(extra or {})}
        try:
            text: str = template.render(
                variables, messages=given, add_generation_prompt=add_generation_prompt
            )
            return text
        except TokensError:
            raise
        except Exception as error:  # a template may raise whatever its expressions raise
            raise TokensError(f"chat template: {error}") from error

    def chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        extra: dict[str, Any] | None = None,
        joiner: str = "\n",
    ) -> list[int]:
        """Ids of a chat; the template writes its own special tokens."""
        text = self.render(messages, tools, add_generation_prompt, extra, joiner)
        return self.encode(text, add_special_tokens=False)

    def _eos(self, config: Mapping[str, Any]) -> set[int]:
        """End ids of the generation settings and of the tokenizer."""
        told = config.get("eos_token_id")
        ids = set(told if isinstance(told, list) else () if told is None else (told,))
        named = self._encoder.token_to_id(self._specials["eos_token"])
        return ids if named is None else ids | {named}


def _file(root: Path, name: str) -> Path:
    if not (root / name).is_file():
        raise TokensError(f"{root}: holds no {name}; must be a HuggingFace tokenizer folder")
    return root / name


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8")) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise TokensError(f"{path}: {error}") from error


def _config(root: Path) -> dict[str, Any]:
    """tokenizer_config.json, with the end ids and the template that have files of their own."""
    config = _read(root / "tokenizer_config.json")
    if not isinstance(config, dict):
        raise TokensError(f"{root / 'tokenizer_config.json'}: must be an object")
    ends = _read(root / "generation_config.json").get("eos_token_id")
    if ends is not None:
        config["eos_token_id"] = ends
    own = root / "chat_template.jinja"
    if own.is_file():
        config["chat_template"] = own.read_text("utf-8")
    elif "chat_template" not in config:
        config["chat_template"] = _read(root / "chat_template.json").get("chat_template")
    return config


def _content(token: object) -> str:
    """A special token's text; newer folders store it as an object."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")


def _missing() -> NoReturn:
    raise TokensError("this tokenizer's folder has no chat template")


# Templates --------------------------------------------------------------------------------------


def _templates(told: object, now: Callable[[], datetime]) -> dict[str, tuple[Any, bool]]:
    """Name -> (compiled template, does it walk over content parts itself?)."""
    named: list[Any] = told if isinstance(told, list) else [{"name": "default", "template": told}]
    texts = {str(item["name"]): str(item["template"]) for item in named if item.get("template")}
    environment = _environment(now)
    try:
        return {
            name: (environment.from_string(text), _walks_parts(environment.parse(text)))
            for name, text in texts.items()
        }
    except TemplateError as error:
        raise TokensError(f"chat template: {error}") from error


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    """The sandbox as HuggingFace's library sets it up, so that templates mean the same here."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    return environment


def _refuse(message: str) -> NoReturn:
    raise TokensError(f"chat template: {message}")


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja's own filter: no HTML escapes."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _walks_parts(tree: nodes.Template) -> bool:
    """True where a loop of the template goes over a message's content (OpenAI's part lists)."""
    names = {
        assign.target.name
        for assign in tree.find_all(nodes.Assign)
        if isinstance(assign.target, nodes.Name) and _is_content(assign.node)
    }
    return any(
        _is_content(loop.iter) or (isinstance(loop.iter, nodes.Name) and loop.iter.name in names)
        for loop in tree.find_all(nodes.For)
    )


def _is_content(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return isinstance(node, nodes.Getitem) and (
        isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    )


def _message(message: dict[str, Any], joiner: str | None) -> dict[str, Any]:
    """A message as engines give it to templates: text joined, call arguments as objects.

    `joiner` None leaves part lists as they are. Raises TokensError for parts that are no text.
    """
    given = dict(message)
    content = message.get("content")
    if content is None:
        given["content"] = ""
    elif isinstance(content, list) and joiner is not None:
        given["content"] = joiner.join(map(_text_of, content))
    if isinstance(message.get("tool_calls"), list):
        given["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    return given


def _text_of(part: object) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return str(part["text"])
    raise TokensError("content: every part must have a text")


def _call(call: object) -> object:
    """Clients send a call's arguments as JSON text; templates expect the object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return call
    return {**call, "function": {**function, "arguments": arguments}}
