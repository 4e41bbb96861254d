"""Router settings: how long the gateway waits, how often it tries, whom it believes.

Pure: frozen dataclasses, one per file that reads them, and RouterSettings that holds them all.
wiring.py fills them from flags; names in brackets are sgl router's flags. Limits of engine legs are
in legs_settings.py. Open it to change a default or its reason.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """When a worker counts as healthy, and how it gets its load."""

    failures: int = 3  # in a row before it leaves; one slow answer under load is no death
    successes: int = 2  # in a row before it comes back; one may be luck
    ramp_s: float = 10.0  # a worker that is new or back has its full share after this
    ramp_least: float = 0.1  # of its share at first: caches are cold, what failed may fail again
    stuck_requests: int = 3  # that wait at one worker; fewer may be one very long prompt
    stuck_s: float = 30.0  # without a sign of any of them before others are preferred


@dataclass(frozen=True, slots=True)
class ProbeSettings:
    """How engines are asked what they are and whether they live."""

    interval_s: float = 5.0  # between two checks of a living worker [--health-check-interval-secs]
    again_s: float = 1.0  # the same where something is wrong: who is back is soon known to be
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
    short_chars: int = 16 * 1024  # up to this a thread of its own: 4 ms, and never behind long ones
    waiting: int = 256  # of each kind in tokenising at once; more go on without knowledge
    deadline_s: float = 5.0  # a prompt that takes longer is routed by load
    recall_bytes: int = 256 * 2**20  # texts and ids of what was asked before; 0 = none
    most_chars: int = 8 * 1024 * 1024  # longest text tokenised: 2 million tokens and more


@dataclass(frozen=True, slots=True)
class SourceSettings:
    """How engines are asked for tokens, where a model's tokenizer is not here."""

    attempt_s: float = 1.0  # one question to one engine; it takes milliseconds, a busy one longer
    deadline_s: float = 3.0  # all questions of one request; then it is routed by load
    attempts: int = 2  # engines asked for one prompt
    together: int = 64  # requests that ask at once; beyond, they go on without knowledge
    most_texts: int = 16  # of a list: each is a question of its own (vLLM takes one at a time)
    most_chars: int = 2 * 1024 * 1024  # longer prompts would hold the engine's own loop up
    most_bytes: int = 16 * 1024 * 1024  # of one answer: 2 million ids
    aside_s: float = 5.0  # an engine that did not answer is not asked again before this
    without_s: float = 60.0  # nor one that has no such route
    remembered_bytes: int = 64 * 2**20  # answers, so that a prompt is asked for once; 0 = none


@dataclass(frozen=True, slots=True)
class SelfCheckSettings:
    """How our tokens are compared with those of each engine."""

    interval_s: float = 30.0  # between two comparisons
    again_s: float = 5.0  # after one that differed, so that a repair is soon seen
    deadline_s: float = 5.0  # a whole comparison: a few short prompts
    together: int = 8  # workers compared at once
    tick_s: float = 0.25  # between two looks at who is due; also how soon a newcomer is compared


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    """When a worker's circuit opens and closes."""

    faults: int = 10  # in a row, or in the window with `share` [--cb-failure-threshold]
    share: float = 0.5  # of all judged outcomes in the window that must be faults
    successes: int = 3  # probes in a row that close it [--cb-success-threshold]
    pause_s: float = 60.0  # open before the first probe [--cb-timeout-duration-secs]
    most_pause_s: float = 600.0  # the pause doubles with each failed probe up to this
    quick_s: float = 1.0  # the pause where its health is good, or nobody else is left; doubles too
    window_s: float = 120.0  # older outcomes do not count [--cb-window-duration-secs]
    probe_s: float = 60.0  # a probe that got no sign gives its place to another after this
    pair_faults: int = 3  # in a row of two workers together, nobody can tell whose: others meet


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
    unsettled_s: float = 5.0  # not judged at all after this: a store is known to be away after 2 s
    unnoticed_s: float = 10.0  # how late trouble is seen: a stopped ingest's beats count for 6 s
    rest_s: float = 15.0  # nothing wrong came: more than unnoticed trouble can be late by
    silent_s: float = 5.0  # without a batch, though enough is owed; batches take milliseconds
    silent_requests: int = 3  # served, and each must have stored blocks
    tick_s: float = 0.25  # between two looks
    tests_a_minute: int = 120  # requests tested for a cause; each hashes its prompt a few times
    most_waiting: int = 256  # requests waiting to be judged
    most_tokens: int = 262_144  # of their prompts together: hashing them is some 20 ms
    most_tested: int = 32_768  # tokens of a request that is tested: some 2 ms for each try


