"""Fixtures of tests about events: dialects that have met nothing strange yet.

A dialect tells each unknown name once per process, so a test would depend on those before it.
"""

from __future__ import annotations

import pytest

from kvplane.events import DIALECTS
from kvplane.events.dialects import mooncake, sglang, vllm


@pytest.fixture(autouse=True)
def fresh_dialects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test begins with readers of its own."""
    for made in (vllm.new(), sglang.new(), mooncake.new()):
        monkeypatch.setitem(DIALECTS, made.name, made)
