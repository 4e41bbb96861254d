"""Queues: what engines' own metrics say of requests that wait, and nothing else of a page."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane.router.queues import queues, said

SGLANG = """# HELP sglang:num_queue_reqs The number of requests in the waiting queue.
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{engine_type="unified",model_name="m",tp_rank="0"} 3.0
sglang:num_queue_reqs{engine_type="unified",model_name="m",tp_rank="1"} 4.0
sglang:num_running_reqs{model_name="m"} 0.0
sglang:num_prefill_prealloc_queue_reqs{model_name="m"} 12.0
sglang:token_usage{model_name="m"} 0.5
sglang:max_total_num_tokens{model_name="m"} 100000.0
"""
VLLM = """vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1e+02
vllm:num_preemptions_total{engine="0"} 7.0
"""


def test_the_queues_of_sglang_are_summed_over_its_ranks() -> None:
    assert queues(SGLANG) == {"num_queue": 7, "num_prefill_prealloc_queue": 12}
    assert said(queues(SGLANG)) == "num_prefill_prealloc_queue 12, num_queue 7"


def test_those_of_vllm_too() -> None:
    assert queues(VLLM) == {"num_requests_running": 2, "num_requests_waiting": 100}


@pytest.mark.parametrize(
    "page",
    [
        "", "num_queue_reqs", "num_queue_reqs NaN", "num_queue_reqs -3", "num_queue_reqs 1e999",
        "x" * 1_000_000, "num_queue_reqs{" * 50_000, "num_" * 200_000,
        "num_queue_reqs{" + 'a="b",' * 100_000, "num_queue_reqs 1.2.3",
    ],
)  # fmt: skip
def test_a_page_that_says_nothing_of_queues_tells_nothing_and_soon(page: str) -> None:
    assert queues(page) == {} and said({}) == ""


@given(st.text(max_size=300))
def test_any_page_is_read(text: str) -> None:
    queues(text)
    queues("sglang:num_queue_reqs" + text + " 3\n" + text)
