"""Registration: what one prefill rank says of itself and of its instance.

Pure. api.py parses a PUT body into one, directory.py keeps it, client.py sends one. Open it to
accept or send another member. Members are those of SGLang 0.5.23; `generation` is ours.

    {"attn_tp_size": 4, "attn_tp_rank": 2, ..., "rank_ip": "10.0.0.3", "rank_port": 40002}
        ->  Registration(place (0, 0, 2, 0), address 10.0.0.3:40002, facts tp 4, ...)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvplane.vocabulary import Generation

from .addresses import Address, bare, is_host, is_wildcard
from .errors import BadInput, BadRegistration
from .fields import count, flag, opt_object, opt_port, opt_text, port, rank, size, text
from .topology import EARLY, FOLLOW_ROOM

MOST_RANKS = 65_536  # of one instance; the biggest known have some hundreds
NEWER = frozenset(
    {
        "kv_layout",
        "dsv41_spec_layout",
        "enable_dsa_cache_layer_split",
        "enable_kv_cache_sharding",
        "prefill_http_port",
        "decode_allocation_policy",
    }
)  # members that came after 0.5.10, in a registration as in the answer to a decode


class Place(NamedTuple):
    """Where a rank stands in its instance. Text where a rank sent text: found by text only."""

    dp: int | str
    cp: int | str
    tp: int | str
    pp: int | str

    @property
    def cell(self) -> tuple[int, int, int, int]:
        """The same as numbers: the cell of the grid that is taken."""
        return (int(self.dp), int(self.cp), int(self.tp), int(self.pp))


@dataclass(frozen=True, slots=True)
class Facts:
    """What all ranks of one instance have in common; None where a rank did not say."""

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    page_size: int = 1  # tokens
    kv_cache_dtype: str | None = None
    kv_layout: str | None = None
    dsv41_spec_layout: Mapping[str, Any] | None = None
    load_balance_method: str = FOLLOW_ROOM
    enable_dsa_cache_layer_split: bool = False
    enable_kv_cache_sharding: bool = False
    prefill_http_port: int | None = None
    decode_allocation_policy: str = EARLY

    @property
    def ranks(self) -> int:
        """How many must register before the instance can be met."""
        return self.dp * self.cp * self.tp * self.pp


@dataclass(frozen=True, slots=True)
class Registration:
    """One accepted PUT /route."""

    place: Place
    address: Address
    facts: Facts
    generation: Generation | None = None
    plain_dp: bool = False  # replicas, not attention groups: the row is system_dp_rank
    raw_ip: str = field(default="", compare=False)  # as sent; answers repeat it untouched
    sent: frozenset[str] = field(default=NEWER, compare=False)  # the NEWER ones this rank knows

    @staticmethod
    def parse(body: object) -> Registration:
        """Raises BadRegistration naming member, value and what would be right."""
        if not isinstance(body, Mapping):
            raise BadRegistration("body", body, "a JSON object")
        try:
            return _parse(body)
        except BadRegistration:
            raise
        except BadInput as error:
            raise BadRegistration(error.field, error.value, error.want) from None

    def body(self) -> dict[str, Any]:
        """What client.py sends: all members SGLang's ranks send, and ours where we have one."""
        facts, place, plain = self.facts, self.place, self.plain_dp
        found: dict[str, Any] = {
            "attn_tp_size": facts.tp,
            "attn_tp_rank": place.tp,
            "attn_cp_size": facts.cp,
            "attn_cp_rank": place.cp,
            "attn_dp_size": 1 if plain else facts.dp,
            "attn_dp_rank": 0 if plain else place.dp,
            "pp_size": facts.pp,
            "pp_rank": place.pp,
            "system_dp_size": facts.dp if plain else 1,
            "system_dp_rank": place.dp if plain else 0,
            "rank_ip": self.raw_ip or self.address.host,
            "rank_port": self.address.port,
            "page_size": facts.page_size,
            "kv_cache_dtype": facts.kv_cache_dtype,
            "kv_layout": facts.kv_layout,
            "dsv41_spec_layout": facts.dsv41_spec_layout,
            "load_balance_method": facts.load_balance_method,
            "enable_dsa_cache_layer_split": facts.enable_dsa_cache_layer_split,
            "enable_kv_cache_sharding": facts.enable_kv_cache_sharding,
            "prefill_http_port": facts.prefill_http_port,
            "decode_allocation_policy": facts.decode_allocation_policy,
        }
        if self.generation is not None:
            found["generation"] = self.generation
        return found


