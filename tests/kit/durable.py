"""Durable: a real Redis that survives its own SIGKILL, on one port and one folder, with AOF."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field

from kit.ports import free_port
from kit.redis import _die_with_parent, _wait_for_ping, binary


@dataclass
class Durable:
    """Started, stopped, killed and frozen by the test that owns it."""

    folder: str
    port: int = field(default_factory=free_port)
    arguments: tuple[str, ...] = ("--appendonly", "yes", "--appendfsync", "everysec")
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self, empty: bool = False) -> None:
        """Returns when it answers, with all that was acknowledged before, or with nothing."""
        if empty:
            shutil.rmtree(self.folder)
            os.mkdir(self.folder)
        words = ["--bind", "127.0.0.1", "--port", str(self.port), "--save", "", "--dir"]
        self.process = subprocess.Popen(
            [binary(), *words, self.folder, *self.arguments],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=_die_with_parent,
        )
        _wait_for_ping(self.process, self.port)

    def send(self, number: int) -> None:
        """A signal: SIGSTOP and SIGCONT freeze and thaw it."""
        assert self.process is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """Death without a farewell."""
        self.end(signal.SIGKILL)

    def end(self, number: int = signal.SIGTERM) -> None:
        """Gone when this returns."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(5)


@contextlib.contextmanager
def durable() -> Iterator[Durable]:
    """One that runs; it and its folder are gone at the end."""
    with tempfile.TemporaryDirectory(prefix="kvplane-redis-") as folder:
        made = Durable(folder)
        made.start()
        try:
            yield made
        finally:
            made.end()
