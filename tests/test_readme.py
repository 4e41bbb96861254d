"""README.md stays true: its shell examples run against a real plane, its names exist.

A block of `sh` is run as it stands; only ports and the path of the command are this machine's.
test_fences.py says which test runs which block.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import shlex
import shutil
import sys
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from kit.plane import EngineSeat, Plane, plane, together
from kit.ports import free_port
from kit.wait import until

from kvplane.children import Child
from kvplane.events.records import entry_record
from kvplane.index import Entry
from kvplane.options import COMMANDS
from kvplane.settings import parser, resolve
from kvplane.vocabulary import BlockHash, Cursor, Epoch, Pod, Role, Stored, Tier, Worker

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
SOMETIMES = ("x-kvplane-reason", "x-kvplane-rooms")  # knowledge less than exact; more than 128
LATER = ("doctor", "picker", "bench-replay")  # other issues' promises


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.M | re.S)


def examples(word: str) -> list[str]:
    """The shell blocks that hold a word."""
    return [block for block in blocks("sh") if word in block]


def test_its_table_of_commands_is_the_command_line() -> None:
    rows = re.findall(r"^\| (`kvplane .*?) \|", README, re.M)
    named = re.findall(r"`kvplane ([a-z]+)(.*?)`", "\n".join(rows))
    assert {name for name, _ in named} == set(COMMANDS) - {"healthy"}  # for health checks only
    for name, rest in named:
        known = {key.flag for key in COMMANDS[name].keys}
        assert set(re.findall(r"--[a-z-]+", rest)) <= known, name


def test_it_promises_nothing_that_is_not_there_yet() -> None:
    assert not [word for word in LATER if word in README and word not in COMMANDS]


def test_its_kvplane_toml_is_accepted_as_it_stands() -> None:
    (text,) = blocks("toml")
    for command in ("router", "ingest", "index", "all"):
        told = resolve(vars(parser().parse_args([command])), {}, tomllib.loads(text))
        (worker,) = told.workers
        assert (worker.role, worker.bootstrap_port) == (Role.PREFILL, 8998)
        assert worker.events == ("tcp://10.0.0.7:5557",)


def test_its_commands_with_addresses_of_others_are_accepted_as_they_stand() -> None:
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.M | re.S)
    lines = [line for kind, block in fences if not kind for line in block.splitlines()]
    commands = [line.split()[1:] for line in lines if line.startswith("kvplane ")]
    assert len(commands) == 2
    for words in commands:
        told = [word.replace("URL", "redis://127.0.0.1:6379/0") for word in words]
        assert resolve(vars(parser().parse_args(told)), {}, {}).workers


def test_its_record_of_a_change_has_the_members_that_are_sent() -> None:
    (shown,) = map(json.loads, blocks("json"))
    worker, epoch = Worker(Pod("10.0.0.7:30000")), Epoch(1)
    stored = Stored(worker, epoch, Tier.GPU, None, (BlockHash(15),), 16)
    sent = entry_record(Entry(Cursor("1-0"), (stored,), worker, epoch, 7, 1796000000.0))
    assert list(shown) == list(sent)
    (change,), (told,) = shown["changes"], sent["changes"]
    assert set(told) - set(change) == {"worker", "epoch"}  # said once in the entry, again in each
    assert {name: told[name] for name in change if name != "blocks"} == {
        name: value for name, value in change.items() if name != "blocks"
    }


async def shell(block: str, running: Plane) -> tuple[int | None, str, str]:
    """(exit status, standard output, standard error) of a block, on this machine's ports."""
    async with started(block, running) as process:
        out, err = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode, out.decode(), err.decode()


@contextlib.asynccontextmanager
async def started(block: str, running: Plane) -> AsyncIterator[asyncio.subprocess.Process]:
    here = block.replace("http://127.0.0.1:8000", running.url).replace("curl ", "curl -sS ")
    here = here.replace(".venv/bin/kvplane", f"{sys.executable} -m kvplane")
    process = await asyncio.create_subprocess_exec(
        "sh", "-euc", here,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "KVPLANE_URL": running.url}, start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        await process.wait()


