"""Facts: what engines say about themselves, and what is made of rubbish."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane.router.discovery.facts import Answers, filled
from kvplane.router.discovery.publishers import dial
from kvplane.vocabulary import Pod, Role, Shape, WorkerUp

DECLARED = WorkerUp(Pod("p1"), "http://10.0.0.7:30000", Role.PREFILL)
SGLANG: dict[str, Any] = {
    "disaggregation_mode": "prefill", "disaggregation_bootstrap_port": 8998, "page_size": 64,
    "tp_size": 4, "pp_size": 2, "dp_size": 2, "kv_cache_dtype": "fp8_e5m2",
    "context_length": 8192, "max_total_tokens": None, "served_model_name": "qwen3",
    "tokenizer_path": "Qwen/Qwen3-8B", "version": "0.5.23",
    "kv_events": {
        "publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 5557, "topic": "",
        "block_size": 64, "dp_size": 2, "replay_endpoint_port_base": 5657,
    },
}  # fmt: skip
TINY: dict[str, Any] = {
    **SGLANG, "dp_size": 1, "page_size": 16, "kv_cache_dtype": "float16",
    "kvplane": {"generation": "g1", "event_form": "sglang"},
    "kv_events": {**SGLANG["kv_events"], "endpoint_host": "127.0.0.1", "block_size": 16},
}  # fmt: skip
MODELS = {"data": [{"id": "qwen3", "max_model_len": 4096}]}


def of(
    info: Any = None, models: Any = None, sources: Any = None, declared: WorkerUp = DECLARED
) -> WorkerUp:
    return filled(declared, Answers(info or {}, models or {}, sources or {}))


def test_an_sglang_prefill_tells_everything() -> None:
    assert of(SGLANG, MODELS) == WorkerUp(
        pod=Pod("p1"),
        url="http://10.0.0.7:30000",
        role=Role.PREFILL,
        engine="sglang",
        model="qwen3",
        bootstrap_port=8998,
        events=("tcp://10.0.0.7:5557", "tcp://10.0.0.7:5558"),
        replay=("tcp://10.0.0.7:5657", "tcp://10.0.0.7:5658"),
        block_size=64,
        dp_size=2,
        max_tokens=4096,
        shape=Shape(tp=4, dp=2, pp=2, page_size=64, kv_dtype="fp8_e5m2"),
    )


def test_the_tiny_engine_also_tells_its_generation_event_form_and_tokenizer() -> None:
    found = of(TINY, MODELS)
    assert (found.engine, found.generation, found.event_form) == ("kvplane", "g1", "sglang")
    assert (found.tokenizer, found.events) == ("builtin", ("tcp://127.0.0.1:5557",))


def test_a_vllm_engine_is_known_by_its_models_and_tells_its_event_sources() -> None:
    source = {
        "enable_kv_cache_events": True,
        "endpoint": "tcp://*:5557",
        "replay_endpoint": "tcp://*:5558",
    }
    found = of(None, MODELS, {"0": source})
    assert (found.engine, found.model) == ("vllm", "qwen3")
    assert (found.events, found.replay) == (("tcp://10.0.0.7:5557",), ("tcp://10.0.0.7:5558",))


@pytest.mark.parametrize(
    "source",
    [
        {"enable_kv_cache_events": False, "endpoint": "tcp://*:5557"},
        {"enable_kv_cache_events": True, "endpoint": None},
    ],
)
def test_event_sources_that_are_off_are_no_events(source: dict[str, Any]) -> None:
    assert of(None, MODELS, {"0": source}).events == ()


def test_what_a_person_declared_wins() -> None:
    declared = WorkerUp(
        Pod("p1"), "http://10.0.0.7:30000", Role.PREFILL, engine="sglang", model="mine",
        bootstrap_port=1, events=("tcp://a:1",), block_size=7, dp_size=3, max_tokens=9,
        tokenizer="folder",
    )  # fmt: skip
    found = of(SGLANG, MODELS, declared=declared)
    for name in ("model", "bootstrap_port", "events", "replay", "block_size", "dp_size"):
        assert getattr(found, name) == getattr(declared, name), name
    assert (found.max_tokens, found.tokenizer, found.adapters) == (9, "folder", ("qwen3",))


@pytest.mark.parametrize(
    ("mode", "role"),
    [("prefill", Role.PREFILL), ("decode", Role.DECODE), ("null", Role.BOTH), (None, Role.PREFILL)],
)
def test_an_engine_knows_its_own_role(mode: str | None, role: Role) -> None:
    assert of({**SGLANG, "disaggregation_mode": mode}).role is role


def test_adapters_are_further_names_and_not_the_model() -> None:
    cards = [{"id": "french", "parent": "qwen3"}, {"id": "qwen3"}, {"id": "alias"}]
    found = of(SGLANG, {"data": cards})
    assert (found.model, found.adapters) == ("qwen3", ("alias", "french"))


def test_events_that_are_switched_off_are_no_events() -> None:
    assert of({**SGLANG, "kv_events": None}).events == ()
    assert of({**SGLANG, "kv_events": {"publisher": "null", "endpoint_port_base": 1}}).events == ()


def test_the_dtype_auto_is_no_dtype() -> None:
    assert of({**SGLANG, "kv_cache_dtype": "auto"}).shape.kv_dtype is None


@pytest.mark.parametrize(
    ("endpoint", "host", "reached"),
    [
        ("tcp://*:5557", "10.0.0.7", "tcp://10.0.0.7:5557"),
        ("tcp://0.0.0.0:5557", "10.0.0.7", "tcp://10.0.0.7:5557"),
        ("tcp://[::]:5557", "fd00::1", "tcp://[fd00::1]:5557"),
        ("tcp://:::5557", "::1", "tcp://[::1]:5557"),
        ("tcp://10.0.0.9:5557", "10.0.0.7", "tcp://10.0.0.9:5557"),
        ("tcp://[fd00::2]:5557", "10.0.0.7", "tcp://[fd00::2]:5557"),
        ("ipc:///run/kv", "10.0.0.7", "ipc:///run/kv"),
    ],
)
def test_a_wildcard_becomes_the_workers_host(endpoint: str, host: str, reached: str) -> None:
    assert dial(endpoint, host) == reached


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=8,
)
rubbish = st.dictionaries(
    st.sampled_from([*SGLANG, "kvplane", "data", "0", "attn_cp_size"]), anything
)


@given(rubbish, rubbish, rubbish)
def test_rubbish_is_survived_and_never_makes_impossible_facts(
    info: Any, models: Any, sources: Any
) -> None:
    found = of(info, models, sources)
    assert found.pod == "p1" and found.dp_size >= 1
    assert found.block_size is None or found.block_size > 0
    assert found.bootstrap_port is None or found.bootstrap_port > 0
