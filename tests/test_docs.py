"""docs/ and CONTRIBUTING.md stay true: what stands in their fences is run, or read as it is meant.

`sh` runs as it stands against a real plane, all of a document in one shell; only addresses and the
path of the command are this machine's. test_fences.py says who checks which block, and looks at the
lines of `make` and `docker compose`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import sys
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from kit.house import House, house
from kit.ports import free_ports
from kit.wait import until

from kvplane.options import COMMANDS
from kvplane.router import POLICIES, Candidate, LegSettings, Need
from kvplane.router.evidence import stage_records
from kvplane.settings import parser, resolve
from kvplane.vocabulary import Room

ROOT = Path(__file__).parents[1]
DOCS = {
    path.name: path for path in [*sorted((ROOT / "docs").glob("*.md")), ROOT / "CONTRIBUTING.md"]
}
FENCE = re.compile(r"^```([a-z]*)\n(.*?)^```$", re.M | re.S)
ELSEWHERE = ("make ", "docker ")  # lines that test_fences.py looks at
every_document = pytest.mark.parametrize("name", DOCS)
needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not on PATH")


def fences(name: str, language: str | None = None) -> list[str]:
    """What stands in the fences of a document (of one language), in order."""
    found = FENCE.findall(DOCS[name].read_text())
    return [text for kind, text in found if language in (None, kind)]


def only(name: str, language: str) -> str:
    (text,) = fences(name, language)
    return text


def test_the_documents_of_the_plan_are_there() -> None:
    wanted = {"operators", "engines", "consumers", "how-it-works", "comparison", "what-it-is-not"}
    assert {f"{one}.md" for one in wanted} | {"CONTRIBUTING.md"} <= set(DOCS)
    readme = (ROOT / "README.md").read_text()
    for name, path in DOCS.items():
        assert path.relative_to(ROOT).as_posix() in readme, f"README.md leads to {name}"


@every_document
def test_every_path_command_and_flag_it_names_exists(name: str) -> None:
    text = DOCS[name].read_text()
    folders = "bench|bootstrap|deploy|docs|engine|events|index|router|src|tests|transfer"
    for path in set(re.findall(rf"`((?:{folders})/[\w./-]*)`", text)):
        assert path.endswith("new.py") or (ROOT / path).exists(), path
    for link in re.findall(r"\]\((?!http)([^)#]+)", text):
        assert (DOCS[name].parent / link).exists(), link
    for command in set(re.findall(r"`kvplane ([a-z]+)", text)):
        assert command in COMMANDS, command
    flags = {key.flag for command in COMMANDS.values() for key in command.keys}
    known = flags | {"--prefill", "--decode", "--worker-urls", "--events", "--replay", "--config"}
    assert set(re.findall(r"`(--[a-z-]+)[ `]", text)) <= known | {"--help"}


@pytest.mark.parametrize("path", [ROOT / "README.md", *DOCS.values()], ids=lambda path: path.name)
def test_every_command_in_a_sentence_or_a_table_is_accepted_as_it_stands(path: Path) -> None:
    prose = re.sub(r"\s+", " ", re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.M | re.S))
    for line in re.findall(r"`kvplane ([^`]+?)(?: --help)?`", prose):
        words = line.replace("[", "").replace("]", "").replace(" …", "")
        words = words.replace("--redis URL", "--redis redis://h:6379/0")
        words = words.replace("PORT", "8998")
        words = re.sub("URL", lambda at: f"http://h{at.start()}:30000", words)  # each its own
        told = vars(parser().parse_args(shlex.split(words) + NEEDED.get(words, [])))
        assert resolve(told, {}, {}).command == words.split()[0], line


NEEDED = {"rank": ["a prompt"]}  # of a command that is only named


def test_its_toml_is_accepted_as_it_stands() -> None:
    told = tomllib.loads(only("operators.md", "toml"))
    for command in ("router", "ingest", "index"):
        found = resolve(vars(parser().parse_args([command])), {}, told)
        assert [worker.role.value for worker in found.workers] == ["prefill", "decode"]


def test_its_limits_of_time_are_those_of_the_command_line() -> None:
    defaults = {key.flag: key.default for key in COMMANDS["router"].keys}
    (table,) = re.findall(
        r"^### How long it waits\n(.*?)^## ", DOCS["operators.md"].read_text(), re.M | re.S
    )
    rows = re.findall(r"^\| `(--[a-z-]+)` \|.*\| (\d+) \|$", table, re.M)
    assert len(rows) == 5 and all(defaults[flag] == float(told) for flag, told in rows)
    legs = LegSettings()
    assert f"{legs.connect_s:g} s to connect" in table and f"{legs.idle_s:g} s between" in table


def figures(text: str) -> dict[str, list[str]]:
    """Benchmark -> its rows; one without a name belongs to the row above."""
    found: dict[str, list[str]] = {}
    (table,) = re.findall(r"^\| `make bench ARGS=` \|.*\n(?:\|.*\n)+", text, re.M)
    named = ""
    for row in table.splitlines()[2:]:
        first, _, rest = row.strip("| ").partition("|") if row.startswith("| `") else ("", "", row)
        named = first.strip(" `") or named
        found.setdefault(named, []).append(rest)
    return found


def test_every_figure_beside_the_peers_is_one_of_the_readme_and_of_a_benchmark() -> None:
    ours = figures((ROOT / "README.md").read_text())
    named = re.findall(r'^    "([a-z0-9-]+)": ', (ROOT / "bench" / "__main__.py").read_text(), re.M)
    assert set(ours) <= set(named)
    told = figures(DOCS["comparison.md"].read_text())
    assert sum(map(len, told.values())) >= 7
    for name, rows in told.items():
        known = set(re.findall(r"[\d.]+", " ".join(ours[name])))
        for row in rows:
            *_, value, beside = (cell.strip() for cell in row.strip("| ").split("|"))
            assert {value.split()[0], beside} <= known, row


# On a running plane ------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[tuple[House, str]]:
    """A gateway over a prefill and a decode, as `make demo` has two of each; and the prefill."""
    async with house() as built:
        prefill, decode = await built.pair()
        await built.gateway(*prefill.words, *decode.words)
        await until(lambda: _exact(built), what="both workers to be known exactly")
        yield built, prefill.pod


async def _exact(built: House) -> bool:
    found = (await built.get("/index/workers"))["workers"]
    return [one["knowledge"] for one in found] == ["exact", "exact"]


async def script(name: str, built: House, prefill: str) -> str:
    """What all the shell blocks of a document write, run one after the other in one shell."""
    lines = [line for text in fences(name, "sh") for line in text.splitlines()]
    text = "\n".join(line for line in lines if not line.startswith(ELSEWHERE))
    text = text.replace("127.0.0.1:8000", built.url.removeprefix("http://"))
    text = text.replace("127.0.0.1:30000", prefill)
    text = text.replace("$PWD/.venv/bin", str(Path(sys.executable).parent))
    process = await asyncio.create_subprocess_exec(
        "sh", "-euc", text.replace("curl ", "curl -sS "), cwd=ROOT, start_new_session=True,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        out, err = await asyncio.wait_for(process.communicate(), 90)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, f"{out.decode()}\n{err.decode()}"
    return out.decode()


@contextlib.asynccontextmanager
async def program(name: str, *words: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """The Python of a document as a process."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", only(name, "python"), *words,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def unknown_metrics(built: House, prefill: str) -> set[str]:
    """Metrics that a document names and no process shows; one with * is a beginning."""
    text = "".join(path.read_text() for path in (ROOT / "README.md", *DOCS.values()))
    named = set(re.findall(r"`(kvplane_[a-z]+_[a-z_]+\*?)[`{]", text))
    info = (await built.worker(prefill))["bootstrap_port"]
    pages = []
    for at in (built.url, f"http://{prefill}", f"http://127.0.0.1:{info}"):
        async with built.session.get(f"{at}/metrics") as answer:
            pages.append(await answer.text())
    shown = set(re.findall(r"^# TYPE (\S+)", "\n".join(pages), re.M))
    assert len(named) > 8
    return {one for one in named if not any(_is_named(one, name) for name in shown)}


