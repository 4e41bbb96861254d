"""A call to Redis gets its own answer or none: cancelled, crowded out, late, short of memory."""

from __future__ import annotations

import asyncio
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import trustme
from kit.cable import Cable
from kit.durable import durable
from kit.ports import free_port
from kit.redis import binary, server
from kit.wait import until
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from kvplane.index import (
    Applied,
    Batch,
    IndexSettings,
    Note,
    RedisStore,
    Row,
    StoreDown,
    StoreUnfit,
)
from kvplane.index.stores.line import ours
from kvplane.runtime import cancel
from kvplane.vocabulary import BlockHash, Epoch, Pod, Worker

A, ONE = Worker(Pod("a")), Epoch(1)
FAST = IndexSettings(block_ms=50, command_timeout_s=1.0)


@pytest.fixture
async def raw(redis_url: str) -> AsyncIterator[Redis]:
    client = Redis.from_url(redis_url)
    yield client
    await client.aclose()


async def lives(store: RedisStore, count: int) -> dict[Worker, int]:
    """Workers whose epochs are all different, so that an answer tells whose it is."""
    found = {}
    for number in range(count):
        worker = Worker(Pod(f"w{number}"))
        found[worker] = await store.begin_life(worker, Epoch(number)) if number else ONE
        if not number:
            await store.begin_life(worker, None)
    return found


# -- cancelled ---------------------------------------------------------------------------------


async def test_a_thousand_calls_over_a_slow_line_get_their_own_answers_though_a_third_is_cancelled(
    redis_url: str, redis_prefix: str
) -> None:
    port, chance = int(redis_url.rpartition(":")[2].partition("/")[0]), random.Random(13)
    async with Cable(port, delay_s=0.02) as line:  # each way
        settings = IndexSettings(connections=8, command_timeout_s=30.0)
        store = RedisStore(f"redis://127.0.0.1:{line.listen}/0", redis_prefix, settings=settings)
        epochs = await lives(store, 8)
        answered = cancelled = 0

        async def one(number: int) -> None:
            nonlocal answered, cancelled
            worker = list(epochs)[number % 8]
            call = asyncio.create_task(store.position(worker))
            if chance.random() < 0.3:
                await asyncio.sleep(chance.random() * 0.06)
                call.cancel()
            try:
                found = await call
            except asyncio.CancelledError:
                cancelled += 1
                return
            assert found is not None and found.epoch == epochs[worker]
            answered += 1

        crowd = asyncio.Semaphore(40)

        async def in_turn(number: int) -> None:
            async with crowd:
                await one(number)

        await asyncio.gather(*map(in_turn, range(1000)))
        assert answered + cancelled == 1000 and answered > 500 and cancelled > 200
        await store.close()


async def test_a_call_cancelled_at_any_step_never_leaves_its_answer_to_the_next(
    redis_url: str, redis_prefix: str
) -> None:
    store = RedisStore(redis_url, redis_prefix, settings=IndexSettings(connections=2))
    epochs = await lives(store, 4)
    for turn in range(200):
        calls = {one: asyncio.create_task(store.position(one)) for one in epochs}
        for _ in range(turn % 20):
            await asyncio.sleep(0)
        calls[list(epochs)[turn % 4]].cancel()
        await asyncio.wait(calls.values())
        for worker, call in calls.items():
            found = None if call.cancelled() else call.result()
            assert call.cancelled() or (found is not None and found.epoch == epochs[worker])
    await store.close()


@pytest.mark.parametrize("ends_with", [None, OSError("gone"), RedisConnectionError("gone")])
async def test_a_cancellation_that_the_client_loses_still_ends_the_task(
    ends_with: Exception | None,
) -> None:
    async def work() -> None:
        with ours("h:1"):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:  # as asyncio.wait_for does before Python 3.12
                if ends_with:
                    raise ends_with from None

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    await cancel(task)
    assert task.cancelled()


# -- crowded -----------------------------------------------------------------------------------


async def clients(raw: Redis, prefix: str) -> int:
    """Connections of ours: those whose last command had to do with no other test."""
    return len([one for one in await raw.client_list() if one["cmd"] in ("hgetall", "hexists")])


