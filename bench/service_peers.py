"""Service peers: ours and Dynamo's standalone indexer, each a process that hears engines over ZMQ
and is asked over HTTP, for bench/service.py.

Dynamo's answers tokens per worker; its block hashes are xxh3_64 with seed 1337 of each block alone,
as signed numbers (unsigned ones are a 422).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zmq
from xxhash import xxh3_64_intdigest

from bench.http_load import answer_bytes
from bench.service_load import SIZE, Frame
from kvplane.index import chain, to_hex
from kvplane.vocabulary import Namespace

ROOT = Path(__file__).parents[1]
BOOT_S = 60.0
PACKED = "application/vnd.kvplane.hashes"
PACKED_TOKENS = "application/vnd.kvplane.tokens"
DYNAMO_THREADS = 4  # its default


class Line:
    """One keep-alive connection that does almost nothing, so that the server is what is timed."""

    def __init__(self, port: int) -> None:
        self._line = socket.create_connection(("127.0.0.1", port), 60)
        self._line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, request: bytes) -> bytes:
        """The whole answer; raises WrongAnswer for any but 200."""
        self._line.sendall(request)
        data, size = b"", 0
        while not size or len(data) < size:
            piece = self._line.recv(1 << 18)
            if not piece:
                raise ConnectionError(f"closed after {data[:80]!r}")
            data += piece
            size = size or answer_bytes(data)
        return data.partition(b"\r\n\r\n")[2]

    def close(self) -> None:
        """For good."""
        self._line.close()


class Service(ABC):
    """A process that is told and asked. Subclasses say how it is started and spoken to."""

    name = ""
    line: Line

    def __init__(self, workers: int) -> None:
        self._context = zmq.Context()
        self._engines = [self._context.socket(zmq.XPUB) for _ in range(workers)]
        self._numbers = [0] * workers
        for engine in self._engines:
            engine.setsockopt(zmq.SNDHWM, 0)
            engine.setsockopt(zmq.LINGER, 0)
            engine.bind("tcp://127.0.0.1:*")
        ends = [
            engine.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0") for engine in self._engines
        ]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        self._process = subprocess.Popen(
            self._command(port, ends), cwd=ROOT, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, env={**os.environ, "DYN_LOG": "error"},
        )  # fmt: skip
        self.pid = self._process.pid
        try:
            self._wait(port)
        except BaseException:
            self.stop()
            raise

    @abstractmethod
    def _command(self, port: int, ends: Sequence[str]) -> list[str]:
        """What starts it on this port, listening to these engines."""

    def _wait(self, port: int) -> None:
        """Until every engine is heard and questions are answered."""
        end = time.monotonic() + BOOT_S
        for engine in self._engines:
            if not engine.poll(max(1, int((end - time.monotonic()) * 1000))):
                raise RuntimeError(f"{self.name} does not listen to its engines")
            engine.recv()
        while True:
            try:
                self.line = Line(port)
                self.line.ask(self.by_tokens(array("I", range(SIZE))))
                return
            except OSError:
                if time.monotonic() > end or self._process.poll() is not None:
                    raise
                time.sleep(0.1)

    def tell(self, frame: Frame) -> None:
        """One batch of one engine."""
        worker, payload = frame
        number = struct.pack(">Q", self._numbers[worker])
        self._numbers[worker] += 1
        self._engines[worker].send_multipart([b"", number, payload])

    @abstractmethod
    def by_tokens(self, tokens: array[int]) -> bytes:
        """A question as it goes over the wire."""

    @abstractmethod
    def by_hash(self, tokens: array[int]) -> bytes:
        """The same, by block hashes."""

    def by_packed_hash(self, tokens: array[int]) -> bytes:
        """The same, without JSON, from who takes it so."""
        return self.by_hash(tokens)

    def by_packed_tokens(self, tokens: array[int]) -> bytes:
        """By tokens, without JSON, from who takes it so."""
        return self.by_tokens(tokens)

    @abstractmethod
    def depths(self, answer: bytes) -> dict[int, int]:
        """Blocks by worker, of those that hold some."""

    def stop(self) -> None:
        """The process and its engines are gone."""
        if hasattr(self, "line"):
            self.line.close()
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._context.destroy(linger=0)


class Ours(Service):
    """kvplane: events, index and HTTP in one process."""

    name = "kvplane"

    def _command(self, port: int, ends: Sequence[str]) -> list[str]:
        return [sys.executable, "-m", "bench.service_process", str(port), *ends]

    def by_tokens(self, tokens: array[int]) -> bytes:
        return post("/rank", {"model": "m", "token_ids": tokens.tolist()})

    def by_hash(self, tokens: array[int]) -> bytes:
        return post("/rank", {"block_hashes": [to_hex(block) for block in _names(tokens)]})

    def by_packed_hash(self, tokens: array[int]) -> bytes:
        """The same, 8 bytes a hash."""
        names = _names(tokens)
        return post("/rank", struct.pack(f"<{len(names)}Q", *names), PACKED)

    def by_packed_tokens(self, tokens: array[int]) -> bytes:
        """By tokens, 4 bytes each."""
        packed = struct.pack(f"<{len(tokens)}I", *tokens)
        return post("/rank?model=m", packed, PACKED_TOKENS)

    def depths(self, answer: bytes) -> dict[int, int]:
        held = json.loads(answer)["workers"]
        return {int(one["worker"][1:]): one["depth_blocks"] for one in held if one["depth_blocks"]}


class Dynamo(Service):
    """`python -m dynamo.indexer` of the environment that DYNAMO_PY names."""

    name = "Dynamo"

    def _command(self, port: int, ends: Sequence[str]) -> list[str]:
        workers = ",".join(f"{number + 1}={end}" for number, end in enumerate(ends))
        return [
            os.environ["DYNAMO_PY"], "-m", "dynamo.indexer", "--block-size", str(SIZE),
            "--port", str(port), "--threads", str(DYNAMO_THREADS), "--workers", workers,
            "--model-name", "m",
        ]  # fmt: skip

    def by_tokens(self, tokens: array[int]) -> bytes:
        return post("/query", {"model_name": "m", "token_ids": tokens.tolist()})

    def by_hash(self, tokens: array[int]) -> bytes:
        data, step = tokens.tobytes(), SIZE * 4
        found = [xxh3_64_intdigest(data[at : at + step], 1337) for at in range(0, len(data), step)]
        signed = struct.unpack(f"<{len(found)}q", struct.pack(f"<{len(found)}Q", *found))
        return post("/query_by_hash", {"model_name": "m", "block_hashes": signed})

    def depths(self, answer: bytes) -> dict[int, int]:
        scores = json.loads(answer).get("scores", {})
        found = {int(name) - 1: max(by_rank.values()) for name, by_rank in scores.items()}
        return {worker: tokens // SIZE for worker, tokens in found.items() if tokens}


def post(path: str, body: Any, kind: str = "application/json") -> bytes:
    """One HTTP/1.1 request."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: bench\r\ncontent-type: {kind}\r\n"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


def _names(tokens: array[int]) -> Sequence[int]:
    return chain(tokens, Namespace("m", SIZE)).blocks