def _is_named(said: str, name: str) -> bool:
    return name.startswith(said[:-1]) if said.endswith("*") else said == name


@needs_curl
async def test_the_operators_commands_run_and_show_what_it_says() -> None:
    async with serving() as (built, prefill):
        out = await script("operators.md", built, prefill)
        assert '"status":"ready"' in out.replace(" ", "")
        assert "403\n" in out  # from elsewhere, without a key
        assert "nothing is wrong" in out
        assert '"draining":true' in out.replace(" ", "")
        assert "kvplane_router_rooms_open 0.0" in out
        assert not await unknown_metrics(built, prefill)
        assert (await built.worker(prefill))["draining"] is False


@needs_curl
async def test_the_consumers_commands_and_its_mirror_are_true() -> None:
    async with (
        serving() as (built, prefill),
        program("consumers.md", f"{built.url}/index") as mirror,
    ):
        out = await script("consumers.md", built, prefill)
        assert '"depth_blocks"' in out and "changes follow" in out
        assert mirror.stdout is not None
        told: dict[str, int] = {}

        async def same() -> bool:
            nonlocal told
            workers = (await built.get("/index/workers"))["workers"]
            true = {one["worker"]: sum(one["blocks"].values()) for one in workers}
            with contextlib.suppress(TimeoutError):  # the mirror may be ahead of that answer
                while told != true:
                    told = json.loads(await asyncio.wait_for(mirror.stdout.readline(), 1))
            return told == true and sum(true.values()) > 0

        await until(same, what="the mirror to hold what the index holds")
        body = {"model": "tiny", "prompt": "something that nobody has asked before " * 4}
        assert (await built.post("/v1/completions", body | {"max_tokens": 1})).status == 200
        before = told
        await until(lambda: _more(built, before), what="more blocks in the index")
        await until(same, what="the mirror to follow")
        assert told != before


