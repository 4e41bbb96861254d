"""Drains: whom did a person take out, and whom back in?

Pure. fleet.py keeps one and asks it of every life of a pod: who was drained stays so when its
engine starts again, and may be drained before it serves. Open it to change how long a word holds.

    PUT draining true | false  ->  holds until the next word, or until the worker is deleted
    never said                 ->  as it was declared (draining = true in [[workers]])
"""

from __future__ import annotations

from kvplane.vocabulary import Pod, WorkerUp

MOST = 4096  # pods; the one that was spoken of longest ago is forgotten first


class Drains:
    """The last word about each pod."""

    def __init__(self) -> None:
        self._said: dict[Pod, bool] = {}

    def say(self, pod: Pod, draining: bool) -> None:
        """It takes no new requests from now on, or again."""
        self._said.pop(pod, None)
        self._said[pod] = draining
        if len(self._said) > MOST:
            del self._said[next(iter(self._said))]

    def of(self, worker: WorkerUp) -> bool:
        """Is it to be left alone?"""
        return self._said.get(worker.pod, worker.draining)

    def forget(self, pod: Pod) -> None:
        """The worker was deleted: another one of that name begins as it is declared."""
        self._said.pop(pod, None)
