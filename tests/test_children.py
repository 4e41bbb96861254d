"""Children: a process of ours answers or is named, and never outlives us."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap

import psutil
import pytest
from kit.ports import free_port
from kit.wait import until

from kvplane.children import Child, ChildFailed


async def test_a_child_that_ends_early_is_named_with_what_it_wrote() -> None:
    child = Child("wrong", ["engine", "--role", "chief"], "http://127.0.0.1:9/health")
    with pytest.raises(ChildFailed, match=r"wrong ended with status 2(.|\n)*role = 'chief'"):
        await child.start()


async def test_a_child_that_never_answers_is_ended_at_its_deadline() -> None:
    port = free_port()
    child = Child(
        "mute",
        ["bootstrap", "--port", str(port)],
        f"http://127.0.0.1:{port}/no-such-route",
        deadline_s=0.5,
    )
    with pytest.raises(ChildFailed, match=r"mute .* silent"):
        await child.start()
    assert child.returncode is not None


async def test_stop_ends_it_and_kill_too() -> None:
    for end in ("stop", "kill"):
        port = free_port()
        url = f"http://127.0.0.1:{port}/health"
        child = Child("directory", ["bootstrap", "--port", str(port)], url)
        await child.start()
        assert child.pid is not None and psutil.pid_exists(child.pid)
        if end == "kill":
            child.kill()
        await child.stop()
        assert child.returncode is not None
        assert child.returncode == (0 if end == "stop" else -signal.SIGKILL)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's promise is Linux only")
async def test_a_child_is_gone_when_its_parent_is_killed() -> None:
    port = free_port()
    program = textwrap.dedent(f"""
        import asyncio
        from kvplane.children import Child

        async def main():
            child = Child("d", ["bootstrap", "--port", "{port}"], "http://127.0.0.1:{port}/health")
            await child.start()
            print(child.pid, flush=True)
            await asyncio.sleep(60)

        asyncio.run(main())
    """)
    parent = subprocess.Popen(  # noqa: ASYNC220 - a parent to be killed
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pid = int(await asyncio.to_thread(parent.stdout.readline))
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    await until(lambda: not psutil.pid_exists(pid), what="the child to be gone")
