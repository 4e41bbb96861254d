"""Index runs: fresh processes of index_process.py, and the peer's environment.

Edge of bench/. Open it to change how a measurement is started, or who the peer is.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.timing import Absent
from bench.workload import Spec

ROOT = Path(__file__).parents[1]
PEER = "Dynamo"
MOST_S = 600.0  # of one process

Found = dict[str, list[dict[str, Any]]]  # engine -> what each round found


class Failed(Exception):
    """A process did not measure anything; its last words."""


def take_turns(
    job: str, spec: Spec, engines: Sequence[str], rounds: int, queries: int = 0
) -> tuple[Found, Absent | None]:
    """A process for each engine and round, the order of engines turned round each time; the peer
    with them where it is, else why not. A peer that fails is left out, ours may not."""
    found: Found = {engine: [] for engine in engines}
    absent = None
    if os.environ.get("DYNAMO_PY"):
        found[PEER] = []
    else:
        absent = Absent(f"{job}, {PEER}'s figures", "DYNAMO_PY names no environment with it")
    for number in range(rounds):
        for engine in list(found) if number % 2 == 0 else list(found)[::-1]:
            try:
                found[engine].append(_fresh(job, engine, spec, queries))
            except Failed as error:
                if engine != PEER:
                    raise
                absent = Absent(f"{job}, {PEER}'s figures", f"failed: {error}")
                del found[PEER]
    return found, absent


def _fresh(job: str, engine: str, spec: Spec, queries: int) -> dict[str, Any]:
    python = os.environ["DYNAMO_PY"] if engine == PEER else sys.executable
    told = {"job": job, "engine": engine, "spec": asdict(spec), "queries": queries}
    try:
        ran = subprocess.run(
            [python, "-m", "bench.index_process", json.dumps(told)],
            capture_output=True, text=True, timeout=MOST_S, cwd=ROOT,
            env={**os.environ, "DYN_LOG": "error"},
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Failed(f"{error}") from error
    if ran.returncode != 0:
        raise Failed((ran.stderr.strip().splitlines() or [f"status {ran.returncode}"])[-1])
    found: dict[str, Any] = json.loads(ran.stdout.strip().splitlines()[-1])
    return found
