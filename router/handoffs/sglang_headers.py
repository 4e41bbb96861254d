"""SGLang's hand-off in headers: the bodies stay as the client sent them.

Pure: a member of the seam handoffs/. Only for engines that run with
SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES; others would not see a triple. The headers hold one room, on
/generate and chat; everything else goes into the body. Source: sglang.md section 8.

    x-override-bootstrap-host: 10.0.0.7   -port: 8998   -room: 71   x-override-rid: kvplane-...47
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvplane.vocabulary import Binding

from ..logprobs import needed
from ..request import Ask
from ..splice import splice
from .base import Bodies, Headers, Seats
from .sglang import OPTIONS, USAGE, Sglang, dropping, ranks

ROUTES = ("/generate", "/v1/chat/completions")
_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])


class SglangHeaders(Sglang):
    """The triple, the name and the ranks as x-override-*."""

    def write(self, ask: Ask, bindings: Sequence[Binding], seats: Seats) -> Bodies:
        """Headers for one prompt and sample, else as Sglang."""
        if ask.path not in ROUTES or ask.batched or len(bindings) > 1:
            return super().write(ask, bindings, seats)
        name, rids = self._named(ask, bindings)
        ours = self._triple(ask, bindings) + name
        to_prefill, to_decode = ranks(bindings[0], seats)
        decode = prefill = splice(ask.raw, ask.body, dropping(ask, ()))
        if ask.stream and ask.path != "/generate":
            prefill = splice(ask.raw, ask.body, dropping(ask, (OPTIONS,)), USAGE)
        return Bodies(
            prefill,
            decode,
            _headers(ours + to_prefill),
            _headers(ours + to_decode),
            merge=needed(ask),
            rids=rids,
        )


def _headers(members: bytes) -> Headers:
    told = _MEMBERS.decode(b"{%b}" % members)
    return tuple(
        (b"x-override-" + name.replace("_", "-").encode(), bytes(value).strip(b'"'))
        for name, value in told.items()
    )
