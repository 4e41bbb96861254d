"""Topology: what a prefill instance looks like, and which of its ranks hold one decode rank's KV.

Pure. Built by directory.py for GET /route, parsed by client.py from it, read by transfer/ and
router/. Open it to add a parallel layout or to change which instances fit each other.

    prefill tp 4, decode tp 2:   decode 0 <- 0, 1     decode 1 <- 2, 3
    prefill tp 2, decode tp 4:   decode 0 <- 0        decode 3 <- 1
Source: SGLang 0.5.23, recorded in tests/vectors/sglang-target-ranks.jsonl.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvplane.vocabulary import Shape

from .errors import BadInput
from .fields import flag, opt_count, opt_object, opt_text, size, text

FOLLOW_ROOM = "follow_bootstrap_room"
EARLY = "early"
ALWAYS_NULL = (
    "target_tp_rank",
    "target_tp_ranks",
    "target_cp_ranks",
    "target_pp_ranks",
    "required_dst_info_num",
    "required_prefill_response_num",
)  # members of the decode's closed record that it fills in itself


@dataclass(frozen=True, slots=True)
class Topology:
    """The answer of GET /route with four times -1."""

    attn_tp_size: int
    attn_cp_size: int
    dp_size: int
    pp_size: int
    page_size: int | None = None  # tokens
    kv_cache_dtype: str | None = None
    follow_bootstrap_room: bool = True  # dp rank is room modulo dp_size
    enable_dsa_cache_layer_split: bool = False
    dsv41_spec_layout: Mapping[str, Any] | None = None  # compared for equality only
    kv_layout: str | None = None
    decode_allocation_policy: str = EARLY
    enable_kv_cache_sharding: bool = False
    prefill_http_port: int | None = None

    @property
    def shape(self) -> Shape:
        """The same in the plane's own words."""
        return Shape(
            tp=self.attn_tp_size,
            cp=self.attn_cp_size,
            dp=self.dp_size,
            pp=self.pp_size,
            page_size=self.page_size,
            kv_dtype=self.kv_cache_dtype,
            kv_layout=self.kv_layout,
        )

    def answer(self) -> dict[str, Any]:
        """Members in the order of SGLang; an unknown one would break a decode, so add none."""
        found: dict[str, Any] = {
            "attn_tp_size": self.attn_tp_size,
            "attn_cp_size": self.attn_cp_size,
            "dp_size": self.dp_size,
            "pp_size": self.pp_size,
            "page_size": self.page_size,
            "kv_cache_dtype": self.kv_cache_dtype,
            "follow_bootstrap_room": self.follow_bootstrap_room,
            "enable_dsa_cache_layer_split": self.enable_dsa_cache_layer_split,
        }
        if self.dsv41_spec_layout is not None:
            found["dsv41_spec_layout"] = self.dsv41_spec_layout
        if self.kv_layout is not None:
            found["kv_layout"] = self.kv_layout
        found["decode_allocation_policy"] = self.decode_allocation_policy
        found["enable_kv_cache_sharding"] = self.enable_kv_cache_sharding
        found["prefill_http_port"] = self.prefill_http_port
        return found | dict.fromkeys(ALWAYS_NULL)

    @staticmethod
    def parse(answer: object) -> Topology:
        """The reverse of answer(); older servers send less, newer ones more.

        Raises BadInput naming the member that cannot be meant.
        """
        if not isinstance(answer, Mapping):
            raise BadInput("answer", answer, "a JSON object")
        return Topology(
            attn_tp_size=size(answer, "attn_tp_size"),
            attn_cp_size=size(answer, "attn_cp_size"),
            dp_size=size(answer, "dp_size"),
            pp_size=size(answer, "pp_size"),
            page_size=opt_count(answer, "page_size"),
            kv_cache_dtype=opt_text(answer, "kv_cache_dtype"),
            follow_bootstrap_room=flag(answer, "follow_bootstrap_room", True),
            enable_dsa_cache_layer_split=flag(answer, "enable_dsa_cache_layer_split", False),
            dsv41_spec_layout=opt_object(answer, "dsv41_spec_layout"),
            kv_layout=opt_text(answer, "kv_layout"),
            decode_allocation_policy=text(answer, "decode_allocation_policy", EARLY),
            enable_kv_cache_sharding=flag(answer, "enable_kv_cache_sharding", False),
            prefill_http_port=opt_count(answer, "prefill_http_port"),
        )