async def _more(built: House, before: dict[str, int]) -> bool:
    workers = (await built.get("/index/workers"))["workers"]
    return {one["worker"]: sum(one["blocks"].values()) for one in workers} != before


async def test_the_engine_of_sixty_lines_is_found_followed_and_foretold() -> None:
    ports = free_ports(3)
    (told, evidence) = map(json.loads, fences("engines.md", "json"))
    told["url"] = f"http://127.0.0.1:{ports[0]}"
    async with serving() as (built, _), program("engines.md", *map(str, ports)):
        assert (await built.post("/workers", told)).status == 202
        tokens = list(range(100, 150))
        body = {"model": "echo", "prompt": tokens, "max_tokens": 1}

        async def answered() -> Any:
            found = await built.post("/v1/completions", body)
            return found if found.status == 200 else None

        first = await until(answered, 30, what="the engine to serve")
        assert first.body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0

        async def deep() -> bool:
            found = await built.post("/v1/completions", body)
            cached = found.body["usage"]["prompt_tokens_details"]["cached_tokens"]
            return found.headers["x-kvplane-depth"] == "3/3" and cached == 48

        await until(deep, what="its blocks to be known")
        known = (await built.get("/index/workers"))["workers"]
        assert {"gpu": 3, "cpu": 0, "disk": 0} in [one["blocks"] for one in known]
    records = list(stage_records(Room(evidence["room"]), evidence["stages"], ""))
    assert [(one.stage.value, one.outcome) for one in records] == [
        ("connect", "ok"),
        ("verify", "failed"),
    ]


def test_the_policy_from_nothing_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(POLICIES):
        monkeypatch.setitem(POLICIES, name, POLICIES[name])
    monkeypatch.setitem(POLICIES, "fewest_requests", POLICIES["random"])  # and away at the end
    exec(compile(only("CONTRIBUTING.md", "python"), "CONTRIBUTING.md", "exec"), {})
    assert POLICIES["fewest_requests"].__name__ == "fewest_requests"
    assert POLICIES["fewest_requests"](list[Candidate](), Need()) == []
