"""Parts: what the processes of the plane are put together from.

Edge of the roof. Small adapters between packages that do not know each other; plane.py orders
them, wiring.py picks them. Open it to change what one package hears of another.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from prometheus_client import CollectorRegistry

from kvplane.events import Broadcast, EventsSettings, Subscriptions
from kvplane.index import Chains, MemoryStore, RedisStore, Store
from kvplane.router import (
    AdmissionSettings,
    BreakerSettings,
    Directories,
    FleetSettings,
    Gateway,
    GatewayError,
    KeySettings,
    ProbeSettings,
    Prompts,
    PromptSettings,
    RetrySettings,
    RouterSettings,
)
from kvplane.runtime import Clock
from kvplane.settings import Settings
from kvplane.vocabulary import Pod, WorkerUp

NEVER = 2**62  # faults that no circuit will see


HINT = ": name its folder (--tokenizer PATH)"


class Hall:
    """What discovery says reaches everybody who must know: subscriptions, prompts, fleet."""

    def __init__(
        self,
        clock: Clock,
        gateway: Gateway | None = None,
        prompts: Prompts | None = None,
        subscriptions: Subscriptions | None = None,
        directories: Directories | None = None,
    ) -> None:
        self._clock, self._gateway = clock, gateway
        self._prompts, self._subscriptions = prompts, subscriptions
        self._directories = directories

    async def up(self, worker: WorkerUp) -> None:
        """A pod serves: its events are followed before the first request can reach it."""
        if self._subscriptions is not None:
            await self._subscriptions.up(worker)
        if self._prompts is not None:
            self._prompts.learn(
                worker.model, worker.tokenizer, worker.engine, worker.pod, worker.adapters
            )
        if self._gateway is not None:
            self._gateway.fleet.up(worker, self._clock.now())
        if self._directories is not None:  # in the same step: no request in between
            self._directories.up(worker)

    async def down(self, pod: Pod) -> None:
        """A pod is gone: no request goes there, then what it held is cleared."""
        if self._gateway is not None:
            self._gateway.fleet.down(pod)
            self._gateway.forget(pod)
        if self._prompts is not None:
            self._prompts.forget(pod)
        if self._directories is not None:
            await self._directories.down(pod)
        if self._subscriptions is not None:
            await self._subscriptions.down(pod)

    def health(self, pod: Pod, well: bool, reason: str) -> bool:
        """One look at a pod. False where it should be looked at again soon."""
        if self._gateway is None:
            return well
        now = self._clock.now()
        self._gateway.fleet.mark_health(pod, well, now, reason)
        serves = self._gateway.fleet.healthy(pod)
        return well and serves and self._gateway.breakers.well(pod, now)


def store_of(told: Settings, clock: Clock, writes: bool) -> Store:
    """Redis where it is named, else this process's memory."""
    if told.values.get("redis") is None:
        return MemoryStore(clock)
    shards = told.values.get("shards")
    return RedisStore(told["redis"], told["redis_prefix"], shards, writes=writes)


def broadcast_of(
    told: Settings, store: Store, clock: Clock, registry: CollectorRegistry
) -> Broadcast:
    """The change stream of this process."""
    settings = EventsSettings(changes_readers=told["changes_readers"])
    return Broadcast(store, clock, settings, registry)


def router_settings(told: Settings) -> RouterSettings:
    """The gateway's settings out of its flags."""
    usual = RouterSettings()
    return RouterSettings(
        prefill_policy=told["prefill_policy"] or told["policy"] or usual.prefill_policy,
        decode_policy=told["decode_policy"] or told["policy"] or usual.decode_policy,
        request_timeout_s=told["request_timeout_secs"],
        first_byte_s=told["first_byte_timeout_secs"],
        block_size=told["block_size"],
        admin_key=told["admin_key"],
        drain_s=told["drain_timeout_secs"],
        tokenizer=told["tokenizer"],
        admission=_admission(told),
        fleet=FleetSettings(told["health_failure_threshold"], told["health_success_threshold"]),
        probe=probe_settings(told),
        prompts=prompt_settings(told),
        breaker=_breaker(told),
        retry=_retry(told),
    )


def _admission(told: Settings) -> AdmissionSettings:
    return AdmissionSettings(
        most_requests=told["max_concurrent_requests"],
        queue=told["queue_size"],
        queue_s=told["queue_timeout_secs"],
        requests_per_s=told["rate_limit_tokens_per_second"] or 0.0,
        most_body_bytes=told["max_payload_size"],
        most_held_bytes=told["max_payload_total"],
        api_key=told["api_key"],
        keys=tuple(KeySettings(**asdict(one)) for one in told.keys),
        tenant_secret=told["tenant_secret"],
    )


def _breaker(told: Settings) -> BreakerSettings:
    never = told["disable_circuit_breaker"]
    return BreakerSettings(
        faults=NEVER if never else told["cb_failure_threshold"],
        successes=told["cb_success_threshold"],
        pause_s=told["cb_timeout_duration_secs"],
        window_s=told["cb_window_duration_secs"],
    )


def _retry(told: Settings) -> RetrySettings:
    return RetrySettings(
        retries=0 if told["disable_retries"] else told["retry_max_retries"],
        first_wait_s=told["retry_initial_backoff_ms"] / 1000,
        factor=told["retry_backoff_multiplier"],
        most_wait_s=told["retry_max_backoff_ms"] / 1000,
        jitter=told["retry_jitter_factor"],
    )


def probe_settings(told: Settings) -> ProbeSettings:
    """How engines are watched."""
    found = ProbeSettings(interval_s=told["health_check_interval_secs"])
    deadline_s = told.values.get("health_check_timeout_secs")
    return found if deadline_s is None else replace(found, deadline_s=deadline_s)


def prompt_settings(told: Settings) -> PromptSettings:
    """What tokenising may cost, and remember."""
    return PromptSettings(recall_bytes=told["recall_mb"] * 2**20)


def chains_of(told: Settings) -> Chains:
    """Names of what is remembered: they and their tokens need less than texts and tokens do."""
    return Chains(told["recall_mb"] * 2**20 // 4)


def with_block_size(workers: Sequence[WorkerUp], block_size: int | None) -> list[WorkerUp]:
    """Workers that name no block size get the one of --block-size."""
    if block_size is None:
        return list(workers)
    return [replace(one, block_size=one.block_size or block_size) for one in workers]


def tokenizing(
    prompts: Prompts,
) -> Callable[[Mapping[str, Any]], Awaitable[Sequence[int]]]:
    """What the index's POST /rank asks for a text: the gateway's own way, so both agree.

    Raises ValueError where it has no answer; its text never shows the prompt.
    """

    async def tokens(body: Mapping[str, Any]) -> Sequence[int]:
        path = "/v1/completions" if body.get("prompt") is not None else "/v1/chat/completions"
        try:
            found = await prompts.tokenise(path, dict(body), str(body.get("model", "")))
        except GatewayError as error:
            raise ValueError(error.message) from None
        if found.tokens is None:
            raise ValueError(found.why + (HINT if found.reason == "no_tokenizer" else ""))
        if len(found.tokens) != 1:
            raise ValueError("one prompt at a time")
        return found.tokens[0]

    return tokens
