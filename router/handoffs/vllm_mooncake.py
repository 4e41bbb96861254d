"""vLLM over Mooncake: both legs at once, brought together by a name of ours.

Pure: a member of the seam handoffs/. Source: vllm.md section 5. The id of the prefill's engine
comes from its rank directory (prefill_ids.py asks). Open it when the hand-over changes.

    prefill  {do_remote_decode: true,  transfer_id}
    decode   {do_remote_prefill: true, transfer_id, remote_bootstrap_addr, remote_engine_id}
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from kvplane.vocabulary import Binding

from ..request import Ask
from .base import Bodies, Seats
from .vllm import Vllm, one_token, rank_headers, with_params


class VllmMooncake(Vllm):
    """Push."""

    directory: Literal["route", "query", ""] = "query"

    def write(self, ask: Ask, bindings: Sequence[Binding], seats: Seats) -> Bodies:
        """Both bodies; without one transfer_id in both vLLM quietly computes everything twice."""
        pair = bindings[0]
        name = f"kvplane-{pair.room:016x}"
        staged = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": name}
        fetched = msgspec.json.encode(
            {
                "do_remote_decode": False,
                "do_remote_prefill": True,
                "remote_bootstrap_addr": _address(pair.triple.host, pair.triple.port),
                "remote_engine_id": seats.engine_id,
                "transfer_id": name,
            }
        )
        to_prefill, to_decode = rank_headers(pair, seats)
        return Bodies(
            one_token(ask, msgspec.json.encode(staged)),
            with_params(ask, fetched),
            to_prefill,
            to_decode,
            clean_up=lambda answer: one_token(ask, fetched),
            ignored=lambda answer, cached: ("", False),  # only the decode's counters tell
        )


def _address(host: str, port: int | None) -> str:
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}"
