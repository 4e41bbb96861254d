"""Soak of the data path: random faults, deaths and pauses under load; then all is given back.

`make soak` runs it; pytest by itself does not collect it. KVPLANE_SOAK_S sets its seconds,
KVPLANE_SOAK_SEED its luck. Answers are compared with those of a lone engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from kit.chaos import trouble
from kit.plane import EngineSeat, Plane, plane
from kit.settled import unsettled
from kit.wait import until

SECONDS = float(os.environ.get("KVPLANE_SOAK_S", "600"))
SEED = int(os.environ.get("KVPLANE_SOAK_SEED", "1"))
CLIENTS = 6
PATIENCE_S = 30.0  # then a client leaves: a fault may hang a leg for longer
QUIET_S = 90.0  # after the last fault; a room's own deadline is 60 s
GATEWAY = ["--health-check-interval-secs", "1", "--cb-timeout-duration-secs", "2"]
SEATS = (
    EngineSeat("p0", "prefill", ["--tp", "2"]), EngineSeat("p1", "prefill", ["--pp", "2"]),
    EngineSeat("d0", "decode", ["--tp", "2"]), EngineSeat("d1", "decode"),
)  # fmt: skip


@dataclass
class Question:
    """One body and what a lone engine says to it."""

    path: str
    body: dict[str, Any]
    tokens: list[int]  # of its first prompt; [] where only the engine knows
    answer: Any = None


@dataclass
class Soak:
    """What happened; printed at the end."""

    running: Plane
    chance: random.Random
    questions: list[Question]
    outcomes: Counter[str] = field(default_factory=Counter)
    chaos: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    slowest_s: float = 0.0


def questions(chance: random.Random) -> list[Question]:
    """Prompts that share beginnings, in every kind of body."""
    stems = [[chance.randrange(32, 127) for _ in range(600)] for _ in range(4)]
    found = []
    for number in range(40):
        stem = stems[number % 4][: chance.choice([0, 16, 100, 320, 600])]
        tail = [chance.randrange(32, 127) for _ in range(chance.choice([1, 15, 33, 200]))]
        ids, text = stem + tail, "".join(map(chr, tail))
        sampling = {"max_new_tokens": chance.choice([1, 8, 40]), "ignore_eos": True}
        kind = number % 5
        if kind < 2:
            found.append(
                Question("/generate", {"input_ids": ids, "sampling_params": sampling}, ids)
            )
        elif kind == 2:
            body = {"input_ids": [ids, tail + ids, ids + tail], "sampling_params": sampling}
            found.append(Question("/generate", body, ids))
        elif kind == 3:
            body = {"model": "tiny", "prompt": text, "max_tokens": 24}
            found.append(Question("/v1/completions", body, []))
        else:
            messages = [{"role": "user", "content": text}]
            body = {"model": "tiny", "messages": messages, "max_tokens": 24, "n": 2}
            found.append(Question("/v1/chat/completions", body, []))
    return found


def told(answer: Any) -> Any:
    """What of a whole answer must always be the same."""
    if isinstance(answer, list):
        return [told(item) for item in answer]
    if "output_ids" in answer:
        return answer["output_ids"]
    return [c["text"] if "text" in c else c["message"]["content"] for c in answer["choices"]]


def told_by_events(question: Question, events: list[dict[str, Any]]) -> Any:
    """The same of a stream. Raises KeyError or IndexError where the stream lacks something."""
    if question.path == "/generate":
        last = {event.get("index", 0): event["output_ids"] for event in events}
        many = isinstance(question.body["input_ids"][0], list)
        return [last[at] for at in range(len(question.answer))] if many else last[0]
    texts = [""] * len(question.answer)
    for event in events:
        for choice in event["choices"]:
            piece = choice.get("text") or choice.get("delta", {}).get("content") or ""
            texts[choice["index"]] += piece
    return texts


async def client(soak: Soak, end: float) -> None:
    """Ask, compare, sometimes leave; until `end`."""
    while time.monotonic() < end:
        question, stream = soak.chance.choice(soak.questions), soak.chance.random() < 0.5
        patience = soak.chance.uniform(0, 0.5) if soak.chance.random() < 0.1 else PATIENCE_S
        begun = time.monotonic()
        try:
            async with asyncio.timeout(patience):
                outcome = await ask(soak, question, stream)
            soak.outcomes[outcome] += 1
            if outcome != "ok":
                await asyncio.sleep(0.1)  # errors come at once: clients that wait are the load
        except TimeoutError:
            soak.outcomes["left" if patience < 1 else "gave up"] += 1
        soak.slowest_s = max(soak.slowest_s, time.monotonic() - begun)


async def ask(soak: Soak, question: Question, stream: bool) -> str:
    """One request: ok, or the code of its error. Notes a wrong answer."""
    body = question.body | {"stream": stream}
    async with soak.running.session.post(soak.running.url + question.path, json=body) as answer:
        try:
            raw = await answer.read()
        except aiohttp.ClientPayloadError:
            return "cut"
        if answer.status != 200:
            error = json.loads(raw)["error"]
            assert error["message"] and error["code"], raw
            return f"{answer.status} {error['code']}"
    if stream:
        lines = [line[5:].strip() for line in raw.split(b"\n") if line.startswith(b"data:")]
        events = [json.loads(line) for line in lines if line != b"[DONE]"]
        broken = [event["error"] for event in events if "error" in event]
        if broken:
            return f"stream {broken[0]['code']}"
        if lines[-1:] != [b"[DONE]"]:
            return "stream without end"
        got = told_by_events(question, events)
    else:
        got = told(json.loads(raw))
    if got != question.answer:
        soak.wrong.append(f"{question.path} {question.body}: {got} for {question.answer}")
    return "ok"


async def held_blocks(running: Plane, name: str, tokens: list[int]) -> int:
    """How many unbroken blocks of these tokens really lie in an engine."""
    truth = await running.get("/truth", at=running.engines[name].url)
    (rank,) = truth["ranks"]
    blocks = {(b["parent"], tuple(b["tokens"])): b["hash"] for b in rank["blocks"]}
    parent, depth, size = None, 0, truth["block_size"]
    while found := blocks.get((parent, tuple(tokens[depth * size : (depth + 1) * size]))):
        parent, depth = found, depth + 1
    return depth


async def too_deep(soak: Soak) -> list[str]:
    """Where the index claims more than an engine has."""
    names = {seat.pod: name for name, seat in soak.running.engines.items()}
    found = []
    for question in soak.questions:
        if not question.tokens:
            continue
        body = {"model": "tiny", "token_ids": question.tokens}
        _, ranked, _ = await soak.running.ask("/index/rank", body)
        for row in ranked["workers"]:
            real = await held_blocks(soak.running, names[row["worker"]], question.tokens)
            soak.chaos["depths compared"] += 1
            if row["depth_blocks"] > real:
                found.append(f"{names[row['worker']]}: {row['depth_blocks']} for {real}")
    return found


@contextlib.asynccontextmanager
async def lone_engine() -> AsyncIterator[str]:
    seat = EngineSeat("lone", "both")
    child = seat.child()
    try:
        await child.start()
        yield seat.url
    finally:
        await child.stop()


async def test_after_faults_deaths_and_pauses_no_answer_was_wrong_and_all_is_given_back() -> None:
    chance = random.Random(SEED)
    async with plane(SEATS, GATEWAY) as running, lone_engine() as lone:
        soak = Soak(running, chance, questions(chance))
        try:
            for question in soak.questions:
                status, answer, _ = await running.ask(question.path, question.body, at=lone)
                assert status == 200, answer
                question.answer = told(answer)
            end = time.monotonic() + SECONDS
            bad = (trouble(running, name, chance, soak.chaos, end) for name in running.engines)
            await asyncio.gather(*bad, *(client(soak, end) for _ in range(CLIENTS)))
            await judged(soak)
        finally:
            for child in running.children.values():
                await child.stop()


async def judged(soak: Soak) -> None:
    """Faults are over: all is given back, and every question is answered again."""
    running, begun = soak.running, time.monotonic()
    for seat in running.engines.values():
        async with running.session.delete(f"{seat.url}/fault") as answer:
            assert answer.status == 200
    stuck: list[Any] = []
    with contextlib.suppress(AssertionError):
        await until(lambda: _settled(running, stuck), QUIET_S)
    settled_s = time.monotonic() - begun
    during = dict(soak.outcomes)
    depths: list[str] = []
    with contextlib.suppress(AssertionError):  # a restart is seen when an idle worker is asked
        await until(lambda: _shallow(soak, depths), QUIET_S)
    true_s = time.monotonic() - begun
    for question in soak.questions:  # the plane works again
        assert await ask(soak, question, stream=False) == "ok", question
    faults = sum(soak.chaos.values()) - soak.chaos["depths compared"]
    sys.stdout.write(
        f"\nsoak seed={SEED} seconds={SECONDS:g} faults={faults} outcomes={during} "
        f"chaos={dict(soak.chaos)} "
        f"wrong={len(soak.wrong)} slowest_s={soak.slowest_s:.1f} settled_s={settled_s:.1f} "
        f"index_true_s={true_s:.1f}\n"
    )
    assert not soak.wrong, soak.wrong[:3]
    assert not stuck, stuck
    assert not depths, depths
    assert during["ok"] > 0 and soak.chaos["killed"] + soak.chaos["stopped and woken"] > 0


async def _shallow(soak: Soak, depths: list[str]) -> bool:
    depths[:] = await too_deep(soak)
    return not depths


async def _settled(running: Plane, stuck: list[Any]) -> bool:
    stuck[:] = await unsettled(running)
    if stuck:
        return False
    async with running.session.get(f"{running.url}/readiness") as answer:
        return answer.status == 200
