"""Commands on the wire: as the client library would say them, in less time."""

from __future__ import annotations

import pytest
from redis.asyncio.connection import Connection

from kvplane.index.stores.pool import packed


@pytest.mark.parametrize(
    "command",
    [
        ("PING",),
        ("GET", "kéy"),
        ("SET", b"k", b"\r\n\x00"),
        ("EVALSHA", "0" * 40, 1, "k", -5, 2**53, b"", b"x" * 511, b"y" * 512, b"z" * 100_000),
        ("EVAL", "return 1", 0),
    ],
    ids=lambda command: command[0],
)
def test_a_command_is_packed_as_the_library_packs_it(command: tuple[object, ...]) -> None:
    assert packed(command) == b"".join(Connection().pack_command(*command))
