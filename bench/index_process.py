"""Index process: one index, one workload, one measurement: `python -m bench.index_process JOB`.

Edge of bench/: runs in the peer's environment too, so only what ENGINES names imports more than
Python. On one core where the system lets us; what is measured goes to stdout as JSON.

    speed    CPU and wall us of a block that is told, us of each question by share
    memory   bytes of a (pod, block) pair: RSS when all is told event by event, less RSS before
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from typing import Any

from bench.workload import Event, Spec, Workload

ENGINES = {
    "changes": ("bench.index_adapter", "Index"),
    "msgpack": ("bench.index_packed", "Packed"),
    "Dynamo": ("bench.index_dynamo", "Dynamo"),
}
SIZE = 16  # tokens of a block
BATCH = 2000  # events made ready, untimed, before they are told
WARM = 30  # questions
CONTENT = 0x9E3779B97F4A7C15  # name of a block ^ this = its content's hash, one to one


def speed(engine: Any, load: Workload, queries: int) -> dict[str, Any]:
    """Tell all, then ask."""
    blocks, cpu_s, wall_s, events = 0, 0.0, 0.0, load.events()
    while batch := list(islice(events, BATCH)):
        blocks += sum(len(event.blocks) for event in batch)
        ready = [_payload(engine, event) for event in batch]
        apply = engine.apply
        began, used = time.perf_counter(), time.process_time()
        for payload in ready:
            apply(payload)
        cpu_s += time.process_time() - used
        wall_s += time.perf_counter() - began
    batch, ready = [], []
    told = {"cpu_us": cpu_s / blocks * 1e6, "wall_us": wall_s / blocks * 1e6}
    return {**told, "queries": _ask(engine, load, queries)}


def _ask(engine: Any, load: Workload, queries: int) -> dict[str, dict[str, list[float]]]:
    """ "wall" and "CPU" -> share of the prompt that is held -> us of each question. Answers have to
    be right."""
    asked = [
        (query.share, query.hit, engine.query(query.blocks, _contents(query.blocks)))
        for query in load.queries(queries)
    ]
    gc.collect()
    find, wall, cpu = engine.find, dict[str, list[float]](), dict[str, list[float]]()
    for _, _, payload in asked[:WARM]:
        find(payload)
    for share, hit, payload in asked:
        used, began = time.process_time(), time.perf_counter()
        found = find(payload)
        took, used = time.perf_counter() - began, time.process_time() - used
        wall.setdefault(str(share), []).append(took * 1e6)
        cpu.setdefault(str(share), []).append(used * 1e6)
        deepest = max(found.values(), default=0)
        assert deepest == hit, f"{deepest} blocks found where {hit} are held"
    return {"wall": wall, "CPU": cpu}


def memory(engine: Any, load: Workload, queries: int) -> dict[str, Any]:
    """Tell all."""
    gc.collect()
    before = _rss_bytes()
    for event in load.events():
        engine.apply(_payload(engine, event))
    gc.collect()
    return {"bytes": (_rss_bytes() - before) / load.resident}


def _payload(engine: Any, event: Event) -> Any:
    seq = list(event.blocks)
    return engine.event(event.pod, event.stored, event.parent, seq, _contents(seq))


def _contents(blocks: list[int]) -> list[int]:
    return [block ^ CONTENT for block in blocks]


def _rss_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def pin() -> None:
    """To the last core we may use, or nowhere."""
    with suppress(AttributeError, OSError):  # not every system can, nor may every container
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


JOBS: dict[str, Callable[[Any, Workload, int], dict[str, Any]]] = {"speed": speed, "memory": memory}


def main(job: dict[str, Any]) -> None:
    """{"job", "engine", "spec", "queries"}"""
    pin()
    module, name = ENGINES[job["engine"]]
    spec = Spec(**job["spec"])
    engine = getattr(importlib.import_module(module), name)(spec.pods, SIZE)
    print(json.dumps(JOBS[job["job"]](engine, Workload(spec), job["queries"])))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
