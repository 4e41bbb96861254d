"""Router options: sgl router's names mean what they mean there, and each reaches its setting."""

from __future__ import annotations

from typing import Any

import pytest

from kvplane.options import COMMANDS
from kvplane.parts import router_settings
from kvplane.router import RouterSettings
from kvplane.router.breaker import Breaker, Outcome
from kvplane.settings import BadSetting, parser, resolve

# flag, value, where it goes, what arrives there
FLAGS: list[tuple[str, str, str, Any]] = [
    ("--policy", "round_robin", "prefill_policy", "round_robin"),
    ("--policy", "round_robin", "decode_policy", "round_robin"),
    ("--prefill-policy", "random", "prefill_policy", "random"),
    ("--decode-policy", "power_of_two", "decode_policy", "power_of_two"),
    ("--request-timeout-secs", "9", "request_timeout_s", 9.0),
    ("--first-byte-timeout-secs", "8", "first_byte_s", 8.0),
    ("--retry-max-retries", "4", "retry.retries", 4),
    ("--retry-initial-backoff-ms", "200", "retry.first_wait_s", 0.2),
    ("--retry-max-backoff-ms", "900", "retry.most_wait_s", 0.9),
    ("--retry-backoff-multiplier", "3", "retry.factor", 3.0),
    ("--retry-jitter-factor", "0.1", "retry.jitter", 0.1),
    ("--cb-failure-threshold", "7", "breaker.faults", 7),
    ("--cb-success-threshold", "8", "breaker.successes", 8),
    ("--cb-timeout-duration-secs", "11", "breaker.pause_s", 11.0),
    ("--cb-window-duration-secs", "12", "breaker.window_s", 12.0),
    ("--health-check-interval-secs", "13", "probe.interval_s", 13.0),
    ("--health-check-timeout-secs", "14", "probe.deadline_s", 14.0),
    ("--health-failure-threshold", "15", "fleet.failures", 15),
    ("--health-success-threshold", "16", "fleet.successes", 16),
    ("--max-concurrent-requests", "17", "admission.most_requests", 17),
    ("--queue-size", "18", "admission.queue", 18),
    ("--queue-timeout-secs", "19", "admission.queue_s", 19.0),
    ("--rate-limit-tokens-per-second", "20", "admission.requests_per_s", 20.0),
    ("--max-payload-size", "21", "admission.most_body_bytes", 21),
    ("--max-payload-total", "22", "admission.most_held_bytes", 22),
    ("--api-key", "k23", "admission.api_key", "k23"),
    ("--tenant-secret", "s24", "admission.tenant_secret", "s24"),
    ("--admin-key", "k25", "admin_key", "k25"),
    ("--drain-timeout-secs", "26", "drain_s", 26.0),
    ("--block-size", "27", "block_size", 27),
    ("--tokenizer", "builtin", "tokenizer", "builtin"),
]


PARSER = parser()


def settings(*argv: str, **environ: str) -> RouterSettings:
    return router_settings(resolve(vars(PARSER.parse_args(["all", *argv])), environ, {}))


def member(found: Any, path: str) -> Any:
    for name in path.split("."):
        found = getattr(found, name)
    return found


@pytest.mark.parametrize(("flag", "value", "path", "arrives"), FLAGS)
def test_a_flag_and_its_environment_reach_their_setting(
    flag: str, value: str, path: str, arrives: Any
) -> None:
    assert member(settings(), path) != arrives
    assert member(settings(flag, value), path) == arrives
    name = "KVPLANE_" + flag[2:].upper().replace("-", "_")
    assert member(settings(**{name: value}), path) == arrives


def test_without_flags_the_gateway_is_as_its_settings_say() -> None:
    assert settings() == RouterSettings()


def test_what_can_be_switched_off() -> None:
    assert settings("--disable-retries").retry.retries == 0
    breaker = Breaker(settings("--disable-circuit-breaker").breaker)
    for _ in range(10_000):
        ticket = breaker.admit(0.0)
        assert ticket is not None
        breaker.book(ticket, Outcome.FAULT, 0.0)


def test_a_command_line_of_sgl_router_is_understood() -> None:
    """The flags its own PD examples use."""
    line = [
        "router", "--pd-disaggregation", "--policy", "cache_aware",
        "--prefill", "http://10.0.0.1:30000", "8998", "--prefill", "http://10.0.0.2:30000", "none",
        "--decode", "http://10.0.0.3:30000", "--decode", "http://10.0.0.4:30000",
        "--host", "0.0.0.0", "--port", "8000", "--prometheus-port", "29000",
    ]  # fmt: skip
    found = resolve(vars(PARSER.parse_args(line)), {}, {})
    assert [str(one.role) for one in found.workers] == ["prefill", "prefill", "decode", "decode"]
    assert (found["prometheus_port"], found["policy"]) == (29000, "cache_aware")


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (("--max-concurrent-requests", "-2"), "max_concurrent_requests = '-2' (flag"),
        (("--max-concurrent-requests", "0"), "= '0' (flag --max-concurrent-requests): must be"),
        (("--queue-size", "-1"), "must be a whole number, 0 to"),
        (("--retry-jitter-factor", "2"), "must be a share from 0 to 1, like 0.2"),
        (("--retry-backoff-multiplier", "0.5"), "must be a factor from 1 to 100, like 1.5"),
        (("--rate-limit-tokens-per-second", "nan"), "must be requests a second above 0, like 50"),
        (("--rate-limit-tokens-per-second", "x"), "must be requests a second above 0, like 50"),
        (("--max-header-size", "10"), "max_header_size = '10' (flag --max-header-size): must be"),
        (("--max-payload-size", "1MB"), "must be a whole number, 1 to"),
    ],
)
def test_a_wrong_value_names_what_is_right(argv: tuple[str, ...], named: str) -> None:
    with pytest.raises(BadSetting) as refused:
        settings(*argv)
    assert named in str(refused.value)


def test_router_and_all_are_told_the_same_but_for_what_is_shared() -> None:
    router, everything = ({key.name for key in COMMANDS[one].keys} for one in ("router", "all"))
    assert everything <= router
    assert router - everything == {"redis", "redis_prefix", "shards", "evidence_secs"}
