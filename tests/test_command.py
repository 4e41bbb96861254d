"""The command as a process: Ctrl-C at any time is quiet, and what goes wrong is one sentence."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from kit.ports import free_port

from kvplane.health import healthy
from kvplane.index import RedisStore

# Stops at the first import of a name that begins so, and tells that it is there.
HELD = """
    import importlib.abc, sys, time

    class Held(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            if name == {module!r}:
                print("held", flush=True)
                time.sleep(60)

    sys.meta_path.insert(0, Held())
    sys.argv = ["kvplane", "demo", "--port", "0"]
    from kvplane.__main__ import main

    sys.exit(main())
"""


def run(*argv: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvplane", *argv],
        capture_output=True, text=True, timeout=60, cwd=folder, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("module", ["argparse", "tomllib", "uvloop", "aiohttp", "kvplane.plane"])
def test_ctrl_c_while_it_still_loads_prints_nothing_and_ends_at_once(
    module: str, tmp_path: Path
) -> None:
    (tmp_path / "kvplane.toml").write_text("")
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(HELD.format(module=module))],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
    ) as process:  # fmt: skip
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "held\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == -signal.SIGINT
        assert process.stdout.read() + process.stderr.read() == ""


def test_an_unreachable_gateway_is_one_sentence_that_says_what_to_do(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    done = run("rank", "x", "--url", url, folder=tmp_path)
    assert done.returncode == 1
    assert done.stderr == (
        f"kvplane: {url} cannot be reached: Connection refused; "
        "is a gateway running there? (--url)\n"
    )


async def test_an_https_url_of_a_door_that_speaks_http_is_told_so(tmp_path: Path) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for words in (("rank", "x"), ("tail",), ("doctor",)):
            done = await asyncio.to_thread(run, *words, "--url", url, folder=tmp_path)
            assert done.returncode == 1
            assert f"{url} speaks no TLS that we do: wrong version number" in done.stderr


def test_a_command_without_its_redis_says_so(tmp_path: Path) -> None:
    done = run("ingest", folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr == (
        "kvplane: redis is missing: kvplane ingest needs --redis redis://host:6379/0\n"
    )


def test_a_tokenizer_folder_without_a_tokenizer_is_a_wrong_value(tmp_path: Path) -> None:
    done = run("router", "--tokenizer", str(tmp_path), folder=tmp_path)
    assert done.returncode == 2
    assert "no tokenizer.json there; name a folder that has one, or 'builtin'" in done.stderr


async def test_a_number_of_shards_that_the_store_has_not_is_one_sentence_and_the_end(
    redis_url: str, redis_prefix: str, tmp_path: Path
) -> None:
    store = RedisStore(redis_url, redis_prefix, 2)
    await store.head()
    await store.close()
    words = ("--redis", redis_url, "--redis-prefix", redis_prefix, "--shards", "3")
    done = await asyncio.to_thread(run, "ingest", *words, folder=tmp_path)
    assert done.returncode == 1
    assert done.stderr == "kvplane: shards 3: this store was made with 2, start with that\n"


def test_a_taken_port_is_one_sentence_naming_who_wanted_it(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run("bootstrap", "--port", str(port), "--log-level", "warning", folder=tmp_path)
    assert done.returncode == 1
    wanted = f"bootstrap cannot listen on 127.0.0.1:{port}: Address already in use"
    assert done.stderr == f"kvplane: {wanted}; --port chooses another\n"


@pytest.mark.parametrize("flag", ["--port", "--bootstrap-port", "--events-port", "--replay-port"])
def test_a_second_engine_is_told_which_of_its_ports_is_taken_and_by_which_flag_to_change_it(
    flag: str, tmp_path: Path
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        ports = {"--port": "0", "--events-port": "0", "--replay-port": "0"}
        ports["--bootstrap-port"] = str(free_port())  # decodes must know it
        words = [word for pair in (ports | {flag: port}).items() for word in pair]
        done = run("engine", "--role", "prefill", *words, folder=tmp_path)
    assert done.returncode == 1
    assert f"127.0.0.1:{port}: Address already in use; {flag} chooses another\n" in done.stderr


@pytest.mark.parametrize(
    ("answer", "status", "said"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", 0, ""),
        (b"HTTP/1.1 503 No\r\ncontent-length: 0\r\n\r\n", 1, "it answered 503"),
        (b"nonsense\r\n\r\n", 1, "nonsense"),
        (b"", 1, "closed connection"),
    ],
)
async def test_a_health_check_is_0_for_200_alone(
    answer: bytes, status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/health"
        assert await asyncio.to_thread(healthy, url) == status
    assert said in capsys.readouterr().err


def test_a_health_check_loads_no_http_client_or_framework(tmp_path: Path) -> None:
    program = (
        "import sys; from kvplane.__main__ import main; "
        f"code = main(['healthy', 'http://127.0.0.1:{free_port()}/']); "
        "print(code, [m for m in ('aiohttp', 'uvicorn', 'numpy', 'redis') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60,
        cwd=tmp_path, check=False, env={**os.environ, "PYTHONSAFEPATH": "1"},
    )  # fmt: skip
    assert done.stdout == "1 []\n"
