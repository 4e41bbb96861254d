"""What evidence and metrics cost: the same requests with them and without, in one run.

The whole way of a request through the gateway, but for sockets: engines answer at once. `pytest -s`
prints the figure.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
from kit.instant import ask, body, instant

from kvplane.router import facts
from kvplane.router.api import Api
from kvplane.router.evidence import Ledger, Meeting
from kvplane.router.remembered import Party, Why

ROUNDS, REQUESTS = 41, 30
MOST_MS = 0.05  # of CPU a request; the figure is 0.01, and a busy machine's caches are cold
BODY = body()


class Forgetful(Ledger):
    """Remembers nothing."""

    def add(self, meeting: Meeting) -> Meeting:
        return meeting

    def close(self, meeting: Meeting, outcome: str, error: dict[str, Any] | None = None) -> None:
        return


class Uncounted:
    """Metrics that count nothing, whatever they are called."""

    def __init__(self, registry: Any = None) -> None:
        self.registry, self.nothing = registry, Nothing()

    def __getattr__(self, name: str) -> Any:
        return self.nothing


class Nothing:
    """Counts nothing."""

    value = 0.0
    on_show: ClassVar[list[Any]] = []
    on_many: ClassVar[list[Any]] = []

    @property
    def of(self) -> Nothing:
        return self

    def __getitem__(self, given: Any) -> Nothing:
        return self

    def labels(self, *given: Any) -> Nothing:
        return self

    def __call__(self, *given: Any, **named: Any) -> None:
        return

    inc = observe = __call__


@contextlib.contextmanager
def blind(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """While inside, an attempt has no line of its own."""
    shared = Meeting("r", 1, "/generate", "tiny", (), None, Party("d1"), Why())
    with monkeypatch.context() as patch:
        patch.setattr(facts, "meeting", lambda *given: shared)
        patch.setattr(Meeting, "began", lambda self, now: None)
        yield


async def spent_ms(api: Api) -> float:
    """CPU of a request, over a round."""
    began = time.process_time()
    for _ in range(REQUESTS):
        assert await ask(api, BODY) == 200
    return (time.process_time() - began) / REQUESTS * 1000


async def test_evidence_and_metrics_cost_little_of_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with (
        instant(monkeypatch) as (dear, whole),
        instant(monkeypatch, Ledger=Forgetful, RouterMetrics=Uncounted) as (cheap, bare),
    ):
        arms: list[tuple[Api, Callable[[], Any], list[float]]] = [
            (dear, contextlib.nullcontext, []),
            (cheap, lambda: blind(monkeypatch), []),
        ]
        for number in range(ROUNDS):
            for api, scope, took in arms if number % 2 else arms[::-1]:
                with scope():
                    spent = await spent_ms(api)
                if number:  # the first one warms up
                    took.append(spent)
        assert len(whole.ledger) == ROUNDS * REQUESTS and len(bare.ledger) == 0
    both = [statistics.median(took) for _, _, took in arms]
    cost_ms = statistics.median(
        one - other for one, other in zip(arms[0][2], arms[1][2], strict=True)
    )
    sys.stdout.write(
        f"\nevidence and metrics: {cost_ms:.4f} ms CPU a request "
        f"(with {both[0]:.3f}, without {both[1]:.3f}, sockets apart)\n"
    )
    assert cost_ms < MOST_MS
