"""Facts: what an engine's own answers add to what a person wrote about it.

Pure. probe.py fetches the answers; what a person declared wins over what an engine says, except
the role: an engine knows what it is. Every member is checked, since a probe may hit anything. Open
it when an engine tells its facts differently. Sources: sglang.md section 8, vllm.md sections 1, 4.

    {"kv_events": {"endpoint_host": "*", "endpoint_port_base": 5557, "dp_size": 2}}, http://10.0.0.7
        -> events ("tcp://10.0.0.7:5557", "tcp://10.0.0.7:5558")
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from kvplane.vocabulary import Generation, Role, Shape, WorkerUp

Facts = Mapping[str, Any]
ROLES = {"prefill": Role.PREFILL, "decode": Role.DECODE, "null": Role.BOTH}
WILDCARDS = ("", "*", "0.0.0.0", "::", "[::]")


@dataclass(frozen=True, slots=True)
class Answers:
    """What was fetched; empty where the engine has no such route."""

    info: Facts  # GET /server_info
    models: Facts  # GET /v1/models
    sources: Facts  # GET /kv_event_sources


def filled(declared: WorkerUp, said: Answers) -> WorkerUp:
    """The declared worker with everything the engine told."""
    own = _object(said.info.get("kvplane"))
    engine = family(declared, said)
    dp_size = max(declared.dp_size, _count(said.info, "dp_size") or 1)
    events, replay = _endpoints(declared, said, dp_size)
    model, others = _models(declared, said)
    generation = own.get("generation")
    return replace(
        declared,
        role=ROLES.get(str(said.info.get("disaggregation_mode")), declared.role),
        engine=engine,
        model=model,
        adapters=others,
        bootstrap_port=declared.bootstrap_port
        or _count(said.info, "disaggregation_bootstrap_port"),
        events=events,
        replay=replay,
        block_size=declared.block_size
        or _count(_object(said.info.get("kv_events")), "block_size")
        or _count(said.info, "page_size"),
        dp_size=dp_size,
        max_tokens=declared.max_tokens or _longest(said),
        tokenizer=declared.tokenizer or ("builtin" if own else ""),
        generation=Generation(str(generation)) if generation else declared.generation,
        event_form=str(own.get("event_form") or declared.event_form),
        shape=_shape(said.info, dp_size),
    )


def family(declared: WorkerUp, said: Answers) -> str:
    """kvplane | sglang | vllm. "kvplane" is also what is declared where nobody said anything."""
    if declared.engine != "kvplane" or "kvplane" in said.info:
        return declared.engine
    if "disaggregation_mode" in said.info or "tp_size" in said.info:
        return "sglang"
    return "vllm" if said.models and not said.info else declared.engine


def dial(endpoint: str, host: str) -> str:
    """An endpoint others can reach: a wildcard becomes the worker's host, IPv6 gets brackets.

    tcp://*:5557, 10.0.0.7 -> tcp://10.0.0.7:5557
    """
    scheme, _, rest = endpoint.partition("://")
    if scheme != "tcp":
        return endpoint
    name, _, port = rest.rpartition(":")
    bare = host if name in WILDCARDS else name.strip("[]")
    return f"tcp://[{bare}]:{port}" if ":" in bare else f"tcp://{bare}:{port}"


def _endpoints(
    declared: WorkerUp, said: Answers, dp_size: int
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Event and replay endpoints, one per dp rank; declared ones win."""
    if declared.events:
        return declared.events, declared.replay
    host = urlsplit(declared.url).hostname or ""
    told = _object(said.info.get("kv_events"))
    if told and told.get("publisher") != "null":
        at, first = str(told.get("endpoint_host") or "*"), _count(told, "endpoint_port_base")
        again = _count(told, "replay_endpoint_port_base")
        return _ports(at, host, first, dp_size), _ports(at, host, again, dp_size)
    ranks = [_object(said.sources.get(str(rank))) for rank in range(dp_size)]
    if not all(rank.get("enable_kv_cache_events") and rank.get("endpoint") for rank in ranks):
        return (), ()
    events = tuple(dial(str(rank["endpoint"]), host) for rank in ranks)
    replay = tuple(dial(str(rank["replay_endpoint"]), host) for rank in ranks if _replays(rank))
    return events, replay if len(replay) == len(events) else ()


def _replays(rank: Facts) -> bool:
    return bool(rank.get("replay_endpoint"))


def _ports(at: str, host: str, first: int | None, dp_size: int) -> tuple[str, ...]:
    if first is None:
        return ()
    return tuple(dial(f"tcp://{at}:{first + rank}", host) for rank in range(dp_size))


def _models(declared: WorkerUp, said: Answers) -> tuple[str, tuple[str, ...]]:
    """The model and the other names it answers to: adapters, aliases."""
    listed = said.models.get("data")
    cards = [_object(card) for card in listed] if isinstance(listed, list) else []
    names = [str(card["id"]) for card in cards if card.get("id")]
    base = next(
        (str(card["id"]) for card in cards if card.get("id") and not card.get("parent")), ""
    )
    model = declared.model or base or str(said.info.get("served_model_name") or "")
    return model, tuple(sorted({*declared.adapters, *names} - {model}))


def _longest(said: Answers) -> int | None:
    """Longest prompt with answer, tokens: the smallest limit anybody names."""
    listed = said.models.get("data")
    cards = [_object(card) for card in listed] if isinstance(listed, list) else []
    limits = [_count(card, "max_model_len") for card in cards]
    limits += [_count(said.info, "context_length"), _count(said.info, "max_total_tokens")]
    return min((limit for limit in limits if limit), default=None)


def _shape(info: Facts, dp_size: int) -> Shape:
    dtype = info.get("kv_cache_dtype")
    return Shape(
        tp=_count(info, "tp_size") or 1,
        cp=_count(info, "attn_cp_size") or 1,
        dp=dp_size,
        pp=_count(info, "pp_size") or 1,
        page_size=_count(info, "page_size"),
        kv_dtype=dtype if isinstance(dtype, str) and dtype != "auto" else None,
    )


def _object(value: object) -> Facts:
    return value if isinstance(value, Mapping) else {}


def _count(facts: Facts, name: str) -> int | None:
    """A whole number above zero, or None for anything else."""
    value = facts.get(name)
    return value if type(value) is int and 0 < value < 2**31 else None
