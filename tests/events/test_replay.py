"""Replay: one question, one bounded answer, and a fleet's questions not all at once."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import zmq.asyncio
from kit.batches import payload, send, store
from kit.streams import QUICK, Publisher, number
from prometheus_client import CollectorRegistry

from kvplane.events import EventsMetrics
from kvplane.events.replay import Answer, Replays
from kvplane.runtime import SystemClock


class Watched(Publisher):
    """Counts questions that are answered at one time; each answer takes a while."""

    now = most = 0

    async def _serve(self) -> None:
        waiting: set[asyncio.Task[None]] = set()
        while True:
            asker, _, _ = await self._router.recv_multipart()
            self.now += 1
            self.most = max(self.most, self.now)
            task = asyncio.create_task(self._answer(asker))
            waiting.add(task)
            task.add_done_callback(waiting.discard)

    async def _answer(self, asker: bytes) -> None:
        await asyncio.sleep(0.01)
        self.now -= 1
        await self._router.send_multipart([asker, b"", b"", number(0), payload(store(1))])
        await self._router.send_multipart([asker, b"", b"", b"\xff" * 8, b""])


async def test_a_fleet_s_questions_are_asked_a_few_at_a_time() -> None:
    turns, metrics = asyncio.Semaphore(3), EventsMetrics(CollectorRegistry())
    context = zmq.asyncio.Context()
    try:
        async with Watched() as publisher:
            every = [
                Replays(context, publisher.replay, QUICK, SystemClock(), metrics, turns)
                for _ in range(20)
            ]
            answers = await asyncio.gather(*(one.ask(0) for one in every))
            assert all(answer and answer.ended for answer in answers)
            assert publisher.most == 3
    finally:
        context.destroy(linger=0)


async def test_an_answer_is_bounded_in_batches_and_in_bytes() -> None:
    metrics = EventsMetrics(CollectorRegistry())
    few = replace(QUICK, replay_batches=10, drain_batches=4)
    small = replace(QUICK, replay_bytes=1000, drain_batches=4)
    context = zmq.asyncio.Context()
    try:
        async with Publisher() as publisher:
            await send(publisher, *range(100), live=False)
            for settings in (few, small):
                asked = Replays(context, publisher.replay, settings, SystemClock(), metrics)
                answer = await asked.ask(0)
                assert isinstance(answer, Answer) and not answer.ended
                assert 0 < len(answer.frames) < 20
    finally:
        context.destroy(linger=0)