@dataclass(frozen=True, slots=True)
class Targets:
    """The prefill ranks one decode rank turns to, and what it waits for."""

    tp_rank: int | None  # the one that sends; None: every listed one does
    tp_ranks: tuple[int, ...]
    cp_ranks: tuple[int, ...]
    pp_ranks: tuple[int, ...]
    dst_info_num: int  # decode ranks that a prefill rank waits for
    responses: int  # prefill ranks that must say Success
    dummies: frozenset[int] = frozenset()  # tp ranks that are told, but send nothing


class Unreachable(ValueError):
    """Two layouts between which KV cannot be moved; names the sizes."""


def targets(
    prefill: Topology,
    decode: Shape,
    engine_rank: int,
    pp_rank: int = 0,
    mla: bool = False,
    hybrid: bool = False,
    all_cp: bool = False,
) -> Targets:
    """Which prefill ranks the decode rank `engine_rank` (inside its tp group) must reach.

    `mla`: one latent head, equal on all tp ranks; `hybrid`: such a model with other layers beside;
    `all_cp`: the decode's switch. Raises Unreachable where SGLang fails an assertion.
    """
    if decode.cp != 1:
        raise Unreachable(f"cp: decode {decode.cp}, only 1 can receive")
    if decode.pp not in (prefill.pp_size, 1):
        raise Unreachable(f"pp: prefill {prefill.pp_size}, decode {decode.pp}, must be equal or 1")
    own, tp_ranks, dst_info, responses = _tensor(prefill, decode.tp, engine_rank, mla)
    split = prefill.enable_dsa_cache_layer_split or prefill.enable_kv_cache_sharding
    cp = prefill.attn_cp_size if all_cp or hybrid or split else 1
    pp_ranks = (pp_rank,) if decode.pp == prefill.pp_size else tuple(range(prefill.pp_size))
    silent = mla and not hybrid and own is not None
    return Targets(
        tp_rank=own,
        tp_ranks=tp_ranks,
        cp_ranks=tuple(range(cp)),
        pp_ranks=pp_ranks,
        dst_info_num=dst_info,
        responses=responses * cp * len(pp_ranks),
        dummies=frozenset(rank for rank in tp_ranks if silent and rank != own),
    )


def _tensor(
    prefill: Topology, decode_tp: int, engine_rank: int, mla: bool
) -> tuple[int | None, tuple[int, ...], int, int]:
    """(selected rank, ranks, decode ranks per prefill rank, answers to wait for) along tp.

    Nothing checks that the sizes divide: prefill 2, decode 3 names a rank that is not there, as
    SGLang does. `compatible` refuses such a pair before.
    """
    tp = prefill.attn_tp_size
    rank = engine_rank % decode_tp
    if mla and prefill.enable_kv_cache_sharding and prefill.attn_cp_size == 1:
        if decode_tp != tp:
            raise Unreachable(f"tp: prefill {tp}, decode {decode_tp}, sharded KV needs equal sizes")
        return None, tuple(range(tp)), decode_tp, tp
    if decode_tp >= tp:
        group = decode_tp // tp
        return rank // group, (rank // group,), group, 1
    step = tp // decode_tp
    first = rank * step
    return first, tuple(range(first, first + step)), 1, 1 if mla else step


def compatible(prefill: Shape, decode: Shape) -> tuple[str, ...]:
    """What keeps the two from meeting, each field with both values; empty where they fit.

    A value one side does not tell fits everything. Number of dp ranks does not matter.
    """
    wrong = []
    for name in ("page_size", "kv_dtype", "kv_layout"):
        here, there = getattr(prefill, name), getattr(decode, name)
        if None not in (here, there) and here != there:
            wrong.append(f"{name}: prefill {here}, decode {there}")
    if max(prefill.tp, decode.tp) % min(prefill.tp, decode.tp):
        wrong.append(f"tp: prefill {prefill.tp}, decode {decode.tp}, one must divide the other")
    if decode.cp != 1:
        wrong.append(f"cp: prefill {prefill.cp}, decode {decode.cp}, only 1 can receive")
    if decode.pp not in (prefill.pp, 1):
        wrong.append(f"pp: prefill {prefill.pp}, decode {decode.pp}, must be equal or 1")
    return tuple(wrong)
