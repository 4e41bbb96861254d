"""Differences: what one rank says of its instance and the instance does not.

Pure. directory.py takes, lists or refuses a rank by it. Open it to change which facts must agree,
or how both values are named.

    instance 64 tokens, rank 32   ->   "page_size: instance has 64, rank says 32"
"""

from __future__ import annotations

from typing import Any

from .errors import Inconsistent
from .registration import Facts, Registration

LATCHED_LATER = ("kv_cache_dtype", "kv_layout", "prefill_http_port")  # null does not latch
MOST_SHOWN = 80  # characters of one value
ALIKE = (
    "page_size",
    "kv_cache_dtype",
    "kv_layout",
    "dsv41_spec_layout",
    "load_balance_method",
    "enable_dsa_cache_layer_split",
    "enable_kv_cache_sharding",
    "prefill_http_port",
    "decode_allocation_policy",
)  # members that are the same in every rank, beside the sizes


def differences(facts: Facts, plain_dp: bool, new: Registration) -> tuple[str, ...]:
    """Every member that differs with both values; empty where all agree."""
    here, there = _members(facts, plain_dp), _members(new.facts, new.plain_dp)
    return tuple(
        f"{name}: instance has {_shown(here[name])}, rank says {_shown(there[name])}"
        for name in here
        if here[name] != there[name]
        and not (name in LATCHED_LATER and None in (here[name], there[name]))
    )


def refuse(facts: Facts, plain_dp: bool, new: Registration, same: bool) -> None:
    """Raises Inconsistent where the rank cannot belong to the instance.

    `same`: it says that it is of the instance's life, or it has not moved and said otherwise
    before: no restart explains a difference. Else the two that SGLang does not take, in its order
    and its words; and a place outside the grid, which nobody would ever ask for.
    """
    differing = differences(facts, plain_dp, new)
    if same and differing:
        raise Inconsistent("; ".join(differing), differing)
    if facts.dsv41_spec_layout != new.facts.dsv41_spec_layout:
        raise Inconsistent("DeepSeek-V4.1 DSpark PD layout differs across prefill ranks", differing)
    if facts.decode_allocation_policy != new.facts.decode_allocation_policy:
        raise Inconsistent("Inconsistent prefill allocation policies", differing)
    if not is_inside(new.place.cell, facts):
        raise Inconsistent("; ".join(differing), differing)


def is_inside(cell: tuple[int, int, int, int], facts: Facts) -> bool:
    """Whether the grid has this cell."""
    dp, cp, tp, pp = cell
    return dp < facts.dp and cp < facts.cp and tp < facts.tp and pp < facts.pp


def _members(facts: Facts, plain_dp: bool) -> dict[str, Any]:
    """As a rank sends them."""
    return {
        "attn_tp_size": facts.tp,
        "attn_cp_size": facts.cp,
        "attn_dp_size": 1 if plain_dp else facts.dp,
        "system_dp_size": facts.dp if plain_dp else 1,
        "pp_size": facts.pp,
        **{name: getattr(facts, name) for name in ALIKE},
    }


def _shown(value: Any) -> str:
    """ASCII and on one line: it travels in a header."""
    return ascii(value)[:MOST_SHOWN]
