"""Question: what does somebody who asks POST /rank want to know?

Pure: a body in, a checked Question or BadValue out; then chains per block size. desk.py answers it.
Open it to accept another way of naming a prompt.

    {model, token_ids | prompt | messages | block_hashes, adapter?, salt?, workers?, items?}

    items   [{"id": "sha-of-image", "start": 17, "length": 576}]     where content lies whose tokens
            are placeholders; a block that one reaches into is another block    hashing.py

Hashes and tokens may come packed as well, 8 and 4 bytes each, little-endian, and nothing else in
the body; then the query string has the rest: ?model=M&adapter=A&workers=a&workers=b@1. A salt is in
the hashes; tokens of a prompt that has one, or items, come in JSON.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any
from urllib.parse import parse_qs

import msgspec
from msgspec.structs import replace

from kvplane.vocabulary import BlockHash, Namespace, PrefixChain, Worker

from .errors import BadValue
from .hashing import Tokens, chain, from_hex
from .numerals import Memory, numerals
from .spans import Span, cut, hexes, numbers

PACKED = "application/vnd.kvplane.hashes"  # content type; clients call any bytes octet-stream
PACKED_TOKENS = "application/vnd.kvplane.tokens"
WAYS = ("token_ids", "prompt", "messages", "block_hashes")
_MISSING = re.compile(r"missing required field `(.+?)` - at `\$\.?(.*)`$")
MOST_CHARS = 3 * 4096  # of model, adapter and salt together
MOST_ITEMS = 4096  # images, sounds and the like of one prompt
_FAULT = re.compile(r"Expected `(.+)`, got `.+?`(?: - at `\$\.?(.*)`)?$")
# Bodies whose long list is read many elements at once: shorter ones are read before that has begun,
# and of longer ones the plain way holds up nobody (desk.py).
AT_ONCE_BYTES = range(8 * 1024, 256 * 1024)


class Item(msgspec.Struct, frozen=True):
    """Content that lies under placeholder tokens: which, from which token on, how many."""

    id: str
    start: int
    length: int


class _Body(msgspec.Struct):
    """As the wire has it; other members belong to the tokenizer."""

    model: str = ""
    token_ids: list[int] | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    block_hashes: list[str] | None = None
    adapter: str = ""
    salt: str = ""
    workers: list[str] | None = None
    items: list[Item] | None = None


class Question(msgspec.Struct, frozen=True):
    """A prompt as tokens, hashes, or as text that is not tokenised yet (`text`: the raw body)."""

    model: str
    adapter: str
    salt: str
    workers: tuple[Worker, ...] | None
    tokens: Tokens | None = None
    hashes: tuple[BlockHash, ...] | None = None
    text: Mapping[str, Any] | None = None
    items: tuple[Item, ...] = ()


_body = msgspec.json.Decoder(_Body)


def read(data: bytes, most_hashes: int, memory: Memory | None = None) -> Question:
    """Of a JSON body. Raises BadValue naming the member, what it was and what would be right."""
    return framed(data, most_hashes, memory)[0]


def framed(data: bytes, most_hashes: int, memory: Memory | None) -> tuple[Question, Span | None]:
    """The same, and where its list is, if that was read at once: frames.py."""
    body, row, span = _parts(data, memory)
    ways = body.token_ids, body.prompt, body.messages, body.block_hashes
    if ways.count(None) != len(WAYS) - 1:
        given = [name for name, way in zip(WAYS, ways, strict=True) if way is not None]
        shown = " and ".join(given) or "nothing"
        raise BadValue("token_ids", shown, f"exactly one of {', '.join(WAYS)}")
    _short(body)
    if not body.model and body.block_hashes is None:
        raise BadValue("model", body.model, "the model's name")
    if body.messages is not None and not body.messages:
        raise BadValue("messages", [], "at least one message")
    workers, items = _workers(body.workers), _items(body) if body.items else ()
    tokens = hashes = text = None
    if body.block_hashes is not None:
        few(len(body.block_hashes if row is None else row), most_hashes)
        hashes = _hashes(body.block_hashes) if row is None else row
    elif body.token_ids is not None:
        tokens = body.token_ids if row is None else row
    else:
        text = _decode(data, msgspec.json.decode)  # all of it: a tokenizer's members too
    asked = Question(body.model, body.adapter, body.salt, workers, tokens, hashes, text, items)
    return asked, span


def read_packed(data: bytes, query: str, most_hashes: int) -> Question:
    """Of a body that is hashes alone. Raises as `read` does."""
    _whole("block_hashes", data, 8)
    few(len(data) // 8, most_hashes)
    asked, _ = _address(query)
    return replace(asked, hashes=numbers(data, "little"))


def read_packed_tokens(data: bytes, query: str, most_hashes: int) -> Question:
    """Of a body that is token ids alone. Raises as `read` does."""
    _whole("token_ids", data, 4)
    asked, told = _address(query)
    if not asked.model:
        raise BadValue("model", asked.model, "the model's name, in the query string")
    for name in ("salt", "items"):
        if name in told:  # who overlooked it would rank another prompt
            raise BadValue(name, "the query string", "sent in JSON, with token_ids beside it")
    return replace(asked, tokens=data)


def _whole(field: str, data: bytes, each: int) -> None:
    if len(data) % each:
        want = f"packed u{8 * each}, so a multiple of {each} bytes"
        raise BadValue(field, f"{len(data)} bytes", want)


def _address(query: str) -> tuple[Question, Mapping[str, list[str]]]:
    """What a query string says beside a packed body, and all of it."""
    told = parse_qs(query, keep_blank_values=True) if query else {}
    model, adapter = (told.get(name, [""])[-1] for name in ("model", "adapter"))
    return Question(model, adapter, "", _workers(told.get("workers"))), told


def _short(body: _Body) -> None:
    """Refuses names that nobody can mean: they are remembered, some thousand of them."""
    if len(body.model) + len(body.adapter) + len(body.salt) > MOST_CHARS:
        for name in ("model", "adapter", "salt"):
            if len(value := getattr(body, name)) > MOST_CHARS // 3:
                raise BadValue(name, value, f"at most {MOST_CHARS // 3} characters")


def few(count: int, most: int) -> None:
    """Refuses more hashes than a process takes."""
    if count > most:
        raise BadValue("block_hashes", count, f"at most {most} hashes")


def _parts(data: bytes, memory: Memory | None) -> tuple[_Body, Any, Span | None]:
    """The body, and its long list where that is made of it at once: the body's own is empty then.
    What cannot be, or is wrong, is for the plain way."""
    if len(data) in AT_ONCE_BYTES and (parts := cut(data)) is not None:
        name, rest, first, last = parts
        tokens = name == "token_ids"
        row = numerals(data, first, last, memory) if tokens else hexes(data[first:last])
        if row is not None:
            with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                body = _body.decode(rest)
                if getattr(body, name) == []:
                    return body, row, (first, last)
    return _decode(data, _body.decode), None, None


def _decode(data: bytes, decode: Callable[[bytes], Any]) -> Any:
    try:
        return decode(data)
    except msgspec.ValidationError as error:
        if missing := _MISSING.search(str(error)):
            raise BadValue(f"{missing[2]}.{missing[1]}", None, "given") from None
        found = _FAULT.search(str(error))
        path = (found[2] or "") if found else ""
        want = found[1].replace("`", "") if found else str(error)
        raise BadValue(path or "body", _at(data, path), want) from None
    except RecursionError:
        raise BadValue("body", data[:40], "a JSON object of fewer levels") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadValue("body", data[:40], f"a JSON object ({error})") from None


def _at(data: bytes, path: str) -> Any:
    """The value at a path like `token_ids[3]`; or how a body begins that is broken, or names a
    member twice and is wrong in the first."""
    try:
        value = msgspec.json.decode(data)
        for step in re.findall(r"\w+", path):
            value = value[int(step) if isinstance(value, list) else step]
    except (msgspec.DecodeError, RecursionError, LookupError, TypeError, ValueError):
        return data[:40]
    return value


def _workers(names: list[str] | None) -> tuple[Worker, ...] | None:
    if names is None:
        return None
    found = []
    for at, name in enumerate(names):
        try:
            found.append(Worker.parse(name))
        except ValueError as error:
            raise BadValue(f"workers[{at}]", name, f"pod or pod@rank ({error})") from None
    return tuple(dict.fromkeys(found))


def _items(body: _Body) -> tuple[Item, ...]:
    """In order of the tokens, whatever order they were named in."""
    found = body.items or []
    if found and body.block_hashes is not None:
        raise BadValue("items", len(found), "left out: block_hashes have them already")
    if len(found) > MOST_ITEMS:
        raise BadValue("items", len(found), f"at most {MOST_ITEMS} items")
    for at, item in enumerate(found):
        if not item.id:
            raise BadValue(f"items[{at}].id", item.id, "the name of the content, as events have it")
        if item.start < 0:
            raise BadValue(f"items[{at}].start", item.start, "the index of a token, from 0")
        if item.length < 1:
            raise BadValue(f"items[{at}].length", item.length, "1 token or more")
    return tuple(sorted(found, key=lambda item: item.start))


def _hashes(texts: list[str]) -> tuple[BlockHash, ...]:
    many, joined = len(texts), " ".join(texts)
    # All at once is a tenth of one by one. Each has 16 letters where every 17th is a blank; hex
    # passes blanks by, so with others among them there are too few bytes.
    if joined[16::17] == " " * (many - 1) and len(joined) == 17 * many - (many > 0):
        with suppress(ValueError):
            packed = bytes.fromhex(joined)
            if len(packed) == 8 * many:
                return numbers(packed, "big")
    found = []
    for at, text in enumerate(texts):
        try:
            found.append(from_hex(text))
        except BadValue as error:
            raise BadValue(f"block_hashes[{at}]", text, error.want) from None
    return tuple(found)


def chains(
    asked: Question, sizes: Collection[int], named: Callable[..., PrefixChain] = chain
) -> dict[int, PrefixChain]:
    """One chain for each block size in use; hashes that were given are the chain of every size.
    `named` gives tokens their names: hashing.chain(), or one that remembers (chains.py)."""
    found, hashes, tokens, items = dict[int, PrefixChain](), asked.hashes, asked.tokens, asked.items
    if items and tokens is not None:
        _fit(items, len(tokens))
    try:
        for size in sizes:
            space = _space(asked.model, size, asked.adapter, asked.salt)
            if hashes is not None:
                found[size] = PrefixChain(space, hashes, len(hashes) * size)
            else:
                assert tokens is not None, "text is tokenised before it is hashed"
                found[size] = named(tokens, space, extra(items, size) if items else None)
        return found
    except BadValue as error:
        field = error.field.replace("tokens", "token_ids", 1)
        raise BadValue(field, error.value, error.want) from None


_space = lru_cache(maxsize=1024)(Namespace)  # the same one again is found sooner where it is a key


def _fit(items: tuple[Item, ...], tokens: int) -> None:
    """Raises BadValue for an item that ends beyond the prompt, or for far too many tokens."""
    for item in items:
        if item.start + item.length > tokens:
            where = f"{item.start} + {item.length}"
            raise BadValue(f"items of {item.id[:40]!r}", where, f"within the {tokens} tokens")
    if sum(item.length for item in items) > 4 * tokens:  # a sound may lie under a film, not more
        raise BadValue("items", len(items), "items that hardly overlap")


def extra(items: Collection[Item], block_size: int) -> dict[int, list[str]]:
    """Texts of the blocks that items reach into, as events of engines have them.

    item "a", start 6, length 4, blocks of 4 -> {1: ["a@2"], 2: ["a@-2"]}
    """
    found: dict[int, list[str]] = {}
    for item in items:
        for at in range(item.start // block_size, (item.start + item.length - 1) // block_size + 1):
            found.setdefault(at, []).append(f"{item.id}@{item.start - at * block_size}")
    return found
