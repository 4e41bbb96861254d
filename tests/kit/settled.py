"""Settled: has a plane given everything back? Asked of its own gauges and of the engines' truth."""

from __future__ import annotations

from typing import Any

from kit.plane import Plane

GAUGES = tuple(
    f"kvplane_router_{name}"
    for name in (
        "inflight",
        "rooms_open",
        "legs_open",
        "connections_busy",
        "aftermath_open",
        "admission_running",
        "admission_waiting",
        "admission_body_bytes",
        "key_running",
    )
)


async def unsettled(running: Plane) -> list[Any]:
    """What is not given back yet."""
    found: list[Any] = []
    async with running.session.get(f"{running.url}/metrics") as answer:
        for line in (await answer.text()).splitlines():
            if line.startswith(GAUGES) and float(line.rsplit(" ", 1)[1]):
                found.append(line)
    for name, seat in running.engines.items():
        truth = await running.get("/truth", at=seat.url)
        (rank,) = truth["ranks"]
        pages = rank["pages"]
        whole = pages["free"] + pages["used"] + pages["quarantined"] == pages["all"]
        held = sum(block["refs"] for block in rank["blocks"])
        cached = len(rank["blocks"])
        lost = not whole or pages["used"] != cached
        moving = {what: count for what, count in rank["transfer"].items() if count}
        work = (rank["sequences"], held, truth["rooms"]["open"], moving)
        if lost or pages["quarantined"] or any(work):
            found.append((name, pages, cached, *work))
    return found