def life(value: object) -> Generation | None:
    """The generation a rank tells, None where it tells none; it must fit into a header."""
    if value is None:
        return None
    if not isinstance(value, str) or not re.fullmatch(r"[!-~]{1,128}", value):
        raise BadRegistration("generation", value, "1 to 128 visible ASCII characters")
    return Generation(value)


def _parse(body: Mapping[str, Any]) -> Registration:
    replicas = size(body, "system_dp_size")
    plain = replicas != 1
    row = "system" if plain else "attn"
    facts = _facts(body, replicas if plain else size(body, "attn_dp_size"))
    _check_unused_row(body, plain)
    place = Place(
        dp=rank(body, f"{row}_dp_rank", facts.dp),
        cp=rank(body, "attn_cp_rank", facts.cp),
        tp=rank(body, "attn_tp_rank", facts.tp),
        pp=rank(body, "pp_rank", facts.pp),
    )
    raw_ip = text(body, "rank_ip")
    if is_wildcard(raw_ip) or not is_host(bare(raw_ip)):
        raise BadInput("rank_ip", raw_ip, "an address that others can reach")
    return Registration(
        place=place,
        address=Address(bare(raw_ip), port(body, "rank_port")),
        facts=facts,
        generation=life(body.get("generation")),
        plain_dp=plain,
        raw_ip=raw_ip,
        # Every release since 0.5.10 sends the method: who leaves it out is no engine we know.
        sent=NEWER & body.keys() if "load_balance_method" in body else NEWER,
    )


def _facts(body: Mapping[str, Any], dp: int) -> Facts:
    if "kv_cache_dtype" not in body:
        raise BadInput("kv_cache_dtype", None, "given, as a text or null")
    facts = Facts(
        tp=size(body, "attn_tp_size"),
        cp=size(body, "attn_cp_size"),
        dp=dp,
        pp=size(body, "pp_size"),
        page_size=count(body, "page_size"),
        kv_cache_dtype=opt_text(body, "kv_cache_dtype"),
        kv_layout=opt_text(body, "kv_layout"),
        dsv41_spec_layout=opt_object(body, "dsv41_spec_layout"),
        load_balance_method=text(body, "load_balance_method", FOLLOW_ROOM),
        enable_dsa_cache_layer_split=flag(body, "enable_dsa_cache_layer_split", False),
        enable_kv_cache_sharding=flag(body, "enable_kv_cache_sharding", False),
        prefill_http_port=opt_port(body, "prefill_http_port"),
        decode_allocation_policy=text(body, "decode_allocation_policy", EARLY),
    )
    if facts.ranks > MOST_RANKS:
        sizes = f"{dp} x {facts.cp} x {facts.tp} x {facts.pp}"
        raise BadInput("dp x cp x tp x pp", sizes, f"at most {MOST_RANKS} ranks together")
    return facts


def _check_unused_row(body: Mapping[str, Any], plain: bool) -> None:
    """Both kinds of data parallelism at once cannot be expressed: rows would overwrite."""
    attn_size, attn_rank = size(body, "attn_dp_size"), rank(body, "attn_dp_rank", None)
    rank(body, "system_dp_rank", None)
    if plain and attn_size > 1 and int(attn_rank) > 0:
        raise BadInput("attn_dp_rank", attn_rank, "0 where system_dp_size is above 1")
