"""One register and one metadata of every form of SGLang's, each with every member told."""

from __future__ import annotations

from typing import Any

from kvplane.transfer.sglang import (
    MooncakeMetadata,
    MooncakeRegister,
    MoriMetadata,
    MoriRegister,
    NixlMetadata,
    NixlRegister,
)

REGISTERS: dict[str, Any] = {
    "mooncake": MooncakeRegister("10.0.0.9", 4000, "10.0.0.9:17", (1, 2), (3,), ((4,), ()), 1, 2,
                                 64, ((5,),), ((6,),), (0, 1), ((7,),), 8, 9, 2, 1, (3,), (64, 64)),
    "nixl": NixlRegister("10.0.0.9", 4000, "a-1", b"\0blob", (1, 2), (3,), ((4,), ()), 0, 2, 1, 64,
                         ((5,),), ((6,),), 8, 9, 16, ("VRAM", "DRAM"), (64, 64), ((7,),), (0, 1),
                         2, 1, ((512,),)),
    "mori": MoriRegister("10.0.0.9", 4000, b"\0desc", (b"a", b"b"), (b"c",), ((b"d",), ()), 0, 2,
                         1, 64, ((5,),), ((6,),)),
}  # fmt: skip
METADATA: dict[str, Any] = {
    "mooncake": MooncakeMetadata(71, "10.0.0.9", 4000, "s:1", (4, 2), 3, ((1,), ()), 2, 32, (9,)),
    "nixl": NixlMetadata(71, "10.0.0.9", 4000, "a-1", (4, 2), 3, 2, ((1,), ()), 32, False),
    "mori": MoriMetadata(71, "10.0.0.9", 4000, "io-1", (4, 2), 3, ((1,), ()), 2, 32),
}
REGISTERS["ascend"], METADATA["ascend"] = REGISTERS["mooncake"], METADATA["mooncake"]
