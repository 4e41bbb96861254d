"""The benchmark's adapter answers as exact sets do, on a small fleet with sessions and holes."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from typing import Any

import pytest

ADAPTER = Path(__file__).parents[2] / "bench" / "index_adapter.py"


@pytest.fixture
def adapter() -> Any:
    spec = importlib.util.spec_from_file_location("index_adapter", ADAPTER)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Sessions:
    """Conversations that share system prompts; each block is a number, each prompt a path."""

    def __init__(self, seed: int) -> None:
        self.random, self.next = random.Random(seed), 1
        self.systems = [self.fresh(40) for _ in range(3)]
        self.prompts: list[list[int]] = []

    def fresh(self, count: int) -> list[int]:
        self.next += count
        return [number * 2654435761 % 2**64 for number in range(self.next - count, self.next)]

    def prompt(self) -> list[int]:
        if self.prompts and self.random.random() < 0.6:
            old = self.random.choice(self.prompts)
            prompt = old[: self.random.randrange(1, len(old) + 1)] + self.fresh(20)
        else:
            prompt = self.random.choice(self.systems) + self.fresh(50)
        self.prompts.append(prompt)
        return prompt


def depth(held: set[int], prompt: list[int]) -> int:
    return next((at for at, block in enumerate(prompt) if block not in held), len(prompt))


@pytest.mark.parametrize("holes", [False, True])
def test_depths_equal_those_of_plain_sets(adapter: Any, holes: bool) -> None:
    pods, sessions = 6, Sessions(11)
    index, held = adapter.Index(pods, 16), [set[int]() for _ in range(pods)]
    for _ in range(250):
        pod, prompt = sessions.random.randrange(pods), sessions.prompt()
        at = 0
        while at < len(prompt):  # engines tell a prompt in pieces
            piece = prompt[at : at + sessions.random.randrange(1, 64)]
            index.apply(index.event(pod, True, prompt[at - 1] if at else None, piece, piece))
            held[pod].update(piece)
            at += len(piece)
        gone = sessions.random.choice(sessions.prompts)[::-1][:30]
        if holes:
            gone = sessions.random.sample(gone, 3)
        index.apply(index.event(pod, False, None, gone, gone))
        held[pod].difference_update(gone)
        asked = sessions.random.choice(sessions.prompts) + sessions.fresh(3)
        found = index.find(index.query(asked, asked))
        wanted = {pod: depth(blocks, asked) for pod, blocks in enumerate(held)}
        assert found == {pod: depth for pod, depth in wanted.items() if depth}
