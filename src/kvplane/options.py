"""Options: which commands there are and what each can be told.

Pure: one table of Keys per command; each Key knows how to read its own text. settings.py makes
the command line, environment and file from it. Open it to add a flag or a command.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


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


@dataclass(frozen=True, slots=True)
class Command:
    """A word after `kvplane`: its sentence, its keys and its positional arguments."""

    help: str
    keys: tuple[Key, ...]
    positional: tuple[Key, ...] = ()


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
            right = f"a whole number, {least} to {most}" if least < most else str(least)
            raise ValueError(f"must be {right}")
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


def _one_of(name: str, words: tuple[str, ...], default: str | None, help_: str) -> Key:
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


POLICIES = (
    "prefix", "cache_aware", "prefix_hash", "power_of_two", "least_loaded",
    "consistent_hash", "round_robin", "random",
)  # fmt: skip

BACKENDS = ("tcp", "mooncake", "nixl", "fake", "mori", "ascend")  # the engine says which can run

HOST = Key("host", address, "127.0.0.1", "address to listen on")
REDIS = Key(
    "redis",
    redis_url,
    None,
    "the shared index: redis:// rediss:// unix:// redis+sentinel:// redis+cluster://; without it "
    "the index is in memory",
)
NEEDED_REDIS = Key("redis", redis_url, None, "the shared index, redis://host:6379/0; needed")
PREFIX = Key("redis_prefix", text, "kvplane", "start of every Redis key")
SHARDS = Key(
    "shards", whole(1, 1024), None, "change streams; fixed at the store's first use, then 1 if none"
)
TOKENIZER = Key("tokenizer", text, "", "folder with tokenizer.json, or 'builtin'")
RECALL = Key("recall_mb", whole(0, 2**20), 256, "MiB of prompts remembered; 0 = none")
ADMIN_KEY = Key("admin_key", text, "", "key that admin writes need when not on loopback")
READERS = Key("changes_readers", whole(1, 100_000), 1000, "readers of /changes; more get 429")
LEVELS = ("debug", "info", "warning", "error")
LOG = _one_of("log_level", LEVELS, "info", "how much to log")

ROUTER_KEYS: tuple[Key, ...] = (
    HOST,
    Key("port", port, 8000, "port to listen on"),
    _one_of("policy", POLICIES, "prefix", "how a prefill is chosen"),
    _one_of("prefill_policy", POLICIES, None, "overrides --policy for prefill"),
    _one_of("decode_policy", POLICIES, "least_loaded", "how a decode is chosen"),
    Key("block_size", whole(1, 4096), None, "tokens a block, where neither engine nor events tell"),
    Key("request_timeout_secs", seconds, 1800.0, "longest life of a request"),
    Key("retry_max_retries", whole(0, 20), 2, "further attempts before the first byte"),
    Key("cb_failure_threshold", whole(1), 10, "faults in a row that open a worker's circuit"),
    Key("cb_success_threshold", whole(1), 3, "good probes that close it again"),
    Key("cb_timeout_duration_secs", seconds, 60.0, "pause before an open circuit is probed"),
    Key("health_check_interval_secs", seconds, 5.0, "between two health checks of a worker"),
    Key("watch_directories", switch, True, "use only prefills whose rank directory answers"),
    Key("max_concurrent_requests", whole(-1), -1, "more are answered 429; -1 = no limit"),
    Key("max_payload_size", whole(1, 2**40), 512 * 2**20, "bytes of a request body"),
    Key("api_key", text, "", "key that inference needs; none = open"),
    Key("prometheus_port", port, None, "a second port for /metrics"),
    READERS,
    TOKENIZER,
    RECALL,
    ADMIN_KEY,
    LOG,
)
DEMO_KEYS = (
    Key("once", switch, False, "answer the chat, then end"),
    HOST,
    Key("port", port, 8000, "gateway's port; a free one where it is taken"),
    _one_of("log_level", LEVELS, "warning", "how much to log"),
)
WRITE_KEY = Key("write_key", text, "", "key that ranks need to register: Authorization: Bearer")
OPEN_WRITES = Key(
    "open_writes",
    switch,
    False,
    "let ranks and nodes of other hosts in without a key or certificate",
)
ENGINE_KEYS = (
    _one_of("role", ("prefill", "decode", "both"), "both", "what it does with a request"),
    HOST,
    Key("port", port, 30000, "HTTP port"),
    Key("advertise_host", text, None, "address others reach it at, where --host is a wildcard"),
    Key("bootstrap_port", port, 8998, "port of a prefill's own rank directory"),
    WRITE_KEY,
    OPEN_WRITES,
    _one_of("backend", BACKENDS, "tcp", "how KV travels; equal on both sides"),
    Key("events_port", port, 5557, "ZMQ events of dp rank 0; rank r is r higher"),
    Key("replay_port", port, 5657, "ZMQ replay of dp rank 0; rank r is r higher"),
    _one_of("event_form", ("vllm", "sglang"), "vllm", "whose form the events have"),
    Key("blocks", whole(4, 2**20), 512, "pages in the cache"),
    Key("block_size", whole(16, 16), 16, "tokens a page"),
    Key("model", text, "tiny", "served model name"),
    Key("context_length", whole(32, 2**17), 4096, "longest prompt with answer, tokens"),
    Key("tp", whole(1, 64), 1, "tensor ranks"),
    Key("pp", whole(1, 64), 1, "pipeline ranks"),
    Key("dp", whole(1, 64), 1, "data-parallel ranks, each a cache of its own"),
    _one_of(
        "load_balance_method",
        ("follow_bootstrap_room", "round_robin"),
        "follow_bootstrap_room",
        "dp rank of a room that names none; round_robin: the directory is told",
    ),
    Key("nnodes", whole(1, 64), 1, "processes that share out the ranks of one prefill"),
    Key("node_rank", whole(0, 63), 0, "which of them this is; 0 has the HTTP door"),
    Key("dist_init_addr", text, None, "host:port where node 0 gathers the others"),
    Key("checksums", switch, True, "checksum of every page that moves; off only for tests"),
    Key("faults", switch, None, "serve POST /fault; on by default on loopback only"),
    LOG,
)
INGEST_KEYS = (
    NEEDED_REDIS,
    PREFIX,
    SHARDS,
    Key("block_size", whole(1, 4096), None, "tokens a block, where neither engine nor events tell"),
    Key("health_check_interval_secs", seconds, 5.0, "between two health checks of a worker"),
    HOST,
    Key("prometheus_port", port, None, "port of /metrics"),
    LOG,
)
INDEX_KEYS = (
    NEEDED_REDIS,
    PREFIX,
    HOST,
    Key("port", port, 8100, "port to listen on"),
    READERS,
    TOKENIZER,
    RECALL,
    LOG,
)
BOOTSTRAP_KEYS = (
    HOST,
    Key("port", port, 8998, "port to listen on"),
    WRITE_KEY,
    OPEN_WRITES,
    Key("tls_cert", text, None, "certificate of this door, PEM; then it speaks https only"),
    Key("tls_key", text, None, "its private key, PEM"),
    Key("client_ca", text, None, "authority whose client certificates may write, PEM"),
    LOG,
)
URL = Key("url", http_url, "http://127.0.0.1:8000", "a gateway or an index service")
MODEL = Key("model", text, "", "model name; needed where not exactly one is served")
AFTER = Key("after", text, "", "cursor to go on from; none = from now on")
RECORDS = Key("json", switch, False, "the records themselves, a line of JSON each")

COMMANDS: dict[str, Command] = {
    "demo": Command("A whole plane with two prefill and two decode engines.", DEMO_KEYS),
    "all": Command("The whole plane in one process, index in memory.", ROUTER_KEYS),
    "bootstrap": Command("One rank directory, SGLang's wire protocol.", BOOTSTRAP_KEYS),
    "ingest": Command("Engines' events into the shared index.", INGEST_KEYS),
    "index": Command("Query and change API over the shared index.", INDEX_KEYS),
    "router": Command(
        "The gateway; with --redis any number of them.", (REDIS, PREFIX, SHARDS, *ROUTER_KEYS)
    ),
    "engine": Command("One tiny real engine on CPU.", ENGINE_KEYS),
    "rank": Command(
        "Who holds the blocks of a prompt.",
        (URL, MODEL),
        (Key("prompt", text, None, "text of the prompt"),),
    ),
    "healthy": Command(
        "Exit 0 if a URL answers 200; for health checks.",
        (),
        (Key("url", http_url, None, "what to ask"),),
    ),
    "tail": Command(
        "Follow the changes of the index, a line of words each.", (URL, AFTER, RECORDS)
    ),
}
WORKER_COMMANDS = frozenset({"all", "ingest", "index", "router"})
NEEDS_REDIS = frozenset({"ingest", "index"})
