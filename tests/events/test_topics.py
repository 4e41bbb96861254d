"""Topics: whose stream it is, as far as it says so (FR-EV-04), and what the filter takes (26)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.batches import payload, send, store
from kit.ingesting import ingesting, up
from kit.streams import QUICK, Publisher, number

from kvplane.events.topics import (
    MOST_CHARS,
    Match,
    Named,
    NoPort,
    Other,
    Unnamed,
    Unsure,
    identity,
    judge_topic,
    shown,
)
from kvplane.index import MemoryStore
from kvplane.vocabulary import Pod, Worker

URL = "http://10.0.0.7:8000"
PLAIN = Worker(Pod("10.0.0.7:8000"))  # as discovery names it where nobody gave it a name
NAMED = Worker(Pod("prefill-0"))


@pytest.mark.parametrize(
    ("topic", "named"),
    [
        ("kv@10.0.0.7:8000@qwen", Named("10.0.0.7", 8000, "qwen")),
        ("kv@10.0.0.7@qwen", Named("10.0.0.7", None, "qwen")),
        ("kv@prefill-0@Qwen/Qwen3-8B", Named("prefill-0", None, "Qwen/Qwen3-8B")),
        ("kv@prefill-0:8000@m@2", Named("prefill-0", 8000, "m@2")),
        ("kv@[fd00::7]:8000@m", Named("fd00::7", 8000, "m")),
        ("kv@[fd00::7]@m", Named("fd00::7", None, "m")),
        ("kv@fd00::7@m", Named("fd00::7", None, "m")),
        ("kv@10.0.0.7:http@m", Named("10.0.0.7", None, "m")),
        ("kv@10.0.0.7:70000@m", Named("10.0.0.7", None, "m")),
        ("kv@10.0.0.7:8000@", Named("10.0.0.7", 8000, "")),
        ("", None),
        ("kv-events", None),
        ("kv@10.0.0.7:8000", None),
        ("kv@@m", None),
        ("kv@ @m", None),
        ("kv@:8000@m", None),
        ("other@10.0.0.7:8000@m", None),
    ],
)
def test_who_a_topic_names(topic: str, named: Named | None) -> None:
    assert identity(topic) == named


@pytest.mark.parametrize(
    ("topic", "worker", "url", "kind"),
    [
        ("kv@10.0.0.7:8000@m", PLAIN, URL, Match),
        ("kv@10.0.0.7:8000@m", NAMED, URL, Match),
        ("kv@10.0.0.7:8001@m", PLAIN, URL, Other),
        ("kv@10.0.0.7:8001@m", NAMED, URL, Other),
        ("kv@10.0.0.8:8000@m", PLAIN, URL, Other),
        ("kv@10.0.0.7@m", PLAIN, URL, NoPort),
        ("kv@10.0.0.7@m", NAMED, URL, NoPort),
        ("kv@10.0.0.7@m", Worker(Pod("10.0.0.7")), URL, NoPort),
        ("kv@prefill-0@m", NAMED, URL, Match),
        ("kv@PREFILL-0@m", NAMED, URL, Match),
        ("kv@prefill-0:8000@m", NAMED, URL, Match),
        ("kv@prefill-0:8001@m", NAMED, URL, Other),
        ("kv@prefill-1@m", NAMED, URL, Other),
        ("kv@prefill-0@m", PLAIN, URL, Unsure),
        ("kv@10.0.0.9:8000@m", Worker(Pod("p.svc:8000")), "http://p.svc:8000", Unsure),
        ("kv@[fd00::7]:8000@m", Worker(Pod("[fd00::7]:8000")), "http://[fd00::7]:8000", Match),
        ("kv@[fd00::8]:8000@m", Worker(Pod("[fd00::7]:8000")), "http://[fd00::7]:8000", Other),
        ("", PLAIN, URL, Unnamed),
        ("x-events", PLAIN, URL, Unnamed),
    ],
)
def test_a_topic_against_a_worker(topic: str, worker: Worker, url: str, kind: type) -> None:
    found = judge_topic(topic, worker, url, 1)
    assert isinstance(found, kind), found


def test_what_cannot_be_matched_is_named_in_words() -> None:
    found = judge_topic("kv@10.0.0.7@m", PLAIN, URL, 1)
    assert isinstance(found, NoPort)
    assert "'kv@10.0.0.7@m' has no port" in found.reason
    assert "10.0.0.7:8000" in found.reason
    other = judge_topic("kv@10.0.0.7:8001@m", NAMED, URL, 1)
    assert isinstance(other, Other)
    for part in ("10.0.0.7:8001", "prefill-0", "10.0.0.7:8000"):
        assert part in other.reason


def test_ranks_of_a_pod_share_its_topic_or_have_doors_counted_up() -> None:
    third = Worker(Pod("p"), 2)
    assert isinstance(judge_topic("kv@10.0.0.7:8000@m", third, URL, 4), Match)
    assert isinstance(judge_topic("kv@10.0.0.7:8002@m", third, URL, 4), Match)
    assert isinstance(judge_topic("kv@10.0.0.7:8003@m", third, URL, 4), Other)


def test_a_topic_is_shown_whole_or_cut_whatever_its_bytes_are() -> None:
    assert shown("kv@größe@m".encode()) == "kv@größe@m"
    assert shown(b"kv\xff") == "kv�"
    assert len(shown("é".encode() * 10_000_000)) == MOST_CHARS


@given(topic=st.text(max_size=40), pod=st.sampled_from(["p", "10.0.0.7:8000"]))
def test_any_topic_is_judged(topic: str, pod: str) -> None:
    judge_topic(topic, Worker(Pod(pod)), URL, 1)
    judge_topic(f"kv@{topic}@m", Worker(Pod(pod)), URL, 1)


@pytest.mark.parametrize("where", ["settings", "worker"])
@pytest.mark.parametrize(
    ("filtered", "topic"),
    [
        ("x-events", b"x-events"),
        ("kv@", b"kv@127.0.0.1:8000@m"),
        ("", b"kv@127.0.0.1:8000@m"),
        ("", b""),
        ("kv-events", b"kv-events-2"),  # a prefix: taken, by the rule of the socket
    ],
)
async def test_the_configured_topic_is_a_prefix_and_nothing_looks_at_it_again(
    filtered: str, topic: bytes, where: str
) -> None:
    settings = replace(QUICK, topic=filtered if where == "settings" else "")
    async with Publisher(topic=topic) as one, ingesting(MemoryStore(), settings) as ingest:
        mine = filtered if where == "worker" else ""
        await ingest.subscriptions.up(up("a", one, topic=mine))
        await one.listened()
        await send(one, 1)
        if filtered:  # what the filter does not take never arrives
            await one.raw([b"else", number(1), payload(store(9))])
        await one.raw([topic, number(1), payload(store(2))])
        await ingest.at("a", 1)
        assert ingest.held("a", (1, 2, 9)) == [1, 2]
