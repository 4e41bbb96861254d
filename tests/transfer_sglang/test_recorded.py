"""Recorded: frames that SGLang's own builders made, and what its own parsers made of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvplane.transfer.sglang import (
    Abort,
    AbortAck,
    Bootstrap,
    MooncakeMetadata,
    MooncakeRegister,
    NixlMetadata,
    NixlRegister,
    Status,
    rank_number,
    read_at_decode,
    read_at_prefill,
    write,
)

VECTORS = Path(__file__).parents[1] / "vectors" / "sglang-zmq-frames.jsonl"
LINES = [json.loads(line) for line in VECTORS.read_text().splitlines()][1:]
BACKENDS = {
    "mooncake": ("mooncake",),
    "mooncake (and ascend)": ("mooncake", "ascend"),
    "nixl": ("nixl",),
    "all": ("mooncake", "ascend", "nixl", "mori"),
}
CASES = [
    pytest.param(line, backend, id=f"{backend}-{line['name']}")
    for line in LINES
    for backend in BACKENDS[line["backend"]]
]
# SGLang's name -> ours
REGISTER = {
    "endpoint": "host", "dst_port": "port", "dst_kv_ptrs": "kv", "dst_aux_ptrs": "aux",
    "dst_state_data_ptrs": "state", "dst_kv_item_len": "item_bytes",
    "dst_kv_item_lens": "items", "dst_state_item_lens": "state_items",
    "dst_state_dim_per_tensor": "state_dims", "dst_kv_layer_ids": "layers",
    "dst_state_layer_ids": "state_layers", "dst_dcp_size": "dcp", "dst_dcp_rank": "dcp_rank",
    "staging_base_ptr": "staging_base", "staging_total_size": "staging_bytes",
}  # fmt: skip
METADATA = {
    "room": "room", "endpoint": "host", "dst_port": "port", "dst_kv_indices": "pages",
    "dst_aux_index": "aux", "dst_state_indices": "state", "required_dst_info_num": "receivers",
    "decode_prefix_len": "prefix_tokens", "is_dummy": "dummy",
}  # fmt: skip
OURS = {
    MooncakeRegister: REGISTER
    | {"mooncake_session_id": "session", "dst_tp_rank": "rank", "dst_attn_tp_size": "tp"},
    MooncakeMetadata: METADATA
    | {"mooncake_session_id": "session", "dst_device_kv_indices": "device_pages"},
    NixlRegister: REGISTER
    | {
        "agent_name": "agent", "agent_metadata": "blob", "dst_kv_mem_kinds": "kinds",
        "gpu_id": "gpu", "decode_tp_size": "tp", "decode_tp_rank": "rank",
        "dst_num_slots": "slots", "dst_state_data_lens": "state_bytes",
    },
    NixlMetadata: METADATA | {"agent_name": "agent"},
}  # fmt: skip
DERIVED = {  # what SGLang's parser leaves for later; never on the wire
    "requires_dcp_relayout": False, "dcp_token_item_lens": None, "staging": None,
    "dcp_dst_region_indices": None, "dst_homogeneous_mem_kind": None, "kv_xfer_segments": None,
}  # fmt: skip
UNPARSED = {  # recorded without SGLang's reading of them
    "abort-bare": Abort(9),
    "abort-return-address": Abort(9, "10.0.0.9", 45678),
    "abort-generation": Abort(9, "10.0.0.9", 45678, "3"),
    "abort-ack": AbortAck(9, 5, "3"),
    "abort-ack-no-generation": AbortAck(9, 5),
    "bootstrap-deferred": Bootstrap(9, "127.0.0.1", 45678),
}


def frames_of(line: dict[str, Any]) -> list[bytes]:
    return [bytes.fromhex(frame) for frame in line["frames_hex"]]


def plain(value: Any) -> Any:
    """As JSON has it."""
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    return [plain(one) for one in value] if isinstance(value, tuple) else value


def test_every_recorded_line_is_here() -> None:
    assert len(LINES) == 22 and {line["backend"] for line in LINES} == set(BACKENDS)


@pytest.mark.parametrize(("line", "backend"), CASES)
def test_frames_are_read_as_sglang_reads_them(line: dict[str, Any], backend: str) -> None:
    frames = frames_of(line)
    to_decode = line.get("direction") == "prefill to decode"
    found = (read_at_decode if to_decode else read_at_prefill)(backend, frames)
    if "parsed" not in line:
        assert found == UNPARSED[line["name"]]
    elif isinstance(found, Status):
        assert [found.room, found.status, found.rank, found.reason] == line["parsed"]
    else:
        names = OURS[type(found)]
        assert found.frames == len(frames)
        for name, value in line["parsed"].items():
            if name in names:
                assert plain(getattr(found, names[name])) == value, name
            elif name == "room":
                assert value == "None"  # how SGLang names a register
            else:
                assert DERIVED[name] == value, name


@pytest.mark.parametrize(("line", "backend"), CASES)
def test_what_was_read_is_written_as_the_same_bytes(line: dict[str, Any], backend: str) -> None:
    frames = frames_of(line)
    to_decode = line.get("direction") == "prefill to decode"
    found = (read_at_decode if to_decode else read_at_prefill)(backend, frames)
    assert write(backend, found) == frames


def test_a_prefill_rank_signs_as_in_the_recorded_status() -> None:
    assert rank_number(tp=2, pp=1, cp=0, pp_size=2, cp_size=1) == 5