async def test_five_hundred_calls_at_once_share_ten_connections(
    redis_prefix: str,
) -> None:
    with server(binary()) as url:
        raw, store = Redis.from_url(url), None
        store = RedisStore(url, redis_prefix, settings=IndexSettings(connections=10))
        epochs = await lives(store, 5)
        most = 0
        calls = [asyncio.create_task(store.position(w)) for _ in range(100) for w in epochs]
        while not all(call.done() for call in calls):
            most = max(most, (await raw.info("clients"))["connected_clients"])
        for number, call in enumerate(calls):
            found = call.result()
            assert found is not None and found.epoch == list(epochs.values())[number % 5]
        assert most <= 11  # and the one that counts
        await store.close()
        await raw.aclose()


async def test_three_processes_share_a_server_that_takes_fewer_clients_than_they_may_open(
    redis_prefix: str,
) -> None:
    with server(binary(), "--maxclients", "32") as url:
        stores = [RedisStore(url, redis_prefix, settings=IndexSettings()) for _ in range(3)]
        epochs = await lives(stores[0], 4)
        calls = [store.position(w) for _ in range(50) for w in epochs for store in stores]
        found = await asyncio.gather(*calls, return_exceptions=True)
        for number, one in enumerate(found):
            epoch = list(epochs.values())[number // 3 % 4]
            assert getattr(one, "epoch", None) == epoch or isinstance(one, StoreDown)
        assert sum(isinstance(one, StoreDown) for one in found) == 0
        for store in stores:
            await store.close()


async def test_who_waits_for_a_connection_too_long_is_told_that_the_store_is_down(
    redis_url: str, redis_prefix: str
) -> None:
    port = int(redis_url.rpartition(":")[2].partition("/")[0])
    async with Cable(port) as line:
        settings = IndexSettings(connections=2, command_timeout_s=0.5)
        store = RedisStore(f"redis://127.0.0.1:{line.listen}/0", redis_prefix, settings=settings)
        await store.begin_life(A, None)
        line.freeze()
        began = time.monotonic()
        found = await asyncio.gather(
            *(store.position(A) for _ in range(20)), return_exceptions=True
        )
        assert all(isinstance(one, StoreDown) for one in found)
        assert time.monotonic() - began < 5
        line.mend()
        await until(lambda: answers(store))
        await store.close()


async def answers(store: RedisStore) -> bool:
    try:
        return await store.position(A) is not None
    except StoreDown:
        return False


@pytest.mark.parametrize("blocks", [10, 1000, 10_000])
async def test_an_apply_of_any_size_is_one_round_trip(
    redis_url: str, redis_prefix: str, blocks: int
) -> None:
    port = int(redis_url.rpartition(":")[2].partition("/")[0])
    async with Cable(port) as line:
        store = RedisStore(f"redis://127.0.0.1:{line.listen}/0", redis_prefix)
        await store.begin_life(A, None)
        await store.apply(Batch(A, ONE, 0, 0))  # the script is known from here on
        line.delay_s, before = 0.005, line.answers
        rows = {b"%d" % n: Row(BlockHash(n), None, (1, 0, 0, 0), 16) for n in range(blocks)}
        calls = [Batch(A, ONE, number, number, (), rows) for number in range(1, 6)]
        for batch in calls:
            assert isinstance(await store.apply(batch), Applied)
        assert line.answers - before == 5
        await store.close()


# -- refused, late -----------------------------------------------------------------------------


async def test_a_frozen_server_is_down_within_the_deadline_and_back_when_it_thaws() -> None:
    with durable() as redis:
        store = RedisStore(redis.url, settings=FAST)
        await store.begin_life(A, None)
        redis.send(signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(StoreDown, match="no answer in 1 s"):
            await store.position(A)
        with pytest.raises(StoreDown):
            await store.living()
        assert time.monotonic() - began < 8
        redis.send(signal.SIGCONT)
        await until(lambda: answers(store))
        await store.close()


# -- keys to the house -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    ca = trustme.CA()
    ca.cert_pem.write_to_path(folder / "ca.pem")
    made = ca.issue_cert("127.0.0.1", "localhost")
    made.private_key_pem.write_to_path(folder / "key.pem")
    made.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    return folder


def has_tls(path: str) -> bool:
    asked = subprocess.run(
        [path, "--port", "0", "--tls-port", "0", "--tls-cert-file", "/none"],
        capture_output=True,
        text=True,
        timeout=10,
    )
    return "Bad directive" not in asked.stdout + asked.stderr


@pytest.fixture(scope="module")
def tls_url(authority: Path) -> Iterator[str]:
    path = shutil.which("redis-server")
    if path is None or not has_tls(path):
        pytest.skip("no redis-server with TLS on PATH: apt-get install redis-server")
    port = free_port()
    how = [f"--tls-cert-file {authority}/cert.pem", f"--tls-key-file {authority}/key.pem"]
    how += [f"--tls-ca-cert-file {authority}/ca.pem", "--tls-auth-clients no", f"--tls-port {port}"]
    with server(path, *" ".join(how).split()):
        yield f"rediss://127.0.0.1:{port}/0"


async def test_tls_is_spoken_where_the_authority_is_named(tls_url: str, authority: Path) -> None:
    good = RedisStore(f"{tls_url}?ssl_ca_certs={authority}/ca.pem", settings=FAST)
    await good.begin_life(A, None)
    after = await good.head()
    assert isinstance(await good.apply(Batch(A, ONE, 0, 0)), Applied)
    async for entry in good.tail(after):
        assert entry.last == 0
        break
    await good.close()
    for wrong in (tls_url, tls_url.replace("rediss", "redis")):
        store = RedisStore(wrong, settings=FAST)
        with pytest.raises(StoreDown):
            await store.position(A)
        await store.close()


async def test_a_user_with_a_password_and_no_more_rights_than_needed_is_enough(
    redis_prefix: str,
) -> None:
    with server(binary()) as url:
        raw = Redis.from_url(url)
        rights = f"on >pa/ss:w@rd ~{redis_prefix}:* ~{{{redis_prefix}:* -@all +@read +@write"
        rights += " +@scripting +@transaction +time +info"
        await raw.execute_command("ACL", "SETUSER", "kv", *rights.split())
        await raw.execute_command("ACL", "SETUSER", "default", "off")
        await raw.aclose()
        login = url.replace("://", "://kv:pa%2Fss%3Aw%40rd@")
        store = RedisStore(login, redis_prefix, settings=FAST)
        await store.fit()
        await store.begin_life(A, None)
        assert isinstance(await store.apply(Batch(A, ONE, 0, 0)), Applied)
        assert len((await store.snapshot()).workers) == 1 and await store.evicted() == 0
        await store.close()


@pytest.mark.parametrize(
    ("login", "tail", "said"),
    [
        ("kv:hunter2@", "", "user and password"),
        ("", "", "user and password"),
        ("kv:right@", "/99", "databases"),
        ("few:right@", "", "allowed"),
    ],
)
async def test_a_server_that_does_not_let_us_in_ends_the_process_with_what_would_be_right(
    login: str, tail: str, said: str, redis_prefix: str
) -> None:
    with server(binary()) as url:
        raw = Redis.from_url(url)
        await raw.execute_command("ACL", "SETUSER", "kv", *["on", ">right", "~*", "+@all"])
        await raw.execute_command("ACL", "SETUSER", "few", *["on", ">right", "~*", "-@all", "+get"])
        await raw.execute_command("ACL", "SETUSER", "default", "off")
        await raw.aclose()
        wrong = url.removesuffix("/0").rstrip("/").replace("://", f"://{login}") + tail
        store = RedisStore(wrong, redis_prefix, settings=FAST)
        with pytest.raises(StoreUnfit, match=said) as caught:
            await store.fit()
        assert "hunter2" not in str(caught.value)
        with pytest.raises(StoreDown):  # at any later time it may be put right
            await store.position(A)
        await store.close()


async def test_a_unix_socket_will_do(tmp_path: Path, redis_prefix: str) -> None:
    with server(binary(), "--unixsocket", str(tmp_path / "r.sock")):
        store = RedisStore(f"unix://{tmp_path}/r.sock?db=3", redis_prefix, settings=FAST)
        assert await store.begin_life(A, None) == 1
        assert await store.begin_life(A, ONE) == 2
        await store.close()


# -- memory ------------------------------------------------------------------------------------

FULL = ("--maxmemory", "20mb", "--maxmemory-policy")


def big(number: int, worker: Worker = A) -> Batch:
    """200 kB."""
    return Batch(worker, ONE, number, number, (), {b"?%d" % number: Note(bytes(200_000))})


async def test_a_server_that_would_throw_keys_away_is_refused_with_setting_value_and_what_is_right(
    redis_prefix: str,
) -> None:
    with server(binary(), *FULL, "allkeys-lru") as url:
        store = RedisStore(url, redis_prefix, settings=FAST)
        with pytest.raises(StoreUnfit) as caught:
            await store.fit()
        said = "maxmemory-policy is allkeys-lru with maxmemory 20971520 bytes"
        assert said in str(caught.value) and "must be noeviction" in str(caught.value)
        await store.close()
        words = ("-m", "kvplane", "ingest", "--redis", url, "--redis-prefix", redis_prefix)
        done = await asyncio.to_thread(
            subprocess.run, (sys.executable, *words), capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 1 and said in done.stderr and "Traceback" not in done.stderr


async def test_a_server_that_answers_and_takes_no_writes_says_why(redis_prefix: str) -> None:
    with server(binary()) as url:
        store, raw = RedisStore(url, redis_prefix, settings=FAST), Redis.from_url(url)
        assert await store.begin_life(A, None) == 1 and await store.refuses() == ""
        for setting, undo, said in (
            (("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE"), "replica of 127.0.0.1:1"),
            (
                ("CONFIG", "SET", "maxmemory", "100kb"),
                ("CONFIG", "SET", "maxmemory", "0"),
                "is full",
            ),
        ):
            await raw.execute_command(*setting)
            with pytest.raises(RedisError):
                await raw.set("anything", "1")
            assert said in await store.refuses()
            await raw.execute_command(*undo)
            assert await store.refuses() == ""
        await raw.aclose()
        await store.close()


async def test_a_policy_that_has_nothing_to_do_yet_is_a_warning(
    redis_prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    with server(binary(), "--maxmemory-policy", "allkeys-lru") as url:
        store = RedisStore(url, redis_prefix, settings=FAST)
        await store.fit()
        assert "maxmemory-policy=allkeys-lru without maxmemory" in caplog.text
        await store.close()


async def test_keys_thrown_away_at_run_time_are_counted_and_the_tables_are_not_whole(
    redis_prefix: str,
) -> None:
    with server(binary(), *FULL, "allkeys-random") as url:
        store = RedisStore(url, redis_prefix, settings=IndexSettings(stream_entries=10))
        assert await store.evicted() == 0
        workers = [Worker(Pod(f"w{number}")) for number in range(50)]
        for worker in workers:
            await store.begin_life(worker, None)
            for number in range(4):
                await store.apply(big(number, worker))
        assert await store.evicted() > 0
        found = [await store.position(worker) for worker in workers]
        assert any(one is None or not one.whole or one.last is None for one in found)
        for worker, position in zip(workers, found, strict=True):
            if position is not None and position.last == 3 and position.whole:
                assert len(await store.table(worker)) == 4
        await store.close()


async def test_without_memory_writes_fail_reads_go_on_and_it_recovers_by_itself(
    redis_prefix: str,
) -> None:
    with server(binary(), *FULL, "noeviction") as url:
        raw = Redis.from_url(url)
        store = RedisStore(url, redis_prefix, settings=FAST)
        await store.fit()
        await store.begin_life(A, None)
        after, number = await store.head(), 0
        with pytest.raises(StoreDown, match=r"OOM|maxmemory"):
            for number in range(1000):
                await store.apply(big(number))
        position = await store.position(A)
        assert position is not None and position.last == number - 1 and position.whole
        assert len(await store.table(A)) == number
        async for entry in store.tail(after):
            assert entry.last == 0
            break
        with pytest.raises(StoreDown):
            await store.apply(big(number))
        await raw.config_set("maxmemory", 0)
        assert isinstance(await store.apply(big(number)), Applied)
        assert len(await store.table(A)) == number + 1
        await store.close()
        await raw.aclose()
