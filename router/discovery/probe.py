"""Probe: is this engine alive, and what does it say about itself?

Edge: a few GETs with deadlines and size limits over aiohttp. static.py decides when; facts.py says
what the answers mean. Open it to change which routes are asked.

    /health   (SGLang: /ready first, its /health runs a request)      only 200 is alive
    /server_info -> /get_server_info    /v1/models    /kv_event_sources (vLLM)
    /metrics    of engines that do not tell their generation
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from dataclasses import dataclass, field
from errno import ECONNREFUSED
from typing import Any

import aiohttp
import msgspec

from kvplane.vocabulary import WorkerUp

from ..errors import engine_said
from ..settings import ProbeSettings
from .facts import Answers, Facts, family, filled

MOST_SAID = 200  # characters of what an engine says of itself


class ProbeFailed(Exception):
    """No answer that could be used. Says from where and why, in a few words."""

    def __init__(self, text: str, stage: str | None = None) -> None:
        super().__init__(text)
        self.stage = stage  # of a meeting, where the engine names one


@dataclass(frozen=True, slots=True)
class Probed:
    """What was learnt. `pending`: the engine lives, but did not tell its facts in time.

    `changing`: it tells what may be another thing next time, a life or a sleep.
    """

    up: WorkerUp
    pending: bool = False
    changing: bool = field(default=False, compare=False)


async def probe(
    session: aiohttp.ClientSession,
    declared: WorkerUp,
    settings: ProbeSettings | None = None,
    before: WorkerUp | None = None,
) -> Probed:
    """The declared worker filled from the engine. Raises ProbeFailed where it does not live.

    An engine that lives but keeps silent about itself is usable as declared (FR-RT-31). `before` is
    what was learnt last time: what its metrics said stays while they do not come.
    """
    settings = settings or ProbeSettings()
    await alive(session, declared, settings)
    try:
        info, models = await asyncio.gather(
            _info(session, declared.url, settings),
            _facts(session, declared.url + "/v1/models", settings),
        )
        vllm = family(declared, Answers(info, models, {})) == "vllm"
        sources, metrics = await asyncio.gather(
            _facts(session, declared.url + "/kv_event_sources", settings) if vllm else _nothing(),
            _page(session, declared.url + "/metrics", settings) if "kvplane" not in info else _no(),
        )
    except ProbeFailed:
        return Probed(declared, pending=True)
    up = filled(declared, Answers(info, models, sources, metrics), before)
    return Probed(up, changing=bool(up.generation) or metrics is not None)


async def _nothing() -> Facts:
    return {}


async def _no() -> None:
    return None


async def alive(session: aiohttp.ClientSession, worker: WorkerUp, settings: ProbeSettings) -> None:
    """Returns where the engine says 200 in time; raises ProbeFailed with the reason otherwise."""
    paths = ("/ready", "/health") if worker.engine == "sglang" else ("/health",)
    for path in paths:
        status, body = await _get(session, worker.url + path, settings)
        if status != 404:
            break
    if status != 200:
        text, stage = engine_said(body)
        said = ": " + " ".join(text.split())[:MOST_SAID] if text else ""
        raise ProbeFailed(f"GET {path} answered {status}{said}", stage)


async def _info(session: aiohttp.ClientSession, url: str, settings: ProbeSettings) -> Facts:
    """Server info under its new or its old name."""
    found = await _facts(session, url + "/server_info", settings)
    return found or await _facts(session, url + "/get_server_info", settings)


async def _facts(session: aiohttp.ClientSession, url: str, settings: ProbeSettings) -> Facts:
    """A JSON object; empty where the route is not there."""
    status, body = await _get(session, url, settings)
    if status in (404, 405):
        return {}
    if status != 200:
        raise ProbeFailed(f"GET {url} answered {status}")
    try:
        found: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProbeFailed(f"GET {url}: no valid JSON: {error}") from error
    return found if isinstance(found, dict) else {}


async def _page(session: aiohttp.ClientSession, url: str, settings: ProbeSettings) -> str | None:
    """A page of text; None where it does not come: nobody is down for want of metrics."""
    try:
        status, body = await _get(session, url, settings)
    except ProbeFailed:
        return None
    return body.decode("utf-8", "replace") if status == 200 else None


async def _get(
    session: aiohttp.ClientSession, url: str, settings: ProbeSettings
) -> tuple[int, bytes]:
    """Status and body within the deadline and the size limit."""
    try:
        async with (
            asyncio.timeout(settings.deadline_s),
            session.get(url, allow_redirects=False) as answer,
        ):
            body = bytearray()
            async for chunk in answer.content.iter_any():
                body += chunk
                if len(body) > settings.most_bytes:
                    raise ProbeFailed(f"GET {url}: more than {settings.most_bytes} bytes")
            return answer.status, bytes(body)
    except TimeoutError as error:
        raise ProbeFailed(f"GET {url}: no answer in {settings.deadline_s} s") from error
    except aiohttp.ClientConnectorError as error:
        raise ProbeFailed(_unreached(error)) from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise ProbeFailed(f"GET {url}: {error or type(error).__name__}") from error


def _unreached(error: aiohttp.ClientConnectorError) -> str:
    """Why there was no connection, in words for a person; a name may have several addresses."""
    host = f"[{error.host}]" if ":" in error.host else error.host
    where, cause = f"{host}:{error.port}", getattr(error, "os_error", None)
    if cause is None or isinstance(cause, ssl.SSLError):  # None: a certificate is not believed
        failed = cause or getattr(error, "certificate_error", None)
        why = getattr(failed, "verify_message", "") or getattr(failed, "reason", "")
        return f"{where} cannot be reached: TLS: {why or 'the handshake failed'}"
    if isinstance(cause, ConnectionRefusedError) or f"[Errno {ECONNREFUSED}]" in str(cause):
        return f"{where} refused the connection"
    if isinstance(cause, socket.gaierror):
        return f"{where} cannot be reached: no such name: {cause.strerror or error.host}"
    number = cause.errno or 0
    why = os.strerror(number) if number > 0 else cause.strerror or type(cause).__name__
    return f"{where} cannot be reached: {why}"
