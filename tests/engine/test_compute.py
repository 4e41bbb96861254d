"""Compute: jobs run one after the other, and whoever leaves waits until its job let go."""

from __future__ import annotations

import asyncio
import threading

import pytest
from prometheus_client import CollectorRegistry

from kvplane.engine import blas
from kvplane.engine.compute import Compute
from kvplane.engine.metrics import EngineMetrics
from kvplane.runtime import SystemClock


@pytest.fixture
def compute() -> Compute:
    return Compute(SystemClock(), EngineMetrics(CollectorRegistry()))


async def test_a_cancelled_job_is_over_before_the_cancel_arrives(compute: Compute) -> None:
    begun, go_on, over = threading.Event(), threading.Event(), threading.Event()

    def job() -> None:
        begun.set()
        go_on.wait(5)
        over.set()

    task = asyncio.create_task(compute.run(job))
    await asyncio.to_thread(begun.wait, 5)
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=0.05)
    assert not done  # the job still writes
    task.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert over.is_set()
    compute.stop()


async def test_a_job_that_waits_its_turn_is_never_begun_once_cancelled(compute: Compute) -> None:
    go_on, ran = threading.Event(), threading.Event()
    first = asyncio.create_task(compute.run(go_on.wait, 5))
    second = asyncio.create_task(compute.run(ran.set))
    await asyncio.sleep(0)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    go_on.set()
    assert await first
    await compute.run(lambda: None)
    assert not ran.is_set()
    compute.stop()


async def test_a_jobs_error_is_its_askers(compute: Compute) -> None:
    with pytest.raises(ZeroDivisionError):
        await compute.run(lambda: 1 // 0)
    compute.stop()


def test_the_blas_of_numpys_own_wheels_is_told() -> None:
    assert blas.one_thread() or not blas.libraries()
