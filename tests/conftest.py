"""Fixtures of the whole suite: time that tests move, and a real Redis."""

from __future__ import annotations

import gc
import signal
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import _lru_cache_wrapper

import fastapi.dependencies.models
import pytest
from hypothesis import HealthCheck, settings
from kit.clock import FakeClock
from kit.redis import launched, real_redis

from kvplane.__main__ import LOOKS_WHILE_LOADING
from kvplane.runtime import spare_garbage_looks

gc.set_threshold(*LOOKS_WHILE_LOADING)  # until all is collected: what is imported stays

# A slow machine is no finding: an example has no deadline, a test has one (pytest-timeout). The
# examples of a tree are the same each time; `make soak` looks for others.
_PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("kvplane", _PATIENT, derandomize=True)
settings.register_profile("search", _PATIENT, max_examples=1000, print_blob=True)
settings.load_profile("kvplane")

# In the background of a shell it is ignored, which children inherit; the tests send it to them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The long files, the longest first; the others are many and short and fill the gaps at the end.
EARLY = (
    "tests/stories/",
    "tests/index/test_view.py",
    "tests/index/test_redis_",
    "tests/bench/",
    "tests/clients/",
    "tests/test_",
    "tests/engine/test_ranks.py",
    "tests/transfer/",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes or waits long goes first, so that the workers of `make test` end together."""
    items.sort(key=_place)


def pytest_collection_finish() -> None:
    """Thousands of tests are no garbage: from here on as in a command that serves."""
    spare_garbage_looks()


@pytest.fixture(scope="module", autouse=True)
def _forgotten() -> Iterator[None]:
    """FastAPI remembers the functions of every app it saw, and so each gateway with all it held:
    hundreds of them make every look for garbage slow."""
    yield
    for one in vars(fastapi.dependencies.models).values():
        if isinstance(one, _lru_cache_wrapper):
            one.cache_clear()


def _place(item: pytest.Item) -> int:
    return next((at for at, name in enumerate(EARLY) if item.nodeid.startswith(name)), len(EARLY))


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """A real server for the session; shared, so keep to `redis_prefix`."""
    with real_redis() as url:
        yield url


@pytest.fixture(scope="session")
def redis_of() -> Iterator[Callable[[str], str]]:
    """URL of a Redis of a kind, one each for the session; shared too. Skips where there is none."""
    urls: dict[str, str] = {}
    with ExitStack() as stack:

        def of(kind: str) -> str:
            if kind not in urls:
                urls[kind] = stack.enter_context(launched(kind))
            return urls[kind]

        yield of


@pytest.fixture
def redis_prefix() -> str:
    """Keys of this test alone."""
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()
