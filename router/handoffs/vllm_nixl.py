"""vLLM over Nixl: prefill first; what it answers tells decode which blocks to pull.

Pure: a member of the seam handoffs/. Source: vllm.md section 5. The transfer object is passed on
whole and byte by byte: its members grow with vLLM's releases. Open it when the hand-over changes.

    prefill  kv_transfer_params {do_remote_decode: true, ...}  ->  {..., kv_transfer_params: {...}}
    decode   kv_transfer_params {...}, as it came
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvplane.vocabulary import Binding

from ..recomputed import COUNTED
from ..request import Ask
from ..splice import splice
from .base import Bodies, Seats, Second, reserved
from .vllm import Vllm, one_token, rank_headers, with_params

STAGE = (
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,'
    b'"remote_block_ids":null,"remote_host":null,"remote_port":null}'
)


class _Prefilled(msgspec.Struct):
    """What is read of prefill's answer."""

    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


class _Params(msgspec.Struct):
    """What is read of the object itself."""

    remote_prefill_cached_tokens: int | None = None


class VllmNixl(Vllm):
    """Pull."""

    def write(self, ask: Ask, bindings: Sequence[Binding], seats: Seats) -> Bodies:
        """Prefill's body, and decode's as soon as prefill has answered."""
        to_prefill, to_decode = rank_headers(bindings[0], seats)

        def then(answer: bytes) -> Second:
            params = given(answer)
            if params is None:
                alone = splice(ask.raw, ask.body, reserved)
                return Second(alone, "prefill gave no transfer parameters")
            return Second(with_params(ask, params))

        def clean_up(answer: bytes) -> bytes | None:
            params = given(answer)
            return None if params is None else one_token(ask, params)

        body = one_token(ask, STAGE)
        return Bodies(body, None, to_prefill, to_decode, then, clean_up, ignored)


def ignored(answer: bytes, cached: int | None) -> tuple[str, bool]:
    """A decode that fetched tells the cached tokens of its prefill, as the object has them; before
    the object had them it told all that it fetched. Where both are 0 its counters must tell."""
    if cached is None:
        return "", False
    try:
        prefills = msgspec.json.decode(given(answer) or b"{}", type=_Params)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError):
        return "", False
    theirs = prefills.remote_prefill_cached_tokens
    if theirs == 0:
        return "", False
    return ("" if cached else COUNTED), cached == theirs


def given(answer: bytes) -> bytes | None:
    """The transfer object of prefill's answer as it came; None where it has none."""
    try:
        raw = bytes(msgspec.json.decode(answer, type=_Prefilled).kv_transfer_params)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError):
        return None
    return raw if raw.startswith(b"{") and raw.strip(b"{} \t\r\n") else None
