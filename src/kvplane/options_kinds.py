"""Kinds of options: how a value is read, and what is said where it cannot be meant.

Pure: text in, a value or a ValueError out, whose text says what would be right. options.py and its
tables are made of these. Open it to add a kind of value.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

CURSOR = re.compile(r"[0-9a-f-]{1,40}\.[0-9]{1,19}")  # one shard: where its stream is, which entry


@dataclass(frozen=True, slots=True)
class Key:
    """One thing a command can be told: --name on the command line, KVPLANE_NAME, name in a file.

    `parse` raises ValueError whose text says what would be right.
    """

    name: str
    parse: Callable[[str], Any]
    default: Any
    help: str
    words: tuple[str, ...] = ()  # where only these are right, --help lists them

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def is_switch(self) -> bool:
        return self.parse is switch

    def shown(self) -> str:
        """The default as --help shows it."""
        if self.default is None or self.default == "":
            return "none"
        if isinstance(self.default, bool):
            return "on" if self.default else "off"
        return str(self.default)


def text(value: str) -> str:
    """Any text."""
    return value


def sendable(value: str) -> str:
    """Text for a body of JSON: bytes of a command line that are no UTF-8 have no place there."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("must be UTF-8") from None
    return value


def named(value: str) -> str:
    """A name that can be told and asked for."""
    if not value.strip():
        raise ValueError("must be a name, not empty")
    return sendable(value)


def credential(value: str) -> str:
    """A key that can travel in a header as it is."""
    if not all("!" <= one <= "~" for one in value):
        raise ValueError("must be printable ASCII without blanks, as it travels in a header")
    return value


def cursor(value: str) -> str:
    """A place in a change stream, of whatever store; "" = from now on."""
    parts = value.split("_") if value else ()
    if not all(CURSOR.fullmatch(part) for part in parts):
        raise ValueError("must be the cursor of a change or of a snapshot, like 1796000000000-0.42")
    return value


def switch(value: str) -> bool:
    """true/false, 1/0, on/off, yes/no."""
    word = value.strip().lower()
    if word in ("1", "true", "on", "yes"):
        return True
    if word in ("0", "false", "off", "no"):
        return False
    raise ValueError("must be true or false")


def port(value: str) -> int:
    """A TCP port; 0 means any free one."""
    if not value.isdecimal() or int(value) > 65535:
        raise ValueError("must be a port, 0 to 65535 (0 = any free one)")
    return int(value)


def whole(least: int, most: int = 2**31) -> Callable[[str], int]:
    """A reader of whole numbers in a range."""

    def read(value: str) -> int:
        if not value.lstrip("-").isdecimal() or not least <= int(value) <= most:
            right = f"a whole number, {least} to {most}" if least < most else str(least)
            raise ValueError(f"must be {right}")
        return int(value)

    return read


def limit(value: str) -> int:
    """How many there may be; 0 would let nobody in, and only look like no limit."""
    try:
        found = whole(-1)(value)
    except ValueError:
        found = 0
    if not found:
        raise ValueError("must be a whole number of 1 or more, or -1 for no limit")
    return found


def number(least: float, most: float, want: str) -> Callable[[str], float]:
    """A reader of numbers in a range; `want` says which, with an example."""

    def read(value: str) -> float:
        try:
            found = float(value)
        except ValueError:
            found = float("nan")
        if not least <= found <= most:
            raise ValueError(f"must be {want}")
        return found

    return read


def seconds(value: str) -> float:
    """A duration above zero, in seconds."""
    try:
        found = float(value)
    except ValueError:
        found = 0.0
    if not 0 < found < 1e7:
        raise ValueError("must be seconds above 0, like 2.5")
    return found


def one_of(name: str, words: tuple[str, ...], default: str | None, help_: str) -> Key:
    """A key that takes one of these words."""

    def read(value: str) -> str:
        if value not in words:
            raise ValueError(f"must be one of {', '.join(words)}")
        return value

    return Key(name, read, default, help_, words)


def address(value: str) -> str:
    """A host to listen on; the empty one would mean every address there is."""
    if not value.strip():
        raise ValueError("must be an address like 127.0.0.1, or 0.0.0.0 for all of them")
    return value


def redis_url(value: str) -> str:
    """A URL of one Redis, of sentinels or of a cluster."""
    from kvplane.index import redis_address  # late: only who names a Redis waits for it

    redis_address(value)
    return value


def http_url(value: str) -> str:
    """An http URL without a slash at its end."""
    wrong = ValueError("must be like http://127.0.0.1:8000")
    scheme, host, _ = _parts(value, wrong)
    if scheme not in ("http", "https") or not host:
        raise wrong
    return value.rstrip("/")


def _parts(url: str, wrong: ValueError) -> tuple[str, str, str]:
    """(scheme, host, path); raises `wrong` for a port or host that cannot be read."""
    try:
        found = urlsplit(url)
        _ = found.port
    except ValueError:
        raise wrong from None
    return found.scheme, found.hostname or "", found.path
