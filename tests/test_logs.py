"""Logs: a line is a line, as text or as JSON; and no prompt and no key is ever in one."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
from typing import Any

import pytest
from kit.gatehouse import gatehouse
from kit.peer import Call, answer

from kvplane.logs import JsonLines
from kvplane.router.settings import AdmissionSettings, RouterSettings


def line(text: str, *given: Any, error: bool = False) -> dict[str, Any]:
    record = logging.LogRecord("kvplane.x", logging.WARNING, "x.py", 1, text, given, None)
    if error:
        try:
            raise ValueError("two\nlines")
        except ValueError:
            record.exc_info = sys.exc_info()
    written = JsonLines().format(record)
    assert "\n" not in written
    found: dict[str, Any] = json.loads(written)
    return found


def test_a_line_of_json_has_the_text_and_its_facts() -> None:
    found = line("gap not closed worker=%s first=%d why=%r action=clear", "p1@2", 8, "no answer")
    assert found["text"] == "gap not closed worker=p1@2 first=8 why='no answer' action=clear"
    facts = {"worker": "p1@2", "first": "8", "why": "no answer", "action": "clear"}
    assert found["facts"] == facts
    assert (found["level"], found["logger"]) == ("warning", "kvplane.x")
    assert found["at"].endswith("Z") and len(found["at"]) == 24


@pytest.mark.parametrize("text", ["", "plain", "a = b", "url=http://x?a=b&c=d", "ünï=cödé 日本=x"])
def test_whatever_a_line_holds_it_is_one_line_of_json(text: str) -> None:
    assert line("%s", text)["text"] == text


def test_a_traceback_is_one_member() -> None:
    assert line("it broke", error=True)["error"].endswith("ValueError: two\nlines")


def test_a_process_logs_json_where_it_is_told_to() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = ["router", "--port", str(taken.getsockname()[1]), "--log-format", "json"]
        command = [sys.executable, "-m", "kvplane", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, "somebody listens there"
    *logged, complaint = done.stderr.strip().splitlines()
    assert complaint.startswith("kvplane: ")
    assert logged and all(json.loads(one)["level"] in ("info", "warning") for one in logged)


async def test_no_prompt_and_no_key_is_ever_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def engine(call: Call) -> None:
        while request := await call.request():
            broken = b"decode" in request and b"/generate" in request
            await call.send(answer(b'{"error":{"message":"no"}}', 500 if broken else 200))

    settings = RouterSettings(
        tokenizer="builtin", admission=AdmissionSettings(api_key="sk-own-key")
    )
    caplog.set_level(logging.DEBUG)
    async with gatehouse({"p1": engine, "d1": engine}, settings) as house:
        for key in ("sk-own-key", "sk-wrong-key"):
            head = {"authorization": f"Bearer {key}"}
            for path, body in (
                ("/generate", {"text": "my-very-words decode"}),
                ("/v1/completions", {"model": "tiny", "prompt": "my-very-words"}),
                ("/v1/chat/completions", {"messages": [{"role": "my-very-words", "content": 5}]}),
                ("/v1/completions", b'{"prompt": "my-very-words'),
                ("/v1/embeddings", {"input": "my-very-words"}),
            ):
                await house.post(path, body, head)
    assert caplog.records, "something is logged at this level"
    ours = [one.getMessage() for one in caplog.records if one.name.startswith("kvplane")]
    for text in ours:
        assert not [word for word in ("my-very-words", "sk-own", "sk-wrong") if word in text], text