def answers(text: str) -> list[dict[str, Any]]:
    """The JSON objects in a text, in order."""
    found, decoder, at = [], json.JSONDecoder(), text.find("{")
    while at >= 0:
        value, end = decoder.raw_decode(text, at)
        found.append(value)
        at = text.find("{", end)
    return found


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not on PATH")
async def test_its_examples_run_as_written_and_show_what_it_says() -> None:
    words = ("/chat/completions", "/index/rank", " tail", "/index/snapshot")
    (chat,), (ask,), (tail,), (changes,) = (examples(word) for word in words)
    seats = [EngineSeat("p", "prefill"), EngineSeat("d", "decode")]
    async with plane(seats) as running, started(tail, running) as following:
        assert following.stdout is not None
        code, out, err = await shell(chat, running)
        assert code == 0, err
        assert "200 OK" in out and "x-kvplane-depth: 0/" in out

        async def held() -> bool:
            code, out, err = await shell(ask, running)
            assert code == 0, err
            first, workers = answers(out)
            assert len(workers["workers"]) == 2
            assert "blocks of 16 tokens, model tiny" in out
            return bool(first["workers"][0]["depth_blocks"] == first["blocks"] > 0)

        await until(held, timeout_s=30, what="the index to hold what the chat left")
        code, out, err = await shell(changes, running)
        assert code == 0, err
        *_, end = answers(out)
        assert end["end"] and f"id: {end['cursor']}\n" in out
        _, out, _ = await shell(chat, running)
        asked = re.search(r"x-kvplane-depth: (\d+)/(\d+)", out)
        assert asked and asked[1] == asked[2] != "0"
        for header in re.findall(r"`(x-kvplane-[a-z]+)", README):
            if header not in SOMETIMES:
                assert f"\n{header}: " in out, header
        room = re.search(r"x-kvplane-room: (\d+)", out)
        assert room and (await running.get(f"/rooms/{room[1]}"))["outcome"] == "ok"
        line = asyncio.create_task(following.stdout.readline())
        number = itertools.count()

        async def heard() -> bool:  # tail follows from when it is connected, so speak until it is
            body = {"model": "tiny", "prompt": f"line {next(number)} of many", "max_tokens": 1}
            assert (await running.ask("/v1/completions", body))[0] == 200
            return line.done()

        await until(heard, timeout_s=30, what="tail to print a change")
        assert re.search(r"^\S+  \S+ +(stored|removed|cleared|known) ", line.result().decode())


class Ports:
    """The numbers of README.md on this machine: each another free port, always the same."""

    def __init__(self) -> None:
        self._found: dict[str, str] = {}

    def here(self, text: str) -> str:
        def free(number: re.Match[str]) -> str:
            return self._found.setdefault(number[0], str(free_port()))

        return re.sub(r"(?<![0-9.])[0-9]{4,5}(?![0-9.])", free, text)


@contextlib.asynccontextmanager
async def processes(block: str, ports: Ports) -> AsyncIterator[list[Child]]:
    """The commands of a block that ends each with &, side by side."""
    whole = block.replace("\\\n", " ")
    children = []
    for line in re.findall(r"^kvplane (.*) &", whole, re.M):
        defaults = {"--port": "30000", "--events-port": "5557", "--replay-port": "5657",
                    "--bootstrap-port": "8998"}  # fmt: skip
        if not line.startswith("engine"):
            defaults = {"--port": "8000"}
        line += "".join(f" {flag} {port}" for flag, port in defaults.items() if flag not in line)
        words = shlex.split(ports.here(line))
        children.append(Child(words[0], words, None))
    async with together(children):
        yield children


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not on PATH")
async def test_its_engines_of_several_ranks_register_and_answer() -> None:
    (block,) = examples("--tp 2")
    ports = Ports()
    async with processes(block, ports), aiohttp.ClientSession() as session:
        body = {"model": "tiny", "prompt": "cut in four, met by two", "max_tokens": 8}
        url = ports.here("http://127.0.0.1:8000/v1/completions")

        async def answered() -> bool:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.post(url, json=body) as answer:
                    return answer.status == 200
            return False

        await until(answered, timeout_s=60, what="an answer of 4 ranks over 2")
        assert json.loads(await curled(block, ports))["summary"] == "register: 4 of 4"


async def curled(block: str, ports: Ports) -> str:
    """What the curl of a block prints, as it stands."""
    (line,) = re.findall(r"^curl .*$", block, re.M)
    command = ports.here(line).replace("curl ", "curl -sS --fail ")
    process = await asyncio.create_subprocess_exec("sh", "-euc", command, stdout=-1, stderr=-1)
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, err.decode()
    return out.decode()


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not on PATH")
async def test_its_two_nodes_are_one_prefill() -> None:
    (block,) = examples("--nnodes")
    ports = Ports()
    async with processes(block, ports), aiohttp.ClientSession() as session:

        async def healthy() -> bool:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(ports.here("http://127.0.0.1:30000/health")) as answer:
                    return answer.status == 200
            return False

        await until(healthy, timeout_s=60, what="both nodes to be there")
        await curled(block, ports)
        async with session.get(ports.here("http://127.0.0.1:8998/ranks")) as answer:
            assert (await answer.json())["summary"] == "register: 4 of 4"
