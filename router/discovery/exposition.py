"""Exposition: what an engine's /metrics page says of its life.

Pure: text in, facts out; a page may be anything. Used by facts.py. Open it when an engine names one
of these figures differently. The page is the second signal for what events say late or not at all:
a restart, a sleep (its AllBlocksCleared only comes with the next request), the size of a block.

    process_start_time_seconds 1.7e+09
    vllm:engine_sleep_state{engine="0",sleep_state="awake"} 0.0
    vllm:cache_config_info{block_size="32",...} 1.0
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_LABELS = r"[^}\n]{0,4000}"  # bounded, or a page could be made that takes hours to search
_NUMBER = r" +([0-9.eE+]{1,32})"
_START = re.compile(rf"^process_start_time_seconds(?:\{{{_LABELS}\}})?{_NUMBER}", re.M)
_AWAKE = re.compile(
    rf'^vllm:engine_sleep_state\{{{_LABELS}\bsleep_state="awake"{_LABELS}\}}{_NUMBER}', re.M
)
_BLOCK = re.compile(rf'^vllm:cache_config_info\{{(?:{_LABELS},)?block_size="([0-9]{{1,6}})"', re.M)


@dataclass(frozen=True, slots=True)
class Page:
    """What was found; None and False where the page says nothing."""

    started: int | None = None  # seconds since 1970 of the process's start
    asleep: bool = False
    block_size: int | None = None  # tokens


def read_page(text: str) -> Page:
    """The three facts of a page in Prometheus' text form."""
    start, block = _START.search(text), _BLOCK.search(text)
    size = int(block[1]) if block else 0
    return Page(
        started=_seconds(start[1]) if start else None,
        asleep=any(_number(value) == 0 for value in _AWAKE.findall(text)),
        block_size=size or None,
    )


def _seconds(text: str) -> int | None:
    value = _number(text)
    return round(value) if value is not None and 0 < value < 2**53 else None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
