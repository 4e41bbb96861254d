"""Options: which commands there are and what each can be told.

Pure: one table of Keys per command; options_kinds.py says how a value is read, options_router.py
has the gateway's. settings.py makes the command line, environment and file from it. Open it to add
a flag or a command.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvplane.options_kinds import (
    Key,
    credential,
    cursor,
    http_url,
    named,
    one_of,
    port,
    seconds,
    sendable,
    switch,
    text,
    whole,
)
from kvplane.options_router import (
    HOST,
    LEVELS,
    LOG,
    LOG_FORM,
    NEEDED_REDIS,
    PREFIX,
    READERS,
    RECALL,
    REDIS,
    ROUTER_KEYS,
    SHARDS,
    TOKENIZER,
)

BACKENDS = ("tcp", "mooncake", "nixl", "fake", "mori", "ascend")  # the engine says which can run


@dataclass(frozen=True, slots=True)
class Command:
    """A word after `kvplane`: its sentence, its keys and its positional arguments."""

    help: str
    keys: tuple[Key, ...]
    positional: tuple[Key, ...] = ()


DEMO_KEYS = (
    Key("once", switch, False, "answer the chat, then end"),
    HOST,
    Key("port", port, 8000, "gateway's port; a free one where it is taken"),
    one_of("log_level", LEVELS, "warning", "how much to log"),
)
WRITE_KEY = Key(
    "write_key", credential, "", "key that ranks need to register: Authorization: Bearer"
)
OPEN_WRITES = Key(
    "open_writes",
    switch,
    False,
    "let ranks and nodes of other hosts in without a key or certificate",
)
ENGINE_KEYS = (
    one_of("role", ("prefill", "decode", "both"), "both", "what it does with a request"),
    HOST,
    Key("port", port, 30000, "HTTP port"),
    Key("advertise_host", text, None, "address others reach it at, where --host is a wildcard"),
    Key("bootstrap_port", port, 8998, "port of a prefill's own rank directory"),
    WRITE_KEY,
    OPEN_WRITES,
    one_of("backend", BACKENDS, "tcp", "how KV travels; equal on both sides"),
    Key("events_port", port, 5557, "ZMQ events of dp rank 0; rank r is r higher"),
    Key("replay_port", port, 5657, "ZMQ replay of dp rank 0; rank r is r higher"),
    one_of("event_form", ("vllm", "sglang"), "vllm", "whose form the events have"),
    Key("blocks", whole(4, 2**20), 512, "pages in the cache"),
    Key("block_size", whole(16, 16), 16, "tokens a page"),
    Key("model", named, "tiny", "served model name"),
    Key("context_length", whole(32, 2**17), 4096, "longest prompt with answer, tokens"),
    Key("tp", whole(1, 64), 1, "tensor ranks"),
    Key("pp", whole(1, 64), 1, "pipeline ranks"),
    Key("dp", whole(1, 64), 1, "data-parallel ranks, each a cache of its own"),
    one_of(
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
    LOG_FORM,
)
INGEST_KEYS = (
    NEEDED_REDIS,
    PREFIX,
    SHARDS,
    Key("block_size", whole(1, 4096), None, "tokens a block, where neither engine nor events tell"),
    Key("health_check_interval_secs", seconds, 5.0, "between two health checks of a worker"),
    Key("api_key", credential, "", "key that engines want of who asks what they are"),
    HOST,
    Key("prometheus_port", port, None, "port of /metrics"),
    LOG,
    LOG_FORM,
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
    LOG_FORM,
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
    LOG_FORM,
)
URL = Key("url", http_url, "http://127.0.0.1:8000", "a gateway or an index service")
MODEL = Key("model", sendable, "", "model name; needed where not exactly one is served")
SALT = Key("salt", sendable, "", "cache_salt of the prompt; none = blocks that all may share")
AFTER = Key("after", cursor, "", "cursor to go on from; none = from now on")
EVIDENCE = Key(
    "evidence_secs",
    whole(0, 10**7),
    0,
    "with --redis: how long any gateway can tell of a room; 0 = only the one that had it",
)
DOCTOR_KEYS = (
    Key("url", http_url, None, "a gateway; http://127.0.0.1:8000 where flags name no workers"),
    Key("admin_key", credential, "", "the gateway's admin key, where it has one"),
    Key("api_key", credential, "", "the engines' key, where they have one"),
    TOKENIZER,
    one_of("log_level", LEVELS, "error", "how much to log"),
)
RECORDS = Key("json", switch, False, "the records themselves, a line of JSON each")

COMMANDS: dict[str, Command] = {
    "demo": Command("A whole plane with two prefill and two decode engines.", DEMO_KEYS),
    "all": Command("The whole plane in one process, index in memory.", ROUTER_KEYS),
    "bootstrap": Command("One rank directory, SGLang's wire protocol.", BOOTSTRAP_KEYS),
    "ingest": Command("Engines' events into the shared index.", INGEST_KEYS),
    "index": Command("Query and change API over the shared index.", INDEX_KEYS),
    "router": Command(
        "The gateway; with --redis any number of them.",
        (REDIS, PREFIX, SHARDS, EVIDENCE, *ROUTER_KEYS),
    ),
    "engine": Command("One tiny real engine on CPU.", ENGINE_KEYS),
    "rank": Command(
        "Who holds the blocks of a prompt.",
        (URL, MODEL, SALT),
        (Key("prompt", sendable, None, "text of the prompt"),),
    ),
    "healthy": Command(
        "Exit 0 if a URL answers 200; for health checks.",
        (),
        (Key("url", http_url, None, "what to ask"),),
    ),
    "doctor": Command(
        "What is wrong with a plane, or with engines; exit 1 if anything blocks.", DOCTOR_KEYS
    ),
    "tail": Command(
        "Follow the changes of the index, a line of words each.", (URL, AFTER, RECORDS)
    ),
}
WORKER_COMMANDS = frozenset({"all", "doctor", "ingest", "index", "router"})
NEEDS_REDIS = frozenset({"ingest", "index"})
