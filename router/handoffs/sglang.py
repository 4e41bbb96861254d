"""SGLang's hand-off: the bootstrap triple in both bodies, both legs at once.

Pure: a member of the seam handoffs/. Sources: sglang.md sections 3 and 8, sgl-router.md section 4.
The tiny engine speaks it too. Open it when SGLang reads other members.

    one prompt, one sample      "bootstrap_room": 71
    a list, or n > 1            "bootstrap_room": [71, 12, 5]    every sample its own room
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvplane.vocabulary import Binding

from ..request import Ask
from ..splice import splice
from .base import Bodies, reserved

# Streams of OpenAI routes tell usage only when asked to. Nobody but us reads prefill's stream, and
# its cached tokens are what the index's foresight is judged by.
USAGE = ("stream_options", b'{"include_usage":true}')


class Sglang:
    """Both engines get the client's body plus the triple."""

    def rooms(self, ask: Ask) -> int:
        """One per prompt and sample: samples that share a room hang SGLang (sglang#26486)."""
        return ask.prompts * ask.samples

    def write(
        self,
        ask: Ask,
        bindings: Sequence[Binding],
        prefill_dp: int = 1,
        decode_dp: int = 1,
    ) -> Bodies:
        """The triple in both; dp ranks where there is more than one."""
        assert len(bindings) == self.rooms(ask), "a room for each prompt and sample"
        triple = _triple(bindings, as_list=ask.batched or len(bindings) > 1)
        pair = bindings[0]
        pinned = [("disagg_prefill_dp_rank", _json(pair.prefill.dp_rank))] * (prefill_dp > 1)
        to_prefill = [("routed_dp_rank", _json(pair.prefill.dp_rank))] * (prefill_dp > 1)
        to_decode = [("routed_dp_rank", _json(pair.decode.dp_rank))] * (decode_dp > 1)
        decode = splice(ask.raw, ask.body, reserved, [*triple, *pinned, *to_decode])
        if ask.stream and ask.path != "/generate":
            to_prefill = [*to_prefill, USAGE]
        if to_prefill == to_decode:
            return Bodies(decode, decode)
        prefill = splice(ask.raw, ask.body, _not_prefills, [*triple, *pinned, *to_prefill])
        return Bodies(prefill, decode)


def _triple(bindings: Sequence[Binding], as_list: bool) -> list[tuple[str, bytes]]:
    hosts = [binding.triple.host for binding in bindings]
    ports = [binding.triple.port for binding in bindings]
    rooms = [binding.triple.room for binding in bindings]
    columns: dict[str, Sequence[object]]
    columns = {"bootstrap_host": hosts, "bootstrap_port": ports, "bootstrap_room": rooms}
    return [(name, _json(column if as_list else column[0])) for name, column in columns.items()]


def _not_prefills(name: str) -> bool:
    return reserved(name) or name == USAGE[0]


def _json(value: object) -> bytes:
    return msgspec.json.encode(value)
