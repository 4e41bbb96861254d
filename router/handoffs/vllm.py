"""vLLM: what its ways of handing over have in common.

Pure. Used by vllm_nixl.py and vllm_mooncake.py. The prefill's request is the client's with one
token to answer and no stream; whatever of the client's could make more of it, or make vLLM refuse
it, goes. Open it when another member has a say in that. Source: vllm.md section 5.

    max_tokens 900, n 3, stream, stream_options   ->   max_tokens 1, min_tokens 1, stream false
"""

from __future__ import annotations

from typing import Literal

from kvplane.vocabulary import Binding

from ..request import Ask
from ..splice import splice
from .base import Headers, Seats, reserved, suspect

# Of more than one sample each would keep its blocks, and only one is fetched (vllm#43509).
MANY = frozenset({"stream", "stream_options", "n", "best_of"})
LIMITS = frozenset({"max_tokens", "max_completion_tokens", "min_tokens"})
ROUTES = ("/v1/chat/completions", "/v1/completions")


class Vllm:
    """What both members say alike."""

    counted = False
    directory: Literal["route", "query", ""] = ""

    def rooms(self, ask: Ask) -> int:
        """One: the meeting of the two legs. vLLM has no rooms; ours names it in the evidence."""
        return 1

    def alone(self, ask: Ask) -> str:
        """One transfer object is for one prompt, and a decode that must tell of every prompt token
        computes them all."""
        if ask.path not in ROUTES:
            return "route"
        if ask.prompts > 1:
            return "list of prompts"
        if ask.body.get("use_beam_search"):
            return "beam search"
        echoed = ask.body.get("echo") and ask.body.get("logprobs") is not None
        if echoed or ask.body.get("prompt_logprobs") is not None:
            return "log-probabilities of the prompt"
        return ""


def one_token(ask: Ask, params: bytes) -> bytes:
    """The client's body for one token. At least one, or a first token that ends the answer would
    end the request as stopped, and vLLM keeps blocks only of one that ran to its limit."""
    limit = b'"max_tokens":1,"min_tokens":1,"stream":false'
    if "max_completion_tokens" in ask.body:  # where it is read it goes before max_tokens
        limit += b',"max_completion_tokens":1'
    return splice(ask.raw, ask.body, _not_prefills, limit + b',"kv_transfer_params":' + params)


def with_params(ask: Ask, params: bytes) -> bytes:
    """The client's body with a transfer object."""
    drop = reserved if suspect(ask.body) else None
    return splice(ask.raw, ask.body, drop, b'"kv_transfer_params":' + params)


def rank_headers(pair: Binding, seats: Seats) -> tuple[Headers, Headers]:
    """The dp ranks, where a pod has several."""
    name = b"x-data-parallel-rank"
    prefill = ((name, b"%d" % pair.prefill.dp_rank),) if seats.prefill_dp > 1 else ()
    return prefill, seats.decode_header


def _not_prefills(name: str) -> bool:
    return name in MANY or name in LIMITS or reserved(name)
