"""Fences: how is each fenced block of README.md, docs/ and CONTRIBUTING.md checked?

A row for each block, in order, and the test that runs or reads it: a block that nobody checks fails
here. Lines of `make` and `docker compose`, which those tests leave out, are looked at here wherever
they are written: make itself says what it would do, and does what is cheap; a compose line is read
against compose.yaml, and run too where there is a docker that can.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "CONTRIBUTING.md"]
FENCE = re.compile(r"^( *)```([a-z]*)\n(.*?)^\1```$", re.M | re.S)
DRAWN = "shown to people"  # no command may hide there
COMMAND = re.compile(r"^\s*(\$ |kvplane |curl |make |docker |\.venv/|export |pip |python)", re.M)

_README, _DOCS, _HERE = "test_readme.py::test_", "test_docs.py::test_", "test_fences.py::test_"
_MAKE = _HERE + "what_make_would_do_is_what_is_there"
_STREAMS = "test_readme_streams.py::test_"
OPERATE = _DOCS + "the_operators_commands_run_and_show_what_it_says"
CONSUME = _DOCS + "the_consumers_commands_and_its_mirror_are_true"
ENGINE = _DOCS + "the_engine_of_sixty_lines_is_found_followed_and_foretold"
EXAMPLES = _README + "its_examples_run_as_written_and_show_what_it_says"
ADDRESSES = _README + "its_commands_with_addresses_of_others_are_accepted_as_they_stand"
RECORD = _README + "its_record_of_a_change_has_the_members_that_are_sent"
PROGRAM = _STREAMS + "its_program_reads_every_kind_of_change_and_notices_what_is_missing"

# page -> (language, how the block begins, who checks it), in the order of the page
CHECKED: dict[str, list[tuple[str, str, str]]] = {
    "README.md": [
        ("sh", "make demo", _MAKE),
        ("mermaid", "flowchart", DRAWN),
        ("sh", "curl -i http://127.0.0.1:8000/v1/chat/completions", EXAMPLES),
        ("toml", "# kvplane.toml", _README + "its_kvplane_toml_is_accepted_as_it_stands"),
        ("", "kvplane ingest --redis URL", ADDRESSES),
        ("sh", "export PATH", _README + "its_engines_of_several_ranks_register_and_answer"),
        ("sh", "kvplane engine", _README + "its_two_nodes_are_one_prefill"),
        ("sh", "curl http://127.0.0.1:8000/index/rank", EXAMPLES),
        ("sh", ".venv/bin/kvplane tail", EXAMPLES),
        ("sh", "curl 'http://127.0.0.1:8000/index/snapshot'", EXAMPLES),
        ("json", '{"cursor"', RECORD),
        ("python", "import struct", PROGRAM),
        ("", '["kvplane-xxh3-1"', _STREAMS + "names_of_blocks_are_made_as_it_says"),
        ("", "events/     TELL", DRAWN),
    ],
    "docs/comparison.md": [("sh", "make bench", _MAKE)],
    "docs/consumers.md": [
        ("sh", "curl http://127.0.0.1:8000/v1/completions", CONSUME),
        ("sh", "curl --max-time 1", CONSUME),
        ("python", "import json, sys", CONSUME),
    ],
    "docs/engines.md": [
        ("text", "topic |", DRAWN),
        ("python", "import asyncio", ENGINE),
        ("json", '{"url"', ENGINE),
        ("json", '{"room"', ENGINE),
    ],
    "docs/how-it-works.md": [
        ("mermaid", "sequenceDiagram", DRAWN),
        ("text", "last was 7:", DRAWN),
        ("text", "name of block n", DRAWN),
        ("mermaid", "sequenceDiagram", DRAWN),
        ("text", "prompt of 1200 tokens", DRAWN),
    ],
    "docs/operators.md": [
        ("sh", "export PATH", OPERATE),
        ("sh", "docker compose config", _HERE + "a_compose_line_names_what_compose_yaml_has"),
        ("toml", "# kvplane.toml", _DOCS + "its_toml_is_accepted_as_it_stands"),
        ("sh", "curl --fail http://127.0.0.1:8000/workers", OPERATE),
        ("sh", "curl http://127.0.0.1:8000/metrics", OPERATE),
        ("sh", "kvplane doctor --url", OPERATE),
        ("sh", "curl -X PUT", OPERATE),
        ("sh", "curl --fail http://127.0.0.1:8000/workers", OPERATE),
    ],
    "docs/routes.md": [],
    "docs/what-it-is-not.md": [],
    "CONTRIBUTING.md": [
        ("text", "events/     TELL", DRAWN),
        ("sh", "make check", _MAKE),
        ("python", "from collections.abc", _DOCS + "the_policy_from_nothing_is_one"),
    ],
}


def fences(page: Path) -> list[tuple[str, str]]:
    """(language, text) of every fenced block, those in lists too."""
    return [(kind, text.lstrip()) for _, kind, text in FENCE.findall(page.read_text())]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_is_checked_by_a_test_that_is_there(page: Path) -> None:
    rows = CHECKED[page.relative_to(ROOT).as_posix()]
    found = fences(page)
    assert page.read_text().count("```") == 2 * len(found), "a fence that is not read here"
    told = [(kind, opening) for kind, opening, _ in rows]
    assert [(kind, text.splitlines()[0]) for kind, text in found] == [
        (kind, text.splitlines()[0]) if text.startswith(opening) else (kind, opening)
        for (kind, opening), (_, text) in zip(told, found, strict=False)
    ], "blocks and rows differ"
    assert len(found) == len(rows)
    for (_, _, by), (_, text) in zip(rows, found, strict=True):
        if by == DRAWN:
            assert not COMMAND.search(text), text
        else:
            file, name = by.split("::")
            assert name in _functions(Path(__file__).parent / file), by


def _functions(path: Path) -> set[str]:
    nodes = ast.parse(path.read_text(), str(path)).body
    return {one.name for one in nodes if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)}


def written(program: str) -> Iterator[str]:
    """Every line of this program: in fences, and between back ticks."""
    for page in PAGES:
        for _, text in fences(page):
            yield from re.findall(rf"^({program} .*?)(?: +#.*)?$", text, re.M)
        prose = FENCE.sub("", page.read_text())
        yield from re.findall(rf"`({program} [^`]+)`", re.sub(r"\s+", " ", prose))


# make --------------------------------------------------------------------------------------------

MADE = sorted(set(written("make")))
needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not on PATH")


def make(*words: str) -> subprocess.CompletedProcess[str]:
    """As a person calls it: a make that runs these tests says nothing here."""
    given = ("ARGS", "VENV", "WORKERS", "PYTHON")  # make hands these on to what it runs
    own = {
        name: value
        for name, value in os.environ.items()
        if "MAKE" not in name and name not in given
    }
    return subprocess.run(["make", *words], cwd=ROOT, env=own, capture_output=True, text=True)


def test_the_lines_of_make_are_found() -> None:
    assert {"make demo", "make test", "make check", "make demo ARGS=--once"} <= set(MADE)
    assert 'make bench ARGS="redis memory lag"' in MADE and len(MADE) > 8


@needs_make
@pytest.mark.parametrize("line", MADE)
def test_what_make_would_do_is_what_is_there(line: str) -> None:
    _, *words = shlex.split(line)
    if words == ["bench", "ARGS="]:  # the heading of a table: each row is one
        words = ["bench", "ARGS=index"]
    done = make("-n", *words)
    assert done.returncode == 0, done.stderr
    last = shlex.split(done.stdout.splitlines()[-1].removeprefix("exec "))
    told = [word[5:].split() for word in words if word.startswith("ARGS=")]
    assert last[len(last) - sum(map(len, told)) :] == [one for some in told for one in some]
    assert re.fullmatch(r"\.venv(-transfer)?/bin/\w+", last[0]), last
    for path in (word for word in last[1:] if word.startswith("tests/")):
        assert (ROOT / path).is_file(), path
    if last[1:3] == ["-m", "bench"]:
        assert set(last[3:]) <= benchmarks(), last


@needs_make
def test_make_test_begins_with_make_check_and_runs_pytest() -> None:
    check, test = (make("-n", word).stdout.splitlines() for word in ("check", "test"))
    assert [line.split()[0].rpartition("/")[2] for line in check[-3:]] == ["ruff", "ruff", "mypy"]
    test = [line for line in test if not line.endswith("&")]  # in a fresh copy, beside the check
    assert test[: len(check)] == check and test[len(check)].startswith(".venv/bin/pytest")


@needs_make
def test_make_help_names_every_target_that_is_meant_for_people() -> None:
    done = make("help")
    assert done.returncode == 0, done.stderr
    (phony,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.M)
    shown = set(re.findall(r"[a-z-]+", done.stdout))
    assert set(phony.split()) - {"help"} <= shown


@cache
def benchmarks() -> set[str]:
    """The rows that `python -m bench` knows, as it says itself."""
    done = subprocess.run(
        [sys.executable, "-m", "bench", "no-such-row"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2
    return set(done.stderr.partition("there are ")[2].replace(",", " ").split())


# docker compose ----------------------------------------------------------------------------------

COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
COMPOSED = sorted(set(written("docker compose")))
OPTIONS = {  # command -> its switches that are used here; further words are services
    "config": {"--quiet", "-q", "--services"},
    "up": {"--build", "--detach", "-d", "--wait"},
    "down": {"--volumes", "-v"},
    "logs": {"--follow", "-f"},
    "ps": {"--all", "-a"},
}


def mistakes(line: str) -> list[str]:
    """What is wrong with a `docker compose` line, by compose.yaml alone."""
    rest, found = shlex.split(line)[2:], []
    while len(rest) > 1 and rest[0] in ("-f", "--file", "--profile"):
        option, value, *rest = rest
        profiles = {
            name for one in COMPOSE["services"].values() for name in one.get("profiles", ())
        }
        if not (value in profiles if option == "--profile" else (ROOT / value).is_file()):
            found.append(f"{option} {value}")
    command, *words = rest or [""]
    known = OPTIONS.get(command, set()) | set(COMPOSE["services"])
    unknown = [] if command in OPTIONS else [command]
    return found + unknown + [word for word in words if word not in known]


@pytest.mark.parametrize("line", COMPOSED)
def test_a_compose_line_names_what_compose_yaml_has(line: str) -> None:
    assert not mistakes(line)


def test_the_lines_of_docker_compose_are_found_and_a_wrong_one_is_noticed() -> None:
    assert {"docker compose config --quiet", "docker compose up --build"} <= set(COMPOSED)
    for wrong in ("confg", "up nobody", "-f other.yaml up", "--profile big up", "up --biuld", ""):
        assert mistakes(f"docker compose {wrong}"), wrong
    assert not mistakes("docker compose -f compose.yaml logs --follow router")


def composes() -> bool:
    """Whether `docker compose` is a command here; it need not reach an engine."""
    if shutil.which("docker") is None:
        return False
    asked = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    return asked.returncode == 0


@pytest.mark.skipif(not composes(), reason="docker compose is not here; its lines are read only")
def test_docker_compose_reads_the_file_itself() -> None:
    for line in (one for one in COMPOSED if " config" in one):
        assert subprocess.run(["sh", "-c", line], cwd=ROOT, check=False).returncode == 0, line
    done = subprocess.run(
        ["docker", "compose", "config", "--services"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == set(COMPOSE["services"])
