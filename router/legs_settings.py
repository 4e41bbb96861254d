"""Leg settings: how long a leg may take and how much it may hold.

Pure: one frozen dataclass. Read by legs.py and its parts, dispatch.py and the proxy.
Open it to change a limit of the connections towards the engines.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LegSettings:
    """Limits of one leg; seconds and bytes."""

    connect_s: float = 3.0  # DNS + TCP + TLS together; a living engine answers in milliseconds
    wait_s: float = 10.0  # for one of a full engine's connections; longer is an overload
    head_s: float = 600.0  # request written -> head; a patient leg's head may come with its end
    idle_s: float = 120.0  # between two reads of a body, while we are the ones who wait
    total_s: float = 1800.0  # the whole leg; sgl router's --request-timeout-secs
    expire_s: float = 4.0  # idle connections: below uvicorn's 5 s, so that we let go first
    lesson_s: float = 300.0  # an engine that closed idle connections sooner is believed this long
    sweep_s: float = 0.25  # grain of all deadlines; one sweeper, no timer per request
    breath_s: float = 0.01  # before more of an answer that nobody looks at is read; then longer
    pause_bytes: int = 256 * 1024  # stop reading the engine while the client holds back this much
    head_bytes: int = 64 * 1024  # names and values of one head; longest silent stretch of framing
    head_lines: int = 128  # headers and trailers of one answer
    informational: int = 16  # 1xx answers before the real one
    answer_bytes: int = 64 * 1024 * 1024  # an answer that is read whole, not streamed
    joined_bytes: int = 16 * 1024  # below this head and body are one write; else a copy costs more
    connections: int = 1024  # per engine
    waiters: int = 1024  # legs that may wait for a connection of a full engine
    idle_connections: int = 256  # kept per engine
