"""Options: which commands there are and what each can be told.

Pure: one table of Keys per command; each Key knows how to read its own text. settings.py makes
the command line, environment and file from it. Open it to add a flag or a command.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Key:
    """One thing a command can be told: --name on the command line, KVPLANE_NAME, name in a file.

    `parse` raises ValueError whose text says what would be right.
    """

    name: str
    parse: Callable[[str], Any]
    default: Any
    help: str

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


@dataclass(frozen=True, slots=True)
class Command:
    """A word after `kvplane`: its sentence, its keys and its positional arguments."""

    help: str
    keys: tuple[Key, ...]
    positional: tuple[tuple[str, str], ...] = ()


def text(value: str) -> str:
    """Any text."""
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
            raise ValueError(f"must be a whole number, {least} to {most}")
        return int(value)

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


def choice(*words: str) -> Callable[[str], str]:
    """A reader of one of these words."""

    def read(value: str) -> str:
        if value not in words:
            raise ValueError(f"must be one of {', '.join(words)}")
        return value

    return read


def redis_url(value: str) -> str:
    """A Redis URL."""
    if not value.startswith(("redis://", "rediss://", "unix://")):
        raise ValueError("must be like redis://host:6379/0, rediss://… or unix:///path")
    return value


def http_url(value: str) -> str:
    """An http URL without a slash at its end."""
    if not value.startswith(("http://", "https://")):
        raise ValueError("must be like http://127.0.0.1:8000")
    return value.rstrip("/")


POLICIES = (
    "prefix", "cache_aware", "prefix_hash", "power_of_two", "least_loaded",
    "consistent_hash", "round_robin", "random",
)  # fmt: skip

HOST = Key("host", text, "127.0.0.1", "address to listen on")
REDIS = Key("redis", redis_url, None, "the shared index; without it the index is in memory")
PREFIX = Key("redis_prefix", text, "kvplane", "start of every Redis key")
SHARDS = Key("shards", whole(1, 1024), 1, "change streams of a new store; fixed at first use")
TOKENIZER = Key("tokenizer", text, "", "folder with tokenizer.json, or 'builtin'")
ADMIN_KEY = Key("admin_key", text, "", "key that admin writes need when not on loopback")
LOG = Key("log_level", choice("debug", "info", "warning", "error"), "info", "how much to log")

ROUTER_KEYS: tuple[Key, ...] = (
    HOST,
    Key("port", port, 8000, "port to listen on"),
    Key("policy", choice(*POLICIES), "prefix", "how a prefill is chosen"),
    Key("prefill_policy", choice(*POLICIES), None, "overrides --policy for prefill"),
    Key("decode_policy", choice(*POLICIES), "least_loaded", "how a decode is chosen"),
    Key("block_size", whole(1, 4096), None, "tokens a block, where neither engine nor events tell"),
    Key("request_timeout_secs", seconds, 1800.0, "longest life of a request"),
    Key("retry_max_retries", whole(0, 20), 2, "further attempts before the first byte"),
    Key("cb_failure_threshold", whole(1), 10, "faults in a row that open a worker's circuit"),
    Key("cb_success_threshold", whole(1), 3, "good probes that close it again"),
    Key("cb_timeout_duration_secs", seconds, 60.0, "pause before an open circuit is probed"),
    Key("health_check_interval_secs", seconds, 5.0, "between two health checks of a worker"),
    Key("max_concurrent_requests", whole(-1), -1, "more are answered 429; -1 = no limit"),
    Key("max_payload_size", whole(1, 2**40), 512 * 2**20, "bytes of a request body"),
    Key("api_key", text, "", "key that inference needs; none = open"),
    Key("prometheus_port", port, None, "a second port for /metrics"),
    TOKENIZER,
    ADMIN_KEY,
    LOG,
)
DEMO_KEYS = (
    Key("once", switch, False, "answer the chat, then end"),
    HOST,
    Key("port", port, 8000, "gateway's port; a free one where it is taken"),
    Key("log_level", choice("debug", "info", "warning", "error"), "warning", "how much to log"),
)
ENGINE_KEYS = (
    Key("role", choice("prefill", "decode", "both"), "both", "what it does with a request"),
    HOST,
    Key("port", port, 30000, "HTTP port"),
    Key("advertise_host", text, None, "address others reach it at, where --host is a wildcard"),
    Key("bootstrap_port", port, 8998, "port of a prefill's own rank directory"),
    Key("events_port", port, 5557, "ZMQ events of dp rank 0; rank r is r higher"),
    Key("replay_port", port, 5657, "ZMQ replay of dp rank 0; rank r is r higher"),
    Key("event_form", choice("vllm", "sglang"), "vllm", "whose form the events have"),
    Key("blocks", whole(4, 2**20), 512, "pages in the cache"),
    Key("block_size", whole(16, 16), 16, "tokens a page"),
    Key("model", text, "tiny", "served model name"),
    Key("context_length", whole(32, 2**17), 4096, "longest prompt with answer, tokens"),
    Key("tp", whole(1, 64), 1, "tensor ranks"),
    Key("pp", whole(1, 64), 1, "pipeline ranks"),
    Key("dp", whole(1, 64), 1, "data-parallel ranks, each a cache of its own"),
    Key("checksums", switch, True, "checksum of every page that moves; off only for tests"),
    Key("faults", switch, None, "serve POST /fault; on by default on loopback only"),
    LOG,
)
INGEST_KEYS = (
    REDIS,
    PREFIX,
    SHARDS,
    Key("block_size", whole(1, 4096), None, "tokens a block, where neither engine nor events tell"),
    Key("health_check_interval_secs", seconds, 5.0, "between two health checks of a worker"),
    HOST,
    Key("prometheus_port", port, None, "port of /metrics"),
    LOG,
)
INDEX_KEYS = (
    REDIS, PREFIX, HOST, Key("port", port, 8100, "port to listen on"), TOKENIZER, LOG,
)  # fmt: skip
BOOTSTRAP_KEYS = (HOST, Key("port", port, 8998, "port to listen on"), LOG)
URL = Key("url", http_url, "http://127.0.0.1:8000", "a gateway")
MODEL = Key("model", text, "", "model name; needed where the gateway serves several")
AFTER = Key("after", text, "", "cursor to go on from; none = from now on")

COMMANDS: dict[str, Command] = {
    "demo": Command("A whole plane with two prefill and two decode engines.", DEMO_KEYS),
    "all": Command("The whole plane in one process, index in memory.", ROUTER_KEYS),
    "bootstrap": Command("One rank directory, SGLang's wire protocol.", BOOTSTRAP_KEYS),
    "ingest": Command("Engines' events into the index.", INGEST_KEYS),
    "index": Command("Query and change API over the index.", INDEX_KEYS),
    "router": Command("The gateway.", (REDIS, PREFIX, SHARDS, *ROUTER_KEYS)),
    "engine": Command("One tiny real engine.", ENGINE_KEYS),
    "rank": Command(
        "Who holds the blocks of a prompt.", (URL, MODEL), (("prompt", "text of the prompt"),)
    ),
    "healthy": Command("Exit 0 if a URL answers 200; for health checks.", (), (("url", "what"),)),
    "tail": Command("Follow the changes.", (URL, AFTER)),
}
WORKER_COMMANDS = frozenset({"all", "ingest", "index", "router"})
NEEDS_REDIS = frozenset({"ingest", "index"})
