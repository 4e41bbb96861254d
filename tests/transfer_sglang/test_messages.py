"""SGLang's messages: shorter and longer ones, and what is refused, each by name."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from kit.sglang import METADATA, REGISTERS

from kvplane.transfer.sglang import (
    FORMS,
    Abort,
    AbortAck,
    AuxData,
    BadFrame,
    Bootstrap,
    MooncakeRegister,
    NixlMetadata,
    StagingFrame,
    Status,
    read_at_decode,
    read_at_prefill,
    write,
)
from kvplane.transfer.sglang.fields import MOST_FRAMES, MOST_REASON, MOST_TEXT

each_backend = pytest.mark.parametrize("backend", FORMS)


@each_backend
def test_every_message_is_read_back(backend: str) -> None:
    for message in (REGISTERS[backend], METADATA[backend], Abort(7), Abort(7, "h", 1),
                    Abort(7, "h", 1, "g-2"), Bootstrap(7, "::1", 1)):  # fmt: skip
        assert read_at_prefill(backend, write(backend, message)) == message
    for notice in (Status(7, 0, 3), AbortAck(7), AbortAck(7, 3), AbortAck(7, 3, "g"),
                   AuxData(7, 2, 5, 3, b"abc")):  # fmt: skip
        assert read_at_decode(backend, write(backend, notice)) == notice


@each_backend
@pytest.mark.parametrize("what", ["register", "metadata"])
def test_a_cut_tail_is_defaults_and_the_count_is_kept(backend: str, what: str) -> None:
    message = (REGISTERS if what == "register" else METADATA)[backend]
    form = getattr(FORMS[backend], what)
    frames = write(backend, message)
    assert len(frames) == form.full == message.frames
    default = {one.name: one.default for one in fields(message)}
    for count in range(form.least, form.full):
        found = read_at_prefill(backend, frames[:count])
        assert found.frames == count and write(backend, found) == frames[:count]
        for at, (name, _) in enumerate(form.fields, len(form.front)):
            wanted = getattr(message, name) if at < count else default[name]
            assert getattr(found, name) == wanted, (count, name)


@each_backend
@pytest.mark.parametrize("what", ["register", "metadata"])
def test_a_message_that_ends_too_early_names_the_first_frame_missing(
    backend: str, what: str
) -> None:
    form = getattr(FORMS[backend], what)
    frames = write(backend, (REGISTERS if what == "register" else METADATA)[backend])
    names = [name for name, _ in form.fields]
    for count in range(max(1, len(form.front)), form.least):
        with pytest.raises(BadFrame, match=rf"frame {count} \(\w+\): missing, must be ") as caught:
            read_at_prefill(backend, frames[:count])
        assert caught.value.field == names[count - len(form.front)]


@each_backend
def test_frames_beyond_the_last_known_are_ignored(backend: str) -> None:
    for message in (REGISTERS[backend], METADATA[backend]):
        assert read_at_prefill(backend, [*write(backend, message), b"new", b""]) == message
    later = [*write(backend, Status(7, 4, 3)), b"new"]
    assert read_at_decode(backend, later) == Status(7, 4, 3)


def test_ten_frames_are_the_oldest_register_of_mooncake() -> None:
    frames = write("mooncake", REGISTERS["mooncake"])[:10]
    found = read_at_prefill("mooncake", frames)
    assert isinstance(found, MooncakeRegister)
    assert (found.item_bytes, found.items, found.layers, found.dcp) == (64, (), (), 1)


def test_a_dummy_takes_part_and_gets_nothing() -> None:
    assert replace(METADATA["mooncake"], pages=(), aux=None).dummy
    assert not replace(METADATA["mooncake"], pages=()).dummy  # everything is held already
    assert not replace(METADATA["mori"], pages=(), aux=None).dummy  # a prefix is held
    assert replace(METADATA["mori"], pages=(), aux=None, prefix_tokens=None).dummy
    bare = write("nixl", replace(METADATA["nixl"], pages=()))
    short = read_at_prefill("nixl", bare[:8])
    assert isinstance(short, NixlMetadata) and short.dummy  # before the frame that says so
    assert read_at_prefill("nixl", bare).dummy is False  # type: ignore[union-attr]


def test_a_reason_travels_where_the_form_has_a_place_for_it() -> None:
    failed = Status(7, 0, 3, "why it failed")
    assert read_at_decode("nixl", write("nixl", failed)) == failed
    assert read_at_decode("mori", write("mori", failed)) == failed
    assert write("mooncake", failed) == [b"7", b"0", b"3"]


@each_backend
@pytest.mark.parametrize("name", ["CHUNK_READY", "STAGING_REQ", "STAGING_RSP", "WATERMARK"])
def test_staging_is_known_by_name_and_refused_by_name(backend: str, name: str) -> None:
    for read in (read_at_prefill, read_at_decode):
        with pytest.raises(StagingFrame, match=rf"frame 0 \(name\): {name}, must be .*staging"):
            read(backend, [name.encode(), b"7", b"0"])


MOONCAKE = write("mooncake", METADATA["mooncake"])


@pytest.mark.parametrize(
    ("at", "frame", "sentence"),
    [
        (0, b"-1", "frame 0 (room): b'-1' (2 bytes), must be a decimal number 0 to 92233"),
        (0, b"9223372036854775808", "frame 0 (room): b'9223372036854775808' (19 bytes), must be"),
        (0, b" 7", "frame 0 (room): b' 7' (2 bytes), must be a decimal number"),
        (0, b"NixlMsgGuard", "frame 0 (room): b'NixlMsgGuard' (12 bytes), must be"),
        (1, b"", "frame 1 (host): b'' (0 bytes), must be 1 to 1024 printable ASCII characters"),
        (1, b"a b", "frame 1 (host): b'a b' (3 bytes), must be"),
        (1, b"x" * (MOST_TEXT + 1), "frame 1 (host): b'xxxxxxxxxxxxxxxxxxxxxxxx'... (1025 bytes)"),
        (2, b"0", "frame 2 (port): b'0' (1 bytes), must be a decimal number 1 to 65535"),
        (2, b"70000", "frame 2 (port): b'70000' (5 bytes), must be a decimal number 1 to 65535"),
        (
            4,
            b"\1\0\0",
            "frame 4 (pages): b'\\x01\\x00\\x00' (3 bytes), must be signed numbers of 4",
        ),
        (4, b"\xff\xff\xff\xff", "must be signed numbers of 4 bytes, at most 1048576, each 0 or"),
        (5, b"", "frame 5 (aux): b'' (0 bytes), must be a decimal number 0 to 2147483647 where f"),
        (6, b"\1\0\0\0", "frame 6 (state): b'\\x01\\x00\\x00\\x00' (4 bytes), must be a count, as"),
        (6, b"\1\0\0\0\4\0\0\0\1\0\0", "frame 6 (state): "),
        (6, b"\1\0\0\0\1\0\0\0\1", "frame 6 (state): "),
        (6, b"\xff\xff\xff\xff" * 3, "frame 6 (state): "),
        (7, b"0", "frame 7 (receivers): b'0' (1 bytes), must be a decimal number 1 to"),
        (8, b"x", "frame 8 (prefix_tokens): b'x' (1 bytes), must be a decimal number"),
    ],
)
def test_a_bad_frame_is_named_with_its_value_and_what_would_be_right(
    at: int, frame: bytes, sentence: str
) -> None:
    with pytest.raises(BadFrame) as caught:
        read_at_prefill("mooncake", [*MOONCAKE[:at], frame, *MOONCAKE[at + 1 :]])
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("read", "backend", "frames", "sentence"),
    [
        (read_at_prefill, "nixl", MOONCAKE, "frame 0 (guard): b'71' (2 bytes), must be b'NixlMs"),
        (read_at_prefill, "mori", [b"MoriMsgGuard"], "frame 1 (room): missing, must be a decimal"),
        (read_at_prefill, "nixl", [], "frame 0 (message): no frame, must be at least 1 frame"),
        (read_at_prefill, "nixl", [b"1"] * 65, "frame 64 (message): a message of 65 frames, must"),
        (read_at_prefill, "mori", [b"ABORT"], "frame 1 (room): missing, must be a decimal number"),
        (read_at_prefill, "mori", [b"ABORT", b"7", b"h"], "frame 3 (port): missing, must be"),
        (read_at_prefill, "mori", [b"BOOTSTRAP", b"7", b"h"], "frame 3 (port): missing, must be"),
        (read_at_decode, "nixl", [b"7", b"4", b"3"], "frame 0 (guard): b'7' (1 bytes), must be b'"),
        (read_at_decode, "mooncake", [b"7", b"5", b"3"], "frame 1 (status): b'5' (1 bytes), must"),
        (read_at_decode, "nixl", [b"KV_STATUS", b"7", b"4", b"3", b"\xff"], "frame 4 (reason): "),
        (read_at_decode, "ascend", [b"ABORT_ACK", b"x"], "frame 1 (room): b'x' (1 bytes), must be"),
        (read_at_decode, "nixl", [b"AUX_DATA", b"7", b"0", b"1", b"\0\0\0\4", b"abc"],
         "frame 4 (length): 4, must be 3, the bytes of frame 5"),
        (read_at_decode, "nixl", [b"AUX_DATA", b"7", b"0", b"1", b"\0\4", b"abc"],
         "frame 4 (length): b'\\x00\\x04' (2 bytes), must be 4 bytes, big-endian"),
    ],
)  # fmt: skip
def test_a_message_of_another_form_is_named(
    read: Any, backend: str, frames: list[bytes], sentence: str
) -> None:
    with pytest.raises(BadFrame) as caught:
        read(backend, frames)
    assert sentence in str(caught.value)


def test_sizes_are_bounded_and_sentences_stay_short() -> None:
    long = [b"KV_STATUS", b"7", b"0", b"3", b"x" * (MOST_REASON + 1)]
    lists = (4097).to_bytes(4, "little") + bytes(4 * 4097)
    for frames in (long, [b"9" * 10_000_000], [b"\0" * 1000] * MOST_FRAMES):
        with pytest.raises(BadFrame) as caught:
            read_at_decode("nixl", frames)
        assert len(str(caught.value)) < 300
    with pytest.raises(BadFrame, match=r"frame 6 \(state\)"):
        read_at_prefill("mooncake", [*MOONCAKE[:6], lists, *MOONCAKE[7:]])
    many = bytes(4 * ((1 << 20) + 1))
    with pytest.raises(BadFrame, match=r"frame 4 \(pages\)"):
        read_at_prefill("mooncake", [*MOONCAKE[:4], many, *MOONCAKE[5:]])


def test_a_backend_that_sglang_has_not_is_named() -> None:
    with pytest.raises(ValueError, match="backend 'rdma': must be one of mooncake, ascend, nixl"):
        read_at_prefill("rdma", [b"7"])
    with pytest.raises(TypeError, match="NixlMetadata is no message of backend mooncake"):
        write("mooncake", METADATA["nixl"])
