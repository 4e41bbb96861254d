"""ZMQ messages, live and replayed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvplane.events import frames
from kvplane.events.errors import BadFrames

VECTORS = Path(__file__).parents[1] / "vectors"
SEVEN = (7).to_bytes(8, "big")


def test_a_live_message_is_topic_sequence_payload() -> None:
    found = frames.live([b"kv@p", SEVEN, b"x"])
    assert found == frames.Frame(7, b"x") and found.topic == "kv@p"
    assert frames.live([b"", SEVEN, b"x"]).topic == ""


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ([], "0 frames"),
        ([b"x"], "1 frames"),
        ([b"", SEVEN], "2 frames"),
        ([b"", b"", SEVEN, b"x"], "4 frames"),
        ([b"", SEVEN[1:], b"x"], "7 bytes"),
        ([b"", SEVEN + b"\0", b"x"], "9 bytes"),
        ([b"", b"\xff" * 8, b""], "at most"),
    ],
)
def test_other_shapes_are_refused_with_a_reason(message: list[bytes], why: str) -> None:
    with pytest.raises(BadFrames, match=why):
        frames.live(message)


def test_a_refusal_is_a_sample_of_what_came() -> None:
    with pytest.raises(BadFrames, match=r"^2 frames of 4, 8 bytes: must be topic, sequence"):
        frames.live([b"kv@p", SEVEN])
    with pytest.raises(BadFrames) as refused:
        frames.live([b"x"] * 10_000)
    assert len(str(refused.value)) < 100


@pytest.mark.parametrize("lead", [[b""], [b"", b"topic"], [b"", b""]])
def test_replay_answers_of_old_and_new_versions(lead: list[bytes]) -> None:
    assert frames.replayed([*lead, SEVEN, b"x"]) == frames.Frame(7, b"x")
    assert frames.replayed([*lead, b"\xff" * 8, b""]) is None


def test_a_replayed_batch_is_the_live_one_with_or_without_its_topic() -> None:
    live, old = frames.live([b"t", SEVEN, b"x"]), frames.replayed([b"", SEVEN, b"x"])
    new = frames.replayed([b"", b"t", SEVEN, b"x"])
    assert live == old == new
    assert old is not None and new is not None and (old.topic, new.topic) == ("", "t")


@pytest.mark.parametrize("message", [[], [b""], [b"", b"", b"", SEVEN, b"x"], [b"", b"7", b"x"]])
def test_an_answer_of_no_known_shape_is_refused(message: list[bytes]) -> None:
    with pytest.raises(BadFrames):
        frames.replayed(message)


def test_recorded_answers_and_questions() -> None:
    seen = 0
    for line in (VECTORS / "sglang-kv-events.jsonl").read_text().splitlines():
        told = json.loads(line)
        if told.get("kind") != "replay" or not told["answers_hex"]:
            continue
        asked = [bytes.fromhex(frame) for frame in told["request_hex"]]
        assert frames.question(int.from_bytes(asked[1], "big")) == asked
        answers = [[bytes.fromhex(f) for f in answer] for answer in told["answers_hex"]]
        *batches, end = [frames.replayed(answer) for answer in answers]
        assert end is None and all(batches)
        seen += 1
    assert seen == 6


def test_the_digest_tells_batches_of_one_number_apart() -> None:
    assert frames.Frame(7, b"x").digest != frames.Frame(7, b"y").digest