@dataclass(frozen=True, slots=True)
class KeySettings:
    """One API key: who has it, and what it may."""

    name: str  # what logs and metrics show: never the key
    digest: str  # SHA-256 of the key, hex: the key itself is kept nowhere
    tenant: str = ""  # whose blocks are kept apart from all others'; "" = nobody's
    requests_per_minute: float = 0.0  # 0 = no limit
    burst: int = 0  # requests at once after a quiet time; 0 = ten seconds' worth
    most_requests: int = -1  # at once; -1 = no limit of its own


@dataclass(frozen=True, slots=True)
class AdmissionSettings:
    """Who is let in, how many at once, and how much they may bring."""

    most_requests: int = -1  # at once; -1 = no limit [--max-concurrent-requests]
    queue: int = 100  # requests that may wait for a place where there is a limit [--queue-size]
    queue_s: float = 60.0  # longest such wait [--queue-timeout-secs]
    requests_per_s: float = 0.0  # of all keys; 0 = no limit [--rate-limit-tokens-per-second]
    most_body_bytes: int = 512 * 1024 * 1024  # of one request [--max-payload-size]
    most_held_bytes: int = 4 * 1024**3  # of all requests at once [--max-payload-total]
    body_s: float = 120.0  # a body must have come by then, and a second later per `body_pace`
    body_pace: int = 32 * 1024  # bytes a second: a long body over a thin line is no attack
    body_idle_s: float = 30.0  # between two parts of a body
    api_key: str = field(default="", repr=False)  # inference needs it; engines get it [--api-key]
    keys: tuple[KeySettings, ...] = ()  # further keys, [[keys]] of the file; engines never see them
    tenant_secret: str = field(default="", repr=False)  # makes tenants' salts unguessable


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """Everything router/ was told."""

    prefill_policy: str = "prefix"  # knowledge is what this plane is for
    decode_policy: str = "least_loaded"  # a decode's cost is its load; the KV comes over anyway
    request_timeout_s: float = 1800.0  # sgl router's; long generations are real
    first_byte_s: float = 600.0  # until a stream begins; a plain answer begins when it is whole
    block_size: int | None = None  # tokens a block where neither engine nor events tell
    admin_key: str = field(default="", repr=False)  # admin needs it when not from loopback
    drain_s: float = 1800.0  # a deleted worker may finish what it has this long
    tokenizer: str = ""  # folder or "builtin" for models that name none
    rooms_kept: int = 10_000  # evidence in memory: some 10 MB
    admission: AdmissionSettings = field(default_factory=AdmissionSettings)
    fleet: FleetSettings = field(default_factory=FleetSettings)
    probe: ProbeSettings = field(default_factory=ProbeSettings)
    watch: WatchSettings = field(default_factory=WatchSettings)
    prompts: PromptSettings = field(default_factory=PromptSettings)
    source: SourceSettings = field(default_factory=SourceSettings)
    self_check: SelfCheckSettings = field(default_factory=SelfCheckSettings)
    breaker: BreakerSettings = field(default_factory=BreakerSettings)
    retry: RetrySettings = field(default_factory=RetrySettings)
    drift: DriftSettings = field(default_factory=DriftSettings)
