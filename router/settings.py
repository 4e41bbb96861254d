"""Router settings: how long the gateway waits, how often it tries, whom it believes.

Pure: frozen dataclasses, one per file that reads them, and RouterSettings that holds them all.
wiring.py fills them from flags; names in brackets are sgl router's flags. Limits of engine legs are
in legs_settings.py. Open it to change a default or its reason.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """When a worker counts as healthy."""

    failures: int = 3  # in a row before it leaves; one slow answer under load is no death
    successes: int = 2  # in a row before it comes back; one may be luck


@dataclass(frozen=True, slots=True)
class ProbeSettings:
    """How engines are asked what they are and whether they live."""

    interval_s: float = 5.0  # between two checks of a living worker [--health-check-interval-secs]
    deadline_s: float = 3.0  # one call; a busy engine answers /health in milliseconds
    first_wait_s: float = 0.1  # before an engine that does not answer yet is asked again
    most_wait_s: float = 2.0  # longest such wait: an engine is found soon after it starts
    most_bytes: int = 4 * 1024 * 1024  # of one answer; server_info of a big engine is some 20 kB
    together: int = 64  # calls at once over all workers


@dataclass(frozen=True, slots=True)
class WatchSettings:
    """How the rank directories of prefills are looked at."""

    interval_s: float = 2.0  # between two looks at one that answers: a restart takes longer
    deadline_s: float = 2.0  # one look; a living directory answers in milliseconds
    failures: int = 2  # in a row before a prefill that was found is lost; one may be a blip
    first_wait_s: float = 0.25  # after a failure; doubles
    most_wait_s: float = 5.0  # where the address swallows calls
    most_wait_told_s: float = 1.0  # where it says no at once: asking is cheap


@dataclass(frozen=True, slots=True)
class PromptSettings:
    """How much tokenising may cost."""

    threads: int = 2  # tokenizers run outside the interpreter lock, so two keep two cores busy
    waiting: int = 256  # requests in tokenising at once; beyond, they go on without knowledge
    deadline_s: float = 5.0  # a prompt that takes longer is routed by load
    recall_bytes: int = 256 * 2**20  # texts and ids of what was asked before; 0 = none
    most_chars: int = 8 * 1024 * 1024  # longest text tokenised: 2 million tokens and more


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    """When a worker's circuit opens and closes."""

    faults: int = 10  # in a row, or in the window with `share` [--cb-failure-threshold]
    share: float = 0.5  # of all judged outcomes in the window that must be faults
    successes: int = 3  # probes in a row that close it [--cb-success-threshold]
    pause_s: float = 60.0  # open before the first probe [--cb-timeout-duration-secs]
    most_pause_s: float = 600.0  # the pause doubles with each failed probe up to this
    window_s: float = 120.0  # older outcomes do not count [--cb-window-duration-secs]
    probe_s: float = 300.0  # a probe nobody reported on gives its place back after this


@dataclass(frozen=True, slots=True)
class RetrySettings:
    """Another attempt before the first byte."""

    retries: int = 2  # attempts after the first [--retry-max-retries]
    first_wait_s: float = 0.05  # sgl router's; then times `factor`
    factor: float = 1.5
    most_wait_s: float = 5.0  # a client waits for its first token
    jitter: float = 0.2  # of the wait, either way, so that a burst does not come back as one
    budget_share: float = 0.2  # retries per request over time: a dead fleet is not asked threefold
    budget_most: float = 50.0  # retries that may be saved up, so that a quiet gateway may retry


@dataclass(frozen=True, slots=True)
class DriftSettings:
    """When the index and what engines find in their caches no longer agree."""

    window: int = 50  # comparisons remembered of one worker
    window_s: float = 600.0  # older ones do not count
    late: int = 10  # the alarm looks at the last of them, so that it is soon
    least: int = 5  # comparisons before there is an alarm
    wrong: int = 3  # of the late ones; an idle engine's late reset makes one wrong, and is no alarm
    alarm: float = 0.2  # share of tokens wrong; evictions on the way to an engine are less
    agree: int = 5  # right ones in a row that end it
    settle_s: float = 1.0  # before a wrong one is judged: the news may be on its way
    silent_s: float = 5.0  # without a batch, though enough is owed; batches take milliseconds
    silent_requests: int = 3  # served, and each must have stored blocks
    tick_s: float = 0.25  # between two looks
    tests_a_minute: int = 120  # requests tested for a cause; each hashes its prompt a few times
    most_waiting: int = 256  # requests waiting to be judged
    most_tokens: int = 262_144  # of their prompts together: hashing them is some 20 ms
    most_tested: int = 32_768  # tokens of a request that is tested: some 2 ms for each try


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """Everything router/ was told."""

    prefill_policy: str = "prefix"  # knowledge is what this plane is for
    decode_policy: str = "least_loaded"  # a decode's cost is its load; the KV comes over anyway
    request_timeout_s: float = 1800.0  # sgl router's; long generations are real
    block_size: int | None = None  # tokens a block where neither engine nor events tell
    most_body_bytes: int = 512 * 1024 * 1024  # sgl router's [--max-payload-size]
    most_requests: int = -1  # at once; -1 = no limit [--max-concurrent-requests]
    queue: int = 100  # requests that may wait for a place when there is a limit; sgl router's
    queue_s: float = 60.0  # longest such wait
    api_key: str = ""  # inference needs it; "" = open
    admin_key: str = ""  # admin writes need it when not from loopback
    tokenizer: str = ""  # folder or "builtin" for models that name none
    rooms_kept: int = 10_000  # evidence in memory: some 10 MB
    fleet: FleetSettings = field(default_factory=FleetSettings)
    probe: ProbeSettings = field(default_factory=ProbeSettings)
    watch: WatchSettings = field(default_factory=WatchSettings)
    prompts: PromptSettings = field(default_factory=PromptSettings)
    breaker: BreakerSettings = field(default_factory=BreakerSettings)
    retry: RetrySettings = field(default_factory=RetrySettings)
    drift: DriftSettings = field(default_factory=DriftSettings)
