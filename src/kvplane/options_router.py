"""Router options: what a gateway can be told, and what it shares with other commands.

Pure: Keys, under sgl router's names where it has them. options.py puts the commands together,
parts.py makes settings of the values. Open it to add a flag of the gateway.
"""

from __future__ import annotations

from kvplane.options_kinds import (
    Key,
    address,
    credential,
    limit,
    number,
    one_of,
    port,
    redis_url,
    seconds,
    switch,
    text,
    whole,
)

POLICIES = (
    "prefix", "cache_aware", "prefix_hash", "power_of_two", "least_loaded",
    "consistent_hash", "round_robin", "random",
)  # fmt: skip
LEVELS = ("debug", "info", "warning", "error")

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
READERS = Key("changes_readers", whole(1, 100_000), 1000, "readers of /changes; more get 429")
LOG = one_of("log_level", LEVELS, "info", "how much to log")
LOG_FORM = one_of("log_format", ("text", "json"), "text", "how a line of the log is written")
SHARE = number(0, 1, "a share from 0 to 1, like 0.2")
TIMES = number(1, 100, "a factor from 1 to 100, like 1.5")
RATE = number(0.001, 1e6, "requests a second above 0, like 50")

ROUTING: tuple[Key, ...] = (
    one_of("policy", POLICIES, None, "how both are chosen; else prefix and least_loaded"),
    one_of("prefill_policy", POLICIES, None, "overrides --policy for prefill"),
    one_of("decode_policy", POLICIES, None, "overrides --policy for decode"),
    Key("block_size", whole(1, 4096), None, "tokens a block, where neither engine nor events tell"),
    Key("pd_disaggregation", switch, False, "changes nothing: pairs are made wherever they can be"),
)
FAILING: tuple[Key, ...] = (
    Key("request_timeout_secs", seconds, 1800.0, "longest life of a request"),
    Key("first_byte_timeout_secs", seconds, 600.0, "longest wait for a stream to begin"),
    Key("retry_max_retries", whole(0, 20), 2, "further attempts before the first byte"),
    Key("retry_initial_backoff_ms", whole(1, 60_000), 50, "wait before the second attempt"),
    Key("retry_max_backoff_ms", whole(1, 600_000), 5000, "longest wait before an attempt"),
    Key("retry_backoff_multiplier", TIMES, 1.5, "each wait is this much longer than the last"),
    Key("retry_jitter_factor", SHARE, 0.2, "share of a wait that is left to chance, either way"),
    Key("disable_retries", switch, False, "one attempt; another where a kept connection was dead"),
    Key("cb_failure_threshold", whole(1), 10, "faults in a row that open a worker's circuit"),
    Key("cb_success_threshold", whole(1), 3, "good probes that close it again"),
    Key("cb_timeout_duration_secs", seconds, 60.0, "pause before an open circuit is probed"),
    Key("cb_window_duration_secs", seconds, 120.0, "older faults do not count"),
    Key("disable_circuit_breaker", switch, False, "no circuit ever opens"),
    Key("health_check_interval_secs", seconds, 5.0, "between two health checks of a worker"),
    Key("health_check_timeout_secs", seconds, 3.0, "longest wait for one answer to them"),
    Key("health_failure_threshold", whole(1, 1000), 3, "failures in a row before it leaves"),
    Key("health_success_threshold", whole(1, 1000), 2, "successes in a row before it is back"),
    Key("watch_directories", switch, True, "use only prefills whose rank directory answers"),
    Key("drain_timeout_secs", seconds, 1800.0, "a deleted worker may finish what it has this long"),
)
ADMITTING: tuple[Key, ...] = (
    Key("max_concurrent_requests", limit, -1, "more have to wait; -1 = no limit"),
    Key("queue_size", whole(0), 100, "requests that may wait for a place; more get 429"),
    Key("queue_timeout_secs", seconds, 60.0, "longest such wait; then 503"),
    Key(
        "rate_limit_tokens_per_second", RATE, None, "requests a second over all keys; more get 429"
    ),
    Key("max_payload_size", whole(1, 2**40), 512 * 2**20, "bytes of a request body; more get 413"),
    Key("max_payload_total", whole(1, 2**44), 4 * 2**30, "of all at once; more get 503"),
    Key("max_header_size", whole(1024, 2**24), 64 * 2**10, "bytes of a request's head; then 431"),
    Key("api_key", credential, "", "key that inference needs; engines get it too"),
    Key("tenant_secret", text, "", "makes the salts of tenants unguessable"),
    Key("admin_key", credential, "", "key that admin needs when not on loopback"),
)
ROUTER_KEYS: tuple[Key, ...] = (
    HOST,
    Key("port", port, 8000, "port to listen on"),
    *ROUTING,
    *FAILING,
    *ADMITTING,
    Key("prometheus_port", port, None, "a second port for /metrics"),
    Key("spans", switch, False, "each attempt as OpenTelemetry spans; needs kvplane[otel]"),
    READERS,
    TOKENIZER,
    RECALL,
    LOG,
    LOG_FORM,
)
