"""Facts: what does this engine say of itself?

Door: GET /server_info. Open it to tell gateways another fact. Source: SGLang's /server_info; what
is ours alone lies under `kvplane`.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from kvplane.vocabulary import Generation, Role

from .model import REVISION
from .registration import DTYPE
from .settings import EngineSettings
from .unit import Unit

MODES = {Role.BOTH: "null", Role.PREFILL: "prefill", Role.DECODE: "decode"}  # SGLang's words


def server_info(
    settings: EngineSettings, units: Sequence[Unit], generation: Generation
) -> dict[str, Any]:
    """Everything a gateway needs to use this engine."""
    prefill = settings.role is Role.PREFILL
    return {
        "model_path": settings.model,
        "tokenizer_path": "builtin",
        "served_model_name": settings.model,
        "host": settings.host,
        "port": settings.port,
        "disaggregation_mode": MODES[settings.role],
        "disaggregation_bootstrap_port": settings.bootstrap_port if prefill else None,
        "disaggregation_transfer_backend": settings.backend,
        "tp_size": settings.tp,
        "pp_size": settings.pp,
        "dp_size": settings.dp,
        "attn_cp_size": 1,
        "page_size": settings.block_size,
        "kv_cache_dtype": DTYPE,
        "context_length": settings.context_length,
        "max_total_num_tokens": settings.blocks * settings.block_size,
        "max_total_tokens": settings.blocks * settings.block_size,
        "load_balance_method": settings.load_balance,
        "version": _version(),
        "kv_events": _events(settings, units[0]),
        "kvplane": {
            "generation": generation,
            "event_form": settings.event_form,
            "role": settings.role.value,
            "revision": REVISION,
            "nnodes": settings.nnodes,
            "node_rank": settings.node_rank,
        },
    }


def _events(settings: EngineSettings, first: Unit) -> dict[str, Any]:
    return {
        "publisher": "zmq",
        "endpoint_host": settings.advertised,
        "endpoint_port_base": first.publisher.port,
        "topic": "",
        "block_size": settings.block_size,
        "dp_size": settings.dp,
        "replay_endpoint_port_base": first.publisher.replay_port,
    }


def _version() -> str:
    try:
        return version("kvplane")
    except PackageNotFoundError:  # run from a bare checkout
        return "0"
