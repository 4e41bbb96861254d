"""Facts: what an engine's own answers add to what a person wrote about it.

Pure. probe.py fetches the answers; what a person declared wins over what an engine says, except
the role: an engine knows what it is. Every member is checked, since a probe may hit anything. Open
it when an engine tells its facts differently. Where it publishes events: publishers.py; what its
metrics say of its life: exposition.py. Sources: SGLang's and vLLM's own servers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvplane.vocabulary import Generation, Role, Shape, WorkerUp

from .exposition import Page, read_page
from .publishers import published

Facts = Mapping[str, Any]
ROLES = {"prefill": Role.PREFILL, "decode": Role.DECODE, "null": Role.BOTH}
_STARTED = "started:"  # how a generation begins that we made of the process's start
_MOST_RANKS = 1024  # data-parallel ones of a pod; who tells more tells rubbish
_JITTER_S = 2  # two starts that are closer are one, computed twice


@dataclass(frozen=True, slots=True)
class Answers:
    """What was fetched; empty where the engine has no such route."""

    info: Facts  # GET /server_info
    models: Facts  # GET /v1/models
    sources: Facts  # GET /kv_event_sources
    metrics: str | None = None  # GET /metrics; None where it was not asked or gave nothing


def filled(declared: WorkerUp, said: Answers, before: WorkerUp | None = None) -> WorkerUp:
    """The declared worker with everything the engine told.

    `before` is what was known until now: what a page that did not come would have said stays.
    """
    own = _object(said.info.get("kvplane"))
    own_port = bootstrap_port(said.info)
    engine = family(declared, said)
    dp_size = max(declared.dp_size, _told_ranks(said.info), _ranks(said.sources))
    found = published(declared, said.info, said.sources, dp_size)
    model, others = _models(declared, said)
    page = None if said.metrics is None else read_page(said.metrics)
    return replace(
        declared,
        role=ROLES.get(str(said.info.get("disaggregation_mode")), declared.role),
        engine=engine,
        model=model,
        adapters=others,
        bootstrap_port=declared.bootstrap_port or own_port,
        own_bootstrap_port=own_port,
        events=found.events,
        replay=found.replay,
        block_size=_block_size(declared, said, page, before),
        dp_size=dp_size,
        max_tokens=declared.max_tokens or _longest(said),
        tokenizer=declared.tokenizer or ("builtin" if own else ""),
        generation=_generation(own, page, before) or declared.generation,
        event_form=str(own.get("event_form") or declared.event_form),
        shape=_shape(said.info, dp_size),
        topic=declared.topic or found.topic,
        asleep=page.asleep if page else before is not None and before.asleep,
    )


def bootstrap_port(info: Facts) -> int | None:
    """Where an engine says that its own rank directory listens."""
    port = _count(info, "disaggregation_bootstrap_port")
    return port if port is not None and port < 65536 else None


def family(declared: WorkerUp, said: Answers) -> str:
    """kvplane | sglang | vllm. "kvplane" is also what is declared where nobody said anything."""
    if declared.engine != "kvplane" or "kvplane" in said.info:
        return declared.engine
    if "disaggregation_mode" in said.info or "tp_size" in said.info:
        return "sglang"
    if "vllm_config" in said.info:  # vLLM in its developers' mode
        return "vllm"
    return "vllm" if said.models and not said.info else declared.engine


def _generation(own: Facts, page: Page | None, before: WorkerUp | None) -> Generation | None:
    """As the engine tells it, else the start of its process. It only ever goes forward: of two
    processes behind one door the younger counts, so answers that alternate are no restarts."""
    if told := own.get("generation"):
        return Generation(str(told))
    known = before.generation if before else None
    if page is None or page.started is None:
        return known
    ours = known is not None and known.startswith(_STARTED)
    if known and ours and page.started < int(known.removeprefix(_STARTED)) + _JITTER_S:
        return known
    return Generation(f"{_STARTED}{page.started}")


def _block_size(
    declared: WorkerUp, said: Answers, page: Page | None, before: WorkerUp | None
) -> int | None:
    told = _count(_object(said.info.get("kv_events")), "block_size")
    size = declared.block_size or told or _count(said.info, "page_size")
    if size is not None or page is not None:
        return size or (page.block_size if page else None)
    return before.block_size if before else None


def _told_ranks(info: Facts) -> int:
    """Data-parallel ranks that SGLang counts; each is given endpoints and accounts of its own."""
    count = _count(info, "dp_size") or 1
    return count if count <= _MOST_RANKS else 1


def _ranks(sources: Facts) -> int:
    """Data-parallel ranks that a vLLM engine names: 0, 1, ... without a hole."""
    count = 0
    while count < _MOST_RANKS and isinstance(sources.get(str(count)), Mapping):
        count += 1
    return count


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
