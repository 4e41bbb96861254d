"""Facts: what engines say about themselves, and what is made of rubbish."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane.router.discovery.exposition import Page, read_page
from kvplane.router.discovery.facts import Answers, filled
from kvplane.router.discovery.publishers import counted, dial
from kvplane.vocabulary import Pod, Role, Shape, WorkerUp

VECTORS = Path(__file__).parents[1] / "vectors"
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
        own_bootstrap_port=8998,
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
    assert found.own_bootstrap_port == 8998, "what it says itself is kept beside it"


@pytest.mark.parametrize("told", [None, 0, -1, 65536, True, "8998", 1.5, [8998]])
def test_a_bootstrap_port_that_cannot_be_is_none(told: Any) -> None:
    found = of({"disaggregation_bootstrap_port": told})
    assert (found.bootstrap_port, found.own_bootstrap_port) == (None, None)


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


CONFIG = {"publisher": "zmq", "endpoint": "tcp://*:5557", "topic": "kv@p1@qwen3"}


@pytest.mark.parametrize("form", [json.dumps, dict], ids=["text", "object"])
def test_an_sglang_that_only_tells_its_arguments_is_counted_up_by_rank(form: Any) -> None:
    told = {**CONFIG, "replay_endpoint": "tcp://*:6557", "buffer_steps": 10_000}
    info = {**SGLANG, "kv_events": None, "kv_events_config": form(told)}
    found = of(info)
    assert found.events == ("tcp://10.0.0.7:5557", "tcp://10.0.0.7:5558")
    assert found.replay == ("tcp://10.0.0.7:6557", "tcp://10.0.0.7:6558")
    assert found.topic == "kv@p1@qwen3"


@pytest.mark.parametrize(
    "told",
    [None, "", "{", "[1]", "7", '{"publisher":"null"}', "{}", "[" * 100_000, 7, ["x"], {},
     '{"publisher":"zmq","endpoint":7}'],
)  # fmt: skip
def test_arguments_that_say_nothing_of_events_are_no_events(told: Any) -> None:
    found = of({**SGLANG, "kv_events": None, "kv_events_config": told})
    if told == '{"publisher":"zmq","endpoint":7}':  # SGLang's own default
        assert found.events == ("tcp://10.0.0.7:5557", "tcp://10.0.0.7:5558")
    else:
        assert (found.events, found.replay, found.topic) == ((), (), "")


@pytest.mark.parametrize(
    ("base", "found"),
    [
        ("tcp://*:0", ("tcp://10.0.0.7:0",)),
        ("ipc:///run/kv", ("ipc:///run/kv",)),
        ("inproc://kv", ("inproc://kv",)),
        ("tcp://[::]:5557", ("tcp://10.0.0.7:5557", "tcp://10.0.0.7:5558")),
        ("tcp://collector:5557", ("tcp://collector:5557", "tcp://collector:5558")),
    ],
)
def test_what_cannot_be_counted_up_is_left_as_one(base: str, found: tuple[str, ...]) -> None:
    assert counted(base, 2, "10.0.0.7") == found


def sources(count: int, **more: Any) -> dict[str, Any]:
    return {
        str(rank): {
            "enable_kv_cache_events": True, "publisher": "zmq",
            "endpoint": f"tcp://*:{5557 + rank}",
            "replay_endpoint": f"tcp://*:{6557 + rank}", "topic": "kv@p1@m", **more,
        }
        for rank in range(count)
    }  # fmt: skip


def test_the_ranks_of_vllm_are_those_it_names() -> None:
    found = of(None, MODELS, sources(4))
    assert (found.dp_size, found.topic) == (4, "kv@p1@m")
    assert found.events == tuple(f"tcp://10.0.0.7:{5557 + rank}" for rank in range(4))
    assert found.replay[3] == "tcp://10.0.0.7:6560"


def test_the_sources_that_a_real_vllm_gave() -> None:
    (told,) = [
        line["answer"]
        for line in map(json.loads, (VECTORS / "vllm-kv-events.jsonl").read_text().splitlines())
        if line.get("path") == "/kv_event_sources"
    ][:1]
    found = of(None, MODELS, told)
    assert found.events == ("tcp://10.0.0.7:18007",)
    assert found.replay == ("tcp://10.0.0.7:18008",)
    assert found.topic == "kv@127.0.0.1:18000@tiny"


@pytest.mark.parametrize("more", [{"publisher": None}, {"publisher": "null"}, {"endpoint": 7}])
def test_a_vllm_publisher_that_is_off_is_no_events(more: dict[str, Any]) -> None:
    assert of(None, MODELS, sources(2, **more)).events == ()


def test_a_vllm_in_developers_mode_is_a_vllm() -> None:
    found = of({"vllm_config": "..."}, MODELS, sources(1))
    assert found.engine == "vllm" and found.events


def test_a_declared_topic_wins() -> None:
    declared = replace(DECLARED, topic="mine")
    assert of(None, MODELS, sources(1), declared).topic == "mine"


# What /metrics says


PAGE = """# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.
process_start_time_seconds 1.70000000049e+09
vllm:engine_sleep_state{engine="0",model_name="tiny",sleep_state="awake"} 1.0
vllm:engine_sleep_state{engine="0",model_name="tiny",sleep_state="discard_all"} 0.0
vllm:cache_config_info{_block_size_resolved="True",block_size="32",engine="0"} 1.0
"""


def test_a_page_tells_start_sleep_and_block_size() -> None:
    assert read_page(PAGE) == Page(1_700_000_000, asleep=False, block_size=32)
    assert read_page(PAGE.replace('"awake"} 1.0', '"awake"} 0.0')).asleep
    two = PAGE + 'vllm:engine_sleep_state{engine="1",sleep_state="awake"} 0\n'
    assert read_page(two).asleep


@pytest.mark.parametrize(
    "text",
    [
        "", "process_start_time_seconds", "process_start_time_seconds NaN",
        "process_start_time_seconds 1e400", "process_start_time_seconds -5",
        "process_start_time_seconds 0", "my_process_start_time_seconds 5",
        'vllm:cache_config_info{block_size="None"} 1',
        'vllm:cache_config_info{my_block_size="7"} 1',
        'vllm:cache_config_info{block_size="0"} 1', "process_start_time_seconds " + "9" * 10_000,
        'vllm:engine_sleep_state{sleep_state="awake"} x', "x" * 1_000_000, "{" * 100_000,
    ],
)  # fmt: skip
def test_a_page_that_says_nothing_tells_nothing(text: str) -> None:
    assert read_page(text) == Page()


@pytest.mark.parametrize(
    "line",
    [
        "vllm:engine_sleep_state{" + 'sleep_state="awake",' * 150_000,
        "vllm:cache_config_info{" + ',block_size="' * 200_000,
        "process_start_time_seconds{" * 100_000,
        'vllm:engine_sleep_state{sleep_state="awake"' * 90_000,
    ],
)
def test_a_page_made_to_be_slow_is_not(line: str) -> None:
    assert read_page(line) == Page()  # hours without bounds: the test's time limit ends it


@given(st.text(max_size=200))
def test_any_page_is_read(text: str) -> None:
    read_page(text)
    read_page("vllm:engine_sleep_state{" + text + "\nprocess_start_time_seconds " + text)


def paged(text: str | None, before: WorkerUp | None = None, **more: Any) -> WorkerUp:
    info = more.pop("info", {})
    return filled(DECLARED, Answers(info, MODELS, {}, text), before)


def test_the_block_size_of_metrics_is_the_last_that_is_asked() -> None:
    assert paged(PAGE).block_size == 32
    assert paged(PAGE, info={"page_size": 16}).block_size == 16
    declared = replace(DECLARED, block_size=7)
    assert filled(declared, Answers({}, MODELS, {}, PAGE)).block_size == 7


def test_a_generation_that_an_engine_tells_is_kept_before_its_start() -> None:
    assert paged(PAGE, info=TINY).generation == "g1"


@given(st.lists(st.integers(1, 2**40), min_size=1, max_size=12))
def test_a_life_that_starts_only_goes_forward(starts: list[int]) -> None:
    known, seen = None, []
    for start in starts:
        known = paged(f"process_start_time_seconds {start}", known)
        assert known.generation is not None
        seen.append(int(known.generation.removeprefix("started:")))
        assert paged(None, known).generation == paged("", known).generation == known.generation
    assert seen == sorted(seen) and seen[-1] >= max(starts) - 1


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


@pytest.mark.parametrize(("told", "ranks"), [(1024, 1024), (1025, 1), (2**31 - 1, 1), (2**40, 1)])
def test_a_number_of_ranks_that_nobody_has_is_not_believed(told: int, ranks: int) -> None:
    found = of({"dp_size": told, "kv_events": {"endpoint_port_base": 5557}})
    assert found.dp_size == ranks and len(found.events) == ranks


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
